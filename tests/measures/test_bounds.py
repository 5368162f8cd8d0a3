"""The measure against dense float64 Jacobians of the demo, and what must hold on every head."""

from pathlib import Path

import numpy as np
import pytest
import torch

import lipaudit
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import InputError
from lipaudit.measures import layer_bounds
from lipaudit.measures.bounds import BoundsOptions, measure, summarise
from lipaudit.models.net import LoadOptions
from lipaudit.models.sources.loader import load_net
from lipaudit.theory import Policy
from lipaudit.theory.bounds.record import load_bounds
from tests.cli.own import Attention
from tests.commands import invoke
from tests.measures.cases import dense, dense_norm
from tests.nets import draw, own_batch, own_net


@pytest.fixture(scope="module")
def demo():
    net = load_net("demo", LoadOptions(dtype="float64"))
    return net, load_data("demo", net, DataOptions(samples=3)).batch.to(net.device, net.dtype)


def measured(net, batch, **given):
    """The part of a batch, and its sections."""
    options = BoundsOptions(**given)
    parts = list(measure(net, [batch], options))
    return parts, summarise(parts, options)


@pytest.fixture(scope="module")
def found(demo):
    return measured(*demo, tol=1e-8, concat=True)


def attention_output(module, x, layer):
    """O of every head of a layer as a function of that layer's X, by plain softmax."""
    attn = module.blocks[layer].attn
    q, k, v = attn.qkv(x).unflatten(-1, (3, 4, 12)).permute(1, 2, 0, 3)
    return torch.softmax(q @ k.mT / 12**0.5, -1) @ v


def layer_inputs(net, batch):
    seen = []
    hooks = [
        block.attn.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
        for block in net.module.blocks
    ]
    net.output(batch)
    for hook in hooks:
        hook.remove()
    return seen


def test_norms_are_those_of_the_dense_jacobian(demo, found):
    """Of heads, and of layers before and after W_O."""
    net, batch = demo
    values = found[0][0].values
    for layer, x in enumerate(layer_inputs(net, batch)):
        for b, z in enumerate(x):
            jacobian = dense(lambda z, i=layer: attention_output(net.module, z, i), z)
            exact = torch.linalg.matrix_norm(jacobian.unflatten(0, (4, -1)), 2)
            heads = values["exact"][b, 4 * layer : 4 * layer + 4]
            np.testing.assert_allclose(heads, exact, rtol=1e-6)

    def whole(z):
        return attention_output(net.module, z, 1).permute(1, 0, 2).flatten(1)

    x, proj = layer_inputs(net, batch)[1][0], net.module.blocks[1].attn.proj
    for name, function in (("layer_exact", whole), ("layer_exact_out", lambda z: proj(whole(z)))):
        assert values[name][0, 1] == pytest.approx(dense_norm(function, x), rel=1e-6)


def test_norms_that_did_not_converge_are_counted(demo):
    heads = measured(*demo, tol=1e-12, max_steps=2, concat=True)[1][0]
    texts = [note.text for note in heads.notes if note.code == "not-converged"]
    assert texts[0].startswith("36 head norms did not converge")
    assert texts[1].startswith("18 layer norms did not converge")
    assert not any(row.converged for row in heads.rows)


def test_more_is_computed_on_request(demo, found):
    """Norms before W_O, gains by splitting, and a proof for layers closer than that for heads."""
    (part,), (heads, layers) = measured(*demo, tol=1e-8, layers="1")
    assert np.isnan(part.values["layer_exact"]).all()
    assert layers.rows[0].exact is None
    assert layers.rows[0].exact_out == pytest.approx(found[1][1].rows[1].exact_out, rel=1e-8)
    assert [note.code for note in layers.notes] == ["left-out"]
    assert not found[1][1].notes
    assert {row.splitting_gain for row in heads.rows} == {None}
    _, (heads, layers) = measured(*demo, layers="1", splitting=True, layer_within=1e-3)
    assert all(row.splitting_gain >= 1 for row in heads.rows)
    assert 0 < layers.rows[0].within <= 1e-3 < max(row.within for row in heads.rows)


def test_every_bound_is_above_the_exact_norm(found):
    values = found[0][0].values
    for name in load_bounds():
        assert (values[name] >= values["exact"]).all(), name
    heads, layers = found[1]
    for layer in layers.rows:
        assert layer.exact_out <= layer.sharp_rss <= layer.sharp_sum <= layer.theorem3_sum
    assert len(heads.rows) == 12
    assert np.median([row.sharp / row.exact for row in heads.rows]) <= 1.4
    assert max(row.sharp_ratio_max for row in heads.rows) <= 3


def test_every_head_and_radius_has_a_row_between_both_ends(demo):
    (part,), (heads, _, section) = measured(*demo, radius="1/100,0.1,3", layers="1")
    assert section.measure == "bounds.ball"
    assert [(row.head, row.r) for row in section.rows[:4]] == [
        *((0, r) for r in (0.01, 0.1, 3.0)),
        (1, 0.01),
    ]
    at_x = {row.head: row for row in heads.rows}
    for row in section.rows:
        assert row.exact < row.ball_norm <= min(row.ball_sharp, row.castin, row.mean_field, row.hu)
        assert row.ball_ratio_max >= row.ball_sharp / row.ball_norm * (1 - 1e-9) or row.r == 3
        assert row.ball_sharp > at_x[row.head].sharp
        assert row.castin > at_x[row.head].castin
    assert section.arrays["ball_sharp"].shape == (12, 3)
    (note,) = section.notes
    assert note.code == "loose-ball"
    assert note.text.startswith("at r = 3 ball_sharp is")
    (alone,), sections = measured(*demo, layers="1")  # balls change nothing at the samples
    for name, values in alone.values.items():
        np.testing.assert_array_equal(values, part.values[name])
    assert len(sections) == 2


def test_heads_that_are_not_affine_have_no_constant_and_a_reason():
    shape = {"depth": 1, "img_size": 32, "embed_dim": 48, "qk_norm": True, "pretrained": False}
    net = load_net("timm:vit_tiny_patch16_224", LoadOptions(model_kwargs=shape))
    batch = load_data("random", net, DataOptions(samples=1)).batch.to(net.device, net.dtype)
    section = measured(net, batch, radius="0.1")[1][2]
    for row in section.rows:
        given = (row.ball_norm, row.ball_sharp, row.castin, row.mean_field, row.hu)
        assert row.exact > 0
        assert given == (None,) * 5
    (note,) = section.notes
    assert note.text.startswith(
        "ball_sharp was not computed for 3 heads: it needs self-attention with affine"
    )


class Pooled(torch.nn.Module):
    """Eight queries meet two keys."""

    def __init__(self):
        super().__init__()
        self.q, self.kv = torch.nn.Linear(8, 8), torch.nn.Linear(8, 16)

    def forward(self, x):
        k, v = self.kv(x.unflatten(1, (2, 4)).mean(2)).chunk(2, -1)
        q, k, v = (t[:, None] for t in (self.q(x), k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)[:, 0]


@pytest.mark.parametrize(("entries", "said"), [(15, 1), (16, 0)])
def test_norms_of_long_maps_are_said_to_be_limits(monkeypatch, entries, said):
    """By the entries of the map: many queries may meet few keys, or few many."""
    net = own_net(Pooled(), (8, 8), "float64", classifier=False)
    batch = own_batch(torch.randn(1, 8, 8, dtype=torch.float64))
    monkeypatch.setattr(layer_bounds, "POLICY", Policy(map_limit=entries))
    section = measured(net, batch)[1][0]
    assert (section.rows[0].p_norm, section.rows[0].tokens) == (pytest.approx(2.0, rel=0.2), 2)
    assert sum(note.code == "long-maps" for note in section.notes) == said


@pytest.mark.parametrize(("little", "layers", "said"), [(1e-4, 2, 1), (0.0, 3, 0)])
def test_attention_that_is_no_softmax_is_named(little, layers, said):
    """Its heads are left out, and those of later layers are numbered as if it were not there."""
    torch.manual_seed(0)
    blocks = torch.nn.Sequential(*map(Attention, ("plain", little, "plain")))
    net = own_net(blocks, (5, 8), "float64", classifier=False)
    batch = own_batch(draw(0, 2, 5, 8).double())
    (every,), (section, *_) = measured(net, batch)
    assert {row.layer for row in section.rows} == set(range(layers))
    notes = [note for note in section.notes if note.code == "attention-unread"]
    assert [note.level for note in notes] == ["warning"] * said
    assert all("(1 at own.py:" in note.text for note in notes)
    (second,), _ = measured(net, batch, layers=(1,))  # has the norms that it has among all
    assert [layer for layer, _, _ in second.facts["heads"]] == [1, 1]
    np.testing.assert_array_equal(second.values["exact"], every.values["exact"][:, 2:4])
    if said:  # alone it is refused by the same words
        with pytest.raises(InputError, match=r"\(the model itself at own\.py:"):
            measured(own_net(blocks[1], (5, 8), "float64", classifier=False), batch)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(("name", "more"), [("bounds", {"radius": 0.01}), ("attention", {})])
def test_a_repeated_sample_counts_once_in_every_table(name, more):
    """Figures are those of the distinct samples, and a comparison agrees with them."""
    x = np.random.default_rng(0).random((2, 1, 8, 8)).astype(np.float32)
    x[0] /= 10
    again = np.concatenate([x, x[1:], x[1:], x[1:]])
    alone, repeated = (
        lipaudit.measure("demo", name, data=data, samples=len(data), **more) for data in (x, again)
    )
    for before, after in zip(alone.sections, repeated.sections, strict=True):
        assert len(after.ids) == 5
        for row, same in zip(before.rows, after.rows, strict=True):
            for column, cell in row.items():
                if isinstance(cell, float):
                    cell = pytest.approx(cell, rel=1e-3)
                assert same[column] == cell, column
    (note,) = [n.text for s in repeated.sections for n in s.notes if n.code == "repeated-samples"]
    assert note.startswith("3 of 5 samples are duplicates")
    Path("a.json").write_bytes(lipaudit.render(repeated, "json"))
    invoke("compare", "a.json", "a.json")
