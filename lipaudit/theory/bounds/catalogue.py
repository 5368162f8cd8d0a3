"""Which bounds there are: ours, and those of plug-ins."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from lipaudit.tables.common import HEAD_NORMS
from lipaudit.tables.plugins import entries
from lipaudit.theory.bounds.appendix_c import APPENDIX_C
from lipaudit.theory.bounds.castin import CASTIN
from lipaudit.theory.bounds.hu import HU
from lipaudit.theory.bounds.mean_field import MEAN_FIELD
from lipaudit.theory.bounds.record import Bound
from lipaudit.theory.bounds.sharp import SHARP
from lipaudit.theory.bounds.theorem3 import THEOREM3
from lipaudit.theory.bounds.theorem3_g1 import THEOREM3_G1

GROUP = "lipaudit.bounds"
OWN = (SHARP, APPENDIX_C, THEOREM3, THEOREM3_G1, CASTIN, MEAN_FIELD, HU)
"""Our bounds in the order of columns, tables and pictures: usually the tightest first."""


@cache
def load_bounds() -> Mapping[str, Bound]:
    """Return the record of every bound by its name: ours, then those of plug-ins.

    Raises:
        UsageError: a plug-in cannot be used; the message names its package.
    """
    taken = {*HEAD_NORMS, *(name for bound in OWN for name in bound.columns())}
    own = {bound.name: bound for bound in OWN}
    return MappingProxyType({**own, **entries(GROUP, Bound, taken)})
