"""What an error advises exists: every command and option that it names can be typed."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
from typer.main import get_command

import lipaudit
from lipaudit.cli.commands import build

SOURCES = sorted(Path(lipaudit.__file__).parent.rglob("*.py"))
COMMAND = re.compile(r"lipaudit ([a-z]+)(?: ([a-z]+))?")
OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*\b")
SAYS = re.compile(r"(Error|Note|remark|warning|_info|_warning|suggestion)$")
"""What says something to a user."""
KEPT = {"advice", "hint", "message", "text", "said"}
"""Variables that hold what is said."""


def flags(command) -> set[str]:
    own = {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)}
    return own.union({"--help"}, *map(flags, getattr(command, "commands", {}).values()))


ROOT = get_command(build())
FLAGS = flags(ROOT)


def literal(node: ast.AST) -> str:
    """The text of a literal, what is filled in being `0`; empty for anything else."""
    pieces = node.values if isinstance(node, ast.JoinedStr) else [node]
    told = [piece.value if isinstance(piece, ast.Constant) else "0" for piece in pieces]
    return "".join(told) if all(isinstance(piece, str) for piece in told) else ""


def texts(node: ast.AST) -> list[str]:
    """What a node says to a user: an error or a note that is made, or a text kept for one."""
    if isinstance(node, ast.Call) and SAYS.search(ast.unparse(node.func)):
        return [literal(arg) for arg in (*node.args, *(k.value for k in node.keywords))]
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in KEPT:
        nodes = list(ast.walk(node.value))
        pieces = [p for each in nodes if isinstance(each, ast.JoinedStr) for p in each.values]
        return [literal(each) for each in nodes if each not in pieces]
    return []


@functools.cache
def advice() -> list[tuple[str, str]]:
    """Every text of an error or note in the source, with the place that it stands in."""
    return [
        (f"{path.name}:{node.lineno}", text)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        for text in texts(node)
        if text
    ]


def test_the_advice_of_the_source_is_read():
    assert len(advice()) > 200
    assert sum(bool(OPTION.search(text)) for _, text in advice()) > 40
    assert sum(bool(COMMAND.search(text)) for _, text in advice()) > 8


def test_every_option_that_an_error_names_exists():
    named = {(place, flag) for place, text in advice() for flag in OPTION.findall(text)}
    assert sorted((place, flag) for place, flag in named if flag not in FLAGS) == []


def test_every_command_that_an_error_names_exists_and_has_the_options_beside_it():
    for place, text in advice():
        for match in COMMAND.finditer(text):
            if match[1] not in ROOT.commands:
                # Prose: "a bug in lipaudit or a plug-in", never something quoted to be typed.
                assert text[: match.start()].rstrip()[-1:] not in ("`", ":"), (place, text)
                assert match.start() > 0, (place, text)
                continue
            command = ROOT.commands[match[1]]
            inner = getattr(command, "commands", {})
            command = inner[match[2]] if inner else command
            rest = re.split(r"[.;`(]|, ", text[match.end() :])[0]
            own = flags(command)
            assert [f for f in OPTION.findall(rest) if f not in own] == [], (place, text)


@pytest.mark.parametrize("name", ["README.md", "docs", "lipaudit/settings", "lipaudit/cli"])
def test_so_does_every_one_of_the_pages_and_helps(name):
    root = Path(lipaudit.__file__).parents[1] / name
    pages = [root] if root.is_file() else [*root.rglob("*.md"), *root.rglob("*.py")]
    for path in pages:
        for line in path.read_text().splitlines():
            for match in re.finditer(r"(?:^|[`\]] ?|bin/)lipaudit ([a-z]+)([^`\[]*)", line):
                if match[1] in ROOT.commands:
                    own = flags(ROOT.commands[match[1]])
                    typed = OPTION.findall(match[2].partition(" | ")[0].partition("#")[0])
                    assert [flag for flag in typed if flag not in own] == [], (path.name, line)
