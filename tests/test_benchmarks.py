"""Benchmarks and studies: all can be asked, tables say what was measured, cut ones go on."""

import argparse
import gzip
import importlib
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import linregress, spearmanr, t

from benchmarks import __main__ as entry
from benchmarks import bench_gpu, bench_heads
from benchmarks import study_fashion as fashion
from benchmarks.bench_growth import Growth, page
from benchmarks.shared import rounds, study
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
    assert "process_time" not in Path(module.__file__).read_text()  # no clock of its own


def test_a_table_gives_medians_with_ends_ratios_moved_norms_bounds_below_and_what_is_lacking():
    before = [Round(0.5, {"heads": s}) for s in (2.0, 4.0, 3.0)]
    after = [Round(0.5, {"heads": s}) for s in (1.0, 1.0, 3.0)]
    lines = list(rounds.table("demo", {"before": before, "after": after}))
    assert lines[0] == "| demo | before | after | after / before |"
    assert lines[2] == "| a plain forward (CPU ms) | 500 | 500 | 1 |"
    assert lines[3] == "| heads | 6 (4 to 8) | 2 (2 to 6) | 0.5 (0.25 to 1) |"
    before = Round(figures={EXACT: [1.0, 2.0, float("nan")], BOUND: [1.5, 2.0, 3.0]})
    after = Round(figures={EXACT: [1.0, 2.002, 4.0], BOUND: [0.9, 2.1, 5.0]})
    text = "\n".join(rounds.table("demo", {"before": [before], "after": [after]}))
    assert f"* {EXACT}: 2 norms, largest relative difference 1.0e-03; 1 not given" in text
    assert "* before: 0 of 2 bounds below the exact norm" in text
    assert "* after: 1 of 3 bounds below the exact norm" in text
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
    asked = argparse.Namespace(models=["demo"], samples=1, max_tokens=8)
    (subject,) = bench_heads.subjects(asked).values()
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


def test_the_exponent_of_a_power_law_is_told_with_an_interval():
    sizes, seconds = (1, 2, 4, 8), (1, 2.2, 3.9, 8.3)
    assert Growth(sizes, (3, 12, 48, 192)).exponent == pytest.approx((2.0, 0.0), abs=1e-9)
    slope, half = Growth(sizes, seconds).exponent
    fit = linregress([math.log(n) for n in sizes], [math.log(y) for y in seconds])
    assert (slope, half) == pytest.approx((fit.slope, 4.30265 * fit.stderr), rel=1e-4)
    assert spread([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, 2.0, 4.0)
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


FEW = ("--train", "32", "--test", "4", "--read", "2", "--standard", "0", "--certified", "0")


def write_idx(path, array):
    head = struct.pack(f">4B{array.ndim}i", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(head + array.tobytes()))


@pytest.fixture
def asked(tmp_path, monkeypatch):
    draw = np.random.default_rng(0)
    for part in ("train", "t10k"):
        pixels = draw.integers(256, size=(32, 28, 28), dtype=np.uint8)
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", pixels)
        labels = draw.integers(10, size=32, dtype=np.uint8)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", labels)
    recipe = fashion.SCRATCH.model_copy(update={"epochs": 1})
    monkeypatch.setattr(fashion, "SCRATCH", recipe)
    monkeypatch.setattr(fashion, "ON", {})
    given = (str(tmp_path / "results"), "--data", str(tmp_path), "--seeds", "1", *FEW)
    return entry.options_of(fashion, "study_fashion", given)


@pytest.mark.ci
def test_the_study_goes_on_where_it_was_cut(asked, monkeypatch, capsys):
    monkeypatch.setattr(study, "ROUNDS", 1)
    pieces, asked.picture = fashion.plan(asked), asked.results.with_suffix(".svg")
    whole, seen = dict(fashion.MEASURED), []

    def noted(stage):
        def figures(net, batch):
            seen.append(stage)
            if len(seen) == 12:
                raise KeyboardInterrupt
            return whole[stage](net, batch)

        return figures

    monkeypatch.setattr(fashion, "MEASURED", {stage: noted(stage) for stage in whole})
    with pytest.raises(KeyboardInterrupt):
        fashion.run(asked)
    fashion.run(asked)
    assert len(seen) == len(pieces) + 1
    assert {p.name for p in asked.results.glob("*.json")} == {piece.file for piece in pieces}
    assert "smallest radius found" in asked.picture.read_text()
    out = capsys.readouterr().out
    for label in ("g1", "head norm", "Jacobian norm", "clean accuracy", "`quick`, 0.02"):
        assert f"| {label} |" in out


def test_a_table_is_of_the_images_that_every_run_has(asked):
    asked.results.mkdir()
    asked.test, asked.read = 512, 0
    for piece in fashion.plan(asked):
        if piece.start == 0 or piece.run != "k = 10":
            text = '{"clean": [1, 0], "quick, 0.02": [1, 0], "quick, 0.05": [0, 0]}'
            (asked.results / piece.file).write_text(text)
    lines = list(fashion.page(asked))
    assert "| clean accuracy | 2 | 50.0% | +0.0 pp | +0.0 pp | +0.0 pp |" in lines


def test_radii_of_a_linear_classifier_are_those_of_its_margins():
    torch.manual_seed(0)
    weight, x = torch.randn(2, 784), 0.3 + 0.4 * torch.rand(16, 1, 28, 28)
    f = lambda z: z.flatten(1) @ weight.T  # noqa: E731
    logits = f(x)
    exact = (logits[:, 0] - logits[:, 1]).abs() / (weight[0] - weight[1]).abs().sum()
    within = (exact > study.LEAST) & (exact < 0.25)
    assert within.sum() > 8
    found = study.nearest(f, x, logits.argmax(1))
    assert (found >= exact * (1 - 1e-4))[within].all()
    assert (found <= exact * 1.03)[within].all()


def test_a_change_has_the_limits_of_student():
    values = [0.3, 0.1, -0.2, 0.4]
    limits = t.interval(0.95, 3, np.mean(values), np.std(values, ddof=1) / 2)
    mean, half = study.change(values)
    assert (mean - half, mean + half) == pytest.approx(limits)
    assert math.isnan(study.change([1.0]).half)
    shares = study.cells([[0.5, 0.5], [0.6, 0.4]], share=True)
    assert list(shares) == ["50.0%", f"+0.0 ± {100 * t.ppf(0.975, 1) * 0.1:.1f} pp"]


def test_rho_is_that_of_the_images_with_a_radius():
    draw = np.random.default_rng(1)
    values = draw.normal(size=60)
    radius = values + draw.normal(size=60)
    radius[:10] = np.nan
    rho = spearmanr(values[10:], radius[10:]).statistic
    pair = (values, radius)
    assert study.mean_rho([pair], np.arange(60)) == pytest.approx(rho)
    mirrored = study.mean_rho([pair, (-values, radius)], np.arange(60))
    assert mirrored == pytest.approx(0, abs=1e-12)
    low, high = study.rho_limits([pair])
    assert low < rho < high < 1
    assert high - low == pytest.approx(4 * (1 - rho**2) / math.sqrt(50), rel=0.5)
