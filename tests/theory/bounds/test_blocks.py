"""Every inequality of the bound by blocks of J J^T against dense matrices, and none to spare."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lipaudit.theory import Policy
from lipaudit.theory.block_norms import (
    AffineRows,
    affine_rows,
    block_norms,
    bound_by_blocks,
    gram_bound,
    query_term,
    row_lengths,
    tighten_row_lengths,
    value_key_norm,
)
from lipaudit.theory.heads import Heads, affine_heads, unit_values
from lipaudit.theory.ingredients import Centred, Ingredients, Tokens

NAMES = ["affine", "biases", "causal", "position-bias", "padding", "cross-attention"]
FORMULA = Policy(dense_entries=0)
GAINS = [0.1, 1.0, 5.0, 20.0]


def paths(heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """A, B and C of the first sample and head as (n d_v) x (tokens D) matrices, C in its own."""
    p, v, k = (t[0, 0] for t in (heads.attention(), heads.v, heads.k))
    wq, wk, wv = (getattr(heads, f"to_{name}").weight[0] for name in "qkv")
    s, n = heads.scale[0, 0], len(p)
    f = p[:, None] * (v - (p @ v)[:, None]).mT  # (n, d_v, m)
    u = s * heads.q[0, 0] @ wk.T
    a = torch.einsum("ij,xc->icjx", p, wv)
    b = torch.einsum("icj,ix->icjx", f, u)
    c = torch.einsum("icj,jd,xd,il->iclx", f, s * k, wq, torch.eye(n, dtype=p.dtype))
    return tuple(path.reshape(n * v.shape[1], -1) for path in (a, b, c))


def norm(matrix: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrix, 2)


def blocks(matrix: Tensor, n: int) -> Tensor:
    """The norms of the n x n blocks of a square matrix."""
    size = len(matrix) // n
    return norm(matrix.reshape(n, size, n, size).transpose(1, 2))


def known_of(heads: Heads) -> tuple[Centred, AffineRows]:
    known = Ingredients(heads, Tokens(heads))
    return known.centred, affine_rows(known)


def pw_of(at: Centred) -> Tensor:
    return at.p * at.w2.sqrt()


def m_of(heads: Heads) -> Tensor:
    at, rows = known_of(heads)
    pw = pw_of(at)
    t, f = query_term(at, rows), row_lengths(at, rows, pw)
    return block_norms(at, rows, pw, t, f, joint=heads.x_kv is None)[0, 0]


@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("name", NAMES)
def test_m_bounds_the_blocks_of_every_product_of_paths_but_one(random_layer, name, gain):
    """And A B^T, which values and keys share, is bounded by itself."""
    heads = unit_values(random_layer(name, gain=gain).heads)[0]
    a, b, c = paths(heads)
    known = [a @ a.T, b @ b.T, c @ c.T]
    if heads.x_kv is None:
        known += [(a + b) @ c.T, c @ (a + b).T]
    truth = sum(blocks(product, heads.q.shape[2]) for product in known)
    assert (m_of(heads) >= truth * (1 - 1e-9) - 1e-15).all()
    at, rows = known_of(heads)
    f = row_lengths(at, rows, pw_of(at))
    for e in (torch.ones_like(at.p[..., :1]).mT, torch.eye(at.p.shape[2]).to(at.p)[:1]):
        cross = value_key_norm(at, rows, f, e.expand(*at.p.shape[:2], 1, -1))[0, 0]
        assert cross >= norm(a @ b.T) * (1 - 1e-9)


@pytest.mark.parametrize("gain", GAINS)
def test_the_spread_lies_between_the_norm_and_the_frobenius_norm(random_layer, gain):
    heads = random_layer("biases", n=7, gain=gain).heads
    at = Ingredients(heads, Tokens(heads)).centred
    f = pw_of(at)[..., None] * 0 + at.p[..., None] * (at.v[:, :, None] - at.o[:, :, :, None])
    exact = torch.linalg.matrix_norm(f, 2)
    length = pw_of(at).norm(dim=-1)
    spread = tighten_row_lengths(at, length)
    assert (spread >= exact * (1 - 1e-9)).all()
    assert (spread <= length).all()
    assert (spread <= 3**0.25 * exact * (1 + 1e-4))[length - spread > 1e-3 * length].all()


@pytest.mark.parametrize(("query", "key"), [(2.0, 1.5), (0.3, 0.3)])
def test_no_constant_of_the_proof_can_be_smaller(query, key):
    """Two tokens of width 1, whose values, keys and queries move the output alike."""
    x = torch.tensor([[[1.0], [-1.0]]], dtype=torch.float64)
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    heads = unit_values(affine_heads(x, query * one, key * one, one))[0]
    a, b, c = paths(heads)
    apart, meeting, in_m = a @ a.T + b @ b.T + c @ c.T, (a + b) @ c.T, norm(m_of(heads))
    if query == 0.3:  # what queries meet is in M
        truth = norm(apart + meeting + meeting.T)
        assert truth * (1 - 1e-9) <= in_m <= 1.05 * truth
        assert norm(apart) < 0.9 * truth
        return
    whole, (at, rows) = norm(a + b + c).square(), known_of(heads)
    e = torch.ones_like(at.p[..., :1, :])
    cross = value_key_norm(at, rows, row_lengths(at, rows, pw_of(at)), e)[0, 0]
    assert whole <= gram_bound(at, rows, joint=True)[0, 0].square() <= 1.01 * whole
    assert in_m + cross < 0.99 * whole  # A B^T counts twice
    assert norm(apart) + 2 * norm(a @ b.T) < 0.99 * whole  # what queries meet counts


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1.0, 1e8])
def test_tokens_of_any_size_are_bounded(scale):
    generator = torch.Generator().manual_seed(5)
    x = scale * torch.randn(1, 9, 6, generator=generator, dtype=torch.float64)
    x[:, 3:5] = x[:, :1]
    weights = torch.randn(3, 1, 6, 4, generator=generator, dtype=torch.float64)
    weights[:2] /= scale  # logits of one size
    heads = unit_values(replace(affine_heads(x, *weights), policy=FORMULA))[0]
    bound = bound_by_blocks(Ingredients(heads, Tokens(heads)))[0, 0]
    whole = norm(sum(paths(heads)))
    assert whole * (1 - 1e-12) <= bound <= 3 * whole


def test_blocks_of_the_product_are_closer_than_those_of_the_jacobian(random_layer):
    for name in ("biases", "rotary", "softcap"):
        layer = random_layer(name)
        exact, j = norm(layer.jacobian()), layer.jacobian()
        bound = bound_by_blocks(Ingredients(layer.heads, Tokens(layer.heads)))
        n, dv = layer.heads.q.shape[2], layer.heads.v.shape[3]
        each = norm(j.reshape(*j.shape[:2], n, dv, n, -1).transpose(-3, -2))
        assert (bound >= exact).all()
        assert (bound <= norm(each) * (1 + 1e-6)).all()


def test_a_nearly_singular_key_projection_keeps_its_images(random_layer):
    """The bound on balls divides by ||u_i||: a norm that is only an upper bound will not do."""
    heads = random_layer("affine").heads
    weight = heads.to_k.weight * torch.tensor([1.0, 1.0, 1e-8], dtype=torch.float64)
    weak = replace(heads, to_k=replace(heads.to_k, weight=weight), k=heads.x[:, None] @ weight)
    weak = replace(weak, q=heads.q * torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64))
    u = torch.linalg.vector_norm(weak.scale[..., None, None] * weak.q @ weight.mT, dim=-1)
    images = affine_rows(Ingredients(weak, Tokens(weak))).u[..., 0]
    torch.testing.assert_close(images, u, rtol=1e-6, atol=0)


@pytest.mark.parametrize("channels", [1, 2000])
def test_the_allowance_of_the_query_term_covers_sums_over_query_channels(channels):
    """kappa = z z^T sums d terms, which may be far more than the d_v of the values.

    In single precision, where double shows what was added.
    """
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 4, generator=gen, dtype=torch.float64)
    weights = (torch.randn(1, 4, d, generator=gen).double() for d in (channels, channels, 1))
    at, rows = known_of(unit_values(affine_heads(x, *weights))[0])
    single = [type(record)(*(t.float() for t in vars(record).values())) for record in (at, rows)]
    t, truth = query_term(*single).double(), query_term(at, rows)
    worst = channels * torch.finfo(torch.float32).eps / 2  # gamma_d, for positive terms attained
    assert (t.square() - truth.square() >= worst * truth.square()).all()
