"""What a page begins with: the answer, facts and notes, the scorecard, and what to do next."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lipaudit.gate.rules import DEFAULT_RULES
from lipaudit.measures import find_column, layouts
from lipaudit.report import cells
from lipaudit.report.blocks import Block, Card, Chapter, Paragraph, list_notes
from lipaudit.report.cells import format_significant
from lipaudit.settings import DATA, spell_options
from lipaudit.tables import Column, Note, Report
from lipaudit.tables.columns import order
from lipaudit.tables.summary import (
    LITTLE,
    Accuracy,
    Radii,
    Sources,
    Summary,
    list_shared_notes,
    summary,
)
from lipaudit.tables.trials import find_layer
from lipaudit.tables.weakest import worst

SEED = "seed"
"""Name of the setting seed, which stands among the facts of the run."""
CHARACTERS = 12
"""Number of characters of a sample's id that are shown."""
RESIZING = ("interpolation", "crop_pct", "crop_mode")
"""The facts of preprocessing that only matter for images of another size."""
LETTERS = 40
"""Number of characters of a text shown after its place."""


def list_facts(report: Report) -> dict[str, str]:
    """Return facts on model, data and run, by name."""
    run = report.run
    model = run.model
    data = run.data
    commits = []
    if model.commit:
        commits.append(f"model {model.commit[:12]} ({model.revision})")
    if data.commit:
        commits.append(f"data {data.commit[:12]} ({data.revision})")
    versions = {"lipaudit": run.lipaudit} | run.versions
    normalising, resizing = list[str](), list[str]()
    for name, value in run.preprocess.items():
        group = resizing if name in RESIZING else normalising
        group.append(f"{name} {format_setting(value)}")
    if resizing and run.options.get("preprocess") != "model":
        resizing.append("images of the model's size stay as they are")
    arithmetic = run.dtype
    if "autocast" in run.options:
        arithmetic += f" (predictions under autocast in {run.options['autocast']})"
    facts = {
        "model": f"{model.spec} ({model.source}, {model.architecture})",
        "weights": f"{model.parameters:,} parameters, sha256 {model.weights_sha256[:16]}",
        "quantised": model.quantised,
        "data": f"{data.spec}, {data.samples} samples, suite {data.suite_id[:16]}",
        "commit": ", ".join(commits),
        "preprocessing": "; ".join(normalising),
        "resizing": "; ".join(resizing),
        "first sample": data.steps,
        "run": f"{run.device}, {arithmetic}, seed {run.seed}, {run.created}",
        "versions": ", ".join(f"{k} {v}" for k, v in versions.items()),
        "command": run.command,
        "status": report.status,
        "reason": run.reason,
    }
    return {name: text for name, text in facts.items() if text}


def format_setting(value: Any) -> str:
    """Write a setting; lists without brackets."""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)


def describe_gaps(report: Report) -> str:
    """Describe what is missing from a report; empty if it is complete."""
    lacks = []
    if report.failures:
        failed = "; ".join(f"{name} failed: {f.reason}" for name, f in report.failures.items())
        lacks.append(f"{failed}. The other measures are complete.")
    if report.unmeasured:
        left = ", ".join(f"{name} ({count})" for name, count in report.unmeasured.items())
        lacks.append(f"the time limit ended the run before some samples were measured: {left}.")
    elif report.status != "complete" and not report.failures:
        lacks.append("the run was cut short.")
    return " ".join(lacks)


def list_top_notes(report: Report) -> list[Note]:
    """Return every warning, then the notes that all measures share."""
    notes = [*summary(report).warnings]
    notes += [note for note in list_common_notes(report) if note.level != "warning"]
    return notes


def list_common_notes(report: Report) -> list[Note]:
    """Return the notes that all measures share; of a single measure, its warnings."""
    notes = list_shared_notes(report)
    measures = [section for section in report.sections if "." not in section.measure]
    if len(measures) < 2:
        notes = [note for note in notes if note.level == "warning"]
    return notes


def open_page(
    answer: Paragraph | None, gaps: str, facts: Iterable[tuple[str, str]], notes: Iterable[Note]
) -> Chapter:
    """Return the opening of a page: the answer, what is missing, facts, warnings and notes."""
    blocks: list[Block] = []
    if answer:
        blocks.append(answer)
    if gaps:
        blocks.append(Paragraph(f"Partial: {gaps}", "broken"))
    rows = tuple(facts)
    if rows:
        blocks.append(Card(rows))
    blocks += list_notes(notes)
    return Chapter("", "", tuple(blocks))


def find_places(report: Report) -> dict[str, str]:
    """Return the place of each sample in the data, with the beginning of a text."""
    places = {}
    for name, place in report.places.items():
        text = report.texts.get(name)
        if text is not None:
            place += f' "{text[:LETTERS]}"'
        places[name] = place
    return places


def name_sample(sample: str, places: Mapping[str, str]) -> str:
    """Name a sample by the beginning of its id and its place."""
    return join_texts([sample[:CHARACTERS], places.get(sample, "")])


def join_texts(texts: Iterable[str]) -> str:
    """Join the texts that are not empty by commas."""
    return ", ".join(filter(None, texts))


# The scorecard


FEWEST = 20
"""Smallest number of samples for which the 95th percentile is shown."""
# The label of each kind of accuracy, and its column in the rows of a measure.
KINDS = {
    "clean": ("clean accuracy", "attack", "clean"),
    "corrupted": ("accuracy under corruptions", "corrupt", "accuracy"),
    "attacked": ("robust accuracy", "attack", "robust"),
    "certified": ("certified accuracy", "certify", "certified"),
    "smoothed": ("smoothed certified", "smoothing", "certified"),
}
RATIO = Column(label="bound / exact", meaning="1 is tight.", unit="×", domain="")


class Line(NamedTuple):
    """A figure of the scorecard, with its interval, its sample or its heads in the text."""

    label: str
    value: Any
    column: Column
    text: str


def list_figures(report: Report) -> list[Line]:
    """Return the first figures of a report; empty if no section has one."""
    known = summary(report)
    lines = []
    before: tuple[str, ...] = ()
    for accuracy in known.accuracy:
        lines.append(_write_accuracy(accuracy, before))
        before = accuracy.attacks
    lines += _list_norms(known, report)
    lines += _list_heads(known, report)
    lines += _list_bounds(known, report)
    return lines


def show_scorecard(report: Report) -> list[Chapter]:
    """Return the chapter of the first figures of a report; none if no section has one."""
    lines = list_figures(report)
    if not lines:
        return []
    marks, notes = cells.list_footnotes([line.column for line in lines])
    rows = []
    for line, mark in zip(lines, marks, strict=True):
        label = cells.write_math(line.label) + mark
        figure = cells.format_value(line.value, line.column)
        rows.append((label, figure, cells.write_math(line.text)))
    card = Card(tuple(rows), "; ".join(notes))
    return [Chapter("scorecard", "Scorecard", (card,))]


def _write_accuracy(accuracy: Accuracy, before: tuple[str, ...]) -> Line:
    """Write an accuracy; attacks that the line before names are not repeated, over many radii."""
    name, measure, share = KINDS[accuracy.kind]
    column = layouts()[measure].fixed[share]
    texts = [_write_limits(accuracy, column)]
    tried = ", ".join(accuracy.attacks)
    if not tried:
        texts.append(f"{accuracy.samples} samples")
    elif len(accuracy.attacks) == 1:
        texts.append(tried)
    elif accuracy.attacks == before:
        texts.append("same attacks")
    else:
        texts.append(f"worst of {tried}")
    if accuracy.undecided:
        texts.append(f"{accuracy.undecided} undecided")
    label = join_texts([name, accuracy.ball])
    return Line(label, accuracy.share, column, join_texts(texts))


def _write_limits(figure: Accuracy | Radii, column: Column) -> str:
    if figure.low is None or figure.high is None:
        return ""
    return f"95 % CI {cells.format_limits(figure.low, figure.high, column)}"


def _list_norms(known: Summary, report: Report) -> Iterator[Line]:
    """Show certified radii, and the norms of the model."""
    if radii := known.radii:
        column = find_column("certify.radius.radius")
        texts = [_write_limits(radii, column), f"median of {radii.samples} samples"]
        if radii.adversarial is not None:
            nearest = cells.format_value(radii.adversarial, column)
            texts.append(f"nearest adversarial {nearest}")
        label = f"certified radius, {radii.norm}"
        yield Line(label, radii.median, column, join_texts(texts))
    if norms := known.norms:
        column = find_column("jacobian.median")
        text = f"{norms.start} to {norms.end}"
        if norms.norm != "2":
            text += f", norm {norms.norm}"
        text += f", {norms.samples} samples; "
        if norms.samples >= FEWEST:
            text += f"p95 {cells.format_value(norms.p95, column)}, "
        text += f"largest {cells.format_value(norms.max, column)}"
        if norms.sample:
            text += f" (sample {name_sample(norms.sample, find_places(report))})"
        yield Line("model sensitivity, median ‖J‖", norms.median, column, text)
    if sources := known.sources:
        yield _write_sources(sources)


def _write_sources(sources: Sources) -> Line:
    """Say through which parts the sensitivity passes; a path may pass several."""
    column = replace(find_column("jacobian.shares.share"), format=".0%")
    texts = []
    if sources.mlps is not None:
        texts.append(f"MLPs {cells.format_value(sources.mlps, column)}")
    head = sources.largest
    texts.append(f"head {head.layer}.{head.head} alone {cells.format_value(head.share, column)}")
    if sources.patterns is None:
        return Line("sensitivity through attention", sources.attention, column, ", ".join(texts))
    texts.append("paths overlap")
    label = "sensitivity via attention maps"
    return Line(label, sources.patterns, column, ", ".join(texts))


def _list_heads(known: Summary, report: Report) -> Iterator[Line]:
    """Show the steepest heads, and the share of fragile rows."""
    if known.heads:
        first, *others = known.heads.steepest
        text = f"head {first.layer}.{first.head}"
        if known.sources and known.sources.steepest:
            text += f" (share {known.sources.steepest.share:.0%})"
        if others:
            next_ones = (f"{h.layer}.{h.head} ({format_significant(h.exact)})" for h in others)
            middle = format_significant(known.heads.median)
            text += f"; next {', '.join(next_ones)}; median {middle}"
        text += _count_measured(report, "bounds")
        column = find_column("bounds.exact")
        yield Line("steepest attention head, ‖J‖", first.exact, column, text)
    if fragile := known.fragile:
        column = replace(find_column("attention.intermediate"), format=".0%")
        text = f"mean of {fragile.of} heads, over half in {fragile.heads}"
        text += f"; most others near {fragile.side}" if fragile.k is not None else ""
        patterns = known.sources.patterns if known.sources else None
        if patterns is not None and patterns < LITTLE:
            text += f"; a penalty on them acts on {patterns:.0%} of the sensitivity"
        text += _count_measured(report, "attention")
        yield Line("fragile attention rows", fragile.share, column, text)


def _count_measured(report: Report, measure: str) -> str:
    """Note the number of samples, if a measure took fewer than the report has."""
    section = report.section(measure)
    count = len(section.ids) if section else 0
    return f"; at {count} samples" if 0 < count < report.run.data.samples else ""


def _list_bounds(known: Summary, report: Report) -> Iterator[Line]:
    """Show the tightest bound at the samples, and the tightest certified one."""
    section = report.section("bounds")
    for status, word in (("bound", "tightest"), ("certified", "certified")):
        bounds = [each for each in known.bounds if each.status == status]
        if bounds and section:
            best = min(bounds, key=lambda each: each.median)
            column = section.columns[best.bound]
            largest = cells.format_value(best.largest, RATIO)
            standing = cells.describe_standing(column)
            text = f"of exact, {best.heads} heads, largest {largest}; {standing}"
            yield Line(f"{word} bound, {column.label}", best.median, RATIO, text)


# The answer in a sentence


def write_answer(report: Report) -> Paragraph | None:
    """Answer in a few sentences how robust a model is, and which head is steepest."""
    known = summary(report)
    clean = [each for each in known.accuracy if each.kind == "clean"]
    attacked = [each for each in known.accuracy if each.kind == "attacked"]
    texts = []
    at_chance = CHANCE in {note.code for note in known.warnings}
    if at_chance:
        texts.append(NO_BASELINE[CHANCE])
    texts += [f"Clean accuracy {each.share:.0%}." for each in clean]
    # The intervals do not overlap: chance does not explain the loss.
    highest_low = max((order(each.low) for each in clean), default=-math.inf)
    broken = [each for each in attacked if each.high is not None and each.high < highest_low]
    if attacked:
        if broken:
            weakest = broken[0]
            verdict = "not robust there"
        else:
            weakest = attacked[-1]
            verdict = _count_broken(known.accuracy, weakest)
        texts.append(f"{weakest.share:.0%} survive every attack at {weakest.ball}: {verdict}.")
    elif known.norms and known.norms.median is not None:
        grown = format_significant(known.norms.median)
        layer = find_layer(known.norms.start)
        what = "the input"
        if layer is not None:
            what = f"the residual stream after layer {layer}"
        texts.append(f"A small change of {what} grows up to {grown}-fold (median sample).")
    certified = [each for each in known.accuracy if each.kind == "certified"]
    proven = [each for each in certified if each.share > 0] or certified
    if proven:
        largest = proven[-1]
        texts.append(f"{largest.share:.0%} are certified at {largest.ball}.")
    if known.heads:
        first = known.heads.steepest[0]
        norm = format_significant(first.exact)
        texts.append(f"The steepest head is layer {first.layer}, head {first.head} (‖J‖ {norm}).")
    if not texts:
        return None
    text = " ".join(texts)
    if broken or at_chance:
        return Paragraph(text, "broken")
    return Paragraph(text, "open" if attacked else "answer")


def _count_broken(known: Sequence[Accuracy], attacked: Accuracy) -> str:
    """Count the correct samples that attacks broke, too few to compare limits."""
    measured = [each for each in known if each.kind == "clean"]
    if not measured or measured[0].samples != attacked.samples:
        return "the limits of clean accuracy overlap"
    clean = measured[0]
    correct = round(clean.share * clean.samples)
    if not correct:
        return "none was correct before"
    broken = correct - round(attacked.share * attacked.samples)
    return f"{broken} of {correct} correct samples broken"


# The next steps


FILE = "report.json"
"""File name of the report in commands on its page, if its own command names none; of an audit."""
RESUME = " --resume"
NOISE = {
    "random-weights": "Load trained weights: the current ones are random.",
    "random-data": "Measure on real samples: the current ones are noise.",
}
"""Advice for reports on random weights or data."""
CHANCE = "clean-accuracy-at-chance"
NO_BASELINE = {
    **NOISE,
    CHANCE: "Check the labels and the order of the classes: clean accuracy is at chance.",
}
"""Advice for reports that cannot be a baseline."""
SMALL_BALL = {"pixels": "2/255", "embeddings": "0.1"}
"""Radius of a suggested attack, by the space that it attacks."""


def find_file(command: str) -> str | None:
    """Return the JSON file that a command writes its report to; None if it names none."""
    try:
        words = shlex.split(command)
    except ValueError:  # the command of a report may be anything
        return None
    # The -o of a gate or a comparison is its verdict.
    flags = "--output|-q?o"
    if words[1:2] in (["gate"], ["compare"]):
        flags = "--report"
    joined = "\0".join(words)
    found = re.search(rf"\0(?:{flags})[\0=]?([^\0]+[.]json)(?=\0|$)", joined)
    if found is not None:
        return found[1]
    folder = re.search(r"\0--run-dir[\0=]([^\0]+)", joined)  # of an audit
    if folder is not None:
        return f"{folder[1].rstrip('/')}/{FILE}"
    return None


def list_obstacles(report: Report) -> dict[str, str]:
    """Return why a report cannot be a baseline, as advice by the code of a warning."""
    codes = {note.code for note in summary(report).warnings}
    return {code: advice for code, advice in NO_BASELINE.items() if code in codes}


def suggest_steps(report: Report) -> Iterator[tuple[str, str, str]]:
    """Yield steps and the command for each, the most urgent first, as points of a list."""
    command = report.run.command
    # A merge says itself which shards to run again.
    if report.status != "complete" and not command.startswith("lipaudit merge "):
        resume = f"{command.removesuffix(RESUME)}{RESUME}"
        yield "", "Measure the missing results.", resume
    model = report.run.model.spec
    how = spell_options(report.run.options)  # the gate reads them from the baseline
    obstacles = list_obstacles(report)
    steps: list[tuple[str, Sequence[str]]] = []
    noise = [advice for code, advice in obstacles.items() if code in NOISE]
    if noise:
        steps.append((" ".join(noise), ("audit", model, *how, "--data", "DATA")))
    elif CHANCE in obstacles:
        steps.append((obstacles[CHANCE], ("check", model, *how, *_spell_data(report))))
    else:
        steps += _suggest_attack(report, how)
    saved = find_file(command)
    file = saved or FILE
    save = ""
    # An audit saves its report in any case, and Python has no such option.
    if saved is None and not re.match(r"lipaudit( audit|\.)", command):
        save = f" (-o {FILE} saves the report)"
    for sample in worst(report)[:1]:
        first = name_sample(sample, find_places(report))
        text = f"Look at the worst samples, first {first}{save}."
        steps.append((text, ("inspect", file, sample[:CHARACTERS])))
    judged = any(report.section(rule.measure) for rule in DEFAULT_RULES)
    if report.status == "complete" and judged and not obstacles:
        text = f"Make CI fail if the next checkpoint is worse{save}."
        steps.append((text, ("gate", model, "--baseline", file)))
    for text, words in steps:
        yield "", text, shlex.join(["lipaudit", *words])


def _suggest_attack(report: Report, options: Sequence[str]) -> Iterator[tuple[str, Sequence[str]]]:
    """Suggest an attack on the logits, if there was none."""
    known = summary(report)
    if known.norms is None or known.norms.end != "logits" or report.section("attack"):
        return
    data = ["--data", "LABELLED"]
    if any(each.kind == "clean" for each in known.accuracy):
        data = _spell_data(report)
    radius = SMALL_BALL.get(known.norms.start, "0.1")
    words = ("attack", report.run.model.spec, *options, *data, "--eps", radius)
    yield "See what attacks achieve: no attack was run.", words


def _spell_data(report: Report) -> list[str]:
    """Return the words of a command that read the data of a report."""
    run = report.run
    return ["--data", run.data.spec, *spell_options(run.options, DATA)]
