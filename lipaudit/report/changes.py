"""What changed between reports: in a sentence, by size in a picture, and sample by sample."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from lipaudit.errors import few
from lipaudit.gate.comparison import Pair, SampleChange
from lipaudit.gate.ranking import Ranking
from lipaudit.gate.verdicts import Verdict, format_change
from lipaudit.measures import find_headline
from lipaudit.report import blocks
from lipaudit.report.blocks import Bar, Block, Forest, Paragraph, Tone
from lipaudit.report.cells import HEADINGS
from lipaudit.report.document import show_example
from lipaudit.report.groups import count_part
from lipaudit.report.rows import list_distinct, read_change, write_arrows
from lipaudit.tables import Report
from lipaudit.tables.columns import finite
from lipaudit.tables.formats import name_sample
from lipaudit.tables.trials import TrialKey

MOVED = ("regressed", "improved")
COLOURS = {"regressed": 1, "improved": 2}
"""Indices of the colours of verdicts; the others are grey."""
GREY = 6
TINY = 1e-300
"""Stands for 0 where a logarithm is taken."""
WORDS = {1: "worse", 2: "better", GREY: "not proven"}
"""What a comparison calls its verdicts, by colour."""
OF_PAIRED = (
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
LIMIT = re.compile(r"[<>]= *([+-][\d.]+)(%|pp)$")
"""A limit of a rule on a change."""
NAMED = 3
"""Largest number of figures that a sentence names for the worse, and for the better."""
MOST = 32
"""Largest number of figures in one picture; proven changes go first."""
PICTURES = 12
"""Largest number of samples that are shown with their images or texts."""


# In a sentence


def write_answer(pair: Pair) -> str:
    """Say in a few sentences what became worse and what better."""
    judged = list_distinct(pair.verdicts)
    # The main figure of a model, such as robust accuracy: it is named first, also if its change is
    # not proven.
    leading = find_leading(judged)
    parts = []
    for status, word in (("regressed", "worse"), ("improved", "better")):
        moved = [verdict for verdict in judged if verdict.status == status]
        if moved:
            moved.sort(key=lambda each: (each is not leading, -compute_size(each)))
            named = few([each.sentence for each in moved], NAMED)
            parts.append(f"{word} in {named}")
    if leading is not None and leading.status == "improved":
        parts.reverse()
    others = sum(verdict.status not in MOVED for verdict in judged)
    # A verdict with a reason is on a figure that cannot be compared.
    refused = sum(bool(verdict.reason) for verdict in pair.verdicts)
    sentences = []
    if leading is not None and leading.change and leading.status not in MOVED:
        sentences.append(
            f"{pair.new}: {leading.sentence}, not proven with {leading.samples} samples."
        )
    if parts:
        sentences.append(f"{pair.new} is {'; and '.join(parts)}.")
        for verdict in judged:
            if (verdict.subject, verdict.status) == ("clean accuracy", "inconclusive"):
                sentences.append(f"Clean accuracy: no proven change, {verdict.figures}.")
        if others:
            sentences.append(f"No proven change in {others} of {len(judged)} figures.")
    elif judged:
        sentences.append(f"{pair.new}: no proven change in any of {len(judged)} figures.")
    if refused:
        sentences.append(f"{refused} figures cannot be compared.")
    return write_arrows(" ".join(sentences))


def choose_tone(pairs: Sequence[Pair]) -> Tone:
    """Return the tone of a `Paragraph`: bad if a figure is worse, open if the first is better."""
    tone: Tone = "answer"
    for pair in pairs:
        if any(verdict.status == "regressed" for verdict in pair.verdicts):
            leading = find_leading(pair.verdicts)
            if leading is None or leading.status != "improved":
                return "broken"
            tone = "open"
    return tone


def count_samples(verdicts: Iterable[Verdict]) -> str:
    """Say on how many samples verdicts are based, for example ", 8 to 64 samples"."""
    counts = sorted({verdict.samples for verdict in verdicts} - {0})
    if not counts:
        return ""
    ends = dict.fromkeys((counts[0], counts[-1]))
    return f", {' to '.join(map(str, ends))} samples"


def find_leading(verdicts: Sequence[Verdict]) -> Verdict | None:
    """Return the verdict on the figure that models are ranked by first: robust accuracy."""
    ranked = dict[int, Verdict]()
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

    All proven changes are drawn. Of other changes, those with finite limits are drawn, but not
    alone: a picture of one such change shows no more than the table.

    Args:
        changes: the name of each change, and the verdict of the test on this change.
        title: the title of the pictures; empty: a title that names the unit.
        words: what the page calls the verdicts, by colour.
    """
    # The bars of each picture, with their sizes.
    units: dict[str, list[tuple[float, Bar]]] = {unit: [] for unit in TITLES}
    for name, verdict in changes:
        needed = [read_change(verdict)]
        if verdict.status not in MOVED:
            needed += (verdict.low, verdict.high)
        if len(finite(needed)) == len(needed):
            units[verdict.unit].append((compute_size(verdict), _draw_bar(name, verdict)))
    found = []
    for unit, sized in units.items():
        colours = {bar.colour for _, bar in sized}
        if len(sized) < 2 and colours <= {GREY}:
            continue
        sized.sort(key=lambda pair: (pair[1].colour == GREY, -pair[0]))
        shown = sorted(sized[:MOST], key=lambda pair: -pair[0])
        bars = [bar for _, bar in shown]
        heading = (title or TITLES[unit]) + count_part(bars, sized)
        # The meaning of the colours that occur.
        legend = {place: word for place, word in words.items() if place in colours}
        is_ratio = unit == "%"
        # The centre is no change: a ratio of 1, or a difference of 0.
        found.append(Forest(heading, AXES[unit], bars, float(is_ratio), is_ratio, legend))
    return found


def compute_size(verdict: Verdict) -> float:
    """Return how far a figure moved, or -1 if this is unknown.

    The size of a log-ratio (a halved figure moved as far as a doubled one), of the change of a
    share, or of a change relative to the old value.
    """
    value = _scale(read_change(verdict), verdict)
    if value is None or math.isnan(value):
        return -1.0
    if verdict.unit == "%":
        return abs(math.log(max(value, TINY)))
    return abs(value) / 100


def _draw_bar(name: str, verdict: Verdict) -> Bar:
    """Return the bar of a change, in the units of its axis."""
    value = _scale(read_change(verdict), verdict) or 0.0
    change = format_change(read_change(verdict), verdict.unit)
    lead = ""
    # The median of the changes over samples may differ from the change of the two medians.
    if change != verdict.texts["change"]:
        lead = "paired "
    if not verdict.unit:  # the axis has percent of the old value
        change = f"{value:+.3g}%"
    # A rule of the gate (`<= +10%`) has a limit, which the picture marks. In a comparison there is
    # no rule, and no limit.
    limit = LIMIT.search(verdict.rule)
    bound = None
    if limit is not None and limit[2] == verdict.unit:
        bound = _scale(float(limit[1]) / 100, verdict)
    return Bar(
        label=name,
        value=value,
        low=_scale(verdict.low, verdict),
        high=_scale(verdict.high, verdict),
        text=f"{write_arrows(verdict.values)}, {lead}{change}",
        colour=COLOURS.get(verdict.status, GREY),
        limit=bound,
    )


def _scale(value: float | None, verdict: Verdict) -> float | None:
    """Return a change in the units of its axis: new / old, points, or percent of the old value."""
    if value is None:
        return None
    if verdict.unit == "%":
        return max(1 + value, 0.0)
    if verdict.unit == "":
        value /= abs(verdict.old or verdict.new or 1.0)
    return 100 * value


def draw_ranking(ranking: Ranking) -> list[Block]:
    """Draw how far every model is from the best one."""
    changes = [(each.model, each.difference) for each in ranking.models if each.difference]
    found: list[Block] = []
    for picture in draw_changes(changes, f"How far is each model from {ranking.models[0].model}?"):
        # Grey: the other colours of a page are those of its models.
        found.append(
            replace(
                picture,
                x=replace(picture.x, label="compared with the best"),
                bars=[replace(bar, colour=GREY) for bar in picture.bars],
                legend={GREY: "difference, with its limits"},
            )
        )
    return found


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
    found = []
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
            model = f"attack on {report.run.label}"
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
