"""docs/lang.md says what the docstrings say."""

from __future__ import annotations

import re
from typing import Any

import sgl_rwttt as rw
from docs import reference


def test_the_page_is_up_to_date() -> None:
    """Guards: a reference that tells of an older signature. Cure: python docs/reference.py"""
    text = reference.PAGE.read_text("utf-8")
    assert text == reference.page(text)


def test_every_public_name_is_there() -> None:
    """Guards: a public name that the reference leaves out."""
    text = reference.render()
    missing = {name for name in rw.__all__ if not re.search(rf"[`.]{name}\b", text)}
    assert missing == {"__version__", "IntegrityError"}


def test_every_member_has_a_docstring() -> None:
    """Guards: a line of the reference that says nothing."""
    lines = [line for line in reference.render().splitlines() if line.startswith("- `")]
    assert len(lines) > 50
    assert not [line for line in lines if re.fullmatch(r"- `[^`]*`\.\s*", line)]


def test_the_hand_written_part_names_real_calls() -> None:
    """Guards: a table of calls that no longer exist."""
    head = reference.PAGE.read_text("utf-8").partition(reference.BEGIN)[0]
    said = set(re.findall(r"`s\.(\w+)|`(\w+)\((?:n|name|x|to|b|text|tail)?[,=)]", head))
    names = {first or second for first, second in said}
    assert len(names) > 10
    assert not {name for name in names if not hasattr(rw.State, name)} - {"run", "gen", "join"}


def test_the_first_program_of_the_page_runs() -> None:
    """Guards: a first program that does not work as pasted."""
    head = reference.PAGE.read_text("utf-8").partition("## Words")[0]
    code = "\n".join(line[4:] for line in head.splitlines() if line.startswith("    ") or not line)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code.partition("state = ")[0], "lang.md", "exec"), names)
    trace = names["checked"].trace(task="Why?", answers={"answer": ["sorry", "Because."]})
    assert trace.error is None and trace.ret_value == "Because."
    assert "rollback" in str(trace)
