"""Hostile names and values in every command and format: no control character comes out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import lipaudit
from lipaudit.cli.commands import build
from lipaudit.schema import dumps

EVIL = "=a\x1b]0;t\x07\x9b2J\x7f\u202e\r|`<b>"
"""A title and a bell, a cleared screen, a turned direction, a formula, a table's bar, HTML."""
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
FORMATS = ("table", "json", "markdown", "html", "csv", "latex")
GATE = ("text", *FORMATS[:4], "junit", "brief")


def run(*args: Any) -> tuple[int, str]:
    """Run a command; what it writes holds nothing that a terminal obeys.

    Returns:
        The exit code, and all that it wrote.
    """
    done = CliRunner().invoke(build(), [str(each) for each in args])
    assert done.exception is None or isinstance(done.exception, SystemExit), args
    said = done.stdout + done.stderr
    assert "internal error" not in said, (args, said[-400:])
    found = OBEYED.search(said)
    assert found is None, (args, said[max(0, found.start() - 80) : found.end() + 40])
    return done.exit_code, said


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder of pictures, arrays and reports with hostile names and values."""
    root = tmp_path_factory.mktemp("x") / EVIL
    for name in ("0", f"1{EVIL}"):
        (root / "pictures" / name).mkdir(parents=True)
        for i in range(2):
            pixels = np.random.default_rng(i).integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "pictures" / name / f"{i}{EVIL}.png")
    np.savez(root / "keys.npz", **{EVIL: np.zeros(3)})
    np.savez(root / "arrays.npz", x=np.zeros((2, 1, 8, 8), dtype=np.uint8), y=np.arange(2))
    (root / "rows.csv").write_text(f"text,{EVIL}\na,{EVIL}\n", newline="")
    (root / "rows.jsonl").write_text(json.dumps({EVIL: EVIL}))
    return root


@pytest.fixture(scope="module")
def reports(folder) -> list[Path]:
    """Return reports of one model whose every free text is hostile."""
    options: dict[str, dict[str, Any]] = {
        "bounds": {"samples": 1, "layers": "0"},
        "attack": {"samples": 2, "eps": "0.1", "attack": "fgsm"},
    }
    paths = []
    for name, how in options.items():
        document = json.loads(dumps(lipaudit.measure("demo", name, **how)))
        paths.append(folder / f"{name}.json")
        paths[-1].write_text(json.dumps(tainted(document)))
    return paths


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
    for format in FORMATS if data == "pictures" and command == "attack" else FORMATS[:1]:
        run(command, "demo", "-n", 1, "--data", folder / data, "-f", format, *more)


def test_reports_and_text_files(folder, reports):
    for path in reports:
        for format in FORMATS:
            assert run("report", path, "-f", format)[0] == 0
            run("compare", path, path, "-f", format)
            run("inspect", path, "-f", format)
        for format in GATE:
            run("gate", path, "-b", path, "-f", format)
        for end in ("md", "html", "csv", "json", "tex"):
            file = folder / f"out.{end}"
            if run("report", path, "-o", file)[0] == 0:
                assert not OBEYED.search(file.read_text())


def test_damaged_reports(folder, reports):
    path = reports[1]
    for text in damaged(path):
        (folder / "bad.json").write_text(text)
        run("report", folder / "bad.json", "-f", "markdown")
        run("gate", folder / "bad.json", "-b", path)


@pytest.mark.parametrize("start", ["", "hf:", "py:", "timm:", "demo:", "hf:a/", "py:own.py:"])
def test_names_of_models_and_data(start):
    for command in ("bounds", "report", "compare"):
        assert run(command, start + EVIL)[0] != 0
    assert run("bounds", "demo", "--data", start + EVIL)[0] == 4


def test_values_of_options(folder):
    for option in ("--attack", "--eps", "--norm", "--layers", "--device", "-f", "--mean", "-o"):
        assert run("attack", "demo", "-n", 1, option, EVIL)[0] != 0
    assert run("explain", EVIL)[0] != 0
    assert run(EVIL)[0] != 0
    assert run("bounds", f"--{EVIL}")[0] != 0


@pytest.mark.parametrize(
    "text",
    [
        'QUOTED = "1"',
        "[QUOTED]\nsamples = 1",
        "[bounds]\nQUOTED = 1",
        "samples = QUOTED",
        "[bounds]\nsamples = QUOTED",
        "device = QUOTED",
        "[gate]\nfail_on = [QUOTED]",
        "RAW = 1",
        "samples = [RAW",
    ],
)
def test_configurations(tmp_path, text):
    path = tmp_path / f"{EVIL}.toml"
    path.write_text(text.replace("QUOTED", json.dumps(EVIL)).replace("RAW", EVIL), newline="")
    run("bounds", "demo", "-n", 1, "--config", path)
