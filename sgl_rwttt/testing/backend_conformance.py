"""The conformance suite of update rules: what every backend owes to the store and its owners.

    from sgl_rwttt.testing.backend_conformance import CHECKS

    @pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
    def test_conformance(check):
        check(MyCase())

A check takes a ``Case`` (``sgl_rwttt.testing.case``), makes backends of its own and raises
AssertionError with the rule that was broken. All of them drive the real store over slot pools
whose free slots hold NaN, and audit its books after every forward.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from random import Random

from sgl_rwttt.core.effects import Effect
from sgl_rwttt.testing.case import Batch, Case, Item, Plan, Rows, SlotKind
from sgl_rwttt.testing.memory import as_bytes, own_slots, row_errors, some
from sgl_rwttt.testing.rig import Branch, Rig
from sgl_rwttt.testing.transfer import export_restore

__all__ = ["CHECKS", "Batch", "Case", "Item", "Plan", "Rows", "SlotKind"]


def oracle_equality(case: Case) -> None:
    """Owners at different offsets in one batch, odd lengths and mixed modes answer as the oracle.

    Few bases are there, so that some versions do not get the one they would have had.
    """
    rig, rng = Rig(case, "oracle equality", bases=6), Random(0)
    _check_sight(case, rig)
    branches = [rig.start() for _ in range(4)]
    lengths = (1, case.chunk - 1, case.chunk, case.chunk + 1, 2 * case.chunk + 1)
    for turn in range(8):
        active = rng.sample(branches, rng.randint(1, len(branches)))
        writes = [
            (branch, some(case, rng.choice(lengths), 10 * turn + i, reads=0.25))
            for i, branch in enumerate(active)
        ]
        order = rng.sample(range(len(active)), len(active))
        rig.advance(*writes, order=order, gap=turn % 2)
    for branch in branches:
        rig.compare(branch)


def _check_sight(case: Case, rig: Rig) -> None:
    """What was written has to show in the answers, or nothing here proves anything."""
    items = some(case, 2 * case.chunk + 1, 1)
    tokens = [token for token, _ in items]
    written = case.oracle(tokens, [Effect.WRITE] * len(tokens))
    frozen = case.oracle(tokens, [Effect.READ] * len(tokens))
    scale = written.double().square().mean().sqrt()
    seen = float(row_errors(written, frozen).max() / scale)
    rig.require(
        seen > 10 * case.tolerance,
        f"the case is blind: the state moves the oracle's answers by {seen:.2g} of their RMS, "
        f"which must be more than 10 times the tolerance of {case.tolerance:.2g}",
    )


def split_anywhere(case: Case) -> None:
    """A context of 2 C + 2 tokens, cut anywhere into two forwards or into single tokens, is one."""
    rig = Rig(case, "split anywhere")
    items, more = some(case, 2 * case.chunk + 2, 2), some(case, case.chunk + 1, 3)
    items[case.chunk + 1] = (items[case.chunk + 1][0], Effect.READ)
    size = len(items)
    cuts = [[size], *([cut, size] for cut in range(1, size)), [*range(1, size + 1)]]
    for cut in cuts:
        branch = rig.start()
        for first, end in pairwise([0, *cut]):
            rig.advance((branch, items[first:end]))
        rig.advance((branch, more))
        rig.compare(branch, f"{size} tokens in forwards that end at {cut}")
        rig.end(branch)


def fork_and_rollback(case: Case) -> None:
    """Twins part at one point inside a block, and earlier points are taken up again."""
    rig, chunk = Rig(case, "fork and rollback"), case.chunk
    common = some(case, 2 * chunk + 1, 4)
    main = rig.start()
    rig.advance((main, common))
    twin = rig.fork(main)
    for seed, count in ((5, 1), (6, chunk), (7, chunk - 1)):
        left, right = some(case, count, seed), some(case, count, 10 * seed)
        rig.advance((main, left), (twin, right))
    rig.compare(main, "the branch that was forked")
    rig.compare(twin, "the fork")
    back = rig.start(common[: chunk + 1])
    rig.advance((back, [*common[len(back.items) : chunk + 1], *some(case, chunk, 8)]))
    rig.compare(back, "a branch that was rolled back")
    end = list(main.items)
    rig.store.release(main.state)
    again = rig.start(end)
    rig.advance((again, [*end[len(again.items) :], *some(case, chunk, 9)]))
    rig.compare(again, "a branch that was taken up again at its end")


def reads_leave_no_trace(case: Case) -> None:
    """READ tokens change no byte of anybody's state, inside a block, at its end and at a start."""
    rig, chunk = Rig(case, "reads leave no trace"), case.chunk
    inside, ended, fresh = (rig.start() for _ in range(3))
    rig.advance((inside, some(case, 2 * chunk + 1, 10)), (ended, some(case, chunk, 11)))
    before = rig.memory()
    for count in (1, chunk, chunk + 1):
        reads = [
            (branch, some(case, count, 12 + i, reads=1.0))
            for i, branch in enumerate((inside, ended, fresh))
        ]
        rig.advance(*reads)
        rig.advance(reads[0])
    rig.check_unchanged(before, {("page", 0)}, "READ tokens")
    for branch in (inside, ended, fresh):
        rig.advance((branch, some(case, chunk + 1, 15)))
        rig.compare(branch)


def non_finite(case: Case) -> None:
    """An owner whose evidence is not finite fails alone; the others' bits do not depend on it."""
    for inside in (False, True):
        where = "inside a forward" if inside else "at the end of a forward"
        rig = Rig(case, f"non-finite evidence of a block completed {where}")
        spoiled, states = _bad_step(case, rig, inside, True)
        twin = Rig(case, rig.rule)
        sound, twins = _bad_step(case, twin, inside, False)
        for index in (0, 2):
            found, expected = states[index], twins[index]
            rig.require(
                as_bytes({"": found.answers[-1][1]}) == as_bytes({"": expected.answers[-1][1]})
                and rig.owned(found) == twin.owned(expected),
                "answer or state of a sound owner depends on the bad one",
            )
        rig.require(sound == [True] * 3, f"finish_step refused sound writes: {sound}")
        rig.require(spoiled == [True, False, True], f"finish_step judged {spoiled}")
        rig.require(not states[1].state.failed, "the bad owner's tail was given up")
        for branch in states:
            rig.advance((branch, some(case, case.chunk + 1, 23)))
            rig.compare(branch, "an owner after the failure")


def _bad_step(case: Case, rig: Rig, inside: bool, spoil: bool) -> tuple[list[bool], list[Branch]]:
    """Three owners complete a block; with ``spoil`` the second one's evidence holds a NaN."""
    branches = [rig.start() for _ in range(3)]
    for i, branch in enumerate(branches):
        rig.advance((branch, some(case, 2 * case.chunk - 1, 20 + i)))
    count = case.chunk + 2 if inside else 1
    token = case.vocab - 1
    steps = [some(case, count, 30 + i) for i in range(3)]
    steps[1][0] = (token, Effect.WRITE) if spoil else steps[1][0]
    writes = list(zip(branches, steps, strict=True))
    if not spoil:
        return rig.step(*writes), branches
    before = rig.owned(branches[1])
    with case.spoil(rig.backend, token):
        step = rig.begin(*writes)
        plan, out = rig.forward(step)
        good = rig.settle(step, plan, out)
    rig.require(not (good[1] or plan.written_pages(1)), "a block with a NaN counts as written")
    rig.require(rig.owned(branches[1]) == before, "the bad owner's version or tail changed")
    return good, branches


def ledger(case: Case) -> None:
    """Whatever ends how, free slots keep their NaN, and in the end all slots are free again."""
    rig, rng = Rig(case, "ledger"), Random(1)
    live = [rig.start()]
    for turn in range(24):
        action, branch = rng.choice(("step", "step", "step", "fork", "end", "raise")), live[0]
        rng.shuffle(live)
        items = some(case, rng.choice((1, case.chunk - 1, case.chunk + 2)), turn, reads=0.2)
        if action == "fork" and len(live) < 4:
            live.append(rig.fork(branch))
        elif action == "end" and len(live) > 1:
            rig.store.release(live.pop().state)
        elif action == "raise":
            step = rig.begin((branch, items))
            rig.forward(step)
            rig.drop(step)
        else:
            rig.advance(*((each, items) for each in live[:3]))
        rig.check_free()
    rig.end(*live)
    rig.check_free()
    held = rig.pages.live, rig.bases.live
    rig.require(held == (0, 0), f"{held[0]} pages and {held[1]} bases are never given back")
    _check_report(rig)


def _check_report(rig: Rig) -> None:
    backend, report = rig.backend, rig.backend.report()
    try:
        json.dumps(report)
    except TypeError as error:
        rig.require(False, f"report holds more than plain values: {error}")
    said = {key: report.get(key) for key in ("backend", "page_bytes", "base_bytes")}
    found = {
        "backend": backend.name,
        "page_bytes": backend.page_bytes,
        "base_bytes": backend.base_bytes,
    }
    rig.require(said == found, f"report says {said}, the members {found}")
    rig.require(isinstance(report.get("dtype"), str), "report does not say the dtype of the state")
    bases = backend.base_bytes > 0 or not rig.case.fold_pages
    rig.require(backend.page_bytes > 0 and bases, f"sizes of slots: {found}")


def aliasing(case: Case) -> None:
    """A forward changes no byte of a slot that is not its own candidates'."""
    rig, rng = Rig(case, "aliasing"), Random(2)
    first, other = rig.start(), rig.start()
    rig.advance((first, some(case, 2 * case.chunk + 1, 40)), (other, some(case, 1, 41)))
    branches = [first, other, rig.fork(first), rig.fork(first)]
    for turn, count in enumerate((1, case.chunk - 1, 1, case.chunk + 1, 1)):
        active = rng.sample(branches, 3)
        step = rig.begin(*((b, some(case, count, 50 + turn, reads=0.1)) for b in active))
        own = {slot for candidate in step.candidates for slot in own_slots(candidate)}
        before, tails = rig.memory(), [as_bytes(rig.tail(branch)) for branch in branches]
        plan, out = rig.forward(step)
        rig.check_unchanged(before, own, "the layers of a forward")
        kept = [as_bytes(rig.tail(branch)) for branch in branches] == tails
        rig.require(kept, "the layers of a forward changed rows of a tail that it continues")
        good = rig.finish(step, plan)
        rig.check_unchanged(before, own, "finish_step")
        rig.publish(step, plan, out, good)
    for branch in branches:
        rig.compare(branch)


CHECKS: dict[str, Callable[[Case], None]] = {
    "oracle_equality": oracle_equality,
    "split_anywhere": split_anywhere,
    "fork_and_rollback": fork_and_rollback,
    "reads_leave_no_trace": reads_leave_no_trace,
    "non_finite": non_finite,
    "ledger": ledger,
    "aliasing": aliasing,
    "export_restore": export_restore,
}
"""All checks by name."""
