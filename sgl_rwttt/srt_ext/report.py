"""The state report: ``meta_info["state"]`` of every answer."""

from __future__ import annotations

from typing import Any

STATE_KEY = "state"


def after_update_request_meta_info(
    _result: None,
    _manager: Any,
    meta_info: dict[str, Any],
    *_rest: Any,
    **_named: Any,
) -> None:
    """Keep the newest report as one dict: SGLang accumulates a list, one item per emission."""
    reports = meta_info.get(STATE_KEY)
    if isinstance(reports, list):
        if reports:
            meta_info[STATE_KEY] = reports[-1]
        else:
            del meta_info[STATE_KEY]


def streamer_class(base: type) -> type:
    """A subclass of SGLang's output streamer that attaches each request's state report."""

    class TTTOutputStreamer(base):  # type: ignore[misc, valid-type]
        __slots__ = ()
        has_additional_customized_info = True

        def build_additional_customized_info(self, reqs: list[Any]) -> dict[str, list[Any]]:
            """One single-item list per request: its report, or nothing when it never ran."""
            reports = []
            for req in reqs:
                lineage = getattr(req, "ttt", None)
                current = None if lineage is None else lineage.current_report()
                reports.append([] if current is None else [current])
            return {STATE_KEY: reports}

        def is_request_level_customized_info_key(self, key: str) -> bool:
            return bool(key == STATE_KEY or super().is_request_level_customized_info_key(key))

    return TTTOutputStreamer
