"""The bound on a ball against what happens at points inside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipaudit.errors import UsageError
from lipaudit.theory.bounds import ball
from lipaudit.theory.bounds.affine import affine_rows, query_term
from lipaudit.theory.bounds.ball import ball_sharp
from lipaudit.theory.bounds.centred import centred
from lipaudit.theory.spectral.upper import nonnegative_norm

AFFINE = ("affine", "biases", "causal", "position-bias", "padding", "padding-causal", "windows")
AFFINE += ("learned-query-same-length", "wide-values", "one-token")


def moved(layer, direction, r):
    """Return the same layer at X' = X + r direction / ||direction||_F, padding left alone."""
    x = layer.heads.x
    if layer.heads.valid is not None:
        direction = direction * layer.heads.valid[..., None]
    lengths = torch.linalg.matrix_norm(direction, keepdim=True)
    return replace(layer, heads=replace(layer.heads, x=x + r * direction / lengths))


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(AFFINE),
    seed=st.integers(0, 10**6),
    gain=st.sampled_from([0.3, 1.5, 6.0]),
    r=st.sampled_from([0.0, 0.01, 0.1, 0.5, 3.0]),
)
def test_no_jacobian_in_the_ball_exceeds_the_bound(random_layer, name, seed, gain, r):
    layer = random_layer(name, seed=seed, gain=gain, samples=1)
    bound = ball_sharp(layer.heads, r)
    generator = torch.Generator().manual_seed(seed)
    for share in (1.0, 0.5):
        direction = torch.randn(layer.heads.x.shape, generator=generator, dtype=torch.float64)
        jacobian = moved(layer, direction, share * r).jacobian()
        assert (bound >= torch.linalg.matrix_norm(jacobian, 2)).all()


def head_at(heads, x):
    """What the bound follows over the ball, for the first head and sample, written out anew."""
    w = {name: getattr(heads, f"to_{name}") for name in "qkv"}
    q, k, v = (x @ p.weight[0] + p.bias[0] for p in w.values())
    s = heads.scale[0, 0]
    p = (s * q @ k.T).softmax(-1)
    gap = v - (p @ v)[:, None]
    t = torch.einsum("ij,ija,jd->iad", p, gap, k) @ w["q"].weight[0].T
    u = s * q @ w["k"].weight[0].T
    blocks = w["v"].weight[0].T + gap[..., None] * u[:, None, None]
    return {"p": p, "gap": gap, "k": k, "u": u, "t": s * t, "blocks": blocks}


def largest_growth(heads, read, r):
    """Largest |read(X') - read(X)| over points X' of the ball, one of them for each entry read.

    `read` turns a head into vectors (..., length) or numbers; X' moves along the gradient of the
    largest change of each.
    """
    x = heads.x[0]
    here = read(head_at(heads, x)).detach()
    jacobian = torch.autograd.functional.jacobian(lambda z: read(head_at(heads, z)), x)
    growth = torch.zeros(here.shape[:-1], dtype=x.dtype)
    for index in torch.cartesian_prod(*(torch.arange(n) for n in here.shape[:-1])).reshape(
        -1, here.ndim - 1
    ):
        entry = tuple(index.tolist())
        rows = jacobian[entry].reshape(here.shape[-1], -1)
        direction = torch.linalg.svd(rows, full_matrices=False).Vh[0].reshape(x.shape)
        ends = [read(head_at(heads, x + sign * r * direction))[entry] for sign in (1, -1)]
        growth[entry] = max((end - here[entry]).norm() for end in ends)
    return growth


@pytest.fixture(params=[0, 1, 2])
def small_heads(random_layer, request):
    """One head of two tokens whose blocks are single rows: little slack in any step."""
    return random_layer(
        "biases", seed=request.param, samples=1, n=2, d=2, dv=1, gain=4.0
    ).heads.pick(slice(0, 1))


R = 1e-3
ROUNDED = 1 + 1e-9
TIGHT = 0.05  # a limit this far above what is reached would have lost a factor


@pytest.mark.parametrize(
    ("read", "limit"),
    [
        (lambda at: at["p"][..., None], lambda move: move.p[0, 0]),
        (lambda at: at["k"], lambda move: move.key[0, 0].expand(2)),
        (lambda at: at["u"], lambda move: move.u[0, 0, :, 0].expand(2)),
        (lambda at: at["gap"], lambda move: move.shift[0, 0].expand(2, 2)),
    ],
    ids=["attention", "keys", "u", "gaps"],
)
def test_what_moves_stays_within_its_limit(small_heads, read, limit):
    bound = limit(ball._moves(small_heads, centred(small_heads), R))
    growth = largest_growth(small_heads, read, R)
    assert (growth <= bound * ROUNDED).all()
    assert (growth >= TIGHT * bound).any()


def test_an_attention_entry_is_limited_from_above(small_heads):
    at = centred(small_heads)
    upper = ball._moves(small_heads, at, R).upper[0, 0]
    growth = largest_growth(small_heads, lambda head: head["p"][..., None], R)
    assert (at.p[0, 0] + growth <= upper * ROUNDED).all()


def test_the_query_term_stays_within_its_limit(small_heads):
    at = centred(small_heads)
    rows, move = affine_rows(small_heads, at), ball._moves(small_heads, at, R)
    t = query_term(at, rows)[0]
    limit = ball._query_term(small_heads, at, rows, move)
    growth = largest_growth(
        small_heads, lambda head: head["t"].flatten(1).norm(dim=-1)[:, None], R
    )
    assert (t + growth <= limit).all()
    assert (growth >= TIGHT * (limit - t)).any()


@pytest.mark.parametrize("name", AFFINE)
def test_a_ball_of_radius_zero_is_the_point(random_layer, name):
    heads = random_layer(name).heads
    at = centred(heads)
    rows = affine_rows(heads, at)
    turn = (rows.a / rows.u).nan_to_num(0.0)[..., :, None, :]
    gap = at.v[..., None, :, :] - at.o[..., :, None, :]
    split = torch.hypot(rows.wv, (turn + rows.u[..., None] * gap).norm(dim=-1))
    beta = torch.minimum(split, rows.wv + gap.norm(dim=-1) * rows.u)
    blocks = at.p * beta + torch.diag_embed(query_term(at, rows)[0])
    torch.testing.assert_close(ball_sharp(heads, 0.0), nonnegative_norm(blocks), rtol=1e-7, atol=0)


def test_the_bound_grows_with_the_ball(layer):
    bounds = torch.stack([ball_sharp(layer.heads, r) for r in (0.0, 1e-3, 0.1, 1.0, 30.0)])
    heads = layer.heads
    maps = (heads.to_q, heads.to_k, heads.to_v)
    affine = all(p is None or p.local is None for p in maps) and heads.x_kv is None
    affine = affine and heads.pairs is None and heads.sink is None
    assert (bounds.isfinite() if affine else bounds.isnan()).all()
    assert not (bounds.diff(dim=0) < 0).any()


def test_entries_that_underflow_stay_in_play(random_layer):
    layer = random_layer("affine", samples=1, n=2, gain=100.0)
    assert layer.heads.attention().amin() == 0
    bound = ball_sharp(layer.heads, 1e-3)
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(layer.heads.x.shape, generator=generator, dtype=torch.float64)
    norms = torch.linalg.matrix_norm(moved(layer, direction, 1e-3).jacobian(), 2)
    assert bound.isfinite().all()
    assert (bound >= norms).all()


def test_a_negative_radius_is_refused(random_layer):
    with pytest.raises(UsageError, match=r"-0\.1"):
        ball_sharp(random_layer("affine").heads, -0.1)
