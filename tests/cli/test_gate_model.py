"""`lipaudit gate MODEL`: the protocol of the baseline, wherever data lie, whatever it runs on."""

import json
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from lipaudit import schema
from lipaudit.cli.commands import build


@pytest.fixture
def lipaudit(tmp_path, monkeypatch):
    """Run a command in an empty directory."""
    monkeypatch.chdir(tmp_path)
    return lambda *args: CliRunner().invoke(build(), list(map(str, args)))


@pytest.fixture
def measured(lipaudit, tmp_path):
    """A baseline of the demo on samples of its own, in a file beside it."""
    with np.load(str(files("lipaudit.data") / "assets" / "digits_test.npz")) as kept:
        x, y = kept["x"], kept["y"]
    np.savez(tmp_path / "val.npz", x=x[:4], y=y[:4])
    np.savez(tmp_path / "other.npz", x=x[4:8], y=y[4:8])
    done = lipaudit("bounds", "demo", "--data", "val.npz", "-n", "4", "-q", "-o", "base.json")
    assert done.exit_code == 0, done.output
    return tmp_path


def moved(folder, monkeypatch):
    """Go to another directory, where the baseline's path leads nowhere."""
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")


def test_a_path_that_leads_nowhere_is_said_to_be_the_baselines(lipaudit, measured, monkeypatch):
    moved(measured, monkeypatch)
    done = lipaudit("gate", "demo", "-b", "../base.json", "-q")
    assert done.exit_code == 4
    said = " ".join(done.stderr.split())
    assert "'val.npz', and the baseline was measured on it" in said
    assert "--data PATH" in said
    there = lipaudit("gate", "demo", "-b", "../base.json", "-q", "--data", "../val.npz")
    assert there.exit_code == 0, there.output
    assert "unchanged" in there.stdout


def test_other_samples_are_refused_before_they_are_measured(lipaudit, measured, monkeypatch):
    monkeypatch.setattr(
        "lipaudit.engine.execute.run_job", lambda *_, **__: pytest.fail("measured")
    )
    done = lipaudit("gate", "demo", "-b", "base.json", "-q", "--data", "other.npz")
    assert done.exit_code == 5
    said = " ".join(done.stderr.split())
    assert "only 0 of the baseline's 4 samples" in said
    assert "Give the baseline's samples (val.npz) with --data" in said


def test_the_report_of_what_was_measured_is_kept(lipaudit, measured):
    named = lipaudit("gate", "demo", "-b", "base.json", "--report", "now.json")
    assert named.exit_code == 0, named.output
    assert "measured: now.json" in named.stderr
    assert not Path("lipaudit-runs").exists()
    usual = lipaudit("gate", "demo", "-b", "base.json", "-q")
    assert usual.exit_code == 0, usual.output
    (kept,) = Path("lipaudit-runs").glob("gate-*/report.json")
    for path in (Path("now.json"), kept):
        assert schema.load(path).section("bounds").rows
    again = lipaudit("gate", "now.json", "-b", "base.json")
    assert again.exit_code == 0, again.output


def test_a_file_that_cannot_be_written_is_refused_before_the_work(lipaudit, measured):
    done = lipaudit("gate", "demo", "-b", "base.json", "--report", "missing/now.json")
    assert done.exit_code == 2
    Path("lipaudit-runs").write_text("no directory")
    done = lipaudit("gate", "demo", "-b", "base.json", "-q")
    assert done.exit_code == 3
    assert "--report" in done.stderr


def test_the_machine_is_chosen_anew_and_the_protocol_is_not(lipaudit, measured):
    done = lipaudit(
        "gate", "demo", "-b", "base.json", "-q", "--device", "cpu", "--batch-size", "1",
        "--offline", "--resume", "--report", "now.json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "unchanged" in done.stdout
    run = json.loads(Path("now.json").read_text())["run"]
    assert (run["device"], run["data"]["samples"]) == ("cpu", 4)
    refused = lipaudit("gate", "demo", "-b", "base.json", "--device", "nowhere")
    assert refused.exit_code == 2


@pytest.mark.parametrize(
    "option", [("--data", "val.npz"), ("--device", "cpu"), ("--resume",), ("--report", "x.json")]
)
def test_options_of_a_measurement_are_refused_with_a_report(lipaudit, measured, option):
    done = lipaudit("gate", "base.json", "-b", "base.json", *option)
    assert done.exit_code == 2
    assert f"{option[0]} has no effect" in done.stderr


def test_without_a_default_rule_one_that_would_apply_is_named(lipaudit):
    lipaudit("attention", "demo", "-n", "2", "-q", "-o", "a.json")
    done = lipaudit("gate", "a.json", "-b", "a.json")
    assert done.exit_code == 2
    said = " ".join(done.stderr.split())
    assert "no default rule exists for attention" in said
    assert "--fail-on 'attention.g1 <= +5%'" in said
    ruled = lipaudit("gate", "a.json", "-b", "a.json", "--fail-on", "attention.g1 <= +5%")
    assert ruled.exit_code == 0, ruled.output


@pytest.mark.parametrize("norm", ["inf", "2"])
def test_either_norm_of_the_jacobian_is_judged_against_its_own_alone(lipaudit, norm):
    for each in ("inf", "2"):
        made = lipaudit("jacobian", "demo", "-n", "2", "-q", "--norm", each, "-o", f"{each}.json")
        assert made.exit_code == 0, made.output
    assert lipaudit("gate", f"{norm}.json", "-b", f"{norm}.json").exit_code == 0
    other = {"inf": "2", "2": "inf"}[norm]
    done = lipaudit("gate", f"{norm}.json", "-b", f"{other}.json")
    assert done.exit_code == 5
    assert f"norm {other} became {norm}" in done.stdout


@pytest.fixture
def older(lipaudit, measured):
    """A baseline from before norms of layers had options of their own."""
    args = ("bounds", "demo", "--data", "val.npz", "-n", "4", "-q", "--concat", "-o", "base.json")
    assert lipaudit(*args).exit_code == 0
    text = json.loads(Path("base.json").read_text())
    for section in text["sections"]:
        section["settings"].pop("concat")
        section["settings"].pop("layer_within")
    Path("base.json").write_text(json.dumps(text))
    return measured


def test_an_older_baseline_is_repeated_with_its_norms_before_the_output_projection(
    lipaudit, older
):
    rule = ("--fail-on", "bounds.layers.exact <= +5%")
    done = lipaudit("gate", "demo", "-b", "base.json", *rule, "--report", "now.json")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("unchanged: bounds.layers.exact") == 3


def test_norms_that_were_not_asked_for_are_missed_only_where_a_rule_reads_them(lipaudit, older):
    assert lipaudit("bounds", "demo", "--data", "val.npz", "-q", "-o", "now.json").exit_code == 0
    usual = lipaudit("gate", "now.json", "-b", "base.json")
    assert usual.exit_code == 0, usual.output
    done = lipaudit("gate", "now.json", "-b", "base.json", "--fail-on", "bounds.layers.exact <= 9")
    assert done.exit_code == 2
    assert "--concat" in done.stderr
