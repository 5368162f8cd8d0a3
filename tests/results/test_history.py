"""Histories on disk and in memory: what counts of the lines of a file, and what does not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

import pytest

from lipaudit import schema
from lipaudit.errors import InputError
from lipaudit.results.history import History, Point, readings
from lipaudit.results.summary import Accuracy, Fragile, Head, Heads, Norms, Summary

EMPTY = History(lipaudit="0", created="now", model="m", data="d")


def point(step: int, session: str = "", **known: object) -> Point:
    return Point(step=step, session=session, time="now", seconds=1.0, **known)


def lines(points: Iterable[Point]) -> str:
    header = EMPTY.model_dump_json(by_alias=True, exclude={"points"})
    said = [header, *(p.model_dump_json(exclude_defaults=True) for p in points)]
    return "".join(f"{line}\n" for line in said)


def steps(history: History) -> list[tuple[int, str]]:
    return [(p.step, p.session) for p in history.points]


def test_a_file_of_lines_and_one_of_json_are_the_same_history():
    points = [point(10, heads={"0.0": float("inf")}), point(0, figures={"loss": float("nan")})]
    history = schema.loads_history(lines(points))
    assert steps(history) == [(0, ""), (10, "")]
    assert history.points[1].heads == {"0.0": float("inf")}
    again = schema.loads_history(
        json.dumps(json.loads(history.model_dump_json(by_alias=True)), indent=2)
    )
    assert again.model_dump_json() == history.model_dump_json()


def test_a_line_that_was_not_finished_does_not_count():
    text = lines([point(0), point(10)])
    assert steps(schema.loads_history(text + text.splitlines()[-1][:20])) == [(0, ""), (10, "")]
    assert steps(schema.loads_history(text[:-1])) == [(0, "")]


def test_of_checkpoints_the_last_measurement_of_a_step_counts():
    history = schema.loads_history(lines([point(10, state="a"), point(20), point(10, state="b")]))
    assert [(p.step, p.state) for p in history.points] == [(10, "b"), (20, "")]


def test_a_training_that_goes_back_supersedes_what_it_had_beyond():
    killed = [point(step, "first") for step in (0, 10, 20, 30)]
    resumed = schema.loads_history(lines([*killed, point(20, "next"), point(40, "next")]))
    assert steps(resumed) == [(0, "first"), (10, "first"), (20, "next"), (40, "next")]
    anew = resumed.with_points([point(0, "third")])
    assert steps(anew) == [(0, "third")]
    assert steps(anew.with_points([point(10, "third")])) == [(0, "third"), (10, "third")]
    late = anew.with_points([point(10, "third")]).with_points([point(5, "third")])
    assert steps(late) == [(0, "third"), (5, "third"), (10, "third")]
    assert steps(schema.loads_history(lines(late.points[:1] + late.points[:0:-1]))) == steps(late)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (lines([]).replace('"1.0"', '"2.0"'), "has schema version 2.0, not 1.0"),
        (lines([]).replace("lipaudit.history", "lipaudit.report"), "is not a lipaudit history"),
        (lines([point(0)]) + "{no\n" + lines([]), "line 3 of f is not JSON"),
        (lines([point(0)]).replace('"seconds":1.0', '"seconds":"x"'), "f is damaged: seconds"),
        (lines([]).replace('"model":"m"', '"mode":"m"'), "f is damaged"),
        ("", "f is not JSON"),
    ],
)
def test_what_is_damaged_is_one_clear_error(text, says):
    with pytest.raises(InputError, match=re.escape(says)):
        schema.loads_history(text, name="f")


def test_what_to_do_about_a_damaged_line_is_said():
    with pytest.raises(InputError) as refusal:
        schema.loads_history(lines([point(0)]) + "[]\n", name="f")
    assert refusal.value.advice == "Without that line the others can be read."


def test_a_history_is_no_report(tmp_path):
    path = tmp_path / "history.jsonl"
    path.write_text(lines([]))
    assert schema.load_any(path) == EMPTY == schema.load_history(path)
    with pytest.raises(InputError, match="is a history, no report") as refusal:
        schema.loads(lines([]), name=str(path))
    assert f"lipaudit report {path}" in refusal.value.advice


def test_the_figures_of_a_summary_have_names_that_every_store_takes():
    """MLflow takes letters, digits, underscores, dashes, periods, spaces and slashes."""
    ball = {"norm": "token-l2", "eps": "2/255", "ball": "token-l2 2/255"}
    norms = {"start": "a", "end": "b", "norm": "2", "sample": "", "samples": 2, "converged": 2}
    summed = Summary(
        accuracy=(
            Accuracy(kind="clean", share=0.5, low=0.1, high=0.9, samples=4),
            Accuracy(kind="certified", share=0.25, low=None, high=None, samples=4, **ball),
        ),
        norms=Norms(median=2.0, p95=None, max=float("inf"), **norms),
        heads=Heads(steepest=(Head(layer=1, head=2, exact=3.0),), median=1.5, heads=12),
        fragile=Fragile(share=0.75, heads=1, of=2, side="uniform", k=None),
    )
    figures = {each.name: each.value for each in readings(summed)}
    assert figures == {
        "clean_accuracy": 0.5,
        "certified_accuracy/token_l2_2_255": 0.25,
        "jacobian_norm/median": 2.0,
        "heads/steepest": 3.0,
        "heads/median": 1.5,
        "fragile_rows": 0.75,
    }
    assert all(re.fullmatch(r"[\w./ -]+", name) for name in figures)
    assert list(readings(Summary())) == []


def test_the_schema_describes_points():
    described = schema.history_schema()
    assert described["properties"]["schema"]["const"] == "lipaudit.history"
    assert {"step", "summary", "heads", "report"} <= described["$defs"]["Point"][
        "properties"
    ].keys()
