"""What an operator sees of a server, and what nobody may see: metrics, listings, logs, limits."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from sgl_rwttt.srt_ext.logs import public_name
from tests.engine.served import request
from tests.engine.server import Server, cli, serving
from tests.golden import golden_case

pytestmark = pytest.mark.engine
CASE = golden_case("qwen3_hidden_proj")
PROMPT = CASE.prompt_ids
KEY = "secret-of-the-test"
AUTH = {"Authorization": f"Bearer {KEY}"}
KEPT = 6  # --ttt-retained-versions; the checkpoint folds every 3 pages
OWNERS = 4  # --ttt-max-owners


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with an API key, metrics, and every limit that fits a test."""
    command = cli(
        *("serve", str(CASE.path), "--skip-tokenizer-init", "--api-key", KEY, "--enable-metrics"),
        *("--ttt-memory-mb", "8", "--ttt-max-owners", str(OWNERS), "--max-total-tokens", "8192"),
        *("--ttt-retained-versions", str(KEPT), "--ttt-owner-timeout", "600"),
    )
    with serving(command, tmp_path_factory.mktemp("observed") / "log") as running:
        yield running


@pytest.fixture(autouse=True)
def no_owner_left(server: Server) -> Iterator[None]:
    """Every test begins and ends without owners, and with books that balance."""
    yield
    for owner in opened:
        verb(server, "close", owner=owner)
    opened.clear()
    health = get(server, "/ttt/health")
    assert (health.status_code, health.json()["status"]) == (200, "ok")
    assert health.json()["integrity_checked"] is True
    assert get(server, "/ttt/owners").json()["owners"] == []


opened: list[str] = []


def get(server: Server, path: str) -> requests.Response:
    return server.get(path, headers=AUTH)


def verb(server: Server, op: str, **args: Any) -> requests.Response:
    return server.post(f"/ttt/{op}", args, headers=AUTH)


def open_owner(server: Server, **args: Any) -> str:
    answer = verb(server, "open", **args)
    assert answer.status_code == 200, answer.text
    opened.append(answer.json()["owner"])
    return opened[-1]


def generate(server: Server, ids: list[int], **options: Any) -> requests.Response:
    return server.post("/generate", request(ids, **options), headers=AUTH)


def flush(server: Server) -> None:
    """Drop every memo; the answer before may have come a step before its request left."""
    assert server.post("/flush_cache?timeout=5", headers=AUTH).status_code == 200


def rid_of(answer: requests.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["meta_info"]["id"])


def metrics(server: Server) -> dict[str, float]:
    """Our samples: name and labels without the model -> value."""
    found = {}
    for line in server.get("/metrics").text.splitlines():
        if line.startswith("sgl_rwttt_"):
            name, value = line.rsplit(" ", 1)
            found[re.sub(r',?model_name="[^"]*"', "", name)] = float(value)
    return found


ROUTES = ["info", "owners", "owners/" + "0" * 32, "health", "no/such/route"]
VERBS = [
    "open",
    "renew",
    "close",
    "abort",
    "drop",
    "unpin",
    "release_root",
    "state",
    "info",
    "owners",
    "owner",
]


def test_every_route_needs_the_api_key(server: Server) -> None:
    """Guards: a state that whoever reaches the port can read, list or end."""
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        for route in ROUTES:
            assert server.get(f"/ttt/{route}", headers=headers).status_code == 401, route
        for op in [*VERBS, "health", "save", "restore", "snapshots", "no_such_verb"]:
            assert server.post(f"/ttt/{op}", {}, headers=headers).status_code == 401, op
        opening = server.post("/open_session", {"capacity_of_str_len": 9}, headers=headers)
        assert opening.status_code == 401
        assert server.post("/generate", request(PROMPT), headers=headers).status_code == 401


def test_the_lineage_of_an_owner(server: Server) -> None:
    """Guards: a branch missing from the tree, or with another point than its answer reported."""
    owner = open_owner(server)
    before = metrics(server)
    first = generate(server, PROMPT, n=4, owner=owner, custom={"ttt_pin": "base"})
    parent = rid_of(first)
    child = generate(server, [5, 6], n=2, owner=owner, parent=parent)
    fork = generate(server, [7], n=2, owner=owner, parent=parent, custom={"ttt_mode": "read"})
    back = generate(
        server, [9], owner=owner, parent=parent, offset=10, custom={"ttt_clear": "drop"}
    )
    seen = get(server, f"/ttt/owners/{owner}").json()
    assert seen["owner"] == owner and seen["name"] == public_name(owner)
    assert [b["rid"] for b in seen["branches"]] == [rid_of(a) for a in (first, child, fork, back)]
    assert [b["parent"] for b in seen["branches"]] == [None, parent, parent, parent]
    assert [b["mode"] for b in seen["branches"]] == ["write", "write", "read", "write"]
    assert [b["pin"] for b in seen["branches"]] == ["base", None, None, None]
    assert not any(b["running"] for b in seen["branches"])
    for branch, answer in zip(seen["branches"], (first, child, fork, back), strict=True):
        report = answer.json()["meta_info"]["state"]
        for key in ("root", "version", "tail", "position", "state_id"):
            assert branch[key] == report[key]
    assert seen["pins"] == ["base"]
    assert seen["roots"] == [back.json()["meta_info"]["state"]["next_root"]]
    assert verb(server, "owner", owner=owner).json()["branches"] == seen["branches"]
    after = metrics(server)
    for name, count in (("forks", 2), ("rollbacks", 1)):
        key = f"sgl_rwttt_{name}_total{{}}"
        assert after[key] - before[key] == count, name
    listed = get(server, "/ttt/owners").json()["owners"]
    assert [(row["name"], row["nodes"]) for row in listed] == [(public_name(owner), 4)]
    assert (listed[0]["pin_count"], listed[0]["root_count"]) == (1, 1)
    assert listed[0]["referenced_bytes"] > 0 and listed[0]["timeout_s"] == 600


def test_metrics_agree_with_the_books(server: Server) -> None:
    """Guards: gauges that are stale once nothing runs, and totals that do not add up."""
    flush(server)
    owner = open_owner(server)
    before = metrics(server)
    generate(server, PROMPT, n=20, owner=owner)
    seen, health = metrics(server), get(server, "/ttt/health").json()
    pages = {kind: seen[f'sgl_rwttt_pages{{kind="{kind}"}}'] for kind in KINDS}
    ledger = health["ledger"]["pages"]
    assert pages["version"] + pages["tail"] == ledger["live"]
    assert (pages["free"], pages["reserved"]) == (ledger["free"], ledger["reserved"])
    assert sum(pages.values()) == ledger["total"]
    bases = {kind: seen[f'sgl_rwttt_bases{{kind="{kind}"}}'] for kind in ("live", "free")}
    assert bases == {kind: health["ledger"]["bases"][kind] for kind in ("live", "free")}
    assert seen["sgl_rwttt_owners{}"] == 1
    assert seen["sgl_rwttt_running_branches{}"] == 0
    store = get(server, "/ttt/info").json()["store"]
    assert seen["sgl_rwttt_versions{}"] == store["versions"]
    grown = {name: value - before.get(name, 0) for name, value in seen.items()}
    assert grown["sgl_rwttt_commits_total{}"] == (len(PROMPT) + 19) // 8
    assert grown['sgl_rwttt_group_owners_count{effect="read"}'] == 20
    assert grown['sgl_rwttt_group_owners_sum{effect="write"}'] >= 2
    assert verb(server, "state", owner=owner, rid="none").status_code == 404
    refused = 'sgl_rwttt_refused_requests_total{error="UnknownState"}'
    assert metrics(server)[refused] == seen.get(refused, 0) + 1


KINDS = ("version", "tail", "free", "reserved")


def test_nobody_learns_an_id(server: Server) -> None:
    """Guards: another owner's id - the capability to use its state - in an answer, label or log."""
    a, b = open_owner(server), open_owner(server)
    for owner in (a, b):
        assert re.fullmatch(r"[0-9a-f]{32}", owner)
    assert a[:8] != b[:8]
    parent_a = rid_of(generate(server, PROMPT, owner=a, custom={"ttt_clear": "drop"}))
    parent_b = rid_of(generate(server, PROMPT, owner=b))
    root_a = get(server, f"/ttt/owners/{a}").json()["roots"][0]
    to_b = [
        verb(server, "state", owner=b, rid=parent_a),
        verb(server, "drop", owner=b, rid=parent_a),
        verb(server, "unpin", owner=b, name="none"),
        verb(server, "release_root", owner=b, root=root_a),
        generate(server, [5], n=1, owner=b, parent=parent_a),
        generate(server, [5], n=1, owner=b, custom={"ttt_root": root_a}),
        generate(server, [5], n=1, owner=b, parent=parent_b, custom={"ttt_expect": "00" * 16}),
    ]
    assert [answer.status_code for answer in to_b] == [403, 403, 404, 403, 403, 403, 409]
    to_b += [get(server, f"/ttt/owners/{b}"), verb(server, "owner", owner=b)]
    to_all = [
        *(get(server, f"/ttt/{route}") for route in ("owners", "info", "health", f"owners/{a}/x")),
        generate(server, PROMPT, n=1, owner=public_name(a)),
        server.post("/generate", {**request([5]), "session_params": {"id": [a]}}, headers=AUTH),
        verb(server, "close", owner=public_name(a)),
        server.get("/metrics"),
    ]
    verb(server, "close", owner=a)
    assert get(server, f"/ttt/owners/{a}").status_code == 410
    assert generate(server, [5], n=1, owner=a, parent=parent_a).status_code == 410
    for answer in to_b:
        assert a not in answer.text, answer.text
    for answer in to_all:
        assert a not in answer.text and b not in answer.text, answer.text
    log = server.log.read_text(errors="replace")
    assert a not in log and b not in log
    assert f"Session opened: {public_name(a)}" in log
    assert f"ttt_refused type=ForeignOwner owner={public_name(b)} branch={parent_a}" in log
    assert f"ttt_refused type=OwnerReleased owner={public_name(a)}" in log


def test_owners_at_the_limit(server: Server) -> None:
    """Guards: a limit that SGLang's own route goes round, or a place that never comes back."""
    for _ in range(OWNERS):
        open_owner(server)
    stock = {"capacity_of_str_len": 9}
    refused = verb(server, "open")
    assert refused.status_code == 507
    assert f"{OWNERS} owners are open" in refused.json()["error"]["message"]
    assert "--ttt-max-owners" in refused.json()["error"]["message"]
    other = server.post("/open_session", stock, headers=AUTH)
    assert other.status_code == 400 and "StateCapacity" in other.text
    assert "--ttt-max-owners" in other.text
    verb(server, "close", owner=opened.pop())
    opened.append(server.post("/open_session", stock, headers=AUTH).json())
    assert re.fullmatch(r"[0-9a-f]{32}", opened[-1])
    assert verb(server, "open").status_code == 507


@pytest.mark.parametrize("chosen", ["abc", "0" * 32], ids=["short", "long"])
def test_an_id_cannot_be_chosen(server: Server, chosen: str) -> None:
    """Guards: a capability that can be guessed, or that a client sets for others."""
    body = {"capacity_of_str_len": 9, "session_id": chosen}
    answer = server.post("/open_session", body, headers=AUTH)
    assert answer.status_code == 400
    assert "InvalidStateRequest" in answer.text and "/ttt/open" in answer.text
    assert get(server, f"/ttt/owners/{chosen}").status_code == 404


def test_an_idle_owner_expires_and_a_running_one_does_not(server: Server) -> None:
    """Guards: an owner closed under its running request; an expired one that keeps its pages."""
    flush(server)
    start = get(server, "/ttt/health").json()["ledger"]
    owner = open_owner(server, timeout=0.3)
    payload = request(PROMPT, n=450, owner=owner, stream=True)
    others = [request([*PROMPT, i], n=450) for i in range(7)]  # so that it takes a while
    with ThreadPoolExecutor(len(others)) as pool:
        pool.map(lambda other: server.post("/generate", other, headers=AUTH), others)
        begun = time.monotonic()
        with server.post("/generate", payload, headers=AUTH, stream=True) as answer:
            for _ in answer.iter_lines():
                if time.monotonic() - begun > 1.5:  # sessions are looked at once a second
                    break
            [row] = get(server, "/ttt/owners").json()["owners"]
    assert (row["name"], row["running"], row["idle_s"]) == (public_name(owner), 1, 0.0)
    deadline = time.monotonic() + 20
    while get(server, "/ttt/owners").json()["count"] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert get(server, "/ttt/owners").json()["count"] == 0
    late = get(server, f"/ttt/owners/{opened.pop()}")
    assert (late.status_code, late.json()["error"]["type"]) == (410, "OwnerReleased")
    flush(server)
    assert get(server, "/ttt/health").json()["ledger"] == start


def test_a_lineage_keeps_k_versions(server: Server) -> None:
    """Guards: versions that pile up behind a long conversation, and a wrong state further back."""
    flush(server)
    owner, evicted = open_owner(server), get(server, "/ttt/info").json()["store"]["evictions"]
    answer, length = generate(server, PROMPT, n=40, owner=owner), len(PROMPT) + 40
    for _ in range(2):
        answer = generate(server, [5], n=40, owner=owner, parent=rid_of(answer))
        length += 41
        store = get(server, "/ttt/info").json()["store"]
        assert store["versions"] <= 1 + KEPT
    report = answer.json()["meta_info"]["state"]
    assert report["version"] == (length - 1) // 8
    assert store["evictions"] == evicted and store["expirations"] > 8
    near = generate(server, [7], n=8, owner=owner, parent=rid_of(answer), offset=length - 3)
    far = generate(server, [7], n=8, owner=owner, parent=rid_of(answer), offset=20)
    cached = [a.json()["meta_info"]["cached_tokens"] for a in (near, far)]
    assert cached[0] > length - 3 - 2 * 8 and cached[1] == 0
    flush(server)
    tokens = [*PROMPT[:20], 7]
    cold = generate(server, tokens, n=8).json()
    assert far.json()["output_ids"] == cold["output_ids"]
    assert far.json()["meta_info"]["state"]["state_id"] == cold["meta_info"]["state"]["state_id"]


MALFORMED: dict[str, dict[str, Any]] = {
    "offset as text": {"session_params": {"offset": "5"}},
    "offset as a fraction": {"session_params": {"offset": 1.5}},
    "offset as a truth value": {"session_params": {"offset": True}},
    "offset beyond int64": {"session_params": {"offset": 10**30}},
    "id as a list": {"session_params": {"id": ["x"]}},
    "rid of the parent as a number": {"session_params": {"rid": 7}},
    "custom_params as a list": {"sampling_params": {"custom_params": [1]}},
    "custom_params as text": {"sampling_params": {"custom_params": "ttt_mode"}},
    "many custom_params": {"sampling_params": {"custom_params": {f"k{i}": 0 for i in range(99)}}},
    "long pin": {"sampling_params": {"custom_params": {"ttt_pin": "x" * 5000}}},
    "long rid": {"rid": "r" * 100_000},
    "negative token": {"input_ids": [-1, 5]},
    "token beyond the vocabulary": {"input_ids": [10**12]},
    "more tokens than the context": {"input_ids": [5] * 5000},
}


def test_malformed_requests_change_nothing(server: Server) -> None:
    """Guards: a value of another type or size that ends the scheduler, and with it every state."""
    owner = open_owner(server)
    parent = rid_of(generate(server, PROMPT, owner=owner))
    before = get(server, "/ttt/info").json()["store"]
    for name, change in MALFORMED.items():
        payload = {**request([5], n=1, owner=owner, parent=parent), **change}
        session = {"id": owner, "rid": parent, **change.get("session_params", {})}
        answer = server.post("/generate", {**payload, "session_params": session}, headers=AUTH)
        assert 400 <= answer.status_code < 500, (name, answer.text)
        assert len(answer.text) < 2000, name
    for op, args in (
        ("close", {"owner": "x" * 300}),
        ("state", {"owner": owner, "rid": 5}),
        ("unpin", {"owner": owner, "name": "x" * 70_000}),
        ("open", {"timeout": [[[]]]}),
        ("owner", {}),
    ):
        answer = verb(server, op, **args)
        assert 400 <= answer.status_code < 500, (op, answer.text)
    assert get(server, "/ttt/info").json()["store"] == before
    assert generate(server, [5], n=1, owner=owner, parent=parent).status_code == 200


def test_no_metric_has_an_unbounded_label(server: Server) -> None:
    """Guards: a time series per owner, per request or per mistyped path."""
    open_owner(server)
    generate(server, PROMPT, n=1, owner=opened[-1])
    get(server, "/ttt/such/a/path")
    text = server.get("/metrics").text
    labels = set(re.findall(r'(\w+)="', "\n".join(x for x in text.splitlines() if "rwttt_" in x)))
    assert labels <= {"model_name", "kind", "effect", "error", "le"}
    paths = set(re.findall(r'endpoint="(/ttt[^"]*)"', text))
    assert paths <= {
        *("/ttt/info", "/ttt/owners", "/ttt/owners/{owner}", "/ttt/health"),
        *("/ttt/{op}", "/ttt/{rest:path}"),
    }
