"""Plug-ins: what packages other than ours declare as entry points of a group of ours."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, TypeVar

from lipaudit.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


def entries(
    group: str,
    kind: type[T],
    taken: Collection[str] = (),
    *,
    check: Callable[[T], str] = lambda record: "",
) -> dict[str, T]:
    """Load what installed packages declare in an entry point group, in order of the names.

    The module that an entry names is imported, so it should import nothing heavy itself.

    Args:
        group: the group's name, `lipaudit.attacks` say.
        kind: the type of the records of the group.
        taken: names that are in use already.
        check: says what is wrong with a record, "names no function" say; empty if nothing is.

    Raises:
        UsageError: an entry cannot be imported, is no `kind`, is called otherwise than its
            record, has a name that is in use or does not pass the check; the message names its
            package.
    """
    from importlib.metadata import entry_points

    records: dict[str, T] = {}
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        if point.name in taken or point.name in records:
            raise _make_refusal(point, "has a name that is in use already")
        records[point.name] = record = _load(point, kind)
        name = getattr(record, "name", point.name)
        fault = check(record) or (
            "" if name == point.name else f"is called {name!r} in its record"
        )
        if fault:
            raise _make_refusal(point, fault)
    return records


def _load(point: EntryPoint, kind: type[T]) -> T:
    try:
        record = point.load()
    except Exception as error:
        reason = f"cannot be loaded: {type(error).__name__}: {error}"
        raise _make_refusal(point, reason) from error
    if not isinstance(record, kind):
        what = f"{kind.__module__}.{kind.__qualname__}"
        raise _make_refusal(point, f"is {type(record).__name__}, not {what}")
    return record


def _make_refusal(point: EntryPoint, reason: str) -> UsageError:
    package = point.dist.name if point.dist else "an unknown package"
    return UsageError(
        f"the plug-in {point.name!r} ({point.group}) of {package} {reason}",
        f"Update {package}, or uninstall it.",
    )
