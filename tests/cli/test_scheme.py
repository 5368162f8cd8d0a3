"""One scheme of options in every command, and a help that fits a terminal."""

import functools
import json
from pathlib import Path

import pytest
from typer.main import get_command

from lipaudit.cli.app import app
from lipaudit.data.batch import DataOptions
from lipaudit.settings import Recipe, RunOptions
from tests.commands import invoke, list_commands

SHORT = {"-f": "--format", "-o": "--output", "-q": "--quiet", "-v": "--verbose", "-n": "--samples",
         "-b": "--baseline", "-h": "--help", "-V": "--version"}  # fmt: skip
"""What each short option means, in whichever command has it."""
WRITES_A_FILE = {"baseline save", "baseline update", "init"}
"""Commands whose result is one file, which -o names; they have nothing for stdout."""


COMMANDS = list_commands()


@pytest.mark.parametrize("name", COMMANDS)
def test_short_options_mean_the_same_everywhere(name):
    flags = {flag: p.opts for p in COMMANDS[name].params for flag in p.opts}
    for short in (flag for flag in flags if len(flag) == 2 and flag.startswith("-")):
        assert SHORT[short] in flags[short], short
    for long in (long for long in SHORT.values() if long in flags):
        assert any(SHORT.get(flag) == long for flag in flags[long]), long
    assert {"-q", "-v", "-o"} <= flags.keys()
    assert ("-f" in flags) != (name in WRITES_A_FILE)


def test_groups_say_so_too():
    assert set(COMMANDS) > {"bounds", "audit", "train", "report", "gate", "explain", "models"}
    for command in (get_command(app), get_command(app).commands["baseline"]):
        assert all(len(set(p.opts) & set(SHORT)) < 2 for p in command.params)


@functools.cache
def help_of(name: str, width: int, flag: str = "--help") -> str:
    done = invoke(*name.split(), flag, columns=width)
    return done.stdout.strip()


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("name", ["", "baseline", *COMMANDS])
def test_the_help_fits_and_shows_no_types_of_python(name, width):
    pages = [help_of(name, width)]
    if "--help-all" in pages[0]:
        pages.append(help_of(name, width, "--help-all"))
    for page in pages:
        assert max(map(len, page.splitlines())) <= width
        for ugly in ("<bool>", "list[", "Path", "…", "None", "default: False"):
            assert ugly not in page, ugly


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_fits_a_screen_and_all_of_it_is_a_flag_away(name):
    page = help_of(name, 100)
    assert len(page.splitlines()) <= 40
    whole = help_of(name, 100, "--help-all") if "--help-all" in page else page
    for parameter in COMMANDS[name].params:
        if parameter.param_type_name == "option":
            assert f" {parameter.opts[0]} " in whole


@pytest.mark.parametrize(
    "args", ["env", "models", "models vit_tiny", "schema", "explain", "explain pgd"]
)
def test_json_is_everywhere_on_stdout_and_in_files(args):
    done = invoke(*args.split(), "-f", "json", "-o", "x.json", "-q")
    assert json.loads(done.stdout)
    assert json.loads(Path("x.json").read_text()) == json.loads(done.stdout)


@pytest.mark.parametrize("args", ["env", "models", "explain pgd"])
def test_text_is_what_a_terminal_gets(args):
    plain = invoke(*args.split(), "-o", "x.txt", code=None)
    named = invoke(*args.split(), "-f", "text", code=None)
    assert plain.stdout == named.stdout == Path("x.txt").read_text()


@pytest.mark.parametrize("args", ["env -f html", "explain pgd -o x.html", "schema -f text"])
def test_a_format_that_cannot_show_it_is_refused_with_those_that_can(args):
    done = invoke(*args.split(), code=None)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "possible here" in done.stderr
    assert "json" in done.stderr


def test_a_configuration_of_runs_has_no_say_in_what_is_explained():
    Path("pyproject.toml").write_text('[tool.lipaudit]\nformat = "html"\n')
    invoke("explain", "pgd")


def test_defaults_that_help_states_are_those_that_are_taken():
    usual = {name: option.usual for name, option in RunOptions.options().items()}
    assert usual["max_tokens"].partition(";")[0] == str(DataOptions.max_tokens)
    said = next(p.help for p in COMMANDS["train"].params if p.name == "batch_size")
    assert f"[default: {Recipe().batch_size}]" in said
