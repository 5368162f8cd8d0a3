"""Every measure by its name, those of the core and of wings, and audits.

No file of a measure loads torch before it measures: commands that read reports start at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from pydantic import field_validator, model_validator

from lipaudit.errors import UsageError, suggestion
from lipaudit.measures.attack import ATTACK
from lipaudit.measures.attention import ATTENTION
from lipaudit.measures.base import AuditRequest, Measure, MeasureOptions
from lipaudit.measures.bounds import BOUNDS
from lipaudit.measures.jacobian import JACOBIAN
from lipaudit.measures.weights import WEIGHTS
from lipaudit.settings.option import Need, Option, Settings, add_options, option
from lipaudit.settings.value_types import Names
from lipaudit.tables import Column, Layout, Report, Section, summary
from lipaudit.tables.plugins import collect, explain_missing
from lipaudit.tables.report import Drawing
from lipaudit.tables.summary import Headline

# The measures of the core. A new one is its file and its name here.
_ORDER = BOUNDS, ATTENTION, JACOBIAN, ATTACK, WEIGHTS
OWN: dict[str, Measure] = {measure.name: measure for measure in _ORDER}


@cache
def load_measures() -> dict[str, Measure]:
    """Return every measure by its name, in the order of an audit: see `Measure.place`.

    Raises:
        UsageError: a plug-in cannot be used; the message names its package.
    """
    known = OWN | collect(Measure, "measures", OWN, check=_find_fault)
    return dict(sorted(known.items(), key=lambda pair: pair[1].place))


def find_measure(name: str) -> Measure:
    """Return the measure with a name.

    Raises:
        UsageError: there is no such measure, or its package is not installed.
    """
    known = load_measures()
    if name not in known:
        advice = explain_missing() or suggestion(name, known)
        raise UsageError(f"there is no measure {name!r}", advice)
    return known[name]


def _find_fault(name: str, measure: Measure) -> str:
    """Return what is wrong with the tables of a plug-in's measure; empty if nothing is.

    A table describes a section of the report. The first table must have the name of the measure,
    all further tables a name NAME.SOMETHING. Headlines are the figures that a report shows first:
    their columns must be columns of the table. The drawings of a table must exist.
    """
    if not measure.tables or measure.tables[0].name != name:
        return f"has no table of the section {name!r}"
    # The built-in drawings, and those of plug-ins.
    drawings = (*get_args(Drawing), *collect(str, "drawings", get_args(Drawing)))
    for number, table in enumerate(measure.tables):
        if number and not table.name.startswith(f"{name}."):
            return f"has a table of the section {table.name!r}"
        for headline in table.headlines:
            if headline.column not in {**table.columns, **table.sample_columns}:
                return f"has a headline of the column {headline.column!r}, which it does not have"
        if table.display is None:
            continue
        for drawing in table.display.drawings:
            if drawing not in drawings:
                known = ", ".join(drawings)
                return f"shows a drawing {drawing!r}, which does not exist (there are: {known})"
    return ""


def layouts() -> dict[str, Layout]:
    """Return the layout of every section, by the section's name."""
    tables = (table for measure in load_measures().values() for table in measure.tables)
    return {table.name: table for table in tables}


def summarise(report: Report) -> Section:
    """Return the summary of a report: its first figures, and its warnings as notes."""
    return summary.summarise(report, layouts())


def list_headlines() -> list[tuple[str, Headline]]:
    """Return the headlines of all sections as (section, headline), in the order of a scorecard.

    Headlines are the figures that a report shows first.
    """
    pairs = []
    for name, layout in layouts().items():
        pairs += [(name, headline) for headline in layout.headlines]
    return sorted(pairs, key=lambda pair: pair[1].place)


def find_headline(metric: str) -> Headline | None:
    """Return the headline of a metric, such as `attack.robust:mean`; None if its column has none.

    A headline is a figure that a report shows first.
    """
    column = re.split("[@:]", metric)[0]  # attack.robust, without a statistic or a row
    for section, headline in list_headlines():
        if column == f"{section}.{headline.column}":
            return headline
    return None


def find_column(metric: str) -> Column:
    """Return the column of a metric (`bounds.exact:median`, `attack.robust@pgd`).

    If the measure of the metric is not installed, the result is a column with a name only.
    """
    path = re.split("[@:]", metric)[0]  # SECTION.COLUMN, without a statistic or a row
    section, _, name = path.rpartition(".")
    columns = {}
    layout = layouts().get(section)
    if layout is not None:
        columns = {**layout.columns, **layout.sample_columns}
    return columns.get(name, Column(name, ""))


def option_types() -> dict[str, type[MeasureOptions]]:
    """Return the class of options of every command that runs one measure, by its name."""
    types = {}
    for name, measure in load_measures().items():
        if not measure.command:  # a measure with `command` is run by the command of this name
            types[name] = measure.options
    return types


# What an audit runs by default.
USUAL = ("bounds", "attention", "jacobian", "attack")


@cache
def load_audit_options() -> type[AuditOptions]:
    """Return the class `AuditOptions` with the options that measures add to an audit.

    A measure may add two kinds: a switch --NAME, which runs it, such as --certify; and options
    that its own command has, too, such as --eps of `attack`.
    """
    fields = {}
    measures = load_measures()
    for name, measure in measures.items():
        if measure.audit.switch:  # the help of the switch; empty if it has none
            fields[name] = option(False, measure.audit.switch)
            fields[name].annotation = bool
    for measure in measures.values():
        # `addition` is added to the help that the option has in the command of the measure.
        for name, addition in measure.audit.options.items():
            known = measure.options.options()[name]
            text = known.help + addition
            # `need`: the option is refused if no measure runs that uses it.
            fields[name] = option(None, text, *known.flags, need=_need_user(name))
            # The text as the user typed it: the measure parses it later.
            fields[name].annotation = str | None
    return add_options(AuditOptions, fields)


def _need_user(name: str) -> Need:
    """Return the condition of an option of audits: a measure that uses it must run."""
    users = []
    for measure in load_measures().values():
        if name in measure.audit.options or name in measure.audit.uses:
            users.append(measure.name)
    text = f"a measure {' or '.join(users)}"
    return Need(text, lambda options: not set(users).isdisjoint(options.names))


class AuditOptions(Settings):
    """What an audit measures, and where its report goes."""

    quick: bool = option(False, "Fewer samples, quick attacks.")
    full: bool = option(
        False,
        "More samples.",
        need=Need("a run without --quick", lambda options: not options.quick),
    )
    only: Names = option(None, f"Measures to run; default: {', '.join(USUAL)}.")
    skip: Names = option(None, "Measures to leave out.", rare=True)
    run_dir: Path | None = option(None, "Folder for the reports.", metavar="FOLDER")

    @classmethod
    def complete(cls) -> type[AuditOptions]:
        """Return the class of audit options with those that measures add, such as --eps.

        Call it on `AuditOptions`. A subclass already has them, and is returned itself.
        """
        if cls is AuditOptions:
            return load_audit_options()
        return cls

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Return the options in the order of the help: --run-dir comes last."""
        known = super().options()
        known["run_dir"] = known.pop("run_dir")
        return known

    @field_validator("only", "skip")
    @classmethod
    def _require_measures(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """Refuse names of measures that do not exist."""
        for name in names or ():
            find_measure(name)
        return names

    @model_validator(mode="after")
    def _require_some(self) -> AuditOptions:
        """Refuse --skip of a measure that would not run anyway, and an audit without measures."""
        by_default = self.only or USUAL
        for name in self.skip or ():
            if name not in by_default:
                raise UsageError(f"--skip {name}: an audit does not run it by default")
        if not self.names:
            raise UsageError("no measure is left to run", "Choose a measure with --only.")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the measures to run, in the order of an audit.

        These are the measures of --only, or else the default ones. Switches such as --certify add
        measures, and --skip removes measures.
        """
        names = set(USUAL)
        if self.only is not None:
            names = set(self.only)
        for name, measure in load_measures().items():
            if measure.audit.switch and getattr(self, name):  # it has a switch --NAME, typed here
                names.add(name)
        names -= set(self.skip or ())
        return tuple(name for name in load_measures() if name in names)

    @property
    def given(self) -> dict[str, str]:
        """Return the options of measures that the user typed, such as --eps: text by name."""
        given = {}
        for measure in load_measures().values():
            for name in measure.audit.options:
                value = getattr(self, name)
                if value is not None:
                    given[name] = value
        return given

    @property
    def required(self) -> frozenset[str]:
        """Return the measures that the user requested: if one cannot run, this is an error.

        A measure is requested by --only, or by an option of its own, such as --eps.
        """
        names = set(self.only or ())
        for name, measure in load_measures().items():
            if not measure.audit.options.keys().isdisjoint(self.given):
                names.add(name)
        return frozenset(names)

    def plan(self, *, demo: bool) -> dict[str, MeasureOptions]:
        """Return the options of every measure to run, by its name.

        A measure with `audit.plan` makes its options from the request of the user. All other
        measures get their default options.

        Raises:
            UsageError: for a bad radius, attack or norm.
        """
        request = AuditRequest(self.given, demo, self.find_size(demo=demo))
        options = {}
        for name in self.names:
            measure = load_measures()[name]
            plan = measure.audit.plan
            options[name] = measure.options() if plan is None else plan(request)
        return options

    def find_size(self, *, demo: bool) -> Literal["quick", "usual", "full"]:
        """Return the size of the audit, which is quick by default on a demo."""
        if self.quick or (demo and not self.full):
            return "quick"
        return "full" if self.full else "usual"

    def counts(self, *, demo: bool) -> Mapping[str, int]:
        """Return the number of samples by measure, for this size of the audit.

        A measure may have numbers for the sizes quick, usual and full. Measures without a number
        for this size are left out: they use their default.
        """
        size = self.find_size(demo=demo)
        counts = {}
        for name, measure in load_measures().items():
            if size in measure.audit.samples:
                counts[name] = measure.audit.samples[size]
        return counts
