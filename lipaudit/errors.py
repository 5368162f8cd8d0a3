"""What can go wrong, as a user meets it: what happened, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """Exit status of every command (documented in docs/errors.md)."""

    OK = 0
    REGRESSION = 1
    USAGE = 2
    INTERNAL = 3
    INPUT = 4
    BASELINE = 5
    NOT_PROVEN = 6


class LipauditError(Exception):
    """An error a user can act on: one line that says what happened, one that says what to do.

    Args:
        message: what happened, with the offending value.
        advice: what to type or change next; empty when the message says it all.
    """

    exit_code = ExitCode.INTERNAL

    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice


class UsageError(LipauditError):
    """The command line or the configuration asks for something that makes no sense."""

    exit_code = ExitCode.USAGE


class EvaluationError(LipauditError):
    """The computation failed: non-finite values, out of memory, an unwritable result."""

    exit_code = ExitCode.INTERNAL


class StructureError(EvaluationError):
    """An attention layer is not, on these data, what it was when the model was surveyed.

    Args:
        layer: its index.
        module: its path.
        reason: in what it differs.
    """

    def __init__(self, layer: int, module: str, reason: str) -> None:
        super().__init__(
            f"attention layer {layer} ({module}) {reason}",
            "its structure depends on the data: leave it out with --layers",
        )
        self.layer = layer
        self.module = module
        self.reason = reason


class InputError(LipauditError):
    """A model or data set is missing, damaged or not supported."""

    exit_code = ExitCode.INPUT


class BaselineError(LipauditError):
    """The baseline is missing, damaged or not comparable with the current report."""

    exit_code = ExitCode.BASELINE


SHORT, ALIKE = 3, 0.85
"""What is longer may be the start of a name, if it is as much like it."""


def similar(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three known names that may have been meant by another, the likeliest first.

    >>> similar("pdg", ["fgsm", "pgd", "square"])
    ['pgd']
    >>> similar("vit_tiny", ["deit_tiny", "vit_tiny_patch16"])
    ['vit_tiny_patch16', 'deit_tiny']
    """
    from difflib import get_close_matches

    word = name.lower()
    spelled = {each.lower(): each for each in reversed(list(known))}
    begun = {each[: len(word)]: each for each in spelled} if len(word) > SHORT else {}
    starts = [begun[start] for start in get_close_matches(word, begun, 3, ALIKE)]
    near = [*starts, *get_close_matches(word, spelled, 3)]
    return [spelled[each] for each in dict.fromkeys(near)][:3]


def suggestion(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """Say what may have been meant by a name that is not known: the advice of an error.

    Args:
        name: as it was given.
        known: the names there are.
        otherwise: what is said where none is near; the list of all, if None.

    >>> suggestion("sgdd", ["sgd", "adamw"])
    "Did you mean 'sgd'?"
    >>> suggestion("lion", ["sgd", "adamw"])
    'There are: sgd, adamw.'
    """
    known = list(known)
    if near := similar(name, known):
        return f"Did you mean {' or '.join(map(repr, near))}?"
    return f"There are: {', '.join(known)}." if otherwise is None else otherwise


def neighbours(path: Path) -> list[str]:
    """Return the paths beside one that is not there: known names for `suggestion`."""
    try:
        return sorted(str(path.parent / each.name) for each in path.parent.iterdir())
    except OSError:
        return []
