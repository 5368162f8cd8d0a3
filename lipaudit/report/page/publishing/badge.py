"""The one figure of a report, or the outcome of a gate, that a badge shows."""

from __future__ import annotations

from lipaudit.errors import ExitCode
from lipaudit.gate.verdicts import Judgement
from lipaudit.report.blocks import Badge
from lipaudit.report.cells import significant
from lipaudit.report.page.publishing.card import unfit
from lipaudit.results import Report
from lipaudit.results.summary import Accuracy, summary

GREEN, YELLOW, ORANGE, RED = "#1a7f37", "#8a6100", "#b34700", "#cf222e"
BLUE, GREY = "#0969da", "#57606a"
GRADES = ((0.75, GREEN), (0.5, YELLOW), (0.25, ORANGE), (0.0, RED))
"""The colour of an accuracy by its lower 95 % limit, so that few samples do not look good."""
PROVEN = {"attacked": "robust accuracy", "certified": "certified accuracy"}
OUTCOMES = {
    ExitCode.OK: ("passed", GREEN),
    ExitCode.REGRESSION: ("regressed", RED),
    ExitCode.NOT_PROVEN: ("not proven", ORANGE),
}
"""What a gate ended with, by its exit code; any other: it could not be judged, in grey."""


def badge(report: Report) -> Badge:
    """Return what is certified, else what attacks left, of the last ball of the scorecard.

    Of a report that has neither: the certified radius, the Jacobian norm, the steepest head. What
    has no scale from good to bad is blue, and what says nothing of a trained model on real data is
    grey and shows no figure.
    """
    summed = summary(report)
    if reason := unfit(report):
        return Badge("lipaudit", reason, GREY)
    known = [each for each in summed.accuracy if each.kind in PROVEN]
    if known:
        return _accuracy(known[-1])
    if summed.radii:
        radii = summed.radii
        return Badge(f"certified radius {radii.norm}", significant(radii.median), BLUE)
    if summed.norms and summed.norms.median is not None:
        return Badge("Jacobian norm", f"{significant(summed.norms.median)} (median)", BLUE)
    if summed.heads:
        return Badge("steepest head", significant(summed.heads.steepest[0].exact), BLUE)
    return Badge("lipaudit", "no figures", GREY)


def judged(judgement: Judgement) -> Badge:
    """Return how a gate ended; a pass that is not proven in all rules says so, in yellow."""
    code = ExitCode(judgement.exit_code)
    message, colour = OUTCOMES.get(code, ("not judged", GREY))
    unproven = sum(verdict.unproven for verdict in judgement.verdicts)
    if code is ExitCode.OK and unproven:
        message, colour = f"passed, {unproven} not proven", YELLOW
    return Badge("lipaudit gate", message, colour)


def _accuracy(accuracy: Accuracy) -> Badge:
    low, high = accuracy.low, accuracy.high
    ends = "" if low is None or high is None else f" ({100 * low:.0f}\N{EN DASH}{100 * high:.0f})"
    worst = accuracy.share if low is None else low
    colour = next(colour for least, colour in GRADES if worst >= least)
    return Badge(f"{PROVEN[accuracy.kind]} {accuracy.ball}", f"{accuracy.share:.0%}{ends}", colour)
