"""Import timm and transformers, which takes most of a command's start, in less time.

timm and torchvision import torch's compiler (`torch._dynamo`) for two functions: `disable` marks
functions that are never compiled, `is_compile_supported` asks about a device. The compiler takes
a second and 150 MB, and lipaudit never compiles.
"""

from __future__ import annotations

import gc
import sys
from functools import cache, partial, wraps
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

# The part of the compiler that torchvision reads.
UTILITIES = "torch._dynamo.utils"


@cache
def import_library(name: str) -> None:
    """Import timm or transformers, without torch's compiler unless more of it is needed.

    The garbage collector is paused: an import makes a million objects and hardly any garbage.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    sys.modules.setdefault(UTILITIES, _Utilities(UTILITIES))
    compiler: Any = torch.compiler
    disable = compiler.disable
    compiler.disable = partial(_disable_later, disable)
    try:
        import_module(name)
    finally:
        compiler.disable = disable
        _remove_stand_in()
        # The command line froze its modules, so that the collector never walks through them. The
        # new modules are then frozen, too. Objects of a notebook are not.
        if gc.get_freeze_count():
            gc.freeze()
        if was_enabled:
            gc.enable()


class _Utilities(ModuleType):
    """Stands for UTILITIES until anything but its function is used."""

    @staticmethod
    def is_compile_supported(device: str) -> bool:
        """Return whether the compiler supports a type of device; only called after the import."""
        from torch._dynamo.utils import is_compile_supported

        return is_compile_supported(device)

    def __getattr__(self, name: str) -> Any:
        """Load the compiler; but Python itself asks modules for __path__ and the like."""
        if name.startswith("__"):
            raise AttributeError(name)
        _remove_stand_in()
        from torch._dynamo import utils

        return getattr(utils, name)


def _remove_stand_in() -> None:
    """Let the next import of UTILITIES load it."""
    if isinstance(sys.modules.get(UTILITIES), _Utilities):
        del sys.modules[UTILITIES]


def _disable_later(disable: Any, function: Any = None, *options: Any, **named: Any) -> Any:
    """Return the function. Its first call marks it as never compiled, and loads the compiler."""
    make = cache(partial(disable, function, *options, **named))

    @wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return make()(*arguments, **keywords)

    return call
