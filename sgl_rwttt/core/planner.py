"""Legal groups and bounded waiting: which transitions of one decode step run, and together.

A round looks at the next transition of every running branch. READs are issued at once. A branch
at a boundary (WRITE) may be held back so that its group grows, never for more than the wait
budget, and never when nobody could still join it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.errors import BranchBusy, InvalidStateRequest, StaleVersion

Shape = tuple[object, ...]
"""All that an operator's shape or rule depends on (dtype, layers, dimensions, chunk, rate ...)."""


@dataclass(frozen=True, slots=True)
class PhaseKey:
    """kappa: transitions of one group agree on it."""

    effect: Effect
    backend: str
    shape: Shape
    placement: str


@dataclass(frozen=True, slots=True)
class Transition:
    """The next step of one branch."""

    owner: str
    branch: str
    backend: str  # update rule
    shape: Shape
    effect: Effect
    expected_version: int  # must be the branch's committed version
    placement: str = ""  # device or rank

    @property
    def key(self) -> PhaseKey:
        """The phase key."""
        return PhaseKey(self.effect, self.backend, self.shape, self.placement)


@dataclass(frozen=True, slots=True)
class LegalGroup:
    """Transitions of equal phase key on distinct branches, each at its committed version."""

    key: PhaseKey
    transitions: tuple[Transition, ...]
    waits: tuple[int, ...] = ()  # decode steps between readiness and issue, per transition


@dataclass(frozen=True, slots=True)
class Round:
    """What one decode step issues, and who waits for a later one."""

    groups: tuple[LegalGroup, ...]  # by the readiness of their oldest member
    held: tuple[Transition, ...]


Branch = tuple[str, str]
Committed = Callable[[str, str], int]


class BatchPlanner:
    """Plans decode steps. Deterministic, O(n) in the transitions of a step.

    A WRITE group is issued when it has `target_batch` members (None: never for that reason), when
    its oldest member has waited `wait_budget` steps, or when no READ of the same rule, shape and
    placement is ready that could still come to a boundary. Groups of any effect are cut to at
    most `target_batch` members. So 0 <= issue step - ready step <= wait_budget for everybody.
    Source of the rules: RW-TTT, read-write scheduling.
    """

    def __init__(self, target_batch: int | None = None, wait_budget: int = 0) -> None:
        """Raises InvalidStateRequest for target_batch < 1 or wait_budget < 0."""
        if target_batch is not None and target_batch < 1:
            raise InvalidStateRequest(f"target_batch must be at least 1, got {target_batch}")
        if wait_budget < 0:
            raise InvalidStateRequest(f"wait_budget must be at least 0, got {wait_budget}")
        self.target_batch = target_batch
        self.wait_budget = wait_budget
        self.step = 0
        self._ready: dict[Branch, int] = {}  # held branches -> the step they became ready

    def plan(
        self, ready: Sequence[Transition], committed: Committed, *, hold: bool = True
    ) -> Round:
        """Plan the next step from every ready transition, at most one per branch.

        A branch that was held and is missing from `ready` has left (abort, retraction); its wait
        is forgotten. Without `hold` everybody is issued. Raises as `group_transitions`, changing
        nothing.
        """
        grouped = group_transitions(ready, committed)
        self.step += 1
        joinable: set[tuple[object, ...]] = {
            (g.key.backend, g.key.shape, g.key.placement)
            for g in grouped
            if g.key.effect is Effect.READ
        }
        issued: list[tuple[int, LegalGroup]] = []
        held: dict[Branch, int] = {}
        waiting: list[Transition] = []
        for group in grouped:
            since = [self._ready.get((t.owner, t.branch), self.step) for t in group.transitions]
            if hold and self._holds(group, min(since), joinable):
                waiting += group.transitions
                held.update(
                    ((t.owner, t.branch), at)
                    for t, at in zip(group.transitions, since, strict=True)
                )
            else:
                issued += self._cut(group, since)
        self._ready = held
        order = _oldest_first([at for at, _ in issued])
        return Round(tuple(issued[i][1] for i in order), tuple(waiting))

    def _holds(self, group: LegalGroup, oldest: int, joinable: set[tuple[object, ...]]) -> bool:
        key = group.key
        if key.effect is not Effect.WRITE or self.step - oldest >= self.wait_budget:
            return False
        if self.target_batch is not None and len(group.transitions) >= self.target_batch:
            return False
        return (key.backend, key.shape, key.placement) in joinable

    def _cut(self, group: LegalGroup, since: list[int]) -> Iterator[tuple[int, LegalGroup]]:
        """The group in pieces of at most target_batch, longest waiting first."""
        size = self.target_batch or len(since)
        order = _oldest_first(since)
        for first in range(0, len(order), size):
            piece = order[first : first + size]
            yield (
                since[piece[0]],
                LegalGroup(
                    group.key,
                    tuple(group.transitions[i] for i in piece),
                    tuple(self.step - since[i] for i in piece),
                ),
            )


def _oldest_first(since: Sequence[int]) -> list[int]:
    """Positions by step, stable; linear, since there are at most wait_budget + 1 steps."""
    by_step: dict[int, list[int]] = {}
    for position, at in enumerate(since):
        by_step.setdefault(at, []).append(position)
    return [position for at in sorted(by_step) for position in by_step[at]]


def group_transitions(transitions: Sequence[Transition], committed: Committed) -> list[LegalGroup]:
    """Group by phase key alone, groups and members in order of first appearance.

    `committed(owner, branch)` is the branch's version number; it may raise UnknownOwner. Raises
    BranchBusy for a branch that appears twice, StaleVersion for an expectation that is not met.
    """
    seen: set[Branch] = set()
    groups: dict[tuple[object, ...], list[Transition]] = {}
    for step in transitions:
        name = (step.owner, step.branch)
        version = committed(*name)
        if name in seen:
            raise BranchBusy(
                "the branch appears twice", owner=name[0], branch=name[1], version=version
            )
        if step.expected_version != version:
            raise StaleVersion(
                f"version {step.expected_version} was expected, {version} is committed",
                owner=name[0],
                branch=name[1],
                version=version,
            )
        seen.add(name)
        kappa = (step.effect, step.backend, step.shape, step.placement)
        groups.setdefault(kappa, []).append(step)
    return [LegalGroup(steps[0].key, tuple(steps)) for steps in groups.values()]
