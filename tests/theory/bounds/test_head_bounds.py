"""Every bound against the dense Jacobian by autograd, for every kind of head."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lipaudit.errors import EvaluationError
from lipaudit.theory import POLICY, Policy
from lipaudit.theory.block_norms import affine_rows, bound_by_blocks, query_term
from lipaudit.theory.bounds.record import Bound, load_bounds
from lipaudit.theory.head_bounds import ball_size_bounds, head_bounds
from lipaudit.theory.heads import Pairs, affine_heads, unit_values
from lipaudit.theory.ingredients import Ingredients, Tokens, bound_token_spread
from lipaudit.theory.products import dense_jacobian
from tests.theory.cases import POLICIES, dense_norms, randn, without_padding

OTHER = ("softcap", "relative", "relative-softcap", "sink", "sink-rotary")


def test_one_token_is_bounded_by_its_value_map(random_layer):
    heads = random_layer("affine", n=1).heads
    wv = torch.linalg.matrix_norm(heads.to_v.weight, 2).expand(2, -1)
    torch.testing.assert_close(head_bounds(heads)["sharp"], wv)


def test_hu_is_not_given_where_it_does_not_hold(random_layer):
    heads = random_layer("affine").heads
    assert head_bounds(replace(heads, x=heads.x * 1e-6))["hu"].isnan().all()


def test_the_query_term_is_the_frobenius_norm(random_layer):
    heads = unit_values(random_layer("biases").heads)[0]
    known = Ingredients(heads, Tokens(heads))
    p, v, k = heads.attention(), heads.v, heads.k
    c = p[..., None] * (v[:, :, None] - (p @ v)[:, :, :, None])
    t = torch.einsum("bhija,bhjd->bhiad", c, k) @ heads.to_q.weight.mT[:, None]
    truth = heads.scale[..., None] * torch.linalg.matrix_norm(t)
    t = query_term(known.centred, affine_rows(known))
    torch.testing.assert_close(t, truth, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["affine", "biases", "causal", "position-bias"])
@pytest.mark.parametrize("gain", [0.3, 1.5, 4.0])
def test_castin_and_mean_field_hold_for_other_tokens_of_the_same_radius(random_layer, name, gain):
    layer = random_layer(name, gain=gain)
    bounds, radius = head_bounds(layer.heads), layer.heads.x.norm(dim=-1).amax(-1)
    for seed in range(5):
        other = random_layer(name, seed=seed).heads.x
        if seed == 0:  # what makes the constant grow: one token apart, the others together
            other = torch.cat([other[:, :1], -other[:, :1].expand(-1, 4, -1)], 1)
        x = other / other.norm(dim=-1, keepdim=True) * radius[:, None, None]
        moved = replace(layer, heads=replace(layer.heads, x=x))
        exact = torch.linalg.matrix_norm(moved.jacobian(), 2)
        assert (bounds["castin"] >= exact).all()
        assert (bounds["mean_field"] >= exact).all()


def test_bounds_of_sizes_hold_on_a_ball(random_layer):
    layer = random_layer("biases", gain=3.0)
    bounds, at_x = ball_size_bounds(layer.heads, 2.0), head_bounds(layer.heads)
    step = random_layer("biases", seed=1).heads.x
    step = 2.0 * step / torch.linalg.matrix_norm(step, keepdim=True)
    moved = replace(layer, heads=replace(layer.heads, x=layer.heads.x + step))
    norms = torch.linalg.matrix_norm(moved.jacobian(), 2)
    for name, bound in bounds.items():
        assert (bound > at_x[name]).all()
        assert (bound >= norms).all()


@pytest.mark.parametrize("name", ["affine", "biases"])
@pytest.mark.parametrize("gain", [0.3, 1.5, 6.0])
def test_the_published_formulas_written_out(random_layer, name, gain):
    """One sample and head, every factor by a singular value decomposition of the full matrix."""
    heads = random_layer(name, gain=gain).heads
    bounds = {name: value[0, 0].item() for name, value in head_bounds(heads).items()}
    x, p, s = heads.x[0], heads.attention()[0, 0], heads.scale[0, 0]
    wq, wk, wv = (getattr(heads, f"to_{c}").weight[0] for c in "qkv")
    if name == "biases":
        x = torch.cat([x, torch.ones(len(x), 1)], 1)
        biases = (getattr(heads, f"to_{c}").bias[:1] for c in "qkv")
        wq, wk, wv = (torch.cat([w, b]) for w, b in zip((wq, wk, wv), biases, strict=True))

    def norm(matrix):
        return torch.linalg.svdvals(matrix)[..., 0]

    m = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    n, a, big = len(x), norm(s * wq @ wk.T), x.norm(dim=1).max()
    top = p.topk(2).values
    g1 = top[:, 0] * (1 - top[:, 0] + top[:, 1])
    growth = min((a * big**2).exp().item(), n**0.5)
    expected = {
        "p_norm": norm(p),
        "softmax_norm_max": norm(m).max(),
        "x_norm": norm(x),
        "radius": heads.x[0].norm(dim=-1).max(),
        "hu": n * (n + 1) * x.norm() ** 2 * (norm(wv) * norm(wq) * norm(wk) + norm(wv)),
        "castin": 3**0.5 * norm(wv) * (a**2 * big**4 * (4 * n + 1) + n).sqrt(),
        "mean_field": norm(wv) * ((1 + a * big**2) * growth + a * big**2),
        "theorem3": norm(wv) * (norm(p) + 2 * norm(x) ** 2 * a * norm(m).max()),
        "theorem3_g1": norm(wv) * (norm(p) + 2 * norm(x) ** 2 * a * g1.max()),
    }
    for bound, value in expected.items():
        assert bounds[bound] == pytest.approx(value.item(), rel=2e-6), bound
    spread = norm(x.T @ m).max()
    limit = 5**0.25 * spread  # a Schatten-4 norm of rank at most 5 - 1
    appendix_c = [norm(wv) * (norm(p) + 2 * v * norm(x) * a) for v in (spread, limit)]
    assert appendix_c[0] <= bounds["appendix_c"] <= appendix_c[1] * (1 + 2e-6)


@pytest.mark.parametrize("t", [1.0, 2.0, 3.0, 6.0])
def test_theorem_3_has_no_factor_to_spare(t):
    """Two tokens x and -x of width 1, t = s w_q w_k x^2: its second term is reached.

    P has p = sigma(2 t) on its diagonal, and M(P_i) = p (1 - p) [[1, -1], [-1, 1]]. For x that
    moves along (1, -1), J is w_v (2 p - 1 + 8 t p (1 - p)); the theorem has ||P|| = 1 for 2 p - 1.
    With c < 2 in place of its 2 it fails where 2 (2 - c) t p > 1. `sharp` is the norm itself.
    """
    x, one = torch.tensor([[[1.0], [-1.0]]]).double(), torch.ones(1, 1, 1).double()
    heads, p = affine_heads(x, t * one, one, 5 * one), torch.tensor(2 * t).double().sigmoid()
    exact, bounds = dense_norms(dense_jacobian(heads)), head_bounds(heads)
    assert exact.item() == pytest.approx(5 * (2 * p - 1 + 8 * t * p * (1 - p)).item())
    assert bounds["sharp"].item() == pytest.approx(exact.item(), rel=1e-10)
    for name in ("theorem3", "theorem3_g1", "appendix_c"):
        assert (bounds[name] - exact).item() == pytest.approx(10 * (1 - p).item(), rel=1e-5), name


@pytest.mark.parametrize("dense_entries", [POLICY.dense_entries, 0])
def test_padding_changes_no_bound(random_layer, dense_entries):
    policy = Policy(dense_entries=dense_entries)
    heads = random_layer("padding", n=6, samples=2).heads
    both = heads.row(1), without_padding(heads, 1, 5)
    padded, bare = (head_bounds(replace(each, policy=policy)) for each in both)
    for name, value in bare.items():
        torch.testing.assert_close(
            padded[name], value, rtol=2e-6, atol=0, equal_nan=True, msg=name
        )


@pytest.mark.parametrize("name", OTHER)
@pytest.mark.parametrize("value_gain", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("gain", [1e-3, 1.0, 30.0])  # nearly uniform to nearly one-hot rows
def test_bounds_of_other_logits_hold_at_the_edges(random_layer, name, value_gain, gain):
    layer = random_layer(name, gain=gain, value_gain=value_gain, twins=True)
    exact = torch.linalg.matrix_norm(layer.jacobian(), 2)
    for policy in POLICIES:
        bounds = head_bounds(replace(layer.heads, policy=policy))
        for bound in ("sharp", "theorem3", "theorem3_g1"):
            assert (bounds[bound] >= exact * (1 - 1e-12)).all(), (bound, policy)


@pytest.mark.parametrize("seed", range(4))
def test_blocks_rounded_to_single_precision_are_bounded_with_two_inputs(random_layer, seed):
    """Of one query and one key of width one B is J but for rounding: nothing else is above it."""
    heads = random_layer("cross-attention-norm", seed=seed, n=1, keys=1).heads
    narrow = replace(heads.to_v, weight=heads.to_v.weight[..., :1], bias=None)
    heads = replace(heads, v=heads.v[..., :1], to_v=narrow, out=None)
    exact = torch.linalg.matrix_norm(dense_jacobian(heads), 2)
    long = Policy(dense_entries=0, map_limit=0)
    known = Ingredients(replace(heads, policy=long), Tokens(heads))
    assert (bound_by_blocks(known) >= exact).all()


@pytest.mark.parametrize("name", [*OTHER, "rotary", "qk-norm", "all-norm", "cross-attention"])
def test_the_general_form_of_theorem_3_written_out(random_layer, name):
    heads = random_layer(name, n=4).heads
    bounds = head_bounds(heads)["theorem3"][0, 0].item()
    whole = heads.rows(0, 4, whole=True)[0, 0]
    p, s = heads.attention()[0, 0], heads.scale[0, 0]
    q, k, v = (t[0, 0] for t in (heads.q, heads.k, heads.v))
    pairs = Pairs() if heads.pairs is None else heads.pairs
    plain = pairs.with_q is None and pairs.with_k is None and pairs.slope is None
    slope = torch.ones_like(p) if pairs.slope is None else pairs.slope[0, 0]
    if heads.sink is None:
        v = v - v.mean(0)
        k = k - k.mean(0) if plain else k
    a, b = slope[..., None] * s * k, slope[..., None] * s * q[:, None]
    a = a if pairs.with_q is None else a + pairs.with_q[0, 0]
    b = b if pairs.with_k is None else b + pairs.with_k[0, 0]

    def phi(projection):
        weight = projection.weight[0].T
        return weight[None] if projection.local is None else projection.local[0, 0] @ weight

    def norm(matrix):
        return torch.linalg.svdvals(matrix)[..., 0].max()

    seen = torch.ones_like(p[..., None]) if heads.pairs is None else (p > 0)[..., None]
    reach = norm(seen * a @ phi(heads.to_q)) + norm((seen * b).transpose(0, 1) @ phi(heads.to_k))
    m = torch.diag_embed(whole) - whole[:, :, None] * whole[:, None]
    expected = norm(phi(heads.to_v)) * norm(p) + norm(m) * norm(v) * reach
    assert bounds == pytest.approx(expected.item(), rel=2e-6)


def test_values_that_are_not_finite_are_refused(random_layer):
    heads = random_layer("affine").heads
    v = heads.v.clone()
    v[0, 0, 0, 0] = torch.inf
    with pytest.raises(EvaluationError, match="undefined v"):
        head_bounds(replace(heads, v=v))


WORDS = dict.fromkeys(("label", "meaning", "formula", "source", "explanation"), "x")


@pytest.fixture
def compute(random_layer):
    """Compute a bound by a function; all that it takes is a record."""
    heads = random_layer("affine").heads

    def by(function):
        return head_bounds(heads, bounds=[Bound(name="strange", compute=function, **WORDS)])

    return by


def test_a_function_is_handed_the_ingredients_and_its_values_come_by_name(compute):
    values = compute(lambda known: (known.p_norm * known.weights.v).float())
    assert "sharp" not in values
    assert values["strange"].dtype == torch.float64
    assert (values["strange"] > 0).all()


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda known: None, "TypeError: returned NoneType, not floats of shape (2, 2)"),
        (lambda known: known.centred.p.sum(), "returned (), not floats of shape"),
        (lambda known: known.p_norm.int(), "not floats of shape (2, 2) (batch, heads)"),
        (lambda known: 1 / 0, "the bound strange failed: ZeroDivisionError: division by zero"),
        (lambda known: Path("/no/table.csv").read_text(), "strange failed: FileNotFoundError"),
    ],
)
def test_what_is_no_bound_is_refused_by_its_name(compute, function, says):
    with pytest.raises(EvaluationError) as caught:
        compute(function)
    assert says in caught.value.message
    assert f"a bug in {function.__module__}:<lambda>" in caught.value.advice


@pytest.mark.parametrize(
    "error", [EvaluationError("too many tokens", "take fewer"), torch.OutOfMemoryError("CUDA")]
)
def test_an_error_that_a_user_can_act_on_is_passed_on(compute, error):
    def refuse(known):
        raise error

    with pytest.raises(type(error)) as caught:
        compute(refuse)
    assert caught.value is error


def test_the_mean_field_bound_counts_a_causal_mask():
    """Every token attends to the first ones: a column of P has a sum of up to log N, not 1."""
    q, k = (1e-3 * randn(i, 1, 8, 4) for i in (1, 2))
    free = affine_heads(randn(0, 1, 40, 8), q, k, randn(3, 1, 8, 4))
    masked = replace(free, causal=True)
    exact = dense_norms(dense_jacobian(masked))
    assert (head_bounds(free)["mean_field"] < exact).all()
    assert (head_bounds(masked)["mean_field"] >= exact).all()


@pytest.mark.parametrize("outlier", [1.0, 100.0])
@pytest.mark.parametrize("spread", [0.0, 1.0, 5.0, 50.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_spread_of_tokens_is_at_least_its_schatten_norm(spread, outlier, dtype):
    gen = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 24, 24, dtype=torch.float64, generator=gen)
    x = torch.randn(2, 24, 10, dtype=torch.float64, generator=gen)
    x[:, 0] *= outlier
    p, x = (spread * logits).softmax(-1), x - x.mean(1, keepdim=True)
    m = torch.diag_embed(p) - p[..., :, None] * p[..., None, :]
    values = torch.linalg.svdvals(x[:, None, None].mT @ m)
    truth = values.pow(4).sum(-1).pow(0.25).amax(-1)
    bound = bound_token_spread(p.to(dtype), x.to(dtype)).double()
    assert (bound >= truth * (1 - 1e-12)).all()
    if dtype == torch.float64 and spread < 50.0:
        torch.testing.assert_close(bound, truth, rtol=1e-6, atol=0)


@pytest.mark.parametrize("tokens", [3, 5])
def test_the_allowance_of_the_spread_covers_sums_over_channels(tokens):
    x = torch.full((1, tokens, 2**18), 0.23)
    x[:, 0] *= 1 - tokens  # all channels alike: their rounding errors add up
    p = randn(0, 1, 1, tokens, tokens).softmax(-1)
    m = torch.diag_embed(p) - p[..., :, None] * p[..., None, :]
    # The same singular values, from one channel that stands for all.
    wide = x[..., :1].double() * x.shape[-1] ** 0.5
    truth = torch.linalg.matrix_norm(wide[:, None, None].mT @ m.double(), 2).amax(-1)
    bound = bound_token_spread(p.float(), x).double()
    assert (bound >= truth * (1 - 1e-12)).all()


def test_bounds_do_not_depend_on_how_maps_are_cut(random_layer):
    heads = random_layer("causal", n=7, samples=3).heads
    whole = head_bounds(replace(heads, policy=Policy(dense_entries=0)))
    cut = head_bounds(replace(heads, policy=Policy(dense_entries=0, map_entries=1)))
    for name in load_bounds():
        torch.testing.assert_close(cut[name], whole[name], rtol=1e-9, atol=0)
