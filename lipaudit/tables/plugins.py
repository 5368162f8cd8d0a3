"""Plug-ins: objects that other packages declare as entry points."""

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
    """Load the objects that installed packages declare in an entry point group, sorted by name.

    The module of an entry is imported, so it should import nothing large.

    Args:
        group: name of the group, such as `lipaudit.attacks`.
        kind: the type of the records of the group.
        taken: names already in use.
        check: returns the fault of a record, such as "names no function"; empty without a fault.

    Raises:
        UsageError: an entry cannot be imported, is not a `kind`, has another name than its record,
            reuses a name or fails the check; the message names its package.
    """
    from importlib.metadata import entry_points

    records: dict[str, T] = {}
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        if point.name in taken or point.name in records:
            raise _make_refusal(point, "has a name that is in use already")
        try:
            record = point.load()
        except Exception as error:
            reason = f"cannot be loaded: {type(error).__name__}: {error}"
            raise _make_refusal(point, reason) from error
        if not isinstance(record, kind):
            what = f"{kind.__module__}.{kind.__qualname__}"
            raise _make_refusal(point, f"is {type(record).__name__}, not {what}")
        name = getattr(record, "name", point.name)
        other = "" if name == point.name else f"is called {name!r} in its record"
        if fault := check(record) or other:
            raise _make_refusal(point, fault)
        records[point.name] = record
    return records


def _make_refusal(point: EntryPoint, reason: str) -> UsageError:
    package = point.dist.name if point.dist else "an unknown package"
    return UsageError(
        f"the plug-in {point.name!r} ({point.group}) of {package} {reason}",
        f"Update {package}, or uninstall it.",
    )
