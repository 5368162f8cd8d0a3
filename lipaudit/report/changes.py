"""What changed between reports: in a sentence, by size in a picture, and sample by sample."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from lipaudit.errors import join_few
from lipaudit.gate.comparison import Pair, SampleChange
from lipaudit.gate.ranking import Ranking
from lipaudit.gate.verdicts import Verdict, format_change
from lipaudit.measures import find_headline
from lipaudit.report.blocks import Bar, Block, Forest, Gallery, Item, Paragraph, Tone
from lipaudit.report.cells import HEADINGS
from lipaudit.report.document import show_example
from lipaudit.report.groups import count_part
from lipaudit.report.rows import list_distinct, read_change, write_arrows
from lipaudit.tables import Report
from lipaudit.tables.columns import finite
from lipaudit.tables.formats import format_count, name_sample
from lipaudit.tables.trials import TrialKey

MOVED = ("regressed", "improved")
COLOURS = {"regressed": 1, "improved": 2}
"""Indices of the colours of verdicts; the others are grey."""
GREY = 6
TINY = 1e-300
"""Stands for 0 where a logarithm is taken."""
WORDS = {1: "worse", 2: "better", GREY: "not proven"}
"""What a comparison calls its verdicts, by colour."""
PAIRED_NOTE = (
    "A paired change compares each sample with itself; of a median, it is the median of these "
    "changes. It can differ from old → new: the two medians may be of different samples."
)
TITLES = {
    "pp": "By how many percentage points did shares change?",
    "": "By how much did other figures change, relative to the old value?",
    "%": "By which factor did figures change?",
}
"""Titles of the pictures, by unit, in the order of the pictures."""
AXES = {
    "pp": HEADINGS["new - old"],
    "%": HEADINGS["new / old"],
    "": HEADINGS["(new - old) / old"],
}
LIMIT = re.compile(r"[<>]= *([+-][\d.eE+-]+)(%|pp)$")
"""A limit of a rule on a change."""
NAMED = 3
"""Largest number of figures that a sentence names for the worse, and for the better."""
MOST = 32
"""Largest number of figures in one picture; proven changes go first."""
PICTURES = 12
"""Largest number of samples that are shown with their images or texts."""


# In a sentence


def write_answer(pair: Pair) -> str:
    """Say in a few sentences which figures of a new model are worse and which are better.

    For example: "B is worse in robust accuracy (linf 4/255) 64.8% → 51.6%; and better in ...".
    """
    judged = list_distinct(pair.verdicts)
    # The main figure of a model, such as robust accuracy: the answer names it before all others.
    leading = find_leading(judged)
    sentences = []
    # The main figure changed, but the change is not proven.
    if leading is not None and leading.change and leading.status not in MOVED:
        sentences.append(
            f"{pair.new}: {leading.sentence}, not proven with {format_count(leading.samples)}."
        )
    clauses = _list_clauses(judged, leading)
    if clauses:
        sentences.append(f"{pair.new} is {'; and '.join(clauses)}.")
        for verdict in judged:
            if verdict.subject == "clean accuracy" and verdict.status == "inconclusive":
                sentences.append(f"Clean accuracy: no proven change, {verdict.figures}.")
        unproven = sum(verdict.status not in MOVED for verdict in judged)
        if unproven:
            sentences.append(f"No proven change in {unproven} of {len(judged)} figures.")
    elif judged:
        sentences.append(
            f"{pair.new}: no proven change in any of {format_count(len(judged), 'figure')}."
        )
    # A verdict has a reason only if its figure cannot be compared.
    incomparable = sum(bool(verdict.reason) for verdict in pair.verdicts)
    if incomparable:
        sentences.append(f"{format_count(incomparable, 'figure')} cannot be compared.")
    return write_arrows(" ".join(sentences))


def _list_clauses(judged: Sequence[Verdict], leading: Verdict | None) -> list[str]:
    """Return "worse in FIGURES" and "better in FIGURES", without a clause that has no figures.

    If the main figure is better, "better in FIGURES" comes first.

    Args:
        judged: the verdicts on all figures.
        leading: the verdict on the main figure; each clause names this figure first.
    """
    clauses = []
    for status, word in (("regressed", "worse"), ("improved", "better")):
        moved = [verdict for verdict in judged if verdict.status == status]
        if moved:
            moved.sort(key=lambda verdict: (verdict is not leading, -compute_size(verdict)))
            figures = join_few([verdict.sentence for verdict in moved], NAMED)
            clauses.append(f"{word} in {figures}")
    if leading is not None and leading.status == "improved":
        clauses.reverse()
    return clauses


def choose_tone(pairs: Sequence[Pair]) -> Tone:
    """Return the tone (the colour on a page) of the answer of one or more comparisons.

    "broken" (bad): a figure of a new model is worse. "open" (undecided): a figure is worse, but
    the main figure, such as robust accuracy, is better. "answer" (neutral): no figure is worse.
    """
    tone: Tone = "answer"
    for pair in pairs:
        if any(verdict.status == "regressed" for verdict in pair.verdicts):
            leading = find_leading(pair.verdicts)
            if leading is None or leading.status != "improved":
                return "broken"
            tone = "open"
    return tone


def count_samples(verdicts: Iterable[Verdict]) -> str:
    """Say on how many samples verdicts are based: ", 8 to 64 samples", or ", 64 samples"."""
    counts = sorted({verdict.samples for verdict in verdicts} - {0})
    if not counts:
        return ""
    start = ""
    if len(counts) > 1:
        start = f"{counts[0]} to "
    return f", {start}{format_count(counts[-1])}"


def find_leading(verdicts: Sequence[Verdict]) -> Verdict | None:
    """Return the verdict on the main figure: the first one by which models can be ranked.

    The order of figures is that of the scorecard, so robust accuracy comes before norms. Of
    several verdicts on the main figure, the first counts. None without such a figure.
    """
    # A headline declares a main figure of a measure: whether it ranks models, and its place.
    ranked = dict[int, Verdict]()  # by the place of the figure on the scorecard
    for verdict in verdicts:
        headline = find_headline(verdict.metric)
        if headline is not None and headline.ranks:
            ranked.setdefault(headline.place, verdict)
    if not ranked:
        return None
    return ranked[min(ranked)]


# By size


def draw_changes(
    changes: Iterable[tuple[str, Verdict]],
    title: str = "",
    words: Mapping[int, str] = WORDS,
) -> list[Forest]:
    """Draw changes with their intervals, the largest first. Each unit gets its own picture.

    Changes that are not proven (grey) are drawn only if they have finite limits. A picture of a
    single such change is left out: the table already shows it.

    Args:
        changes: the name of each change, and the verdict of the test on this change.
        title: the title of the pictures; empty: a title that names the unit.
        words: what the page calls the verdicts, by colour.
    """
    # The bars of each unit, each bar after the size of its change.
    units: dict[str, list[tuple[float, Bar]]] = {unit: [] for unit in TITLES}
    for name, verdict in changes:
        # The numbers that must be finite: of a proven change only the change itself.
        needed = [read_change(verdict)]
        if verdict.status not in MOVED:
            needed += (verdict.low, verdict.high)
        if len(finite(needed)) == len(needed):
            units[verdict.unit].append((compute_size(verdict), _draw_bar(name, verdict)))
    pictures = []
    for unit, sized in units.items():
        colours = {bar.colour for _, bar in sized}
        if len(sized) < 2 and colours <= {GREY}:
            continue
        # A picture has room for MOST bars: proven changes first, then the largest changes.
        sized.sort(key=lambda pair: (pair[1].colour == GREY, -pair[0]))
        bars = [bar for _, bar in sorted(sized[:MOST], key=lambda pair: -pair[0])]
        heading = (title or TITLES[unit]) + count_part(bars, sized)
        # Only the colours that occur.
        legend = {colour: word for colour, word in words.items() if colour in colours}
        is_ratio = unit == "%"
        centre = 1.0 if is_ratio else 0.0  # no change: a ratio of 1, a difference of 0
        pictures.append(
            Forest(heading, x=AXES[unit], bars=bars, centre=centre, log=is_ratio, legend=legend)
        )
    return pictures


def compute_size(verdict: Verdict) -> float:
    """Return how far a figure moved, to sort changes by size; -1 if this is unknown.

    For a ratio, this is |log(new / old)|: a halved figure moved as far as a doubled one. For a
    share, it is |new - old|; for other figures, |new - old| relative to the old value.
    """
    moved = _scale(read_change(verdict), verdict)
    if moved is None or math.isnan(moved):
        return -1.0
    # The unit is that of the rule: one that limits a ratio is written in percent, such as +5%.
    if verdict.unit == "%":  # `moved` is new / old
        return abs(math.log(max(moved, TINY)))  # TINY: the ratio may be 0
    return abs(moved) / 100  # `moved` is in percentage points, or in percent of the old value


def _draw_bar(name: str, verdict: Verdict) -> Bar:
    """Return the bar of a change in a forest plot, with its interval and the limit of its rule.

    The text of the bar is such as `64.8% → 51.6%, -13.2 pp`.
    """
    # In the units of the axis, by the unit of the verdict: the ratio new / old ("%"), percentage
    # points ("pp"), or percent of the old value ("").
    # A figure that is missing in one report has no change: its bar is at 0, without an interval.
    value = _scale(read_change(verdict), verdict) or 0.0
    change = format_change(read_change(verdict), verdict.unit)
    word = ""
    # The bar shows the median of the samples' changes. Its text says "paired" if this differs from
    # the change of the two medians, old and new.
    if change != verdict.texts["change"]:
        word = "paired "
    if verdict.unit == "":  # the axis has percent of the old value
        change = f"{value:+.3g}%"
    # A rule of the gate, such as `jacobian.norm <= +10%`, has a limit: +10 and the unit % (or pp),
    # which are the groups of the match. In a comparison there is no rule.
    match = LIMIT.search(verdict.rule)
    limit = None
    if match is not None and match[2] == verdict.unit:
        limit = _scale(float(match[1]) / 100, verdict)
    return Bar(
        label=name,
        value=value,
        low=_scale(verdict.low, verdict),
        high=_scale(verdict.high, verdict),
        text=f"{write_arrows(verdict.values)}, {word}{change}",
        colour=COLOURS.get(verdict.status, GREY),
        limit=limit,
    )


def _scale(value: float | None, verdict: Verdict) -> float | None:
    """Convert a change, or a limit of it, to the units of the axis on which it is drawn.

    Args:
        value: new / old - 1 if the unit is "%"; new - old if it is "pp" (shares) or empty.
        verdict: the verdict on the change.

    Returns:
        The ratio new / old for "%", percentage points for "pp", else percent of the old value.
    """
    if value is None:
        return None
    if verdict.unit == "%":
        return max(1 + value, 0.0)
    if verdict.unit == "":
        # An old value of 0 cannot be the divisor: the new value is, which may be 0, too.
        value /= abs(verdict.old or verdict.new or 1.0)
    return 100 * value


def draw_ranking(ranking: Ranking) -> list[Forest]:
    """Draw how far every model is from the best one."""
    # The best model comes first, and has no difference.
    title = f"How far is each model from {ranking.models[0].model}?"
    changes = [(each.model, each.difference) for each in ranking.models if each.difference]
    pictures = []
    for picture in draw_changes(changes, title):
        # Grey: the other colours of a page are those of its models.
        pictures.append(
            replace(
                picture,
                x=replace(picture.x, label="compared with the best"),
                bars=[replace(bar, colour=GREY) for bar in picture.bars],
                legend={GREY: "difference, with its limits"},
            )
        )
    return pictures


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
    gallery = Gallery(text="", items=items[:PICTURES])
    if len(items) <= PICTURES:
        return [gallery]
    return [Paragraph(f"The first {PICTURES} of {len(items)}."), gallery]


def _show_sample(sample: SampleChange, title: str, reports: Sequence[Report]) -> Item | None:
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
            model = f"attack on {report.run.label}"
            return replace(item, lines=(changed, model, *item.lines))
    for report in reports:
        if sample.id in report.texts:
            return Item(title, pictures=(), lines=(changed, f'"{report.texts[sample.id]}"'))
    return None


def describe_flip(sample: SampleChange) -> str:
    """Say which yes-or-no results of a sample changed: `robust at linf 0.1: yes → no; ...`."""
    changes = [f"{_name_result(metric)}: yes → no" for metric in sample.lost]
    changes += (f"{_name_result(metric)}: no → yes" for metric in sample.gained)
    return "; ".join(dict.fromkeys(changes))  # several metrics may have the same name


def _name_result(metric: str) -> str:
    """Return `robust at linf 0.1` for the metric `attack.robust@pgd,linf,0.1`."""
    name, _, row = metric.partition("@")
    word = name.rpartition(".")[2]
    trial = TrialKey.parse(row)
    if trial is None:
        return word
    return f"{word} at {trial.ball}"
