"""Shares through the measure `jacobian`: sections, notes, comparisons, samples, pages."""

import numpy as np
import pytest
import torch
from torch import nn

import lipaudit
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.gate import compare
from lipaudit.measures.base import Part
from lipaudit.measures.jacobian import JacobianOptions, summarise
from lipaudit.models.net import LoadOptions
from lipaudit.models.sources.loader import load_net
from lipaudit.report import of_comparison, of_sample, render
from lipaudit.report.blocks import Heatmap, Stack
from lipaudit.report.document import make_page
from lipaudit.tables.summary import find_figures
from tests.commands import invoke
from tests.measures.cases import run_measure
from tests.models.conftest import batch_for, build
from tests.nets import Calls, draw, own_batch, own_net, seeded


@pytest.fixture(scope="module")
def demo():
    net = load_net("demo", LoadOptions(dtype="float64"))
    return net, load_data("demo", net, DataOptions(samples=6)).batch.to(net.device, net.dtype)


@pytest.fixture(scope="module")
def report():
    return lipaudit.audit("demo", ["bounds", "attention", "jacobian"], samples=6)


def freeze(net, layer, head):
    """Hold the output of a head of the demo constant."""

    def hold(_module, args):
        parts = [*args[0].chunk(4, -1)]
        parts[head] = parts[head].detach()
        return (torch.cat(parts, -1),)

    return net.module.blocks[layer].attn.proj.register_forward_pre_hook(hold)


def test_a_row_per_head_and_a_limit_of_the_norm_without_it(demo):
    """The norm with a frozen head is at least 1 - share of the whole, at every sample."""
    net, batch = demo
    jacobian, shares, paths = run_measure("jacobian", net, batch, shares=True)
    assert [(row.layer, row.head) for row in shares.rows] == [
        (layer, head) for layer in range(3) for head in range(4)
    ]
    values = {
        name: shares.arrays[name].numpy() for name in ("share", "pattern", "value", "carried")
    }
    norm = np.array(jacobian.samples["norm"])
    for i, row in enumerate(shares.rows):
        with freeze(net, row.layer, row.head):
            (frozen, *_) = run_measure("jacobian", net, batch)
        assert (
            np.array(frozen.samples["norm"]) >= norm * (1 - values["share"][i]) * 0.999999
        ).all()
        assert row.share == pytest.approx(np.median(values["share"][i]), abs=1e-5)
        assert row.share_max == pytest.approx(values["share"][i].max(), abs=1e-5)
        assert row.sample == batch.ids[values["share"][i].argmax()]
        assert (row.from_, row.to, row.samples) == ("pixels", "logits", 6)
    np.testing.assert_allclose(values["pattern"] + values["value"], values["share"], atol=2e-6)
    np.testing.assert_allclose(values["carried"], values["share"] * norm, rtol=1e-4, atol=1e-5)
    # The class token reads pixels by attention alone.
    np.testing.assert_allclose(shares.samples["attention"], 1, atol=1e-9)
    assert [row.part for row in paths.rows] == ["attention", "MLP", "block"] * 3
    parts = [paths.arrays[name].numpy() for name in ("pattern", "value", "mlp", "rest")]
    sums = np.nansum(parts, 0)
    for row, total in zip(paths.rows, sums, strict=True):
        if row.part != "block":
            np.testing.assert_allclose(total, 1, atol=2e-6)


def test_figures_do_not_depend_on_batches_and_parts_are_stored(demo):
    net, batch = demo
    whole = run_measure("jacobian", net, batch, shares=True)
    apart = run_measure("jacobian", net, batch[:1], batch[1:4], batch[4:], shares=True)
    for one, other in zip(whole, apart, strict=True):
        assert one.samples.keys() == other.samples.keys()
        for name in one.arrays:
            np.testing.assert_allclose(
                one.arrays[name].numpy(), other.arrays[name].numpy(), rtol=1e-5, atol=1e-5
            )


def test_the_direction_of_the_margin_is_its_gradient(demo):
    """Head shares of f_y - f_j by plain autograd: frozen, its gradient along itself is shorter."""
    net, batch = demo
    _, shares, paths = run_measure("jacobian", net, batch, shares=True, direction="margin")
    assert {row.to for row in (*shares.rows, *paths.rows)} == {"margin"}
    x = batch.x.clone().requires_grad_()

    def gradient():
        logits = net.module((x - 0.5) / 0.5)
        others = logits.scatter(1, batch.y[:, None], -torch.inf)
        margin = logits.gather(1, batch.y[:, None])[:, 0] - others.amax(1)
        return torch.autograd.grad(margin.sum(), x)[0].flatten(1)

    whole = gradient()
    for i in (0, 5, 9):
        row = shares.rows[i]
        with freeze(net, row.layer, row.head):
            rest = gradient()
        expected = 1 - (rest * whole).sum(1) / whole.square().sum(1)
        np.testing.assert_allclose(shares.arrays["share"].numpy()[i], expected, atol=1e-5)
    assert shares.samples["gap"] == (None,) * 6


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--shares --norm inf", "--shares needs --norm 2"),
        ("--direction margin", "--direction needs --shares"),
        ("--shares --from layers", "--shares are of paths from the input of the model"),
        ("--shares --direction margin --to features", "--direction margin needs the scores"),
    ],
)
def test_what_has_no_shares_is_refused(elsewhere, options, text):
    done = invoke("jacobian", "demo", "-n", 1, *options.split(), code=2)
    assert text in " ".join(done.stderr.split())


def test_language_models_and_padded_texts_have_shares():
    """With respect to embeddings; texts of one length are measured together."""
    for name in ("gpt2", "llama", "bert"):
        net = build(name, "float64")
        batch = batch_for(net)
        sections = run_measure("jacobian", net, batch, shares=True)
        assert [s.measure for s in sections] == ["jacobian", "jacobian.shares", "jacobian.paths"]
        shares = sections[1]
        assert len(shares.rows) == 8
        assert {row.from_ for row in shares.rows} == {"embeddings"}
        alone = run_measure("jacobian", net, batch[1:].trim(), shares=True)[1]
        np.testing.assert_allclose(
            shares.arrays["share"].numpy()[:, 1:], alone.arrays["share"].numpy(), atol=1e-5
        )


def test_a_model_without_attention_has_a_note_in_place_of_shares():
    net = own_net(seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 3))), (3, 4))
    (section,) = run_measure("jacobian", net, own_batch(draw(0, 2, 3, 4)), shares=True)
    assert section.rows[0].median > 0
    (note,) = [note for note in section.notes if note.code == "no-shares"]
    assert "no attention was found" in note.text


def test_a_layer_that_cannot_be_cut_is_named():
    """The output of the second attention is detached: no path of the input passes it."""

    def forward(one, two, head, x):
        def attend(qkv, t):
            q, k, v = qkv(t)[:, None].chunk(3, 3)
            return nn.functional.scaled_dot_product_attention(q, k, v)[:, 0]

        y = x + attend(one, x)
        with torch.no_grad():
            fixed = attend(two, x * 0 + 1)
        return head((y + fixed).mean(1))

    parts = nn.Linear(6, 18), nn.Linear(6, 18), nn.Linear(6, 3)
    net = own_net(seeded(lambda: Calls(forward, *parts)), (5, 6))
    _, shares, _ = run_measure("jacobian", net, own_batch(draw(0, 2, 5, 6)), shares=True)
    one, two = shares.rows
    assert one.share is not None
    assert two.share is None
    assert two.sample == ""
    (note,) = [note for note in shares.notes if note.code == "no-share"]
    assert note.text.endswith("it does not depend on the input of the Jacobian")


def test_a_part_without_shares_leaves_null_of_its_samples(demo):
    """One batch that fails, such as one without memory for a second graph, costs no other."""
    net, batch = demo
    options = JacobianOptions(shares=True)
    measure = lipaudit.measures.load_measures()["jacobian"]
    one, two = measure.compute(net, batch.split(3), options)
    values = {name: v for name, v in two.values.items() if not name.startswith("share_")}
    facts = {name: fact for name, fact in two.facts.items() if name not in ("heads", "steps")}
    lost = Part(two.ids, values, facts | {"unshared": "no reason at all"})
    jacobian, shares, _ = summarise([one, lost], options)
    known = ~np.isnan(shares.arrays["share"].numpy())
    assert known[:, :3].all()
    assert not known[:, 3:].any()
    assert shares.samples["patterns"][3:] == (None,) * 3
    assert "no shares of heads: no reason at all" in [note.text for note in jacobian.notes]


def test_every_audit_has_shares_and_says_so_in_words(report):
    assert report.section("jacobian").settings["shares"] is True
    rows = {(row.layer, row.head): row for row in report.section("jacobian.shares").rows}
    first = max(rows.values(), key=lambda row: row.share)
    steep = max(report.section("bounds").rows, key=lambda row: row.exact)
    share = rows[steep.layer, steep.head].share
    card = " ".join(lipaudit.summarize(report).split())
    patterns = np.median(report.section("jacobian.shares").samples["patterns"])
    line = card.partition("sensitivity via attention maps")[2].split()
    assert f"{patterns:.1%}" in line[:2]  # behind the mark of its footnote
    assert f"head {first.layer}.{first.head} carries most ({first.share:.1%})" in card
    assert f"head {steep.layer}.{steep.head} (carries {share:.1%})" in card
    (figure,) = find_figures(lipaudit.measures.summarise(report), "sensitivity_in_maps")
    assert figure.value == pytest.approx(patterns)


def test_no_penalty_on_maps_is_suggested_where_they_carry_little(report):
    section = report.section("jacobian.shares")
    few = {**section.samples, "patterns": (0.1,) * 6}
    sections = tuple(
        s.model_copy(update={"samples": few}) if s is section else s for s in report.sections
    )
    changed = report.model_copy(update={"sections": sections})
    (before,), (after,) = (
        find_figures(lipaudit.measures.summarise(each), "fragile_rows")
        for each in (report, changed)
    )
    assert "most other rows near " in before.text
    assert "most other rows near " not in after.text
    assert "a penalty on them acts on 10.0% of the sensitivity" in after.text


def test_a_sample_names_the_heads_that_carry_it(report):
    section = report.section("jacobian.shares")
    sample = section.ids[2]
    page = of_sample(report, "report.json", sample).page()
    (chapter,) = [c for c in page.chapters if c.name == "jacobian.shares"]
    table = chapter.blocks[1]
    shares = section.arrays["share"].numpy()[:, 2]
    first = section.rows[shares.argmax()]
    assert list(table.rows[0][:2]) == [f"{first.layer}.{first.head}", pytest.approx(shares.max())]
    assert [row[1] for row in table.rows] == sorted((row[1] for row in table.rows), reverse=True)


def test_a_page_maps_shares_beside_norms_on_one_scale_and_stacks_the_steps(report):
    page = make_page(report)
    chapters = {chapter.name: chapter.blocks for chapter in page.chapters}
    maps = [block for block in chapters["jacobian.shares"] if isinstance(block, Heatmap)]
    steep, carried = maps[:2]
    assert steep.scale == carried.scale
    assert steep.scale.high == 1
    assert max(max(row) for row in steep.values) == 1
    assert max(max(row) for row in carried.values) == 1
    (stack,) = [block for block in chapters["jacobian.paths"] if isinstance(block, Stack)]
    places = [f"{i} {part}" for i in range(3) for part in ("attention", "MLP")]
    assert list(stack.places) == places
    for i in range(6):
        assert sum(part[i] for part in stack.parts.values()) == pytest.approx(1, abs=1e-5)
    html = render(report, "html").decode()
    assert "0 attention, pattern: " in html  # a tooltip


def test_a_comparison_names_the_heads_that_carry_the_change_of_the_norm():
    """Per head, ||J|| times its share, old and new, paired by sample."""
    old, new = (
        lipaudit.audit(name, {"jacobian": {}}, samples=24) for name in ("demo", "demo:robust")
    )
    (pair,) = compare([old, new]).pairs
    heads = {(h.layer, h.head): h for h in pair.heads if h.metric.startswith("jacobian.shares")}
    assert len(heads) == 12
    before, after = (
        report.section("jacobian.shares").arrays["carried"].numpy() for report in (old, new)
    )
    for i, row in enumerate(old.section("jacobian.shares").rows):
        head = heads[row.layer, row.head]
        assert head.paired == pytest.approx(np.median(after[i] - before[i]), abs=1e-4)
        assert head.old == pytest.approx(np.median(before[i]), abs=1e-4)
    assert any(head.stands for head in heads.values())
    text = render(of_comparison(compare([old, new]), [old, new]), "table").decode()
    assert "Which heads carry the change of the norm?" in text


def test_reports_with_and_without_shares_are_compared_by_their_norms(report):
    plain = lipaudit.audit("demo", {"jacobian": {"shares": False}}, samples=6)
    assert plain.section("jacobian.shares") is None
    (pair,) = compare([plain, report]).pairs
    norms = [v for v in pair.verdicts if v.metric.startswith("jacobian.norm")]
    assert norms
    assert not any(verdict.reason for verdict in norms)
    margin = lipaudit.audit("demo", {"jacobian": {"direction": "margin"}}, samples=6)
    (pair,) = compare([report, margin]).pairs
    refused = [v for v in pair.verdicts if v.metric.startswith("jacobian.shares")]
    assert refused
    assert all("norms of pixels to logits are now" in v.reason for v in refused)


class Once(torch.autograd.Function):
    """A square whose gradient has no derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, u):
        return 2 * ctx.saved_tensors[0] * u


def test_a_model_without_a_second_derivative_keeps_its_norm():
    """A few outputs need one derivative; shares need two, and say that they have not got them."""

    def forward(qkv, head, x):
        x = Once.apply(x)
        q, k, v = qkv(x)[:, None].chunk(3, 3)
        y = nn.functional.scaled_dot_product_attention(q, k, v)[:, 0]
        return head((x + y).mean(1))

    net = own_net(seeded(lambda: Calls(forward, nn.Linear(6, 18), nn.Linear(6, 3))), (5, 6))
    (section,) = run_measure("jacobian", net, own_batch(draw(0, 2, 5, 6)), shares=True)
    assert section.rows[0].median > 0
    (note,) = [note for note in section.notes if note.code == "no-shares"]
    assert "a derivative that cannot be differentiated again" in note.text
