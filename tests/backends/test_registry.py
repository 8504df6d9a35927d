"""Update rules by name: ours, and those that other distributions register."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sgl_rwttt.backends import BACKENDS, backend_class
from sgl_rwttt.backends.in_place import InPlaceBackend

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes a distribution visible that registers rules: name = module:class."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(distribution: str, **rules: str) -> None:
        folder = tmp_path / f"{distribution.replace('-', '_')}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\n")
        lines = [f"{name} = {value}" for name, value in rules.items()]
        (folder / "entry_points.txt").write_text("\n".join(["[sgl_rwttt.backends]", *lines]))

    return make


def test_ours_by_name() -> None:
    """A name in the table that no class goes with."""
    for name in BACKENDS:
        assert backend_class(name).name == name


def test_another_distributions_rule(install: Install, tmp_path: Path) -> None:
    """An installed rule that is not found."""
    (tmp_path / "other_rule_a.py").write_text("class Rule:\n    name = 'theirs'\n")
    install("other-a", theirs="other_rule_a:Rule")
    assert backend_class("theirs").name == "theirs"


def test_ours_win(install: Install) -> None:
    """A distribution that replaces one of our rules by being installed."""
    install("other-b", in_place="no_such_module:Rule")
    assert backend_class("in_place") is InPlaceBackend


def test_an_unknown_name_lists_all(install: Install) -> None:
    """A message that says no and not what there is."""
    ours = "in_place, lora_delta, streaming"
    with pytest.raises(ValueError, match=f"no update rule named 'x'; there are {ours}$"):
        backend_class("x")
    install("other-c", b_rule="m:Rule", a_rule="m:Rule", in_place="m:Rule")
    with pytest.raises(ValueError, match=f"{ours}, and from other distributions a_rule, b_rule$"):
        backend_class("x")


def test_a_name_registered_twice(install: Install) -> None:
    """Which rule serves that depends on the order of folders."""
    install("other-d", same="m:Rule")
    install("other-e", same="n:Rule")
    with pytest.raises(ValueError, match="'same' is registered 2 times, by other-d, other-e; keep"):
        backend_class("same")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "of distribution other-f: broken_rule:Rule cannot be imported: ModuleNotFoundError"),
        ("", "of distribution other-f: broken_rule:Rule cannot be imported: AttributeError"),
        ("raise OSError('no card')", r"cannot be imported: OSError\('no card'\)"),
        ("Rule = 3", "other-f: broken_rule:Rule is no class"),
    ],
    ids=["no module", "no class", "raises", "not a class"],
)
def test_a_rule_that_cannot_be_had(
    install: Install,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str | None,
    message: str,
) -> None:
    """An error from the depths of another distribution that does not say which one it is."""
    monkeypatch.delitem(sys.modules, "broken_rule", raising=False)
    if source is not None:
        (tmp_path / "broken_rule.py").write_text(source)
    install("other-f", theirs="broken_rule:Rule")
    with pytest.raises(ValueError, match=message):
        backend_class("theirs")
