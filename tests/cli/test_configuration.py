"""The configuration file: read once, at the boundary, never into the protocol of a baseline."""

import json
import math
from pathlib import Path

import pytest
from click.testing import Result

from lipaudit.settings import RunOptions
from lipaudit.settings.value_types import read_keywords, write_keywords
from tests.commands import invoke

BASE = """
[tool.lipaudit]
seed = 7
samples = 3
"""


@pytest.fixture
def lipaudit():
    """Run a command with a configuration file."""

    def run(*args: str, config: str = BASE, code: int = 0) -> Result:
        Path("pyproject.toml").write_text(config)
        return invoke(*args, code=code)

    return run


def test_every_shared_option_takes_its_default_from_the_file(lipaudit):
    done = lipaudit("attention", "demo", "-f", "json")
    report = json.loads(done.stdout)
    assert report["run"]["seed"] == report["sections"][0]["settings"]["seed"] == 7
    assert report["run"]["data"]["samples"] == 3
    # Nothing of it is on the Hub.
    assert report["run"]["model"]["commit"] == report["run"]["data"]["commit"] == ""


def test_what_is_typed_wins(lipaudit, monkeypatch):
    done = lipaudit("attention", "demo", "-n", "2", "-f", "json", "--seed", "0")
    assert json.loads(done.stdout)["run"]["seed"] == 0
    monkeypatch.setenv("LIPAUDIT_DATA", "demo:train")
    done = lipaudit("attention", "demo", "-f", "json", config=BASE + 'data = "demo"\n')
    assert json.loads(done.stdout)["run"]["data"]["spec"] == "demo:train"


def test_a_gated_model_follows_the_baseline_alone(lipaudit):
    lipaudit("bounds", "demo", "-n", "4", "--layers", "0", "-o", "base.json", config="")
    done = lipaudit("gate", "demo", "-b", "base.json", "-q")
    assert "pass:" in done.stdout  # with 3 of its 4 samples nothing could be judged


def test_values_of_keywords_keep_their_case():
    read = RunOptions.model_validate({"model_kwargs": 'a="Foo",b=Foo,c=True,d=None,e=1E3,f=null'})
    assert read.model_kwargs == {
        "a": "Foo", "b": "Foo", "c": True, "d": None, "e": 1000.0, "f": None
    }  # fmt: skip


def test_written_keywords_are_read_as_the_same_values():
    values = {"a": math.inf, "b": -math.inf, "c": "inf", "d": "2", "e": 1e-5, "f": None, "g": True}
    assert read_keywords(write_keywords(values)) == values


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[tool.lipaudit.gates]\nstrict = true", "unknown key 'gates'"),
        ("[tool.lipaudit]\nstrict = true", "unknown key 'strict'"),
        ("[tool.lipaudit]\nrules = ['jacobian.norm <= 0.1']", "unknown key 'rules'"),
    ],
)
def test_a_gate_does_not_ignore_what_it_cannot_read(lipaudit, config, message):
    """The default rules would judge in place of those that the user wrote."""
    lipaudit("jacobian", "demo", "-n", "2", "-o", "now.json", config="")
    done = lipaudit("gate", "now.json", "-b", "now.json", config=config, code=2)
    assert message in done.stderr


def test_train_takes_what_concerns_it(lipaudit):
    lipaudit("train", "demo", "-n", "64", "--epochs", "1", "--batch-size", "32")
    record = json.loads(Path("trained/train.json").read_text())
    assert record["recipe"]["seed"] == 7


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("sample = 3", "Did you mean 'samples'?"),
        ("samples = 0", "samples in the lipaudit configuration: 0"),
        ('samples = "many"', "samples in the lipaudit configuration: 'many'"),
        ("samples = true", "samples in the lipaudit configuration is True"),
        ('offline = "yes"', "offline in the lipaudit configuration is 'yes'"),
        ('batch-size = "lots"', "batch-size in the lipaudit configuration: 'lots'"),
        ('model-kwargs = "x"', "model-kwargs in the lipaudit configuration: 'x'"),
        ("gate = 3", "tool.lipaudit and gate in pyproject.toml must be tables"),
        ("verbose = true", "unknown key 'verbose'"),
        ("[tool]\nlipaudit = 3", "pyproject.toml must be tables"),
    ],
)
def test_a_wrong_line_is_named(lipaudit, line, says):
    text = line if "tool" in line else f"[tool.lipaudit]\n{line}\n"
    done = lipaudit("attention", "demo", "-n", "1", config=text, code=2)
    assert says in " ".join(done.stderr.split())
    assert done.stdout == ""


def test_a_fault_of_toml_names_the_line_and_how_to_mend_it(lipaudit):
    done = lipaudit("attention", "demo", config="samples = 4\nformat = json\n", code=2)
    assert "line 2" in done.stderr
    assert "Write text in quotes" in done.stderr
