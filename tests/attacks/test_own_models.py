"""Own models held to truths that do not come from lipaudit."""

from __future__ import annotations

import pytest

from tests.attacks.own_models import CASES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_figure_is_the_truth(case):
    figure, truth = case.run()
    assert figure.startswith(truth)
