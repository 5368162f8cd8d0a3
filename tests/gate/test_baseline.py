import math
import shlex

import numpy as np
import pytest

from lipaudit import schema
from lipaudit.errors import BaselineError, UsageError
from lipaudit.gate import judge
from lipaudit.gate.conditions import find_problems, load_baseline, promote
from lipaudit.tables import Array
from tests.commands import invoke

EXACT = np.random.default_rng(1).lognormal(0, 0.3, (144, 8))
ROBUST = np.r_[np.ones(90, int), np.zeros(38, int)]


def nulled(section):
    """Every norm null, as a measure writes what it could not compute."""
    none = (None,) * len(section.samples["norm"])
    return section.model_copy(update={"samples": {**section.samples, "norm": none}})


@pytest.fixture
def full(report, bounds, jacobian, attack, norms):
    section = bounds(EXACT, heads=12)
    edges = Array.of(np.linspace(0, 1, 51))
    histogram = {"g1_ratio_hist": Array.of(np.ones((144, 50))), "g1_ratio_edges": edges}
    section = section.model_copy(update={"arrays": section.arrays | histogram})
    return report(attack(ROBUST), jacobian(norms), section)


def test_a_baseline_is_an_ordinary_report_that_judges_like_the_original(tmp_path, full):
    path = tmp_path / "baseline.json"
    path.write_text(schema.dumps(promote(full, "first release")), encoding="utf-8")
    baseline = load_baseline(path)
    assert baseline.run.reason == "first release"
    assert judge(full, baseline).verdicts == judge(full, full).verdicts


def test_it_is_small_and_has_one_time_stamp(full):
    text = schema.dumps(promote(full, "why"))
    assert len(text) < 2**17
    assert "\r" not in text
    assert "g1_ratio_hist" not in text
    assert '"seconds": 1.25' not in text
    assert text.count("2026-") == 1
    assert promote(promote(full, "why"), "why") == promote(full, "why")


def test_an_unfit_report_and_one_without_a_reason_are_not_promoted(
    report, jacobian, bounds, norms
):
    for reason in ("", "  "):
        with pytest.raises(UsageError, match="reason"):
            promote(report(jacobian(norms)), reason)
    with np.errstate(all="ignore"):
        unfit = {
            "cut short": report(jacobian(norms), status="partial"),
            "1 value is not finite": report(jacobian(np.r_[norms, math.nan])),
            "did not converge": report(bounds(EXACT, converged=False)),
            "64 values are not finite": report(nulled(jacobian(norms))),
            "no samples": report(jacobian([])),
            "no sections": report(),
        }
    for words, bad in unfit.items():
        assert words in find_problems(bad)[0]
        with pytest.raises(BaselineError, match=words):
            promote(bad, "why")


@pytest.mark.parametrize("where", [(), ("-o", "kept here.json")])
def test_the_command_that_a_refusal_names_works_as_it_stands(where, full, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    (tmp_path / "my report.json").write_text(schema.dumps(full))
    args = ["baseline", "save", "my report.json", *where]
    invoke(*args)
    refused = invoke(*args, code=2)
    command = refused.stderr.partition("Use: lipaudit ")[2].strip()
    invoke(*shlex.split(command))
    path = where[1] if where else "lipaudit-baseline.json"
    assert load_baseline(tmp_path / path).run.reason == "..."
