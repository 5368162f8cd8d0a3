"""The measure `attack`: rows, columns, intervals."""

import base64
import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError
from safetensors.numpy import load

from lipaudit.attacks.kinds import CHUNK
from lipaudit.data.batch import Batch
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import InputError, UsageError
from lipaudit.measures.attack import AttackOptions, encode_examples, measure
from lipaudit.measures.base import Part
from lipaudit.models.sources.loader import load_net
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


def test_what_cannot_be_attacked_is_refused(net):
    for given in ({"attack": "pgd"}, {"attack": "magic", "eps": ("0.1",)}):
        with pytest.raises(UsageError):
            AttackOptions(**given)
    with pytest.raises(InputError, match="needs a label for every sample"):
        attacked(net, replace(digits(net, 2), y=None), attack="fgsm", eps=("0.1",))


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
        values = {"x_adv": x_adv, "robust": np.zeros((1, 1)), "label": np.zeros(1)}
        return Part((name,), values)

    options = AttackOptions(attack="pgd", eps=("0.1",), save_adv=tmp_path / "adv.safetensors")
    (written,) = encode_examples([part("a", 5, 1.0), part("b", 3, 2.0)], options)
    x = load(written)["x"]
    assert x.shape == (2, 5, 4)
    assert (x[0] == 1).all()
    assert (x[1, :3] == 2).all()
    assert not x[1, 3:].any()


def test_no_more_is_drawn_than_the_first_samples(net, monkeypatch):
    monkeypatch.setattr("lipaudit.measures.attack.DRAWN", 64)
    examples = attacked(net, digits(net, 80), attack="fgsm", eps=("0.1",)).examples
    assert examples
    assert examples.keys() <= set(digits(net, 80).ids[:64])
