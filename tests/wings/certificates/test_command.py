"""`lipaudit certify` from the outside: what it prints, writes, refuses and goes on with."""

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import lipaudit
from lipaudit.engine.execute import Observer
from lipaudit.models.sources.loader import load_net
from tests.commands import invoke, refuse

pytestmark = pytest.mark.usefixtures("elsewhere", "blank_charts")

OWN = "py:tests.cli.own:"


@pytest.fixture(autouse=True)
def _own(elsewhere, monkeypatch):
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
    assert "certifiedᵃ" in radii
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


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("certify", {"eps": "0.05,0.2"}),
        ("smoothing", {"smooth": 0.25, "noise_samples": "10,50"}),
    ],
)
def test_an_interrupted_run_goes_on_sample_by_sample_to_the_same_figures(name, options):
    left = iter((True, False))
    stopping, done, seen = Observer(), Observer(), []

    def stop(*_):
        if not next(left):
            raise KeyboardInterrupt

    stopping.advances, done.begins = stop, lambda _, samples: seen.append(samples)
    done.note = lambda note: seen.append(note.text) if note.code == "cost" else None
    done.advances = lambda *_: seen.append("done")
    options = {"data": "data.npz", "samples": 5, **options}
    with pytest.raises(KeyboardInterrupt):
        lipaudit.measure(f"{OWN}dense", "certify", observer=stopping, **options)
    runs = [
        lipaudit.measure(f"{OWN}dense", "certify", observer=done, resume=resume, **options)
        for resume in (True, False)
    ]
    assert [each for each in seen if isinstance(each, int)] == [3, 5]
    assert seen.count("done") == 8
    if name == "smoothing":  # says its time before
        assert seen[1].startswith("smoothing: a sample takes 60 noisy copies of")
    first, second = (dict(run.section(name).samples) for run in runs)
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
    (proven,) = [r for r in report["summary"]["rows"] if r["name"] == "certified_accuracy"]
    assert (proven["metric"], proven["radius"]) == ("certify.certified@linf,0.01", "0.01")
    done = certify(*asked, command="audit", model="sorting")
    assert {s["measure"] for s in json.loads(done.stdout)["sections"]} == {"jacobian"}
    assert "certify was not measured here: no certificate for this model" in done.stderr


def test_from_python_an_audit_certifies_what_it_attacks():
    plan = {"attack": {"attack": "fgsm"}, "certify": {"order": "1"}}
    report = lipaudit.audit(f"{OWN}dense", plan, data="data.npz", eps="0.01", samples=3)
    attack, certify = report.section("attack"), report.section("certify")
    assert attack.settings["eps"] == certify.settings["eps"] == ["0.01"]
    assert certify.rows[0].certified <= attack.rows[-1].robust


def test_proofs_are_repeated_without_a_search_and_nothing_altered_is_proven():
    """The cross of 'a report altered by one number' and of 'proofs altered by one number'."""
    certify("--eps", "0.05,0.4,0.5", "--proofs", "proofs.npz", "-o", "report.json", "-q")
    verify = ("certify", "--verify", "report.json")
    lines = invoke(*verify, "--proofs", "proofs.npz").stdout.splitlines()
    section = lipaudit.load("report.json").section("certify")
    largest = {}
    for row in section.rows:  # the smallest ball first
        flags = section.samples[f"certified@linf,{row.eps_text}"]
        largest |= {i: row.eps_text for i, yes in zip(section.ids, flags, strict=True) if yes}
    assert sorted(lines) == sorted(f"{i} {eps} proven" for i, eps in largest.items())
    # Balls that were split are not proven without their parts, or with parts of which one fails.
    with zipfile.ZipFile("proofs.npz") as archive:
        parts = {n: dict(np.load(io.BytesIO(archive.read(n)))) for n in archive.namelist()}
    assert len(parts) > 1
    split = [name for name, arrays in parts.items() if len(arrays["which"]) > 2]
    assert split
    changes = {
        "no part": lambda arrays: {n: v[:, :0] if n == "y" else v[:0] for n, v in arrays.items()},
        "one part less": lambda arrays: {
            n: np.delete(v, 0, 1 if n == "y" else 0) for n, v in arrays.items()
        },
        "a multiplier": lambda arrays: arrays | {"y": replaced(arrays["y"], 1e6)},
        "no number": lambda arrays: arrays | {"y": replaced(arrays["y"], np.nan)},
        "a sign": lambda arrays: arrays | {"state": -arrays["state"]},
        "fewer units": lambda arrays: (
            arrays | {"y": arrays["y"][..., 1:], "state": arrays["state"][:, 1:]}
        ),
    }
    odd = {
        "units": lambda arrays: arrays | {"y": arrays["y"][..., 1:]},
        "of a pickle": lambda arrays: arrays | {"y": arrays["y"].astype(object)},
    }
    altered = (*verify, "--proofs", "altered.npz")
    for name, change in (changes | odd).items():
        with zipfile.ZipFile("altered.npz", "w") as archive:
            for ball, arrays in parts.items():
                apply = ball == split[0] or name in odd
                np.savez(file := io.BytesIO(), **(change(arrays) if apply else arrays))
                archive.writestr(ball, file.getvalue())
        if name in odd:
            refuse(4, "altered.npz is damaged", *altered)
            continue
        failed = [line for line in invoke(*altered, code=6).stdout.splitlines() if "NOT" in line]
        assert failed == [f"{split[0].replace('@', ' ')} NOT PROVEN"], name
    Path("altered.npz").write_bytes(Path("proofs.npz").read_bytes()[:-100])
    refuse(4, "altered.npz is", *altered)
    without = invoke(*verify, code=6).stdout.splitlines()
    assert {line for line in without if line.endswith("NOT PROVEN")} == {
        f"{name.replace('@', ' ')} NOT PROVEN" for name in parts
    }


def replaced(y, value):
    """Return multipliers of which one is another."""
    y = y.copy()
    y[0, 0, y[0, 0].argmax()] = value
    return y


def test_a_report_with_another_number_is_refused():
    certify("--eps", "0.1,0.6", "--proofs", "proofs.npz", "-o", "report.json", "-q")
    document = json.loads(Path("report.json").read_text())
    place = next(i for i, each in enumerate(document["sections"]) if each["measure"] == "certify")
    flags = document["sections"][place]["samples"]["certified@linf,0.6"]
    assert 0 in flags

    def altered(change):
        copy = json.loads(json.dumps(document))
        change(copy["sections"][place], copy)
        Path("altered.json").write_text(json.dumps(copy))
        return ("certify", "--verify", "altered.json", "--proofs", "proofs.npz")

    def more(section, _):
        at = section["samples"]["certified@linf,0.6"].index(0)
        section["samples"]["certified@linf,0.6"][at] = 1

    def share(section, _):
        section["rows"][1]["certified"] += 1 / 6

    def both(section, copy):
        more(section, copy)
        share(section, copy)

    def label(section, _):
        section["samples"]["label"][0] = 1 - section["samples"]["label"][0]

    def radius(section, _):
        section["settings"]["eps"] = ["0.1", "0.2"]

    def weights(_, copy):
        copy["run"]["model"]["weights_sha256"] = "0" * 64

    for change in (more, share, label, radius, weights):
        refuse(4, "does not fit its model, its samples or its own", *altered(change))
    assert "NOT PROVEN" in invoke(*altered(both), code=6).stdout
    bounds = ("bounds", "demo", "-n", "1", "-q", "-o", "bounds.json")
    invoke(*bounds)
    refuse(4, "the report has no certificates", "certify", "--verify", "bounds.json")
