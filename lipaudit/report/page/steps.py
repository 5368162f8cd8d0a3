"""What a reader of a report does next, as far as the report says so."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from lipaudit.report.blocks import Scorecard
from lipaudit.report.page.views.common import CHARACTERS, places
from lipaudit.results import Report
from lipaudit.results.summary import summary
from lipaudit.results.worst import worst

FILE = "report.json"
"""What an audit calls the file that its page is made of."""

RESUME = " --resume"
NOTHING = {"random-weights", "random-data"}
"""Warnings of figures that say nothing of a model in use: none to hold the next one to."""


def steps(report: Report, card: Scorecard | None) -> tuple[tuple[str, str], ...]:
    """Return steps and the command for each, the most urgent first."""
    return (*_repairs(report), *_samples(report), *_changes(card), *_guard(report))


def _repairs(report: Report) -> Iterator[tuple[str, str]]:
    """Measure what is missing, or was measured on noise."""
    model, summed = report.run.model.spec, summary(report)
    if report.status != "complete":
        command = report.run.command.removesuffix(RESUME)
        yield "Measure what is missing.", f"{command}{RESUME}"
    codes = {warning.code for warning in summed.warnings}
    if codes & NOTHING:
        asked = [
            "Load trained weights: these are random." if "random-weights" in codes else "",
            "Measure at samples that the model meets in use: these are noise."
            if "random-data" in codes
            else "",
        ]
        command = shlex.join(["lipaudit", "audit", model, "--data", "DATA"])
        yield " ".join(filter(None, asked)), command
    elif summed.norms and summed.norms.end == "logits" and not report.section("attack"):
        yield (
            "See what attacks achieve: nothing here says so.",
            shlex.join(["lipaudit", "attack", model, "--data", "LABELLED"]),
        )


def _samples(report: Report) -> Iterator[tuple[str, str]]:
    first, known = next(iter(worst(report)), ""), places(report)
    if first:
        name = first[:CHARACTERS]
        place = f", {known[first]}" if first in known else ""
        yield f"Look at the worst samples, first {name}{place}.", f"lipaudit inspect {FILE} {name}"


def _changes(card: Scorecard | None) -> Iterator[tuple[str, str]]:
    for line in card.lines if card else ():
        if line.command:
            yield line.aim, line.command


def _guard(report: Report) -> Iterator[tuple[str, str]]:
    codes = {warning.code for warning in summary(report).warnings}
    if report.status == "complete" and report.sections and not codes & NOTHING:
        command = shlex.join(["lipaudit", "gate", report.run.model.spec, "--baseline", FILE])
        yield "Let CI fail when the next checkpoint is worse.", command
