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

OWN = "py:tests.cli.own:"


@pytest.fixture(autouse=True)
def _own(_elsewhere, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    x = torch.rand(6, 1, 3, 4, generator=torch.Generator().manual_seed(0))
    y = load_net(f"{OWN}dense").module(x).argmax(1)
    np.savez("data.npz", x=x.numpy(), y=y.numpy())


def certify(*args: str, model: str = "dense", command: str = "certify", code: int = 0):
    asked = [command, f"{OWN}{model}", "--data", "data.npz", *args]
    return invoke(*asked, code=code)


def test_what_is_printed_fits_a_terminal_and_says_the_bracket():
    radii = certify("--radius", "--tol", "0.5", "-n", "2").stdout  # no rows of balls
    assert "nothing was measured" not in radii
    assert "certified radius" in radii
    files = ("-o", "page.html", "-o", "page.md", "-o", "report.json")
    done = certify("--eps", "0.005,0.5", "--radius", "--tol", "0.5", *files)
    lines = done.stdout.splitlines()
    assert max(map(len, [*lines, *radii.splitlines()])) <= 80
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
        lipaudit.measure(f"{OWN}dense", "certify", observer=stopping, **options)
    runs = [
        lipaudit.measure(f"{OWN}dense", "certify", observer=done, resume=resume, **options)
        for resume in (True, False)
    ]
    assert begun == [3, 5]
    first, second = (dict(run.section("certify").samples) for run in runs)
    assert {**first, "seconds": 0} == {**second, "seconds": 0}


def test_an_audit_certifies_on_demand_and_says_where_it_cannot():
    done = certify("--eps", "0.1", "-q", model="sorting", code=4)
    assert "no rule for the operation sort (in other)" in done.stderr
    assert "works on any model" in done.stderr
    asked = ("--only", "jacobian", "--eps", "0.01", "--certify", "-n", "2", "-f", "json")
    done = certify(*asked, command="audit")
    report = json.loads(done.stdout)
    measured = {s["measure"]: s for s in report["sections"]}
    assert measured.keys() == {"jacobian", "certify"}
    assert measured["certify"]["settings"]["eps"] == ["0.01"]
    proven = report["summary"]["accuracy"][-1]
    assert (proven["kind"], proven["eps"]) == ("certified", "0.01")
    done = certify(*asked, command="audit", model="sorting")
    assert {s["measure"] for s in json.loads(done.stdout)["sections"]} == {"jacobian"}
    assert "certify was left out: no certificate for this model" in done.stderr


def test_from_python_an_audit_certifies_what_it_attacks():
    plan = {"attack": {"attack": "fgsm"}, "certify": {"order": "1"}}
    report = lipaudit.audit(f"{OWN}dense", plan, data="data.npz", eps="0.01", samples=3)
    attack, certify = report.section("attack"), report.section("certify")
    assert attack.settings["eps"] == certify.settings["eps"] == ["0.01"]
    assert certify.rows[0].certified <= attack.rows[-1].robust
