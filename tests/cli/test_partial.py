"""Audits that finish: a measure that fails costs its own figures, and nothing else."""

from pathlib import Path

import pytest
import torch

import lipaudit
from lipaudit.errors import EvaluationError, InputError
from lipaudit.measures import load_measures
from lipaudit.report import render
from lipaudit.schema import load
from tests.commands import break_measure, invoke, refuse

pytestmark = pytest.mark.usefixtures("blank_charts")

AUDIT = ("audit", "demo", "-n", "1", "--run-dir", "run")


def audit(*args: str, code: int | None = 0):
    return invoke(*AUDIT, *args, code=code)


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (EvaluationError("values are not finite", "Try float64."), 3, "values are not finite"),
        (InputError("there is no such thing"), 4, "no such thing"),
        (ZeroDivisionError("by zero"), 3, "internal error: ZeroDivisionError: by zero"),
        (RuntimeError("CUDA error: device-side assert triggered"), 3, "the device failed"),
        (torch.OutOfMemoryError("CUDA out of memory"), 3, "out of memory"),
    ],
)
def test_a_measure_that_fails_leaves_its_reason_in_its_place(monkeypatch, error, code, says):
    break_measure(monkeypatch, "attention", error)
    done = audit("--only", "attention,jacobian", code=None)
    assert done.exit_code == code, done.output
    assert says in done.stderr.splitlines()[-2]
    assert "--resume" in done.stderr.splitlines()[-1]
    report = load("run/report.json")
    assert report.status == "partial"
    lost, kept = report.sections
    assert (lost.measure, kept.measure) == ("attention", "jacobian")
    assert says in lost.failure.reason
    assert lost.failure.exit_code == code
    assert kept.failure is None
    assert kept.rows
    assert "failure" not in kept.model_dump()
    for format in ("table", "markdown", "html"):
        page = render(report, format).decode()
        assert "attention failed: " in page
        assert "The other measures are complete." in " ".join(page.split())
        assert page.index("FAILED: ") < page.rindex("Jacobian norm")


def test_what_failed_alone_is_measured_again(monkeypatch):
    with monkeypatch.context() as broken:
        break_measure(broken, "attention", EvaluationError("no"))
        audit("--only", "attention,jacobian", code=3)
    break_measure(
        monkeypatch, "jacobian", AssertionError("it was measured, and is measured again")
    )
    audit("--only", "attention,jacobian", "--resume", "--run-dir", "again")
    # A journal that holds every sample leaves nothing to measure: the generator is never asked.
    assert load("again/report.json").status == "complete"


def test_the_last_hope_ends_the_run_with_its_own_error(monkeypatch):
    break_measure(monkeypatch, "jacobian", EvaluationError("values are not finite"))
    done = audit("--only", "jacobian", code=3)
    assert "error: values are not finite" in done.stderr
    assert not Path("run").exists()


def test_an_interrupted_audit_keeps_what_is_measured(monkeypatch):
    break_measure(monkeypatch, "jacobian", KeyboardInterrupt())
    done = audit("--only", "attention,jacobian", code=130)
    assert "run the same command with --resume to continue" in done.stderr
    assert list(Path("cache").rglob("*.npz"))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--only bounds,atention", "no measure 'atention'"),
        ("--skip scaling", "--skip scaling: an audit does not run it"),
        ("--skip bounds,attention,jacobian,attack", "no measure is left"),
        ("--only bounds --attack pgd", "--attack needs a measure attack"),
        ("--only bounds,bounds", "bounds is named twice"),
        ("--attack nope", "unknown attack"),
        ("--norm l3", "--norm"),
        ("--norm token-l2 --attack pgd", "token-l2 is a norm for token embeddings"),
        ("--eps 2", "larger than the range of the data"),
        ("--attack pgd --data random", "attack needs labelled samples"),
        ("--attack pgd --data random", "name the label column with --label-column"),
        ("--run-dir file", "file is a file"),
        ("--run-dir file/inside", "file is a file"),
    ],
)
def test_what_can_be_checked_is_checked_before_the_first_measurement(monkeypatch, line, says):
    Path("file").touch()
    for name in load_measures():
        break_measure(monkeypatch, name, AssertionError("something was measured"))
    refuse(2, says, *AUDIT, *line.split())
    assert sorted(p.name for p in Path().iterdir()) == ["file"]


def test_a_run_folder_of_its_own_is_checked_too():
    Path("lipaudit-runs").touch()
    done = invoke("audit", "demo", "-n", "1", code=2)
    assert "lipaudit-runs is a file" in done.stderr


def test_attacks_of_an_audit_are_those_that_are_named():
    audit("--only", "attack", "--attack", "fgsm", "--norm", "l2", "--eps", "1/2")
    section = load("run/report.json").section("attack")
    assert {(row.attack, row.norm, row.eps_text) for row in section.rows} == {
        ("fgsm", "l2", "1/2"),
        ("worst", "l2", "1/2"),
    }


def test_what_the_data_do_not_allow_is_left_out_with_a_note():
    report = lipaudit.audit("demo", ["attack", "jacobian"], data="random", samples=1)
    assert [section.measure for section in report.sections] == ["jacobian"]
    note = next(note for note in report.sections[0].notes if note.code == "left-out")
    assert "attack was left out: attack needs labelled samples" in note.text


def test_a_partial_report_is_no_baseline_and_passes_no_gate(monkeypatch):
    audit("--only", "attention,jacobian")
    invoke("baseline", "save", "run/report.json")
    break_measure(monkeypatch, "attention", EvaluationError("values are not finite"))
    audit("--only", "attention,jacobian", code=3)
    refused = invoke("baseline", "save", "run/report.json", "-o", "b.json", code=5)
    assert "attention failed: values are not finite" in refused.stderr
    rule = ("--fail-on", "jacobian.norm:median <= +5%")
    judged = invoke("gate", "run/report.json", *rule, code=3)
    assert "partial: attention failed" in " ".join(judged.stdout.split())
