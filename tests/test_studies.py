"""The studies: they go on where they were cut, and their tables are of what every run has."""

import gzip
import math
import struct

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr, t

from benchmarks import __main__ as entry
from benchmarks import study_fashion as fashion
from benchmarks.shared import study

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
    assert "| clean accuracy | 2 | 50.0 % | +0.0 pp | +0.0 pp | +0.0 pp |" in lines


def test_radii_of_a_linear_classifier_are_those_of_its_margins():
    torch.manual_seed(0)
    weight = torch.randn(2, 784)
    x = 0.3 + 0.4 * torch.rand(16, 1, 28, 28)

    def f(z):
        return z.flatten(1) @ weight.T

    logits = f(x)
    slope = (weight[0] - weight[1]).abs().sum()
    exact = (logits[:, 0] - logits[:, 1]).abs() / slope
    within = (exact > study.LEAST) & (exact < 0.25)
    assert within.sum() > 8
    found = study.nearest(f, x, logits.argmax(1))
    assert (found >= exact * (1 - 1e-4))[within].all()
    assert (found <= exact * 1.03)[within].all()


def test_a_change_has_the_limits_of_student():
    values = [0.3, 0.1, -0.2, 0.4]
    low, high = t.interval(0.95, 3, np.mean(values), np.std(values, ddof=1) / 2)
    mean, half = study.change(values)
    assert (mean - half, mean + half) == pytest.approx((low, high))
    assert math.isnan(study.change([1.0]).half)
    shares = study.cells([[0.5, 0.5], [0.6, 0.4]], share=True)
    assert list(shares) == ["50.0 %", f"+0.0 ± {100 * t.ppf(0.975, 1) * 0.1:.1f} pp"]


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
