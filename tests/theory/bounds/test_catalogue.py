"""Bounds that are computed by the function that their record names."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from lipaudit.errors import EvaluationError, LipauditError, UsageError
from lipaudit.tables.bounds import OWN, Bound
from lipaudit.theory.bounds.head_bounds import BOUNDS, separate_bounds

WORDS = dict.fromkeys(("label", "meaning", "formula", "source", "explanation"), "x")


@pytest.fixture
def compute(random_layer, monkeypatch):
    """Compute a bound by a function; all that it takes is a record."""
    heads = random_layer("affine").heads

    def by(function):
        module = ModuleType("formulas_of_a_stranger")
        module.function = function
        monkeypatch.setitem(sys.modules, module.__name__, module)
        record = Bound(name="strange", function=f"{module.__name__}:function", **WORDS)
        return separate_bounds(heads, [OWN["sharp"], record])

    return by


def test_a_function_is_handed_the_heads_and_its_values_come_by_name(compute):
    values = compute(lambda heads: heads.q.flatten(2).norm(dim=-1).float())
    assert list(values) == ["strange"]
    assert values["strange"].dtype == torch.float64
    assert (values["strange"] > 0).all()


def test_bounds_that_share_ingredients_are_not_computed_alone(random_layer):
    assert separate_bounds(random_layer("affine").heads, OWN.values()) == {}
    assert BOUNDS.keys() >= OWN.keys()


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda heads: None, "the bound strange returned NoneType, not floats of shape (2, 2)"),
        (lambda heads: heads.q.sum(), "the bound strange returned (), not floats of shape (2, 2)"),
        (lambda heads: heads.q[..., 0, 0].int(), "not floats of shape (2, 2) (batch, heads)"),
        (lambda heads: 1 / 0, "the bound strange failed: ZeroDivisionError: division by zero"),
    ],
)
def test_what_is_no_bound_is_refused_by_its_name(compute, function, says):
    with pytest.raises(EvaluationError) as caught:
        compute(function)
    assert says in caught.value.message
    assert "a bug in the plug-in formulas_of_a_stranger:function" in caught.value.advice


def test_an_error_that_a_user_can_act_on_is_passed_on(compute):
    error = EvaluationError("too many tokens", "take fewer")

    def refuse(heads):
        raise error

    with pytest.raises(LipauditError) as caught:
        compute(refuse)
    assert caught.value is error


@pytest.mark.parametrize("function", ["no_such_module:function", "math:no_such_function"])
def test_a_function_that_is_not_there_is_a_usage_error(random_layer, function):
    record = Bound(name="strange", function=function, **WORDS)
    with pytest.raises(UsageError, match=f"strange cannot be computed: {function} was not found"):
        separate_bounds(random_layer("affine").heads, [record])
