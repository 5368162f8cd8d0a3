"""The scorecard of a page: the summary of a report, a line for each figure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace

from lipaudit.report.blocks import Brief, Line, Scorecard
from lipaudit.report.cells import significant, standing, text
from lipaudit.report.draw.layout import scored
from lipaudit.report.page.remarks import lack, leading
from lipaudit.report.page.views.common import CHARACTERS, interval, places
from lipaudit.results import (
    AttentionRow,
    BoundsRow,
    CertifyRadiusRow,
    Column,
    JacobianRow,
    Report,
)
from lipaudit.results.figures import order
from lipaudit.results.history import KINDS
from lipaudit.results.summary import (
    Accuracy,
    Fragile,
    Heads,
    Norms,
    Radii,
    Tightness,
    summary,
)

FEWEST = 20
"""Of fewer samples the 95th percentile lies between the two largest norms."""
RATIO = Column(label="bound / exact", meaning="1 is tight.", unit="×", domain="")


def scorecard(report: Report, *, short: bool = False) -> Scorecard | None:
    """Draw the scorecard of a report; None where no section has a figure for it.

    Args:
        report: that is summed up.
        short: whether the norms share a line.
    """
    summed, known = summary(report), places(report)
    lines = [
        *(_accuracy(each, report) for each in summed.accuracy),
        *([_radii(summed.radii)] if summed.radii else ()),
        *(_norms(summed.norms, known, short=short) if summed.norms else ()),
        *(_heads(summed.heads, report) if summed.heads else ()),
        *(_fragile(summed.fragile, report) if summed.fragile else ()),
        *_tightest(summed.bounds),
    ]
    return Scorecard(tuple(lines)) if lines else None


def brief(report: Report) -> Brief:
    """Return the scorecard for a pull request: state, data and warnings, then the figures."""
    card, missing = scorecard(report, short=True), lack(report)
    lines, marks = scored(card) if card else ([], [])
    state = f"PARTIAL: {missing}" if missing else "complete"
    return Brief(
        title=f"lipaudit: {report.run.model.spec}",
        remarks=(
            f"{report.run.data.samples} samples of {report.run.data.spec}; {state}",
            *(f"{note.level}: {note.text}" for note in leading(report)),
            *(["; ".join(marks)] if marks else []),
        ),
        heads=("", "", ""),
        rows=tuple(line[:3] for line in lines),
        align="lrl",
    )


def _accuracy(accuracy: Accuracy, report: Report) -> Line:
    label, column = KINDS[accuracy.kind]
    tried = ", ".join(accuracy.attacks)
    said = [
        interval(accuracy.low, accuracy.high),
        f"worst of {tried}" if len(accuracy.attacks) > 1 else tried,
        "" if tried else f"{accuracy.samples} samples",
        f"{accuracy.undecided} undecided" if accuracy.undecided else "",
    ]
    named = label if accuracy.kind == "clean" else f"{label}, {accuracy.ball}"
    command = _hardening(accuracy, report)
    left = text(accuracy.share, column)
    aim = f"Train against attacks: at {accuracy.ball} they leave {left} of the samples right."
    return Line(
        named,
        accuracy.share,
        column,
        ", ".join(filter(None, said)),
        command,
        aim if command else "",
    )


def _hardening(accuracy: Accuracy, report: Report) -> str:
    """Return the training on the smallest L-inf ball in which attacks surely break images."""
    known = summary(report).accuracy
    least = [order(each.low) for each in known if each.kind == "clean"]
    broken = [
        each
        for each in known
        if (each.kind, each.norm) == ("attacked", "linf") and each.high is not None
        if any(each.high < low for low in least)
    ]
    if "size" not in report.run.preprocess or broken[:1] != [accuracy]:
        return ""
    return _training(report, "--adversarial", "pgd", "--eps", accuracy.eps)


def _training(report: Report, *options: str) -> str:
    words = ["lipaudit", "train", report.run.model.spec, *options]
    return shlex.join(
        [*words, *([] if report.run.model.source == "demo" else ["--data", "TRAIN"])]
    )


def _radii(radii: Radii) -> Line:
    column = CertifyRadiusRow.columns()["radius"]
    ends = [text(each, column) for each in (radii.low, radii.high) if each is not None]
    adversarial = text(radii.adversarial, column)
    said = [
        " to ".join(ends),
        f"median of {radii.samples} samples",
        "" if radii.adversarial is None else f"nearest adversarial {adversarial}",
    ]
    label = f"certified radius, {radii.norm}"
    return Line(label, radii.median, column, ", ".join(filter(None, said)))


def _norms(norms: Norms, known: Mapping[str, str], *, short: bool) -> Iterator[Line]:
    columns = JacobianRow.columns()
    kind = "" if norms.norm == "2" else f", norm {norms.norm}"
    of = f"{norms.start} to {norms.end}{kind}, {norms.samples} samples"
    place = f", {known[norms.sample]}" if norms.sample in known else ""
    sample = f"sample {norms.sample[:CHARACTERS]}{place}" if norms.sample else ""
    if norms.samples == 1:
        yield Line("Jacobian norm", norms.max, columns["max"], f"{of[:-1]}: {sample}")
        return
    many = norms.samples >= FEWEST
    if short:
        p95, most = (text(each, columns["max"]) for each in (norms.p95, norms.max))
        tail = f"p95 {p95}, " if many else ""
        of = f"{of}; {tail}max {most}: {sample}".removesuffix(": ")
    yield Line("Jacobian norm, median", norms.median, columns["median"], of)
    if short:
        return
    if many:
        yield Line("Jacobian norm, p95", norms.p95, columns["p95"])
    yield Line("Jacobian norm, max", norms.max, columns["max"], sample)


def _heads(heads: Heads, report: Report) -> Iterator[Line]:
    first, *others = heads.steepest
    said = f"head {first.layer}.{first.head}"
    named = ", ".join(f"{h.layer}.{h.head} ({significant(h.exact)})" for h in others)
    if named:
        said += f"; next {named}; median head {significant(heads.median)}"
    said += _measured(report, "bounds")
    yield Line("steepest head, ||J||", first.exact, BoundsRow.columns()["exact"], said)


def _fragile(fragile: Fragile, report: Report) -> Iterator[Line]:
    column = replace(AttentionRow.columns()["intermediate"], format=".0%")
    said = f"mean of {fragile.of} heads, more than half in {fragile.heads}"
    if fragile.k is not None:
        said += f"; most others near {fragile.side}"
    said += _measured(report, "attention")
    command = _penalty(fragile, report)
    aim = "Train against fragile rows, then attack the result: fewer need not be more robust."
    yield Line("fragile rows", fragile.share, column, said, command, aim if command else "")


def _measured(report: Report, measure: str) -> str:
    """Say at how many samples, where a measure took fewer than the report has."""
    section = report.section(measure)
    count = len(section.ids) if section else 0
    return f"; at {count} samples" if 0 < count < report.run.data.samples else ""


def _penalty(fragile: Fragile, report: Report) -> str:
    """Return the training that lowers the share; nothing for a model that has no classes."""
    if fragile.k is None or not fragile.heads:
        return ""
    attacked, jacobian = report.section("attack"), summary(report).norms
    if not (attacked and attacked.rows) and (jacobian is None or jacobian.end != "logits"):
        return ""
    return _training(
        report, "--penalty", "jasmin", *(["--k", str(fragile.k)] if fragile.k else [])
    )


def _tightest(bounds: tuple[Tightness, ...]) -> Iterator[Line]:
    """Show the tightest bound at the samples, and the tightest that is certified."""
    columns = BoundsRow.columns()
    for status in ("bound", "certified"):
        known = [each for each in bounds if each.status == status]
        if known:
            best = min(known, key=lambda each: each.median)
            column = columns[best.bound]
            said = f"over {best.heads} heads, largest {text(best.largest, RATIO)}"
            label = f"bound / exact, {column.label}"
            yield Line(label, best.median, RATIO, f"{said}; {standing(column)}")
