"""Rows of attention one by one: the files, and how rows are distributed in each layer."""

import csv
import io

import numpy as np
import pytest
import torch

import lipaudit
from lipaudit.data.batch import Batch
from lipaudit.errors import UsageError
from lipaudit.measures.attention import ATTENTION, AttentionOptions, measure, summarise
from lipaudit.measures.attention_rows import CLASSES, KEYS, STATISTICS, encode_rows
from tests.measures.test_attention import by_hand, swin_maps, text_maps, text_model, text_net
from tests.models.conftest import batch_for, build


def small_swin():
    net = build("timm-swin", "float64")
    batch = batch_for(net)
    return net, batch, swin_maps(net, batch)


def ragged_bert():
    net = text_net(text_model("Bert"))
    mask = torch.ones(2, 14, dtype=torch.bool)
    mask[1, 9:] = False
    batch = Batch(torch.randint(1, 60, (2, 14)), None, ("aa", "bb"), mask)
    return net, batch, text_maps(net, batch)


@pytest.mark.parametrize("model", [small_swin, ragged_bert])
def test_every_row_of_the_models_own_maps_is_in_the_file(model, tmp_path):
    torch.manual_seed(3)
    net, batch, layers = model()
    options = AttentionOptions(rows=tmp_path / "rows.npz")
    parts = list(measure(net, [batch], options))
    table = np.load(io.BytesIO(encode_rows(parts, ".npz")))
    found = 0
    for index, maps in enumerate(layers):
        for sample, of_sample in zip(batch.ids, maps, strict=True):
            for window, head in np.ndindex(of_sample.shape[:2]):
                rows = of_sample[window, head].numpy()
                place = {"sample": sample, "layer": index, "head": head, "window": window}
                here = np.all([table[name] == value for name, value in place.items()], 0)
                assert table["row"][here].tolist() == list(range(len(rows)))
                expected = [by_hand(row, options) for row in rows]
                for name in STATISTICS:
                    want = [each[name] for each in expected]
                    np.testing.assert_allclose(table[name][here], want, rtol=1e-6, atol=1e-9)
                found += len(rows)
    assert found == len(table["row"]) > 0


def test_shares_of_the_picture_are_those_of_the_rows_of_the_file(tmp_path):
    torch.manual_seed(3)
    net, batch, _ = ragged_bert()
    parts = list(measure(net, batch.split(1), AttentionOptions(rows=tmp_path / "rows.npz")))
    assert {part.values["rows.0"].shape[3] for part in parts} == {14, 9}
    table = np.load(io.BytesIO(encode_rows(parts, ".npz")))
    (section,) = summarise(parts, AttentionOptions())
    values = {"top_two": table["top1"] + table["top2"], "tightness": table["g1_ratio"]}
    for name, lower in CLASSES.items():
        shares = section.arrays[f"{name}@layers"].numpy()
        for layer in np.unique(table["layer"]):
            of_layer = values[name][table["layer"] == layer]
            # The smallest ratio is 1 but for rounding; NaN is in no class.
            of_layer = np.maximum(of_layer[~np.isnan(of_layer)], lower[0])
            counts, _ = np.histogram(of_layer, [*lower, np.inf])
            # Reports store arrays to six digits.
            assert shares[layer] == pytest.approx(counts / len(of_layer), rel=5e-6)


def test_the_command_writes_both_files_alike(tmp_path):
    names = (tmp_path / "rows.csv", tmp_path / "rows.npz")
    for name in names:
        report = lipaudit.measure("demo", "attention", samples=3, rows=name)
    with names[0].open() as file:
        lines = list(csv.DictReader(file))
    columns = np.load(names[1])
    assert list(lines[0]) == [*KEYS, *STATISTICS]
    assert len(lines) == len(columns["g1"]) == 3 * 12 * 17
    for name in STATISTICS:
        typed = [float(line[name] or "nan") for line in lines]
        np.testing.assert_allclose(typed, columns[name], rtol=1e-8)
    for row in report.section("attention").rows:
        here = (columns["layer"] == row.layer) & (columns["head"] == row.head)
        assert columns["g1"][here].mean() == pytest.approx(row.g1, rel=1e-6)
        assert np.nanmean(columns["intermediate"][here]) == pytest.approx(row.intermediate)


def test_without_the_option_no_row_is_kept():
    torch.manual_seed(3)
    net, batch, _ = ragged_bert()
    (part,) = measure(net, [batch], AttentionOptions())
    assert not any(name.startswith("rows.") for name in part.values)


def test_a_file_of_another_kind_is_refused():
    with pytest.raises(UsageError, match=r"rows: 'rows.parquet': it must end in .csv or .npz"):
        ATTENTION.options.parse({"rows": "rows.parquet"})
