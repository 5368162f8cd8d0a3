"""Attention that people write themselves: read right, or named; nothing is silent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.attention import own_modules
from tests.models.attention.own_modules import CASES

own_modules.load_cases()


PAGE = Path(__file__).parents[3] / "docs" / "mechanisms.md"


def test_page_says_how_each_is_read():
    """What is read is what is expected: the tests below."""
    text = PAGE.read_text(encoding="utf-8")
    said = own_modules.section(own_modules.expected_outcome)
    assert text[text.index(own_modules.HEADING) :] == said.lstrip("\n")


def test_suite_is_large():
    assert len(CASES) >= 100


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside"])
@pytest.mark.parametrize("name", CASES)
def test_own_module_is_read_right_or_named(name, beside):
    """Heads of dense float64 autograd to 1e-6, no bound below them, no layer left out silently."""
    reading = own_modules.read(name, beside=beside)
    assert (reading.outcome, reading.fault) == (
        own_modules.expected(CASES[name], beside=beside),
        "",
    )


@pytest.mark.parametrize("name", ["mapped", "mapped_heads", "masked_rows", "sample_batches"])
def test_norm_of_a_model_that_holds_it(name):
    """Against a dense Jacobian."""
    assert own_modules.whole(name) == ""
