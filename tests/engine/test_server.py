"""Servers started as users start them: `sgl-rwttt serve` and a plain launch_server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sgl_rwttt.core.errors import ServerGone
from sgl_rwttt.core.faults import ENV_FAULTS
from sgl_rwttt.lang.http import HttpTransport
from sgl_rwttt.srt_ext.launch import cpu_environment
from tests.engine.served import request
from tests.engine.server import Server, cli, serving
from tests.golden import golden_case

pytestmark = pytest.mark.engine
CASE = golden_case("qwen3_hidden_proj")
KEY = "secret-of-the-test"
AUTH = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`sgl-rwttt serve` with an API key."""
    command = cli("serve", str(CASE.path), "--skip-tokenizer-init", "--api-key", KEY)
    with serving(command, tmp_path_factory.mktemp("serve") / "log") as running:
        yield running


def generate(server: Server, ids: list[int], **options: Any) -> requests.Response:
    return server.post("/generate", request(ids, **options), headers=AUTH)


def verb(server: Server, op: str, **args: Any) -> requests.Response:
    return server.post(f"/ttt/{op}", args, headers=AUTH)


def test_golden_over_http(server: Server) -> None:
    """Guards: another result over HTTP than in process."""
    count = len(CASE.generated_ids)
    answer = generate(server, CASE.prompt_ids, n=count).json()
    assert answer["output_ids"] == CASE.generated_ids
    report = answer["meta_info"]["state"]
    assert report["position"] == len(CASE.prompt_ids) + count - 1
    assert report["mode"] == "write"
    assert len(report["state_id"]) == 32


def test_the_report_streams(server: Server) -> None:
    """Guards: a streamed answer without a state report, or with a list of them."""
    payload = request(CASE.prompt_ids, n=6, stream=True)
    lines = server.post("/generate", payload, headers=AUTH, stream=True).iter_lines()
    chunks = [json.loads(x[6:]) for x in lines if x.startswith(b"data: {")]
    versions = [c["meta_info"]["state"]["version"] for c in chunks]
    positions = [c["meta_info"]["state"]["position"] for c in chunks]
    assert positions == sorted(positions)
    assert versions[-1] == positions[-1] // CASE.config["ttt_chunk"]


@pytest.mark.parametrize("op", ["open", "info", "close"])
def test_ttt_routes_need_the_api_key(server: Server, op: str) -> None:
    """Guards: control verbs open to whoever reaches the port."""
    assert server.post(f"/ttt/{op}", {}).status_code == 401
    assert server.get("/ttt/info").status_code == 401


def test_verbs_and_their_errors(server: Server) -> None:
    """Guards: an unknown, foreign, busy or released thing that is not named as what it is."""
    a = verb(server, "open").json()
    b = verb(server, "open").json()["owner"]
    owner = a["owner"]
    assert a["chunk"] == CASE.config["ttt_chunk"]
    first = generate(server, CASE.prompt_ids, owner=owner, custom={"ttt_pin": "here"}).json()
    rid = first["meta_info"]["id"]
    at = verb(server, "state", owner=owner, rid=rid, offset=len(CASE.prompt_ids)).json()
    assert at["state_id"] == first["meta_info"]["state"]["state_id"]

    def refused(response: requests.Response, status: int, kind: str) -> None:
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert error["type"] == kind
        assert error["message"]

    refused(verb(server, "state", owner=owner, rid="no-such-node"), 404, "UnknownState")
    refused(verb(server, "state", owner=b, rid=rid), 403, "ForeignOwner")
    refused(verb(server, "state", owner=owner, rid=rid, offset=0), 400, "InvalidStateRequest")
    refused(verb(server, "close", owner="00" * 16), 404, "UnknownOwner")
    refused(verb(server, "unpin", owner=owner, name="there"), 404, "UnknownState")
    refused(verb(server, "release_root", owner=owner, root="xyz"), 400, "InvalidStateRequest")
    refused(verb(server, "open", unknown=1), 400, "InvalidStateRequest")
    refused(verb(server, "explode"), 400, "InvalidStateRequest")
    refused(verb(server, "fault", point="queued", action="kill"), 400, "InvalidStateRequest")
    assert verb(server, "unpin", owner=owner, name="here").status_code == 200
    assert verb(server, "drop", owner=owner, rid=rid).json()["dropped"] == [rid]
    refused(verb(server, "drop", owner=owner, rid=rid), 404, "UnknownState")
    for opened in (owner, b):
        assert verb(server, "close", owner=opened).status_code == 200
        refused(verb(server, "close", owner=opened), 410, "OwnerReleased")


BAD_REQUESTS: list[tuple[str, int, dict[str, Any]]] = [
    ("unknown session", 404, {"owner": "00" * 16}),
    ("unknown key", 400, {"custom": {"ttt_colour": "red"}}),
    ("key of another type", 400, {"custom": {"ttt_mode": 1}}),
    ("unknown mode", 400, {"custom": {"ttt_mode": "think"}}),
    ("root without a session", 400, {"custom": {"ttt_root": "00" * 16}}),
    ("malformed state id", 400, {"custom": {"ttt_expect": "abc"}}),
    ("stale state id", 409, {"custom": {"ttt_expect": "00" * 16}}),
    ("clear without a session", 400, {"custom": {"ttt_clear": "drop"}}),
    ("beam search", 400, {"sampling": {"beam_width": 2, "n": 2}}),
]


@pytest.mark.parametrize(
    "status, options", [b[1:] for b in BAD_REQUESTS], ids=[b[0] for b in BAD_REQUESTS]
)
def test_bad_requests_are_refused_by_type(
    server: Server, status: int, options: dict[str, Any]
) -> None:
    """Guards: a typo or a stale id served as if it were not there."""
    before = server.get("/ttt/info", headers=AUTH).json()["store"]
    answer = generate(server, CASE.prompt_ids, n=2, **options)
    assert answer.status_code == status, answer.text
    after = server.get("/ttt/info", headers=AUTH).json()["store"]
    assert after["commits"] == before["commits"]


def test_embeddings_as_input_are_refused(server: Server) -> None:
    """Guards: input without token ids, which no lineage can name, killing the scheduler."""
    payload = {"input_embeds": [[0.0] * 32] * 3, "sampling_params": {"max_new_tokens": 2}}
    assert server.post("/generate", payload, headers=AUTH).status_code == 400
    assert generate(server, CASE.prompt_ids, n=2).status_code == 200


def test_requests_that_kill_or_fool_a_stock_server(server: Server) -> None:
    """Guards: `replace` without rid and a reused rid (both crash SGLang), silent bad offsets."""
    owner = verb(server, "open").json()["owner"]
    parent = generate(server, CASE.prompt_ids, owner=owner).json()["meta_info"]["id"]
    base = request([5], n=1, owner=owner, parent=parent)
    for change in (
        {"rid": None, "replace": True},
        {"rid": parent, "replace": True},
        {"rid": parent, "drop_previous_output": True},
        {"rid": parent, "offset": 0},
        {"rid": parent, "offset": len(CASE.prompt_ids) + 1},
        {"rid": parent, "offset": -1},
        {"rid": None, "offset": 3},
        {"rid": "no-such-node"},
    ):
        payload = {**base, "rid": None, "session_params": {"id": owner, **change}}
        answer = server.post("/generate", payload, headers=AUTH)
        assert answer.status_code in (400, 404), (change, answer.text)
    reused = {**base, "rid": parent}
    assert server.post("/generate", reused, headers=AUTH).status_code == 400
    assert generate(server, [5], n=1, owner=owner, parent=parent).status_code == 200
    verb(server, "close", owner=owner)
    late = generate(server, [5], n=1, owner=owner, parent=parent)
    assert late.status_code == 410
    assert "OwnerReleased" in late.text


def test_stock_sessions_are_owners_too(server: Server) -> None:
    """Guards: SGLang's own session routes bypassing the owner's release."""
    opened = server.post("/open_session", {"capacity_of_str_len": 1000}, headers=AUTH).json()
    answer = generate(server, CASE.prompt_ids, owner=opened, custom={"ttt_clear": "drop"}).json()
    root = answer["meta_info"]["state"]["next_root"]
    assert server.get("/ttt/info", headers=AUTH).json()["store"]["roots"] == 1
    server.post("/close_session", {"session_id": opened}, headers=AUTH)
    assert server.get("/ttt/info", headers=AUTH).json()["store"]["roots"] == 0
    assert generate(server, [5], owner=opened, custom={"ttt_root": root}).status_code == 410


def test_weights_cannot_be_replaced_while_serving(server: Server) -> None:
    """Guards: states that are differences from weights which are gone."""
    body = {"model_path": str(CASE.path)}
    answer = server.post("/update_weights_from_disk", body, headers=AUTH)
    assert answer.status_code == 400
    assert "restart the server" in answer.text
    assert generate(server, CASE.prompt_ids, n=2).status_code == 200


PROGRAM = """
from sgl_rwttt import function, gen

@function
def ask(s, q):
    s += q + gen("a", max_tokens=4, temperature=0)
    here = s.checkpoint()
    with s.fork(2) as branches:
        branches += gen("b", max_tokens=2, temperature=0)
        s.keep(branches.best("b"))
    s.rollback(here)
    return [len(s.tokens), s["a"], int(q)]
"""


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with the key in its environment."""
    env = {**os.environ, "RWTTT_API_KEY": KEY}
    return subprocess.run(cli(*words), env=env, capture_output=True, text=True, timeout=240)


def test_the_command_runs_programs_on_a_server(server: Server, tmp_path: Path) -> None:
    """Guards: a command that works on a fake alone; a key or a tokenizer that does not arrive."""
    characters = {chr(i + 1): i for i in range(128)}  # one token each
    characters["?"] = characters.pop("@")
    tokenizer = Tokenizer(models.WordLevel(characters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    (tmp_path / "prog.py").write_text(PROGRAM)
    rows = [{"q": q} for q in ("123456789", "12", "not a number", "12")]
    (tmp_path / "in").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["run", f"{tmp_path}/prog.py:ask", "--url", server.url, "--tokenizer", str(tmp_path)]
    done = command(*words, "--batch", f"{tmp_path}/in", "--out", f"{tmp_path}/out")
    assert done.returncode == 1, done.stderr
    assert "4 rows, 1 failed" in done.stderr
    first, second, bad, again = map(json.loads, (tmp_path / "out").read_text().splitlines())
    assert bad["error"]["type"] == "ValueError"
    assert second == again
    for row, q in ((first, "123456789"), (second, "12")):
        assert row["text"] == q + row["variables"]["a"]
        assert row["result"] == [row["state"]["position"], row["variables"]["a"], int(q)]
        assert row["state"]["version"] == row["state"]["position"] // CASE.config["ttt_chunk"]
    owners = command("inspect", server.url)
    assert owners.returncode == 0, owners.stderr
    assert "no owners" in owners.stdout
    assert str(CASE.path) in owners.stdout


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SGLang's own command, which may be made to fail."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(CASE.path)]
    command += ["--device", "cpu", "--skip-tokenizer-init", "--ttt-memory-mb", "8"]
    command += ["--max-total-tokens", "4096"]
    env = {**cpu_environment(), ENV_FAULTS: "1"}
    with serving(command, tmp_path_factory.mktemp("plain") / "log", env) as running:
        yield running


def test_plain_launch_server(plain: Server) -> None:
    """Guards: a checkpoint that only our own command can serve. Two variables are enough here."""
    answer = plain.post("/generate", request(CASE.prompt_ids, n=8)).json()
    assert answer["output_ids"] == CASE.generated_ids[:8]
    assert answer["meta_info"]["state"]["version"] > 0
    pools = plain.get("/ttt/info").json()["pools"]
    assert pools["pages"] * pools["page_bytes"] <= 8 << 20


def test_the_scheduler_is_killed(plain: Server) -> None:
    """Guards: clients that wait for ever for a process that is gone. The last test of the server.

    `sgl-rwttt serve` becomes this command.
    """
    assert plain.post("/ttt/fault", {"point": "nowhere"}).status_code == 400
    order = {"point": "mid_tail", "action": "kill", "skip": 2}
    assert plain.post("/ttt/fault", order).status_code == 200
    client = HttpTransport(plain.url)
    started = time.monotonic()
    with pytest.raises(ServerGone):
        client.generate(request(CASE.prompt_ids, n=50))
    with pytest.raises(ServerGone):
        client.info()
    assert time.monotonic() - started < 60
    plain.process.wait(timeout=60)
    with pytest.raises(requests.RequestException):
        plain.get("/health")


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--tp-size", "2"], "--tp-size"),
        (["--ttt-memory-mb", "0"], "--ttt-memory-mb"),
    ],
)
def test_unsupported_flags_stop_the_server_by_name(
    flags: list[str], named: str, tmp_path: Path
) -> None:
    """Guards: a combination that would corrupt states silently, refused by a test of its own only.

    Every refused flag is in tests/srt_ext/test_options.py; here one of SGLang's and one of ours.
    """
    command = cli("serve", str(CASE.path), "--skip-tokenizer-init", *flags)
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode != 0
    assert named in done.stdout + done.stderr
