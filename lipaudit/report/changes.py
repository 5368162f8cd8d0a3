"""What changed between reports: in a sentence, by size in a picture, and sample by sample."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lipaudit.gate.comparison import Pair, SampleChange
from lipaudit.gate.ranking import Ranking
from lipaudit.gate.rules import find_words
from lipaudit.gate.verdicts import Verdict, format_change
from lipaudit.measures import find_column, list_headlines
from lipaudit.report import blocks
from lipaudit.report.blocks import Bar, Block, Forest, Paragraph, Tone
from lipaudit.report.cells import read_words
from lipaudit.report.document import show_example
from lipaudit.tables import Column, Report
from lipaudit.tables.formats import name_sample, write_math
from lipaudit.tables.trials import TrialKey

MOVED = ("regressed", "improved")
COLOURS = {"regressed": 1, "error": 1, "not comparable": 1, "improved": 2}
"""Indices of the colours of verdicts; the others have none."""
WORDS = {1: "worse", 2: "better", 6: "not proven"}
"""What the colours of a forest plot mean."""
GREY = 6
TITLES = {
    "%": "By which factor did figures change?",
    "pp": "By how many percentage points did shares change?",
}
ORDER = {"pp": 0, "%": 1}
"""Order of the pictures, by unit: shares such as accuracies come first."""
LIMIT = re.compile(r"[<>]= *([+-][\d.]+)(%|pp)$")
"""A limit of a rule on a change."""
NAMED = 3
"""Largest number of figures that a sentence names for the worse, and for the better."""
MOST = 16
"""Largest number of figures in one picture."""
PICTURES = 12
"""Largest number of samples that are shown with their images or texts."""


# In a sentence


def write_answer(pair: Pair) -> str:
    """Say in a sentence or two what became worse and what better."""
    # A verdict with a reason is on a figure that cannot be compared.
    judged = [verdict for verdict in pair.verdicts if not verdict.reason]
    # The main figure of a model, such as robust accuracy: it is named first, also if its change is
    # not proven.
    leading = _find_leading(judged)
    parts = []
    for status, word in (("regressed", "worse"), ("improved", "better")):
        moved = [verdict for verdict in judged if verdict.status == status]
        if moved:
            moved.sort(key=lambda verdict: (verdict is not leading, -abs(_read_paired(verdict))))
            parts.append(f"{word} in {_name_figures(moved)}")
    if leading is not None and leading.status == "improved":
        parts.reverse()
    others = sum(verdict.status not in MOVED for verdict in judged)
    refused = len(pair.verdicts) - len(judged)
    sentences = []
    if leading is not None and leading.change and leading.status not in MOVED:
        change = f"{leading.subject} {write_arrows(leading.values)}"
        sentences.append(f"{pair.new}: {change}, not proven with {leading.samples} samples.")
    if parts:
        sentences.append(f"{pair.new} is {'; and '.join(parts)}.")
        if others:
            sentences.append(f"No proven change in {others} of {len(judged)} figures.")
    elif judged:
        sentences.append(f"{pair.new}: no proven change in any of {len(judged)} figures.")
    if refused:
        sentences.append(f"{refused} figures cannot be compared.")
    return " ".join(sentences)


def choose_tone(pairs: Sequence[Pair]) -> Tone:
    """Return the tone of a `Paragraph`: bad if a figure is worse, open if the first is better."""
    tone: Tone = "answer"
    for pair in pairs:
        if any(verdict.status == "regressed" for verdict in pair.verdicts):
            leading = _find_leading(pair.verdicts)
            if leading is None or leading.status != "improved":
                return "broken"
            tone = "open"
    return tone


def _name_figures(verdicts: Sequence[Verdict]) -> str:
    """Name the first figures that have a name in words, and count all others.

    Some figures only have the name of a metric (`bounds.exact:each`). Such a name is no text for a
    sentence, so these figures are only counted.
    """
    worded = [verdict for verdict in verdicts if not verdict.subject.startswith(verdict.metric)]
    named = [f"{verdict.subject} {write_arrows(verdict.values)}" for verdict in worded[:NAMED]]
    others = len(verdicts) - len(named)
    if others:
        count = "1 figure" if others == 1 else f"{others} figures"
        named.append(f"{count} more" if named else count)
    return ", ".join(named)


def _find_leading(verdicts: Sequence[Verdict]) -> Verdict | None:
    """Return the verdict on the figure that models are ranked by first: robust accuracy."""
    for section, headline in list_headlines():
        metric = f"{section}.{headline.column}"
        if not headline.ranks:
            continue
        for verdict in verdicts:
            if verdict.metric.partition(":")[0] == metric:
                return verdict
    return None


# By size


def write_arrows(text: str) -> str:
    """Write the arrows of verdicts as pages do: `64.8% → 51.6%`."""
    return text.replace("->", "→")


def _read_paired(verdict: Verdict) -> float:
    """Return the change of a figure, 0 if it is unknown."""
    return read_change(verdict) or 0.0


def read_change(verdict: Verdict) -> float | None:
    """Return the paired change, else the change of the two figures."""
    return verdict.change if verdict.paired is None else verdict.paired


def name_metric(metric: str) -> str:
    """Return the name of a metric for a picture: in words, else the heading of its column."""
    column, _, stat = metric.partition(":")  # `jacobian.norm` and `median`
    measure, _, name = column.rpartition(".")
    words = find_words(measure, name) or read_words()["columns"].get(column)
    if not words:
        words = write_math(find_column(column).label)
    if stat == "p95":
        words += ", p95"
    return words


def name_change(verdict: Verdict) -> str:
    """Return the name of a changed figure for a picture."""
    return verdict.subject.replace(verdict.metric, name_metric(verdict.metric))


def draw_changes(changes: Iterable[tuple[str, Verdict]], title: str = "") -> list[Block]:
    """Draw changes with their intervals, the largest first. Each unit gets its own picture.

    Args:
        changes: the name of each change, and the verdict of the test on this change. A verdict
            without a change or without limits is left out.
        title: the title of the pictures; empty: a title that names the unit.
    """
    units: dict[str, list[tuple[str, Verdict]]] = {}
    drawn: set[str] = set()
    for name, verdict in changes:
        value = read_change(verdict)
        known = [end for end in (value, verdict.low, verdict.high) if end is not None]
        # Several measures report the clean accuracy: it is drawn once.
        change = f"{name} {verdict.values}"
        if len(known) == 3 and all(map(math.isfinite, known)) and change not in drawn:
            drawn.add(change)
            # A verdict without a unit is a difference in the unit of its metric: such differences
            # of two metrics cannot share an axis.
            units.setdefault(verdict.unit or verdict.metric, []).append((name, verdict))
    found: list[Block] = []
    for unit in sorted(units, key=lambda unit: ORDER.get(unit, len(ORDER))):
        group = units[unit]
        if len(group) < 2:  # a picture of one bar shows no more than the table
            continue
        group.sort(key=lambda change: -abs(_read_size(change[1])))
        heading = title or TITLES.get(unit) or f"By how much did {group[0][0]} change?"
        if len(group) > MOST:
            heading += f" The {MOST} largest of {len(group)}"
        bars = [_draw_bar(name, verdict) for name, verdict in group[:MOST]]
        found.append(_draw_unit(unit, heading, bars))
    return found


def _read_size(verdict: Verdict) -> float:
    """Return how far a figure moved, with a sign.

    For a ratio this is the logarithm, so that a halved figure moved as far as a doubled one.
    """
    value = _read_paired(verdict)
    if verdict.unit == "%" and value > -1:
        return math.log1p(value)
    return value


def _draw_unit(unit: str, title: str, bars: Sequence[Bar]) -> Forest:
    """Return the forest plot of the changes of one unit: ratios, percentage points, differences.

    Args:
        unit: "%", "pp", or a metric for differences in its own unit.
        title: printed above the plot.
        bars: the changes with their intervals, in the units of the axis.
    """
    # The meaning of the colours that occur.
    colours = {bar.colour for bar in bars}
    legend = {place: word for place, word in WORDS.items() if place in colours}
    if unit == "%":
        axis = Column("new / old", "", "×", domain="")
        return Forest(title, axis, bars, centre=1.0, log=True, legend=legend)
    axis = Column("new - old", "", "points" if unit == "pp" else "", domain="")
    return Forest(title, axis, bars, legend=legend)


def _draw_bar(name: str, verdict: Verdict) -> Bar:
    """Return the bar of a change, in the units of its axis."""
    unit = verdict.unit
    value = read_change(verdict)
    assert value is not None
    assert verdict.low is not None
    assert verdict.high is not None
    change = format_change(value, unit)
    if verdict.paired is not None:
        # The median of the changes over samples differs from the change of the two medians.
        change = f"paired {change}"
    # A rule of the gate (`<= +10%`) has a limit, which the picture marks. In a comparison there is
    # no rule, and no limit.
    limit = LIMIT.search(verdict.rule)
    bound = None
    if limit is not None and limit[2] == unit:
        bound = _scale(float(limit[1]) / 100, unit)
    return Bar(
        label=name,
        value=_scale(value, unit),
        low=_scale(verdict.low, unit),
        high=_scale(verdict.high, unit),
        text=f"{write_arrows(verdict.values)}, {change}",
        colour=COLOURS.get(verdict.status, GREY),
        limit=bound,
    )


def _scale(value: float, unit: str) -> float:
    """Return a change in the units of its axis: new / old, percentage points, or new - old."""
    if unit == "%":
        return max(1 + value, 0.0)
    if unit == "pp":
        return 100 * value
    return value


def draw_ranking(ranking: Ranking) -> list[Block]:
    """Draw how far every model is from the best one."""
    changes = []
    for model in ranking.models:
        if model.difference is not None:
            changes.append((model.model, model.difference))
    return draw_changes(changes, f"How far is each model from {ranking.models[0].model}?")


# Sample by sample


def show_flipped(flipped: Sequence[SampleChange], reports: Sequence[Report]) -> list[Block]:
    """Show the samples whose result changed: images with adversarial examples, or texts.

    The result is empty if no report stores images or texts.
    """
    places: dict[str, str] = {}
    for report in reports:
        places |= report.places
    items = []
    for sample in flipped:
        item = _show_sample(sample, name_sample(sample.id, places), reports)
        if item is not None:
            items.append(item)
    if not items:
        return []
    found: list[Block] = []
    if len(items) > PICTURES:
        found.append(Paragraph(f"The first {PICTURES} of {len(items)}."))
    return [*found, blocks.Gallery("", items[:PICTURES])]


def _show_sample(
    sample: SampleChange, title: str, reports: Sequence[Report]
) -> blocks.Item | None:
    """Return a sample with its adversarial example, or else its text; None if neither is stored.

    Args:
        sample: a sample whose result changed between two reports.
        title: the name of the sample.
        reports: the reports; the first one with something stored counts.
    """
    changed = describe_flip(sample)
    for report in reports:
        attack = report.section("attack")
        if attack is not None and sample.id in attack.examples:
            item = show_example(title, attack.examples[sample.id])
            model = f"by {report.run.label}:"
            return replace(item, lines=(changed, model, *item.lines))
    for report in reports:
        if sample.id in report.texts:
            return blocks.Item(title, (), (changed, f'"{report.texts[sample.id]}"'))
    return None


def describe_flip(sample: SampleChange) -> str:
    """Say which results of a sample changed."""
    turned = [f"{_name_result(name)}: yes → no" for name in sample.lost]
    turned += (f"{_name_result(name)}: no → yes" for name in sample.gained)
    return "; ".join(dict.fromkeys(turned))


def _name_result(metric: str) -> str:
    """Return the name of a yes-or-no figure: `robust at linf 0.1`."""
    name, _, row = metric.partition("@")
    trial = TrialKey.parse(row)
    word = name.rpartition(".")[2]
    if trial is None:
        return word
    return f"{word} at {trial.ball}"
