"""`lipaudit certify --smooth` from the outside: what it prints and refuses."""

import json
from pathlib import Path

import pytest

from tests.commands import invoke, refuse

pytestmark = pytest.mark.usefixtures("elsewhere", "blank_charts")

SMOOTH = ("certify", "demo", "--smooth", "0.25", "--noise-samples", "10,60", "-n", "3")


def test_what_is_printed_fits_a_terminal_and_names_the_smoothed_classifier():
    files = ("-o", "page.html", "-o", "report.json")
    done = invoke(*SMOOTH, "--eps", "0.05,1/10", *files, "--details", columns=80)
    assert max(map(len, done.stdout.splitlines())) <= 80
    for text in ("norm  eps   ", "1 - alpha", "not of the model", "60 noisy copies certify no"):
        assert text in done.stdout
    domain = "certified, for the smoothed classifier in the ball, with probability 1 - alpha"
    assert domain in " ".join(done.stdout.split())
    assert "noisy copies of" in done.stderr
    assert "clean" in Path("page.html").read_text()
    (section,) = json.loads(Path("report.json").read_text())["sections"]
    assert section["measure"] == "smoothing"
    settings = {"smooth": 0.25, "noise_samples": "10,60", "alpha": 0.001, "eps": ["0.05", "1/10"]}
    assert settings.items() <= section["settings"].items()
    invoke("inspect", "report.json")
    assert "smoothed classifier" in invoke("explain", "smoothing.certified").stdout


def test_the_gate_pairs_certificates_sample_by_sample():
    invoke(*SMOOTH, "--eps", "0.05", "-o", "old.json", "-q")
    invoke("baseline", "save", "old.json", "--reason", "first", "-q")
    rules = ("smoothing.certified >= -2pp", "smoothing.radius:median >= -5%")
    rule = [word for text in rules for word in ("--fail-on", text)]
    done = invoke("gate", "demo", *rule)
    assert "smoothing.certified >= -2pp l2,0.05" in done.stdout
    more = ("--smooth", "0.5")
    invoke(*SMOOTH, *more, "--eps", "0.05", "-o", "new.json", "-q")
    assert "smooth 0.25 became 0.5" in invoke("gate", "new.json", *rule, code=5).stdout


def test_it_is_a_part_of_certify_and_no_command():
    assert "--smooth" in invoke("certify", "--help-all").stdout
    assert "smoothing" not in invoke("--help").stdout
    refuse(2, "smoothing needs noise", "audit", "demo", "--only", "smoothing", "-n", "1")


def test_the_denoiser_of_a_baseline_may_lie_elsewhere():
    code = "import torch\n\n\nclass Half(torch.nn.Module):\n    def forward(self, x):\n"
    Path("here.py").write_text(f"{code}        return x / 2\n")
    invoke(*SMOOTH, "--denoiser", "py:here.py:Half", "-o", "base.json")
    Path("here.py").rename("there.py")
    gate = ("gate", "demo", "-b", "base.json", "--fail-on", "smoothing.certified >= -2pp", "-q")
    refuse(4, "here.py", *gate)
    assert "unchanged" in invoke(*gate, "--denoiser", "py:there.py:Half").stdout
    Path("there.py").write_text(f"{code}        return x / 3\n")
    invoke(*gate, "--denoiser", "py:there.py:Half", code=5)  # another classifier
    invoke("bounds", "demo", "-n", "1", "--layers", "0", "-o", "other.json")
    text = "--denoiser needs a section smoothing in the baseline"
    refuse(2, text, "gate", "demo", "-b", "other.json", "--denoiser", "py:there.py:Half")
