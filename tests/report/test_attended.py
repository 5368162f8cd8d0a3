"""Attention maps that know their tokens: named, and laid over the text or the picture."""

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from lipaudit import schema
from lipaudit.errors import InputError
from lipaudit.measures import layouts
from lipaudit.report.blocks import Heatmap, Passage
from lipaudit.report.charts import draw_svg
from lipaudit.report.sections import draw_attention
from lipaudit.tables import Array, Section
from lipaudit.tables.report import Attended
from tests.report.conftest import keep

P = np.array([[0.5, 0.25, 0.125, 0.125, 0.0], [0.2, 0.2, 0.2, 0.2, 0.2], *np.eye(5)[2:]])
WORDS = ("[CLS]", "<b>good", "film", "##s", "[SEP]")
PATCHES = ("CLS", "patch 0,0", "patch 0,1", "patch 1,0", "patch 1,1")


def picture(side: int = 4) -> str:
    file = io.BytesIO()
    Image.fromarray(np.full((side, side, 3), 200, np.uint8)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


TEXT = Attended(sample="ab" * 8, tokens=WORDS)
IMAGE = Attended(sample="ab" * 8, tokens=PATCHES, grid=(2, 2), first=1, image=picture())


def section(whose: Attended | None) -> Section:
    arrays = {"map@1.3": Array.of(P), "map_tokens@1.3": Array.of(np.array([5, 5]))}
    name = "map@1.3"
    kept = {} if whose is None else {name: whose}
    return layouts()["attention"].section(arrays=arrays, attended=kept)


def test_it_is_kept_in_the_file(report):
    attention = report.section("attention").model_copy(update={"attended": {"map@1.3": IMAGE}})
    kept = keep(report, attention)
    assert schema.loads(schema.dumps(kept)).section("attention").attended == {"map@1.3": IMAGE}
    with pytest.raises(ValueError, match="2 x 2 patches are no 4 tokens"):
        Attended(sample="", tokens=PATCHES[:4], grid=(2, 2), first=1)


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


def test_a_map_of_a_picture_is_laid_over_it():
    whole, received = draw_attention({"": section(IMAGE)})
    assert whole.rows == whole.columns == PATCHES
    assert isinstance(received, Heatmap)
    assert np.array(received.values) == pytest.approx(P.mean(0)[1:].reshape(2, 2))
    assert received.image == IMAGE.image
    assert f"({P.mean(0)[0]:.0%} on other tokens)" in received.title


def test_a_picture_shows_through_where_nothing_is_paid():
    """The veil of a patch is as the root of its share, nine tenths where P is largest."""
    _, received = draw_attention({"": section(IMAGE)})
    veils = re.findall(r"fill: var\(--c1, #d55e00\); fill-opacity: ([\d.]+)", draw_svg(received))
    wanted = 0.9 * np.sqrt(P.mean(0)[1:] / P.mean(0)[1:].max())
    assert [float(veil) for veil in veils] == pytest.approx(wanted, abs=0.01)


def test_a_picture_that_cannot_be_read_is_a_damaged_report():
    damaged = IMAGE.model_copy(update={"image": "iVBO"})
    _, received = draw_attention({"": section(damaged)})
    with pytest.raises(InputError, match="report is damaged"):
        draw_svg(received)
