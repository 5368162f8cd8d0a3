"""`lipaudit certify` from the outside: what it prints, writes, refuses and goes on with."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import lipaudit
from lipaudit.engine.execute import Observer
from lipaudit.models.sources.loader import load_net
from tests.commands import invoke

pytestmark = pytest.mark.usefixtures("blank_charts")

FILE = """
import torch
from torch import nn
from lipaudit.models.net import ModelSpec


class Small(nn.Module):
    def __init__(self, other=None):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.head, self.other = nn.Linear(12, 6), nn.Linear(6, 3), other

    def forward(self, x):
        h = torch.relu(self.up(x.flatten(1)))
        return self.head(h if self.other is None else self.other(h))


class Sorting(nn.Module):
    def forward(self, h):
        return h.sort(-1).values


def load():
    return ModelSpec(Small(), (1, 3, 4), classifier=True)


def sorting():
    return ModelSpec(Small(Sorting()), (1, 3, 4), classifier=True)
"""
RADII = ("--eps", "0.005,0.05,0.5", "--radius", "--tol", "0.3")


@pytest.fixture(autouse=True)
def _own(_elsewhere, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    Path("model.py").write_text(FILE)
    x = torch.rand(6, 1, 3, 4, generator=torch.Generator().manual_seed(0))
    y = load_net("py:model.py:load").module(x).argmax(1)
    np.savez("data.npz", x=x.numpy(), y=y.numpy())


def certify(*args: str, model: str = "load", command: str = "certify", code: int = 0):
    asked = [command, f"py:model.py:{model}", "--data", "data.npz", *args]
    return invoke(*asked, code=code)


def test_what_is_printed_fits_a_terminal_and_says_the_bracket():
    done = certify(*RADII, "-o", "page.html", "-o", "page.md", "-o", "report.json")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "norm  eps    cleanᵃ " in done.stdout
    assert "How far around a sample is its class proven?" in lines
    page = Path("page.html").read_text()
    assert "How far around a sample is its class proven?" in page
    figures = "100.0% (61.0 to 100.0%)"
    row = f"| linf | 0.005 | 100.0% | {figures} | {figures} |"
    assert row in Path("page.md").read_text()
    section = json.loads(Path("report.json").read_text())["sections"][0]
    assert section["settings"]["norm"] == "linf"
    assert section["samples"]["verdict@linf,0.5"].count("broken") > 0
    again = invoke("report", "report.json")
    assert "How far around a sample is its class proven?" in again.stdout


def test_only_radii_have_no_rows_of_balls():
    done = certify("--radius", "--tol", "0.5", "-n", "2")
    assert "nothing was measured" not in done.stdout
    assert "certified radius" in done.stdout


@pytest.mark.parametrize("labelled", [True, False])
def test_what_certify_broke_is_among_the_worst_samples(labelled):
    arrays = np.load("data.npz")
    np.savez("data.npz", **{n: arrays[n] for n in ("x", "y") if labelled or n == "x"})
    certify("--eps", "0.05,0.3", "-q", "-o", "report.json")
    (section,) = json.loads(Path("report.json").read_text())["sections"]
    verdicts = section["samples"]["verdict@linf,0.3"]
    assert 0 < verdicts.count("broken") < len(verdicts)
    listed = invoke("inspect", "report.json", code=None).stdout.splitlines()
    rows = [line for line in listed if "index " in line]
    said = ["linf 0" in line for line in rows]
    assert said == sorted(said, reverse=True)
    assert sum(said) == verdicts.count("broken")


def test_an_interrupted_run_goes_on_sample_by_sample_to_the_same_figures():
    left = iter((True, False))
    stopping, done, begun = Observer(), Observer(), []

    def stop(*_):
        if not next(left):
            raise KeyboardInterrupt

    stopping.advances, done.begins = stop, lambda _, samples: begun.append(samples)
    options = {"data": "data.npz", "eps": "0.05,0.2", "samples": 5}
    with pytest.raises(KeyboardInterrupt):
        lipaudit.measure("py:model.py:load", "certify", observer=stopping, **options)
    runs = [
        lipaudit.measure("py:model.py:load", "certify", observer=done, resume=resume, **options)
        for resume in (True, False)
    ]
    assert begun == [3, 5]
    first, second = (dict(run.section("certify").samples) for run in runs)
    assert {**first, "seconds": 0} == {**second, "seconds": 0}


def test_a_model_that_cannot_be_certified_is_refused_by_operation_and_module():
    done = certify("--eps", "0.1", "-q", model="sorting", code=4)
    assert "no rule for the operation sort (in other)" in done.stderr
    assert "works on any model" in done.stderr


def test_an_audit_certifies_on_demand_and_says_where_it_cannot():
    asked = ("--only", "jacobian", "--eps", "0.01", "--certify", "-n", "2", "-f", "json")
    done = certify(*asked, command="audit")
    report = json.loads(done.stdout)
    measured = {s["measure"]: s for s in report["sections"]}
    assert measured.keys() == {"jacobian", "certify"}
    assert measured["certify"]["settings"]["eps"] == ["0.01"]
    told = [(a["kind"], a["eps"]) for a in report["summary"]["accuracy"]]
    assert told[-1] == ("certified", "0.01")
    done = certify(*asked, command="audit", model="sorting")
    report = json.loads(done.stdout)
    assert {s["measure"] for s in report["sections"]} == {"jacobian"}
    assert "certify was left out: no certificate for this model" in done.stderr


def test_from_python_an_audit_certifies_what_it_attacks():
    plan = {"attack": {"attack": "fgsm"}, "certify": {"order": "1"}}
    report = lipaudit.audit("py:model.py:load", plan, data="data.npz", eps="0.01", samples=3)
    attack, certify = report.section("attack"), report.section("certify")
    assert attack.settings["eps"] == certify.settings["eps"] == ["0.01"]
    assert certify.rows[0].certified <= attack.rows[-1].robust
