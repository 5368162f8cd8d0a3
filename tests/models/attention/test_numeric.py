"""Norms of layers without a closed form, against the closed form and against dense Jacobians."""

from functools import partial

import pytest
import torch

from lipaudit.data.batch import Batch
from lipaudit.measures.layers import per_sample
from lipaudit.models.attention.capture import Layer, capture
from lipaudit.models.attention.numeric import compute_numeric_norms
from lipaudit.theory.head_norms import head_norms

SEEDS = [3, 4]


def numeric(net, sites, batch: Batch, index: int, seeds=SEEDS):
    norms_of = partial(compute_numeric_norms, seeds=seeds, tol=1e-8)
    (norms,) = capture(net, sites, batch, norms_of, layers=[index])
    assert norms.converged.all()
    return norms.norm


@pytest.mark.parametrize(
    ("name", "index"),
    [("timm-swin", 1), ("timm-qk-norm", 0), ("bert", 1), ("torch-encoder", 1)],
)
def test_numeric_norms_are_those_of_the_closed_form(zoo, name, index):
    """Where the module's input is X itself, the two are the same number."""
    net, sites, batch = zoo(name, "float64")
    (closed,) = capture(net, sites, batch, Layer.heads, layers=[index])
    norms = head_norms(closed, seeds=SEEDS, tol=1e-8).norm
    want = per_sample(norms, closed.sample)
    torch.testing.assert_close(numeric(net, sites, batch, index), want, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    ("name", "behind"), [("gemma2", "o_proj"), ("deberta", None), ("timm-cait", "proj")]
)
def test_numeric_norms_are_those_of_the_dense_jacobian(zoo, name, behind):
    net, sites, batch = zoo(name, "float64")
    batch = Batch(batch.x[:1], None, batch.ids[:1])
    site = sites[0]
    module, seen = net.module.get_submodule(site.module), []
    projection = behind and module.get_submodule(behind)

    def note(_module, args, kwargs):
        seen.append((args, kwargs))

    with module.register_forward_pre_hook(note, with_kwargs=True):
        net.output(batch)
    args, kwargs = seen[0]
    x = args[0] if args else kwargs.pop("hidden_states")

    def heads(x: torch.Tensor) -> torch.Tensor:
        if projection is None:
            return module(x, *args[1:], **kwargs)[0]
        inputs = []
        with projection.register_forward_pre_hook(lambda _m, given: inputs.append(given[0])):
            module(x, *args[1:], **kwargs)
        return inputs[0]

    dense = torch.autograd.functional.jacobian(heads, x)[0, :, :, 0]
    dense = dense.unflatten(1, (site.heads, -1)).transpose(0, 1).flatten(1, 2).flatten(2)
    want = torch.linalg.matrix_norm(dense, 2)[None]
    # transformers computes the softmax of these models in float32.
    torch.testing.assert_close(numeric(net, sites, batch, 0, seeds=[3]), want, rtol=2e-6, atol=0.0)


def test_padding_is_no_output(zoo):
    net, sites, batch = zoo("deberta", "float64")
    together = numeric(net, sites, batch, 0)
    length = int(batch.mask[1].sum())
    alone = Batch(batch.x[1:, :length], None, batch.ids[1:])
    want = numeric(net, sites, alone, 0, seeds=SEEDS[1:])
    torch.testing.assert_close(together[1:], want, rtol=1e-6, atol=0.0)
