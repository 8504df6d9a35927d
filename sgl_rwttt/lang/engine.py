"""A server inside this process."""

from __future__ import annotations

import asyncio
import atexit
import queue
import signal
import threading
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import suppress
from multiprocessing import resource_tracker
from typing import Any

from sgl_rwttt.core.errors import ServerGone, StateError

from .backend import StateBackend
from .http import _shutdown
from .transport import Json, checked, error_of, gone

_ALIVE_S = 0.5  # how often a waiting call looks whether the server still runs
_END = object()


class EngineTransport:
    """An sglang.Engine whose event loop runs in a thread of its own.

    Nothing but that thread touches the engine; calls from any thread are handed to it.
    """

    def __init__(self, model_path: str, **server_args: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_closed = False
        self._has_failed = False  # a process of the engine reported its end
        self._children: list[Any] = []
        self._old_handler = self._watch_children()
        self._thread = threading.Thread(target=self._serve, name="sgl_rwttt engine", daemon=True)
        self._thread.start()
        self._engine: Any = None
        try:
            self._engine = self._wait(self._start(model_path, server_args))
        except BaseException:
            self.close()
            raise

    def _watch_children(self) -> Any:
        """Have a failing engine process end our calls, where SGLang would end this process."""
        if threading.current_thread() is not threading.main_thread():
            return None
        return signal.signal(signal.SIGQUIT, self._on_failure)

    def _on_failure(self, *_: Any) -> None:
        self._has_failed = True

    def _serve(self) -> None:
        # Engine processes inherit this: Ctrl-C is for the program, which may go on with the engine.
        # The resource tracker unblocks the signal in the thread that starts it.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _start(self, model_path: str, server_args: dict[str, Any]) -> Any:
        from sgl_rwttt.srt_ext.launch import engine_defaults, prepare_environment

        prepare_environment(ranks=server_args.get("dp_size") or 1)
        _publish_options(server_args)
        import psutil
        from sglang.srt.entrypoints.engine import Engine as SGLangEngine

        engine = SGLangEngine(**engine_defaults(model_path, **server_args))
        self._children = [psutil.Process(pid) for pid in engine.get_all_child_pids()]
        return engine

    @property
    def tokenizer(self) -> Any:
        """The engine's own tokenizer."""
        return self._engine.tokenizer_manager.tokenizer

    def generate(self, payload: Json) -> Json:
        """One request, one answer."""
        return checked(self._wait(self._first(payload)))

    def generate_batch(self, payload: Json) -> list[Json]:
        """A batch of requests."""
        return [checked(answer) for answer in self._wait(self._first(payload))]

    def generate_stream(self, payload: Json) -> Iterator[Json]:
        """The growing answer."""
        return map(checked, self._items(payload))

    def generate_siblings(self, payload: Json) -> Iterator[Json]:
        """The growing answers of a batch."""
        return self._items(payload)

    def _items(self, payload: Json) -> Iterator[Json]:
        items: queue.SimpleQueue[Any] = queue.SimpleQueue()

        async def pump() -> None:
            async for item in self._answers(payload):
                items.put(dict(item, output_ids=list(item.get("output_ids") or ())))

        future = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        future.add_done_callback(lambda _: items.put(_END))
        try:
            while (item := self._next(items)) is not _END:
                yield item
            self._result(future)
        finally:
            future.cancel()  # nobody reads the rest

    def control(self, op: str, args: Json) -> Json:
        """A control verb, through the same function that serves /ttt/<op>."""
        from sgl_rwttt.srt_ext.control import control

        answer: Json = self._wait(control(self._engine.tokenizer_manager, op, args))
        return answer

    def info(self) -> Json:
        """Model, pools and counters."""
        return self.control("info", {})

    def close(self) -> None:
        """Stop the engine and its processes. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._old_handler is not None:
            with suppress(ValueError):  # not in the main thread
                signal.signal(signal.SIGQUIT, self._old_handler)
        if self._engine is not None:
            self._engine.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)

    async def _first(self, payload: Json) -> Any:
        async for answer in self._answers(payload):
            return answer
        raise StateError("the engine gave no answer")

    async def _answers(self, payload: Json) -> AsyncIterator[Any]:
        from fastapi import HTTPException
        from sglang.srt.managers.io_struct import GenerateReqInput

        try:
            manager = self._engine.tokenizer_manager
            async for answer in manager.generate_request(GenerateReqInput(**payload), None):
                yield answer
        except HTTPException as error:
            raise error_of(str(error.detail)) from error
        except ValueError as error:
            if isinstance(error, StateError):
                raise
            raise error_of(str(error)) from error

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self._is_closed:
            work.close()
            raise ServerGone("the engine was shut down")
        return self._result(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _result(self, future: Any) -> Any:
        while True:
            try:
                return future.result(timeout=_ALIVE_S)
            except TimeoutError:
                if future.done():
                    raise
                self._check_alive(future)

    def _next(self, items: queue.SimpleQueue[Any]) -> Any:
        while True:
            try:
                return items.get(timeout=_ALIVE_S)
            except queue.Empty:
                self._check_alive(None)

    def _check_alive(self, future: Any) -> None:
        dead = [child.pid for child in self._children if not _runs(child)]
        if not (dead or self._has_failed or self._is_closed):
            return
        if future is not None:
            future.cancel()
        what = f"process {dead} ended" if dead else "a process of it failed, see the log"
        raise gone("the engine", "it was shut down" if self._is_closed else what)


def _publish_options(server_args: dict[str, Any]) -> None:
    """Take this package's `ttt_*` options out of `server_args`; the server reads them at start."""
    from sgl_rwttt.srt_ext.options import TTTOptions

    own = {name: server_args.pop(name) for name in list(server_args) if name.startswith("ttt_")}
    TTTOptions.from_mapping(own).publish()  # without any too: those of an earlier engine end here


def _runs(process: Any) -> bool:
    import psutil

    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


class Engine(StateBackend):
    """Programs run on a model served inside this process.

    Without a model path it is the embedded model, built at the first use and cached. Keyword
    arguments are SGLang's server arguments, and this package's (`ttt_*`, docs/flags.md). A script
    makes it under `if __name__ == "__main__":`, because it starts processes. Owners have no lease
    unless `lease_s` says so: this process cannot die without its engine.
    """

    def __init__(
        self,
        model_path: str | None = None,
        *,
        chat_template: str | None = None,
        lease_s: float | None = None,
        **kwargs: Any,
    ) -> None:
        if model_path is None:
            from sgl_rwttt.models.embedded import ensure

            model_path = str(ensure(progress=True))
        super().__init__(EngineTransport(model_path, **kwargs), chat_template, lease_s)
        atexit.register(_shutdown, weakref.ref(self))
