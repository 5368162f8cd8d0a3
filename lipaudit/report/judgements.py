"""What the gate found, as pages: a comparison, a ranking of several models, a judgement."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, get_args

from lipaudit.gate.comparison import Comparison, HeadChange, Pair, Ranking
from lipaudit.gate.rules import Judgement, Verdict, VerdictStatus, amount
from lipaudit.measures import find_column
from lipaudit.report import blocks
from lipaudit.report.blocks import Block, Cells, Chapter, Document, Paragraph, Points, make_table
from lipaudit.report.document import list_names, list_warnings, make_pages, open_several
from lipaudit.report.opening import find_places, list_figures, open_page
from lipaudit.report.sections import FIT, TOP, map_heads
from lipaudit.tables import Column, Note, Report, model_labels
from lipaudit.tables.columns import group_values
from lipaudit.tables.trials import FLAGS


def make_page(
    found: Comparison | Ranking | Judgement, reports: Sequence[Report], *, short: bool = False
) -> Document:
    """Return the page of what the gate found.

    Args:
        found: a comparison, a ranking or a judgement.
        reports: the compared or ranked reports.
        short: for one screen: without sections; judgements are always short.
    """
    if isinstance(found, Comparison):
        return make_comparison_page(found, reports, short=short)
    if isinstance(found, Judgement):
        return make_judgement_page(found)
    opening = open_several(reports, describe_ranking(found), short=short)
    table = tabulate_ranking(found, reports, FIGURES if short else None)
    criterion: tuple[Block, ...] = ()
    if found.criterion:
        wide = f", each corrected for {found.compared} comparisons" * (found.compared > 1)
        text = f"Ranked by {found.criterion}. Limits of differences: 95 %, paired{wide}."
        criterion = (Paragraph(text),)
    title = "Which model is the most robust?" if criterion else "The models, in order"
    chapter = Chapter("ranking", title, (table, *criterion, *blocks.list_notes(found.notes)))
    return make_pages(reports, [opening, chapter], short=short)


# Comparisons


FIRST: tuple[VerdictStatus, ...] = ("regressed", "improved", "inconclusive", "unchanged")
"""Verdicts, the most severe first."""
FEW = 3
"""Number of samples and heads on one screen; it has twice as many figures."""
NORM = "jacobian.norm"
CARRIED = "jacobian.shares."


def make_comparison_page(
    comparison: Comparison, reports: Sequence[Report], *, short: bool
) -> Document:
    """Return the page of a comparison: what changed, then the reports side by side.

    Args:
        comparison: the comparison.
        reports: the compared reports.
        short: for one screen: without samples, heads and sections.
    """
    pairs, several = comparison.pairs, len(comparison.pairs) > 1
    places = {name: place for report in reports for name, place in find_places(report).items()}
    counts, chapters, warnings = [], list[Chapter](), list_warnings(reports)
    for i, pair in enumerate(pairs):
        lead, of = (f"{pair.new}: ", f" ({pair.new})") if several else ("", "")
        counts.append(lead + _count_verdicts(pair))
        # Conditions that differ, and the metrics that they exclude.
        refused = group_values((v.reason, v.metric) for v in pair.verdicts if v.reason)
        excluded = (f"not compared, {why}: {', '.join(names)}" for why, names in refused.items())
        warnings += (Note.warn("differs", lead + text) for text in (*pair.warnings, *excluded))
        figures = _show_figures(pair, short=short)
        samples = _show_samples(pair, places, FEW if short else FIT)
        most = FEW if short else TOP
        carriers = [head for head in pair.heads if head.metric.startswith(CARRIED)]
        heads = _show_heads([head for head in pair.heads if head not in carriers], most)
        number = f"-{i + 1}" * several
        for name, title, parts in (
            ("change", f"What changed from {pair.old} to {pair.new}?", figures),
            ("samples", f"Which samples changed?{of}", samples),
            ("heads", f"Which heads changed?{of}", heads),
            (
                "carriers",
                f"Which heads carry the change of the norm?{of}",
                _show_heads(carriers, most),
            ),
        ):
            chapters += [Chapter(name + number, title, parts)] if parts else []
    data = dict.fromkeys(f"{r.run.data.spec}, {r.run.data.samples} samples" for r in reports)
    old, *new = comparison.models
    facts = [("old", old), *(("new", name) for name in new), ("data", "; ".join(data))]
    worse = any(verdict.status == "regressed" for pair in pairs for verdict in pair.verdicts)
    answer = Paragraph(" ".join(counts), "broken" if worse else "answer")
    page = make_pages(reports, [open_page(answer, "", facts, warnings), *chapters], short=short)
    which = f"{len(pairs)} models" if several else pairs[0].new
    return replace(page, title=f"lipaudit: {which} against {pairs[0].old}")


def _count_verdicts(pair: Pair) -> str:
    """Count the verdicts, and name what regressed."""
    judged = [verdict for verdict in pair.verdicts if verdict.status in FIRST]
    counts = Counter(verdict.status for verdict in judged)
    listed = [f"{counts[status]} {status}" for status in FIRST if counts[status]]
    refused = sum(bool(verdict.reason) for verdict in pair.verdicts)
    listed += [f"{refused} not compared"] if refused else []
    worse = [f"{v.metric} {v.name}".rstrip() for v in judged if v.status == "regressed"]
    more = f" and {len(worse) - FEW} more" if len(worse) > FEW else ""
    regressed = f" Regressed: {'; '.join(worse[:FEW])}{more}." if worse else ""
    return f"Of {len(judged) + refused} figures: {', '.join(listed)}.{regressed}"


# Chapters


def _show_figures(pair: Pair, *, short: bool) -> list[Block]:
    """Show the verdicts, the most severe first, and note what permits the comparison."""
    judged = [verdict for verdict in pair.verdicts if verdict.status in FIRST]
    judged.sort(key=lambda verdict: FIRST.index(verdict.status))
    shown, rows = judged[: 2 * FEW if short else None], list[Cells]()
    for verdict in shown:
        texts = {name: text or None for name, text in verdict.texts.items()}
        row: Cells = {
            "metric": f"{verdict.metric} {verdict.name}".rstrip(),
            "verdict": verdict.status,
        }
        row |= {"old": texts["baseline"], "new": texts["current"], "change": texts["change"]}
        if not short:
            row |= {"paired": texts["paired"], "95 % limits": texts["limits"]}
            row |= {"samples": verdict.samples or None}
            if verdict.mcnemar is not None:
                row |= {"lost": verdict.lost, "gained": verdict.gained}
                row |= {"McNemar": verdict.mcnemar}
        rows.append(row)
    moved = {i for i, v in enumerate(shown) if v.status in ("regressed", "improved")}
    title = f"The first {len(shown)} of {len(judged)}" if len(shown) < len(judged) else ""
    table = [make_table(title, rows, strong=moved)] if rows else []
    notes = () if short else pair.notes
    return [*table, *blocks.list_notes(Note.info("differs", text) for text in notes)]


def _read_change(verdict: Verdict) -> float | None:
    """Return the paired change, else the change of the two figures."""
    return verdict.change if verdict.paired is None else verdict.paired


def rank_heads(changes: Sequence[HeadChange]) -> list[HeadChange]:
    """Return the heads that moved, the largest change first; ratios up and down count equally."""

    def size(head: HeadChange) -> float:
        value = _read_change(head)
        if value is None or math.isnan(value):
            return -1.0
        # Halved and doubled heads moved equally far.
        return abs(math.log1p(value)) if head.unit == "%" and value > -1 else abs(value)

    return [head for head in sorted(changes, key=size, reverse=True) if size(head) >= 0]


def _show_heads(heads_moved: Sequence[HeadChange], most: int) -> list[Block]:
    """Show the heads that moved most; unless they are few, also the changes of all as maps."""
    groups = group_values((head.metric.rpartition(":")[0], head) for head in heads_moved)
    if not groups:
        return []
    first, changes = next(iter(groups.items()))
    ranked, whole = rank_heads(changes), most > FEW
    shown = ranked if whole and len(ranked) <= FIT else ranked[:most]
    rows: list[Cells] = [
        {
            "head": f"{head.layer}.{head.head}",
            "change": amount(_read_change(head), head.unit),
            "95 % limits": head.texts["limits"] or None,
            "p (Holm)": head.p_adjusted,
            "stands": None if head.p_adjusted is None else head.stands,
        }
        for head in shown
    ]
    maps, columns = [], dict[tuple[str, str], Column]()
    for metric, group in groups.items() if whole else ():
        column, unit = find_column(metric), group[0].unit
        heads = {(head.layer, head.head): head for head in group}
        for when in ("old", "new"):
            columns[metric, when] = replace(column, label=f"{column.label}, {when}")
            for row, head in zip(rows, shown, strict=True):
                same = heads.get((head.layer, head.head))
                row[metric, when] = same and getattr(same, when)
        times, how = {"%": (1.0, "+.1%"), "pp": (100.0, "+.1f"), "": (1.0, "+.3g")}[unit]
        known = {place: _read_change(head) for place, head in heads.items()}
        values = {k: None if value is None else value * times for k, value in known.items()}
        meaning = "New value over old value, sample by sample."
        change = Column("change", meaning, unit.strip("%"), how, status=column.status)
        maps.append(map_heads(f"{metric}: change of every head", values, change, centre=0.0))
    part = f" ({len(shown)} of {len(ranked)})" if len(shown) < len(ranked) else ""
    strong = {i for i, head in enumerate(shown) if head.stands}
    title = f"Heads that moved most{part}, by {first}"
    table = [make_table(title, rows, columns, strong=strong)] if rows else []
    proven = sum(head.stands for head in changes)
    count = f"{proven} of {len(changes)} changes are proven (column stands)."
    return [Paragraph(count), *table, *maps]


def _show_samples(pair: Pair, places: Mapping[str, str], most: int) -> list[Block]:
    """Show the samples whose result changed, with their figures before and after."""
    flipped = [sample for sample in pair.samples if sample.lost or sample.gained]
    shown, columns = flipped[:most], dict[tuple[str, str], Column]()
    rows = list_names([sample.id for sample in shown], places)
    for row, s in zip(rows, shown, strict=True):
        turned = [f"{n}: yes → no" for n in s.lost] + [f"{n}: no → yes" for n in s.gained]
        row["became"] = "; ".join(turned)
    counts = Counter(metric for sample in pair.samples for metric in sample.figures)
    # Columns with most samples come first; norms come before others.
    for metric in sorted(counts, key=lambda metric: (-counts[metric], metric != NORM)):
        name, _, trial = metric.partition("@")
        # A figure is shown if half of the samples have it; yes and no are in the column before.
        known = most > FEW and 2 * sum(metric in sample.figures for sample in shown) >= len(shown)
        if not known or name.split(".")[-1] in FLAGS:
            continue
        column = find_column(metric)
        for end, when in enumerate(("old", "new")):
            label = ", ".join(filter(None, (column.label, trial, when)))
            columns[metric, when] = replace(column, label=label)
            for row, sample in zip(rows, shown, strict=True):
                row[metric, when] = sample.figures.get(metric, (None, None))[end]
    part = f" ({len(shown)} of {len(flipped)})" if len(shown) < len(flipped) else ""
    return [make_table(f"Samples that changed{part}", rows, columns)] if shown else []


# Rankings


FIGURES = 4
"""Number of figures of each scorecard on one screen."""


def tabulate_ranking(
    ranking: Ranking, reports: Sequence[Report], most: int | None = None
) -> blocks.Table:
    """Return a row for every model: its rank, and the figures of its scorecard, up to `most`."""
    names = zip(model_labels(reports), reports, strict=True)
    cards = {name: {line.label: line for line in list_figures(report)} for name, report in names}
    columns: dict[tuple[str, str], Column] = {}  # no label may replace a cell of the ranking
    for label, line in (item for card in cards.values() for item in card.items()):
        columns.setdefault(("figure", label), replace(line.column, label=label))
    rows = []
    for model in ranking.models:
        row: Cells = {"model": model.model}
        if ranking.criterion:
            row = {"rank": model.rank, **row, "outcome": model.outcome, "difference": None}
            if difference := model.difference:  # the best model has none
                limits = difference.texts["limits"]
                row["difference"] = amount(_read_change(difference), difference.unit)
                row["difference"] += f" ({limits})" if limits else ""
        for key in list(columns)[:most]:
            known = cards[model.model].get(key[1])
            row[key] = known and known.value
        rows.append(row)
    return make_table("", rows, columns, keys=2 if ranking.criterion else 1)


def describe_ranking(ranking: Ranking) -> str:
    """Describe which models are best, behind or not distinguishable; empty if not ranked."""
    named = group_values(((m.outcome, m.reason), m.model) for m in ranking.models if m.outcome)
    return " ".join(
        f"{outcome.capitalize()}: {', '.join(models)}{f' ({reason})' if reason else ''}."
        for (outcome, reason), models in named.items()
    )


# Judgements


MARKS = {"improved": "✓", "pass (proven)": "✓", "pass": "✓", "unchanged": "="}
GRAVEST: tuple[VerdictStatus, ...] = get_args(VerdictStatus)[::-1]
"""Verdicts, the most severe first."""
ALONE = 6
"""Rules with at most this many rows are listed row by row."""
MOST = 8
"""Largest number of verdicts listed line by line for a rule, and of failures on a page."""
COLUMNS = ("baseline", "current", "change", "paired", "limits", "samples")


def write_verdicts(judgement: Judgement) -> list[str]:
    """Write a judgement line by line: the answer first, the outcome with its counts last."""
    lines = [judgement.reason, f"{judgement.current} against {judgement.baseline}", ""]
    lines += [f"! warning: {text}" for text in judgement.warnings]
    groups = [*_group_verdicts(judgement)]
    # Rules that fail come first, then those that are open.
    groups.sort(key=lambda group: min((rank_verdict(judgement, v) for v in group[1]), default=2))
    for rule, listed, passed in groups:
        first = listed[:MOST]
        lines += [f"{_choose_mark(judgement, verdict)} {verdict.line}" for verdict in first]
        cut = Counter[str](verdict.status for verdict in listed[MOST:])
        more = "more " if first else ""
        for status, count in (cut + passed).items():
            where = "; -f table lists them" if status in cut else ""
            lines.append(f"  {rule}: {count} {more}rows {status}{where}")
    lines += [f"  note: {note}" for note in judgement.notes]
    return [*lines, "", f"{judgement.summary} (exit code {judgement.exit_code})"]


def rank_verdict(judgement: Judgement, verdict: Verdict) -> int:
    """Return 0 for a verdict that fails, 1 for one that is open, 2 for the others."""
    if judgement.fails(verdict):
        return 0
    return 1 if verdict.status == "inconclusive" else 2


def make_judgement_page(judgement: Judgement) -> Document:
    """Return the page of a judgement: the answer, a table of verdicts, the remarks."""
    ending = "failed" if judgement.exit_code else "passed"
    tone: Literal["kept", "open", "broken"] = "broken" if judgement.exit_code else "kept"
    if not judgement.exit_code:
        if judgement.outcome == "not proven":
            ending = "not proven"
        if not all(verdict.proven for verdict in judgement.verdicts):
            tone = "open"
    text = f"{ending.upper()} (exit code {judgement.exit_code}): {judgement.reason}"
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
    chapter = Chapter("verdicts", "What is the verdict on each rule?", _show_verdicts(judgement))
    title = f"lipaudit gate {ending}: {judgement.current} against {judgement.baseline}"
    return Document(title, (opening, chapter))


def _group_verdicts(judgement: Judgement) -> Iterator[tuple[str, list[Verdict], Counter[str]]]:
    """Yield each rule, its verdicts to list, the worst first, and how many others passed.

    All verdicts are listed if they are few, else those that do not simply pass.
    """
    rules = group_values((verdict.rule, verdict) for verdict in judgement.verdicts)
    for rule, verdicts in rules.items():
        # For an upper limit the largest excess comes first, for a lower one the largest shortfall.
        sign = -1 if ">=" in rule else 1

        def rank(verdict: Verdict, sign: int = sign) -> tuple[bool, float]:
            values = (verdict.paired, verdict.change, verdict.new)
            known = [each for each in values if each is not None and not verdict.reason]
            return not judgement.fails(verdict), -sign * known[0] if known else -math.inf

        few = len(verdicts) <= ALONE
        passed = ("pass (proven)", "pass", "unchanged")
        listed = [v for v in verdicts if few or judgement.fails(v) or v.status not in passed]
        others = Counter[str](v.status for v in verdicts if v not in listed)
        yield rule, sorted(listed, key=rank) if len(listed) > ALONE else listed, others


def _choose_mark(judgement: Judgement, verdict: Verdict) -> str:
    return "✗" if judgement.fails(verdict) else MARKS.get(verdict.status, "~")


def _show_verdicts(judgement: Judgement) -> list[Block]:
    """Explain the failing verdicts in a sentence each, then tabulate all, failing ones first."""
    groups = [*_group_verdicts(judgement)]
    verdicts = [verdict for _, listed, _ in groups for verdict in listed]
    verdicts.sort(key=lambda v: (rank_verdict(judgement, v), GRAVEST.index(v.status)))
    rows: list[Cells] = []
    for v in verdicts:
        mark = f"{_choose_mark(judgement, v)} {v.status}"
        rows.append({"verdict": mark, "rule": v.rule, "row": v.reason or v.name, **v.texts})
    for rule, listed, passed in groups:
        more, blank = "more " * bool(listed), dict.fromkeys(COLUMNS, "")
        for status, n in passed.items():
            rows.append({"verdict": status, "rule": rule, "row": f"{n} {more}rows", **blank})
    grave = [v for v in verdicts if rank_verdict(judgement, v) < 2 or v.remark]
    points = tuple(("", verdict.line, "") for verdict in grave[:MOST])
    notes = tuple(("note", text, "") for text in judgement.notes)
    table = [make_table("", rows)] if rows else []
    return [*([Points(points)] if points else []), *table, *([Points(notes)] if notes else [])]
