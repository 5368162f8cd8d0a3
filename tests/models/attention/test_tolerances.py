"""A head with giant numbers must not hide what another head does, nor a dead one what it does."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from lipaudit.models import graph
from lipaudit.models.attention.capture import add_inputs, capture, matches_autograd
from lipaudit.models.attention.logits import read_product
from lipaudit.models.attention.survey import survey
from lipaudit.models.graph import Probed
from lipaudit.models.requirements import agree
from lipaudit.theory.head_norms import head_norms
from tests.models.attention.tiny import WIDTH, Tiny, norms, tiny_net
from tests.nets import draw, own_batch

TOKENS = 6
GIANT = 1e3
"""How many times larger the logits of the first of two heads are."""
POSITION = draw(2, TOKENS, TOKENS)


def giant(logits=lambda s: s, change=lambda q: q) -> Tiny:
    """Return heads in float32, the first one with giant logits; `change` is of the queries."""
    module = Tiny(
        attend=lambda q, k, v: logits(q @ k.mT).softmax(-1) @ v,
        change=lambda _m, _x, q, k, v: (change(q), k, v),
        out=torch.nn.Identity,
    )
    for linear in (module.to_q, module.to_k):
        linear.weight.data *= 2
        linear.weight.data[:4] *= GIANT**0.5
    return module


def second(change: torch.Tensor) -> torch.Tensor:
    """Put something into the second of two heads, (1, 2, ...)."""
    return torch.stack([torch.zeros_like(change), change])[None]


def floored(s: torch.Tensor) -> torch.Tensor:
    """Keep logits above the end of float32, as masks need it: nothing is cut off."""
    end = torch.tensor(torch.finfo(s.dtype).min)
    return torch.max(s.clamp(min=float(end)), end)


# A position bias that is rounding beside the logits of the other head.
biased = partial(giant, lambda s: s + second(5e-3 * POSITION.to(s)))
# Queries that are shifted by position, by little beside the other head's queries.
shifted = partial(giant, change=lambda q: q + second(1e-3 * POSITION[:, :4]))
# Logits that take a small share of the other head's.
leaking = partial(giant, lambda s: torch.cat([s[:, :1], s[:, 1:] + 1e-7 * s[:, :1]], 1))
# Logits that are cut off where no ordinary sample takes them.
capped = partial(giant, lambda s: s.clamp(max=1e8))


def surveyed(module: Tiny):
    net = tiny_net(module, TOKENS, "float32")
    batch = own_batch(draw(1, 1, TOKENS, WIDTH))
    return net, survey(net, batch).sites[0], batch


def test_small_bias_beside_giant_logits_is_kept():
    """With logits still larger, and a bias of 0.1, the norm was 13% off without it."""
    module = biased()
    net, site, batch = surveyed(module)
    found = capture(net, (site,), batch, lambda layer: layer.heads())
    torch.testing.assert_close(found[0].bias[0, 1], 5e-3 * POSITION, rtol=0.0, atol=1e-5)
    norm = head_norms(found[0], seeds=[0], tol=1e-8).norm[0, 1]
    want = norms(module.double().heads, batch.x[0].double())[1]
    torch.testing.assert_close(norm, want, rtol=1e-5, atol=0.0)


def test_bias_of_rounding_is_none():
    net, site, batch = surveyed(giant(lambda s: s / 3 + second(0 * POSITION)))
    found = capture(net, (site,), batch, lambda layer: layer.heads().bias)
    assert found[0] is None or not found[0][0, 1].any()


@pytest.mark.parametrize(
    ("model", "kinds", "reason"),
    [
        (shifted, ("local", "affine", "affine"), None),
        (leaking, ("affine", "affine", "affine"), "its logits mix heads or keys"),
        (lambda: dead_model(), ("affine", "affine", "affine"), None),
    ],
)
def test_one_head_hides_nothing_of_another(model, kinds, reason):
    _, site, _ = surveyed(model())
    assert site.kinds == kinds
    assert (site.reason is None) == (reason is None)
    assert reason is None or reason in site.reason


@pytest.mark.parametrize(("model", "plain"), [(capped, False), (partial(giant, floored), True)])
def test_logits_that_a_sample_may_take_to_a_cut_off_are_not_plain(model, plain):
    """Bounds for all inputs are not given for them."""
    net, site, batch = surveyed(model())
    found = capture(net, (site,), batch, lambda layer: layer.heads().pairs)
    assert (found[0] is None) == plain


def dead_model() -> Tiny:
    module = giant()
    for linear in (module.to_q, module.to_k, module.to_v):
        linear.weight.data[4:] *= 1e-15
        linear.bias.data[4:] *= 1e-15
    return module


@pytest.mark.parametrize(
    ("name", "head", "factor"),
    [("to_q", 1, 1.001), ("to_k", 1, 1.001), ("to_v", 0, 1.1), ("to_v", 1, 1.001)],
)
def test_a_wrong_weight_of_any_head_fails_the_comparison_with_autograd(name, head, factor):
    """Off by a little in one head, beside another that is 1e15 times larger, or smaller."""
    net, site, batch = surveyed(dead_model() if name == "to_v" else giant())

    def compare(layer):
        with torch.enable_grad():
            plain, relative = read_product(layer.call, batch, site.structure.q)
            heads, parts = add_inputs(site.structure, plain, layer.call, batch, relative)
            weight = getattr(heads, name).weight.clone()
            weight[head] *= factor
            wrong = replace(heads, **{name: replace(getattr(heads, name), weight=weight)})
            return [matches_autograd(each, parts, layer.call) for each in (heads, wrong)]

    assert capture(net, (site,), batch, compare) == [[True, False]]


def test_agreement_is_judged_slice_by_slice():
    a = torch.tensor([[1e4, 1.0]])
    b = a + torch.tensor([[0.0, 1e-3]])
    assert agree(a, b)
    assert agree(a, b, each=0)
    assert not agree(a, b, each=1)


def test_an_affine_map_is_judged_head_by_head():
    """Heads of very different sizes; the small one has an offset that depends on the position."""
    y = torch.randn(12, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    scale = torch.tensor([1e4, 1.0])[None, :, None, None]
    t = y.view(3, 4, 2, 4).transpose(1, 2) * scale
    rows, columns = torch.arange(12).view(3, 4), torch.arange(8).view(2, 4)
    source = Probed(t, (y,), lambda t: t)
    assert graph.find_affine_map(source, rows, columns) is not None
    shift = torch.tensor([0.0, 1e-2])[None, :, None, None] * torch.arange(4.0)[:, None]
    shifted = Probed(t + shift, (y,), lambda t: t)
    assert graph.find_affine_map(shifted, rows, columns) is None
    identity = torch.eye(4).expand(3, 2, 4, 4, 4) * scale[..., None]
    assert graph.is_linear(source, identity, rows, columns)
    assert not graph.is_linear(shifted, identity, rows, columns)


HEADS = 12


def probed(columns: torch.Tensor) -> Probed:
    """Heads of two channels, each with its columns of y, in both tokens of one window."""
    y = torch.randn(2, 2 * HEADS, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return Probed((y[:, columns] * 1e-12).transpose(0, 1)[None], (y,), lambda t: t)


def heads_of(source: Probed) -> torch.Tensor | None:
    return graph.label_affected(source, torch.arange(HEADS).view(1, HEADS, 1, 1), rows=False)


def test_every_column_has_the_head_that_it_feeds():
    """One that feeds two heads is noticed, and one that feeds nothing has none."""
    columns = torch.randperm(2 * HEADS, generator=torch.Generator().manual_seed(1))
    labels = heads_of(probed(columns.view(HEADS, 2)))
    assert labels[columns].tolist() == [h for h in range(HEADS) for _ in range(2)]
    for one, other in ((0, 11), (3, 4), (7, 8)):
        columns = torch.arange(2 * HEADS).view(HEADS, 2).clone()
        columns[other, 0] = columns[one, 0]
        assert heads_of(probed(columns)) is None
    columns = torch.arange(2 * HEADS).view(HEADS, 2).clone()
    columns[5, 1] = columns[5, 0]
    assert heads_of(probed(columns))[11] == -1
