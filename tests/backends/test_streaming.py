"""What one owner's streaming state is to the others, to itself earlier, and to its readers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sgl_rwttt.backends.streaming import StreamingConfig
from sgl_rwttt.core import faults
from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.spans import ModeSpans
from tests.backends.streaming_rig import StreamingRig
from tests.golden_streaming import NAMES, StreamingCase, streaming_case

W, R = Effect.WRITE, Effect.READ
TOLERANCE = 1e-4


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest) -> StreamingCase:
    return streaming_case(request.param)


def assert_logits(got: Tensor, expected: Tensor, what: str = "") -> None:
    assert got.shape == expected.shape, what
    worst = (got - expected).abs().max().item()
    assert worst < TOLERANCE, f"{what}: off by {worst:.2e}"


def test_owners_at_different_offsets_in_one_batch(case: StreamingCase) -> None:
    """Guards: one offset for the whole batch; rows that meet another owner's page or state."""
    rig, tokens, expected = StreamingRig(case), case.input_ids, case.prefill[48]
    at = [1, 7, 15, 16, 31, 20]
    states = [rig.start() for _ in at]
    for state, n in zip(states, at, strict=True):
        rig.write(state, tokens[:n])
    for step in range(17):
        counts = [1 + (step + i) % 3 for i in range(len(at))]
        writes = [
            (s, tokens[n : min(n + c, 48)], W)
            for s, n, c in zip(states, at, counts, strict=True)
            if n < 48
        ]
        rows = iter(rig.forward(*writes, padding=step % 3))
        for i, n in enumerate(at):
            if n < 48:
                end = min(n + counts[i], 48)
                assert_logits(next(rows), expected[n:end], f"owner {i} at {n}")
                at[i] = end


def test_padding_is_no_evidence(case: StreamingCase) -> None:
    """Guards: rows of nobody that get a state, or that leave a row in somebody's tail."""
    rig, tokens = StreamingRig(case), case.input_ids
    state, twin = rig.start(), rig.start()
    rig.forward((state, tokens[:17], W), padding=5)
    rig.write(twin, tokens[:17])
    assert torch.equal(rig.write(state, tokens[17:40]), rig.write(twin, tokens[17:40]))


def test_a_read_token_is_answered_as_if_written_next(case: StreamingCase) -> None:
    """Guards: a frozen token that sees the state without itself, or at another offset."""
    rig, tokens, expected = StreamingRig(case), case.input_ids, case.prefill[48]
    state = rig.start()
    for n in range(40):
        assert_logits(rig.read(state, tokens[n : n + 1]), expected[n : n + 1], f"after {n}")
        rig.write(state, tokens[n : n + 1])


def test_read_tokens_leave_no_trace(case: StreamingCase) -> None:
    """Guards: evidence, convolution inputs or offsets of frozen tokens in later answers."""
    rig, tokens, expected = StreamingRig(case), case.input_ids, case.prefill[48]
    state = rig.start()
    modes = ModeSpans()
    mixed: list[int] = []
    kept: list[int] = []
    for n, token in enumerate(tokens[:48]):
        kept.append(len(mixed))
        mixed.append(token)
        modes.append(1, W)
        if n % 5 == 3:
            mixed += [1, 2, 3] * (1 + 7 * (n % 2))
            modes.append(len(mixed) - len(modes), R)
    at = 0
    rows = []
    for size in (1, 30, 2, 64, len(mixed)):
        part = mixed[at : at + size]
        rows.append(rig.forward((state, part, modes))[0])
        at += len(part)
    assert at == len(mixed)
    assert_logits(torch.cat(rows)[kept], expected, "write tokens")
    view = rig.store.view(state)
    assert (view.number, view.rows, view.position) == (3, 0, len(mixed))


def test_a_frozen_run_reads_one_state(case: StreamingCase) -> None:
    """Guards: frozen tokens that see each other, as one pass or as several."""
    rig, tokens = StreamingRig(case), case.input_ids
    state = rig.start()
    rig.write(state, tokens[:21])
    before = rig.store.view(state)
    together = rig.read(state, tokens[30:64])
    for i in (0, 1, 17, 33):
        assert_logits(together[i : i + 1], rig.read(state, tokens[30 + i : 31 + i]), f"token {i}")
    after = rig.store.view(state)
    assert (after.number, after.rows, after.version_id) == (
        before.number,
        before.rows,
        before.version_id,
    )
    assert_logits(rig.write(state, tokens[21:48]), case.prefill[48][21:], "after the frozen run")


@pytest.mark.parametrize("at", [3, 16, 21])
def test_fork(case: StreamingCase, at: int) -> None:
    """Guards: a tail that both branches fill."""
    rig, tokens, expected = StreamingRig(case), case.input_ids, case.prefill[48]
    state = rig.start()
    rig.write(state, tokens[:at])
    twin = rig.store.fork(state, "twin", "b")
    alone = rig.start()
    rig.write(alone, tokens[:at] + tokens[1:20])
    rig.write(state, tokens[1:20])
    for n in range(at, 48):
        assert_logits(rig.write(twin, [tokens[n]]), expected[n : n + 1], f"twin at {n}")
    assert_logits(rig.write(state, [5]), rig.write(alone, [5]), "the forked branch")


def test_restart_at_every_retained_point(case: StreamingCase) -> None:
    """Guards: a rollback into a mini-batch that takes the whole of its retained tail."""
    rig, tokens, expected = StreamingRig(case), case.input_ids, case.prefill[48]
    state = rig.start()
    rig.write(state, tokens[:43])
    rig.store.release(state)
    for depth in (16, 32, 33, 35, 42, 43):
        again = rig.start(tokens[:depth])
        assert again.clock.position == depth
        assert_logits(rig.write(again, tokens[depth:48]), expected[depth:], f"from {depth}")
        rig.store.release(again)
    lost = rig.start(tokens[:20])
    assert lost.clock.position == 20 or lost.clock.position == 16
    start = lost.clock.position
    assert_logits(rig.write(lost, tokens[start:48]), expected[start:], "from a lost tail")


def test_a_state_has_a_constant_size(case: StreamingCase) -> None:
    """Guards: pages or versions that a long context holds."""
    rig = StreamingRig(case, pages=8, bases=6)
    state = rig.start()
    held = []
    for step in range(30):
        rig.write(state, case.input_ids[:24])
        rig.store.flush()
        view = rig.store.view(state)
        assert view.pages == ()
        held.append((rig.store.stats()["pages_live"], rig.store.stats()["bases_live"], step % 2))
    assert len(set(held[2:])) == 2, held


def test_without_free_bases_the_state_is_a_chain(case: StreamingCase) -> None:
    """Guards: a version without a dense state, read, continued and folded later."""
    rig, tokens, expected = StreamingRig(case, bases=2), case.input_ids, case.prefill[48]
    first, second = rig.start(), rig.start()
    rig.write(first, tokens[:17])
    assert rig.store.view(first).base is not None
    rows = [rig.write(second, tokens[1:17] + tokens[:2])]
    assert rig.store.view(second).base is None
    alone = StreamingRig(case)
    state = alone.start()
    expected_rows = [alone.write(state, tokens[1:17] + tokens[:2])]
    for token in tokens[2:40]:
        rows.append(rig.write(second, [token]))
        expected_rows.append(alone.write(state, [token]))
    assert_logits(torch.cat(rows), torch.cat(expected_rows), "chain")
    assert_logits(rig.write(first, tokens[17:48]), expected[17:], "the one with a base")


def test_an_owner_that_is_not_finite_fails_alone(case: StreamingCase) -> None:
    """Guards: a spoilt state that is committed, and bits of the others that it changes."""
    results = []
    for spoil in (False, True):
        rig, tokens = StreamingRig(case), case.input_ids
        states = [rig.start() for _ in range(3)]
        writes = [(s, tokens[i : i + 15], W) for i, s in enumerate(states)]
        rig.forward(*writes)
        if spoil:
            page = rig.store.view(states[1]).tail_page
            rig.backend.K[0, page * 16 + 3, 0] = torch.nan
        last = [(s, [tokens[40]], W) for s in states]
        candidates = rig.begin(last)
        plan, logits = rig.run(candidates, last)
        good = rig.settle(plan, candidates)
        assert good == [True, not spoil, True]
        views = [rig.store.view(s) for s in states]
        assert [v.number for v in views] == [1, int(not spoil), 1]
        after = [rig.write(states[i], tokens[:5]) for i in (0, 2)]
        results.append((logits[0], logits[2], *after))
    for plain, beside in zip(*results, strict=True):
        assert torch.equal(plain, beside)


@pytest.mark.parametrize("fold_pages", [1, 2, 0], ids=["dense", "mixed", "chain"])
def test_export_and_restore(case: StreamingCase, fold_pages: int) -> None:
    """Guards: a version that comes back without its convolution inputs."""
    rig, tokens = StreamingRig(case, fold_pages=fold_pages), case.input_ids
    state = rig.start()
    rig.write(state, tokens[:48])
    view = rig.store.view(state)
    saved = rig.backend.export(view)
    layout = rig.backend.layout(len(view.pages), view.base is not None)
    assert {k: (v.dtype, tuple(v.shape)) for k, v in saved.items()} == layout
    slots = [view.base] if view.base is not None else []
    for slot in slots:
        rig.backend.poison_base(slot)
    for page in view.pages:
        rig.backend.poison(page)
    rig.backend.restore(saved, view.base, view.pages)
    fresh = StreamingRig(case)
    other = fresh.start()
    fresh.write(other, tokens[:48])
    assert_logits(rig.write(state, tokens[:20]), fresh.write(other, tokens[:20]))
    bad = {name: value[:1] for name, value in saved.items()}
    with pytest.raises(ValueError, match=r"not \(torch.float32"):
        rig.backend.restore(bad, view.base, view.pages)


def test_steps_that_are_refused(case: StreamingCase) -> None:
    """Guards: a layer that runs twice, a step that ends before its layers or twice."""
    rig = StreamingRig(case)
    writes = [(rig.start(), case.input_ids[:4], W)]
    candidates = rig.begin(writes)
    plan = rig.backend.begin_step([c.segment for c in candidates])
    with pytest.raises(RuntimeError, match=r"\[0, 1\] did not run"):
        rig.backend.finish_step(plan)
    plan, _ = rig.run(candidates, writes)
    with pytest.raises(RuntimeError, match="ran twice"):
        rig.backend.recent(plan, 0, 0, torch.zeros(4, 32))
    rig.settle(plan, candidates)
    with pytest.raises(RuntimeError, match="ran already"):
        rig.backend.finish_step(plan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ttt_layer_type": "mlp"}, "ttt_layer_type is 'mlp'; allowed: 'linear'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"mini_batch_size": 0}, "mini_batch_size is 0"),
        ({"mini_batch_size": 2}, "conv_kernel is 4; allowed: at most mini_batch_size"),
        ({"ttt_base_lr": float("nan")}, "ttt_base_lr is nan"),
        ({"num_attention_heads": 3}, "num_attention_heads is 3"),
        ({"share_qk": 1}, "share_qk is 1"),
    ],
)
def test_configurations_that_are_refused(change: dict[str, object], message: str) -> None:
    """Guards: a checkpoint that is served by another rule than its own."""
    config = streaming_case("ttt_linear_full").config
    with pytest.raises(ValueError, match=message):
        StreamingConfig.from_hf({**config, **change})


@pytest.mark.parametrize(
    ("point", "action", "spoilt", "times", "failed"),
    [
        ("write.batch", faults.raising(RuntimeError("x")), None, 1, []),
        ("write.batch", faults.raising(RuntimeError("x")), None, 2, [0]),
        ("write.candidate", faults.not_finite, 1, 1, []),
        ("write.candidate", faults.not_finite, 1, 2, [1]),
    ],
    ids=["raises once", "raises twice", "not finite once", "not finite twice"],
)
def test_a_write_that_fails_is_tried_alone(
    case: StreamingCase,
    point: str,
    action: faults.Action,
    spoilt: int | None,
    times: int,
    failed: list[int],
) -> None:
    """Guards: one owner's failed write that ends the others, or a tail that it costs."""
    rig, tokens = StreamingRig(case), case.input_ids
    states = [rig.start() for _ in range(3)]
    rig.forward(*((s, tokens[i : i + 15], W) for i, s in enumerate(states)))
    last = [(s, [tokens[40]], W) for s in states]
    candidates = rig.begin(last)
    plan, _ = rig.run(candidates, last)
    page = None if spoilt is None else candidates[spoilt].blocks[0].page
    with faults.armed(point, action, when=lambda c: page in (None, c.get("page")), times=times):
        good = rig.settle(plan, candidates)
    assert [i for i, ok in enumerate(good) if not ok] == failed
    assert plan.retried > 0
    alone = StreamingRig(case)
    for i, state in enumerate(states):
        if not good[i]:
            assert rig.store.view(state).rows == 15
            rig.write(state, [tokens[40]])
        twin = alone.start()
        alone.write(twin, tokens[i : i + 15])
        alone.write(twin, [tokens[40]])
        assert_logits(rig.write(state, tokens[:9]), alone.write(twin, tokens[:9]), f"owner {i}")
