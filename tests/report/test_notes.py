"""Where notes stand: what spoils figures above them, and what is alike in one."""

import pytest

from lipaudit.gate import compare, judge
from lipaudit.report import of_comparison, of_judgement, of_reports, render
from lipaudit.report.page.document import make_page
from lipaudit.report.page.facts import merge_notes
from lipaudit.tables import Note
from tests.report.conftest import keep

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


def only(report, measure):
    kept = tuple(s for s in report.sections if s.measure == measure)
    return keep(report, *kept)


@pytest.mark.parametrize("format", PAGES)
@pytest.mark.parametrize("measure", ["bounds", "attention", "jacobian", "attack", "scaling"])
def test_a_warning_stands_above_the_figures_of_its_section(spoiled, format, measure):
    text = render(of_reports(only(spoiled, measure)), format).decode()
    chapter = make_page(only(spoiled, measure)).chapters[0].title
    assert 0 < text.find(RANDOM.text) < text.rfind(chapter)
    assert text.count(RANDOM.text) == 1


@pytest.mark.parametrize("format", PAGES)
def test_what_is_said_of_all_measures_is_said_once_above_them(spoiled, format):
    text = render(of_reports(spoiled), format).decode().rpartition("</nav>")[2]  # its contents
    findings = text.find("What stands out")
    for note in (RANDOM, FEWER):
        assert text.count(note.text) == 1
        assert 0 < text.find(note.text) < findings
    assert text.count(STUCK.text) == 1
    assert 0 < text.find(STUCK.text) < findings


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


def test_notes_that_differ_in_one_word_are_one():
    texts = [f"no {name} for 12 heads: needs one input" for name in ("castin", "hu", "sharp")]
    notes = [Note(level="info", code="no-bound", text=text) for text in (*texts, "other words")]
    assert [note.text for note in merge_notes(notes)] == [
        "no castin, hu, sharp for 12 heads: needs one input",
        "other words",
    ]


def test_many_notes_alike_are_counted():
    notes = [Note(level="info", code="c", text=f"layer {i}: none") for i in range(9)]
    (note,) = merge_notes(notes)
    assert note.text == "layer 0, 1, 2, 3, 4, 5, ... (9 in all): none"


@pytest.mark.parametrize(
    ("level", "code", "text"),
    [("warning", "c", "layer 1 fails"), ("info", "d", "layer 1 fails"), ("info", "c", "1 fails")],
)
def test_notes_of_another_kind_stay_apart(level, code, text):
    notes = [Note(level="info", code="c", text="layer 0 fails")]
    notes.append(Note(level=level, code=code, text=text))
    assert merge_notes(notes) == tuple(notes)


def test_what_a_comparison_leaves_out_is_said_once_for_a_reason(spoiled, report):
    attention = report.section("attention").model_copy(update={"settings": {"k": 3}})
    layers = report.section("bounds.layers")
    other = keep(report, layers, attention)
    text = render(of_comparison(compare([report, other]), [report, other]), "table").decode()
    words = " ".join(text.split())
    assert words.count("gamma 0.1 became unset; k 10 became 3") == 1
    assert "attention.g1:median, attention.softmax_norm:median, attention.intermediate" in words
    assert "has it: bounds, bounds.ball, jacobian, attack, certify" in words
