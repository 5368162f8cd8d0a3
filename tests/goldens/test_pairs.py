"""What compare and gate write of two fixed checkpoints, beside what is stored here."""

import json
import re
from pathlib import Path

import pytest

from tests.goldens.test_values import PAIRS, check, run_command, shorten, walk

MODELS = {"old": "demo", "new": "demo:jasmin"}
RULES = ("bounds.exact_max:p95 <= +10%", "bounds.exact:max <= +5%", "attack.robust >= -2pp")
PASSING = re.compile(r"seconds|hash|version|created|time|path|file|device")
"""Fields that depend on the day and the machine."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, str]:
    """Two audits of eight digits in float64, made from Python with a tight tolerance."""
    import lipaudit

    folder = tmp_path_factory.mktemp("reports")
    measures = {"bounds": {"tol": 1e-9}, "jacobian": {"tol": 1e-9}, "attention": {}, "attack": {}}
    for name, model in MODELS.items():
        report = lipaudit.audit(model, measures, samples=8, dtype="float64")
        (folder / f"{name}.json").write_bytes(lipaudit.render(report, "json"))
    return {name: str(folder / f"{name}.json") for name in MODELS}


def check_json(name: str, path: Path) -> None:
    """Hold every leaf of a JSON file to the one that is stored."""
    leaves = walk(json.loads(path.read_text()))
    lasting = {p: v for p, v in leaves if v not in (None, "", []) and not PASSING.search(p)}
    check(name, {place: shorten(value) for place, value in lasting.items()})


def test_a_comparison_is_the_one_that_is_stored(reports, tmp_path):
    path = tmp_path / "compare.json"
    run_command("compare", reports["old"], reports["new"], "-q", "-o", str(path))
    check_json(PAIRS[0], path)


@pytest.mark.parametrize(
    ("name", "baseline", "current", "code"),
    [(PAIRS[1], "old", "new", 0), (PAIRS[2], "new", "old", 1)],
)
def test_a_gate_is_the_one_that_is_stored(name, baseline, current, code, reports, tmp_path):
    path = tmp_path / "gate.json"
    rules = [part for rule in RULES for part in ("--fail-on", rule)]
    args = ("gate", reports[current], "--baseline", reports[baseline], *rules)
    run_command(*args, "-q", "-o", str(path), code=code)
    check_json(name, path)
