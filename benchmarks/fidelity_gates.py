"""The gates of check_fidelity.py: what is compared, and how large it may be."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from fidelity_hooks import RULES

DTYPES = ("float32", "bfloat16")
BROKEN_CHUNK = 32  # of the engine whose rules are broken
TOP = 5  # most probable tokens that are compared
GOLDEN_LIMIT = 1e-4  # of a log-probability in float32, against the published code

GATES = {
    "nll": "difference of the mean loss, nats per token",
    "kl": "mean of exp(r) - 1 - r, r the difference of a token's log-probability",
    "top5": "share of the five most probable tokens that is the same, mean over tokens",
    "drift": "norm of the difference of the weights' change over that of the change, worst layer",
}
LIMITS = {
    "float32": {"nll": 1e-5, "kl": 1e-8, "top5": 0.998, "drift": 1e-4},
    "bfloat16": {"nll": 2e-2, "kl": 5e-3, "top5": 0.94, "drift": 5e-2},
}


def compared(alone: dict[str, Any], batched: dict[str, Any]) -> dict[str, float]:
    """The gates' numbers for one owner, and the losses and the largest |r| besides."""
    pairs = list(zip(alone["logprobs"], batched["logprobs"], strict=True))
    ratios = [there - here for here, there in pairs]
    here, there = (-statistics.fmean(side) for side in zip(*pairs, strict=True))
    tops = zip(alone["top"], batched["top"], strict=True)
    return {
        "nll": abs(there - here),
        "kl": statistics.fmean(divergence(r) for r in ratios),
        "top5": statistics.fmean(overlap(mine, theirs) for mine, theirs in tops),
        "drift": batched["drift"],
        "loss alone": here,
        "loss in the batch": there,
        "largest": max(map(abs, ratios)),
    }


def divergence(r: float) -> float:
    """exp(r) - 1 - r, which is never negative; infinite where it is too large for a float."""
    try:
        return math.expm1(r) - r
    except OverflowError:
        return math.inf


def overlap(first: Sequence[Sequence[Any]], second: Sequence[Sequence[Any]]) -> float:
    """Share of the tokens among the first `TOP` of both; entries are (token, log-probability)."""
    common = {entry[0] for entry in first[:TOP]} & {entry[0] for entry in second[:TOP]}
    return len(common) / TOP


def passes(gate: str, value: float, dtype: str) -> bool:
    """Whether a number is within its limit; one that is not finite never is."""
    limit = LIMITS[dtype][gate]
    return value >= limit if gate == "top5" else value <= limit


def failed(numbers: dict[str, float], dtype: str) -> list[str]:
    """The gates that reject these numbers."""
    return [gate for gate in GATES if not passes(gate, numbers[gate], dtype)]


def worst(measured: Iterable[dict[str, float]]) -> dict[str, float]:
    """Per gate the number that is hardest to accept."""
    rows = list(measured)
    return {gate: (min if gate == "top5" else max)(row[gate] for row in rows) for gate in GATES}


def owners_of(result: dict[str, Any], batch: int) -> list[dict[str, float]]:
    """The numbers of each compared owner in one batch of an engine."""
    pairs = zip(result["alone"], result["batches"][batch]["owners"], strict=True)
    return [compared(alone, batched) for alone, batched in pairs]


def broken_numbers(report: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Rule -> the gates' worst numbers with that rule broken, and that of the golden vectors.

    The rule "" is the control: nothing is broken.
    """
    golden = report["golden"][0]["difference"] if report["rules"] else {}
    return {
        rule: {**worst(owners_of(report["broken"], index)), "golden": golden[rule]}
        for index, rule in enumerate(["", *report["rules"]] if report["rules"] else [])
    }


def rejected_by(numbers: dict[str, float]) -> list[str]:
    """The gates that see a broken rule, in float32."""
    golden = [] if numbers["golden"] <= GOLDEN_LIMIT else ["golden"]
    return [*failed(numbers, "float32"), *golden]


def failures(report: dict[str, Any]) -> list[str]:
    """What is not as it has to be, one sentence each; empty when every gate held."""
    found = []
    for engine in report["configurations"]:
        for prompt, numbers in zip(report["size"]["prompts"], owners_of(engine, 0), strict=True):
            for gate in failed(numbers, engine["dtype"]):
                where = f"{engine['dtype']}, chunks of {engine['chunk']}, prompt {prompt}"
                found.append(f"{where}: {gate} {numbers[gate]:.2e} is beyond its limit")
    for case in report["golden"]:
        if not case["difference"][""] <= GOLDEN_LIMIT:
            found.append(f"golden {case['name']}: {case['difference']['']:.2e} is beyond its limit")
    seen: set[str] = set()
    for rule, numbers in broken_numbers(report).items():
        rejecting = rejected_by(numbers)
        if not rule and rejecting:
            found.append(f"with nothing broken: {', '.join(rejecting)} beyond the limit")
        if rule and not rejecting:
            found.append(f"no gate rejects the broken rule {rule}")
        if rule:
            seen.update(rejecting)
    if set(report["rules"]) == set(RULES) and not report["quick"]:
        found += [f"gate {gate} was never seen to fail" for gate in {*GATES, "golden"} - seen]
    return found
