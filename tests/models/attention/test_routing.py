"""Choices by the largest scores: named, and the Jacobian that of the choices made."""

import pytest
import torch
from torch import nn

from benchmarks.reference import truth
from benchmarks.reference.loaded import alone
from benchmarks.reference.mechanisms import load, texts
from lipaudit.data.batch import Batch
from lipaudit.measures import load_measures, option_types
from lipaudit.measures.base import in_order, join_parts, notes
from lipaudit.models.attention.uses import Routing
from lipaudit.models.net import Net
from lipaudit.models.sources.loading import LoadOptions, load_net


def measure_norms(net: Net, batch: Batch):
    """Return the notes and the norms of all samples, in their order."""
    options = option_types()["jacobian"](tol=1e-10, within=1e-6)
    parts = in_order(list(load_measures()["jacobian"].parts(net, [batch], options)), batch.ids)
    return notes(parts), join_parts(parts, "norm")


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("experts", "model.layers.0.mlp.gate"),
        ("expert-queries", "model.layers.0.self_attention.experts.router"),
        ("grouped", None),
    ],
)
def test_routers_are_named_and_the_norm_is_that_of_their_choice(name, first):
    net = load(name)
    batch = texts(net)
    remarks, norms = measure_norms(net, batch)
    said = [note for note in remarks if note.code == "routed"]
    assert [f"(first in {first})" in note.text for note in said] == [True] * (first is not None)
    assert "routed-tie" not in [note.code for note in remarks]
    for i, norm in enumerate(norms):
        assert norm == pytest.approx(truth.norm(truth.whole(net, alone(batch, i))), rel=1e-9)


def test_a_tie_between_experts_is_a_warning():
    net = load("experts")
    net.module.model.layers[0].mlp.gate.weight.data[1:] = 0.0  # two experts with equal scores
    codes = {note.code: note.level for note in measure_norms(net, texts(net))[0]}
    assert codes["routed-tie"] == "warning"


class Chooser(nn.Module):
    """Takes some of its scores, and the place of the largest."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x[:, 0].argmax()
        return x.topk(self.k, dim=1).values


@pytest.mark.parametrize(("k", "grad", "seen"), [(2, True, [""]), (3, True, []), (2, False, [])])
def test_what_is_no_choice_that_depends_on_the_input_is_none(k, grad, seen):
    routing, module = Routing(), Chooser(k)
    x = torch.tensor([[1.0, 2.0, 3.0]]).requires_grad_(grad)
    with routing.watching(module):
        module(x)
    assert list(routing.modules) == seen


def test_experts_are_measured_in_double_precision(tmp_path):
    """The grouped products that transformers takes by itself know no float64."""
    net = load("experts", "float32")
    net.module.save_pretrained(tmp_path)
    batch = texts(net)
    wide = load_net(str(tmp_path), LoadOptions(device="cpu", dtype="float64"))
    torch.testing.assert_close(wide.output(batch).float(), net.output(batch), rtol=1e-4, atol=1e-5)
