"""The entry point of the benchmarks: every one can be asked, and tables say what was measured."""

import argparse
import importlib
import math
from pathlib import Path

import pytest
import torch
from scipy.stats import linregress

from benchmarks import __main__ as entry
from benchmarks import bench_gpu, bench_heads
from benchmarks.bench_growth import Growth, page
from benchmarks.shared import rounds
from benchmarks.shared.flops import Flops
from benchmarks.shared.profile import Profile
from benchmarks.shared.rounds import Round
from benchmarks.shared.sides import Side, attempt
from benchmarks.shared.timing import quartiles, spread
from lipaudit.theory import spectral

EXACT = "exact norms"
BOUND = f"bound sharp of {EXACT}"


@pytest.mark.parametrize("name", entry.names())
def test_every_benchmark_says_its_options_and_is_listed(name, capsys):
    module = importlib.import_module(f"benchmarks.{entry.names()[name].stem}")
    assert hasattr(module, "subjects") or hasattr(module, "run")
    with pytest.raises(SystemExit) as end:
        entry.options_of(module, name, ["--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: benchmarks {name}")
    assert f"\n{name} " in entry.listing()


def test_no_benchmark_has_a_clock_of_its_own():
    folder = Path(entry.__file__).parent
    own = [f.name for f in folder.glob("*.py") if "process_time" in f.read_text()]
    assert own == []


def test_a_table_gives_medians_with_ends_and_the_ratio_of_each_round():
    before = [Round(0.5, {"heads": s}) for s in (2.0, 4.0, 3.0)]
    after = [Round(0.5, {"heads": s}) for s in (1.0, 1.0, 3.0)]
    lines = list(rounds.table("demo", {"before": before, "after": after}))
    assert lines[0] == "| demo | before | after | after / before |"
    assert lines[2] == "| a plain forward (CPU ms) | 500 | 500 | 1 |"
    assert lines[3] == "| heads | 6 (4 to 8) | 2 (2 to 6) | 0.5 (0.25 to 1) |"


def test_a_table_says_how_far_norms_moved_and_which_bounds_are_below():
    before = Round(figures={EXACT: [1.0, 2.0, float("nan")], BOUND: [1.5, 2.0, 3.0]})
    after = Round(figures={EXACT: [1.0, 2.002, 4.0], BOUND: [0.9, 2.1, 5.0]})
    text = "\n".join(rounds.table("demo", {"before": [before], "after": [after]}))
    assert f"* {EXACT}: 2 norms, largest relative difference 1.0e-03; 1 not given" in text
    assert "* before: 0 of 2 bounds below the exact norm" in text
    assert "* after: 1 of 3 bounds below the exact norm" in text


def test_what_a_commit_lacks_is_left_out_and_named():
    lacking = attempt(lambda: importlib.import_module("lipaudit.nothing"))
    sides = {"before": [lacking], "after": [Round(1.0, {"heads": 2.0})]}
    text = "\n".join(rounds.table("demo", sides))
    assert "| heads | – | 2 | – |" in text
    assert "* before has no figures: ModuleNotFoundError" in text


def test_a_profile_leaves_out_what_other_watched_functions_take(monkeypatch):
    ticks = iter(range(100))
    inner = spectral.shift_exponent
    monkeypatch.setattr(
        spectral, "outer", lambda *given: spectral.shift_exponent(*given), raising=False
    )
    spectral.outer.__module__ = spectral.__name__
    functions = {"inner": ["shift_exponent"], "outer": ["outer"], "none": ["no_such_name"]}
    profile = Profile(functions, lambda: next(ticks))
    with profile.watching():
        spectral.outer(torch.ones(1), torch.zeros(1, dtype=torch.int64))
    assert spectral.shift_exponent is inner
    # The clock ticks at the start of both and at the end of both: 3 in all, 1 of them inside.
    assert profile.seconds == {"inner": 1, "outer": 2}


def test_the_cost_of_every_part_of_bounds_is_told_apart():
    (subject,) = bench_heads.subjects(
        argparse.Namespace(models=["demo"], samples=1, max_tokens=8)
    ).values()
    measured = subject()
    assert measured.problems == {}
    assert measured.seconds.keys() >= {*bench_heads.FUNCTIONS} - {bench_heads.OTHER}
    assert all(seconds > 0 for seconds in measured.seconds.values())


def test_a_side_is_a_process_that_says_what_it_can_measure():
    side = Side(entry.ROOT, ["command", "--", "bounds", "demo"])
    try:
        assert side.subjects == ["`lipaudit bounds demo`"]
        assert side.round("other").problems
    finally:
        side.end()
    assert side.process.returncode == 0


def test_spreads_are_ordered():
    assert spread([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, 2.0, 4.0)


def test_the_exponent_of_a_power_law_is_told_with_an_interval():
    assert Growth((1, 2, 4, 8), (3, 12, 48, 192)).exponent == pytest.approx((2.0, 0.0), abs=1e-9)
    slope, half = Growth((1, 2, 4, 8), (1, 2.2, 3.9, 8.3)).exponent
    fit = linregress(
        [math.log(n) for n in (1, 2, 4, 8)], [math.log(y) for y in (1, 2.2, 3.9, 8.3)]
    )
    assert (slope, half) == pytest.approx((fit.slope, 4.30265 * fit.stderr), rel=1e-4)


def test_what_is_too_little_to_fit_an_exponent_is_said():
    line = {"axis": "tokens", "measure": "attack", "seconds": {"step": 1.0}, "memory": 1.0}
    with pytest.raises(SystemExit, match="three numbers of tokens"):
        list(page([line | {"size": 64}, line | {"size": 128}]))
    lines = list(page([line | {"size": size} for size in (64, 128, 256)]))
    assert "| step | 0.00 ± 0.00 |" in lines


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_operations_are_counted_by_precision_in_every_mode(mode):
    a, b = torch.ones(3, 4, 5), torch.ones(6, 7, dtype=torch.float64)
    with mode(), Flops() as flops:
        a @ a.mT
        b @ b.mT
        spectral.shift_exponent(b[0] @ b.mT, torch.zeros(6, dtype=torch.int64))
    assert flops.counts == {"float32": 2 * 3 * 4 * 5 * 4, "float64": 2 * 6 * 7 * 6 + 2 * 7 * 6}


def test_a_run_on_a_card_goes_on_where_it_ended(tmp_path, capsys, monkeypatch):
    begun = []
    pieces = [(name, lambda name=name: begun.append(name) or {"rate": 1.0}) for name in "abc"]
    monkeypatch.setattr(bench_gpu, "pieces", lambda _: iter(pieces))
    asked = argparse.Namespace(results=tmp_path / "r.jsonl", seconds=100.0, table=False)
    asked.results.write_text('{"piece": "b", "rate": 2.0}\n')
    bench_gpu.run(asked)
    bench_gpu.run(asked)
    assert begun == ["a", "c"]
