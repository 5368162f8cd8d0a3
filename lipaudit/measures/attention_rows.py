"""Attention rows one by one: a file of their values, and how they are distributed in each layer.

[Y25] Fig. 3 shows g_1/||M|| over the rows of a head. It can be drawn again from the file.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lipaudit.measures.base import Arrays, Part

if TYPE_CHECKING:
    from torch import Tensor

    from lipaudit.measures.layers import Reduced

CSV = ".csv"
NPZ = ".npz"
# Statistics of rows with a mean over all rows, in the order of the arrays, by their names in
# `softmax.row_statistics`.
MEANS = (
    "top1",
    "top2",
    "g1",
    "softmax_norm",
    "g1_ratio",
    "gk_ratio",
    "entropy",
    "entropy_normalized",
    "support",
    "uniform",
    "intermediate",
    "categorical",
)
# Statistics of a row in the file. The file has the entropy in nats only.
STATISTICS = tuple(name for name in MEANS if name != "entropy_normalized")
# Columns of the file that name a row.
KEYS = ("sample", "layer", "head", "window", "row")
# Name of the array with the rows of a layer, behind which its index follows.
ROWS = "rows."
# Lower ends of the classes that rows are counted in; the last class has no upper end. p(1) + p(2)
# lies in (0, 1], and g_1/||M|| begins at 1.
CLASSES = {
    "top_two": tuple(i / 10 for i in range(10)),
    "tightness": (1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.1, 1.15, 1.2, 1.25),
}


def keep_rows(by_row: Mapping[str, Tensor], sample: Tensor, samples: int) -> Tensor:
    """Return the statistics of rows by sample: (samples, heads, windows, rows, statistics).

    Layers that attend within windows of a sample (Swin) have several windows per sample. All other
    layers have one window. Samples with fewer windows are padded with NaN.

    Args:
        by_row: statistics of each row, (windows of all samples, heads, rows).
        sample: index of the sample of each window.
        samples: number of samples.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    # (windows of all samples, heads, rows, statistics), then one tensor per sample.
    rows = torch.stack([by_row[name] for name in STATISTICS], -1)
    by_sample = [rows[sample == i] for i in range(samples)]
    # (samples, windows, heads, rows, statistics).
    padded = pad_sequence(by_sample, batch_first=True, padding_value=torch.nan)
    return padded.transpose(1, 2)


def count_rows(by_row: Mapping[str, Tensor], sample: Tensor, samples: int) -> Reduced:
    """Count the rows of each sample and head in every class of `CLASSES`, for histograms.

    There are two histograms, (samples, heads, classes): `top_two`, of p(1) + p(2), the two largest
    entries of a row p; and `tightness`, of g_1 / ||M||, how far the bound g_1 =
    p(1) (1 - p(1) + p(2)) exceeds the norm of the row's softmax Jacobian M = diag(p) - p p^T.

    Args:
        by_row: statistics of each row, (windows of all samples, heads, rows); NaN at padding.
        sample: index of the sample of each window.
        samples: number of samples.
    """
    import torch

    from lipaudit.measures.layers import sum_windows

    values = {"top_two": by_row["top1"] + by_row["top2"], "tightness": by_row["g1_ratio"]}
    counts = {}
    for name, lower in CLASSES.items():
        # `lower` has the lower end of each class. All values below lower[1] are in class 0.
        ends = sample.new_tensor(lower[1:], dtype=torch.float64)
        class_of_row = torch.bucketize(values[name], ends, right=True)
        known = ~values[name].isnan()  # a row without a value is in no class
        # (windows, heads, rows, classes): 1 for the class of the row.
        members = torch.nn.functional.one_hot(class_of_row, len(lower)) * known[..., None]
        counts[name] = sum_windows(members.sum(-2), sample, samples)
    return counts


def join_counts(arrays: Arrays, layers: Sequence[int]) -> Arrays:
    """Return the histograms of the rows of each layer: their share in every class of `CLASSES`.

    They have the shape (classes, layers), by the name NAME@layers of an array.

    Args:
        arrays: counts by name, (samples, heads of all layers, classes); older parts have none.
        layers: layer of each head.
    """
    import numpy as np

    shares = {}
    for name in CLASSES:
        if name not in arrays:
            continue
        by_head = arrays[name].sum(0)
        by_layer = []
        for layer in dict.fromkeys(layers):
            by_layer.append(by_head[np.array(layers) == layer].sum(0))
        counts = np.array(by_layer, dtype=np.float64)  # (layers, classes)
        total = counts.sum(1, keepdims=True)
        with np.errstate(invalid="ignore"):
            shares[f"{name}@layers"] = (counts / total).T
    return shares


def encode_rows(parts: Sequence[Part], suffix: str) -> bytes:
    """Return the file of all rows: a line per row in CSV, or a column per array in NPZ."""
    import numpy as np

    tables = [columns for part in parts for columns in _list_rows(part)]
    names = (*KEYS, *STATISTICS)
    columns = {name: np.concatenate([table[name] for table in tables]) for name in names}
    if suffix == NPZ:
        content = io.BytesIO()
        # `Any`, as a type checker takes the keyword arguments for the flag `allow_pickle`.
        save: Any = np.savez_compressed
        save(content, **columns)
        return content.getvalue()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(_format_lines(columns))
    return text.getvalue().encode()


def _list_rows(part: Part) -> Iterator[Arrays]:
    """Yield the rows of each layer of a part, by column; padded queries are left out."""
    import numpy as np

    ids = np.array(part.ids)
    for name, values in part.values.items():
        if not name.startswith(ROWS):
            continue
        # (samples, heads, windows, rows): False at padding, which is NaN.
        is_row = ~np.isnan(values[..., 0])
        sample, head, window, row = np.nonzero(is_row)
        columns = dict(zip(STATISTICS, values[is_row].T, strict=True))
        columns["sample"] = ids[sample]
        columns["layer"] = np.full(len(sample), int(name.removeprefix(ROWS)))
        yield columns | {"head": head, "window": window, "row": row}


def _format_lines(columns: Arrays) -> Iterable[Sequence[Any]]:
    """Yield the cells of each line of a CSV: statistics with 9 digits, empty in place of NaN.

    Args:
        columns: the values of each column, one per line.
    """
    cells_of_columns = []
    for name, values in columns.items():
        cells = values.tolist()
        if name in STATISTICS:
            cells = ["" if math.isnan(cell) else f"{cell:.9g}" for cell in cells]
        cells_of_columns.append(cells)
    return zip(*cells_of_columns, strict=True)  # from columns to lines
