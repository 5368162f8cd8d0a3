"""What a page begins with: the answer, facts and notes, the scorecard, and what to do next."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lipaudit.measures import list_headlines
from lipaudit.report.blocks import Block, Card, Chapter, Paragraph, Tone, list_notes
from lipaudit.report.cells import format_value, list_footnotes, read_words, write_math
from lipaudit.settings import DATA, spell_options
from lipaudit.tables import Note, Report, Row, Run, Section
from lipaudit.tables.columns import group_values, order, wilson
from lipaudit.tables.formats import CHARACTERS, describe_places, format_count, name_sample
from lipaudit.tables.summary import (
    describe_figure,
    find_figures,
    list_shared_notes,
    list_warnings,
)
from lipaudit.tables.trials import WHOLE, parse_radius
from lipaudit.tables.weakest import can_rank, find_worst

SEED = "seed"
"""Name of the setting seed, which stands among the facts of the run."""
RESIZING = ("interpolation", "crop_pct", "crop_mode")
"""The facts of preprocessing that only matter for images of another size."""


def list_facts(report: Report) -> dict[str, str]:
    """Return facts on model, data and run, by name."""
    run = report.run
    model = run.model
    data = run.data
    versions = {"lipaudit": run.lipaudit} | run.versions
    arithmetic = run.dtype
    if "autocast" in run.options:
        arithmetic += f" (predictions under autocast in {run.options['autocast']})"
    facts = {
        "model": f"{model.spec} ({model.source}, {model.architecture})",
        "weights": f"{model.parameters:,} parameters, sha256 {model.weights_sha256[:16]}",
        "quantised": model.quantised,
        "data": f"{data.spec}, {format_count(data.samples)}, suite {data.suite_id[:16]}",
        "commit": _describe_commits(run),
        **_list_preprocessing(run),
        "first sample": data.steps,  # how the first sample was prepared
        "run": f"{run.device}, {arithmetic}, seed {run.seed}, {run.created}",
        "versions": ", ".join(f"{k} {v}" for k, v in versions.items()),
        "command": run.command,
        "status": report.status,
        "reason": run.reason,
    }
    return {name: text for name, text in facts.items() if text}


def _describe_commits(run: Run) -> str:
    """Return the commits of model and data on their hub, such as `model 0123abcd (main)`.

    A model or data without a commit, such as a file, is left out.
    """
    commits = []
    for name, source in (("model", run.model), ("data", run.data)):
        if source.commit:
            commits.append(f"{name} {source.commit[:12]} ({source.revision})")
    return ", ".join(commits)


def _list_preprocessing(run: Run) -> dict[str, str]:
    """Return how images were prepared, and how images of another size were resized, as texts."""
    preprocessing = list[str]()
    resizing = list[str]()
    for name, value in run.preprocess.items():
        group = resizing if name in RESIZING else preprocessing
        group.append(f"{name} {format_setting(value)}")
    # Only --preprocess model also prepares images that have the model's size.
    if resizing and run.options.get("preprocess") != "model":
        resizing.append("images of the model's size stay as they are")
    return {"preprocessing": "; ".join(preprocessing), "resizing": "; ".join(resizing)}


def format_setting(value: Any) -> str:
    """Write a setting; lists without brackets."""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)


def describe_gaps(report: Report) -> str:
    """Describe what is missing from a report; empty if it is complete."""
    gaps = [f"{name} failed: {failure.reason}" for name, failure in report.failures.items()]
    if report.unmeasured:
        counts = ", ".join(f"{name} ({count})" for name, count in report.unmeasured.items())
        gaps.append(f"the time limit ended the run before some samples were finished: {counts}")
    elif gaps:
        gaps[-1] += ". The other measures are complete"
    elif report.status != "complete":
        gaps.append("the run was cut short")
    return f"{'; '.join(gaps)}." if gaps else ""


def list_top_notes(report: Report) -> list[Note]:
    """Return the notes for the top of a page: all warnings, then the notes of all measures."""
    return [*list_warnings(report), *list_common_notes(report)]


def list_common_notes(report: Report) -> list[Note]:
    """Return the notes that all measures of a report share, without warnings.

    A report of a single measure has none: the chapter of the measure shows its notes.
    """
    if len(report.main_sections) < 2:
        return []
    return [note for note in list_shared_notes(report) if note.level != "warning"]


def open_page(
    answer: Paragraph | None = None,
    gaps: str = "",
    facts: Iterable[tuple[str, str]] = (),
    notes: Iterable[Note] = (),
) -> Chapter:
    """Return the opening of a page: the answer, what is missing, facts, warnings and notes."""
    blocks: list[Block] = []
    if answer:
        blocks.append(answer)
    if gaps:
        blocks.append(Paragraph(f"Partial: {gaps}", tone="broken"))
    rows = list(facts)
    if rows:
        blocks.append(Card(rows))
    blocks += list_notes(notes)
    return Chapter(name="", title="", blocks=blocks)


# The scorecard


def show_scorecard(summary: Section) -> list[Chapter]:
    """Return the chapter with the main figures of a report; no chapter without such figures."""
    if not summary.rows:
        return []
    columns = [describe_figure(row) for row in summary.rows]
    marks, notes = list_footnotes(columns)
    # A headline explains its figure; without a headline, the column of the figure does.
    explained = {each.name: each.meaning for _, each in list_headlines() if each.meaning}
    norms = read_words()["words"]["Norms of attacks"]
    rows = []
    meanings = []
    for row, column, mark in zip(summary.rows, columns, marks, strict=True):
        label = write_math(row.figure) + mark
        figure = format_value(row.value, column)
        rows.append((label, figure, write_math(row.text)))
        meaning = explained.get(row.name) or row.meaning
        if row.norm in norms:
            meaning += f" {row.norm}: {norms[row.norm]}"
        meanings.append(write_math(meaning))
    card = Card(rows, note="; ".join(notes), meanings=meanings)
    return [Chapter("scorecard", summary.title, (card,))]


# The answer in a sentence


CLEAN = "clean_accuracy"
ATTACKED = "attacked_accuracy"
CERTIFIED = "certified_accuracy"
NORM = "jacobian_norm"
STEEPEST = "steepest_head"
"""Names of the figures that the answer and the next steps depend on."""


def write_answer(summary: Section) -> Paragraph | None:
    """Return the answer of a page: a sentence for each main figure of a report, and a tone.

    The sentences say how robust the model is; without attacks, how large its norms are. The tone,
    the colour on a page, says whether the answer is bad ("broken"), good ("kept"), undecided
    ("open") or none of these ("answer").

    Args:
        summary: the main figures; a figure has a row for each ball, the largest ball last.
    """
    figures = group_values((row.name, row) for row in summary.rows)
    clean = figures.get(CLEAN, [])
    attacked = figures.get(ATTACKED, [])
    broken = _find_broken(summary)
    sentences = []
    at_chance = CHANCE in {note.code for note in summary.notes}
    if at_chance:
        sentences.append(NO_BASELINE[CHANCE])
    # If attacks ran, their result is the answer, and norms get no sentence.
    omitted = (NORM, STEEPEST) if attacked else ()
    for name, rows in figures.items():
        worded = [row for row in rows if row.sentence]
        if name == ATTACKED:
            sentences.append(_describe_attacked(clean, attacked, broken))
        elif worded and name not in omitted:
            # The largest ball in which the figure is positive, else the largest ball.
            positive = [row for row in worded if order(row.value) > 0]
            sentences.append((positive or worded)[-1].sentence)
    if not sentences:
        return None
    tone: Tone = "broken"
    if not broken and not at_chance:
        tone = _choose_tone(figures)
    return Paragraph(" ".join(sentences), tone)


def _choose_tone(figures: Mapping[str, Sequence[Row]]) -> Tone:
    """Return the tone (the colour on a page) of an answer without a proven loss of accuracy.

    "kept" (good): every correct sample is proven to be robust, even in the largest ball. Else
    "open" (undecided) if attacks ran, and "answer" (neutral) if not.

    Args:
        figures: the rows of each main figure by name, with the largest ball last.
    """
    clean = figures.get(CLEAN)
    certified = figures.get(CERTIFIED)
    if clean and certified and certified[-1].value >= clean[0].value > 0:
        return "kept"
    return "open" if ATTACKED in figures else "answer"


def _find_broken(summary: Section) -> list[Row]:
    """Return the accuracies under attack that are proven to be below the clean accuracy.

    Their intervals do not overlap: the upper limit under attack is below the lower limit without
    attack.
    """
    clean = find_figures(summary, CLEAN)
    highest_low = max((order(row.low) for row in clean), default=-math.inf)
    attacked = find_figures(summary, ATTACKED)
    return [row for row in attacked if row.high is not None and row.high < highest_low]


def _describe_attacked(
    clean: Sequence[Row], attacked: Sequence[Row], broken: Sequence[Row]
) -> str:
    """Say how many samples survive the attacks in one ball.

    With rows in `broken`, the sentence is on a ball in which the loss of accuracy is proven. Each
    norm has a smallest radius with a proven loss. Of these balls, one for each norm, the ball with
    the lowest accuracy is chosen; if accuracies are equal, the ball with the smallest radius.

    Without rows in `broken`, no loss is proven. The sentence is then on the last row of
    `attacked`, the largest ball of the last norm.

    Args:
        clean: the figure of the accuracy without attack; empty if there is none.
        attacked: the accuracy under attack in every ball, by norm, then by growing radius.
        broken: the rows of `attacked` that are proven to be below the clean accuracy, in the
            order of `attacked`.
    """
    if broken:
        # A dict keeps the last row of each norm. Radii grow, so in reversed order the last row of
        # a norm has the smallest radius.
        smallest = {row.norm: row for row in reversed(broken)}
        chosen = min(
            smallest.values(),
            key=lambda row: (row.value, float(parse_radius(row.radius))),
        )
        verdict = "not robust there"
    else:
        chosen = attacked[-1]
        verdict = _count_broken(clean, chosen)
    return f"{chosen.sentence}: {verdict}."


def _count_broken(clean: Sequence[Row], attacked: Row) -> str:
    """Say how many of the correctly classified samples the attacks broke.

    The sentence is for a loss of accuracy that is too small to be proven.

    Args:
        clean: the figure of the accuracy without attack, if there is one.
        attacked: the figure of the accuracy under attack.
    """
    if not clean or clean[0].samples != attacked.samples:  # counts of other samples
        return "the limits of clean accuracy overlap"
    correct = round(clean[0].value * attacked.samples)
    if not correct:
        return "none was correct before"
    broken = correct - round(attacked.value * attacked.samples)
    return f"{broken} of {correct} correct samples broken"


# The next steps


FILE = "report.json"
"""File name of the report in commands on its page, if its own command names none; of an audit."""
RESUME = " --resume"
MERGES = ("lipaudit merge ", "lipaudit.merge(")
MEASURES = re.compile(r"lipaudit (?!gate |compare |merge )")
"""Beginning of a command that measures samples of its own choice."""
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
FEW = 30
"""With fewer samples, the next step is to take more: as many as `ENOUGH`."""
ENOUGH = 64
SMALL_BALL = {"pixels": "2/255", "embeddings": "0.1"}
"""Radius of a suggested attack, by the space that it attacks."""


def find_file(command: str) -> str | None:
    """Return the JSON file to which a command writes its report; None if the command has none."""
    try:
        words = shlex.split(command)
    except ValueError:  # the command of a report may be anything
        return None
    # A gate or a comparison writes its verdict to the file of -o, and the report to --report.
    flags = "--output|-q?o"
    if words[1:2] in (["gate"], ["compare"]):
        flags = "--report"
    joined = "\0".join(words)  # no word contains this character, so words may contain spaces
    # -o FILE.json, -qo FILE.json or --output=FILE.json
    file = re.search(rf"\0(?:{flags})[\0=]?([^\0]+[.]json)(?=\0|$)", joined)
    if file is not None:
        return file[1]
    folder = re.search(r"\0--run-dir[\0=]([^\0]+)", joined)  # where an audit writes
    if folder is not None:
        return f"{folder[1].rstrip('/')}/{FILE}"
    return None


def list_obstacles(report: Report) -> dict[str, str]:
    """Return why a report cannot be a baseline, as advice by the code of a warning."""
    codes = {note.code for note in list_warnings(report)}
    return {code: advice for code, advice in NO_BASELINE.items() if code in codes}


def suggest_steps(report: Report, summary: Section) -> Iterator[tuple[str, str, str]]:
    """Yield what to do next, the most urgent step first: ("", sentence, command).

    The triples are points of a list (`blocks.Points`), whose mark, the first text, is empty here.

    Args:
        report: the report.
        summary: the main figures of the report.
    """
    command = report.run.command
    # `lipaudit merge` prints which shards to run again, so a merged report needs no such step.
    if report.status != "complete" and not command.startswith(MERGES):
        # The interrupted run may have resumed another one: its command then ends in --resume.
        resume = f"{command.removesuffix(RESUME)}{RESUME}"
        yield "", "Measure the missing results.", resume
    # Why the report cannot be a baseline, such as random weights. More samples would not help.
    obstacles = list_obstacles(report)
    if not obstacles:
        yield from _suggest_more(report, summary)
    # Each step is a sentence and the words of a command behind `lipaudit`.
    steps = [
        *_suggest_measurement(report, summary, obstacles),
        *_suggest_samples(report),
        *_suggest_radii(report, summary),
    ]
    # Whether the gate has a default rule for a figure of this report, as for robust accuracy.
    has_rule = any(headline.rule and report.section(name) for name, headline in list_headlines())
    if report.status == "complete" and has_rule and not obstacles:
        file, remark = _choose_file(command)
        text = f"Make CI fail if the next checkpoint is worse{remark}."
        # The gate reads the options of the run from the baseline.
        steps.append((text, ("gate", report.run.model.spec, "--baseline", file)))
    for text, words in steps:
        yield "", text, shlex.join(["lipaudit", *words])


# A sentence, and the words of a command behind `lipaudit`.
_Step = tuple[str, Sequence[str]]


def _suggest_measurement(
    report: Report, summary: Section, obstacles: Mapping[str, str]
) -> Iterator[_Step]:
    """Yield the most useful next measurement: a sentence, and the words of a command.

    A report on random weights or data needs real ones; an accuracy at chance needs a check of the
    labels; any other report needs attacks if none ran.

    Args:
        report: the report.
        summary: the main figures of the report.
        obstacles: advice by the code of a warning: random weights or data (the codes in NOISE), or
            an accuracy at chance (CHANCE).
    """
    model = _spell_model(report)
    noise = [advice for code, advice in obstacles.items() if code in NOISE]
    if noise:
        yield " ".join(noise), ("audit", *model, "--data", "DATA")
    elif CHANCE in obstacles:
        yield obstacles[CHANCE], ("check", *model, *_spell_data(report))
    else:
        yield from _suggest_attack(report, summary)


def _suggest_samples(report: Report) -> Iterator[_Step]:
    """Yield the step to look at the worst sample, if the report ranks its samples.

    A step is a sentence, and the words of a command behind `lipaudit`.
    """
    if not can_rank(report):
        return
    file, remark = _choose_file(report.run.command)
    sample = find_worst(report)[0]
    name = name_sample(sample, describe_places(report))
    text = f"Look at the worst samples, first {name}{remark}."
    yield text, ("inspect", file, sample[:CHARACTERS])


def _choose_file(command: str) -> tuple[str, str]:
    """Return the file of a report for a suggested command, and a remark on how to save the report.

    The remark is empty if the command of the report saved it, and for calls from Python.
    """
    file = find_file(command)
    # `lipaudit audit` always saves its report; calls from Python (`lipaudit.`) have no option -o.
    if file is None and not re.match(r"lipaudit( audit|\.)", command):
        return FILE, f" (-o {FILE} saves the report)"
    return file or FILE, ""


def _suggest_radii(report: Report, summary: Section) -> Iterator[_Step]:
    """Yield the step to attack with nine radii from 0 to a radius at which attacks succeeded.

    A step is a sentence, and the words of a command behind `lipaudit`.
    """
    for row in _find_broken(summary)[:1]:  # the first ball in which the model is not robust
        if row.norm not in WHOLE:  # norms in WHOLE count words or tokens: they have few radii
            model_and_data = (*_spell_model(report), *_spell_data(report))
            radii = ("--norm", row.norm, "--eps", f"0:{row.radius}:9")
            words = ("attack", *model_and_data, "--attack", "pgd", *radii)
            yield "Find the radius at which attacks begin to succeed.", words


def _suggest_more(report: Report, summary: Section) -> Iterator[tuple[str, str, str]]:
    """Yield the step to measure more samples, if an accuracy has few: ("", sentence, command).

    The command repeats that of the report. This works only for commands that choose samples
    themselves (MEASURES), unlike `gate` and `compare`.
    """
    command = report.run.command
    clean = find_figures(summary, CLEAN)
    if not clean or clean[0].samples >= FEW or not MEASURES.match(command):
        return
    # The widths of the 95% limits with the present and with the suggested number of samples.
    widths = []
    for count in (clean[0].samples, ENOUGH):
        low, high = wilson(count / 2, count)  # limits are widest at an accuracy of 50%
        widths.append(f"{100 * (high - low):.0f} points apart with {format_count(count)}")
    text = f"Measure more samples: 95% limits of an accuracy are up to {', '.join(widths)}."
    command = re.sub(r" (-n|--samples)[ =]*\d+", "", command)
    # The data had fewer samples than the command asked for.
    if any(note.code == "fewer-samples" for note in list_shared_notes(report)):
        command = re.sub(r" --data[ =]\S+", " --data LARGER", command)
    yield "", text, f"{command} -n {ENOUGH}"


def _suggest_attack(report: Report, summary: Section) -> Iterator[_Step]:
    """Yield the step to run an attack: a sentence, and the words of a command behind `lipaudit`.

    There is no such step if an attack ran, or if the Jacobian of the logits was not measured.
    """
    jacobian = report.section("jacobian")
    if jacobian is None or not find_figures(summary, NORM) or report.section("attack"):
        return
    row = next(row for row in jacobian.rows if not row.module)  # of the whole model
    if row.to != "logits":
        return
    # An attack needs labels. Data without a clean accuracy have none.
    data = ["--data", "LABELLED"]
    if find_figures(summary, CLEAN):
        data = _spell_data(report)
    radius = SMALL_BALL.get(row.from_, "0.1")  # by the input of the Jacobian: pixels, embeddings
    words = ("attack", *_spell_model(report), *data, "--eps", radius)
    yield "See what attacks achieve: no attack was run.", words


def _spell_model(report: Report) -> list[str]:
    """Return the words of a command that measure the model of a report again."""
    run = report.run
    return [run.model.spec, *spell_options(run.options)]


def _spell_data(report: Report) -> list[str]:
    """Return the words of a command that read the data of a report."""
    run = report.run
    return ["--data", run.data.spec, *spell_options(run.options, DATA)]
