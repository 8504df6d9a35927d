"""Legal groups: which transitions may run as one operator call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.errors import BranchBusy, StaleVersion

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


def group_transitions(
    transitions: Sequence[Transition], committed: Callable[[str, str], int]
) -> list[LegalGroup]:
    """Group greedily by phase key, groups and members in order of first appearance.

    `committed(owner, branch)` is the branch's version number; it may raise UnknownOwner. Raises
    BranchBusy for a branch that appears twice, StaleVersion for an expectation that is not met.
    """
    seen: set[tuple[str, str]] = set()
    groups: dict[PhaseKey, list[Transition]] = {}
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
        groups.setdefault(step.key, []).append(step)
    return [LegalGroup(key, tuple(steps)) for key, steps in groups.items()]
