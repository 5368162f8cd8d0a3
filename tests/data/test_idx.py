"""IDX files: what MNIST and its kin come in."""

import gzip
import struct

import numpy as np
import pytest
import torch

from lipaudit.data.arrays import KINDS, read_idx
from lipaudit.data.loading import DataOptions, SampleForm, find_data_forms, load_data
from lipaudit.errors import InputError

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 4, 6), dtype=np.uint8)
CODES = {np.dtype(kind).newbyteorder("="): code for code, kind in KINDS.items()}


def written(path, array, *, cut=None):
    """Write an array as the format's page says."""
    head = struct.pack(f">BBBB{array.ndim}i", 0, 0, CODES[array.dtype], array.ndim, *array.shape)
    data = (head + array.astype(array.dtype.newbyteorder(">")).tobytes())[:cut]
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
    assert set(read_idx(written(tmp_path / "x-images-idx3-ubyte", IMAGES))) == {"x"}


@pytest.mark.parametrize("kind", CODES)
def test_numbers_of_every_type(tmp_path, kind):
    values = np.array([[1, 2, 3], [-4, 5, 100]]).astype(kind)
    read = read_idx(written(tmp_path / "a-idx2-ubyte", values))["x"]
    assert read.tolist() == values.tolist()


@pytest.mark.parametrize("cut", [0, 2, 9, -1])
@pytest.mark.parametrize("name", ["a-idx3-ubyte", "a-idx3-ubyte.gz"])
def test_a_damaged_file_is_named(tmp_path, name, cut):
    path = written(tmp_path / name, IMAGES, cut=cut)
    with pytest.raises(InputError, match=f"{name} is not a readable IDX file"):
        read_idx(path)


def test_half_an_archive_is_named(tmp_path):
    path = written(tmp_path / "a-idx3-ubyte.gz", IMAGES)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match="not a readable IDX file"):
        read_idx(path)


def test_a_file_of_labels_is_no_data(tmp_path):
    path = written(tmp_path / "t10k-labels-idx1-ubyte", np.arange(5, dtype=np.uint8))
    with pytest.raises(InputError, match="not inputs") as caught:
        read_idx(path)
    assert "images" in caught.value.advice
