"""Damaged and hostile files: one error for each, and sizes that are checked before memory is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lipaudit.errors import InputError, LipauditError, out_of_memory

DEFLATED = 1032
"""Bytes that one byte of a deflated file unpacks to at most."""


@contextmanager
def refuse_damage(name: object, kind: str, advice: str) -> Iterator[None]:
    """Turn whatever a library raises at a damaged file into one error.

    Args:
        name: the file, for the message.
        kind: what it should be: `.npz file`, `image`.
        advice: what to do about it.

    Raises:
        InputError: the block raised an exception that is not lipaudit's.
    """
    try:
        yield
    except LipauditError:
        raise
    except Exception as error:  # every format's library has exceptions of its own
        said = str(error).partition("\n")[0] or type(error).__name__
        reason = "it takes more memory than there is" if out_of_memory(error) else said
        raise InputError(f"{name} is not a readable {kind} ({reason})", advice) from error


def claimed_size(shape: Sequence[int], width: int, most: int) -> int:
    """Return the bytes of an array whose header gives its shape.

    Args:
        shape: as the header claims it.
        width: bytes of a number.
        most: bytes that the file can hold.

    Raises:
        ValueError: the array cannot be in the file.
    """
    size = math.prod(map(int, shape)) * width
    if min(shape, default=0) < 0 or size > most:
        sizes = " x ".join(map(str, shape))
        raise ValueError(f"its header claims {sizes} values, it holds at most {most} bytes")
    return size
