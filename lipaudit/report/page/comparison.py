"""A comparison of reports: the opening of its page, and the chapters of figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lipaudit.gate.changes import HeadChange, Kind
from lipaudit.gate.comparison import ABSENT, Comparison, Pair
from lipaudit.gate.contrasts import TOLERANCE
from lipaudit.gate.verdicts import Verdict, VerdictStatus, amount
from lipaudit.report.blocks import (
    Block,
    Brief,
    Chapter,
    Document,
    Line,
    Notes,
    Paragraph,
    Scorecard,
    Table,
)
from lipaudit.report.cells import format_number, format_significant, format_value, write_math
from lipaudit.report.page.changes import (
    NORM,
    format_change_limits,
    name_outcome,
    rank_heads,
    show_heads,
    show_samples,
)
from lipaudit.report.page.common import CHARACTERS
from lipaudit.report.page.opening import merge_notes
from lipaudit.results import Column, Note, Report, layouts
from lipaudit.results.summary import KINDS
from lipaudit.results.trials import TrialKey

MORE = (
    "--details prints all figures, samples and heads; lipaudit explain WORD says what a word "
    "means."
)
FIRST: tuple[VerdictStatus, ...] = ("regressed", "improved", "inconclusive", "unchanged")
"""Verdicts, the gravest first."""
NAMED = 3
"""How many samples and heads are named."""
ACCURACY: dict[str, Kind] = {
    "attack.correct:mean": "clean",
    "jacobian.correct:mean": "clean",
    "certify.correct:mean": "clean",
    "attack.robust:mean": "attacked",
    "certify.robust:mean": "attacked",
    "certify.certified:mean": "certified",
}
"""Metrics that are accuracies; of two with the same kind and ball, the first is shown."""
OLD, NEW = "OLD.json", "NEW.json"
"""Names of the two reports in commands."""
HEADLINES = {
    "jacobian.norm:median": "Jacobian norm, median",
    "jacobian.norm:p95": "Jacobian norm, p95",
    "jacobian.margin:median": "margin, median",
    "jacobian.radius_first_order:median": "first-order radius",
    "certify.radius:median": "certified radius",
    "bounds.exact_max:median": "steepest head of a sample",
    "bounds.exact:median": "median head",
    "attention.softmax_norm:median": "softmax norm, median head",
    "attention.intermediate:median": "fragile rows, median head",
}
"""Figures of the scorecard beside accuracies, with their names."""


@dataclass(frozen=True)
class Headline:
    """A figure of the scorecard: its name, its format, and the verdict on its change."""

    label: str
    column: Column
    verdict: Verdict


def open_comparison(page: Document, comparison: Comparison, reports: Sequence[Report]) -> Document:
    """Return a page with the changes above its chapters."""
    warned = [note for pair in comparison.pairs for note in _list_warnings(pair)]
    return replace(
        page,
        title=_write_title(comparison),
        facts=_list_facts(comparison, reports),
        notes=merge_notes([*warned, *page.notes]),
        scorecard=_make_scorecard(comparison),
        steps=tuple(_suggest_steps(comparison, reports)),
        findings=tuple(
            finding
            for i, pair in enumerate(comparison.pairs)
            for finding in _list_findings(pair, i, f"{pair.new}: " * (len(comparison.pairs) > 1))
        ),
    )


def make_comparison_screen(page: Document) -> Document:
    """Return a page without its chapters, for one screen."""
    told = tuple((text, "") for text, _ in page.findings)
    return replace(page, findings=told, chapters=(), more=MORE)


def brief_comparison(comparison: Comparison) -> Brief:
    """Return the changes for a pull request: warnings, counts, then the figures."""
    pairs = comparison.pairs
    return Brief(
        title=_write_title(comparison),
        remarks=(
            *(f"{note.level}: {note.text}" for pair in pairs for note in _list_warnings(pair)),
            *(_count_verdicts(pair) for pair in pairs),
        ),
        heads=("verdict", "figure", "old", "new", "paired change", "95 % limits"),
        rows=tuple(
            (
                line.verdict.status,
                write_math(label),
                format_value(line.verdict.old, line.column),
                format_value(line.verdict.new, line.column),
                line.verdict.texts["paired"] or line.verdict.texts["change"],
                format_change_limits(line.verdict, line.verdict.unit),
            )
            for label, line in sorted(_list_headlines(comparison), key=_rank_verdict)
        ),
        align="llrrrr",
    )


def _write_title(comparison: Comparison) -> str:
    first, *others = comparison.models
    new = others[0] if len(others) == 1 else f"{len(others)} models"
    return f"lipaudit: {new} against {first}"


def _list_facts(comparison: Comparison, reports: Sequence[Report]) -> tuple[tuple[str, str], ...]:
    """Return the models and the samples that are compared."""
    models = tuple(
        (
            "new" if i else "old",
            f"{name} ({r.run.model.architecture}), weights {r.run.model.weights_sha256[:12]}",
        )
        for i, (name, r) in enumerate(zip(comparison.models, reports, strict=True))
    )
    data = dict.fromkeys(f"{r.run.data.spec}, {r.run.data.samples} samples" for r in reports)
    return (*models, ("data", "; ".join(data)))


def _list_warnings(pair: Pair) -> tuple[Note, ...]:
    """Return warnings: conditions that differ, and the metrics that cannot be compared for it."""
    refused = (v for v in pair.verdicts if v.reason and not v.reason.endswith(ABSENT))
    texts = [("conditions", text) for text in pair.warnings]
    texts += [("not-compared", f"not compared, {v.reason}: {v.metric}") for v in refused]
    return merge_notes(Note(level="warning", code=code, text=text) for code, text in texts)


def _make_scorecard(comparison: Comparison) -> Scorecard | None:
    """Tell by how much figures changed."""
    lines = tuple(
        Line(label, line.verdict.texts["change"] or "0", line.column, _describe_figure(line))
        for label, line in _list_headlines(comparison)
    )
    return Scorecard(lines) if lines else None


def _list_headlines(comparison: Comparison) -> list[tuple[str, Headline]]:
    """Return the figures of the scorecard: of one pair the gravest first, of several by figure."""
    told = [(pair, line) for pair in comparison.pairs for line in _find_headlines(pair)]
    if len(comparison.pairs) == 1:
        return sorted(((line.label, line) for _, line in told), key=_rank_verdict)
    order = list(dict.fromkeys(line.label for _, line in told))
    told.sort(key=lambda each: order.index(each[1].label))
    return [(f"{line.label}, {pair.new}", line) for pair, line in told]


def _rank_verdict(told: tuple[str, Headline]) -> int:
    return FIRST.index(told[1].verdict.status)


def _describe_figure(line: Headline) -> str:
    """Describe the change of a figure: its verdict, old and new value, and limits."""
    verdict = line.verdict
    differs = verdict.texts["paired"] not in ("", verdict.texts["change"])
    known = [
        f"paired {verdict.texts['paired']}" if differs else "",
        format_change_limits(verdict, verdict.unit),
    ]
    between = f" ({': '.join(filter(None, known))})" if any(known) else ""
    old, new = (format_value(value, line.column) for value in (verdict.old, verdict.new))
    return f"{verdict.status} {old} → {new}{between}"


def _find_headlines(pair: Pair) -> list[Headline]:
    """Return accuracies, then the figures of `HEADLINES`."""
    judged = [verdict for verdict in pair.verdicts if verdict.status in FIRST]
    accuracies: dict[str, Headline] = {}
    for metric, kind in ACCURACY.items():
        for verdict in judged:
            if verdict.metric == metric:
                ball = TrialKey.parse(verdict.name)
                label = name_outcome(kind, ball.ball if ball else "")
                accuracies.setdefault(label, Headline(label, KINDS[kind][1], verdict))
    figures = {verdict.metric: verdict for verdict in judged}
    return [
        *accuracies.values(),
        *(
            Headline(label, _find_column(metric), figures[metric])
            for metric, label in HEADLINES.items()
            if metric in figures
        ),
    ]


def _find_column(metric: str) -> Column:
    """Return how the column of a metric reads, which is of samples or of rows."""
    measure, _, name = metric.partition(":")[0].rpartition(".")
    layout = layouts()[measure]
    return {**layout.columns, **layout.samples}[name]


def _suggest_steps(comparison: Comparison, reports: Sequence[Report]) -> Iterator[tuple[str, str]]:
    """Suggest the next steps: inspect a lost sample, measure more, run a gate, set a baseline."""
    several = len(comparison.pairs) > 1
    for pair, report in zip(comparison.pairs, reports[1:], strict=True):
        of = f"{pair.new}: " if several else ""
        lost = next((sample for sample in pair.samples if sample.lost), None)
        if lost:
            name = lost.id[:CHARACTERS]
            where = f", {lost.place}" if lost.place else ""
            yield (
                f"{of}Look at what was lost, first {name}{where}.",
                f"lipaudit inspect {NEW} {name}",
            )
        unclear = [v.metric for v in pair.verdicts if v.status == "inconclusive" and v.samples]
        if unclear:
            more = f"{report.run.command} --samples {4 * report.run.data.samples}"
            yield (
                f"{of}Measure more samples of both: chance may explain {len(unclear)} changes.",
                more,
            )
        if any(v.status == "regressed" for v in pair.verdicts):
            gate = f"lipaudit gate {NEW} --baseline {OLD}"
            yield f"{of}See which changes fail a gate, corrected for how many there are.", gate
        elif any(v.status == "improved" for v in pair.verdicts):
            yield (
                f"{of}Make it the baseline that the next is held to.",
                f"lipaudit baseline save {NEW}",
            )


def _list_findings(pair: Pair, index: int, lead: str) -> Iterator[tuple[str, str]]:
    """Yield the findings on a pair, each with the name of its chapter."""
    yield lead + _count_verdicts(pair), f"change-{index}"
    for said in (*_describe_flips(pair), *_describe_risen(pair)):
        yield lead + said, f"samples-{index}"
    if pair.heads:
        yield lead + _describe_heads(pair), f"heads-{index}"


def _count_verdicts(pair: Pair) -> str:
    """Count the verdicts, and name what regressed."""
    judged = [verdict for verdict in pair.verdicts if verdict.status in FIRST]
    counts = Counter(verdict.status for verdict in judged)
    said = ", ".join(f"{counts[status]} {status}" for status in FIRST if counts[status])
    worse = [_name_figure(v.metric, v.name) for v in judged if v.status == "regressed"]
    named = f" Regressed: {_name_first(worse, '; ')}." if worse else ""
    return f"Of {len(judged)} figures: {said}.{named}"


def _name_figure(metric: str, name: str = "") -> str:
    """Name a metric as the scorecard does, or else by the label of its column."""
    if metric in ACCURACY:
        ball = TrialKey.parse(name)
        return name_outcome(ACCURACY[metric], ball.ball if ball else "")
    reduced = metric.partition(":")[2]
    named = ", ".join(filter(None, (_find_column(metric).label, reduced, name)))
    return HEADLINES.get(metric, named)


def _name_first(names: Sequence[str], between: str = ", ") -> str:
    """Name the first of some, and count the rest."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return between.join(names[:NAMED]) + more


def _describe_flips(pair: Pair) -> Iterator[str]:
    """Describe for each outcome how many samples changed sides, and name the lost ones."""
    turned = [outcome for outcome in pair.outcomes if outcome.lost or outcome.gained]
    still = [name_outcome(o.kind, o.ball) for o in pair.outcomes if o not in turned]
    turned.sort(key=lambda outcome: (-outcome.lost, -outcome.gained))
    for outcome in turned[:NAMED]:
        lost = [s.place or s.id[:CHARACTERS] for s in pair.samples if outcome.name in s.lost]
        which = f": {_name_first(lost)}" if lost else ""
        yield (
            f"{name_outcome(outcome.kind, outcome.ball).capitalize()}: {outcome.gained} of "
            f"{outcome.samples} samples gained, {outcome.lost} lost (exact McNemar p = "
            f"{format_number(outcome.mcnemar, '.2g')}){which}."
        )
    if turned[NAMED:]:
        rest = "; ".join(name_outcome(o.kind, o.ball) for o in turned[NAMED:])
        yield f"Samples also changed sides: {rest}."
    if still:
        yield f"No sample changed sides: {'; '.join(still)}."


def _describe_risen(pair: Pair) -> Iterator[str]:
    """Describe in how many samples the Jacobian norm rose, and where it rose most."""
    known = [(s, *ends) for s in pair.samples if (ends := s.ends(NORM)) and min(ends) > 0]
    risen = [each for each in known if each[2] > each[1] * (1 + TOLERANCE)]
    if risen:
        sample, old, new = max(risen, key=lambda each: each[2] / each[1])
        where = sample.place or sample.id[:CHARACTERS]
        most = (
            f", most that of {where}: {format_significant(old)} became {format_significant(new)}"
        )
    if known:
        said = (
            f"rose in {len(risen)} of {len(known)} samples{most}" if risen else "rose in no sample"
        )
        yield f"The Jacobian norm {said}."


def _describe_heads(pair: Pair) -> str:
    """Name the heads that moved most, beyond chance where that is known."""
    changes = pair.heads[0]
    order, what = rank_heads(changes), f"Heads, {_find_column(changes.metric).label}"
    if not changes.samples:
        return f"{what}, without limits: {_list_heads(order, changes.unit)}."
    proven = [head for head in order if head.stands]
    many = f"of {len(changes.heads)} changes stand after Holm's correction over heads"
    if not proven:
        return f"{what}: none {many}."
    up = sum((head.change or 0) > 0 for head in proven)
    return (
        f"{what}: {len(proven)} {many} ({up} up, {len(proven) - up} down), most of all "
        f"{_list_heads(proven, changes.unit)}."
    )


def _list_heads(named: Sequence[HeadChange], unit: str) -> str:
    return ", ".join(
        f"{head.layer}.{head.head} {amount(head.change, unit)}"
        + (f" ({known})" if (known := format_change_limits(head, unit)) else "")
        for head in named[:NAMED]
    )


# Chapters of figures


HOW = (
    "Change: of the two figures. Paired: what is tested, each sample against itself, with the "
    "limits of a 95 % interval for each figure alone; figures without limits are compared as they "
    "are. All are over the samples that both reports have."
)

COLUMNS = {
    "metric": "s",
    "verdict": "s",
    "old": "",
    "new": "",
    "change": "",
    "paired": "",
    "95 % limits": "",
    "samples": "",
}
"""Columns of the figures with their format: `s` is text, an empty one is a number."""


def make_chapters(comparison: Comparison, places: Mapping[str, str]) -> tuple[Chapter, ...]:
    """Return three chapters for every model but the first: figures, samples, heads.

    Args:
        comparison: of reports.
        places: where their samples are found, by id.
    """
    of = ": {}" if len(comparison.pairs) > 1 else ""
    return tuple(
        Chapter(f"{name}-{i}", title, tuple(shown))
        for i, pair in enumerate(comparison.pairs)
        for name, title, shown in (
            ("change", f"{pair.new} against {pair.old}", _show_figures(pair)),
            (
                "samples",
                f"Samples, old and new{of.format(pair.new)}",
                show_samples(pair, places),
            ),
            ("heads", f"Heads, old and new{of.format(pair.new)}", show_heads(pair)),
        )
        if shown
    )


def _show_figures(pair: Pair) -> list[Block]:
    judged = [verdict for verdict in pair.verdicts if not verdict.reason]
    texts = [("differs", text) for text in pair.notes]
    texts += [
        ("not-compared", f"not compared, {v.reason}: {v.metric}")
        for v in pair.verdicts
        if v.reason.endswith(ABSENT)
    ]
    notes = merge_notes(Note(level="info", code=code, text=text) for code, text in texts)
    return [Paragraph(HOW), _tabulate(judged), *([Notes(notes)] if notes else [])]


def _tabulate(verdicts: Sequence[Verdict]) -> Table:
    rows = []
    for verdict in verdicts:
        texts = verdict.texts | {"limits": format_change_limits(verdict, verdict.unit)}
        metric = f"{verdict.metric} {verdict.name}".rstrip()
        rows.append((metric, verdict.status, *(text or None for text in texts.values())))
    return Table(
        title="",
        columns=tuple(Column(label=k, meaning="", format=how) for k, how in COLUMNS.items()),
        rows=tuple(rows),
        strong=frozenset(
            i for i, v in enumerate(verdicts) if v.status in ("regressed", "improved")
        ),
    )
