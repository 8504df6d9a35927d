"""Random programs over all verbs: how to draw one, and how to run it on a state or its replay."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

import sgl_rwttt as rw
from sgl_rwttt.lang.state import State

from .fake_transport import FakeServer, Json, Node
from .oracle import Answers, Branch, Refused, Vocabulary
from .toy_tokenizer import toy_tokenizer

Op = tuple[Any, ...]
ROLES = {"system": rw.system, "user": rw.user, "assistant": rw.assistant}
TEXTS = ["The model", " reads", "Stop", " 42", "🙂", "日本語 ", "é", "\n", " x + 1 ", "token. ", ""]
LONG = "A state is a function of the exact token sequence. The model keeps what it reads."
CHOICES = [" yes", " no", " perhaps not", "🙂", " reads it"]


WORDS = ["STOP", " re", "de", " model", "\n", "日本", "🙂", "é", " 42", "<|endoftext|>"]


class MenuServer(FakeServer):
    """A fake server whose model says stops, ends and halves of characters often."""

    def __init__(self) -> None:
        super().__init__()
        parts = [
            self.tokenizer.encode(c, add_special_tokens=False) for w in WORDS for c in pieces(w)
        ]
        self.follow = {a: b for ids in parts for a, b in pairwise(ids)}
        self.menu = [ids[0] for ids in parts] * 3 + [i for ids in parts for i in ids[1:]]
        self.menu.append(self.tokenizer.eos_token_id)

    def answers(self) -> Answers:
        """The oracle's model of this server."""
        eos = self.tokenizer.eos_token_id
        return Answers(Vocabulary(self.tokenizer), self.menu, self.follow, self.chunk, eos)

    def next_token(
        self, node: Node, number: int, params: Json, script: list[int] | None, index: int
    ) -> tuple[int, float]:
        token, logprob = super().next_token(node, number, params, script, index)
        after = self.follow.get(node.tokens[-1])
        if after is not None and token % 10 < 8:
            return after, logprob
        return self.menu[token % len(self.menu)], logprob


def pieces(word: str) -> list[str]:
    """Words of ASCII whole, of other characters one by one."""
    return [word] if word.isascii() else list(word)


# Drawing

texts = st.sampled_from(TEXTS)
names = st.sampled_from("abc")
stop_ids = [toy_tokenizer().encode(word)[-1] for word in (" 42", " re", "é")]
stops = st.lists(st.sampled_from(["STOP", "TO", " re", "ode", "日", "🙂\n", *stop_ids]), max_size=3)
fills = st.tuples(st.just("fill"), texts)
gens = st.tuples(st.just("gen"), names, st.integers(1, 11), stops)
selects = st.tuples(
    st.just("select"), names, st.lists(st.sampled_from(CHOICES), min_size=2, max_size=3)
)
parts = st.lists(gens | gens | gens | fills | selects, min_size=1, max_size=4)
turns = st.tuples(st.just("turn"), st.sampled_from(sorted(ROLES)), parts).map(lambda turn: [turn])
leads = st.sampled_from(["Q", "The ", "日", LONG])
endings = st.one_of(
    st.tuples(st.just("keep"), st.integers(0, 2)),
    st.tuples(st.just("keep"), st.integers(0, 2)),
    st.tuples(st.just("best"), names),
    st.tuples(st.just("prune"), st.integers(1, 2)),
    st.just(("join",)),
    st.just(("leave",)),
)
places = st.sampled_from([None, None, None, "x", "y"])
IN_ROLE = [
    *[st.tuples(st.just("say"), leads, st.booleans(), parts)] * 4,
    st.tuples(st.just("checkpoint"), places),
    st.just(("flush",)),
    st.tuples(st.just("score"), st.sampled_from([LONG, " yes", "🙂"])),
]
OUT_OF_ROLE = [
    *[st.tuples(st.just("say"), leads, st.booleans(), turns)] * 2,
    *[st.tuples(st.just("rollback"), places)] * 2,
    st.tuples(st.just("held"), st.integers(0, 3)),
]
CONTEXTS = [
    st.tuples(
        st.just("adapt"),
        st.sampled_from([LONG, "Hi"]),
        st.integers(1, 2),
        st.sampled_from(["clear", "keep"]),
    ),
    st.just(("clear",)),
    st.tuples(st.just("snapshot"), st.sampled_from("st")),
    st.tuples(st.just("restore"), st.sampled_from("st")),
]


@st.composite
def programs(draw: Any, in_one_context: bool = False) -> list[Op]:
    """A list of operations; blocks hold operations of their own."""
    first: list[Op] = draw(st.lists(IN_ROLE[0], min_size=1, max_size=2))
    free = OUT_OF_ROLE if in_one_context else OUT_OF_ROLE + CONTEXTS
    rest = draw(st.lists(operation(2, free), min_size=4, max_size=9))
    return [*first, ("checkpoint", "x"), *rest]


def operation(depth: int, free: list[Any]) -> st.SearchStrategy[Op]:
    """One operation; `free` are those that a role does not allow, empty inside of one."""
    kinds, in_role = IN_ROLE + free, not free
    if not depth:
        return st.one_of(kinds)
    inner = st.lists(operation(depth - 1, free), min_size=1, max_size=3)
    forks = st.lists(inner, min_size=1, max_size=3)
    at = st.none() if in_role else places
    blocks = [
        *[st.tuples(st.just("fork"), at, forks, endings)] * 4,
        st.tuples(st.just("hold"), forks),
        *[st.tuples(st.just(kind), inner) for kind in ("frozen", "freeze", "peek", "copy")],
    ]
    if not in_role:
        said = st.lists(operation(depth - 1, []), min_size=1, max_size=3)
        blocks.append(st.tuples(st.just("role"), st.sampled_from(sorted(ROLES)), said))
    return st.one_of(kinds + blocks)


# Running


class Walk:
    """Runs a program on a state (a `State` or the oracle's `Branch`) and looks at it.

    With `every` it looks after each operation, else only at the end, so that branches overlap.
    """

    def __init__(
        self,
        view: Callable[[Any], Any],
        every: bool,
        want: list[Any] | None,
        is_real: bool = False,  # a real model's log-probabilities are not equal to the last bit
    ) -> None:
        self.view, self.every, self.want, self.is_real = view, every, want, is_real
        self.seen: list[Any] = []
        self.held: list[Any] = []
        self.saved: set[str] = set()

    def __call__(self, s: Any, program: list[Op]) -> None:
        self.run(s, program)
        self.look(s, "end")
        while self.held:
            self.held.pop().release()
        self.look(s, "all released")

    def run(self, s: Any, program: list[Op]) -> None:
        for op in program:
            try:
                getattr(self, "do_" + op[0])(s, *op[1:])
            except (Refused, rw.StateError) as error:
                name = error.args[0] if isinstance(error, Refused) else type(error).__name__
                self.note(op[0], name)
            if self.every:
                self.look(s, op[0])

    def look(self, s: Any, what: str) -> None:
        deadline = time.monotonic() + 2
        value = self.view(s)
        if self.want is not None:  # a worker thread may still hold what it has just done
            while value != self.want[len(self.seen)][1] and time.monotonic() < deadline:
                time.sleep(0.001)
                value = self.view(s)
        self.note(what, value)

    def note(self, what: str, value: Any) -> None:
        self.seen.append((what, value))
        if self.want is not None:
            assert self.seen[-1] == self.want[len(self.seen) - 1], difference(
                self.seen[-1], self.want[len(self.seen) - 1]
            )

    # Operations

    def do_say(self, s: Any, lead: str, is_bare: bool, parts: list[Op]) -> None:
        if not (is_bare and self.every and not is_empty(s)):
            parts = [("fill", lead), *parts]
        if isinstance(s, Branch):
            replay(s, parts)
        elif parts:
            s += expression(parts)

    def do_flush(self, s: Any) -> None:
        s.flush()

    def do_checkpoint(self, s: Any, name: str | None) -> None:
        made = s.checkpoint(name)
        self.note("checkpoint", (made.position, made.version, made.state_id))

    def do_rollback(self, s: Any, name: str | None) -> None:
        s.rollback(name)
        close_role(s)

    def do_adapt(self, s: Any, text: str, epochs: int, context: str) -> None:
        if not is_frozen(s):
            s.adapt(text, epochs=epochs, context=context)

    def do_clear(self, s: Any) -> None:
        s.clear_context()

    def do_score(self, s: Any, text: str) -> None:
        if is_empty(s):
            return
        score = s.score(text)
        values = list(score if isinstance(s, Branch) else score.logprobs)
        self.note("score", len(values) if self.is_real else values)

    def do_snapshot(self, s: Any, name: str) -> None:
        if name not in self.saved:
            self.saved.add(name)
            s.snapshot(name)

    def do_restore(self, s: Any, name: str) -> None:
        if name in self.saved and not is_frozen(s):
            s.restore(name)

    def do_frozen(self, s: Any, program: list[Op]) -> None:
        with s.frozen():
            self.run(s, program)

    def do_freeze(self, s: Any, program: list[Op]) -> None:
        s.freeze()
        self.run(s, program)
        s.unfreeze()

    def do_peek(self, s: Any, program: list[Op]) -> None:
        with s.peek() as p:
            self.run(p, program)

    def do_copy(self, s: Any, program: list[Op]) -> None:
        with s.copy() as c:
            self.run(c, program)

    def do_role(self, s: Any, role: str, program: list[Op]) -> None:
        if isinstance(s, Branch):
            s.begin(role)
            self.run(s, program)
            s.end(role)
        else:
            with getattr(s, role)():
                self.run(s, program)

    def do_fork(self, s: Any, at: str | None, forks: list[list[Op]], ending: Op) -> None:
        with s.fork(len(forks), at=at) as branches:
            for branch, program in zip(branches, forks, strict=True):
                if at is not None:
                    close_role(branch)
                self.run(branch, program)
            getattr(self, "end_" + ending[0])(s, branches, *ending[1:])

    def end_keep(self, s: Any, branches: Any, i: int) -> None:
        s.keep(branches[i % len(branches.states)])

    def end_best(self, s: Any, branches: Any, name: str) -> None:
        s.keep(branches.best(name))

    def end_prune(self, s: Any, branches: Any, keep: int) -> None:
        branches.prune(lambda branch: sum(branch.tokens), keep=min(keep, len(branches.states)))
        if self.every:
            self.look(s, "pruned")
        s.keep(branches[0])

    def end_join(self, s: Any, branches: Any) -> None:
        branches.join()

    def end_leave(self, s: Any, branches: Any) -> None:
        with_nested = branches[0].fork(1)
        try:
            s.keep(with_nested[0])
        finally:
            with_nested.release()

    def do_hold(self, s: Any, forks: list[list[Op]]) -> None:
        held = s.fork(len(forks))
        for branch, program in zip(held, forks, strict=True):
            self.run(branch, program)
        self.held.append(held)

    def do_held(self, s: Any, i: int) -> None:
        if i % 2 and self.held:
            self.held.pop(i % len(self.held)).release()
        elif self.held:
            self.do_say(self.held[i % len(self.held)][0], "again", False, [("gen", "c", 3, [])])


def difference(got: Any, want: Any) -> str:
    """The parts of two looks that are not equal."""
    if type(got) is type(want) and isinstance(got, dict):
        parts = {k: difference(got.get(k), want.get(k)) for k in {**got, **want}}
        return str({k: v for k, v in parts.items() if v})
    if type(got) is type(want) and isinstance(got, tuple) and len(got) == len(want):
        return " | ".join(filter(None, map(difference, got, want)))
    return "" if got == want else f"{got!r} instead of {want!r}"


def is_empty(s: Any) -> bool:
    pending = s.pending() if isinstance(s, Branch) else s.pending
    return not (s.tokens or pending)


def close_role(s: Any) -> None:
    """A place inside a role brings the open role with it."""
    role = s.at.role if isinstance(s, Branch) else s.stream_executor.cur_role
    if role is not None and isinstance(s, Branch):
        s.end(role)
    elif role is not None:
        s += getattr(rw.lang, role + "_end")()


def is_frozen(s: Any) -> bool:
    return not s.flag if isinstance(s, Branch) else bool(s.mode == "read")


def expression(parts: list[Op]) -> Any:
    """sglang.lang's expression."""
    made: Any = None
    for kind, *rest in parts:
        if kind == "fill":
            part: Any = rest[0]
        elif kind == "gen":
            name, limit, ends = rest
            part = rw.gen(
                name,
                max_tokens=limit,
                stop=[x for x in ends if isinstance(x, str)],
                stop_token_ids=[x for x in ends if isinstance(x, int)],
            )
        elif kind == "select":
            part = rw.select(*rest)
        else:
            part = ROLES[rest[0]](expression(rest[1]))
        made = part if made is None else made + part
    return made


def replay(s: Branch, parts: list[Op]) -> None:
    """The same on the oracle."""
    for kind, *rest in parts:
        if kind == "turn":
            s.begin(rest[0])
            replay(s, rest[1])
            s.end(rest[0])
        else:
            getattr(s, kind)(*rest)


# Looking


def view_of_branch(s: Branch) -> Json:
    here, at = s.here(), s.at
    runs: list[list[Any]] = []
    for i, (_, flag) in enumerate(at.items):
        mode = "write" if flag else "read"
        if runs and runs[-1][2] == mode:
            runs[-1][1] = i + 1
        else:
            runs.append([i, i + 1, mode])
    return {
        "text": s.text(),
        "pending": s.pending(),
        "tokens": s.tokens,
        "modes": runs,
        "at": (here.version, here.tail, len(at.items), here.state_id.hex()),
        "mode": "read" if s.depth else "write",
        "variables": dict(at.variables),
        "messages": at.messages[:],
        "role": at.role,
    }


def view_of_state(s: State) -> Json:
    executor: Any = s.stream_executor
    return {
        "text": s.text(),
        "pending": s.pending,
        "tokens": list(s.tokens),
        "modes": [list(run) for run in s.lineage.modes],
        "at": (s.version, s.tail, s.position, s.state_id),
        "mode": s.mode,
        "variables": dict(executor.variables),
        "messages": list(s.messages()),
        "role": executor.cur_role,
    }


def view_of_server(server: FakeServer, s: State) -> Any:
    """(nodes, pins, roots) that the server holds for the owner."""
    s.sync()
    s.stream_executor.owner.sweep()
    with server.lock:
        [session] = server.sessions.values()
        nodes = [
            (
                node.root,
                list(zip(node.tokens, [int(m.value == "write") for m in node.modes], strict=True)),
            )
            for node in list(session.nodes.values())
        ]
        return sorted(nodes), len(session.pins), set(session.roots)
