"""`lipaudit compare --attribute`: models are loaded as reports say, or it is said why not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from lipaudit import schema
from lipaudit.cli.commands import build

SAMPLES = 4


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Reports of two demos on the same samples, and of one on others."""
    folder = tmp_path_factory.mktemp("reports")
    for name, model, seed in (("a", "demo", 0), ("b", "demo:robust", 0), ("c", "demo:robust", 5)):
        done = run(
            "jacobian", model, "-n", SAMPLES, "--seed", seed, "-q", "-o", folder / f"{name}.json"
        )
        assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def here(reports, tmp_path, monkeypatch):
    for path in reports.iterdir():
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*args):
    return CliRunner().invoke(build(), list(map(str, args)), env={"COLUMNS": "80"})


def changed(name: str, **fields) -> str:
    """Write a report again with other facts of its model."""
    report = schema.load(Path(name))
    model = report.run.model.model_copy(update=fields)
    run_of_it = report.run.model_copy(update={"model": model})
    Path("changed.json").write_text(schema.dumps(report.model_copy(update={"run": run_of_it})))
    return "changed.json"


def test_the_cost_comes_first_and_the_result_has_all_layers(here):
    done = run("compare", "a.json", "b.json", "--attribute", "-f", "json", "-o", "out.html")
    assert done.exit_code == 0, done.output
    assert "17 of 17 layers differ: 36 norms of 4 samples" in " ".join(done.stderr.split())
    (shown,) = json.loads(done.stdout)["attributions"]
    assert (shown["old"], shown["new"], shown["start"]) == ("demo", "demo:robust", "pixels")
    norms = [schema.load(here / f"{n}.json").section("jacobian").samples["norm"] for n in "ab"]
    assert shown["values"]["change"]["data"] == pytest.approx(
        np.log(np.divide(*reversed(norms))).tolist(), rel=1e-4
    )
    assert shown["samples"] == list(
        schema.load(here / "a.json").section("jacobian").samples["ids"]
    )
    parts = [layer["effect"]["mean"] for layer in shown["layers"]]
    assert sum(parts) + shown["rest"]["effect"]["mean"] == pytest.approx(shown["change"]["mean"])
    assert "Which layers explain the change" in (here / "out.html").read_text()


def test_blocks_and_fewer_samples_cost_less(here):
    done = run("compare", "a.json", "b.json", "--attribute", "--groups", "block", "-n", "2")
    assert done.exit_code == 0, done.output
    assert "8 of 8 layers differ: 18 norms of 2 samples" in " ".join(done.stderr.split())
    assert "geometric mean over 2 samples" in " ".join(done.stdout.split())
    quiet = run("compare", "a.json", "b.json", "--attribute", "-q", "-n", "1", "--groups", "block")
    assert (quiet.exit_code, quiet.stderr) == (0, "")


def test_every_other_model_is_set_against_the_first(here):
    how = ("--attribute", "--groups", "block", "-n", "1", "-q")
    done = run("compare", "a.json", "b.json", "b.json", *how, "-f", "json")
    assert done.exit_code == 0, done.output
    comparison = json.loads(done.stdout)
    pairs = [(pair["old"], pair["new"]) for pair in comparison["pairs"]]
    assert [(s["old"], s["new"]) for s in comparison["attributions"]] == pairs
    assert len(set(pairs)) == 2
    brief = run("compare", "a.json", "b.json", *how, "-f", "brief").stdout
    assert "8 of 8 layers differ" in brief
    assert len(brief.splitlines()) <= 15


def test_a_model_in_place_of_a_report_is_measured_as_the_first_was(here):
    done = run("compare", "a.json", "demo:robust", "-f", "json", "-q", "--report", "now.json")
    assert done.exit_code == 0, done.output
    read = run("compare", "a.json", "b.json", "-f", "json")
    verdicts = [json.loads(each.stdout)["pairs"][0]["verdicts"] for each in (done, read)]
    assert verdicts[0] == verdicts[1]
    assert schema.load(here / "now.json").run.model.spec == "demo:robust"
    assert json.loads(read.stdout)["attributions"] == []


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("--groups", "block"), 2, "--groups goes with --attribute"),
        (("-n", "3"), 2, "--samples goes with --attribute"),
        (("--data", "demo"), 2, "b.json is a report: --data would do nothing"),
        (("--attribute", "--arch", "timm:x"), 2, "b.json is a report: --arch would do nothing"),
    ],
)
def test_options_that_would_do_nothing_are_refused(here, args, code, said):
    done = run("compare", "a.json", "b.json", *args)
    assert done.exit_code == code, done.output
    assert said in " ".join(done.stderr.split())


def test_a_model_that_is_another_by_now_is_refused(here):
    done = run(
        "compare", "a.json", changed("b.json", weights_sha256="0" * 64), "--attribute", "-q"
    )
    assert done.exit_code == 4
    assert "demo:robust has other weights by now" in " ".join(done.stderr.split())


def test_a_module_measured_from_python_has_no_name(here):
    named = changed("b.json", source="module", spec="MyModel")
    done = run("compare", "a.json", named, "--attribute", "-q")
    assert done.exit_code == 2
    assert "lipaudit.attribute(OLD, NEW)" in " ".join(done.stderr.split())


def test_reports_on_other_samples_are_refused(here):
    report = schema.load(Path("c.json"))
    ids = report.section("jacobian").samples["ids"]
    assert not {*ids} & {*schema.load(Path("a.json")).section("jacobian").samples["ids"]}
    for more in ((), ("--attribute",)):
        done = run("compare", "a.json", "c.json", "-q", *more)
        assert done.exit_code == 5, done.output


def test_the_same_weights_leave_nothing_to_explain(here):
    done = run("compare", "a.json", "a.json", "--attribute", "-q")
    assert done.exit_code == 4
    assert "same weights" in done.stderr
