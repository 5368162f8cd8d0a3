"""Hostile names and values in every command and format: no control character comes out."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import lipaudit
from lipaudit.measures.base import Part
from lipaudit.measures.texts import encode_table
from lipaudit.models.sources.loader import load_net
from lipaudit.models.sources.saving import save_net
from lipaudit.schema import dumps
from tests.cli.test_fuzz import is_internal
from tests.commands import invoke

pytestmark = pytest.mark.usefixtures("blank_charts")

EVIL = "=a\x1b]0;t\x07\x9b2J\x7f\u202e\r|`<b>"
"""A title and a bell, a cleared screen, a turned direction, a formula, a table's bar, HTML."""
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
OWN = """
import torch
from torch import nn
from lipaudit.models.sources.timm import load_demo

class Named(nn.Module):
    def __init__(self, fails):
        super().__init__()
        self.parts = nn.ModuleDict({EVIL: load_demo("standard").module})
        self.fails = fails

    def forward(self, x):
        if self.fails and not torch.equal(x[:, 0, 0, 0], torch.zeros(len(x))):
            raise RuntimeError(EVIL)
        return self.parts[EVIL](x)

def named():
    return Named(False)

def fails():
    return Named(True)

def small():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

def refuses():
    raise RuntimeError(EVIL)
"""
"""Models whose modules and errors have hostile names."""
FORMATS = ("table", "json", "markdown", "html", "csv", "latex")
GATE = ("text", *FORMATS[:4], "junit")


def run(*args: Any) -> tuple[int, str]:
    """Run a command; what it writes holds nothing that a terminal obeys.

    Returns:
        The exit code, and all that it wrote.
    """
    done = invoke(*args, code=None)
    said = done.stdout + done.stderr
    assert not is_internal(done), (args, said[-400:])
    found = OBEYED.search(said)
    assert found is None, (args, said[max(0, found.start() - 80) : found.end() + 40])
    return done.exit_code, said


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder of pictures, arrays and reports with hostile names and values."""
    root = tmp_path_factory.mktemp("x") / EVIL
    for i in range(10):  # as many classes as the model has: they are its own, in their order
        path = root / "pictures" / f"{i}{EVIL}"
        path.mkdir(parents=True)
        pixels = np.random.default_rng(i).integers(0, 256, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(path / f"{i}{EVIL}.png")
    np.savez(root / "keys.npz", **{EVIL: np.zeros(3)})
    np.savez(root / "arrays.npz", x=np.zeros((2, 1, 8, 8), dtype=np.uint8), y=np.arange(2))
    (root / "rows.csv").write_text(f"text,{EVIL}\na,{EVIL}\n", newline="")
    (root / "rows.jsonl").write_text(json.dumps({EVIL: EVIL}))
    (root / "own.py").write_text(OWN.replace("EVIL", ascii(EVIL)))
    return root


@pytest.fixture(scope="module")
def reports(folder) -> list[Path]:
    """Return reports of one model whose every free text is hostile."""
    options = {"bounds": {"layers": "0"}, "attack": {"eps": "0.1", "attack": "fgsm"}}
    for name, how in options.items():
        document = json.loads(dumps(lipaudit.measure("demo", name, samples=2, **how)))
        (folder / f"{name}.json").write_text(json.dumps(tainted(document)))
    return [folder / f"{name}.json" for name in options]


def show(*paths: Path) -> None:
    """Show reports in every format."""
    for format in FORMATS:
        assert run("report", *paths, "-f", format)[0] == 0


def run_each(*args: Any, options: str) -> list[int]:
    """Run a command with each of some options of a hostile value; return the exit codes."""
    values = {
        option: EVIL + "\0" * (option in ("--run-dir", "--out")) for option in options.split()
    }
    return [run(*args, option, value)[0] for option, value in values.items()]


FREE = {"text", "notes", "ids", "texts", "name", "names", "labels", "reason", "data", "model"}
FREE |= {"origins", "places", "command", "path", "spec", "hostname", "device_name", "advice"}


def tainted(value: Any, key: str = "") -> Any:
    """Return a document with hostile text behind every string under a key of free text."""
    if isinstance(value, dict):
        return {name: tainted(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [tainted(each, key) for each in value]
    return value + EVIL if isinstance(value, str) and key in FREE else value


def damaged(path: Path) -> list[str]:
    """Return documents with hostile keys and values where lipaudit expects its own."""
    document = json.loads(path.read_text())
    texts = [json.dumps(document | {key: EVIL}) for key in document]
    texts.append(json.dumps(document | {EVIL: EVIL}))
    for key in ("rows", "settings", "name", "samples"):
        section = document["sections"][0] | {key: EVIL}
        texts.append(json.dumps(document | {"sections": [section]}))
    section = document["sections"][0]
    row = {EVIL: EVIL} | {name + EVIL: each for name, each in section["rows"][0].items()}
    texts.append(json.dumps(document | {"sections": [section | {"rows": [row]}]}))
    texts.append(json.dumps(document | {"sections": [section | {EVIL: EVIL}]}))
    return texts


@pytest.mark.parametrize("data", ["pictures", "keys.npz", "arrays.npz", "rows.csv", "rows.jsonl"])
@pytest.mark.parametrize("command", ["bounds", "attack", "check"])
def test_data(folder, data, command):
    more = {"attack": ["--attack", "fgsm", "--eps", "0.1"]}.get(command, [])
    saved = folder / "data.json"
    line = (command, "demo", "-n", 1, "--data", folder / data, *more)
    code, said = run(*line, "-f", "json", "-o", saved)
    assert code == 0 or data != "pictures", said
    if code == 0 and command == "attack":
        show(saved)


def test_reports_and_text_files(folder, reports):
    for path in reports:
        show(path)
        for format in FORMATS:
            run("compare", path, path, "-f", format)
            run("inspect", path, "-f", format)
        for format in GATE:
            run("gate", path, "-b", path, "-f", format)
        files = [folder / f"out.{end}" for end in ("md", "html", "csv", "json", "tex")]
        assert run("report", path, *(word for file in files for word in ("-o", file)))[0] == 0
        assert not [file for file in files if OBEYED.search(file.read_text())]
    for text in damaged(path):
        (folder / "bad.json").write_text(text)
        run("report", folder / "bad.json", "-f", "markdown")
        run("gate", folder / "bad.json", "-b", path)


def assert_shown(folder: Path) -> None:
    """Check every text file below a folder, its JSON without reading it."""
    for path in folder.rglob("*"):
        if path.suffix in (".json", ".jsonl", ".html", ".md", ".csv", ".txt", ".tex"):
            found = OBEYED.search(path.read_bytes().decode())
            assert found is None, (path, found)


def test_baselines(folder, reports):
    path, kept = reports[1], folder / f"kept{EVIL}" / f"base{EVIL}.json"
    kept.parent.mkdir()
    assert run("baseline", "save", path, "-o", kept, "--reason", EVIL)[0] == 0
    assert run("baseline", "save", path, "-o", kept, "--reason", EVIL)[0] == 2
    assert run("baseline", "update", path, "-o", kept, "--reason", EVIL)[0] == 0
    for format in ("text", "json"):
        assert run("baseline", "check", kept, "-f", format)[0] == 0
    for format in GATE:
        run("gate", path, "-b", kept, "-f", format)
    assert_shown(kept.parent)
    for text in damaged(path):
        (folder / "bad.json").write_text(text)
        run("baseline", "check", folder / "bad.json")
        run("baseline", "update", folder / "bad.json", "-o", kept, "--reason", "x")
    for how in (EVIL, f"{EVIL}/{EVIL}", f"{path}/{EVIL}"):
        assert run("baseline", "check", how)[0] == 5
        assert run("baseline", "update", path, "-o", how + "/x", "--reason", "x")[0] == 2


def test_shards(folder, monkeypatch):
    monkeypatch.chdir(folder)
    parts = folder / f"parts{EVIL}"
    how = ("-n", 4, "--data", folder / "pictures", "--attack", "fgsm", "--eps", "0.1")
    how += ("--save-adv", f"made{EVIL}.safetensors", "--parts", parts)
    for number in (1, 2):
        assert run("attack", "demo", *how, "--shard", f"{number}/2")[0] == 0
    for format in FORMATS:
        assert run("merge", parts, "-f", format)[0] == 0
    merged = folder / "merged" / f"{EVIL}.json"
    merged.parent.mkdir()
    assert run("merge", parts, "-o", merged)[0] == 0
    assert_shown(merged.parent)
    described = parts / "shard-2-of-2.json"
    document = json.loads(described.read_text())
    described.write_text(json.dumps(tainted(document)))
    run("merge", parts)
    for key, value in document.items():
        other = {EVIL: value} if isinstance(value, dict) else EVIL
        described.write_text(json.dumps(document | {key: other}))
        assert run("merge", parts)[0] == 4
    described.write_text(json.dumps(document))
    assert run("merge", EVIL)[0] == 4


def test_certificates_and_audits(folder):
    pictures = ("-n", 2, "--data", folder / "pictures")
    certify = ("certify", f"py:{folder}/own.py:small", *pictures, "--eps", "0.001")
    audit = ("audit", "demo", *pictures, "--only", "attack,jacobian", "--eps", "0.1")
    audit += ("--attack", "fgsm")
    for line in (certify, audit):
        saved = folder / f"{line[0]}{EVIL}.json"
        assert run(*line, "-o", saved)[0] == 0
        show(saved)
    runs = folder / f"runs{EVIL}"
    assert run(*audit, "demo:robust", "--run-dir", runs)[0] == 0
    for format in ("table", "markdown"):
        assert run("report", *runs.glob("*/report.json"), "-f", format)[0] == 0
    assert_shown(runs)
    assert run("audit", "demo", f"{folder}/own.py:{EVIL}", *audit[2:])[0] != 0
    run_each("audit", "demo", "-n", 1, options="--only --skip --eps --norm --run-dir")
    codes = run_each("certify", "demo", "-n", 1, options="--eps --nodes --seconds --norm")
    assert codes == [2] * 4


def test_saved_texts_read_back_as_they_were():
    kept = {"id": "a", "text": EVIL, "original": EVIL}
    saved = encode_table([Part(("a",), {"label": np.zeros(1, int)}, {"texts": [kept]})]).decode()
    assert not OBEYED.search(saved)
    assert json.loads(saved)["text"] == EVIL


@pytest.mark.parametrize("name", ["named", "fails", "refuses"])
def test_own_models(folder, name):
    how = ("--data", folder / "arrays.npz", "-n", 2, "--layers", "0")
    model = f"py:{folder}/own.py:{name}"
    for more in [("-v",)] if name == "named" else [(), ("-v",)]:
        run("bounds", model, *how, *more)
        run("check", model, *how[:4], *more)
    run("audit", model, *how[:4], "--only", "jacobian,attack", "--eps", "0.1", "--attack", "fgsm")
    for format in FORMATS[:2]:
        code, said = run("bounds", model, *how, "-f", format, "-o", folder / f"{name}.json")
        assert (code == 0) == (name == "named"), said
    if code == 0:
        show(folder / f"{name}.json")
    run("audit", "demo", model, *how[:4], "--only", "jacobian", "-v")
    run("watch", folder, "--arch", model, *how[:4])
    run("train", model, *how[:2], "--epochs", 1, "--out", folder / f"out-{name}")


def test_trainings(folder):
    out = folder / f"trained{EVIL}"
    pictures = folder / "pictures"
    line = ("train", "demo", "--data", pictures, "--held-out", pictures, "--epochs", 1)
    line += ("--batch-size", 2, "--out", out)
    assert run(*line)[0] == 0
    assert run(*line)[0] == 2
    assert run(*line, "--resume")[0] == 0
    assert run(*line, "--resume", "-f", "json")[0] == 0
    assert_shown(out)
    record = json.loads((out / "train.json").read_text())
    for key in record:
        other = {EVIL: EVIL} if isinstance(record[key], dict) else EVIL
        (out / "train.json").write_text(json.dumps(record | {key: other}))
        run(*line, "--resume")
    (out / "train.json").write_text(EVIL)
    run(*line, "--resume")
    (out / "checkpoint.pt").write_text(EVIL)
    run(*line, "--resume")
    options = "--data --held-out --penalty --lr --adversarial --out"
    assert 0 not in run_each("train", "demo", options=options)


def test_checkpoints(folder):
    root = folder / f"checkpoints{EVIL}"
    for name in (f"checkpoint-1{EVIL}", f"{EVIL}checkpoint-2", f"checkpoint-3{EVIL}"):
        (root / name).mkdir(parents=True)
        save_net(load_net("demo"), root / name)
    config = root / f"checkpoint-3{EVIL}/config.json"
    config.write_text(json.dumps(tainted(json.loads(config.read_text())) | {EVIL: EVIL}))
    (root / f"step_4{EVIL}.pt").write_text(EVIL)
    line = ("watch", root, "--data", folder / "pictures", "-n", 1, "--only", "jacobian")
    page = folder / "pages" / f"{EVIL}.html"
    page.parent.mkdir()
    assert run(*line, "-o", page, "-f", "markdown")[0] != 0  # the last cannot be read
    run(*line)
    reports = sorted((root / "lipaudit-checkpoints").glob("step-*.json"))
    assert len(reports) == 3
    for format in ("table", "markdown", "html", "json"):
        assert run("report", *reports, "--rank-by", "order", "-f", format)[0] == 0
    assert_shown(root)
    assert_shown(page.parent)
    run("watch", f"{root}{EVIL}")
    run_each("watch", root, options="--run-dir --eps")


@pytest.mark.parametrize("start", ["", "hf:", "py:", "timm:", "demo:", "hf:a/", "py:own.py:"])
def test_names_of_models_and_data(start):
    for command in ("bounds", "audit", "certify", "report", "compare"):
        assert run(command, start + EVIL)[0] != 0
    assert run("bounds", "demo", "--data", start + EVIL)[0] == 4


def test_values_of_options(folder):
    options = "--attack --eps --norm --layers --device -f --mean -o"
    assert 0 not in run_each("attack", "demo", "-n", 1, options=options)
    assert 0 not in [
        run(*each)[0] for each in (("explain", EVIL), (EVIL,), ("bounds", f"--{EVIL}"))
    ]


@pytest.mark.parametrize(
    "text",
    [
        'QUOTED = "1"', "[QUOTED]\nsamples = 1", "[bounds]\nQUOTED = 1", "samples = QUOTED",
        "[bounds]\nsamples = QUOTED", "device = QUOTED", "[gate]\nfail_on = [QUOTED]", "RAW = 1",
        "samples = [RAW",
    ],
)  # fmt: skip
def test_configurations(tmp_path, text):
    path = tmp_path / f"{EVIL}.toml"
    path.write_text(text.replace("QUOTED", json.dumps(EVIL)).replace("RAW", EVIL), newline="")
    run("bounds", "demo", "-n", 1, "--config", path)
