"""The queue of one branch: errors stick and are raised, nothing hangs."""

from __future__ import annotations

import contextvars
import queue
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from sglang.lang.interpreter import StreamExecutor
from sglang.lang.ir import SglSamplingParams

from sgl_rwttt.core.errors import OwnerReleased, StateError

from .backend import StateBackend
from .owner import Owner
from .steps import Arrivals, Step, variables_of


class BranchWorker(StreamExecutor):
    """Runs what is submitted in order, in a worker thread, or at once without one.

    The first error ends the branch: what is queued is skipped, and every later use raises that
    error. A cancelled branch wakes everybody who waits for it, whatever its worker is doing.
    """

    backend: StateBackend
    error_: BaseException | None
    text_: str
    messages_: list[Any]
    variables: dict[str, Any]
    meta_info: dict[str, Any]
    variable_event: dict[str, Arrivals]
    cur_role: str | None
    cur_role_begin_pos: int | None
    fork_start_text_pos: int | None

    def __init__(
        self,
        backend: StateBackend,
        owner: Owner,
        arguments: dict[str, Any],
        default_sampling_para: SglSamplingParams,
        *,
        stream: bool = False,
        use_thread: bool = True,
    ) -> None:
        self._ended = True  # until the constructor is through
        self._is_cancelled = False
        self._asked: set[Step] = set()  # steps that somebody waits for
        self._runner: threading.Thread | None = None  # who runs the present expression
        self._lock = threading.Lock()
        self._failed: set[str] = set()
        self._open: Counter[str] = Counter()  # variables that the running expression still owes
        self.owner = owner
        self.was_raised = False  # whether the program has seen the error
        self.is_over = False  # whether the program that drives this branch has returned
        self.progress = threading.Condition()
        super().__init__(backend, arguments, default_sampling_para, None, stream, use_thread=False)
        self.use_thread = use_thread
        if use_thread:
            self.queue: queue.Queue[Any] = queue.Queue()
            self.worker = threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._thread_worker_func,),
                name="sgl_rwttt branch",
                daemon=True,
            )
            self.worker.start()
        owner.join(self)
        self._ended = False

    # Submitting and waiting

    def submit(self, expr: Any) -> None:
        """Queue an expression. Raises the branch's error, or OwnerReleased after its end."""
        names = list(variables_of(expr))
        with self._lock:
            self._check()
            if self._ended:
                raise OwnerReleased("this branch was released", owner=self.owner.name)
            for name in names:
                self.variable_event.setdefault(name, Arrivals()).expect()
            if self.use_thread:
                self.queue.put(expr)
                return
        self._run(expr)
        self._check()

    def ask(self, run: Callable[[], Any]) -> Any:
        """Queue `run` and wait for what it returns."""
        step = Step(run)
        self._asked.add(step)
        try:
            self.submit(step)
            return step.done.result()
        finally:
            self._asked.discard(step)
            self.was_raised = self.was_raised or self.error_ is not None

    def sync(self) -> None:
        """Wait until everything queued has run; raises the branch's error."""
        self.drain()
        self._check()

    def drain(self) -> None:
        """Wait until everything queued has run or was skipped; never raises.

        A cancelled branch is not waited for.
        """
        if not self.use_thread or threading.current_thread() is self.worker:
            return
        with self.queue.all_tasks_done:
            self.queue.all_tasks_done.wait_for(lambda: self._is_cancelled or not self._is_busy)
        if self._ended and not self._is_cancelled:
            self.worker.join()

    @property
    def _is_busy(self) -> bool:
        """Whether something is queued or runs."""
        return self.use_thread and self.queue.unfinished_tasks > 0

    def error(self) -> BaseException | None:
        """The branch's error, None when there is none; does not raise."""
        self.drain()
        self.was_raised = True
        return self.error_

    def fail(self, error: BaseException) -> None:
        """End the branch with `error` from outside (its program raised)."""
        if self.error_ is None:
            self.error_ = error
        self._notify()

    def cancel(self, error: BaseException | None = None) -> None:
        """Skip what is queued, give up what runs, and raise `error` to all who wait; never blocks.

        Callable from any thread; without an error of its own it is OwnerReleased.
        """
        with self._lock:
            if self._is_cancelled:
                return
            self._is_cancelled = True
            if self.error_ is None:
                self.error_ = error or OwnerReleased("the run was cancelled", owner=self.owner.name)
                self.was_raised = error is None
        if self._runner is not None:
            self.owner.stop(self._runner)
        for name, event in list(self.variable_event.items()):
            if not event.is_set():
                self._failed.add(name)
                event.give_up()
        for step in list(self._asked):
            step.fail(self.error_)
        if self.use_thread:
            with self.queue.all_tasks_done:
                self.queue.all_tasks_done.notify_all()
        self._notify()

    def finish_program(self) -> None:
        """The program that drives this branch has returned."""
        self.is_over = True
        self._notify()

    def get_var(self, name: str) -> Any:
        """The variable's value, once everything queued that sets it has run."""
        self._await_mention(name)
        event = self.variable_event.get(name)
        if event is not None:
            event.wait()
        if name in self._failed or (self.error_ is not None and name not in self.variables):
            self._check()
        return self.variables[name]

    def await_growth(self, name: str | None, length: int) -> tuple[str, bool]:
        """Wait until the text (or a variable) is not `length` long any more, or will not change.

        Returns it and whether it is complete.
        """

        def value() -> str:
            return self.text_ if name is None else str(self.variables.get(name, ""))

        def is_done() -> bool:
            event = None if name is None else self.variable_event.get(name)
            is_set = event is not None and event.is_set()
            return is_set or self.is_over or self._is_cancelled or bool(self.is_finished)

        with self.progress:
            self.progress.wait_for(lambda: len(value()) != length or is_done())
            done = is_done()
            return value(), done

    def get_meta_info(self, name: str, timeout: float | None = None) -> Any:
        """SGLang's meta_info of the gen or select that set the variable."""
        event = self.variable_event.get(name)
        if event is not None and not event.wait(timeout):
            raise TimeoutError(f"variable {name!r} was not set within {timeout} s")
        if name in self._failed:
            self._check()
        return self.meta_info.get(name)

    def end(self, cancel: bool = False) -> None:
        """Run what is queued (or cancel it), then let go of the place. Idempotent; does not wait.

        With `cancel` the requests in flight end with the next `Owner.abort`, or with the owner.
        """
        if getattr(self, "_ended", True) and not cancel:  # True: the constructor did not get far
            return
        if cancel:
            self.was_raised = True  # of an error that ends its program, or its fork, with others
            if self._is_busy:
                self.cancel()
        with self._lock:
            if self._ended:
                return
            self._ended = True
            if self.use_thread:
                self.queue.put(None)
                return
        self._finish()

    # Running

    def _thread_worker_func(self) -> None:
        try:
            while (expr := self.queue.get()) is not None:
                self._run(expr)
                self.queue.task_done()
                del expr  # it may hold nodes that nobody else needs
        except BaseException as error:  # of this loop, not of an expression
            died = StateError(f"the branch's worker died: {error!r}", owner=self.owner.name)
            died.__cause__ = error
            self.cancel(died)
        try:
            self._finish()
        finally:
            self.queue.task_done()

    def _finish(self) -> None:
        self._let_go()
        self.is_finished = True
        self._notify()
        self.owner.leave()

    def _run(self, expr: Any) -> None:
        self._open = Counter(variables_of(expr))
        self._runner = threading.current_thread()
        try:
            if self.error_ is None:
                self._execute(expr)
        except BaseException as error:
            if self.error_ is None:
                self.error_ = error
        if self.error_ is not None:
            self._skip(expr, self.error_)
        self._notify()

    def _skip(self, expr: Any, error: BaseException) -> None:
        for name in list(self._open.elements()):
            self._failed.add(name)
            self._arrived(name)
        if isinstance(expr, Step):
            expr.fail(error)

    def _check(self) -> None:
        if self.error_ is not None:
            self.was_raised = True
            raise self.error_

    def _arrived(self, name: str | None) -> None:
        if name is not None and self._open[name] > 0:
            self._open[name] -= 1
            self.variable_event[name].set()
        self._notify()

    def _notify(self) -> None:
        with self.progress:
            self.progress.notify_all()

    def _await_mention(self, name: str) -> None:
        """In a streamed run another thread may ask before the program has said the name."""
        if not self.stream or self.owner.program_thread in (None, threading.current_thread()):
            return
        with self.progress:
            self.progress.wait_for(
                lambda: (
                    name in self.variable_event
                    or name in self.variables
                    or self.is_over
                    or self._is_cancelled
                )
            )

    def _let_go(self) -> None:
        """Give up the branch's place (runs once, behind everything queued)."""
