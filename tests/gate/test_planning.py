"""What the gate says that it will see is what its tests see."""

import math

import numpy as np
import pytest

from lipaudit.gate.planning import CHURN, SPREAD, describe_power
from lipaudit.gate.statistics import judge_median, judge_share
from lipaudit.schema import dumps
from tests.commands import invoke
from tests.gate.cases import NORMS, attack, flags, jacobian, report, with_samples


def named(text, before, after):
    return float(text.partition(before)[2].partition(after)[0])


@pytest.mark.parametrize("n", [64, 256, 1000])
def test_what_is_named_is_seen_in_nine_of_ten_runs(n):
    """Simulated with the gate's own tests; the names are rounded, and approximations."""
    rng = np.random.default_rng(n)
    norms = rng.lognormal(size=n)
    section = with_samples(jacobian(norms), correct=flags(n // 2, n))
    lines = [*describe_power(report(section))]
    drop = named(lines[0], "a drop of ", " points") / 100
    growth = named(lines[1], "growth of ", "%") / 100
    assert "clean accuracy" in lines[0]
    level, runs = 0.05 / 2, 2000
    flips = rng.multinomial(n, [CHURN + drop, CHURN, 1 - 2 * CHURN - drop], runs)
    seen = [judge_share(int(w), int(b), n).p(0.0) <= level for w, b, _ in flips]
    assert 0.8 <= np.mean(seen) <= 0.98
    changes = rng.normal(math.log1p(growth), SPREAD, (runs, n))
    if growth > 0.1:  # a smaller one is named by the limit of the rule
        assert 0.8 <= np.mean([judge_median(x).p(0.0) <= level for x in changes]) <= 0.98
    assert np.mean([judge_median(x).p(0.0) <= level for x in changes]) >= 0.8


def test_saving_a_baseline_says_what_strict_would_fail(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for n, strict in ((128, True), (137, False)):
        (tmp_path / "r.json").write_text(dumps(report(attack(flags(n // 2, n)))))
        said = invoke("baseline", "save", "r.json", "-o", f"b{n}.json").stderr
        assert f"with {n} samples in 9 of 10 runs a drop of " in said
        assert ("--strict fails even an equally good checkpoint" in said) == strict
    few = report(jacobian(NORMS[:4]))
    assert "with 4 samples no change is proven, 6 are needed: Jacobian norm" in [
        *describe_power(few)
    ]
