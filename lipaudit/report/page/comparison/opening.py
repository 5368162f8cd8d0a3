"""What a comparison says first: warnings, what changed, which samples and heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lipaudit.gate.comparison import Comparison, HeadChange, Kind, Pair
from lipaudit.gate.comparison.verdicts import ABSENT
from lipaudit.gate.contrasts import TOLERANCE
from lipaudit.gate.verdicts import Verdict, VerdictStatus, amount
from lipaudit.report.blocks import Brief, Document, Line, Scorecard
from lipaudit.report.cells import number, pretty, significant, text
from lipaudit.report.page.comparison import attribution, heads
from lipaudit.report.page.comparison.samples import NORM, called
from lipaudit.report.page.remarks import merged
from lipaudit.report.page.views.common import CHARACTERS
from lipaudit.results import Column, Note, Report, row_types, sample_columns
from lipaudit.results.history import KINDS
from lipaudit.results.trials import TrialKey

MORE = (
    "--details prints all figures, samples and heads; lipaudit explain WORD says what a word "
    "means."
)
FIRST: tuple[VerdictStatus, ...] = ("regressed", "improved", "inconclusive", "unchanged")
"""Verdicts in the order in which they are told."""
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
"""Metrics that are accuracies; of two of one kind and ball, the first is told."""
OLD, NEW = "OLD.json", "NEW.json"
"""What commands call the two reports."""
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
"""Figures that are told first beside accuracies, and what the scorecard calls them."""


@dataclass(frozen=True)
class Headline:
    """A figure that is told first: what it is called, how it reads, and what became of it."""

    label: str
    column: Column
    verdict: Verdict


def opened(page: Document, comparison: Comparison, reports: Sequence[Report]) -> Document:
    """Set what changed above the chapters of a page."""
    warned = [note for pair in comparison.pairs for note in _spoiling(pair)]
    swapped = (note for shown in comparison.attributions for note in shown.notes)
    warned += [note for note in swapped if note.level == "warning"]
    return replace(
        page,
        title=_title(comparison),
        facts=_facts(comparison, reports),
        notes=merged([*warned, *page.notes]),
        scorecard=_scorecard(comparison),
        steps=tuple(_steps(comparison, reports)),
        findings=(
            *(
                finding
                for i, pair in enumerate(comparison.pairs)
                for finding in _findings(pair, i, f"{pair.new}: " * (len(comparison.pairs) > 1))
            ),
            *attribution.findings(comparison.attributions),
        ),
    )


def screen(page: Document) -> Document:
    """Keep of a page what fits a screen."""
    told = tuple((text, "") for text, _ in page.findings)
    return replace(page, findings=told, chapters=(), more=MORE)


def brief(comparison: Comparison) -> Brief:
    """Return what changed for a pull request: warnings, counts, then the figures."""
    pairs = comparison.pairs
    return Brief(
        title=_title(comparison),
        remarks=(
            *(f"{note.level}: {note.text}" for pair in pairs for note in _spoiling(pair)),
            *(_counted(pair) for pair in pairs),
            *(said for said, _ in attribution.findings(comparison.attributions)),
        ),
        heads=("verdict", "figure", "old", "new", "paired change", "95 % limits"),
        rows=tuple(
            (
                line.verdict.status,
                pretty(label),
                text(line.verdict.old, line.column),
                text(line.verdict.new, line.column),
                _change(line.verdict),
                heads.limits(line.verdict, line.verdict.unit),
            )
            for label, line in sorted(_told(comparison), key=_gravity)
        ),
        align="llrrrr",
    )


def _title(comparison: Comparison) -> str:
    first, *others = comparison.models
    new = others[0] if len(others) == 1 else f"{len(others)} models"
    return f"lipaudit: {new} against {first}"


def _facts(comparison: Comparison, reports: Sequence[Report]) -> tuple[tuple[str, str], ...]:
    """Say what is compared, and on which samples."""
    models = tuple(
        (
            "new" if i else "old",
            f"{name} ({r.run.model.architecture}), weights {r.run.model.weights_sha256[:12]}",
        )
        for i, (name, r) in enumerate(zip(comparison.models, reports, strict=True))
    )
    data = dict.fromkeys(f"{r.run.data.spec}, {r.run.data.samples} samples" for r in reports)
    return (*models, ("data", "; ".join(data)))


def _spoiling(pair: Pair) -> tuple[Note, ...]:
    """Return what spoils the comparison, and what could not be compared because of it."""
    refused = (v for v in pair.verdicts if v.reason and not v.reason.endswith(ABSENT))
    texts = [("conditions", text) for text in pair.warnings]
    texts += [("not-compared", f"not compared, {v.reason}: {v.metric}") for v in refused]
    return merged(Note(level="warning", code=code, text=text) for code, text in texts)


def _scorecard(comparison: Comparison) -> Scorecard | None:
    """Tell by how much figures changed."""
    lines = tuple(
        Line(label, line.verdict.texts["change"] or "0", line.column, _said(line))
        for label, line in _told(comparison)
    )
    return Scorecard(lines) if lines else None


def _told(comparison: Comparison) -> list[tuple[str, Headline]]:
    """Return what is told first: of one pair what regressed first, of several figure by figure."""
    told = [(pair, line) for pair in comparison.pairs for line in _headlines(pair)]
    if len(comparison.pairs) == 1:
        return sorted(((line.label, line) for _, line in told), key=_gravity)
    order = list(dict.fromkeys(line.label for _, line in told))
    told.sort(key=lambda each: order.index(each[1].label))
    return [(f"{line.label}, {pair.new}", line) for pair, line in told]


def _gravity(told: tuple[str, Headline]) -> int:
    return FIRST.index(told[1].verdict.status)


def _said(line: Headline) -> str:
    """Say what became of a figure."""
    verdict = line.verdict
    differs = verdict.texts["paired"] not in ("", verdict.texts["change"])
    known = [
        f"paired {verdict.texts['paired']}" if differs else "",
        heads.limits(verdict, verdict.unit),
    ]
    between = f" ({': '.join(filter(None, known))})" if any(known) else ""
    old, new = (text(value, line.column) for value in (verdict.old, verdict.new))
    return f"{verdict.status} {old} → {new}{between}"


def _change(verdict: Verdict) -> str:
    return verdict.texts["paired"] or verdict.texts["change"]


def _headlines(pair: Pair) -> list[Headline]:
    """Return the figures that are told first: accuracies, then those of `HEADLINES`."""
    judged = [verdict for verdict in pair.verdicts if verdict.status in FIRST]
    accuracies: dict[str, Headline] = {}
    for metric, kind in ACCURACY.items():
        for verdict in judged:
            if verdict.metric == metric:
                ball = TrialKey.parse(verdict.name)
                label = called(kind, ball.ball if ball else "")
                accuracies.setdefault(label, Headline(label, KINDS[kind][1], verdict))
    figures = {verdict.metric: verdict for verdict in judged}
    return [
        *accuracies.values(),
        *(
            Headline(label, _column(metric), figures[metric])
            for metric, label in HEADLINES.items()
            if metric in figures
        ),
    ]


def _column(metric: str) -> Column:
    """Return how the column of a metric reads, which is of samples or of rows."""
    measure, _, name = metric.partition(":")[0].rpartition(".")
    return {**row_types()[measure].columns(), **sample_columns(measure)}[name]


def _steps(comparison: Comparison, reports: Sequence[Report]) -> Iterator[tuple[str, str]]:
    """Say what to do next: see what was lost, measure more, make the better one the standard."""
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
        alike = report.run.model.parameters == reports[0].run.model.parameters
        if alike and not comparison.attributions and _moved(pair):
            asked = f"lipaudit compare {OLD} {NEW} --attribute"
            yield f"{of}See which layers explain the change of the norm.", asked
        if any(v.status == "regressed" for v in pair.verdicts):
            gate = f"lipaudit gate {NEW} --baseline {OLD}"
            yield f"{of}See which changes fail a gate, corrected for how many there are.", gate
        elif any(v.status == "improved" for v in pair.verdicts):
            yield (
                f"{of}Make it the baseline that the next is held to.",
                f"lipaudit baseline save {NEW}",
            )


def _moved(pair: Pair) -> bool:
    """Tell whether the norm of the model is shown to have changed."""
    norm = (v for v in pair.verdicts if v.metric == f"{NORM}:median")
    return any(v.status in ("improved", "regressed") for v in norm)


def _findings(pair: Pair, index: int, lead: str) -> Iterator[tuple[str, str]]:
    """Say what stands out of a pair, after some words, and the chapter that it comes from."""
    yield lead + _counted(pair), f"change-{index}"
    for said in (*_flips(pair), *_risen(pair)):
        yield lead + said, f"samples-{index}"
    if pair.heads:
        yield lead + _heads(pair), f"heads-{index}"


def _counted(pair: Pair) -> str:
    """Count the verdicts, and name what regressed."""
    judged = [verdict for verdict in pair.verdicts if verdict.status in FIRST]
    counts = Counter(verdict.status for verdict in judged)
    said = ", ".join(f"{counts[status]} {status}" for status in FIRST if counts[status])
    worse = [_named_figure(v.metric, v.name) for v in judged if v.status == "regressed"]
    named = f" Regressed: {_first(worse, '; ')}." if worse else ""
    return f"Of {len(judged)} figures: {said}.{named}"


def _named_figure(metric: str, name: str = "") -> str:
    """Call a metric what the scorecard does, or by the label of its column and what it is of."""
    if metric in ACCURACY:
        ball = TrialKey.parse(name)
        return called(ACCURACY[metric], ball.ball if ball else "")
    reduced = metric.partition(":")[2]
    named = ", ".join(filter(None, (_column(metric).label, reduced, name)))
    return HEADLINES.get(metric, named)


def _first(names: Sequence[str], between: str = ", ") -> str:
    """Name the first of some, and count the rest."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return between.join(names[:NAMED]) + more


def _flips(pair: Pair) -> Iterator[str]:
    """Say of each outcome how many samples changed sides, and which are worse now."""
    turned = [outcome for outcome in pair.outcomes if outcome.lost or outcome.gained]
    still = [called(o.kind, o.ball) for o in pair.outcomes if o not in turned]
    turned.sort(key=lambda outcome: (-outcome.lost, -outcome.gained))
    for outcome in turned[:NAMED]:
        lost = [s.place or s.id[:CHARACTERS] for s in pair.samples if outcome.name in s.lost]
        which = f": {_first(lost)}" if lost else ""
        yield (
            f"{called(outcome.kind, outcome.ball).capitalize()}: {outcome.gained} of "
            f"{outcome.samples} samples gained, {outcome.lost} lost (exact McNemar p = "
            f"{number(outcome.mcnemar, '.2g')}){which}."
        )
    if turned[NAMED:]:
        rest = "; ".join(called(o.kind, o.ball) for o in turned[NAMED:])
        yield f"Samples also changed sides: {rest}."
    if still:
        yield f"No sample changed sides: {'; '.join(still)}."


def _risen(pair: Pair) -> Iterator[str]:
    """Say of how many samples the Jacobian norm rose, and of which most."""
    known = [(s, *ends) for s in pair.samples if (ends := s.ends(NORM)) and min(ends) > 0]
    risen = [each for each in known if each[2] > each[1] * (1 + TOLERANCE)]
    if risen:
        sample, old, new = max(risen, key=lambda each: each[2] / each[1])
        where = sample.place or sample.id[:CHARACTERS]
        most = f", most that of {where}: {significant(old)} became {significant(new)}"
    if known:
        said = (
            f"rose in {len(risen)} of {len(known)} samples{most}" if risen else "rose in no sample"
        )
        yield f"The Jacobian norm {said}."


def _heads(pair: Pair) -> str:
    """Name the heads that moved most, beyond chance where that is known."""
    changes = pair.heads[0]
    order, what = heads.ranked(changes), f"Heads, {_column(changes.metric).label}"
    if not changes.samples:
        return f"{what}, without limits: {_named(order, changes.unit)}."
    proven = [head for head in order if head.stands]
    many = f"of {len(changes.heads)} changes stand after Holm's correction over heads"
    if not proven:
        return f"{what}: none {many}."
    up = sum((head.change or 0) > 0 for head in proven)
    return (
        f"{what}: {len(proven)} {many} ({up} up, {len(proven) - up} down), most of all "
        f"{_named(proven, changes.unit)}."
    )


def _named(named: Sequence[HeadChange], unit: str) -> str:
    return ", ".join(
        f"{head.layer}.{head.head} {amount(head.change, unit)}"
        + (f" ({known})" if (known := heads.limits(head, unit)) else "")
        for head in named[:NAMED]
    )
