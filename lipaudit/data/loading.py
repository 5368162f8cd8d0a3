"""The --data argument: which source it names, and the samples it gives."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path

from torch import Tensor

from lipaudit.data.arrays import draw_arrays, holds_arrays, read_arrays
from lipaudit.data.continuations import read_continuations
from lipaudit.data.drawing import Drawn, to_batch
from lipaudit.data.hub_sets import read_dataset
from lipaudit.data.images import read_folder
from lipaudit.data.intake import DataOptions as DataOptions
from lipaudit.data.intake import Intake, remark, warning
from lipaudit.data.intake import Samples as Samples
from lipaudit.data.synthetic import random_samples
from lipaudit.data.tables import TABLES, read_rows
from lipaudit.data.text import read_table, read_text
from lipaudit.errors import InputError, UsageError, neighbours, suggestion
from lipaudit.results import Note

DIGIT_FILES = {"demo": "digits_test.npz", "demo:train": "digits_train.npz"}
SOME_TOKENS = 16
"""More tokens than a tokenizer puts around a text."""
MOST_UNKNOWN = 1 / 3
"""Share of unknown tokens above which a warning says so. SentencePiece gives an unknown word two
tokens, of which one is the space: half of the tokens are all of the words there."""
FORMS = (
    "demo, demo:train, random, a folder of images, .npz, .safetensors, an IDX file, .csv, "
    ".tsv, .jsonl, .parquet, .txt, hf:NAME[SPLIT]"
)


def load_data(spec: str | None, net: Intake, options: DataOptions | None = None) -> Samples:
    """Load the samples that a --data argument names, in the form the model takes.

    The forms: `demo` (360 handwritten digits); `demo:train` (the 1437 that the demo models were
    trained on); `random`; a folder of images, sub-folders being classes; `.npz` or `.safetensors`
    with x and perhaps y; an IDX file of images (`t10k-images-idx3-ubyte.gz`), the labels beside
    it; `.csv`, `.tsv`, `.jsonl`, `.parquet` with a column of texts or two of pairs; `.txt`;
    `hf:NAME[/CONFIGURATION][[SPLIT]][@REVISION]`. None is `demo` for the demo
    models and `random` for others.

    Raises:
        UsageError: no samples are asked for.
        InputError: the data are missing, damaged, or not what the model takes.
    """
    options = options or DataOptions()
    if options.samples < 1:
        raise UsageError(
            f"--samples {options.samples} leaves nothing to measure", "Give 1 or more."
        )
    spec = spec or ("demo" if net.info.source == "demo" else "random")
    return _samples(spec, _read(spec, net, options), net, options)


def own_samples(x: Tensor, y: Tensor | None, net: Intake, options: DataOptions) -> Samples:
    """Draw samples from tensors that are at hand, in the form the model takes.

    Args:
        x: images (samples, channels, height, width), float sequences (samples, tokens, width) or
            token ids (samples, tokens).
        y: labels (samples,), or None.
        net: the model.
        options: how many, and by which seed.

    Raises:
        InputError: of another shape than the model takes, or values out of range.
    """
    return _samples("tensors", draw_arrays(x, y, net, options, origin="x"), net, options)


def _samples(spec: str, drawn: Drawn, net: Intake, options: DataOptions) -> Samples:
    notes = drawn.notes + _unknown(drawn, net)
    if len(drawn.x) < options.samples:
        text = f"{spec} has {len(drawn.x)} samples, {options.samples} were asked for"
        notes += (remark("fewer-samples", text),)
    if drawn.commit is not None:
        notes += (drawn.commit.note,)
    origins = tuple(drawn.origins)
    return Samples(spec, to_batch(drawn, net), notes, drawn.commit, origins, drawn.task)


def _unknown(drawn: Drawn, net: Intake) -> tuple[Note, ...]:
    """Warn where most tokens of the texts are unknown to the tokenizer."""
    if net.unknown_id is None or net.tokenize is None:
        return ()
    around = len(net.tokenize("", SOME_TOKENS))
    count = sum(max(len(ids) - around, 0) for ids in drawn.x)
    unknown = sum(int((ids % (net.vocabulary or 1) == net.unknown_id).sum()) for ids in drawn.x)
    if unknown <= MOST_UNKNOWN * count:
        return ()
    text = (
        f"{100 * unknown / count:.0f} % of the tokens are unknown to the tokenizer: the model "
        "reads the same id for all of them. Check that the tokenizer belongs to this model, and "
        "that the texts are in its language, spelling and case"
    )
    return (warning("unknown-tokens", text),)


def _read(spec: str, net: Intake, options: DataOptions) -> Drawn:
    if spec == "random":
        return random_samples(net, options)
    if spec in DIGIT_FILES:
        return _digits(spec, net, options)
    if spec.startswith("hf:"):
        return read_dataset(spec.removeprefix("hf:"), net, options)
    path = Path(spec)
    if path.is_dir():
        return read_folder(path, net, options)
    if not path.is_file():
        known = (*DIGIT_FILES, "random", *neighbours(path))
        advice = suggestion(spec, known, f"--data is one of: {FORMS}.")
        raise InputError(f"there is no data {spec!r}", advice)
    return _read_file(path, net, options)


def _read_file(path: Path, net: Intake, options: DataOptions) -> Drawn:
    if holds_arrays(path):
        return read_arrays(path, net, options)
    if path.suffix not in (*TABLES, ".txt"):
        raise InputError(f"{path} is of no kind that is read", f"--data is one of: {FORMS}.")
    if net.kind != "text":
        raise InputError(
            f"{path} holds text; the model takes {net.kind}", "Give a folder or an .npz file."
        )
    if options.scored and path.suffix in TABLES:
        table = read_rows(path, options)
        drawn = read_continuations(table.rows, net, table.options, origin=str(path))
        return replace(drawn, notes=table.notes + drawn.notes)
    return (read_text if path.suffix == ".txt" else read_table)(path, net, options)


def _digits(spec: str, net: Intake, options: DataOptions) -> Drawn:
    if net.kind != "image" or tuple(net.sample_shape) != (1, 8, 8):
        raise InputError(
            f"--data {spec} is handwritten digits of 1x8x8 pixels; the model takes {net.kind} of "
            f"shape {tuple(net.sample_shape)}",
            "Give your own data, or --data random.",
        )
    with as_file(files("lipaudit.data") / "assets" / DIGIT_FILES[spec]) as path:
        return read_arrays(path, net, options)
