"""A bound is its record: the function is in it, and what it returns is checked."""

import pytest
import torch

from lipaudit.errors import EvaluationError, LipauditError
from lipaudit.theory.bounds.head_bounds import head_bounds
from lipaudit.theory.bounds.record import Bound
from lipaudit.theory.bounds.sharp import SHARP

WORDS = dict.fromkeys(("label", "meaning", "formula", "source", "explanation"), "x")


@pytest.fixture
def compute(random_layer):
    """Compute a bound by a function; all that it takes is a record."""
    heads = random_layer("affine").heads

    def by(function):
        return head_bounds(heads, bounds=[Bound(name="strange", compute=function, **WORDS)])

    return by


def test_a_function_is_handed_the_ingredients_and_its_values_come_by_name(compute):
    values = compute(lambda known: (known.p_norm * known.weights.v).float())
    assert "sharp" not in values
    assert values["strange"].dtype == torch.float64
    assert (values["strange"] > 0).all()


def test_a_bound_alone_is_what_it_is_among_all(random_layer):
    heads = random_layer("affine").heads
    assert head_bounds(heads, bounds=[SHARP])["sharp"].equal(head_bounds(heads)["sharp"])


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda known: None, "the bound strange returned NoneType, not floats of shape (2, 2)"),
        (lambda known: known.at.p.sum(), "the bound strange returned (), not floats of shape"),
        (lambda known: known.p_norm.int(), "not floats of shape (2, 2) (batch, heads)"),
        (lambda known: 1 / 0, "the bound strange failed: ZeroDivisionError: division by zero"),
    ],
)
def test_what_is_no_bound_is_refused_by_its_name(compute, function, says):
    with pytest.raises(EvaluationError) as caught:
        compute(function)
    assert says in caught.value.message
    assert f"a bug in the plug-in {function.__module__}:<lambda>" in caught.value.advice


def test_an_error_that_a_user_can_act_on_is_passed_on(compute):
    error = EvaluationError("too many tokens", "take fewer")

    def refuse(known):
        raise error

    with pytest.raises(LipauditError) as caught:
        compute(refuse)
    assert caught.value is error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
        (FileNotFoundError("table.csv"), EvaluationError),
    ],
)
def test_a_bound_is_not_blamed_for_memory_but_for_its_own_files(compute, error, kind):
    def fail(known):
        raise error

    with pytest.raises(kind):
        compute(fail)
