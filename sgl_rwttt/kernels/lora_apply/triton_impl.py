"""LoRA READ on the GPU: the kernels of the page READ, with adapters as pages of r rows."""

from __future__ import annotations

from torch import Tensor

from sgl_rwttt.kernels.apply_state.plan import ReadPlan
from sgl_rwttt.kernels.apply_state.tables import make_tables
from sgl_rwttt.kernels.apply_state.triton_impl import add_pages
from sgl_rwttt.kernels.lora_apply.torch_impl import check_rank


def lora_apply(h: Tensor, out: Tensor, plan: ReadPlan, A: Tensor, B: Tensor, scale: float) -> None:
    """As ``torch_impl.lora_apply``; h A^T of 16-bit pools is rounded to 16 bits."""
    check_rank(plan, A, B)
    for launch in plan.prepared(make_tables).launches:
        add_pages(h, out, launch, A, B.transpose(1, 2), scale)
