"""A state saved in one process goes on in another; three engines, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from sgl_rwttt.core.errors import (
    ForeignOwner,
    IncompatibleSnapshot,
    InvalidStateRequest,
    RollbackBeyondRetention,
    StateCapacity,
    UnknownOwner,
    UnknownState,
)
from tests.engine.served import Served, rid, state
from tests.golden import golden_case

pytestmark = pytest.mark.engine
CASE, OTHER = golden_case("qwen3_hidden_proj"), golden_case("llama_embed_proj")
CHUNK = int(CASE.config["ttt_chunk"])
QUESTION = [5, 9, 13]


def ledger(served: Served) -> dict[str, int]:
    """The slots in use, after the audit and without memos."""
    served.flush()
    info = served.info()
    assert info["integrity_checked"]
    names = ("pages_live", "bases_live", "roots", "pins", "versions", "owners")
    return {name: info["store"][name] for name in names}


def ask(served: Served, owner: str, root: str, tokens: int = 2 * CHUNK + 8) -> dict[str, Any]:
    """What a root gives for the question: ids and points, the first 8 tokens among them."""
    answer = served.generate(QUESTION, n=tokens, owner=owner, custom={"ttt_root": root})
    points = [
        served.control("state", owner=owner, rid=rid(answer), offset=offset)
        for offset in range(1, len(QUESTION) + tokens)
    ]
    return {
        "ids": answer["output_ids"],
        "state_ids": [point["state_id"] for point in points],
        "versions": [point["version"] for point in points],
    }


READ = {"ttt_mode": "read"}


def go_on(served: Served, owner: str, parent: str, ids: list[int], **at: Any) -> dict[str, Any]:
    """What a point says: ids and the place behind them, over two boundaries."""
    answer = served.generate(ids, n=2 * CHUNK + 3, owner=owner, parent=parent, **at)
    report = state(answer)
    return {
        "ids": answer["output_ids"],
        "state_id": report["state_id"],
        "version": report["version"],
        "tail": report["tail"],
    }


def cached(served: Served, owner: str, parent: str, ids: list[int]) -> int:
    """Tokens of a point that a request did not compute again."""
    answer = served.generate(ids, n=0, owner=owner, parent=parent)
    return int(answer["meta_info"]["cached_tokens"])


def save_contexts(served: Served, owner: str, root: str) -> dict[str, Any]:
    """Save two points in mid-context, and what they say next: one with a frozen region and behind
    a rollback, one on a cleared root and so far on that its reading starts at a dense base."""
    first = served.generate(CASE.prompt_ids, n=2 * CHUNK + 3, owner=owner)
    frozen = served.generate([3, 4, 5], n=2, owner=owner, parent=rid(first), custom=READ)
    served.generate([6] * CHUNK, n=2, owner=owner, parent=rid(frozen))
    kept = state(frozen)["position"] - 1
    mid = served.generate([6, 7], n=0, owner=owner, parent=rid(frozen), offset=kept)
    long = served.generate(CASE.prompt_ids, n=9 * CHUNK + 5, owner=owner, custom={"ttt_root": root})
    inner = served.generate([8], n=0, owner=owner, parent=rid(long))
    found = {}
    for name, node in (("mid", mid), ("inner", inner)):
        client = {"text": name}
        args = {"owner": owner, "name": name, "rid": rid(node)}
        saved = served.control("save", **args, kv=True, client=client)
        assert {key: saved[key] for key in ("position", "tail", "state_id")} == {
            key: state(node)[key] for key in ("position", "tail", "state_id")
        }
        found[name] = {
            "saved": saved,
            "on": go_on(served, owner, rid(node), [9]),
            "at once": go_on(served, owner, rid(node), []),
            "back": go_on(served, owner, rid(node), [9], offset=7),
        }
        again = served.control("restore", owner=owner, name=name)
        assert (again["reused"], again["kv_loaded"], again["pages"]) == (True, 0, 0)
        assert go_on(served, owner, again["rid"], [9]) == found[name]["on"]
        served.control("drop", owner=owner, rid=again["rid"])
    assert not served.control("owner", owner=owner)["pins"]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("snapshots")


@contextmanager
def engine(model: Path, folder: Path, **options: Any) -> Iterator[Served]:
    options = {"ttt_snapshot_dir": str(folder), "ttt_max_snapshots": 6, **options}
    with closing(Served(model, **options)) as served:
        yield served


@pytest.fixture(scope="module")
def original(folder: Path) -> dict[str, Any]:
    """The first process: save, clear, go on."""
    with engine(CASE.path, folder) as served:
        empty, owner = ledger(served), served.open()
        first = served.generate(CASE.prompt_ids, n=5 * CHUNK + 3, owner=owner)
        cleared = served.generate(
            [7], n=2, owner=owner, parent=rid(first), custom={"ttt_clear": "drop"}
        )
        root = state(cleared)["next_root"]
        contexts = save_contexts(served, owner, root)
        saved = served.control("save", owner=owner, name="state", rid=rid(cleared))
        earlier = served.control(
            "save", owner=owner, name="early", rid=rid(first), offset=CHUNK + 1
        )
        served.control(
            "save", owner=owner, name="early", rid=rid(first), replace=True, offset=CHUNK
        )
        by_root = served.control("save", owner=owner, name="state-2", root=root)
        again = served.control("restore", owner=served.open(), name="state")
        refusals(served, owner, rid(first), root)
        went_on = ask(served, owner, root)
        counters = served.info()["counters"]
        served.control("close", owner=owner)
        served.control("close", owner=again["owner"])
        assert ledger(served) == empty
    return {
        "root": root,
        "report": state(cleared),
        "saved": saved,
        "early": earlier,
        "by_root": by_root,
        "again": again,
        "went_on": went_on,
        "counters": counters,
        "contexts": contexts,
    }


def refusals(served: Served, owner: str, node: str, root: str) -> None:
    """Wrong calls: typed, and nothing changes."""
    stranger, before = served.open(), served.info()["store"]

    def refused(kind: type[Exception], op: str, **args: Any) -> None:
        with pytest.raises(kind):
            served.control(op, **args)

    refused(InvalidStateRequest, "save", owner=owner, name="y")
    refused(InvalidStateRequest, "save", owner=owner, name="y", rid=node, root=root)
    refused(InvalidStateRequest, "save", owner=owner, name="y", root=root, offset=1)
    refused(InvalidStateRequest, "save", owner=owner, name="y", rid=node, offset=10_000)
    refused(InvalidStateRequest, "save", owner=owner, name="y", rid=node, offset=True)
    refused(InvalidStateRequest, "save", owner=owner, name="y", rid=node, replace=1)
    refused(InvalidStateRequest, "save", owner=owner, name="state", rid=node)
    refused(InvalidStateRequest, "save", owner=owner, name="../y", rid=node)
    refused(InvalidStateRequest, "save", owner=owner, name="y", rid=node, kv=1)
    refused(InvalidStateRequest, "save", owner=owner, name="y", rid=node, client={})
    refused(InvalidStateRequest, "save", owner=owner, name="y", root=root, kv=True)
    refused(InvalidStateRequest, "save", owner=owner, name="y", rid=node, kv=True, client=[])
    refused(ForeignOwner, "save", owner=stranger, name="y", rid=node, kv=True)
    refused(InvalidStateRequest, "restore", owner=owner, name="mid", rid=node)
    refused(InvalidStateRequest, "restore", owner=owner, name="mid", kv="yes")
    refused(IncompatibleSnapshot, "restore", owner=owner, name="state", kv=True)
    refused(ForeignOwner, "save", owner=stranger, name="y", rid=node)
    refused(ForeignOwner, "save", owner=stranger, name="y", root=root)
    refused(UnknownState, "save", owner=owner, name="y", rid="nobody")
    refused(UnknownOwner, "save", owner="00" * 16, name="y", rid=node)
    refused(UnknownOwner, "restore", owner="00" * 16, name="state")
    refused(UnknownState, "restore", owner=stranger, name="y")
    refused(InvalidStateRequest, "restore", owner=stranger, name="/etc/passwd")
    refused(InvalidStateRequest, "restore", owner=stranger, name=".")
    assert served.info()["store"] == before
    served.control("save", owner=owner, name="last", rid=node)
    refused(StateCapacity, "save", owner=owner, name="one-more", rid=node)
    served.flush()
    folded = {"rid": node, "offset": CHUNK + 1}  # no version after the dense base needs it
    refused(RollbackBeyondRetention, "save", owner=owner, name="early", replace=True, **folded)
    refused(
        RollbackBeyondRetention, "save", owner=owner, name="mid", replace=True, rid=node, kv=True
    )
    served.control("close", owner=stranger)


def test_the_answers_say_what_was_saved(original: dict[str, Any], folder: Path) -> None:
    """Guards: a tail that is silently not in the file, another version than a clear keeps."""
    saved, report = original["saved"], original["report"]
    assert saved["version"] == report["version"] >= 5
    assert saved["root"] == saved["state_id"] == report["next_root"]
    assert saved["tail_dropped"] == report["tail"] > 0
    assert saved["bytes"] == (folder / "state").stat().st_size
    assert original["early"]["version"] == 1
    assert original["early"]["tail_dropped"] == 1
    assert original["by_root"]["root"] == original["root"]
    assert (folder / "state").read_bytes() == (folder / "state-2").read_bytes()
    assert original["again"]["reused"]
    assert original["again"]["root"] == original["root"]
    assert original["counters"]["snapshot_saves"] == 7
    assert original["counters"]["snapshot_restores"] == 3
    assert original["counters"]["snapshot_hits"] == 3


def test_a_new_process_goes_on(original: dict[str, Any], folder: Path) -> None:
    """Guards: a restore that prefills again in silence, or gives other tokens or other ids."""
    with engine(CASE.path, folder) as served:
        empty, owner = ledger(served), served.open()
        restored = served.control("restore", owner=owner, name="state")
        assert not restored["reused"]
        assert restored["root"] == original["root"]
        assert restored["version"] == original["saved"]["version"]
        held = ledger(served)
        assert held["pages_live"] + held["bases_live"] > 0
        assert ask(served, owner, restored["root"]) == original["went_on"]
        other = served.open()
        assert served.control("restore", owner=other, name="state")["reused"]
        served.control("release_root", owner=owner, root=restored["root"])
        assert ask(served, other, restored["root"]) == original["went_on"]
        with pytest.raises(UnknownState):
            served.control("restore", owner=other, name="y")
        listed = served.control("snapshots")
        assert [found["name"] for found in listed["snapshots"]] == [
            "early",
            "inner",
            "last",
            "mid",
            "state",
            "state-2",
        ]
        early = served.control("restore", owner=other, name="early")
        assert early["version"] == 1
        for name, context in original["contexts"].items():
            resume(served, name, context)
        served.control("close", owner=owner)
        served.control("close", owner=other)
        assert ledger(served) == empty


def resume(served: Served, name: str, context: dict[str, Any]) -> None:
    """A new owner goes on in mid-context as the original did, and computes nothing of it again."""
    owner, saved = served.open(), context["saved"]
    restored = served.control("restore", owner=owner, name=name)
    position, node = restored["position"], restored["rid"]
    for key in ("version", "version_id", "tail", "position", "state_id"):
        assert restored[key] == saved[key]
    assert (restored["kv_loaded"], restored["kv_reused"]) == (position, 0)
    assert (restored["client"], len(restored["tokens"])) == ({"text": name}, position)
    assert served.info()["integrity_checked"]
    assert cached(served, owner, node, [9]) == position
    assert cached(served, owner, node, []) == restored["ready"] == position - 1
    assert go_on(served, owner, node, [9]) == context["on"]
    assert go_on(served, owner, node, []) == context["at once"]
    assert go_on(served, owner, node, [9], offset=7) == context["back"]
    memory = served.control("owner", owner=owner, memory=True)["memory"]
    assert 0 < memory["own_pages"] <= memory["pages"]
    assert memory["context_tokens"] > position
    served.flush()  # what is left is pinned, or can be computed again
    assert cached(served, owner, node, [9]) == 0
    assert go_on(served, owner, node, [9]) == context["on"]
    weights = served.control("restore", owner=owner, name=name, kv=False)
    assert (weights["root"], weights["position"]) == (saved["root"], 0)
    served.control("close", owner=owner)


def test_another_checkpoint_refuses(original: dict[str, Any], folder: Path) -> None:
    """Guards: a state of one model added to the weights of another."""
    with engine(OTHER.path, folder) as served:
        empty, owner = ledger(served), served.open()
        with pytest.raises(IncompatibleSnapshot, match="the file has"):
            served.control("restore", owner=owner, name="state")
        listed = served.control("snapshots")["snapshots"]
        assert all(found["error"]["type"] == "IncompatibleSnapshot" for found in listed)
        assert served.generate(OTHER.prompt_ids, n=4, owner=owner)["output_ids"]
        served.control("close", owner=owner)
        assert ledger(served) == empty


def test_a_folder_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    """Guards: a server that finds out at the first save."""
    with pytest.raises(ValueError, match="--ttt-snapshot-dir"), engine(CASE.path, tmp_path / "no"):
        pass
