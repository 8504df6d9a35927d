"""The benchmark of adaptation: its documents, its worker and its table; nothing judges a loss."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sgl_rwttt.lang import StateBackend
from tests.benchmarks.scripts import load, table_rows
from tests.lang.fake_transport import FakeServer, FakeTransport


@pytest.fixture(scope="module")
def adaptation() -> ModuleType:
    return load("bench_adaptation")


class Words:
    """A tokenizer of one id per word."""

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        assert not add_special_tokens
        return SimpleNamespace(ids=[hash(word) for word in text.split()])


@pytest.mark.parametrize("kind", ["code", "pages"])
def test_documents(kind: str, adaptation: ModuleType) -> None:
    """Guards: one document twice, another order, documents that are too short."""
    found = adaptation.documents(kind, Words(), 20, 60)
    assert [len(ids) for ids in found] == [60] * 20
    assert len({tuple(ids) for ids in found}) == 20
    assert adaptation.documents(kind, Words(), 20, 60) == found
    with pytest.raises(ValueError, match=f"of kind {kind}"):
        adaptation.documents(kind, Words(), 100_000, 60)


def test_worker() -> None:
    """Guards: a loss that is learnt from, an adapted context that stays, an owner that stays."""
    server = FakeServer()
    backend = StateBackend(FakeTransport(server))
    found = load("adaptation_worker").adapted(backend, list(range(40, 80)), 24)
    assert set(found) == {"before", "after", "updates", "seconds"}
    assert found["before"] > 0
    assert not server.sessions
    backend.shutdown()


def test_report(adaptation: ModuleType, tmp_path: Path) -> None:
    """Guards: the mean of ratios for the ratio of means, a column of another kind, no plot."""
    runs = [
        {"before": 2.0, "after": 1.0, "updates": 6, "seconds": 2.0},
        {"before": 4.0, "after": 4.5, "updates": 4, "seconds": 4.0},
    ]
    report = {
        "machine": load("common").machine(1),
        "command": "none",
        "size": adaptation.QUICK,
        "results": {"in_place": {"code": runs}},
    }
    ((*row,),) = table_rows(adaptation.render(report))
    assert row[:3] == ["in_place", "code", "3.000 -> 2.750"]
    assert row[3:] == ["-0.2500 +- 0.7500", "-8.3 %", "1 of 2", "5.0", "3.0"]
    (drawn,) = adaptation.plot(report, tmp_path)
    assert drawn.name == "adaptation-changes.png" and drawn.stat().st_size > 1000
