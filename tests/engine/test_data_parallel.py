"""Two data-parallel ranks: an owner stays on its own, and nobody is told apart by the answers."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import requests

from tests.engine.served import request
from tests.engine.server import Server, cli, serving
from tests.golden import golden_case

pytestmark = pytest.mark.engine
CASE = golden_case("qwen3_hidden_proj")
PROMPT, CHUNK = CASE.prompt_ids, int(CASE.config["ttt_chunk"])
OWNERS = 3  # --ttt-max-owners, of each rank


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("ranks")
    command = cli(
        *("serve", str(CASE.path), "--skip-tokenizer-init", "--dp-size", "2", "--enable-metrics"),
        *("--ttt-memory-mb", "16", "--max-total-tokens", "4096", "--ttt-max-owners", str(OWNERS)),
        *("--ttt-snapshot-dir", str(folder)),
    )
    with serving(command, folder.parent / "ranks.log", {"OMP_NUM_THREADS": "1"}) as running:
        yield running


@pytest.fixture
def owners(server: Server) -> Iterator[dict[int, list[str]]]:
    """Two owners on each rank, opened in turn; afterwards nothing is left anywhere."""
    flush(server)
    answers = [verb(server, "open") for _ in range(4)]
    assert len({(each["boot_id"], each["fingerprint"], each["root"]) for each in answers}) == 1
    opened = [each["owner"] for each in answers]
    by_rank: dict[int, list[str]] = {0: [], 1: []}
    for owner in opened:
        by_rank[rank(generate(server, [3], owner=owner))].append(owner)
    yield by_rank
    for owner in opened:
        verb(server, "close", owner=owner)
    left = server.get("/ttt/info").json()
    assert left["integrity_checked"] is True
    assert [each["sessions"] for each in left["dp_ranks"]] == [0, 0]
    health = server.get("/ttt/health")
    assert (health.status_code, len(health.json()["dp_ranks"])) == (200, 2)


def verb(server: Server, op: str, **args: Any) -> dict[str, Any]:
    answer = server.post(f"/ttt/{op}", args)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(answer: requests.Response) -> str:
    """The type of a verb's refusal."""
    return str(answer.json()["error"]["type"])


def generate(server: Server, ids: list[int], **options: Any) -> dict[str, Any]:
    answer = server.post("/generate", request(ids, **options))
    assert answer.status_code == 200, answer.text
    return answer.json()


def rank(answer: dict[str, Any]) -> int:
    return int(answer["meta_info"]["dp_rank"])


def rid(answer: dict[str, Any]) -> str:
    return str(answer["meta_info"]["id"])


def point(answer: dict[str, Any]) -> dict[str, Any]:
    """What must not depend on the rank, or on what was cached."""
    report = answer["meta_info"]["state"]
    kept = ("root", "version", "tail", "position", "state_id", "versions")
    return {"ids": answer["output_ids"], **{key: report[key] for key in kept}}


def flush(server: Server) -> None:
    assert server.post("/flush_cache?timeout=10").status_code == 200


def words(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 128) for _ in range(length)]


def alone(server: Server, ids: list[int], n: int, where: int) -> dict[str, Any]:
    """A whole context as one request, with nothing cached: what a server for one would say."""
    flush(server)
    return point(generate(server, ids, n=n, routed_dp_rank=where))


def test_owners_spread_and_learn_as_published(server: Server, owners: dict[int, list[str]]) -> None:
    """Guards: all owners on one rank, and a rank with other weights or a state of its own kind."""
    assert {each: len(held) for each, held in owners.items()} == {0: 2, 1: 2}
    info = server.get("/ttt/info").json()
    assert (info["sessions"], [each["sessions"] for each in info["dp_ranks"]]) == (4, [2, 2])
    together = [owner for held in owners.values() for owner in held]
    count = len(CASE.generated_ids)
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(generate, server, PROMPT, n=count, owner=o) for o in together]
        answers = [each.result() for each in asked]
    assert [rank(answer) for answer in answers] == [0, 0, 1, 1]
    assert [answer["output_ids"] for answer in answers] == [CASE.generated_ids] * 4
    listed = server.get("/ttt/owners").json()
    assert Counter(row["dp_rank"] for row in listed["owners"]) == {0: 2, 1: 2}
    commits = [each["counters"]["commits"] for each in server.get("/ttt/info").json()["dp_ranks"]]
    assert all(commits)


def test_conversations_side_by_side(server: Server, owners: dict[int, list[str]]) -> None:
    """Guards: a turn that reaches the other rank, where its owner is unknown or somebody else."""
    together = [owner for held in owners.values() for owner in held]

    def converse(seed: int, owner: str) -> list[tuple[list[int], dict[str, Any]]]:
        """Three turns; each names a rank that is not the owner's, or is."""
        read, parent, turns = list[int](), None, []
        for turn, length in enumerate((2 * CHUNK + 3, CHUNK - 1, 5)):
            ids = words(10 * seed + turn, length)
            answer = generate(
                server, ids, n=CHUNK + 2, owner=owner, parent=parent, routed_dp_rank=turn % 2
            )
            turns.append((read + ids, answer))
            read, parent = read + ids + answer["output_ids"], rid(answer)
        return turns

    with ThreadPoolExecutor() as pool:
        told = list(pool.map(converse, range(4), together))
    for where, turns in zip((0, 0, 1, 1), told, strict=True):
        assert {rank(answer) for _, answer in turns} == {where}
        for context, answer in (turns[0], turns[-1]):
            expected = alone(server, context, CHUNK + 2, 1 - where)
            found = point(answer)
            assert {k: found[k] for k in ("ids", "state_id", "version", "tail")} == {
                k: expected[k] for k in ("ids", "state_id", "version", "tail")
            }


def test_forks_rollbacks_and_resets_on_the_second_rank(
    server: Server, owners: dict[int, list[str]]
) -> None:
    """Guards: siblings, a kept prefix or a root looked for on a rank that does not have them."""
    owner = owners[1][0]
    first = generate(server, PROMPT, n=CHUNK, owner=owner, custom={"ttt_pin": "base"})
    said = PROMPT + first["output_ids"]
    forks = [[5, 6], [7], words(1, CHUNK + 1)]
    with ThreadPoolExecutor() as pool:
        siblings = list(
            pool.map(
                lambda ids: generate(server, ids, n=CHUNK, owner=owner, parent=rid(first)), forks
            )
        )
    back = generate(server, [9], n=CHUNK, owner=owner, parent=rid(first), offset=CHUNK + 2)
    cleared = generate(
        server, [4], n=2, owner=owner, parent=rid(first), custom={"ttt_clear": "drop"}
    )
    root = cleared["meta_info"]["state"]["next_root"]
    empty = generate(server, [11, 12], n=CHUNK, owner=owner, custom={"ttt_root": root})
    answers = [first, *siblings, back, cleared, empty]
    assert {rank(answer) for answer in answers} == {1}
    assert empty["meta_info"]["state"]["version"] > 0
    seen = verb(server, "owner", owner=owner)
    assert (seen["pins"], seen["roots"]) == (["base"], [root])
    assert {branch["rid"] for branch in seen["branches"]} >= {rid(answer) for answer in answers}
    verb(server, "unpin", owner=owner, name="base")
    verb(server, "release_root", owner=owner, root=root)
    assert verb(server, "drop", owner=owner, rid=rid(back))["dropped"] == [rid(back)]
    contexts = [*(said + ids for ids in forks), [*said[: CHUNK + 2], 9]]
    for context, answer in zip(contexts, [*siblings, back], strict=True):
        assert point(answer)["ids"] == alone(server, context, CHUNK, 0)["ids"]


def test_a_snapshot_goes_from_rank_to_rank(server: Server, owners: dict[int, list[str]]) -> None:
    """Guards: a file that only the rank which wrote it can read, or a restore at another rank."""
    source, same, other = owners[1][0], owners[1][1], owners[0][0]
    first = generate(server, PROMPT, n=2 * CHUNK + 3, owner=source)
    saved = verb(server, "save", owner=source, name="talk", rid=rid(first), kv=True)
    listed = verb(server, "snapshots")["snapshots"]
    assert [each["name"] for each in listed] == ["talk"]
    twice = server.post("/ttt/save", {"owner": source, "name": "talk", "rid": rid(first)})
    assert refused(twice) == "InvalidStateRequest"
    expected = point(generate(server, [9], n=CHUNK, owner=source, parent=rid(first)))
    for owner in (same, other):
        restored = verb(server, "restore", owner=owner, name="talk")
        assert restored["state_id"] == saved["state_id"]
        assert restored["reused"] is (owner == same)
        answer = generate(server, [9], n=CHUNK, owner=owner, parent=restored["rid"])
        assert rank(answer) == (1 if owner == same else 0)
        weights = verb(server, "restore", owner=owner, name="talk", kv=False)
        empty = generate(server, [9], n=CHUNK, owner=owner, custom={"ttt_root": weights["root"]})
        assert empty["meta_info"]["state"]["version"] >= saved["version"]
        # the last sampled token was not read yet, and is not in the file
        on = generate(
            server, [first["output_ids"][-1], 9], n=CHUNK, owner=owner, parent=restored["rid"]
        )
        assert (point(on)["ids"], point(on)["state_id"]) == (expected["ids"], expected["state_id"])


def test_a_verb_is_answered_once_by_the_rank_that_owns(
    server: Server, owners: dict[int, list[str]]
) -> None:
    """Guards: a refusal from the wrong rank, two answers, and an id that leads to a neighbour."""

    def counts() -> list[int]:
        ranks = server.get("/ttt/info").json()["dp_ranks"]
        return [each["counters"]["refused"] for each in ranks]

    mine = owners[1][0]
    answer = generate(server, PROMPT, owner=mine)
    report = verb(server, "state", owner=mine, rid=rid(answer))
    assert report["state_id"] == answer["meta_info"]["state"]["state_id"]
    forged = f"{int(mine, 16) ^ 1:032x}"  # the other rank's, if there were such an owner
    for owner, where in ((forged, 0), (f"{int(mine, 16) ^ 2:032x}", 1)):
        before = counts()
        for op in ("state", "drop"):
            told = server.post(f"/ttt/{op}", {"owner": owner, "rid": rid(answer)})
            assert (told.status_code, refused(told)) == (404, "UnknownOwner")
        for named in (None, 0, 1):
            told = server.post("/generate", request([5], owner=owner, routed_dp_rank=named))
            assert told.status_code == 404 and "[UnknownOwner " in told.text
        grown = [new - old for new, old in zip(counts(), before, strict=True)]
        assert grown == [5 * (each == where) for each in (0, 1)]
    for other, error in ((owners[1][1], "ForeignOwner"), (owners[0][0], "UnknownState")):
        told = server.post("/generate", request([5], owner=other, parent=rid(answer)))
        assert f"[{error} " in told.text
    named = [owner for held in owners.values() for owner in held]
    renewal = verb(server, "renew", owners=[forged, *named])
    assert renewal["unknown"] == [forged]
    assert renewal["boot_id"] == server.get("/ttt/info").json()["boot_id"]
    own = server.post("/open_session", {"capacity_of_str_len": 9}).json()
    assert generate(server, [5], owner=own)["output_ids"] == []
    assert server.post("/close_session", {"session_id": own}).status_code == 200
    assert refused(server.post("/ttt/state", {"owner": own, "rid": "x"})) == "OwnerReleased"


def test_limits_are_those_of_a_rank(server: Server, owners: dict[int, list[str]]) -> None:
    """Guards: a refusal while another rank has a place, or none when none has."""
    more = [verb(server, "open")["owner"] for _ in range(2)]
    full = server.post("/ttt/open", {})
    assert (full.status_code, refused(full)) == (507, "StateCapacity")
    where = [rank(generate(server, [3], owner=owner)) for owner in more]
    assert where == [0, 1]
    verb(server, "close", owner=more[1])
    more[1] = verb(server, "open")["owner"]
    assert rank(generate(server, [3], owner=more[1])) == 1
    for owner in more:
        verb(server, "close", owner=owner)


def test_who_owns_nothing_goes_anywhere(server: Server) -> None:
    """Guards: requests without an owner on one rank only, or refused."""
    count = len(CASE.generated_ids)
    answers = [generate(server, PROMPT, n=count) for _ in range(4)]
    assert {rank(answer) for answer in answers} == {0, 1}
    assert [answer["output_ids"] for answer in answers] == [CASE.generated_ids] * 4
    assert len({json.dumps(point(answer)) for answer in answers}) == 1
    off = [generate(server, PROMPT, n=8, custom={"ttt_mode": "off"}) for _ in range(2)]
    assert off[0]["output_ids"] == off[1]["output_ids"] and {rank(each) for each in off} == {0, 1}
    for named in (0, 1):
        assert rank(generate(server, PROMPT, routed_dp_rank=named)) == named
    assert server.post("/generate", request(PROMPT, routed_dp_rank=2)).status_code == 400
    samples = server.get("/metrics").text.splitlines()
    free = [line for line in samples if line.startswith("sgl_rwttt_pages{") and '"free"' in line]
    assert sorted(re.findall(r'dp_rank="(.)"', "".join(free))) == ["0", "1"]
    flush(server)
    cold = [generate(server, PROMPT, routed_dp_rank=named) for named in (0, 1)]
    assert [answer["meta_info"]["cached_tokens"] for answer in cold] == [0, 0]


def test_a_dead_rank_ends_the_server(server: Server) -> None:
    """Guards: owners of a killed rank who wait for ever. The last test: nothing is left to ask."""
    schedulers = [
        process
        for process in psutil.Process(server.process.pid).children(recursive=True)
        if "scheduler" in " ".join(process.cmdline()) and "DP1" in " ".join(process.cmdline())
    ]
    assert len(schedulers) == 1
    os.kill(schedulers[0].pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while server.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    assert server.process.poll() not in (None, 0)
