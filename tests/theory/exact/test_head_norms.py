"""The exact Jacobian against dense autograd Jacobians in float64."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lipaudit.errors import EvaluationError
from lipaudit.measures.layers import max_windows
from lipaudit.theory.head_bounds import head_bounds
from lipaudit.theory.head_norms import head_norms, layer_norms, splitting_gain
from lipaudit.theory.heads import affine_heads
from lipaudit.theory.products import dense_jacobian, sketched_vjp_x
from tests.theory.cases import without_padding

SEEDS = (0, 1)


def spectral(matrices):
    return torch.linalg.matrix_norm(matrices, 2)


def test_dense_jacobian_is_that_of_autograd(layer):
    """And so is J^T u."""
    heads, truth = layer.heads, layer.jacobian()
    torch.testing.assert_close(dense_jacobian(heads), truth, rtol=0, atol=1e-12)
    shape = (*heads.q.shape[:3], heads.v.shape[3])
    u = torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    inputs = {"x": heads.x} | ({} if heads.x_kv is None else {"x_kv": heads.x_kv})
    whole = {name: torch.eye(x.shape[2]).to(x) for name, x in inputs.items()}
    u, found = sketched_vjp_x(heads, u, torch.ones(shape[:2]).to(u), whole)
    pulled = [found.get(name, torch.zeros_like(x)).flatten(1) for name, x in inputs.items()]
    expected = torch.einsum("bhox,bho->bx", truth, u.flatten(2))
    torch.testing.assert_close(torch.cat(pulled, 1), expected, rtol=0, atol=1e-12)


def test_norms_of_heads_and_layers(layer):
    """In float64, and of float32 heads to four digits."""
    truth = spectral(layer.jacobian())
    concat, out = (spectral(layer.layer_jacobian(out=each)) for each in (False, True))
    single = layer.heads.to(torch.float32)
    for heads, tol, rtol in ((layer.heads, 1e-11, 1e-10), (single, 1e-4, 1e-4)):
        norms, whole = (f(heads, seeds=SEEDS, tol=tol) for f in (head_norms, layer_norms))
        torch.testing.assert_close(norms.norm, truth, rtol=rtol, atol=0)
        torch.testing.assert_close(whole.concat.norm, concat, rtol=rtol, atol=0)
        torch.testing.assert_close(whole.out.norm, out, rtol=rtol, atol=0)
        assert norms.converged.all()
        assert (norms.upper >= truth * (1 - rtol)).all()
    assert layer_norms(replace(layer.heads, out=None), seeds=SEEDS).out is None


KINDS = ["biases", "qk-norm", "windows", "softcap", "relative", "relative-own", "sink"]


@pytest.mark.parametrize("name", KINDS)
def test_a_row_does_not_depend_on_its_batch(random_layer, name):
    heads = random_layer(name, n=7, windows=1).heads
    together = head_norms(heads, seeds=(3, 4))
    alone = replace(heads.row(1), sample=torch.tensor([0]))
    apart = head_norms(alone, seeds=[4])
    torch.testing.assert_close(apart.norm[0], together.norm[1], rtol=1e-12, atol=0)
    assert torch.equal(apart.products[0], together.products[1])
    last = head_norms(heads.pick(slice(1, 2)), seeds=(3, 4))
    torch.testing.assert_close(last.norm[:, 0], together.norm[:, 1], rtol=1e-12, atol=0)


def test_padding_changes_nothing(random_layer):
    padded = random_layer("padding", n=9).heads  # the second sample has 8 tokens
    inside = head_norms(padded, seeds=(3, 4))
    alone = head_norms(without_padding(padded, 1, 8), seeds=[4])
    torch.testing.assert_close(alone.norm[0], inside.norm[1], rtol=1e-12, atol=0)
    assert torch.equal(alone.products[0], inside.products[1])


def test_windows_of_a_sample_make_one_block_diagonal_jacobian(random_layer):
    layer = random_layer("windows")
    rows = head_norms(layer.heads, seeds=SEEDS, tol=1e-11).norm
    dense = layer.jacobian()
    pairs = [dense[2 * s : 2 * s + 2, h] for s in (0, 1) for h in (0, 1)]
    blocks = torch.stack([spectral(torch.block_diag(*pair)) for pair in pairs]).view(2, 2)
    torch.testing.assert_close(max_windows(rows, layer.heads.sample), blocks, rtol=1e-10, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_heads_whose_queries_keys_and_values_are_constant_have_norm_0(random_layer, dtype):
    heads = replace(random_layer("affine").heads, to_q=None, to_k=None, to_v=None).to(dtype)
    whole = layer_norms(heads, seeds=SEEDS)
    for norms in (head_norms(heads, seeds=SEEDS), whole.concat, whole.out):
        assert not norms.norm.any()
        assert not norms.upper.any()
    assert not head_bounds(heads)["sharp"].any()


def test_values_that_a_normalisation_makes_constant_have_a_small_norm(random_layer):
    # Tokens of one channel: RMSNorm of x W leaves only its sign, and ||J^T u||^2 cancels.
    options = {"n": 1, "width": 1, "d": 2, "gain": 30.0}
    for seed in (2, 10, 11, 17):
        heads = random_layer("all-norm", seed=seed, **options).heads.to(torch.float32)
        norms = head_norms(heads, seeds=[0, 1])
        truth = torch.linalg.matrix_norm(dense_jacobian(heads.to(torch.float64)), 2)
        torch.testing.assert_close(norms.norm, truth, rtol=1e-6, atol=1e-7)


def test_a_value_that_is_not_finite_is_an_error(random_layer):
    heads = random_layer("affine").heads
    v = heads.v.clone()
    v[1, 0, 0, 0] = torch.inf
    with pytest.raises(EvaluationError, match="problem 2 "):
        head_norms(replace(heads, v=v), seeds=SEEDS)


# Splitting tokens.


def duplicated(layer, times):
    """The same layer with every token repeated; maps that ignore the position stay valid."""
    heads = layer.heads
    rows = {name: getattr(heads, name).repeat_interleave(times, 2) for name in "qkv"}
    bias = heads.bias

    def split(t):
        return None if t is None else t.repeat_interleave(times, 2).repeat_interleave(times, 3)

    x = heads.x.repeat_interleave(times, 1)
    layer = replace(layer, heads=replace(heads, x=x, **rows, bias=split(bias)))
    if layer.logits is None:
        return layer
    logits = replace(layer.logits, r=split(layer.logits.r), t=split(layer.logits.t))
    return replace(layer, logits=logits, bias=split(layer.bias))


@settings(max_examples=25, deadline=None)
@example(name="affine", seed=0, gain=6.0, times=2)
@given(
    name=st.sampled_from(
        ["affine", "biases", "position-bias", "qk-norm", "wide-values", "softcap", "relative"]
    ),
    seed=st.integers(0, 10_000),
    gain=st.sampled_from([0.5, 1.5, 3.0, 6.0]),
    times=st.sampled_from([2, 3]),
)
def test_splitting_gain_is_what_duplicates_do(random_layer, name, seed, gain, times):
    layer = random_layer(name, seed=seed, gain=gain, samples=1, n=4)
    exact = spectral(layer.jacobian())
    gain = splitting_gain(layer.heads, exact, seeds=[0], tol=1e-12)
    truth = spectral(duplicated(layer, times).jacobian())
    torch.testing.assert_close(gain * exact, truth, rtol=1e-10, atol=0)


def test_splitting_gain_of_many_tokens(random_layer):
    heads = random_layer("affine", n=20, width=12, d=8, dv=8).heads
    p = heads.attention()
    c = p[..., None] * (heads.v[:, :, None] - (p @ heads.v)[:, :, :, None])
    t = torch.einsum("bhija,bhjd->bhiad", c, heads.k)
    largest = spectral(t @ heads.to_q.weight.mT[:, None] / 8**0.5).amax(2)
    gain = splitting_gain(heads, largest / 3, seeds=SEEDS, tol=1e-11)
    torch.testing.assert_close(gain, torch.full_like(gain, 3.0), rtol=1e-10, atol=0)
    assert splitting_gain(heads, largest * 3, seeds=SEEDS).eq(1).all()


def test_two_inputs_gain_nothing(random_layer):
    layer = random_layer("cross-attention", gain=6.0)
    exact = spectral(layer.jacobian())
    assert splitting_gain(layer.heads, exact, seeds=SEEDS).eq(1).all()


def test_causal_attention_and_sinks_have_no_splitting_gain(random_layer):
    """Copies of all tokens take from the share of a sink; a causal mask is one as a bias, too."""
    heads = random_layer("causal").heads
    future = torch.ones(heads.q.shape[2], heads.k.shape[2], dtype=torch.bool).triu(1)
    mask = torch.zeros(1, 1, *future.shape, dtype=torch.float64).masked_fill(future, -torch.inf)
    by_bias = replace(heads, causal=False, bias=mask)
    assert by_bias.is_causal()
    assert not replace(heads, causal=False).is_causal()
    sink = random_layer("sink").heads
    for each, name in ((heads, "causal"), (by_bias, "causal"), (sink, "sink")):
        with pytest.raises(ValueError, match=name):
            splitting_gain(each, torch.ones(2, 2), seeds=SEEDS)


def test_a_bias_of_the_values_acts_beside_a_sink(random_layer):
    """It drops out of J only where the rows of P sum to 1; 1e4 times the values swamps them."""
    layer = random_layer("sink")
    to_v, v = layer.heads.to_v, layer.heads.v
    more = 1e4 * to_v.bias
    heads = replace(layer.heads, v=v + more[:, None], to_v=replace(to_v, bias=to_v.bias + more))
    layer = replace(layer, heads=heads)
    truth = spectral(layer.jacobian())
    norms = head_norms(heads, seeds=SEEDS, tol=1e-11)
    torch.testing.assert_close(norms.norm, truth, rtol=1e-10, atol=0)
    assert (head_bounds(heads)["sharp"] >= truth * (1 - 1e-12)).all()


def test_a_weak_sink_is_none_and_a_strong_one_takes_all(random_layer):
    plain = random_layer("biases").heads
    weak, strong = (replace(plain, sink=torch.full((1, 2, 1), s).double()) for s in (-1e3, 1e3))
    torch.testing.assert_close(dense_jacobian(weak), dense_jacobian(plain), rtol=0, atol=1e-13)
    assert not dense_jacobian(strong).any()
    rows = replace(plain, sink=torch.randn(1, 2, 5).double()).rows(1, 4, whole=True)
    assert rows.shape == (2, 2, 3, 6)
    torch.testing.assert_close(rows.sum(-1), torch.ones(2, 2, 3).double())


@pytest.mark.parametrize("name", ["affine", "causal", "cross-attention"])
def test_weak_attention_has_its_norm_from_any_start(random_layer, name):
    """W_V of a random model has singular values close together, and J is nearly P kron W_V^T."""
    one = random_layer(name, gain=0.05, samples=1, n=24, width=48, dv=24).heads
    how = {"tol": 1e-10, "max_steps": 2000}
    truth, whole = (f(one, seeds=[0], **how) for f in (head_norms, layer_norms))
    starts = range(60)  # the sample many times, each of which starts by a seed of its own
    names = [name for name in ("x", "x_kv", "q", "k", "v") if getattr(one, name) is not None]
    again = {name: torch.cat([getattr(one, name)] * len(starts)) for name in names}
    heads = replace(one, **again, sample=torch.arange(len(starts)))
    norm, together = (f(heads, seeds=starts) for f in (head_norms, layer_norms))
    assert len(norm.norm) == len(together.out.norm) == len(starts)
    for norms, expected in (
        (norm.norm, truth.norm),
        (together.concat.norm, whole.concat.norm),
        (together.out.norm, whole.out.norm),
    ):
        torch.testing.assert_close(norms, expected.expand_as(norms), rtol=1e-4, atol=0)


def test_weak_attention_takes_few_products():
    """Singular values crowd: a start that knew single heads only took up to 18 and 14."""
    draw = {"generator": torch.Generator().manual_seed(5), "dtype": torch.float64}
    wq, wk, wv = (torch.randn(6, 192, 32, **draw) for _ in range(3))
    heads = affine_heads(torch.randn(2, 24, 192, **draw), 0.02 * wq, 0.02 * wk, wv)
    heads = replace(heads, out=torch.randn(6, 32, 192, **draw))
    norms = layer_norms(heads, seeds=(0, 1), within=0.2)
    assert norms.concat.products.max() <= 10
    assert norms.out.products.max() <= 10
