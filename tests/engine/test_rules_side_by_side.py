"""The same programs on the other two rules: nothing in a program knows which one it runs on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sgl_rwttt as rw
from examples import best_of_n, chat
from tests.backends.lora_oracle import tiny_model
from tests.engine.preloaded import forking
from tests.engine.server import free_port
from tests.golden_streaming import streaming_case
from tests.lang.toy_tokenizer import toy_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]
VOCAB, CONTEXT = 512, 2048
LORA = {"ttt_backend": "lora_delta", "ttt_chunk": 16, "ttt_lr": 0.01, "ttt_tau": 1.0}


def streaming_checkpoint(folder: Path) -> Path:
    """A golden TTT-Linear checkpoint with a vocabulary of 512."""
    case = streaming_case("ttt_linear_full")
    shutil.copytree(case.path, folder, ignore=shutil.ignore_patterns("expected"))
    config = {**case.config, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.randn((VOCAB, weights[name].shape[1]), generator=generator)
    save_file(weights, folder / "model.safetensors")
    return folder


def lora_checkpoint(folder: Path) -> Path:
    """A stock qwen3 checkpoint."""
    tiny_model("qwen3", vocab_size=VOCAB, max_position_embeddings=CONTEXT).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["streaming", "lora_delta"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[rw.Engine]:
    is_lora = request.param == "lora_delta"
    make = lora_checkpoint if is_lora else streaming_checkpoint
    folder = make(tmp_path_factory.mktemp("model") / "toy")
    toy_tokenizer().save_pretrained(folder)
    options: dict[str, Any] = {"max_total_tokens": 8192, "ttt_memory_mb": 64, "port": free_port()}
    with forking():
        backend = rw.Engine(str(folder), **options, **(LORA if is_lora else {}))
    assert backend.transport.info()["rule"] == request.param
    rw.set_default_backend(backend)
    yield backend
    rw.set_default_backend(None)
    with forking():
        backend.shutdown()


@pytest.fixture(autouse=True)
def balanced(engine: rw.Engine) -> Iterator[None]:
    """Nothing of a test's owners is left."""
    yield
    info = engine.transport.info()
    assert info["integrity_checked"]
    assert info["sessions"] == info["store"]["owners"] == info["store"]["pins"] == 0


def test_chat(engine: rw.Engine) -> None:
    """Guards the language against what only In-Place TTT has; the state moves, and it counts."""
    report = chat.main([])
    assert len(report.answers) == 3
    assert 0 < report.versions[0] < report.versions[1] < report.versions[2]
    assert report.before > 0
    assert report.after != report.before


def test_best_of_n(engine: rw.Engine) -> None:
    """Guards forks, keep and what follows it."""
    candidates, state = best_of_n.main(["--n", "3"])
    assert len({candidate.state_id for candidate in candidates}) == 3
    assert state["answer"] == max(candidates, key=lambda c: c.logprob).answer
    assert state.version > 0


def test_score_sees_the_text_before_each_token(engine: rw.Engine) -> None:
    """Guards `score` on a model without KV, whose frozen tokens would not see each other.

    Both ways within one chunk, so that nothing is learnt on the way in either of them.
    """

    @rw.function
    def program(s: rw.State) -> Any:
        s += "One two"
        s.flush()
        return s.score(" three four"), list(s.stream_executor.cursor.ledger.tokens)

    score, context = program.run().ret_value
    ids = context + list(score.tokens)
    assert len(ids) < 16
    answer = engine.transport.generate(
        {
            "input_ids": ids,
            "rid": "plain",
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
    )
    logprobs = [row[0] for row in answer["meta_info"]["input_token_logprobs"]][len(context) :]
    assert score.logprobs == pytest.approx(logprobs, abs=1e-4)
