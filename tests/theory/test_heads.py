"""The containers: the map P, computed once for all that a visit asks; precision, slices.

Maps too large to be kept: their rows are met block by block, and nothing else changes.
"""

from collections import Counter
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lipaudit.measures.layers import max_windows
from lipaudit.theory import Policy
from lipaudit.theory.head_bounds import head_bounds
from lipaudit.theory.head_norms import forward_error, head_norms, layer_norms, splitting_gain
from lipaudit.theory.heads import Heads, Projection, affine_heads, rows_in_reach
from lipaudit.theory.products import sketched_vjp_x
from tests.live import Live


def tensors(heads):
    for part in (heads, heads.to_q, heads.to_k, heads.to_v):
        for field in fields(part) if part is not None else ():
            value = getattr(part, field.name)
            if isinstance(value, Tensor):
                yield field.name, value


def test_attention_gives_the_outputs_of_plain_softmax_attention(layer):
    heads = layer.heads
    x_kv = heads.x if heads.x_kv is None else heads.x_kv
    out = heads.attention() @ heads.v
    for b in range(out.shape[0]):
        for h in range(out.shape[1]):
            truth = layer.output(b, h, heads.x[b], x_kv[b])
            torch.testing.assert_close(out[b, h], truth, rtol=1e-12, atol=1e-12)


def test_a_row_without_keys_is_zero_and_nan_is_not_taken_for_a_mask(random_layer):
    heads = random_layer("affine").heads
    mask = torch.zeros(1, 1, 5, 5, dtype=torch.float64)
    mask[..., 2, :] = -torch.inf
    p = replace(heads, bias=mask).attention()
    assert p[..., 2, :].eq(0).all()
    assert torch.equal(p[..., 3, :], heads.attention()[..., 3, :])
    for each in (heads, random_layer("padding").heads):
        q = each.q.clone()
        q[0, 1, 0, 0] = torch.nan
        assert replace(each, q=q).attention()[0, 1, 0].isnan().all()


def test_to_changes_the_precision_of_everything(layer):
    heads = layer.heads.to(torch.float32)
    floating = {value.dtype for _, value in tensors(heads) if value.is_floating_point()}
    assert floating == {torch.float32}
    assert heads.sample.dtype == torch.int64
    for (name, low), (_, high) in zip(tensors(heads), tensors(layer.heads), strict=True):
        torch.testing.assert_close(low, high, rtol=1e-6, atol=1e-6, check_dtype=False, msg=name)


def test_per_sample_takes_the_largest_window(random_layer):
    heads = random_layer("windows").heads
    values = torch.tensor([[1.0, 7.0], [2.0, 6.0], [9.0, 0.0], [8.0, torch.nan]])
    assert torch.equal(max_windows(values[:, 0], heads.sample), torch.tensor([2.0, 9.0]))
    worst = max_windows(values, heads.sample)[:, 1]
    assert worst[0] == 7.0
    assert worst[1].isnan()
    missed = torch.tensor([False, True, False, False])
    assert max_windows(missed, heads.sample).tolist() == [True, False]


@pytest.mark.parametrize(
    "name", ["affine", "causal", "position-bias", "padding", "padding-causal"]
)
@pytest.mark.parametrize("gain", [1.0, 1e4])
def test_visible_keys_are_those_that_nothing_masks(random_layer, name, gain):
    """Whatever P makes of them: with giant logits most keys that are seen have P = 0."""
    heads, calm = (random_layer(name, gain=g).heads for g in (gain, 1e-3))
    counts = heads.visible(0, 5).sum(-1).expand(heads.q.shape[:3])
    assert torch.equal(counts, calm.attention().count_nonzero(-1))
    assert torch.equal(heads.visible(2, 4), heads.visible(0, 5)[..., 2:4, :])


@pytest.mark.parametrize("mask", [-torch.inf, torch.finfo(torch.float32).min, -1e4])
def test_every_convention_of_a_mask_hides_its_keys(random_layer, mask):
    heads = random_layer("affine").heads
    bias = torch.zeros(1, 1, 5, 5, dtype=torch.float64)
    bias[..., 2:] = mask
    assert replace(heads, bias=bias).visible(0, 5).sum(-1).unique().tolist() == [2]
    hidden = replace(heads, bias=bias + torch.full((5, 5), mask).nan_to_num().triu(1))
    assert hidden.is_causal()


@pytest.mark.parametrize("size", [1e12, 1e22, -1e22])
def test_giant_logits_hide_no_key_that_is_as_large(random_layer, size):
    bias = torch.full((1, 1, 5, 5), size, dtype=torch.float64)
    bias[..., 4], bias[..., 0, :] = -torch.inf, torch.finfo(torch.float32).min
    seen = replace(random_layer("affine").heads, bias=bias).visible(0, 5)
    assert seen.sum(-1).flatten().tolist() == [0, 4, 4, 4, 4]


def test_one_hot_rows_and_parts_of_causal_layers_are_not_taken_for_causal(random_layer):
    """Giant logits leave P = 0 above the diagonal, where nothing is masked."""
    heads = random_layer("position-bias").heads
    peaked = 500.0 * torch.eye(5, dtype=torch.float64)[None, None] + heads.bias
    peaked = replace(heads, bias=4 * peaked, scale=0 * heads.scale)
    assert not peaked.attention().triu(1).any()
    assert not peaked.is_causal()
    mask = torch.zeros(1, 2, 5, 5, dtype=torch.float64)
    mask[:, 0] = torch.full((5, 5), -torch.inf).triu(1)
    heads = replace(heads, bias=mask)
    assert not heads.is_causal()
    assert [heads.pick(slice(h, h + 1)).is_causal() for h in (0, 1)] == [True, False]


def test_a_mask_of_booleans_is_one_of_zeros_and_infinities(random_layer):
    heads = random_layer("rotary").heads
    n = heads.q.shape[2]
    seen = torch.ones(n, n, dtype=torch.bool).tril().triu(-2)  # a causal sliding window
    seen[3] = False
    mask = seen.repeat(len(heads.q), 1, 1, 1)
    added = torch.zeros_like(mask, dtype=heads.q.dtype).masked_fill(~mask, -torch.inf)
    kept, cast = replace(heads, bias=mask), replace(heads, bias=added)
    assert kept.to(torch.float32).bias is mask
    for limit in (2**25, 0):  # all rows at once, and one by one
        policy = Policy(map_limit=limit, chunk_entries=1)
        kept, cast = replace(kept, policy=policy), replace(cast, policy=policy)
        assert [rows[1] for rows in kept.row_blocks()] == ([n] if limit else [*range(1, n + 1)])
        for read in (
            lambda heads: heads.rows(0, n),
            lambda heads: heads.visible(0, n),
            lambda heads: torch.tensor(replace(heads).is_causal()),
            forward_error,
        ):
            assert torch.equal(read(kept), read(cast))
    assert kept.is_causal()
    bounds, same = head_bounds(kept), head_bounds(cast)
    assert all(torch.equal(bounds[name].nan_to_num(), same[name].nan_to_num()) for name in same)


KINDS = ("affine", "padding", "rotary", "causal", "windows", "softcap", "sink-padding")


class Softmaxes(TorchFunctionMode):
    """Counts the softmaxes by precision."""

    def __init__(self):
        super().__init__()
        self.count: Counter[torch.dtype] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.softmax:
            self.count[args[0].dtype] += 1
        return func(*args, **(kwargs or {}))


def visit(heads: Heads):
    """All that the measure `bounds` asks of a layer."""
    seeds = range(int(heads.sample.max()) + 1)
    norms = head_norms(heads, seeds=seeds)
    values = {"exact": norms.norm, "layer": layer_norms(heads, seeds=seeds).concat.norm}
    if not heads.is_causal() and heads.sink is None:
        values["gain"] = splitting_gain(heads, norms.norm, seeds=seeds)
    return values | head_bounds(heads)


@pytest.mark.parametrize("name", KINDS)
def test_the_map_is_computed_once_in_each_precision_and_changes_no_number(random_layer, name):
    for size in ({}, {"n": 40, "width": 30, "d": 6}):  # dense and factored
        with Softmaxes() as softmaxes:
            visit(random_layer(name, **size).heads.to(torch.float32))
        assert softmaxes.count == {torch.float32: 1, torch.float64: 1}
    heads = random_layer(name).heads
    shared, seeds = visit(heads), range(2)
    alone = head_bounds(replace(heads)) | {"exact": head_norms(replace(heads), seeds=seeds).norm}
    for key, value in alone.items():
        torch.testing.assert_close(shared[key], value, rtol=1e-12, atol=0, equal_nan=True)


@pytest.mark.parametrize("change", ["q", "k", "scale", "bias", "sink"])
def test_other_logits_have_another_map(random_layer, change):
    heads = random_layer("sink", position_bias=True).heads
    p = heads.attention()
    other = replace(heads, **{change: 2 * getattr(heads, change)})
    assert not torch.equal(other.attention(), p)
    with pytest.raises(ValueError, match=change):
        heads.with_same_map(**{change: getattr(heads, change)})


def test_what_is_cast_down_does_not_share_the_digits_it_has_lost(random_layer):
    heads = random_layer("affine").heads
    p = heads.attention()
    rounded = heads.to(torch.float32).to(torch.float64).attention()
    assert not torch.equal(rounded, p)
    torch.testing.assert_close(rounded, p, rtol=1e-5, atol=0)


def test_a_known_map_carries_gradients_all_the_same():
    weights = torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    x = torch.randn(1, 5, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    heads = affine_heads(x, *weights)
    with torch.no_grad():
        heads.attention()
    with torch.inference_mode():
        heads.attention()
    truth = (4**-0.5 * heads.q @ heads.k.mT).softmax(-1)[..., 0].sum()
    (expected,) = torch.autograd.grad(truth, x, retain_graph=True)
    (gradient,) = torch.autograd.grad(heads.attention()[..., 0].sum(), x)
    torch.testing.assert_close(gradient, expected)


# Maps too large to be kept.

SEEDS = range(10)
LONG = Policy(map_limit=0, chunk_entries=24)


def norms_of(heads):
    heads = replace(heads)  # nothing that is known of the maps
    how = {"seeds": SEEDS, "max_steps": 4}  # alike at every step: none needs to be the last
    norms, layer = {"head": head_norms(heads, **how)}, layer_norms(heads, **how)
    norms |= {"layer": layer.concat} | ({} if layer.out is None else {"out": layer.out})
    values = {name: each.norm for name, each in norms.items()}
    if not heads.is_causal() and heads.sink is None:
        values["gain"] = splitting_gain(heads, values["head"], seeds=SEEDS)
    u = torch.randn(heads.v.shape[:2] + heads.q.shape[2:3] + heads.v.shape[3:]).to(heads.v)
    u = u if heads.valid is None else u * heads.valid[:, None, :, None]
    inputs = {"x": heads.x} | ({} if heads.x_kv is None else {"x_kv": heads.x_kv})
    whole = {name: torch.eye(x.shape[2]).to(x) for name, x in inputs.items()}
    _, pulled = sketched_vjp_x(heads, u, torch.ones(u.shape[:2]).to(u), whole)
    values |= {f"pulled {name}": t for name, t in pulled.items()}
    return values


def test_exact_norms_are_those_of_kept_maps(layer):
    long = replace(layer.heads, policy=LONG)
    torch.manual_seed(0)
    kept = norms_of(layer.heads)
    torch.manual_seed(0)
    met = norms_of(long)
    assert len(long.row_blocks()) > 1 or layer.heads.q.shape[2] < 3
    for name, values in kept.items():
        torch.testing.assert_close(met[name], values, rtol=1e-9, atol=1e-12)


def test_rows_are_cut_to_the_keys_that_they_see(random_layer):
    heads = random_layer("rotary").heads
    n = heads.q.shape[2]
    window = torch.ones(n, n, dtype=torch.bool).tril().triu(-1)[None, None]
    causal, sliding = replace(heads, causal=True), replace(heads, bias=window)
    for one, first in ((causal, 0), (sliding, 2)):
        p, keys = rows_in_reach(one, 3, 5)
        assert keys == slice(first, 5)
        whole = torch.zeros_like(one.attention()[:, :, 3:5])
        whole[..., keys] = p
        torch.testing.assert_close(whole, one.attention()[:, :, 3:5], rtol=1e-12, atol=0)


SHORT = Policy(map_limit=2**15, chunk_entries=2**14, map_entries=1)


def rotary_heads(tokens, count, width, policy=SHORT):
    """A causal layer with rotary-like maps, one sample; by default too long to be kept."""
    torch.manual_seed(0)
    x, weights = torch.randn(1, tokens, 8), torch.randn(3, count, 8, width)
    heads = replace(affine_heads(x, *weights), causal=True, policy=policy)
    turns = torch.linalg.qr(torch.randn(1, 1, tokens, width, width)).Q
    q, k = ((turns @ (x[:, None] @ w)[..., None])[..., 0] for w in weights[:2])
    to_q, to_k = (Projection(w, None, turns, "rotation") for w in weights[:2])
    return replace(heads, q=q, k=k, to_q=to_q, to_k=to_k)


def test_exact_norms_of_long_layers_keep_no_map():
    """Memory of a block of rows in float64, and of vectors: it grows as the tokens do.

    Two steps: each keeps as much as any other.
    """
    most = []
    for tokens in (256, 512):
        heads, live = rotary_heads(tokens, 4, 2), Live()
        with live:
            head_norms(heads, seeds=[0], max_steps=2)
            layer_norms(heads, seeds=[0], max_steps=2)
        assert live.largest <= 2 * 8 * SHORT.chunk_entries
        most.append(live.most)
    assert most[1] < 2.2 * most[0]
    assert most[1] < 4 * 512**2 * 8 / 2  # the maps of the four heads, in double precision


def test_bounds_of_long_layers_keep_the_maps_of_one_head():
    """P in float64 and in float32, the norms of its blocks in float32, and blocks of rows."""
    tokens, heads, live = 512, rotary_heads(512, 4, 2), Live()
    with live:
        head_bounds(heads)
    assert live.largest <= 8 * tokens**2
    assert live.most < 20 * tokens**2
