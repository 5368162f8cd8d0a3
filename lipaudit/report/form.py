"""The forms in which a result can be shown, and what a format says of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TextIO

Form = Literal["page", "screen", "brief", "record", "frame", "lines", "judgement", "picture"]
"""A `Document`, one that fits a screen, a `Brief`, a pydantic model, a `Frame`, lines of text, a
`Judgement` of the gate, a picture's block."""
Subject = Mapping[Form, Callable[[], Any]]
"""What a command has to show: how each form that it has is made."""


@dataclass(frozen=True)
class Format:
    """One way to write a result.

    Attributes:
        name: what `--format` calls it.
        takes: the form that it writes.
        render: that form in, the bytes of a file out.
        suffixes: of the files that are written so.
        asked: whether a file is written so only where `--format` names it: what its suffix alone
            asks for is another format.
        refusal: what is said, and what to do instead, where a result has no such form.
        screen: writes the form to a stream as a terminal of its width and colours takes it;
            None where a terminal gets the bytes of a file.
    """

    name: str
    takes: Form
    render: Callable[[Any], bytes]
    suffixes: tuple[str, ...] = ()
    asked: bool = False
    refusal: tuple[str, str] = ("", "")
    screen: Callable[[Any, TextIO], None] | None = None
