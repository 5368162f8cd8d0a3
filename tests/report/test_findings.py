"""Findings: each names its rows, and chance explains none of them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from lipaudit.report.page.findings import compute_spearman, diagnose
from lipaudit.tables import Report
from tests.report.conftest import keep

pairs = st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 1)), min_size=8, max_size=40)


@settings(deadline=None, max_examples=50)
@given(pairs)
def test_rho_is_that_of_scipy_with_ties(points):
    x, y = zip(*points, strict=True)
    found = compute_spearman(x, y)
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert found is None
    else:
        assert found.rho == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)
        assert -1 <= found.low <= found.rho <= found.high <= 1


def test_limits_cover_the_true_value_about_as_often_as_they_say():
    """Normal pairs with correlation r have rho = 6/pi asin(r/2)."""
    generator = np.random.default_rng(0)
    truth = 6 / math.pi * math.asin(0.6 / 2)
    hits = 0
    for _ in range(1000):
        x, noise = generator.normal(size=(2, 50))
        found = compute_spearman(x.tolist(), (0.6 * x + 0.8 * noise).tolist())
        hits += found.low <= truth <= found.high
    assert 0.93 <= hits / 1000 <= 0.97


def test_too_few_pairs_say_nothing():
    assert compute_spearman(range(7), range(7)) is None
    assert compute_spearman(range(8), range(8)).rho == 1


def texts(report: Report) -> list[str]:
    return [text for text, _ in diagnose(report)]


def with_rows(report: Report, measure: str, **changes: object) -> Report:
    sections = tuple(
        s.model_copy(update={"rows": tuple(row.replace(**changes) for row in s.rows)})
        for s in report.sections
        if s.measure == measure
    )
    return keep(report, *sections)


def test_every_finding_names_a_section_of_the_report(report):
    assert [name for _, name in diagnose(report)] == ["attention", "jacobian", "jacobian"]


def test_sinks_are_heads_in_which_one_key_takes_more_than_half(report):
    assert any(t.startswith("In 3 of 12 heads one key takes") for t in texts(report))
    sinks = with_rows(report, "attention", sink_max=0.9, sink_token=0)
    assert any(t.endswith("at position 0 in all of them.") for t in texts(sinks))


def test_empty_and_blank_reports_say_nothing_wrong(report, blank_report):
    assert [*diagnose(keep(report))] == []
    assert texts(blank_report) == []


def _joined(report: Report) -> list[tuple[float, bool]]:
    """Norm and being broken at 2/255, of samples classified rightly, joined by id by hand."""
    jacobian, attack = report.section("jacobian").samples, report.section("attack").samples
    norms = dict(zip(jacobian["ids"], jacobian["norm"], strict=True))
    column = "robust@worst,linf,2/255"
    return [
        (norms[name], not kept)
        for name, right, kept in zip(attack["ids"], attack["correct"], attack[column], strict=True)
        if right and norms[name] is not None and norms[name] == norms[name]
    ]


def test_correlation_is_that_of_the_joined_samples(report):
    from scipy.stats import spearmanr

    norms, broken = zip(*_joined(report), strict=True)
    rho = spearmanr(norms, broken).statistic
    (text,) = [t for t in texts(report) if "‖J‖" in t and "are broken more often" in t]
    assert text.startswith(f"Samples with a {'larger' if rho > 0 else 'smaller'} ‖J‖ are broken")
    assert f" {rho:.2f} [" in text
    assert text.endswith(f"{len(norms)} samples.")


def test_attack_that_breaks_all_or_none_says_nothing(report):
    attack = report.section("attack")
    samples = dict(attack.samples)
    samples = {n: (1,) * 24 if n.startswith("robust@") else v for n, v in samples.items()}
    sections = tuple(
        s.model_copy(update={"samples": samples}) if s.measure == "attack" else s
        for s in report.sections
    )
    assert not [t for t in texts(keep(report, *sections)) if "broken more" in t]


def test_what_chance_explains_is_not_said(report):
    """Every second sample is broken, in the order of the norms: their ranks say nothing."""
    assert any("are broken more often" in t for t in texts(report))
    attack = report.section("attack")
    order = {name: i for i, name in enumerate(report.section("jacobian").samples["ids"])}
    every = tuple(order[name] % 2 for name in attack.samples["ids"])
    samples = {n: every if n.startswith("robust@") else v for n, v in attack.samples.items()}
    changed = attack.model_copy(update={"samples": samples})
    sections = tuple(changed if s.measure == "attack" else s for s in report.sections)
    assert not any("broken more" in t for t in texts(keep(report, *sections)))
