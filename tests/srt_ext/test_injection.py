"""The control verb that arms faults, and that it is not there unless asked for at start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_rwttt.core import faults
from sgl_rwttt.core.errors import InvalidStateRequest, StaleVersion
from sgl_rwttt.srt_ext.injection import fault

SHOW = """
from sgl_rwttt.srt_ext import control, verbs
print("fault" in verbs.VERBS, "fault" in control.operations())
"""


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.disarm()


@pytest.mark.parametrize(
    ("value", "there"), [(None, "False False"), ("0", "False False"), ("1", "True True")]
)
def test_the_verb_needs_the_variable(
    value: str | None, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a served process that strangers can make fail."""
    monkeypatch.delenv(faults.ENV_FAULTS, raising=False)
    if value is not None:
        monkeypatch.setenv(faults.ENV_FAULTS, value)
    done = subprocess.run(
        [sys.executable, "-c", SHOW], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == there


def scheduler(**rows: Any) -> Any:
    return SimpleNamespace(ttt=SimpleNamespace(rows=rows))


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"point": "nowhere", "action": "kill"}, "nowhere"),
        ({"point": "queued", "action": "explode"}, "explode"),
        ({"point": "queued", "action": "raise", "error": "KeyError"}, "KeyError"),
        ({"point": "queued", "action": "raise", "error": "nothing"}, "nothing"),
        ({"point": "queued", "action": "kill", "colour": 1}, "colour"),
        ({"point": "queued", "action": "kill", "skip": "1"}, "skip"),
        ({"point": "write.batch", "action": "abort"}, "write.batch"),
        ({"point": "mid_tail", "action": "not_finite"}, "write.candidate"),
    ],
)
def test_what_it_does_not_know_is_refused(args: dict[str, Any], named: str) -> None:
    """Guards: a typo that arms nothing."""
    with pytest.raises(InvalidStateRequest, match=named):
        fault(scheduler(), args)
    assert faults._armed is None


def test_a_fault_is_for_one_owner_by_name_or_by_page() -> None:
    """Guards: a fault for one owner that hits another."""

    def lineage(owner: str, page: int) -> Any:
        candidate = SimpleNamespace(blocks=[SimpleNamespace(page=page)])
        names = {"owner": owner, "branch": "x", "version": 0}
        return SimpleNamespace(state=SimpleNamespace(candidate=candidate, names=names))

    running = scheduler(one=lineage("a", 3), two=lineage("b", 4))
    order = {"action": "raise", "error": "StaleVersion", "owner": "a", "times": 0}
    fault(running, {"point": "after_commit", **order})
    fault(running, {"point": "write.batch", **order})
    faults.reach("after_commit", owner="b", branch="x")
    faults.reach("write.batch", pages=[4])
    with pytest.raises(StaleVersion):
        faults.reach("after_commit", owner="a", branch="x")
    for _ in range(2):
        with pytest.raises(StaleVersion):
            faults.reach("write.batch", pages=[4, 3])
    assert fault(running, {"disarm": True}) == {"disarmed": True}
    faults.reach("after_commit", owner="a", branch="x")


def test_an_abort_is_heard_when_messages_are_next_read() -> None:
    """Guards: an abort in the middle of a forward pass, which no client can send."""
    heard: list[str] = []
    running = scheduler()
    running.process_input_requests = lambda messages: heard.append("messages")
    running.abort_request = lambda message: heard.append(message.rid)
    fault(running, {"point": "mid_tail", "action": "abort"})
    faults.reach("mid_tail", owner="a", branch="r1")
    assert heard == []
    running.process_input_requests([])
    running.process_input_requests([])
    assert heard == ["messages", "r1", "messages"]
