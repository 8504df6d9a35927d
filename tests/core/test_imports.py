"""The contract is a leaf: it imports the standard library only."""

import subprocess
import sys

CODE = """
import sys
before = set(sys.modules)
import sgl_rwttt.core
tops = {name.partition(".")[0] for name in set(sys.modules) - before}
inside = {name for name in sys.modules if name.startswith("sgl_rwttt.")}
print(sorted(tops - sys.stdlib_module_names - {"sgl_rwttt"}))
print(sorted(name for name in inside if not name.startswith("sgl_rwttt.core")))
"""


def test_core_imports_the_standard_library_only():
    """A torch or SGLang import creeps in, and a client without them cannot compute ids."""
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split("\n")[:2] == ["[]", "[]"]
