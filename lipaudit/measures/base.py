"""What a measure is: its options, its tables, a generator of Parts, and their summary.

A measure's file is imported by commands that only read reports: it imports torch, numpy and what
computes with them inside of functions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import Field

from lipaudit.errors import InputError
from lipaudit.settings.option import Settings, option
from lipaudit.settings.value_types import Layers
from lipaudit.tables import Array, Layout, Note, Notes, Row, Section
from lipaudit.tables.columns import HEAD, make_row, wilson
from lipaudit.tables.trials import COUNTED, Norm, is_repeat, parse_column
from lipaudit.theory import TOL
from lipaudit.theory import WITHIN as PROVEN_WITHIN

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from lipaudit.attacks.evaluate import Outcome
    from lipaudit.attacks.signs import Checks
    from lipaudit.data.batch import Batch
    from lipaudit.models.net import Net

Values: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
# The cells of some columns of a table, by name; None: not computed.
Columns = dict[str, list[float | None]]
# Plain values by name, which JSON can hold (see `Part.facts`).
Facts = dict[str, Any]
# Arrays by name; their first axis is the samples.
Arrays: TypeAlias = "dict[str, Values]"


class MeasureOptions(Settings):
    """Options of a measure; they become the section's `settings`.

    The docstring of a subclass is the help of its command.

    Attributes:
        seed: of everything random.
        layers: which attention layers; None is all.
    """

    # Default number of samples.
    samples: ClassVar[int] = 8
    # Values of newer options in older reports, which do not record them.
    older_defaults: ClassVar[Mapping[str, Any]] = {}
    # Whether the measure reads attention layers, and has no figures without one.
    reads_layers: ClassVar[bool] = False
    # Whether its predictions are those of --autocast.
    deploys: ClassVar[bool] = False
    # Whether the measure needs labels.
    labelled: ClassVar[bool] = False
    # Whether a language model scores continuations for it: never (it reads texts alone), asked
    # (with --score), or always (there is no other way to measure such a model).
    scores: ClassVar[Literal["never", "asked", "always"]] = "never"

    # Options that take the place of MODEL, and for each the function (`module:function`) that is
    # called with these options, those of the run and the output, in place of measuring.
    alone: ClassVar[Mapping[str, str]] = MappingProxyType({})

    # Fields of every measure, typed with the run or with measures of layers.
    seed: int = 0
    layers: Layers = None

    @property
    def tokens(self) -> int | None:
        """Return the number of tokens that texts need, if the measure needs long ones."""
        return None

    @property
    def reads_samples(self) -> bool:
        """Say whether figures depend on the samples."""
        return True

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the files that the measure writes in addition to the report."""
        return ()

    def list_seeds(self, ids: Sequence[str]) -> list[int]:
        """Return the seed of each sample's random numbers, independent of its batch."""
        return [seed_of(sample, self.seed) for sample in ids]

    def adapt(self, kind: str, changes: Sequence[Norm] = COUNTED, why: str = "") -> Self:
        """Return the options for a kind of model: unchanged, unless a measure overrides this.

        Args:
            kind: image, tokens or text.
            changes: the units of the model's texts that can be changed: words, characters.
            why: the reason, for error messages, why other units cannot be changed.

        Raises:
            UsageError: the options do not suit such a model.
        """
        return self

    def adapt_scores(self, changes: Sequence[Norm]) -> Self:
        """Return the options for a language model that scores continuations of prompts.

        The default treats the model as a text model whose texts cannot be changed, and ignores
        `changes`. A measure that can change prompts, such as `attack`, overrides this method.

        Args:
            changes: the units of the prompts that could be changed: words, characters.

        Raises:
            UsageError: the options do not suit such a model.
        """
        return self.adapt("text", changes=(), why="it scores continuations")

    def redirect(self, name: str) -> tuple[str, MeasureOptions]:
        """Return the measure that these options ask for, with its options; as a rule this one."""
        return name, self

    def list_unsaved(self) -> dict[str, Any]:
        """Return the options that can be typed, but are not settings of the report, by name."""
        settings = self.model_dump()
        return {name: getattr(self, name) for name in self.options() if name not in settings}

    def identify(self) -> dict[str, Any]:
        """Return all that figures depend on among the options; of files, the contents."""
        return dict(self)

    def draw_steepest(self, sections: Sequence[Section]) -> Self:
        """Return options that draw the map of the steepest head of earlier sections, if any."""
        return self


class NormOptions(MeasureOptions):
    """Options of a measure that takes norms by Lanczos steps.

    Attributes:
        tol: relative accuracy of the norms, estimated.
        max_steps: most Lanczos steps per norm.
        within: proven relative error: how far the probabilistic limit may be above a norm.
    """

    tol: float = option(
        TOL,
        "Relative accuracy at which the iteration stops (estimated, not proven).",
        gt=0,
        lt=1,
        rare=True,
    )
    max_steps: int = Field(300, ge=1)
    within: float = option(
        PROVEN_WITHIN,
        "Proven relative accuracy of the norms (probability 99.9%).",
        gt=0,
        allow_inf_nan=False,
        rare=True,
    )

    @property
    def accuracy(self) -> dict[str, Any]:
        """Return the accuracy for the solver."""
        return {"tol": self.tol, "max_steps": self.max_steps, "within": self.within}


@dataclass(frozen=True)
class Part:
    """The result on one chunk of samples: the unit of progress, of resuming and of sharding.

    A measure may yield several parts of the same samples: each replaces the one before.

    Attributes:
        ids: ids of the samples of the chunk.
        values: arrays whose first axis is the sample; of length 1 for figures of the whole chunk.
        facts: values that JSON can hold (names of layers, reasons): lists, dicts with text as
            keys, numbers, text. Facts that were stored come back with lists in place of tuples.
        notes: remarks on this chunk.
        complete: whether the work on the chunk is done. A resumed run gives incomplete parts back
            to the measure.
    """

    ids: tuple[str, ...]
    values: Mapping[str, Values]
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: Notes = ()
    complete: bool = True


@dataclass(frozen=True)
class AuditRequest:
    """What a person asks of an audit.

    Attributes:
        given: the typed options that measures add to an audit, by name.
        demo: whether every model is a demo.
        size: quick, full, or usual.
    """

    given: Mapping[str, str]
    demo: bool
    size: Literal["quick", "usual", "full"]


@dataclass(frozen=True, kw_only=True)
class AuditRole:
    """The part of a measure in an audit.

    Attributes:
        switch: help of an option `--NAME` that adds the measure; empty: only --only adds it.
        options: its options of text that an audit has, too: the end of each one's help, by name.
        uses: options that other measures add to an audit, and that it uses, too.
        samples: number of samples by size; where one is missing, the default of its options.
        plan: returns its options; None: the defaults.
    """

    switch: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    uses: tuple[str, ...] = ()
    samples: Mapping[Literal["quick", "usual", "full"], int] = field(default_factory=dict)
    plan: Callable[[AuditRequest], MeasureOptions] | None = None


@dataclass(frozen=True)
class Measure:
    """A measure, as every command, the gate and the report know it.

    Attributes:
        name: name of its command and its section.
        tables: layouts of its sections: first the section NAME, then those called NAME.SOMETHING.
        options: class of its options; the docstring is the help of its command.
        compute: yields a Part per batch. No batch is empty.
        summarise: makes the sections from all parts, without side effects.
        batch: default number of samples at a time.
        short_batch: the same for short samples (see `Batch.is_short`); None: `batch`.
        chunk: samples per Part, if the result depends on it; the batch size then goes to the
            options.
        encode_files: returns the contents of the files that its options ask for.
        check: refuses unsuitable models, samples or options before anything is measured.
        command: the command that runs it; empty for a command of its own name.
        place: its place in audits and lists, in ascending order.
        audit: its part in an audit.
        moved: options for files that may be elsewhere when `gate` and `compare` measure a MODEL
            like a baseline: fields of these commands, by name, as `repeat_option` returns them.
    """

    name: str
    tables: tuple[Layout, ...]
    options: type[MeasureOptions]
    compute: Callable[[Net, Iterable[Batch], Any], Iterator[Part]]
    summarise: Callable[[Sequence[Part], Any], list[Section]]
    batch: int
    short_batch: int | None = None
    chunk: int | None = None
    encode_files: Callable[[Sequence[Part], Any], Mapping[Path, bytes]] = lambda _, _options: {}
    check: Callable[[Net, Batch, Any], object] = lambda _net, _batch, _options: None
    command: str = ""
    place: int = 50
    audit: AuditRole = AuditRole()
    moved: Mapping[str, Any] = field(default_factory=dict)


class TimeOverError(Exception):
    """The time limit is over: the work on the current part is dropped."""


@dataclass(frozen=True)
class Listener:
    """Receives the progress and the notes of a measure while it runs.

    Attributes:
        moves: receives the number of finished samples of the current part.
        costs: receives the number of forward passes of a sample, seconds per pass, and their name.
        notes: receives a note at once; the report does not have it.
        end: when the time limit is over, in seconds of `time.monotonic`.
    """

    moves: Callable[[float], None] = lambda _samples: None
    costs: Callable[[int, float, str], None] = lambda _passes, _seconds, _unit: None
    notes: Callable[[Note], None] = lambda _note: None
    end: float = math.inf


NOBODY = Listener()
_LISTENER: ContextVar[Listener] = ContextVar("listener", default=NOBODY)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Send progress and notes of measures inside the block to a listener, with its time limit."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def report_progress(samples: float) -> None:
    """Report how many samples of the current part are done; for measures with long parts."""
    _LISTENER.get().moves(samples)


def report_cost(passes: int, seconds: float, unit: str) -> None:
    """Report, before the work, how many passes a sample takes, seconds of each, and their name."""
    _LISTENER.get().costs(passes, seconds, unit)


def report_note(code: str, text: str) -> None:
    """Report at once what is known so far, or what is to come; the report does not have it."""
    _LISTENER.get().notes(Note.info(code, text))


def is_limited() -> bool:
    """Say whether the run has a time limit."""
    return _LISTENER.get().end < math.inf


def require_time() -> None:
    """End the work on the current part if the time limit is over.

    Raises:
        TimeOverError: the time limit is over.
    """
    if time.monotonic() >= _LISTENER.get().end:
        raise TimeOverError


def join_parts(parts: Sequence[Part], name: str) -> Values:
    """Concatenate one array of all parts along the samples."""
    import numpy as np

    return np.concatenate([part.values[name] for part in parts])


def join_arrays(parts: Sequence[Part], besides: Collection[str] = ()) -> Arrays:
    """Concatenate every array that all parts have, along the samples, but for those in `besides`.

    Arrays that only some parts have are left out: an older version may have stored these parts.
    """
    common = [name for name in parts[0].values if all(name in part.values for part in parts)]
    return {name: join_parts(parts, name) for name in common if name not in besides}


def sample_ids(parts: Iterable[Part | Batch]) -> tuple[str, ...]:
    """Return the ids of the samples of parts or batches in order."""
    return tuple(i for part in parts for i in part.ids)


def select_complete(parts: Iterable[Part]) -> list[Part]:
    """Return the parts that are complete."""
    return [part for part in parts if part.complete]


def make_rows(
    layout: Layout, heads: Sequence[Sequence[Any]] = (), /, **columns: Any
) -> tuple[Row, ...]:
    """Return the rows of a table from its columns.

    Args:
        layout: the layout of the table.
        heads: (layer, head, module) of each row, for a table of heads: three further columns.
        columns: by name, one value per row, or a single value for all rows; plain values, or an
            array of numpy. NaN means not computed, and becomes None.
    """
    if heads:
        layer_head_module = zip(*heads, strict=True)  # from rows to columns
        columns |= zip(HEAD, layer_head_module, strict=True)
    for name, values in columns.items():
        # Cells are plain values of Python, which JSON can hold, unlike numbers of numpy.
        if hasattr(values, "tolist"):
            columns[name] = values.tolist()
    count = max(len(values) for values in columns.values() if isinstance(values, list | tuple))
    cells = []
    for values in columns.values():
        if not isinstance(values, list | tuple):  # a single value is repeated in all rows
            values = [values] * count
        cells.append(_read_cells(values))
    rows = zip(*cells, strict=True)
    return tuple(make_row(layout.columns, dict(zip(columns, row, strict=True))) for row in rows)


def _read_cells(values: Iterable[Any], *, whole: bool = False) -> Iterator[Any]:
    """Yield cells of plain values: None in place of NaN; with `whole`, numbers as integers."""
    for value in values:
        if value is None or value != value:  # NaN differs from itself
            yield None
        elif whole:
            yield int(value)
        else:
            yield value


def make_section(
    layout: Layout,
    parts: Sequence[Part],
    options: MeasureOptions,
    rows: Sequence[Row],
    notes: Iterable[Note] = (),
    *,
    samples: Mapping[str, Values | Sequence[Any]] = MappingProxyType({}),
    arrays: Mapping[str, Values] = MappingProxyType({}),
    **others: Any,
) -> Section:
    """Return a section of the report of a measure.

    Args:
        layout: the layout of the section.
        parts: the parts, with sample ids, and facts of samples: examples, gradients, classes.
        options: the options; the section records them as its settings.
        rows: the rows of its table.
        notes: the notes.
        samples: columns with a value per sample. In an array of numpy NaN means not computed, and
            becomes None; a list is stored as it is.
        arrays: the values of each sample that rows summarise, (samples, rows).
        others: other attributes of the section.
    """
    columns: dict[str, Any] = {"ids": sample_ids(parts)}
    for name, values in samples.items():
        if hasattr(values, "tolist"):
            column, _ = parse_column(name)  # robust@pgd,linf,0.1 -> robust
            # The format d is that of whole numbers: booleans are stored as 0 and 1.
            whole = layout.sample_columns[column].format == "d"
            columns[name] = tuple(_read_cells(values.tolist(), whole=whole))
        else:
            columns[name] = tuple(values)
    return layout.section(
        settings=options.model_dump(),
        rows=tuple(rows),
        notes=tuple(notes),
        samples=columns,
        arrays={name: Array.of(values.T) for name, values in arrays.items()},
        **{name: join_facts(parts, name) for name in ("examples", "gradients", "classes")},
        **others,
    )


def make_share_columns(name: str, flags: Values) -> dict[str, Any]:
    """Return the columns of a share with its 95% limits (Wilson), one value per row.

    Args:
        name: name of the column of the share; the limits are NAME_low and NAME_high.
        flags: 1 for each sample that counts, else 0, or a share in between, (samples, rows).
    """
    limits = [wilson(float(of_row.sum()), len(of_row)) for of_row in flags.T]
    return {
        name: flags.mean(0),
        f"{name}_low": [low for low, _ in limits],
        f"{name}_high": [high for _, high in limits],
    }


def mark_unique(parts: Sequence[Part]) -> Values:
    """Return True for each sample that repeats no earlier one, (samples,).

    Shares and medians use only these samples.
    """
    import numpy as np

    return np.array([not is_repeat(name) for name in sample_ids(parts)])


def select_unique(parts: Sequence[Part], arrays: Mapping[str, Values]) -> Arrays:
    """Return arrays, (samples, ...), without the samples that repeat an earlier one."""
    unique = mark_unique(parts)
    return {name: values[unique] for name, values in arrays.items()}


def note_repeats(parts: Sequence[Part]) -> Iterator[Note]:
    """Warn if samples repeat others."""
    unique = mark_unique(parts)
    if not unique.all():
        yield Note.warn(
            "repeated-samples",
            f"{sum(~unique)} of {len(unique)} samples are duplicates, which accuracies, means and "
            "medians leave out",
        )


def name_classes(net: Net, *columns: Values) -> dict[str, str]:
    """Return the names of the classes whose numbers occur in some columns, by number as text.

    Classes without a name are left out. The numbers are texts because facts are stored as JSON.
    """
    numbers = set()
    for column in columns:
        numbers.update(column.tolist())
    return {str(i): name for i, name in enumerate(net.labels or ()) if i in numbers}


def join_facts(parts: Sequence[Part], name: str) -> dict[Any, Any]:
    """Return the entries of all dicts that parts have under a name among their facts."""
    joined: dict[Any, Any] = {}
    for part in parts:
        joined |= part.facts.get(name, {})
    return joined


def seed_of(sample: str, seed: int) -> int:
    """Return the seed of a sample's random numbers, independent of its batch."""
    # An id is a hash in hexadecimal: 12 digits are 48 bits.
    return (int(sample[:12], 16) + seed) % 2**63


def notes(parts: Sequence[Part]) -> Notes:
    """Return the distinct notes of all parts in order."""
    return tuple(dict.fromkeys(note for part in parts for note in part.notes))


def note_lower_estimates(within: float) -> Iterator[Note]:
    """Note how far norms may be too low: `within` is their relative error, 0 if they are exact."""
    if within > 0:
        text = f"norms ‖J‖ are at most {100 * within:.2g}% too low (99.9% confidence)"
        yield Note.info("lower-estimates", text)


def note_missed(count: int, what: str = "norms") -> Iterator[Note]:
    """Warn of norms that did not converge; nothing if there are none."""
    if count:
        text = f"{count} {what} did not converge to tol, so they may be too low"
        yield Note.warn("not-converged", text)


def reduce_known(values: Values, statistic: Callable[[Values], Any]) -> float | None:
    """Return a statistic of the values that are not NaN, None if all are."""
    known = values[values == values]  # NaN differs from itself
    if len(known) == 0:
        return None
    return float(statistic(known))


def reduce_columns(values: Values, statistic: Callable[[Values], Any]) -> list[float | None]:
    """Return a statistic of each column of an array (samples, columns), by `reduce_known`."""
    return [reduce_known(column, statistic) for column in values.T]


def require_labels(batch: Batch, what: str) -> Tensor:
    """Return the labels of samples, all of which must have one.

    Raises:
        InputError: a sample has no label. The message says that `what` needs one.
    """
    if batch.y is None or bool((batch.y < 0).any()):
        raise InputError(
            f"{what} needs a label for every sample",
            "Give labelled samples with --data (a folder, .npz, .csv...).",
        )
    return batch.y


def require_decision(net: Net, advice: str) -> None:
    """Refuse a model without a decision between classes, or whose tokens cannot be perturbed.

    Raises:
        InputError: the model has fewer than two classes, or its embedding table was not found.
    """
    if (net.classes or 0) < 2:
        reason = f"{net.architecture} has one class" if net.classes else net.lacks_classes
        raise InputError(
            f"{reason}, so no prediction is right or wrong",
            f"{advice} A model with one logit z, (samples, 1), has to return "
            "torch.cat([0 * z, z], 1).",
        )
    if net.kind == "text" and net.entry is None:
        raise InputError(
            f"the embedding layer of {net.architecture} was not found",
            "Write a py: factory that returns a ModelSpec with its `entry`.",
        )


def read_checks(*outcomes: Outcome) -> list[Facts]:
    """Return the signs of weak attacks that the clean samples show, as facts of a part."""
    return [asdict(outcome.checks) for outcome in outcomes if outcome.checks]


def sum_checks(parts: Sequence[Part]) -> Checks:
    """Add up the counts of the parts: how many clean samples show each sign of weak attacks."""
    from lipaudit.attacks.signs import Checks

    counts = (Checks(**checks) for part in parts for checks in part.facts["checks"])
    return reduce(Checks.__add__, counts)
