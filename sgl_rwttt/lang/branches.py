"""The branches of a fork."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sglang.lang.ir import SglCommitLazy, SglExprList, SglGen, SglSelect

from sgl_rwttt.core.errors import InvalidStateRequest

from .ledger import Pin
from .siblings import Siblings
from .upstream import ProgramStateGroup, SglExpr

if TYPE_CHECKING:
    from .state import State

Key = str | Callable[["State"], Any]
Part = str | SglExpr


class Branches(ProgramStateGroup):
    """States that share everything up to the fork and go their own ways behind it.

    As a context manager it frees on leaving every branch that the parent did not keep. The
    branches' first requests go to the server as one batch: see `Siblings`.
    """

    states: list[State]
    src_state: State

    def __init__(self, states: Sequence[State], src_state: State, pin: Pin | None) -> None:
        super().__init__(list(states), src_state)
        self._pin = pin
        self._siblings = Siblings()
        if len(states) > 1 and src_state.stream_executor.use_thread:
            for state in states:
                state.stream_executor.cursor.seat = self._siblings.seat()

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, i: int) -> State:
        return self.states[i]

    def __iter__(self) -> Iterator[State]:
        return iter(self.states)

    def __iadd__(self, other: Part | Sequence[Part] | Callable[[int], Part]) -> Branches:
        """Add the same to every branch, one item of a list to each, or what `other(i)` returns.

        Raises InvalidStateRequest for a list of another length.
        """
        if callable(other):
            parts: Sequence[Any] = [other(i) for i in range(len(self))]
        elif isinstance(other, str | SglExpr):
            parts = [other] * len(self)
        elif isinstance(other, list | tuple):
            if len(other) != len(self):
                raise InvalidStateRequest(f"{len(other)} items for {len(self)} branches")
            parts = other
        else:
            raise InvalidStateRequest(f"branches cannot take a {type(other).__name__}")
        asked = [state for state, part in zip(self.states, parts, strict=True) if _asks(part)]
        if asked:
            self._siblings.expect(state.stream_executor.cursor.seat for state in asked)
        for state, part in zip(self.states, parts, strict=True):
            state += part
        return self

    def best(self, key: Key) -> State:
        """The branch with the highest key (the first of equals).

        `key` is a function of the branch, or the name of a gen: then its mean logprob counts.
        Waits for the branches and raises the first error of one.
        """
        return max(self.states, key=_scorer(key))

    def prune(self, key: Key, keep: int = 1) -> Branches:
        """Free all but the `keep` best branches (see `best`); the order of the rest stays.

        Raises InvalidStateRequest for `keep` out of range.
        """
        if not 1 <= keep <= len(self):
            raise InvalidStateRequest(f"cannot keep {keep} of {len(self)} branches")
        scorer = _scorer(key)
        ranked = sorted(self.states, key=scorer, reverse=True)
        stay = {id(state) for state in ranked[:keep]}
        losers = [state for state in self.states if id(state) not in stay]
        self.states = [state for state in self.states if id(state) in stay]
        self._free(losers)
        return self

    def join(self, mode: str = "gather_variable") -> None:
        """Gather the branches' new variables into lists of the parent, then free the branches.

        Their text and state do not come back: say `keep` for that.
        """
        if mode != "gather_variable":
            raise InvalidStateRequest(f"join({mode!r}): states cannot be concatenated")
        for state in self.states:
            state.sync()
        gathered = self.src_state.stream_executor.variables
        known = set(gathered)
        for state in self.states:
            for name, value in state.stream_executor.variables.items():
                if name not in known:
                    gathered.setdefault(name, []).append(value)
        self.release()

    def release(self, cancel: bool = False) -> None:
        """Free every branch; what the parent kept is the parent's. Idempotent.

        Waits for what they are doing, unless `cancel`.
        """
        self._pin = None
        self._free(self.states, cancel)

    def _free(self, states: Sequence[State], cancel: bool = False) -> None:
        owner = self.src_state.stream_executor.owner
        for state in states:
            state.stream_executor.end(cancel)
        if cancel:
            owner.abort()
        for state in states:
            state.stream_executor.drain()
            state.forget_checkpoints()
        if not cancel:  # else at the next request: an error does not wait for a busy server
            owner.sweep()

    def __enter__(self) -> Branches:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release(cancel=kind is not None)


def _asks(part: Any) -> bool:
    """Whether an expression sends a request."""
    if isinstance(part, SglExprList):
        return any(_asks(each) for each in part.expr_list)
    return isinstance(part, SglGen | SglSelect | SglCommitLazy)


def _scorer(key: Key) -> Callable[[State], Any]:
    if callable(key):
        return key

    def mean_logprob(state: State) -> float:
        meta = state.stream_executor.get_meta_info(key) or {}
        items = meta.get("output_token_logprobs")
        if not (items and all(items)):  # a select has none of its own
            raise InvalidStateRequest(f"{key!r} was not generated in this branch: pass a function")
        kept = items[: meta.get("kept_tokens", len(items))] or items
        return float(sum(item[0] for item in kept) / len(kept))

    return mean_logprob
