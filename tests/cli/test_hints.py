"""Every command and option that a text, a page or a help names can be typed."""

import ast
import functools
import re
from pathlib import Path

import pytest
from typer.main import get_command

import lipaudit
from lipaudit.cli.app import app
from lipaudit.errors import UsageError
from lipaudit.measures import AuditOptions, option_types
from lipaudit.settings import Recipe, RunOptions

OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*\b")
TYPED = re.compile(r"(?:^|[`\]:] ?|bin/)lipaudit ([a-z]+)(?: ([a-z]+))?([^`\[;]*)")
"""A command line in a page or a text; what stands behind it up to the next quotation."""

EXAMPLE = "confidence"
"""The command of the plug-in of docs/extending.md."""


def flags(command) -> set[str]:
    own = {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)}
    return own.union({"--help"}, *map(flags, getattr(command, "commands", {}).values()))


ROOT = get_command(app)
FLAGS = flags(ROOT)


@pytest.mark.parametrize("name", ["README.md", "docs", "lipaudit"])
def test_every_command_that_is_named_exists_and_has_the_options_beside_it(name):
    root, found = Path(lipaudit.__file__).parents[1] / name, 0
    pages = [root] if root.is_file() else [*root.rglob("*.md"), *root.rglob("*.py")]
    for path in pages:
        for line in path.read_text().splitlines():
            for match in TYPED.finditer(line):
                if match[1] not in ROOT.commands:
                    # Prose: "the names: lipaudit has two", never what is quoted to be typed.
                    quoted = line[: match.start() + 1][-1:] == "`"
                    assert not quoted or match[1] == EXAMPLE, (path.name, line)
                    continue
                command = ROOT.commands[match[1]]
                command = getattr(command, "commands", {}).get(match[2], command)
                typed = OPTION.findall(match[3].partition(" | ")[0].partition("#")[0])
                assert [f for f in typed if f not in flags(command)] == [], (path.name, line)
                found += 1
    assert found > 5


@functools.cache
def list_texts() -> list[tuple[str, str]]:
    """Return every text of the package, with f-strings cut where values go in."""
    texts = []
    for path in Path(lipaudit.__file__).parent.rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        constants = (node.value for node in nodes if isinstance(node, ast.Constant))
        texts += [(path.name, value) for value in constants if isinstance(value, str)]
    return texts


OTHERS = {"--help", "--directory", "--digits", "--width", "--no-", "--repo-type"}
"""Options of other programs, and a property of a page, that a text names."""


def test_every_option_that_a_text_names_is_one():
    long = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
    texts = [(flag, name) for name, text in list_texts() for flag in long.findall(text)]
    assert {each for each in texts if each[0] not in FLAGS | OTHERS} == set()


def test_every_value_that_a_text_names_is_taken():
    groups = {g: g.options() for g in (*option_types().values(), Recipe, RunOptions, AuditOptions)}
    pattern = r"(--[a-z][a-z-]+)[ =]([a-z0-9][^\s)'\"|;]*)"
    tried = 0
    for name, text in list_texts():
        for flag, value in re.findall(pattern, text):
            value = value.rstrip(".,:")
            owners = [
                (group, field)
                for group, options in groups.items()
                for field, option in options.items()
                if flag in option.flags
            ]
            if not owners or not re.fullmatch(r"[\d.,/-]+|[a-z-]+(,[a-z-]+)+|[a-z_]+=\w+", value):
                continue
            results = [takes(group, field, value) for group, field in owners]
            assert any(results), f"{name}: {flag} {value}"
            tried += 1
    assert tried >= 5


def takes(group, field: str, value: str) -> bool:
    least = {"eps": "2/255"} if "logical_chunk" in group.model_fields and field != "eps" else {}
    try:
        group.parse(least | {field: value})
    except UsageError as error:
        return "needs" in error.message
    return True
