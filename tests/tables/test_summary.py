"""Headlines that a section declares: their rows, their order, and which of equal ones counts."""

import pytest

from lipaudit.tables import Column, Layout
from lipaudit.tables.columns import ACCURACY, limit_columns
from lipaudit.tables.summary import Headline, describe_figure, find_figures, summarise
from tests.gate import cases

SHARE = Column.share("kept", "Share of the samples that keep.", status="estimate")


def make_layout(*headlines: Headline, name: str = "heat") -> Layout:
    fixed = {"part": Column.text("part", "The part."), "kept": SHARE, **limit_columns("kept")}
    return Layout(name=name, headlines=headlines, fixed=fixed)


def summarise_rows(headline: Headline, *rows: dict) -> list:
    layout = make_layout(headline)
    samples = {"ids": tuple("abcd")}
    section = layout.section(rows=tuple(layout.row(**row) for row in rows), samples=samples)
    return list(summarise(cases.report(section), {"heat": layout}).rows)


KEPT = Headline(name="kept", column="kept", label="kept heat", sentence="{value:.0%} keep.")


def test_a_column_is_a_figure_with_its_limits_samples_and_description():
    (row,) = summarise_rows(KEPT, {"part": "all", "kept": 0.5, "kept_low": 0.2, "kept_high": 0.8})
    assert (row.name, row.metric, row.figure) == ("kept", "heat.kept", "kept heat")
    assert (row.value, row.low, row.high, row.samples) == (0.5, 0.2, 0.8, 4)
    assert row.text == "95% CI 20.0 to 80.0%, 4 samples"
    assert row.sentence == "50% keep."
    column = describe_figure(row)
    assert (column.label, column.better, column.status) == ("kept heat", "higher", "estimate")
    assert (column.meaning, column.format, column.domain) == (SHARE.meaning, ".1%", "at X")


def test_several_rows_are_figures_by_their_names_and_none_is_lost():
    rows = summarise_rows(KEPT, {"part": "a", "kept": 0.5}, {"part": "b", "kept": 0.25})
    assert [row.figure for row in rows] == ["kept heat, a", "kept heat, b"]
    assert [row.metric for row in rows] == ["heat.kept@part=a", "heat.kept@part=b"]
    assert summarise_rows(KEPT, {"part": "a"}) == []  # nothing was measured


def test_of_equal_figures_the_first_place_counts_and_tens_are_sorted_by_balls():
    fixed = {
        "norm": Column.text("norm", "Norm."),
        "eps": Column("eps", "Radius.", format=".4g"),
        **{name: ACCURACY[name] for name in ("eps_text", "samples", "robust")},
    }
    layouts = {}
    sections = []
    for name, place, share, radii in (
        ("late", 21, 0.1, ("2/255", "0.5")),
        ("early", 20, 0.9, ("4/510", "0.25")),  # the first is 2/255 in another notation
    ):
        headline = Headline(name="robust", column="robust", label="robust", place=place)
        layouts[name] = Layout(name=name, headlines=(headline,), fixed=fixed)
        rows = []
        for text in radii:
            ball = {"norm": "linf", "eps": 0.0, "eps_text": text}
            rows.append(layouts[name].row(**ball, samples=4, robust=share))
        sections.append(layouts[name].section(rows=tuple(rows)))
    summary = summarise(cases.report(*sections), layouts)
    shown = [(row.metric, row.value) for row in find_figures(summary, "robust")]
    assert shown == [
        ("early.robust@linf,4/510", 0.9),
        ("early.robust@linf,0.25", 0.9),
        ("late.robust@linf,0.5", 0.1),
    ]


@pytest.mark.parametrize("label", ["", "warm"])
def test_a_headline_without_a_label_is_on_no_scorecard(label):
    rows = summarise_rows(
        Headline(name="kept", column="kept", label=label), {"part": "all", "kept": 1.0}
    )
    assert [row.figure for row in rows] == [label] * bool(label)
