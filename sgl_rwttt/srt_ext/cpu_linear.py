"""Linear layers of a decode step on the CPU: products of few rows (`kernels/few_rows`)."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from torch import Tensor, nn

from sgl_rwttt.kernels.dispatch import compiled
from sgl_rwttt.kernels.few_rows import torch_impl

# up to how many rows a form is as fast as torch's own product or faster
MOST_COMPILED = 32
MOST_TRANSPOSED = 64  # with several threads
MOST_TRANSPOSED_ALONE = 4  # with one


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, K] times weight [N, K] transposed, plus bias [N]; contiguous [rows, N].

    Equal to torch.nn.functional.linear up to the order of summation.
    """
    product = _product_of(x, weight)
    if product is None:
        return nn.functional.linear(x, weight, bias)
    return product if bias is None else product.add_(bias)


def _product_of(x: Tensor, weight: Tensor) -> Tensor | None:
    if x.dim() != 2 or not x.shape[0]:
        return None
    rows = x.shape[0]
    jit = compiled("few_rows")
    if jit is not None and rows <= MOST_COMPILED and weight.is_contiguous():
        product: Tensor = jit.few_rows(x, weight)
        return product
    most = MOST_TRANSPOSED if torch.get_num_threads() > 1 else MOST_TRANSPOSED_ALONE
    return torch_impl.few_rows(x, weight) if 1 < rows <= most else None


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
    if (jit := compiled("few_rows")) is not None:
        jit.kernel.compile()
    for module in model.modules():
        method = _METHODS.get(type(getattr(module, "quant_method", None)))
        weight = getattr(module, "weight", None)
        if method is None or weight is None or getattr(module, "use_intel_amx_backend", False):
            continue
        if weight.dtype == torch.float32 and weight.device.type == "cpu":
            module.quant_method = method()
            found += 1
    return found
