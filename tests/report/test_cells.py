import math

import pytest

from lipaudit.measures import layouts
from lipaudit.report import cells
from lipaudit.tables import Column


def column(**how: object) -> Column:
    return Column(label="x", meaning="", **how)


@pytest.mark.parametrize(
    ("value", "how", "text"),
    [
        (None, {}, "–"),
        (math.nan, {}, "NaN"),
        (math.inf, {"unit": "×"}, "inf×"),
        (-math.inf, {}, "-inf"),
        (1.2, {}, "1.20"),
        (130.0, {"unit": "×"}, "130×"),
        (1.2, {"format": "+.3g"}, "+1.20"),
        (-130.0, {"format": "+.3g"}, "-130"),
        (9000.0, {}, "9.00e3"),
        (1.5e-7, {}, "1.50e-7"),
        (1e300, {}, "1.00e300"),
        (0.0, {}, "0.00"),
        (True, {"format": ""}, "yes"),
        (False, {"format": "d"}, "no"),
        (3, {"format": "d"}, "3"),
        (3.0, {"format": "d"}, "3"),
        (3.5, {"format": "d"}, "3.5"),
        (0.9375, {"format": ".1%"}, "93.8%"),
        (2.0, {"format": ".1f", "unit": "s"}, "2.0 s"),
        ("1e411×", {"unit": "×"}, "1e411×"),
        ("a\x1b[1m\n", {"format": "s"}, "a\\x1b[1m\\x0a"),
    ],
)
def test_text_of_a_value(value, how, text):
    assert cells.format_value(value, column(**how)) == text


def test_columns_that_stand_alike_share_one_note():
    marks, notes = cells.list_footnotes(
        [column(format="s"), column(), column(unit="s", domain="")]
    )
    assert marks == ["", "", ""]
    assert notes == ["exact at X"]


def test_columns_that_stand_apart_are_marked():
    columns = [column(), column(status="empirical", domain="ball"), column(format="d"), column()]
    marks, notes = cells.list_footnotes(columns)
    assert marks == ["ᵃ", "ᵇ", "", "ᵃ"]
    assert notes == ["ᵃ exact at X", "ᵇ empirical in the ball"]


@pytest.mark.parametrize("kind", layouts().values(), ids=layouts())
def test_marks_suffice_for_every_row_type(kind):
    columns = list(kind.columns.values())
    marks, notes = cells.list_footnotes(columns)
    standings = {cells.describe_standing(c) for c in columns} - {""}
    assert len(notes) == len(standings)
    assert len(set(marks) - {""}) in (0, len(standings))
