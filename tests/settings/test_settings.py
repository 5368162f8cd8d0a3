"""Options are stated once: the commands, the page and the settings agree."""

import re
import runpy
from pathlib import Path

import pytest
import typer.main

from lipaudit.cli.app import app
from lipaudit.errors import UsageError
from lipaudit.measures import AuditOptions, option_types
from lipaudit.settings import Recipe, RunOptions

DOCS = Path(__file__).parents[2] / "docs"
GROUPS = option_types() | {"audit": AuditOptions, "train": Recipe}


def test_the_page_is_that_of_the_settings():
    page = runpy.run_path(str(DOCS / "site/options.py"))["page"]
    assert (DOCS / "options.md").read_text() == page()


@pytest.mark.parametrize("name", GROUPS)
def test_a_command_has_every_option_of_its_settings(name):
    command = typer.main.get_command(app).commands[name]
    typed = {parameter.name: parameter for parameter in command.params}
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


@pytest.mark.parametrize(
    ("values", "said"),
    [({"tol": 0}, "--tol: 0: it must be greater than 0"), ({"seed": "x"}, "--seed: 'x': it must")],
)
def test_a_value_out_of_range_is_refused_as_all_are(values, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        option_types()["bounds"].parse(values)
