"""Tables of texts or images: CSV, TSV, JSON lines, parquet, and folders of images."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torch import Tensor

from lipaudit.data import batch
from lipaudit.data.arrays import to_box
from lipaudit.data.batch import DataOptions, SampleOrigin, Samples, make_batch
from lipaudit.data.image_files import Picture, collect_notes, list_pictures, read_image
from lipaudit.data.texts import encode, is_empty, limit_tokens, note_cut, shorten
from lipaudit.errors import InputError, explain_failure, suggestion
from lipaudit.tables import Note, Notes

if TYPE_CHECKING:
    from lipaudit.models.net import Net

T = TypeVar("T")
SEPARATORS = {".csv": ",", ".tsv": "\t"}
SUFFIXES = (*SEPARATORS, ".jsonl", ".parquet")
IMAGES = ("image", "img", "picture")
TEXTS = ("text", "sentence", "content", "review", "question", "document")
# Usual names of the columns of a pair of texts.
PAIRS = (
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("text_a", "text_b"),
    ("text1", "text2"),
    ("text", "text_b"),
    ("text", "text_pair"),
)
LABELS = ("label", "labels", "y", "target", "class", "sentiment")
# Largest length of a field of a table, in characters.
LONGEST_FIELD = 2**31 - 1
# Number of characters of an id shown in a place.
LONGEST = 40


@dataclass(frozen=True)
class SampleTable:
    """Rows of samples: of a file, of a folder of images, or of a data set.

    Attributes:
        origin: the table, for messages.
        columns: names of the columns.
        places: place of each row, for messages: `line 7`.
        rows: values by column; reading one may be slow (a data set decodes its images).
        faults: why rows cannot be read, by index.
        classes: class names of the numbers in a label column, by its name.
        notes: what was left out.
    """

    origin: str
    columns: Sequence[str]
    places: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
    faults: Mapping[int, str] = field(default_factory=dict)
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    notes: Notes = ()

    @property
    def column_list(self) -> str:
        """Return the names of its columns, for messages."""
        return f"columns: {', '.join(self.columns)}"

    @property
    def sound(self) -> list[int]:
        """Return the indices of the rows without a fault."""
        return [i for i in range(len(self.places)) if i not in self.faults]

    def locate(self, i: int) -> str:
        """Return the table and the place of row i, for messages."""
        return f"{self.origin}: {self.places[i]}"

    def refuse(self, i: int, fault: str) -> None:
        """Raise an InputError for row i if `fault`, the description of a fault, is not empty."""
        if fault:
            raise InputError(
                f"{self.locate(i)} {fault}",
                "Correct it, or leave such rows out with --skip-bad.",
            )

    def require_rows(self, options: DataOptions) -> None:
        """Refuse a table with faulty rows; with `skip_bad`, only if it has no other rows.

        Raises:
            InputError: the message describes the first fault.
        """
        can_skip = options.skip_bad and self.sound
        if self.faults and not can_skip:
            first = min(self.faults)
            self.refuse(first, self.faults[first])

    def read_column(self, name: str) -> list[Any]:
        """Return the values of all rows in one column."""
        # A data set of the Hub decodes all columns of a row, even images: select one column first.
        rows: Any = self.rows
        if hasattr(rows, "select_columns"):
            rows = rows.select_columns([name])
        return [row.get(name) for row in rows]

    def name_row(self, i: int) -> str:
        """Return the place of a row, with its id if the table has ids: "line 7, id 31"."""
        place = self.places[i]
        if "id" not in self.columns:
            return place
        row_id = self.rows[i].get("id")
        if row_id is None:
            return place
        return f"{place}, id {str(row_id)[:LONGEST]}"


def read_folder(path: Path) -> SampleTable:
    """Return the pictures of a folder as a table; sub-folders, if any, are the classes.

    Raises:
        InputError: there are no pictures, or some beside and some inside sub-folders.
    """
    files, notes = list_pictures(path)
    places = [file.relative_to(path).as_posix() for file in files]
    # All pictures are in the folder itself (no labels), or all are in sub-folders (classes).
    if files[0].parent == path:
        rows: list[dict[str, Any]] = [{"image": file} for file in files]
        return SampleTable(str(path), ["image"], places, rows, notes=notes)
    folders = [file.parent.name for file in files]
    names = sorted(set(folders))
    rows = []
    for file, folder in zip(files, folders, strict=True):
        rows.append({"image": file, "label": names.index(folder)})
    return SampleTable(
        str(path), ["image", "label"], places, rows, classes={"label": names}, notes=notes
    )


def read_table(path: Path) -> SampleTable:
    """Read every row of a file; for a row that cannot be read, the table has a fault instead.

    Raises:
        InputError: the file cannot be read, or has no rows.
    """
    readers = {".jsonl": _read_json_lines, ".parquet": _read_parquet}
    advice = "Save it as UTF-8, with one row per sample."
    with explain_failure(f"{path} is not a readable {path.suffix} file", advice, Exception):
        lines = list(readers.get(path.suffix, _read_separated)(path))
    if not lines:
        raise InputError(
            f"{path} has no rows",
            "Write the column names into the first line and the samples below.",
        )
    # Each line has a place, such as "line 7", the values by column, and a fault ("" for none).
    places, rows, faults = zip(*lines, strict=True)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    classes = {}
    if path.suffix == ".parquet":
        classes = _read_classes(path)
    faults_by_row = {i: fault for i, fault in enumerate(faults) if fault}
    return SampleTable(str(path), columns, places, rows, faults=faults_by_row, classes=classes)


# Place, values and fault of a row.
_Line = tuple[str, dict[str, Any], str]


@contextmanager
def _read_long_fields() -> Iterator[None]:
    """Allow long fields in Python's csv inside the block; restore the global limit afterwards."""
    before = csv.field_size_limit(LONGEST_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _read_separated(path: Path) -> Iterator[_Line]:
    """Yield the rows of a file whose first line has the column names; skip empty lines."""
    # utf-8-sig removes the byte order mark that spreadsheets write before the first name.
    # A field may be longer than the 131,072 characters that csv reads by default.
    with _read_long_fields(), path.open(encoding="utf-8-sig", newline="") as lines:
        first_line = next((line for line in lines if line.strip()), "")
        lines.seek(0)
        separator = _find_separator(first_line, path)
        table = csv.DictReader(lines, delimiter=separator, strict=True)
        # The names are in the first line that is not empty. DictReader would take the first line.
        names = next(filter(None, table.reader), [])
        table.fieldnames = names
        _require_unique(filter(None, names), path)
        for row in table:
            surplus = len(row.pop(None, ()))  # DictReader puts fields without a name under None
            fault = ""
            # Lines of separators alone, which spreadsheets write at the end, are skipped.
            if not surplus and not any(row.values()):
                continue
            if surplus:
                fault = (
                    f"has {surplus} more than the columns' {len(names)} fields: put texts with "
                    "commas in quotes"
                )
            elif len(names) > 1 and list(row.values()) == names:
                fault = "repeats the column names"
            yield f"line {table.line_num}", row, fault


def _find_separator(first_line: str, path: Path) -> str:
    """Return the separator of a table: of those that its first line has, the most usual one."""
    # Spreadsheets of many countries write semicolons in a .csv.
    separators = (SEPARATORS[path.suffix], ";", *SEPARATORS.values())
    return next((mark for mark in separators if mark in first_line), separators[0])


def _require_unique(names: Iterable[str], path: Path) -> None:
    """Refuse a table with two columns of the same name: only the last one would be read."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InputError(f"{path} has the column {twice[0]!r} twice", "Rename or remove one.")


def _read_json_lines(path: Path) -> Iterator[_Line]:
    """Yield the rows of a file with one JSON object per line; skip empty lines."""
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            values: Any = {}
            fault = ""
            try:
                values = json.loads(line, object_pairs_hook=_make_object)
            except (ValueError, RecursionError) as error:  # broken, or nested beyond all bounds
                fault = f"is not JSON ({error})"
            if not isinstance(values, dict):
                values = {}
                fault = "is not a {...} object"
            yield f"line {number}", values, fault


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; refuse a repeated key, for which Python would use the last value."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key stands there twice")
    return values


def _read_parquet(path: Path) -> Iterator[_Line]:
    """Yield the rows of a parquet file."""
    advice = "pip install pyarrow, or save the table as .csv or .jsonl."
    with explain_failure(f"{path} needs the library `pyarrow`", advice, ImportError):
        from pyarrow import parquet
    for number, values in enumerate(parquet.read_table(path).to_pylist(), 1):
        yield f"row {number}", values, ""


def _read_classes(path: Path) -> dict[str, list[str]]:
    """Return the class names of label columns, from the metadata that `datasets` writes.

    It writes JSON: {"info": {"features": {"label": {"names": ["cat", "dog"], ...}, ...}}}.
    """
    from pyarrow import parquet

    metadata = parquet.read_schema(path).metadata or {}
    description = json.loads(metadata.get(b"huggingface", b"{}"))
    features = description.get("info", {}).get("features", {})
    return {name: feature["names"] for name, feature in features.items() if "names" in feature}


def find_fault(values: Mapping[str, Any], texts: Sequence[str], label: str | None = None) -> str:
    """Return why a row cannot be used, such as "has no 'text'"; "" if it can be used.

    It cannot be used if a text or the label is empty, or is not a single value.

    Args:
        values: the row.
        texts: the columns of texts.
        label: the column of the label; None if no label is needed.
    """
    for name in texts:
        value = values.get(name)
        if is_empty(value):
            return f"has no {name!r}"
        if isinstance(value, (list, tuple, dict, bytes)):
            return f"has a {type(value).__name__} in {name!r}, not a text"
    if label is not None:
        value = values.get(label)
        if is_empty(value) or str(value).strip().lower() == "nan":
            return f"has no {label!r}"
        if isinstance(value, (list, tuple, dict)):
            return f"has a {type(value).__name__} in {label!r}, and a sample has only one"
    return ""


def draw_rows(
    table: SampleTable, options: DataOptions, read: Callable[[int], T], *, what: str
) -> tuple[list[int], list[T], Notes]:
    """Draw the requested number of rows at random, and read them.

    With `skip_bad`, rows with faults are left out. A row that `read` refuses is replaced by the
    next row in the random order.

    Args:
        table: the table.
        options: number of samples, seed, and whether to skip faulty rows.
        read: reads a row, given its index; it raises InputError for a faulty row.
        what: the word for rows in messages: images, texts or rows.

    Returns:
        The indices of the rows, `read(index)` of each, and notes on rows left out.

    Raises:
        InputError: a row cannot be read; with `skip_bad`, only if no row can be read.
    """
    table.require_rows(options)
    sound = table.sound  # indices of the rows without a fault
    rows: list[int] = []
    values = []
    refusals = []
    # All of them in random order, as some may have to be replaced.
    for k in batch.draw_indices(total=len(sound), samples=len(sound), seed=options.seed):
        if len(rows) == options.samples:
            break
        row = sound[k]
        try:
            values.append(read(row))
        except InputError as error:
            if not options.skip_bad:
                raise
            refusals.append(error.message)
        else:
            rows.append(row)
    if not rows:
        first = "".join(refusals[:1])
        raise InputError(f"none of {len(sound)} {what} can be read ({first})", "Check the files.")
    faults = [f"{table.places[i]} {fault}" for i, fault in sorted(table.faults.items())]
    notes = _note_skipped("rows", faults) + _note_skipped(what, refusals)
    return rows, values, notes


def _note_skipped(what: str, reasons: Sequence[str]) -> Notes:
    """Return a warning about rows or samples that were left out; no notes if there are none."""
    if not reasons:
        return ()
    text = f"unreadable {what} were left out: {len(reasons)} (the first: {reasons[0]})"
    return (Note.warn("skipped-bad", text),)


def draw_table(table: SampleTable, net: Net, options: DataOptions) -> Samples:
    """Draw images, texts or pairs of texts from a table, with their labels if it has any.

    Labels are class names or class numbers of the model.

    Raises:
        InputError: the table lacks a column or has labels unknown to the model, or a row cannot be
            read; with `skip_bad`, none can.
    """
    table.require_rows(options)  # first, as a table of unreadable rows has no columns
    inputs = _choose_inputs(table, net, options)
    table, labels, notes = _read_labels(table, inputs, net, options)
    draw = _draw_texts if net.kind == "text" else _draw_images
    samples = draw(table, inputs, labels, net, options)
    return replace(samples, notes=table.notes + samples.notes + notes)


# Class numbers by row; None: the samples have no labels.
_Labels = dict[int, int] | None


def _read_labels(
    table: SampleTable, inputs: Sequence[str], net: Net, options: DataOptions
) -> tuple[SampleTable, _Labels, Notes]:
    """Read the labels of a table as class numbers of the model.

    Args:
        table: the table.
        inputs: the columns of images or texts, which cannot be labels.
        net: the model, with its classes.
        options: the requested column, and whether rows with faults are skipped.

    Returns:
        The table, in which rows without a valid label have a fault; class numbers by row, or None
        if there are no labels to use; notes.

    Raises:
        InputError: a label is missing or is not a class of the model.
    """
    label = choose_column(table, options.label_column, LABELS)
    if label is None:
        others = ", ".join(name for name in table.columns if name not in inputs)
        if net.classes is None or not others:
            return table, None, ()
        text = f"{table.origin} has no column called label: --label-column names one ({others})"
        return table, None, (Note.info("no-label-column", text),)
    if net.classes is None:
        text = f"the labels of {table.origin} ({label}) are not used: the model has no classes"
        return table, None, (Note.info("labels-unused", text),)
    labels = table.read_column(label)
    table = _add_label_faults(table, label, labels)
    table.require_rows(options)
    rows = table.sound  # indices of the rows without a fault
    values = [labels[i] for i in rows]
    places = list(map(table.locate, rows))
    classes = table.classes.get(label)  # class names, if the labels are class numbers
    numbers, notes = batch.match_labels(values, net, places, classes)
    return table, dict(zip(rows, numbers, strict=True)), notes


def _add_label_faults(table: SampleTable, label: str, values: Sequence[Any]) -> SampleTable:
    """Return the table, in which a row without a valid label has a fault.

    Args:
        table: the table; a row that has a fault already keeps it.
        label: the column of labels.
        values: its values.
    """
    faults = dict(table.faults)
    names = table.classes.get(label)  # the labels are then numbers of these classes, -1: unknown
    for i, value in enumerate(values):
        fault = find_fault({label: value}, texts=(), label=label)
        if not fault and names is not None:
            is_class = isinstance(value, int) and -1 <= value < len(names)
            if not is_class:
                fault = f"has the label {value!r}, and the file names {len(names)} classes"
        if fault:
            faults.setdefault(i, fault)
    return replace(table, faults=faults)


def _draw_images(
    table: SampleTable, inputs: Sequence[str], labels: _Labels, net: Net, options: DataOptions
) -> Samples:
    """Draw images from a column of a table.

    Args:
        table: the table.
        inputs: the name of the column.
        labels: class numbers by row; None: no labels.
        net: the model.
        options: number of samples and seed.
    """
    (column,) = inputs

    def read(i: int) -> Picture:
        """Return the image of row i of the table, in the range of pixels that the model takes."""
        values = table.rows[i]
        table.refuse(i, find_fault(values, inputs))  # an InputError if the cell is empty
        pixels, steps = read_image(values[column], table.places[i], net)
        return Picture(to_box(pixels, net.box), steps)

    rows, pictures, skipped = draw_rows(table, options, read, what="images")
    places = [table.name_row(i) for i in rows]
    steps = [picture.steps for picture in pictures]
    pixels = [picture.pixels for picture in pictures]
    return Samples(
        make_batch(pixels, net, _select_labels(labels, rows)),
        skipped + collect_notes(places, steps),
        origins=tuple(map(SampleOrigin, places)),
        steps=[step.text for step in steps[0]],
    )


def _select_labels(labels: _Labels, rows: Sequence[int]) -> list[int] | None:
    """Return the class numbers of some rows, in their order."""
    if labels is None:
        return None
    return [labels[i] for i in rows]


class _EncodedTexts(NamedTuple):
    """A text or a pair of texts, their token ids together, and whether they were cut."""

    texts: tuple[str, ...]
    tokens: Tensor
    is_cut: bool


def _draw_texts(
    table: SampleTable, inputs: Sequence[str], labels: _Labels, net: Net, options: DataOptions
) -> Samples:
    """Draw texts, or pairs of texts, from one or two columns of a table.

    Args:
        table: the table.
        inputs: the names of the columns.
        labels: class numbers by row; None: no labels.
        net: the model.
        options: number of samples, seed, and largest number of tokens.
    """
    limit, notes = limit_tokens(net, options)

    def read(i: int) -> _EncodedTexts:
        """Return the texts of row i of the table, their token ids, and whether these were cut."""
        values = table.rows[i]
        table.refuse(i, find_fault(values, inputs))  # an InputError if a text is missing
        texts = tuple(str(values[name]) for name in inputs)
        origin = table.locate(i)
        # The tokenizer cuts. One token more than allowed shows whether the text is longer.
        tokens = encode(texts, net, limit + 1, origin)
        if len(tokens) <= limit:
            return _EncodedTexts(texts, tokens, is_cut=False)
        return _EncodedTexts(texts, encode(texts, net, limit, origin), is_cut=True)

    rows, encoded, skipped = draw_rows(table, options, read, what="texts")
    notes += note_cut([row.is_cut for row in encoded], f"texts were cut to {limit} tokens")
    tokens = [row.tokens for row in encoded]
    texts = tuple(row.texts for row in encoded)
    samples = make_batch(tokens, net, _select_labels(labels, rows))
    places = map(table.name_row, rows)
    return Samples(
        replace(samples, texts=texts, limit=limit),
        skipped + notes,
        origins=tuple(map(SampleOrigin, places, map(shorten, texts))),
        # `Samples.steps` tells the user what was done to the first sample only.
        steps=(f"{len(tokens[0])} tokens, special ones included",),
    )


def _choose_inputs(table: SampleTable, net: Net, options: DataOptions) -> tuple[str, ...]:
    """Return the column of the images, or the columns of the texts."""
    if net.kind == "text":
        return choose_text_columns(table, options)
    image = choose_column(table, requested=None, usual=IMAGES)
    if net.kind != "image" or image is None:
        raise InputError(
            f"{table.origin} has no column of images ({table.column_list})",
            f"Name it {' or '.join(IMAGES)}; the model takes {net.kind}.",
        )
    return (image,)


def choose_text_columns(
    table: SampleTable, options: DataOptions, *, usual: Sequence[str] = ()
) -> tuple[str, ...]:
    """Choose the column of the texts, or the two columns of pairs.

    Args:
        table: the table.
        options: has the requested columns (--text-column), if any.
        usual: further usual names of a text column, tried first.

    Raises:
        InputError: no column has a usual name, or a requested column is missing.
    """
    columns = table.columns
    requested = options.text_column
    if requested is not None:
        names = [name.strip() for name in requested.split(",")]
        if requested in columns:  # a name may hold a comma
            names = [requested]
        if len(names) > 2:
            raise InputError(
                f"--text-column names {len(names)} columns",
                "Give one column, or two for pairs of texts.",
            )
        return tuple(require_column(name, table) for name in names)
    for pair in PAIRS:
        if set(pair) <= set(columns):
            return pair
    for name in (*usual, *TEXTS):
        if name in columns:
            return (name,)
    advice = "Name it with --text-column. For pairs, give two: --text-column FIRST,SECOND."
    if Path(table.origin).suffix in SEPARATORS:
        advice += " If the first line is data, add a line with column names above it: text,label."
    raise InputError(f"{table.origin} has no text column ({table.column_list})", advice)


def choose_column(table: SampleTable, requested: str | None, usual: Sequence[str]) -> str | None:
    """Return the requested column, or the first column with a usual name; None without any.

    Raises:
        InputError: the requested column is missing.
    """
    if requested is not None:
        return require_column(requested, table)
    return next((name for name in usual if name in table.columns), None)


def require_column(name: str, table: SampleTable) -> str:
    """Return the name; raise an error if the table has no column of this name."""
    if name not in table.columns:
        raise InputError(f"{table.origin} has no column {name!r}", suggestion(name, table.columns))
    return name
