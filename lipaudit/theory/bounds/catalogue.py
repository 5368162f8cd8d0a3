"""Which bounds there are: the files of this folder, and those of plug-ins."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType

from lipaudit.tables.common import HEAD_NORMS
from lipaudit.tables.plugins import entries
from lipaudit.theory import bounds as folder
from lipaudit.theory.bounds.record import Bound

GROUP = "lipaudit.bounds"


def _read_records() -> tuple[Bound, ...]:
    """Read the record of every file: `castin.py` has its own under the name `CASTIN`."""
    names = {module.name for module in iter_modules(folder.__path__)} - {"catalogue", "record"}
    modules = {name: import_module(f"{folder.__name__}.{name}") for name in names}
    records: list[Bound] = [getattr(module, name.upper()) for name, module in modules.items()]
    return tuple(sorted(records, key=lambda bound: bound.place))


OWN = _read_records()
"""Our bounds in the order of columns, tables and pictures: usually the tightest first."""


@cache
def load_bounds() -> Mapping[str, Bound]:
    """Return the record of every bound by its name: ours, then those of plug-ins.

    Raises:
        UsageError: a plug-in cannot be used; the message names its package.
    """
    taken = {*HEAD_NORMS, *(name for bound in OWN for name in bound.columns())}
    records = {bound.name: bound for bound in OWN} | entries(GROUP, Bound, taken)
    return MappingProxyType(records)
