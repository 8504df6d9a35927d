"""The ``/ttt`` routes of SGLang's HTTP server (guarded by ``--api-key`` like every other route)."""

from __future__ import annotations

from typing import Any

from sgl_rwttt.core.errors import InvalidStateRequest, StateError

from .control import control


def include_routes() -> None:
    """Add the ``/ttt`` routes to SGLang's FastAPI application."""
    from fastapi import APIRouter, Request
    from fastapi.responses import JSONResponse
    from sglang.srt.entrypoints import http_server

    router = APIRouter(prefix="/ttt")

    async def answer(op: str, args: dict[str, Any]) -> JSONResponse:
        manager = http_server.get_global_state().tokenizer_manager
        if not hasattr(manager, "ttt_control_communicator") or not _serves_ttt(manager):
            error: StateError = InvalidStateRequest("this server's checkpoint has no ttt_mode")
            return JSONResponse({"error": error.to_wire()}, status_code=404)
        try:
            return JSONResponse(await control(manager, op, args))
        except StateError as error:
            return JSONResponse({"error": error.to_wire()}, status_code=error.http_status)

    async def info() -> JSONResponse:
        return await answer("info", {})

    async def verb(op: str, request: Request) -> JSONResponse:
        try:
            args = await request.json() if await request.body() else {}
        except ValueError:
            args = None
        if not isinstance(args, dict):
            error = InvalidStateRequest("the body must be a JSON object")
            return JSONResponse({"error": error.to_wire()}, status_code=error.http_status)
        return await answer(op, args)

    # FastAPI reads parameter types from annotations; these are strings in this module.
    verb.__annotations__.update(op=str, request=Request)
    router.add_api_route("/info", info, methods=["GET"], response_model=None)
    router.add_api_route("/{op}", verb, methods=["POST"], response_model=None)
    http_server.app.include_router(router)


def _serves_ttt(manager: Any) -> bool:
    return bool(getattr(manager.model_config.hf_config, "ttt_mode", False))
