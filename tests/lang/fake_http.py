"""The fake server behind real sockets, with SGLang's status codes and error bodies."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sgl_rwttt.core.errors import StateError

from .fake_transport import FakeServer, FakeTransport


class FakeHttp:
    """`with FakeHttp(server) as http: http.url`; `kill` cuts every connection at once.

    `dies_at(path, body)` says of a POST that the server is killed while it works on it.
    """

    def __init__(self, server: FakeServer) -> None:
        self.connections: list[socket.socket] = []
        self.headers: list[str | None] = []
        self.dies_at: Callable[[str, Any], bool] = lambda path, body: False
        self.ended = threading.Event()
        self.frozen = threading.Event()  # as a stopped process: it accepts, and answers nothing
        self.server = server
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self.handler(FakeTransport(server)))
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/"

    def __enter__(self) -> FakeHttp:
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """As a killed process: the port closes and open connections are reset."""
        self.ended.set()
        self.http.shutdown()
        self.http.server_close()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handler(self, transport: FakeTransport) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # a header and a body are two writes

            def setup(self) -> None:
                super().setup()
                outer.connections.append(self.connection)

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                if outer.frozen.is_set():
                    outer.ended.wait()
                self.answer(200, transport.info())

            def do_POST(self) -> None:
                outer.headers.append(self.headers.get("Authorization"))
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if outer.frozen.is_set():
                    outer.ended.wait()
                if outer.dies_at(self.path, body):
                    outer.kill()
                    return
                try:
                    if self.path.startswith("/ttt/"):
                        self.answer(200, transport.control(self.path[5:], body))
                    elif body.get("stream"):
                        self.stream(body)
                    elif isinstance(body["rid"], list):
                        self.answer(200, transport.generate_batch(body))
                    else:
                        self.answer(200, transport.generate(body))
                except StateError as error:
                    self.refuse(error)

            def refuse(self, error: StateError) -> None:
                wire = error.to_wire()
                if self.path == "/generate":
                    wire = {"type": "BadRequest", "message": error.to_header(), "code": 400}
                self.answer(error.http_status, {"error": wire})

            def stream(self, body: Any) -> None:
                self.send_response(200)
                self.send_header("Connection", "close")
                self.end_headers()
                try:
                    is_batch = isinstance(body["rid"], list)
                    run = transport.generate_siblings if is_batch else transport.generate_stream
                    for item in run(body):
                        self.event(json.dumps(item))
                except StateError as error:
                    self.event(json.dumps({"error": {"message": error.to_header()}}))
                self.event("[DONE]")
                self.close_connection = True

            def event(self, data: str) -> None:
                self.wfile.write(b"data: " + data.encode() + b"\n\n")
                self.wfile.flush()

            def answer(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        return Handler
