"""The configuration file: read once, at the boundary, never into the protocol of a baseline."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from lipaudit.cli.commands import build

BASE = """
[tool.lipaudit]
format = "json"
seed = 7
output = ["page.md"]
quiet = true
samples = 3
"""


@pytest.fixture
def lipaudit(tmp_path, monkeypatch):
    """Run a command in an empty directory with a configuration file."""
    monkeypatch.chdir(tmp_path)

    def run(*args: str, config: str = BASE) -> Result:
        Path("pyproject.toml").write_text(config)
        return CliRunner().invoke(build(), list(args))

    return run


def test_every_shared_option_takes_its_default_from_the_file(lipaudit):
    done = lipaudit("attention", "demo")
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["run"]["seed"] == report["sections"][0]["settings"]["seed"] == 7
    assert report["run"]["data"]["samples"] == 3
    assert Path("page.md").read_text().startswith("#")


def test_what_is_typed_wins(lipaudit, monkeypatch):
    done = lipaudit("attention", "demo", "-n", "2", "-f", "markdown", "--seed", "0")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("#")
    monkeypatch.setenv("LIPAUDIT_DATA", "demo:train")
    done = lipaudit("attention", "demo", config=BASE + 'data = "demo"\n')
    assert json.loads(done.stdout)["run"]["data"]["spec"] == "demo:train"


def test_a_gated_model_follows_the_baseline_alone(lipaudit):
    made = lipaudit("bounds", "demo", "-n", "4", "-o", "base.json", config="")
    assert made.exit_code == 0, made.output
    done = lipaudit("gate", "demo", "-b", "base.json", "-q")
    assert done.exit_code == 0, done.output
    assert "pass:" in done.stdout  # with 3 of its 4 samples nothing could be judged


def test_train_takes_what_concerns_it(lipaudit):
    done = lipaudit("train", "demo", "-n", "64", "--epochs", "1", "--batch-size", "32")
    assert done.exit_code == 0, done.output
    assert done.stderr == ""  # quiet
    record = json.loads(Path("trained/train.json").read_text())
    assert record["recipe"]["seed"] == 7
    assert not Path("page.md").exists()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("sample = 3", "Did you mean 'samples'?"),
        ("samples = 0", "samples in the lipaudit configuration: 0"),
        ('samples = "many"', "samples in the lipaudit configuration: 'many'"),
        ("samples = true", "samples in the lipaudit configuration is True"),
        ('quiet = "yes"', "quiet in the lipaudit configuration is 'yes'"),
        ('batch-size = "lots"', "batch-size in the lipaudit configuration: 'lots'"),
        ('model-kwargs = "x"', "model-kwargs in the lipaudit configuration: 'x'"),
        ("output = [1]", "output in the lipaudit configuration: 1"),
        ("gate = 3", "'gate' in pyproject.toml is 3, not a table"),
        ('format = "yaml"', "unknown format"),
        ("verbose = true", "unknown key 'verbose'"),
    ],
)
def test_a_wrong_line_is_named(lipaudit, line, says):
    done = lipaudit("attention", "demo", config=f"[tool.lipaudit]\n{line}\n")
    assert done.exit_code == 2
    assert says in " ".join(done.stderr.split())
    assert done.stdout == ""


@pytest.mark.parametrize("text", ["tool = 3", "[tool]\nlipaudit = 3"])
def test_a_file_without_the_table_is_named(lipaudit, text):
    done = lipaudit("attention", "demo", config=text)
    assert done.exit_code == 2
    assert "pyproject.toml is 3, not a table" in " ".join(done.stderr.split())


def test_one_file_of_output_needs_no_list(lipaudit):
    done = lipaudit("attention", "demo", "-n", "1", config='[tool.lipaudit]\noutput = "x.md"\n')
    assert done.exit_code == 0, done.output
    assert Path("x.md").is_file()


def test_a_wrong_line_is_named_where_another_value_is_typed(lipaudit):
    done = lipaudit("attention", "demo", "-n", "1", config="[tool.lipaudit]\nsamples = 0\n")
    assert done.exit_code == 2


def test_a_fault_of_toml_names_the_line_and_how_to_mend_it(tmp_path):
    from lipaudit.cli.config import read
    from lipaudit.errors import UsageError

    (tmp_path / "own.toml").write_text("samples = 4\nformat = json\n")
    with pytest.raises(UsageError) as caught:
        read(tmp_path / "own.toml")
    assert "Line 2 is 'format = json'; put text in quotes" in caught.value.advice
