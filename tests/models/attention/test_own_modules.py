"""Attention that people write themselves: read right, or named; nothing is silent."""

from __future__ import annotations

import pytest

from tests.models.attention import own_modules
from tests.models.attention.own_modules import CASES

own_modules.load_cases()


def _cases(beside: bool):
    for name, case in CASES.items():
        reason = own_modules.pending(case, beside=beside)
        marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
        yield pytest.param(
            name, beside, id=f"{name}-{'beside' if beside else 'alone'}", marks=marks
        )


def test_suite_is_large():
    assert len(CASES) >= 100


@pytest.mark.parametrize(("name", "beside"), [*_cases(False), *_cases(True)])
def test_own_module_is_read_right_or_named(name, beside):
    """Heads of dense float64 autograd to 1e-6, no bound below them, no layer left out silently."""
    reading = own_modules.read(name, beside=beside)
    assert (reading.outcome, reading.fault) == (
        own_modules.expected(CASES[name], beside=beside),
        "",
    )
