"""Radii, and the names of trials in columns and rules."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lipaudit.errors import UsageError
from lipaudit.measures import layouts
from lipaudit.measures.attack import ATTACK_TABLE
from lipaudit.tables import Column
from lipaudit.tables.trials import (
    Radius,
    TrialKey,
    parse_budget,
    parse_column,
    parse_radius,
    parse_range,
    worst_cases,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2/255", Fraction(2, 255)),
        ("1.1/255", Fraction(11, 2550)),
        (" 8 / 255 ", Fraction(8, 255)),
        ("0.03", Fraction(3, 100)),
        (".5", Fraction(1, 2)),
        ("1e-3", Fraction(1, 1000)),
        ("0", Fraction(0)),
    ],
)
def test_a_radius_is_read_exactly(text, value):
    radius = parse_radius(text)
    assert radius == Radius("any", value)
    assert radius.text == text.strip()
    assert float(radius) == float(value)


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ("0:8/255:9", ["0", *(f"{i}/255" for i in range(1, 9))]),
        ("1/255:2/255:3", ["1/255", "1.5/255", "2/255"]),
        ("0:8/255:4", ["0", "8/765", "16/765", "8/255"]),
        ("0:0.1:5", ["0", "0.025", "0.05", "0.075", "0.1"]),
        ("0.5 : 12 : 2", ["0.5", "12"]),
        ("1:4:4", ["1", "2", "3", "4"]),
        ("2words", ["2words"]),
    ],
)
def test_a_range_of_radii_is_exact_and_has_both_ends(text, texts):
    radii = parse_range(text)
    assert [radius.text for radius in radii] == texts
    assert [parse_budget(radius.text) for radius in radii] == [*radii]
    assert len({b.value - a.value for a, b in pairwise(radii)}) <= 1


HUGE = ["1e309", "1e400", "1e99999", "9" * 309, "1e200/1e-200"]
"""They are too large for a float."""


@pytest.mark.parametrize(
    "text", ["", "-1/255", "2/0", "8/", "eps", "nan", "inf", "1/2/3", "0x1", *HUGE]
)
def test_what_is_no_radius_is_named(text):
    with pytest.raises(UsageError, match="is not a radius") as caught:
        parse_radius(text)
    assert repr(text) in caught.value.message
    assert "2/255" in caught.value.advice


@pytest.mark.parametrize("text", ["0:1e400:3", f"{'9' * 309}words"])
def test_radii_that_are_too_large_are_refused(text):
    with pytest.raises(UsageError, match="is not a (radius|range)"):
        parse_range(text)


def test_the_largest_float_is_a_radius():
    assert float(parse_radius("1.7e308")) == 1.7e308


KEY = TrialKey.parse("pgd,linf,2/255")
NAMES = st.from_regex(r"[a-z][a-z0-9-]*", fullmatch=True)
SPELLINGS = st.sampled_from(["0", "0.1", ".5", "2/255", "1.1/255", "1e-3", "8 / 255"])


@given(NAMES, NAMES, SPELLINGS, NAMES)
def test_what_is_written_is_read_back(attack, norm, text, kind):
    trial = TrialKey(attack, norm, parse_radius(text))
    assert TrialKey.parse(str(trial)) == trial
    again = parse_column(trial.column(kind))
    assert again == (kind, trial)
    assert again[1].radius.text == text


@pytest.mark.parametrize(
    "name",
    ["margin", "robust@pgd", "robust@pgd,linf", "robust@a,l2,x", "certified@2/255", "x@a,b,l2,2"],
)
def test_a_column_of_no_trial_keeps_its_name(name):
    assert parse_column(name) == (name, None)


def test_trials_are_equal_whatever_the_spelling_of_the_radius():
    half, same, other = (TrialKey.parse(f"pgd,linf,{eps}") for eps in ("0.5", "1/2", "0.25"))
    assert half == same
    assert len({half, same, other}) == 2


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("pgd linf 2/255 4/510 attack=pgd norm=linf eps=2/255 eps=4/510", True),
        ("fgsm l2 2 attack=linf norm=pgd eps=pgd attack=2/255 seed=pgd", False),
    ],
)
def test_words_that_name_a_trial_or_another(words, named):
    assert {KEY.matches(word) for word in (*words.split(), *[""] * (not named))} == {named}


def test_rows_and_columns_know_their_trial():
    row = ATTACK_TABLE.row(attack="pgd", norm="linf", eps=2 / 255, eps_text="2/255")
    assert row.key == KEY
    old = ATTACK_TABLE.row(attack="pgd", norm="linf", eps=2 / 255)
    assert str(old.key) == "pgd,linf,0.007843"
    section, unknown = layouts()["attack"].section(), "speed@pgd,linf,2/255"
    assert section.sample_column("robust@pgd,linf,2/255").label == "robust"
    assert section.sample_column(unknown) == Column(unknown, "")
    ball = TrialKey("", "linf", parse_radius("2/255"))  # a trial without an attack
    assert str(ball) == "linf,2/255"
    assert parse_column(ball.column("certified")) == ("certified", ball)
    matched = {word: ball.matches(word) for word in ("linf", "eps=2/255", "pgd")}
    assert matched == {"linf": True, "eps=2/255": True, "pgd": False}
    for norm, eps, said in (("linf", "2/255", "linf 2/255"), ("words", "2", "2 words"),
                            ("words", "1", "1 word")):  # fmt: skip
        assert TrialKey("pgd", norm, parse_radius(eps)).ball == said


def test_a_worst_case_has_every_trial_inside_its_ball():
    keys = [
        TrialKey(name, "linf", parse_radius(eps))
        for name, eps in (("pgd", "4/255"), ("autoattack", "2/255"))
    ]
    large, small = (TrialKey("worst", "linf", parse_radius(eps)) for eps in ("4/255", "2/255"))
    assert worst_cases(keys) == {large: keys, small: keys[1:]}
