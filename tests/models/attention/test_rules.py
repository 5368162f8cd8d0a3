"""Each rule of reading is switched off once: some module is then not read as it should be."""

import pytest
from torch import nn

from lipaudit.engine import prepare
from lipaudit.models.attention import capture, surveyor
from lipaudit.models.attention.observe import trace, uses
from tests.models.attention import own_modules

own_modules.load_cases()
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
        [(surveyor, "_share_input", lambda _layer: None)],
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
    assert own_modules.read(name, beside=not alone).outcome == want
    for owner, attribute, without in changes:
        monkeypatch.setattr(owner, attribute, without)
    assert own_modules.read(name, beside=not alone).outcome != want
