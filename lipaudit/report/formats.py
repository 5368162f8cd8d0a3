"""All formats, and the choice of one by its name or by the suffix of a file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from lipaudit.errors import UsageError, suggestion
from lipaudit.report import html, latex, markdown, records, terminal

Form = Literal["page", "screen", "record", "frame", "lines", "judgement"]
"""A `Document`, one that fits a screen, a pydantic model, rows of plain values, lines of
text, a `Judgement` of the gate."""
Subject = Mapping[Form, Callable[[], Any]]
"""A result: for each form, the function that creates it."""


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
        screen: writes the form to a stream as a terminal of its width and colours takes it;
            None where a terminal gets the bytes of a file.
    """

    name: str
    takes: Form
    render: Callable[[Any], bytes]
    suffixes: tuple[str, ...] = ()
    asked: bool = False
    screen: Callable[[Any, TextIO], None] | None = None


_FORMATS = (
    Format("brief", "page", markdown.render_brief, (".md",), asked=True),
    Format("csv", "frame", records.write_csv, (".csv",)),
    Format("html", "page", html.render, (".html", ".htm")),
    Format("json", "record", records.write_json, (".json",)),
    Format("junit", "judgement", records.write_junit, (".xml",)),
    Format("latex", "page", latex.render, (".tex",)),
    Format("markdown", "page", markdown.render, (".md", ".markdown")),
    Format("table", "page", terminal.render, (".txt",), screen=terminal.write),
    Format("text", "lines", records.write_lines, (".txt",)),
)
RENDERERS: dict[str, Format] = {known.name: known for known in _FORMATS}
"""Every format, by the name that `--format` takes."""


USUAL = ("text", "table", "json")
"""Default formats of a terminal, by preference."""


def find_format(name: str, forms: Collection[Form]) -> Format:
    """Return a format by its name.

    Args:
        name: what `--format` was given.
        forms: those that the result has.

    Raises:
        UsageError: for an unknown format, or one that cannot show the result.
    """
    if name not in RENDERERS:
        known = [known.name for known in RENDERERS.values() if known.takes in forms]
        raise UsageError(f"unknown format {name!r}", suggestion(name, known))
    return _require_form(RENDERERS[name], forms)


def find_file_format(path: Path, forms: Collection[Form], chosen: Format | None = None) -> Format:
    """Return the format that a file's name asks for.

    Where formats share the suffix, the one that was chosen comes first, then the result's own
    before that of any page: `.txt` is a judgement's lines, and a report's tables; `.md` is a page,
    and a brief where that was chosen.

    Args:
        path: of the file.
        forms: those that the result has.
        chosen: what `--format` named.

    Raises:
        UsageError: for a suffix without a format, or whose format cannot show the result.
    """
    suffix = path.suffix.lower()
    if chosen and suffix in chosen.suffixes:
        return chosen
    candidates = [f for f in RENDERERS.values() if suffix in f.suffixes and not f.asked]
    if not candidates:
        usual = [f for f in RENDERERS.values() if f.takes in forms and not f.asked]
        known = [suffix for each in usual for suffix in each.suffixes]
        message = f"cannot tell the format of {path} from its name"
        raise UsageError(message, suggestion(suffix, dict.fromkeys(known)))
    # A result that has a form of its own (lines of a judgement) is written in that form.
    candidates.sort(key=lambda known: (known.takes not in forms, known.takes == "page"))
    return _require_form(candidates[0], forms)


def find_usual_format(forms: Collection[Form]) -> Format:
    """Return the format that a terminal gets when none is named: the first that can be had."""
    return next(known for n in USUAL if (known := RENDERERS[n]).takes in forms)


def _require_form(known: Format, forms: Collection[Form]) -> Format:
    if known.takes not in forms:
        able = ", ".join(each.name for each in RENDERERS.values() if each.takes in forms)
        raise UsageError(f"{known.name} is not possible here", f"There are: {able}.")
    return known
