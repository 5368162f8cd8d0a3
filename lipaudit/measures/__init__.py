"""Every measure by its name, those of the core and of wings, and audits.

No file of a measure loads torch before it measures: commands that read reports start at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args

from pydantic import field_validator, model_validator

from lipaudit.errors import UsageError, suggestion
from lipaudit.measures.attack import ATTACK, AttackOptions
from lipaudit.measures.attention import ATTENTION
from lipaudit.measures.base import Measure, MeasureOptions
from lipaudit.measures.bounds import BOUNDS
from lipaudit.measures.jacobian import JACOBIAN, JacobianOptions
from lipaudit.measures.weights import WEIGHTS
from lipaudit.settings.option import Names, Need, Settings, option
from lipaudit.tables import Column, Layout
from lipaudit.tables.plugins import collect, explain_missing
from lipaudit.tables.report import Drawing
from lipaudit.theory import NODES

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
    """Return the measure of a name.

    Raises:
        UsageError: it does not exist, or is not installed.
    """
    known = load_measures()
    if name not in known:
        advice = explain_missing() or suggestion(name, known)
        raise UsageError(f"there is no measure {name!r}", advice)
    return known[name]


def _find_fault(name: str, measure: Measure) -> str:
    sections = [table.name for table in measure.tables]
    if not sections or sections[0] != name:
        return f"has no table of the section {name!r}"
    drawings = get_args(Drawing)
    for number, table in enumerate(measure.tables):
        if number and not table.name.startswith(f"{name}."):
            return f"has a table of the section {table.name!r}"
        if table.display is None:
            continue
        for drawing in table.display.drawings:
            if drawing not in drawings:
                known = ", ".join(drawings)
                return f"shows a drawing {drawing!r}, which does not exist (there are: {known})"
    return ""


def layouts() -> dict[str, Layout]:
    """Return the layout of every section, by the section's name."""
    by_section: dict[str, Layout] = {}
    for measure in load_measures().values():
        by_section |= {table.name: table for table in measure.tables}
    return by_section


def find_column(metric: str) -> Column:
    """Return the column of a metric (`bounds.exact:median`, `attack.robust@pgd`).

    If its measure is not installed, the column has the metric's name only.
    """
    path = re.split("[@:]", metric)[0]
    section, _, name = path.rpartition(".")
    columns: dict[str, Column] = {}
    layout = layouts().get(section)
    if layout is not None:
        columns = {**layout.columns, **layout.sample_columns}
    return columns.get(name, Column(name, ""))


def option_types() -> dict[str, type[MeasureOptions]]:
    """Return the options of every command that measures, by its name."""
    types: dict[str, type[MeasureOptions]] = {}
    for name, measure in load_measures().items():
        if not measure.command:
            types[name] = measure.options
    return types


# Fewer samples where a sample costs more.
QUICK_SAMPLES = {"attention": 16, "bounds": 8, "jacobian": 64, "attack": 64, "certify": 4}
# Enough for a gate: in 9 of 10 runs a drop of 8 points, or norms that grow by 10 %, are seen.
AUDIT_SAMPLES = {"bounds": 16, "jacobian": 128, "attack": 256}
FULL_SAMPLES = {"attention": 128, "bounds": 32, "jacobian": 256, "attack": 512, "certify": 32}
# The demos are of digits, which larger changes leave readable.
DEMO_EPS, EPS = "0.1", "2/255"
USUAL = ("bounds", "attention", "jacobian", "attack")
# Options of attack that an audit also takes.
OF_ATTACK = ("eps", "attack", "norm")
# Seconds per sample for certificates in an audit; a started ball is finished.
SECONDS = 20.0


def _of_attack(name: str, default: str = "") -> Any:
    """Return an option of the attacks as an option of the audit."""
    known = AttackOptions.options()[name]
    attacked = Need(
        "a measure attack or certify",
        lambda options: not {"attack", "certify"}.isdisjoint(options.names),
    )
    return option(None, known.help + default, *known.flags, need=attacked)


class AuditOptions(Settings):
    """What an audit measures, and where its report goes."""

    quick: bool = option(False, "Fewer samples, quick attacks.")
    full: bool = option(
        False,
        "More samples, all of AutoAttack.",
        need=Need("a run without --quick", lambda options: not options.quick),
    )
    only: Names = option(None, f"Measures to run; default: {', '.join(USUAL)}.")
    skip: Names = option(None, "Measures to leave out.", rare=True)
    certify: bool = option(
        False, f"Also compute certificates, at the radii --eps: up to {SECONDS:g} s a sample."
    )
    eps: str | None = _of_attack("eps", f" Default: {EPS}, of a demo {DEMO_EPS}.")
    attack: str | None = _of_attack("attack")
    norm: str | None = _of_attack("norm")
    run_dir: Path | None = option(None, "Folder for the reports.", metavar="FOLDER")

    @field_validator("only", "skip")
    @classmethod
    def _require_measures(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for name in names or ():
            find_measure(name)
        return names

    @model_validator(mode="after")
    def _some(self) -> AuditOptions:
        run = self.only or USUAL
        for name in self.skip or ():
            if name not in run:
                raise UsageError(f"--skip {name}: an audit does not run it by default")
        if not self.names:
            raise UsageError("no measure is left to run", "Choose a measure with --only.")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Return the requested measures, in order."""
        wanted = set(USUAL)
        if self.only is not None:
            wanted = set(self.only)
        if self.certify:
            wanted.add("certify")
        wanted -= set(self.skip or ())
        return tuple(name for name in load_measures() if name in wanted)

    @property
    def required(self) -> frozenset[str]:
        """Return the measures that the user named: it is an error if one cannot run."""
        named = set(self.only or ())
        if any(getattr(self, name) for name in OF_ATTACK):
            named.add("attack")
        return frozenset(named)

    def plan(self, *, demo: bool) -> dict[str, MeasureOptions]:
        """Return the options of every measure.

        Raises:
            UsageError: for a bad radius, attack or norm.
        """
        from lipaudit.wings.certificates.options import BallNorm, CertifyOptions

        ensemble = "quick" if self.small(demo=demo) else "autoattack"
        given: dict[str, str] = {}
        for name in OF_ATTACK:
            value = getattr(self, name)
            if value is not None:
                given[name] = value
        given["usual"] = f"fgsm,pgd,{ensemble}"
        given["usual_eps"] = DEMO_EPS if demo else EPS
        attacks = AttackOptions.parse(given)
        # Certificates are of the attacked balls, and of norms that have certificates.
        certificates = CertifyOptions(
            eps=tuple(radius for radius in attacks.eps if radius.value and not radius.unit),
            usual_eps=attacks.usual_eps,
            norm=attacks.norm if attacks.norm in get_args(BallNorm) else None,
            seconds=SECONDS,
            nodes=NODES,
        )
        plan: dict[str, MeasureOptions] = {"attack": attacks, "certify": certificates}
        plan["jacobian"] = JacobianOptions(shares=True)
        options: dict[str, MeasureOptions] = {}
        for name in self.names:
            if name in plan:
                options[name] = plan[name]
            else:
                options[name] = load_measures()[name].options()
        return options

    def small(self, *, demo: bool) -> bool:
        """Say whether the audit is quick, which is the default on a demo."""
        return self.quick or (demo and not self.full)

    def counts(self, *, demo: bool) -> Mapping[str, int]:
        """Return the number of samples of each measure that does not use its default."""
        if self.small(demo=demo):
            return QUICK_SAMPLES
        return FULL_SAMPLES if self.full else AUDIT_SAMPLES
