"""Wrong calls; each line that names an error code must be rejected with it, no other one."""

from __future__ import annotations

import sgl_rwttt as rw
from sgl_rwttt import assistant, gen, user


@rw.function
def program(s: rw.State, question: str, limit: int = 8) -> str:
    s += gen("a", max_tokens="8")  # arg-type
    s += gen("a", maximum=8)  # call-arg
    s += 3  # arg-type
    s += user(3)  # arg-type
    s += assistant(gen("b")) + 3  # operator
    s.adapt(question, context="forget")  # arg-type
    s.adapt(question, epoch=2)  # call-arg
    s.fork("3")  # arg-type
    s.fork(3, where="here")  # call-arg
    s.rollback(3)  # arg-type
    s.keep(s.fork(2))  # arg-type
    s.clear_context(tail="save")  # arg-type
    s.snapshot("name", cache=True)  # call-arg
    s.score(question).median()  # attr-defined
    s.revert()  # attr-defined
    s.version = 3  # misc
    with s.fork(2) as branches:
        branches += 3  # arg-type
        branches.best(3)  # arg-type
        branches.prune("a", keep="1")  # arg-type
    return str(s["a"])


@rw.function  # arg-type
def no_state(question: str) -> str:
    return question


program(question=3)  # arg-type
program(limit=3)  # call-arg
program("Why?", wrong=True)  # call-arg
program.run(question="Why?", keep="yes")  # arg-type
program.run(question="Why?", backend="http://localhost:30000")  # arg-type
program.run_batch([], on_error="ignore")  # call-overload
program.nothing()  # attr-defined
rw.Runtime(30000)  # arg-type
rw.Engine(model_path=3)  # arg-type
rw.set_default_backend("server")  # arg-type
rw.nothing()  # attr-defined
