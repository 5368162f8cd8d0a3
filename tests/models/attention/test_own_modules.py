"""Attention that people write themselves: read right, or named; nothing is silent."""

import pytest
import torch

import lipaudit
from tests.models.attention import own_modules
from tests.models.attention.own_modules import CASES


def test_the_list_says_how_each_is_read():
    """What is read is what is expected: the tests below."""
    text = own_modules.LISTING.read_text(encoding="utf-8")
    assert text == own_modules.listing(own_modules.expected)


READ = ("read", "numerical")
"""Outcomes that do not depend on whether the model has other attention: tested once."""
RUNS = [(what, False) for what in CASES]
RUNS += [(what, True) for what, case in CASES.items() if case.outcome not in READ]
FIRST = {own_modules.expected(*run): run for run in reversed(RUNS)}.values()
"""One of each outcome; .ci/run reads the others, too."""


@pytest.mark.parametrize(
    ("what", "beside"),
    [pytest.param(*run, marks=() if run in FIRST else pytest.mark.ci) for run in RUNS],
)
def test_own_module_is_read_right_or_named(what, beside):
    """Heads of dense float64 autograd to 1e-6, no bound below them, no layer left out silently."""
    assert own_modules.read(what, beside) == own_modules.expected(what, beside)


@pytest.mark.parametrize(
    ("what", "module", "out"),
    [
        ("a loop over the heads", "own", lambda a: a.o),
        ("chunks of queries", "own", lambda a: a.o),
        ("a loop over a ParameterList: three matrices per head", "own", lambda a: a.o),
        ("a module per head (nanoGPT's Head), side by side", "own", lambda a: a.o),
        ("nanoGPT's MultiHeadAttention of causal heads", "own.sa", lambda a: a.sa.proj),
    ],
)
def test_a_loop_is_a_layer_of_its_parent_with_an_output_map(what, module, out):
    """Heads are named by the module of the loop; the layer's norm is that behind W_O."""
    built, x = own_modules.model(what)
    report = lipaudit.measure(built, "bounds", data=x, dtype="float64", tol=1e-10)
    heads, layers = report.sections
    assert [(row.module, row.head) for row in heads.rows] == [(module, h) for h in range(2)]
    (layer,) = CASES[what].truth(built.own)
    w = out(built.own).weight
    exact = [norm(lambda z: own_modules.join(layer.heads(z)) @ w.T, one) for one in x]
    assert layers.rows[0].exact_out == pytest.approx(sum(exact) / len(exact), rel=1e-6)


@pytest.mark.parametrize(
    "what",
    [
        "torch.func.vmap over the samples",
        "torch.func.vmap over the heads",
        "a fully masked row and nan_to_num",
        "a loop over the samples, batches of one",
    ],
)
def test_norm_of_a_model_that_holds_it(what):
    """Against a dense Jacobian, without a warning that the gradient is no derivative."""
    built, x = own_modules.model(what, beside=True)
    report = lipaudit.measure(built, "jacobian", data=x, dtype="float64", tol=1e-10)
    exact = [norm(lambda z: built(z[None]), one) for one in x]
    assert report.section("jacobian").rows[0].max == pytest.approx(max(exact), rel=1e-6)
    assert not own_modules.warned(report)


def norm(f, x):
    """Return ||J|| of f at x, dense."""
    jacobian = torch.autograd.functional.jacobian(f, x)
    return float(torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()), 2))
