"""Layers that differ between two models: which they are, and a model with some of each."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from lipaudit.errors import InputError
from lipaudit.models.swap import Exchange, layers_of

TIMM = ["cls_token", "pos_embed", "patch_embed"]
PARTS = ["norm1", "attn", "norm2", "mlp"]


def other_of(module, *parts, by=0.1):
    """A copy whose tensors below some of its parts differ."""
    other = deepcopy(module)
    with torch.no_grad():
        for name, t in (*other.named_parameters(), *other.named_buffers()):
            if t.is_floating_point() and name.startswith(parts):
                t += by * (1 + torch.rand_like(t))
    return other


def layers(module, grouping="layer"):
    names = [name for name, _ in module.named_parameters()]
    return list(dict.fromkeys(layers_of(module, names, grouping).values()))


def test_the_layers_of_a_vit(zoo):
    module = zoo("timm-vit")[0].module
    inner = [f"blocks.{i}.{part}" for i in range(2) for part in PARTS]
    assert layers(module) == [*TIMM, *inner, "norm", "head"]
    assert layers(module, "block") == [*TIMM, "blocks.0", "blocks.1", "norm", "head"]


def test_the_layers_of_a_text_model(zoo):
    module = zoo("bert")[0].module
    parts = ("attention", "intermediate", "output")
    inner = [f"bert.encoder.layer.{i}.{part}" for i in range(2) for part in parts]
    assert layers(module) == ["bert.embeddings", *inner, "bert.pooler", "classifier"]


def test_blocks_within_stages_are_the_blocks(zoo):
    names = layers(zoo("timm-swin")[0].module, "block")
    stages = ["layers.0.blocks.0", "layers.0.blocks.1", "layers.1.downsample", "layers.1.blocks.0"]
    assert names == ["patch_embed", *stages, "norm", "head"]


def test_a_model_without_blocks_has_its_parts(zoo):
    assert layers(zoo("handwritten")[0].module) == ["wq", "wk", "wv", "head"]


@pytest.mark.parametrize("name", ["timm-vit", "timm-swin", "bert", "gpt2", "t5", "torch-encoder"])
@pytest.mark.parametrize("grouping", ["layer", "block"])
def test_every_tensor_that_differs_is_in_one_layer(zoo, name, grouping):
    module = zoo(name)[0].module
    other = other_of(module, "")
    exchange = Exchange(module, other, grouping)
    given = [t for layer in exchange.layers for t in layer.tensors]
    assert len(given) == len(set(given))
    own, theirs = dict(module.named_parameters()), dict(other.named_parameters())
    assert {n for n in own if not torch.equal(own[n], theirs[n])} <= set(given)
    assert sum(layer.entries for layer in exchange.layers) >= sum(p.numel() for p in own.values())


def test_what_is_the_same_is_no_layer_of_it(zoo):
    module = zoo("timm-vit")[0].module
    exchange = Exchange(module, other_of(module, "blocks.1.attn.proj.bias"))
    (layer,) = exchange.layers
    assert (layer.name, layer.tensors) == ("blocks.1.attn", ("blocks.1.attn.proj.bias",))
    assert exchange.same == len(layers(module)) - 1
    old = module.blocks[1].attn.proj.bias
    new = exchange.moves()[0][0][1] + old
    assert layer.entries == old.numel()
    assert layer.moved == pytest.approx(float((new - old).norm() / old.norm()), rel=1e-6)


def test_a_model_holds_the_layers_asked_for_and_then_its_own(zoo):
    net, _, batch = zoo("timm-vit")
    module, other = net.module, other_of(net.module, "")
    before = {n: (t.data_ptr(), t.clone()) for n, t in module.state_dict().items()}
    theirs = {n: (t.data_ptr(), t.clone()) for n, t in other.state_dict().items()}
    exchange = Exchange(module, other)
    with exchange.holding(["blocks.0.mlp", "head"]):
        for name, value in module.state_dict().items():
            swapped = name.startswith(("blocks.0.mlp.", "head."))
            assert torch.equal(value, (theirs if swapped else before)[name][1]), name
    with torch.no_grad(), exchange.holding(exchange.names):
        assert torch.equal(net.call(batch.x, None), other(batch.x))
    with pytest.raises(RuntimeError, match="stop"), exchange.holding(["head"]):
        raise RuntimeError("stop")
    for model, kept in ((module, before), (other, theirs)):
        for name, value in model.state_dict().items():
            assert value.data_ptr() == kept[name][0], name
            assert torch.equal(value, kept[name][1]), name


class Tied(nn.Module):
    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.norm = nn.BatchNorm1d(4)
        if tied:
            self.head.weight = self.embedding.weight


def test_what_is_tied_is_swapped_once():
    model = Tied()
    exchange = Exchange(model, other_of(model, "embedding"))
    assert exchange.names == ("embedding",)
    assert exchange.tied == (("embedding.weight", "head.weight"),)
    with exchange.holding(["embedding"]):
        assert model.head.weight is model.embedding.weight
        assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()


def test_statistics_of_a_batch_norm_belong_to_it():
    model = Tied()
    exchange = Exchange(model, other_of(model, "norm.running"))
    assert [layer.name for layer in exchange.layers] == ["norm"]
    assert exchange.layers[0].tensors == ("norm.running_mean", "norm.running_var")
    counted = deepcopy(model)
    counted.norm.num_batches_tracked += 3
    (layer,) = Exchange(model, counted).layers
    assert (layer.entries, layer.moved) == (1, None)
    assert Exchange(model, counted).moves() == [[]]


def wider():
    model = Tied(tied=False)
    model.head = nn.Linear(4, 9, bias=False)
    return model


def without_norm():
    model = Tied(tied=False)
    del model.norm
    return model


@pytest.mark.parametrize(
    ("own", "other", "message"),
    [
        (lambda: Tied(tied=False), wider, r"head.weight \(7, 4\) and \(9, 4\)"),
        (lambda: Tied(tied=False), without_norm, "only the first has norm.weight"),
        (without_norm, lambda: Tied(tied=False), "only the second has norm.weight"),
        (Tied, lambda: Tied(tied=False), "one tensor in the first model and two in the second"),
    ],
)
def test_models_of_two_architectures_are_refused(own, other, message):
    with pytest.raises(InputError, match=message):
        Exchange(own(), other())
