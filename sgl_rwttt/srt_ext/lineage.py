"""The lineage of one SGLang request: which state it starts from, how it reads, what it leaves."""

from __future__ import annotations

from array import array
from typing import Any

from sgl_rwttt.core.candidate import Candidate
from sgl_rwttt.core.chain import ContextChain
from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.errors import OwnerReleased, StateError, WriteFailed
from sgl_rwttt.core.lineage import LineageClock
from sgl_rwttt.core.owners import OwnerState
from sgl_rwttt.core.retention import RetentionWindow
from sgl_rwttt.core.spans import ModeSpans
from sgl_rwttt.core.versions import Version

# A READ token's id in the radix tree: the same token read frozen has other KV than read in WRITE
# mode wherever the state moved in between, so the two must not share a node.
READ_KEY_OFFSET = 1 << 40


def namespace(extra_key: str | None, root: bytes, default: bytes) -> str | None:
    """The radix namespace of a context: KV depends on the root state, unless it is the default."""
    return extra_key if root == default else f"{extra_key or ''}|ttt:{root.hex()}"


def mode_keys(tokens: array[int], modes: ModeSpans) -> array[int]:
    """``tokens`` as radix keys: READ tokens are shifted out of the WRITE tokens' range."""
    if modes.all_write:
        return tokens
    keys = array("q", tokens)
    for first, end, mode in modes.runs(0, len(tokens)):
        if mode is Effect.READ:
            keys[first:end] = array("q", [t + READ_KEY_OFFSET for t in keys[first:end]])
    return keys


class RequestLineage:
    """Everything the runtime knows about one request; hangs on the request as ``req.ttt``.

    Tokens ``[0, prompt)`` carry the modes of ``spans``; everything after is read in ``mode``.
    """

    def __init__(
        self,
        *,
        owner: str,
        branch: str,
        root: Version,
        spans: ModeSpans,
        mode: Effect,
        chunk: int,
        session: bool = False,
        pin: str | None = None,
        clear: str | None = None,
    ) -> None:
        self.owner = owner
        self.branch = branch
        self.root = root
        self.spans = spans
        self.mode = mode
        self.session = session
        self.pin = pin
        self.pinned = False  # whether ``pin`` is held in the store
        self.kept = 0  # tokens of its parent's context that it goes on from
        self.starts: tuple[str, ...] = ()  # "forks", "rollbacks": how it continues its parent
        self.clear = clear
        self.prompt = len(spans)
        self.chain = ContextChain(root.id, chunk, root.number)
        self.state: OwnerState | None = None
        self.window: RetentionWindow | None = None  # of the present run
        self.req: Any = None
        self.error: StateError | None = None  # ended the request
        self.late_error: StateError | None = None  # pin or reset failed after the last token
        self.next_root: bytes | None = None
        self.updates = 0  # boundaries computed for this request that changed the state
        self._versions: list[list[int]] = []
        self._final: dict[str, Any] | None = None

    def extend_to(self, length: int) -> ModeSpans:
        """Modes of the first ``length`` tokens; tokens beyond the prompt take this request's."""
        if length > len(self.spans):
            self.spans.append(length - len(self.spans), self.mode)
        return self.spans

    def sync(self, tokens: array[int], length: int) -> ContextChain:
        """The chain over at least the first ``length`` of ``tokens`` (hashes only what is new)."""
        self.chain.sync(tokens, self.extend_to(length), length)
        return self.chain

    def key_tokens(self, tokens: array[int]) -> array[int]:
        """``tokens`` as radix keys; see ``mode_keys``."""
        return mode_keys(tokens, self.extend_to(len(tokens)))

    def require_state(self) -> OwnerState:
        """The running state; raises OwnerReleased when the request does not run."""
        if self.state is None:
            raise OwnerReleased("this request runs no more", owner=self.owner, branch=self.branch)
        return self.state

    def tokens(self, first: int, end: int) -> array[int]:
        """Tokens ``[first, end)`` of the context, from the request (not from the device)."""
        prompt, output = self.req.origin_input_ids, self.req.output_ids
        split = len(prompt)
        if first >= split:
            return array("q", output[first - split : end - split])
        return array("q", prompt[first:end]) + array("q", output[: max(0, end - split)])

    def next_effect(self) -> Effect:
        """WRITE when the next token of the running state completes a chunk, else READ."""
        clock = self.require_state().clock
        completes = self.mode is Effect.WRITE and clock.rows + 1 == clock.chunk
        return Effect.WRITE if completes else Effect.READ

    def version_read(self, candidate: Candidate) -> int:
        """Version number that the segment's last token reads (before the candidate's commit)."""
        segment = candidate.segment
        deferred = segment.parts[-1].deferred
        return self.require_state().version.number + len(segment.blocks) - deferred

    def note_output(self, version: int) -> None:
        """Record the version under which the next output token is sampled."""
        index = len(self.req.output_ids) if self.req is not None else 0
        if not self._versions or self._versions[-1][1] != version:
            if self._versions and self._versions[-1][0] == index:
                self._versions.pop()
            self._versions.append([index, version])

    def typed(self, error: RuntimeError) -> StateError:
        """``error`` as a StateError that names this owner, branch and version."""
        kind: type[StateError] = WriteFailed
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, StateError):
            kind, text = type(error), str(error)
        version = None if self.state is None else self.state.version.number
        return kind(text, owner=self.owner, branch=self.branch, version=version)

    def fail(self, error: StateError) -> None:
        """End the request with ``error``; nothing that this forward computed for it is kept.

        SGLang looks at ``discard_output_reason`` after a prefill and at ``to_finish`` after a
        decode step; a prefill in chunks is stopped by the scheduler (``stop_failed_chunk``).
        """
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        self.error = error
        if self.req is not None:
            reason = FINISH_ABORT(error.to_header(), error.http_status, type(error).__name__)
            self.req.discard_output_reason = self.req.to_finish = reason
            self.req.skip_radix_cache_insert = True

    def report(self, clock: LineageClock) -> dict[str, Any]:
        """The state report at a point (JSON types only)."""
        report: dict[str, Any] = {
            "owner": self.owner,
            "branch": self.branch,
            "root": self.root.id.hex(),
            "version": clock.number,
            "tail": clock.rows,
            "position": clock.position,
            "mode": self.mode.value,
            "state_id": clock.state_id.hex(),
            "versions": [list(span) for span in self._versions],
            "updates": self.updates,
        }
        if self.next_root is not None:
            report["next_root"] = self.next_root.hex()
        if self.late_error is not None:
            report["error"] = self.late_error.to_wire()
        return report

    def close(self, state: OwnerState) -> None:
        """Keep the last report; the request stops running."""
        self.settle_at(state.clock)
        self.state = self.window = None

    def settle_at(self, clock: LineageClock) -> None:
        """The request stands finished at a point."""
        self._final = self.report(clock)

    def current_report(self) -> dict[str, Any] | None:
        """The report of the running state, else the last one, else None (never ran)."""
        return self._final if self.state is None else self.report(self.state.clock)
