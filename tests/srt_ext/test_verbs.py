"""A verb that breaks: it is answered, and the scheduler goes on."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_rwttt.srt_ext import verbs


def broken(scheduler: Any, args: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("a fault")


@pytest.mark.parametrize(
    ("verb", "says"),
    [(broken, "a fault"), (lambda scheduler, args: {"n": object()}, "not JSON serializable")],
    ids=["raises", "answers with what no message can carry"],
)
def test_a_fault_of_a_verb_is_an_answer(
    verb: Any, says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Any exception but a StateError ended the scheduler, and the states of all owners with it."""
    monkeypatch.setitem(verbs.VERBS, "owners", verb)
    refused: list[Any] = []
    runtime = SimpleNamespace(note_refusal=lambda error, op: refused.append((error, op)))
    message = SimpleNamespace(op="owners", args="{}", rid="asked")
    sessions = SimpleNamespace(sessions={"a": None})
    scheduler = SimpleNamespace(ttt=runtime, session_controller=sessions)
    answer = verbs.handle(scheduler, message)
    error = json.loads(answer.payload)
    assert not answer.ok
    assert (answer.rid, answer.owners) == ("asked", 1)
    assert error["type"] == "StateError"
    assert says in error["message"]
    assert [op for _, op in refused] == ["owners"]
    assert "Traceback" in caplog.text
