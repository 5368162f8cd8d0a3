"""A dry run: what would be read and measured, without measuring it."""

import json
from pathlib import Path

import numpy as np
import pytest

from lipaudit.measures import load_measures
from tests.commands import invoke, replace_parts


@pytest.fixture(autouse=True)
def _nothing_is_measured(_elsewhere, monkeypatch):
    for name in load_measures():
        replace_parts(monkeypatch, name, lambda *_: pytest.fail("measured"))


def check(*args: str) -> tuple[dict, str]:
    """Plan once; return the JSON, and the text in one line."""
    done = invoke("check", *args, "-f", "json", "-o", "plan.txt")
    return json.loads(done.stdout), " ".join(Path("plan.txt").read_text().split())


def test_samples_are_shown_with_labels_and_measures_with_their_number():
    np.savez("two.npz", x=np.zeros((2, 1, 8, 8), np.float32), y=np.array([3, 7]))
    seen, text = check("demo", "--data", "two.npz")
    assert seen["first"] == ["index 0: label 3", "index 1: label 7"]
    assert (seen["layers"], seen["heads"]) == (3, {"closed form": 12})
    assert seen["measures"] == dict.fromkeys(("bounds", "attention", "jacobian", "attack"), 2)
    assert "heads closed form: 12 data two.npz samples 2 first index 0: label 3" in text


def test_what_is_left_out_has_no_closed_form_or_is_no_softmax_has_a_reason():
    seen, text = check("py:tests.cli.own:attention", "--model-kwargs", "kind=gated")
    assert seen["heads"].pop("closed form") == 2
    ((reason, heads),) = seen["heads"].items()
    assert (heads, f"{reason}: 2" in text) == (2, True)
    assert "attack" not in seen["measures"]
    assert any(note.startswith("attack was not measured here: ") for note in seen["notes"])
    seen, _ = check(
        "py:tests.cli.own:attention", "--model-kwargs", "kind=sigmoid", "--samples", "2"
    )
    assert seen["layers"] == 1
    (note,) = [note for note in seen["notes"] if "softmax" in note]
    assert note.startswith("not recognised as attention, and not measured (0 at own.py:")
    seen, text = check("py:tests.cli.own:convolution")
    assert (seen["layers"], "no attention was found" in text) == (0, True)
    (note,) = [note for note in seen["notes"] if "attention" in note]
    assert note.startswith("bounds and attention were not measured here: no attention was found")
    assert not {"bounds", "attention"} & {*seen["measures"]}


def test_a_forward_pass_is_timed_and_the_places_of_weights_fit_the_terminal():
    places = {"": "cpu", "blocks.1": "disk", "head": "disk"}
    Path("map.json").write_text(json.dumps(places))
    seen, text = check("demo", "--device-map", "map.json")
    assert seen["device_map"] == places
    assert "all else: cpu blocks.1: disk head: disk" in text
    assert seen["forward"]["samples"] == 8
    assert 0 < seen["forward"]["seconds"] < 60
    assert 0.01 < seen["forward"]["gigabytes"] < 100
    lines = invoke("check", "demo", "-n", "2", columns=80).stdout.splitlines()
    assert max(map(len, lines)) <= 80
