"""The benchmark of the embedded model: its documents, its owners, its report, without engines."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sgl_rwttt.lang import StateBackend
from tests.benchmarks.scripts import load, table_rows
from tests.lang.fake_transport import FakeServer, FakeTransport


@pytest.fixture(scope="module")
def embedded() -> ModuleType:
    return load("bench_embedded")


class Words:
    """A tokenizer of one id per word."""

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        assert not add_special_tokens
        return SimpleNamespace(ids=[hash(word) for word in text.split()])


def test_documents() -> None:
    """Guards: one document twice, another order, a glossary whose entries are all alike."""
    module = load("documents")
    for kind in module.KINDS:
        found = module.documents(kind, Words(), 11, 200)
        assert [len(ids) for ids in found] == [200] * 11
        assert len({tuple(ids) for ids in found}) == 11
        assert module.documents(kind, Words(), 11, 200) == found
    entries = [entry.split(". ", 1)[1] for entry in module.glossary(3).split("\n\n")[1:]]
    assert len(entries) == len(set(entries)) == module.ENTRIES
    with pytest.raises(ValueError, match="of kind glossary"):
        module.documents("glossary", Words(), 2, 100_000)
    with pytest.raises(ValueError, match="no documents of kind"):
        next(module.texts("poetry"))


def test_stream() -> None:
    """Guards: a stream that begins again before its text is used up."""
    module = load("documents")
    ids = module.stream("prose", Words(), 20_000)
    assert len(ids) == 20_000
    assert ids[:300] != ids[10_000:10_300]
    with pytest.raises(ValueError, match="all documents"):
        module.stream("prose", Words(), 10_000_000)


def test_points(embedded: ModuleType) -> None:
    """Guards: a curve without its end, a point that is measured twice."""
    assert embedded.points(1) == [1]
    assert embedded.points(73) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 73]
    assert embedded.others(embedded.KINDS, "code") == ["prose", "glossary"]


def test_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a loss that is learnt from, roots and owners that stay, contexts that are skipped."""
    server, worker = FakeServer(), load("embedded_worker")
    backend = StateBackend(FakeTransport(server))
    found = worker.adapted(backend, list(range(40, 80)), list(range(90, 110)), 24)
    assert {name: len(pair) for name, pair in found.items()} == {
        "reread": 2,
        "continuation": 2,
        "unrelated": 2,
    }
    assert not server.sessions
    monkeypatch.setattr(worker, "drifts", lambda *_: [0.5])
    ids = list(range(1, 101))
    curve = worker.stability(backend, ids, [list(range(40, 60))], 16, [1, 3, 5], [1.0], tmp_path)
    assert [point["tokens"] for point in curve] == [16, 48, 80]
    assert not server.sessions
    backend.shutdown()


def test_drift(tmp_path: Path) -> None:
    """Guards: another layer's norm, a drift that is not relative."""

    class Transport:
        def control(self, op: str, args: dict[str, Any]) -> None:
            assert (op, args["root"], args["replace"]) == ("save", "r", True)
            base = torch.stack([torch.full((2, 3), 1.0), torch.full((2, 3), 2.0)])
            save_file({"D": base}, tmp_path / args["name"])

    backend = SimpleNamespace(transport=Transport())
    found = load("embedded_worker").drifts(backend, "o", "r", [6.0**0.5, 6.0**0.5], tmp_path)
    assert found == pytest.approx([1.0, 2.0])


def point(tokens: int, unrelated: float, last: float) -> dict[str, Any]:
    pairs = {"last": [3.0, 3.0 + last], "next": [2.0, 2.0], "unrelated": [[4.0, 4.0 + unrelated]]}
    return {"tokens": tokens, "drift": [tokens / 1e4, 0.0], **pairs}


def report() -> dict[str, Any]:
    runs = [
        {"reread": [4.0, 3.0], "continuation": [3.0, 3.0], "unrelated": [2.0, 2.5]},
        {"reread": [2.0, 2.5], "continuation": [3.0, 2.0], "unrelated": [2.0, 2.5]},
    ]
    return {
        "machine": load("common").machine(1),
        "command": "none",
        "quick": False,
        "size": load("bench_embedded").FULL,
        "tolerance": 0.01,
        "layers": [24, 25],
        "table": {"code": runs},
        "stability": {
            "code": [point(448, 0.01, -0.2), point(896, 0.03, -0.1), point(1792, 0.05, -0.1)]
        },
    }


def test_report(embedded: ModuleType) -> None:
    """Guards: the mean of ratios for the ratio of means, a layer in another layer's column."""
    row, *curve = table_rows(embedded.render(report()))
    assert row[:3] == ["code", "2", "3.000"]
    assert row[3] == "-0.2500 +- 0.7500 (-8.3 %)"
    assert curve[1] == ["896", "0.0896", "0.0000", "+0.0300", "-0.1000", "+0.0000", "yes"]
    assert [cells[-1] for cells in curve] == ["yes", "yes", "no"]


def test_safe_range() -> None:
    """Guards: a stream called safe behind a point that was not, or that forgets what it reads."""
    module, made = load("embedded_report"), report()
    curve = made["stability"]["code"]
    assert module.safe_points(curve, 0.01) == 2
    assert "up to 896 tokens" in module.safe_range(made, curve)
    assert "not at 1,792 (0.1792)" in module.safe_range(made, curve)
    assert module.safe_points([curve[2], curve[0]], 0.01) == 0
    assert module.safe_points([point(448, 0.0, 0.1)], 0.01) == 0
    assert "all that was read" in module.safe_range(made, curve[:2])


def test_plots(embedded: ModuleType, tmp_path: Path) -> None:
    """Guards: a plot that cannot be drawn from a report."""
    drawn = embedded.plot(report(), tmp_path)
    assert [each.name for each in drawn] == ["embedded-table.png", "embedded-stability-code.png"]
    assert all(each.stat().st_size > 1000 for each in drawn)
