"""Owners on data-parallel ranks: where they go, who is asked, and what the answers say together."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sgl_rwttt.core.errors import InvalidStateRequest, StateCapacity, UnknownOwner
from sgl_rwttt.srt_ext import launch, ranks
from sgl_rwttt.srt_ext.control import control
from sgl_rwttt.srt_ext.dispatch import OwnerDispatch
from sgl_rwttt.srt_ext.limits import MAX_NAMES, MAX_ROWS
from sgl_rwttt.srt_ext.links import RankLinks
from sgl_rwttt.srt_ext.rank_answers import health, info, owners
from sgl_rwttt.srt_ext.ranks import bind_cpus, new_owner, rank_of, shares

RANKS = 3


@pytest.fixture(autouse=True)
def message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message without SGLang, whose import takes seconds."""
    io: Any = ModuleType("sgl_rwttt.srt_ext.io")
    io.TTTControlReqInput = SimpleNamespace
    monkeypatch.setitem(sys.modules, io.__name__, io)


class Server:
    """A tokenizer process whose ranks answer out of a table, when they are told to."""

    def __init__(self, count: int = RANKS, place: int = 1000) -> None:
        self.place = place
        self.open: list[list[str]] = [[] for _ in range(count)]
        self.asked: list[tuple[int, str, dict[str, Any]]] = []
        self.held: list[Any] | None = None
        self.ttt_links = RankLinks(self.take, count)

    def auto_create_handle_loop(self) -> None:
        pass

    def take(self, message: Any) -> None:
        self.asked.append((message.rank, message.op, json.loads(message.args)))
        if self.held is None:
            asyncio.get_running_loop().call_soon(self.answer, message)
        else:
            self.held.append(message)

    def answer(self, message: Any) -> None:
        mine, args = self.open[message.rank], json.loads(message.args)
        payload, ok = self.verb(message.rank, message.op, args, mine)
        reply = SimpleNamespace(
            rid=message.rid, ok=ok, payload=json.dumps(payload), owners=len(mine)
        )
        self.ttt_links.receive(reply)

    def verb(
        self, rank: int, op: str, args: dict[str, Any], mine: list[str]
    ) -> tuple[dict[str, Any], bool]:
        if op == "open":
            if len(mine) >= self.place:
                return StateCapacity(f"rank {rank} is full").to_wire(), False
            mine.append(new_owner(rank, len(self.open)))
            return {"owner": mine[-1]}, True
        if op == "renew":
            if not isinstance(args["owners"], list):
                return InvalidStateRequest("'owners' must be a list").to_wire(), False
            unknown = [owner for owner in args["owners"] if owner not in mine]
            return {"boot_id": "boot", "unknown": unknown}, True
        owner = args.get("owner")
        if owner is not None and owner not in mine:
            return UnknownOwner(f"rank {rank} has no {owner}", owner=owner).to_wire(), False
        if op == "close":
            mine.remove(args["owner"])
        return {"rank": rank, **args}, True

    def run(self, op: str, **args: Any) -> dict[str, Any]:
        return asyncio.run(control(self, op, args))


def test_an_id_says_its_rank() -> None:
    """Guards: an owner that a stateless client cannot be led to, or ids that can be guessed."""
    for count in (1, 2, 3, 8):
        drawn = {new_owner(rank, count) for rank in range(count) for _ in range(20)}
        assert len(drawn) == 20 * count
        assert all(len(owner) == 32 and set(owner) <= set("0123456789abcdef") for owner in drawn)
        assert Counter(rank_of(owner, count) for owner in drawn) == dict.fromkeys(range(count), 20)
    for no_id in ("", "x", "F" * 32, "f" * 33, 7, None, ["a"], "0x" + "f" * 30, " " + "f" * 31):
        assert rank_of(no_id, 8) == 0


def test_owners_spread_and_stay() -> None:
    """Guards: owners heaped on one rank, and a verb that reaches a rank without its owner."""
    server = Server()
    opened = [server.run("open")["owner"] for _ in range(7)]
    assert [rank_of(owner, RANKS) for owner in opened] == [0, 1, 2, 0, 1, 2, 0]
    for owner in (opened[1], opened[4]):
        assert server.run("close", owner=owner)["rank"] == 1
    again = [server.run("open")["owner"] for _ in range(4)]
    assert [rank_of(owner, RANKS) for owner in again] == [1, 1, 1, 2]
    server.asked.clear()
    for op in ("state", "drop", "unpin", "save", "restore", "abort", "owner", "release_root"):
        assert server.run(op, owner=opened[2], rid="r")["rank"] == 2
    assert {rank for rank, *_ in server.asked} == {2} and len(server.asked) == 8


def test_opens_in_flight_are_counted() -> None:
    """Guards: owners that are opened at the same time and all go to one rank."""
    server = Server()

    async def together() -> list[dict[str, Any]]:
        return await asyncio.gather(*(control(server, "open", {}) for _ in range(6)))

    opened = asyncio.run(together())
    found = Counter(rank_of(answer["owner"], RANKS) for answer in opened)
    assert found == {0: 2, 1: 2, 2: 2}


def test_a_rank_that_expired_its_owners_gets_the_next() -> None:
    """Guards: a count that is never put right, when a rank closes owners without being asked."""
    server = Server(2)
    for _ in range(4):
        server.run("open")
    server.open[1].clear()
    where = [rank_of(server.run("open")["owner"], 2) for _ in range(5)]
    assert where == [0, 1, 1, 1, 0]


def test_a_full_rank_passes_the_owner_on() -> None:
    """Guards: a refusal while another rank has a place; the last refusal is typed."""
    server = Server(2, place=1)
    server.open[0].append("opened before")
    assert rank_of(server.run("open")["owner"], 2) == 1
    with pytest.raises(StateCapacity, match="is full"):
        server.run("open")


def test_an_unknown_owner_is_refused_by_one_rank() -> None:
    """Guards: a forged id that is answered twice, or leads to somebody's owner."""
    server = Server()
    mine = server.run("open")["owner"]
    forged = f"{(int(mine, 16) + 1) % (1 << 128):032x}"
    server.asked.clear()
    with pytest.raises(UnknownOwner, match="has no"):
        server.run("state", owner=forged)
    assert len(server.asked) == 1


def test_one_renewal_reaches_every_rank() -> None:
    """Guards: a lease that runs out because its owner was named at another rank."""
    server = Server()
    opened = [server.run("open")["owner"] for _ in range(5)]
    gone = new_owner(1, RANKS)
    server.asked.clear()
    named = [opened[4], gone, *opened[:4]]
    assert server.run("renew", owners=named) == {"boot_id": "boot", "unknown": [gone]}
    heard = {rank: set(args["owners"]) for rank, _, args in server.asked}
    assert heard == {r: {owner for owner in named if rank_of(owner, RANKS) == r} for r in range(3)}
    assert server.run("renew", owners=[]) == {"boot_id": "boot", "unknown": []}
    with pytest.raises(InvalidStateRequest):
        server.run("renew", owners="x")
    server.asked.clear()
    server.run("renew", owners=[gone] * (MAX_NAMES + 1))
    assert len(server.asked) == 1  # whole, for the rank to refuse


def test_an_answer_belongs_to_its_question() -> None:
    """Guards: the answer for a caller who has gone, given to the next, who may be anybody."""

    async def story() -> None:
        server = Server(2)
        server.open = [["a"], ["b"]]
        server.held = []
        first = asyncio.create_task(control(server, "state", {"owner": "a"}))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.create_task(control(server, "close", {"owner": "a"}))
        await asyncio.sleep(0)
        late, early = server.held
        server.answer(late)
        await asyncio.sleep(0)
        assert not second.done()
        server.answer(early)
        assert await second == {"rank": 0, "owner": "a"}
        assert server.ttt_links._asked == {}

    asyncio.run(story())


def rank_info(rank: int, **more: Any) -> dict[str, Any]:
    return {
        "boot_id": "boot",
        "root": "r",
        "sessions": 2 + rank,
        "running": rank,
        "integrity_checked": True,
        "integrity_error": None,
        "pools": {"page_bytes": 10},
        "store": {"pages_live": 3 * rank, "pages_free": 5},
        "counters": {"commits": 10 + rank},
        "planner": {
            "mode": "rw",
            "target_batch": None,
            "wait_budget": 0,
            "rounds": 4,
            "forwards": 4,
            "rows": 5,
            "held": rank,
            "max_wait": 7 - rank,
        },
        **more,
    }


def test_info_counts_all_ranks() -> None:
    """Guards: a rank whose numbers nobody sees, and a size that is added up."""
    found = info([rank_info(0), rank_info(1, integrity_checked=False, integrity_error="bad")])
    assert (found["sessions"], found["running"], found["boot_id"]) == (5, 1, "boot")
    assert (found["integrity_checked"], found["integrity_error"]) == (False, "bad")
    assert found["store"] == {"pages_live": 3, "pages_free": 10}
    assert (found["counters"], found["pools"]) == ({"commits": 21}, {"page_bytes": 10})
    waits = {key: found["planner"][key] for key in ("rows", "held", "max_wait", "mode")}
    assert waits == {"rows": 10, "held": 1, "max_wait": 7, "mode": "rw"}
    assert [(each["dp_rank"], each["sessions"]) for each in found["dp_ranks"]] == [(0, 2), (1, 3)]
    assert [each["store"]["pages_live"] for each in found["dp_ranks"]] == [0, 3]


def test_owners_of_all_ranks_are_listed_by_age() -> None:
    """Guards: a listing of one rank, or one longer than its limit."""
    ages = [[9.0, 1.0], [5.0]]
    rows = [[{"name": str(age), "age_s": age} for age in each] for each in ages]
    found = owners([{"owners": r, "count": len(r), "truncated": False} for r in rows])
    assert [(row["age_s"], row["dp_rank"]) for row in found["owners"]] == [(9, 0), (5, 1), (1, 0)]
    assert (found["count"], found["truncated"]) == (3, False)
    many = {"owners": [{"age_s": 1.0}] * MAX_ROWS, "count": MAX_ROWS, "truncated": False}
    found = owners([many, many])
    assert (len(found["owners"]), found["count"]) == (MAX_ROWS, 2 * MAX_ROWS)
    assert found["truncated"] is True


def test_health_is_that_of_the_worst_rank() -> None:
    """Guards: an unbalanced rank behind a healthy one."""
    ledger = {"pages": {"free": 3, "live": 1}, "bases": {"free": 2, "live": 0}}
    fine = {"status": "ok", "integrity_checked": True, "running": 0, "ledger": ledger}
    busy = {**fine, "integrity_checked": False, "running": 2}
    bad = {**fine, "status": "unbalanced", "error": "1 + 1 != 3"}
    assert health([fine, busy])["status"] == "ok"
    assert health([fine, busy])["integrity_checked"] is False
    found = health([fine, bad])
    assert (found["status"], found["error"], found["running"]) == ("unbalanced", "1 + 1 != 3", 0)
    assert found["ledger"]["pages"] == {"free": 6, "live": 2}
    assert [each["status"] for each in found["dp_ranks"]] == ["ok", "unbalanced"]


class Stock:
    """The parts of SGLang's controller that the overrides call."""

    launch_dp_size = RANKS

    def maybe_external_dp_rank_routing(self, req: Any) -> bool:
        return req.routed_dp_rank is not None


class Controller(OwnerDispatch, Stock):
    pass


def test_a_request_goes_to_its_owners_rank() -> None:
    """Guards: a client that names a rank reaching another one than its owner's, or losing it."""
    controller = Controller()
    owner = new_owner(2, RANKS)
    for named in (None, 0, 1, 2):
        session = SimpleNamespace(id=owner, rid="parent")
        req = SimpleNamespace(session_params=session, routed_dp_rank=named)
        assert controller.maybe_external_dp_rank_routing(req) is True
        assert req.routed_dp_rank == 2
    for no_owner in (None, SimpleNamespace(id=None, rid="x")):
        for named in (None, 1):
            req = SimpleNamespace(session_params=no_owner, routed_dp_rank=named)
            assert controller.maybe_external_dp_rank_routing(req) is (named is not None)
            assert req.routed_dp_rank == named
    embedding = SimpleNamespace(routed_dp_rank=None)
    assert controller.maybe_external_dp_rank_routing(embedding) is False
    odd = SimpleNamespace(session_params=SimpleNamespace(id=["a"]), routed_dp_rank=None)
    assert controller.maybe_external_dp_rank_routing(odd) is True and odd.routed_dp_rank == 0


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr(ranks, "_bound", None)
    common: Any = ModuleType("sglang.srt.utils.common")
    common.get_cpu_ids_by_node = lambda: ["0,1,2,3"]
    for name in ("sglang", "sglang.srt", "sglang.srt.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, common.__name__, common)
    monkeypatch.delenv(ranks.ENV_BIND, raising=False)
    yield monkeypatch
    os.environ.pop(ranks.ENV_BIND, None)


def test_ranks_share_the_cpus(environment: pytest.MonkeyPatch) -> None:
    """Guards: SGLang refusing more ranks than NUMA nodes, and an old engine's share left over."""
    bind_cpus(2)
    assert os.environ[ranks.ENV_BIND] == "0,1|2,3"
    assert ranks.ENV_BIND not in launch.fresh_environment()
    bind_cpus(1)
    assert ranks.ENV_BIND not in os.environ
    environment.setenv(ranks.ENV_BIND, "7|8")
    bind_cpus(2)
    assert os.environ[ranks.ENV_BIND] == launch.fresh_environment()[ranks.ENV_BIND] == "7|8"


def test_shares_of_cpus() -> None:
    """Guards: a CPU given twice while others are idle, and a rank without one."""
    assert shares([0, 2, 4, 6, 8], 2) == "0,2|4,6,8"
    assert shares([3], 2) == "3|3"
    assert shares([0, 1], 2) == "0|1"


@pytest.mark.parametrize(
    "flags, count",
    [
        ([], 1),
        (["--dp-size", "4"], 4),
        (["--data-parallel-size=2"], 2),
        (["--dp-size", "x"], 1),
        (["--dp-size"], 1),
    ],
)
def test_threads_are_shared_out(
    flags: list[str], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: as many busy threads per rank as the machine has cores."""
    monkeypatch.setattr(launch, "physical_cores", lambda: 8)
    assert launch.data_parallel_ranks(flags) == count
    env: dict[str, str] = {}
    monkeypatch.setattr(launch, "cpu_environment", lambda path: {})
    launch.prepare_environment(env, ranks=count)
    assert env["OMP_NUM_THREADS"] == str(8 // count)
