"""The frontend's benchmark: it runs and counts right; nothing judges a time."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sgl_rwttt.lang import StateBackend
from tests.benchmarks.scripts import load, table_rows
from tests.lang.fake_transport import FakeServer, FakeTransport


@pytest.fixture(scope="module")
def lang() -> ModuleType:
    return load("bench_lang")


@pytest.fixture(scope="module")
def worker() -> ModuleType:
    return load("lang_worker")


def test_overhead(lang: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Guards: null backends that an interpreter does not accept, nodes counted wrong."""
    out = tmp_path / "lang.json"
    lang.main(["--quick", "--only", "overhead", "--nodes", "16", "--out", str(out)])
    rows = table_rows(capsys.readouterr().out)
    assert [row[0] for row in rows] == ["text and gen", "fork(4), a gen in each"]
    found = json.loads(out.read_text())["overhead"]
    assert all(len(taken[name]) == 1 for taken in found.values() for name in ("ours", "stock"))


def test_the_null_server_computes_once(lang: ModuleType) -> None:
    """Guards: the null server's own hashing measured as the interpreter's."""
    null = load("lang_null")
    transport = null.NullTransport()
    backend = StateBackend(transport)
    first = null.our_chain.run(count=4, backend=backend)
    assert first.text() == (null.WORD + null.SAID) * 4
    null.our_forks.run(count=2, backend=backend)
    transport._clocks.clear()
    null.our_chain.run(count=4, backend=backend)
    null.our_forks.run(count=2, backend=backend)
    backend.shutdown()


def test_verbs_and_siblings(worker: ModuleType) -> None:
    """Guards: a verb that is timed twice or never, branches that are not freed, tokens of the
    prefix counted as generated."""
    server = FakeServer()
    backend = StateBackend(FakeTransport(server))
    taken = worker.verbs(backend, "The state is", branches=3, rounds=4)
    assert {name: len(values) for name, values in taken.items()} == dict.fromkeys(worker.VERBS, 4)
    assert not server.sessions
    found = worker.siblings(backend, "The state is", branches=3, decode=5)
    assert found["tokens"] == 15
    assert 0 < found["branch_seconds"] < found["seconds"]
    backend.shutdown()


def test_report(lang: ModuleType) -> None:
    """Guards: a ratio of the wrong runs, a tail that is an average."""
    assert lang.p99(range(1, 101)) == 99
    assert lang.p99([3.0, 1.0]) == 3.0
    options = lang.parse([])
    run = {"tokens": 100.0, "seconds": 4.0, "branch_seconds": 2.0}
    report: dict[str, Any] = {
        "machine": load("common").machine(1),
        "command": "none",
        "size": {name: getattr(options, name) for name in lang.FULL},
        "attention_backend": None,
        "verbs": {
            way: {verb: [scale * i / 1e3 for i in range(1, 101)] for verb in lang.VERBS}
            for way, scale in (("engine", 1), ("http", 2))
        },
        "siblings": {
            "siblings": [run],
            "independent": [{"tokens": 100.0, "seconds": 8.0}],
            "stock": [{**run, "branch_seconds": 1.0}],
        },
        "overhead": {"text and gen": {"ours": [30.0], "stock": [10.0]}},
    }
    rows = {row[0]: row[1:] for row in table_rows(lang.render(report))}
    assert rows["fork"] == ["50.50", "99.00", "101.00", "198.00"]
    assert rows["8 branches"] == ["25.0 (25.0..25.0)", "50.0 (50.0..50.0)", "", ""]
    assert rows["8 independent requests"][2:] == ["2.00 (2.00..2.00)", ""]
    (stock,) = [row for name, row in rows.items() if "stock" in name]
    assert [cell.split()[0] for cell in stock[2:]] == ["1.00", "0.50"]
    assert rows["text and gen"][2].startswith("3.00")
