"""Every command and option that a text, a page or a help names can be typed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

import lipaudit
from lipaudit.cli.commands import build

OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*\b")
TYPED = re.compile(r"(?:^|[`\]:] ?|bin/)lipaudit ([a-z]+)(?: ([a-z]+))?([^`\[;]*)")
"""A command line in a page or a text; what stands behind it up to the next quotation."""

EXAMPLE = "confidence"
"""The command of the plug-in of docs/extending.md."""


def flags(command) -> set[str]:
    own = {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)}
    return own.union({"--help"}, *map(flags, getattr(command, "commands", {}).values()))


ROOT = get_command(build())


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
