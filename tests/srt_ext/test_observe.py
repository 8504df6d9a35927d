"""The verbs and routes that only look, and SGLang's own sessions, without a server."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.errors import IntegrityError, InvalidStateRequest, StateCapacity
from sgl_rwttt.srt_ext import http, observe, sessions
from sgl_rwttt.srt_ext.housekeeping import Housekeeping
from sgl_rwttt.srt_ext.limits import MAX_ARGUMENTS, MAX_ROWS
from sgl_rwttt.srt_ext.logs import public_name
from tests.backends.in_place_rig import Rig


class Scheduler:
    """What the verbs look at: a runtime on the real store, and open sessions."""

    def __init__(self, *owners: str) -> None:
        self.rig = Rig(chunk=4, pages=12, bases=3)
        self.ttt = SimpleNamespace(
            store=self.rig.store,
            backend=self.rig.backend,
            rows={},
            counters={
                **dict.fromkeys(("retried_writes", "aborted", "retracted"), 0),
                "admissions": 3,
                "hit_tokens": 7,
            },
            check_integrity=self.rig.store.check_integrity,
            is_released=lambda owner: False,
        )
        sessions = {owner: self.session(owner) for owner in owners}
        self.session_controller = SimpleNamespace(sessions=sessions)

    def session(self, owner: str) -> SimpleNamespace:
        now = time.monotonic()
        return SimpleNamespace(
            session_id=owner, req_nodes={}, timeout=None, last_active_time=now, ttt_opened=now - 5
        )


def test_a_listing_is_bounded_and_holds_no_id() -> None:
    """Guards: an answer that grows with the server, or that hands out capabilities."""
    names = [f"{i:032x}" for i in range(MAX_ROWS + 3)]
    listing = observe.owners(Scheduler(*names), {})
    assert (listing["count"], len(listing["owners"])) == (MAX_ROWS + 3, MAX_ROWS)
    assert listing["truncated"] is True
    assert not any(name in str(listing) for name in names)
    assert listing["owners"][0]["name"] == public_name(names[0])
    assert observe.owners(Scheduler("a"), {})["truncated"] is False


def test_a_listing_counts_what_an_owner_holds() -> None:
    """Guards: shared pages counted twice, another owner's pages, or a running owner as idle."""
    scheduler = Scheduler("a", "b")
    rig = scheduler.rig
    state = rig.start("a")
    rig.write(state, list(range(9)))
    rig.store.pin("a", "here", state)
    rig.store.open_root("a", state.version)
    a, b = observe.owners(scheduler, {})["owners"]
    assert (a["running"], a["pin_count"], a["root_count"], b["running"]) == (1, 1, 1, 0)
    assert a["referenced_bytes"] == 3 * rig.backend.page_bytes
    assert (b["referenced_bytes"], a["idle_s"]) == (0, 0.0)
    assert 5 <= a["age_s"] < 60


def test_memory_tells_own_from_shared() -> None:
    """Guards: a page counted as an owner's own that another one reads too; numbers of SGLang's,
    which are numpy's, that end the scheduler because JSON has no place for them.
    """
    scheduler: Any = Scheduler("a", "b")
    rig, session = scheduler.rig, scheduler.session_controller.sessions["a"]
    pool = SimpleNamespace(get_kv_size_bytes=lambda: (np.int64(60), np.int64(40)))
    scheduler.token_to_kv_pool_allocator = SimpleNamespace(
        size=9, page_size=1, get_kvcache=lambda: pool
    )
    scheduler.session_controller.get = scheduler.session_controller.sessions.get
    state = rig.start("a")
    rig.write(state, list(range(9)))
    rig.store.pin("a", "here", state)
    twin = rig.store.fork(state, "b", "twin")
    session.req_nodes = {
        "x": SimpleNamespace(
            parent=None,
            req=SimpleNamespace(
                rid="x",
                finished=lambda: True,
                ttt=SimpleNamespace(
                    kept=4,
                    current_report=lambda: {"position": 9},
                    mode=Effect.WRITE,
                    pinned=False,
                ),
            ),
        )
    }
    memory = json.loads(json.dumps(observe._memory(scheduler, session)))
    assert memory == {
        "pages": 3,
        "own_pages": 1,  # the open tail; b has copied its rows
        "bases": 0,
        "own_bases": 0,
        "state_bytes": 3 * rig.backend.page_bytes,
        "own_bytes": rig.backend.page_bytes,
        "context_tokens": 5,
        "kv_bytes": 50,
    }
    rig.store.release(twin)


def test_health_tells_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a health check that says ok to broken books, or that ends the scheduler."""
    scheduler = Scheduler()
    healthy = observe.health(scheduler, {})
    assert (healthy["status"], healthy["integrity_checked"]) == ("ok", True)
    assert healthy["ledger"]["pages"] == {"free": 11, "live": 0, "total": 12, "reserved": 1}

    def broken() -> None:
        raise IntegrityError("pages: free 1 + live 2")

    monkeypatch.setattr(scheduler.ttt, "check_integrity", broken)
    ill = observe.health(scheduler, {})
    assert (ill["status"], ill["error"]) == ("unbalanced", "pages: free 1 + live 2")
    scheduler.ttt.rows[1] = object()
    busy = observe.health(scheduler, {})
    assert (busy["status"], busy["integrity_checked"], busy["running"]) == ("ok", False, 1)


# routes


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """The routes on an empty application; the control verb is `answers`."""
    server: Any = ModuleType("sglang.srt.entrypoints.http_server")
    server.app = FastAPI()
    manager = SimpleNamespace(
        ttt_links=None,
        model_config=SimpleNamespace(hf_config=SimpleNamespace(ttt_mode=True)),
    )
    server.get_global_state = lambda: SimpleNamespace(tokenizer_manager=manager)
    for name in ("sglang", "sglang.srt", "sglang.srt.entrypoints"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, server.__name__, server)
    monkeypatch.setattr(http, "control", answers)
    http.include_routes()
    return TestClient(server.app, raise_server_exceptions=False)


async def answers(manager: Any, op: str, args: dict[str, Any]) -> dict[str, Any]:
    if op == "open":
        raise StateCapacity("2 owners are open")
    if op == "health":
        return {"status": "unbalanced"}
    return {"op": op, **args}


def test_routes_call_their_verbs(client: TestClient) -> None:
    """Guards: a route that answers another verb, another status, or one the operator mistyped."""
    assert client.get("/ttt/info").json() == {"op": "info"}
    assert client.get("/ttt/owners").json() == {"op": "owners"}
    assert client.get("/ttt/snapshots").json() == {"op": "snapshots"}
    assert client.get("/ttt/owners/abc").json() == {"op": "owner", "owner": "abc"}
    assert client.post("/ttt/close", json={"owner": "a"}).json() == {"op": "close", "owner": "a"}
    assert client.post("/ttt/info").json() == {"op": "info"}
    refused = client.post("/ttt/open", json={})
    assert (refused.status_code, refused.json()["error"]["type"]) == (507, "StateCapacity")
    assert client.get("/ttt/health").status_code == 503
    for path in ("/ttt/owners/abc/x", "/ttt/nothing", "/ttt/"):
        assert client.get(path).status_code == 404, path
    paths = {getattr(route, "path", None) for route in client.app.routes}  # type: ignore[attr-defined]
    assert "/ttt/owners/{owner}" in paths and None not in paths


@pytest.mark.parametrize(
    "body, status",
    [
        (b'{"owner": "' + b"x" * MAX_ARGUMENTS + b'"}', 413),
        (b"[" * 60_000, 400),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, 400),
        (b"[1]", 400),
        (b"\xff\xfe", 400),
        (b"{", 400),
        (b"", 200),
    ],
    ids=["long", "deep list", "deep object", "list", "not text", "cut", "none"],
)
def test_bodies_are_bounded(client: TestClient, body: bytes, status: int) -> None:
    """Guards: a body of any size read into memory, or one that ends in a 500."""
    answer = client.post("/ttt/drop", content=body)
    assert answer.status_code == status
    assert status == 200 or answer.json()["error"]["type"] == InvalidStateRequest.__name__


# SGLang's own sessions


def opening(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"session_id": None, "streaming": None, "timeout": None, **fields})


@pytest.mark.parametrize(
    "fields, result",
    [
        ({}, "owner of {}"),
        ({"timeout": 5.0}, "owner of {'timeout': 5.0}"),
        ({"session_id": "chosen"}, "/ttt/open"),
        ({"streaming": True}, "streaming"),
        ({"timeout": 99.0}, r"\[StateCapacity .*\] full"),
    ],
)
def test_sglangs_sessions_are_owners(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], result: str
) -> None:
    """Guards: SGLang's route and `Engine.open_session` going round limits and random ids."""

    async def control(manager: Any, op: str, args: dict[str, Any]) -> dict[str, Any]:
        if args.get("timeout") == 99.0:
            raise StateCapacity("full")
        assert op == "open"
        return {"owner": f"owner of {args}"}

    async def stock(manager: Any, obj: Any, request: Any) -> str:
        return "stock"

    monkeypatch.setattr(sessions, "control", control)
    config = SimpleNamespace(ttt_mode=True)
    manager = SimpleNamespace(model_config=SimpleNamespace(hf_config=config))
    call = sessions.around_open_session(stock, manager, opening(**fields), None)
    if result.startswith("owner"):
        assert asyncio.run(call) == result  # type: ignore[arg-type]
    else:
        with pytest.raises(ValueError, match=result):
            asyncio.run(call)  # type: ignore[arg-type]
    config.ttt_mode = False
    call = sessions.around_open_session(stock, manager, opening(**fields), None)
    assert asyncio.run(call) == "stock"  # type: ignore[arg-type]


def test_sglangs_own_message_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a way to open a session past the verb, with an id and without a limit."""
    io_struct: Any = ModuleType("sglang.srt.managers.io_struct")
    io_struct.OpenSessionReqOutput = SimpleNamespace
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, io_struct.__name__, io_struct)
    scheduler = Housekeeping()
    answer = scheduler.open_session(SimpleNamespace(session_id="chosen"))
    assert (answer.success, answer.session_id) == (False, "chosen")
