"""Errors as users see them: what happened, and what to do."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import cache
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement


class ExitCode(IntEnum):
    """Exit status of every command (documented in docs/errors.md)."""

    OK = 0
    REGRESSION = 1
    USAGE = 2
    INTERNAL = 3
    INPUT = 4
    BASELINE = 5
    NOT_PROVEN = 6
    TIME_LIMIT = 7


class LipauditError(Exception):
    """An error a user can act on: one line that says what happened, one that says what to do.

    Args:
        message: what happened, with the offending value.
        advice: what to type or change next; empty when the message says it all.
        exit_code: exit code of another error that this one reports; None: the code of its class.
    """

    exit_code = ExitCode.INTERNAL

    def __init__(self, message: str, advice: str = "", exit_code: int | None = None) -> None:
        # Texts may quote a file: control characters must not reach the terminal.
        self.message, self.advice = visible(message), visible(advice)
        super().__init__(self.message)
        if exit_code is not None:
            self.exit_code = ExitCode(exit_code)


class UsageError(LipauditError):
    """The command line or the configuration is not valid."""

    exit_code = ExitCode.USAGE


class EvaluationError(LipauditError):
    """The computation failed: non-finite values, out of memory, an unwritable result."""

    exit_code = ExitCode.INTERNAL


class StructureError(EvaluationError):
    """An attention layer differs, on these data, from the survey of the model.

    Args:
        layer: index of the layer.
        module: path of its module.
        reason: the difference.
    """

    def __init__(self, layer: int, module: str, reason: str) -> None:
        # A survey on the first samples of a run reads which ops an attention layer consists of. On
        # a later sample the layer has other ops: `reason` says which.
        super().__init__(
            f"attention layer {layer} ({module}): {reason}",
            "The structure of this layer depends on the data. Leave it out with --layers.",
        )
        self.layer = layer
        self.module = module
        self.reason = reason


class InputError(LipauditError):
    """A model or data set is missing, damaged or not supported."""

    exit_code = ExitCode.INPUT


class BaselineError(LipauditError):
    """The baseline is missing, damaged or not comparable, or a report cannot be one."""

    exit_code = ExitCode.BASELINE


def visible(text: str, keep: str = "") -> str:
    r"""Return text with control characters, direction marks and lone surrogates as escapes.

    Args:
        text: text that may come from an unknown file.
        keep: characters that stay as they are.

    >>> print(visible("a\x1b[31m\u202eb"))
    a\x1b[31m\u202eb
    """
    # The common case, which C handles fast.
    if text.isprintable():
        return text
    # Unicode categories: control and format characters, surrogates, line and paragraph separators.
    control = ("Cc", "Cf", "Cs", "Zl", "Zp")
    hidden = [c for c in set(text) - set(keep) if unicodedata.category(c) in control]
    return text.translate(
        {c: f"\\x{c:02x}" if c < 0x100 else f"\\u{c:04x}" for c in map(ord, hidden)}
    )


# Control characters that JSON does not escape by itself.
_CONTROL = re.compile("[\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")


def escape_controls(text: str) -> str:
    """Escape control characters in the strings of a JSON text."""
    return _CONTROL.sub(lambda match: json.dumps(match[0])[1:-1], text)


# Words longer than SHORT may match the start of a name, if at least ALIKE similar.
SHORT = 3
ALIKE = 0.85


def similar(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three of the known names that are similar to `name`, the likeliest first.

    They are names with a similar beginning (`vit_tiny` for vit_tiny_patch16), then similar names.

    >>> similar("pdg", ["fgsm", "pgd", "square"])
    ['pgd']
    >>> similar("vit_tiny", ["deit_tiny", "vit_tiny_patch16"])
    ['vit_tiny_patch16', 'deit_tiny']
    """
    from difflib import get_close_matches

    word = name.lower()
    # The names as they are spelled, by the name in lower case. Reversed, so that of names that
    # differ by case only the first one wins.
    spelled = {each.lower(): each for each in reversed(list(known))}
    near: list[str] = []
    if len(word) > SHORT:  # the beginnings of short words are alike by chance
        by_start = {each[: len(word)]: each for each in spelled}
        starts = get_close_matches(word, by_start, n=3, cutoff=ALIKE)
        near += (by_start[start] for start in starts)
    near += get_close_matches(word, spelled, n=3)
    distinct = list(dict.fromkeys(near))
    return [spelled[each] for each in distinct[:3]]


def join_few(names: Sequence[object], most: int = 4) -> str:
    """Return the first few names in one text, and how many more there are."""
    more = ""
    if len(names) > most:
        more = f" and {len(names) - most} more"
    return ", ".join(map(str, names[:most])) + more


def list_first(names: Sequence[object], most: int) -> list[str]:
    """Return the first few names as texts, and "..." if there are more."""
    shown = list(map(str, names[:most]))
    if len(names) > most:
        shown.append("...")
    return shown


def suggestion(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """Return the hint of an error on an unknown name.

    Args:
        name: the unknown name.
        known: all valid names.
        otherwise: the hint if no name is similar; None: the list of all names.

    >>> suggestion("sgdd", ["sgd", "adamw"])
    "Did you mean 'sgd'?"
    >>> suggestion("lion", ["sgd", "adamw"])
    'There are: sgd, adamw.'
    """
    known = list(known)
    if near := similar(name, known):
        return f"Did you mean {' or '.join(map(repr, near))}?"
    if otherwise is None:
        return f"There are: {', '.join(known)}."
    return otherwise


def neighbours(path: Path) -> list[str]:
    """Return the paths in the folder of a missing file, as known names for `suggestion`."""
    try:
        return sorted(str(path.parent / each.name) for each in path.parent.iterdir())
    except OSError:  # the folder is missing, too, or cannot be read
        return []


# Texts of RuntimeErrors from torch, whose allocators have no exception of their own.
_NO_MEMORY = re.compile("out of memory|allocate memory|not enough memory|Storage size calculation")
_DEVICE = re.compile("CUDA error|CUBLAS_STATUS|CUDNN_STATUS|cuDNN error|HIP error|MPS backend")


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an exception means that memory ran out, on the host or a device.

    Only accelerators have a special exception. The host's allocator raises RuntimeError, which is
    recognised by its text.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))


def is_machine_error(error: BaseException) -> bool:
    """Say whether an exception is about the machine (memory, device, disk), not the model.

    Code that tries whether a model can run must raise these exceptions again.

    >>> is_machine_error(RuntimeError("CUDA error: device-side assert triggered"))
    True
    >>> is_machine_error(RuntimeError("shapes do not fit"))
    False
    """
    if is_out_of_memory(error) or isinstance(error, OSError):
        return True
    # The exception of torch is compared by name: this file must not import torch.
    if type(error).__name__ == "AcceleratorError":
        return True
    return isinstance(error, RuntimeError) and bool(_DEVICE.search(str(error)))


def is_ours(error: BaseException) -> bool:
    """Tell whether an exception was raised by lipaudit's own code, not by code that it calls."""
    files = [frame.filename for frame in extract_tb(error.__traceback__)]
    return Path(files[-1]).is_relative_to(Path(__file__).parent)


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message."""
    return str(error).strip().partition("\n")[0]


def summarise_error(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message, if it has one."""
    return ": ".join(filter(None, (type(error).__name__, first_line(error))))


@contextmanager
def explain_failure(what: str, advice: str, *kinds: type[BaseException]) -> Iterator[None]:
    """Turn exceptions of a library or of the user's code into an `InputError`.

    lipaudit's own errors pass through.

    Args:
        what: what failed; type and first line of the exception follow in brackets.
        advice: the hint.
        kinds: the exceptions to convert. By default all but faults of memory or a device, on which
            `what` has no bearing; and also the attempt to end the program, whose exit code would
            be taken for lipaudit's.

    Raises:
        InputError: the block raised such an exception.
    """
    caught = kinds or (Exception, SystemExit)
    try:
        yield
    except LipauditError:
        raise
    except caught as error:
        # By default, faults of memory or a device pass through. Those of the disk (OSError) do
        # not: a missing or unreadable file is what `what` and `advice` explain. Readers of files
        # convert all faults, with `Exception` as `kinds`: a damaged file may ask for any amount of
        # memory.
        if not kinds and is_machine_error(error) and not isinstance(error, OSError):
            raise
        reason = summarise_error(error)
        if is_out_of_memory(error):
            reason = "it needs more memory than is available"
        raise InputError(f"{what} ({reason})", advice) from error


@cache
def find_unmet_requirement() -> tuple[str, str] | None:
    """Return message and advice on a package that is missing or too old; None if none is."""
    from importlib.metadata import PackageNotFoundError, requires

    from packaging.requirements import Requirement

    try:
        needed = [Requirement(text) for text in requires("lipaudit") or ()]
    except PackageNotFoundError:  # lipaudit runs from a checkout that is not installed
        return None
    for package in needed:
        # Packages of an extra, and of another platform or Python, are not needed.
        if package.marker is not None and not package.marker.evaluate({"extra": ""}):
            continue
        misfit = _find_misfit(package)
        if not misfit:
            continue
        wanted = f"{package.name}{package.specifier}"
        advice = f"pip install '{wanted}'"
        if package.name == "torchvision":  # its operators fit one build of torch
            advice += " from the index that torch was installed from"
        return f"{package.name} {misfit}, and lipaudit needs {wanted}", advice
    return None


def _find_misfit(package: Requirement) -> str:
    """Return why an installed package does not fit, such as `1.0 is installed`; "" if it fits."""
    from importlib.metadata import PackageNotFoundError, version

    from packaging.version import Version

    try:
        installed = version(package.name)
    except PackageNotFoundError:
        return "is not installed"
    # A vendor's build (2.8.0a0+nv25.8) counts as the release that it precedes.
    if package.specifier.contains(Version(installed).base_version, prereleases=True):
        return ""
    return f"{installed} is installed"


def list_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that led to it, the last one first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def find_user_error(error: BaseException) -> LipauditError | None:
    """Return an exception as an error that a user can act on; None if it can only be a bug.

    Memory, torchvision, packages, files and devices have a hint of their own.

    Args:
        error: any exception.
    """
    if isinstance(error, LipauditError):
        return error
    said = first_line(error)
    if is_out_of_memory(error):
        advice = "Try --batch-size 1, --device cpu, fewer --samples, or a smaller model."
        return EvaluationError("out of memory" + (f" ({said})" if said else ""), advice)
    # The operators of torchvision work with one version of torch only: with another, the first
    # use fails, and its error names the operator.
    if misfit := next((e for e in list_causes(error) if "torchvision::" in str(e)), None):
        return InputError(
            f"torchvision does not fit the installed torch: {first_line(misfit)}",
            "Install torchvision from the index that torch was installed from.",
        )
    if isinstance(error, SystemExit):
        text = f"the model ended the program (SystemExit: {said})"
        return EvaluationError(text, "Let its code raise an exception in place of sys.exit.")
    if isinstance(error, ImportError):
        # If a package that lipaudit requires is missing, name it; else use Python's own words.
        unknown = f"a package is missing or too old: {said}", "Look for it: pip check"
        message, advice = find_unmet_requirement() or unknown
        return InputError(message, advice)
    if isinstance(error, OSError):
        return _explain_os_error(error)
    if is_machine_error(error):
        advice = "Look at the device (lipaudit env), or try --device cpu."
        return EvaluationError(f"the device failed: {said}", advice)
    return None


def _explain_os_error(error: OSError) -> LipauditError:
    """Return an error of the operating system, such as a full disk, with the file and a hint."""
    file = f"{error.filename}: " if error.filename else ""
    return EvaluationError(
        f"the operating system refused: {file}{error.strerror or first_line(error)}",
        "Check the path, its permissions and the space left.",
    )


def explain_error(error: BaseException) -> LipauditError:
    """Return any exception as an error with a hint, for the last line of a command.

    An unexpected exception is reported as a bug, unless a package is missing or too old: it may
    then come from there.
    """
    if (known := find_user_error(error)) is not None:
        return known
    if words := find_unmet_requirement():
        return InputError(*words)
    return LipauditError(
        f"internal error: {summarise_error(error)}",
        "This is a bug in lipaudit: run again with -v to see where.",
    )
