"""Picture files as other tools write them: modes, ranges, rotation, places, and what is said."""

import struct

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from lipaudit.data.image_files import Resizing
from lipaudit.data.loading import DataOptions, find_data_forms, load_data
from lipaudit.data.tables import SampleTable, draw_table
from tests.data.conftest import picture

DRAW = np.random.default_rng(0)
SHADES = DRAW.integers(0, 256, (8, 8), dtype=np.uint8)
SHADES[0, :2] = 0, 255


def load(folder, net, n=9, **options):
    return load_data(str(folder), net, DataOptions(samples=n, **options))


def notes(samples):
    return {note.code: note.text for note in samples.notes if note.code != "fewer-samples"}


# What each tool writes of the same greys, as an array that Pillow stores; and what it says.
STORED = {
    "uint8.png": SHADES,
    "uint16.png": SHADES * np.uint16(257),
    "uint16.tif": SHADES * np.uint16(257),
    "uint16.jp2": SHADES * np.uint16(257),
    "float.tif": (SHADES / 255).astype(np.float32),
    "float.tiff": (SHADES / 255).astype(np.float32),
    "bool.png": SHADES > 127,
}


@pytest.mark.parametrize("name", STORED)
def test_greys_of_every_depth_are_the_same_pixels(tmp_path, image_taker, name):
    Image.fromarray(STORED[name]).save(tmp_path / name)
    samples = load(tmp_path, image_taker((1, 8, 8)))
    expected = (SHADES > 127) * 1.0 if "bool" in name else SHADES / 255
    np.testing.assert_allclose(samples.batch.x[0, 0], expected, atol=1e-6)
    assert notes(samples) == {}
    depth = {"uint16": "divided by 257", "float": "times 255"}.get(name.partition(".")[0], "")
    assert depth in "; ".join(samples.steps)


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (SHADES.astype(np.int32), "holds 32-bit integers from 0 to 255"),
        (SHADES.astype(np.float32), "holds floats from 0 to 255"),
        ((SHADES / 255 - 0.5).astype(np.float32), "holds floats from -0.5 to 0.5"),
        (np.full((8, 8), np.nan, np.float32), "holds floats from nan"),
    ],
)
def test_greys_of_an_unknown_range_are_refused(tmp_path, image_taker, refused, array, says):
    Image.fromarray(array).save(tmp_path / "bad.tif")
    message = refused(tmp_path, image_taker((1, 8, 8)))
    assert f"bad.tif {says}" in message
    assert "Save images with 8 or 16 bits" in message
    picture(tmp_path / "fine.png", 200, mode="L")
    assert len(load(tmp_path, image_taker((1, 8, 8)), skip_bad=True).batch) == 1


@pytest.mark.parametrize("most", [1, 16])
@pytest.mark.parametrize("kind", ["array", "folder", "short"])
def test_a_range_that_is_hardly_used_is_named(tmp_path, image_taker, most, kind):
    levels = (SHADES % (most + 1)).astype(np.uint8)
    if kind == "array":
        np.savez(tmp_path / "a.npz", x=levels[None])
        samples = load(tmp_path / "a.npz", image_taker((1, 8, 8)))
    else:
        short = levels * np.uint16(257)
        Image.fromarray(levels if kind == "folder" else short).save(tmp_path / "a.png")
        samples = load(tmp_path, image_taker((1, 8, 8)))
    assert f"is {most} of 255" in notes(samples)["dark-images"]
    np.testing.assert_allclose(samples.batch.x[0, 0], levels / 255, atol=1e-7)


def test_greys_whose_white_is_zero_are_inverted_at_every_depth(tmp_path, image_taker):
    """As the page of the format says of WhiteIsZero; Pillow inverts 8 bits only."""
    for name, most in (("uint16.tif", 65535), ("float.tif", 1)):
        stored = STORED[name]
        Image.fromarray((most - stored).astype(stored.dtype)).save(tmp_path / name)
        data = bytearray((tmp_path / name).read_bytes())
        # An entry of the directory: tag 262, of type short, once, with the value 1.
        entry = struct.pack("<HHIHH", 262, 3, 1, 1, 0)
        assert data.count(entry) == 1
        at = data.index(entry)
        data[at : at + 12] = struct.pack("<HHIHH", 262, 3, 1, 0, 0)
        (tmp_path / name).write_bytes(data)
    samples = load(tmp_path, image_taker((1, 8, 8)))
    for x in samples.batch.x:
        np.testing.assert_allclose(x[0], SHADES / 255, atol=1e-6)
    assert "rounded, inverted" in "; ".join(samples.steps)


def test_planes_of_16_bits_and_signed_bytes_are_refused(tmp_path, image_taker, refused):
    """Files as tifffile writes them: Pillow reads other pixels without an error."""
    colour = DRAW.integers(0, 256, (3, 8, 8), dtype=np.uint8)
    planes = colour.astype(np.uint16) * 257
    heads = {
        256: (3, 8), 257: (3, 8), 258: (3, 16), 259: (3, 1), 262: (3, 2), 277: (3, 3), 278: (3, 8),
        284: (3, 2),
    }  # fmt: skip
    (tmp_path / "a.tif").write_bytes(tiff(heads, list(planes)))
    assert "planes of 16 bits" in refused(tmp_path, image_taker())
    heads |= {258: (3, 8), 262: (3, 1), 277: (3, 1), 284: (3, 1), 339: (3, 2)}
    (tmp_path / "a.tif").write_bytes(tiff(heads, [colour[0]]))
    assert "signed numbers" in refused(tmp_path, image_taker((1, 8, 8)))
    heads[339] = (3, 1)
    (tmp_path / "a.tif").write_bytes(tiff(heads, [colour[0]]))
    np.testing.assert_allclose(
        load(tmp_path, image_taker((1, 8, 8))).batch.x[0, 0], colour[0] / 255, atol=1e-7
    )


def tiff(tags, strips):
    """Write a TIFF file, little-endian, of one directory and a strip for each plane."""
    depths, count = [tags[258][1]] * tags[277][1], len(strips)
    start = 8 + 2 + 12 * (len(tags) + 2) + 4
    extra, at = b"", start + 6 * 3 + 8 * count
    places = [at + sum(s.nbytes for s in strips[:i]) for i in range(count)]
    lists = {258: ("H", depths), 273: ("I", places), 279: ("I", [s.nbytes for s in strips])}
    entries = b""
    for tag in sorted({*tags, *lists}):
        kind, values = lists.get(tag, ("H", [tags.get(tag, (3, 0))[1]]))
        packed = struct.pack(f"<{len(values)}{kind}", *values)
        value = packed.ljust(4, b"\0")
        if len(packed) > 4:
            value = struct.pack("<I", start + len(extra))
            extra += packed
        entries += struct.pack("<HHI", tag, {"H": 3, "I": 4}[kind], len(values)) + value
    head = b"II*\0" + struct.pack("<IH", 8, len(entries) // 12) + entries + b"\0" * 4
    body = (head + extra).ljust(at, b"\0")
    return body + b"".join(strip.tobytes() for strip in strips)


def test_arrays_say_what_was_done_to_their_values(tmp_path, image_taker):
    for array, done in ((SHADES, "divided by 255"), (SHADES / 255, "values not changed")):
        np.savez(tmp_path / "a.npz", x=array[None])
        steps = load(tmp_path / "a.npz", image_taker((1, 8, 8))).steps
        assert steps[0] == f"{array.dtype} array of shape (8, 8)"
        assert steps[1] == f"values of all samples: {array.min():.4g} to {array.max():.4g}"
        assert steps[2] == done


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["png", "jpg", "tif"])
def test_a_camera_that_was_turned(tmp_path, image_taker, orientation, suffix):
    """The pixels are those that `datasets` and every viewer show, and the size is known before."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = tmp_path / f"a.{suffix}"
    Image.fromarray(DRAW.integers(0, 256, (8, 4, 3), dtype=np.uint8)).save(file, exif=exif)
    table = datasets.Dataset.from_dict({"image": [str(file)]}).cast_column(
        "image", datasets.Image()
    )
    shown = np.asarray(table[0]["image"].convert("RGB"))
    shape = (3, *shown.shape[:2])
    assert shape == ((3, 4, 8) if orientation > 4 else (3, 8, 4))
    assert find_data_forms(str(tmp_path))[0].shape == shape
    samples = load(tmp_path, image_taker(shape))
    np.testing.assert_allclose(samples.batch.x[0], shown.transpose(2, 0, 1) / 255, atol=1e-7)
    rows = SampleTable("hf:x", ["image"], ["index 0"], table)
    again = draw_table(rows, image_taker(shape), DataOptions(samples=1))
    assert torch.equal(samples.batch.x, again.batch.x)
    # Pillow itself turns TIFF files.
    is_told = orientation > 1 and suffix != "tif"
    assert ("turned" in notes(samples)) == is_told
    assert (f"EXIF orientation {orientation}" in "".join(samples.steps)) == is_told


def test_what_lies_in_a_folder_and_is_not_read_is_named(tmp_path, image_taker, refused):
    for name in ("cat/1.png", "dog/2.jfif", "dog/3.jp2", "cat/._1.png", "__MACOSX/._x.png"):
        file = tmp_path / name
        picture(file.with_suffix(".jpg" if file.suffix == ".jfif" else file.suffix), (250, 0, 0))
    (tmp_path / "dog/2.jpg").rename(tmp_path / "dog/2.jfif")
    for name in ("cat/._1.png", "cat/._bad.png", ".DS_Store", "notes.md"):
        (tmp_path / name).write_bytes(b"\0\5\26\7")
    net = image_taker(classes=2, labels=("cat", "dog"))
    samples = load(tmp_path, net)
    found = {
        origin.place: y
        for origin, y in zip(samples.origins, samples.batch.y.tolist(), strict=True)
    }
    assert found == {"cat/1.png": 0, "dog/2.jfif": 1, "dog/3.jp2": 1}
    assert notes(samples) == {}
    picture(tmp_path / "dog" / "more" / "4.png")
    (tmp_path / "cat" / "5.heic").write_bytes(b"a picture of a phone")
    left_out = [n.text for n in load(tmp_path, net).notes if n.code == "files-left-out"]
    assert left_out == [
        "1 images in deeper folders were not read (the first: dog/more/4.png)",
        "1 files of other formats were not read (the first: cat/5.heic)",
    ]
    deep = tmp_path / "deep"
    picture(deep / "train" / "cat" / "1.png")
    assert f"try --data {deep / 'train'}" in refused(deep, net)


MODES = {
    "RGBA": ("transparency", "a.png"), "LA": ("transparency", "a.png"), "P": (None, "a.gif"),
    "CMYK": (None, "a.jpg"), "1": (None, "a.bmp"), "YCbCr": (None, "a.tif"), "L": (None, "a.webp"),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_becomes_colours_and_lost_transparency_is_named(tmp_path, image_taker, mode):
    code, name = MODES[mode]
    colour = Image.new("RGB", (8, 8), (250, 250, 250))
    colour.convert(mode).save(tmp_path / name)
    samples = load(tmp_path, image_taker())
    with Image.open(tmp_path / name) as image:
        expected = np.asarray(image.convert("RGB")).transpose(2, 0, 1) / 255
        stored = image.mode
    np.testing.assert_allclose(samples.batch.x[0], expected, atol=1e-7)
    assert set(notes(samples)) == ({code} if code else set())
    assert stored == "RGB" or f"{stored} to RGB" in "; ".join(samples.steps)


def test_a_palette_with_a_clear_colour_and_an_animation(tmp_path, image_taker):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ((250, 0, 0), (0, 250, 0))]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    clear = Image.new("P", (8, 8), 0)
    clear.putpalette([0, 0, 250])
    clear.save(tmp_path / "b.png", transparency=0)
    for suffix in ("tif", "webp", "apng"):
        frames[0].save(
            tmp_path / f"c.{suffix}", save_all=True, append_images=frames[1:], lossless=True
        )
    samples = load(tmp_path, image_taker())
    by_place = {
        o.place: x[:, 0, 0].tolist() for o, x in zip(samples.origins, samples.batch.x, strict=True)
    }
    for name in ("a.gif", "c.tif", "c.webp", "c.apng"):
        assert by_place[name] == pytest.approx([250 / 255, 0, 0])
    assert by_place["b.png"] == pytest.approx([0, 0, 250 / 255])
    said = notes(samples)
    assert said["first-frame"].startswith("4 of 5 images (the first: ")
    assert said["transparency"].startswith("1 of 5 images (the first: b.png)")


def test_resizing_by_choice():
    """Against Pillow's own crop: what covers the size, the model's steps, or none."""
    image = Image.fromarray(DRAW.integers(0, 256, (20, 20, 3), dtype=np.uint8))
    small = image.resize((8, 8), Image.Resampling.BICUBIC)
    plain = torch.from_numpy(np.asarray(small).transpose(2, 0, 1) / np.float32(255))
    half = {"Half": lambda i: Resizing((3, 8, 8))(i.crop((5, 5, 15, 15)))}
    cropped = half["Half"](image)
    assert torch.equal(Resizing((3, 8, 8))(image), plain)
    assert torch.equal(Resizing((3, 8, 8), half)(image), cropped)
    assert torch.equal(Resizing((3, 8, 8), half, "resize")(image), plain)
    assert torch.equal(Resizing((3, 8, 8), half)(small), plain)
    at_size = {"Dark": lambda i: Resizing((3, 8, 8))(i) / 2}
    assert torch.equal(Resizing((3, 8, 8), at_size, "model")(small), plain / 2)
    assert torch.equal(Resizing((3, 8, 8), half, "none")(small), plain)
