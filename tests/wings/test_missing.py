"""The core without any wing: as where no installed package declares one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lipaudit
from lipaudit.errors import UsageError
from lipaudit.measures import USUAL, load_measures
from lipaudit.tables.plugins import load_wings
from tests.commands import installed, invoke, refuse

pytestmark = pytest.mark.usefixtures("elsewhere")

ROOT = Path(__file__).parents[2]
MISSING = "Not installed: certificates, corruptions, growth, training. Reinstall lipaudit"
# Core tests that name no wing: numbers, attacks, captured models, engine, pages, commands.
SELECTION = (
    "tests/api/test_bounds.py",
    "tests/attacks/test_plan.py",
    "tests/attacks/test_steps.py",
    "tests/cli/test_check.py",
    "tests/engine/test_prepare.py",
    "tests/gate/test_statistics.py",
    "tests/measures/test_attack.py",
    "tests/measures/test_attention.py",
    "tests/measures/test_bounds.py",
    "tests/measures/test_weights.py",
    "tests/report/test_strange_measure.py",
    "tests/tables/test_trials.py",
    "tests/theory/test_softmax.py",
)


@pytest.fixture(scope="module")
def bare_folder(tmp_path_factory):
    """A folder whose lipaudit declares nothing: the first one of a name is taken."""
    folder = tmp_path_factory.mktemp("bare")
    info = folder / "lipaudit-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lipaudit\nVersion: 0\n")
    return folder


@pytest.fixture
def bare(bare_folder):
    with installed(bare_folder):
        assert not load_wings()
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A report with a section of a wing, made where it is installed."""
    path = tmp_path_factory.mktemp("whole") / "whole.json"
    asked = ("--only", "attack,corrupt", "-n", 2, "--attack", "fgsm", "--eps", "0.01")
    invoke("audit", "demo", *asked, "--run-dir", path.parent / "run", "-o", path, "-q")
    return path


@pytest.mark.usefixtures("bare")
def test_the_core_audits_and_says_what_it_found(blank_charts):
    files = ("-o", "a.json", "-o", "a.html", "-o", "a.md")
    done = invoke("audit", "demo", "-n", 2, "--attack", "fgsm", *files, "-q")
    sections = [each["measure"] for each in json.loads(Path("a.json").read_text())["sections"]]
    assert [name for name in sections if "." not in name] == list(USUAL)
    for text in (done.stdout, Path("a.md").read_text(), Path("a.html").read_text()):
        assert "robust accuracy" in text
    for command in (
        ("report", "a.json", "a.json"),
        ("compare", "a.json", "a.json"),
        ("gate", "a.json", "-b", "a.json"),
        ("inspect", "a.json"),
        ("baseline", "check", "a.json"),
        ("explain", "sharp"),
        ("explain",),
        ("schema",),
        ("check", "demo"),
    ):
        assert invoke(*command).stdout


@pytest.mark.usefixtures("bare")
def test_help_lists_the_core_and_says_what_is_missing():
    text = invoke("--help").stdout
    assert MISSING in text
    assert {*load_measures()} == {*USUAL, "weights"}
    listed = re.findall(r"^  ([a-z]+) ", text, re.MULTILINE)
    assert {"bounds", "attack", "audit", "gate", "weights"} < {*listed}
    assert not {"certify", "corrupt", "scaling", "train", "watch"} & {*listed}
    assert MISSING in invoke("env").stdout


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    "command",
    ["certify demo", "train demo", "watch .", "audit demo --certify", "audit demo --only corrupt"],
)
def test_a_command_or_option_of_a_missing_wing_says_so(command):
    refuse(2, MISSING, *command.split())


@pytest.mark.usefixtures("bare")
def test_names_of_missing_wings_say_so_in_python():
    with pytest.raises(AttributeError, match=MISSING):
        _ = lipaudit.watch
    with pytest.raises(UsageError) as caught:
        lipaudit.measure("demo", "scaling")
    assert MISSING in caught.value.advice
    assert "watch" not in dir(lipaudit)


@pytest.mark.usefixtures("bare")
def test_a_report_of_missing_wings_is_read(whole, blank_charts):
    invoke("report", whole, "-o", "again.json", "-o", "again.html")
    before, after = (json.loads(path.read_text()) for path in (whole, Path("again.json")))
    assert after["sections"] == before["sections"]
    assert "gaussian_noise" in Path("again.html").read_text()
    gated = " ".join(invoke("gate", whole, "-b", whole).stdout.split())
    assert f"not judged, because the measure is not installed: corrupt. {MISSING}" in gated
    assert "attack.robust" in gated
    advice = refuse(2, "there is no measure 'corrupt'", "gate", "demo", "-b", whole, "-q")
    assert MISSING in advice


@pytest.mark.ci
def test_core_tests_pass_without_wings(bare_folder):
    env = os.environ | {"PYTHONPATH": f"{bare_folder}{os.pathsep}{ROOT}"}
    asked = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*asked, *SELECTION], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


def test_the_core_names_no_wing():
    """Also not in text, which import-linter does not see."""
    for path in (ROOT / "lipaudit").rglob("*.py"):
        if "wings" not in path.relative_to(ROOT).parts:
            assert "lipaudit.wings." not in path.read_text(encoding="utf-8"), path
