"""Blocks found without names; their norms against dense Jacobians of the modules themselves."""

import pytest
import torch

from lipaudit.models.attention.numeric import compute_residual_norms, find_residuals

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
