"""Attention that people write themselves: read right, or named; nothing is silent."""

from pathlib import Path

import pytest
import torch

import lipaudit
from tests.models.attention import own_modules
from tests.models.attention.own_modules import CASES

own_modules.load_cases()


PAGE = Path(__file__).parents[3] / "docs" / "mechanisms.md"


def test_page_says_how_each_is_read():
    """What is read is what is expected: the tests below."""
    text = PAGE.read_text(encoding="utf-8")
    said = own_modules.section(own_modules.expected_outcome)
    assert text[text.index(own_modules.HEADING) :] == said.lstrip("\n")


READ = ("read", "numerical")
"""Outcomes that do not depend on whether the model has other attention: tested once."""
RUNS = [(name, False) for name in CASES]
RUNS += [(name, True) for name, case in CASES.items() if case.outcome not in READ]


@pytest.mark.parametrize(("name", "beside"), RUNS)
def test_own_module_is_read_right_or_named(name, beside):
    """Heads of dense float64 autograd to 1e-6, no bound below them, no layer left out silently."""
    reading = own_modules.read(name, beside=beside)
    assert (reading.outcome, reading.fault) == (
        own_modules.expected(CASES[name], beside=beside),
        "",
    )


@pytest.mark.parametrize(
    ("name", "module", "out"),
    [
        ("head_loop", "own", lambda a: a.o),
        ("query_chunks", "own", lambda a: a.o),
        ("own_weight_loop", "own", lambda a: a.o),
        ("head_modules", "own", lambda a: a.o),
        ("nano", "own.sa", lambda a: a.sa.proj),
    ],
)
def test_a_loop_is_a_layer_of_its_parent_with_an_output_map(name, module, out):
    """Heads are named by the module of the loop; the layer's norm is that behind W_O."""
    built, x = own_modules.model(name, beside=False)
    report = lipaudit.measure(built, "bounds", data=x, dtype="float64", tol=1e-10)
    heads, layers = report.sections
    assert [(row.module, row.head) for row in heads.rows] == [(module, h) for h in range(2)]
    (layer,) = CASES[name].truth(built.own)
    w = out(built.own).weight
    exact = [
        torch.autograd.functional.jacobian(lambda z: own_modules.join(layer.heads(z)) @ w.T, one)
        for one in x
    ]
    norms = [torch.linalg.matrix_norm(j.flatten(0, 1).flatten(1), 2) for j in exact]
    assert layers.rows[0].exact_out == pytest.approx(float(torch.stack(norms).mean()), rel=1e-6)


@pytest.mark.parametrize("name", ["mapped", "mapped_heads", "masked_rows", "sample_batches"])
def test_norm_of_a_model_that_holds_it(name):
    """Against a dense Jacobian."""
    assert own_modules.whole(name) == ""
