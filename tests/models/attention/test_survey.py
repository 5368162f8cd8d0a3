"""The checks that come before any number."""

from dataclasses import replace

import einops
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from lipaudit.data.batch import Batch
from lipaudit.errors import EvaluationError, InputError
from lipaudit.models.attention.capture import capture
from lipaudit.models.attention.numeric import compute_numeric_norms
from lipaudit.models.attention.survey import survey
from lipaudit.models.attention.uses import Uses
from lipaudit.models.precision import exact_arithmetic
from lipaudit.theory.products import dense_jacobian
from tests.models.attention.tiny import WIDTH, Tiny, tiny_net
from tests.nets import Calls, draw, own_batch

TOKENS = 6


def less_largest(logits):
    """Take the largest logit of each row off all of them."""
    return logits - logits.amax(-1, keepdim=True)


def shifted(q, k, v):
    return less_largest(q @ k.mT).softmax(-1) @ v


def net_and_batch(module: nn.Module, dtype: str = "float32"):
    net = tiny_net(module, TOKENS, dtype)
    return net, own_batch(draw(0, 2, TOKENS, WIDTH).to(net.dtype))


def sites_of(module: nn.Module):
    return survey(*net_and_batch(module)).sites


# --- errors


@pytest.mark.parametrize("written_out", [False, True])
def test_three_passes_are_a_survey(written_out):
    """A plain one and two that are observed show all that has to hold; a fourth shows nothing."""
    attend = shifted if written_out else F.scaled_dot_product_attention
    net, batch = net_and_batch(Tiny(attend=attend))
    passes = []
    net.module.register_forward_pre_hook(lambda *_: passes.append(1))
    (site,) = survey(net, batch).sites
    assert site.closed_form
    assert len(passes) == 3


def attend_to_samples(module, x):
    q, k, v = module(x.flatten(1)[:, :WIDTH]).chunk(3, -1)
    return (q @ k.T).softmax(-1) @ v


def tiny(function):
    return lambda: nn.Sequential(Tiny(), Calls(function))


def linear(function):
    return lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Calls(function))


def add_noise(x):
    return x + torch.rand_like(x)


def centre(x):
    return x - x.mean(0)


RANDOM, MIXED = "random: two forward passes", "depends on the other samples of its batch"


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (tiny(add_noise), RANDOM),
        (tiny(centre), MIXED),
        (tiny(lambda x: x + float(torch.is_grad_enabled())), "when it is observed"),
        # These have no attention, either: what they are not is said before what they have not.
        (linear(add_noise), RANDOM),
        (linear(centre), MIXED),
        (lambda: Calls(attend_to_samples, nn.Linear(WIDTH, 3 * WIDTH)), MIXED),
    ],
)
def test_model_that_is_no_fixed_function_of_a_sample_is_refused(module, message):
    with pytest.raises(InputError, match=message):
        sites_of(module())


def test_output_that_is_not_finite_is_an_error():
    net, batch = net_and_batch(Tiny())
    with pytest.raises(EvaluationError, match="not finite"):
        survey(net, replace(batch, x=batch.x * torch.inf))


def test_model_without_attention_is_told_the_likely_causes_and_what_needs_none():
    with pytest.raises(InputError, match="no attention was found in Linear") as caught:
        sites_of(nn.Linear(WIDTH, 3))
    for cause in ("Flash", "torch.compile", "TorchScript", "linear attention"):
        assert cause in caught.value.advice
    for command in ("lipaudit jacobian", "lipaudit attack"):
        assert command in caught.value.advice


def attend_by_hand(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize("attend", [flex_attention, attend_by_hand])
def test_attention_for_compilers_is_counted_where_nothing_is_compiled(attend):
    compiled = torch.compile(attend)
    uses = Uses(lambda: "block")
    with exact_arithmetic(torch.device("cpu")), torch.no_grad(), uses:
        q, k, v = torch.randn(3, 1, 2, 16, 16, generator=torch.Generator().manual_seed(0))
        for t in (q, k, v):
            uses.mark(t)
        compiled(q, k, v)
    assert uses.counts == {"block": 1}


def mix_states(bcd, out, x):
    """EfficientViM: a softmax over tokens weighs them into a state, which is read."""
    b, c, step = bcd(x).mT.chunk(3, 1)
    return x + (out(x.mT @ (step.softmax(-1) * b).mT) @ c).mT


def mix_lambdas(qkv, x):
    """A lambda layer: softmax over the tokens of the keys, then q (k^T v)."""
    q, k, v = qkv(x).chunk(3, -1)
    q = q.unflatten(-1, (2, -1)).transpose(1, 2)
    return (q @ (k.mT.softmax(-1) @ v).unflatten(1, (2, -1))).mean(1)


@pytest.mark.parametrize(
    ("function", "widths"), [(mix_states, (3 * WIDTH, WIDTH)), (mix_lambdas, (3 * WIDTH,))]
)
def test_products_of_a_mixer_are_no_logits_to_the_next(function, widths):
    torch.manual_seed(0)
    mixers = [Calls(function, *(nn.Linear(WIDTH, n) for n in widths)) for _ in range(3)]
    with pytest.raises(InputError, match=r"no attention was|none can be measured \(0 at test_"):
        sites_of(nn.Sequential(*mixers))
    (site,) = sites_of(nn.Sequential(*mixers[:2], Tiny()))
    assert (site.module, site.closed_form) == ("2", True)


SIGMOIDS = """
def attend(q, k, v):
    return product(product(q, k.mT).sigmoid(), v)
"""


def compile_functions(code, file, **names):
    """Return the functions of a file."""
    exec(compile(code, file, "exec"), names)
    return names


class Weighed(nn.Module):
    """Attention whose output is scaled by a dot product of each sample with a constant."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tiny = Tiny()
        self.register_buffer("weights", torch.rand(WIDTH))

    def forward(self, x):
        scales = [torch.dot(sample[0], self.weights) for sample in x]
        return self.tiny(x) * torch.stack(scales)[:, None, None]


def test_a_dot_product_of_a_sample_with_a_constant_is_no_attention():
    (site,) = sites_of(Weighed())
    assert site.closed_form


@pytest.mark.parametrize("package", ["einops", "einx"])
def test_the_line_of_unread_attention_is_one_of_the_model(package):
    """Not of a package that rearranges axes; a folder of that name is no such package."""
    code = "def product(a, b):\n    return a @ b\n"
    parts = compile_functions(code, f"/packages/{package}/ops.py", __name__=f"{package}.ops")
    file = f"/projects/{package}/model.py"
    parts = compile_functions(SIGMOIDS, file, __name__="model", product=parts["product"])
    unread = survey(*net_and_batch(nn.Sequential(Tiny(), Tiny(attend=parts["attend"])))).unread
    assert unread == ("1 at model.py:3",)


def attend_by_einops(q, k, v):
    weights = einops.einsum(q, k, "b h i d, b h j d -> b h i j").sigmoid()
    return einops.einsum(weights, v, "b h i j, b h j d -> b h i d")


def test_the_line_of_an_einsum_of_einops_is_one_of_the_model():
    unread = survey(*net_and_batch(nn.Sequential(Tiny(), Tiny(attend=attend_by_einops)))).unread
    line = attend_by_einops.__code__.co_firstlineno + 2
    assert unread == (f"1 at test_survey.py:{line}",)


class Mixed(Tiny):
    """Talking heads: a linear map of the logits over heads or over keys, one or two of them."""

    def __init__(self, axis, times):
        super().__init__(attend=self.mix)
        width = {-3: 2, -1: TOKENS}[axis]
        self.maps, self.axis = nn.ModuleList(nn.Linear(width, width) for _ in range(times)), axis

    def mix(self, q, k, v):
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


def placed(q, k, v):
    """Queries and keys that meet positions, under a soft cap."""
    positions = torch.randn(TOKENS, TOKENS, 4, generator=torch.Generator().manual_seed(1)).to(q)
    r = torch.einsum("bhid,ijd->bhij", q, positions)
    t = torch.einsum("bhjd,ijd->bhij", k, positions)
    return (torch.tanh(q @ k.mT) + r + t).softmax(-1) @ v


PAIRS = {
    "the largest logit of each row taken off": shifted,
    "the same, and a sink in front": lambda q, k, v: (
        less_largest(F.pad(q @ k.mT, (1, 0), value=0.5)).softmax(-1)[..., 1:] @ v
    ),
    "heads folded into samples where q meets k": lambda q, k, v: (
        (q.flatten(0, 1) @ k.flatten(0, 1).mT).unflatten(0, q.shape[:2]).softmax(-1) @ v
    ),
    "heads folded into samples where P meets v": lambda q, k, v: (
        (q @ k.mT).softmax(-1).flatten(0, 1) @ v.flatten(0, 1)
    ).view(v.shape),
    "positions and a soft cap": placed,
}


@pytest.mark.parametrize("attend", PAIRS.values(), ids=PAIRS)
def test_logits_of_each_pair_have_a_closed_form(attend):
    """What is taken off a whole row leaves the plain logits."""
    net, batch = net_and_batch(Tiny(attend=attend), "float64")
    (site,) = survey(net, batch).sites
    assert site.closed_form
    (heads,) = capture(net, (site,), batch, lambda layer: layer.heads())
    jacobian = torch.autograd.functional.jacobian(
        lambda x: net.module.heads(x[None])[0], batch.x[0]
    )
    truth = jacobian.flatten(1, 2).flatten(2)
    torch.testing.assert_close(dense_jacobian(heads)[0], truth, rtol=0, atol=1e-12)
    if attend is shifted:
        assert heads.pairs is None
        assert heads.bias is None or heads.bias.abs().max() < 1e-12


def dropped(q, k, v):
    """Maps that are changed after the softmax."""
    p = (q @ k.mT).softmax(-1)
    return (p * (p > 0.1)) @ v


def misfolded(q, k, v):
    """Heads that are one axis with the samples where q meets k, in another order than v's."""
    logits = q.transpose(0, 1).flatten(0, 1) @ k.transpose(0, 1).flatten(0, 1).mT
    return logits.softmax(-1).unflatten(0, (2, -1)).transpose(0, 1) @ v


def crossing(q, k, v):
    """Attention over the samples, which cancels out: rows belong to no sample."""
    o = F.scaled_dot_product_attention(*(t.transpose(0, 2) for t in (q, k, v)))
    return 0 * o.transpose(0, 2) + v


def moving_sink(q, k, v):
    logits = q @ k.mT
    return torch.cat([logits, logits[..., :1] * 0.5], -1).softmax(-1)[..., :-1] @ v


def stretched(q, k, v):
    """Logits times the largest one of their row."""
    logits = q @ k.mT
    return (logits * logits.amax(-1, keepdim=True)).softmax(-1) @ v


OPEN = [
    ({"change": lambda _m, _x, q, k, v: (q + q.flip(2), k, v)}, "q depends on several tokens"),
    (
        {
            "change": lambda m, x, q, k, v: (q * m.gate(x.tanh())[:, None], k, v),
            "gate": lambda: nn.Linear(WIDTH, 4),
        },
        "q is made from linear maps of several tensors",
    ),
    (
        {"change": lambda _m, x, q, k, v: (q, k, x.unflatten(2, (2, -1)).transpose(1, 2))},
        "v is not the output of a linear map",
    ),
    (
        {
            "change": lambda m, x, q, k, v: (q, *m.kv[:, None].expand(-1, len(x), -1, -1, -1)),
            "kv": lambda: nn.Parameter(torch.randn(2, 2, 5, 4)),
        },
        "keys or values are constants, or have no gradient",
    ),
    (
        {"attend": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=q @ q.mT)},
        "its logits depend on the input not only",
    ),
    ({"attend": stretched}, "its logits depend on the largest one of their row"),
    ({"attend": moving_sink}, "its logits mix heads or keys"),
    (  # queries move the logits in a way of their own
        {
            "attend": lambda q, k, v: (
                (q @ k.mT + torch.sin(q.sum(-1, keepdim=True)) * torch.ones(6)).softmax(-1) @ v
            )
        },
        "its logits depend on the input not only",
    ),
    ({"attend": misfolded}, "cannot be attributed to samples"),
    ({"attend": dropped}, "P is changed between the softmax and the values"),
    ({"attend": crossing}, "cannot be attributed to samples"),
]


@pytest.mark.parametrize(("how", "reason"), OPEN)
def test_layer_without_closed_form_says_why(how, reason):
    net, batch = net_and_batch(Tiny(**how))
    (site,) = survey(net, batch).sites
    assert not site.closed_form
    assert reason in site.reason
    rows = capture(net, (site,), batch, lambda layer: layer.attention.attention().sum(-1))
    torch.testing.assert_close(rows[0], torch.ones_like(rows[0]))


def test_layer_that_cannot_be_run_again_says_so():
    class Stateful(Tiny):
        """Keeps what it saw: a second run sees twice as much."""

        def forward(self, x):
            before = getattr(self, "cache", None)
            self.cache, self.factor = (x, 1) if before is None else (None, 2)
            return 0 * super().forward(x) + x

    module = Stateful(attend=dropped, change=lambda m, _x, q, k, v: (q, k, m.factor * v))
    net, batch = net_and_batch(module)
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

    (site,) = sites_of(Tiny(change=lambda m, x, q, k, v: (q, k, Reversed.apply(v))))
    assert not site.closed_form


def test_a_graph_that_cannot_be_differentiated_again_has_no_closed_form():
    """The comparison with autograd is what finds it."""

    def recomputed(q, k, v):
        return checkpoint(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, q, k, v, use_reentrant=False)

    (site,) = sites_of(Tiny(attend=recomputed))
    assert not site.closed_form
    assert "its graph cannot be differentiated: torch.utils.checkpoint" in site.reason


def test_survey_leaves_the_model_as_it_was():
    net, batch = net_and_batch(nn.Sequential(Tiny(), nn.Dropout(0.5)))
    state = torch.get_rng_state()
    assert survey(net, batch).sites[0].closed_form
    assert not any(m.training for m in net.module.modules())
    assert all(not p.requires_grad and p.grad is None for p in net.module.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.module.modules())


def test_short_text_is_repeated(zoo):
    """At position 0 a rotation is none: one token would not tell."""
    net = zoo("llama")[0]
    word = Batch(torch.tensor([[5, 0, 0]]), None, ("a",), torch.tensor([[True, False, False]]))
    assert [site.kinds for site in survey(net, word).sites] == [
        ("rotation", "rotation", "affine")
    ] * 2


def test_a_row_of_nan_that_the_model_drops_is_named():
    """Token 2 sees no key, and its output, NaN, is left out: no other cause is given."""

    def attend(q, k, v):
        unseen = torch.arange(q.shape[2])[:, None] == 2
        return (q @ k.mT).masked_fill(unseen, -torch.inf).softmax(-1) @ v

    layer = Tiny(attend=attend)
    net = tiny_net(Calls(lambda m, x: m(x)[:, :2], layer), 5)
    (site,) = survey(net, own_batch(draw(1, 2, 5, WIDTH, dtype=torch.float64))).sites
    assert not site.closed_form
    assert site.reason == (
        "P is NaN in some rows (all keys masked, or an overflow); "
        "its norms cannot be computed numerically either: its output is not finite"
    )


class Pool(nn.Module):
    """Attention of one head with learned queries."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 3, WIDTH))
        self.to_k, self.to_v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        qkv = (self.queries.expand(len(x), -1, -1), self.to_k(x), self.to_v(x))
        return F.scaled_dot_product_attention(*(t[:, None] for t in qkv))[:, 0]


def test_two_modules_of_learned_queries_are_no_parts_of_one_attention():
    pools = nn.ModuleList([Pool(), Pool()])
    sites = sites_of(Calls(lambda parts, x: parts[0](x) * parts[1](x), pools))
    assert [site.partners for site in sites] == [(), ()]
