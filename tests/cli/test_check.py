"""A dry run: what would be read and measured, without measuring it."""

import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lipaudit.measures import JacobianOptions, load_measures
from tests.commands import invoke, refuse, replace_parts
from tests.engine.test_fitting import MODEL


@pytest.fixture(autouse=True)
def _little_is_measured(monkeypatch):
    """A measure is tried on two samples at most, in two layers or steps."""
    for name, measure in load_measures().items():
        replace_parts(monkeypatch, name, partial(_tried, measure))


def _tried(measure, net, batches, options):
    """Little of a measure, of two samples at most."""
    assert len(batches.first) <= 2
    tried = options.max_steps if isinstance(options, JacobianOptions) else len(options.layers)
    assert tried <= 2
    return measure.parts(net, batches, options)


def check(*args: str) -> tuple[dict, str]:
    """Plan once; return what is written as JSON, and as text."""
    done = invoke("check", *args, "-f", "json", "-o", "told.txt")
    return json.loads(done.stdout), Path("told.txt").read_text()


def test_samples_are_shown_with_labels_and_measures_with_times():
    np.savez("two.npz", x=np.zeros((2, 1, 8, 8), np.float32), y=np.array([3, 7]))
    seen, told = check("demo", "--data", "two.npz")
    assert [each["label"] for each in seen["first"]] == [3, 7]
    assert [each["place"] for each in seen["first"]] == ["index 0", "index 1"]
    assert {tuple(each["shape"]) for each in seen["first"]} == {(1, 8, 8)}
    assert (seen["layers"], seen["heads"], seen["closed_form"]) == (3, 12, 12)
    assert seen["measures"].keys() == {"bounds", "attention", "jacobian", "attack"}
    for planned in seen["measures"].values():
        assert planned["samples"] == 2
        assert planned["batch"] == 2
        assert seen["memory"]["held"] / 2 < planned["bytes"] < 2 * seen["memory"]["held"]
    assert seen["forward"]["samples"] == 2
    assert seen["forward"]["seconds"] > 0
    assert re.search(r"^time +\S+ s for a forward pass of 2 samples; a run", told, re.MULTILINE)
    assert "index 1, 1 x 8 x 8, label 7" in told
    assert "12 in 3 layers, 12 with a closed form" in told
    assert told.count("2 at a time, in roughly ") == 4
    assert re.search(r"^memory +[\d.]+ [GM]B are free$", told, re.MULTILINE)


def test_what_cannot_be_had_is_named_with_the_reason():
    Path("own.py").write_text(MODEL)
    seen, told = check("py:own.py:make")
    told = " ".join(told.split())
    assert (seen["heads"], seen["closed_form"], sum(seen["numerical"].values())) == (4, 2, 2)
    assert "attack" not in seen["measures"]
    assert not any("left out" in note for note in seen["notes"])
    assert f"not run attack: {seen['needs']['attack']}" in told
    assert "no class scores" in seen["needs"]["attack"]
    assert seen["measures"]["bounds"]["bytes"] > 0  # of the layer with a closed form
    for reason in seen["numerical"]:
        assert reason
        assert f"2 without: {reason}" in told


def test_where_weights_would_lie_is_shown():
    places = {"": "cpu", "blocks.1": "disk", "head": "disk"}
    Path("map.json").write_text(json.dumps(places))
    seen, told = check("demo", "-n", "2", "--device-map", "map.json")
    assert seen["device_map"] == places
    assert "          cpu: all else\n          disk: blocks.1, head\n" in told


@pytest.mark.parametrize(("option", "value"), [("--time-limit", "1h"), ("--shard", "1/2")])
def test_options_of_a_run_that_do_nothing_are_refused(option, value):
    refuse(2, f"{option} works only when", "check", "demo", option, value)


def test_what_is_not_known_of_memory_is_said():
    Path("own.py").write_text(MODEL.replace("Attention(False)", "Attention(True)"))
    seen, told = check("py:own.py:make")
    assert seen["measures"]["bounds"]["bytes"] is None
    assert seen["measures"]["attention"]["bytes"] > 0
    assert "the memory is unknown: no layer has a closed form" in " ".join(told.split())


def test_lines_fit_the_terminal():
    Path("own.py").write_text(MODEL)
    Path("map.json").write_text('{"": "disk"}')
    how = ("py:own.py:make", "-n", "1", "--device-map", "map.json")
    told = invoke("check", *how, columns=80).stdout
    assert max(map(len, told.splitlines())) <= 80, told
    assert "          disk: all\n" in told


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

class Bag(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(30, 8), torch.nn.Linear(8, classes)
        self.mix = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, ids, mask=None):
        x = self.embed(ids)
        x = x + self.mix(x, x, x, None if mask is None else ~mask, need_weights=False)[0]
        return self.head(x.mean(1))

class Convolution(torch.nn.Sequential):
    def __init__(self):
        pool = torch.nn.AdaptiveAvgPool2d(1)
        super().__init__(torch.nn.Conv2d(1, 4, 3), pool, torch.nn.Flatten(), torch.nn.Linear(4, 3))

def text():
    return ModelSpec(Bag(2), (6,), kind="text", vocabulary=30)

def bare():
    return Bag(2)

def convolution():
    return ModelSpec(Convolution(), (1, 8, 8))
"""
USUAL = {"bounds", "attention", "jacobian", "attack"}


@pytest.mark.parametrize(
    ("model", "data", "needs"),
    [
        ("demo", (), {}),
        ("demo", ("--data", "random"), {"attack": "Give labelled samples with --data"}),
        ("demo", ("--data", "pictures"), {"attack": "Give labelled samples with --data"}),
        ("demo", ("--data", "labels.npz"), {"attack": "`lipaudit audit --only bounds,attention,"}),
        ("text", (), {"attack": "Give labelled samples with --data"}),
        ("text", ("--data", "ids.npz"), {}),
        (
            "convolution",
            (),
            {"attack": "labelled", "bounds": "no attention was", "attention": "no attention was"},
        ),
        (
            "convolution",
            ("--data", "fits.npz"),
            {"bounds": "no attention was found", "attention": "no attention was found"},
        ),
        ("bare", (), dict.fromkeys((*USUAL, "certify"), "return a lipaudit.ModelSpec")),
    ],
)
def test_each_measure_runs_or_says_what_it_needs(model, data, needs):
    """Without data, without labels, with labels of other classes, without attention, unknown."""
    Path("own.py").write_text(OTHERS)
    np.savez("labels.npz", x=np.zeros((2, 1, 8, 8), np.float32), y=np.array([3, 17]))
    np.savez("fits.npz", x=np.zeros((2, 1, 8, 8), np.float32), y=np.array([0, 2]))
    np.savez("ids.npz", x=np.ones((2, 6), np.int64), y=np.array([0, 1]))
    Path("pictures").mkdir()
    Image.new("L", (8, 8)).save("pictures/a.png")
    line = (model if model == "demo" else f"py:own.py:{model}", *data, "--samples", "2")
    seen, told = check(*line)
    assert seen["needs"].keys() == needs.keys()
    assert seen["measures"].keys() == USUAL - needs.keys()
    for name, words in needs.items():
        assert words in seen["needs"][name]
        row = next(line for line in told.splitlines() if re.match(rf"not run .*\b{name}\b", line))
        assert row.startswith("not run   ")
