"""What clients send is bounded and typed, ids stay out of logs, and nothing is unpickled."""

from __future__ import annotations

import ast
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sgl_rwttt
from sgl_rwttt.core.errors import InvalidStateRequest, StaleVersion, StateError, UnknownOwner
from sgl_rwttt.srt_ext import logs, metrics
from sgl_rwttt.srt_ext.arguments import only, pack, shown, text, unpack
from sgl_rwttt.srt_ext.limits import MAX_ARGUMENTS, MAX_PARAMS, MAX_TEXT
from sgl_rwttt.srt_ext.params import check_request, check_session_params, parse_params

PACKAGE = Path(sgl_rwttt.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
ID = "0123456789abcdef" * 2


# code


def test_no_code_of_ours_unpickles_or_evaluates() -> None:
    """Guards: a client's bytes or a file that can run code in the server."""
    modules = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    calls = {"eval", "exec", "compile", "__import__"}
    loads = {"torch.load", "numpy.load", "np.load", "yaml.load", "yaml.unsafe_load"}
    bad, seen = [], 0
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if any(name.split(".")[0] in modules for name in names):
                bad.append((source.name, node.lineno, names))
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                seen += 1
                if called in calls | loads:
                    bad.append((source.name, node.lineno, [called]))
    assert bad == []
    assert len(SOURCES) > 50 and seen > 1000


def test_counted_names_are_metrics() -> None:
    """Guards: a KeyError in the scheduler for an event that no metric has, metrics being on."""
    counted = set()
    for source in SOURCES:
        counted |= set(re.findall(r'(?:self|runtime)\.count\("(\w+)"', source.read_text()))
    assert counted and counted <= set(metrics.COUNTERS)


# values


@pytest.mark.parametrize(
    "custom, named",
    [
        ([1], "custom_params"),
        ("ttt_mode", "custom_params"),
        ({f"k{i}": 0 for i in range(MAX_PARAMS + 1)}, str(MAX_PARAMS)),
        ({"ttt_" + "x" * 10_000: "y"}, "unknown"),
        ({"ttt_mode": "x" * 10_000}, "ttt_mode"),
        ({"ttt_pin": "x" * 129}, "128"),
        ({"ttt_pin": ["x"]}, "ttt_pin"),
        ({"ttt_root": "0" * 10_000}, "32 hexadecimal"),
    ],
)
def test_custom_params_are_bounded(custom: Any, named: str) -> None:
    """Guards: a value that kills the scheduler, or comes back at full length in an error."""
    with pytest.raises(InvalidStateRequest, match=named) as refusal:
        parse_params(custom)
    assert len(str(refusal.value)) < 1000
    assert parse_params({7: 1, "theirs": 2}).pin is None


@pytest.mark.parametrize(
    "field, value",
    [
        ("id", 5),
        ("id", [ID]),
        ("rid", {}),
        ("offset", "5"),
        ("offset", 1.0),
        ("offset", True),
        ("replace", 1),
        ("drop_previous_output", "no"),
    ],
)
def test_session_params_of_another_type_are_refused(field: str, value: Any) -> None:
    """Guards: a TypeError in the scheduler, which would end it; and an id in the error's text."""
    fields = dict.fromkeys(("id", "rid", "offset", "replace", "drop_previous_output"))
    check_session_params(SimpleNamespace(**fields))
    with pytest.raises(InvalidStateRequest, match=f"session_params.{field}") as refusal:
        check_session_params(SimpleNamespace(**{**fields, field: value}))
    assert ID not in str(refusal.value)


@pytest.mark.parametrize("tokens", [[-1], [5, 128], [10**12]])
def test_token_ids_outside_the_vocabulary_are_refused(tokens: list[int]) -> None:
    """Guards: an index error in the embedding, which would end the scheduler."""
    check_request("r", [0, 127], 128)
    check_request("r", [], 128)
    with pytest.raises(InvalidStateRequest, match=r"\[0, 128\)"):
        check_request("r", tokens, 128)


def test_names_and_arguments_are_bounded() -> None:
    """Guards: a control message of any size, or a name that cannot be sent back."""
    with pytest.raises(InvalidStateRequest, match=str(MAX_TEXT)):
        check_request("r" * (MAX_TEXT + 1), [1], 128)
    assert unpack(pack({"owner": "x"})) == {"owner": "x"}
    with pytest.raises(InvalidStateRequest, match=str(MAX_ARGUMENTS)):
        pack({"owner": "x" * MAX_ARGUMENTS})
    nested: Any = {}
    for _ in range(100_000):
        nested = {"a": nested}
    for args in ({"a": object()}, nested):
        with pytest.raises(InvalidStateRequest, match="not a JSON object"):
            pack(args)
    for packed in ("[" * 60_000, "[1]", "5", "{"):
        with pytest.raises(InvalidStateRequest, match="JSON object"):
            unpack(packed)
    for value in ("", "x" * (MAX_TEXT + 1), "\ud800", 5, None, ["a"]):
        with pytest.raises(InvalidStateRequest, match="'owner' must be a string") as refusal:
            text({"owner": value}, "owner")
        str(refusal.value).encode()
    with pytest.raises(InvalidStateRequest, match="unknown arguments"):
        only({"x": 1}, "owner")
    assert len(shown("x" * 10_000)) < MAX_TEXT + 10


# logs


def test_a_log_line_names_no_owner_and_cannot_be_forged() -> None:
    """Guards: an owner's id in a log file, and a client's line break that makes a second line."""
    error = StaleVersion(
        f"session {ID} moved\nttt_refused type=Nothing", owner=ID, branch="a b\n=c", version=3
    )
    line = logs.event_line("ttt_refused", error, op="state")
    assert ID not in line and "\n" not in line
    name = logs.public_name(ID)
    assert re.fullmatch(r"[0-9a-f]{8}", name) and name not in ID
    assert line.startswith(f"ttt_refused type=StaleVersion owner={name} branch=a%20b%0A%3Dc ")
    assert 'version=3 op=state message="session ' in line
    bare = logs.event_line("ttt_refused", InvalidStateRequest("no"))
    assert bare == 'ttt_refused type=InvalidStateRequest owner=- branch=- version=- message="no"'


def _logged(caplog: pytest.LogCaptureFixture, name: str, text: str, *args: Any) -> str:
    caplog.clear()
    with caplog.at_level(logging.INFO):
        logging.getLogger(name).warning(text, *args)
    return caplog.text


def test_lines_of_sglang_and_uvicorn_hide_ids(caplog: pytest.LogCaptureFixture) -> None:
    """Guards: ids that others write at the default level: sessions, errors, paths."""
    logs.hide_owner_ids()
    logs.hide_owner_ids()
    name = logs.public_name(ID)
    sessions = "sglang.srt.session.session_controller"
    assert len(logging.getLogger(sessions).filters) == 1
    assert f"Session opened: {name} (" in _logged(
        caplog, sessions, f"Session opened: {ID} (active)"
    )
    error: StateError = UnknownOwner(f"session {ID} does not exist", owner=ID, branch="f" * 32)
    line = _logged(caplog, "sglang.srt.entrypoints.http_server", f"Error: {error.to_header()}")
    assert ID not in line and name in line and "f" * 32 in line
    access = '%s - "%s %s HTTP/%s" %d'
    for path in (f"/ttt/owners/{ID}", f"/ttt/owners/{ID}/x?y=1"):
        line = _logged(caplog, "uvicorn.access", access, "1.2.3.4", "GET", path, "1.1", 200)
        assert ID not in line and "/ttt/owners/..." in line and "200" in line
