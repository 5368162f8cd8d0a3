"""The opening of a report's page: facts, notes, the scorecard, the next steps."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from lipaudit.report.blocks import Brief, Line, Scorecard, list_scores
from lipaudit.report.cells import describe_standing, format_significant, format_value
from lipaudit.report.page.common import CHARACTERS, find_places, format_limits
from lipaudit.results import (
    ATTENTION_TABLE,
    BOUNDS_TABLE,
    JACOBIAN_TABLE,
    RADII_TABLE,
    Column,
    Data,
    Model,
    Note,
    Report,
)
from lipaudit.results.figures import order
from lipaudit.results.summary import (
    KINDS,
    Accuracy,
    Fragile,
    Heads,
    Norms,
    Radii,
    Tightness,
    shared,
    summary,
)
from lipaudit.results.worst import worst

# Facts


def list_facts(report: Report) -> tuple[tuple[str, str], ...]:
    """Return what was audited and how, by name."""
    run, model, data = report.run, report.run.model, report.run.data
    return (
        ("model", f"{model.spec} ({model.source}, {model.architecture})"),
        ("weights", f"{model.parameters:,} parameters, sha256 {model.weights_sha256[:16]}"),
        ("data", f"{data.spec}, {data.samples} samples, suite {data.suite_id[:16]}"),
        *_list_commits(report),
        ("run", f"{run.device}, {run.dtype}, seed {run.seed}, {run.created}"),
        ("command", run.command),
        (
            "status",
            report.status if report.shard is None else f"{report.status}, {report.shard.name}",
        ),
        *([("reason", run.reason)] if run.reason else []),
    )


def list_versions(report: Report) -> str:
    """Name the packages that the figures depend on, with their versions."""
    known = {"lipaudit": report.run.lipaudit} | report.run.versions
    return ", ".join(f"{name} {version}" for name, version in known.items())


def _list_commits(report: Report) -> list[tuple[str, str]]:
    """Return which states of repositories of the Hugging Face Hub were read."""
    read: dict[str, Model | Data] = {"model": report.run.model, "data": report.run.data}
    return [
        (f"{name} commit", f"{of.commit[:12]} ({of.revision})")
        for name, of in read.items()
        if of.commit
    ]


# Notes


LISTED = 6
"""How many of the words in which notes differ are written out."""


def describe_gaps(report: Report) -> str:
    """Describe what is missing from a report; empty if it is complete."""
    lacks = []
    if report.shard is not None:
        lacks.append(
            f"this is {report.shard.name}: its figures are of some of the samples. lipaudit merge "
            "makes one report of all."
        )
    if report.failures:
        failed = "; ".join(f"{name} failed: {f.reason}" for name, f in report.failures.items())
        lacks.append(f"{failed}. What follows is the rest.")
    if report.unmeasured:
        left = ", ".join(f"{name} ({count})" for name, count in report.unmeasured.items())
        lacks.append(
            f"the time limit ended the run, and samples are left: of {left}. Figures are of those "
            "that were measured."
        )
    elif report.status != "complete" and not report.failures:
        lacks.append("the run was cut short; what follows is incomplete.")
    return " ".join(lacks)


def list_shared_notes(report: Report) -> list[Note]:
    """Return the notes that all measures share, which are shown once, above the figures.

    Of a report of one measure these are its warnings.
    """
    measures = [s for s in report.sections if "." not in s.measure]
    return [n for n in shared(report) if n.level == "warning" or len(measures) > 1]


def list_leading_notes(report: Report) -> tuple[Note, ...]:
    """Return every warning, then the notes that all measures share."""
    warned = [
        Note(level="warning", code=w.code, text=f"{w.measure}: {w.text}" if w.measure else w.text)
        for w in summary(report).warnings
    ]
    return merge_notes([*warned, *list_shared_notes(report)])


def merge_notes(notes: Iterable[Note]) -> tuple[Note, ...]:
    """Write notes that differ in one word as one, with these words side by side.

    >>> texts = ("no castin for 12 heads", "no hu for 12 heads", "12 heads are numerical")
    >>> [n.text for n in merge_notes(Note(level="info", code="head", text=t) for t in texts)]
    ['no castin, hu for 12 heads', '12 heads are numerical']
    """
    groups: list[list[Note]] = []
    for note in dict.fromkeys(notes):
        group = next((g for g in groups if _find_difference([*g, note]) is not None), None)
        if group is None:
            groups.append(group := [])
        group.append(note)
    return tuple(map(_join_notes, groups))


def _find_difference(notes: Sequence[Note]) -> int | None:
    """Return which word alone differs; None where the notes are not alike."""
    texts = [note.text.split(" ") for note in notes]
    if len({(note.level, note.code, len(t)) for note, t in zip(notes, texts, strict=True)}) > 1:
        return None
    places = [i for i, words in enumerate(zip(*texts, strict=True)) if len(set(words)) > 1]
    return places[0] if len(places) == 1 else None


def _join_notes(notes: Sequence[Note]) -> Note:
    place = _find_difference(notes)
    if place is None:
        return notes[0]
    words = notes[0].text.split(" ")
    each = [note.text.split(" ")[place] for note in notes]
    plain = [word.rstrip(",:;") for word in each]
    listed = ", ".join(plain[:LISTED])
    more = f", ... ({len(each)} in all)" if len(each) > LISTED else ""
    words[place] = listed + more + each[-1].removeprefix(plain[-1])
    return notes[0].model_copy(update={"text": " ".join(words)})


# The scorecard


FEWEST = 20
"""With fewer samples the 95th percentile is between the two largest norms, and is not shown."""
RATIO = Column(label="bound / exact", meaning="1 is tight.", unit="×", domain="")


def make_scorecard(report: Report, *, short: bool = False) -> Scorecard | None:
    """Draw the scorecard of a report; None where no section has a figure for it.

    Args:
        report: that is summed up.
        short: whether the norms share a line.
    """
    summed, known = summary(report), find_places(report)
    lines = [
        *(_accuracy_line(each, report) for each in summed.accuracy),
        *([_radii_line(summed.radii)] if summed.radii else ()),
        *(_norm_lines(summed.norms, known, short=short) if summed.norms else ()),
        *(_head_lines(summed.heads, report) if summed.heads else ()),
        *(_fragile_line(summed.fragile, report) if summed.fragile else ()),
        *_bound_lines(summed.bounds),
    ]
    return Scorecard(tuple(lines)) if lines else None


def brief_report(report: Report) -> Brief:
    """Return the scorecard for a pull request: state, data and warnings, then the figures."""
    card, missing = make_scorecard(report, short=True), describe_gaps(report)
    lines, marks = list_scores(card) if card else ([], [])
    state = f"PARTIAL: {missing}" if missing else "complete"
    return Brief(
        title=f"lipaudit: {report.run.model.spec}",
        remarks=(
            f"{report.run.data.samples} samples of {report.run.data.spec}; {state}",
            *(f"{note.level}: {note.text}" for note in list_leading_notes(report)),
            *(["; ".join(marks)] if marks else []),
        ),
        heads=("", "", ""),
        rows=tuple(line[:3] for line in lines),
        align="lrl",
    )


def _accuracy_line(accuracy: Accuracy, report: Report) -> Line:
    label, column = KINDS[accuracy.kind]
    tried = ", ".join(accuracy.attacks)
    said = [
        format_limits(accuracy.low, accuracy.high),
        f"worst of {tried}" if len(accuracy.attacks) > 1 else tried,
        "" if tried else f"{accuracy.samples} samples",
        f"{accuracy.undecided} undecided" if accuracy.undecided else "",
    ]
    named = label if accuracy.kind == "clean" else f"{label}, {accuracy.ball}"
    command = _suggest_hardening(accuracy, report)
    left = format_value(accuracy.share, column)
    aim = f"Train against attacks: at {accuracy.ball} they leave {left} of the samples right."
    return Line(
        named,
        accuracy.share,
        column,
        ", ".join(filter(None, said)),
        command,
        aim if command else "",
    )


def _suggest_hardening(accuracy: Accuracy, report: Report) -> str:
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
    return _write_training(report, "--adversarial", "pgd", "--eps", accuracy.eps)


def _write_training(report: Report, *options: str) -> str:
    words = ["lipaudit", "train", report.run.model.spec, *options]
    return shlex.join(
        [*words, *([] if report.run.model.source == "demo" else ["--data", "TRAIN"])]
    )


def _radii_line(radii: Radii) -> Line:
    column = RADII_TABLE.columns["radius"]
    ends = [format_value(each, column) for each in (radii.low, radii.high) if each is not None]
    adversarial = format_value(radii.adversarial, column)
    said = [
        " to ".join(ends),
        f"median of {radii.samples} samples",
        "" if radii.adversarial is None else f"nearest adversarial {adversarial}",
    ]
    label = f"certified radius, {radii.norm}"
    return Line(label, radii.median, column, ", ".join(filter(None, said)))


def _norm_lines(norms: Norms, known: Mapping[str, str], *, short: bool) -> Iterator[Line]:
    columns = JACOBIAN_TABLE.columns
    kind = "" if norms.norm == "2" else f", norm {norms.norm}"
    of = f"{norms.start} to {norms.end}{kind}, {norms.samples} samples"
    place = f", {known[norms.sample]}" if norms.sample in known else ""
    sample = f"sample {norms.sample[:CHARACTERS]}{place}" if norms.sample else ""
    if norms.samples == 1:
        yield Line("Jacobian norm", norms.max, columns["max"], f"{of[:-1]}: {sample}")
        return
    many = norms.samples >= FEWEST
    if short:
        p95, most = (format_value(each, columns["max"]) for each in (norms.p95, norms.max))
        tail = f"p95 {p95}, " if many else ""
        of = f"{of}; {tail}max {most}: {sample}".removesuffix(": ")
    yield Line("Jacobian norm, median", norms.median, columns["median"], of)
    if short:
        return
    if many:
        yield Line("Jacobian norm, p95", norms.p95, columns["p95"])
    yield Line("Jacobian norm, max", norms.max, columns["max"], sample)


def _head_lines(heads: Heads, report: Report) -> Iterator[Line]:
    first, *others = heads.steepest
    said = f"head {first.layer}.{first.head}"
    named = ", ".join(f"{h.layer}.{h.head} ({format_significant(h.exact)})" for h in others)
    if named:
        said += f"; next {named}; median head {format_significant(heads.median)}"
    said += _count_measured(report, "bounds")
    yield Line("steepest head, ||J||", first.exact, BOUNDS_TABLE.columns["exact"], said)


def _fragile_line(fragile: Fragile, report: Report) -> Iterator[Line]:
    column = replace(ATTENTION_TABLE.columns["intermediate"], format=".0%")
    said = f"mean of {fragile.of} heads, more than half in {fragile.heads}"
    if fragile.k is not None:
        said += f"; most others near {fragile.side}"
    said += _count_measured(report, "attention")
    command = _suggest_penalty(fragile, report)
    aim = "Train against fragile rows, then attack the result: few fragile rows are no proof."
    yield Line("fragile rows", fragile.share, column, said, command, aim if command else "")


def _count_measured(report: Report, measure: str) -> str:
    """Say at how many samples, where a measure took fewer than the report has."""
    section = report.section(measure)
    count = len(section.ids) if section else 0
    return f"; at {count} samples" if 0 < count < report.run.data.samples else ""


def _suggest_penalty(fragile: Fragile, report: Report) -> str:
    """Return the training that lowers the share; nothing for a model that has no classes."""
    if fragile.k is None or not fragile.heads:
        return ""
    attacked, jacobian = report.section("attack"), summary(report).norms
    if not (attacked and attacked.rows) and (jacobian is None or jacobian.end != "logits"):
        return ""
    return _write_training(
        report, "--penalty", "jasmin", *(["--k", str(fragile.k)] if fragile.k else [])
    )


def _bound_lines(bounds: tuple[Tightness, ...]) -> Iterator[Line]:
    """Show the tightest bound at the samples, and the tightest that is certified."""
    columns = BOUNDS_TABLE.columns
    for status in ("bound", "certified"):
        known = [each for each in bounds if each.status == status]
        if known:
            best = min(known, key=lambda each: each.median)
            column = columns[best.bound]
            said = f"over {best.heads} heads, largest {format_value(best.largest, RATIO)}"
            label = f"bound / exact, {column.label}"
            yield Line(label, best.median, RATIO, f"{said}; {describe_standing(column)}")


# The next steps


FILE = "report.json"
"""The file of a report, as commands on its page name it."""

RESUME = " --resume"
NOISE = {
    "random-weights": "Load trained weights: these are random.",
    "random-data": "Measure at samples that the model meets in use: these are noise.",
}
"""Advice for warnings of figures that say nothing of a model in use, and are no baseline."""


def suggest_steps(report: Report, card: Scorecard | None) -> tuple[tuple[str, str], ...]:
    """Return steps and the command for each, the most urgent first."""
    model, norms, steps = report.run.model.spec, summary(report).norms, []
    codes = {warning.code for warning in summary(report).warnings}
    if report.status != "complete":
        command = report.run.command.removesuffix(RESUME)
        steps.append(("Measure what is missing.", f"{command}{RESUME}"))
    if codes & NOISE.keys():
        advice = " ".join(text for code, text in NOISE.items() if code in codes)
        steps.append((advice, shlex.join(["lipaudit", "audit", model, "--data", "DATA"])))
    elif norms and norms.end == "logits" and not report.section("attack"):
        command = shlex.join(["lipaudit", "attack", model, "--data", "LABELLED"])
        steps.append(("See what attacks achieve: nothing here says so.", command))
    for sample in worst(report)[:1]:
        name, known = sample[:CHARACTERS], find_places(report)
        place = f", {known[sample]}" if sample in known else ""
        command = f"lipaudit inspect {FILE} {name}"
        steps.append((f"Look at the worst samples, first {name}{place}.", command))
    steps += [(line.aim, line.command) for line in (card.lines if card else ()) if line.command]
    if report.status == "complete" and report.sections and not codes & NOISE.keys():
        command = shlex.join(["lipaudit", "gate", model, "--baseline", FILE])
        steps.append(("Let CI fail when the next checkpoint is worse.", command))
    return tuple(steps)
