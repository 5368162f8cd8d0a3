"""The measure `attack`: rows, columns, intervals."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from safetensors.numpy import load

from lipaudit.attacks.kinds import CHUNK
from lipaudit.data.batch import Batch
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import UsageError
from lipaudit.measures import load_measures
from lipaudit.measures.attack import AttackOptions, encode_files, measure
from lipaudit.measures.base import Listener, Part, listening
from lipaudit.measures.rating import compute_calibration_error
from lipaudit.models.sources.loader import load_net
from lipaudit.report.pictures import list_classes
from lipaudit.tables.columns import wilson
from tests.measures.cases import run_measure


@pytest.fixture(scope="module")
def net():
    return load_net("demo")


def digits(net, samples=24):
    return load_data("demo", net, DataOptions(samples=samples)).batch


def attacked(net, batch, **given):
    return run_measure("attack", net, *batch.split(CHUNK), **given)[0]


def test_rows_and_columns_agree(net):
    found = attacked(net, digits(net), attack="fgsm,pgd", eps=("0", "0.05", "0.1"), steps=4)
    assert [(row.attack, row.eps_text) for row in found.rows] == [
        (name, eps) for name in ("worst", "fgsm", "pgd") for eps in ("0", "0.05", "0.1")
    ]
    assert [row.robust == row.clean for row in found.rows[:3]] == [True, False, False]
    assert found.rows[1].robust > found.rows[2].robust
    for row in found.rows:
        flags = found.samples[f"robust@{row.attack},linf,{row.eps_text}"]
        assert sum(flags) / len(flags) == row.robust
        assert row.robust_low <= row.robust <= row.robust_high
        assert row.robust <= row.clean
    # statsmodels.stats.proportion.proportion_confint(5, 10, method="wilson"), and 0 of 20
    assert wilson(5, 10) == pytest.approx((0.236593, 0.763407), abs=1e-6)
    assert wilson(0, 20) == pytest.approx((0.0, 0.161125), abs=1e-6)
    worst, fgsm, pgd = (found.samples[f"robust@{n},linf,0.1"] for n in ("worst", "fgsm", "pgd"))
    assert worst == tuple(map(min, fgsm, pgd))


@pytest.mark.parametrize(("samples", "shown"), [(29, False), (30, True)])
def test_few_samples_have_no_calibration_error_but_a_note(net, samples, shown):
    options = AttackOptions(attack="fgsm", eps=("0.05",))
    parts = list(measure(net, digits(net, samples).split(CHUNK), options))
    (found,) = load_measures()["attack"].summarise(parts, options)
    for row in found.rows:
        assert (row.ece is not None, row.ece_clean is not None) == (shown, shown)
    noted = [note.text for note in found.notes if note.code == "left-out"]
    assert noted == ["a calibration error (ECE) needs 30 samples"] * (not shown)


def test_progress_counts_what_is_left_for_samples_that_are_not_broken(net):
    """At a radius of 0 nothing is done; a broken sample takes no passes at larger radii."""
    shares = []
    options = AttackOptions(attack="pgd", eps=("1/2", "0", "0.05"), steps=4)
    batch = digits(net, 30)
    with listening(Listener(moves=shares.append)):
        (part,) = measure(net, [batch], options)
    flags = {t.radius.text: part.values["robust"][:, i] for i, t in enumerate(options.trials())}
    right, alive = int(part.values["correct"].sum()), int(flags["0.05"].sum())
    assert right == int(flags["0"].sum()) > alive > 0
    cost = 12  # four gradients
    spent = (30, 30, 30 + cost * right, 30 + cost * (right + alive))
    left = (2 * cost * right, 2 * cost * right, cost * alive, 0)
    assert shares == pytest.approx([30 * s / (s + n) for s, n in zip(spent, left, strict=True)])


def test_classes_and_calibration_are_those_of_the_examples(net, tmp_path):
    """Recomputed from the saved examples: a forward pass each, bins and classes in plain loops."""
    batch = digits(net, 60)
    given = {"attack": "fgsm,pgd", "eps": ("0.05", "0.1"), "steps": 4}
    options = AttackOptions(**given, save_adv=tmp_path / "adv.safetensors")
    parts = list(measure(net, batch.split(CHUNK), options))
    tensors = load(encode_files(parts, options)[options.save_adv])
    (found,) = load_measures()["attack"].summarise(parts, options)
    keys = ["fgsm,linf,0.05", "fgsm,linf,0.1", "pgd,linf,0.05", "pgd,linf,0.1"]

    def predict(x):
        with torch.no_grad():
            return net.output(Batch(torch.as_tensor(x), None, batch.ids)).double().softmax(1)

    scores = {"": predict(batch.x), **{key: predict(tensors[key]) for key in keys}}
    y = batch.y
    stands = {key: p.argmax(1) == y for key, p in scores.items()}
    for worst, inside in (("0.05", keys[::2]), ("0.1", keys)):
        picked = []
        for i in range(60):
            fallen = [key for key in inside if not stands[key][i]]
            picked.append(scores[(fallen or inside[-1:])[0]][i])
        scores[f"worst,linf,{worst}"] = torch.stack(picked)
        stands[f"worst,linf,{worst}"] = torch.stack([stands[key] for key in inside]).all(0)

    def calibrate(name):
        error, sure = 0.0, scores[name].amax(1)
        for m in range(15):
            some = (sure > m / 15) & (sure <= (m + 1) / 15)
            if some.any():
                gap = stands[name][some].double().mean() - sure[some].mean()
                error += float(some.double().mean() * gap.abs())
        return error

    assert len(found.rows) == 6
    for row in found.rows:
        name = str(row.key)
        assert row.ece_clean == pytest.approx(calibrate(""), abs=1e-6)
        assert row.ece == pytest.approx(calibrate(name), abs=1e-6)
        shares = {int(c): float(stands[name][y == c].double().mean()) for c in y.unique()}
        count = {c: int((y == c).sum()) for c in shares}
        large = [c for c in shares if count[c] >= 5]
        lowest = min(large, key=lambda c: (shares[c], -count[c]))  # of equal ones the largest
        assert min(count.values()) < 5
        assert (row.robust_class, row["class"]) == (
            shares[lowest],
            f"{lowest} ({count[lowest]} samples)",
        )
    for key in ("", *keys):
        stored = found.samples["confidence" + "@" * bool(key) + key]
        assert stored == pytest.approx(scores[key].amax(1).tolist(), abs=1e-6)
    (table,) = list_classes({"": found})
    assert [column.label for column in table.columns] == [
        *("class", "samples", "clean", "linf 0.05", "linf 0.1")
    ]
    for c, line in zip(y.unique(), table.rows, strict=True):
        some = y == c
        assert tuple(line[:2]) == (str(int(c)), int(some.sum()))
        for name, said in zip(("", "worst,linf,0.05", "worst,linf,0.1"), line[2:], strict=True):
            hits = int(stands[name][some].sum())
            low, high = wilson(hits, int(some.sum()))
            share = hits / int(some.sum())
            assert said == f"{share:.1%} ({100 * low:.1f} to {high:.1%})"


def test_a_confidence_on_the_edge_of_a_bin_belongs_to_the_lower_one():
    """Bin m holds ((m - 1) / 15, m / 15]: 3/15 and 0.21 are apart, 2.9/15 and 3/15 are not."""
    sure = np.array([0.2, 0.21, 2.9 / 15, 1.0])
    hits = np.array([True, False, False, True])
    bins = [1 - 0.2 - 2.9 / 15, 0.21, 0.0]
    assert compute_calibration_error(sure, hits) == pytest.approx(sum(bins) / 4, abs=1e-12)


def test_the_recorded_chunk_is_the_one_that_was_used(net):
    """It decides the random starts, so a report must not say one thing and do another."""
    options = AttackOptions(attack="pgd", eps=("0.1",), steps=1)
    assert options.model_dump()["logical_chunk"] == CHUNK
    assert AttackOptions.model_validate(options.model_dump()) == options  # an old report's
    with pytest.raises(ValidationError, match="logical_chunk"):
        AttackOptions(logical_chunk=32)
    for size in (CHUNK // 2, CHUNK + 1):
        with pytest.raises(UsageError, match="chunks of 64"):
            list(measure(net, digits(net, 2 * CHUNK).split(size), options))


def test_what_an_attack_breaks_is_drawn_with_its_scores(net):
    batch = digits(net)
    section = attacked(net, batch, batch_size=5, steps=4, attack="fgsm,pgd", eps=("0.05",))
    samples, at = section.samples, {name: i for i, name in enumerate(batch.ids)}
    fallen = zip(batch.ids, samples["correct"], samples["robust@worst,linf,0.05"], strict=True)
    assert section.examples.keys() == {name for name, right, stands in fallen if right > stands}
    assert 0 < len(section.examples) < 24
    for name, example in section.examples.items():
        image, changed, difference = (
            np.array(Image.open(io.BytesIO(base64.b64decode(picture))), dtype=float) / 255
            for picture in (example.image, example.adversarial, example.difference)
        )
        x = batch.x[at[name], 0].numpy()
        assert np.abs(image - x).max() <= 0.5 / 255 + 1e-6
        assert 0 < np.abs(changed - image).max() <= 0.05 + 1 / 255 + 1e-6
        amplified = 0.5 + example.times * (changed - image)
        assert np.abs(amplified - difference).max() <= (2 * example.times + 1) / 255
        assert samples[f"robust@{example.trial}"][at[name]] == 0
        logits = net.output(Batch(batch.x[at[name] : at[name] + 1], None, (name,)))
        scores = logits.softmax(1)[0].detach().numpy()
        true, said = map(int, example.classes)
        assert true == samples["label"][at[name]] != said
        assert example.before == pytest.approx(scores[[true, said]], abs=2e-4)
        assert example.after[1] >= example.after[0]


def test_examples_of_short_and_long_texts_are_written_together(tmp_path):
    def part(name, tokens, value):
        x_adv = np.full((1, 1, tokens, 4), value, dtype=np.float32)
        values = {"x_adv": x_adv, "robust": np.zeros((1, 1)), "label": np.zeros(1, int)}
        return Part((name,), values)

    options = AttackOptions(attack="pgd", eps=("0.1",), save_adv=tmp_path / "adv.safetensors")
    (written,) = encode_files([part("a", 5, 1.0), part("b", 3, 2.0)], options).values()
    x = load(written)["x"]
    assert x.shape == (2, 5, 4)
    assert (x[0] == 1).all()
    assert (x[1, :3] == 2).all()
    assert not x[1, 3:].any()


def test_no_more_is_drawn_than_the_first_512_samples(net):
    batch = load_data("demo:train", net, DataOptions(samples=576)).batch
    section = attacked(net, batch, attack="fgsm", eps=("0.1",), batch_size=64)
    fallen = {
        n for n, r in zip(batch.ids, section.samples["robust@fgsm,linf,0.1"], strict=True) if not r
    }
    assert section.examples
    assert section.examples.keys() < fallen
    assert section.examples.keys() <= set(batch.ids[:512])
