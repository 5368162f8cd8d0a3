"""What is slow says how slow."""

import re
from pathlib import Path

SLOW = re.compile(r"\bmark\.slow\b")
NAMED = re.compile(r"\bmark\.slow\(seconds=[1-9]")


def test_every_slow_test_names_its_seconds():
    texts = {path.name: path.read_text() for path in Path(__file__).parent.rglob("*.py")}
    slow = {name: len(SLOW.findall(text)) for name, text in texts.items()}
    assert sum(slow.values()) > 10
    assert slow == {name: len(NAMED.findall(text)) for name, text in texts.items()}
