"""Damaged reports, baselines and shards: shown, judged, or refused in one line.

Every file is changed in one to three places and given to a command that reads it. The exit code
is 0 (of the gate also 1), 4, 5 or 6, and an error is one line with one hint.

More: DAMAGED=3000 DAMAGED_SEED=7 python -m pytest -m slow -n 0 -s tests/cli/test_damaged.py
"""

import json
import os
import random
import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

import lipaudit
from lipaudit.schema import dumps
from tests.commands import invoke
from tests.report.conftest import make_report

pytestmark = pytest.mark.usefixtures("_elsewhere", "blank_charts")

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
    *("baseline update bad.json -o new.json --reason x", "merge bad.json shard2.json"),
)
FORMATS = {"gate": ("text", "html", "junit"), "baseline": ("text", "json")}
FACE = re.compile(r"error: [^\n]+\n(  hint: [^\n]+\n)?")


@pytest.fixture(scope="module")
def documents() -> dict[str, str]:
    """A report of every measure, and two shards."""
    how: dict[str, Any] = {"samples": 4, "eps": "0.1", "attack": "fgsm"}
    shards = {f"shard{i}": lipaudit.measure("demo", "attack", shard=f"{i}/2", **how) for i in "12"}
    return {name: dumps(report) for name, report in ({"whole": make_report()} | shards).items()}


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


def find_fault(line: str, *options: str) -> tuple[int, str]:
    """Run a command; return its exit code, and what is wrong with how it ended."""
    done = invoke(*line.split(), *options, code=None)
    leaked = done.exception is not None and not isinstance(done.exception, SystemExit)
    # A judgement is no error: its exit code is that of its gravest verdict, whatever that is.
    judged = line.startswith("gate") and done.stdout and not done.stderr
    fine = {0, 1, 3, 5, 6} if judged else {0, 4, 5}
    if leaked or done.exit_code not in fine or "internal error" in done.stderr:
        fault = f"exit {done.exit_code}: {done.exception!r} {done.stderr[-500:]}"
    elif done.exit_code in (4, 5) and not judged and not FACE.fullmatch(done.stderr):
        fault = f"not one line: {done.stderr[-500:]}"
    else:
        fault = ""
    return done.exit_code, fault


def write(name: str, text: str) -> None:
    with open(f"{name}.json", "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)


def find_faults(documents: dict[str, str], seed: int, count: int) -> tuple[list[str], set[int]]:
    """Try so many damaged files; return what is wrong, and the exit codes."""
    for name, text in documents.items():
        write(name, text)
    chosen, faults, codes = random.Random(seed), [], set()
    for number in range(count):
        line = chosen.choice(READERS)
        name = "shard1" if "merge" in line else "whole"
        write("bad", damage(documents[name], chosen, [chosen.choice([*documents.values()])]))
        format = chosen.choice(FORMATS.get(line.split()[0], ("table", "markdown", "html", "json")))
        code, fault = find_fault(line, *([] if "update" in line else ["-f", format]))
        codes.add(code)
        if fault:
            faults.append(f"#{number} {line}: {fault}")
            print(faults[-1], flush=True)
    return faults, codes


def test_damaged_files_are_shown_or_refused_in_one_line(documents):
    faults, codes = find_faults(documents, seed=0, count=45)
    assert faults == []
    assert {0, 4} <= codes


@pytest.mark.slow(seconds=300)
def test_many_damaged_files(documents):
    count, seed = (int(os.environ.get(*e)) for e in (("DAMAGED", "3000"), ("DAMAGED_SEED", "1")))
    assert find_faults(documents, seed, count)[0] == []


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
        assert not find_fault(line, "-f", format)[1]
