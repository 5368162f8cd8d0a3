"""A dry run: what would be read and measured, without measuring it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from lipaudit.cli.commands import build
from lipaudit.measures import MEASURES
from tests.engine.test_estimate import MODEL


@pytest.fixture(autouse=True)
def _nothing_is_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, measure in MEASURES.items():
        monkeypatch.setitem(MEASURES, name, replace(measure, parts=None))


def check(*args: str, code: int = 0) -> str:
    done = CliRunner().invoke(build(), ["check", *args])
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else done.stderr


def test_samples_are_shown_with_labels_and_measures_with_times():
    np.savez("two.npz", x=np.zeros((2, 1, 8, 8), np.float32), y=np.array([3, 7]))
    seen = json.loads(check("demo", "--data", "two.npz", "-f", "json"))
    assert [each["label"] for each in seen["first"]] == [3, 7]
    assert [each["place"] for each in seen["first"]] == ["index 0", "index 1"]
    assert {tuple(each["shape"]) for each in seen["first"]} == {(1, 8, 8)}
    assert (seen["layers"], seen["heads"], seen["closed_form"]) == (3, 12, 12)
    assert seen["measures"].keys() == {"bounds", "attention", "jacobian", "attack"}
    for planned in seen["measures"].values():
        assert planned["samples"] == 2
        assert "(estimate; a forward of a sample takes" in planned["time"]
    told = check("demo", "--data", "two.npz")
    assert "index 1, 1 x 8 x 8, label 7" in told
    assert "12 in 3 layers, 12 with a closed form" in told


def test_what_cannot_be_had_is_named_with_the_reason(tmp_path):
    (tmp_path / "own.py").write_text(MODEL)
    model = f"py:{tmp_path / 'own.py'}:make"
    seen = json.loads(check(model, "-f", "json"))
    assert (seen["heads"], seen["closed_form"], sum(seen["numerical"].values())) == (4, 2, 2)
    assert "attack" not in seen["measures"]
    left = next(note for note in seen["notes"] if note.startswith("attack was left out: "))
    told = check(model)
    assert left in told
    for reason in seen["numerical"]:
        assert reason
        assert f"2 without: {reason}" in told


def test_where_weights_would_lie_is_shown(tmp_path):
    places = {"": "cpu", "blocks.1": "disk", "head": "disk"}
    (tmp_path / "map.json").write_text(json.dumps(places))
    how = ("demo", "-n", "2", "--device-map", str(tmp_path / "map.json"))
    assert json.loads(check(*how, "-f", "json"))["device_map"] == places
    told = check(*how)
    assert "          cpu: all else\n          disk: blocks.1, head\n" in told


@pytest.mark.parametrize(("option", "value"), [("--time-limit", "1h"), ("--shard", "1/2")])
def test_options_of_a_run_that_do_nothing_are_refused(option, value):
    assert f"{option} is for measuring" in check("demo", option, value, code=2)
