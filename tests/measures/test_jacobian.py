"""The measure `jacobian`: blocks beside the model, and norms that are not numbers."""

import copy
import csv
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import lipaudit
from lipaudit import schema
from lipaudit.data.batch import Batch
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import InputError
from lipaudit.measures.base import Part
from lipaudit.measures.jacobian import JacobianOptions, summarise
from lipaudit.models.net import LoadOptions
from lipaudit.models.sources.loader import load_net
from lipaudit.report.blocks import Curve
from lipaudit.report.sections import show_section
from tests.gate import cases
from tests.measures.cases import dense_norm, run_measure
from tests.models.conftest import batch_for, build
from tests.nets import Calls, draw, own_batch, own_net


def test_blocks_are_measured_beside_the_model():
    net = load_net("demo", LoadOptions(dtype="float64"))
    batch = load_data("demo", net, DataOptions(samples=3)).batch.to(net.device, net.dtype)
    (section,) = run_measure("jacobian", net, batch[:2], batch[2:], tol=1e-8, per_layer=True)
    assert [row.module for row in section.rows] == ["", "blocks.0", "blocks.1", "blocks.2"]
    inputs = []
    for block in net.module.blocks:
        block.register_forward_pre_hook(lambda _m, args: inputs.append(args[0]))
    net.output(batch)
    assert section.arrays["norm"].shape == (4, 3)
    assert section.arrays["norm"].numpy()[0] == pytest.approx(section.samples["norm"], rel=1e-5)
    for i, block in enumerate(net.module.blocks):
        exact = [dense_norm(block, x[None]) for x in inputs[i]]
        row = section.rows[i + 1]
        assert row.median == pytest.approx(np.median(exact), rel=1e-8)
        assert row.max == pytest.approx(max(exact), rel=1e-8)
        assert section.arrays["norm"].numpy()[i + 1] == pytest.approx(exact, rel=1e-5)
        assert row.converged == row.samples == 3


def dense_after(net, batch, module, call=0):
    """||J|| of each sample from the output of a call of a module, by plain autograd."""
    calls = []

    def change(_module, _args, output, z=None):
        # Copies: the model may write into the output.
        calls.append((output if isinstance(output, torch.Tensor) else output[0]).clone())
        if z is None or len(calls) != call + 1:
            return output
        return z.clone() if isinstance(output, torch.Tensor) else (z.clone(), *output[1:])

    def norm(sample):
        def run(z=None):
            calls.clear()
            part = net.module.get_submodule(module)
            with part.register_forward_hook(lambda *args: change(*args, z=z)):
                return net.output(sample)

        with torch.no_grad():
            run()
        return dense_norm(run, calls[call])

    return [norm(batch[i : i + 1].trim()) for i in range(len(batch))]


DEPTHS = {
    "demo": ("blocks.{}", 3),
    "gpt2": ("transformer.h.{}", 2),  # blocks return tuples
    "bert": ("bert.encoder.layer.{}", 2),  # not the attention alone, which --per-layer takes
    "timm-swin": ("layers.0.blocks.{}", 2),
    "albert": ("albert.encoder.albert_layer_groups.0", 2),  # one block, called twice
}


@pytest.mark.parametrize(("name", "path", "count"), [(k, *v) for k, v in DEPTHS.items()])
def test_norms_over_depth_are_those_of_plain_autograd(name, path, count):
    if name == "demo":
        net = load_net("demo", LoadOptions(dtype="float64"))
        batch = load_data("demo", net, DataOptions(samples=3)).batch
    else:
        net = build(name, "float64")
        batch = batch_for(net)
    batch = batch.to(net.device, net.dtype)
    how = {"tol": 1e-9, "target": None if net.classes else "features"}
    (section,) = run_measure("jacobian", net, batch, start="layers", **how)
    (plain,) = run_measure("jacobian", net, batch, **how)
    assert section.rows[0] == plain.rows[0]
    assert section.samples == plain.samples
    assert [row.from_ for row in section.rows[1:]][:count] == [f"layer:{i}" for i in range(count)]
    for layer, row in enumerate(section.rows[1 : count + 1]):
        assert row.module == path.format(layer)
        truth = dense_after(net, batch, row.module, call=0 if "{}" in path else layer)
        assert section.arrays["norm"].numpy()[layer + 1] == pytest.approx(truth, rel=1e-5)
        assert row.max == pytest.approx(max(truth), rel=1e-8)
        (alone,) = run_measure("jacobian", net, batch, start=f"layer:{layer}", **how)
        (only,) = alone.rows
        assert (only.from_, only.to) == (row.from_, row.to)
        assert alone.samples["norm"] == pytest.approx(truth, rel=1e-8)


def test_all_depths_take_one_forward_pass():
    net = load_net("demo", LoadOptions(dtype="float64"))
    batch = load_data("demo", net, DataOptions(samples=5)).batch.to(net.device, net.dtype)
    sizes = []
    with net.module.register_forward_pre_hook(lambda _m, args: sizes.append(len(args[0]))):
        run_measure("jacobian", net, batch, start="layers")
    assert sizes.count(5) == 1  # others are of the survey and of checks, at up to three samples


def test_a_model_without_residual_connections_has_no_depth():
    net = build("handwritten")
    with pytest.raises(InputError, match="no block around attention layer 0 has a residual conn"):
        run_measure("jacobian", net, batch_for(net), start="layers", target="features")


class Stream(nn.Module):
    """Blocks of nn.TransformerEncoder: samples first, tokens first, or both in one axis."""

    def __init__(self, layout):
        super().__init__()
        first = layout != "tokens"
        how = {"dropout": 0.0, "batch_first": first, "norm_first": True}
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, **how) for _ in range(2))
        self.layout, self.out = layout, nn.Linear(8, 3)

    def forward(self, x):
        z = x.transpose(0, 1) if self.layout == "tokens" else x
        for block in self.encoder:
            z = block(z)
        return self.out(z.mean(0 if self.layout == "tokens" else 1))


class Folded(nn.Module):
    """A block whose stream has samples and tokens in one axis."""

    def __init__(self):
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)
        self.block = Calls(self.mix)

    def mix(self, z):
        x = z.view(self.samples, -1, 8)
        return z + self.attention(x, x, x, need_weights=False)[0].flatten(0, 1)

    def forward(self, x):
        self.samples = len(x)
        return self.out(self.block(x.flatten(0, 1)).view(x.shape).mean(1))


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_stream_without_a_row_per_sample_says_so(tokens):
    batch = own_batch(draw(0, 3, tokens, 8))
    for module in (Stream("tokens"), *([Folded()] if tokens > 1 else [])):
        net = own_net(module, (tokens, 8))
        layers = "layers 0, 1" if isinstance(module, Stream) else "layer 0"
        says = f"the output of the block around attention {layers} has no row per sample"
        with pytest.raises(InputError, match=says):
            run_measure("jacobian", net, batch, start="layers")
        (section,) = run_measure("jacobian", net, batch, per_layer=True)
        assert len(section.rows) == 1
        assert says in {note.text for note in section.notes}
    assert len(run_measure("jacobian", own_net(Stream(""), (tokens, 8)), batch, start="layers"))


def test_an_output_before_a_block_does_not_depend_on_it():
    """Without a last LayerNorm, the tokens are those of the norm inside the last block."""
    net, batch = own_net(Stream(""), (5, 8)), own_batch(draw(0, 2, 5, 8))
    for start in ("layers", "layer:1"):
        with pytest.raises(InputError, match="output tokens of .* not depend on layer:1"):
            run_measure("jacobian", net, batch, start=start, target="tokens")
    (section,) = run_measure("jacobian", net, batch, start="layer:0", target="tokens")
    assert section.rows[0].mean > 0


class Twice(nn.Module):
    """A block of two attention layers, whose output its successor overwrites."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Calls(self.mix, *self.make_parts()) for _ in range(2))
        self.out = nn.Linear(8, 3)

    @staticmethod
    def make_parts():
        return [nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2)]

    @staticmethod
    def mix(first, second, x):
        y = first(x, x, x, need_weights=False)[0]
        return x + second(y, y, y, need_weights=False)[0]

    def forward(self, x):
        first = self.blocks[0](x)
        then = first.clone()
        first += 1
        return self.out((first.tanh() + self.blocks[1](then)).mean(1))


def test_blocks_of_two_layers_have_one_row_and_may_be_written_into():
    net, batch = own_net(Twice(), (5, 8), "float64"), own_batch(draw(0, 3, 5, 8).double())
    (section,) = run_measure("jacobian", net, batch, start="layers", tol=1e-9)
    assert [row.from_ for row in section.rows] == ["tokens", "layer:0", "layer:2"]
    for row in section.rows[1:]:
        assert row.max == pytest.approx(max(dense_after(net, batch, row.module)), rel=1e-8)
    # The output of the first block reaches the model's output around the second, too.
    assert [note.text.split(" (")[0] for note in section.notes if note.code == "paths-fixed"] == [
        "the input also reaches the output around layer:2"
    ]


class Pair(nn.Module):
    """An encoder and a decoder, of which the decoder reads the input, too."""

    def __init__(self):
        super().__init__()
        how = {"dropout": 0.0, "batch_first": True}
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, **how) for _ in "ab")
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(8, 2, 16, **how) for _ in "ab")
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        memory = self.encoder[1](self.encoder[0](x))
        return self.out(self.decoder[1](self.decoder[0](x, memory), memory).mean(1))


def test_encoder_and_decoder_are_two_curves():
    net, batch = own_net(Pair(), (5, 8), "float64"), own_batch(draw(0, 2, 5, 8).double())
    (section,) = run_measure("jacobian", net, batch, start="layers", tol=1e-9)
    paths = ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]
    assert [row.module for row in section.rows[1:]] == paths
    for row in section.rows[1:]:
        assert row.max == pytest.approx(max(dense_after(net, batch, row.module)), rel=1e-8)
    (curve,) = [block for block in show_section(section) if isinstance(block, Curve)]
    labels = [f"{stack} {name}" for stack in ("encoder", "decoder") for name in ("mean", "p95")]
    assert [series.label for series in curve.series] == labels
    assert [[*series.x] for series in curve.series] == [[0, 1], [0, 1], [2, 4], [2, 4]]
    (text,) = [note.text for note in section.notes if note.code == "paths-fixed"]
    assert "around layer:0, layer:1, layer:2 (as from an encoder to a decoder)" in text


class Stages(Stream):
    """One stack of blocks in two modules, as Swin and PVT have them."""

    def __init__(self):
        super().__init__("")
        self.blocks1, self.blocks2 = self.encoder, copy.deepcopy(self.encoder)
        del self.encoder

    def forward(self, x):
        for block in (*self.blocks1, *self.blocks2):
            x = block(x)
        return self.out(x.mean(1))


def test_stages_of_one_stack_are_one_curve():
    net, batch = own_net(Stages(), (5, 8)), own_batch(draw(0, 2, 5, 8))
    (section,) = run_measure("jacobian", net, batch, start="layers")
    modules = [f"blocks{stage}.{i}" for stage in (1, 2) for i in (0, 1)]
    assert [row.module for row in section.rows if row.module] == modules
    (curve,) = [block for block in show_section(section) if isinstance(block, Curve)]
    assert [(s.label, [*s.x]) for s in curve.series] == [
        (n, [0, 1, 2, 3]) for n in ("mean", "p95")
    ]


def test_the_page_and_the_csv_have_the_curve():
    report = lipaudit.measure("demo", "jacobian", start="layers", samples=2)
    section = report.section("jacobian")
    (curve,) = [block for block in show_section(section) if isinstance(block, Curve)]
    assert [series.label for series in curve.series] == ["mean", "p95"]
    for series in curve.series:
        assert [*series.x] == [0, 1, 2]
        assert [*series.y] == [row[series.label] for row in section.rows[1:]]
    page = lipaudit.render(report, "html").decode()
    assert "How much a change after each block can still grow" in page
    lines = list(csv.DictReader(lipaudit.render(report, "csv").decode().splitlines()))
    means = {line["row"]: float(line["value"]) for line in lines if line["column"] == "mean"}
    assert means == {
        ",".join(filter(None, (row.from_, row.to, row.module))): row.mean for row in section.rows
    }


def test_a_norm_that_is_not_a_number_says_so():
    values = {"norm": (1.0, math.nan), "upper": (1.0, math.nan), "within": (0.0, math.nan)}
    values |= {"products": (3, 3), "converged": (True, False), "rivals": (1, 1)}
    values |= {"complete": (True, True), "radius_first_order": (0.5, math.nan)}
    values = {name: np.array(each) for name, each in values.items()}
    part = Part(("a", "b"), values, {"from": "pixels", "to": "logits", "method": "lanczos"})
    report = cases.report(*summarise([part], JacobianOptions()))
    written = json.loads(schema.dumps(report))["sections"][0]
    assert written["samples"]["norm"] == [1.0, "NaN"]
    assert written["samples"]["radius_first_order"] == [0.5, None]
    assert written["rows"][0]["median"] == "NaN"
    assert written["rows"][0]["within"] == "NaN"
    codes = {note["code"] for note in written["notes"]}
    assert "not-finite" in codes
    assert "not-converged" not in codes  # a lower estimate is a number


def linear_net(layer, samples=6):
    """A net of one linear layer on 4 tokens of width 12, and samples."""
    net = own_net(nn.Sequential(nn.Flatten(), layer), (4, 12), "float64")
    return net, own_batch(draw(0, samples, 4, 12).double())


def test_a_lower_estimate_says_what_is_proven_of_it():
    """Forty singular values crowd below the first: the estimate of the error means little."""
    layer = nn.Linear(48, 40, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.diag(torch.linspace(0.99, 1.0, 48))[8:])
    net, batch = linear_net(layer)
    for within in (0.03, 1e-6):
        (section,) = run_measure("jacobian", net, batch, within=within)
        row = section.rows[0]
        norms = np.array(section.samples["norm"])
        assert row.converged == 6
        assert row.within <= within * (1 + 1e-6)
        assert (norms <= 1 + 1e-12).all()
        assert (norms * (1 + row.within) >= 1 - 1e-12).all()
        said = " ".join(note.text for note in section.notes)
        assert f"at most {100 * row.within:.2g}% too low (99.9% confidence)" in said


def late_rival():
    """At 0, classes rank in their order; the first one is left nearest for the last of forty."""
    layer = nn.Linear(48, 40)
    with torch.no_grad():
        layer.weight.copy_(1e-2 * torch.eye(48)[:40])
        layer.weight[-1] = 1e3
        layer.bias.copy_(-torch.linspace(0, 1, 40))
    net, batch = linear_net(layer)
    return layer, net, Batch(torch.zeros_like(batch.x), None, batch.ids)


def test_a_radius_that_was_not_completed_says_so():
    layer, net, batch = late_rival()
    truth = 1 / float(torch.linalg.vector_norm(layer.weight[0] - layer.weight[-1]))
    for rivals, complete in ((5, False), (39, True)):
        (section,) = run_measure("jacobian", net, batch, rivals=rivals)
        radius = section.samples["radius_first_order"]
        assert section.samples["rivals"] == (rivals,) * 6
        assert section.samples["complete"] == (complete,) * 6
        assert max(radius) <= truth * (1 + 1e-6)
        assert (min(radius) >= truth * (1 - 1e-6)) == complete
        codes = {note.code for note in section.notes}
        assert ("radius-incomplete" in codes) != complete


def test_a_misclassified_sample_needs_no_further_rivals():
    """It has no radius, so none that is a lower limit: its class is the last of forty."""
    _, net, batch = late_rival()
    for label, limited in ((39, 0), (0, 6)):
        y = torch.full((len(batch),), label)
        (section,) = run_measure("jacobian", net, replace(batch, y=y), rivals=1)
        assert section.samples["complete"] == (False,) * 6
        assert section.samples["radius_first_order"].count(None) == 6 - limited
        notes = [note.text for note in section.notes if note.code == "radius-incomplete"]
        assert [text.split(" ", 1)[0] for text in notes] == ["6"] * bool(limited)


def test_a_sample_that_repeats_another_counts_once():
    """In every row: medians and means are those of the distinct samples."""
    x = np.random.default_rng(0).random((3, 1, 8, 8)).astype(np.float32)
    alone, twice = (
        lipaudit.measure("demo", "jacobian", data=data, per_layer=True, samples=len(data))
        for data in (x, np.concatenate([x, x[:1], x[:1]]))
    )
    sections = [report.section("jacobian") for report in (alone, twice)]
    assert [row.samples for row in sections[1].rows] == [3] * 4
    for before, after in zip(*(section.rows for section in sections), strict=True):
        assert after.median == pytest.approx(before.median, rel=1e-4)
        assert after.mean == pytest.approx(before.mean, rel=1e-4)
    assert len(sections[1].ids) == 5
    assert "repeated-samples" in {note.code for note in sections[1].notes}


@pytest.mark.parametrize(("norm", "named"), [("2", "l2"), ("inf", "linf")])
def test_the_first_order_radius_names_the_norm_of_its_ball(norm, named):
    section = lipaudit.measure("demo", "jacobian", samples=2, norm=norm).section("jacobian")
    assert section.sample_column("radius_first_order").label == f"first-order radius, {named}"
