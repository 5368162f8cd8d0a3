"""A time limit that the code under test cannot catch by accident."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class OutOfTime(BaseException):
    """The limit has passed."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise OutOfTime in the block after so many seconds."""

    def stop(*_: Any) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
