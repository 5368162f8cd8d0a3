"""The page of a comparison: its opening, and its chapters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lipaudit.gate.comparison import (
    ABSENT,
    Comparison,
    HeadChange,
    HeadChanges,
    Outcome,
    Pair,
    SampleChange,
)
from lipaudit.gate.verdicts import Verdict, VerdictStatus, amount
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
from lipaudit.report.page.samples import SAMPLE, add_places
from lipaudit.report.page.scorecard import name_accuracy
from lipaudit.report.page.views import FIT, HEAD, TOP, map_heads
from lipaudit.report.pictures import Heatmap
from lipaudit.settings.registry import find_column
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
    warnings = [note for pair in pairs for note in _list_warnings(pair)]
    lines = tuple(_list_lines(comparison))
    leads = [f"{pair.new}: " if several else "" for pair in pairs]
    counts = [lead + _count_verdicts(pair) for lead, pair in zip(leads, pairs, strict=True)]
    regressed = any(verdict.status == "regressed" for pair in pairs for verdict in pair.verdicts)
    return replace(
        page,
        title=_write_title(comparison),
        outcome=Banner(" ".join(counts), "broken" if regressed else None),
        facts=_list_facts(comparison, reports),
        notes=merge_notes([*warnings, *page.notes]),
        scorecard=Scorecard(lines) if lines else None,
        findings=tuple(
            (leads[i] + text, chapter + _number_pair(comparison, i))
            for i, pair in enumerate(pairs)
            for text, chapter in _list_findings(pair)
        ),
    )


def _number_pair(comparison: Comparison, index: int) -> str:
    """Return the suffix of the chapters of a pair: empty if there is one pair."""
    return f"-{index + 1}" if len(comparison.pairs) > 1 else ""


def make_comparison_screen(page: Document) -> Document:
    """Return a page without its chapters, for one screen."""
    findings = tuple((text, "") for text, _ in page.findings)
    return replace(page, findings=findings, chapters=(), more=MORE)


def _write_title(comparison: Comparison) -> str:
    first, *others = comparison.models
    new = others[0] if len(others) == 1 else f"{len(others)} models"
    return f"lipaudit: {new} against {first}"


def _list_facts(comparison: Comparison, reports: Sequence[Report]) -> tuple[tuple[str, str], ...]:
    """Return the models and the samples that are compared."""
    models = ((name, r.run.model) for name, r in zip(comparison.models, reports, strict=True))
    said = [
        f"{name} ({model.architecture}), weights {model.weights_sha256[:12]}"
        for name, model in models
    ]
    data = dict.fromkeys(f"{r.run.data.spec}, {r.run.data.samples} samples" for r in reports)
    return (("old", said[0]), *(("new", each) for each in said[1:]), ("data", "; ".join(data)))


def _list_warnings(pair: Pair) -> tuple[Note, ...]:
    """Return warnings: conditions that differ, and the metrics that they exclude."""
    refused = (v for v in pair.verdicts if v.reason and not v.reason.endswith(ABSENT))
    texts = [("conditions", text) for text in pair.warnings]
    texts += [("not-compared", f"not compared, {v.reason}: {v.metric}") for v in refused]
    return merge_notes(Note(level="warning", code=code, text=text) for code, text in texts)


# Figures


def _list_lines(comparison: Comparison) -> Iterator[Line]:
    """Yield the figures of the scorecard: one pair's by severity, several pairs' by figure."""
    found: dict[str, list[tuple[Pair, Verdict]]] = {}
    for metric in (*ACCURACY, *HEADLINES):
        for pair in comparison.pairs:
            for verdict in pair.verdicts:
                if verdict.metric == metric and verdict.status in FIRST:
                    each = found.setdefault(_name_figure(metric, verdict.name), [])
                    each += [(pair, verdict)] if pair not in [known for known, _ in each] else []
    lines = [(label, *both) for label, each in found.items() for both in each]
    if len(comparison.pairs) == 1:
        lines.sort(key=lambda line: FIRST.index(line[2].status))
    for label, pair, verdict in lines:
        of = f", {pair.new}" if len(comparison.pairs) > 1 else ""
        kind = ACCURACY.get(verdict.metric)
        column = KINDS[kind][1] if kind else find_column(verdict.metric)
        value = verdict.texts["change"] or "0"
        yield Line(label + of, value, column, _describe_figure(verdict, column))


def _name_figure(metric: str, name: str = "") -> str:
    """Name a metric as the scorecard does, else by the label of its column."""
    if metric in ACCURACY:
        ball = TrialKey.parse(name)
        return name_accuracy(ACCURACY[metric], ball.ball if ball else "")
    parts = (find_column(metric).label, metric.partition(":")[2], name)
    return HEADLINES.get(metric, ", ".join(filter(None, parts)))


def _describe_figure(verdict: Verdict, column: Column) -> str:
    """Describe the change of a figure: its verdict, old and new value, and limits."""
    differs = verdict.texts["paired"] not in ("", verdict.texts["change"])
    known = [
        f"paired {verdict.texts['paired']}" if differs else "",
        format_change_limits(verdict, verdict.unit),
    ]
    between = f" ({': '.join(filter(None, known))})" if any(known) else ""
    old, new = (format_value(value, column) for value in (verdict.old, verdict.new))
    return f"{verdict.status} {old} → {new}{between}"


def format_change_limits(change: HeadChange | Verdict, unit: str) -> str:
    """Format the limits of a paired change, or the reason why there are none."""
    if change.low is None or change.high is None:
        return ""
    if change.high == math.inf and change.low in (-1.0, -math.inf):
        return "too few samples"
    return f"{amount(change.low, unit)} to {amount(change.high, unit)}"


# Sentences


def _list_findings(pair: Pair) -> Iterator[tuple[str, str]]:
    """Yield the findings on a pair, each with its chapter: lost and gained samples, heads."""
    turned = [outcome for outcome in pair.outcomes if outcome.lost or outcome.gained]
    turned.sort(key=lambda outcome: (-outcome.lost, -outcome.gained))
    for outcome in turned[:NAMED]:
        lost = [s.place or s.id[:CHARACTERS] for s in pair.samples if outcome.name in s.lost]
        which = f": {_name_first(lost)}" if lost else ""
        name = name_accuracy(outcome.kind, outcome.ball)
        yield (
            f"{name[0].upper()}{name[1:]}: {outcome.gained} of {outcome.samples} samples gained, "
            f"{outcome.lost} lost (exact McNemar p = {format_number(outcome.mcnemar, '.2g')})"
            f"{which}.",
            "samples",
        )
    if pair.outcomes and not turned:
        yield "No sample changed its result.", "samples"
    if pair.heads:
        yield _describe_heads(pair.heads[0]), "heads"


def _count_verdicts(pair: Pair) -> str:
    """Count the verdicts, and name what regressed."""
    judged = [verdict for verdict in pair.verdicts if verdict.status in FIRST]
    counts = Counter(verdict.status for verdict in judged)
    listed = ", ".join(f"{counts[status]} {status}" for status in FIRST if counts[status])
    worse = [_name_figure(v.metric, v.name) for v in judged if v.status == "regressed"]
    named = f" Regressed: {_name_first(worse, '; ')}." if worse else ""
    refused = sum(bool(v.reason) and not v.reason.endswith(ABSENT) for v in pair.verdicts)
    listed += f", {refused} not compared" if refused else ""
    return f"Of {len(judged) + refused} figures: {listed}.{named}"


def _name_first(names: Sequence[str], between: str = ", ") -> str:
    """Name the first items, and count the others."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return between.join(names[:NAMED]) + more


def _describe_heads(changes: HeadChanges) -> str:
    """Name the heads that moved most, beyond chance if samples are known."""
    order, what = rank_heads(changes), f"Heads, {find_column(changes.metric).label}"
    proven = [head for head in order if head.stands]
    named = ", ".join(
        f"{head.layer}.{head.head} {amount(head.change, changes.unit)}"
        + (f" ({limits})" if (limits := format_change_limits(head, changes.unit)) else "")
        for head in (proven or order)[:NAMED]
    )
    if not changes.samples:
        return f"{what}, without limits: {named}."
    many = f"of {len(changes.heads)} changes are proven (Holm's correction over heads)"
    if not proven:
        return f"{what}: none {many}."
    up = sum((head.change or 0) > 0 for head in proven)
    down = len(proven) - up
    return f"{what}: {len(proven)} {many}, {up} up and {down} down, most of all {named}."


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
FIGURES = {
    "metric": "s",
    "verdict": "s",
    "old": "",
    "new": "",
    "change": "",
    "paired": "",
    "95 % limits": "",
    "samples": "",
}
"""Columns of the table with their format: `s` is text, empty is a number."""
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
            ("samples", f"Which samples changed?{of}", _show_samples(pair, places)),
            ("heads", f"Which heads changed?{of}", _show_heads(pair)),
        )
        if shown
    )


def _show_figures(pair: Pair) -> list[Block]:
    judged = [verdict for verdict in pair.verdicts if not verdict.reason]
    rows = []
    for verdict in judged:
        texts = verdict.texts | {"limits": format_change_limits(verdict, verdict.unit)}
        metric = f"{verdict.metric} {verdict.name}".rstrip()
        rows.append((metric, verdict.status, *(text or None for text in texts.values())))
    moved = frozenset(i for i, v in enumerate(judged) if v.status in ("regressed", "improved"))
    columns = tuple(Column(label=k, meaning="", format=how) for k, how in FIGURES.items())
    remarks = [("differs", text) for text in pair.notes]
    remarks += [
        ("not-compared", f"not compared, {v.reason}: {v.metric}")
        for v in pair.verdicts
        if v.reason.endswith(ABSENT)
    ]
    notes = merge_notes(Note(level="info", code=code, text=text) for code, text in remarks)
    table = Table("", columns, tuple(rows), strong=moved)
    return [Paragraph(HOW), table, *([Notes(notes)] if notes else [])]


def rank_heads(changes: HeadChanges) -> list[HeadChange]:
    """Return the heads that moved, the largest change first; ratios up and down count equally."""

    def size(change: HeadChange) -> float:
        value = change.change
        if value is None or math.isnan(value):
            return -1.0
        # Halved and doubled heads moved equally far.
        return abs(math.log1p(value)) if changes.unit == "%" and value > -1 else abs(value)

    return [head for head in sorted(changes.heads, key=size, reverse=True) if size(head) >= 0]


def _show_heads(pair: Pair) -> list[Block]:
    """Show the heads that moved most, and the changes of all as maps."""
    if not pair.heads:
        return []
    ranked = rank_heads(pair.heads[0])
    shown = ranked if len(ranked) <= FIT else ranked[:TOP]
    unit = pair.heads[0].unit
    cells: list[tuple[Column, list[Any]]] = [
        (HEAD, [f"{head.layer}.{head.head}" for head in shown]),
        (Column("change", "", format=""), [amount(head.change, unit) for head in shown]),
        (
            Column("95 % limits", "", format=""),
            [format_change_limits(head, unit) or None for head in shown],
        ),
        (ADJUSTED, [head.p_adjusted for head in shown]),
        (STANDS, [None if head.p_adjusted is None else head.stands for head in shown]),
    ]
    for changes in pair.heads:
        column = find_column(changes.metric)
        ends = {(h.layer, h.head): (h.old, h.new) for h in changes.heads}
        both = [ends.get((head.layer, head.head), (None, None)) for head in shown]
        for end, when in enumerate(("old", "new")):
            label = f"{column.label}, {when}"
            cells.append((replace(column, label=label), [values[end] for values in both]))
    part = f" ({len(shown)} of {len(ranked)})" if len(shown) < len(ranked) else ""
    strong = frozenset(i for i, head in enumerate(shown) if head.stands)
    return [
        Paragraph(PROVEN),
        make_table(
            f"Heads that moved most{part}, by {pair.heads[0].metric}", cells, strong=strong
        ),
        *map(_map_changes, pair.heads),
    ]


def _map_changes(changes: HeadChanges) -> Heatmap:
    times, how = {"%": (1.0, "+.1%"), "pp": (100.0, "+.1f"), "": (1.0, "+.3g")}[changes.unit]
    unit, status = changes.unit.replace("%", ""), find_column(changes.metric).status
    column = Column(
        "change", "New value over old value, sample by sample.", unit, how, status=status
    )
    values = {
        (h.layer, h.head): None if h.change is None else h.change * times for h in changes.heads
    }
    return map_heads(f"{changes.metric}: change of every head", values, column, centre=0.0)


def _show_samples(pair: Pair, places: Mapping[str, str]) -> list[Block]:
    """Show the samples whose verdict changed, with their figures before and after."""
    flipped = [sample for sample in pair.samples if sample.flipped]
    many = f"The first {FIT} of {len(flipped)} samples that changed"
    title = many if len(flipped) > FIT else "Samples that changed"
    counts = Counter(metric for sample in pair.samples for metric in sample.figures)
    # Columns with most samples come first; norms come before others.
    metrics = sorted(counts, key=lambda metric: (-counts[metric], metric != NORM))
    counted: list[Block] = [Paragraph(FLIPS), _tabulate_outcomes(pair.outcomes)]
    return [
        *(counted if pair.outcomes else []),
        *([_tabulate_samples(title, metrics, flipped[:FIT], places)] if flipped else []),
    ]


def _tabulate_outcomes(outcomes: Sequence[Outcome]) -> Table:
    formats = {
        "samples": "d",
        "old": ".1%",
        "new": ".1%",
        "lost": "d",
        "gained": "d",
        "McNemar": ".2g",
    }
    columns = (Column(k, "", format=how, domain="") for k, how in formats.items())
    rows = tuple(
        (
            name_accuracy(o.kind, o.ball),
            o.samples,
            o.old / o.samples,
            o.new / o.samples,
            o.lost,
            o.gained,
            o.mcnemar,
        )
        for o in outcomes
    )
    # 5 %, the level of all other figures of the page.
    strong = frozenset(i for i, o in enumerate(outcomes) if o.mcnemar <= 0.05)
    return Table("", (ASKED, *columns), rows, strong=strong)


def _tabulate_samples(
    title: str, metrics: Sequence[str], samples: Sequence[SampleChange], places: Mapping[str, str]
) -> Table:
    """Tabulate samples before and after, by the figures that half of them have."""
    cells: list[tuple[Column, list[Any]]] = [
        (SAMPLE, [sample.id for sample in samples]),
        (BECAME, [_describe_change(sample) or None for sample in samples]),
    ]
    for metric in metrics:
        both = [sample.figures.get(metric, (None, None)) for sample in samples]
        if 2 * sum(metric in sample.figures for sample in samples) >= len(samples):
            for end, when in enumerate(("old", "new")):
                column = _find_sample_column(metric, when)
                cells.append((column, [values[end] for values in both]))
    return add_places(make_table(title, cells), places)


def _describe_change(sample: SampleChange) -> str:
    states = ((name, *both) for name, both in sample.states.items())
    return "; ".join(f"{name}: {old} → {new}" for name, old, new in states if old != new)


def _find_sample_column(metric: str, when: str) -> Column:
    """Return the heading of a per-sample figure: `||J||, old`."""
    column, trial = find_column(metric), metric.partition("@")[2]
    return replace(column, label=", ".join(filter(None, (column.label, trial, when))))
