"""Where each sample is found again: what stands there is the sample."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image

from lipaudit.data.loading import DataOptions, draw_tensors, load_data

SOME = DataOptions(samples=3, seed=5)
TEXTS = [f"text number {i} of several" for i in range(9)]


def test_a_picture_by_its_file(tmp_path, image_taker):
    for shade, name in ((50, "cat"), (200, "dog")):
        (tmp_path / name).mkdir()
        for i in range(3):
            Image.new("RGB", (8, 8), (shade + i, 0, 0)).save(tmp_path / name / f"{i}.png")
    net = image_taker(classes=2)
    samples = load_data(str(tmp_path), net, SOME)
    assert len(samples.origins) == 3
    for origin, x in zip(samples.origins, samples.batch.x, strict=True):
        with Image.open(tmp_path / origin.place) as image:
            assert torch.equal(net.prepare(image), x)


def test_a_sample_of_an_array_by_its_index(tmp_path, image_taker):
    x = np.random.default_rng(0).random((9, 3, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "a.npz", x=x)
    samples = [load_data(str(tmp_path / "a.npz"), image_taker(), SOME)]
    samples.append(draw_tensors(torch.from_numpy(x), None, image_taker(), SOME))
    for each in samples:
        for origin, values in zip(each.origins, each.batch.x, strict=True):
            word, index = origin.place.split()
            assert word == "index"
            assert np.array_equal(x[int(index)], values)


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


def test_a_window_of_a_text_by_its_first_character(read, text_taker):
    text = " ".join(TEXTS)
    samples = read("t.txt", text, samples=4, max_tokens=5)
    for origin, x in zip(samples.origins, samples.batch.x, strict=True):
        start = int(origin.place.removeprefix("character ")) - 1
        assert x.tolist() == text_taker().tokenize(text[start:], 5)
        assert text[start:].startswith(origin.text.removesuffix("..."))


def test_what_is_made_up_is_found_nowhere(image_taker):
    assert load_data("random", image_taker(), SOME).origins == ()


def test_long_texts_are_cut_and_set_on_one_line(read):
    (origin,) = read("t.jsonl", json.dumps({"text": "some\n words " * 50}) + "\n").origins
    assert origin.text.startswith("some words some words")
    assert origin.text.endswith("...")
    assert len(origin.text) < 130
