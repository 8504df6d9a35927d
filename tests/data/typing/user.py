"""A user's program that says everything the frontend offers; `mypy --strict` must accept it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import sgl_rwttt as rw
from sgl_rwttt import assistant, gen, select, system, user


@rw.function
def plain(s: rw.State, question: str, limit: int = 8) -> str:
    s += system("Be brief.")
    s += user(question) + assistant(gen("answer", max_tokens=limit, stop=["\n"]))
    s += "Sure? " + select("sure", ["yes", "no"], choices_method=rw.greedy_token_selection)
    s += rw.user_begin() + "How many? " + rw.user_end()
    s += rw.assistant_begin() + rw.gen_int("n", max_tokens=2) + rw.assistant_end()
    s += rw.system_begin() + rw.gen_string("text") + rw.system_end()
    s += gen("choice", choices=["a", "b"], choices_method=rw.token_length_normalized)
    s += select("other", ["a"], choices_method=rw.unconditional_likelihood_normalized)
    s["mine"] = len(s["answer"])
    if "sure" in s:
        s.set_var("seen", s.get_var("sure"))
    meta: Any = s.get_meta_info("answer")
    with s.var_scope("both"), s.assistant():
        s += "One " + gen("one", dtype=int)
    s.user("Two?")
    s.sync()
    error: BaseException | None = s.error()
    messages: list[Any] = s.messages()
    return f"{s.text()} {meta} {error} {messages}"


@rw.function
def branching(s: rw.State) -> list[str]:
    s += "One"
    here: rw.Checkpoint = s.checkpoint("here")
    place: tuple[str | None, int, int, str] = (
        here.name,
        here.position,
        here.version,
        here.state_id,
    )
    with s.fork(4) as branches:
        branches += gen("a", temperature=0.9)
        branches += " text"
        branches += [gen("b"), "c", "d", "e"]
        branches += lambda i: f"{i} " + gen("f")
        branches.prune("a", keep=2)
        best: rw.State = branches.best(lambda branch: branch.score(" end").mean)
        first: rw.State = branches[0]
        texts = [branch.text() for branch in branches]
        s.keep(best if len(branches) > 1 else first)
    found: rw.Branches = s.fork(2, at=here)
    found.join()
    found.release()
    s.rollback(here)
    s.rollback("here")
    s.rollback()
    named: Mapping[str, rw.Checkpoint] = s.checkpoints
    with s.copy() as scratch:
        scratch += "x"
    return [*texts, str(place), str(list(named))]


@rw.function()
def learning(s: rw.State, document: str) -> float:
    s.adapt(document, epochs=2, context="clear")
    with s.frozen() as same:
        same += "Question"
    s.freeze()
    s.unfreeze()
    with s.peek() as p:
        p += gen("answer")
    s.flush()
    s.clear_context(tail="drop")
    saved: dict[str, Any] = s.snapshot("name", kv=True, replace=True)
    loaded: dict[str, Any] = s.restore("name", kv=None)
    if saved == loaded:
        s.commit()
    score: rw.Score = s.score(document)
    ids: tuple[int, ...] = score.tokens
    values: tuple[float, ...] = score.logprobs
    return score.sum + score.mean + score.perplexity + len(ids) + sum(values)


@rw.function
def looking(s: rw.State) -> str:
    where: tuple[str, str | None, int, int, int, str, str, str] = (
        s.owner,
        s.branch,
        s.version,
        s.tail,
        s.position,
        s.mode,
        s.state_id,
        s.pending,
    )
    tokens: tuple[int, ...] = s.tokens
    held: dict[str, int] = s.memory()
    lineage: rw.Lineage = s.lineage
    path: tuple[rw.Event, ...] = s.history()
    graph: str = rw.tree(s)
    spans = [f"{first}-{end} {mode}" for first, end, mode in lineage.modes]
    parts = [lineage.root, lineage.state_id, str(lineage.tokens), path[0].what, graph]
    return " ".join([*parts, *spans, str(where), str(tokens), str(held)])


def part(topic: str) -> rw.SglExpr:
    """Expressions can be made by functions."""
    return user(topic) + assistant(gen("a"))


def run(url: str) -> list[str]:
    server = rw.Runtime(url, api_key="key", tokenizer_path="folder", lease_s=30.0)
    engine: rw.StateBackend = rw.Engine("model", ttt_memory_mb=512)
    rw.set_default_backend(server)
    state: rw.State = plain.run(question="Why?", backend=engine, keep=True, temperature=0)
    value: Any = state.ret_value
    state.release()
    checked: rw.State = plain("Why?", limit=3)
    fixed: rw.Program[...] = plain.bind(question="How?")
    fixed.run(limit=3, state="name", rank=4)
    trace: rw.Trace = plain.trace(question="Why?", answers={"answer": "Because"})
    states: list[rw.State] = plain.run_batch([{"question": "Who?"}], progress_bar=True)
    mixed: list[rw.State | Exception] = plain.run_batch(["a", "b"], on_error="return")
    answers = [x.text() for x in mixed if isinstance(x, rw.State)]
    streamed = plain.run(question="Why?", stream=True)
    words = list(streamed.text_iter("answer"))
    info: dict[str, Any] = server.get_server_info()
    server.shutdown()
    names = [state.text() for state in [checked, *states]]
    return [*answers, *words, *names, str(value), str(trace), str(info), server.url]


async def run_async() -> list[str]:
    states = await asyncio.gather(*(plain.arun(question=q) for q in "ab"))
    words = [word async for word in states[0].text_async_iter("answer")]
    return [*words, states[1].text()]


def careful() -> str:
    try:
        learning.run(document="text")
    except rw.RollbackBeyondRetention as error:
        return f"{error.owner} {error.branch} {error.version}"
    except rw.StateError as error:
        return str(error)
    except rw.ProgramFailed:
        return "no answer"
    return ""
