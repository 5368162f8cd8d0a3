"""The checks that come before any number."""

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lipaudit.data.batch import Batch
from lipaudit.errors import EvaluationError, InputError
from lipaudit.models.attention.capture import capture
from lipaudit.models.attention.numeric import compute_numeric_norms
from lipaudit.models.attention.survey import survey
from lipaudit.theory.products import dense_jacobian
from tests.nets import draw, own_batch, own_net

TOKENS, WIDTH = 6, 8


class Model(nn.Module):
    """One attention layer; subclasses spoil it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.noise = nn.Identity()

    def heads(self, x):
        return self.qkv(x).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    def forward(self, x):
        o = self.attend(*self.heads(x))
        return self.noise(self.out(o.transpose(1, 2).flatten(2)))


def net_and_batch(module: nn.Module, dtype: str = "float32"):
    net = own_net(module, (TOKENS, WIDTH), dtype, classifier=False)
    return net, own_batch(draw(0, 2, TOKENS, WIDTH).to(net.dtype))


def sites_of(module: nn.Module):
    return survey(*net_and_batch(module)).sites


def test_plain_model_is_closed_form():
    (site,) = sites_of(Model())
    assert site.closed_form
    assert site.kinds == ("affine", "affine", "affine")
    assert site.structure.out is not None


# --- errors


@pytest.mark.parametrize("written_out", [False, True])
def test_three_passes_are_a_survey(written_out):
    """A plain one and two that are observed show all that has to hold; a fourth shows nothing."""
    net, batch = net_and_batch(Shifted() if written_out else Model())
    passes = []
    net.module.register_forward_pre_hook(lambda *_: passes.append(1))
    (site,) = survey(net, batch).sites
    assert site.closed_form
    assert len(passes) == 3


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


def test_randomised_model_is_refused_and_the_module_named():
    model = Model()
    model.noise = Noise()
    with pytest.raises(InputError, match="random: two forward passes"):
        sites_of(model)


@pytest.mark.parametrize("part", ["noise", "centre"])
def test_what_a_model_is_not_is_said_before_what_it_has_not(part):
    """Both are true: it has no attention, and it is no fixed function of a sample."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Noise() if part == "noise" else Centre())
    with pytest.raises(InputError, match="random|depends on the other samples"):
        sites_of(module)


class Centre(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def test_model_that_mixes_samples_is_refused_and_the_module_named():
    model = Model()
    model.noise = Centre()
    with pytest.raises(InputError, match="depends on the other samples"):
        sites_of(model)


class Shy(nn.Module):
    def forward(self, x):
        return x + float(torch.is_grad_enabled())


def test_model_that_changes_under_observation_is_refused():
    model = Model()
    model.noise = Shy()
    with pytest.raises(InputError, match="when it is observed"):
        sites_of(model)


def test_output_that_is_not_finite_is_an_error():
    net, batch = net_and_batch(Model())
    with pytest.raises(EvaluationError, match="not finite"):
        survey(net, replace(batch, x=batch.x * torch.inf))


def test_model_without_attention_is_told_the_likely_causes_and_what_needs_none():
    with pytest.raises(InputError, match="no attention was found in Linear") as caught:
        sites_of(nn.Linear(WIDTH, 3))
    for cause in ("Flash", "torch.compile", "TorchScript", "linear attention"):
        assert cause in caught.value.advice
    for command in ("lipaudit jacobian", "lipaudit attack"):
        assert command in caught.value.advice


class StateSpace(nn.Module):
    """The mixer of EfficientViM: a softmax over tokens weighs them into a state, which is read."""

    def __init__(self):
        super().__init__()
        self.bcd, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, c, step = self.bcd(x).mT.chunk(3, 1)
        state = self.out(x.mT @ (step.softmax(-1) * b).mT)
        return x + (state @ c).mT


class Lambda(nn.Module):
    """A lambda layer: softmax over the tokens of the keys, then q (k^T v)."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        q = q.unflatten(-1, (2, -1)).transpose(1, 2)
        lambdas = (k.mT.softmax(-1) @ v).unflatten(1, (2, -1))
        return (q @ lambdas).mean(1)


@pytest.mark.parametrize("mixer", [StateSpace, Lambda])
def test_products_of_a_mixer_are_no_logits_to_the_next(mixer):
    torch.manual_seed(0)
    with pytest.raises(InputError, match=r"no attention was found|cannot be measured \(0, test_"):
        sites_of(nn.Sequential(mixer(), mixer(), mixer()))
    (site,) = sites_of(nn.Sequential(mixer(), mixer(), Model()))
    assert (site.module, site.closed_form) == ("2", True)


class OverSamples(Model):
    """Attention whose rows are samples."""

    def forward(self, x):
        q, k, v = self.qkv(x.flatten(1)[:, :WIDTH]).chunk(3, -1)
        return (q @ k.T).softmax(-1) @ v


def test_attention_over_samples_is_refused():
    with pytest.raises(InputError, match="depends on the other samples of its batch"):
        sites_of(OverSamples())


class Mixed(Model):
    """Talking heads: a linear map of the logits over heads or over keys, one or two of them."""

    def __init__(self, axis, times=1):
        super().__init__()
        width = {-3: 2, -1: TOKENS}[axis]
        self.maps, self.axis = nn.ModuleList(nn.Linear(width, width) for _ in range(times)), axis

    def attend(self, q, k, v):
        logits = (q @ k.mT).movedim(self.axis, -1)
        for part in self.maps:
            logits = part(logits)
        return logits.movedim(-1, self.axis).softmax(-1) @ v


@pytest.mark.parametrize(("axis", "times"), [(-3, 1), (-3, 2), (-1, 1)])
def test_attention_is_seen_behind_a_map_of_its_logits(axis, times):
    (site,) = sites_of(Mixed(axis, times))
    assert "depend on the input not only" in site.reason
    assert site.inputs


# --- layers that have no closed form say why, and never break the survey


class Reflected(Model):
    """Queries that see their neighbours."""

    def heads(self, x):
        q, k, v = super().heads(x)
        return q + q.flip(2), k, v


class Gated(Model):
    """Queries that are multiplied by a linear map of another tensor."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)

    def heads(self, x):
        q, k, v = super().heads(x)
        return q * self.gate(x.tanh())[:, None], k, v


class Raw(Model):
    """Values that are the input itself."""

    def heads(self, x):
        q, k, _ = super().heads(x)
        return q, k, x.unflatten(2, (2, -1)).transpose(1, 2)


class Constant(Model):
    """Keys and values from memory."""

    def __init__(self):
        super().__init__()
        self.memory = nn.Parameter(torch.randn(2, 2, 5, 4))

    def heads(self, x):
        return super().heads(x)[0], *self.memory.unsqueeze(1).expand(-1, len(x), -1, -1, -1)


class Biased(Model):
    """A bias that depends on the input, through the fused op."""

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=q @ q.mT)


class Sunk(Model):
    """A logit of its own in front of those of the keys, and the largest one taken off."""

    def attend(self, q, k, v):
        logits = F.pad(q @ k.mT, (1, 0), value=0.5)
        logits = logits - logits.amax(-1, keepdim=True)
        return logits.softmax(-1)[..., 1:] @ v


class Shifted(Model):
    """The largest logit of each row taken off all of them."""

    def attend(self, q, k, v):
        logits = q @ k.mT
        return (logits - logits.amax(-1, keepdim=True)).softmax(-1) @ v


class Folded(Model):
    """Heads that are one axis with the samples where q meets k, and not where P meets v."""

    def attend(self, q, k, v):
        logits = q.flatten(0, 1) @ k.flatten(0, 1).mT
        return logits.view(*q.shape[:2], *logits.shape[1:]).softmax(-1) @ v


class Unfolded(Model):
    """The other way round."""

    def attend(self, q, k, v):
        p = (q @ k.mT).softmax(-1).flatten(0, 1)
        return (p @ v.flatten(0, 1)).view(v.shape)


class Placed(Model):
    """Queries and keys that meet positions, under a soft cap."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(TOKENS, TOKENS, 4))

    def attend(self, q, k, v):
        r = torch.einsum("bhid,ijd->bhij", q, self.positions)
        t = torch.einsum("bhjd,ijd->bhij", k, self.positions)
        return (torch.tanh(q @ k.mT) + r + t).softmax(-1) @ v


@pytest.mark.parametrize("model", [Sunk, Shifted, Folded, Unfolded, Placed])
def test_logits_of_each_pair_have_a_closed_form(model):
    net, batch = net_and_batch(model(), "float64")
    (site,) = survey(net, batch).sites
    assert site.closed_form
    found = capture(net, (site,), batch, lambda layer: layer.heads())
    heads, module = found[0], net.module

    def outputs(x):
        return module.attend(*module.heads(x[None]))[0]

    truth = torch.autograd.functional.jacobian(outputs, batch.x[0]).flatten(1, 2).flatten(2)
    torch.testing.assert_close(dense_jacobian(heads)[0], truth, rtol=0, atol=1e-12)


def test_what_is_taken_off_a_whole_row_leaves_the_plain_logits():
    net, batch = net_and_batch(Shifted(), "float64")
    (heads,) = capture(net, survey(net, batch).sites, batch, lambda layer: layer.heads())
    assert heads.pairs is None
    assert heads.bias is None or heads.bias.abs().max() < 1e-12


class Stretched(Model):
    """Logits times the largest one of their row."""

    def attend(self, q, k, v):
        logits = q @ k.mT
        return (logits * logits.amax(-1, keepdim=True)).softmax(-1) @ v


class MovingSink(Model):
    """A sink that depends on the keys."""

    def attend(self, q, k, v):
        logits = q @ k.mT
        return torch.cat([logits, logits[..., :1] * 0.5], -1).softmax(-1)[..., :-1] @ v


class Bent(Model):
    """Queries that move the logits in a way of their own."""

    def attend(self, q, k, v):
        return (q @ k.mT + torch.sin(q.sum(-1, keepdim=True)) * torch.ones(6)).softmax(-1) @ v


class Misfolded(Model):
    """Heads that are one axis with the samples where q meets k, in another order than v's."""

    def attend(self, q, k, v):
        logits = q.transpose(0, 1).flatten(0, 1) @ k.transpose(0, 1).flatten(0, 1).mT
        p = logits.softmax(-1).view(2, -1, *logits.shape[1:]).transpose(0, 1)
        return p @ v


class Dropped(Model):
    """Maps that are changed after the softmax."""

    def attend(self, q, k, v):
        p = (q @ k.mT).softmax(-1)
        return (p * (p > 0.1)) @ v


class Crossing(Model):
    """Attention over the samples, which cancels out: rows belong to no sample."""

    def attend(self, q, k, v):
        o = F.scaled_dot_product_attention(*(t.transpose(0, 2) for t in (q, k, v)))
        return 0 * o.transpose(0, 2) + v


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Reflected, "q depends on several tokens"),
        (Gated, "q is made from linear maps of several tensors"),
        (Raw, "v is not the output of a linear map"),
        (Constant, "keys or values are constants, or have no gradient"),
        (Biased, "its logits depend on the input not only"),
        (Stretched, "its logits depend on the largest one of their row"),
        (MovingSink, "its logits mix heads or keys"),
        (Bent, "its logits depend on the input not only"),
        (Misfolded, "cannot be attributed to samples"),
        (Dropped, "P is changed between the softmax and the values"),
        (Crossing, "cannot be attributed to samples"),
    ],
)
def test_layer_without_closed_form_says_why(model, reason):
    net, batch = net_and_batch(model())
    (site,) = survey(net, batch).sites
    assert not site.closed_form
    assert re.search(reason, site.reason)
    rows = capture(net, (site,), batch, lambda layer: layer.attention.attention().sum(-1))
    torch.testing.assert_close(rows[0], torch.ones_like(rows[0]))


def test_layer_that_cannot_be_run_again_says_so():
    class Stateful(Dropped):
        """Keeps what it saw: a second run sees twice as much."""

        def forward(self, x):
            before = getattr(self, "cache", None)
            self.cache = None if before is not None else x
            q, k, v = self.heads(x)
            if before is not None:
                v = 2 * v
            return 0 * self.out(self.attend(q, k, v).transpose(1, 2).flatten(2)) + x

    net, batch = net_and_batch(Stateful())
    (site,) = survey(net, batch).sites
    assert site.inputs == ()
    assert "its norms cannot be computed numerically either" in site.reason
    found = capture(net, (site,), batch, lambda layer: compute_numeric_norms(layer, seeds=[1, 2]))
    assert found[0].norm.isnan().all()
    assert not found[0].converged.any()


def test_layer_that_disagrees_with_autograd_has_no_closed_form():
    class Reversed(torch.autograd.Function):
        """The identity, with a wrong derivative in the tokens."""

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g.flip(2)

    class Lying(Model):
        def heads(self, x):
            q, k, v = super().heads(x)
            return q, k, Reversed.apply(v)

    (site,) = sites_of(Lying())
    assert not site.closed_form


def test_survey_leaves_the_model_as_it_was():
    net, batch = net_and_batch(Model())
    net.module.train().requires_grad_(True)
    state = torch.get_rng_state()
    survey(net, batch)
    assert all(m.training for m in net.module.modules())
    assert all(p.requires_grad and p.grad is None for p in net.module.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.module.modules())


def test_dropout_is_switched_off_meanwhile():
    model = Model()
    model.noise = nn.Dropout(0.5)
    net, batch = net_and_batch(model)
    net.module.train()
    assert survey(net, batch).sites[0].closed_form
    assert net.module.noise.training


def test_short_text_is_repeated(zoo):
    """At position 0 a rotation is none: one token would not tell."""
    net = zoo("llama")[0]
    word = Batch(torch.tensor([[5, 0, 0]]), None, ("a",), torch.tensor([[True, False, False]]))
    assert [site.kinds for site in survey(net, word).sites] == [
        ("rotation", "rotation", "affine")
    ] * 2
