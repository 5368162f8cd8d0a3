"""Which source --data names, made-up samples, and where each sample is found again."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from lipaudit.data.loading import DataOptions, draw_tensors, load_data
from lipaudit.errors import UsageError


def test_without_data_a_demo_takes_its_labelled_digits_and_others_noise(image_taker):
    net = image_taker((1, 8, 8), classes=10)
    assert load_data(None, net).spec == "random"
    samples = load_data(None, replace(net, source="demo"), DataOptions(samples=360))
    assert (samples.spec, samples.notes) == ("demo", ())
    assert samples.batch.x.shape == (360, 1, 8, 8)
    assert samples.batch.y.bincount().min() > 30
    more = load_data("demo", net, DataOptions(samples=361))
    (note,) = more.notes
    assert note.text == "demo has 360 samples, fewer than the 361 requested"


def test_random_samples_warn_whatever_the_kind(image_taker, text_taker, token_taker):
    for net in (image_taker(), text_taker(), text_taker(tokenize=None), token_taker()):
        samples = load_data("random", net, DataOptions(samples=3, max_tokens=6))
        assert [(n.level, n.code) for n in samples.notes] == [("warning", "random-data")]
        assert len(samples.batch) == 3
        assert samples.batch.y is None
        assert samples.batch.x.shape[1:] == (net.input_shape if net.kind != "text" else (6,))
    long = load_data("random", text_taker(64), DataOptions(samples=50, max_tokens=64)).batch
    assert (long.x.shape, long.mask, len(set(long.ids))) == ((50, 64), None, 50)


def test_noise_falls_with_frequency_as_one_over_f(image_taker):
    """The mean power over rings of frequency has slope -2 in a double logarithmic plot."""
    x = load_data("random", image_taker((1, 64, 64)), DataOptions(samples=64)).batch.x
    assert 0 <= x.min() < x.max() <= 1
    power = torch.fft.fft2(x[:, 0].double() - x.double().mean((1, 2, 3))[:, None, None]).abs() ** 2
    f = torch.fft.fftfreq(64, dtype=torch.float64)
    radius = torch.hypot(f[:, None], f)
    rings = [(radius > r / 64 - 0.5 / 64) & (radius <= r / 64 + 0.5 / 64) for r in range(2, 20)]
    level = torch.stack([power[:, ring].mean().log() for ring in rings])
    at = torch.stack([radius[ring].mean().log() for ring in rings])
    slope = torch.cov(torch.stack([at, level]))[0, 1] / at.var()
    assert -2.3 < slope < -1.7


def test_random_samples_depend_on_the_seed_alone(image_taker, token_taker):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    for net in (image_taker(), token_taker()):
        few = load_data("random", net, DataOptions(samples=2, seed=3)).batch
        many = load_data("random", net, DataOptions(samples=4, seed=3)).batch
        other = load_data("random", net, DataOptions(samples=4, seed=4)).batch
        assert many.ids[:2] == few.ids
        assert not set(many.ids) & set(other.ids)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_suite_is_its_samples_whatever_their_order(image_taker, read):
    net = image_taker((1, 8, 8), classes=10)
    whole = [load_data("demo", net, DataOptions(samples=360, seed=s)) for s in (0, 1)]
    part = load_data("demo", net, DataOptions(samples=359))
    assert whole[0].batch.ids != whole[1].batch.ids
    assert whole[0].suite_id == whole[1].suite_id != part.suite_id
    # Repeated samples have ids of their own.
    assert len(set(read("t.csv", "text\nsame\nsame\nsame\n", samples=3).batch.ids)) == 3


def test_data_that_are_not_there_or_not_known(tmp_path, image_taker, refused):
    for samples in (0, -1):
        message = refused("random", image_taker(), UsageError, samples=samples)
        assert "leaves no sample to measure" in message
    assert "there is no data 'nowhere'" in refused("nowhere", image_taker())
    (tmp_path / "a.xlsx").write_text("x")
    assert "has an unsupported format" in refused(tmp_path / "a.xlsx", image_taker())
    assert "1x8x8" in refused("demo", image_taker())


SOME = DataOptions(samples=3, seed=5)
TEXTS = [f"text number {i} of several" for i in range(9)]


def test_a_picture_by_its_file_and_a_sample_of_an_array_by_its_index(animals, image_taker):
    net = image_taker(classes=2)
    samples = load_data(str(animals), net, SOME)
    assert len(samples.origins) == 3
    for origin, x in zip(samples.origins, samples.batch.x, strict=True):
        with Image.open(animals / origin.place) as image:
            assert torch.equal(net.prepare(image), x)
    x = np.random.default_rng(0).random((9, 3, 8, 8)).astype(np.float32)
    np.savez(animals / "a.npz", x=x)
    samples = [load_data(str(animals / "a.npz"), image_taker(), SOME)]
    samples.append(draw_tensors(torch.from_numpy(x), None, image_taker(), SOME))
    for each in samples:
        for origin, values in zip(each.origins, each.batch.x, strict=True):
            index = int(origin.place.removeprefix("index "))
            assert np.array_equal(x[index], values)
    assert load_data("random", image_taker(), SOME).origins == ()  # made up: found nowhere


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_row_of_a_table_by_its_line_its_id_and_its_text(tmp_path, text_taker, suffix):
    path = tmp_path / f"t.{suffix}"
    rows = [{"id": f"no-{i}", "text": text} for i, text in enumerate(TEXTS)]
    with path.open("w", newline="") as file:
        if suffix == "csv":
            table = csv.DictWriter(file, ["id", "text"])
            table.writeheader()
            table.writerows(rows)
        else:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    samples = load_data(str(path), text_taker(), SOME)
    lines = path.read_text().splitlines()
    for origin, x in zip(samples.origins, samples.batch.x, strict=True):
        place, name = origin.place.split(", id ")
        line = lines[int(place.removeprefix("line ")) - 1]
        assert origin.text in line
        assert name in line
        assert x.tolist() == text_taker().tokenize(origin.text, 128)


def test_a_window_goes_by_its_first_character_and_long_texts_are_cut(read, text_taker):
    text = " ".join(TEXTS)
    samples = read("t.txt", text, samples=4, max_tokens=5)
    for origin, x in zip(samples.origins, samples.batch.x, strict=True):
        start = int(origin.place.removeprefix("character ")) - 1
        assert x.tolist() == text_taker().tokenize(text[start:], 5)
        assert text[start:].startswith(origin.text.removesuffix("..."))
    (origin,) = read("t.jsonl", json.dumps({"text": "some\n words " * 50}) + "\n").origins
    assert origin.text.startswith("some words some words")
    assert origin.text.endswith("...")
    assert len(origin.text) < 130


def test_random_samples_are_within_the_limits_of_the_model(image_taker, token_taker):
    for net in (
        replace(image_taker(), box=(-2.0, 255.0)),
        replace(token_taker(), box=(-2.0, 255.0)),
    ):
        samples = load_data("random", net, DataOptions(samples=8))
        assert [note.code for note in samples.notes] == ["random-data"]  # not too dark
        low, high = samples.batch.x.aminmax()
        assert -2 <= low < 60
        assert 195 < high <= 255


def test_no_random_ids_are_no_text(text_taker, refused):
    message = refused("random", text_taker(tokenize=None), UsageError, max_tokens=0)
    assert "--max-tokens 0 leaves nothing" in message
