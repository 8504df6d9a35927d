"""A server over HTTP."""

from __future__ import annotations

import atexit
import json
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sgl_rwttt.core.errors import InvalidStateRequest

from .backend import StateBackend
from .liveness import PROBE_S, Call, Watch, watched_adapter
from .transport import Json, checked, gone

LEASE_S = 30.0  # how long a server keeps the owners of a client that has died
_CONNECT_S = 1.0  # how long a server may take to accept a connection
_CONTROL_S = 300.0  # how long a step may keep a control verb waiting: SGLang's own watchdog


class HttpTransport:
    """SGLang's native endpoints plus `/ttt`, over one pool of persistent connections."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        tokenizer_path: str | None = None,
        verify: bool | str = True,
    ) -> None:
        import requests

        self.url = url.rstrip("/")
        self.tokenizer_path = tokenizer_path
        self._lost = (requests.RequestException, OSError)
        self._session = requests.Session()
        self._session.verify = verify
        self._session.mount(self.url, watched_adapter(pool_connections=4, pool_maxsize=512))
        self._watch = Watch(self._probe)
        if api_key is not None:
            self._session.headers["Authorization"] = f"Bearer {api_key}"
        self._tokenizer: Any = None
        self._lock = threading.Lock()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer at `tokenizer_path`, else at the server's model path."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = load_tokenizer(self._tokenizer_path())
            return self._tokenizer

    def _tokenizer_path(self) -> str:
        if self.tokenizer_path is not None:
            return self.tokenizer_path
        path = str(self.info().get("model_path", ""))
        if not os.path.isdir(path):
            raise InvalidStateRequest(
                f"the server's model path {path!r} does not exist on this machine: "
                "say Runtime(url, tokenizer_path=...)"
            )
        return path

    def generate(self, payload: Json) -> Json:
        """POST /generate."""
        return checked(self._json("POST", "/generate", payload, None))

    def generate_batch(self, payload: Json) -> list[Json]:
        """POST /generate with lists."""
        return [checked(answer) for answer in self._json("POST", "/generate", payload, None)]

    def generate_stream(self, payload: Json) -> Iterator[Json]:
        """POST /generate with server-sent events."""
        return map(checked, self._events(payload))

    def generate_siblings(self, payload: Json) -> Iterator[Json]:
        """POST /generate with lists and server-sent events."""
        return (item if "index" in item else checked(item) for item in self._events(payload))

    def _events(self, payload: Json) -> Iterator[Json]:
        with (
            self._answering() as call,
            self._session.post(
                self.url + "/generate", json=payload, stream=True, timeout=(_CONNECT_S, None)
            ) as response,
        ):
            self._raise_for(response)
            for line in response.iter_lines():
                call.hear()
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield json.loads(data)
        raise gone(self.url, "the answer's stream ended before the answer did")

    def control(self, op: str, args: Json) -> Json:
        """POST /ttt/<op>."""
        answer: Json = self._json("POST", f"/ttt/{op}", args, _CONTROL_S)
        return answer

    def info(self) -> Json:
        """GET /ttt/info."""
        answer: Json = self._json("GET", "/ttt/info", None, _CONTROL_S)
        return answer

    def close(self) -> None:
        """Close the connections; the server goes on."""
        self._session.close()

    def _json(self, method: str, path: str, body: Json | None, read_s: float | None) -> Any:
        with self._answering():
            response = self._session.request(
                method, self.url + path, json=body, timeout=(_CONNECT_S, read_s)
            )
            self._raise_for(response)
            return response.json()

    @contextmanager
    def _answering(self) -> Iterator[Call]:
        """A call whose lost connection, or lost server, is ServerGone."""
        with self._watch.call() as call:
            try:
                yield call
            except self._lost as error:
                raise gone(self.url, call.verdict or error) from error

    def _probe(self) -> None:
        """Any answer is a sign of life. SGLang's HTTP process gives this one without the model."""
        self._session.get(self.url + "/ping", timeout=(_CONNECT_S, PROBE_S))

    def _raise_for(self, response: Any) -> None:
        if response.status_code == 200:
            return
        plain = f"HTTP {response.status_code}: {response.text[:500]}"
        try:
            body = response.json()
        except ValueError:
            body = None
        if body is None and response.status_code in (502, 504):  # a proxy that finds no server
            raise gone(self.url, plain)
        checked(body if isinstance(body, dict) and body.get("error") else {"error": plain})


def load_tokenizer(path: str) -> Any:
    """The transformers tokenizer at `path`; nothing is downloaded and no code of it is run."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True)


class Runtime(StateBackend):
    """Programs run on a server at `url` (started with `sgl-rwttt serve`).

    `api_key` is the server's. The tokenizer is read at `tokenizer_path`, by default at the server's
    model path, if that is a folder of this machine; nothing is downloaded. `chat_template` is a
    name of SGLang's, by default the model's own. `verify` is as in requests. Raises ServerGone when
    nobody answers.

    The server closes an owner that this process has not renewed for `lease_s` seconds; None leaves
    it to the server's `--ttt-owner-timeout`.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        tokenizer_path: str | None = None,
        chat_template: str | None = None,
        verify: bool | str = True,
        lease_s: float | None = LEASE_S,
    ) -> None:
        transport = HttpTransport(url, api_key, tokenizer_path, verify)
        super().__init__(transport, chat_template, lease_s)
        self.url = url
        atexit.register(_shutdown, weakref.ref(self))


def _shutdown(backend: weakref.ref[StateBackend]) -> None:
    found = backend()
    if found is not None:
        found.shutdown()
