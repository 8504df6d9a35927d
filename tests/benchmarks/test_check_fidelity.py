"""The fidelity check: its gates, its broken rules, its report. No engine runs here."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sgl_rwttt.core.effects import Effect
from tests.backends.in_place_rig import Rig, some_tokens
from tests.benchmarks.scripts import load, table_rows
from tests.golden import FOLDER

TOP = [[token, -1.0] for token in range(5)]


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return load("check_fidelity")


@pytest.fixture(scope="module")
def gates() -> ModuleType:
    return load("fidelity_gates")


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    return load("fidelity_hooks")


def owner(logprobs: list[float], drift: float = 0.0) -> dict[str, Any]:
    return {"logprobs": logprobs, "top": [TOP] * len(logprobs), "drift": drift}


def test_numbers(gates: ModuleType) -> None:
    """Guards: differences that cancel out in a gate that should add them, a NaN that passes."""
    other = owner([-1.5, -1.5], drift=0.25)
    other["top"] = [TOP, [*TOP[:3], [7, -1.0], [8, -1.0]]]
    found = gates.compared(owner([-1.0, -2.0]), other)
    assert found["nll"] == 0.0
    assert found["kl"] == pytest.approx((math.exp(0.5) + math.exp(-0.5) - 2) / 2)
    assert (found["top5"], found["drift"], found["largest"]) == (0.8, 0.25, 0.5)
    assert gates.failed(found, "float32") == ["kl", "top5", "drift"]
    same = gates.compared(owner([-1.0]), owner([-1.0]))
    assert gates.failed(same, "float32") == []
    assert gates.failed(dict.fromkeys(gates.GATES, math.nan), "bfloat16") == list(gates.GATES)
    assert gates.divergence(1e4) == math.inf


def outputs(rig: Rig) -> list[Tensor]:
    """Two owners read in one prefill that completes chunks of both, then decode in one batch."""
    owners = [rig.start(name) for name in ("one", "two")]
    tokens = [some_tokens(23, seed) for seed in (1, 2)]
    found: list[Tensor] = []
    for first, end in ((0, 9), *((at, at + 1) for at in range(9, 23))):
        pairs = zip(owners, tokens, strict=True)
        found += rig.forward([(one, ids[first:end], Effect.WRITE) for one, ids in pairs])
    return found


def test_every_rule_is_broken_and_nothing_else(hooks: ModuleType) -> None:
    """Guards: a gate that was `seen to fail` on a product that nothing had been done to."""
    right = outputs(Rig(chunk=4, fold_pages=3))
    for rule in (None, *hooks.RULES):
        with hooks.breaking(lambda rule=rule: rule):
            found = outputs(Rig(chunk=4, fold_pages=3))
        same = all(torch.equal(mine, theirs) for mine, theirs in zip(found, right, strict=True))
        assert same == (rule is None), rule
    again = outputs(Rig(chunk=4, fold_pages=3))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(again, right, strict=True))


def test_orders(hooks: ModuleType, tmp_path: Path) -> None:
    """Guards: the orders of the run before."""
    path = tmp_path / "orders.json"
    hooks.write_orders(path, None, {})
    orders = hooks.Orders(path)
    assert orders.fresh().rule is None
    hooks.write_orders(path, "rate", {"a": [1, 2]})
    assert (orders.fresh().rule, orders.tokens) == ("rate", {"a": [1, 2]})


def test_scores() -> None:
    """Guards: scores of other tokens, or shifted by one, taken for those that were asked for."""
    scores = load("fidelity_worker").scores
    meta = {
        "input_token_logprobs": [[None, 4, None], [-1.0, 5, None]],
        "output_token_logprobs": [[-2.0, 6, None]],
        "input_top_logprobs": [None, [[-1.0, 5, None]]],
        "output_top_logprobs": [[[-0.5, 7, None]]],
    }
    found = scores(meta, [5, 6], 9)
    assert found == {"logprobs": [-1.0, -2.0], "top": [[[5, -1.0]], [[7, -0.5]]]}
    with pytest.raises(RuntimeError, match="2 scores"):
        scores(meta, [4, 5], 9)


def test_room_for_snapshots() -> None:
    """Guards: a run of all rules that ends at the server's default limit of 64 snapshots."""
    check, hooks = load("check_fidelity"), load("fidelity_hooks")
    rules = [None, *hooks.RULES]
    owners, compared = check.FULL["owners"], len(check.FULL["prompts"])
    job = load("fidelity_worker").FidelityJob(
        model="",
        options={},
        state={},
        tokens=[[1]] * owners,
        prompts=[1] * owners,
        read=[1] * owners,
        compared=compared,
        top=1,
        rules=rules,
    )
    assert job.saved() == compared + owners * len(rules) > 64


def test_scores_of_the_last_token() -> None:
    """Guards: a run that stops at a token which SGLang scores right and names wrongly."""
    scores = load("fidelity_worker").scores
    meta = {
        "input_token_logprobs": [[None, 4, None], [-1.0, 0, None]],
        "output_token_logprobs": [[-2.0, 8, None]],
        "input_top_logprobs": [None, [[-1.0, 8, None]]],
        "output_top_logprobs": [[[-2.0, 8, None]]],
    }
    assert scores(meta, [8, 8], 9)["logprobs"] == [-1.0, -2.0]
    for tokens, vocabulary in (([8, 8], 10), ([7, 8], 9), ([8, 0], 9)):
        with pytest.raises(RuntimeError, match="2 scores"):
            scores(meta, tokens, vocabulary)


def test_change_of_weights(tmp_path: Path) -> None:
    """Guards: a drift that leaves out the dense base or the pages."""
    weights = load("weights")
    g = torch.Generator().manual_seed(0)
    base, h, v = (torch.randn(2, *shape, generator=g) for shape in ((3, 5), (4, 5), (4, 3)))
    save_file({"D": base, "H": h, "V": v}, tmp_path / "both")
    save_file({"H": h, "V": v}, tmp_path / "pages")
    pages = [v[n].double().T @ h[n].double() for n in range(2)]
    for found, wanted in zip(weights.change(tmp_path / "pages"), pages, strict=True):
        torch.testing.assert_close(found, wanted)
    both = weights.change(tmp_path / "both")
    torch.testing.assert_close(both[1], base[1].double() + pages[1])
    assert load("fidelity_worker").drift(tmp_path / "pages", tmp_path / "pages") == 0.0


def test_golden_difference() -> None:
    """Guards: another row of the vectors, a token without a value."""
    golden = load("fidelity_golden")
    folder = FOLDER / "llama_embed_proj"
    job = golden.golden_job(folder, [None])
    assert len(job.tokens) == len(job.prompts) == len(job.read) == job.compared
    vectors = load_file(folder / "expected" / "vectors.safetensors")
    logits = torch.cat([vectors["prefill_logits"], vectors["decode_logits"]])[:-1]
    rows = torch.log_softmax(logits.double(), -1).tolist()
    right = {"top": [[[token, value] for token, value in enumerate(row)] for row in rows]}
    assert golden.golden_difference(folder, [right]) < 1e-12
    wrong = copy.deepcopy(right)
    wrong["top"][7][3][1] += 0.5
    assert golden.golden_difference(folder, [wrong]) == pytest.approx(0.5)
    del wrong["top"][7][3]
    assert golden.golden_difference(folder, [wrong]) == math.inf


def made_up() -> dict[str, Any]:
    batch = {"rule": None, "owners": [owner([-1.0, -2.0])]}
    broken = {"rule": "rate", "owners": [owner([-1.0, -2.0], drift=0.01)]}
    return {
        "machine": load("common").machine(1),
        "command": "none",
        "quick": True,
        "size": {"read": 1, "decode": 1, "owners": 2, "prompts": [9]},
        "broken_size": {"read": 1, "decode": 1},
        "rules": ["rate"],
        "configurations": [
            {"dtype": "float32", "chunk": 16, "alone": [owner([-1.0, -2.0])], "batches": [batch]}
        ],
        "golden": [{"name": "toy", "difference": {"": 1e-5, "rate": 2e-5}}],
        "broken": {"alone": [owner([-1.0, -2.0])], "batches": [batch, broken]},
    }


def test_report(check: ModuleType, gates: ModuleType, tmp_path: Path) -> None:
    """Guards: a gate that failed and is not said, a broken rule that nobody saw, no plot."""
    render, report = check.render, made_up()
    (drawn,) = check.plot(report, tmp_path)
    assert drawn.stat().st_size > 1000
    assert check.plot({"rules": []}, tmp_path) == []
    assert gates.failures(report) == []
    text = render(report)
    assert "FAILED" not in text and "**1.0e-02**" in text
    row = table_rows(text)[0]
    assert row[:5] == ["float32", "16", "9", "1.50000", "1.50000"]
    assert row[-1] == "none"

    unseen, wrong = made_up(), made_up()
    unseen["broken"]["batches"][1]["owners"][0]["drift"] = 0.0
    assert gates.failures(unseen) == ["no gate rejects the broken rule rate"]
    wrong["configurations"][0]["batches"][0]["owners"][0]["drift"] = 0.5
    wrong["golden"][0]["difference"][""] = math.nan
    assert len(gates.failures(wrong)) == 3  # the golden vectors are the control's too
    assert render(wrong).count("FAILED") == 3


def test_every_gate_has_to_be_seen_to_fail(gates: ModuleType, hooks: ModuleType) -> None:
    """Guards: a gate that passes everything."""
    report = made_up()
    report["quick"], report["rules"] = False, list(hooks.RULES)
    report["golden"][0]["difference"] = {"": 0.0} | dict.fromkeys(hooks.RULES, 0.0)
    report["broken"]["batches"] += report["broken"]["batches"][1:] * len(hooks.RULES)
    assert sorted(gates.failures(report)) == [
        f"gate {name} was never seen to fail" for name in ("golden", "kl", "nll", "top5")
    ]


def test_flags(check: ModuleType, hooks: ModuleType) -> None:
    """Guards: `--break RULE` that measures everything else too, sizes that mean nothing."""
    whole = check.parse([])
    assert whole.only == list(check.PARTS) and whole.rules == list(hooks.RULES)
    assert list(check.configurations(whole))[-1] == ("bfloat16", 32)
    one = check.parse(["--break", "rate"])
    assert (one.only, one.rules) == (["broken"], ["rate"])
    assert check.parse(["--break", "all"]).rules == list(hooks.RULES)
    for wrong in (["--owners", "2"], ["--decode", "1"], ["--break", "none"], ["--prompts", "0"]):
        with pytest.raises(SystemExit):
            check.parse(wrong)
