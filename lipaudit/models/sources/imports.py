"""Import timm and transformers, which takes most of a command's start, in less time."""

from __future__ import annotations

import gc
from functools import cache
from importlib import import_module


@cache
def import_library(name: str) -> None:
    """Import timm or transformers while the garbage collector is paused.

    An import makes a million objects and hardly any garbage.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        import_module(name)
    finally:
        # The command line froze its modules, so that the collector never walks through them. The
        # new modules are then frozen, too. Objects of a notebook are not.
        if gc.get_freeze_count():
            gc.freeze()
        if was_enabled:
            gc.enable()
