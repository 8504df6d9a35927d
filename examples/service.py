"""An asyncio service: an HTTP server whose handlers are programs, with 50 clients at once.

    python examples/service.py [--url http://127.0.0.1:30000] [--clients 50]

`POST /ask` runs a program with `arun`, which leaves the event loop free, so the programs of all
clients run at the same time and the model batches them. The demo ends by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests
import uvicorn
from fastapi import FastAPI

import sgl_rwttt as rw
from sgl_rwttt import gen

app = FastAPI()


@rw.function
def ask(s: rw.State, question: str) -> str:
    """What one client gets: a state of its own for the time of the request."""
    s += question + gen("answer", max_tokens=4, temperature=0, stop=",")
    return str(s["answer"])


@app.post("/ask")
async def handle(body: dict[str, str]) -> dict[str, Any]:
    """The handler."""
    state = await ask.arun(question=body["question"])
    return {"answer": state.ret_value, "state_id": state.state_id}


def question(client: int) -> str:
    """What a client asks."""
    return f"{client}, {client + 1}, {client + 2},"


def call(url: str, client: int) -> dict[str, Any]:
    """One client's request."""
    response = requests.post(url, json={"question": question(client)}, timeout=120)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


async def serve(clients: int) -> list[dict[str, Any]]:
    """Serve until every client has its answer."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/ask"
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(clients) as pool:
        calls = [loop.run_in_executor(pool, call, url, client) for client in range(clients)]
        answers = await asyncio.gather(*calls)
    server.should_exit = True
    await serving
    return answers


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run the service on the embedded model in this process, or on a server."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="a running server; default: the embedded model, in process")
    parser.add_argument("--clients", type=int, default=50)
    args = parser.parse_args(argv)
    if args.url:
        rw.set_default_backend(rw.Runtime(args.url))
    ask.run(question="1, 2,")  # starts the engine before the first client comes
    start = time.perf_counter()
    answers = asyncio.run(serve(args.clients))
    seconds = time.perf_counter() - start
    for client in range(0, args.clients, max(1, args.clients // 5)):
        print(f"{question(client)} ->{answers[client]['answer']}")
    print(f"{len(answers)} answers in {seconds:.1f} s")
    return answers


if __name__ == "__main__":
    main()
