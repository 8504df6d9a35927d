"""The third-party example: installed as a distribution, found by name, and shown whole."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from sgl_rwttt.backends.base import StateBackend
from sgl_rwttt.testing.backend_conformance import CHECKS
from sgl_rwttt.testing.case import Case, Plan

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "third_party_backend"
PAGE = ROOT / "docs" / "backends.md"

BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def run(*command: str, cwd: Path, path: tuple[Path, ...] = ()) -> str:
    """Its output; a failure shows it."""
    places = os.pathsep.join(map(str, path))
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": places},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_installed_distribution_passes(tmp_path: Path) -> None:
    """An example that works in our tree only, because a file or the entry point is not packed."""
    source, suite, installed = (tmp_path / name for name in ("source", "suite", "installed"))
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("tests", "__pycache__"))
    shutil.copytree(EXAMPLE / "tests", suite)
    run("-c", BUILD, str(tmp_path), cwd=source)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:  # all that installing a wheel without scripts does
        packed.extractall(installed)

    told = run(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", str(suite)),
        cwd=suite,
        path=(installed, ROOT),
    )
    assert f"{3 * len(CHECKS) + 1} passed" in told


def test_the_page_shows_the_example() -> None:
    """A page whose example is another one than what is tested, or too long to be read."""
    page, code = PAGE.read_text("utf-8"), (EXAMPLE / "running_mean.py").read_text("utf-8")
    assert f"\n```python\n{code}```\n" in page
    assert f"\n```toml\n{(EXAMPLE / 'pyproject.toml').read_text('utf-8')}```\n" in page
    assert len(code.splitlines()) < 100


def test_the_page_names_everything() -> None:
    """A member or check that was added and that nobody is told of."""
    page = PAGE.read_text("utf-8")
    asked = [StateBackend, Plan, Case]
    members = {name for each in asked for name in {*vars(each), *each.__annotations__}}
    names = {name for name in members if not name.startswith("_")} | set(CHECKS)
    missing = [
        name for name in sorted(names) if f"`{name}`" not in page and f"`{name}(" not in page
    ]
    assert not missing
