"""The content of each section's chapter: a question, a sentence, and a list of views."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from lipaudit.report.blocks import Table, make_table
from lipaudit.report.cells import write_math
from lipaudit.report.page.attention import count_ratios, draw_attention, draw_joints
from lipaudit.report.page.views import (
    FIT,
    HEAD,
    MODEL,
    TOP,
    Sections,
    View,
    count_samples,
    find_columns,
    group_rows,
    make_series,
    map_column,
    pick_largest,
    read_all,
    spread_columns,
    tabulate,
    view_unknown,
)
from lipaudit.report.pictures import Curve, Scatter, Series
from lipaudit.tables import Column, Row
from lipaudit.tables.columns import find_bounds
from lipaudit.tables.figures import finite, log10_ratio, order
from lipaudit.tables.trials import COSTS, WORST


@dataclass(frozen=True)
class ChapterPlan:
    """The content of a chapter.

    Attributes:
        question: its heading.
        about: the meaning of its figures, in a sentence.
        views: views of one report.
        several: views of several reports; by default the same.
        whole: whether the views show every row and every column.
    """

    question: str
    about: str = ""
    views: tuple[View, ...] = (view_unknown,)
    several: tuple[View, ...] = ()
    whole: bool = False


# Bounds beside exact norms


def format_ratio(logarithm: float | None) -> float | str | None:
    """Return 10 to a power as a cell; text if it is too large for a number."""
    if logarithm is None:
        return None
    # Beyond the range of floats, show the power of ten.
    return 10**logarithm if logarithm < 300 else f"1e{logarithm:.0f}×"


def list_steepest(sections: Sections) -> Iterator[Table]:
    """List the heads with the largest exact norms, and each bound as a multiple of the norm."""
    columns = find_columns(sections)
    rows = pick_largest(read_all(sections), "exact")
    inputs = [row.input for row in rows]
    cells: list[tuple[Column, list[Any]]] = [(HEAD, [row.head for row in rows])]
    if {*inputs} - {"", "one input"}:
        cells.append((columns["input"], inputs))
    cells.append((columns["exact"], [row.exact for row in rows]))
    for name, column in find_bounds(columns).items():
        ratios = [format_ratio(log10_ratio(row, name)) for row in rows]
        if any(ratio is not None for ratio in ratios):
            cells.append((replace(column, unit="×"), ratios))
    title = "Heads with the largest norm; each bound as a multiple of the exact norm"
    yield make_table(title, cells)


TIGHTNESS = (
    Column(label="bound", meaning="Name of the upper bound.", format="s"),
    Column(label="status", meaning="How far it is proven.", format="s"),
    Column(label="holds", meaning="Where it holds.", format="s"),
    Column(label="heads", meaning="Heads with this bound.", format="d"),
    Column(
        label="median",
        meaning="Median of bound / exact over the heads; 1 is tight.",
        unit="×",
        domain="",
    ),
    Column(label="largest", meaning="Largest bound / exact over the heads.", unit="×", domain=""),
)


def list_tightness(sections: Sections) -> Iterator[Table]:
    """List how many times each bound is above the exact norm, in every model."""
    columns, several, lines = find_columns(sections), "" not in sections, []
    for name, column in find_bounds(columns).items():
        for model, section in sections.items():
            known = finite(log10_ratio(row, name) for row in section.rows)
            ends = [format_ratio(reduce(known)) if known else None for reduce in (median, max)]
            place = model if several else write_math(column.domain)
            lines.append((column.label, column.status, place, len(known), *ends))
    # With several models, the model replaces the domain, so that a row fits a terminal.
    shown = [MODEL if several and each.label == "holds" else each for each in TIGHTNESS]
    yield Table("Tightness over all heads: bound / exact", tuple(shown), tuple(lines))


def scatter_bounds(sections: Sections) -> Iterator[Scatter]:
    """Plot every bound of every head over its exact norm: no point may be below y = x."""
    columns = find_columns(sections)
    rows = read_all(sections)
    series: list[Series] = []
    for bound, column in find_bounds(columns).items():
        points = [(row.exact, row.get(bound), f"head {row['head']}") for row in rows]
        # Logarithmic axes show positive numbers only.
        known = [p for p in points if len(finite(p[:2])) == 2 and min(p[:2]) > 0]
        if known:
            exact, bounds, names = zip(*known, strict=True)
            series.append(Series(column.label, exact, bounds, names=names))
    if series:
        limit = Column(label="bound", meaning="Upper bound.", status="bound")
        title = "Upper bounds over the exact norm, per head"
        yield Scatter(title, columns["exact"], limit, tuple(series))


# Accuracy under attack


def draw_accuracies(sections: Sections) -> Iterator[Curve]:
    """Draw accuracy over the radius: a line per attack, or one per report."""
    columns, rows = find_columns(sections), read_all(sections)
    if "" not in sections:
        rows = [row for row in rows if row.attack == WORST] or rows
    accuracy = replace(columns["robust"], label="accuracy")
    for norm, group in group_rows(rows, lambda row: str(row.norm)).items():
        series = []
        for name, line in group_rows(group, lambda row: str(row.model or row.attack)).items():
            # No attack counts as a ball of radius 0.
            start = Row({"eps": 0.0, "robust": line[0].clean})
            series.append(make_series(name, [*line, start], "eps", "robust"))
        kept = tuple(each for each in series if len(each.x) > 1)
        ticks = {"0": 0.0} | {row.eps_text: row.eps for row in group}
        if kept:
            title = f"Accuracy under attack, {norm}"
            yield Curve(title, columns["eps"], accuracy, kept, ticks=ticks)


# Norms over the length of the sequence


LINES = 5
"""Largest number of heads or layers in one chart, spread evenly."""
MODES = {
    "real": "On data: norms over the length",
    "adversarial": "At worst-case tokens",
    "ascent": "At the best tokens of an ascent",
    "radius": "Worst-case tokens over the radius",
}


def list_lengths(sections: Sections) -> Iterator[Table]:
    """List the norms on data: a row per head or layer, a column per length."""
    columns, several = find_columns(sections), "" not in sections
    rows = [row for row in read_all(sections) if row.mode == "real"]
    lines = group_rows(rows, lambda row: f"{row.head} {row.model}").values()
    firsts = [line[0] for line in lines]
    norms = [{row.n: row.norm for row in line} for line in lines]
    shown = [
        (HEAD, [row.head for row in firsts]),
        *([(MODEL, [row.model for row in firsts])] if several else []),
        (columns["radius"], [row.radius for row in firsts]),
        *(
            (replace(columns["norm"], label=f"n={n}"), [each.get(n) for each in norms])
            for n in sorted({row.n for row in rows})
        ),
    ]
    if firsts:
        yield make_table("On data: median norms by length", shown, keys=1 + several)


def draw_lengths(sections: Sections) -> Iterator[Curve]:
    """Draw norms over the length n beside n^(1/4) and n^(1/2), by mode; over R in mode radius."""
    columns = find_columns(sections)
    rows = [row for row in read_all(sections) if order(row.norm) > 0]
    for mode, title in MODES.items():
        x = "radius" if mode == "radius" else "n"
        lines: dict[str, list[Row]] = {}
        for row in (row for row in rows if row["mode"] == mode):
            # A line has a radius R unless the data define it, or a length n.
            fixed = {"real": "", "radius": "n"}.get(mode, "radius")
            name = f"{row.model} {row.head}{', masked' * bool(row.masked)}".strip()
            if fixed and row[fixed] is not None:
                name += f", {'R' if fixed == 'radius' else 'n'} = {row[fixed]:.3g}"
            lines.setdefault(name, []).append(row)
        names = list(lines)
        if len(names) > LINES:
            names = [names[round(i * (len(names) - 1) / (LINES - 1))] for i in range(LINES)]
        series = [make_series(name, lines[name], x, "norm") for name in names]
        if series and x == "n":
            start, end = min(s.x[0] for s in series), max(s.x[-1] for s in series)
            first = series[0].y[0]
            for text, power in (("1/4", 0.25), ("1/2", 0.5)):
                last = first * (end / start) ** power
                series.append(Series(f"n^{text}", (start, end), (first, last), guide=True))
        if series:
            yield Curve(title, columns[x], columns["norm"], tuple(series), log=True)


# Norms at each position of a text


def list_positions(sections: Sections) -> Iterator[Table]:
    """List the positions with the largest norms over the texts that have them."""
    for section in sections.values():
        if "positions" not in section.arrays:
            continue
        norms = map(finite, section.arrays["positions"].numpy().T.tolist())
        known = [(i, len(v), median(v), max(v)) for i, v in enumerate(norms) if v]
        shown = known if len(known) <= FIT else sorted(known, key=lambda row: -row[3])[:TOP]
        of = section.columns
        columns = (section.sample_column("position"), of["samples"], of["median"], of["max"])
        yield Table("Norms by position", columns, tuple(shown))


FRAGILE: tuple[str, ...] = (
    "intermediate",
    "uniform",
    "categorical",
    "g1",
    "g1_max",
    "softmax_norm",
    "g1_ratio",
    "support",
)
QUANTILES = ("norm", "mean", "median", "p95", "max", "within", "samples", "converged")

PLANS: dict[str, ChapterPlan] = {
    "bounds": ChapterPlan(
        "Which heads amplify a small change most?",
        "Exact norm ‖J‖ of each head: how much a small change of the head's own input can "
        "grow in its output (median over the samples). Later layers may shrink it again.",
        (
            map_column("exact", "Exact ‖J‖ of every head"),
            list_steepest,
            list_tightness,
            scatter_bounds,
        ),
        (list_tightness, spread_columns("exact", "sharp", "sharp_ratio_max", "p_norm")),
    ),
    "bounds.layers": ChapterPlan(
        "How much do whole layers amplify?",
        "The same norm for all heads of a layer together.",
        (
            tabulate(
                names=("exact", "exact_out", "within", "sharp_rss", "sharp_sum", "theorem3_sum")
            ),
        ),
    ),
    "bounds.ball": ChapterPlan(
        "How large can the norm of a head get near the samples?",
        "Within a ball of radius r around a sample's tokens: the largest norm that a search "
        "found, and proven upper bounds.",
        (tabulate(keys=("head", "r")),),
        whole=True,
    ),
    "attention": ChapterPlan(
        "Where is attention fragile?",
        "An attention row is fragile (intermediate) if it is neither flat nor one-hot: the "
        "softmax then reacts most to a small change.",
        (
            map_column("intermediate", "Share of rows in the intermediate (fragile) regime"),
            tabulate("Most intermediate heads", FRAGILE, keys=("head",), by="intermediate"),
            tabulate(
                "Strongest sinks",
                ("sink_max", "sink_token", "sink_first", "entropy_normalized"),
                keys=("head",),
                by="sink_max",
                most=5,
            ),
            count_ratios,
            draw_joints,
            draw_attention,
        ),
        (
            spread_columns("g1", "intermediate", "gk_ratio", "softmax_norm", "entropy"),
            count_ratios,
            draw_joints,
            draw_attention,
        ),
    ),
    "jacobian": ChapterPlan(
        "How sensitive is the whole model?",
        "Jacobian norm ‖J‖: by how much a small change of a sample can grow in the model's "
        "output, in the worst direction.",
        (
            tabulate("Over the samples", QUANTILES, keys=("from", "to", "module", "norm")),
            count_samples("norm"),
            list_positions,
        ),
    ),
    "attack": ChapterPlan(
        "Which attacks succeed?",
        "Share of the samples that stay correct under each attack, with 95 % limits. A "
        "stronger attack can only lower it.",
        (
            tabulate(
                "Accuracy under attack",
                ("samples", "clean", "robust", *COSTS),
                keys=("attack", "norm", "eps_text"),
                strong=WORST,
            ),
            draw_accuracies,
        ),
    ),
    "certify": ChapterPlan(
        "What is proven?",
        "The true robust accuracy is between the certified share (proven) and the robust "
        "share (not broken by the attacks).",
        (
            tabulate(
                "Robust accuracy: between certified and attacked",
                ("samples", "clean", "certified", "robust", "undecided"),
                keys=("norm", "eps_text"),
            ),
        ),
    ),
    "certify.radius": ChapterPlan(
        "How far around a sample is its class proven?",
        "Certified radius: no input nearer to the sample changes its class. Adversarial "
        "radius: an attack found a misclassified input at this distance.",
        (tabulate(keys=("norm",)),),
        whole=True,
    ),
    "scaling": ChapterPlan(
        "How do norms grow with the length of the sequence?",
        "n is the number of tokens. Dotted lines are reference slopes.",
        (list_lengths, draw_lengths),
    ),
    "scaling.fit": ChapterPlan(
        "By which power of the length do norms grow?",
        "norm = c n^a: [C24] finds a near 1/4 on text; 1/2 is the worst case.",
        (tabulate(keys=("head", "mode", "radius")),),
        whole=True,
    ),
}


def find_plan(measure: str, title: str = "") -> ChapterPlan:
    """Return the plan of a section's chapter; a plug-in's plan follows from its columns."""
    return PLANS.get(measure) or ChapterPlan(title or measure, whole=True)
