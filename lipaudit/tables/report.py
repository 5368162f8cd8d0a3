"""The classes Report and Section: the results of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from string import ascii_uppercase
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
from pydantic import Field, field_validator, model_validator

from lipaudit.tables.columns import (
    Array,
    Cell,
    Column,
    Columns,
    Float,
    Frozen,
    Row,
    Rows,
    finite,
    make_row,
    reduce_values,
)
from lipaudit.tables.trials import FLAGS, parse_column

if TYPE_CHECKING:
    import numpy as np

    from lipaudit.tables.summary import Headline

SCHEMA_VERSION = "2.0"


class Note(Frozen):
    """A note on the numbers; it is printed with them and never dropped."""

    level: Literal["info", "warning"]
    code: str
    text: str

    @classmethod
    def info(cls, code: str, text: str) -> Note:
        """Return a note of the level `info`."""
        return cls(level="info", code=code, text=text)

    @classmethod
    def warn(cls, code: str, text: str) -> Note:
        """Return a warning."""
        return cls(level="warning", code=code, text=text)

    def add_lead(self, lead: str) -> Note:
        """Return the note with its subject in front: "LEAD: text"; unchanged for an empty lead."""
        return self.model_copy(update={"text": f"{lead}: {self.text}" if lead else self.text})


Notes = tuple[Note, ...]


class Failure(Frozen):
    """The reason why a measure has no result: its error and exit code."""

    reason: str
    advice: str = ""
    exit_code: int


def require_aligned(samples: dict[str, tuple[Cell, ...]]) -> dict[str, tuple[Cell, ...]]:
    """Check that per-sample columns have equal lengths, and a column `ids` that names the samples.

    Raises:
        ValueError: the check fails.
    """
    if samples and "ids" not in samples:
        raise ValueError("per-sample columns without ids")
    lengths = {len(values) for values in samples.values()}
    if len(lengths) > 1:
        raise ValueError(f"per-sample columns of different lengths: {sorted(lengths)}")
    return samples


def require_drawable(arrays: dict[str, Array]) -> dict[str, Array]:
    """Check that the attention maps among the arrays of a section can be drawn.

    An array `map@HEAD` is a matrix. `map_tokens@HEAD` has two numbers for the labels of its axes:
    how many queries and keys there are.

    Raises:
        ValueError: a map has another shape, or `map_tokens` is missing or wrong.
    """
    for name, array in arrays.items():
        kind, _, head = name.partition("@")
        # Whether the shape is right, by kind; other arrays may have any shape.
        fits = {"map": len(array.shape) == 2, "map_tokens": array.shape == (2,)}
        if array.data and not fits.get(kind, True):
            raise ValueError(f"{name} has the shape {array.shape}")
        if kind == "map" and f"map_tokens@{head}" not in arrays:
            raise ValueError(f"{name} without map_tokens@{head}")
        if kind == "map_tokens" and len(finite(array.data)) < len(array.data):
            raise ValueError(f"{name} has values that are no numbers")
    return arrays


# A PNG file in base64.
Png = Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]*={0,2}$")]


class Example(Frozen):
    """An adversarial example of a sample; images are stored with at most 64 pixels a side.

    Attributes:
        trial: the first trial that broke the sample.
        image: the sample.
        adversarial: the adversarial example.
        difference: the difference of the two; grey means zero.
        times: factor by which the difference is amplified.
        text: the changed text, for attacks on words and characters.
        classes: true class, and class predicted after the attack; names, or else numbers.
        before: scores of these classes without attack; all scores sum to 1.
        after: their scores under attack.
    """

    trial: str
    image: Png = ""
    adversarial: Png = ""
    difference: Png = ""
    times: Float = 1.0
    text: str = ""
    classes: tuple[str, str]
    before: tuple[Float, Float]
    after: tuple[Float, Float]


class Gradient(Frozen):
    """The share of each token in the steepest change of a sample.

    Attributes:
        of: margin: the gradient of f_y - max_(j != y) f_j; direction: the leading right singular
            vector v of the Jacobian, along which the output changes most.
        tokens: the first tokens as texts; numbers without a tokenizer.
        shares: share of each token in the squared length: ||g_t||^2 / sum_s ||g_s||^2 over all s.
        left_out: number of further tokens.
    """

    of: Literal["margin", "direction"]
    tokens: tuple[str, ...]
    shares: tuple[Float, ...]
    left_out: int = 0

    @model_validator(mode="after")
    def _check_lengths(self) -> Gradient:
        if len(self.tokens) != len(self.shares):
            raise ValueError(f"{len(self.shares)} shares of {len(self.tokens)} tokens")
        return self


class Attended(Frozen):
    """The sample behind an attention map.

    Attributes:
        sample: its id.
        tokens: its tokens as texts.
    """

    # Earlier reports have the patches of pictures here.
    model_config = pydantic.ConfigDict(extra="ignore")

    sample: str
    tokens: tuple[str, ...]


SCORES = "log_probabilities"
"""Array of the log-probability of every class, (classes, samples), of few classes."""


class Section(Frozen):
    """The result of one measure.

    Attributes:
        measure: its name.
        title: its heading on a page; empty: its name.
        settings: its options.
        columns: columns of the rows, in printed order.
        sample_columns: per-sample columns; `robust@ATTACK,NORM,EPS` uses the column `robust`.
        rows: one per head, layer, attack..., ordered by (layer, head) if present.
        samples: per-sample columns in the order of its `ids`.
        arrays: per-head per-sample values, histograms and maps.
        notes: notes on these numbers.
        examples: adversarial examples by sample id; written only if there are any.
        gradients: shares of tokens by sample id; written only if there are any.
        attended: samples of attention maps, by array name; written only if known.
        classes: names of true and predicted classes by number; written only if known.
        files: files that the run wrote beside the report, by path as given, and the SHA-256 of
            their contents; written only if there are any.
        failure: why there are no figures; written only if the measure failed.
        unmeasured: number of samples that a time limit left out, or under only some of the
            attacks; written only if positive.
    """

    measure: str
    title: str = ""
    settings: dict[str, Any] = Field({}, repr=False)
    columns: Columns = Field({}, repr=False)
    sample_columns: Columns = Field({}, repr=False)
    rows: Rows = Field((), repr=False)
    samples: dict[str, tuple[Cell, ...]] = Field({}, repr=False)
    arrays: dict[str, Array] = Field({}, repr=False)
    notes: tuple[Note, ...] = ()
    examples: dict[str, Example] = Field({}, repr=False)
    gradients: dict[str, Gradient] = Field({}, repr=False)
    attended: dict[str, Attended] = Field({}, repr=False)
    classes: dict[int, str] = Field({}, repr=False)
    files: dict[str, str] = Field({}, repr=False)
    failure: Failure | None = None
    unmeasured: int = Field(0, ge=0)

    @pydantic.model_serializer(mode="wrap")
    def _leave_out_empty(self, plain: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the fields to write to JSON: all that are not empty, and those in `always`."""
        always = ("measure", "settings", "columns", "rows", "samples", "arrays", "notes")
        values = plain(self)  # pydantic's own serialization: all fields
        return {name: value for name, value in values.items() if value or name in always}

    @field_validator("rows", mode="before")
    @classmethod
    def _read_rows(cls, rows: Any, info: pydantic.ValidationInfo) -> Any:
        """Return the rows of a section from JSON or Python, after a check of their cells."""
        if not isinstance(rows, (list, tuple)) or not all(isinstance(r, Mapping) for r in rows):
            raise ValueError("rows are a list of objects")
        # pydantic has validated the columns before. `make_row` checks each cell by its column, and
        # gives missing cells the default of their column.
        columns = info.data.get("columns", {})
        return tuple(make_row(columns, row) for row in rows)

    _check_lengths = field_validator("samples")(require_aligned)
    _check_arrays = field_validator("arrays")(require_drawable)

    @model_validator(mode="after")
    def _check_flags(self) -> Section:
        """Check that per-sample columns of yes and no contain only 1, 0 and empty cells."""
        flags = FLAGS & self.sample_columns.keys()
        for name, cells in self.samples.items():
            if name.partition("@")[0] not in flags:  # `robust` of `robust@pgd,linf,2/255`
                continue
            for flag in finite(cells):
                if flag not in (0, 1):
                    raise ValueError(f"{name} holds {flag:g}, which is neither 0 nor 1")
        return self

    def frame(self) -> Any:
        """Return the rows as a pandas DataFrame, or as a list of dicts if pandas is missing.

        Columns are in the order and units of the tables (see `columns`).
        """
        cells = [dict(row) for row in self.rows]
        try:
            pandas = import_module("pandas")
        except ImportError:
            return cells
        return pandas.DataFrame(cells, columns=list(self.columns))

    @property
    def ids(self) -> tuple[str, ...]:
        """Return the ids of the samples in the per-sample columns of the section."""
        return tuple(map(str, self.samples.get("ids", ())))

    def sample_column(self, name: str) -> Column:
        """Return the description of a per-sample column (`robust@pgd,linf,2/255`: `robust`)."""
        return self.sample_columns.get(parse_column(name)[0], Column(label=name, meaning=""))


Drawing = Literal[
    "tightness",
    "attention",
    "rows",
    "accuracies",
    "classes",
    "depth",
    "paths",
]


@dataclass(frozen=True, kw_only=True)
class Display:
    """What the chapter of a section shows, on every page.

    Attributes:
        about: the meaning of its figures, in a sentence.
        columns: columns of its table; the closest bounds follow. Empty: all of them.
        by: a column: of many rows, the table has those with its largest values.
        maps: columns that are mapped over layers and heads.
        drawings: pictures and tables of its own, by their names in `report.pictures` or in a wing.
        histograms: per-sample columns that are counted.
        worst: per-sample columns in the table of the worst samples.
        folded: whether an HTML page shows only the heading at first, unless it comes first.
        titles: titles of the maps and histograms, by column: what a reader asks.
        brief: whether one screen of its measure has its table.
    """

    about: str
    columns: tuple[str, ...] = ()
    by: str = ""
    maps: tuple[str, ...] = ()
    drawings: tuple[Drawing | str, ...] = ()
    histograms: tuple[str, ...] = ()
    worst: tuple[str, ...] = ()
    folded: bool = True
    titles: Mapping[str, str] = field(default_factory=dict)
    brief: bool = True


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout of a section: its title, its columns and its per-sample columns.

    Attributes:
        name: name of the section.
        title: heading on a page, a question; empty: the name.
        display: what its chapter shows; by default every column.
        fixed: its columns in printed order, first those that name a row.
        sample_columns: its per-sample columns.
        headlines: its first figures, for scorecards, rankings and the gate.
        declared: returns columns declared elsewhere, such as those of bounds.
        behind: the column after which the declared ones are printed.
    """

    name: str
    title: str = ""
    display: Display | None = None
    fixed: Mapping[str, Column]
    sample_columns: Mapping[str, Column] = field(default_factory=dict)
    headlines: tuple[Headline, ...] = ()
    declared: Callable[[], Mapping[str, Column]] | None = None
    behind: str = ""

    @property
    def columns(self) -> dict[str, Column]:
        """Return the columns by name, in printed order.

        These are the fixed columns. Columns that are declared elsewhere, such as one for each
        bound, come after the fixed column `behind`.
        """
        columns = {}
        for name, column in self.fixed.items():
            columns[name] = column
            if self.declared is not None and name == self.behind:
                columns |= self.declared()
        return columns

    def row(self, /, **cells: Any) -> Row:
        """Return a row of these cells (`from_` for `from`); missing cells get their defaults.

        Raises:
            ValueError: a required cell is missing, or a cell has the wrong type or no column.
        """
        return make_row(self.columns, {n.removesuffix("_"): cell for n, cell in cells.items()})

    def reduce(self, samples: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, float]:
        """Return the cells of a row that are statistics over samples, such as a median norm.

        Args:
            samples: values, (samples,), by the name of their per-sample column.
        """
        cells = {}
        for name, column in self.columns.items():
            reduction = column.reduction
            if reduction is not None and reduction.values in samples:
                values = samples[reduction.values]
                cells[name] = float(reduce_values(reduction.stat, values))
        return cells

    def section(self, **values: Any) -> Section:
        """Return a section with this layout."""
        return Section(
            measure=self.name,
            title=self.title,
            columns=self.columns,
            sample_columns=self.sample_columns,
            **values,
        )


class Model(Frozen):
    """The audited checkpoint.

    `revision` (as requested) and `commit` belong to a repository of the Hugging Face Hub, if the
    model comes from one. `quantised` says how its weights are quantised, if they are.
    """

    spec: str
    source: str
    architecture: str
    parameters: int
    weights_sha256: str
    quantised: str = ""
    revision: str = ""
    commit: str = ""


class Data(Frozen):
    """The samples.

    `suite_id` is a hash of the sorted sample ids, `steps` what was done to the first sample. The
    rest is as in `Model`.
    """

    spec: str
    samples: int
    suite_id: str
    revision: str = ""
    commit: str = ""
    steps: str = ""


class Run(Frozen):
    """The origin of the numbers: everything needed to repeat them.

    `options` are the given options that define model and data (arch, max_tokens...), `device_map`
    is the placement of the modules, `reason` is why the report became the baseline.
    """

    lipaudit: str
    command: str
    created: str
    seed: int
    device: str
    dtype: str
    versions: dict[str, str]
    model: Model
    data: Data
    preprocess: dict[str, Any] = {}
    options: dict[str, Any] = {}
    device_map: dict[str, str] = {}
    reason: str = ""

    @property
    def label(self) -> str:
        """Return the MODEL, and its roundings on request: `demo int4:32 bfloat16`."""
        roundings = (self.options.get(name) for name in ("quantize", "autocast"))
        return " ".join(filter(None, (self.model.spec, *roundings)))


class Report(Frozen):
    """One run of lipaudit: the only thing that is written, compared, gated and rendered.

    It is partial if a measure failed or the run was cut short: a failed section has the reason, a
    section cut by a time limit the number of missing samples. `samples` has the place of each
    sample, in the order of its `ids`: `place` in the data (a file, a line, an index), for texts
    the beginning as `text`, and with --group-column its `group`; it is empty for random samples.
    `figures` are the rows of a stored summary whose measures are not installed.
    """

    schema_: Literal["lipaudit.report"] = Field("lipaudit.report", alias="schema")
    schema_version: str = SCHEMA_VERSION
    status: Literal["complete", "partial"] = "complete"
    run: Run
    samples: dict[str, tuple[Cell, ...]] = Field({}, repr=False)
    sections: tuple[Section, ...]
    figures: Rows = Field((), exclude=True, repr=False)

    _check_lengths = field_validator("samples")(require_aligned)

    @property
    def places(self) -> dict[str, str]:
        """Return the places of samples in the data, by id."""
        return self._read_texts("place")

    @property
    def texts(self) -> dict[str, str]:
        """Return the beginnings of samples that are texts, by id."""
        return self._read_texts("text")

    @property
    def groups(self) -> dict[str, str]:
        """Return the groups of samples, by id; samples without one are left out."""
        return self._read_texts("group")

    def _read_texts(self, column: str) -> dict[str, str]:
        pairs = zip(self.samples.get("ids", ()), self.samples.get(column, ()), strict=False)
        return {str(name): str(value) for name, value in pairs if value}

    def section(self, measure: str) -> Section | None:
        """Return the section of a measure, None if it was not measured."""
        return next((s for s in self.sections if s.measure == measure), None)

    @property
    def main_sections(self) -> list[Section]:
        """Return the sections of measures, without their parts, such as `jacobian.shares`."""
        return [section for section in self.sections if "." not in section.measure]

    @property
    def failures(self) -> dict[str, Failure]:
        """Return the failed measures, with the reasons."""
        return {s.measure: s.failure for s in self.sections if s.failure is not None}

    @property
    def unmeasured(self) -> dict[str, int]:
        """Return the measures that a time limit ended, with the numbers of missing samples."""
        return {s.measure: s.unmeasured for s in self.sections if s.unmeasured}

    def __str__(self) -> str:
        """Return the scorecard, in at most 25 lines."""
        import lipaudit  # inside the method: rendering is a layer above, and imports this module

        return lipaudit.summarize(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the report as HTML for a notebook, in a frame so that styles do not mix."""
        import lipaudit

        page = lipaudit.render(self, "html").decode()
        return f'<iframe srcdoc="{escape(page)}" style="width:100%;height:40em;border:0"></iframe>'


def model_labels(reports: Sequence[Report]) -> list[str]:
    """Return a name for each report: its model; if two are equal, all get a letter in front.

    After A to Z, the letters continue with A1 to Z1, A2, ...
    """
    specs = [report.run.label for report in reports]
    if len(set(specs)) == len(specs):
        return specs
    labels = []
    for index, spec in enumerate(specs):
        turn, letter = divmod(index, len(ascii_uppercase))
        labels.append(f"{ascii_uppercase[letter]}{turn or ''}: {spec}")
    return labels
