"""No random command line and no damaged report, baseline, shard or other file is a bug.

Options are those of the application, by their types; values are usual, at the edge, or junk. Of
damaged reports the exit code is 0 (of the gate also 1), 4, 5 or 6, and an error is one line with
one hint. The long runs: python -m pytest -m slow FILE with FUZZ_INPUTS=5000 DAMAGED=3000
FUZZ_SEED=1 DAMAGED_SEED=1.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from PIL import Image
from safetensors.torch import save_file

import lipaudit
from lipaudit.schema import dumps
from tests.commands import invoke, list_commands
from tests.report.conftest import make_report

VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 3, 10**400, 1e308, 1e-320, "NaN", "Infinity", "-Infinity"),
    *("x", "", "\x00", "\ud800", "é" * 300, [], {}, [None], [[]], {"a": None}, ["x"], "2/255"),
)
CRAFTED: list[tuple[str, tuple[str | int, ...], Any]] = [
    ("report bad.json", (0, "rows"), None),
    ("report bad.json", (3, "settings", "k"), []),
    ("report bad.json", (3, "arrays", "map_tokens@1.2", "data", 0), None),
    ("report bad.json", (4, "samples", "norm", 0), ""),
    ("report bad.json", (5, "rows", 0, "robust"), -1),
    ("report bad.json", (8, "rows", 0, "n"), -1),
    ("report bad.json", (8, "rows", 0, "n"), 0),
    ("gate bad.json -b whole.json", (5, "rows", 0, "robust"), 1e308),
    ("compare whole.json bad.json", (5, "samples", "ids"), ...),
    ("compare bad.json whole.json", (5, "samples", "ids"), ...),
]
"""What once ended in an internal error: a command, a place in a section, a value (...: none)."""
READERS = (
    *("report bad.json", "report bad.json whole.json", "inspect bad.json"),
    *("compare bad.json whole.json", "compare whole.json bad.json"),
    *("gate bad.json -b whole.json", "gate whole.json -b bad.json", "baseline check bad.json"),
    *("baseline update bad.json -o new.json --reason x", "merge run"),
)
FORMATS = {"gate": ("text", "html", "junit"), "baseline": ("text", "json")}
FACE = re.compile(r"error: [^\n]+\n(  hint: [^\n]+\n)?")


SHARD = "run/shard-1-of-1"


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Path:
    """The folder of a shard, which is all of a run."""
    how: dict[str, Any] = {"samples": 4, "eps": "0.1", "attack": "fgsm"}
    folder = tmp_path_factory.mktemp("parts") / "run"
    lipaudit.measure("demo", "attack", shard="1/1", parts=folder, **how)
    return folder


@pytest.fixture
def documents(parts) -> dict[str, str]:
    """A report of every measure, and what a folder of parts says of its shard."""
    shutil.copytree(parts, "run")
    return {"whole": dumps(make_report()), SHARD: Path(f"{SHARD}.json").read_text()}


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container of a document with each of its keys; of lists the first two items."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:2])
    for key, each in inner:
        yield value, key
        if isinstance(each, dict | list):
            yield from places(each)


def change(document: Any, chosen: random.Random, others: list[Any]) -> None:
    """Change a document in one place."""
    everywhere = list(places(document))
    if not everywhere:
        return
    inside, key = chosen.choice(everywhere)
    how = chosen.choice(["value", "value", "remove", "double", "rename", "swap", "shorten"])
    if how == "remove":
        del inside[key]
    elif how == "double" and isinstance(inside, list):
        inside.insert(key, deepcopy(inside[key]))
    elif how == "rename" and isinstance(inside, dict):
        name = chosen.choice(["x", "ids", "robust@x", "robust@worst,linf,0.1", "1.2"])
        inside[name] = inside.pop(key)
    elif how == "swap":
        elsewhere, other = chosen.choice(list(places(chosen.choice(others))))
        inside[key] = deepcopy(elsewhere[other])
    elif how == "shorten" and isinstance(inside[key], list | str):
        inside[key] = inside[key][: len(inside[key]) // 2]
    else:
        inside[key] = chosen.choice(VALUES)


def damage(text: str, chosen: random.Random, others: list[str]) -> str:
    """Return a document that is cut, or changed in one to three places."""
    if chosen.random() < 0.05:
        return text[: chosen.randrange(len(text))]
    document, loaded = json.loads(text), [json.loads(other) for other in others]
    for _ in range(chosen.choice([1, 1, 2, 3])):
        change(document, chosen, loaded)
    return json.dumps(document)


def is_internal(done: Result) -> bool:
    """Say whether a command ended in an error of our own."""
    leaked = done.exception is not None and not isinstance(done.exception, SystemExit)
    return leaked or "internal error" in done.stderr


def read_damaged(line: str, *options: str) -> tuple[int, str]:
    """Run a command; return its exit code, and what is wrong with how it ended."""
    done = invoke(*line.split(), *options, code=None)
    # A judgement is no error: its exit code is that of its gravest verdict, whatever that is.
    judged = line.startswith("gate") and done.stdout and not done.stderr
    fine = {0, 1, 3, 5, 6} if judged else {0, 4, 5}
    fault = ""
    if is_internal(done) or done.exit_code not in fine:
        fault = f"exit {done.exit_code}: {done.exception!r} {done.stderr[-500:]}"
    elif done.exit_code in (4, 5) and not judged and not FACE.fullmatch(done.stderr):
        fault = f"not one line: {done.stderr[-500:]}"
    return done.exit_code, fault


def write(name: str, text: str) -> None:
    with open(f"{name}.json", "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)


def try_damaged(documents: dict[str, str], seed: int, count: int) -> tuple[list[str], set[int]]:
    """Try so many damaged files; return what is wrong, and the exit codes."""
    for name, text in documents.items():
        write(name, text)
    chosen, faults, codes = random.Random(seed), [], set()
    for number in range(count):
        line = chosen.choice(READERS)
        name, bad = (SHARD, SHARD) if "merge" in line else ("whole", "bad")
        write(bad, damage(documents[name], chosen, [chosen.choice([*documents.values()])]))
        format = chosen.choice(FORMATS.get(line.split()[0], ("table", "markdown", "html", "json")))
        code, fault = read_damaged(line, *([] if "update" in line else ["-f", format]))
        codes.add(code)
        if fault:
            faults.append(f"#{number} {line}: {fault}")
            print(faults[-1], flush=True)
    return faults, codes


ROUND = 60
"""Command lines for each directory of files."""

JUNK = ["", " ", "x", "-1", "0", "1e999", "nan", "²", "١", "ß" * 300, "\U0001f600", "../..", "a=b"]
JUNK += ["9" * 30, "9" * 5000, ",", ",,", "1,,2", "2-1", "[", "%s", "{x}", "[bold]", "\\", "None"]
NUMBERS = ["0", "1", "2", "3", "-1", "0.5", "1.0", "1e-4", "1e308", "1e-320", "inf", "-inf", "nan"]
NUMBERS += ["2147483648", str(2**63 - 1), str(2**63), str(-(2**63) - 1), "9" * 400, "0x10", "1_0"]
MODELS = ["demo"] * 12 + ["demo:jasmin", "demo:robust", "demo:", "demo:x", "timm:nope", "timm:"]
MODELS += ["hf:", "hf:a/b/c", "hf:a", "py:", "py:x", "py:own.py:model", "py:own.py:fails", "vit"]
MODELS += [f"py:own.py:{name}" for name in ("nothing", "nope", "image", "text")] + ["a/b"]
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
    "fail_on": ["jacobian.norm:median <= +5%", "attack.robust >= -2pp", "x", "bounds.exact <="],
    "epochs": ["1"],
    "penalty": ["jasmin", "specformer"],
    "kind": ["py"],
    "name": ["sharp", "bounds", "jacobian.norm", "tol", "vit_tiny", "g1", "bounds.", "."],
}
"""Values of some options and arguments that mean something, by parameter."""

OWN = """
from lipaudit import ModelSpec
from lipaudit.models.sources.timm import load_demo
from tests.measures.cases import Words
def model(): return load_demo("standard").module
def fails(): raise RuntimeError("no")
def nothing(): return None
def image(): return ModelSpec(model(), (1, 8, 8))
def text(): return ModelSpec(Words(), (12,), kind="text", vocabulary=50)
"""


def find_fault(args: tuple[str, ...], seconds: float) -> str:
    """Run a command line, interrupted after so much computing; say what is wrong with its end.

    Seconds of the processor, not of the clock: a busy machine tries the same.
    """
    stopped = []

    def stop(*_: object) -> None:
        stopped.append(True)
        raise KeyboardInterrupt

    before, report = signal.signal(signal.SIGPROF, stop), sys.unraisablehook
    # Again and again: a finalizer may swallow it, which is nobody's fault.
    sys.unraisablehook = lambda lost: lost.exc_type is KeyboardInterrupt or report(lost)
    signal.setitimer(signal.ITIMER_PROF, seconds, seconds)
    try:
        done = invoke(*args, code=None)
    except KeyboardInterrupt:
        return ""
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        sys.unraisablehook = report
    traced = "Traceback" in done.stderr and not {"-v", "--verbose"} & {*args}
    if is_internal(done) or traced:
        return f"{done.exception!r} {done.stderr[-600:]}"
    if stopped:
        return ""
    if done.exit_code not in {0, 2, 3, 4, 5, 6} | ({1} if args[0] == "gate" else set()):
        return f"exit code {done.exit_code}: {done.stderr[-300:]}"
    partial = "the report is partial" in done.stderr
    if done.stdout and not partial and "error: " in done.stderr:
        return f"stdout beside an error: {done.stdout[:200]}"
    return ""


class Typist:
    """Types command lines out of the application's own parameters.

    Args:
        seed: decides all of them.
        files: names of files to choose from.
    """

    def __init__(self, seed: int, files: list[str]) -> None:
        self.random, self.files = random.Random(seed), files
        self.commands = list_commands()

    def line(self) -> tuple[str, ...]:
        """Return the next command line."""
        name = self.random.choice(list(self.commands))
        line, options = name.split(), []
        for parameter in self.commands[name].params:
            if parameter.name == "help":
                continue
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


def write_files(seed: int, originals: list[str], count: int) -> list[str]:
    """Write files of every kind that is read, whole and damaged, into the working directory."""
    rng = random.Random(seed)
    write_whole(originals)
    whole = sorted(str(p) for p in Path().iterdir())
    for number in range(count):
        path = Path(rng.choice([name for name in whole if Path(name).is_file()]))
        copy = Path(f"m{number}{path.suffix}")
        if re.fullmatch(r"r\d.json", path.name):
            copy.write_text(damage(path.read_text(), rng, originals))
        else:
            copy.write_bytes(change_bytes(path.read_bytes(), rng))
    return sorted(str(p) for p in Path().iterdir()) + ["nowhere.json", "no/where.npz", "."]


def write_whole(reports: list[str]) -> None:
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
    Path("c.toml").write_text('samples = 1\n[gate]\nfail-on = ["attack.robust >= -2pp"]\n')
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
    large = f'{{"schema": "lipaudit.report", "schema_version": 1{"0" * 5000}}}'
    Path("big.json").write_text(large)
    Path("\u00fcml\u00e4ut \U0001f600.json").write_text("{}")
    Path("broken.json").symlink_to("gone.json")
    Path("loop.npz").symlink_to("loop.npz")
    Path("locked.json").write_text("{}")
    Path("locked.json").chmod(0)


def change_bytes(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(rng.choice([0, 1, 1, 5, 50])):
        if data:
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.choice([len(data), len(data), len(data) // 2, 7])])


@pytest.fixture(scope="module")
def reports() -> list[str]:
    """Reports as they are written: two measured ones, and one of every measure."""
    for name in ("timm", "transformers", "torch._dynamo", "sklearn", "safetensors.torch"):
        import_module(name)  # an interrupted import would leave half a module behind
    few = {"jacobian": {}, "attack": {"eps": "0.1", "attack": "fgsm"}}
    measured = [lipaudit.measure("demo", name, samples=2, **how) for name, how in few.items()]
    return [dumps(report) for report in (*measured, make_report())]


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    def refused(*_args, **_options):
        raise OSError("no network in a test")

    monkeypatch.setattr(socket.socket, "connect", refused)


def find_faults(root: Path, reports: list[str], *, seed: int, inputs: int, seconds: float):
    """Try command lines, in a fresh directory of files for each round: a line may spoil it."""
    faults = []
    for start in range(seed, seed + inputs, ROUND):
        folder = root / f"play{start}"
        folder.mkdir()
        with contextlib.chdir(folder):
            typist = Typist(start, write_files(start, reports, 40))
            for _ in range(min(ROUND, seed + inputs - start)):
                line = typist.line()
                if fault := find_fault(line, seconds):
                    faults.append(f"{line}: {fault}")
                    print(faults[-1], flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    return faults


def test_nothing_that_is_typed_is_a_bug(tmp_path, reports):
    assert find_faults(tmp_path, reports, seed=0, inputs=60, seconds=0.3) == []


@pytest.mark.slow(seconds=300)
def test_nothing_that_is_typed_is_a_bug_at_length(tmp_path, reports):
    inputs, seed = (int(os.environ.get(*e)) for e in (("FUZZ_INPUTS", 3000), ("FUZZ_SEED", 1)))
    assert find_faults(tmp_path, reports, seed=seed, inputs=inputs, seconds=2.0) == []


BLANK = pytest.mark.usefixtures("blank_charts")


@BLANK
def test_damaged_files_are_shown_or_refused_in_one_line(documents):
    faults, codes = try_damaged(documents, seed=0, count=45)
    assert faults == []
    assert {0, 4} <= codes


@BLANK
@pytest.mark.slow(seconds=300)
def test_many_damaged_files(documents):
    count, seed = (int(os.environ.get(*e)) for e in (("DAMAGED", "3000"), ("DAMAGED_SEED", "1")))
    assert try_damaged(documents, seed, count)[0] == []


@BLANK
@pytest.mark.parametrize(("line", "place", "value"), CRAFTED)
def test_what_once_was_an_internal_error(documents, line, place, value):
    write("whole", documents["whole"])
    document = inner = json.loads(documents["whole"])
    for key in ("sections", *place[:-1]):
        inner = inner[key]
    if value is ...:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    write("bad", json.dumps(document))
    for format in ("table", "markdown", "html", "json"):
        assert not read_damaged(line, "-f", format)[1]
