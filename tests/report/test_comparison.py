"""The page of a comparison: what it says first, and where each figure is found."""

import csv
import io
import re

import numpy as np
import pytest

from lipaudit.errors import BaselineError
from lipaudit.gate import compare
from lipaudit.gate.verdicts import Verdict
from lipaudit.report import of_comparison, render, terminal
from lipaudit.report.blocks import Table
from lipaudit.report.page.comparison import format_change_limits
from lipaudit.report.page.scorecard import make_scorecard
from lipaudit.report.pictures import Heatmap
from lipaudit.tables import Array
from tests.report.conftest import keep, rename

HEADS = 12
RNG = np.random.default_rng(20)
NORMS = RNG.lognormal(2, 0.4, 64)
EXACT = RNG.lognormal(0, 0.4, (HEADS, 8))


@pytest.fixture
def before(report):
    """A model whose samples and heads are measured one by one."""
    return measured(report, EXACT, NORMS, np.r_[np.ones(30, int), np.zeros(34, int)])


@pytest.fixture
def after(report):
    """Half of all norms, one louder head, three samples broken and ten mended."""
    louder = EXACT * np.exp(np.random.default_rng(21).normal(0, 0.01, EXACT.shape))
    louder[5] *= 10
    robust = np.r_[np.zeros(3, int), np.ones(37, int), np.zeros(24, int)]
    changed = measured(report, louder, NORMS / 2, robust)
    return rename(changed, spec="new", weights_sha256="f" * 64)


def measured(report, exact, norms, robust):
    names = tuple(f"{i:016x}" for i in range(64))
    bounds, jacobian, attack = (report.section(m) for m in ("bounds", "jacobian", "attack"))
    rows = [
        row.replace(exact=float(np.median(line)), converged=True)
        for row, line in zip(bounds.rows, exact, strict=True)
    ]
    sections = (
        bounds.model_copy(
            update={
                "rows": tuple(rows),
                "samples": {"ids": names[:8], "exact_max": tuple(exact.max(0).tolist())},
                "arrays": {"exact": Array.of(exact)},
            }
        ),
        jacobian.model_copy(
            update={
                "rows": tuple(row.replace(converged=64) for row in jacobian.rows),
                "samples": {"ids": names, "norm": tuple(norms.tolist())},
            }
        ),
        attack.model_copy(
            update={
                "rows": (),
                "samples": {
                    "ids": names,
                    "correct": (1,) * 64,
                    "robust@worst,linf,0.1": tuple(robust.tolist()),
                },
            }
        ),
    )
    places = {"ids": names, "place": tuple(f"index {i}" for i in range(64))}
    return report.model_copy(update={"sections": sections, "samples": places})


@pytest.fixture
def subject(before, after):
    return of_comparison(compare([before, after]), [before, after])


def chapter(page, name):
    return next(chapter for chapter in page.chapters if chapter.name == name)


def blocks(page, name, kind):
    return [block for block in chapter(page, name).blocks if isinstance(block, kind)]


def test_it_begins_with_what_changed_regressions_first(subject, before, after):
    page = subject["page"]()
    assert page.title == f"lipaudit: new against {before.run.model.spec}"
    said = {line.label: (line.value, line.text) for line in page.scorecard.lines}
    assert said["model sensitivity, median ‖J‖"][0] == "-50%"
    assert said["model sensitivity, median ‖J‖"][1].startswith("improved ")
    assert said["robust accuracy, linf 0.1"][0] == "+10.9pp"
    words = [line.text.split()[0] for line in page.scorecard.lines]
    order = ["regressed", "improved", "inconclusive", "unchanged"]
    assert words == sorted(words, key=order.index)
    assert said["steepest head of a sample"][1].startswith("regressed ")


def test_figures_over_heads_are_not_called_what_other_figures_of_a_report_are(report, before):
    kept = (*before.sections, report.section("attention"))
    whole = keep(before, *kept)
    alone = {line.label for line in make_scorecard(whole).lines}
    page = of_comparison(compare([whole, whole]), [whole, whole])["page"]()
    both = {line.label for line in page.scorecard.lines}
    assert {"steepest attention head, ‖J‖", "fragile attention rows"} <= alone - both
    assert {"steepest head of a sample", "fragile rows, median head"} <= both - alone


def test_what_stands_out_names_samples_and_heads(subject):
    said = dict(reversed(found) for found in subject["page"]().findings)
    text = " ".join(text for text, _ in subject["page"]().findings)
    assert "Robust accuracy, linf 0.1: 10 of 64 samples gained, 3 lost" in text
    lost = sorted(range(3), key=lambda i: -NORMS[i])
    assert ": " + ", ".join(f"index {i}" for i in lost) + "." in text
    heads = said["heads"]
    assert "1 of 12 changes are proven" in heads
    assert "1.1 +" in heads


def test_samples_that_flipped_stand_with_their_place_the_worst_first(subject):
    _, flipped = blocks(subject["page"](), "samples", Table)
    assert [column.label for column in flipped.columns[:5]] == [
        "sample",
        "place",
        "became",
        "||J||, old",
        "||J||, new",
    ]
    assert len(flipped.columns) == 5  # the steepest head is known of 8 samples
    first, last = flipped.rows[0], flipped.rows[-1]
    worst = max(range(3), key=lambda i: NORMS[i])
    assert first[:3] == (
        f"{worst:016x}"[:12],
        f"index {worst}",
        "robust accuracy, linf 0.1: yes → no",
    )
    assert first[3:5] == pytest.approx((NORMS[worst], NORMS[worst] / 2))
    assert last[2] == "robust accuracy, linf 0.1: no → yes"
    assert len(flipped.rows) == 13


def test_heads_stand_by_how_much_they_moved(subject):
    (heads,) = blocks(subject["page"](), "heads", Table)
    cells = dict(zip([column.label for column in heads.columns], heads.rows[0], strict=True))
    assert (cells["head"], cells["stands"]) == ("1.1", True)
    assert 850 < float(cells["change"].strip("+%")) < 950
    assert cells["exact, new"] == pytest.approx(10 * cells["exact, old"], rel=0.05)
    assert heads.strong == {0}
    maps = blocks(subject["page"](), "heads", Heatmap)
    assert [block.centre for block in maps] == [0.0] * len(maps)
    assert maps[0].values[1][1] == pytest.approx(9.0, rel=0.05)


def test_warnings_stand_first_and_say_what_could_not_be_compared(before, after):
    jacobian = after.section("jacobian")
    loose = jacobian.model_copy(update={"settings": {**jacobian.settings, "tol": 0.1}})
    run = after.run.model_copy(update={"dtype": "float64"})
    changed = after.model_copy(
        update={"run": run, "sections": (after.section("bounds"), loose, after.section("attack"))}
    )
    page = of_comparison(compare([before, changed]), [before, changed])["page"]()
    assert [note.level for note in page.notes[:2]] == ["warning"] * 2
    assert "dtype: float32 became float64" in page.notes[0].text
    assert "settings differ: tol" in page.notes[1].text
    assert "jacobian.norm:median, jacobian.norm:p95" in page.notes[1].text


def test_a_setting_that_was_not_given_is_called_so(before, after):
    jacobian = after.section("jacobian")
    pair = [
        keep(report, jacobian.model_copy(update={"settings": {"target": target}}))
        for report, target in ((before, "loss"), (after, None))
    ]
    with pytest.raises(BaselineError, match="target loss became not given"):
        compare(pair)


def test_it_fits_a_screen(subject):
    text = terminal.render(subject["screen"](), width=80).decode()
    lines = text.splitlines()
    assert 20 < len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert "--details" in text


def test_a_brief_of_it_has_the_regressions_first(subject):
    lines = render(subject, "brief").decode().splitlines()
    assert len(lines) <= 15
    texts = [line.split("|")[3].split() for line in lines if line.startswith("|")][2:]
    words = [words[0] for words in texts if words]
    assert words[0] == "regressed"
    assert words == sorted(words, key=["regressed", "improved", "inconclusive"].index)


def test_csv_has_a_row_for_every_sample(subject):
    rows = list(csv.DictReader(io.StringIO(render(subject, "csv").decode())))
    assert len(rows) == 64
    by_place = {row["place"]: row for row in rows}
    for i in (0, 40, 63):
        row = by_place[f"index {i}"]
        assert float(row["jacobian.norm.old"]) == NORMS[i]
        assert float(row["jacobian.norm.new"]) == NORMS[i] / 2
    assert by_place["index 0"]["attack.robust@worst,linf,0.1.old"] == "1.0"
    assert (by_place["index 0"]["lost"], by_place["index 0"]["gained"]) == ("1", "0")
    assert by_place["index 31"]["attack.robust@worst,linf,0.1.new"] == "1.0"


def test_every_other_report_stands_against_the_first(before, after):
    third = rename(after, spec="third", weights_sha256="e" * 64)
    reports = [before, after, third]
    page = of_comparison(compare(reports), reports)["page"]()
    names = [chapter.name for chapter in page.chapters]
    assert [n for n in names if n[-2:] in ("-1", "-2")] == [
        f"{part}-{i}" for i in (1, 2) for part in ("change", "samples", "heads")
    ]
    labels = [line.label for line in page.scorecard.lines]
    assert {f"model sensitivity, median ‖J‖, {name}" for name in ("new", "third")} <= set(labels)


def test_equal_reports_have_nothing_to_tell(before):
    page = of_comparison(compare([before, before]), [before, before])["page"]()
    assert {line.text.split()[0] for line in page.scorecard.lines} == {"unchanged"}
    assert "both reports are of the same weights" in page.notes[0].text
    assert any("none of 12 changes are proven" in text for text, _ in page.findings)


def test_of_many_balls_those_are_told_in_which_most_was_lost(before, after):
    def with_balls(report, lost):
        section = report.section("attack")
        columns = {
            f"robust@worst,linf,{eps}": tuple(int(not (lost and i < eps)) for i in range(64))
            for eps in (1, 2, 3, 4, 5)
        }
        samples = {"ids": section.samples["ids"], "correct": (1,) * 64} | columns
        return keep(report, section.model_copy(update={"samples": samples}))

    reports = [with_balls(before, False), with_balls(after, True)]
    said = [text for text, _ in of_comparison(compare(reports), reports)["page"]().findings]
    assert [text.partition(":")[0] for text in said[:3]] == [
        f"Robust accuracy, linf {eps}" for eps in (5, 4, 3)
    ]
    assert said[0].endswith("index 0, index 1, index 2 and 2 more.")


def test_a_change_is_that_of_the_two_figures_beside_it(report, before):
    norms = NORMS * np.where(np.arange(64) % 3, 0.5, 2)
    after = measured(report, EXACT, norms, np.ones(64, int))
    page = of_comparison(compare([before, after]), [before, after])["page"]()
    said = {line.label: (line.value, line.text) for line in page.scorecard.lines}
    value, text = said["model sensitivity, median ‖J‖"]
    change = 100 * (np.median(norms) / np.median(NORMS) - 1)
    assert (
        float(value.rstrip("%")) == pytest.approx(change, rel=1e-2) != pytest.approx(-50, rel=0.1)
    )
    assert "(paired -50%: " in text


def test_what_regressed_is_called_by_its_words(subject):
    counted = subject["page"]().outcome.text
    assert "Regressed: " in counted
    assert not re.search(r"\w\.\w|:\w", counted)


def test_limits_without_an_upper_end_are_none_only_where_there_is_no_lower_one_either():
    """A norm that was 0 in a sample grew without end: that is seen, not unknown."""
    words = {"rule": "", "metric": "bounds.exact:each", "status": "regressed", "unit": "%"}
    head = Verdict(**words, low=0.5, high=float("inf"))
    assert format_change_limits(head) == "+50% to +inf"
    assert format_change_limits(head.model_copy(update={"low": -1.0})) == "too few samples"


def test_a_finding_leads_to_its_chapter_by_its_name_in_the_contents(before, after):
    text = render(of_comparison(compare([before, after]), [before, after]), "html").decode()
    assert '<a class="source" href="#samples">Samples</a>' in text
