"""The page of a training: where each figure stands, and when it changed."""

from __future__ import annotations

import csv
import json

import pytest
from typer.testing import CliRunner

from lipaudit.cli.commands import build
from lipaudit.report import RENDERERS, of_history, render
from lipaudit.report.blocks import Curve, Heatmap, Table
from lipaudit.report.page.history import courses, spark
from lipaudit.results.history import History, Point
from lipaudit.results.summary import Accuracy, Head, Heads, Norms, Summary

EMPTY = History(lipaudit="0", created="now", model="m", data="d", measures={"jacobian": {}})


def norm(value: float, **more: object) -> Summary:
    how = {"start": "pixels", "end": "logits", "norm": "2", "sample": "", "samples": 4}
    return Summary(norms=Norms(median=value, p95=value, max=value, converged=4, **how), **more)


def accuracy(share: float, low: float, high: float) -> Summary:
    one = Accuracy(kind="clean", share=share, low=low, high=high, samples=40)
    return Summary(accuracy=(one,))


def trained(*summaries: Summary, **known: object) -> History:
    points = (
        Point(step=100 * i, time="now", seconds=1.0, summary=each, **known)
        for i, each in enumerate(summaries)
    )
    return EMPTY.with_points(points)


def findings(history: History) -> list[str]:
    return [text for text, _ in of_history(history)["page"]().findings]


def test_the_largest_change_is_named_with_its_steps():
    history = trained(*map(norm, (1.0, 1.1, 4.4, 5.0)))
    (said,) = findings(history)
    assert said.startswith("Largest changes from step 100 to 200: Jacobian norm, median, 1.10 to ")
    assert "4.40 (×4.00)" in said
    assert findings(trained(*map(norm, (1.0, 1.1, 1.2, 1.3)))) == []
    assert findings(trained(norm(2.0))) == []


def test_a_change_of_accuracy_within_its_limits_is_no_finding():
    within = trained(accuracy(0.5, 0.35, 0.65), accuracy(0.7, 0.54, 0.82))
    beyond = trained(accuracy(0.3, 0.18, 0.45), accuracy(0.7, 0.54, 0.82))
    assert findings(within) == []
    assert findings(beyond) == [
        "Largest changes from step 0 to 100: clean accuracy, 30.0% to 70.0%."
    ]


def test_the_scorecard_is_of_the_last_step_beside_the_first_and_the_best():
    page = of_history(trained(*map(norm, (2.0, 1.0, 3.0))))["page"]()
    line = page.scorecard.lines[0]
    assert (line.label, line.value) == ("Jacobian norm, median", 3.0)
    assert line.text == "▅▁█ first 2.00; lowest 1.00 at 100"


def test_a_long_course_is_thinned_out_from_its_end():
    assert spark([float(i) for i in range(1000)]) == "▁▁▂▂▃▃▄▄▅▅▆▆▇▇██"
    assert spark((1.0, float("nan"), 2.0)) == "▁ █"
    assert spark((1.0, 1.0)) == "▁▁"


def test_curves_have_every_point_and_its_limits():
    history = trained(accuracy(0.3, 0.1, 0.5), Summary(), accuracy(0.5, 0.3, 0.7))
    (course,) = courses(history)
    assert (course.steps, course.low, course.high) == ((0, 200), (0.1, 0.3), (0.5, 0.7))
    (curve,) = curves(history)
    assert (curve.series[0].x, curve.series[0].low) == ((0.0, 200.0), (0.1, 0.3))


def curves(history: History) -> list[Curve]:
    page = of_history(history)["page"]()
    return [b for chapter in page.chapters for b in chapter.blocks if isinstance(b, Curve)]


def test_a_curve_that_diverges_has_a_logarithmic_axis():
    """On a linear one 2 and 3 would share the lowest of 14 lines with 90 on the first."""
    history = trained(*map(norm, (2.0, 3.0, 90.0)))
    (curve,) = curves(history)
    assert (curve.logs, curve.title) == ((False, True), "Jacobian norm of the model, log scale")
    text = render(of_history(history), "table").decode()
    drawn = text[text.index("log scale") :].splitlines()[1:15]
    assert [i for i, line in enumerate(drawn) if "+" in line] == [0, 12, 13]
    assert [c.logs for c in curves(trained(norm(2.0), norm(3.0)))] == [(False, False)]


def test_heads_are_set_over_steps_in_their_order():
    heads = Heads(steepest=(Head(layer=0, head=0, exact=1.0),), median=1.0, heads=3)
    known = {"2.0": 3.0, "10.1": 4.0, "2.10": 5.0}
    history = trained(Summary(heads=heads), heads=known)
    page = of_history(history.with_points([Point(step=7, time="", seconds=1.0)]))["page"]()
    (shown,) = [b for c in page.chapters for b in c.blocks if isinstance(b, Heatmap)]
    assert shown.rows == ("2.0", "2.10", "10.1")
    assert shown.place("2.10", "0") == "2.10, step 0"
    text = render(of_history(history), "table").decode()
    assert "head down, step across" in text
    assert "head \\\\ step" in render(of_history(history), "markdown").decode()
    drawing = render(of_history(history), "html").decode()
    assert "3 heads x 1 steps, largest 5.00 at 2.10, step 0" in drawing
    assert (shown.columns, shown.values) == (("0",), ((3.0,), (5.0,), (4.0,)))


def test_a_measurement_that_failed_is_said_first_and_left_out_of_the_curves(history):
    page = of_history(history)["page"]()
    assert page.notes[0].text.startswith("step 200: bounds failed: no ")
    (table,) = [b for c in page.chapters for b in c.blocks if isinstance(b, Table)]
    assert [row[0] for row in table.rows] == [0, 100, 200, 300]
    assert set(table.rows[2][4:]) == {None}
    assert dict(page.facts)["cost"] == "7.5 s, 12.5% of the time of the training"


def test_a_step_at_which_all_failed_is_not_called_measured():
    history = trained(norm(2.0), norm(1.0))
    lost = history.points[0].model_copy(update={"step": 200, "failures": {"jacobian": "torn"}})
    for points, many in ((history.points, "2 measured"), ((*history.points, lost), "2 of 3 mea")):
        said = dict(of_history(EMPTY.with_points(points))["page"]().facts)["steps"]
        assert f", {many}" in said


def test_a_warning_of_some_steps_says_of_which():
    warned = {"measure": "attack", "code": "chance", "text": "5 of 64"}
    poor = Summary(warnings=({**warned},))
    history = trained(poor, Summary(warnings=({**warned, "text": "9 of 64"},)), Summary())
    (note,) = of_history(history)["page"]().notes
    assert note.text == "attack: at 2 steps, the last 100: 9 of 64"
    (note,) = of_history(trained(poor))["page"]().notes
    assert note.text == "attack: 5 of 64"


@pytest.mark.parametrize("format", ["table", "markdown", "html", "json"])
def test_a_hostile_history_is_shown_in_every_format(history, format):
    assert format in RENDERERS
    text = render(of_history(history), format).decode()
    assert "step-300.pt" in text
    assert ("<script>alert(1)" in text) == (format in ("table", "json"))


def test_a_table_for_programs_has_a_line_for_every_step(history):
    rows = list(csv.DictReader(render(of_history(history), "csv").decode().splitlines()))
    assert [(r["step"], r["epoch"], r["own/loss"]) for r in rows] == [
        ("0", "", ""),
        ("100", "0.5", "0.25"),
        ("200", "", ""),
        ("300", "", ""),
    ]
    norms = [p.summary.norms for p in history.points]
    assert [r["jacobian_norm/median"] for r in rows] == [str(n.median) if n else "" for n in norms]
    assert rows[3]["checkpoint"] == "step-300.pt"


def test_a_history_without_points_is_a_page():
    assert "over its training" in render(of_history(EMPTY), "html").decode()


def test_the_command_shows_a_history_and_refuses_it_beside_reports(history, report, tmp_path):
    saved, path = tmp_path / "a.json", tmp_path / "history.jsonl"
    saved.write_bytes(render(report, "json"))
    path.write_text(
        "".join(
            f"{line}\n"
            for line in (
                history.model_dump_json(by_alias=True, exclude={"points"}),
                *(p.model_dump_json(exclude_defaults=True) for p in history.points),
            )
        )
    )
    done = run("report", path, "-o", tmp_path / "curves.html", "-f", "table")
    assert done.exit_code == 0, done.output
    assert "Scorecard" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "Heads over time" not in done.stdout
    assert "Heads over time" in run("report", path, "--details").stdout
    assert "Curves" in (tmp_path / "curves.html").read_text()
    assert json.loads(run("report", path, "-f", "json").stdout)["schema"] == "lipaudit.history"
    refused = run("report", saved, path)
    assert refused.exit_code == 4
    assert "is a history, no report" in refused.stderr
    assert json.loads(run("schema", "history").stdout)["title"] == "History"


def run(*args: object):
    return CliRunner().invoke(build(), [*map(str, args)], env={"COLUMNS": "80"})


@pytest.mark.parametrize("value", [1e17, 1e308, 1e-320])
@pytest.mark.parametrize("form", ["table", "markdown", "html"])
def test_a_training_that_diverged_is_drawn(value, form):
    page = render(of_history(trained(Summary(), figures={"loss": value})), form).decode()
    assert "loss, of the training itself" in page
