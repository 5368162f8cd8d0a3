"""A measure of another package: its command, its figures, and everywhere that they appear."""

import json
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lipaudit.data.loading import DataOptions, load_data
from lipaudit.models.sources.loader import load_net
from tests import processes

PLUGINS = Path(__file__).parents[1] / "plugins"


def lipaudit(*args: str, cwd: Path, **how: Any) -> subprocess.CompletedProcess[str]:
    before = partial(processes.installed, PLUGINS)
    return processes.completed(*args, cwd=cwd, before=before, **how)


PICTURE = "How sure is the model of its samples?"
READING = (
    ("report", "a.json", "-f", "html"),  # with the package's picture
    ("compare", "a.json", "a.json", "-f", "markdown"),
    ("report", "a.json", "-f", "csv"),
    ("gate", "a.json", "-b", "a.json", "--fail-on", "confidence.confidence:mean >= -1%"),
    ("gate", "a.json", "-b", "a.json", "--fail-on", "confidence.mean >= 0.1", "-f", "html"),
)
DEFAULT = ("gate", "a.json", "-b", "a.json")


@pytest.fixture(scope="module")
def session(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A directory with the report of the example's measure in every format, and how it went."""
    folder = tmp_path_factory.mktemp("measured")
    files = [f"-oa.{suffix}" for suffix in ("json", "md", "html", "txt")]
    measure = ("confidence", "demo", "-n", "24", "--temperature", "2", *files)
    learn = (("--help",), ("confidence", "--help"), ("explain", "confidence"))
    learn += (("unsure", "a.json"), ("unsure", "a.json", "-f", "json"), ("unsure", "--help"))
    wrong = ("confidence", "demo", "--temperature", "0")
    return folder, lipaudit(*measure, cwd=folder, then=[*READING, DEFAULT, *learn, wrong])


@pytest.fixture(scope="module")
def measured(session) -> Path:
    return session[0]


def test_its_figures_are_those_of_the_model(measured):
    report = json.loads((measured / "a.json").read_text())
    section = report["sections"][0]
    # A journal asks the same: what another version of a plug-in has finished is not gone on.
    assert report["run"]["versions"]["lipaudit-example"] == "1.0"
    net = load_net("demo")
    batch = load_data("demo", net, DataOptions(samples=24)).batch
    with torch.no_grad():
        truth = (net.output(batch) / 2).double().softmax(1).amax(1)
    assert section["settings"] == {"seed": 0, "layers": None, "temperature": 2.0}
    assert section["samples"]["ids"] == list(batch.ids)
    assert section["samples"]["confidence"] == pytest.approx(truth.tolist())
    assert section["rows"][0]["mean"] == pytest.approx(float(truth.mean()))


def test_it_is_in_every_format(measured):
    for name in ("a.md", "a.html", "a.txt"):
        text = (measured / name).read_text()
        assert "Confidence of the predictions" in text
        assert "lowest" in text


def test_its_headline_is_a_line_of_the_scorecard_a_row_of_the_json_and_a_rule(session):
    folder, done = session
    report = json.loads((folder / "a.json").read_text())
    (row,) = report["summary"]["rows"]
    mean = report["sections"][0]["rows"][0]["mean"]
    known = {"name": "confidence", "metric": "confidence.mean", "figure": "mean confidence"}
    known |= {"value": mean, "samples": 24, "text": "24 samples", "better": "higher"}
    assert row.items() >= known.items()
    line = f"mean confidence  {mean:.1%}  24 samples"
    text = (folder / "a.txt").read_text()
    assert line in text
    assert f"Mean confidence {mean:.0%}." in text
    assert f"| mean confidence | {mean:.1%} | 24 samples |" in (folder / "a.md").read_text()
    # Without a rule of the user the gate takes the declared one.
    assert "confidence.confidence:median >= -10%" in done.stdout


def test_it_has_a_command_and_an_explanation(session):
    done = session[1]
    assert "confidence" in done.stdout.split("Usage:")[1]
    for text in ("Smallest over the samples.", "Divide the logits by it."):
        assert text in done.stdout
    assert (done.returncode, "--temperature" in done.stderr) == (2, True), done.stderr


def test_a_command_of_its_package_reads_its_report(session):
    folder, done = session
    samples = json.loads((folder / "a.json").read_text())["sections"][0]["samples"]
    least = min(zip(samples["confidence"], samples["ids"], strict=True))
    assert f"\n{least[1]} {least[0]:.1%}\n" in done.stdout
    assert f'"{least[1]}": {least[0]}' in done.stdout
    usage = done.stdout.split("Usage:")
    assert "unsure" in usage[1]
    assert "List the samples that the model is least sure of" in usage[-1]


def test_its_picture_is_on_the_page(measured):
    page = (measured / "a.html").read_text()
    assert PICTURE in page
    assert "share of the samples" in page


def test_it_can_be_gated(measured):
    worse = json.loads((measured / "a.json").read_text())
    worse["run"]["model"]["weights_sha256"] = "0" * 64
    values = worse["sections"][0]["samples"]["confidence"]
    worse["sections"][0]["samples"]["confidence"] = [0.9 * value for value in values]
    (measured / "worse.json").write_text(json.dumps(worse))
    rule = ("-b", "a.json", "--fail-on", "confidence.confidence:median >= -1%")
    both = ("gate", "demo", "-q", *rule), ("gate", "worse.json", *rule)
    done = lipaudit(*both[0], cwd=measured, then=both[1:])  # the second if the first passes
    said = ("pass:" in done.stdout, "regressed" in done.stdout)
    assert (done.returncode, said) == (1, (True, True)), done.stdout + done.stderr


def test_a_report_is_read_where_the_measure_is_not_installed(session):
    folder, there = session
    first, *others = READING[2:]
    done = processes.completed(*first, cwd=folder, then=others)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("onfidence") >= len(others) + 1
    # The gate names a figure by the words of its measure; without the measure, by its column.
    page = there.stdout.replace('<td class="t long">mean confidence (', '<td class="t">mean (')
    assert page != there.stdout
    assert done.stdout in page


def test_its_picture_alone_is_missing_where_the_measure_is_not_installed(session):
    folder, there = session
    done = processes.completed(*READING[0], cwd=folder, then=[READING[1]])
    assert done.returncode == 0, done.stderr
    assert there.stdout.count(PICTURE) > 2
    assert PICTURE not in done.stdout
    for text in ("Confidence of the predictions", "lowest", "onfidence of each sample"):
        assert text in done.stdout
