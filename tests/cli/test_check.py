"""A dry run: what would be read and measured, without measuring it."""

import json
from pathlib import Path

import numpy as np
import pytest

from lipaudit.measures import load_measures
from tests.commands import invoke, refuse, replace_parts

MODEL = '''
import torch
from torch import nn
from lipaudit.models.net import ModelSpec

class Attention(nn.Module):
    """Two heads; gated logits have no closed form."""

    def __init__(self, gated):
        super().__init__()
        self.qkv, self.gated = nn.Linear(8, 24), gated

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        logits = q @ k.mT
        p = (logits * x.mean((1, 2))[:, None, None, None] if self.gated else logits).softmax(-1)
        return (p @ v).transpose(1, 2).flatten(2)

def make(gated=True):
    layers = nn.Sequential(Attention(gated), Attention(False))
    return ModelSpec(layers, (5, 8), kind="tokens", classifier=False)
'''


@pytest.fixture(autouse=True)
def _nothing_is_measured(monkeypatch):
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
    Path("own.py").write_text(MODEL)
    seen, text = check("py:own.py:make")
    assert seen["heads"].pop("closed form") == 2
    ((reason, heads),) = seen["heads"].items()
    assert (heads, f"{reason}: 2" in text) == (2, True)
    assert "attack" not in seen["measures"]
    assert any(note.startswith("attack was left out: ") for note in seen["notes"])


def test_the_places_of_weights_are_shown_in_lines_that_fit_the_terminal():
    places = {"": "cpu", "blocks.1": "disk", "head": "disk"}
    Path("map.json").write_text(json.dumps(places))
    seen, text = check("demo", "-n", "2", "--device-map", "map.json")
    assert seen["device_map"] == places
    assert "all else: cpu blocks.1: disk head: disk" in text
    lines = invoke("check", "demo", "-n", "2", columns=80).stdout.splitlines()
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(("option", "value"), [("--time-limit", "1h"), ("--shard", "1/2")])
def test_options_of_a_run_that_do_nothing_are_refused(option, value):
    refuse(2, f"{option}: only when", "check", "demo", option, value)


OWN = """
import torch

class Attention(torch.nn.Module):
    def __init__(self, plain):
        super().__init__()
        self.qkv, self.plain = torch.nn.Linear(8, 24), plain

    def forward(self, x):
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        if self.plain:
            p = (q @ k.mT).softmax(-1)
        else:
            p = (q @ k.mT).sigmoid() + 1e-3
            p = p / p.sum(-1, keepdim=True)
        return x + (p @ v)[:, 0]

class Reader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Attention(True), Attention(False)])
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))

def model():
    from lipaudit import ModelSpec
    return ModelSpec(Reader(), (5, 8), kind="tokens")
"""


def test_attention_that_is_no_softmax_is_named():
    Path("own.py").write_text(OWN)
    seen, _ = check("py:own.py:model", "--samples", "2")
    assert seen["layers"] == 1
    (note,) = [note for note in seen["notes"] if "softmax" in note]
    assert note.startswith("attention that was not measured (blocks.1, own.py:")


OTHERS = """
import torch
from lipaudit import ModelSpec

class Convolution(torch.nn.Sequential):
    def __init__(self):
        pool = torch.nn.AdaptiveAvgPool2d(1)
        super().__init__(torch.nn.Conv2d(1, 4, 3), pool, torch.nn.Flatten(), torch.nn.Linear(4, 3))

def convolution():
    return ModelSpec(Convolution(), (1, 8, 8))
"""


def test_a_model_without_attention_says_so():
    Path("own.py").write_text(OTHERS)
    seen, text = check("py:own.py:convolution")
    assert seen["layers"] == 0
    assert "no attention was found" in text


def test_one_forward_pass_is_timed_and_its_memory_said():
    facts = json.loads(invoke("check", "demo", "-f", "json").stdout)
    forward = facts["forward"]
    assert forward["samples"] == 8
    assert 0 < forward["seconds"] < 60
    assert 0.01 < forward["gigabytes"] < 100
