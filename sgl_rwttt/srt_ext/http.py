"""The ``/ttt`` routes of SGLang's HTTP server (guarded by ``--api-key`` like every other route).

``POST /ttt/<verb>`` takes a JSON object; the verbs that only look have a ``GET``. Every other path
under ``/ttt`` is answered here too, so that a mistyped one becomes no label of SGLang's metrics.
"""

from __future__ import annotations

import json
from typing import Any

from sgl_rwttt.core.errors import InvalidStateRequest, StateError

from .control import control, serves_ttt
from .limits import MAX_ARGUMENTS
from .logs import hide_owner_ids

_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]


def include_routes() -> None:
    """Add the ``/ttt`` routes to SGLang's FastAPI application."""
    from fastapi import Request
    from fastapi.responses import JSONResponse
    from sglang.srt.entrypoints import http_server

    app = http_server.app

    def refuse(error: StateError, status: int | None = None) -> JSONResponse:
        return JSONResponse({"error": error.to_wire()}, status_code=status or error.http_status)

    async def answer(op: str, args: dict[str, Any]) -> JSONResponse:
        manager = http_server.get_global_state().tokenizer_manager
        if not hasattr(manager, "ttt_links") or not serves_ttt(manager):
            return refuse(
                InvalidStateRequest(
                    "this server's checkpoint has no ttt_mode, and no --ttt-backend"
                ),
                404,
            )
        try:
            return JSONResponse(await control(manager, op, args))
        except StateError as error:
            return refuse(error)

    async def info() -> JSONResponse:
        return await answer("info", {})

    async def owners() -> JSONResponse:
        return await answer("owners", {})

    async def owner(owner: str) -> JSONResponse:
        return await answer("owner", {"owner": owner})

    async def snapshots() -> JSONResponse:
        return await answer("snapshots", {})

    async def health() -> JSONResponse:
        found = await answer("health", {})
        if found.status_code == 200 and json.loads(bytes(found.body))["status"] != "ok":
            found.status_code = 503
        return found

    async def verb(op: str, request: Request) -> JSONResponse:
        body = await _body(request)
        if body is None:
            text = f"the body is longer than the {MAX_ARGUMENTS} bytes that are allowed"
            return refuse(InvalidStateRequest(text), 413)
        try:
            args = json.loads(body) if body else {}
        except (ValueError, RecursionError):
            args = None
        if not isinstance(args, dict):
            return refuse(InvalidStateRequest("the body must be a JSON object"))
        return await answer(op, args)

    async def nothing() -> JSONResponse:
        return refuse(InvalidStateRequest("no such route: see docs/operations.md"), 404)

    # FastAPI reads parameter types from annotations; these are strings in this module.
    verb.__annotations__.update(op=str, request=Request)
    views = {
        "/info": info,
        "/owners": owners,
        "/owners/{owner}": owner,
        "/health": health,
        "/snapshots": snapshots,
    }
    # Onto the application itself: a route of an included router shows its raw path, and with it an
    # owner's id, as a label of SGLang's HTTP metrics.
    for path, view in views.items():
        app.add_api_route(f"/ttt{path}", view, methods=["GET"], response_model=None)
    app.add_api_route("/ttt/{op}", verb, methods=["POST"], response_model=None)
    app.add_api_route("/ttt/{rest:path}", nothing, methods=_METHODS, response_model=None)
    hide_owner_ids()


async def _body(request: Any) -> bytes | None:
    """The request's body; None, read no further, when it is longer than ``MAX_ARGUMENTS``."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_ARGUMENTS:
            return None
    return body
