"""@function programs: running one, many, or one in an event loop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Concatenate, Generic, Literal, ParamSpec, overload

from sglang.lang.global_config import global_config
from sglang.lang.ir import SglSamplingParams

from sgl_rwttt.core.errors import InvalidStateRequest

from .backend import StateBackend
from .cancellation import Cancellation, in_thread, run_rows
from .executor import StateExecutor
from .owner import Owner
from .sampling import FIELDS, check_single
from .state import State
from .trace import NODES, Trace, trace_program
from .trace_state import Answers
from .upstream import SglFunction

_DEFAULTS: dict[str, Any] = {"stop": [], "stop_token_ids": [], "stop_regex": []}
_choosing = threading.Lock()
P = ParamSpec("P")  # of the program's function, behind `s`


class ProgramFailed(RuntimeError):
    """For programs to raise when they find no answer that passes."""


class Program(SglFunction, Generic[P]):
    """A function of a state `s`; every run of it is an owner of its own on the server.

    Made by `function`. A program may call another one's function on its own state:
    `other.func(s, ...)`.
    """

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> State:
        """As `run` with the program's own arguments only, which type checkers then check."""
        run: Callable[..., State] = self.run
        return run(*args, **kwargs)

    def bind(self, **kwargs: Any) -> Program[...]:
        """The program with some arguments fixed. Raises TypeError for unknown ones."""
        unknown = set(kwargs) - set(self.arg_names)
        if unknown:
            raise TypeError(f"{self.func.__name__} has no arguments {sorted(unknown)}")
        return Program(self.func, bind_arguments={**self.bind_arguments, **kwargs})

    def run(
        self,
        *args: Any,
        stream: bool = False,
        keep: bool = False,
        backend: StateBackend | None = None,
        use_thread: bool = True,
        state: str | None = None,
        rank: int | None = None,
        **kwargs: Any,
    ) -> State:
        """Run the program and wait for it; what it returned is `.ret_value` of the state.

        `args` and `kwargs` are the program's own arguments. It runs on `backend`, else on the
        default one, else on the embedded model in this process. With `state` it starts where the
        snapshot of that name was saved; with `rank` its LoRA delta has that rank, one of the
        server's (`--ttt-rank 8,4`). Without `use_thread` every `+=` waits for the model.

        Sampling parameters (temperature=..., max_new_tokens=...) are defaults for its gens. The
        owner is freed at the end unless `keep`. With `stream` it returns at once: see `text_iter`.
        Raises what the program raised, and errors of branches that it did not look at. When it
        raises, Ctrl-C included, its requests are ended on the server and are not waited for.
        """
        named: dict[str, Any] = {
            "stream": stream,
            "keep": keep,
            "backend": backend,
            "use_thread": use_thread,
        }
        return self._start(Cancellation(), *args, state=state, rank=rank, **named, **kwargs)

    def _start(
        self,
        cancellation: Cancellation,
        *args: Any,
        stream: bool = False,
        keep: bool = False,
        backend: Any = None,
        use_thread: bool = True,
        state: str | None = None,
        rank: int | None = None,
        **kwargs: Any,
    ) -> State:
        sampling = self._sampling(kwargs)
        chosen = resolve_backend(backend)
        arguments = {**kwargs, **self.bind_arguments}
        owner = Owner(chosen.transport, chosen.lease, rank)
        cancellation.begin(owner)
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
        """As `run`, without blocking the event loop, in a thread of its own.

        A cancelled task gets CancelledError at once. The program ends at its next use of `s`
        (OwnerReleased), its requests are ended on the server, and its owner is freed.
        """
        cancellation = Cancellation()
        try:
            state: State = await in_thread(partial(self._start, cancellation, *args, **kwargs))
        except asyncio.CancelledError:
            cancellation.cancel()
            raise
        return state

    @overload
    def run_batch(
        self,
        batch_kwargs: Sequence[Any],
        *,
        on_error: Literal["raise"] = "raise",
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        **kwargs: Any,
    ) -> list[State]: ...
    @overload
    def run_batch(
        self,
        batch_kwargs: Sequence[Any],
        *,
        on_error: Literal["return"],
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        **kwargs: Any,
    ) -> list[State | Exception]: ...
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

        With on_error="return" a failing row never touches the others and its exception stands in
        its place. With "raise" it is raised, no further row begins, and those that run are
        cancelled; so they are when the call is interrupted.
        """
        if on_error not in ("raise", "return"):
            raise InvalidStateRequest(f'on_error={on_error!r}: "raise" or "return"')
        rows = [self._row(row) for row in batch_kwargs]
        if not rows:
            return []
        kwargs["backend"] = resolve_backend(kwargs.get("backend"))
        threads = 64 if num_threads == "auto" else int(num_threads)

        def one(row: Mapping[str, Any], cancellation: Cancellation) -> Any:
            return self._start(cancellation, **row, **kwargs)

        return run_rows(
            rows,
            one,
            threads,
            lambda error: on_error == "raise" or not isinstance(error, Exception),
            partial(_progress, total=len(rows), show=progress_bar),
        )

    def trace(
        self, *args: Any, nodes: int = NODES, answers: Answers | None = None, **kwargs: Any
    ) -> Trace:
        """What the program would do, without a server; print it.

        Gens answer with a placeholder, or with the text (or one text after another) that `answers`
        has for their name; selects take the first choice, `best` the first branch. What the program
        raises on them is in the trace. Its own Python code runs as always. Raises TraceLimit when
        it says more than `nodes` nodes.
        """
        sampling = self._sampling(kwargs)
        arguments = {**kwargs, **self.bind_arguments}
        return trace_program(self.func, args, arguments, sampling, nodes, answers)

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
    owner = executor.owner
    try:
        state.ret_value = func(state, *args, **kwargs)
        _raise_unseen(owner)
        if not keep:
            state.release()
    except BaseException as error:
        executor.fail(error)
        for each in owner.branches():
            each.end(cancel=True)
        owner.close_at_once()
        if not in_thread:
            raise
    finally:
        executor.finish_program()


def _raise_unseen(owner: Owner) -> None:
    for executor in owner.branches():
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


def _progress(results: Iterable[Any], *, total: int, show: bool) -> Iterable[Any]:
    if not show:
        return results
    import tqdm

    return tqdm.tqdm(results, total=total)


@overload
def function(func: Callable[Concatenate[State, P], Any]) -> Program[P]: ...
@overload
def function(
    func: None = None,
) -> Callable[[Callable[Concatenate[State, P], Any]], Program[P]]: ...
def function(
    func: Callable[..., Any] | None = None,
) -> Program[...] | Callable[[Callable[..., Any]], Program[...]]:
    """Make a program of a function whose first argument is `s`; a decorator."""
    return Program if func is None else Program(func)


def set_default_backend(backend: StateBackend | None) -> None:
    """Run programs on `backend` unless they name another; None: on the embedded model."""
    global_config.default_backend = backend
