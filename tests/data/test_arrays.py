"""Arrays and tables as other programs write them."""

import csv

import numpy as np
import pytest
import torch

from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import InputError

RNG = np.random.default_rng(0)
X = RNG.random((4, 3, 8, 8)).astype(np.float32)
Y = np.array([0, 1, 2, 1])


def read(path, net):
    """Return the samples in the order of the file."""
    samples = load_data(str(path), net, DataOptions(samples=4))
    order = [int(origin.place.removeprefix("index ")) for origin in samples.origins]
    return samples.batch.x[np.argsort(order)], samples.batch.y[np.argsort(order)]


@pytest.mark.parametrize("kind", [">f4", ">f8", "<f4"])
@pytest.mark.parametrize("label", ["y", "label", "labels"])
def test_byte_order_and_the_name_of_labels_do_not_matter(kind, label, tmp_path, image_taker):
    np.savez(tmp_path / "a.npz", x=X.astype(kind), **{label: Y.astype(">i8")})
    x, y = read(tmp_path / "a.npz", image_taker(classes=3))
    assert torch.equal(x, torch.from_numpy(X))
    assert y.tolist() == Y.tolist()


@pytest.mark.parametrize(("off", "fits"), [(1e-7, True), (-1e-7, True), (2e-6, False)])
def test_values_beyond_the_box_by_rounding_are_cut(off, fits, tmp_path, image_taker):
    x = X.copy()
    x[0, 0, 0, 0] = max(0.0, np.sign(off)) + 1.2 * off
    np.savez(tmp_path / "a.npz", x=x, y=Y)
    if fits:
        found, _ = read(tmp_path / "a.npz", image_taker(classes=3))
        assert torch.equal(found, torch.from_numpy(x).clamp(0, 1))
        return
    with pytest.raises(InputError) as refused:
        read(tmp_path / "a.npz", image_taker(classes=3))
    # The message shows in which digit the value is outside.
    assert "1.000002; the model takes [0, 1]" in refused.value.message


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_texts_longer_than_a_field_of_python_are_read(suffix, tmp_path, text_taker):
    long, before = "word " * 30_000, csv.field_size_limit()
    separator = "," if suffix == ".csv" else "\t"
    text = f"text{separator}label\n{long}{separator}1\nshort one{separator}0\n"
    (tmp_path / f"a{suffix}").write_text(text)
    net, options = text_taker(classes=2), DataOptions(samples=2)
    batch = load_data(str(tmp_path / f"a{suffix}"), net, options).batch
    assert sorted(batch.y.tolist()) == [0, 1]
    assert csv.field_size_limit() == before
