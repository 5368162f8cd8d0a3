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

RATIO = Column(label="bound / exact", meaning="1 is tight.", unit="×", domain="")


def scorecard(report: Report, *, short: bool = False) -> Scorecard | None:
    """Draw the scorecard of a report; None where no section has a figure for it.

    Args:
        report: that is summed up.
        short: whether the norms share a line.
    """
    summed, known = summary(report), places(report)
    lines = [
        *(_accuracy(each) for each in summed.accuracy),
        *([_radii(summed.radii)] if summed.radii else ()),
        *(_norms(summed.norms, known, short=short) if summed.norms else ()),
        *(_heads(summed.heads) if summed.heads else ()),
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


def _accuracy(accuracy: Accuracy) -> Line:
    label, column = KINDS[accuracy.kind]
    tried = ", ".join(accuracy.attacks)
    said = [
        interval(accuracy.low, accuracy.high),
        f"worst of {tried}" if len(accuracy.attacks) > 1 else tried,
        "" if tried else f"{accuracy.samples} samples",
        f"{accuracy.undecided} undecided" if accuracy.undecided else "",
    ]
    named = label if accuracy.kind == "clean" else f"{label}, {accuracy.ball}"
    return Line(named, accuracy.share, column, ", ".join(filter(None, said)))


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
    if short:
        p95, most = (text(each, columns["max"]) for each in (norms.p95, norms.max))
        of = f"{of}; p95 {p95}, max {most}: {sample}".removesuffix(": ")
    yield Line("Jacobian norm, median", norms.median, columns["median"], of)
    if short:
        return
    yield Line("Jacobian norm, p95", norms.p95, columns["p95"])
    yield Line("Jacobian norm, max", norms.max, columns["max"], sample)


def _heads(heads: Heads) -> Iterator[Line]:
    first, *others = heads.steepest
    said = f"{first.layer}.{first.head}"
    named = ", ".join(f"{h.layer}.{h.head} ({significant(h.exact)})" for h in others)
    if named:
        said += f"; next {named}; median {significant(heads.median)}"
    yield Line("steepest head, ||J||", first.exact, BoundsRow.columns()["exact"], said)


def _fragile(fragile: Fragile, report: Report) -> Iterator[Line]:
    column = replace(AttentionRow.columns()["intermediate"], format=".0%")
    said = f"more than half in {fragile.heads} of {fragile.of} heads"
    if fragile.k is None:
        yield Line("fragile rows", fragile.share, column, said)
        return
    said += f", most others near {fragile.side}"
    yield Line("fragile rows", fragile.share, column, said, _penalty(fragile, report))


def _penalty(fragile: Fragile, report: Report) -> str:
    """Return the training that lowers the share; nothing for a model that has no classes."""
    attacked, jacobian = report.section("attack"), summary(report).norms
    if not (attacked and attacked.rows) and (jacobian is None or jacobian.end != "logits"):
        return ""
    words = ["lipaudit", "train", report.run.model.spec, "--penalty", "jasmin"]
    if report.run.model.source != "demo":
        words += ["--data", "TRAIN"]
    return shlex.join([*words, *(["--k", str(fragile.k)] if fragile.k else [])])


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
