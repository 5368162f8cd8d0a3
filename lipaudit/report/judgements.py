"""What the gate found, as pages: a comparison, a ranking of several models, a judgement."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import get_args

from lipaudit.gate.comparison import Comparison, HeadChange, Pair, SampleChange
from lipaudit.gate.ranking import Ranking
from lipaudit.gate.verdicts import Judgement, Verdict, VerdictStatus, format_change
from lipaudit.measures import find_column
from lipaudit.report import blocks
from lipaudit.report.blocks import Block, Cells, Chapter, Document, Paragraph, Points
from lipaudit.report.cells import pick_columns
from lipaudit.report.changes import (
    MOVED,
    choose_tone,
    describe_flip,
    draw_changes,
    draw_ranking,
    name_change,
    name_metric,
    read_change,
    show_flipped,
    write_answer,
    write_arrows,
)
from lipaudit.report.document import list_names, list_warnings, make_pages, open_several
from lipaudit.report.groups import count_part, show_group_changes, show_movement, write_movement
from lipaudit.report.opening import open_page
from lipaudit.report.rows import (
    FIT,
    TOP,
    map_heads,
    read_verdict,
    tabulate_rows,
)
from lipaudit.tables import Column, Note, Report, model_labels
from lipaudit.tables.columns import group_values
from lipaudit.tables.formats import describe_places, join_texts
from lipaudit.tables.summary import describe_figure
from lipaudit.tables.trials import FLAGS


def make_page(
    found: Comparison | Ranking | Judgement, reports: Sequence[Report], *, short: bool = False
) -> Document:
    """Return the page of a comparison, a ranking or a judgement of the gate.

    Args:
        found: a comparison, a ranking or a judgement.
        reports: the compared or ranked reports.
        short: whether the page has to fit one screen; it then lacks the sections of the reports.
            The page of a judgement is always short.
    """
    if isinstance(found, Comparison):
        return make_comparison_page(found, reports, short=short)
    if isinstance(found, Judgement):
        return make_judgement_page(found)
    opening = open_several(reports, describe_ranking(found), short=short)
    return make_pages(reports, [opening, show_ranking(found, reports, short=short)], short=short)


# Comparisons


FIRST: tuple[VerdictStatus, ...] = ("regressed", "improved", "inconclusive", "unchanged")
"""Verdicts, the most severe first."""
FEW = 3
"""Number of samples and heads on one screen; it has twice as many figures."""
NORM = "jacobian.norm"
CARRIED = "jacobian.shares."
BRIEF_CHANGES = pick_columns(
    "metric", status="verdict", baseline="old", current="new", change="change"
)
"""Columns of changes on one screen; like all columns of verdicts by the fields of `Verdict`."""
CHANGES = BRIEF_CHANGES | pick_columns(
    "paired",
    limits="95% limits",
    samples="samples",
    lost="lost",
    gained="gained",
    mcnemar="McNemar",
)
HEADS = pick_columns("head", "change", limits="95% limits", p_adjusted="p (Holm)", stands="stands")


OF_FIGURES = (
    "Figures of samples are medians and 95th percentiles over the samples, figures of heads are "
    "medians or means over the heads, as on the scorecard. One differs: exact_max takes the "
    "steepest head of each sample, and the scorecard's steepest head is one for all samples. A "
    "paired change is the median change of a sample; its limits hold for this figure alone."
)
OF_HEADS = "p (Holm), corrected over all heads, is at most 5% (column stands)."


def make_comparison_page(
    comparison: Comparison, reports: Sequence[Report], *, short: bool
) -> Document:
    """Return the page of a comparison: what changed, then the reports side by side.

    Args:
        comparison: the comparison.
        reports: the compared reports.
        short: whether the page has to fit one screen: short tables, and no sections of reports.
    """
    pairs = comparison.pairs
    several = len(pairs) > 1
    places = dict[str, str]()
    for report in reports:
        places |= describe_places(report)
    counts = []
    chapters = list[Chapter]()
    warnings = list_warnings(reports)
    for i, pair in enumerate(pairs):
        lead = ""
        if several:
            lead = f"{pair.new}: "
        counts.append(write_answer(pair))
        for text in (*pair.warnings, *_list_excluded(pair)):
            warnings.append(Note.warn("differs", lead + text))
        for chapter in _list_chapters(pair, places, reports, several=several, short=short):
            if several:
                chapter = replace(chapter, name=f"{chapter.name}-{i + 1}")
            chapters.append(chapter)
    data = dict.fromkeys(f"{r.run.data.spec}, {r.run.data.samples} samples" for r in reports)
    old, *new = comparison.models
    facts = [("old", old), *(("new", name) for name in new), ("data", "; ".join(data))]
    answer = Paragraph(" ".join(counts), choose_tone(pairs))
    opening = open_page(answer, "", facts, warnings)
    page = make_pages(reports, [opening, *chapters], short=short)
    which = f"{len(pairs)} models" if several else pairs[0].new
    return replace(page, title=f"lipaudit: {which} against {pairs[0].old}")


def _list_excluded(pair: Pair) -> Iterator[str]:
    """Yield for each reason that prevents a comparison a text with the reason and its metrics."""
    refused = group_values((v.reason, v.metric) for v in pair.verdicts if v.reason)
    for why, names in refused.items():
        yield f"not compared, {why}: {', '.join(names)}"


def _list_chapters(
    pair: Pair,
    places: Mapping[str, str],
    reports: Sequence[Report],
    *,
    several: bool,
    short: bool,
) -> Iterator[Chapter]:
    """Yield the chapters of the comparison of two reports, without empty ones.

    Args:
        pair: the comparison of one model with the first.
        places: the place of each sample in the data, by id.
        reports: all reports of the page; images and texts of samples are read from these.
        several: whether the page compares several models, so that titles name the model.
        short: for one screen.
    """
    of = f" ({pair.new})" if several else ""
    most = FEW if short else TOP  # rows of a table
    figures = _show_figures(pair, short=short)
    if figures:
        yield Chapter("change", f"What changed from {pair.old} to {pair.new}?", figures)
    groups = show_group_changes(pair, most)
    if groups:
        yield Chapter("groups", f"Which groups changed?{of}", groups)
    if pair.predictions is not None:
        moved = show_movement(pair.predictions)
        yield Chapter("predictions", f"How did the predictions move?{of}", moved)
    flipped = [sample for sample in pair.samples if sample.lost or sample.gained]
    samples = _show_samples(pair, flipped, places, FEW if short else FIT)
    if samples and not short:
        samples += show_flipped(flipped, reports)
    if samples:
        yield Chapter("samples", f"Which samples changed?{of}", samples)
    # The parts of the model's norm that pass through each head: a table of their own.
    carriers = [head for head in pair.heads if head.metric.startswith(CARRIED)]
    heads = _show_heads([head for head in pair.heads if head not in carriers], most)
    if heads:
        yield Chapter("heads", f"Which heads changed?{of}", heads)
    carrying = _show_heads(carriers, most)
    if carrying:
        yield Chapter("carriers", f"Which heads carry the change of the norm?{of}", carrying)


# Chapters


def _show_figures(pair: Pair, *, short: bool) -> list[Block]:
    """Return a table of verdicts, the most severe first; a full page adds a picture and notes."""
    judged = [verdict for verdict in pair.verdicts if verdict.status in FIRST]
    judged.sort(key=lambda verdict: FIRST.index(verdict.status))
    shown = judged
    columns = CHANGES
    found = list[Block]()
    if short:
        shown = judged[: 2 * FEW]
        columns = BRIEF_CHANGES
    else:
        found += draw_changes((name_change(verdict), verdict) for verdict in judged)
    moved = {i for i, verdict in enumerate(shown) if verdict.status in MOVED}
    title = ""
    if len(shown) < len(judged):
        title = f"The first {len(shown)} of {len(judged)}"
    found += tabulate_rows(columns, map(read_verdict, shown), title, strong=moved)
    if shown and not short:
        found.append(Paragraph(OF_FIGURES))
    if not short:
        found += blocks.list_notes(Note.info("differs", text) for text in pair.notes)
    return found


def rank_heads(changes: Sequence[HeadChange]) -> list[HeadChange]:
    """Return the heads with a known change, largest first; increase and decrease count equally."""

    def size(head: HeadChange) -> float:
        # The sort key: how far the head moved; -1 for an unknown change, which is left out below.
        value = read_change(head)
        if value is None or math.isnan(value):
            return -1.0
        if head.unit == "%" and value > -1:
            value = math.log1p(value)  # halved and doubled heads moved equally far
        return abs(value)

    return [head for head in sorted(changes, key=size, reverse=True) if size(head) >= 0]


def _show_heads(heads_moved: Sequence[HeadChange], most: int) -> list[Block]:
    """Return a table of the heads that changed most, and a map of all heads for each metric.

    The short page has only the table, without old and new values.

    Args:
        heads_moved: the change of each head in each metric. The first metric ranks the heads.
        most: number of heads in the table; FEW on the short page.
    """
    # The changes by metric; `partition` removes the statistic behind the colon.
    groups = group_values((head.metric.rpartition(":")[0], head) for head in heads_moved)
    if not groups:
        return []
    first, changes = next(iter(groups.items()))
    ranked = rank_heads(changes)
    has_maps = most > FEW  # FEW rows mean the short page
    shown = ranked[:most]
    if has_maps and len(ranked) <= FIT:  # the full page has room for all heads
        shown = ranked
    rows = [_list_head_cells(head) for head in shown]
    if not has_maps:
        groups = {}  # the loop below then adds neither maps nor old and new values
    maps = list[Block]()
    columns = dict(HEADS)
    for metric, group in groups.items():
        column = find_column(metric)
        heads = {(head.layer, head.head): head for head in group}
        for when in ("old", "new"):
            key = f"{metric}, {when}"
            columns[key] = replace(column, label=f"{column.label}, {when}")
            for row in rows:
                same = heads.get((row["layer"], row["head"]))  # None: not measured in this metric
                row[key] = same and getattr(same, when)
        maps.append(_map_changes(metric, heads))
    proven = sum(head.stands for head in changes)
    found: list[Block] = [Paragraph(f"{proven} of {len(changes)} changes are proven: {OF_HEADS}")]
    strong = {i for i, head in enumerate(shown) if head.stands}
    title = f"Heads that moved most{count_part(shown, ranked)}, by {name_metric(first)}"
    found += tabulate_rows(columns, rows, title, strong=strong)
    return found + maps


def _list_head_cells(head: HeadChange) -> Cells:
    """Return the cells of a head in the table of heads that moved most."""
    cells = read_verdict(head)
    cells["change"] = format_change(read_change(head), head.unit)
    if head.p_adjusted is not None:
        cells["stands"] = head.stands
    return cells


def _map_changes(metric: str, heads: Mapping[tuple[int, int], HeadChange]) -> Block:
    """Return a map of the changes of a metric: a row for each layer, a column for each head."""
    column = find_column(metric)
    unit = next(iter(heads.values())).unit
    times = 100.0 if unit == "pp" else 1.0  # shares become percentage points
    values = dict[tuple[int, int], float | None]()
    for place, head in heads.items():
        value = read_change(head)
        values[place] = value if value is None else value * times
    how = {"%": "+.1%", "pp": "+.1f", "": "+.3g"}[unit]
    meaning = "New value over old value, sample by sample."
    change = Column("change", meaning, unit.strip("%"), how, status=column.status)
    title = f"How {name_metric(metric)} changed in every head"
    return map_heads(title, values, change, centre=0.0)


def _show_samples(
    pair: Pair, flipped: Sequence[SampleChange], places: Mapping[str, str], most: int
) -> list[Block]:
    """Show the samples whose result changed, with their figures before and after.

    Args:
        pair: the comparison of two models.
        flipped: its samples whose result changed.
        places: the place of each sample in the data, by id.
        most: number of samples in the table; FEW on the short page.
    """
    if not flipped:
        return []
    shown = flipped[:most]
    columns = pick_columns("sample", "place", "became")
    rows = list_names([sample.id for sample in shown], places)
    for row, sample in zip(rows, shown, strict=True):
        row["became"] = describe_flip(sample)
    counts = Counter[str]()
    for sample in pair.samples:
        counts.update(sample.figures.keys())
    # Metrics that most samples have come first; among equals, the norm comes first.
    for metric in sorted(counts, key=lambda metric: (-counts[metric], metric != NORM)):
        name, _, trial = metric.partition("@")
        # Shown if half of the samples have the metric; the short page (FEW rows) has no room.
        known = sum(metric in sample.figures for sample in shown)
        if most <= FEW or 2 * known < len(shown):
            continue
        if name.split(".")[-1] in FLAGS:  # yes-or-no results: the column `became` shows them
            continue
        column = find_column(metric)
        for end, when in enumerate(("old", "new")):
            key = f"{metric}, {when}"
            columns[key] = replace(column, label=join_texts((column.label, trial, when)))
            for row, sample in zip(rows, shown, strict=True):
                if metric in sample.figures:
                    row[key] = sample.figures[metric][end]
    title = "Samples that changed" + count_part(shown, flipped)
    return [*tabulate_rows(columns, rows, title)]


# Rankings


FIGURES = 4
"""Number of figures of each scorecard on one screen."""


def show_ranking(ranking: Ranking, reports: Sequence[Report], *, short: bool) -> Chapter:
    """Return the chapter of a ranking: a table, the criterion and, on full pages, a picture."""
    title = "The models, in order"
    keys = 1
    criterion = list[Block]()
    if ranking.criterion:
        title = "Which model is the most robust?"
        keys = 2
        text = f"Ranked by {ranking.criterion}; rank 1 has the best model and every one that is "
        text += "not distinguishable from it. Limits of differences: 95%, paired"
        if ranking.compared > 1:
            text += f", each corrected for {ranking.compared} comparisons"
        criterion.append(Paragraph(f"{text}."))
    drawn = list[Block]()
    if not short:
        drawn = draw_ranking(ranking)
    columns, rows = list_models(ranking, reports, FIGURES if short else None)
    tables = tabulate_rows(columns, rows, keys=keys)
    parts = (*tables, *criterion, *drawn, *blocks.list_notes(ranking.notes))
    return Chapter("ranking", title, parts)


def list_models(
    ranking: Ranking, reports: Sequence[Report], most: int | None = None
) -> tuple[dict[str, Column], list[Cells]]:
    """Return the columns of a ranking, and a row for every model.

    Args:
        ranking: the ranking, with the main figures of every model.
        reports: the reports, in the order given; their figures get columns in this order.
        most: largest number of figures; None: all.
    """
    figures: dict[str, Column] = {}
    summaries = {model.model: model.summary for model in ranking.models}
    for name in model_labels(reports):
        for figure in summaries[name].rows:
            # With this prefix, a figure called `rank` does not replace the rank of the model.
            figures.setdefault(f"figure {figure.figure}", describe_figure(figure))
    columns = pick_columns("model")
    if ranking.criterion:
        columns = pick_columns("rank", "model", "outcome", "difference")
    columns |= dict([*figures.items()][:most])
    rows = list[Cells]()
    for model in ranking.models:
        row: Cells = {f"figure {figure.figure}": figure.value for figure in model.summary.rows}
        row |= {"rank": model.rank, "model": model.model, "outcome": model.outcome}
        difference = model.difference
        if difference is not None:  # the best model has none
            limits = difference.texts["limits"]
            row["difference"] = format_change(read_change(difference), difference.unit)
            if limits:
                row["difference"] += f" ({limits})"
        rows.append(row)
    return columns, rows


def describe_ranking(ranking: Ranking) -> str:
    """Say which models are best, behind, or not distinguishable from the best; else nothing."""
    figures = _read_ranked(ranking)
    pairs = list[tuple[tuple[str, str], str]]()
    criterion = ""
    for model in ranking.models:
        name = model.model
        if figures.get(name):
            name += f" ({figures[name]})"
        pairs.append(((model.outcome, model.reason), name))
        if model.difference is not None:
            criterion = f" by {name_change(model.difference)}"
    sentences = []
    for (outcome, reason), names in group_values(pairs).items():
        because = ""
        if reason:
            because = f" ({reason})"
        lead = outcome.capitalize()
        if outcome == "best":
            lead += criterion
        if outcome:
            sentences.append(f"{lead}: {', '.join(names)}{because}.")
    return " ".join(sentences)


def _read_ranked(ranking: Ranking) -> dict[str, str]:
    """Return the ranking figure as a text, for the best model and each model compared to it."""
    figures: dict[str, str] = {}
    for model in ranking.models:
        if model.difference is not None:
            best, _, figures[model.model] = model.difference.values.partition(" -> ")
            figures.setdefault(ranking.models[0].model, best)
    return figures


# Judgements


MARKS = {"improved": "✓", "pass (proven)": "✓", "pass": "✓", "unchanged": "="}
GRAVEST: tuple[VerdictStatus, ...] = get_args(VerdictStatus)[::-1]
"""Verdicts, the most severe first."""
ALONE = 6
"""Rules with at most this many rows are listed row by row."""
MOST = 8
"""Largest number of verdicts listed line by line for a rule, and of failures on a page."""
PASSED = ("pass (proven)", "pass", "unchanged")
TEXTS = pick_columns("baseline", "current", "change", "paired", "limits", "samples")
VERDICTS = pick_columns("verdict", "rule", "row") | TEXTS


RuleVerdicts = tuple[str, list[Verdict], Counter[str]]
"""A rule, its verdicts to list one by one, and how many others have each status."""


def write_verdicts(judgement: Judgement) -> list[str]:
    """Write a judgement line by line: the answer first, the outcome with its counts last."""
    lines = [judgement.reason, f"{judgement.current} against {judgement.baseline}", ""]
    lines += (f"! warning: {text}" for text in judgement.warnings)

    def rank(group: RuleVerdicts) -> int:
        # The sort key of a rule: the rank of its most severe listed verdict.
        return min((rank_verdict(judgement, verdict) for verdict in group[1]), default=2)

    # Rules that fail come first, then rules without a proven answer, then rules that pass.
    for rule, listed, passed in sorted(_group_verdicts(judgement), key=rank):
        first = listed[:MOST]
        for verdict in first:
            mark = _choose_mark(judgement, verdict)
            lines.append(f"{mark} {verdict.line}")
        # The verdicts beyond MOST are not written line by line, but counted by status (`cut`).
        cut = Counter[str](verdict.status for verdict in listed[MOST:])
        more = "more " if first else ""
        for status, count in (cut + passed).items():
            line = f"  {rule}: {count} {more}rows {status}"
            if status in cut:
                line += "; -f table lists them"
            lines.append(line)
    if judgement.predictions is not None:
        lines.append(f"  {write_movement(judgement.predictions)}")
    lines += (f"  note: {note}" for note in judgement.notes)
    return [*lines, "", f"{judgement.summary} (exit code {judgement.exit_code})"]


def rank_verdict(judgement: Judgement, verdict: Verdict) -> int:
    """Return 0 for a verdict that fails, 1 for an inconclusive verdict, 2 for all others."""
    if judgement.fails(verdict):
        return 0
    return 1 if verdict.status == "inconclusive" else 2


def make_judgement_page(judgement: Judgement) -> Document:
    """Return the page of a judgement: the answer, a table of verdicts, the remarks."""
    ending = "passed"
    tone: blocks.Tone = "kept"
    if judgement.exit_code:
        ending = "failed"
        tone = "broken"
    elif judgement.outcome == "not proven":
        ending = "not proven, CI passes"
        tone = "open"
    elif not all(verdict.proven for verdict in judgement.verdicts):
        tone = "open"
    reason = write_arrows(judgement.reason).removeprefix("not proven: ")
    text = f"{ending.upper()} (exit code {judgement.exit_code}): {reason}"
    if judgement.outcome != "pass":
        text += f". Verdicts: {judgement.counts}."
    answer = Paragraph(text, tone)
    file = f" ({judgement.baseline_file})" if judgement.baseline_file else ""
    strict = ", and rules that are not proven fail" if judgement.strict else ""
    facts = (
        ("current", judgement.current),
        ("baseline", judgement.baseline + file),
        ("confidence", f"{1 - judgement.alpha:.4g} over all rules together{strict}"),
    )
    warnings = (Note.warn("differs", text) for text in judgement.warnings)
    opening = open_page(answer, "", facts, warnings)
    todo = "See which samples, groups and heads changed."
    if judgement.outcome == "not proven" and judgement.needed:
        todo = f"Measure both models on at least {judgement.needed} samples. {todo}"
    steps = Points((("", todo, "lipaudit compare BASELINE CURRENT"),))
    chapter = Chapter("verdicts", "What is the verdict on each rule?", _show_verdicts(judgement))
    title = f"lipaudit gate {ending}: {judgement.current} against {judgement.baseline}"
    after = Chapter("next-steps", "What to do next", (steps,))
    return Document(title, (opening, after, chapter))


def _group_verdicts(judgement: Judgement) -> Iterator[RuleVerdicts]:
    """Yield each rule of the gate, its verdicts to list, and the counts of all other verdicts.

    A rule with at most ALONE verdicts lists all of them. A rule with more verdicts counts the
    verdicts that pass and lists only the rest, the worst verdict first.
    """
    rules = group_values((verdict.rule, verdict) for verdict in judgement.verdicts)
    for rule, verdicts in rules.items():
        listed = list[Verdict]()
        passed = Counter[str]()
        for verdict in verdicts:
            passes = verdict.status in PASSED and not judgement.fails(verdict)
            if passes and len(verdicts) > ALONE:
                passed[verdict.status] += 1
            else:
                listed.append(verdict)
        if len(listed) > ALONE:
            listed.sort(key=partial(_rank_excess, judgement))
        yield rule, listed, passed


def _rank_excess(judgement: Judgement, verdict: Verdict) -> tuple[bool, float]:
    """Return a sort key for the verdicts of a rule: failing verdicts first, then the worst value.

    For an upper limit (<=) the largest value is the worst; for a lower limit (>=) the smallest.
    """
    passes = not judgement.fails(verdict)
    if verdict.reason:  # the figure cannot be compared: before every value
        return passes, -math.inf
    for value in (verdict.paired, verdict.change, verdict.new):
        if value is not None:
            excess = -value if ">=" in verdict.rule else value
            return passes, -excess
    return passes, -math.inf


def _choose_mark(judgement: Judgement, verdict: Verdict) -> str:
    if judgement.fails(verdict):
        return "✗"
    return MARKS.get(verdict.status, "~")


def _show_verdicts(judgement: Judgement) -> list[Block]:
    """Return a picture, sentences on verdicts that do not pass, and a table of all verdicts."""
    groups = [*_group_verdicts(judgement)]
    verdicts = list[Verdict]()
    for _, listed, _ in groups:
        verdicts += listed
    verdicts.sort(key=lambda v: (rank_verdict(judgement, v), GRAVEST.index(v.status)))
    rows = list[Cells]()
    points = list[tuple[str, str, str]]()
    for verdict in verdicts:
        row = {
            "verdict": f"{_choose_mark(judgement, verdict)} {verdict.status}",
            "rule": verdict.rule,
            "row": verdict.reason or verdict.row,
        }
        rows.append(row | verdict.texts)
        if verdict.remark or rank_verdict(judgement, verdict) < 2:
            points.append(("", write_arrows(verdict.line), ""))
    for rule, listed, passed in groups:
        more = "more " if listed else ""
        for status, count in passed.items():
            row = {"verdict": status, "rule": rule, "row": f"{count} {more}rows"}
            rows.append(row | dict.fromkeys(TEXTS, ""))
    found = draw_changes((name_change(verdict), verdict) for verdict in verdicts)
    if points:
        found.append(Points(points[:MOST]))
    found += tabulate_rows(VERDICTS, rows)
    notes = tuple(("note", text, "") for text in judgement.notes)
    if judgement.predictions is not None:
        notes = (("predictions", write_movement(judgement.predictions), ""), *notes)
    if notes:
        found.append(Points(notes))
    return found
