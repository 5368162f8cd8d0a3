"""Attention that people write themselves: read right, or named; nothing is silent."""

from pathlib import Path

import pytest
import torch
from torch import nn

import lipaudit
from lipaudit.engine import prepare
from lipaudit.models.attention import capture, surveyor, trace, uses
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
RUNS = [(name, True) for name in CASES]
RUNS += [(name, False) for name, case in CASES.items() if case.outcome not in READ]


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


_is_map = trace.Tracer._is_map


def _is_parameter(self, factors, address):
    """A weight is a leaf, as it was before rule 1."""
    weight = factors.weight
    leaf = isinstance(weight, nn.Parameter) or isinstance(weight._base, nn.Parameter)
    return leaf and _is_map(self, factors, address)


RULES = {
    "what is computed from parameters is a weight": (
        [(trace.Tracer, "_is_map", _is_parameter)],
        "times_one",
    ),
    "X is what the module of the attention takes": (
        [(surveyor, "_holds", lambda frame, _call: not frame.name)],
        "identity_values",
    ),
    "heads that one map reads are no windows": (
        [(trace, "divides_channels", lambda _t: False)],
        "tutorial",
    ),
    "tokens in another order are one input": (
        [(surveyor, "_is_reordered", lambda *_: False)],
        "rolled",
    ),
    "every use of a map is accounted for": (
        [(uses.Uses, "beyond", lambda _self, _modules: [])],
        "two_values",
    ),
    "heads that are taken one by one are one layer": (
        [(surveyor.Surveyor, "find_loops", lambda _self: [])],
        "head_loop",
    ),
    "heads with maps of their own are one layer": (
        [(surveyor, "_are_heads", lambda _group: False)],
        "nano",
    ),
    "heads that cannot be joined are named": (
        [(surveyor, "_share_input", lambda *_: False)],
        "uneven_modules",
    ),
    "a sample that is taken alone is no batch": (
        [(surveyor.Surveyor, "leave_loops", lambda _self: None)],
        "sample_loop",
    ),
    "a closed form is proven on every sample": (
        [(capture, "matches_autograd", lambda *_: True)],
        "relu_logits alone",
    ),
    "autograd is compared with the function": (
        [(prepare, "compare_derivative", lambda *_: ())],
        "rounded_behind",
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_is_switched_off_is_missed(rule, monkeypatch):
    changes, module = RULES[rule]
    name, _, alone = module.partition(" ")
    want = own_modules.expected(own_modules.CASES[name], beside=not alone)
    for owner, attribute, without in changes:
        monkeypatch.setattr(owner, attribute, without)
    assert own_modules.read(name, beside=not alone).outcome != want
