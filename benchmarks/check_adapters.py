"""Adapters of four kinds of text, applied and updated by the server and by PEFT: the same loss?

For each text an adapter is fitted with the PEFT library and saved. The server starts from that
folder (`--ttt-adapter`). Both then give the loss of held-out tokens with the adapter as it is
(apply), and after two more segments were written (update: PEFT with torch's autograd and AdamW, one
segment at a time). A difference above the limit is an error: exit status 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import (
    add_run_flags,
    command_line,
    machine,
    machine_line,
    markdown_table,
    run,
    run_worker,
)

from sgl_rwttt.models.embedded import ensure
from sgl_rwttt.models.texts import text

WORKER = Path(__file__).resolve().with_name("adaptation_worker.py")
TEXTS = ("glossary", "prose", "code", "frequency")
LIMIT = 3.4e-3  # nats per token; the largest change that the RW-TTT paper reports for this check
CHUNK, LR, RANK, ALPHA = 64, 1e-3, 8, 16
HELD_OUT = 192  # tokens
FIT_LR, WINDOW = 1e-3, 64
TIMEOUT_S = 3600.0


def peft_model(model: Path) -> Any:
    """The base model with a fresh adapter, as `--ttt-backend lora_delta` has it by default."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)
    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    return get_peft_model(base, config).eval()


def loss_of(peft: Any, ids: Sequence[int]) -> Any:
    """Mean loss of all tokens but the first, a scalar tensor, nats."""
    import torch

    tokens = torch.tensor([list(ids)])
    logits = peft(tokens).logits[0, :-1].float()
    return torch.nn.functional.cross_entropy(logits, tokens[0, 1:])


def trained(peft: Any) -> list[Any]:
    """The adapter's parameters."""
    return [each for each in peft.parameters() if each.requires_grad]


def fit(peft: Any, ids: Sequence[int], steps: int) -> None:
    """A short fit on windows of a text."""
    import torch

    optimizer = torch.optim.AdamW(trained(peft), lr=FIT_LR)
    for step in range(steps):
        at = step * WINDOW % max(1, len(ids) - WINDOW)
        optimizer.zero_grad()
        loss_of(peft, ids[at : at + WINDOW]).backward()
        optimizer.step()


def boundary(peft: Any, segment: Sequence[int]) -> None:
    """TLM's step on one segment, tau = 0: moments zero, no decay, gradient clipped at norm 1."""
    import torch

    optimizer = torch.optim.AdamW(trained(peft), lr=LR, weight_decay=0.0)
    optimizer.zero_grad()
    loss = loss_of(peft, segment)
    (0.1 * loss.detach().exp() * loss).backward()
    torch.nn.utils.clip_grad_norm_(trained(peft), 1.0)
    optimizer.step()


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Both sides for every text."""
    import torch
    from tokenizers import Tokenizer

    torch.set_num_threads(options.threads)
    facts, model, first = machine(options.threads), ensure(ttt=False), 2 * CHUNK
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    results: dict[str, Any] = {}
    for name in options.texts:
        print(f"running {name} ...", file=sys.stderr, flush=True)
        ids = tokenizer.encode(text(name), add_special_tokens=False).ids
        ids, fitted = ids[-first - HELD_OUT :], ids[: -first - HELD_OUT]
        peft = peft_model(model)
        fresh = loss_of(peft, ids[first:]).item()
        fit(peft, fitted, options.steps)
        with tempfile.TemporaryDirectory() as folder:
            peft.save_pretrained(folder)
            rule = {
                "ttt_backend": "lora_delta",
                "ttt_adapter": folder,
                "ttt_lr": LR,
                "ttt_tau": 0.0,
            }
            sizes = {"max_total_tokens": 4096, "ttt_memory_mb": 128}
            job = {
                "model": str(model),
                "options": {**sizes, **rule},
                "first": first,
                "documents": {name: [ids]},
            }
            env = {"OMP_NUM_THREADS": str(options.threads)}
            (ours,) = run_worker(WORKER, job, env, TIMEOUT_S)[name]
        reference = {"fresh": fresh, "before": loss_of(peft, ids[first:]).item()}
        for at in range(0, first, CHUNK):
            boundary(peft, ids[at : at + CHUNK])
        reference["after"] = loss_of(peft, ids[first:]).item()
        results[name] = {"ours": ours, "peft": reference}
    return {
        "benchmark": "adapters",
        "machine": facts,
        "command": command_line(__file__, arguments, options.threads),
        "size": {"steps": options.steps},
        "results": results,
    }


def differences(report: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """|ours - PEFT| of each text, in nats per token: apply, update."""
    return {
        name: (
            abs(each["ours"]["before"] - each["peft"]["before"]),
            abs(each["ours"]["after"] - each["peft"]["after"]),
        )
        for name, each in report["results"].items()
    }


def render(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    rows = []
    for name, (apply, update) in differences(report).items():
        peft, ours = report["results"][name]["peft"], report["results"][name]["ours"]
        losses = [f"{peft[key]:.4f}" for key in ("fresh", "before", "after")]
        rows.append([name, *losses, f"{apply:.1e}", f"{update:.1e}", str(ours["updates"])])
    header = ["text", "base model", "fitted adapter", "after two segments"]
    header += ["difference, apply", "difference, update", "updates"]
    return "\n\n".join(
        [
            f"{machine_line(report['machine'])}\n\n`{report['command']}`",
            f"Loss of {HELD_OUT} held-out tokens in nats per token (PEFT's), and how far the "
            f"server's is from it; adapters fitted in {report['size']['steps']} steps; limit "
            f"{LIMIT:.1e}",
            markdown_table(header, rows),
        ]
    )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags; SystemExit for wrong usage."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS))
    parser.add_argument("--steps", type=int, default=24, help="of each fit (default 24)")
    add_run_flags(parser)
    options = parser.parse_args(arguments)
    if min(options.steps, options.threads) < 1:
        parser.error("--steps and --threads must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and store the raw numbers if asked to; 1 when a difference is too large."""
    report = run(arguments, parse, measure, render)
    worst = max(max(pair) for pair in differences(report).values())
    if not worst < LIMIT:  # NaN too
        print(f"a difference of {worst:.1e} is above {LIMIT:.1e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
