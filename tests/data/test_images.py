"""Folders of images: what is read, how classes are matched, what is refused."""

import numpy as np
import pytest
import torch
from PIL import Image

from lipaudit.data.images import resize, thumbnail, to_box
from lipaudit.data.loading import DataOptions, load_data


def picture(path, colour=(10, 20, 30), size=(8, 8), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


@pytest.fixture
def animals(tmp_path):
    """Two classes, three pictures each, told apart by their first pixel."""
    for shade, name in ((50, "cat"), (200, "dog")):
        for i in range(3):
            picture(tmp_path / name / f"{i}.png", (shade + i, 0, 0))
    return tmp_path


def shades(samples):
    return (samples.batch.x[:, 0, 0, 0] * 255).round().int().tolist()


def test_a_flat_folder_has_no_labels(tmp_path, image_taker):
    for i in range(3):
        picture(tmp_path / f"{i}.png", (i, 0, 0))
    (tmp_path / "notes.md").write_text("not a picture")
    samples = load_data(str(tmp_path), image_taker(classes=2))
    assert sorted(shades(samples)) == [0, 1, 2]
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


def test_classes_that_cannot_be_matched_are_an_error(animals, image_taker, refused):
    assert "class 'cat'" in refused(animals, image_taker(classes=5))
    labels = ("ant", "bee", "elk", "fox", "gnu", "hen", "ibis")
    said = refused(animals, image_taker(classes=7, labels=labels))
    assert "7 classes ('ant', 'bee', 'elk', 'fox', 'gnu', ...)" in said


def test_a_model_of_features_takes_the_images_alone(animals, image_taker):
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


def test_pixels_of_an_image_of_the_right_size_are_untouched(tmp_path, image_taker):
    array = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(array).save(tmp_path / "a.png")
    x = load_data(str(tmp_path), image_taker(), DataOptions(samples=1)).batch.x[0]
    torch.testing.assert_close(x, torch.from_numpy(array).permute(2, 0, 1) / 255)


def test_other_sizes_are_scaled_to_cover_and_cropped_in_the_middle():
    """Bright left and right thirds of a wide picture fall to the crop."""
    wide = Image.new("L", (90, 30), 255)
    wide.paste(0, (30, 0, 60, 30))
    pixels = resize(wide, (1, 10, 10))
    assert pixels.shape == (1, 10, 10)
    assert pixels[0, :, 2:8].max() < 0.02


def test_sixteen_bit_greys_keep_their_shades():
    array = np.array([[0, 65535], [257, 32896]], dtype=np.uint16)
    pixels = resize(Image.fromarray(array), (1, 2, 2))
    assert (pixels * 255).round().int().tolist() == [[[0, 255], [1, 128]]]


@pytest.mark.parametrize("box", [(-1.0, 1.0), (0.0, 255.0)])
def test_pictures_are_shown_as_they_lie_in_the_box_of_a_model(box):
    pixels = torch.rand(3, 5, 5, generator=torch.Generator().manual_seed(0))
    assert thumbnail(to_box(pixels, box), box) == thumbnail(pixels)
    assert thumbnail(pixels, box) != thumbnail(pixels)


def test_channels_are_those_of_the_model():
    colour = Image.new("RGBA", (4, 4), (255, 0, 0, 255))
    assert resize(colour, (1, 4, 4)).shape == (1, 4, 4)
    assert resize(colour, (3, 4, 4))[:, 0, 0].tolist() == [1, 0, 0]


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


def test_others_take_the_place_of_what_was_skipped(animals, image_taker):
    """As many as were asked for, and more of them only add to fewer."""
    (animals / "cat" / "9.png").write_bytes(b"no picture")
    taken = [
        load_data(str(animals), image_taker(), DataOptions(samples=n, skip_bad=True)).batch.ids
        for n in range(1, 7)
    ]
    for n, ids in enumerate(taken, 1):
        assert len(ids) == n
        assert ids == taken[-1][:n]


def test_a_folder_of_nothing_but_damaged_pictures_is_refused(tmp_path, image_taker, refused):
    (tmp_path / "a.png").write_bytes(b"no picture")
    assert "none of 1 images can be read" in refused(tmp_path, image_taker(), skip_bad=True)
