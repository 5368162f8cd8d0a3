"""Every command through a real process: exit codes, streams, strict JSON, files."""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from lipaudit.cli.commands import build
from tests.processes import completed


def lipaudit(*args: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return completed(*args, cwd=cwd, env={"COLUMNS": "80"})


def strict(text: str) -> dict:
    def refuse(token):
        raise AssertionError(f"{token} is not strict JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="session")
def audited(tmp_path_factory) -> Path:
    """A directory with a quick audit of the demo in `run/`, and its baseline."""
    folder = tmp_path_factory.mktemp("audited")
    done = lipaudit("audit", "demo", "-n", "16", "--run-dir", "run", "-f", "json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert strict(done.stdout)["status"] == "complete"
    assert (folder / "run/report.json").read_text() == done.stdout
    saved = lipaudit("baseline", "save", "run/report.json", cwd=folder)
    assert saved.returncode == 0, saved.stderr
    return folder


def test_the_audit_ends_with_what_was_found_and_what_to_type(audited):
    done = lipaudit("audit", "demo", "-n", "4", "--run-dir", "again", cwd=audited)
    assert done.returncode == 0
    tail = done.stderr.strip().splitlines()
    assert "attention (4 samples)" in tail[0]
    assert tail[-1].split() == [
        "lipaudit", "gate", "demo", "--baseline", "lipaudit-baseline.json",
    ]  # fmt: skip
    assert (audited / "again/report.html").read_text().startswith("<!doctype html>")


def test_adversarial_examples_reproduce_the_printed_accuracy(tmp_path):
    import torch
    from safetensors.torch import load_file

    from lipaudit.models.sources.loading import load_net

    done = lipaudit(
        "attack", "demo", "--eps", "0.1", "--attack", "fgsm,pgd", "--steps", "5", "-n", "32",
        "--save-adv", "adv.safetensors", "-f", "json", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    section = strict(done.stdout)["sections"][0]
    saved, net = load_file(tmp_path / "adv.safetensors"), load_net("demo")
    for row in section["rows"]:
        if row["attack"] == "worst":
            continue
        x = saved[f"{row['attack']},{row['norm']},{row['eps_text']}"]
        with torch.no_grad():
            right = net.read(net.call(x, None)).argmax(1) == saved["y"]
        assert float(right.double().mean()) == row["robust"]
    again = lipaudit(
        "jacobian", "demo", "--data", "adv.safetensors", "-n", "32", "-f", "json", cwd=tmp_path
    )
    read, samples = strict(again.stdout), section["samples"]
    worst = dict(zip(samples["ids"], samples["robust@worst,linf,0.1"], strict=True))
    made = [place.partition("made of ")[2] for place in read["samples"]["place"]]
    assert sorted(made) == sorted(worst)
    correct = dict(zip(made, read["sections"][0]["samples"]["correct"], strict=True))
    assert correct == {name: bool(stands) for name, stands in worst.items()}


def test_commands_that_read_reports_never_load_torch(audited):
    report = "run/report.json"
    commands = (
        ["--help"],
        ["explain", "sharp"],
        ["schema"],
        ["gate", report, "-o", "gate.xml"],
        ["compare", report, report],
        ["report", report, "-o", "page.md"],
    )
    code = (
        "import sys; from lipaudit.cli import main\n"
        f"for words in {commands!r}:\n"
        "    sys.argv = ['lipaudit', *words]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code, words\n"
        "    heavy = {'torch', 'timm', 'transformers', 'matplotlib'} & {*sys.modules}\n"
        "    assert not heavy, (words, heavy)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=audited, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "unchanged" in done.stdout
    assert (audited / "gate.xml").read_bytes().startswith(b"<?xml")


def test_a_model_is_gated_by_the_protocol_of_the_baseline(audited):
    done = lipaudit("gate", "demo", "-q", cwd=audited)
    assert done.returncode == 0, done.stderr
    assert "regressed" not in done.stdout


def test_weights_are_gated_both_ways_with_the_architecture_of_the_baseline(tmp_path):
    from safetensors.torch import save_file

    from lipaudit.models.sources.loading import load_net

    state = load_net("demo").module.state_dict()
    save_file(state, tmp_path / "good.safetensors")
    state["blocks.1.attn.qkv.weight"][96 + 12 : 96 + 24] *= 1.5
    save_file(state, tmp_path / "worse.safetensors")
    shape = "img_size=8,patch_size=2,in_chans=1,num_classes=10"
    shape += ",embed_dim=48,depth=3,num_heads=4,mlp_ratio=2"
    reading = ("--arch", "timm:vit_tiny_patch16_224", "--model-kwargs", shape)
    reading += ("--mean", "0.5", "--std", "0.5", "--data", "demo", "-q")
    for name in ("good", "worse"):
        made = lipaudit(
            "bounds", f"{name}.safetensors", *reading, "-n", 4, "-o", f"{name}.json", cwd=tmp_path
        )
        assert made.returncode == 0, made.stderr
    regressed = lipaudit("gate", "worse.safetensors", "-b", "good.json", "-q", cwd=tmp_path)
    assert regressed.returncode == 1, regressed.stdout + regressed.stderr
    assert "layer 1 head 1" in regressed.stdout
    unread = piped("gate worse.json -b good.json -f json 2>&1 | true", tmp_path)
    assert unread.returncode == 1
    improved = lipaudit("gate", "good.json", "-b", "worse.json", cwd=tmp_path)
    assert improved.returncode == 0, improved.stdout + improved.stderr
    assert "improved: bounds.exact:each <= +20% layer 1 head 1" in improved.stdout
    other = ("--arch", "timm:nope")
    refused = lipaudit("gate", "good.safetensors", "-b", "good.json", *other, cwd=tmp_path)
    assert refused.returncode == 4
    assert "nope" in refused.stderr


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["bounds"], 2, "Missing argument"),
        (["bounds", "demo", "--samples", "0"], 2, "--samples"),
        (["bounds", "demo", "--tol", "-1"], 2, "--tol"),
        (["bounds", "demo", "--tol", "nan"], 2, "--tol"),
        (["bounds", "demo", "--within", "inf"], 2, "--within"),
        (["bounds", "demo", "--seed", str(2**63)], 2, "--seed"),
        (["attention", "demo", "--p-norm-tokens", "-1"], 2, "--p-norm-tokens"),
        (["scaling", "demo", "--mode", ""], 2, "--mode"),
        (["scaling", "demo", "--tol", "nan"], 2, "--tol"),
        (["scaling", "demo", "--radius", "inf"], 2, "--radius"),
        (["bounds", "demo", "--layers", "9"], 2, "no attention layer 9"),
        (["bounds", "demo", "--layers", "a"], 2, "--layers"),
        (["bounds", "demo", "-f", "yaml"], 2, "unknown format"),
        (["bounds", "demo", "--batch-size", "many"], 2, "--batch-size"),
        (["bounds", "demo", "-o", "x.docx"], 2, "format"),
        (["bounds", "demo", "-o", "missing/x.json"], 2, "there is no folder missing"),
        (["bounds", "no-such-model"], 4, "no model"),
        (["bounds", "demo", "--data", "nowhere/"], 4, "no data"),
        (["jacobian", "demo", "--to", "moon"], 2, "--to"),
        (["attack", "demo"], 2, "no attack radius"),
        (["attack", "demo", "--eps", "two"], 2, "not a radius"),
        (["attack", "demo", "--eps", "0.1", "--data", "random"], 2, "labelled"),
        (["audit", "demo", "--quick", "--full"], 2, "--full needs a run without --quick"),
        (["explain", "sharpp"], 2, "sharp"),
        (["gate", "missing.json"], 5, "baseline"),
        (["report", "missing.json"], 4, "cannot read"),
        (["baseline", "check", "missing.json"], 5, "missing.json"),
        (["models", "no-such-thing"], 2, "no model"),
    ],
)
def test_bad_input_is_one_clear_line_and_the_documented_exit_code(
    args, code, says, tmp_path, monkeypatch
):
    from lipaudit.cli.commands import build

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    done = CliRunner().invoke(build(), args)
    assert done.exit_code == code, done.output
    assert says in done.stderr
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("args", "code"), [((), 130), (("terminated",), 143)])
def test_a_stopped_run_has_a_status_of_its_own(args, code, tmp_path, monkeypatch):
    from lipaudit.cli.commands import build
    from lipaudit.engine import execute

    def stopped(*_args, **_options):
        raise KeyboardInterrupt(*args)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(execute, "run_job", stopped)
    done = CliRunner().invoke(build(), ["bounds", "demo", "-o", "x.json"])
    assert done.exit_code == code
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), ValueError("no")])
@pytest.mark.parametrize("args", [("attention", "demo"), ("audit", "demo", "--run-dir", "run")])
def test_a_run_that_ends_early_gives_the_cursor_back(args, fault, tmp_path, monkeypatch):
    from lipaudit.cli import progress
    from lipaudit.engine.execute import Task

    def fail(_task, _units):
        raise fault

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "Console", functools.partial(Console, force_terminal=True))
    monkeypatch.setattr(Task, "_measure_left", fail)
    said = CliRunner().invoke(build(), [*args, "-n", "1"]).stderr
    hidden, shown = "\x1b[?25l", "\x1b[?25h"
    assert 0 <= said.rfind(hidden) < said.rfind(shown) < said.rfind("error:")


def test_strict_fails_on_what_is_not_proven(audited):
    args = ("gate", "run/report.json", "--strict", "--fail-on")
    assert lipaudit(*args, "jacobian.norm:median <= +5%", cwd=audited).returncode == 0
    report = strict((audited / "run/report.json").read_text())
    report["run"]["model"]["weights_sha256"] = "0" * 64
    section = next(s for s in report["sections"] if s["measure"] == "jacobian")
    # Half of the samples a little up, half down: no change of the median, and no proof of it.
    norms = [v * (1.3 if i % 2 else 0.75) for i, v in enumerate(section["samples"]["norm"])]
    section["samples"]["norm"] = norms
    (audited / "noisy.json").write_text(json.dumps(report))
    args = ("gate", "noisy.json", "--strict", "--fail-on", "jacobian.norm:median <= +5%")
    done = lipaudit(*args, cwd=audited)
    assert done.returncode == 6, done.stdout + done.stderr


def test_a_comparison_shows_the_change_of_every_head_in_every_format(audited):
    report = json.loads((audited / "run/report.json").read_text())
    section = next(s for s in report["sections"] if s["measure"] == "bounds")
    count = section["arrays"]["exact"]["shape"][1]
    for i in range(5 * count, 6 * count):  # layer 1, head 1
        section["arrays"]["exact"]["data"][i] *= 1.25
    (audited / "louder.json").write_text(json.dumps(report))
    files = ("-o", "compared.html", "-o", "compared.md", "-f", "table", "--details")
    done = lipaudit("compare", "run/report.json", "louder.json", *files, cwd=audited)
    assert done.returncode == 0, done.stderr
    screen = lipaudit("compare", "run/report.json", "louder.json", cwd=audited).stdout
    assert "--details prints" in screen
    assert len(screen.splitlines()) <= 40
    pages = [done.stdout, *((audited / f"compared.{end}").read_text() for end in ("html", "md"))]
    for page in pages:
        assert "B: demo against A: demo" in page
        assert "bounds.exact: change of every head" in page
        assert "+25.0%" in page
        assert "Jacobian norm" in page
    found = strict(
        lipaudit("compare", "louder.json", "louder.json", "-f", "json", cwd=audited).stdout
    )
    assert [pair["old"] for pair in found["pairs"]] == ["A: demo"]


def test_learning_commands_print_something_useful(tmp_path):
    for args, says in (
        (["explain", "bounds.sharp"], "Proven upper bound"),
        (["explain", "theorem3"], "2 ||X||^2 ||A|| max_i ||M(P_i)||"),
        (["explain", "robust"], "a stronger attack may break more"),
        (["explain", "jacobian"], "jacobian.norm"),
        (["explain", "max-tokens"], "--max-tokens of every measure: Cut texts"),
        (["explain", "within"], "--within of bounds"),
        (["env"], "torch"),
        (["models"], "timm:NAME"),
    ):
        done = lipaudit(*args, cwd=tmp_path)
        assert done.returncode == 0
        assert says in " ".join(done.stdout.split())
    assert "properties" in strict(lipaudit("schema", cwd=tmp_path).stdout)


def test_env_says_which_devices_can_be_used(monkeypatch):
    # Torch sees a device that it cannot make a tensor on, as of a GPU whose driver is too old.
    absent = torch.device("hpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: absent)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    facts = json.loads(CliRunner().invoke(build(), ["env", "-f", "json"]).stdout)
    reason = "device 'hpu:0' is not available on this machine"
    assert facts["devices"] == f"cpu, hpu:0 (not usable: {reason})"
    assert facts["default device"] == ("cuda" if torch.cuda.is_available() else "cpu")


def test_env_asks_for_no_accelerator_where_there_is_none(monkeypatch):
    def absent():
        raise RuntimeError("Cannot access accelerator device when none is available.")  # torch 2.6

    monkeypatch.setattr(torch.accelerator, "current_accelerator", absent)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    facts = json.loads(CliRunner().invoke(build(), ["env", "-f", "json"]).stdout)
    assert facts["devices"] == "cpu"


@pytest.mark.parametrize(
    ("name", "flag", "shown"),
    [
        ("bounds", "--tol", "[default: 0.0001]"),
        ("bounds", "--seed", "[default: 0]"),
        ("bounds", "--dtype", "[default: float32]"),
        ("train", "--k", "[default: 0]"),
        ("train", "--flip", "[default: flip]"),
        ("bounds", "--samples", "[default: 8]"),
        ("attack", "--samples", "[default: 128]"),
        ("train", "--batch-size", "[default: 512]"),
        ("bounds", "--batch-size", "[default: auto]"),
        ("bounds", "--format", "[default: table]"),
        ("bounds", "--resume", ""),
    ],
)
def test_help_shows_the_default_as_it_would_be_typed(name, flag, shown):
    said = CliRunner().invoke(build(), [name, "--help-all"], env={"COLUMNS": "150"}).output
    line = next(line for line in said.splitlines() if line.startswith(f"│ {flag} "))
    assert re.findall(r"\[default.*\]", line) == ([shown] if shown else [])


def test_a_batch_size_of_auto_is_what_it_is_without(tmp_path):
    common = ("attention", "demo", "-n", 2, "-f", "json")
    auto, without = (
        lipaudit(*common, *how, cwd=tmp_path) for how in (("--batch-size", "auto"), ())
    )
    assert auto.returncode == 0, auto.stderr
    assert strict(auto.stdout)["sections"] == strict(without.stdout)["sections"]


def test_a_pipe_that_closes_early_is_no_error(tmp_path):
    done = piped("models vit | head -1", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_that_nobody_reads_keeps_its_exit_code(tmp_path):
    assert piped("report missing.json 2>&1 | true", tmp_path).returncode == 4
    assert piped("report missing.json >&- 2>&-", tmp_path).returncode == 4


def piped(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of bash that begins with one of lipaudit's, with the exit code of that."""
    text = f"{sys.executable} -m lipaudit {command}; exit ${{PIPESTATUS[0]}}"
    return subprocess.run(
        ["bash", "-c", text], cwd=cwd, capture_output=True, text=True, check=False
    )
