"""A result as bytes: one file per format, each with a `FORMAT` that says what it writes."""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from lipaudit.errors import UsageError, suggestion
from lipaudit.report.form import Form, Format


def collect() -> dict[str, Format]:
    """Return the format of every file in this folder, by name: a new one is a file here."""
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    return {module.FORMAT.name: module.FORMAT for module in modules}


RENDERERS: dict[str, Format] = collect()
"""Every format, by the name that `--format` takes."""


USUAL = ("text", "table", "json")
"""What a terminal gets: text where a result has lines, else a page, else data."""


def named(name: str, forms: Collection[Form]) -> Format:
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
    return _showing(RENDERERS[name], forms)


def of_file(path: Path, forms: Collection[Form], chosen: Format | None = None) -> Format:
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
    candidates.sort(key=lambda known: (known.takes not in forms, known.takes == "page"))
    return _showing(candidates[0], forms)


def usual(forms: Collection[Form]) -> Format:
    """Return the format that a terminal gets when none is named: the first that can be had."""
    return next(known for n in USUAL if (known := RENDERERS[n]).takes in forms)


def _showing(known: Format, forms: Collection[Form]) -> Format:
    if known.takes not in forms:
        able = (each.name for each in RENDERERS.values() if each.takes in forms)
        here = f"{known.name} cannot show this", f"There are: {', '.join(able)}."
        raise UsageError(*(known.refusal if "page" in forms and known.refusal[0] else here))
    return known
