"""Report and Section: what a run leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from lipaudit.tables.columns import (
    Array,
    Cell,
    Column,
    Columns,
    Float,
    Frozen,
    Row,
    Rows,
    make_row,
)
from lipaudit.tables.figures import require_drawable
from lipaudit.tables.samples import require_flags
from lipaudit.tables.trials import parse_column

SCHEMA_VERSION = "2.0"


class Note(Frozen):
    """A remark that belongs to the numbers: printed with them, never dropped."""

    level: Literal["info", "warning"]
    code: str
    text: str


class Failure(Frozen):
    """Why a measure has no result: the error it ended with, and the exit code it deserves."""

    reason: str
    advice: str = ""
    exit_code: int


def require_aligned(samples: dict[str, tuple[Cell, ...]]) -> dict[str, tuple[Cell, ...]]:
    """Return per-sample columns: of one length, each sample named by the column `ids`.

    Raises:
        ValueError: they are not.
    """
    if samples and "ids" not in samples:
        raise ValueError("per-sample columns without ids")
    lengths = {len(values) for values in samples.values()}
    if len(lengths) > 1:
        raise ValueError(f"per-sample columns of different lengths: {sorted(lengths)}")
    return samples


Png = Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]*={0,2}$")]
"""A PNG file in base64."""


class Example(Frozen):
    """What an attack made of a sample: where it is one, as pictures of at most 64 pixels.

    Attributes:
        trial: the first that broke it.
        image: the sample.
        adversarial: what it became.
        difference: of the two; grey is none.
        times: how much the difference is amplified.
        text: what it became where its words or characters were changed.
        classes: true and, after the attack, predicted; by name, or number where there are none.
        before: their scores without attack, of 1 in all.
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
    """How the steepest change of a sample is shared out among its tokens.

    Attributes:
        of: margin: the gradient of f_y - max_(j != y) f_j; direction: the leading right singular
            vector v of the Jacobian, along which the output changes most.
        tokens: the first of them, as they are written; numbers where no tokenizer tells.
        shares: of each, its part of the squared length: ||g_t||^2 / sum_s ||g_s||^2 over all s.
        left_out: how many further tokens there are.
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
    """Whose attention a map shows.

    Attributes:
        sample: its id.
        tokens: how its tokens are written; of pictures, which patch each of them is.
        grid: rows and columns of patches; (0, 0) where tokens are none.
        first: the token that is the first patch; the others follow row by row.
        image: the picture that patches lie in, of at most 64 pixels.
    """

    sample: str
    tokens: tuple[str, ...]
    grid: tuple[int, int] = (0, 0)
    first: int = 0
    image: Png = ""

    @model_validator(mode="after")
    def _check_grid(self) -> Attended:
        rows, columns = self.grid
        if min(rows, columns, self.first) < 0 or self.first + rows * columns > len(self.tokens):
            raise ValueError(f"{rows} x {columns} patches are no {len(self.tokens)} tokens")
        return self


class Section(Frozen):
    """The result of one measure.

    Attributes:
        measure: its name.
        title: its heading on a page; empty: its name.
        settings: the options it ran with.
        columns: how the cells of rows read, in the order they are printed.
        sample_columns: how per-sample columns read; `robust@ATTACK,NORM,EPS` reads as `robust`.
        rows: one per head, layer, attack..., ordered by (layer, head) where there are any.
        samples: per-sample columns in the order of its `ids`.
        arrays: per-head per-sample values, histograms and maps.
        notes: remarks that belong to these numbers.
        examples: adversarial ones, by sample id; written only where there are any.
        gradients: of texts and other tokens, by sample id; written only where there are any.
        attended: of attention maps, by the name of their array; written only where known.
        classes: names of the classes that samples have or are taken for, by their number;
            written only where known.
        failure: why there are none; written only where the measure failed.
        unmeasured: samples that a time limit left; written only where there are any.
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
    failure: Failure | None = None
    unmeasured: int = Field(0, ge=0)

    @model_serializer(mode="wrap")
    def _leave_out_empty(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what there is none of, as in most sections."""
        always = ("measure", "settings", "columns", "rows", "samples", "arrays", "notes")
        return {k: v for k, v in plain(self).items() if k in always or v}

    @field_validator("rows", mode="before")
    @classmethod
    def _read_rows(cls, rows: Any, info: ValidationInfo) -> Any:
        if not isinstance(rows, (list, tuple)) or not all(isinstance(r, Mapping) for r in rows):
            raise ValueError("rows are a list of objects")
        return tuple(make_row(info.data.get("columns", {}), row) for row in rows)

    _check_lengths = field_validator("samples")(require_aligned)
    _check_arrays = field_validator("arrays")(require_drawable)

    @model_validator(mode="after")
    def _check_flags(self) -> Section:
        require_flags(self.samples, self.sample_columns)
        return self

    def frame(self) -> Any:
        """Return the rows as a pandas DataFrame, or as a list of dicts where there is no pandas.

        Columns stand as in the tables, in their units (`columns` says which).
        """
        cells = [dict(row) for row in self.rows]
        try:
            pandas = import_module("pandas")
        except ImportError:
            return cells
        return pandas.DataFrame(cells, columns=list(self.columns))

    @property
    def ids(self) -> tuple[str, ...]:
        """The samples that it has columns for."""
        return tuple(map(str, self.samples.get("ids", ())))

    def sample_column(self, name: str) -> Column:
        """Return how a per-sample column reads (`robust@pgd,linf,2/255` reads as `robust`)."""
        return self.sample_columns.get(parse_column(name)[0], Column(label=name, meaning=""))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a section is laid out: its title, its columns and those of its samples.

    Attributes:
        name: of the section.
        title: its heading on a page; empty: its name.
        fixed: its columns, in the order they are printed: first those that name a row.
        sample_columns: the columns that it has for every sample.
        declared: returns columns that are declared elsewhere, those of bounds.
        behind: the column behind which the declared ones are printed.
    """

    name: str
    title: str = ""
    fixed: Mapping[str, Column]
    sample_columns: Mapping[str, Column] = field(default_factory=dict)
    declared: Callable[[], Mapping[str, Column]] | None = None
    behind: str = ""

    @property
    def columns(self) -> dict[str, Column]:
        """The columns by name, in the order they are printed."""
        if self.declared is None:
            return dict(self.fixed)
        items = list(self.fixed.items())
        place = list(self.fixed).index(self.behind) + 1
        return dict([*items[:place], *self.declared().items(), *items[place:]])

    def row(self, /, **cells: Any) -> Row:
        """Return a row of these cells (`from_` for `from`); what is not given has its default.

        Raises:
            ValueError: a cell is missing, of the wrong type or of no column.
        """
        columns = self.columns
        cells = {name.removesuffix("_"): value for name, value in cells.items()}
        return make_row(columns, cells)

    def section(self, **values: Any) -> Section:
        """Return a section that is laid out so."""
        columns = {"columns": self.columns, "sample_columns": self.sample_columns}
        return Section(measure=self.name, title=self.title, **columns, **values)


class Model(Frozen):
    """The audited checkpoint.

    `revision` (as asked for) and `commit` are those of a repository of the Hugging Face Hub, where
    it comes from one.
    """

    spec: str
    source: str
    architecture: str
    parameters: int
    weights_sha256: str
    revision: str = ""
    commit: str = ""


class Data(Frozen):
    """The samples; `suite_id` is a hash of the sorted sample ids, the rest as of `Model`."""

    spec: str
    samples: int
    suite_id: str
    revision: str = ""
    commit: str = ""


class Run(Frozen):
    """Where the numbers come from: all that is needed to repeat them.

    `options` are those given that decide what model and data are (arch, max_tokens...),
    `device_map` is where modules lay that were spread, `reason` why it was made the baseline.
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


class Shard(Frozen):
    """Which part of a run a report is of, and what `lipaudit merge` makes the whole run of.

    Attributes:
        number: which part, from 1.
        of: how many there are.
        ids: of all samples of the run, in their order.
        counts: how many of them each measure takes, from the first.
        notes: remarks on loading, with which the notes of a measure begin.
        options: of each measure, those that are no settings of its section.
        parts: what each measure gave, in base64; only `lipaudit merge` reads it.
    """

    number: int
    of: int
    ids: tuple[str, ...]
    counts: dict[str, int]
    notes: tuple[Note, ...]
    options: dict[str, dict[str, Any]]
    parts: dict[str, str]

    @property
    def name(self) -> str:
        """Say which it is: `shard 2 of 4`."""
        return f"shard {self.number} of {self.of}"


class Report(Frozen):
    """One run of lipaudit: the only thing that is written, compared, gated and rendered.

    It is partial where a measure failed or the run was cut short; each section that failed says
    why, each that a time limit ended how many samples it left. `shard` is there where it is of one
    part of a run. `samples` says where each sample is found, in the order of its `ids`: its
    `place` in the data (a file, a line, an index) and, of texts, how its `text` begins; empty
    where samples are made up.
    """

    schema_: Literal["lipaudit.report"] = Field("lipaudit.report", alias="schema")
    schema_version: str = SCHEMA_VERSION
    status: Literal["complete", "partial"] = "complete"
    run: Run
    shard: Shard | None = None
    samples: dict[str, tuple[Cell, ...]] = Field({}, repr=False)
    sections: tuple[Section, ...]

    _check_lengths = field_validator("samples")(require_aligned)

    @model_serializer(mode="wrap")
    def _leave_out_empty(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write no shard where the report is of a whole run."""
        return {k: v for k, v in plain(self).items() if k != "shard" or v}

    def found(self, column: str) -> dict[str, str]:
        """Return where samples are found (`place`), or how their texts begin (`text`), by id."""
        pairs = zip(self.samples.get("ids", ()), self.samples.get(column, ()), strict=False)
        return {str(name): str(value) for name, value in pairs if value}

    def section(self, measure: str) -> Section | None:
        """Return the section of a measure, None when it was not measured."""
        return next((s for s in self.sections if s.measure == measure), None)

    @property
    def failures(self) -> dict[str, Failure]:
        """The measures that failed, and why."""
        return {s.measure: s.failure for s in self.sections if s.failure is not None}

    @property
    def unmeasured(self) -> dict[str, int]:
        """The measures that a time limit ended, and how many samples it left."""
        return {s.measure: s.unmeasured for s in self.sections if s.unmeasured}

    def __str__(self) -> str:
        """Return the scorecard, in at most 25 lines."""
        import lipaudit  # by the public names: rendering is a layer above

        return lipaudit.summarize(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Show itself in a notebook: its page, in a frame of its own so that styles stay apart."""
        import lipaudit

        page = lipaudit.render(self, "html").decode()
        return f'<iframe srcdoc="{escape(page)}" style="width:100%;height:40em;border:0"></iframe>'


def rows_of(section: Section | None) -> list[Row]:
    """Return the rows of a section, none where it was not measured."""
    return [] if section is None else list(section.rows)


def is_of_heads(section: Section) -> bool:
    """Tell whether every row is of one head, named by the columns `layer` and `head`."""
    columns = section.columns
    return all(name in columns and columns[name].needed for name in ("layer", "head"))


def model_labels(reports: Sequence[Report]) -> list[str]:
    """Name each report by its model, with a letter in front where models repeat."""
    specs = [report.run.model.spec for report in reports]
    if len(set(specs)) == len(specs):
        return specs
    return [f"{chr(ord('A') + index)}: {spec}" for index, spec in enumerate(specs)]
