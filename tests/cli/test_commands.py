"""Every command from end to end: exit codes, streams, strict JSON, files, maps."""

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import lipaudit
from lipaudit.measures import load_measures
from lipaudit.models.sources.loader import load_net
from lipaudit.tables.weakest import find_worst
from tests.commands import invoke, list_commands, read_figures, refuse, replace_parts

strict = partial(json.loads, parse_constant=pytest.fail)


@pytest.fixture
def folder(audited, monkeypatch) -> Path:
    """The folder of the audit, as working directory."""
    monkeypatch.chdir(audited[0])
    return audited[0]


def test_adversarial_examples_reproduce_the_printed_accuracy():
    how = ("--eps", "0.1", "--attack", "fgsm,pgd", "--steps", "5", "-n", "32", "-f", "json")
    done = invoke("attack", "demo", *how, "--save-adv", "adv.safetensors", "-o", "a.json")
    assert done.stdout == Path("a.json").read_text()
    section = strict(done.stdout)["sections"][0]
    again = invoke("jacobian", "demo", "--data", "adv.safetensors", "-n", "32", "-f", "json")
    correct = strict(again.stdout)["sections"][0]["samples"]["correct"]
    assert sum(correct) == sum(section["samples"]["robust@worst,linf,0.1"])


def test_from_python_an_audit_gives_what_the_command_gives(folder):
    """But for the map of the most amplifying head, which the command keeps."""
    reports = (lipaudit.load("run/report.json"), lipaudit.audit("demo", samples=4))
    theirs, ours = (read_figures(report)["sections"] for report in reports)
    for section in (*theirs, *ours):
        for name in ("arrays", "attended", "notes"):
            section.pop(name, None)
    assert ours == theirs


def test_commands_that_read_reports_never_load_torch(folder):
    report = "run/report.json"
    commands = (
        ["--help"],
        ["explain", "sharp"],
        ["schema"],
        ["gate", report, "-o", "gate.xml"],
        ["compare", report, report],
        ["report", report, "-o", "page.md"],
        ["report", report, "-o", "page.html"],
    )
    code = (
        "import gc, sys; from lipaudit.cli import main\n"
        f"for words in {commands!r}:\n"
        "    sys.argv = ['lipaudit', *words]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code, words\n"
        "    heavy = {'torch', 'timm', 'transformers', 'scipy'} & {*sys.modules}\n"
        "    assert not heavy, (words, heavy)\n"
        "    assert gc.isenabled() == ('-o' in words), words\n"
        "    assert 'matplotlib' not in sys.modules or 'page.html' in words, words\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "unchanged" in done.stdout
    assert Path("gate.xml").read_bytes().startswith(b"<?xml")
    assert Path("page.html").read_bytes() == Path("run/report.html").read_bytes()


def test_weights_are_gated_both_ways_with_the_architecture_of_the_baseline():
    state = load_net("demo").module.state_dict()
    save_file(state, "good.safetensors")
    state["blocks.1.attn.qkv.weight"][96 + 12 : 96 + 24] *= 1.5
    save_file(state, "worse.safetensors")
    shape = "img_size=8,patch_size=2,in_chans=1,num_classes=10"
    shape += ",embed_dim=48,depth=3,num_heads=4,mlp_ratio=2"
    reading = ("--arch", "timm:vit_tiny_patch16_224", "--model-kwargs", shape)
    reading += ("--mean", "0.5", "--std", "0.5", "--data", "demo", "-q")
    how = ("-n", 8, "--layers", "1")
    for name in ("good", "worse"):
        invoke("bounds", f"{name}.safetensors", *reading, *how, "-o", f"{name}.json")
    regressed = invoke("gate", "worse.safetensors", "-b", "good.json", "-q", code=1)
    assert "layer 1 head 1" in regressed.stdout
    assert piped("gate worse.json -b good.json -f json 2>&1 | true").returncode == 1
    improved = invoke("gate", "good.json", "-b", "worse.json")
    assert "improved: bounds.exact:each <= +20% layer 1 head 1" in improved.stdout
    refuse(4, "nope", "gate", "good.safetensors", "-b", "good.json", "--arch", "timm:nope")


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), ValueError("no")])
@pytest.mark.parametrize("args", [("attention", "demo"), ("audit", "demo", "--run-dir", "run")])
def test_a_run_that_ends_early_gives_the_cursor_back(args, fault, monkeypatch):
    def fail(*_):
        raise fault

    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    monkeypatch.setenv("TERM", "xterm")
    for name in load_measures():
        replace_parts(monkeypatch, name, fail)
    said = invoke(*args, "-n", "1", code=None).stderr
    hidden, shown = "\x1b[?25l", "\x1b[?25h"
    assert 0 <= said.rfind(hidden) < said.rfind(shown) < said.rfind("error:")


def test_strict_fails_on_what_is_not_proven(folder):
    args = ("--strict", "--fail-on", "jacobian.norm:median <= +5%")
    invoke("gate", "run/report.json", *args)
    report = strict(Path("run/report.json").read_text())
    report["run"]["model"]["weights_sha256"] = "0" * 64
    section = next(s for s in report["sections"] if s["measure"] == "jacobian")
    # Half of the samples a little up, half down: no change of the median, and no proof of it.
    norms = [v * (1.3 if i % 2 else 0.75) for i, v in enumerate(section["samples"]["norm"])]
    section["samples"]["norm"] = norms
    figures = {"mean": np.mean, "median": np.median, "max": np.max}
    row = {name: float(reduce(norms)) for name, reduce in figures.items()}
    section["rows"][0] |= row | {"p95": float(np.quantile(norms, 0.95))}
    Path("noisy.json").write_text(json.dumps(report))
    invoke("gate", "noisy.json", *args, code=6)


def test_explain_prints_a_paragraph_once_and_suggests_what_can_be_typed():
    lines = invoke("explain", "share", columns=80).stdout.splitlines()
    assert any(line.startswith("jacobian.shares.share: ") for line in lines)
    assert any(line.startswith("jacobian.paths.share: ") for line in lines)
    assert sum("How to read it: Exact at the samples" in line for line in lines) == 1
    lines = invoke("explain", "bounds.theorem3", columns=80).stdout.splitlines()
    assert any(line.startswith("  Source: Yudin et al. 2025 Theorem 3; ") for line in lines)
    said = refuse(2, "nothing is called 'steep'", "explain", "steep")
    assert "'steepest attention head'" in said
    assert said.isascii()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("explain bounds.sharp", "Proven upper bound"),
        ("explain theorem3", "2 ||X||^2 ||A|| m)"),
        ("explain robust", "a stronger attack may break more"),
        ("explain jacobian", "jacobian.norm"),
        ("explain max-tokens", "--max-tokens of every measure: Cut texts"),
        ("explain within", "--within of bounds"),
        ("--version", lipaudit.__version__),
        ("env", "torch"),
        ("models", "demo:robust"),
        ("schema", '"properties"'),
    ],
)
def test_learning_commands_print_something_useful(line, says):
    assert says in " ".join(invoke(*line.split()).stdout.split())


@pytest.mark.parametrize("count", [1, 0])
def test_env_says_which_devices_can_be_used(count, monkeypatch):
    """Torch sees a device that it cannot make a tensor on, as a GPU whose driver is too old."""

    def find():
        if not count:
            raise RuntimeError("Cannot access accelerator device when none is available.")
        return torch.device("hpu")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", find)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    facts = json.loads(invoke("env", "-f", "json").stdout)
    why = "device 'hpu:0' is not available on this machine, or has no float64"
    assert facts["devices"] == "cpu" + f", hpu:0 (not usable: {why})" * count
    assert facts["default device"] == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("name", "flag", "shown"),
    [
        ("train", "--flip", "[default: flip]"),
        ("attack", "--samples", "[default: 128]"),
        ("bounds", "--batch-size", "[default: auto]"),
        ("bounds", "--resume", ""),
    ],
)
def test_help_shows_the_default_as_it_would_be_typed(name, flag, shown):
    said = next(p.help for p in list_commands()[name].params if p.opts[0] == flag)
    assert re.findall(r"\[default.*\]", said) == ([shown] if shown else [])


def test_a_batch_size_of_auto_is_what_it_is_without():
    common = ("attention", "demo", "-n", 2, "-f", "json")
    auto, without = (invoke(*common, *how) for how in (("--batch-size", "auto"), ()))
    assert strict(auto.stdout)["sections"] == strict(without.stdout)["sections"]


@pytest.mark.parametrize(
    ("command", "code"),
    [("models vit | head -1", 0), ("report missing.json 2>&1 | true", 4),
     ("report missing.json >&- 2>&-", 4)],
)  # fmt: skip
def test_a_pipe_that_closes_early_is_no_error_and_an_error_keeps_its_exit_code(command, code):
    done = piped(command)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr


def piped(command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of bash that begins with one of lipaudit's, with the exit code of that."""
    text = f"{sys.executable} -m lipaudit {command}; exit ${{PIPESTATUS[0]}}"
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> tuple[Path, str]:
    """A folder with the map of a head as JSON and a page, and what was printed."""
    folder = tmp_path_factory.mktemp("drawn")
    line = ("attention", "demo", "-n", "2", "--map", "1.3")
    files = ("-o", folder / "map.json", "-o", folder / "map.html")
    return folder, invoke(*line, *files, columns=80).stdout


def test_a_map_is_named_in_the_terminal_drawn_as_a_picture_and_drawn_again_when_read(drawn):
    folder, text = drawn
    said, page = " ".join(text.split()), (folder / "map.html").read_text()
    assert "in the html format: Attention map of head 1.3, " in said
    assert ": 17 x 17 entries, largest " in said
    assert 'aria-label="Attention map of head 1.3, ' in page
    invoke("report", folder / "map.json", "-o", "again.html")
    assert Path("again.html").read_text() == page
    section = json.loads((folder / "map.json").read_text())["sections"][0]
    assert section["arrays"]["map@1.3"]["shape"] == [17, 17]
    # A map is no setting, so that reports stay comparable.
    assert not {"map", "query"} & section["settings"].keys()


def test_a_terminal_shows_one_screen_and_last_the_files_and_what_to_type(audited):
    said, shown = audited[1].stderr.splitlines(), audited[1].stdout.splitlines()
    weakest = find_worst(lipaudit.load(audited[0] / "run/report.json"))[0][:12]
    assert said[said.index("") + 1 :] == [
        "report: run/report.html",
        "data:   run/report.json",
        f"next:   lipaudit inspect run/report.json {weakest}",
    ]
    assert shown[0] == "lipaudit: demo"
    # A slow machine says how long the next attack takes.
    lines = [re.sub(r"; at most about .+ left", "", line) for line in [*said, *shown]]
    assert sum(-(-max(len(line), 1) // 80) for line in lines) <= 40
    assert max(map(len, shown)) <= 80
    assert "Scorecard" in shown


def test_the_page_of_an_audit_of_12_heads_stays_below_250_kb(audited):
    assert (audited[0] / "run/report.html").stat().st_size < 250_000


def test_details_print_the_sections_and_so_do_files(audited, monkeypatch):
    folder, shown = audited[0], audited[1].stdout.splitlines()
    monkeypatch.chdir(folder)
    whole = invoke("report", "run/report.json", "--details", columns=80).stdout.splitlines()
    assert invoke("report", "run/report.json", columns=80).stdout.splitlines() == shown
    scored = shown[shown.index("Scorecard") :]
    scored = scored[: scored.index("")]
    assert len(scored) > 9
    assert "\n".join(scored) in "\n".join(whole)
    assert "Attention map of head" not in "\n".join(shown)
    invoke("report", "run/report.json", "-o", "run.txt")
    for text in ("\n".join(whole), (folder / "run.txt").read_text()):
        assert "Attention map of head" in text
        assert "What do the words mean" in text


def test_the_page_shows_the_map_of_the_most_amplifying_head(audited):
    folder = audited[0]
    saved = json.loads((folder / "run/report.json").read_text())
    bounds, attention = saved["sections"][0], saved["sections"][2]
    top = max(bounds["rows"], key=lambda row: row["exact"])
    name = f"{top['layer']}.{top['head']}"
    assert f"map@{name}" in attention["arrays"]
    for page in ("run/report.html", "run.md"):
        assert f"Attention map of head {name}, first sample" in (folder / page).read_text()
