"""The backend rwttt_cpu against SGLang's torch_native on the same pools; its name and limits."""

from __future__ import annotations

import argparse
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_rwttt.srt_ext import attention, plugin
from sgl_rwttt.srt_ext.attention import CPU_ATTENTION, refuse_misuse, register_attention
from sgl_rwttt.srt_ext.launch import has_cuda, prepare_environment
from sgl_rwttt.srt_ext.refusals import RefusedFlag
from tests.assert_close import assert_close

pytestmark = pytest.mark.slow
HEADS, KV_HEADS, SIZE, LAYER = 6, 2, 16, 1
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}


@pytest.fixture(scope="module", autouse=True)
def _sglang() -> None:
    prepare_environment()


class Rig:
    """Both backends over one KV pool whose free slots are NaN, and one table of rows."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        from sgl_rwttt.srt_ext.cpu_attention import CPUAttnBackend

        torch.manual_seed(0)
        self.dtype = dtype
        self.pool = MHATokenToKVPool(400, 1, dtype, KV_HEADS, SIZE, 2, "cpu", False)
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.fill_(torch.nan)
        self.table = torch.randint(1, 401, (8, 128), dtype=torch.int32)  # stale entries
        runner = SimpleNamespace(
            device="cpu",
            token_to_kv_pool=self.pool,
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
        )
        self.ours, self.stock = CPUAttnBackend(runner), TorchNativeAttnBackend(runner)
        self.free = torch.randperm(400) + 1

    def give(self, row: int, first: int, count: int) -> torch.Tensor:
        """Free slots for tokens first.. of a row."""
        slots, self.free = self.free[:count], self.free[count:]
        self.table[row, first : first + count] = slots.int()
        return slots

    def fill(self, row: int, count: int) -> None:
        """Give a row ``count`` tokens of KV."""
        slots = self.give(row, 0, count)
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer[slots] = torch.randn(count, KV_HEADS, SIZE).to(self.dtype)

    def qkv(self, tokens: int) -> list[torch.Tensor]:
        return [
            torch.randn(tokens, heads * SIZE).to(self.dtype).view(tokens, *shape)
            for heads, shape in (
                (HEADS, (HEADS * SIZE,)),
                (KV_HEADS, (KV_HEADS, SIZE)),
                (KV_HEADS, (KV_HEADS, SIZE)),
            )
        ]

    def both(self, batch: Any, layer: Any, extend: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Ours, then stock, on the same input."""
        tokens = len(batch.out_cache_loc)
        q, k, v = self.qkv(tokens)
        results = []
        for backend in (self.ours, self.stock):
            backend.init_forward_metadata(batch)
            call = backend.forward_extend if extend else backend.forward_decode
            results.append(call(q, k, v, layer, batch))
        return results[0], results[1]


def layer_with(**changes: Any) -> Any:
    from sglang.srt.layers.radix_attention import RadixAttention

    layer = RadixAttention(HEADS, SIZE, 0.25, KV_HEADS, LAYER)
    for name, value in changes.items():
        setattr(layer, name, value)
    return layer


def batch_of(rig: Rig, prefixes: dict[int, int], counts: dict[int, int] | None) -> Any:
    """A decode batch (one token each) or, with ``counts``, a prefill after ``prefixes``."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    new = counts or dict.fromkeys(prefixes, 1)
    slots = [rig.give(row, before, new[row]) for row, before in prefixes.items()]
    lengths = torch.tensor([before + new[row] for row, before in prefixes.items()])
    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND if counts else ForwardMode.DECODE,
        req_pool_indices=torch.tensor(list(prefixes)),
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        extend_prefix_lens=torch.tensor(list(prefixes.values())) if counts else None,
        extend_seq_lens=torch.tensor([new[row] for row in prefixes]) if counts else None,
        out_cache_loc=torch.cat(slots),
        encoder_out_cache_loc=torch.cat(slots),
        encoder_lens=None,
        spec_info=None,
    )


def is_ours(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records which kernels run."""
    ran: list[str] = []

    def record(owner: Any, attribute: str, name: str) -> None:
        run = getattr(owner, attribute)
        monkeypatch.setattr(owner, attribute, lambda *args: (ran.append(name), run(*args))[1])

    record(rig.ours._decode, "run", "_decode")
    record(rig.ours, "_extend", "_extend")
    return ran


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_decode_is_torch_native(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: another answer than stock, a token that is not stored, poison read from free KV."""
    rig = Rig(dtype)
    ran = is_ours(rig, monkeypatch)
    prefixes = {5: 40, 2: 1, 7: 90, 3: 17}
    for row, count in prefixes.items():
        rig.fill(row, count)
    for step in range(3):
        batch = batch_of(rig, {row: n + step for row, n in prefixes.items()}, None)
        for _ in range(2):  # two layers under one plan
            ours, stock = rig.both(batch, layer_with(), extend=False)
            assert ours.shape == stock.shape == (4, HEADS * SIZE)
            assert_close(ours, stock, TOLERANCE[dtype])
    assert ran == ["_decode"] * 6


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_extend_is_torch_native(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: prefill after a prefix hit, without one, and of a single token."""
    rig = Rig(dtype)
    ran = is_ours(rig, monkeypatch)
    prefixes = {5: 40, 2: 0, 7: 60, 3: 17}
    for row, count in prefixes.items():
        if count:
            rig.fill(row, count)
    batch = batch_of(rig, prefixes, {5: 8, 2: 30, 7: 1, 3: 17})
    ours, stock = rig.both(batch, layer_with(), extend=True)
    assert_close(ours, stock, TOLERANCE[dtype])
    assert ran == ["_extend"] * 4


STOCK_LAYERS = {
    "sliding window": {"sliding_window_size": 5},
    "soft cap": {"logit_cap": 30.0},
    "cross attention": {"is_cross_attention": True},
}


@pytest.mark.parametrize("extend", [False, True], ids=["decode", "extend"])
@pytest.mark.parametrize("changes", STOCK_LAYERS.values(), ids=STOCK_LAYERS)
def test_what_we_do_not_compute_is_stock(
    changes: dict[str, Any], extend: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: an option of a layer that is silently dropped."""
    rig = Rig()
    ran = is_ours(rig, monkeypatch)
    rig.fill(1, 30)
    batch = batch_of(rig, {1: 30}, {1: 4} if extend else None)
    if "is_cross_attention" in changes:
        batch.encoder_lens = torch.tensor([30])
    ours, stock = rig.both(batch, layer_with(**changes), extend)
    assert torch.equal(ours, stock)
    assert ran == []


def test_an_encoder_is_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: bidirectional attention computed causally."""
    from sglang.srt.layers.radix_attention import AttentionType

    rig = Rig()
    ran = is_ours(rig, monkeypatch)
    batch = batch_of(rig, {1: 0}, {1: 9})
    ours, stock = rig.both(batch, layer_with(attn_type=AttentionType.ENCODER_ONLY), extend=True)
    assert torch.equal(ours, stock)
    assert ran == []


def test_a_plan_serves_only_its_batch() -> None:
    """Guards: the plan of one batch used for another, or for a part of it."""
    rig = Rig()
    for row, count in {1: 30, 2: 5}.items():
        rig.fill(row, count)
    first, second = batch_of(rig, {1: 30}, None), batch_of(rig, {2: 5}, None)
    q, k, v = rig.qkv(1)
    rig.ours.init_forward_metadata(first)
    ours = rig.ours.forward_decode(q, k, v, layer_with(), second)
    rig.stock.init_forward_metadata(second)
    assert_close(ours, rig.stock.forward_decode(q, k, v, layer_with(), second))


def config(**changes: Any) -> Any:
    plain = {
        "attention_backend": None,
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "device": "cpu",
        "page_size": 1,
    }
    return SimpleNamespace(**{**plain, **changes})


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"attention_backend": CPU_ATTENTION, "device": "cuda"}, "--attention-backend.*'cuda'"),
        ({"decode_attention_backend": CPU_ATTENTION, "page_size": 16}, "--decode-.*--page-size"),
    ],
)
def test_misuse_is_named(changes: dict[str, Any], named: str) -> None:
    """Guards: CPU attention on another device, or a Triton kernel launched on CPU tensors."""
    with pytest.raises(RefusedFlag, match=named):
        refuse_misuse(config(**changes))


def test_a_process_that_sees_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: SGLang's Triton helpers launched on CPU tensors; only torch_native turns them off."""
    monkeypatch.setattr(attention, "_launches_triton", lambda: True)
    assert attention.default_attention() == "torch_native"
    with pytest.raises(RefusedFlag, match="torch_native"):
        refuse_misuse(config(attention_backend=CPU_ATTENTION))
    refuse_misuse(config(attention_backend="triton", device="cuda", page_size=16))


@pytest.mark.skipif(has_cuda(), reason="the default of a machine without a GPU")
def test_use_on_the_cpu_is_accepted() -> None:
    """Guards: refusing what is verified."""
    refuse_misuse(config(attention_backend=CPU_ATTENTION))
    refuse_misuse(config(decode_attention_backend=CPU_ATTENTION, page_size=None))
    assert attention.default_attention() == CPU_ATTENTION


def test_the_command_line_knows_the_name() -> None:
    """Guards: argparse refusing the name before the plugin's class is ever asked."""
    from sglang.srt.server_args import ServerArgs

    register_attention()
    register_attention()
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    flags = ["--model-path", "x", "--attention-backend", CPU_ATTENTION]
    assert parser.parse_args(flags).attention_backend == CPU_ATTENTION
    actions = {action.dest: action for action in parser._actions}
    assert list(actions["attention_backend"].choices or ()).count(CPU_ATTENTION) == 1


def test_only_a_scheduler_process_gets_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a registration that hangs on a TTT checkpoint, or slows every process down."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    monkeypatch.setitem(sys.modules, "sglang.srt.managers.scheduler", object())
    monkeypatch.delitem(ATTENTION_BACKENDS, CPU_ATTENTION, raising=False)
    monkeypatch.delenv(plugin.ENV_ACTIVE, raising=False)
    register_attention()
    assert CPU_ATTENTION not in ATTENTION_BACKENDS
    monkeypatch.setattr(attention.multiprocessing, "parent_process", lambda: object())
    register_attention()
    assert CPU_ATTENTION in ATTENTION_BACKENDS
    monkeypatch.delitem(ATTENTION_BACKENDS, CPU_ATTENTION)
