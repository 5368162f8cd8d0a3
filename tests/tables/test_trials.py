"""Radii, and the names of trials in columns and rules."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lipaudit.errors import UsageError
from lipaudit.measures import layouts
from lipaudit.measures.attack import ATTACK_TABLE
from lipaudit.tables import Column
from lipaudit.tables.trials import Radius, TrialKey, parse_column, parse_radius


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


@pytest.mark.parametrize("text", ["", "-1/255", "2/0", "8/", "eps", "nan", "inf", "1/2/3", "0x1"])
def test_what_is_no_radius_is_named(text):
    with pytest.raises(UsageError, match="is not a radius") as caught:
        parse_radius(text)
    assert repr(text) in caught.value.message
    assert "2/255" in caught.value.advice


def key(text="pgd,linf,2/255"):
    return TrialKey.parse(text)


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
    assert key("pgd,linf,0.5") == key("pgd,linf,1/2")
    assert len({key("pgd,linf,0.5"), key("pgd,linf,1/2"), key("pgd,linf,0.25")}) == 2


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("pgd linf 2/255 4/510 attack=pgd norm=linf eps=2/255 eps=4/510", True),
        ("fgsm l2 2 attack=linf norm=pgd eps=pgd attack=2/255 seed=pgd", False),
    ],
)
def test_words_that_name_a_trial_or_another(words, named):
    assert {key().matches(word) for word in words.split()} == {named}
    assert not key().matches("")


def test_the_row_of_a_trial_knows_it():
    row = ATTACK_TABLE.row(attack="pgd", norm="linf", eps=2 / 255, eps_text="2/255")
    assert row.key == key()
    old = ATTACK_TABLE.row(attack="pgd", norm="linf", eps=2 / 255)
    assert str(old.key) == "pgd,linf,0.007843"


def test_the_column_of_a_trial_reads_as_its_kind():
    section, unknown = layouts()["attack"].section(), "speed@pgd,linf,2/255"
    assert section.sample_column("robust@pgd,linf,2/255").label == "robust"
    assert section.sample_column(unknown) == Column(unknown, "")


def test_a_ball_is_a_trial_without_an_attack():
    ball = TrialKey("", "linf", parse_radius("2/255"))
    assert str(ball) == "linf,2/255"
    assert parse_column(ball.column("certified")) == ("certified", ball)
    matched = {word: ball.matches(word) for word in ("linf", "eps=2/255", "pgd")}
    assert matched == {"linf": True, "eps=2/255": True, "pgd": False}


@pytest.mark.parametrize(
    ("norm", "eps", "said"),
    [("linf", "2/255", "linf 2/255"), ("words", "2", "2 words"), ("words", "1", "1 word")],
)
def test_a_ball_is_named_as_people_say_it(norm, eps, said):
    assert TrialKey("pgd", norm, parse_radius(eps)).ball == said
