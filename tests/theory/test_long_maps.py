"""Maps too large to be kept: their rows are met block by block, and nothing else changes."""

from dataclasses import replace

import torch

from lipaudit.theory.head_bounds import head_bounds
from lipaudit.theory.head_norms import head_norms, layer_norms, splitting_gain
from lipaudit.theory.heads import Projection, affine_heads, rows_in_reach
from lipaudit.theory.policy import Policy
from lipaudit.theory.products import sketched_vjp_x
from tests.live import Live

SEEDS = range(10)
LONG = Policy(map_limit=0, chunk_entries=24)


def norms_of(heads):
    heads = replace(heads)  # nothing that is known of the maps
    norms = {"head": head_norms(heads, seeds=SEEDS, tol=1e-9)}
    layer = layer_norms(heads, seeds=SEEDS, tol=1e-9)
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
