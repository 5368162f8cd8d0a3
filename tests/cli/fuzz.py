"""Random command lines and files: what a user may type, by accident or not.

Options are those of the application, by their types; values are usual, at the edge, or junk.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer.main
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

import lipaudit
from lipaudit.cli.commands import build
from lipaudit.schema import dumps

JUNK = ["", " ", "x", "-1", "0", "1e999", "nan", "²", "١", "ß" * 300, "\U0001f600", "../..", "a=b"]
JUNK += ["9" * 30, "9" * 5000, ",", ",,", "1,,2", "2-1", "[", "%s", "{x}", "[bold]", "\\", "None"]
NUMBERS = ["0", "1", "2", "3", "-1", "0.5", "1.0", "1e-4", "1e308", "1e-320", "inf", "-inf", "nan"]
NUMBERS += ["2147483648", str(2**63 - 1), str(2**63), str(-(2**63) - 1), "9" * 400, "0x10", "1_0"]
MODELS = ["demo"] * 12 + [
    "demo:jasmin",
    "demo:robust",
    "demo:",
    "demo:x",
    "timm:nope",
    "timm:",
]
MODELS += ["hf:", "hf:a/b/c", "hf:a", "py:", "py:x", "py:own.py:model", "py:own.py:fails"]
MODELS += [
    "py:own.py:nothing",
    "py:own.py:nope",
    "py:own.py:image",
    "py:own.py:text",
    "vit",
    "a/b",
]
USUAL = {
    "samples": ["1", "2"],
    "model": MODELS,
    "layers": ["0", "0,1", "1-2", "7", "0-99"],
    "eps": ["0.1", "2/255", "0", "1", "1/0", "1/255,2/255", "0.1,0.1", "-1"],
    "attack": ["fgsm", "pgd", "fgsm,pgd", "square", "custom:fgsm", "custom:", "paper", "quick"],
    "norm": ["linf", "l2", "token-l2", "2", "inf"],
    "modes": ["real", "radius", "real,real", "adversarial", "ascent"],
    "lengths": ["8:16:log2", "2:3:log2", "16:8:log2", "2:9:log1", "8:999999999999:log3"],
    "heads": ["0.0", "all", "9.9", "0.0,0.0", "a.b"],
    "map": ["0.0", "1.3", "9.9", "a"],
    "query": ["0", "3", "99"],
    "start": ["pixels", "embeddings"],
    "target": ["logits", "probabilities", "features", "tokens"],
    "device": ["cpu", "auto", "meta", "cuda", "mps", "cpu:7"],
    "dtype": ["float32", "float64", "float16"],
    "batch_size": ["auto", "1", "3"],
    "format": ["table", "json", "markdown", "html", "junit", "JSON"],
    "mean": ["0.5", "0.5,0.5,0.5", "nan"],
    "std": ["0.5", "0", "-1", "1,2"],
    "input_size": ["8", "1,8,8", "8,8", "3,8,8", "1,2,3,4", "0"],
    "model_kwargs": ["pretrained=false", "a=1", "=", "a", "a=1,a=2"],
    "only": ["jacobian", "attention,jacobian", "nope", "attack"],
    "skip": ["bounds", "attack", "scaling"],
    "arch": ["timm:vit_tiny_patch16_224", "timm:nope", "x"],
    "fail_on": [
        "jacobian.norm:median <= +5%",
        "attack.robust >= -2pp",
        "x",
        "bounds.exact:each <=",
    ],
    "epochs": ["1"],
    "penalty": ["jasmin", "specformer"],
    "kind": ["py"],
    "name": ["sharp", "bounds", "jacobian.norm", "tol", "vit_tiny", "g1", "bounds.", "."],
}
"""Values of some options and arguments that mean something, by parameter."""

OWN = """
import torch
from torch import nn
from lipaudit import ModelSpec
from lipaudit.models.sources.demo import load_demo
def model(): return load_demo("standard").module
def fails(): raise RuntimeError("no")
def nothing(): return None
def image(): return ModelSpec(model(), (1, 8, 8))
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 2)
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
    def forward(self, ids, mask=None):
        x = self.embed(ids)
        hidden = None if mask is None else ~mask
        return self.head((x + self.mix(x, x, x, hidden, need_weights=False)[0]).mean(1))
def text(): return ModelSpec(Words(), (12,), kind="text", vocabulary=50)
"""


@dataclass(frozen=True)
class Outcome:
    """What an input came to.

    Attributes:
        args: the command line.
        code: its exit code.
        stdout: what it printed.
        stderr: what it said.
        error: an exception that got out.
        stopped: whether it took too long and was interrupted.
    """

    args: tuple[str, ...]
    code: int
    stdout: str
    stderr: str
    error: BaseException | None
    stopped: bool

    @property
    def fault(self) -> str:
        """Say what is wrong with it; empty where nothing is."""
        leaked = self.error is not None and not isinstance(self.error, SystemExit)
        traced = "Traceback" in self.stderr and not {"-v", "--verbose"} & {*self.args}
        if leaked or traced or "internal error" in self.stderr:
            return f"{self.error!r} {self.stderr[-600:]}"
        if self.stopped:
            return ""
        known = {0, 2, 3, 4, 5, 6} | ({1} if self.args[0] == "gate" else set())
        if self.code not in known:
            return f"exit code {self.code}: {self.stderr[-300:]}"
        partial = "the report is partial" in self.stderr
        if self.stdout and not partial and "error: " in self.stderr:
            return f"stdout beside an error: {self.stdout[:200]}"
        return ""


def run(args: tuple[str, ...], seconds: float) -> Outcome:
    """Run a command line here, and interrupt it after so much computing, as Ctrl-C would.

    Seconds of the processor, not of the clock: a busy machine tries the same.
    """
    stopped = []

    def stop(*_: object) -> None:
        stopped.append(True)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGPROF, stop)
    # Again and again: a finalizer may swallow it.
    signal.setitimer(signal.ITIMER_PROF, seconds, seconds)
    try:
        done = CliRunner().invoke(build(), args)
        error = done.exception
        found = (int(done.exit_code), done.stdout, done.stderr)
    except KeyboardInterrupt:
        found, error = (130, "", ""), None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    return Outcome(args, *found, error, bool(stopped))


class Typist:
    """Types command lines out of the application's own parameters.

    Args:
        seed: decides all of them.
        files: names of files to choose from.
    """

    def __init__(self, seed: int, files: list[str]) -> None:
        self.random, self.files = random.Random(seed), files
        self.commands = dict(_commands(typer.main.get_command(build())))

    def line(self) -> tuple[str, ...]:
        """Return the next command line."""
        name = self.random.choice(list(self.commands))
        line, options = name.split(), []
        for parameter in self.commands[name]:
            if not parameter.opts[0].startswith("-"):
                many = self.random.randint(1, 3) if parameter.nargs == -1 else 1
                line += [self._value(parameter) for _ in range(many)]
            else:
                options.append(parameter)
        drawn = self.random.sample(options, min(len(options), self.random.randint(0, 4)))
        least = [o for o in options if o.name in ("samples", "epochs") and o not in drawn]
        for option in drawn + least:
            flag = self.random.choice([*option.opts, *option.secondary_opts])
            line.append(flag)
            if not option.is_flag:
                line.append("1" if option in least else self._value(option))
        return tuple(line)

    def _value(self, parameter: Any) -> str:
        usual = USUAL.get(parameter.name or "", [])
        named = parameter.name in ("data", "config", "reports", "report", "baseline", "held_out")
        named |= parameter.name in ("current", "results", "run_dir", "out", "output", "file")
        pools = [usual] * 6 + [JUNK, NUMBERS] if usual else [JUNK, NUMBERS]
        pools += [self.files] * (8 if named else 1)
        pools += [["random", "demo", "hf:", "hf:x"]] if parameter.name == "data" else []
        return self.random.choice(self.random.choice(pools))


def _commands(root: Any, prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    for name, command in root.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, [p for p in command.params if p.name != "help"]


def write_files(seed: int, originals: list[str], count: int) -> list[str]:
    """Write files of every kind that is read, whole and damaged, into the working directory."""
    rng = random.Random(seed)
    _write_whole(originals)
    whole = sorted(str(p) for p in Path().iterdir())
    for number in range(count):
        path = Path(rng.choice([name for name in whole if Path(name).is_file()]))
        copy = Path(f"m{number}{path.suffix}")
        if path.suffix == ".json" and rng.random() < 0.8:
            copy.write_text(_changed_json(path, rng))
        else:
            copy.write_bytes(_changed_bytes(path.read_bytes(), rng))
    return sorted(str(p) for p in Path().iterdir()) + ["nowhere.json", "no/where.npz", "."]


def _write_whole(reports: list[str]) -> None:
    for number, text in enumerate(reports):
        Path(f"r{number}.json").write_text(text)
    x = np.random.default_rng(0).integers(0, 256, (3, 1, 8, 8), dtype=np.uint8)
    np.savez("x.npz", x=x, y=np.arange(3))
    np.savez("odd.npz", x=np.zeros((0, 1, 8, 8)), y=np.array(["a"]))
    np.savez("words.npz", x=np.array([[1, 2, 3], [4, 5, 6]]), y=np.array([0, 1]))
    np.savez("objects.npz", x=np.array([{}, None], dtype=object))
    save_file({"x": torch.rand(2, 1, 8, 8), "y": torch.arange(2)}, "x.safetensors")
    torch.save({"state_dict": {"a": torch.ones(2)}}, "w.pt")
    Path("t.csv").write_text("text,label\nhello there,0\n,1\n")
    Path("t.jsonl").write_text('{"text": "a", "label": 0}\n{"text": "b"}\n')
    Path("t.tsv").write_text("text\tlabel\n\u00fc\t1\n")
    Path("t.txt").write_text("some words\n" * 9)
    Path("c.toml").write_text(
        'samples = 1\nseed = 3\n[gate]\nfail-on = ["attack.robust >= -2pp"]\n'
    )
    Path("pic").mkdir()
    Image.new("L", (8, 8)).save("pic/a.png")
    Path("torn").mkdir()
    Path("torn/b.png").write_bytes(Path("pic/a.png").read_bytes()[:40])
    Path("model").mkdir()
    Path("model/config.json").write_text('{"model_type": "bert"}')
    Path("void").mkdir()
    Path("own.py").write_text(OWN)
    Path("empty.json").touch()
    Path("empty.npz").touch()
    Path("deep.json").write_text("[" * 200_000)
    Path("big.json").write_text(
        '{"schema": "lipaudit.report", "schema_version": 1' + "0" * 5000 + "}"
    )
    Path("\u00fcml\u00e4ut \U0001f600.json").write_text("{}")
    Path("broken.json").symlink_to("gone.json")
    Path("loop.npz").symlink_to("loop.npz")
    Path("locked.json").write_text("{}")
    Path("locked.json").chmod(0)


VALUES: list[Any] = [None, -1, 0, 10**400, 1e308, "NaN", "Infinity", "x", "", [], {}, True, [[]]]
VALUES += [{"a": 1}, "\x00", "<b>&", "2/255", -0.5, ["x"], 10**18]


def _changed_json(path: Path, rng: random.Random) -> str:
    """Change one to three values of a document, somewhere."""
    try:
        document = json.loads(path.read_text())
    except (ValueError, RecursionError):
        return path.read_text()[:1000]
    for _ in range(rng.randint(1, 3)):
        place, key = _place(document, rng)
        if place is None:
            break
        how = rng.random()
        if how < 0.25:
            del place[key]
        elif how < 0.35 and isinstance(place, list):
            place.append(place[key])
        else:
            place[key] = rng.choice(VALUES)
    return json.dumps(document)


def _place(value: Any, rng: random.Random) -> tuple[Any, Any]:
    """Return where in a document something stands: a container and a key."""
    while isinstance(value, dict | list) and value:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        inner = value[key]
        if not (isinstance(inner, dict | list) and inner) or rng.random() < 0.15:
            return value, key
        value = inner
    return None, None


def _changed_bytes(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(rng.choice([0, 1, 1, 5, 50])):
        if data:
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.choice([len(data), len(data), len(data) // 2, 7])])


def originals() -> list[str]:
    """Return reports as they are written: of every measure, and a partial one."""
    for name in ("timm", "transformers", "torch._dynamo", "sklearn", "safetensors.torch"):
        import_module(name)  # an interrupted import would leave half a module behind
    reports = [lipaudit.measure("demo", "jacobian", samples=3)]
    reports.append(lipaudit.measure("demo", "attack", samples=3, eps="0.1", attack="fgsm"))
    reports.append(lipaudit.measure("demo", "bounds", samples=2))
    reports.append(lipaudit.measure("demo", "attention", samples=2, map="0.0"))
    return [dumps(report) for report in reports]


@contextmanager
def playground(root: Path, seed: int, reports: list[str], files: int) -> Iterator[list[str]]:
    """Go to a fresh directory full of files; where one spoils it, the next starts anew."""
    back = Path.cwd()
    folder = root / f"play{seed}"
    folder.mkdir(parents=True)
    os.chdir(folder)
    try:
        yield write_files(seed, reports, files)
    finally:
        os.chdir(back)
        shutil.rmtree(folder, ignore_errors=True)
