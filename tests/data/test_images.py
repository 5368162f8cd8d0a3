"""Folders of images, arrays and IDX files: layouts, ranges, classes, what is refused."""

import gzip
import struct

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from lipaudit.data.arrays import KINDS, load_arrays, thumbnail, to_box
from lipaudit.data.image_files import Resizing
from lipaudit.data.loading import DataOptions, SampleForm, find_data_forms, load_data
from lipaudit.errors import InputError
from tests.data.conftest import picture


def shades(samples):
    return (samples.batch.x[:, 0, 0, 0] * 255).round().int().tolist()


def test_a_flat_folder_has_no_labels_and_pixels_that_fit_are_untouched(tmp_path, image_taker):
    draw = np.random.default_rng(0)
    pixels = {i: draw.integers(0, 256, (8, 8, 3), dtype=np.uint8) for i in range(3)}
    for i, array in pixels.items():
        array[0, 0, 0] = i
        Image.fromarray(array).save(tmp_path / f"{i}.png")
    (tmp_path / "notes.md").write_text("not a picture")
    samples = load_data(str(tmp_path), image_taker(classes=2))
    assert sorted(shades(samples)) == [0, 1, 2]
    for shade, x in zip(shades(samples), samples.batch.x, strict=True):
        torch.testing.assert_close(x, torch.from_numpy(pixels[shade]).permute(2, 0, 1) / 255)
    assert samples.batch.y is None
    assert [n.code for n in samples.notes] == ["fewer-samples"]


@pytest.mark.parametrize(
    "names",
    [
        {"labels": ("Dog", "bird", "CAT")},
        {"labels": ("dog, hound", "x", "feline, cat")},
        {"aliases": {"dog": 0, "cat": 2}},
    ],
)
def test_classes_are_matched_by_name_or_alias(animals, image_taker, names):
    net = image_taker(classes=3, **names)
    samples = load_data(str(animals), net, DataOptions(samples=6))
    for shade, label in zip(shades(samples), samples.batch.y.tolist(), strict=True):
        assert label == (2 if shade < 100 else 0)
    assert samples.notes == ()


def test_classes_are_matched_by_order_where_counts_agree_and_a_note_says_so(animals, image_taker):
    samples = load_data(str(animals), image_taker(classes=2), DataOptions(samples=6))
    for shade, label in zip(shades(samples), samples.batch.y.tolist(), strict=True):
        assert label == (0 if shade < 100 else 1)
    assert [n.code for n in samples.notes] == ["labels-by-order"]
    assert "'cat' is class 0" in samples.notes[0].text


def test_classes_without_a_match_are_an_error_but_for_features(animals, image_taker, refused):
    assert "class 'cat'" in refused(animals, image_taker(classes=5))
    labels = ("ant", "bee", "elk", "fox", "gnu", "hen", "ibis")
    said = refused(animals, image_taker(classes=7, labels=labels))
    assert "7 classes ('ant', 'bee', 'elk', 'fox', 'gnu', ...)" in said
    samples = load_data(str(animals), image_taker(), DataOptions(samples=2))
    assert samples.batch.y is None
    assert [n.code for n in samples.notes] == ["labels-unused"]


def test_sampling_depends_on_the_seed_alone_and_grows_by_adding(animals, image_taker):
    net = image_taker(classes=2)
    ids = {
        (seed, n): load_data(str(animals), net, DataOptions(samples=n, seed=seed)).batch.ids
        for seed in (0, 1)
        for n in (3, 6)
    }
    assert ids[0, 6][:3] == ids[0, 3]
    assert ids[0, 6] != ids[1, 6]
    assert sorted(ids[0, 6]) == sorted(ids[1, 6])


def test_only_the_samples_drawn_are_opened(animals, image_taker):
    net = image_taker(classes=2)
    drawn = shades(load_data(str(animals), net, DataOptions(samples=5)))
    left = next(s for s in (50, 51, 52, 200, 201, 202) if s not in drawn)
    folder, number = ("cat", left - 50) if left < 100 else ("dog", left - 200)
    (animals / folder / f"{number}.png").write_bytes(b"damaged")
    assert shades(load_data(str(animals), net, DataOptions(samples=5))) == drawn


def test_other_sizes_channels_and_depths_are_those_of_the_model():
    """Bright left and right thirds of a wide picture fall to the crop; greys keep their shades."""
    wide = Image.new("L", (90, 30), 255)
    wide.paste(0, (30, 0, 60, 30))
    pixels = Resizing((1, 10, 10))(wide)
    assert pixels.shape == (1, 10, 10)
    assert pixels[0, :, 2:8].max() < 0.02
    array = np.array([[0, 65535], [257, 32896]], dtype=np.uint16)
    pixels = Resizing((1, 2, 2))(Image.fromarray(array))
    assert (pixels * 255).round().int().tolist() == [[[0, 255], [1, 128]]]
    colour = Image.new("RGBA", (4, 4), (255, 0, 0, 255))
    assert Resizing((1, 4, 4))(colour).shape == (1, 4, 4)
    assert Resizing((3, 4, 4))(colour)[:, 0, 0].tolist() == [1, 0, 0]


@pytest.mark.parametrize("box", [(-1.0, 1.0), (0.0, 255.0)])
def test_pictures_are_shown_as_they_lie_in_the_box_of_a_model(box):
    pixels = torch.rand(3, 5, 5, generator=torch.Generator().manual_seed(0))
    assert thumbnail(to_box(pixels, box), box) == thumbnail(pixels)
    assert thumbnail(pixels, box) != thumbnail(pixels)


def test_folders_that_are_refused(tmp_path, image_taker, text_taker, refused):
    assert "holds no images" in refused(tmp_path, image_taker())
    picture(tmp_path / "a.png")
    assert "the model takes text" in refused(tmp_path, text_taker())
    assert "takes 5 channels" in refused(tmp_path, image_taker((5, 8, 8)))
    picture(tmp_path / "class" / "b.png")
    assert "beside and inside" in refused(tmp_path, image_taker())


def test_one_damaged_picture_does_not_end_a_run_that_may_skip_it(animals, image_taker, refused):
    net = image_taker(classes=2, labels=("cat", "dog"))
    sound = load_data(str(animals), net, DataOptions(samples=6))
    (animals / "cat" / "9.png").write_bytes(b"no picture")
    (animals / "dog" / "8.jpg").mkdir()
    assert "--skip-bad" in refused(animals, net, samples=8)
    samples = load_data(str(animals), net, DataOptions(samples=8, skip_bad=True))
    assert sorted(samples.batch.ids) == sorted(sound.batch.ids)
    for shade, label in zip(shades(samples), samples.batch.y.tolist(), strict=True):
        assert label == int(shade > 100)
    skipped = next(note for note in samples.notes if note.code == "skipped-bad")
    assert (skipped.level, "left out: 2 (" in skipped.text) == ("warning", True)
    # Others take its place: as many as were asked for, and more of them only add to fewer.
    for n in range(1, 7):
        few = load_data(str(animals), net, DataOptions(samples=n, skip_bad=True)).batch
        assert few.ids == samples.batch.ids[:n]
        assert len(few.ids) == n
    for path in animals.glob("*/?.png"):
        path.write_bytes(b"no picture")
    assert "none of 8 images can be read" in refused(animals, net, skip_bad=True)


RNG = np.random.default_rng(0)
BYTES = RNG.integers(0, 256, (6, 3, 8, 8), dtype=np.uint8)
ALL = DataOptions(samples=6)
ORDER = torch.randperm(6, generator=torch.Generator().manual_seed(0))


def saved(path, **arrays):
    np.savez(path, **arrays)
    return str(path)


@pytest.mark.parametrize(
    ("name", "array", "shape"),
    [
        *((name, BYTES, (3, 8, 8)) for name in ("x", "images", "inputs")),
        ("x", BYTES.transpose(0, 2, 3, 1), (3, 8, 8)),  # channels last
        ("x", BYTES[:, 0], (1, 8, 8)),  # grey images without a channel
    ],
)
@pytest.mark.parametrize("labels", ["y", "labels"])
def test_bytes_become_pixels_with_their_labels(tmp_path, image_taker, name, array, shape, labels):
    path = saved(tmp_path / "a.npz", **{name: array, labels: np.arange(6)})
    batch = load_data(path, image_taker(shape, classes=6), ALL).batch
    torch.testing.assert_close(batch.x, torch.from_numpy(BYTES[:, : shape[0]])[ORDER] / 255)
    assert batch.y.tolist() == ORDER.tolist()


def test_safetensors_sequences_and_ids_are_read(tmp_path, image_taker, token_taker, text_taker):
    arrays = {"x": torch.from_numpy(BYTES), "y": torch.arange(6)}
    save_file(arrays, tmp_path / "a.safetensors")
    path = saved(tmp_path / "a.npz", x=BYTES, y=np.arange(6))
    net = image_taker(classes=6)
    twins = [load_data(p, net, ALL).batch for p in (path, str(tmp_path / "a.safetensors"))]
    assert twins[0].ids == twins[1].ids
    path = saved(tmp_path / "a.npz", x=BYTES, y=np.arange(6) > 2, labels=np.array(["no", "yes"]))
    assert load_data(path, image_taker(classes=2), ALL).batch.y.tolist() == (ORDER > 2).tolist()
    x, ids = RNG.normal(size=(6, 5, 4)) * 100, RNG.integers(0, 100, (6, 7))
    batch = load_data(saved(tmp_path / "b.npz", x=x), token_taker(), ALL).batch
    torch.testing.assert_close(batch.x, torch.from_numpy(x)[ORDER].float())
    batch = load_data(saved(tmp_path / "c.npz", x=ids), text_taker(), ALL).batch
    assert (batch.x.tolist(), batch.mask) == (ids[ORDER].tolist(), None)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (BYTES[:, :, :4], "samples of shape (3, 4, 8); the model takes (3, 8, 8)"),
        (BYTES.astype(np.float32), "values from 0 to 255"),
        (BYTES / 255 - 0.5, "values from -0.5"),
        (np.full((2, 3, 8, 8), np.nan), "NaN or infinite"),
        (BYTES[:0], "has no samples"),
        (np.full((2, 5), 100), "the vocabulary has 100"),
        (np.full((2, 5), -1), "from -1"),
        (np.full((2, 129), 1), "at most 128"),
        (np.full((2, 5), 1.0), "float64"),
    ],
)
def test_inputs_that_are_refused(tmp_path, image_taker, text_taker, refused, x, message):
    net = image_taker() if x.ndim == 4 else text_taker()
    assert message in refused(saved(tmp_path / "a.npz", x=x), net)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.full(6, 3), f"index {ORDER[0]}: the class 3 is not one of the model's 3 classes (0"),
        (np.full(6, -1), "the class -1 is not one of"),
        (np.arange(5), "labels of shape (5,)"),
        (np.eye(6), "labels of shape (6, 6)"),
        (np.zeros(6), "float64 labels"),
        (np.array(list("abcabc")), "a.npz holds <U1"),
    ],
)
def test_labels_that_are_refused(tmp_path, image_taker, refused, y, message):
    assert message in refused(saved(tmp_path / "a.npz", x=BYTES, y=y), image_taker(classes=3))
    assert "arrays: z" in refused(saved(tmp_path / "a.npz", z=BYTES), image_taker())


IMAGES = np.random.default_rng(0).integers(0, 256, (5, 4, 6), dtype=np.uint8)
CODES = {np.dtype(kind).newbyteorder("="): code for code, kind in KINDS.items()}


def written(path, array):
    """Write an array as the format's page says."""
    head = struct.pack(f">BBBB{array.ndim}i", 0, 0, CODES[array.dtype], array.ndim, *array.shape)
    data = head + array.astype(array.dtype.newbyteorder(">")).tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("end", ["-idx{}-ubyte", "-idx{}-ubyte.gz", ".idx{}-ubyte"])
def test_images_come_with_the_labels_beside_them(tmp_path, image_taker, end):
    path = written(tmp_path / f"t10k-images{end.format(3)}", IMAGES)
    written(tmp_path / f"t10k-labels{end.format(1)}", np.arange(5, dtype=np.uint8))
    batch = load_data(str(path), image_taker((1, 4, 6), classes=5), DataOptions(samples=5)).batch
    torch.testing.assert_close(batch.x[:, 0], torch.from_numpy(IMAGES)[batch.y] / 255)
    assert sorted(batch.y.tolist()) == [0, 1, 2, 3, 4]
    assert find_data_forms(str(path)) == (SampleForm("image", (1, 4, 6)),)


@pytest.mark.parametrize("kind", CODES)
def test_numbers_of_every_type(tmp_path, kind):
    values = np.array([[1, 2, 3], [-4, 5, 100]]).astype(kind)
    read, _ = load_arrays(written(tmp_path / "a-idx2-ubyte", values))
    assert read.tolist() == values.tolist()


def test_labels_are_not_needed_and_a_file_of_them_is_no_data(tmp_path):
    assert load_arrays(written(tmp_path / "x-images-idx3-ubyte", IMAGES))[1] is None
    path = written(tmp_path / "t10k-labels-idx1-ubyte", np.arange(5, dtype=np.uint8))
    with pytest.raises(InputError, match="has no samples") as caught:
        load_arrays(path)
    assert "images" in caught.value.advice
