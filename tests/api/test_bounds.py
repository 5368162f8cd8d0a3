"""The bounds on bare tensors: those of the theory, above the dense Jacobian's norm."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import lipaudit
from lipaudit.errors import EvaluationError, UsageError
from lipaudit.theory.bounds.record import load_bounds
from lipaudit.theory.head_norms import head_norms


def attention(x, wq, wk, wv, *, biases=(0, 0, 0), scale=None, causal=False, mask=None):
    q, k, v = (x @ w + b for w, b in zip((wq, wk, wv), biases, strict=True))
    logits = (q.shape[-1] ** -0.5 if scale is None else scale) * q @ k.mT
    logits = logits if mask is None else logits + mask
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits).triu(1).bool(), -torch.inf)
    return logits.softmax(-1) @ v


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"scale": 2.0},
        {"causal": True},
        {"mask": torch.linspace(-1, 1, 25).reshape(5, 5)},
        {"biases": tuple(torch.linspace(0, 1, 3).double() * i for i in (1, -1, 2))},
    ],
    ids=["plain", "scale", "causal", "mask", "biases"],
)
def test_the_norm_is_that_of_the_dense_jacobian_and_no_bound_is_below(how):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(5, 4, generator=rng, dtype=torch.float64)
    weights = torch.randn(3, 4, 3, generator=rng, dtype=torch.float64)
    dense = torch.autograd.functional.jacobian(lambda z: attention(z, *weights, **how), x)
    truth = torch.linalg.matrix_norm(dense.reshape(15, 20), 2)
    norm = lipaudit.bounds.exact(x, *weights, **how)
    assert norm.shape == ()
    torch.testing.assert_close(norm, truth, rtol=1e-6, atol=0)
    bounds = lipaudit.bounds.every(x, *weights, **how)
    assert bounds.keys() == load_bounds().keys()
    for name, bound in bounds.items():
        if name == "hu" and not bound.isfinite():
            continue
        assert bound >= truth, name
        assert getattr(lipaudit.bounds, name)(x, *weights, **how) == bound


def test_shapes_follow_the_tensors():
    x, w = torch.randn(2, 5, 4), torch.randn(3, 4, 2)
    assert lipaudit.bounds.sharp(x, w, w, w).shape == (2, 3)
    assert lipaudit.bounds.sharp(x[0], w, w, w).shape == (3,)
    assert lipaudit.bounds.sharp(x, w[0], w[0], w[0]).shape == (2,)
    assert "||sum_j J_ij J_lj^T||" in lipaudit.bounds.sharp.__doc__
    assert "sharp" in dir(lipaudit.bounds)


def test_one_bias_for_all_heads_is_one_for_each():
    rng = torch.Generator().manual_seed(1)
    x, bias = torch.randn(5, 4, generator=rng), torch.randn(2, generator=rng)
    weights = torch.randn(3, 3, 4, 2, generator=rng)
    shared = lipaudit.bounds.every(x, *weights, biases=(bias, None, bias))
    for head in range(3):
        alone = lipaudit.bounds.every(x, *weights[:, head], biases=(bias, None, bias))
        for name, value in alone.items():
            torch.testing.assert_close(shared[name][head], value, equal_nan=True, msg=name)


def test_what_does_not_fit_is_refused():
    x, w = torch.randn(5, 4), torch.randn(3, 2)
    with pytest.raises(UsageError, match="does not fit"):
        lipaudit.bounds.exact(x, w, w, w)
    w = torch.ones(4, 2)
    with pytest.raises(UsageError, match=r"W_K of shape \(1, 4, 3\) does not fit"):
        lipaudit.bounds.sharp(x, w, torch.ones(4, 3), w)
    with pytest.raises(AttributeError, match="no bound 'blunt'"):
        lipaudit.bounds.blunt(x, w, w, w)


@pytest.mark.parametrize("name", [*load_bounds(), "exact"])
@pytest.mark.parametrize("kind", [np.asarray, lambda t: np.asarray(t)[::-1][::-1], Tensor.tolist])
def test_arrays_and_lists_are_taken_like_tensors(name, kind):
    rng = torch.Generator().manual_seed(1)
    x, *weights = (torch.randn(size, generator=rng).double() for size in [(5, 4), *[(4, 2)] * 3])
    bound, mask = getattr(lipaudit.bounds, name), torch.zeros(5, 5)
    expected = bound(x, *weights, mask=mask)
    taken = bound(*map(kind, (x, *weights)), mask=kind(mask))
    torch.testing.assert_close(taken, expected, equal_nan=True)
    assert taken.shape == expected.shape


@pytest.mark.parametrize(
    ("x", "w", "how", "message"),
    [
        ((0, 4), (4, 2), {}, "tokens of shape (0, 4)"),
        ((5, 0), (0, 2), {}, "tokens of shape (5, 0)"),
        ((5, 4), (4, 0), {}, "W_Q of shape (4, 0)"),
        ((5, 4), (0, 4, 2), {}, "W_Q of shape (0, 4, 2)"),
        ((4,), (4, 2), {}, "tokens of shape (4,)"),
        ((1, 1, 5, 4), (4, 2), {}, "tokens of shape (1, 1, 5, 4)"),
        ((5, 4), (4,), {}, "W_Q of shape (4,)"),
        ((5, 4), (4, 2), {"mask": np.zeros((4, 5))}, "mask of shape (1, 1, 4, 5) does not fit"),
        ((5, 4), (4, 2), {"mask": np.zeros(0)}, "mask of shape (0,)"),
        ((5, 4), (4, 2), {"biases": (None, np.zeros(3), None)}, "bias k of shape (1, 3)"),
        ((5, 4), (4, 2), {"biases": (np.zeros((3, 2)), None, None)}, "bias q of shape (3, 2)"),
        ((5, 4), (4, 2), {"mask": [["x"]]}, "mask: "),
        ((5, 4), (4, 2), {"mask": [[1], [1, 2]]}, "mask: "),
        ((5, 4), (4, 2), {"mask": np.full((5, 5), 1j)}, "mask of shape (5, 5)"),
        # Added to the logits, as the text says, they would leave every key visible.
        ((5, 4), (4, 2), {"mask": np.tri(5) > 0}, "mask: truth values"),
        ((5, 4), (4, 2), {"mask": torch.ones(5, 5, dtype=torch.bool)}, "mask: truth values"),
    ],
)
@pytest.mark.parametrize("kind", [np.ones, torch.ones])
def test_shapes_are_named_in_one_sentence(x, w, how, message, kind):
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        lipaudit.bounds.exact(kind(x), kind(w), kind(w), kind(w), **how)
    assert caught.value.advice
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["sharp", "exact"])
def test_parameters_of_a_model_are_taken_like_tensors(name):
    x, w = torch.randn(5, 4), torch.randn(3, 4, 2)
    function = getattr(lipaudit.bounds, name)
    value = function(x, *torch.nn.Parameter(w))
    assert not value.requires_grad
    assert value == function(x, *w)


@pytest.mark.parametrize(
    "how", [{"mask": [[0.0] * 4 + [math.nan]]}, {"scale": math.nan}, {"scale": math.inf}]
)
def test_a_mask_or_scale_that_is_not_finite_is_named(how):
    x, w = torch.randn(5, 4), torch.randn(3, 4, 2)
    with pytest.raises(EvaluationError, match="attention map has undefined entries"):
        lipaudit.bounds.sharp(x, *w, **how)


def test_a_norm_that_did_not_converge_is_not_given(monkeypatch):
    x, w = torch.randn(5, 4), torch.randn(3, 4, 2)
    norms = head_norms(lipaudit.bounds.heads(x, *w), seeds=[0], tol=1e-6)
    unconverged = replace(norms, converged=torch.zeros_like(norms.converged))
    monkeypatch.setattr("lipaudit.tensors.head_norms", lambda *_args, **_how: unconverged)
    with pytest.raises(EvaluationError, match="1 norms did not converge"):
        lipaudit.bounds.exact(x, *w)


def test_the_norm_found_in_a_ball_is_at_least_that_at_its_centre():
    rng = torch.Generator().manual_seed(0)
    # Two heads without logits, ||J|| = ||W_V|| at all tokens: values that a few power steps do not
    # tell apart.
    values = torch.linalg.qr(torch.randn(2, 12, 12, generator=rng, dtype=torch.float64)).Q
    values = values * torch.linspace(0.9, 1.0, 12, dtype=torch.float64)
    zero = torch.zeros_like(values)
    x = torch.randn(1, 12, generator=rng, dtype=torch.float64)
    found = lipaudit.bounds.ball_norm(x, zero, zero, values, 0.1)
    assert found.tolist() == pytest.approx([1.0, 1.0], abs=1e-6)


def test_a_ball_is_bracketed():
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(5, 4, generator=rng, dtype=torch.float64)
    weights = torch.randn(3, 4, 3, generator=rng, dtype=torch.float64)
    at_x = lipaudit.bounds.exact(x, *weights, causal=True)
    found = lipaudit.bounds.ball_norm(x, *weights, 0.1, causal=True)
    bound = lipaudit.bounds.ball_sharp(x, *weights, 0.1, causal=True)
    assert at_x.shape == found.shape == bound.shape == ()
    assert at_x < found < bound
    nowhere_else = lipaudit.bounds.ball_sharp(x, *weights, 0.0, causal=True)
    assert nowhere_else == lipaudit.bounds.sharp(x, *weights, causal=True)
