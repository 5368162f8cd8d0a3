"""Every family of timm and every type of transformers: no crash, no number that is wrong.

Run by hand or nightly, with -m reference; docs/coverage.md holds the outcomes.
"""

import pytest

from benchmarks.reference import certificates
from benchmarks.reference.cases import Case, cases, outcome_of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """List the models where they are asked for: the list takes seconds."""
    if "case" not in metafunc.fixturenames:
        return
    wanted = metafunc.config.getoption("markexpr")
    listed = "reference" in wanted and "not reference" not in wanted
    known = cases() if listed else ()
    metafunc.parametrize("case", known, ids=[f"{case.library}-{case.name}" for case in known])


@pytest.mark.reference
def test_every_number_is_true(case: Case):
    outcome = outcome_of(case)
    assert outcome.outcome not in ("crash", "wrong", "unfinished"), "\n".join(outcome.reasons)


@pytest.mark.reference
def test_every_certified_range_holds(case: Case):
    outcome, why = certificates.outcome_of(case)
    assert outcome not in ("wrong", "crash"), why


@pytest.mark.ci
def test_the_comparison_itself_runs():
    """One small family: all of them take half an hour, and are run by hand."""
    outcome = outcome_of(Case("timm", "deit"))
    assert outcome.outcome == "ok"
    assert outcome.checked > 100
