"""`lipaudit gate MODEL`: the protocol of the baseline, wherever data lie, whatever it runs on."""

import json
import shutil
from contextlib import chdir
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from lipaudit import schema
from tests.commands import invoke, refuse, replace_parts


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder with samples, others, and baselines of the demo on the former."""
    folder = tmp_path_factory.mktemp("kept")
    with np.load(str(files("lipaudit.data") / "assets" / "digits_test.npz")) as digits:
        x, y = digits["x"], digits["y"]
    with chdir(folder):
        np.savez("val.npz", x=x[:2], y=y[:2])
        np.savez("other.npz", x=x[2:4], y=y[2:4])
        line = ("bounds", "demo", "--data", "val.npz", "-n", "2", "--layers", "0", "-q")
        invoke(*line, "-o", "base.json")
        invoke(*line, "--concat", "-o", "older.json")
        # from before norms of layers had options of their own
        text = json.loads(Path("older.json").read_text())
        for section in text["sections"]:
            section["settings"].pop("concat")
            section["settings"].pop("layer_within")
        Path("older.json").write_text(json.dumps(text))
    return folder


@pytest.fixture
def measured(kept, _elsewhere, tmp_path):
    """A working directory with the files."""
    return shutil.copytree(kept, tmp_path, dirs_exist_ok=True)


def test_data_may_be_elsewhere_and_other_samples_are_refused_unmeasured(measured, monkeypatch):
    (measured / "elsewhere").mkdir()
    monkeypatch.chdir(measured / "elsewhere")  # the baseline's path leads nowhere
    gate = ("gate", "demo", "-b", "../base.json", "-q")
    refuse(4, "'val.npz'", *gate)
    assert "unchanged" in invoke(*gate, "--data", "../val.npz").stdout
    replace_parts(monkeypatch, "bounds", lambda *_: pytest.fail("measured"))
    said = " ".join(invoke(*gate, "--data", "../other.npz", code=5).stderr.split())
    assert "only 0 of the baseline's 2 samples" in said
    assert "Give the baseline's samples (val.npz) with --data" in said


def test_a_baseline_keeps_all_digits_of_how_pixels_are_normalised(measured):
    """Those of CLIP have eight; six of them are another mean, which a gate refuses."""
    line = ("bounds", "demo", "--data", "val.npz", "-n", "2", "--layers", "0", "-q")
    pixels = ("--mean", "0.48145466", "--std", "0.26862954")
    invoke(*line, *pixels, "-o", "clip.json")
    assert schema.load("clip.json").run.options["mean"] == "0.48145466"
    assert "unchanged" in invoke("gate", "demo", "-b", "clip.json", "-q").stdout


def test_a_baseline_spells_short_numbers_as_older_baselines_do(measured):
    line = ("bounds", "demo", "--data", "val.npz", "-n", "2", "--layers", "0", "-q")
    invoke(*line, "--mean", "0", "--std", "0.50", "-o", "short.json")
    options = schema.load("short.json").run.options
    assert (options["mean"], options["std"]) == ("0", "0.5")


def test_the_report_of_what_was_measured_is_kept_and_the_machine_is_chosen_anew(measured):
    gate = ("gate", "demo", "-b", "base.json")
    where = ("--device", "cpu", "--batch-size", "1", "--offline", "--resume")
    named = invoke(*gate, "--report", "now.json", *where)
    assert "unchanged" in named.stdout
    assert "measured: now.json" in named.stderr
    assert not Path("lipaudit-runs").exists()
    run = schema.load(Path("now.json")).run
    assert (run.device, run.data.samples) == ("cpu", 2)
    invoke(*gate, "-q")
    (kept,) = Path("lipaudit-runs").glob("gate-*/report.json")
    assert schema.load(kept).section("bounds").rows
    invoke("gate", "now.json", "-b", "base.json")
    # A file that cannot be written is refused before the work.
    invoke(*gate, "--report", "missing/now.json", code=2)
    shutil.rmtree("lipaudit-runs")
    Path("lipaudit-runs").write_text("no directory")
    refuse(3, "--report", *gate, "-q")
    invoke(*gate, "--device", "nowhere", code=2)
    for line in ("--data val.npz", "--device cpu", "--resume", "--report x.json"):
        option = line.split()
        refuse(2, f"{option[0]} has no effect", "gate", "base.json", "-b", "base.json", *option)


def test_without_a_default_rule_one_is_asked_for():
    invoke("attention", "demo", "-n", "2", "-q", "-o", "a.json")
    said = refuse(2, "no default rule exists for attention", "gate", "a.json", "-b", "a.json")
    assert "Name a rule with --fail-on; lipaudit explain" in " ".join(said.split())
    invoke("gate", "a.json", "-b", "a.json", "--fail-on", "attention.g1 <= +5%")
    # A MODEL is not measured in vain, and its report does not advise to.
    refuse(2, "no default rule exists for attention", "gate", "demo", "-b", "a.json")
    assert not Path("lipaudit-runs").exists()
    assert "lipaudit gate" not in invoke("report", "a.json", "-f", "markdown").stdout


@pytest.mark.parametrize(
    ("command", "rule", "untested"),
    [
        (
            "certify demo --smooth 0.25 --noise-samples 5,20",
            "smoothing.certified >= -2pp l2,0.25",
            ("smoothing.clean >= -2pp", "smoothing.noisy >= -2pp"),
        ),
        (
            "corrupt demo --corruption fog",
            "corrupt.accuracy@mean >= -2pp",
            ("corrupt.drop <= +1pp",),
        ),
    ],
)
def test_what_a_report_advises_has_a_default_rule(command, rule, untested):
    invoke(*command.split(), "-n", "2", "-q", "-o", "report.json")
    page = invoke("report", "report.json", "-f", "markdown").stdout
    assert "lipaudit gate demo --baseline report.json" in page
    for text in untested:  # refused before a MODEL is measured
        says = f"{text!r}: how far {text.split()[0]} varies by chance is unknown"
        refuse(2, says, "gate", "demo", "--baseline", "report.json", "--fail-on", text)
    assert not Path("lipaudit-runs").exists()
    assert rule in invoke("gate", "demo", "--baseline", "report.json").stdout


def test_either_norm_of_the_jacobian_is_judged_against_its_own_alone():
    for norm in ("inf", "2"):
        invoke("jacobian", "demo", "-n", "2", "-q", "--norm", norm, "-o", f"{norm}.json")
        invoke("gate", f"{norm}.json", "-b", f"{norm}.json")
    for old, new in (("inf", "2"), ("2", "inf")):
        done = invoke("gate", f"{new}.json", "-b", f"{old}.json", code=5)
        assert f"norm {old} became {new}" in done.stdout


def test_an_older_baseline_is_repeated_with_its_norms_before_the_output_projection(measured):
    rule = ("--fail-on", "bounds.layers.exact <= +5%")
    done = invoke("gate", "demo", "-b", "older.json", *rule, "--report", "now.json")
    assert done.stdout.count("unchanged: bounds.layers.exact") == 1


def test_norms_that_were_not_asked_for_are_missed_only_where_a_rule_reads_them(measured):
    invoke("gate", "base.json", "-b", "older.json")
    rule = ("--fail-on", "bounds.layers.exact <= 9")
    refuse(2, "--concat", "gate", "base.json", "-b", "older.json", *rule)
