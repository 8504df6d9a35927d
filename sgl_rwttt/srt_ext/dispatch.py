"""The data-parallel controller, which stands between the tokenizer process and the ranks.

What concerns an owner goes to the owner's rank, whatever rank a client asks for; requests without
an owner are balanced as SGLang does it. A rank that dies ends the server.
"""

from __future__ import annotations

from typing import Any

from .ranks import rank_of


def controller_class(base: type) -> type:
    """The subclass of SGLang's DataParallelController that serves a TTT checkpoint."""
    return type("TTTDataParallelController", (OwnerDispatch, base), {})


class OwnerDispatch:
    """The overrides; mixed in front of SGLang's DataParallelController."""

    def init_dispatcher(self: Any) -> None:
        """Route control verbs, and watch the ranks: SGLang watches only this process."""
        from sglang.srt.utils.watchdog import SubprocessWatchdog
        from sglang.utils import TypeBasedDispatcher

        from .io import TTTControlReqInput

        super().init_dispatcher()  # type: ignore[misc]
        self._request_dispatcher += TypeBasedDispatcher([(TTTControlReqInput, self.send_verb)])
        names = [f"rank {rank}" for rank in range(len(self.scheduler_procs))]
        self.ttt_watchdog = SubprocessWatchdog(self.scheduler_procs, names)
        self.ttt_watchdog.start()

    def send_verb(self: Any, message: Any) -> None:
        """Hand a control verb to the one rank that it names."""
        from sglang.srt.managers.io_struct import sock_send

        sock_send(self.workers[message.rank], message)

    def maybe_external_dp_rank_routing(self: Any, req: Any) -> Any:
        """Name the rank of the request's owner; without one it keeps what it named, if any."""
        session = getattr(req, "session_params", None)
        if session is not None and session.id is not None:
            req.routed_dp_rank = rank_of(session.id, self.launch_dp_size)
        return super().maybe_external_dp_rank_routing(req)  # type: ignore[misc]
