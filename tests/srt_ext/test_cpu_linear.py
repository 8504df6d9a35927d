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
    """What torch says of its threads; which form a product has depends on it."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    return int(request.param)


@pytest.fixture(params=[True, False], ids=["compiled", "torch"])
def with_jit(request: pytest.FixtureRequest, cpu_linear: Any, monkeypatch: Any) -> bool:
    """Whether compiled kernels run on this platform."""
    if not request.param:
        monkeypatch.setattr(cpu_linear, "compiled", lambda folder: None)
    return bool(request.param)


def test_which_form(
    cpu_linear: Any, threads: int, with_jit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a number of rows with a form that is slower for it than torch's own product."""
    from sgl_rwttt.kernels.few_rows import jit_impl, torch_impl

    asked: list[str] = []

    def form(name: str, module: Any) -> None:
        original = module.few_rows
        monkeypatch.setattr(module, "few_rows", lambda *a: (asked.append(name), original(*a))[1])

    form("compiled", jit_impl)
    form("transposed", torch_impl)
    found: dict[int, str] = {}
    for rows in range(100):
        asked.clear()
        cpu_linear.few_rows_linear(torch.randn(rows, 8), torch.randn(8, 8))
        found[rows] = asked[0] if asked else "plain"
    most = 4 if threads == 1 else 64
    expected = {rows: "transposed" if 1 < rows <= most else "plain" for rows in range(100)}
    if with_jit:
        expected |= dict.fromkeys(range(1, 33), "compiled")
    assert found == expected


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 17, 32, 33, 64, 65])
def test_product(cpu_linear: Any, threads: int, with_jit: bool, rows: int, bias: bool) -> None:
    """Guards: a product that is transposed, not contiguous, or reads rows that are not there."""
    torch.manual_seed(rows)
    stored = torch.full((rows + 1, 24), torch.nan)  # the row past the end is poison
    x = stored[:rows].copy_(torch.randn(rows, 24))
    weight, shift = torch.randn(40, 24), torch.randn(40) if bias else None
    expected = x.double() @ weight.double().T + (0 if shift is None else shift.double())
    out = cpu_linear.few_rows_linear(x, weight, shift)
    assert out.is_contiguous() and out.dtype == torch.float32
    assert_close(out, expected, 1e-6)


@pytest.mark.parametrize("outputs", [1, 7, 31, 33, 100])
@pytest.mark.parametrize("width", [1, 7, 8, 63, 129, 576])
@pytest.mark.parametrize("rows", [1, 3, 8, 13])
def test_odd_shapes(cpu_linear: Any, outputs: int, width: int, rows: int) -> None:
    """Guards: a rest of a block, or of a vector, that is left out."""
    torch.manual_seed(rows)
    weight = torch.full((outputs + 1, width), torch.nan)[:outputs].copy_(
        torch.randn(outputs, width)
    )
    x = torch.randn(rows, width)
    out = cpu_linear.few_rows_linear(x, weight)
    assert_close(out, x.double() @ weight.double().T, 1e-6)


def test_rows_do_not_meet(cpu_linear: Any) -> None:
    """Guards: NaN of one stream in another's row."""
    x = torch.randn(4, 24)
    x[2] = torch.nan
    out = cpu_linear.few_rows_linear(x, torch.randn(40, 24))
    assert out.isnan().any(1).tolist() == [False, False, True, False]


def test_other_shapes_are_left_to_torch(cpu_linear: Any) -> None:
    """Guards: a batch of sequences, or a column view, that is misread."""
    weight = torch.randn(40, 24)
    strided = torch.randn(40, 48)[:, ::2]
    for x in (torch.randn(2, 3, 24), torch.randn(24, 4).T, torch.randn(24), torch.randn(3, 24)):
        for w in (weight, torch.randn(24, 40).T, strided):
            expected = x.double() @ w.double().T
            assert_close(cpu_linear.few_rows_linear(x, w), expected, 1e-6)


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
