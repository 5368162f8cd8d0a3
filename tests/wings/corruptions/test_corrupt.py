"""The measure `corrupt`: figures counted again by hand, texts by plain transformers, paired."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from scipy import stats

import lipaudit
from lipaudit.attacks.kinds import TYPING
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import InputError, UsageError
from lipaudit.gate.comparison import compare
from lipaudit.gate.judging import judge
from lipaudit.gate.rules import parse_rule
from lipaudit.measures.base import seed_of
from lipaudit.measures.texts import make_reader, read_texts
from lipaudit.models.sources.loader import load_net
from lipaudit.tables.columns import wilson
from lipaudit.wings.corruptions.corrupt import CorruptOptions
from lipaudit.wings.corruptions.images import corrupt_image
from lipaudit.wings.corruptions.typing_errors import mistype
from tests.attacks.text_folders import FOLDERS, TEXTS, count_typing_errors, save
from tests.measures.cases import run_measure

NAMES = ("gaussian_noise", "fog", "jpeg_compression")
LEVELS = (1, 5)


@pytest.fixture(scope="module")
def net():
    return load_net("demo")


@pytest.fixture(scope="module")
def digits(net):
    return load_data("demo", net, DataOptions(samples=20)).batch


def test_every_figure_is_counted_again(net, digits):
    batch = replace(digits, ids=(*digits.ids[:-1], f"{digits.ids[0]}-2"))  # the last is a repeat
    (section,) = run_measure("corrupt", net, batch, corruption=NAMES, severity=LEVELS)
    right = np.zeros((20, len(NAMES), len(LEVELS)))
    for i, j, k in np.ndindex(right.shape):
        x = corrupt_image(batch.x[i].numpy(), NAMES[j], LEVELS[k], seed_of(batch.ids[i], 0))
        z = (torch.tensor(x).float() - 0.5) / 0.5  # as the demo normalises
        right[i, j, k] = net.module(z[None]).argmax() == batch.y[i]
    clean = (net.output(batch).argmax(1) == batch.y).double().numpy()
    assert section.samples == {"ids": batch.ids, "correct": tuple(clean.astype(int))}
    lines = {"clean": clean[:, None], "mean": right.reshape(20, -1)}
    lines |= {name: right[:, j] for j, name in enumerate(NAMES)}
    assert [row.corruption for row in section.rows] == [*lines]
    for i, (row, line) in enumerate(zip(section.rows, lines.values(), strict=True)):
        np.testing.assert_allclose(section.arrays["accuracy"].numpy()[i], line.mean(1), atol=1e-6)
        line = line[:-1]  # a repeat counts once
        assert row.samples == 19
        assert row.accuracy == pytest.approx(line.mean())
        assert (row.accuracy_low, row.accuracy_high) == wilson(
            pytest.approx(line.mean() * 19).expected, 19
        )
        assert row.drop == pytest.approx(1 - line.mean() / clean[:-1].mean())
        assert row.worst == pytest.approx(line.min(1).mean())
    assert section.rows[0].severity_1 == section.rows[0].accuracy
    assert section.rows[3].severity_5 == pytest.approx(right[:-1, 1, 1].mean())
    assert section.rows[3].severity_2 is None
    levels = section.arrays["severity_5"].numpy()
    np.testing.assert_array_equal(levels[2:], right[..., 1].T)
    np.testing.assert_allclose(levels[1], right[..., 1].mean(1), atol=1e-6)


def test_copies_depend_on_the_sample_and_the_seed_alone(net, digits):
    how = {"corruption": "snow,elastic", "severity": "3,5"}
    (whole,) = run_measure("corrupt", net, digits, **how)
    (cut,) = run_measure("corrupt", net, *digits.split(7), **how)
    assert whole == cut
    (alone,) = run_measure("corrupt", net, digits, **how | {"corruption": "elastic"})
    rows = [each.arrays["accuracy"].numpy()[-1] for each in (whole, alone)]
    np.testing.assert_array_equal(*rows)
    (other,) = run_measure("corrupt", net, digits, **how, seed=1)
    assert other.arrays["accuracy"] != whole.arrays["accuracy"]


@pytest.mark.parametrize("channels", [1, 3])
def test_the_box_of_a_model_is_that_of_its_copies(channels):
    """A model that takes pixels in another box gets the same pictures, but for random draws."""
    certain = "zoom,brightness,contrast,pixelate,jpeg"
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(channels * 64, 10))
    shifted = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(channels * 64, 10))
    with torch.no_grad():  # W x + b of x = (z + 3) / 4
        shifted[1].weight.copy_(module[1].weight / 4)
        shifted[1].bias.copy_(module[1].bias + 0.75 * module[1].weight.sum(1))
    x = torch.randint(257, (6, channels, 8, 8)) / 256  # exact in both boxes
    y = module(x).argmax(1)
    found = []
    for each, box in ((module, (0, 1)), (shifted, (-3, 1))):
        spec = lipaudit.ModelSpec(each, (channels, 8, 8), box=box)
        data = (box[0] + (box[1] - box[0]) * x, y)
        report = lipaudit.measure(spec, "corrupt", data=data, dtype="float64", corruption=certain)
        found.append([row.accuracy for row in report.section("corrupt").rows])
    assert found[0] == found[1]
    assert len({*found[0]}) > 2


def test_pixels_at_the_end_of_a_box_that_float32_rounds_outwards():
    """float32(-0.3) is below -0.3, and there is no noise of negative light."""
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    spec = lipaudit.ModelSpec(module, (1, 8, 8), box=(-0.3, 0.7))
    x = torch.linspace(0, 1, 64).reshape(1, 1, 8, 8) - 0.3
    data = (x.clamp(-0.3, 0.7), module(x).argmax(1))
    report = lipaudit.measure(spec, "corrupt", data=data, corruption="shot_noise")
    assert [row.accuracy is not None for row in report.section("corrupt").rows] == [True] * 3


@pytest.mark.parametrize("kind", TYPING)
def test_typing_errors_are_of_their_kind_and_number(tmp_path, kind):
    save(FOLDERS[0], tmp_path / "m")
    net, data = load_net(str(tmp_path / "m")), tmp_path / "texts.txt"
    data.write_text("A Good film,  with GREAT actors!\n")
    batch = load_data(str(data), net, DataOptions(samples=1)).batch
    read = read_texts(make_reader(net), batch, characters=True)
    (draft,), lexicon = read.drafts, read.reader.lexicon
    (text,) = draft.texts
    found = set()
    for seed in range(40):
        (one,) = mistype(draft, Random(seed), lexicon, kind, 1).texts
        found.add(one)
        assert count_typing_errors(text, one) == 1
        assert len(one) - len(text) == {"remove": -1, "insert": 1}.get(kind, 0)
        assert (sorted(one) == sorted(text)) == (kind == "swap")
        assert [c for c in one if not c.isalnum()] == [c for c in text if not c.isalnum()]
        (five,) = mistype(draft, Random(seed), lexicon, kind, 5).texts
        assert len(five) - len(text) == {"remove": -5, "insert": 5}.get(kind, 0)
    assert len(found) > 10


@pytest.mark.parametrize("folder", [FOLDERS[0], FOLDERS[6]], ids=["bert", "gpt2"])
def test_texts_are_judged_as_plain_transformers_judges_them(folder, tmp_path):
    plain = save(folder, tmp_path / "m")
    net, data = load_net(str(tmp_path / "m")), tmp_path / "texts.csv"
    few = [text for text in TEXTS if "\t" not in text]
    lines = [f'"{text}",{plain.classify(text) if i else 0}\n' for i, text in enumerate(few)]
    data.write_text("text,label\n" + "".join(lines))
    batch = load_data(str(data), net, DataOptions(samples=len(few))).batch
    how = {"corruption": TYPING, "severity": "1,4"}
    sections = [run_measure("corrupt", net, *batch.split(n), **how) for n in (2, 7)]
    (section,) = sections[0]
    assert section == sections[1][0]
    assert [row.corruption for row in section.rows] == ["clean", "mean", *TYPING]
    read, right = read_texts(make_reader(net), batch, characters=True), np.zeros((4, len(few), 2))
    for i, j, k in np.ndindex(right.shape):
        level, name = (1, 4)[k], TYPING[i]
        draw = Random(f"{seed_of(batch.ids[j], 0)} {name} {level}")
        copy = mistype(read.drafts[j], draw, read.reader.lexicon, name, level)
        right[i, j, k] = plain.classify(copy.texts[0]) == batch.y[j]
    np.testing.assert_array_equal(section.arrays["accuracy"].numpy()[2:], right.mean(2))
    assert section.rows[1].accuracy == pytest.approx(right.mean())
    assert section.rows[1].worst == pytest.approx(right.min((0, 2)).mean())
    assert section.rows[1].worst < section.rows[1].accuracy < 1


def test_reports_are_compared_sample_by_sample():
    how = {"samples": 40, "corruption": "fog,contrast", "severity": "2,4"}
    old, new = (lipaudit.measure(f"demo{name}", "corrupt", **how) for name in (":robust", ""))
    rules = [parse_rule(f"corrupt.{text} >= -1pp") for text in ("accuracy", "severity_4@fog")]
    verdicts = judge(new, old, rules).verdicts
    assert [v.name for v in verdicts] == ["clean", "mean", "fog", "contrast", "fog"]
    assert verdicts[0].lost is not None  # clean samples are right or wrong: limits of a share
    # Right at every severity or not: a share with a test, on shared samples alone, too.
    for current in (new, lipaudit.measure("demo", "corrupt", **how | {"samples": 39})):
        worst = judge(current, old, [parse_rule("corrupt.worst@fog >= -1pp")]).verdicts[0]
        assert (worst.samples, worst.lost is not None) == (len(current.section("corrupt").ids), 1)
    assert verdicts[1].lost is None
    lines = [r.section("corrupt").arrays["accuracy"].numpy() for r in (old, new)]
    for verdict, before, now in zip(verdicts[1:4], *(each[1:] for each in lines), strict=True):
        assert (verdict.old, verdict.new) == pytest.approx((before.mean(), now.mean()))
        change = now - before
        ends = stats.bootstrap((change,), np.mean, method="percentile").confidence_interval
        within = 0.1 * (ends.high - ends.low)
        assert (verdict.low, verdict.high) == pytest.approx(tuple(ends), abs=within)
        # Exchanging old and new within the samples is scipy's permutation test of pairs.
        exact = stats.permutation_test(
            (before, now), lambda a, b: (a - b).mean(), permutation_type="samples",
            alternative="greater",
        )  # fmt: skip
        assert verdict.p == pytest.approx(exact.pvalue, abs=0.02)
    assert verdicts[2].status == "regressed"
    pair = compare([old, new]).pairs[0]
    named = [v.name for v in pair.verdicts if v.metric == "corrupt.accuracy:each"]
    assert named == ["clean", "mean", "fog", "contrast"]
    fewer = lipaudit.measure("demo", "corrupt", **how | {"severity": "2"})
    (verdict,) = judge(fewer, old, rules[:1]).verdicts
    assert verdict.status == "not comparable"
    assert "severity" in verdict.reason


def test_what_has_no_accuracy_or_no_corruption_is_refused(net, digits):
    measures = {"corrupt": {}, "attack": {"eps": ("1",)}, "smoothing": {"smooth": 1}}
    for labels in (None, digits.y.clone().index_fill(0, torch.tensor([3]), -1)):
        for name, how in measures.items():
            with pytest.raises(InputError, match="needs a label for every sample"):
                run_measure(name, net, replace(digits, y=labels), **how)
    for kind, name in (("text", "fog"), ("image", "swap"), ("tokens", None)):
        with pytest.raises(UsageError, match=f"is not for {kind} models"):
            CorruptOptions(corruption=name and (name,)).adapt(kind)
    with pytest.raises(UsageError, match="typing errors are not possible"):
        CorruptOptions().adapt("text", ("words",), "it has no tokenizer")
