"""Damaged reports, baselines and shards: shown, judged, or refused in one line.

Every file is changed in one to three places and given to a command that reads it. The exit code
is 0 (of the gate also 1), 4, 5 or 6, and an error is one line with one hint.

More: DAMAGED=3000 DAMAGED_SEED=7 python -m pytest -m slow -n 0 -s tests/cli/test_damaged.py
"""

import collections
import json
import os
import random
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import lipaudit
from lipaudit.schema import dumps
from tests.commands import invoke
from tests.report.conftest import make_report

MUTATIONS = 80
MEASURES: dict[str, dict[str, Any]] = {
    "bounds": {"samples": 1},
    "attention": {"samples": 1, "map": "0.0"},
    "jacobian": {"samples": 2, "per_layer": True},
    "attack": {"samples": 2, "eps": "0.1", "attack": "fgsm"},
    "certify": {"samples": 1, "eps": "0.01", "data": "demo"},
    "scaling": {"samples": 1, "modes": "real,radius", "lengths": "4:8:log2", "layers": "0"},
}
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 3, 10**400, 1e308, 1e-320, "NaN", "Infinity", "-Infinity"),
    *("x", "", "\x00", "\ud800", "é" * 300, [], {}, [None], [[]], {"a": None}, ["x"], "2/255"),
)
CRAFTED: list[tuple[str, str, tuple[str | int, ...], Any]] = [
    ("bounds", "report", ("sections", 0, "rows"), None),
    ("attention", "report", ("sections", 0, "settings", "k"), []),
    ("attention", "report", ("sections", 0, "arrays", "map_tokens@0.0", "data", 0), None),
    ("jacobian", "report", ("sections", 0, "samples", "norm", 0), ""),
    ("attack", "report", ("sections", 0, "rows", 0, "robust"), -1),
    ("attack", "gate", ("sections", 0, "rows", 0, "robust"), 1e308),
    ("scaling", "report", ("sections", 0, "rows", 0, "n"), -1),
    ("scaling", "report", ("sections", 0, "rows", 0, "n"), 0),
    ("everything", "compare", ("sections", 5, "samples", "ids"), ...),
]
"""What once ended in an internal error: a document, a command, a place, a value (...: none)."""
READERS = {
    "report": ("report", "compare", "gate", "inspect", "baseline", "promote", "rank"),
    "shard": ("merge", "report"),
}
"""The commands that read each kind of file."""
JUDGED = ("bounds", "jacobian", "attack", "certify")
"""Those that the rules of the gate are about."""
FORMATS = ("table", "markdown", "html", "json", "latex", "csv")
SHOWS = {
    "baseline": ("text", "json"),
    "inspect": FORMATS[:5],
    "gate": ("text", *FORMATS[:5], "junit"),
}
FACE = re.compile(r"error: [^\n]+\n(  hint: [^\n]+\n)?")


@dataclass(frozen=True)
class Case:
    """A damaged file, and the command that reads it.

    Attributes:
        how: the kinds of change that were made.
        text: of the file.
        args: the command line.
    """

    how: str
    text: str
    args: tuple[str, ...]


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> dict[str, str]:
    """One document of each kind, as it is written."""
    linear = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    quick = lipaudit.ModelSpec(linear, (1, 8, 8), classifier=True)
    texts = {
        name: dumps(lipaudit.measure(quick if name == "certify" else "demo", name, **options))
        for name, options in MEASURES.items()
    }
    texts["everything"] = dumps(make_report())
    folder = tmp_path_factory.mktemp("shards")
    for number in (1, 2):
        path = folder / f"{number}.json"
        args = ("attack", "demo", "-n", "4", "--eps", "0.1", "--attack", "fgsm")
        invoke(*args, "--shard", f"{number}/2", "-o", path)
        texts[f"shard{number}"] = path.read_text()
    return texts


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Yield every container of a document with each of its keys; of lists the first two items."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:2])
    for key, each in inner:
        yield value, key
        if isinstance(each, dict | list):
            yield from places(each)


def change(document: Any, chosen: random.Random, others: list[Any]) -> str:
    """Change a document in one place, and name the kind of change."""
    everywhere = list(places(document))
    if not everywhere:
        return "none"
    inside, key = chosen.choice(everywhere)
    how = chosen.choice(["value", "value", "remove", "double", "rename", "swap", "shorten"])
    if how == "remove":
        del inside[key]
    elif how == "double" and isinstance(inside, list):
        inside.insert(key, deepcopy(inside[key]))
    elif how == "rename" and isinstance(inside, dict):
        inside[chosen.choice(["x", "ids", "robust@x", "robust@worst,linf,0.1", "1.2"])] = (
            inside.pop(key)
        )
    elif how == "swap":
        elsewhere, other = chosen.choice(list(places(chosen.choice(others))))
        inside[key] = deepcopy(elsewhere[other])
    elif how == "shorten" and isinstance(inside[key], list | str):
        inside[key] = inside[key][: len(inside[key]) // 2]
    else:
        how, inside[key] = "value", chosen.choice(VALUES)
    return how


def damage(text: str, chosen: random.Random, others: list[str]) -> tuple[str, str]:
    """Return a damaged document, and the kinds of damage."""
    if chosen.random() < 0.05:
        return "cut", text[: chosen.randrange(len(text))]
    document = json.loads(text)
    loaded = [json.loads(other) for other in others]
    kinds = {change(document, chosen, loaded) for _ in range(chosen.choice([1, 1, 2, 3]))}
    return "+".join(sorted(kinds)), json.dumps(document)


def command(name: str, reader: str, folder: Path, chosen: random.Random) -> tuple[str, ...]:
    """Return a command that reads the damaged file beside the whole one."""
    bad, good = str(folder / "bad.json"), str(folder / f"{name}.json")
    show = ("-f", chosen.choice(SHOWS.get(reader, FORMATS)))
    first = chosen.random() < 0.5
    pair = (bad, good) if first else (good, bad)
    lines = {
        "report": ("report", bad, *show),
        "rank": ("report", *pair, *show),
        "inspect": ("inspect", bad, *show),
        "compare": ("compare", *pair, *show),
        "gate": ("gate", pair[0], "-b", pair[1], *show),
        "baseline": ("baseline", "check", bad, *show) if first else ("baseline", "check", bad),
        "promote": ("baseline", "update", bad, "-o", str(folder / "new.json"), "--reason", "x"),
        "merge": ("merge", bad, str(folder / f"shard{3 - int(name[-1:])}.json"), *show)
        if reader == "merge"
        else (),
    }
    return lines[reader]


def outcome(args: tuple[str, ...]) -> tuple[int, str]:
    """Run a command; return its exit code, and what is wrong with how it ended."""
    done = invoke(*args, code=None)
    leaked = done.exception is not None and not isinstance(done.exception, SystemExit)
    # A judgement is no error: its exit code is that of its gravest verdict, whatever that is.
    judged = args[0] == "gate" and done.stdout and not done.stderr
    fine = {0, 1, 3, 5, 6} if judged else {0, 4, 5}
    if leaked or done.exit_code not in fine or "internal error" in done.stderr:
        return done.exit_code, f"exit {done.exit_code}: {done.exception!r} {done.stderr[-500:]}"
    if done.exit_code in (4, 5) and not judged and not FACE.fullmatch(done.stderr):
        return done.exit_code, f"not one line: {done.stderr[-500:]}"
    return done.exit_code, ""


def run_all(
    documents, folder: Path, seed: int, count: int
) -> tuple[list[str], collections.Counter]:
    """Try so many damaged files; return the faults, and how often each change came to what."""
    for name, text in documents.items():
        (folder / f"{name}.json").write_text(text)
    chosen, faults, table = random.Random(seed), [], collections.Counter()
    names = list(documents)
    for number in range(count):
        name = chosen.choice(names)
        others = [documents[chosen.choice(names)]]
        how, text = damage(documents[name], chosen, others)
        (folder / "bad.json").write_text(text)
        readers = READERS["shard" if "shard" in name else "report"]
        reader = chosen.choice([each for each in readers if each != "gate" or name in JUDGED])
        args = command(name, reader, folder, chosen)
        code, fault = outcome(args)
        for each in how.split("+"):
            table[each, code] += 1
        if fault:
            faults.append(f"#{number} {name} {how} {args}: {fault}")
            print(faults[-1], flush=True)
            kept = os.environ.get("DAMAGED_KEEP")
            if kept:
                Path(kept, f"{seed}-{number}.json").write_text(text)
    return faults, table


def test_damaged_files_are_shown_or_refused_in_one_line(documents, tmp_path):
    faults, table = run_all(documents, tmp_path, seed=0, count=MUTATIONS)
    assert faults == []
    assert {0, 4} <= {code for _, code in table}


@pytest.mark.slow(seconds=300)
def test_many_damaged_files(documents, tmp_path):
    count = int(os.environ.get("DAMAGED", "3000"))
    seed = int(os.environ.get("DAMAGED_SEED", "1"))
    faults, table = run_all(documents, tmp_path, seed=seed, count=count)
    for (how, code), times in sorted(table.items()):
        print(f"{how:10} exit {code}: {times}")
    assert faults == []


@pytest.mark.parametrize(("name", "reader", "place", "value"), CRAFTED)
def test_what_once_was_an_internal_error(documents, tmp_path, name, reader, place, value):
    (tmp_path / f"{name}.json").write_text(documents[name])
    document = inner = json.loads(documents[name])
    for key in place[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    (tmp_path / "bad.json").write_text(json.dumps(document))
    good, bad = str(tmp_path / f"{name}.json"), str(tmp_path / "bad.json")
    lines = {"report": [("report", bad)], "gate": [("gate", bad, "-b", good)]}
    lines["compare"] = [("compare", good, bad), ("compare", bad, good)]
    for line in lines[reader]:
        for format in ("table", "markdown", "html", "json"):
            assert not outcome((*line, "-f", format))[1]
