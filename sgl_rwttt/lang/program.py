"""@function programs: running one, many, or one in an event loop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, overload

from sglang.lang.global_config import global_config
from sglang.lang.ir import SglFunction, SglSamplingParams

from sgl_rwttt.core.errors import InvalidStateRequest

from .backend import StateBackend
from .executor import StateExecutor
from .owner import Owner
from .sampling import FIELDS, check_single
from .state import State

_DEFAULTS: dict[str, Any] = {"stop": [], "stop_token_ids": [], "stop_regex": []}
_choosing = threading.Lock()


class ProgramFailed(RuntimeError):
    """For programs to raise when they find no answer that passes."""


class Program(SglFunction):
    """A function of a state `s`; every run of it is an owner of its own on the server."""

    def bind(self, **kwargs: Any) -> Program:
        """The program with some arguments fixed."""
        unknown = set(kwargs) - set(self.arg_names)
        if unknown:
            raise TypeError(f"{self.func.__name__} has no arguments {sorted(unknown)}")
        return Program(self.func, bind_arguments={**self.bind_arguments, **kwargs})

    def run(
        self,
        *args: Any,
        stream: bool = False,
        keep: bool = False,
        backend: Any = None,
        use_thread: bool = True,
        state: str | None = None,
        **kwargs: Any,
    ) -> State:
        """Run the program and wait for it; what it returned is `.ret_value`.

        With `state` it starts on the weights of that snapshot, in an empty context.

        Sampling parameters (temperature=..., max_new_tokens=...) are defaults for its gens. The
        owner is freed at the end unless `keep`. With `stream` it returns at once: see `text_iter`.
        Raises what the program raised, and errors of branches that it did not look at.
        """
        sampling = self._sampling(kwargs)
        chosen = resolve_backend(backend)
        arguments = {**kwargs, **self.bind_arguments}
        owner = Owner(chosen.transport)
        s = State(
            StateExecutor(chosen, owner, arguments, sampling, stream=stream, use_thread=use_thread)
        )
        func = self.func if state is None else _on(state, self.func)
        if not stream:
            _drive(s, func, args, arguments, keep)
            return s
        thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(_drive, s, func, args, arguments, keep, True),
            name="sgl_rwttt program",
            daemon=True,
        )
        owner.program_thread = thread
        thread.start()
        return s

    async def arun(self, *args: Any, **kwargs: Any) -> State:
        """As `run`, without blocking the event loop."""
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            _async_pool(), lambda: context.run(self.run, *args, **kwargs)
        )

    def run_batch(
        self,
        batch_kwargs: Sequence[Any],
        *,
        on_error: str = "raise",
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Run the program once per row (a dict of arguments, or a tuple); results in order.

        A failing row never touches the others. With on_error="return" its exception stands in its
        place; with "raise" the first one (in order) is raised after all rows have run.
        """
        if on_error not in ("raise", "return"):
            raise InvalidStateRequest(f'on_error={on_error!r}: "raise" or "return"')
        rows = [self._row(row) for row in batch_kwargs]
        if not rows:
            return []
        kwargs["backend"] = resolve_backend(kwargs.get("backend"))
        threads = 64 if num_threads == "auto" else int(num_threads)

        def one(row: Mapping[str, Any]) -> Any:
            try:
                return self.run(**row, **kwargs)
            except Exception as error:
                return error

        with ThreadPoolExecutor(min(threads, len(rows))) as pool:
            results = list(_progress(pool.map(one, rows), len(rows), progress_bar))
        failed = [result for result in results if isinstance(result, BaseException)]
        if failed and on_error == "raise":
            raise failed[0]
        return results

    def _row(self, row: Any) -> dict[str, Any]:
        if isinstance(row, Mapping):
            return dict(row)
        values = row if isinstance(row, list | tuple) else (row,)
        if len(values) > len(self.arg_names):
            raise TypeError(f"{self.func.__name__} takes {self.arg_names}, a row has {values!r}")
        return dict(zip(self.arg_names, values, strict=False))

    def _sampling(self, kwargs: dict[str, Any]) -> SglSamplingParams:
        given = {k: kwargs.pop(k) for k in FIELDS if k in kwargs and k not in self.arg_names}
        check_single(given.get("n"))
        for name, empty in _DEFAULTS.items():
            if given.get(name) is None:
                given[name] = list(empty)
        return SglSamplingParams(**given)


def _on(snapshot: str, func: Callable[..., Any]) -> Callable[..., Any]:
    """The program, started on a snapshot."""

    def started(s: State, *args: Any, **kwargs: Any) -> Any:
        s.restore(snapshot)
        return func(s, *args, **kwargs)

    return started


def _drive(
    state: State,
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    keep: bool,
    in_thread: bool = False,
) -> None:
    """Run the program's function to its end, settle its branches, free its owner."""
    executor = state.stream_executor
    failed = True
    try:
        state.ret_value = func(state, *args, **kwargs)
        _raise_unseen(executor.owner)
        failed = False
    except BaseException as error:
        executor.fail(error)
        if not in_thread:
            raise
    finally:
        if failed or not keep:
            for each in list(executor.owner.executors):
                each.end(cancel=failed)
            for each in list(executor.owner.executors):
                each.drain()
            executor.owner.close()
        executor.finish_program()


def _raise_unseen(owner: Owner) -> None:
    for executor in list(owner.executors):
        executor.drain()
        if executor.error_ is not None and not executor.was_raised:
            executor.sync()


def resolve_backend(backend: Any) -> StateBackend:
    """`backend`, the default one, or the embedded model served in this process."""
    chosen = backend if backend is not None else global_config.default_backend
    if chosen is None:
        with _choosing:
            chosen = global_config.default_backend
            if chosen is None:
                from .engine import Engine

                chosen = global_config.default_backend = Engine()
    if not isinstance(chosen, StateBackend):
        raise TypeError(
            f"{type(chosen).__name__} cannot carry state: use sgl_rwttt.Runtime(url) or "
            "sgl_rwttt.Engine(model_path=...)"
        )
    return chosen


_pool: ThreadPoolExecutor | None = None


def _async_pool() -> ThreadPoolExecutor:
    global _pool
    with _choosing:
        if _pool is None:
            _pool = ThreadPoolExecutor(256, thread_name_prefix="sgl_rwttt arun")
        return _pool


def _progress(results: Iterable[Any], total: int, show: bool) -> Iterable[Any]:
    if not show:
        return results
    import tqdm

    return tqdm.tqdm(results, total=total)


@overload
def function(func: Callable[..., Any]) -> Program: ...
@overload
def function(func: None = None) -> Callable[[Callable[..., Any]], Program]: ...
def function(
    func: Callable[..., Any] | None = None,
) -> Program | Callable[[Callable[..., Any]], Program]:
    """Make a program of a function whose first argument is `s`."""
    return Program if func is None else Program(func)


def set_default_backend(backend: StateBackend | None) -> None:
    """Run programs on `backend` unless they name another."""
    global_config.default_backend = backend
