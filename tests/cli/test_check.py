"""A dry run: what would be read and measured, without measuring it."""

import json
from pathlib import Path

import numpy as np
import pytest

from lipaudit.measures import load_measures
from tests.commands import invoke, refuse, replace_parts

OWN = '''
import torch
from torch import nn
from lipaudit import ModelSpec

class Attention(nn.Module):
    """Two heads, whose logits have a closed form, or are gated, or make a map without softmax."""

    def __init__(self, kind):
        super().__init__()
        self.qkv, self.kind = nn.Linear(8, 24), kind

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        logits = q @ k.mT
        if self.kind == "gated":
            logits = logits * x.mean((1, 2))[:, None, None, None]
        if self.kind == "sigmoid":
            p = logits.sigmoid() + 1e-3
            p = p / p.sum(-1, keepdim=True)
        else:
            p = logits.softmax(-1)
        return x + (p @ v).transpose(1, 2).flatten(2)

def make(kind):
    layers = nn.Sequential(Attention(kind), Attention("plain"))
    return ModelSpec(layers, (5, 8), kind="tokens", classifier=False)

def convolution():
    layers = nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    return ModelSpec(nn.Sequential(*layers), (1, 8, 8))
'''


@pytest.fixture(autouse=True)
def _nothing_is_measured(_elsewhere, monkeypatch):
    Path("own.py").write_text(OWN)
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


def test_what_is_left_out_and_what_has_no_closed_form_have_a_reason():
    seen, text = check("py:own.py:make", "--model-kwargs", "kind=gated")
    assert seen["heads"].pop("closed form") == 2
    ((reason, heads),) = seen["heads"].items()
    assert (heads, f"{reason}: 2" in text) == (2, True)
    assert "attack" not in seen["measures"]
    assert any(note.startswith("attack was left out: ") for note in seen["notes"])


def test_attention_that_is_no_softmax_is_named():
    seen, _ = check("py:own.py:make", "--model-kwargs", "kind=sigmoid", "--samples", "2")
    assert seen["layers"] == 1
    (note,) = [note for note in seen["notes"] if "softmax" in note]
    assert note.startswith("attention that was not measured (0, own.py:")


def test_a_model_without_attention_says_so():
    seen, text = check("py:own.py:convolution")
    assert seen["layers"] == 0
    assert "no attention was found" in text


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


@pytest.mark.parametrize(("option", "value"), [("--time-limit", "1h"), ("--shard", "1/2")])
def test_options_of_a_run_that_do_nothing_are_refused(option, value):
    refuse(2, f"{option}: only when", "check", "demo", option, value)
