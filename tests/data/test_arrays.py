"""Array files: layouts, ranges, labels; IDX files, which MNIST and its kin come in."""

import gzip
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lipaudit.data.images import KINDS, load_arrays
from lipaudit.data.loading import DataOptions, SampleForm, find_data_forms, load_data
from lipaudit.errors import InputError

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


def test_safetensors_read_as_npz(tmp_path, image_taker):
    arrays = {"x": torch.from_numpy(BYTES), "y": torch.arange(6)}
    save_file(arrays, tmp_path / "a.safetensors")
    path = saved(tmp_path / "a.npz", x=BYTES, y=np.arange(6))
    net = image_taker(classes=6)
    twins = [load_data(p, net, ALL).batch for p in (path, str(tmp_path / "a.safetensors"))]
    assert twins[0].ids == twins[1].ids


def test_float_sequences_have_no_range(tmp_path, token_taker):
    x = RNG.normal(size=(6, 5, 4)) * 100
    batch = load_data(saved(tmp_path / "a.npz", x=x), token_taker(), ALL).batch
    torch.testing.assert_close(batch.x, torch.from_numpy(x)[ORDER].float())


def test_token_ids(tmp_path, text_taker):
    ids = RNG.integers(0, 100, (6, 7))
    batch = load_data(saved(tmp_path / "a.npz", x=ids), text_taker(), ALL).batch
    assert batch.x.tolist() == ids[ORDER].tolist()
    assert batch.mask is None


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
        (
            np.full(6, 3),
            f"index {ORDER[0]}: the class 3 is not one of the model's 3 classes (0 to",
        ),
        (np.full(6, -1), "the class -1 is not one of"),
        (np.arange(5), "labels of shape (5,)"),
        (np.eye(6), "labels of shape (6, 6)"),
        (np.zeros(6), "float64 labels"),
    ],
)
def test_labels_that_are_refused(tmp_path, image_taker, refused, y, message):
    assert message in refused(saved(tmp_path / "a.npz", x=BYTES, y=y), image_taker(classes=3))


def test_arrays_of_other_names_are_listed(tmp_path, image_taker, refused):
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


def test_labels_are_not_needed(tmp_path):
    assert load_arrays(written(tmp_path / "x-images-idx3-ubyte", IMAGES))[1] is None


@pytest.mark.parametrize("kind", CODES)
def test_numbers_of_every_type(tmp_path, kind):
    values = np.array([[1, 2, 3], [-4, 5, 100]]).astype(kind)
    read, _ = load_arrays(written(tmp_path / "a-idx2-ubyte", values))
    assert read.tolist() == values.tolist()


def test_a_file_of_labels_is_no_data(tmp_path):
    path = written(tmp_path / "t10k-labels-idx1-ubyte", np.arange(5, dtype=np.uint8))
    with pytest.raises(InputError, match="has no samples") as caught:
        load_arrays(path)
    assert "images" in caught.value.advice
