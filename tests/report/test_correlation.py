from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from lipaudit.report.page.correlation import spearman

pairs = st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 1)), min_size=8, max_size=40)


@settings(deadline=None, max_examples=50)
@given(pairs)
def test_rho_is_that_of_scipy_with_ties(points):
    x, y = zip(*points, strict=True)
    found = spearman(x, y)
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
        found = spearman(x.tolist(), (0.6 * x + 0.8 * noise).tolist())
        hits += found.low <= truth <= found.high
    assert 0.93 <= hits / 1000 <= 0.97


def test_too_few_pairs_say_nothing():
    assert spearman(range(7), range(7)) is None
    assert spearman(range(8), range(8)).rho == 1
