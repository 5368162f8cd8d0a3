"""The chapter on which layers explain a change: sentence, table, picture, words."""

from __future__ import annotations

import numpy as np
import pytest

from lipaudit.cli.tools import known
from lipaudit.gate.attribution import attribution
from lipaudit.report import render, topics
from lipaudit.report.blocks import Forest, Notes, Paragraph, Series, Table
from lipaudit.report.cells import pretty
from lipaudit.report.draw import forest, plots
from lipaudit.report.draw.marks import marks
from lipaudit.report.page.comparison.attribution import page
from lipaudit.results import Column

ENDS = {"old": "A", "new": "B", "start": "pixels", "target": "logits", "same": 3}
EFFECTS = {"embed": -0.1, "blocks.0": 0.6, "blocks.1": 0.2}


def shown(effects=EFFECTS, samples=4, interaction=0.1):
    """A model of layers with these effects, each a little different from sample to sample."""
    noise = 1 + 0.05 * np.cos(np.arange(samples))
    parts = np.array([effect * noise for effect in effects.values()])
    total = parts.sum(0) + interaction
    facts = [{"layer": name, "entries": 9, "moved": 0.25} for name in effects]
    norms = {
        "old": np.ones(samples),
        "new": np.exp(total),
        "swapped": np.exp(parts),
        "undone": np.exp(total - parts),
        "linear_old": parts,
    }
    ends = ENDS | {"samples": tuple(map(str, range(samples)))}
    return attribution(ends, facts, norms)


def blocks(attributed, kind):
    (chapter,) = page(attributed).chapters
    return [block for block in chapter.blocks if isinstance(block, kind)]


def test_the_sentence_names_what_changed_and_the_layers_that_did_it():
    first, _ = blocks(shown(), Paragraph)
    change = 0.7 * (1 + 0.05 * np.cos(np.arange(4)).mean()) + 0.1
    assert f"pixels to logits changed by {np.expm1(change):+.1%}" in first.text
    assert "3 of 6 layers differ" in first.text
    assert "The largest shares: blocks.0 75%, blocks.1 25%." in first.text
    assert "embed" not in first.text


def test_the_table_has_the_largest_first_then_the_rest_and_all():
    (table,) = blocks(shown(), Table)
    assert [row[0] for row in table.rows] == [
        "blocks.0", "blocks.1", "embed", "rest: no layer alone", "all layers",
    ]  # fmt: skip
    shares = [row[1] for row in table.rows]
    assert shares[4] == 1.0
    assert sum(shares[:4]) == pytest.approx(1)
    assert table.rows[3][1] == pytest.approx(0.1 / shown().change.mean)
    labels = [column.label for column in table.columns]
    assert {row[labels.index("linear, new")] for row in table.rows} == {None}
    assert table.rows[0][labels.index("moved")] == 0.25


def test_of_many_layers_the_largest_are_shown_and_all_are_kept():
    many = shown({f"layer {i}": 0.01 * (i + 1) for i in range(30)})
    top, every = blocks(many, Table)
    assert (len(top.rows), len(every.rows)) == (22, 32)
    assert (top.rows[0][0], every.rows[0][0]) == ("layer 29", "layer 0")
    assert (top.folded, every.folded) == (False, True)
    (forest,) = blocks(many, Forest)
    assert len(forest.bars) == 21


def test_without_shares_the_picture_is_of_logarithms():
    (forest,) = blocks(shown(), Forest)
    assert forest.x.label == "share"
    assert sum(forest.series[0].x) == pytest.approx(1)
    even = shown({"a": 0.1, "b": -0.1}, interaction=0.0)
    assert even.rest.share is None
    (forest,) = blocks(even, Forest)
    assert forest.x.label == "ln(new / old)"
    assert [note.code for note in blocks(even, Notes)[0].notes] == ["no-change"]
    first, _ = blocks(even, Paragraph)
    assert "largest shares" not in first.text


@pytest.mark.parametrize("format", ["html", "markdown", "table", "json"])
def test_every_format_names_the_layers(format):
    written = render(shown(), format).decode()
    assert all(name in written for name in EFFECTS)


def test_every_word_of_it_is_explained():
    (table,) = blocks(shown(), Table)
    (forest,) = blocks(shown({"a": 0.1, "b": -0.1}, interaction=0.0), Forest)
    words = [pretty(column.label) for column in (*table.columns, forest.x)]
    assert [word for word in words if not topics.explained(word, known())] == []


X = Column("share", "", format=".0%")
FOREST = Forest(
    "what <b>",
    X,
    ("first", "<i>second", "third"),
    (
        Series(
            "both",
            (0.5, -0.25, 0.0),
            (0.0, 1.0, 2.0),
            left=(0.4, None, -0.1),
            right=(0.6, None, 0.1),
        ),
        Series("one", (0.3,), (1.0,)),
    ),
)


def test_bars_lie_on_their_side_of_0():
    lines = list(forest.lines(FOREST, 30))
    assert lines == [
        "first       50%            │████████████████████",
        "<i>second  -25%  ██████████│",
        "third        0%            │",
    ]


def test_what_is_pointed_at_says_its_figure():
    first, second, third = marks(FOREST)
    assert (first.text, first.x) == ("first, both: 50% (40% to 60%)", (0.0, 0.5))
    assert (second.text, second.x) == ("<i>second, both: -25%", (0.0, -0.25))
    assert (third.text, third.point, third.y) == ("<i>second, one: 30%", True, (1.0, 1.0))


def test_the_picture_is_an_element_with_its_figures_in_words():
    element = plots.svg(FOREST)
    assert element.startswith('<svg role="img" aria-label="what &lt;b&gt;: share of first 50%')
    assert "&lt;i&gt;second" in element
    assert element == plots.svg(FOREST)
    assert "<b>" not in element
