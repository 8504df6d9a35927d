"""Planner, simulation and mode benchmarks: they run and count right; nothing judges a time."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.benchmarks.scripts import load, table_rows
from tests.golden import FOLDER as GOLDEN

CHUNK = 8


@pytest.fixture(scope="module")
def traces() -> ModuleType:
    return load("traces")


@pytest.fixture(scope="module")
def simulation() -> ModuleType:
    return load("simulation")


@pytest.fixture(scope="module")
def costs() -> ModuleType:
    return load("costs")


@pytest.fixture(scope="module")
def modes() -> ModuleType:
    return load("bench_modes")


@pytest.fixture(scope="module")
def size(traces: ModuleType) -> Any:
    return traces.Size(streams=4, prompt=16, decode=17, chunk=CHUNK)


def test_planner_benchmark(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Guards: a benchmark that no longer runs, or in which nobody ever waits."""
    out = tmp_path / "planner.json"
    load("bench_planner").main(["--steps", "60", "--owners", "3", "70", "--out", str(out)])
    rows = table_rows(capsys.readouterr().out)
    assert [row[:2] for row in rows] == [[n, p] for p in ("greedy", "waiting") for n in ("3", "70")]
    held = [result["held"] for result in json.loads(out.read_text())["results"]]
    assert held[:2] == [0, 0] and min(held[2:]) > 0


def test_traces_have_the_boundaries_that_they_claim(traces: ModuleType, size: Any) -> None:
    """Guards: a trace whose bursts or skew are not there."""

    def boundaries(name: str) -> list[list[int]]:
        """Per stream, the decode steps at which it writes, by counting every token."""
        trace = traces.TRACES[name](size, 0)
        return [
            [
                step
                for step in range(s.decode - 1)
                if (s.prompt + step) % trace.chunk == trace.chunk - 1
            ]
            for s in trace.streams
        ]

    assert boundaries("uniform") == [[7, 15], [5, 13], [3, 11], [1, 9]]
    assert boundaries("bursty-update") == [[7, 15]] * 4
    assert boundaries("all-update") == [list(range(16))] * 4
    first = sorted(steps[0] for steps in boundaries("phase-skew"))
    gaps = [(b - a) % CHUNK for a, b in zip(first, [*first[1:], first[0]], strict=True)]
    assert sorted(gaps) == [1, 2, 2, 3]  # 1, 2 and 3 apart; 2 more close the circle
    arrivals = [stream.at for stream in traces.TRACES["poisson"](size, 0).streams]
    assert arrivals[0] == 0 < arrivals[1] and arrivals == sorted(arrivals)
    lengths = sorted(stream.decode for stream in traces.TRACES["heterogeneous"](size, 0).streams)
    assert lengths == [4, 13, 21, 30]


def test_percentile_and_times(traces: ModuleType) -> None:
    """Guards: a tail that is an average, prefill counted as decode."""
    assert traces.p95(range(1, 101)) == 95
    assert traces.p95([3.0, 1.0, 2.0]) == 3.0
    answer = traces.Answer([(2.0, 1), (2.5, 2), (4.0, 4)], [], None)
    late = traces.Answer([(3.0, 1), (5.0, 2)], [], None)
    timed = traces.timing([1.0, 1.5], [answer, late])
    assert (timed.tokens, timed.seconds, timed.rate) == (6, 4.0, 1.5)
    assert (timed.decode_tokens, timed.decode_seconds, timed.prefill) == (3, 2.0, 2.0)
    assert (timed.first_p95, timed.completion_p95) == (2.0, 3.5)


def test_readiness_waits_for_queued_prefills(traces: ModuleType) -> None:
    """Guards: the prefill of others in a stream's wait for its first decode step."""
    first = traces.Answer([(1.0, 1), (4.0, 2)], [], None)
    queued = traces.Answer([(3.0, 1), (4.0, 2)], [], None)
    later = traces.Answer([(3.5, 1), (5.0, 2)], [], None)
    waits = traces.first_waits([0.0, 0.5, 2.0], [first, queued, later])
    assert waits == [1.0, 0.5, 1.5]


def test_simulated_time_and_work(simulation: ModuleType, costs: ModuleType, size: Any) -> None:
    """Guards: a forward pass too many, a write that is not paid for."""
    price = costs.Costs(forward=1.0, row=0.1, group=0.01, write=0.001, prefill_token=0.5)

    def run(trace: str, mode: str) -> Any:
        return simulation.Simulation(simulation.TRACES[trace](size, 0), price, mode).run()

    burst = run("bursty-update", "rw")
    assert asdict(burst.counts) == {"forwards": 16, "rows": 64, "groups": 2, "writes": 8}
    assert burst.timing.prefill == pytest.approx(1 + 64 * 0.5)
    assert burst.timing.decode_seconds == pytest.approx(16 + 6.4 + 0.02 + 0.008)
    assert burst.timing.first_p95 == pytest.approx(1.4)
    assert run("bursty-update", "phase").counts == burst.counts
    assert run("uniform", "phase").counts.forwards == 16 + 8
    assert run("uniform", "serial").counts.forwards == 64
    assert run("all-update", "rw").counts == costs.Counts(16, 64, 16, 64)


def test_no_trace_breaks_a_rule(simulation: ModuleType, costs: ModuleType, size: Any) -> None:
    """Guards: a wait beyond the budget, a stream that is never answered."""
    for name, make in simulation.TRACES.items():
        trace = make(size, 1)
        for mode, budget in (("rw", 0), ("rw", 3), ("phase", 1), ("phase", 16), ("serial", 0)):
            o = simulation.Simulation(trace, costs.Costs(), mode, budget).run()
            assert o.timing.tokens == sum(stream.decode for stream in trace.streams)
            assert o.violations == 0 and 0 <= o.max_wait <= budget, (name, mode, budget)
            assert (o.held > 0) == (budget > 0 and name not in ("bursty-update", "all-update"))


def test_the_simulation_sees_violations(
    simulation: ModuleType, costs: ModuleType, size: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a count of violations that is always 0."""
    planner = simulation.BatchPlanner
    monkeypatch.setattr(simulation, "BatchPlanner", lambda target, w: planner(target, w + 1))
    trace = simulation.TRACES["phase-skew"](size, 0)
    assert simulation.Simulation(trace, costs.Costs(), "rw", 2).run().violations > 0


def test_costs_are_found_again(simulation: ModuleType, costs: ModuleType, size: Any) -> None:
    """Guards: a calibration that mixes up its columns, or gives negative costs."""
    price = costs.Costs(0.07, 0.02, 0.005, 0.001, 0.002)
    outcomes = [
        simulation.Simulation(make(size, 0), price).run()
        for name, make in simulation.TRACES.items()
        if name != "poisson"
    ]
    samples = [(o.counts, costs.seconds(price, o.counts)) for o in outcomes]
    assert asdict(costs.fit(samples, 0.002)) == pytest.approx(asdict(price))
    cheaper = [(counts, took - 0.01 * counts.groups) for counts, took in samples]
    assert costs.fit(cheaper, 0.002).group == 0 <= min(asdict(costs.fit(cheaper, 0.002)).values())


def test_simulation_script(
    simulation: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Guards: a script that no longer runs, costs of an unknown file taken silently."""
    price = tmp_path / "costs.json"
    price.write_text(json.dumps({"costs": {"forward": 1.0}}))
    small = ["--streams", "3", "--prompt", "8", "--decode", "9", "--chunk", "8"]
    with pytest.raises(ValueError, match="'costs' must hold exactly"):
        simulation.main([*small, "--costs", str(price)])
    simulation.main([*small, "--out", str(tmp_path / "out.json")])
    rows = table_rows(capsys.readouterr().out)
    assert len(rows) == 3 * 6 + 2 * 6
    assert {row[-1] for row in rows} == {"0"}
    assert len(json.loads((tmp_path / "out.json").read_text())["outcomes"]) == 18 + 2 * 6 * 5


def test_one_engine_per_setup(modes: ModuleType) -> None:
    """Guards: an engine started twice, arrivals paced by nothing."""
    engines = modes.wanted(modes.parse([]))
    assert len(engines) == 1 + 1 + 2 + 1 + 5
    assert engines[modes.Setup()] == [
        *("uniform", "bursty-update", "poisson", "phase-skew", "heterogeneous"),
        *("uniform x1", "uniform x2", "uniform x4"),
    ]
    assert engines[modes.ALL_UPDATE] == ["all-update"]
    assert all(names[0] != "poisson" for names in engines.values())


def made_up_report(modes: ModuleType) -> dict[str, Any]:
    """A report of every part whose runs are simulated; stream 0 of mode phase has other tokens."""
    options = modes.parse(["--quick", "--budgets", "0", "2"])
    size = modes.Size(options.streams, options.prompt, options.decode, CHUNK)
    runs = []
    for setup, names in modes.wanted(options).items():
        for name in names:
            trace = modes.trace_of(name, size, 0)
            price = modes.Costs(group=0.001)
            o = modes.Simulation(trace, price, setup.mode, setup.wait_budget).run()
            outputs = [[i] for i in range(len(trace.streams))]
            outputs[0] = [9] if setup.mode == "phase" else outputs[0]
            runs.append(
                {
                    "setup": asdict(setup),
                    "simulated": modes.simulated(trace, setup),
                    "trace": name,
                    "prompt_tokens": sum(stream.prompt for stream in trace.streams),
                    "timing": asdict(o.timing),
                    "outputs": outputs,
                    "planner": {
                        "rounds": o.rounds,
                        "forwards": o.counts.forwards,
                        "held": o.held,
                        "max_wait": o.max_wait,
                        "wait_budget": o.wait_budget,
                    },
                    "failed_writes": 0,
                }
            )
    return {
        "machine": load("common").machine(1),
        "command": "none",
        "parts": list(modes.PARTS),
        "dtype": "float32",
        "seed": 0,
        "size": asdict(size),
        "wait_mode": "rw",
        "runs": modes.compared(runs),
        "costs": modes.fitted_costs(runs),
    }


def test_report_of_every_part(modes: ModuleType, tmp_path: Path) -> None:
    """Guards: a missing row, a share of the wrong run, other tokens that nobody sees, a report
    whose costs the simulation cannot read."""
    report = made_up_report(modes)
    rows = {row[0]: row for row in table_rows(modes.render(report))}
    assert list(rows) == [
        *("uniform", "bursty-update", "all-update", "poisson", "phase-skew", "heterogeneous"),
        *("rw, uniform", "rw, bursty-update", "phase, uniform", "phase, bursty-update"),
        *("serial, uniform", "owner, uniform", "owner, bursty-update"),
        *("dense, uniform", "dense, bursty-update", "w = 0", "w = 2"),
    ]
    assert rows["uniform"][2] == rows["w = 0"][2] == "1.000"
    assert float(rows["serial, uniform"][2]) < float(rows["phase, uniform"][2]) < 1
    assert rows["w = 2"][8:11] == [rows["w = 2"][8], "2", "0"] and int(rows["w = 2"][8]) > 0
    assert [name for name, row in rows.items() if row[11] != "0"] == [
        "phase, uniform",
        "phase, bursty-update",
    ]
    assert report["costs"]["error"] < 0.01
    (tmp_path / "modes.json").write_text(json.dumps(report))
    assert load("costs").Costs.read(tmp_path / "modes.json").group == pytest.approx(0.001)

    report["runs"][-1]["planner"]["max_wait"] = 3
    rows = {row[0]: row for row in table_rows(modes.render(report))}
    assert rows["w = 2"][9:11] == ["3", "1"]


def test_plots(modes: ModuleType, tmp_path: Path) -> None:
    """Guards: a run of ten minutes that ends without its plots."""
    drawn = modes.plot(made_up_report(modes), tmp_path)
    parts = load("modes_report").TITLES
    assert [file.name for file in drawn] == [f"modes-{part}.png" for part in parts]
    assert all(file.stat().st_size > 1000 for file in drawn)


@pytest.mark.engine
def test_modes_at_toy_size(modes: ModuleType) -> None:
    """Guards: an engine without the options named, waits that it does not count, a simulation of
    something else than the engine does, forks or sessions that say something else than requests
    alone, counts or memory that are not there."""
    given = ["--quick", "--only", "wait", "--budgets", "2", "--threads", "1"]
    options = modes.parse(given)
    size = modes.Size(4, 16, 9, CHUNK)
    setup = modes.Setup(wait_budget=2)
    model = GOLDEN / "llama_embed_proj"
    job = modes.job_for(options, model, size, setup, ["phase-skew"])
    prefix, length = job.runs[0].prompts[0][:15], 9
    prompts = [[*prefix, ids[0]] for ids in job.runs[0].prompts]
    plain = modes.TraceRun("in turn", prompts, [length] * 4, [0.0] * 4, in_turn=True)
    forked = modes.replace(plain, trace="forks", in_turn=False, fork=len(prefix))
    owners = modes.replace(plain, trace="sessions", in_turn=False, sessions=True)
    job = modes.replace(job, runs=[*job.runs, plain, forked, owners])
    result = modes.run_worker(modes.WORKER, asdict(job), {"OMP_NUM_THREADS": "1"}, 600.0)
    skewed, *same = result["runs"]

    planner, lengths = skewed["planner"], [len(output) for output in skewed["outputs"]]
    trace = modes.trace_of("phase-skew", size, 0)
    assert lengths == [stream.decode for stream in trace.streams]
    assert planner["wait_budget"] == planner["max_wait"] == 2 and planner["held"] > 0
    assert planner["forwards"] == modes.simulated(trace, setup)["forwards"]
    assert planner["rows"] == sum(lengths) - len(lengths)
    assert skewed["timing"]["tokens"] == sum(lengths) and skewed["failed_writes"] == 0

    assert len({str(run["outputs"]) for run in same}) == 1
    assert [run["at_once"] for run in same] == [1, 4, 4]
    for run in same:
        assert run["planner"]["rows"] == run["timing"]["decode_tokens"] == 4 * (length - 1)
        assert run["state"]["decode_writes"] == 4 and run["retracted"] == 0  # at 24 tokens
        assert run["peak_mib"] > 100
