"""A sample in which everything is alike must not decide what a model is."""

import pytest
import torch
import torch.nn.functional as F

from lipaudit.data.batch import Batch
from lipaudit.errors import InputError
from lipaudit.measures.bounds import BoundsOptions, measure, summarise
from lipaudit.models.attention.capture import Layer, capture
from lipaudit.models.attention.survey import make_generic, survey
from lipaudit.theory.head_norms import head_norms
from tests.models.attention.tiny import HEADS, WIDTH, Tiny, norms, tiny_net
from tests.nets import draw, own_batch

TOKENS = 7


def net_of(module: Tiny):
    return tiny_net(module, TOKENS)


def batch_of(*samples: torch.Tensor) -> Batch:
    return own_batch(torch.stack(samples).double())


def random(seed: int = 0) -> torch.Tensor:
    return draw(seed, TOKENS, WIDTH)


ALIKE = {
    "zero": torch.zeros(TOKENS, WIDTH),
    "one": torch.ones(TOKENS, WIDTH),
    "equal tokens": random()[:1].expand(TOKENS, -1),
}


def plain(change=lambda t, _x: t, read=lambda x: (x, x, x)) -> Tiny:
    """Return a module with changed queries and keys, or other X of queries, keys and values."""
    return Tiny(
        read=lambda _m, x: read(x),
        change=lambda _m, x, q, k, v: (change(q, x), change(k, x), v),
        out=torch.nn.Identity,
    )


def normed(t, _x):
    """Normalise queries and keys in each head."""
    return F.layer_norm(t, t.shape[-1:])


def reduced(x):
    """Keys and values of tokens that are averaged in pairs: equal only where neighbours are."""
    y = 0.5 * (x + x.roll(1, 1))
    return x, y, y


AFFINE, LOCAL = ("affine",) * 3, ("local", "local", "affine")
MODELS = {  # the kinds, and whether keys read what queries read; None without a closed form
    "plain": (plain, AFFINE, True),
    "normed": (lambda: plain(normed), LOCAL, True),
    # Beyond a level that no ordinary sample reaches, and with a part below every tolerance.
    "saturated": (lambda: plain(lambda t, _: t.clamp(-1e3, 1e3)), LOCAL, True),
    "nearly affine": (lambda: plain(lambda t, _: t + 1e-7 * t.tanh()), LOCAL, True),
    "reduced": (lambda: plain(read=reduced), AFFINE, False),
    "values of other tokens": (lambda: plain(read=lambda x: (x, x, x.flip(1))), AFFINE, None),
}


@pytest.mark.parametrize(("build", "kinds", "joint"), MODELS.values(), ids=MODELS)
def test_structure_does_not_depend_on_the_sample(build, kinds, joint):
    net = net_of(build())
    sites = [survey(net, batch_of(x)).sites for x in (random(1), *ALIKE.values())]
    reasons = {site.reason for (site,) in sites}
    assert len(reasons) == 1
    for (site,) in sites:
        assert site.kinds == kinds
        assert site.closed_form == (joint is not None)
        assert not site.closed_form or site.structure.joint == joint


@pytest.mark.parametrize("name", ALIKE)
def test_a_constant_sample_and_an_ordinary_one_are_measured_together(name):
    """On the first, normalised queries look affine, and `castin` would be exceeded."""
    net, options = net_of(plain(normed)), BoundsOptions(tol=1e-8)
    batch = batch_of(ALIKE[name], random(2))
    parts = list(measure(net, batch.split(1), options))
    for part in parts:
        assert all(
            row.castin is row.mean_field is None for row in summarise([part], options)[0].rows
        )
    found = torch.cat([torch.as_tensor(part.values["exact"]) for part in parts])
    want = torch.stack([norms(net.module.heads, x) for x in batch.x])
    torch.testing.assert_close(found, want, rtol=1e-6, atol=0.0)


def test_mixed_samples_show_on_a_constant_sample():
    """A companion that equals the sample would hide it."""
    with pytest.raises(InputError, match="depends on the other samples"):
        survey(net_of(plain(read=lambda x: 3 * (x - x.mean(0),))), batch_of(ALIKE["one"]))


def test_heads_that_are_equal_on_a_sample_are_not_grouped():
    x = torch.zeros(TOKENS, WIDTH)
    x[:, [0, -1]] = random(3)[:, [0, -1]]
    module = plain()
    # Equal weights for two input channels: equal heads where the others are zero.
    module.to_k.weight.data[:, [0, -1]] = 1.0
    module.to_k.bias.data.fill_(1.0)
    net, batch = net_of(module), batch_of(x)
    (site,) = survey(net, batch).sites
    assert site.structure.k.repeat == 1
    (heads,) = capture(net, (site,), batch, Layer.heads)
    want = net.module.to_k.weight.unflatten(0, (HEADS, -1)).mT
    assert torch.equal(heads.to_k.weight, want)
    assert head_norms(heads, seeds=[0]).converged.all()


def test_generic_points_stay_in_the_box_and_move_every_entry(zoo):
    net, _, batch = zoo("timm-vit")
    black = Batch(torch.zeros_like(batch.x), None, batch.ids)
    _, pair, other = make_generic(net, black)
    assert torch.equal(pair.x[0], other.x[0])
    assert pair.x.min() >= 0
    assert pair.x.max() <= 1
    assert all(len(x.unique()) > 0.99 * x.numel() for x in (*pair.x, other.x[1]))


def test_text_keeps_its_tokens_and_moves_their_embeddings(zoo):
    net, _, batch = zoo("bert")
    moved, pair, other = make_generic(net, batch)
    assert torch.equal(pair.x[0], other.x[0])
    assert set(pair.x[0].tolist()) <= set(batch.x[0].tolist())
    assert not torch.allclose(moved.output(pair), net.output(pair))
    torch.testing.assert_close(moved.output(pair)[0], moved.output(other)[0])


@pytest.mark.parametrize(
    "name",
    ["timm-swinv2", "timm-qk-norm", "timm-twins", "timm-cait", "qwen3", "llama", "olmo2", "t5"],
)
def test_a_black_image_and_equal_words_decide_nothing(zoo, name):
    net, sites, batch = zoo(name)
    same = Batch(torch.full_like(batch.x, 5 if net.kind == "text" else 0), None, batch.ids)
    assert [site.kinds for site in survey(net, same).sites] == [site.kinds for site in sites]


def far(x):
    return x.square().sum((1, 2)) > 1e4


def moody(t, x):
    """Normalise samples far from zero only."""
    return torch.where(far(x)[:, None, None, None], normed(t, x), t)


def settled(t, x):
    """The same where nothing gives it away: the branch not taken is not in the graph."""
    rows = zip(t, far(x), strict=True)
    return torch.stack([normed(row, x) if f else row for row, f in rows])


@pytest.mark.parametrize("size", [1, 3])
def test_structure_that_changes_with_the_data_is_reopened(size):
    """The run goes on, with norms that hold and without bounds that do not."""
    net, options = net_of(plain(settled)), BoundsOptions(tol=1e-8)
    batch = batch_of(random(4), 100 * random(5), random(6))
    parts = list(measure(net, batch.split(size), options))
    found = torch.cat([torch.as_tensor(part.values["exact"]) for part in parts])
    want = torch.stack([norms(net.module.heads, x) for x in batch.x])
    torch.testing.assert_close(found, want, rtol=1e-6, atol=0.0)
    heads = summarise(parts, options)[0]
    assert [note.code for note in heads.notes].count("structure-changed") == 1
    for row in heads.rows:
        assert row.kind == "affine, numerical"
        assert {row.castin, row.sharp} == {None}
        assert row.exact_max is not None


def test_conditions_on_the_values_are_not_affine():
    (site,) = survey(net_of(plain(moody)), batch_of(random(4))).sites
    assert site.kinds == LOCAL
