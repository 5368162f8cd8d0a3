"""One scheme of options: stated once, alike in every command, with a help that fits."""

import json
import runpy
from pathlib import Path

import pytest
from typer.main import get_command

from lipaudit.cli.app import app
from lipaudit.data.batch import DataOptions
from lipaudit.measures import AuditOptions, option_types
from lipaudit.settings import RunOptions
from lipaudit.wings.training.recipe import Recipe
from tests.commands import invoke, list_commands, refuse

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
    for group in (get_command(app), get_command(app).commands["baseline"]):
        assert all(len(set(p.opts) & set(SHORT)) < 2 for p in group.params)


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("name", ["", "baseline", *COMMANDS])
def test_the_help_fits_a_screen_and_all_of_it_is_a_flag_away(name, width):
    first, *_ = pages = [invoke(*name.split(), "--help", columns=width).stdout.strip()]
    if "--help-all" in first:
        pages.append(invoke(*name.split(), "--help-all", columns=width).stdout.strip())
    for page in pages:
        assert max(map(len, page.splitlines())) <= width
        for ugly in ("<bool>", "list[", "Path", "…", "None", "default: False"):
            assert ugly not in page, ugly
    if name in COMMANDS:
        assert len(first.splitlines()) <= 40 or width < 100
    for parameter in COMMANDS[name].params if name in COMMANDS else ():
        if parameter.param_type_name == "option":
            assert f" {parameter.opts[0]} " in pages[-1]


@pytest.mark.parametrize(
    "args", ["env", "models", "models vit_tiny", "schema", "explain", "explain pgd"]
)
def test_facts_are_json_or_text_on_stdout_and_in_files(args):
    done = invoke(*args.split(), "-f", "json", "-o", "x.json", "-q")
    assert json.loads(done.stdout)
    assert json.loads(Path("x.json").read_text()) == json.loads(done.stdout)
    if args != "schema":
        plain = invoke(*args.split(), "-o", "x.txt")
        named = invoke(*args.split(), "-f", "text")
        assert plain.stdout == named.stdout == Path("x.txt").read_text()


@pytest.mark.parametrize("args", ["env -f html", "explain pgd -o x.html", "schema -f text"])
def test_a_format_that_cannot_show_it_is_refused_with_those_that_can(args):
    assert "json" in refuse(2, "possible here", *args.split())


def test_defaults_that_help_states_are_those_that_are_taken():
    usual = {name: option.usual for name, option in RunOptions.options().items()}
    assert usual["max_tokens"].partition(",")[0] == str(DataOptions.max_tokens)
    said = next(p.help for p in COMMANDS["train"].params if p.name == "batch_size")
    assert f"[default: {Recipe().batch_size}]" in said
    Path("pyproject.toml").write_text('[tool.lipaudit]\nformat = "html"\n')
    invoke("explain", "pgd")  # has no say in what is explained


DOCS = Path(__file__).parents[2] / "docs"
GROUPS = option_types() | {"audit": AuditOptions, "train": Recipe}


def test_the_page_is_that_of_the_settings():
    page = runpy.run_path(str(DOCS / "site/options.py"))["page"]
    assert (DOCS / "options.md").read_text() == page()


@pytest.mark.parametrize("name", GROUPS)
def test_a_command_has_every_option_of_its_settings(name):
    typed = {parameter.name: parameter for parameter in COMMANDS[name].params}
    for option in [*GROUPS[name].options().values(), *RunOptions.options().values()]:
        parameter = typed[option.name]
        assert set(option.flags) <= {flag.split("/")[0] for flag in parameter.opts}
        assert parameter.help.startswith(option.help)
        # A command may say better what is done without: `usual` is of most of them.
        stated = "[default: " if option.usual else f"[default: {option.shown}]"
        assert (stated in parameter.help) == bool(option.shown)
        assert parameter.default is None  # what is not typed may be configured


@pytest.mark.parametrize("kind", [*GROUPS.values(), RunOptions], ids=lambda kind: kind.__name__)
def test_defaults_pass_their_own_checks(kind):
    least = {"eps": "2/255"} if "logical_chunk" in kind.model_fields else {}
    settings = kind.parse(least)
    assert kind.parse(settings.model_dump(mode="json")) == settings
