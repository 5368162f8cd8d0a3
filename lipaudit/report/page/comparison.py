"""The page of a comparison: its opening, and its chapters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lipaudit.gate.changes import Comparison, HeadChange, Pair
from lipaudit.gate.verdicts import Verdict, VerdictStatus, amount
from lipaudit.measures.registry import find_column
from lipaudit.report.blocks import (
    Banner,
    Block,
    Chapter,
    Document,
    Line,
    Notes,
    Paragraph,
    Scorecard,
    Table,
    make_table,
)
from lipaudit.report.cells import format_number, format_value
from lipaudit.report.page.facts import CHARACTERS, merge_notes
from lipaudit.report.page.samples import list_names
from lipaudit.report.page.scorecard import name_accuracy
from lipaudit.report.page.views import FIT, HEAD, TOP, map_heads
from lipaudit.tables import Column, Note, Report
from lipaudit.tables.summary import KINDS
from lipaudit.tables.trials import TrialKey

MORE = (
    "--details prints all figures, samples and heads; lipaudit explain WORD says what a word "
    "means."
)
FIRST: tuple[VerdictStatus, ...] = ("regressed", "improved", "inconclusive", "unchanged")
"""Verdicts, the most severe first."""
NAMED = 3
"""Number of samples and heads that are listed."""
NORM = "jacobian.norm"
ACCURACY = {
    "attack.correct:mean": "clean",
    "jacobian.correct:mean": "clean",
    "certify.correct:mean": "clean",
    "attack.robust:mean": "attacked",
    "certify.robust:mean": "attacked",
    "certify.certified:mean": "certified",
}
"""Accuracy metrics. If two have the same kind and ball, the first is shown."""
HEADLINES = {
    "jacobian.norm:median": "model sensitivity, median ‖J‖",
    "jacobian.norm:p95": "model sensitivity, p95 ‖J‖",
    "jacobian.margin:median": "margin, median",
    "jacobian.radius_first_order:median": "first-order radius",
    "certify.radius:median": "certified radius",
    "bounds.exact_max:median": "steepest head of a sample",
    "bounds.exact:median": "median head",
    "attention.softmax_norm:median": "softmax norm, median head",
    "attention.intermediate:median": "fragile rows, median head",
}
"""Other figures of the scorecard, with their labels."""


def open_comparison(page: Document, comparison: Comparison, reports: Sequence[Report]) -> Document:
    """Return a page with the changes above its chapters."""
    pairs, several = comparison.pairs, len(comparison.pairs) > 1
    counts, notes, findings = [], list[Note](), []
    for i, pair in enumerate(pairs):
        lead = f"{pair.new}: " if several else ""
        counts.append(lead + _count_verdicts(pair))
        # Conditions that differ, and the metrics that they exclude.
        texts = [("conditions", text) for text in pair.warnings]
        texts += [
            ("not-compared", f"not compared, {v.reason}: {v.metric}") for v in _list_refused(pair)
        ]
        notes += merge_notes(Note(level="warning", code=code, text=text) for code, text in texts)
        suffix = _number_pair(comparison, i)
        findings += [(lead + text, chapter + suffix) for text, chapter in _list_findings(pair)]
    runs = [report.run for report in reports]
    old, *new = (
        f"{name} ({run.model.architecture}), weights {run.model.weights_sha256[:12]}"
        for name, run in zip(comparison.models, runs, strict=True)
    )
    data = dict.fromkeys(f"{run.data.spec}, {run.data.samples} samples" for run in runs)
    lines = tuple(_list_lines(comparison))
    regressed = any(verdict.status == "regressed" for pair in pairs for verdict in pair.verdicts)
    which = f"{len(pairs)} models" if several else pairs[0].new
    return replace(
        page,
        title=f"lipaudit: {which} against {pairs[0].old}",
        outcome=Banner(" ".join(counts), "broken" if regressed else None),
        facts=(("old", old), *(("new", each) for each in new), ("data", "; ".join(data))),
        notes=merge_notes([*notes, *page.notes]),
        scorecard=Scorecard(lines) if lines else None,
        findings=tuple(findings),
    )


def _number_pair(comparison: Comparison, index: int) -> str:
    """Return the suffix of the chapters of a pair: empty if there is one pair."""
    return f"-{index + 1}" if len(comparison.pairs) > 1 else ""


def _list_refused(pair: Pair) -> list[Verdict]:
    """Return the figures that both reports have, but under different conditions."""
    return [verdict for verdict in pair.verdicts if verdict.reason]


# Figures


def _list_lines(comparison: Comparison) -> Iterator[Line]:
    """Yield the figures of the scorecard: one pair's by severity, several pairs' by figure."""
    found: dict[str, dict[str, Verdict]] = {}
    for metric in (*ACCURACY, *HEADLINES):
        for pair in comparison.pairs:
            for verdict in pair.verdicts:
                if verdict.metric == metric and verdict.status in FIRST:
                    label = _name_figure(metric, verdict.name)
                    found.setdefault(label, {}).setdefault(pair.new, verdict)
    lines = [(label, *each) for label, verdicts in found.items() for each in verdicts.items()]
    if len(comparison.pairs) == 1:
        lines.sort(key=lambda line: FIRST.index(line[2].status))
    for label, model, verdict in lines:
        of = f", {model}" if len(comparison.pairs) > 1 else ""
        kind, texts = ACCURACY.get(verdict.metric), verdict.texts
        column = KINDS[kind][1] if kind else find_column(verdict.metric)
        old, new = (format_value(value, column) for value in (verdict.old, verdict.new))
        differs = texts["paired"] not in ("", texts["change"])
        known = [f"paired {texts['paired']}"] if differs else []
        known += filter(None, [format_change_limits(verdict)])
        between = f" ({': '.join(known)})" if known else ""
        text = f"{verdict.status} {old} → {new}{between}"
        yield Line(label + of, texts["change"] or "0", column, text)


def _name_figure(metric: str, name: str = "") -> str:
    """Name a metric as the scorecard does, else by the label of its column."""
    if metric in ACCURACY:
        ball = TrialKey.parse(name)
        return name_accuracy(ACCURACY[metric], ball.ball if ball else "")
    parts = (find_column(metric).label, metric.partition(":")[2], name)
    return HEADLINES.get(metric, ", ".join(filter(None, parts)))


def format_change_limits(change: Verdict) -> str:
    """Format the limits of a paired change, or the reason why there are none."""
    if change.high == math.inf and change.low in (-1.0, -math.inf):
        return "too few samples"
    return change.texts["limits"]


def list_shares(pair: Pair) -> dict[str, Verdict]:
    """Return the verdicts on accuracies by label; of equal labels, the first counts."""
    found: dict[str, Verdict] = {}
    for verdict in pair.verdicts:
        if verdict.mcnemar is not None:
            found.setdefault(_name_figure(verdict.metric, verdict.name), verdict)
    return found


# Sentences


def _list_findings(pair: Pair) -> Iterator[tuple[str, str]]:
    """Yield the findings on a pair, each with its chapter: lost and gained samples, heads."""
    shares = list_shares(pair)
    turned = [(label, share) for label, share in shares.items() if share.lost or share.gained]
    turned.sort(key=lambda each: (-(each[1].lost or 0), -(each[1].gained or 0)))
    for label, share in turned[:NAMED]:
        name = _name_sample_column(share)
        lost = [s.place or s.id[:CHARACTERS] for s in pair.samples if name in s.lost]
        which = f": {_name_first(lost)}" if lost else ""
        yield (
            f"{label[0].upper()}{label[1:]}: {share.gained} of {share.samples} samples gained, "
            f"{share.lost} lost (exact McNemar p = {format_number(share.mcnemar or 0.0, '.2g')})"
            f"{which}.",
            "samples",
        )
    if shares and not turned:
        yield "No sample changed its result.", "samples"
    for heads in _group_heads(pair)[:1]:
        yield _describe_heads(heads), "heads"


def _name_sample_column(verdict: Verdict) -> str:
    """Name the figures of samples behind a verdict: `attack.robust@worst,linf,2/255`."""
    return "@".join(filter(None, (verdict.metric.rpartition(":")[0], verdict.name)))


def _group_heads(pair: Pair) -> list[list[HeadChange]]:
    """Return the changes of heads column by column."""
    groups: dict[str, list[HeadChange]] = {}
    for head in pair.heads:
        groups.setdefault(head.metric, []).append(head)
    return list(groups.values())


def _count_verdicts(pair: Pair) -> str:
    """Count the verdicts, and name what regressed."""
    judged = [verdict for verdict in pair.verdicts if verdict.status in FIRST]
    counts = Counter(verdict.status for verdict in judged)
    listed = ", ".join(f"{counts[status]} {status}" for status in FIRST if counts[status])
    worse = [_name_figure(v.metric, v.name) for v in judged if v.status == "regressed"]
    regressed = f" Regressed: {_name_first(worse, '; ')}." if worse else ""
    refused = len(_list_refused(pair))
    listed += f", {refused} not compared" if refused else ""
    return f"Of {len(judged) + refused} figures: {listed}.{regressed}"


def _name_first(names: Sequence[str], between: str = ", ") -> str:
    """Name the first items, and count the others."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return between.join(names[:NAMED]) + more


def _describe_heads(changes: Sequence[HeadChange]) -> str:
    """Name the heads that moved most, beyond chance if samples are known."""
    order, what = rank_heads(changes), f"Heads, {find_column(changes[0].metric).label}"
    proven = [head for head in order if head.stands]
    named = ", ".join(
        f"{head.layer}.{head.head} {_format_change(head)}"
        + (f" ({limits})" if (limits := format_change_limits(head)) else "")
        for head in (proven or order)[:NAMED]
    )
    if all(head.p is None for head in changes):
        return f"{what}, without limits: {named}."
    many = f"of {len(changes)} changes are proven (Holm's correction over heads)"
    if not proven:
        return f"{what}: none {many}."
    up = sum((_read_change(head) or 0) > 0 for head in proven)
    down = len(proven) - up
    return f"{what}: {len(proven)} {many}, {up} up and {down} down, most of all {named}."


def _read_change(head: HeadChange) -> float | None:
    """Return the paired change of a head, else the change of its two figures."""
    return head.change if head.paired is None else head.paired


def _format_change(head: HeadChange) -> str:
    return amount(_read_change(head), head.unit)


# Chapters


HOW = (
    "Change: of the two values shown. Paired: the tested change, each sample against itself, "
    "with its 95 % interval. All values are over the samples in both reports."
)
FLIPS = (
    "Gained: samples that are correct, robust or certified now and were not before. Lost: "
    "the reverse. McNemar: p-value that nothing changed."
)
PROVEN = (
    "A change stands if it is significant after Holm's correction over all heads (5 % chance "
    "of any false alarm). Limits are for each head alone (Student's t)."
)
FIGURES = dict.fromkeys(("metric", "verdict"), "s") | dict.fromkeys(
    ("old", "new", "change", "paired", "95 % limits", "samples"), ""
)
"""Columns of the table with their format: `s` is text, empty is a number."""
OUTCOMES = {
    "samples": "d",
    "old": ".1%",
    "new": ".1%",
    "lost": "d",
    "gained": "d",
    "McNemar": ".2g",
}
"""Columns of the table of verdicts that changed, with their format."""
ASKED = Column(label="asked", meaning="Yes-or-no result of each sample.", format="s")
BECAME = Column(label="became", meaning="The sample's result before and now.", format="s")
STANDS = Column(
    label="stands", meaning="Whether the change is significant after Holm's correction.", format=""
)
ADJUSTED = Column(
    label="p (Holm)", meaning="p-value, corrected over the heads.", format=".2g", domain=""
)


def make_chapters(comparison: Comparison, places: Mapping[str, str]) -> tuple[Chapter, ...]:
    """Return three chapters for each pair of models: figures, samples, heads.

    Args:
        comparison: the comparison.
        places: places of the samples in the data, by id.
    """
    several = len(comparison.pairs) > 1
    return tuple(
        Chapter(name + _number_pair(comparison, i), title, tuple(shown))
        for i, pair in enumerate(comparison.pairs)
        for of in [f" ({pair.new})" if several else ""]
        for name, title, shown in (
            ("change", f"What changed from {pair.old} to {pair.new}?", _show_figures(pair)),
            ("samples", f"Which samples changed?{of}", [*_show_samples(pair, places)]),
            ("heads", f"Which heads changed?{of}", _show_heads(pair)),
        )
        if shown
    )


def _show_figures(pair: Pair) -> list[Block]:
    """Show all verdicts, and note the differences that permit the comparison."""
    judged = [verdict for verdict in pair.verdicts if not verdict.reason]
    rows = []
    for verdict in judged:
        texts = verdict.texts | {"limits": format_change_limits(verdict)}
        metric = f"{verdict.metric} {verdict.name}".rstrip()
        rows.append((metric, verdict.status, *(text or None for text in texts.values())))
    moved = frozenset(i for i, v in enumerate(judged) if v.status in ("regressed", "improved"))
    columns = tuple(Column(label=k, meaning="", format=how) for k, how in FIGURES.items())
    notes = merge_notes(Note(level="info", code="differs", text=text) for text in pair.notes)
    table = Table("", columns, tuple(rows), strong=moved)
    return [Paragraph(HOW), table, *([Notes(notes)] if notes else [])]


def rank_heads(changes: Sequence[HeadChange]) -> list[HeadChange]:
    """Return the heads that moved, the largest change first; ratios up and down count equally."""

    def size(head: HeadChange) -> float:
        value = _read_change(head)
        if value is None or math.isnan(value):
            return -1.0
        # Halved and doubled heads moved equally far.
        return abs(math.log1p(value)) if head.unit == "%" and value > -1 else abs(value)

    return [head for head in sorted(changes, key=size, reverse=True) if size(head) >= 0]


def _show_heads(pair: Pair) -> list[Block]:
    """Show the heads that moved most, and the changes of all as maps."""
    groups = _group_heads(pair)
    if not groups:
        return []
    ranked = rank_heads(groups[0])
    shown = ranked if len(ranked) <= FIT else ranked[:TOP]
    limits = [format_change_limits(head) or None for head in shown]
    cells: list[tuple[Column, list[Any]]] = [
        (HEAD, [f"{head.layer}.{head.head}" for head in shown]),
        (Column("change", "", format=""), [_format_change(head) for head in shown]),
        (Column("95 % limits", "", format=""), limits),
        (ADJUSTED, [head.p_adjusted for head in shown]),
        (STANDS, [None if head.p_adjusted is None else head.stands for head in shown]),
    ]
    maps = []
    for changes in groups:
        metric, unit = changes[0].metric.rpartition(":")[0], changes[0].unit
        column, heads = find_column(metric), {(head.layer, head.head): head for head in changes}
        both = [heads.get((head.layer, head.head)) for head in shown]
        for when in ("old", "new"):
            label = f"{column.label}, {when}"
            cells.append((replace(column, label=label), [h and getattr(h, when) for h in both]))
        times, how = {"%": (1.0, "+.1%"), "pp": (100.0, "+.1f"), "": (1.0, "+.3g")}[unit]
        known = {place: _read_change(head) for place, head in heads.items()}
        values = {k: None if value is None else value * times for k, value in known.items()}
        meaning = "New value over old value, sample by sample."
        change = Column("change", meaning, unit.strip("%"), how, status=column.status)
        maps.append(map_heads(f"{metric}: change of every head", values, change, centre=0.0))
    part = f" ({len(shown)} of {len(ranked)})" if len(shown) < len(ranked) else ""
    title = f"Heads that moved most{part}, by {groups[0][0].metric.rpartition(':')[0]}"
    strong = frozenset(i for i, head in enumerate(shown) if head.stands)
    return [Paragraph(PROVEN), make_table(title, cells, strong=strong), *maps]


def _show_samples(pair: Pair, places: Mapping[str, str]) -> Iterator[Block]:
    """Show the samples whose result changed, with their figures before and after."""
    shares = list_shares(pair)
    if shares:
        columns = (Column(k, "", format=how, domain="") for k, how in OUTCOMES.items())
        rows = [
            (label, v.samples, v.old, v.new, v.lost, v.gained, v.mcnemar)
            for label, v in shares.items()
        ]
        # 5 %, the level of all other figures of the page.
        strong = frozenset(i for i, v in enumerate(shares.values()) if (v.mcnemar or 0) <= 0.05)
        yield Paragraph(FLIPS)
        yield Table("", (ASKED, *columns), tuple(rows), strong=strong)
    labels = {_name_sample_column(share): label for label, share in shares.items()}
    flipped = [sample for sample in pair.samples if sample.lost or sample.gained]
    many = f"The first {FIT} of {len(flipped)} samples that changed"
    title = many if len(flipped) > FIT else "Samples that changed"
    shown = flipped[:FIT]
    became = [
        "; ".join(
            f"{labels[name]}: {change}"
            for names, change in ((sample.lost, "yes → no"), (sample.gained, "no → yes"))
            for name in names
        )
        for sample in shown
    ]
    cells: list[tuple[Column, list[Any]]] = [
        *list_names([sample.id for sample in shown], places),
        (BECAME, became),
    ]
    figures = (metric for sample in pair.samples for metric in sample.figures)
    counts = Counter(metric for metric in figures if metric not in labels)
    # Columns with most samples come first; norms come before others.
    for metric in sorted(counts, key=lambda metric: (-counts[metric], metric != NORM)):
        both = [sample.figures.get(metric, (None, None)) for sample in shown]
        # A figure is shown if half of the samples have it.
        if 2 * sum(metric in sample.figures for sample in shown) >= len(shown):
            column, trial = find_column(metric), metric.partition("@")[2]
            for end, when in enumerate(("old", "new")):
                label = ", ".join(filter(None, (column.label, trial, when)))
                cells.append((replace(column, label=label), [values[end] for values in both]))
    if shown:
        yield make_table(title, cells)
