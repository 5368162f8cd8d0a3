"""Texts for users are short sentences in plain words: help, glossary, columns, notes, errors."""

import ast
import re
from pathlib import Path

import pytest
import typer

from lipaudit.cli.app import app
from lipaudit.report.topics import list_topics

PACKAGE = Path(__file__).parents[1] / "lipaudit"
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
        yield from (
            (f"{name} {each} {p.name}", getattr(p, "help", "") or "") for p in command.params
        )
        if hasattr(command, "commands"):
            yield from helps(command, f"{name} {each}")


def explanations():
    for topic in list_topics():
        parts = (part.removeprefix("How to read it: ") for part in topic.details)
        yield from ((topic.name, part) for part in (topic.meaning, *parts))


def notes_and_errors():
    for path in PACKAGE.rglob("*.py"):
        yield from ((f"{path.name}:{line}", text) for line, text in literals(path))


SOURCES = {
    "help": lambda: helps(typer.main.get_command(app)),
    "explain": explanations,
    "code": notes_and_errors,
}


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
