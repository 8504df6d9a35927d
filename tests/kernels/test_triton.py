"""The Triton kernels in Triton's interpreter, and whether they compile for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_rwttt.kernels.apply_state.plan import ReadPart, plan_read
from sgl_rwttt.kernels.lora_apply.plan import plan_lora
from sgl_rwttt.kernels.tail_append.plan import plan_append

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SHARED_MEMORY = 227 * 1024  # bytes of one block on Hopper


def test_in_the_interpreter() -> None:
    """Guards: the kernels; see ``on_triton`` for what each of its tests guards."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    folder = Path(__file__).with_name("on_triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


def test_torch_path_needs_no_triton() -> None:
    """Guards: an import of Triton on a machine that has none, or of SGLang anywhere here."""
    code = """
import sys
sys.modules["triton"] = sys.modules["sglang"] = None
from sgl_rwttt.kernels import kernel
from sgl_rwttt.kernels.dispatch import operations
print(len([kernel(name) for name in operations()]) > 5)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def _read(dtype: torch.dtype) -> None:
    from sgl_rwttt.kernels.apply_state.triton_impl import apply_state

    h, H, V = (torch.empty(rows, w, dtype=dtype) for rows, w in ((64, 768), (320, 768), (320, 256)))
    D, out = torch.empty(2, 256, 768), torch.empty(64, 256)
    for part in (ReadPart(0, 1, 1, (1, 2)), ReadPart(0, 40, None, (1, 2))):
        apply_state(h, out, plan_read([[part]], 32, CPU), H, V, D)


def _lora(dtype: torch.dtype) -> None:
    from sgl_rwttt.kernels.lora_apply.triton_impl import lora_apply

    A, B = torch.empty(4, 16, 256, dtype=dtype), torch.empty(4, 768, 16, dtype=dtype)
    h, out = torch.empty(3, 256, dtype=dtype), torch.empty(3, 768)
    lora_apply(h, out, plan_lora([1, 0, 2], 16, CPU), A, B, 0.5)


def _boundary(dtype: torch.dtype) -> None:
    from sgl_rwttt.kernels.boundary_update.triton_impl import boundary_update

    T, conv = torch.empty(4, 32, 256, dtype=dtype), torch.empty(256, 5, dtype=dtype)
    boundary_update(T, conv, torch.empty(256, 256, dtype=dtype), 0.1)


def _fold(dtype: torch.dtype) -> None:
    from sgl_rwttt.kernels.dense_update.triton_impl import dense_update

    H, V = torch.empty(96, 768, dtype=dtype), torch.empty(96, 256, dtype=dtype)
    dense_update(torch.empty(2, 256, 768), 0, 1, [(32, 96)], H, V)


def _move(dtype: torch.dtype) -> None:
    from sgl_rwttt.kernels.selective_commit.triton_impl import selective_commit
    from sgl_rwttt.kernels.tail_append.triton_impl import tail_append

    pool, slots = torch.empty(4, 16, 256, dtype=dtype), torch.tensor([1, 2])
    selective_commit(pool, pool, slots, slots + 1, torch.tensor([True, False]))
    t, rows = torch.empty(8, 256), pool.flatten(0, 1)
    tail_append(t.to(dtype), t, rows, rows, plan_append([(0, 5, 1), (3, 9, 1)], CPU))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs the compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("launch", [_read, _lora, _boundary, _fold, _move])
def test_compiles_for_hopper(launch: Any, dtype: torch.dtype) -> None:
    """Guards: what the interpreter allows and the compiler does not; tiles that do not fit."""
    pytest.importorskip("triton")
    from tests.kernels.offline import compiled

    with compiled() as kernels:
        launch(dtype)
    assert kernels
    for name, binary in kernels:
        assert binary.metadata.shared <= SHARED_MEMORY, name
        if "move" not in name and "taps" not in name:
            assert "mma" in binary.asm["ptx"], f"{name} multiplies without the tensor cores"
