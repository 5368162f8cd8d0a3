"""Reading the attention of every kind of model, against the models' own tensors and autograd."""

import copy
import weakref
from contextlib import ExitStack, contextmanager

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn

from benchmarks.reference.truth import AllWide
from lipaudit.data.batch import Batch
from lipaudit.errors import EvaluationError, InputError
from lipaudit.models.attention.capture import Layer, Site, capture
from lipaudit.theory.head_bounds import head_bounds
from lipaudit.theory.heads import Heads
from lipaudit.theory.products import dense_jacobian
from lipaudit.train.penalty import SpecformerPenalty

AFFINE = ("affine", "affine", "affine")
ROTARY = ("rotation", "rotation", "affine")
LOCAL = ("local", "local", "affine")
CLOSED = {
    "timm-vit": [AFFINE] * 2,
    "timm-deit3": [AFFINE] * 2,
    "timm-eva02": [ROTARY] * 2,
    "timm-qk-norm": [LOCAL] * 2,
    "timm-swin": [AFFINE] * 3,
    "timm-swinv2": [LOCAL] * 3,
    "timm-twins": [AFFINE] * 5,
    "hf-vit": [AFFINE] * 2,
    "hf-dinov2": [AFFINE] * 2,
    "hf-swin": [AFFINE] * 2,
    "bert": [AFFINE] * 2,
    "bert-eager": [AFFINE] * 2,
    "distilbert": [AFFINE] * 2,
    "albert": [AFFINE] * 2,
    "gpt2": [AFFINE] * 2,
    "gptj": [ROTARY] * 2,
    "llama": [ROTARY] * 2,
    "qwen3": [LOCAL] * 2,
    "olmo2": [("cross-head", "cross-head", "affine")] * 2,
    "t5": [AFFINE] * 6,
    "torch-encoder": [AFFINE] * 2,
    "handwritten": [AFFINE],
    "gemma2": [ROTARY] * 2,
    "gpt-oss": [ROTARY] * 2,
    "deepseek-v3": [("cross-head",) * 3] * 2,
    "deepseek-v2": [("rotation", "cross-head", "cross-head")] * 2,
    "mobilebert": [("cross-head", "cross-head", "affine")] * 2,
    "deberta": [AFFINE] * 2,
    "deberta-v3": [AFFINE] * 2,
    "deberta-v1": [AFFINE] * 2,
    "timm-sam": [AFFINE] * 2,
    "timm-sam-eager": [AFFINE] * 2,
}
OPEN = {
    "timm-mvit": "q depends on several tokens",
    "cvt": "its keys and values read different inputs",
}
PAIRS = {  # which terms the logits have beside s q k^T: a slope, r, t
    "gemma2": (True, False, False),
    "deberta": (False, True, True),
    "deberta-v3": (False, True, True),
    "deberta-v1": (False, True, True),
    "timm-sam": (False, True, False),
    "timm-sam-eager": (False, True, False),
}


def layers_of(net, sites, batch, **options) -> list[Layer]:
    """All layers at once: tests may hold them."""
    return capture(net, sites, batch, lambda layer: layer, **options)


def heads_of(net, sites: tuple[Site, ...], batch: Batch) -> list[Heads]:
    return capture(net, sites, batch, Layer.heads)


UNCHANGED = ["timm-swinv2", "timm-cait", "timm-mvit", "timm-sam-eager", "albert", "gptj", "t5"]
UNCHANGED += ["gpt-oss", "deberta", "torch-encoder"]


@pytest.mark.parametrize("name", UNCHANGED)
def test_model_is_not_changed(zoo, name):
    """Everything up to the last attention: the pass ends there."""
    net, sites, batch = zoo(name)
    with module_outputs(net) as observed:
        assert capture(net, sites, batch, lambda layer: layer.site) == list(sites)
    with module_outputs(net) as plain:
        net.output(batch)
    assert len(observed) < len(plain)
    for (module, seen), (same, true) in zip(observed, plain, strict=False):
        assert module == same
        torch.testing.assert_close(seen, true)


@contextmanager
def module_outputs(net):
    """What each module of a model gives while the block runs it, in order."""
    seen: list[tuple[str, torch.Tensor]] = []

    def note(name, out):
        if isinstance(out, torch.Tensor):
            seen.append((name, out.detach().clone()))

    with ExitStack() as hooks:
        for name, part in net.module.named_modules():
            hook = part.register_forward_hook(lambda _m, _a, out, name=name: note(name, out))
            hooks.callback(hook.remove)
        yield seen


@pytest.mark.parametrize("name", ["llama", "gemma2", "timm-vit"])
def test_nothing_is_run_behind_the_last_layer_that_is_wanted(zoo, name):
    net, sites, batch = zoo(name)
    whole = capture(net, sites, batch, lambda layer: layer.output)
    with module_outputs(net) as every:
        capture(net, sites, batch, lambda layer: layer.site.index)
    with module_outputs(net) as first:
        (output,) = capture(net, sites, batch, lambda layer: layer.output, layers=[0])
    assert torch.equal(output, whole[0])
    inside = {module for module, _ in first}
    assert not any(site.module in inside for site in sites)
    assert len(first) < len(every) / len(sites) + 5


@pytest.mark.parametrize("name", OPEN)
def test_layers_without_closed_form_say_why(zoo, name):
    for site in zoo(name)[1]:
        assert not site.closed_form
        assert OPEN[name] in site.reason
        assert site.inputs  # their norms can be had numerically


@pytest.mark.parametrize("name", CLOSED)
def test_heads_hold_together(zoo, name):
    """q, k, v follow from X, and the output from P and v, by the recorded tensors alone."""
    net, sites, batch = zoo(name)
    assert [site.kinds for site in sites] == CLOSED[name]
    assert all(site.closed_form and site.reason is None for site in sites)
    assert [site.index for site in sites] == list(range(len(sites)))
    for layer in layers_of(net, sites, batch):
        heads = layer.heads()
        pairs = heads.pairs
        terms = () if pairs is None else (pairs.slope, pairs.with_q, pairs.with_k)
        assert tuple(term is not None for term in terms) == PAIRS.get(name, ())
        assert (heads.sink is not None) == (name == "gpt-oss")
        memory = heads.x if heads.x_kv is None else heads.x_kv
        for rows, x, made in (
            (heads.q, heads.x, heads.to_q),
            (heads.k, memory, heads.to_k),
            (heads.v, memory, heads.to_v),
        ):
            if made.kind in ("affine", "rotation"):
                y = x[:, None] @ made.weight + (0 if made.bias is None else made.bias[:, None])
                want = y if made.local is None else (made.local @ y[..., None])[..., 0]
                seen = (x != 0).any(-1)[:, None, :, None]  # padding is zero in x only
                torch.testing.assert_close(rows * seen, want * seen, rtol=1e-4, atol=1e-4)
        o = layer.output if heads.valid is None else layer.output * heads.valid[:, None, :, None]
        torch.testing.assert_close(heads.attention() @ heads.v, o, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gptj", "gemma2", "gpt-oss"])
def test_nothing_is_in_single_precision_where_the_model_is_in_double(zoo, name):
    """These cast queries, keys or logits to float32, whatever their own precision."""
    net, sites, batch = zoo(name, "float64")
    for layer in layers_of(net, sites, batch):
        heads = layer.heads()
        assert {t.dtype for t in (heads.q, heads.k, heads.v, layer.output)} == {torch.float64}
        o = layer.output * heads.valid[:, None, :, None]
        torch.testing.assert_close(heads.attention() @ heads.v, o, rtol=0, atol=1e-13)


# --- weights: bit by bit those of the parameters


def parts(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """(out, in) of a Linear to (heads, in, d)."""
    return weight.unflatten(0, (heads, -1)).mT


def bert_weights(module):
    attention = module.bert.encoder.layer[0].attention
    linears = (attention.self.query, attention.self.key, attention.self.value)
    return [(m.weight, m.bias) for m in linears], attention.output.dense.weight.T


def vit_weights(module):
    attention = module.blocks[0].attn
    fused = zip(attention.qkv.weight.chunk(3), attention.qkv.bias.chunk(3), strict=True)
    return list(fused), attention.proj.weight.T


def gpt2_weights(module):
    """They are stored the other way round."""
    attention = module.transformer.h[0].attn
    fused = attention.c_attn
    pairs = zip(fused.weight.chunk(3, 1), fused.bias.chunk(3), strict=True)
    return [(weight.T, bias) for weight, bias in pairs], attention.c_proj.weight


@pytest.mark.parametrize(
    ("name", "weights"),
    [("bert", bert_weights), ("timm-vit", vit_weights), ("gpt2", gpt2_weights)],
)
def test_weights_are_those_of_the_parameters(zoo, name, weights):
    net, sites, batch = zoo(name)
    heads = heads_of(net, sites, batch)[0]
    true, out = weights(net.module)
    for made, (weight, bias) in zip((heads.to_q, heads.to_k, heads.to_v), true, strict=True):
        assert torch.equal(made.weight, parts(weight, 4))
        assert torch.equal(made.bias, bias.view(4, -1))
    assert torch.equal(heads.out, out.unflatten(0, (4, -1)))


def test_weights_of_grouped_queries_are_repeated(zoo):
    net, sites, batch = zoo("llama")
    heads = heads_of(net, sites, batch)[0]
    attention = net.module.model.layers[0].self_attn
    assert torch.equal(heads.to_q.weight, parts(attention.q_proj.weight, 4))
    for made, linear in ((heads.to_k, attention.k_proj), (heads.to_v, attention.v_proj)):
        assert torch.equal(made.weight, parts(linear.weight, 2).repeat_interleave(2, 0))
    assert torch.equal(heads.k[:, 0], heads.k[:, 1])


def test_a_projection_without_bias_stays_without(zoo):
    heads = heads_of(*zoo("t5"))[0]
    assert heads.to_q.bias is heads.to_k.bias is heads.to_v.bias is None


def test_weights_of_a_shared_layer(zoo):
    first, second = heads_of(*zoo("albert"))
    assert torch.equal(first.to_q.weight, second.to_q.weight)
    assert not torch.equal(first.x, second.x)


# --- P, against the eager implementation of the library


def eager_maps(net, batch: Batch) -> list[torch.Tensor]:
    """Attention maps as transformers reports them, in call order."""
    module = copy.deepcopy(net.module)
    for part in module.modules():  # some versions leave the encoder's and the decoder's as it was
        if hasattr(part, "set_attn_implementation"):
            part.set_attn_implementation("eager")
    mask = None if batch.mask is None else batch.mask.long()
    if net.kind == "image":
        return list(module(pixel_values=batch.x, output_attentions=True).attentions)
    if not module.config.is_encoder_decoder:
        out = module(input_ids=batch.x, attention_mask=mask, output_attentions=True)
        return list(out.attentions)
    start = torch.zeros_like(batch.x[:, :1])
    shifted = torch.cat([start, batch.x[:, :-1]], 1)
    out = module(
        input_ids=batch.x,
        attention_mask=mask,
        decoder_input_ids=shifted,
        decoder_attention_mask=batch.mask,
        output_attentions=True,
    )
    pairs = zip(out.decoder_attentions, out.cross_attentions, strict=True)
    return [*out.encoder_attentions, *(p for pair in pairs for p in pair)]


@pytest.mark.parametrize(
    "name",
    ["hf-vit", "hf-dinov2", "bert", "distilbert", "llama", "t5", "deberta"],
)
def test_maps_are_those_of_the_eager_model(zoo, name):
    net, sites, batch = zoo(name)
    want = eager_maps(net, batch)
    assert len(want) == len(sites)
    for layer, p in zip(layers_of(net, sites, batch), want, strict=True):
        valid = layer.attention.valid
        true = p if valid is None else p * valid[:, None, :, None]
        torch.testing.assert_close(layer.attention.attention(), true, rtol=1e-5, atol=1e-6)
        assert (valid is None) == (batch.mask is None)


def test_attention_sinks_are_a_last_key(zoo):
    net, sites, batch = zoo("gpt-oss")
    for layer, want in zip(layers_of(net, sites, batch), eager_maps(net, batch), strict=True):
        p, valid = layer.attention.attention(), batch.mask[:, None, :, None]
        torch.testing.assert_close(p[..., :-1], want * valid, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(p.sum(-1), batch.mask[:, None].expand(p.shape[:-1]).float())


# --- the Jacobian, against autograd through the module itself

MODULES = {  # those of language models are compared in `test_mechanisms`
    "timm-vit": (1, "blocks.1.attn", "proj"),
    "timm-eva02": (1, "blocks.1.attn", "proj"),
    "timm-qk-norm": (1, "blocks.1.attn", "proj"),
    "timm-swin": (1, "layers.0.blocks.1.attn", "proj"),
    "timm-swinv2": (1, "layers.0.blocks.1.attn", "proj"),
    "bert": (1, "bert.encoder.layer.1.attention", "output.dense"),
    "bert-eager": (0, "bert.encoder.layer.0.attention", "output.dense"),
    "distilbert": (1, "distilbert.transformer.layer.1.attention", "out_lin"),
    "t5": (2, "decoder.block.0.layer.0.SelfAttention", "o"),
    "deberta": (1, "deberta.encoder.layer.1.attention", "output.dense"),
    "deberta-v3": (0, "deberta.encoder.layer.0.attention", "output.dense"),
    "deberta-v1": (1, "deberta.encoder.layer.1.attention", "output.dense"),
    "timm-sam": (1, "blocks.1.attn", "proj"),
    "timm-sam-eager": (1, "blocks.1.attn", "proj"),
}


def true_jacobian(net, batch: Batch, path: str, projection: str) -> torch.Tensor:
    """d(concatenated heads) / d(input of the attention module), in its last batch row, in float64.

    (tokens, heads * d_v, tokens, D): what enters the output projection, seen by a hook.
    """
    module, calls = net.module.get_submodule(path), []

    def note(_module, args, kwargs):
        calls.append((args, kwargs))

    with module.register_forward_pre_hook(note, with_kwargs=True), AllWide():
        net.output(batch)
    args, kwargs = calls[0]
    # A cache would add the keys of the first pass; versions of transformers name it differently.
    kwargs = {
        name: value for name, value in kwargs.items() if not isinstance(value, transformers.Cache)
    }
    x = args[0] if args else kwargs.pop("hidden_states")

    def concatenated(row: torch.Tensor) -> torch.Tensor:
        seen = []
        hook = module.get_submodule(projection).register_forward_pre_hook(
            lambda _m, inputs: seen.append(inputs[0])
        )
        with AllWide():
            module(torch.cat([x[:-1], row[None]]), *args[1:], **kwargs)
        hook.remove()
        return seen[0][-1]

    return torch.autograd.functional.jacobian(concatenated, x[-1])


@pytest.mark.parametrize("name", ["deepseek-v3", "mobilebert"])
def test_weights_in_a_row_have_no_specformer_penalty(zoo, name):
    net, _, batch = zoo(name)
    with pytest.raises(InputError, match="several linear maps in a row"):
        SpecformerPenalty(net, batch)


def test_a_shared_bottleneck_is_part_of_queries_and_keys(zoo):
    """The Jacobian is that in the layer's own input, which the values read as it is."""
    net, sites, batch = zoo("mobilebert", "float64")
    heads = heads_of(net, sites, batch)[1]
    layer = net.module.mobilebert.encoder.layer[1]
    q_linear, k_linear, v_linear = (
        getattr(layer.attention.self, part) for part in ("query", "key", "value")
    )

    def concatenated(x: torch.Tensor) -> torch.Tensor:
        shared = layer.bottleneck.attention(x)
        q, k, v = (
            linear(t).unflatten(1, (4, -1)).transpose(0, 1)
            for linear, t in ((q_linear, shared), (k_linear, shared), (v_linear, x))
        )
        logits = q @ k.mT / q.shape[-1] ** 0.5
        return logits.softmax(-1) @ v

    x = heads.x[0]
    assert heads.x_kv is None
    assert x.shape[-1] == net.module.config.hidden_size
    true = torch.autograd.functional.jacobian(concatenated, x).flatten(1, 2).flatten(2)
    found = dense_jacobian(heads)[0]
    torch.testing.assert_close(found, true, rtol=0, atol=1e-9 * float(true.abs().max()))


@pytest.mark.parametrize("name", ["gpt-oss", *PAIRS])
def test_bounds_of_models_with_other_logits_are_above_the_exact_norms(zoo, name):
    for heads in heads_of(*zoo(name, "float64")):
        exact = torch.linalg.matrix_norm(dense_jacobian(heads), 2)
        found = head_bounds(heads)
        for bound in ("sharp", "theorem3", "theorem3_g1"):
            assert (found[bound] >= exact * (1 - 1e-12)).all(), bound
        assert (found["sharp"] < 20 * exact)[exact > 0].all()
        for bound in ("hu", "castin", "mean_field", "appendix_c"):
            assert found[bound].isnan().all(), bound


DEBERTA_SCALE = 1e-9 if Version(transformers.__version__) >= Version("5.23") else 2e-7
"""Before 5.23 a scripted function rounds DeBERTa's scale to float32 (6e-8), in every precision."""


@pytest.mark.parametrize("name", MODULES)
def test_closed_form_jacobian_is_that_of_the_module(zoo, name):
    net, sites, batch = zoo(name, "float64")
    index, path, projection = MODULES[name]
    heads = heads_of(net, sites, batch)[index]
    true = true_jacobian(net, batch, path, projection)
    if heads.valid is not None:
        true = true * heads.valid[-1][:, None, None, None]
    count = heads.q.shape[1]
    true = true.unflatten(1, (count, -1)).transpose(0, 1).flatten(1, 2).flatten(2)
    found = dense_jacobian(heads)[-1]
    within = DEBERTA_SCALE if name.startswith("deberta") else 1e-9
    torch.testing.assert_close(found, true, rtol=0, atol=within * float(true.abs().max()))


def test_output_weights_rebuild_the_layer(zoo):
    """nn.MultiheadAttention has no output projection to hook: its output is the truth."""
    net, sites, batch = zoo("torch-encoder")
    heads = heads_of(net, sites, batch)[1]
    attention, seen = net.module[0].layers[1].self_attn, []
    hook = attention.register_forward_hook(lambda _m, _a, out: seen.append(out[0]))
    with torch.enable_grad():  # else torch takes its fused path around the module
        net.output(batch)
    hook.remove()
    o = heads.attention() @ heads.v
    made = torch.einsum("bhnc,hcy->bny", o, heads.out) + attention.out_proj.bias
    torch.testing.assert_close(made, seen[0], rtol=1e-4, atol=1e-5)


# --- cross-attention, windows, padding


def test_cross_attention_reads_two_inputs(zoo):
    net, sites, batch = zoo("t5")
    cross = heads_of(net, sites, batch)[3]
    encoded = net.module.encoder(batch.x, attention_mask=batch.mask.long()).last_hidden_state
    want = encoded * batch.mask[..., None]
    torch.testing.assert_close(cross.x_kv, want, rtol=1e-4, atol=1e-5)
    assert cross.x.shape == cross.x_kv.shape
    assert not torch.equal(cross.x, cross.x_kv)


def test_class_attention_reads_one_query(zoo):
    net, sites, batch = zoo("timm-cait")
    assert [site.closed_form for site in sites] == [False, True, True]  # the first: talking heads
    heads = layers_of(net, sites, batch)[1].heads()
    assert heads.x.shape[1] == 1
    assert torch.equal(heads.x[:, 0], heads.x_kv[:, 0])


def test_windows_belong_to_their_samples(zoo):
    net, sites, batch = zoo("timm-swin")
    heads = heads_of(net, sites, batch)[1]
    alone = heads_of(net, sites, batch[1:])[1]
    assert heads.sample.tolist() == [0] * 4 + [1] * 4
    torch.testing.assert_close(heads.x[heads.sample == 1], alone.x, rtol=1e-4, atol=1e-5)


def test_padding_changes_nothing(zoo):
    net, sites, batch = zoo("bert")
    padded = heads_of(net, sites, batch)[1]
    length = int(batch.mask[1].sum())
    short = Batch(batch.x[1:, :length], None, batch.ids[1:])
    alone = heads_of(net, sites, short)[1]
    torch.testing.assert_close(padded.x[1:, :length], alone.x, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        padded.attention()[1:, :, :length, :length], alone.attention(), rtol=1e-4, atol=1e-6
    )
    assert padded.valid.tolist() == batch.mask.tolist()
    assert not padded.x[1, length:].any()
    assert not padded.attention()[1, :, length:].any()
    assert not padded.attention()[1, :, :, length:].any()


def test_causal_attention_without_padding_has_no_mask_tensor(zoo):
    net, sites, batch = zoo("gpt2")
    for layer in layers_of(net, sites, Batch(batch.x, None, batch.ids)):
        assert layer.attention.causal
        assert layer.attention.bias is None
        assert not layer.attention.attention().triu(1).any()


@pytest.mark.parametrize("name", ["timm-qk-norm", "t5", "timm-swin"])
def test_layers_read_alike_in_any_batch(zoo, name):
    """The survey has seen two samples of another length; each sample is what it is."""
    net, sites, batch = zoo(name)
    one = batch[:1]
    both, single = heads_of(net, sites, batch), heads_of(net, sites, one)
    for together, alone in zip(both, single, strict=True):
        first = together.sample == 0
        torch.testing.assert_close(together.x[first], alone.x, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(together.q[first], alone.q, rtol=1e-4, atol=1e-5)
        local = together.to_q.local
        if local is not None and local.shape[0] > 1:
            torch.testing.assert_close(local[first], alone.to_q.local, rtol=1e-4, atol=1e-5)


# --- the pass itself


@pytest.mark.parametrize("name", ["timm-vit", "timm-swin", "bert-eager", "llama"])
def test_one_layer_is_alive_at_a_time(zoo, name):
    net, sites, batch = zoo(name)
    kept: list[weakref.ref] = []

    def visit(layer: Layer) -> None:
        assert not any(ref() is not None for ref in kept)
        heads = layer.heads()
        kept.extend(weakref.ref(t) for t in (layer, layer.attention.q, heads.x, layer.output))

    capture(net, sites, batch, visit)
    assert len(kept) == 4 * len(sites)


def test_everything_is_put_back_after_an_error(zoo):
    net, sites, batch = zoo("bert")
    module, dropout = net.module, net.module.dropout
    weight = module.classifier.weight
    dropout.training, weight.requires_grad = True, True
    state = torch.get_rng_state()

    def fail(_layer: Layer) -> None:
        torch.rand(3)
        raise RuntimeError("stop")

    try:
        with torch.no_grad():
            with pytest.raises(RuntimeError, match="stop"):
                capture(net, sites, batch, fail)
            assert not torch.is_grad_enabled()
        assert dropout.training
        assert weight.requires_grad
        assert torch.equal(torch.get_rng_state(), state)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    finally:
        dropout.training, weight.requires_grad = False, False


def test_a_layer_that_is_not_met_is_an_error(zoo):
    net, sites, batch = zoo("timm-vit")
    last, net.module.blocks[1] = net.module.blocks[1], nn.Identity()
    try:
        with pytest.raises(EvaluationError, match=r"attention layer 1 \(blocks\.1\.attn\)"):
            capture(net, sites, batch, lambda _: None)
    finally:
        net.module.blocks[1] = last


def test_a_layer_that_has_changed_is_an_error(zoo):
    net, sites, batch = zoo("timm-vit")
    attention = net.module.blocks[0].attn
    attention.q_norm = nn.LayerNorm(8)
    try:
        with pytest.raises(EvaluationError, match=r"layer 0 .*no longer an affine function"):
            heads_of(net, sites, batch)
    finally:
        attention.q_norm = nn.Identity()
