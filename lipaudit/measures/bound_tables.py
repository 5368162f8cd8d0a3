"""The tables of the measure `bounds`: heads, layers and balls, with the headlines of a report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial
from statistics import median

from lipaudit.tables import Column, Display, Layout, Reduction, Report, Row, Section
from lipaudit.tables.columns import (
    HEAD,
    HEAD_NORMS,
    NEAR,
    NORM_OF,
    WITHIN_COLUMN,
    finite,
    largest,
    list_ratios,
)
from lipaudit.tables.formats import format_count, format_significant, format_value
from lipaudit.tables.summary import Headline, count_measured
from lipaudit.tables.trials import count_distinct
from lipaudit.theory.bounds.record import AFFINE_PLAIN, BALL, load_bounds


def _list_bounds() -> dict[str, Column]:
    """Return the columns of every bound by name; columns of a logarithm come last."""
    columns: dict[str, Column] = {}
    for bound in load_bounds().values():
        columns |= bound.columns()
    names = sorted(columns, key=lambda name: name.startswith("log10_"))  # a stable sort
    return {name: columns[name] for name in names}


# Number of heads that the scorecard lists behind the steepest one.
NEXT = 2
RATIO = Column(label="bound / ||J||", meaning="1 is tight.", unit="×", domain="")


def read_steepest(headline: Headline, section: Section, report: Report) -> Iterator[Row]:
    """Yield the figure of the steepest head: its norm.

    The text reads "head 1.3 (carries 12.0%) and 2 more within 1.5%; next 0.1 (4.2), 2.0 (3.9);
    median 1.7". "carries" is the share of the head in the model's sensitivity, if shares were
    measured. "more" counts heads that may be as steep: a solver approaches the norm (the column
    `exact`) from below, so it may be too low by `within`. "next" lists the heads with the next
    largest norms, including those counted by "more".
    """
    rows = [row for row in section.rows if finite([row.exact])]
    if not rows:
        return
    first, *others = largest(rows, "exact", len(rows))
    name = f"{first.layer}.{first.head}"
    ties = _describe_ties(first, others)
    text = f"head {name}"
    shares = report.section("jacobian.shares")
    for row in shares.rows if shares else ():  # the measure of shares may not have run
        if (row.layer, row.head) == (first.layer, first.head) and finite([row.share]):
            text += f" (carries {row.share:.1%})"
    text += ties
    if others:
        next_heads = []
        for row in others[:NEXT]:
            next_heads.append(f"{row.layer}.{row.head} ({format_significant(row.exact)})")
        middle = format_significant(median(row.exact for row in rows))
        text += f"; next {', '.join(next_heads)}; median {middle}"
    text += count_measured(section, report)
    norm = f"‖J‖ {format_significant(first.exact)}"
    if section.ids:
        norm += f", median of {format_count(count_distinct(section.ids))}"
    sentence = f"Steepest attention head: {name}{ties} ({norm})."
    yield headline.row(section, first.exact, text=text, sentence=sentence)


def _describe_ties(steepest: Row, others: Iterable[Row]) -> str:
    """Return " and 2 more within 1.5%" if the norms of two other heads may be as large; else "".

    `within` is the proven relative error of a norm: the true norm is at most exact (1 + within).
    """
    errors = []
    for row in others:
        if finite([row.within]) and row.exact * (1 + row.within) >= steepest.exact:
            errors.append(row.within)
    if not errors:
        return ""
    return f" and {len(errors)} more within {max(errors):.1%}"


def read_tightest(headline: Headline, section: Section, report: Report) -> Iterator[Row]:
    """Yield how many times the tightest bound exceeds the exact norm (median over heads).

    The text adds the tightest certified bound: one that also holds for inputs other than X.
    """
    # By bound: log10(bound / exact norm) of each head. The tightest bound comes first.
    logs_of_bounds = list_ratios(section.columns, section.rows)
    if not logs_of_bounds:
        return
    tightest, logs = next(iter(logs_of_bounds.items()))
    text = f"of ‖J‖, {len(logs)} heads, largest {_format_ratio(max(logs))}"
    for name, logs_of_bound in logs_of_bounds.items():
        column = section.columns[name]
        if column.status == "certified":
            text += (
                f"; for any input of no larger norm: {column.label} "
                f"{_format_ratio(median(logs_of_bound))}"
            )
            break
    label = f"{headline.label}, {section.columns[tightest].label}"
    value = _compute_ratio(median(logs))
    metric = f"{section.measure}.{tightest}/exact"
    yield headline.row(section, value, RATIO, figure=label, metric=metric, text=text)


def _format_ratio(logarithm: float) -> str:
    """Format how many times a bound is the exact norm, from the logarithm to base 10."""
    return format_value(_compute_ratio(logarithm), RATIO)


def _compute_ratio(logarithm: float) -> float:
    """Return a ratio from its logarithm to base 10; infinity if no float is as large."""
    if logarithm < 308:
        return float(10**logarithm)
    return math.inf


BOUNDS_TABLE = Layout(
    name="bounds",
    title="Which attention heads are the steepest?",
    headlines=(
        Headline(
            name="steepest_head",
            column="exact",
            label="steepest attention head, ‖J‖",
            words="head norm",
            meaning="The head with the largest norm ||J||: the factor by which a small change of "
            "its own input can grow (sample median). Another head may carry more of the model's "
            "sensitivity. Head 1.3 is head 3 of layer 1, both from 0.",
            place=60,
            read=read_steepest,
            rule="bounds.exact:each <= +20%",
        ),
        Headline(
            name="tightest_bound",
            column="exact",
            label="tightest bound",
            meaning="The upper bound closest to ||J||: bound / ||J|| at the median head. It is "
            "pointwise (holds at the measured samples only) unless it is certified.",
            place=80,
            read=read_tightest,
        ),
    ),
    display=Display(
        about="Norm ‖J‖ of each head: how much a small change of the head's own input can grow in "
        "its output. Norms and bounds are medians over the samples; max ‖J‖ is the largest norm. "
        "Later layers may shrink the change, so the steepest head need not carry most of the "
        "model's sensitivity (jacobian --shares).",
        columns=("head", "input", "exact"),
        by="exact",
        maps=("exact",),
        titles={"exact": "How steep each head is (norm ‖J‖)"},
        drawings=("tightness",),
        folded=False,
    ),
    sample_columns={
        "exact_max": Column("largest head", "Largest head norm of the sample.", better="lower")
    },
    fixed=HEAD_NORMS,
    behind="exact_max",
    declared=_list_bounds,
)


_limit = partial(Column, status="bound")
LAYERS_TABLE = Layout(
    name="bounds.layers",
    title="How much do whole layers amplify?",
    display=Display(about="The same norm for all heads of a layer together.", brief=False),
    fixed={
        "layer": HEAD["layer"],
        "module": HEAD["module"],
        "exact": Column.norm(
            "before W_O",
            "Norm with the heads concatenated, before W_O (--concat).",
            "exact",
            reading=NORM_OF.format("the layer's input", "the outputs of its heads"),
        ),
        "exact_out": Column.norm("with W_O", "Norm after the output projection.", "exact_out"),
        "within": WITHIN_COLUMN,
        "sharp_sum": _limit("||W_O|| sum", "||W_O|| times the sum of the heads' sharp bounds."),
        "sharp_rss": _limit(
            "||W_O|| rss", "||W_O|| times the root of the sum of squares of sharp."
        ),
        "theorem3_sum": _limit(
            "theorem 3 sum", "||W_O|| times the sum of the heads' Theorem 3 bounds."
        ),
    },
)


# Bounds for all inputs whose tokens are short: they hold in the ball without a search.
_column_of_tokens = partial(
    Column, domain="all inputs, every ||x_i|| <= R + r", status="certified"
)

BALLS_TABLE = Layout(
    name="bounds.ball",
    title="How large can the norm of a head get near the samples?",
    display=Display(
        about="Within a ball of radius r around a sample's tokens: the largest norm that a search "
        "found, and proven upper bounds.",
        folded=False,
    ),
    fixed={
        **HEAD,
        "r": Column(
            "r", "Radius: ||X' - X||_F over all tokens of a sample.", domain="", needed=True
        ),
        "exact": Column("||J|| at X", "The norm at X.", reading=NEAR),
        "ball_norm": Column.norm(
            "norm found",
            "Largest ||J|| that gradient ascent finds in the ball.",
            "ball_norm",
            domain=BALL,
            status="empirical",
            reading=NEAR,
        ),
        "ball_sharp": Column(
            "ball sharp",
            "Upper bound on ||J|| everywhere in the ball (lipaudit's own).",
            better="lower",
            domain=BALL,
            status="certified",
            formula="sharp + integral_0^r C(rho) d rho, C(rho) >= ||D^2 O[F, F]||_F, ||F||_F = 1",
            reading="Source: ours.\nThe norm at X, and what the second derivative can add to "
            "it on the way to any X' in the ball.\nWhy it exceeds the norm found is "
            "unknown: the bound may be loose, or the search missed a worse "
            f"point.\nNot computed for every head: it {AFFINE_PLAIN}.",
            reduction=Reduction("median", "ball_sharp"),
        ),
        "ball_ratio_max": Column(
            "sharp/found",
            "Largest ball sharp / norm found over samples.",
            domain=BALL,
            status="empirical",
            reduction=Reduction("max", "ball_sharp", per="ball_norm"),
        ),
        "castin": _column_of_tokens(
            "castin at R+r", "The bound castin for tokens of norm up to R + r."
        ),
        "mean_field": _column_of_tokens(
            "mean field at R+r", "The bound mean_field for tokens of norm up to R + r."
        ),
        "hu": Column(
            "hu at r", "The bound of Hu et al. 2024 on the ball.", domain=BALL, status="certified"
        ),
    },
)


# Columns of balls that bound `ball_norm`.
CERTIFIED = ("ball_sharp", "castin", "mean_field", "hu")
# The arrays of the columns of balls: some columns of heads have the same names.
IN_BALLS = {name: f"at_r_{name}" for name in ("ball_norm", *CERTIFIED)}
# Figures of heads that bounds are made of, at X.
INGREDIENTS = ("p_norm", "x_norm", "radius", "softmax_norm_max")
# Values of layers: the columns of their table, with a prefix.
OF_LAYERS = tuple(f"layer_{name}" for name in LAYERS_TABLE.fixed if name not in HEAD)
# The kind of heads without a closed form.
NUMERICAL = "numerical"
