"""Wings: what packages add to lipaudit. Each is one record, declared by one entry point.

The entry points of the group `lipaudit.wings` name the records: those of lipaudit's own wings (see
its pyproject.toml), and those of other packages. Every room collects its kind of object from all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from pkgutil import iter_modules, resolve_name
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from lipaudit.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")

GROUP = "lipaudit.wings"
# Groups of lipaudit 0.2, each for one kind of object.
OLD_GROUPS = ("lipaudit.attacks", "lipaudit.bounds", "lipaudit.measures")
GUIDE = "docs/extending.md has an example"


@dataclass(frozen=True, kw_only=True)
class Wing:
    """What a package adds to lipaudit.

    Every command imports the record, so its module imports nothing large, such as torch. Functions
    are named as `module:function`, and imported when they are first called. No name may be in use
    already.

    Attributes:
        measures: each a `lipaudit.measures.base.Measure`.
        bounds: each a `lipaudit.theory.bounds.record.Bound`.
        attacks: each a `lipaudit.attacks.kinds.AttackKind`, by the name that `--attack` takes.
        commands: the heading in `lipaudit --help` and the function of each command, by name.
        options: the options of these commands, which `explain` lists, by command.
        topics: the meanings of words, which `explain` prints, by heading and word.
        drawings: functions from sections to blocks of a page, by the name in a `Display`.
        public: what `lipaudit.NAME` offers in Python: `module:object`, by name.

    Raises:
        TypeError: a field is neither a tuple nor a mapping, as its type asks.
    """

    measures: tuple[Any, ...] = ()
    bounds: tuple[Any, ...] = ()
    attacks: Mapping[str, Any] = field(default_factory=dict)
    commands: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    options: Mapping[str, type[Any]] = field(default_factory=dict)
    topics: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    drawings: Mapping[str, str] = field(default_factory=dict)
    public: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A plug-in may come from anybody: check the type of every field. A field whose default is
        # () is a tuple, all others are mappings.
        for known in fields(self):
            kind = tuple if known.default == () else Mapping
            value = getattr(self, known.name)
            if not isinstance(value, kind):
                word = kind.__name__.lower()
                raise TypeError(f"{known.name} is a {type(value).__name__}, not a {word}")


@cache
def load_wings() -> Mapping[EntryPoint, Wing]:
    """Return the wings of all installed packages: lipaudit's first, then by name.

    Raises:
        UsageError: an entry point cannot be imported, is no `Wing`, reuses a name, or belongs to a
            group of lipaudit 0.2; the message names its package.
    """
    from importlib.metadata import entry_points

    declared = entry_points()
    for group in OLD_GROUPS:
        for point in declared.select(group=group):
            reason = f"is declared as in lipaudit 0.2 (it is now part of a Wing in {GROUP})"
            raise _make_entry_error(point, reason)
    wings: dict[EntryPoint, Wing] = {}
    points = declared.select(group=GROUP)
    for point in sorted(points, key=lambda point: (not _is_own(point), point.name)):
        if point.name in {other.name for other in wings}:
            raise _make_entry_error(point, "has a name that is in use already")
        wings[point] = _load_wing(point)
    return MappingProxyType(wings)


def _load_wing(point: EntryPoint) -> Wing:
    """Return the wing (what a package adds to lipaudit) that an entry point names.

    Raises:
        UsageError: the wing cannot be imported, or is no `Wing`; the message names its package.
    """
    try:
        wing = point.load()
    except Exception as error:
        reason = f"cannot be loaded: {type(error).__name__}: {error}"
        raise _make_entry_error(point, reason) from error
    if not isinstance(wing, Wing):
        reason = f"is {type(wing).__name__}, not {Wing.__module__}.{Wing.__name__}"
        raise _make_entry_error(point, reason)
    return wing


def collect(
    kind: type[T],
    name: str,
    taken: Collection[str] = (),
    *,
    check: Callable[[str, T], str] = lambda _name, _value: "",
) -> dict[str, T]:
    """Return the objects of one kind that all installed wings (plug-ins) add, by name.

    Args:
        kind: type of the objects.
        name: the field of a wing that has the objects, such as `measures`.
        taken: names already in use.
        check: called with the name of an object and the object: returns a fault, such as "has no
            table", or "".

    Raises:
        UsageError: an object is not a `kind`, reuses a name or fails the check; the message names
            its package.
    """
    collected = {}
    for point, wing in load_wings().items():
        objects = getattr(wing, name)
        # A tuple becomes a dict by the attribute `name`. An object without a name gets its number:
        # it is not of the right type, so the check below refuses it.
        if isinstance(objects, tuple):
            objects = {getattr(each, "name", number): each for number, each in enumerate(objects)}
        for key, value in objects.items():
            fault = ""
            if not isinstance(value, kind):
                fault = f"is {type(value).__name__}, not {kind.__module__}.{kind.__qualname__}"
            elif key in taken or key in collected:
                fault = "has a name that is in use already"
            fault = fault or check(key, value)
            if fault:
                raise _make_entry_error(point, f"has {key!r} among its {name}, which {fault}")
            collected[key] = value
    return collected


def load_object(place: str) -> Any:
    """Import and return the object that `module:object` names.

    Raises:
        UsageError: the object does not exist, or its module cannot be imported.
    """
    try:
        return resolve_name(place)
    except Exception as error:
        raise make_package_error(place, "cannot be loaded", error) from error


def make_package_error(place: str, fault: str, error: Exception) -> UsageError:
    """Return the error to raise for a plug-in's object that fails; it names the package.

    Args:
        place: the object as declared, `module:object`.
        fault: what went wrong, such as "cannot be loaded".
        error: the exception of the package.
    """
    package = place.partition(":")[0].partition(".")[0]  # the first name of the module
    return UsageError(
        f"{place} {fault}: {type(error).__name__}: {error}", f"Update {package}, or uninstall it."
    )


def explain_missing() -> str:
    """Return the advice to reinstall lipaudit if one of its own wings is missing; else "".

    If a folder in `lipaudit/wings` has no entry point, the installation is outdated.
    """
    folder = Path(__file__).parents[1] / "wings"
    missing = {module.name for module in iter_modules([str(folder)])}
    missing -= {point.name for point in load_wings() if _is_own(point)}
    if not missing:
        return ""
    return f"Not installed: {', '.join(sorted(missing))}. Reinstall lipaudit: pip install -e ."


def _is_own(point: EntryPoint) -> bool:
    return point.value.startswith("lipaudit.")


def _make_entry_error(point: EntryPoint, reason: str) -> UsageError:
    """Return the error to raise for a plug-in that cannot be used: its package, and the reason."""
    package = point.dist.name if point.dist else "an unknown package"
    return UsageError(
        f"the plug-in {point.name!r} ({point.group}) of {package} {reason}",
        f"Update {package}, or uninstall it. For its authors: {GUIDE}.",
    )
