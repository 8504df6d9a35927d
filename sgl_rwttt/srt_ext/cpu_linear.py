"""Linear layers of a decode step on the CPU: products of few rows.

y = x W^T of few rows is computed as (W x^T)^T, with the weight as the tall left factor. The BLAS
library in torch then reads a weight for 2 to 4 rows nearly as fast as for one, and shares the work
of up to 64 rows better among threads; as x W^T, two rows take twice as long as one.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from torch import Tensor, nn

MOST_ROWS = 64  # with several threads; beyond, both forms take the same time
MOST_ROWS_ALONE = 4  # with one thread


def is_few(rows: int) -> bool:
    """Whether so many rows are multiplied faster this way; one row is a product of its own kind."""
    return 1 < rows <= (MOST_ROWS if torch.get_num_threads() > 1 else MOST_ROWS_ALONE)


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, K] times weight [N, K] transposed, plus bias [N]; contiguous [rows, N].

    Equal to torch.nn.functional.linear up to the order of summation.
    """
    if x.dim() != 2 or not is_few(x.shape[0]):
        return nn.functional.linear(x, weight, bias)
    product = torch.mm(weight, x.t()).t().contiguous()
    return product if bias is None else product.add_(bias)


class FewRowsLinearMethod(UnquantizedLinearMethod):
    """SGLang's linear method with `few_rows_linear`."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return few_rows_linear(x, layer.weight, bias)


class FewRowsEmbeddingMethod(UnquantizedEmbeddingMethod):
    """The same for a vocabulary: its product is the logits, its lookup is stock."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return few_rows_linear(x.to(layer.weight.dtype), layer.weight, bias)


_METHODS: dict[type, type] = {
    UnquantizedLinearMethod: FewRowsLinearMethod,
    UnquantizedEmbeddingMethod: FewRowsEmbeddingMethod,
}


def use_few_rows(model: Any) -> int:
    """Give every plain float32 weight on the CPU the methods above; how many got one.

    Layers with a quantized, packed or other method, and other dtypes, are left as they are.
    """
    found = 0
    for module in model.modules():
        method = _METHODS.get(type(getattr(module, "quant_method", None)))
        weight = getattr(module, "weight", None)
        if method is None or weight is None or getattr(module, "use_intel_amx_backend", False):
            continue
        if weight.dtype == torch.float32 and weight.device.type == "cpu":
            module.quant_method = method()
            found += 1
    return found
