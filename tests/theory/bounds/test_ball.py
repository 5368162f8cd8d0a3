"""The bound on a ball against what happens at points inside it."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lipaudit.errors import UsageError
from lipaudit.theory import head_bounds as ball
from lipaudit.theory.ascent import ball_norm
from lipaudit.theory.head_bounds import ball_sharp, head_bounds
from lipaudit.theory.heads import affine_heads, unit_values
from tests.theory.cases import affine_layer

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
    z = s * k @ w["q"].weight[0].T
    gap, off = v - (p @ v)[:, None], z - (p @ z)[:, None]
    deviations = [(p[..., None].sqrt() * rows).flatten(1) for rows in (off, gap)]
    return {"p": p, "gap": gap, "z": deviations[0], "v": deviations[1]} | {
        "u": s * q @ w["k"].weight[0].T
    }


def largest(heads, read, r):
    """Largest |read(X')| over points X' of the ball, one of them for each entry read.

    `read` turns a head into vectors (..., length); X' moves along the gradient of the largest
    change of each, and of its length.
    """
    x = heads.x[0]
    here = read(head_at(heads, x)).detach()
    jacobian = torch.autograd.functional.jacobian(lambda z: read(head_at(heads, z)), x)
    longest = here.norm(dim=-1)
    for index in torch.cartesian_prod(*(torch.arange(n) for n in longest.shape)).reshape(
        -1, longest.ndim
    ):
        entry = tuple(index.tolist())
        rows = jacobian[entry].reshape(here.shape[-1], -1)
        along = torch.linalg.svd(rows, full_matrices=False).Vh[0], here[entry] @ rows
        ends = [
            read(head_at(heads, x + sign * r * (step / step.norm()).nan_to_num(0.0).view_as(x)))
            for step in along
            for sign in (1, -1)
        ]
        longest[entry] = max(end[entry].norm() for end in ends)
    return here.norm(dim=-1), longest


@pytest.fixture(params=[0, 1, 2])
def small_heads(random_layer, request):
    """One head of two tokens whose blocks are single rows: little slack in any step."""
    options = {"seed": request.param, "samples": 1, "n": 2, "d": 2, "dv": 1, "gain": 4.0}
    return unit_values(random_layer("biases", **options).heads.pick(slice(0, 1)))[0]


def curvature(heads, rho):
    at = ball.read_point(heads)
    return float(ball.bound_curvature(at, ball.bound_moves(at, rho)))


R = 1e-3
ROUNDED = 1 + 1e-9
TIGHT = 0.05  # a limit this far above what is reached would have lost a factor


@pytest.mark.parametrize("name", ["p", "u", "z", "v", "shift"])
def test_what_moves_stays_within_its_limit(small_heads, name):
    """`shift` is of values beside their outputs."""
    gap = head_at(small_heads, small_heads.x[0])["gap"]
    read = {"p": lambda at: at["p"][..., None], "shift": lambda at: at["gap"] - gap}
    limit = getattr(ball.bound_moves(ball.read_point(small_heads), R), name)[0, 0]
    start, end = largest(small_heads, read.get(name, lambda at: at[name]), R)
    limit = limit if name in read else limit.view_as(end)
    assert (end <= limit * ROUNDED).all()
    assert ((end - start) >= TIGHT * (limit - start)).any()


def rows_of_weights(seed, peak):
    """Rows of probabilities, some of them nearly all at one key."""
    gen = torch.Generator().manual_seed(seed)
    return (peak * torch.randn(1, 1, 200, 6, generator=gen, dtype=torch.float64)).softmax(-1)


@pytest.mark.parametrize("peak", [0.3, 2.0, 9.0])
def test_a_weighted_variance_is_limited_key_by_key(peak):
    p, gen = rows_of_weights(0, peak), torch.Generator().manual_seed(1)
    w = torch.rand(p.shape, generator=gen, dtype=torch.float64)
    f = torch.randn(p.shape, generator=gen, dtype=torch.float64)
    centre = rows_of_weights(2, peak)  # another mean is as good
    limit, holds = ball.bound_weights(centre, p, w)
    square = (f - (p * f).sum(-1, keepdim=True)).square()
    least = (limit * f.square()).sum(-1) / (p * w * square).sum(-1)
    assert holds.any()
    assert (least[holds[..., 0]] >= 1 - 1e-12).all()


def alone(seed, moving):
    """A head of two tokens of which only some of queries, keys and values follow the tokens."""
    gen = torch.Generator().manual_seed(seed)
    x, *weights = (
        torch.randn(1, *shape, generator=gen, dtype=torch.float64)
        for shape in ((2, 2), (2, 1), (2, 1), (2, 1))
    )
    heads = affine_heads(x, *weights)
    fixed = {f"to_{name}": None for name in "qkv" if name not in moving}
    return unit_values(replace(heads, **fixed))[0]


def second_derivative(heads):
    """D^2 O of the only head as a stack of matrices, one per output, by plain autograd."""
    x, layer = heads.x[0], affine_layer(heads)

    def output(flat):
        return layer.output(0, 0, flat.view_as(x), flat.view_as(x)).flatten()

    def jacobian(flat):
        return torch.autograd.functional.jacobian(output, flat, create_graph=True)

    return torch.autograd.functional.jacobian(jacobian, x.flatten())


def largest_along(forms, seed):
    """Largest ||(f^T H_o f)_o|| over unit f that power steps find."""
    gen = torch.Generator().manual_seed(seed)
    f = torch.randn(16, forms.shape[-1], generator=gen, dtype=torch.float64)
    best = 0.0
    for _ in range(60):
        f = torch.nn.functional.normalize(f, dim=1)
        values = torch.einsum("oab,sa,sb->so", forms, f, f)
        best = max(best, float(values.norm(dim=1).max()))
        f = torch.einsum("oab,so,sb->sa", forms, values, f) + 0.2 * f
    return best


@pytest.mark.parametrize(
    ("moving", "least"),
    [("k", 0.9), ("q", 0.9), ("qk", 0.7), ("kv", 0.8), ("qv", 0.8), ("qkv", 0.7)],
)
def test_the_curvature_is_limited_and_some_heads_reach_the_limit(moving, least):
    shares = []
    for seed in range(30):
        heads = alone(seed, moving)
        limit = curvature(heads, 0.0)
        shares.append(largest_along(second_derivative(heads), seed) / limit)
    assert max(shares) <= ROUNDED
    assert max(shares) >= least


@pytest.mark.parametrize(("z", "u"), [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (2.0, 0.5)])
def test_values_that_moved_count_with_their_distance(z, u):
    """Two queries that attend evenly, v_j - o_i = 0 at X and anything of length 1 where it moves.

    There E (sigma - E sigma)^2 is (z f_i)^2, the variance of u f_j, and of both together where
    they point one way: (z + u)^2 / 2 at f = (1, -1) / sqrt 2.
    """
    ones = torch.ones(1, 1, 2, 1, dtype=torch.float64)
    even, nothing = 0.5 * ones @ ones.mT, 0 * ones @ ones.mT
    flags = torch.zeros_like(ones, dtype=torch.bool)
    one = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    rows = dict.fromkeys(("z", "w", "slope", "bend"), nothing)
    point = ball.BallPoint(p=even, u=0 * ones, wv=one, a=one, one_hot=flags, uneven=flags, **rows)
    on = ball.BallLimits(p=even, spread=even, u=u * ones, z=z * ones, v=0 * ones, shift=ones)
    assert float(ball.bound_curvature(point, on)) >= max(z**2, 2**-0.5 * (z + u) ** 2)


def test_attention_that_is_flat_at_x_bends_within_its_limit():
    """Tokens 0: the logits are e_i^T A e_j, and log P moves with the square of the radius."""
    gen = torch.Generator().manual_seed(0)
    weights = torch.randn(3, 1, 2, 2, generator=gen, dtype=torch.float64)
    x, r = torch.zeros(1, 3, 2, dtype=torch.float64), 0.1
    limit = ball.bound_moves(ball.read_point(affine_heads(x, *weights)), r).p.log() + math.log(3)
    e = torch.randn(4000, 3, 2, generator=gen, dtype=torch.float64)
    e = r * e / e.flatten(1).norm(dim=1)[:, None, None]
    growth = affine_heads(e, *weights).attention().log().amax((0, 1)) + math.log(3)
    assert (growth <= limit).all()
    assert (growth >= 0.7 * limit).any()


@pytest.mark.parametrize("r", [0.01, 0.5])
def test_the_growth_is_no_less_than_the_integral_of_the_curvature(r):
    """The curvature grows: with each panel at its end the sum is above the integral, by little."""
    heads = alone(0, "qkv")
    middles = [curvature(heads, r * (i + 0.5) / 50) for i in range(50)]
    whole, ends = r * sum(middles) / 50, (curvature(heads, 0.0), curvature(heads, r))
    growth = float(ball.bound_growth(heads, r))
    assert whole <= growth <= whole + r / ball.PANELS * (ends[1] - ends[0]) * ROUNDED


@pytest.mark.parametrize("seed", range(6))
def test_the_curvature_holds_in_the_ball(seed):
    heads, gen = alone(seed, "qkv"), torch.Generator().manual_seed(seed)
    weights = [p.weight for p in (heads.to_q, heads.to_k, heads.to_v)]
    limit = curvature(heads, 0.5)
    for _ in range(8):
        step = torch.randn(heads.x.shape, generator=gen, dtype=torch.float64)
        there = affine_heads(heads.x + 0.5 * step / step.norm(), *weights)
        assert largest_along(second_derivative(there), seed) <= limit


@settings(deadline=None, max_examples=15)
@given(
    name=st.sampled_from(AFFINE),
    seed=st.integers(0, 10**6),
    gain=st.sampled_from([0.3, 1.5, 30.0]),
    r=st.sampled_from([0.01, 0.1, 0.5]),
    twins=st.booleans(),
)
@example(name="learned-query-same-length", seed=31026, gain=30.0, r=0.5, twins=True)
def test_no_ascent_exceeds_the_bound(random_layer, name, seed, gain, r, twins):
    heads = random_layer(name, seed=seed, gain=gain, twins=twins and name != "one-token").heads
    found = ball_norm(heads, r, seeds=range(1 + int(heads.sample.max())))
    assert (found <= ball_sharp(heads, r) * ROUNDED).all()


def test_the_bound_grows_with_the_ball_from_the_point(layer):
    """It is that at X, then finite, and infinite once it is beyond every number."""
    radii = (0.0, 1e-3, 0.1, 1.0, 30.0, 1e160)
    bounds = torch.stack([ball_sharp(layer.heads, r) for r in radii])
    heads = layer.heads
    maps = (heads.to_q, heads.to_k, heads.to_v)
    affine = all(p is None or p.local is None for p in maps) and heads.x_kv is None
    if not affine or heads.pairs is not None or heads.sink is not None:
        assert bounds.isnan().all()
        return
    assert torch.equal(bounds[0], head_bounds(heads)["sharp"])
    assert bounds[:-1].isfinite().all()
    assert (bounds[-1] == torch.inf).all()
    assert not (bounds[:-1].diff(dim=0) < 0).any()


def test_entries_that_underflow_stay_in_play(random_layer):
    layer = random_layer("affine", samples=1, n=2, gain=100.0)
    assert layer.heads.attention().amin() == 0
    bound = ball_sharp(layer.heads, 1e-3)
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(layer.heads.x.shape, generator=generator, dtype=torch.float64)
    norms = torch.linalg.matrix_norm(moved(layer, direction, 1e-3).jacobian(), 2)
    assert bound.isfinite().all()
    assert (bound >= norms).all()


def test_a_key_that_underflowed_for_all_queries_keeps_its_distance():
    """Behind a mask, too: where the tokens move, it may count again."""
    weight = torch.ones(1, 1, 1, dtype=torch.float64)
    x = torch.tensor([[[-28.0], [28.0], [30.0]]], dtype=torch.float64)
    heads = replace(affine_heads(x, weight, -weight, weight), causal=True)
    p, z = heads.attention()[0, 0], heads.k[0, 0]  # s = 1 and W_Q = 1
    assert not p[:, 1].any()
    truth = (z.mT - p @ z).abs().tril()
    torch.testing.assert_close(ball.read_point(heads).z[0, 0].tril(), truth, rtol=1e-6, atol=1e-5)


def test_a_negative_radius_is_refused(random_layer):
    with pytest.raises(UsageError, match=r"-0\.1"):
        ball_sharp(random_layer("affine").heads, -0.1)
