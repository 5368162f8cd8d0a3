"""Reading the attention of every kind of model, against the models' own tensors and autograd."""

import weakref
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import torch
from torch import nn

from lipaudit.data.batch import Batch
from lipaudit.errors import EvaluationError, InputError
from lipaudit.measures.layers import max_windows
from lipaudit.models.attention.capture import Layer, Site, capture
from lipaudit.models.attention.numeric import compute_numeric_norms
from lipaudit.theory.heads import Heads
from lipaudit.theory.products import dense_jacobian
from lipaudit.wings.training.penalty import SpecformerPenalty
from tests.models.conftest import WEIGHTS

AFFINE = ("affine", "affine", "affine")
ROTARY = ("rotation", "rotation", "affine")
LOCAL = ("local", "local", "affine")
CLOSED = {  # the kinds of q, k and v of every layer
    **dict.fromkeys(
        ["timm-vit", "timm-deit3", "hf-vit", "hf-dinov2", "hf-swin", "bert", "bert-eager",
         "distilbert", "albert", "gpt2", "torch-encoder", "deberta", "deberta-v3",
         "deberta-v1", "timm-sam", "timm-sam-eager"],
        [AFFINE] * 2,
    ),
    **dict.fromkeys(["timm-eva02", "gptj", "llama", "gemma2", "gpt-oss"], [ROTARY] * 2),
    **dict.fromkeys(["timm-qk-norm", "qwen3"], [LOCAL] * 2),
    **dict.fromkeys(["olmo2", "mobilebert"], [("cross-head", "cross-head", "affine")] * 2),
    "handwritten": [AFFINE],
    "timm-swin": [AFFINE] * 3, "timm-swinv2": [LOCAL] * 3,
    "timm-twins": [AFFINE] * 5,
    "t5": [AFFINE] * 6,
    "deepseek-v3": [("cross-head",) * 3] * 2,
    "deepseek-v2": [("rotation", "cross-head", "cross-head")] * 2,
}  # fmt: skip
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


UNCHANGED = ["timm-vit", "timm-swinv2", "timm-cait", "timm-mvit", "timm-sam-eager", "albert"]
UNCHANGED += ["gptj", "llama", "gemma2", "t5", "gpt-oss", "deberta", "torch-encoder"]


@pytest.mark.parametrize("name", UNCHANGED)
def test_a_pass_changes_nothing_and_ends_in_the_last_layer_that_is_wanted(zoo, name):
    net, sites, batch = zoo(name)
    with module_outputs(net) as plain:
        net.output(batch)
    ends = []
    for last in (0, len(sites) - 1):
        with module_outputs(net) as observed:
            layers = range(last + 1)
            found = capture(net, sites, batch, lambda layer: layer.site, layers=layers)
        assert found == list(sites[: last + 1])
        ends.append(len(observed))
        for (module, seen), (same, true) in zip(observed, plain, strict=False):
            assert module == same
            torch.testing.assert_close(seen, true)
        calls = [site.module for site in sites[:last]].count(sites[last].module)
        assert [module for module, _ in observed].count(sites[last].module) <= calls
    assert ends[0] < ends[1] < len(plain)


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


@pytest.mark.parametrize("name", OPEN)
def test_layers_without_closed_form_say_why(zoo, name):
    for site in zoo(name)[1]:
        assert not site.closed_form
        assert OPEN[name] in site.reason
        assert site.inputs  # their norms can be had numerically


# These cast queries, keys or logits to float32, whatever their own precision.
WIDE = ["gptj", "gemma2", "gpt-oss"]
TOLERANCES = {  # of rows, and of outputs, by the precision
    "float32": ({"rtol": 1e-4, "atol": 1e-4}, {"rtol": 1e-4, "atol": 1e-5}),
    "float64": ({"rtol": 1e-9, "atol": 1e-9}, {"rtol": 0, "atol": 1e-13}),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "float32") for name in CLOSED] + [(name, "float64") for name in WIDE],
)
def test_heads_hold_together(zoo, name, dtype):
    """q, k, v follow from X, and the output from P and v, by the recorded tensors alone."""
    net, sites, batch = zoo(name, dtype)
    for_rows, for_outputs = TOLERANCES[dtype]
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
                torch.testing.assert_close(rows * seen, want * seen, **for_rows)
        assert {t.dtype for t in (heads.q, heads.k, heads.v, layer.output)} == {net.dtype}
        o = layer.output if heads.valid is None else layer.output * heads.valid[:, None, :, None]
        torch.testing.assert_close(heads.attention() @ heads.v, o, **for_outputs)


# --- weights: bit by bit those of the parameters


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_those_of_the_parameters(zoo, name):
    """Those of grouped queries are repeated."""
    net, sites, batch = zoo(name)
    heads = heads_of(net, sites, batch)[0]
    true, out = WEIGHTS[name](net.module, 0)
    assert len(heads.out) == (3 if name == "torch-encoder" else 4)
    for made, (weight, bias) in zip((heads.to_q, heads.to_k, heads.to_v), true, strict=True):
        groups = weight.unflatten(0, (-1, made.weight.shape[-1])).mT
        assert torch.equal(made.weight, groups.repeat_interleave(len(heads.out) // len(groups), 0))
        assert made.bias is bias is None or torch.equal(made.bias, bias.view(len(groups), -1))
    assert torch.equal(heads.out, out.unflatten(0, (len(heads.out), -1)))


def test_weights_of_a_shared_layer(zoo):
    first, second = heads_of(*zoo("albert"))
    assert torch.equal(first.to_q.weight, second.to_q.weight)
    assert not torch.equal(first.x, second.x)


# --- norms: those of the closed form are compared with autograd in `test_mechanisms`


@pytest.mark.parametrize("name", ["deepseek-v3", "mobilebert"])
def test_weights_in_a_row_have_no_specformer_penalty(zoo, name):
    net, _, batch = zoo(name)
    with pytest.raises(InputError, match="several linear maps in a row"):
        SpecformerPenalty(net, batch)


@pytest.mark.parametrize(
    ("name", "index"),
    [("timm-swin", 1), ("timm-qk-norm", 0), ("bert", 1), ("torch-encoder", 1), ("gemma2", 0),
     ("deberta", 0)],
)  # fmt: skip
def test_numeric_norms_are_those_of_the_closed_form(zoo, name, index):
    """Where the input of the module is X itself, the two are the same number; padding is none."""
    net, sites, batch = zoo(name, "float64")
    (heads,) = capture(net, sites, batch, Layer.heads, layers=[index])
    want = max_windows(torch.linalg.matrix_norm(dense_jacobian(heads), 2), heads.sample)
    norms_of = partial(compute_numeric_norms, seeds=[3, 4], tol=1e-8)
    (norms,) = capture(net, sites, batch, norms_of, layers=[index])
    assert norms.converged.all()
    torch.testing.assert_close(norms.norm, want, rtol=1e-7, atol=0.0)


# --- cross-attention, windows, padding


def test_class_attention_reads_one_query(zoo):
    net, sites, batch = zoo("timm-cait")
    assert [site.closed_form for site in sites] == [False, True, True]  # the first: talking heads
    heads = layers_of(net, sites, batch)[1].heads()
    assert heads.x.shape[1] == 1
    assert torch.equal(heads.x[:, 0], heads.x_kv[:, 0])


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
    """Windows belong to their samples, and each sample is what it is beside others."""
    net, sites, batch = zoo(name)
    both, single = heads_of(net, sites, batch), heads_of(net, sites, batch[1:])
    for together, alone in zip(both, single, strict=True):
        own = together.sample == 1
        torch.testing.assert_close(together.x[own], alone.x, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(together.q[own], alone.q, rtol=1e-4, atol=1e-5)
        local = together.to_q.local
        if local is not None and local.shape[0] > 1:
            torch.testing.assert_close(local[own], alone.to_q.local, rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize(
    ("place", "part", "said"),
    [
        ("blocks.1", nn.Identity(), r"attention layer 1 \(blocks\.1\.attn\)"),  # is not met
        ("blocks.0.attn.q_norm", nn.LayerNorm(8), r"layer 0 .*no longer an affine function"),
    ],
)
def test_a_layer_that_has_changed_is_an_error(zoo, place, part, said):
    net, sites, batch = zoo("timm-vit")
    before = net.module.get_submodule(place)
    net.module.set_submodule(place, part)
    try:
        with pytest.raises(EvaluationError, match=said):
            heads_of(net, sites, batch)
    finally:
        net.module.set_submodule(place, before)


def test_a_layer_without_closed_form_has_no_projections(zoo):
    """A measure of a plug-in may ask for them: its error names the layer and the reason."""
    (layer, *_) = layers_of(*zoo("timm-mvit"))
    with pytest.raises(InputError, match=r"layer 0 .*no closed form: q depends on several tokens"):
        layer.heads()
