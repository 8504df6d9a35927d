"""Writes of the in-place backend that fail, and what the others notice."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from sgl_rwttt.backends.in_place import InPlaceBackend
from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.owners import OwnerState
from sgl_rwttt.core.segment import BlockPart, Segment
from tests.assert_close import assert_close
from tests.backends.in_place_rig import Rig, some_tokens

WRITE = Effect.WRITE
OWNERS = 4
BAD = 1


def at_the_boundary(owners: range = range(OWNERS)) -> tuple[Rig, list[OwnerState]]:
    """Owners with two chunks each and all but the last token of a third."""
    rig = Rig(4, d_model=63, d_ff=100, seed=5)
    states = [rig.start(f"o{i}") for i in owners]
    for i, state in zip(owners, states, strict=True):
        rig.write(state, some_tokens(11, i))
    return rig, states


def last_token(owner: int) -> list[int]:
    return some_tokens(12, owner)[11:]


def weights(rig: Rig, state: OwnerState) -> list[Tensor]:
    """The version's V rows: exact, not a sum."""
    return [rig.backend.export(state.version)["V"][slot] for slot in range(2)]


@pytest.mark.parametrize("which", ["h", "t"])
def test_nan_in_one_owner(which: str) -> None:
    """One owner's NaN that stops or changes the others' commits, or that is committed itself."""
    rig, states = at_the_boundary()
    tokens = [last_token(i) for i in range(OWNERS)]
    candidates = rig.begin([(s, t, WRITE) for s, t in zip(states, tokens, strict=True)])
    plan, good, deltas = rig.run(candidates, tokens, spoil={BAD: which})
    assert good == [i != BAD for i in range(OWNERS)]
    assert plan.written_pages(BAD) == () and len(plan.written_pages(0)) == 1
    rig.settle(plan, good, candidates)

    healthy, twins = at_the_boundary()
    same = healthy.forward([(s, t, WRITE) for s, t in zip(twins, tokens, strict=True)])
    others = [i for i in range(OWNERS) if i != BAD]
    for i in others:
        assert torch.equal(deltas[i], same[i])
        for a, b in zip(weights(rig, states[i]), weights(healthy, twins[i]), strict=True):
            assert torch.equal(a, b)

    assert states[BAD].version.number == 2 and states[BAD].clock.rows == 3
    rig.write(states[BAD], tokens[BAD])
    tokens_after = [*some_tokens(12, BAD), 3]
    found = rig.write(states[BAD], [3])
    assert_close(found, rig.expected(tokens_after)[:, -1:], 2e-5)


def test_batch_independence() -> None:
    """V rows that depend, in the last bit, on who else is at a boundary."""
    rig, states = at_the_boundary()
    rig.forward([(s, last_token(i), WRITE) for i, s in enumerate(states)])
    for i in range(OWNERS):
        alone, (state,) = at_the_boundary(range(i, i + 1))
        alone.write(state, last_token(i))
        for a, b in zip(weights(rig, states[i]), weights(alone, state), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("which", ["h", "t"])
@pytest.mark.parametrize("fold", [0, 1])
def test_nan_inside_a_prefill(which: str, fold: int) -> None:
    """A block completed inside the layer that is committed without having been checked."""
    rig = Rig(4, fold)
    states = [rig.start("a"), rig.start("b")]
    first = [some_tokens(8, i) for i in range(2)]
    candidates = rig.begin([(s, [*t, 0, 1], WRITE) for s, t in zip(states, first, strict=True)])
    tokens = [[*t, 0, 1] for t in first]
    table = rig.h if which == "h" else rig.t
    clean = table.clone()
    spoiled = next(t for t in first[0] if t not in tokens[1])
    table[1, spoiled] = torch.inf
    plan, good, deltas = rig.run(candidates, tokens)
    table.copy_(clean)
    assert good == [False, True] and plan.written_pages(0) == ()
    rig.settle(plan, good, candidates)
    assert_close(deltas[1], rig.expected(tokens[1]), 2e-5)
    assert states[0].version.number == 0 and states[0].tail is None


@pytest.mark.parametrize("tokens", [[7, 7, 7, 7], [7, 7, 7, 7, 1]], ids=["deferred", "inner"])
def test_a_sum_that_overflows_is_finite(tokens: list[int]) -> None:
    """Large but finite evidence that the cheap check takes for a failure."""
    rig = Rig(4)
    rig.h[:, 7] = 3e38
    candidates = rig.begin([(rig.start("a"), tokens, WRITE)])
    _, good, _ = rig.run(candidates, [tokens])
    assert good == [True]


def test_batch_failure_is_retried_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in the group that ends every owner in it."""
    rig, states = at_the_boundary()
    original, calls = rig.backend._boundary, []

    def fails_in_company(T: Tensor, *rest: object) -> Tensor:
        calls.append(T.shape[0])
        if T.shape[0] > 1:
            raise RuntimeError("out of memory")
        return original(T, *rest)

    monkeypatch.setattr(rig.backend, "_boundary", fails_in_company)
    rig.forward([(s, last_token(i), WRITE) for i, s in enumerate(states)])
    assert calls == [OWNERS] + [1, 1] * OWNERS
    for i, state in enumerate(states):
        tokens = [*some_tokens(12, i), 3]
        assert_close(rig.write(state, [3]), rig.expected(tokens)[:, -1:], 2e-5)


def test_second_failure_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that escapes, or a page that is touched although the write failed."""
    rig, states = at_the_boundary()
    candidates = rig.begin([(s, last_token(i), WRITE) for i, s in enumerate(states)])
    page = states[0].tail.page

    def fails(*_: object) -> Tensor:
        raise RuntimeError("always")

    monkeypatch.setattr(rig.backend, "_boundary", fails)
    plan, good, _ = rig.run(candidates, [last_token(i) for i in range(OWNERS)])
    assert good == [False] * OWNERS
    assert torch.equal(rig.backend.tail(page, 4, 1)[1], rig.t[1, some_tokens(12, 0)[8:]])
    rig.settle(plan, good, candidates)


def test_every_layer_must_run() -> None:
    """A step whose write skipped a layer, or ran it twice, and is committed all the same."""
    rig = Rig(4)
    (candidate,) = rig.begin([(rig.start("a"), [1, 2, 3, 4], WRITE)])
    plan = rig.backend.begin_step([candidate.segment])
    rig.backend.layer_step(plan, 0, rig.h[0, :4], rig.t[0, :4])
    with pytest.raises(RuntimeError, match=r"layer slots \[1\] did not run"):
        rig.backend.finish_step(plan)
    with pytest.raises(RuntimeError, match="layer slot 0 ran twice"):
        rig.backend.layer_step(plan, 0, rig.h[0, :4], rig.t[0, :4])
    rig.backend.layer_step(plan, 1, rig.h[1, :4], rig.t[1, :4])
    assert rig.backend.finish_step(plan) == [True]
    with pytest.raises(RuntimeError, match="ran already"):
        rig.backend.finish_step(plan)


def part(page: int = 3, row: int = 0) -> BlockPart:
    return BlockPart(0, 1, True, page, row, False, False, None, ())


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([Segment(0, 1, None, (), (part(page=0),))], "page 0"),
        ([Segment(0, 1, None, (), (part(page=80),))], "page 80"),
        ([Segment(0, 1, None, (), (part(page=-1),))], "page -1"),
        ([Segment(0, 1, None, (), (part(row=4),))], "row 4"),
        ([Segment(0, 2, None, (), (part(),))], "cover 1 of 2"),
        ([Segment(i, 1, None, (), (part(),)) for i in range(2)], "both write page 3"),
    ],
    ids=["dummy", "beyond", "sentinel", "row", "gap", "twice"],
)
def test_illegal_steps(segments: list[Segment], message: str) -> None:
    """A plan that would write into the dummy, past a page or into another owner's page."""
    with pytest.raises(ValueError, match=message):
        Rig(4).backend.begin_step(segments)


def test_copy_rows_refuses() -> None:
    """A copy from or to the dummy, or of more rows than a page has."""
    backend = Rig(4).backend
    for src, dst, rows in [(0, 1, 1), (1, 0, 1), (1, -1, 1), (1, 80, 1), (1, 2, 5)]:
        with pytest.raises(ValueError, match="cannot copy"):
            backend.copy_rows(src, dst, rows)


def test_weights_must_fit() -> None:
    """A checkpoint whose tensors do not fit its configuration, found only when it is served."""
    backend = Rig(4).backend
    conv, proj = torch.zeros(12, 1, 5), torch.zeros(12, 12)
    for slot, c, p, message in [
        (2, conv, proj, "layer slot 2"),
        (0, conv[:, :, :3], proj, "ttt_conv"),
        (0, conv, proj[:5], "ttt_proj"),
        (0, conv, None, "missing"),
    ]:
        with pytest.raises(ValueError, match=message):
            backend.set_weights(slot, c, p)


def test_weights_must_be_there() -> None:
    """A forward that finds out in the middle that a layer was never loaded."""
    rig = Rig(4)
    backend = InPlaceBackend(rig.config, 4, 1)
    backend.set_weights(0, rig.conv[0], rig.proj[0])
    with pytest.raises(RuntimeError, match=r"layer slots \[1\] have no weights"):
        backend.begin_step([])


def test_report_and_default_fold() -> None:
    """Sizes that do not add up to the memory taken."""
    rig = Rig(4)
    backend, report = rig.backend, rig.backend.report()
    pools = (backend.H, backend.V)
    assert backend.page_bytes * report["pages"] == sum(p.numel() * 4 for p in pools)
    assert backend.base_bytes * report["bases"] == backend.D.numel() * 4
    assert backend.default_fold_pages == 2  # 12 * 20 / 32 = 7.5 rows, pages of 4
    assert not backend.dense(SimpleNamespace(base=None, pages=()), 0).any()
