"""Programs of these tests run on the fake server; nothing here starts an engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_rwttt.lang import StateBackend
from sgl_rwttt.lang.state import State

from .fake_transport import FakeServer, FakeTransport
from .toy_tokenizer import toy_tokenizer


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    toy_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def backend(server: FakeServer) -> Iterator[StateBackend]:
    made = StateBackend(FakeTransport(server))
    yield made
    made.shutdown()
    assert server.is_dead or not server.sessions, "a run left its owner open"


def check_text(s: State) -> None:
    """decode(ledger) + pending == text, the invariant of every program."""
    s.sync()
    executor: Any = s.stream_executor
    decoded = executor.backend.text.decode(s.tokens)
    assert decoded + s.pending == executor.text_
