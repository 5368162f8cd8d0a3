"""What can go wrong, as a user meets it: what happened, and what to do about it."""

from __future__ import annotations

from enum import IntEnum


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
