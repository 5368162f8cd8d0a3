"""The --data argument: find its source, and load the samples."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lipaudit.data import arrays, grouping, tables, texts
from lipaudit.data.arrays import SampleForm, to_box
from lipaudit.data.batch import DataOptions as DataOptions
from lipaudit.data.batch import SampleOrigin, make_batch
from lipaudit.data.batch import Samples as Samples
from lipaudit.data.continuations import read_continuations
from lipaudit.data.hub import read_dataset
from lipaudit.data.image_files import find_common_shape
from lipaudit.errors import InputError, UsageError, neighbours, suggestion
from lipaudit.tables import Note, Notes
from lipaudit.tables.formats import format_count

if TYPE_CHECKING:
    from lipaudit.models.net import Net

DIGIT_FILES = {"demo": "digits_test.npz", "demo:train": "digits_train.npz"}
# Standard deviation of the pixels of random images; about that of photographs.
CONTRAST = 0.2
# More tokens than the special tokens that a tokenizer adds to a text.
SOME_TOKENS = 16
# Share of unknown tokens that gives a warning. SentencePiece splits an unknown word into two
# tokens, one of which is the space: if all words are unknown, half of the tokens are.
MOST_UNKNOWN = 1 / 3
# Share of the range of pixels that some pixel of any usual set of images exceeds.
DARK = 1 / 4
FORMS = (
    "--data is one of: demo, demo:train, random, a folder of images, .npz, .safetensors, an IDX "
    "file, .csv, .tsv, .jsonl, .parquet, .txt, hf:NAME[SPLIT]."
)


def load_data(spec: str | None, net: Net, options: DataOptions | None = None) -> Samples:
    """Load the samples of a --data argument, in the form that the model takes.

    Forms of --data: `demo` (360 handwritten digits); `demo:train` (the 1437 digits that the demo
    models were trained on); `random`; a folder of images with one sub-folder per class; `.npz` or
    `.safetensors` with x and optionally y; an IDX file of images (`t10k-images-idx3-ubyte.gz`)
    with its labels beside it; `.csv`, `.tsv`, `.jsonl`, `.parquet` with a column of texts, or two
    columns of pairs; `.txt`; `hf:NAME[/CONFIGURATION][[SPLIT]][@REVISION]`. None means `demo` for
    the demo models and `random` for others.

    Raises:
        UsageError: the number of samples is 0.
        InputError: the data are missing, damaged, or do not fit the model.
    """
    options = options or DataOptions()
    if options.samples < 1:
        raise UsageError(
            f"--samples {options.samples} leaves no sample to measure", "Give 1 or more."
        )
    spec = spec or ("demo" if net.source == "demo" else "random")
    if spec == "random":
        samples = _make_random(net, options)
    elif spec in DIGIT_FILES:
        samples = _draw_digits(spec, net, options)
    elif spec.startswith("hf:"):
        table, commit = read_dataset(spec.removeprefix("hf:"), offline=options.offline)
        samples = replace(_draw_from_table(table, net, options), commit=commit)
    else:
        samples = _draw_from_path(Path(spec), net, options)
    return _complete_samples(samples, spec, net, options)


def _draw_digits(spec: str, net: Net, options: DataOptions) -> Samples:
    """Draw handwritten digits that come with lipaudit.

    Raises:
        InputError: the model takes other samples than images of 8 x 8 grey pixels.
    """
    shape = tuple(net.input_shape)
    if net.kind != "image" or shape != (1, 8, 8):
        raise InputError(
            f"--data {spec} is handwritten digits of 1x8x8 pixels; the model takes {net.kind} of "
            f"shape {shape}",
            "Give your own data, or --data random.",
        )
    with as_file(files("lipaudit.data") / "assets" / DIGIT_FILES[spec]) as file:
        return _draw_from_arrays(file, net, options)


def _draw_from_path(path: Path, net: Net, options: DataOptions) -> Samples:
    """Draw samples from a folder of images, or from a file of arrays or texts.

    Raises:
        InputError: the model takes another kind of samples, or the data are missing or damaged.
    """
    if path.is_dir():
        if net.kind != "image":
            raise InputError(
                f"{path} is a folder of images; the model takes {net.kind}",
                "Give --data a text file, an .npz file, or random.",
            )
        return _draw_from_table(tables.read_folder(path), net, options)
    if _are_arrays(path):
        return _draw_from_arrays(path, net, options)
    if net.kind != "text":
        raise InputError(
            f"{path} holds text; the model takes {net.kind}", "Give a folder or an .npz file."
        )
    if path.suffix == ".txt":
        return texts.read_text(path, net, options)
    return _draw_from_table(tables.read_table(path), net, options)


def _draw_from_arrays(path: Path, net: Net, options: DataOptions) -> Samples:
    """Draw samples from a file of arrays."""
    x, y = arrays.load_arrays(path)
    return arrays.draw_arrays(x, y, net, options, origin=str(path))


def _draw_from_table(table: tables.SampleTable, net: Net, options: DataOptions) -> Samples:
    """Draw samples from a table, with groups if --group-column names a column of the table."""
    if options.scored and net.kind == "text":
        samples = read_continuations(table, net, options)
    else:
        samples = tables.draw_table(table, net, options)
    name = options.group_column
    if name is None or (name == grouping.CLASSES and name not in table.columns):
        return samples
    return grouping.group_by_column(samples, table, name)


def draw_tensors(x: Tensor, y: Tensor | None, net: Net, options: DataOptions) -> Samples:
    """Draw samples from tensors in memory, in the form that the model takes.

    Args:
        x: images (samples, channels, height, width), float sequences (samples, tokens, width) or
            token ids (samples, tokens).
        y: labels (samples,), or None.
        net: the model.
        options: number of samples and seed.

    Raises:
        InputError: the shape does not fit the model, or values are out of range.
    """
    samples = arrays.draw_arrays(x, y, net, options, origin="x")
    return _complete_samples(samples, "tensors", net, options)


def find_data_forms(spec: str | None) -> tuple[SampleForm, ...]:
    """Return the possible kinds and shapes of the samples of a --data argument; empty if unknown.

    Known are the demo digits, folders of images of the same size, and arrays. The axes of an array
    may be read in several ways, so arrays may have several forms.

    Raises:
        InputError: the file is missing or damaged.
    """
    if spec in DIGIT_FILES:
        return (SampleForm("image", (1, 8, 8)),)
    if not spec or spec == "random" or spec.startswith("hf:"):
        return ()
    path = Path(spec)
    if path.is_dir():
        shape = find_common_shape(path)
        if shape is None:
            return ()
        return (SampleForm("image", shape),)
    if _are_arrays(path):
        return arrays.list_forms(arrays.load_arrays(path)[0])
    return ()


def _are_arrays(path: Path) -> bool:
    """Return whether a file contains arrays (True) or texts (False).

    Raises:
        InputError: the file does not exist, or has an unsupported format.
    """
    if not path.is_file():
        raise InputError(
            f"there is no data {str(path)!r}",
            suggestion(str(path), (*DIGIT_FILES, "random", *neighbours(path)), FORMS),
        )
    if arrays.holds_arrays(path):
        return True
    if path.suffix not in (*tables.SUFFIXES, ".txt"):
        raise InputError(f"{path} has an unsupported format", FORMS)
    return False


def _complete_samples(samples: Samples, spec: str, net: Net, options: DataOptions) -> Samples:
    """Return samples with the --data argument, groups by class, and notes common to all data."""
    samples = replace(samples, spec=spec)
    has_groups = any(origin.group for origin in samples.origins)
    # If no column of a table gave groups, --group-column classes groups samples by their labels.
    if options.group_column is not None and not has_groups:
        samples = grouping.group_by_class(samples, net, options.group_column)
    notes = samples.notes + _note_unknown(samples, net) + _note_dark(samples, net)
    count = len(samples.batch)
    if count < options.samples:
        text = f"{spec} has {format_count(count)}, fewer than the {options.samples} requested"
        notes += (Note.info("fewer-samples", text),)
    if samples.commit is not None:
        notes += (samples.commit.note,)
    return replace(samples, notes=notes)


def _note_unknown(samples: Samples, net: Net) -> Notes:
    """Return a warning if the tokenizer does not know many of the tokens; else no notes."""
    x = samples.batch.x
    mask = samples.batch.mask
    if net.unknown_id is None or net.tokenize is None:
        return ()
    if mask is None:
        mask = torch.ones_like(x, dtype=torch.bool)
    # The number of special tokens around each text: an empty text consists of them alone. They are
    # not counted.
    special = len(net.tokenize("", SOME_TOKENS))
    count = int((mask.sum(1) - special).clamp_min(0).sum())
    # Token `id` of continuation i of a prompt is stored as id + i * vocabulary.
    ids = x % (net.vocabulary or 1)
    unknown = int((mask & (ids == net.unknown_id)).sum())
    # A tokenizer may read an empty text as an unknown token. Then `count` may be too small, or 0.
    share = unknown / max(count, unknown, 1)
    if share <= MOST_UNKNOWN:
        return ()
    text = (
        f"{100 * share:.0f}% of the tokens are unknown to the tokenizer: the model "
        "reads the same id for all of them. Check that the tokenizer belongs to this model, and "
        "that the texts are in its language and case"
    )
    return (Note.warn("unknown-tokens", text),)


def _note_dark(samples: Samples, net: Net) -> Notes:
    """Return a warning if no image has a bright pixel: the data may have a smaller range."""
    if net.kind != "image" or net.box is None:
        return ()
    low, high = net.box  # black and white
    brightest = (float(samples.batch.x.max()) - low) / (high - low)
    if brightest >= DARK:
        return ()
    text = (
        f"the brightest pixel of all samples is {255 * brightest:.3g} of 255. If the data have "
        "another range, such as 0 to 1 or 0 to 16, scale them to the whole range"
    )
    return (Note.warn("dark-images", text),)


def _make_random(net: Net, options: DataOptions) -> Samples:
    """Make samples without labels: 1/f noise for images, a fixed text, or Gaussian tokens."""
    rng = torch.Generator().manual_seed(options.seed)
    notes: Notes = ()
    origins: list[SampleOrigin] = []
    shape = net.input_shape
    count = options.samples
    if net.kind == "image":
        what = "1/f noise"
        x = [to_box(_make_noise(shape, rng), net.box) for _ in range(count)]
    elif net.kind == "tokens":
        what = "Gaussian tokens"
        x = [torch.randn(shape, generator=rng) for _ in range(count)]
        if net.box is not None:  # values have limits
            what = "Gaussian noise within the limits of the model"
            x = [to_box((0.5 + CONTRAST * tokens).clamp(0, 1), net.box) for tokens in x]
    elif net.tokenize is not None:
        story = (files("lipaudit.data") / "assets" / "text.txt").read_text("utf-8")
        what = "a text that comes with lipaudit"
        # `after` appends the text to itself, so that windows at its end are as long as others.
        x, origins, notes = texts.cut_windows(story, net, options, origin="random", after=story)
    else:
        what = "random token ids"
        length, notes = texts.limit_tokens(net, options)
        x = [*_draw_token_ids(net, (count, length), rng)]
    text = (
        f"--data random: the samples are {what}. The results depend on the samples, so give "
        "real data with --data"
    )
    notes = (Note.warn("random-data", text), *notes)
    return Samples(make_batch(x, net), notes, origins=tuple(origins))


def _draw_token_ids(net: Net, shape: tuple[int, int], rng: torch.Generator) -> Tensor:
    """Draw random token ids of a shape (samples, tokens) for a model without a tokenizer."""
    vocabulary = net.vocabulary or 1
    ids = torch.randint(vocabulary, shape, generator=rng)
    if net.end_id is not None:
        # The end token stands once in a text, at the end, where tokenizers put it. Where it was
        # drawn by chance, take the next id.
        ids[ids == net.end_id] = (net.end_id + 1) % vocabulary
        ids[:, -1] = net.end_id
    return ids


def _make_noise(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Draw an image in [0, 1] whose amplitude falls with frequency as 1/f, as in photographs.

    Mean 0.5 and standard deviation 0.2, then clipped to [0, 1].
    """
    _, height, width = shape
    white = torch.randn(shape, generator=rng)
    spectrum = torch.fft.rfft2(white)  # (channels, height, width // 2 + 1)
    vertical = torch.fft.fftfreq(height)[:, None]
    horizontal = torch.fft.rfftfreq(width)
    # The mean has the frequency 0. To avoid a division by 0, the lowest other frequency is used.
    lowest = 1 / max(height, width)
    frequency = torch.hypot(vertical, horizontal).clamp_min(lowest)
    image = torch.fft.irfft2(spectrum / frequency, s=(height, width))
    tiny = torch.finfo(image.dtype).tiny
    # The deviation of an image with a single pixel is 0: avoid a division by 0.
    deviation = image.std(unbiased=False).clamp_min(tiny)
    centred = image - image.mean()
    return (0.5 + CONTRAST * centred / deviation).clamp(0, 1)
