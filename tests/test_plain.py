"""Texts for users are short and plain, and what they name can be typed."""

import ast
import functools
import re
from pathlib import Path

import pytest
from typer.main import get_command

from lipaudit.cli.app import app
from lipaudit.errors import UsageError
from lipaudit.measures import AuditOptions, option_types
from lipaudit.report.topics import list_topics
from lipaudit.settings import RunOptions
from lipaudit.wings.training.recipe import Recipe

PACKAGE = Path(__file__).parents[1] / "lipaudit"
COMMANDS = get_command(app)
LONGEST = 25
"""Largest number of words of a sentence."""
RIDDLES = re.compile(
    r"\b(met|meets|stood|lies?|told|said|whence|have it|is had|what is left|what came of|"
    r"by its place|those of which|so-maniest)\b",
    re.IGNORECASE,
)
ENDS = re.compile(r"(?<=[.!?])\s+|\n\s*\n|\n(?= )")  # an indented line is an example or an item


def find_faults(text):
    """Return the sentences of a text that are too long, and its words that are riddles."""
    long = [each for each in ENDS.split(text) if len(each.split()) > LONGEST]
    return long + [found[0] for found in RIDDLES.finditer(text)]


def spell(node):
    """Return the text of a literal; a value in an f-string counts as one word."""
    if isinstance(node, ast.JoinedStr):
        return "".join(spell(part) or "1" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        both = spell(node.left), spell(node.right)
        return None if None in both else "".join(both)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def literals(path):
    """Yield the texts in the code of a file: notes, errors, hints, labels; no docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        text = spell(node)
        if text is None:
            nodes += ast.iter_child_nodes(node)
        elif text.count(" ") > 2:
            yield node.lineno, text


def helps(group, name="lipaudit"):
    """Yield the help of every command and of its options."""
    for each, command in group.commands.items():
        yield f"{name} {each}", command.help or ""
        yield from ((f"{name} {each} {p.name}", p.help or "") for p in command.params)
        if hasattr(command, "commands"):
            yield from helps(command, f"{name} {each}")


def explanations():
    for topic in list_topics():
        parts = (part.removeprefix("How to read it: ") for part in topic.details)
        yield from ((topic.name, part) for part in (topic.meaning, *parts))


def notes_and_errors():
    for path in PACKAGE.rglob("*.py"):
        yield from ((f"{path.name}:{line}", text) for line, text in literals(path))


SOURCES = {"help": lambda: helps(COMMANDS), "explain": explanations, "code": notes_and_errors}


@pytest.mark.parametrize("source", SOURCES)
def test_sentences_are_short_and_plain(source):
    texts = list(SOURCES[source]())
    assert len(texts) > 100
    assert {place: found for place, text in texts if (found := find_faults(text))} == {}


def test_a_long_sentence_and_a_riddle_are_found():
    sentence = " ".join(["word"] * LONGEST) + "."
    assert find_faults(f"{sentence} {sentence}") == []
    assert len(find_faults(sentence.replace(".", " word."))) == 1
    assert find_faults("An exact norm is met from below.") == ["met"]
    (node,) = ast.parse("f'a {b} ' + 'met c d'").body
    assert spell(node.value) == "a 1 met c d"


OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*\b")
TYPED = re.compile(r"(?:^|[`\]:] ?|bin/)lipaudit ([a-z]+)(?: ([a-z]+))?([^`\[;]*)")
"""A command line in a page or a text; what stands behind it up to the next quotation."""

EXAMPLE = "confidence"
"""A command of the plug-in of docs/extending.md."""


def flags(command) -> set[str]:
    own = {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)}
    return own.union({"--help"}, *map(flags, getattr(command, "commands", {}).values()))


FLAGS = flags(COMMANDS)


@pytest.mark.parametrize("name", ["README.md", "docs", "lipaudit"])
def test_every_command_that_is_named_exists_and_has_the_options_beside_it(name):
    root, found = PACKAGE.parent / name, 0
    pages = [root] if root.is_file() else [*root.rglob("*.md"), *root.rglob("*.py")]
    for path in pages:
        for line in path.read_text().splitlines():
            for match in TYPED.finditer(line):
                if match[1] not in COMMANDS.commands:
                    # Prose: "the names: lipaudit has two", never what is quoted to be typed.
                    quoted = line[: match.start() + 1][-1:] == "`"
                    assert not quoted or match[1] == EXAMPLE, (path.name, line)
                    continue
                command = COMMANDS.commands[match[1]]
                command = getattr(command, "commands", {}).get(match[2], command)
                typed = OPTION.findall(match[3].partition(" | ")[0].partition("#")[0])
                known = flags(command) | {f"--{EXAMPLE}"}  # its switch of an audit
                assert [f for f in typed if f not in known] == [], (path.name, line)
                found += 1
    assert found > 5


@functools.cache
def list_texts() -> list[tuple[str, str]]:
    """Return every text of the package, with f-strings cut where values go in."""
    texts = []
    for path in PACKAGE.rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        constants = (node.value for node in nodes if isinstance(node, ast.Constant))
        texts += [(path.name, value) for value in constants if isinstance(value, str)]
    return texts


OTHERS = {"--help", "--directory", "--digits", "--width", "--no-", "--repo-type"}
"""Options of other programs, and a property of a page, that a text names."""


SPACED = re.compile(r"(?:\d|^) %(?!\w)")
"""A percentage with a space, also where an f-string puts the number in front of this text."""


def test_percentages_are_written_as_tables_print_them():
    assert SPACED.search("95 % limits")
    assert not SPACED.search("95% limits")
    root = PACKAGE.parent
    pages = [root / "README.md", root / "CHANGELOG.md", *(root / "docs").rglob("*.md")]
    texts = [(page.name, line) for page in pages for line in page.read_text().splitlines()]
    assert [each for each in [*texts, *list_texts()] if SPACED.search(each[1])] == []


def test_every_option_that_a_text_names_is_one():
    long = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
    texts = [(flag, name) for name, text in list_texts() for flag in long.findall(text)]
    assert [each for each in texts if each[0] not in FLAGS | OTHERS] == []


def test_every_value_that_a_text_names_is_taken():
    groups = {g: g.options() for g in (*option_types().values(), Recipe, RunOptions, AuditOptions)}
    pattern = r"(--[a-z][a-z-]+)[ =]([a-z0-9][^\s)'\"|;]*)"
    tried = 0
    for name, text in list_texts():
        for flag, value in re.findall(pattern, text):
            value = value.rstrip(".,:")
            owners = [(g, f) for g, options in groups.items() for f, option in options.items()
                      if flag in option.flags]  # fmt: skip
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
