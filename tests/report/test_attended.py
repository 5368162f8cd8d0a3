"""Attention maps that know their tokens: named, and laid over the text."""

import numpy as np
import pytest

from lipaudit import schema
from lipaudit.measures import layouts
from lipaudit.report.blocks import Passage
from lipaudit.report.charts import draw_svg
from lipaudit.report.sections import draw_attention
from lipaudit.tables import Array, Section
from lipaudit.tables.report import Attended
from tests.report.conftest import keep

P = np.array([[0.5, 0.25, 0.125, 0.125, 0.0], [0.2, 0.2, 0.2, 0.2, 0.2], *np.eye(5)[2:]])
WORDS = ("[CLS]", "<b>good", "film", "##s", "[SEP]")


TEXT = Attended(sample="ab" * 8, tokens=WORDS)


def section(whose: Attended | None) -> Section:
    arrays = {"map@1.3": Array.of(P), "map_tokens@1.3": Array.of(np.array([5, 5]))}
    kept = {} if whose is None else {"map@1.3": whose}
    return layouts()["attention"].section(arrays=arrays, attended=kept)


def test_it_is_kept_in_the_file(report):
    attention = report.section("attention").model_copy(update={"attended": {"map@1.3": TEXT}})
    text = schema.dumps(keep(report, attention))
    assert schema.loads(text).section("attention").attended == {"map@1.3": TEXT}
    # Earlier versions wrote the patches of a picture, too.
    old = text.replace('"tokens": ["[CLS]"', '"grid": [2, 2], "first": 1, "tokens": ["[CLS]"')
    assert old != text
    assert schema.loads(old).section("attention").attended == {"map@1.3": TEXT}


def test_a_map_that_knows_no_tokens_is_drawn_as_it_was():
    (block,) = draw_attention({"": section(None)})
    assert block.title == "Attention map of head 1.3, first sample"
    assert block.rows == block.columns == ("0", "1", "2", "3", "4")


def test_a_map_of_a_text_is_laid_over_it():
    whole, received = draw_attention({"": section(TEXT)})
    assert (whole.title, whole.rows) == ("Attention map of head 1.3, sample abababababab", WORDS)
    assert isinstance(received, Passage)
    assert received.tokens == WORDS
    assert received.shares == pytest.approx(P.mean(0))
    assert "&lt;b&gt;good" in draw_svg(whole)
