"""Blocks found without names; their norms against dense Jacobians of the modules themselves."""

import pytest
import torch
from torch import nn

from lipaudit.models.attention.numeric import compute_residual_norms, find_residuals
from lipaudit.models.attention.survey import find_layers
from tests.models.attention.tiny import WIDTH, Tiny, tiny_net
from tests.nets import draw, own_batch

PATHS = {
    "timm-vit": "blocks.{}",
    "timm-swin": "layers.0.blocks.{}",
    "bert": "bert.encoder.layer.{}.attention",
    "gpt2": "transformer.h.{}",
    "llama": "model.layers.{}",
    "t5": "encoder.block.{}.layer.0",
    "torch-encoder": "0.layers.{}",
    "albert": "albert.encoder.albert_layer_groups.0.albert_layers.0.attention",  # called twice
}


@pytest.mark.parametrize(("name", "path"), PATHS.items())
def test_the_smallest_module_with_a_skip_path_is_found(zoo, name, path):
    net, sites, batch = zoo(name)
    blocks = find_residuals(net, batch, sites)
    assert [block.module for block in blocks[:2]] == [path.format(0), path.format(1)]
    assert [block.call for block in blocks[:2]] == [0, int("{}" not in path)]


def test_attention_without_a_skip_path_has_no_block(zoo):
    net, sites, batch = zoo("handwritten")
    assert find_residuals(net, batch, sites) == (None,)


def alone(net, batch, sample, block):
    """||J|| of one sample without padding, from the module as the model itself calls it."""
    length = None if batch.mask is None else int(batch.mask[sample].sum())
    calls = []

    def keep(module, args, kwargs):
        calls.append((args, kwargs))

    module = net.module.get_submodule(block.module)
    hook = module.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        net.call(batch.x[sample : sample + 1, :length], None)
    hook.remove()
    (x, *args), kwargs = calls[block.call]
    assert block.input == 0

    def run(z):
        y = module(z, *args, **kwargs)
        return y if isinstance(y, torch.Tensor) else y[0]

    jacobian = torch.autograd.functional.jacobian(run, x, vectorize=True)
    return torch.linalg.matrix_norm(jacobian.reshape(x.numel(), x.numel()), 2)


@pytest.mark.parametrize("name", ["timm-swin", "albert", "gpt2", "torch-encoder"])
def test_norms_are_those_of_the_module_without_padding(zoo, name):
    net, sites, batch = zoo(name, "float64")
    block = find_residuals(net, batch, sites)[-1]
    ((found, norms),) = compute_residual_norms(net, batch, [block], tol=1e-9, seeds=[1, 2])
    assert found == block
    assert norms.converged.all()
    truth = alone(net, batch, 1, block)  # the second sentence is padded
    torch.testing.assert_close(norms.norm[1], truth, rtol=1e-8, atol=0)
    hooks = [(m._forward_hooks, m._forward_pre_hooks) for m in net.module.modules()]
    assert not any(before or behind for before, behind in hooks)


class Placed(nn.Module):
    """A model that gives its block positions: (tokens, width), or one row for each head."""

    def __init__(self, by_head):
        super().__init__()
        self.block = Tiny(read=lambda _m, x, places: 3 * (x + places,))
        self.places = nn.Parameter(draw(1, 4, WIDTH))
        self.by_head = by_head
        self.block.forward = lambda x, places: x + Tiny.forward(self.block, x, self.add(x, places))

    def add(self, x, places):
        """Return positions of each token of x, from those that the block gets."""
        return places.view(len(x), 2, 4, WIDTH).sum(1) if self.by_head else places

    def forward(self, x):
        rows = 2 * len(x) if self.by_head else 1
        places = self.places.repeat(rows, 1, 1) if self.by_head else self.places
        return self.block(x, places)


@pytest.mark.parametrize("by_head", [False, True])
def test_arguments_that_samples_share_or_that_have_rows_of_heads(by_head):
    """Four samples of four tokens: positions of tokens have as many rows as there are samples."""
    net = tiny_net(Placed(by_head), 4)
    # Samples of different size converge one after the other, so some run without the others.
    sizes = torch.tensor([0.01, 0.3, 3.0, 30.0], dtype=torch.float64)
    batch = own_batch(sizes[:, None, None] * draw(2, 4, 4, WIDTH, dtype=torch.float64))
    (block,) = find_residuals(net, batch, find_layers(net, batch))
    ((_, norms),) = compute_residual_norms(net, batch, [block], tol=1e-9, seeds=range(4))
    for x, norm in zip(batch.x, norms.norm, strict=True):
        jacobian = torch.autograd.functional.jacobian(net.module, x[None])
        true = torch.linalg.matrix_norm(jacobian.reshape(x.numel(), x.numel()), 2)
        torch.testing.assert_close(norm, true, rtol=1e-8, atol=0)


class Rounded(nn.Module):
    """A model that rounds the input of its block to half precision."""

    def __init__(self):
        super().__init__()
        self.block = Tiny()
        self.block.forward = lambda x: x + Tiny.forward(self.block, x)

    def forward(self, x):
        return self.block(x.bfloat16().to(x))


def test_blocks_in_float64_are_measured_without_rounding_of_their_input():
    net = tiny_net(Rounded(), 4)
    batch = own_batch(draw(2, 1, 4, WIDTH, dtype=torch.float64))
    (block,) = find_residuals(net, batch, find_layers(net, batch))
    ((_, norms),) = compute_residual_norms(net, batch, [block], tol=1e-9, seeds=[0])
    x = batch.x
    jacobian = torch.autograd.functional.jacobian(net.module.block, x)
    true = torch.linalg.matrix_norm(jacobian.reshape(x.numel(), x.numel()), 2)
    torch.testing.assert_close(norms.norm[0], true, rtol=1e-8, atol=0)
