"""Products of few rows on the CPU against float64, and which layers get them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sgl_rwttt.srt_ext.launch import prepare_environment
from tests.assert_close import assert_close

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cpu_linear() -> Any:
    prepare_environment()
    from sgl_rwttt.srt_ext import cpu_linear

    return cpu_linear


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """What torch says of its threads; how many rows are few depends on it."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    return int(request.param)


def test_how_many_are_few(cpu_linear: Any, threads: int) -> None:
    """Guards: eight rows of one thread, which take longer the other way round."""
    few = [rows for rows in range(100) if cpu_linear.is_few(rows)]
    assert few == list(range(2, 5 if threads == 1 else 65))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 17, 64, 65])
def test_product(cpu_linear: Any, threads: int, rows: int, bias: bool) -> None:
    """Guards: a product that is transposed, not contiguous, or reads rows that are not there."""
    torch.manual_seed(rows)
    stored = torch.full((rows + 1, 24), torch.nan)  # the row past the end is poison
    x = stored[:rows].copy_(torch.randn(rows, 24))
    weight, shift = torch.randn(40, 24), torch.randn(40) if bias else None
    expected = x.double() @ weight.double().T + (0 if shift is None else shift.double())
    out = cpu_linear.few_rows_linear(x, weight, shift)
    assert out.is_contiguous() and out.dtype == torch.float32
    assert_close(out, expected, 1e-6)


def test_rows_do_not_meet(cpu_linear: Any) -> None:
    """Guards: NaN of one stream in another's row."""
    x = torch.randn(4, 24)
    x[2] = torch.nan
    out = cpu_linear.few_rows_linear(x, torch.randn(40, 24))
    assert out.isnan().any(1).tolist() == [False, False, True, False]


def test_other_shapes_are_left_to_torch(cpu_linear: Any) -> None:
    """Guards: a batch of sequences, or a column view, that is misread."""
    weight = torch.randn(40, 24)
    for x in (torch.randn(2, 3, 24), torch.randn(24, 4).T, torch.randn(24)):
        expected = x.double() @ weight.double().T
        assert_close(cpu_linear.few_rows_linear(x, weight), expected, 1e-6)


def layer(method: Any, dtype: torch.dtype = torch.float32, **more: Any) -> nn.Module:
    made = nn.Linear(4, 4, bias=False, dtype=dtype)
    made.quant_method = method
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_which_layers(cpu_linear: Any) -> None:
    """Guards: a quantized or packed weight multiplied as if it were plain, a layer forgotten."""
    from sglang.srt.layers.quantization.unquant import (
        UnquantizedEmbeddingMethod,
        UnquantizedLinearMethod,
    )

    class Other(UnquantizedLinearMethod):
        pass

    plain, packed, half, other = (
        layer(UnquantizedLinearMethod()),
        layer(UnquantizedLinearMethod(), use_intel_amx_backend=True),
        layer(UnquantizedLinearMethod(), torch.bfloat16),
        layer(Other()),
    )
    vocabulary = layer(UnquantizedEmbeddingMethod())
    model = nn.ModuleList([plain, packed, half, other, vocabulary, nn.Linear(4, 4)])
    before = [module.quant_method for module in (packed, half, other)]
    assert cpu_linear.use_few_rows(model) == 2
    assert type(plain.quant_method) is cpu_linear.FewRowsLinearMethod
    assert type(vocabulary.quant_method) is cpu_linear.FewRowsEmbeddingMethod
    assert [module.quant_method for module in (packed, half, other)] == before
    x = torch.randn(3, 4)
    for module in (plain, vocabulary):
        found = module.quant_method.apply(module, x)
        assert_close(found, x.double() @ module.weight.double().T, 1e-6)


def test_logits_take_it(cpu_linear: Any) -> None:
    """Guards: an SGLang that multiplies by the vocabulary without asking its method."""
    from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method

    method = cpu_linear.FewRowsEmbeddingMethod()
    assert should_apply_lm_head_quant_method(layer(method), method)


def test_the_backend_brings_it(cpu_linear: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a CPU server whose streams share a step that costs as much as their own."""
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    from sgl_rwttt.srt_ext import attention, cpu_attention

    monkeypatch.setattr(cpu_attention, "CPUAttnBackend", lambda runner: runner)
    model = nn.ModuleList([layer(UnquantizedLinearMethod())])
    attention._create(SimpleNamespace(model=model))
    assert type(model[0].quant_method) is cpu_linear.FewRowsLinearMethod
