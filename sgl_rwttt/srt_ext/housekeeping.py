"""What the scheduler does beside requests: idle owners, stock sessions, gauges."""

from __future__ import annotations

import logging
import time
from itertools import chain
from typing import Any

from .limits import keep_named_sessions, keep_running_sessions
from .logs import public_name

logger = logging.getLogger(__name__)

REFRESH_S = 1.0  # at most that often the gauges are set while requests run


class Housekeeping:
    """Overrides of SGLang's Scheduler, mixed in front of it."""

    _ttt_refreshed = 0.0
    _ttt_changed = True  # since the gauges were set

    def process_input_requests(self: Any, recv_reqs: list[Any]) -> None:
        """Sessions time out here: not while a request runs or waits, or a message names them."""
        if sessions := self.session_controller.sessions:
            running = (lineage.req for lineage in self.ttt.rows.values())
            queued = self.grammar_manager.grammar_queue
            keep_running_sessions(chain(running, self.waiting_queue, queued))
            for message in recv_reqs:
                keep_named_sessions(sessions, self._tokenized_requests(message) or [message])
        self._ttt_changed = self._ttt_changed or bool(recv_reqs)
        super().process_input_requests(recv_reqs)  # type: ignore[misc]
        self.refresh_metrics()

    def on_idle(self: Any) -> None:
        """Nothing runs: the gauges are set before SGLang sleeps, so that they stay right."""
        self.refresh_metrics(at_once=self._ttt_changed)
        super().on_idle()  # type: ignore[misc]

    def refresh_metrics(self: Any, *, at_once: bool = False) -> None:
        """Set the gauges when ``REFRESH_S`` have passed since the last time, or ``at_once``."""
        runtime = self.ttt
        if not runtime.metrics.enabled:
            return
        now = time.monotonic()
        if at_once or now - self._ttt_refreshed >= REFRESH_S:
            self._ttt_refreshed, self._ttt_changed = now, False
            runtime.metrics.refresh(runtime, len(self.session_controller.sessions))

    def open_session(self: Any, recv_req: Any) -> Any:
        """Refuse SGLang's own message: the tokenizer process turns it into the verb ``open``.

        Only that verb makes an unguessable id, keeps the limits and answers with a typed error.
        """
        from sglang.srt.managers.io_struct import OpenSessionReqOutput

        logger.warning(
            "ttt_refused type=InvalidStateRequest owner=%s message=%s",
            public_name(str(recv_req.session_id)),
            '"sessions of a TTT checkpoint are opened with /ttt/open"',
        )
        return OpenSessionReqOutput(session_id=recv_req.session_id, success=False)
