"""The scorecard of a report, the answer in a sentence, and the next steps."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace

from lipaudit.measures import ATTENTION_TABLE, BOUNDS_TABLE, JACOBIAN_TABLE, RADII_TABLE
from lipaudit.report.blocks import Banner, Line, Scorecard
from lipaudit.report.cells import (
    describe_standing,
    format_limits,
    format_significant,
    format_value,
)
from lipaudit.report.page.facts import (
    CHARACTERS,
    find_places,
    name_sample,
)
from lipaudit.tables import Column, Report
from lipaudit.tables.figures import order
from lipaudit.tables.summary import KINDS, Accuracy, Summary, summary
from lipaudit.tables.worst import worst

FEWEST = 20
"""Smallest number of samples for which the 95th percentile is shown."""
RATIO = Column(label="bound / exact", meaning="1 is tight.", unit="×", domain="")


def make_scorecard(report: Report) -> Scorecard | None:
    """Make the scorecard of a report; None if no section has a figure for it."""
    known = summary(report)
    lines = (
        *(_write_accuracy(each, report) for each in known.accuracy),
        *_list_radii(known),
        *_list_norms(known, report),
        *_list_heads(known, report),
        *_list_fragile(known, report),
        *_list_bounds(known, report),
    )
    return Scorecard(lines) if lines else None


def name_accuracy(kind: str, ball: str) -> str:
    """Name a kind of accuracy, in a ball: robust accuracy, linf 2/255."""
    return ", ".join(filter(None, (KINDS[kind][0], ball)))


def _write_accuracy(accuracy: Accuracy, report: Report) -> Line:
    column, tried = KINDS[accuracy.kind][1], ", ".join(accuracy.attacks)
    ends = accuracy.low, accuracy.high
    limits = "" if None in ends else format_limits(order(ends[0]), order(ends[1]), column)
    texts = [
        f"95 % CI {limits}" if limits else "",
        f"worst of {tried}" if len(accuracy.attacks) > 1 else tried,
        "" if tried else f"{accuracy.samples} samples",
        f"{accuracy.undecided} undecided" if accuracy.undecided else "",
    ]
    label, text = name_accuracy(accuracy.kind, accuracy.ball), ", ".join(filter(None, texts))
    line = Line(label, accuracy.share, column, text)
    # Training helps images, in the smallest L-inf ball in which attacks break them.
    broken = [each for each in list_broken(summary(report)) if each.norm == "linf"]
    if "size" not in report.run.preprocess or broken[:1] != [accuracy]:
        return line
    command = _write_training(report, "--adversarial", "pgd", "--eps", accuracy.eps)
    left = format_value(accuracy.share, column)
    aim = f"Train against attacks: at {accuracy.ball} only {left} of the samples stay right."
    return replace(line, command=command, aim=aim)


def list_broken(known: Summary) -> list[Accuracy]:
    """Return the accuracies under attack that are below clean accuracy beyond chance."""
    # The intervals do not overlap: chance does not explain the loss.
    least = [order(each.low) for each in known.accuracy if each.kind == "clean"]
    attacked = [each for each in known.accuracy if each.kind == "attacked"]
    return [a for a in attacked if a.high is not None and any(a.high < low for low in least)]


def _write_training(report: Report, *options: str) -> str:
    data = [] if report.run.model.source == "demo" else ["--data", "TRAIN"]
    return shlex.join(["lipaudit", "train", report.run.model.spec, *options, *data])


def _list_radii(known: Summary) -> Iterator[Line]:
    if radii := known.radii:
        column = RADII_TABLE.columns["radius"]
        ends = [order(each) for each in (radii.low, radii.high) if each is not None]
        nearest = format_value(radii.adversarial, column)
        texts = [
            f"95 % CI {format_limits(ends[0], ends[1], column)}" if ends else "",
            f"median of {radii.samples} samples",
            "" if radii.adversarial is None else f"nearest adversarial {nearest}",
        ]
        label = f"certified radius, {radii.norm}"
        yield Line(label, radii.median, column, ", ".join(filter(None, texts)))


def _list_norms(known: Summary, report: Report) -> Iterator[Line]:
    if (norms := known.norms) is None:
        return
    column = JACOBIAN_TABLE.columns["median"]
    kind = "" if norms.norm == "2" else f", norm {norms.norm}"
    sample = f" (sample {name_sample(norms.sample, find_places(report))})" if norms.sample else ""
    text = f"{norms.start} to {norms.end}{kind}, {norms.samples} samples"
    if norms.samples == 1:
        yield Line("model sensitivity, ‖J‖", norms.max, column, text[:-1] + sample)
        return
    p95, most = (format_value(each, column) for each in (norms.p95, norms.max))
    tail = f"p95 {p95}, " if norms.samples >= FEWEST else ""
    text = f"{text}; {tail}largest {most}{sample}"
    yield Line("model sensitivity, median ‖J‖", norms.median, column, text)


def _list_heads(known: Summary, report: Report) -> Iterator[Line]:
    if heads := known.heads:
        first, *others = heads.steepest
        text = f"head {first.layer}.{first.head}"
        if others:
            named = (f"{h.layer}.{h.head} ({format_significant(h.exact)})" for h in others)
            text += f"; next {', '.join(named)}; median head {format_significant(heads.median)}"
        text += _count_measured(report, "bounds")
        column = BOUNDS_TABLE.columns["exact"]
        yield Line("steepest attention head, ‖J‖", first.exact, column, text)


def _list_fragile(known: Summary, report: Report) -> Iterator[Line]:
    if (fragile := known.fragile) is None:
        return
    column = replace(ATTENTION_TABLE.columns["intermediate"], format=".0%")
    text = f"mean of {fragile.of} heads, more than half in {fragile.heads}"
    if fragile.k is not None:
        text += f"; most others near {fragile.side}"
    text += _count_measured(report, "attention")
    line = Line("fragile attention rows", fragile.share, column, text)
    # A penalty is trained on classes: only models with logits or under attack have them.
    attacks = report.section("attack")
    classes = (attacks and attacks.rows) or (known.norms and known.norms.end == "logits")
    if fragile.k is not None and fragile.heads and classes:
        k = ["--k", str(fragile.k)] if fragile.k else []
        command = _write_training(report, "--penalty", "jasmin", *k)
        aim = (
            "Train against fragile rows, then attack the result: fewer fragile rows do not "
            "prove robustness."
        )
        line = replace(line, command=command, aim=aim)
    yield line


def _count_measured(report: Report, measure: str) -> str:
    """Note the number of samples, if a measure took fewer than the report has."""
    section = report.section(measure)
    count = len(section.ids) if section else 0
    return f"; at {count} samples" if 0 < count < report.run.data.samples else ""


def _list_bounds(known: Summary, report: Report) -> Iterator[Line]:
    """Show the tightest bound at the samples, and the tightest certified one."""
    for status in ("bound", "certified"):
        bounds, section = [b for b in known.bounds if b.status == status], report.section("bounds")
        if bounds and section:
            best = min(bounds, key=lambda each: each.median)
            column = section.columns[best.bound]
            largest = format_value(best.largest, RATIO)
            text = f"of exact, {best.heads} heads, largest {largest}"
            label = f"{'tightest' if status == 'bound' else status} bound, {column.label}"
            yield Line(label, best.median, RATIO, f"{text}; {describe_standing(column)}")


# The answer in a sentence


def write_answer(report: Report) -> Banner | None:
    """Answer in one or two sentences how robust a model is, and which head is steepest."""
    known, state = summary(report), None
    texts = [f"Clean accuracy {a.share:.0%}." for a in known.accuracy if a.kind == "clean"]
    attacked = [each for each in known.accuracy if each.kind == "attacked"]
    broken = list_broken(known)
    if attacked:
        worst = broken[0] if broken else attacked[-1]
        verdict = "not robust there" if broken else "no loss beyond chance"
        texts.append(f"{worst.share:.0%} survive every attack at {worst.ball}: {verdict}.")
        state = "broken" if broken else "open"
    elif known.norms and known.norms.median is not None:
        grown = format_significant(known.norms.median)
        texts.append(f"A small change of the input grows up to {grown}-fold (median sample).")
    if known.heads:
        first = known.heads.steepest[0]
        norm = format_significant(first.exact)
        texts.append(f"The steepest head is layer {first.layer}, head {first.head} (‖J‖ {norm}).")
    return Banner(" ".join(texts), state) if texts else None  # type: ignore[arg-type]


# The next steps


FILE = "report.json"
"""File name of the report in commands on its page."""
RESUME = " --resume"
NOISE = {
    "random-weights": "Load trained weights: the current ones are random.",
    "random-data": "Measure on real samples: the current ones are noise.",
}
"""Advice for reports on random weights or data, which cannot be a baseline."""


def suggest_steps(report: Report, card: Scorecard | None) -> tuple[tuple[str, str], ...]:
    """Return steps and the command for each, the most urgent first."""
    model, norms, steps = report.run.model.spec, summary(report).norms, []
    codes = {warning.code for warning in summary(report).warnings}
    if report.status != "complete":
        command = report.run.command.removesuffix(RESUME)
        steps.append(("Measure the missing results.", f"{command}{RESUME}"))
    if codes & NOISE.keys():
        advice = " ".join(text for code, text in NOISE.items() if code in codes)
        steps.append((advice, shlex.join(["lipaudit", "audit", model, "--data", "DATA"])))
    elif norms and norms.end == "logits" and not report.section("attack"):
        command = shlex.join(["lipaudit", "attack", model, "--data", "LABELLED"])
        steps.append(("See what attacks achieve: no attack was run.", command))
    for sample in worst(report)[:1]:
        name = name_sample(sample, find_places(report))
        command = f"lipaudit inspect {FILE} {sample[:CHARACTERS]}"
        steps.append((f"Look at the worst samples, first {name}.", command))
    steps += [(line.aim, line.command) for line in (card.lines if card else ()) if line.command]
    if report.status == "complete" and report.sections and not codes & NOISE.keys():
        command = shlex.join(["lipaudit", "gate", model, "--baseline", FILE])
        steps.append(("Make CI fail if the next checkpoint is worse.", command))
    return tuple(steps)
