"""Starts near what grows most through the values, against dense matrices in float64."""

from dataclasses import replace

import pytest
import torch

from lipaudit.theory.exact.head_norms import layer_norms
from lipaudit.theory.exact.products import (
    ScaledHeads,
    Through,
    head_guess,
    head_products,
    layer_guess,
    layer_products,
)
from lipaudit.theory.heads import affine_heads


def some_heads(*, gain, n=6, width=8, count=3, d=4):
    """Plain heads with an output projection; W_Q and W_K times the gain."""
    draw = {"generator": torch.Generator().manual_seed(5), "dtype": torch.float64}
    wq, wk, wv = (torch.randn(count, width, d, **draw) for _ in range(3))
    heads = affine_heads(torch.randn(2, n, width, **draw), gain * wq, gain * wk, wv)
    return replace(heads, out=torch.randn(count, d, width, **draw))


def families(heads):
    """The heads side by side, each with a gain, and their sum behind W_O."""
    layer = layer_products(heads)
    gains = torch.linspace(0.5, 1.0, heads.q.shape[1], dtype=heads.q.dtype)
    return ScaledHeads(layer, gains), Through(layer, heads.out)


def growth(products, u):
    return products.pulled_norm(u) / torch.linalg.vector_norm(u, dim=1)


def dense_norms(family, size):
    """||J|| of both batch rows, from J J^T column by column."""
    columns = [family(unit.expand(2, -1)) for unit in torch.eye(size, dtype=torch.float64)]
    return torch.linalg.matrix_norm(torch.stack(columns, 1), 2).sqrt()


def test_the_guess_of_a_head_is_its_vector_where_the_maps_stand_still():
    products = head_products(replace(some_heads(gain=0.5), to_q=None, to_k=None))
    truth = dense_head_norms(products)
    torch.testing.assert_close(growth(products, head_guess(products)), truth, rtol=1e-3, atol=0)


def dense_head_norms(products):
    p, v = products.attend.maps.kept, products.sides[-1].weight
    return torch.linalg.matrix_norm(p, 2) * torch.linalg.matrix_norm(v, 2).repeat(2)


@pytest.mark.parametrize(("gain", "least"), [(0.0, 0.999), (0.3, 0.97)])
def test_the_guess_of_a_layer_is_near_its_vector_where_the_maps_stand_still(gain, least):
    """All maps alike leave one b; of others the guess takes one for all heads."""
    heads = replace(some_heads(gain=gain), to_q=None, to_k=None)
    for family in families(heads):
        truth = dense_norms(family, heads.q.shape[2] * family.channels)
        reached = growth(family, layer_guess(family)) / truth
        assert (reached <= 1 + 1e-12).all()
        assert (reached >= least).all()


@pytest.mark.parametrize("name", ["all-norm", "learned-query", "sink-padding"])
def test_values_that_are_no_map_of_their_token_give_no_guess(random_layer, name):
    heads = random_layer(name).heads
    still = heads if name != "learned-query" else replace(heads, to_v=None)
    assert not head_guess(head_products(still)).any()
    assert not any(layer_guess(family).any() for family in families(still))


def test_weak_attention_takes_few_products():
    """Singular values crowd: a start that knew single heads only took up to 18 and 14."""
    heads = some_heads(gain=0.02, n=24, width=192, count=6, d=32)
    norms = layer_norms(heads, seeds=(0, 1), within=0.2)
    assert norms.concat.products.max() <= 10
    assert norms.out.products.max() <= 10
