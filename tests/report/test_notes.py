"""Where notes stand: what spoils figures is above them, once."""

import pytest

from lipaudit.gate import compare, judge
from lipaudit.report import of_comparison, of_judgement, of_reports, render
from lipaudit.tables import Note
from tests.report.conftest import keep

pytestmark = pytest.mark.usefixtures("blank_charts")

PAGES = ("table", "markdown", "html")
RANDOM = Note(level="warning", code="random-weights", text="the weights are random numbers")
FEWER = Note(level="info", code="fewer-samples", text="only a handful of samples were there")
STUCK = Note(level="warning", code="not-converged", text="seven norms are lower estimates")


@pytest.fixture
def spoiled(report):
    """A report whose every measure is of random weights, and whose heads did not converge."""

    def noted(section):
        if "." in section.measure:
            return section
        own = (STUCK,) if section.measure == "bounds" else ()
        return section.model_copy(update={"notes": (RANDOM, FEWER, *section.notes, *own)})

    return keep(report, *tuple(map(noted, report.sections)))


@pytest.mark.parametrize("format", PAGES)
def test_what_is_said_of_all_measures_is_said_once_above_them(spoiled, format):
    text = render(of_reports(spoiled), format).decode().rpartition("</nav>")[2]  # its contents
    for note in (RANDOM, FEWER, STUCK):
        assert text.count(note.text) == 1
        assert 0 < text.find(note.text) < text.find("clean accuracy")
    alone = render(keep(spoiled, spoiled.section("attack")), format).decode()
    assert alone.count(RANDOM.text) == 1
    assert 0 < alone.find(RANDOM.text) < alone.find("clean accuracy")


@pytest.mark.parametrize("format", PAGES)
def test_warnings_stand_above_reports_side_by_side_and_what_changed(spoiled, report, format):
    report, spoiled = (
        keep(each, each.section("bounds"), each.section("jacobian")) for each in (report, spoiled)
    )
    for subject in (
        of_reports(report, spoiled),
        of_comparison(compare([report, spoiled]), [report, spoiled]),
    ):
        text = render(subject, format).decode().rpartition("</nav>")[2]
        assert 0 < text.find(RANDOM.text) < text.find("What do the words mean")


@pytest.mark.parametrize("format", ["text", *PAGES])
def test_a_warning_stands_above_the_verdicts(spoiled, report, format):
    judgement = of_judgement(judge(spoiled, report))
    text = render(judgement, format).decode()
    assert all(RANDOM.text in render(judgement, name).decode() for name in ("json", "junit"))
    assert 0 < text.find(RANDOM.text) < text.find("jacobian.norm:median")


def test_what_a_comparison_leaves_out_is_said_once_for_a_reason(spoiled, report):
    attention = report.section("attention").model_copy(update={"settings": {"k": 3}})
    layers = report.section("bounds.layers")
    other = keep(report, layers, attention)
    text = render(of_comparison(compare([report, other]), [report, other]), "table").decode()
    words = " ".join(text.split())
    metrics = ", ".join(f"attention.{n}:median" for n in ("g1", "softmax_norm", "intermediate"))
    assert words.count(f"gamma 0.1 became unset; k 10 became 3: {metrics}") == 1
    for measure in ("bounds", "bounds.ball", "jacobian", "attack", "certify"):
        assert f"has it: {measure} " in words
