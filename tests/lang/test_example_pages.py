"""The pages of the examples: one for each, and each tells how to run it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = ROOT / "docs" / "examples"


def test_every_example_has_its_page() -> None:
    """Guards: an example that nobody finds, a page of one that is gone."""
    names = {path.stem for path in EXAMPLES}
    assert {path.stem for path in PAGES.glob("*.md")} == names | {"README"}
    listed = re.findall(r"\]\((\w+)\.md\)", (PAGES / "README.md").read_text("utf-8"))
    assert sorted(listed) == sorted(names)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_page_tells_how_to_run_its_example(path: Path) -> None:
    """Guards: a page without the command, the output or the two ways to run it."""
    page = (PAGES / f"{path.stem}.md").read_text("utf-8")
    assert f"    python examples/{path.name}" in page and "--url http" in page
    for title in ("## Run it", "## Output", "## Change it"):
        assert f"\n{title}\n" in page
    assert f"](../../examples/{path.name})" in page


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_can_be_pasted(path: Path) -> None:
    """Guards: an example that starts processes at import, or needs another file of ours."""
    tree = ast.parse(path.read_text("utf-8"))
    assert ast.unparse(tree.body[-1]).startswith("if __name__ == '__main__':")
    imports = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [module for module in imports if module.startswith(("examples", "tests", "."))]
    assert len(path.read_text("utf-8").splitlines()) <= 110
