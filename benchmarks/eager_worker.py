"""An eager loop of transformers with In-Place TTT, batch size 1: `eager_worker.py JOB RESULT`.

The rule as published, at batch size 1: a KV cache, one token per forward pass, a private dense copy
of each fast weight that changes after every complete chunk of the stream. A prompt is read in one
forward pass, in which the layers with fast weights go chunk by chunk. Started by bench_table.py.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine_worker import WARMUP_TOKENS, Stream
from footprint import peak_mib, reset_peaks
from traces import in_turn, timing


@dataclass(frozen=True)
class EagerJob:
    """What the loop is asked to do; plain values, it travels as JSON."""

    model: str  # checkpoint folder, with `ttt_target: input_embed`
    dtype: str
    prompts: list[list[int]]
    decode: list[int]  # tokens to generate, per stream
    repeats: int


class FastWeight:
    """Stands for one down projection: y = W h, and W += lr V^T H after each complete chunk."""

    def __init__(self, down: Any, conv: Any, proj: Any, lr: float, chunk: int) -> None:
        self.down, self.conv, self.proj, self.lr, self.chunk = down, conv, proj, lr, chunk
        self.source: EagerLoop | None = None
        self.reset()
        down.forward = self.read

    def reset(self) -> None:
        """A new stream: W as in the checkpoint, no rows in the open chunk."""
        self.weight = self.down.weight.detach().clone()
        self.hidden: list[Any] = []
        self.target: list[Any] = []
        self.open = self.writes = 0

    def read(self, hidden: Any) -> Any:
        """The projection of hidden [1, n, d_ff], each row by the weights that its chunk began with.

        Modifies the weights where chunks end.
        """
        import torch

        assert self.source is not None
        outputs, at, rows, target = [], 0, hidden[0], self.source.target
        while at < len(rows):
            end = min(len(rows), at + self.chunk - self.open)
            outputs.append(rows[at:end] @ self.weight.T)
            self.hidden.append(rows[at:end])
            self.target.append(target[at:end])
            self.open += end - at
            if self.open == self.chunk:
                self._write()
            at = end
        return torch.cat(outputs)[None]

    def _write(self) -> None:
        import torch

        from sgl_rwttt.kernels.boundary_update.torch_impl import boundary_update

        target = torch.cat(self.target)[None]
        values = boundary_update(target, self.conv, self.proj, self.lr)[0]
        self.weight.addmm_(values.T, torch.cat(self.hidden))
        self.hidden, self.target = [], []
        self.open, self.writes = 0, self.writes + 1


class EagerLoop:
    """A model of transformers whose fast weights change while it reads and generates."""

    def __init__(self, folder: Path, dtype: str) -> None:
        """Raises ValueError for a checkpoint with another target than the input embeddings."""
        import torch
        from safetensors.torch import load_file

        from sgl_rwttt.backends.in_place_config import InPlaceConfig
        from sgl_rwttt.models.checkpoint import Checkpoint
        from sgl_rwttt.models.eager import EagerModel
        from sgl_rwttt.srt_ext.launch import local_config

        config = local_config(folder)
        rule = InPlaceConfig.from_hf(config)
        if rule.target != "input_embed":
            raise ValueError(f"the eager loop knows ttt_target 'input_embed', not {rule.target!r}")
        weights = {}
        for file in sorted(folder.glob("*.safetensors")):
            weights |= load_file(file)
        kind = getattr(torch, dtype)
        weights = {name: tensor.to(kind) for name, tensor in weights.items()}
        checkpoint = Checkpoint(config, weights, lambda _text, _special: [], {}, dtype)
        self.model = EagerModel(checkpoint).model
        self.target: Any = None  # rows [n, d] of the forward pass that runs
        self.fast: dict[int, FastWeight] = {}
        for layer in rule.layers:
            prefix = f"model.layers.{layer}.mlp.ttt_"
            down = self.model.model.layers[layer].mlp.down_proj
            conv = weights[prefix + "conv.weight"][:, 0]
            proj = weights[prefix + "proj.weight"] if rule.proj else None
            self.fast[layer] = FastWeight(down, conv, proj, rule.lr, rule.chunk)
            self.fast[layer].source = self

    def stream(self, prompt: Sequence[int], decode: int) -> Stream:
        """Answer one prompt greedily with `decode` tokens, from the checkpoint's weights."""
        import torch

        for weight in self.fast.values():
            weight.reset()
        arrivals: list[tuple[float, int]] = []
        output: list[int] = []
        past, ids = None, list(prompt)
        with torch.inference_mode():
            while len(output) < decode:
                tokens = torch.tensor([ids])
                self.target = self.model.model.embed_tokens(tokens)[0]
                out = self.model.model(tokens, past_key_values=past, use_cache=True)
                past = out.past_key_values
                ids = [int(self.model.lm_head(out.last_hidden_state[0, -1]).argmax())]
                output += ids
                arrivals.append((time.perf_counter(), len(output)))
        return Stream(arrivals, output, None)

    def writes(self) -> int:
        """Chunks that the last stream completed."""
        return next(iter(self.fast.values())).writes


def measure(loop: EagerLoop, job: EagerJob) -> dict[str, Any]:
    """All streams, one after the other."""
    reset_peaks()
    timings, outputs, writes = [], [], 0
    chunk = next(iter(loop.fast.values())).chunk
    for prompt, decode in zip(job.prompts, job.decode, strict=True):
        start = time.perf_counter()
        answer = loop.stream(prompt, decode)
        timings.append(timing([start], [answer]))
        outputs.append(answer.output)
        writes += loop.writes() - len(prompt) // chunk
    return {
        "trace": "eager",
        "timing": asdict(in_turn(timings)),
        "outputs": outputs,
        "peak_mib": peak_mib(),
        "state": {"decode_writes": writes},
        "planner": {"rows": sum(decode - 1 for decode in job.decode)},
    }


def work(job: EagerJob) -> dict[str, Any]:
    """Load the model, warm it up, run all streams `repeats` times."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    loop = EagerLoop(Path(job.model), job.dtype)
    loop.stream(job.prompts[0], min(*job.decode, WARMUP_TOKENS))
    return {"runs": [measure(loop, job) for _ in range(job.repeats)]}


def main() -> None:
    """Read the job, write the result; a failure leaves no result and a traceback in the log."""
    job = EagerJob(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(work(job)), encoding="utf-8")


if __name__ == "__main__":
    main()
