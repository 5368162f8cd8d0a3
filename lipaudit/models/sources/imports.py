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
    """Import timm or transformers in less time: without torch's compiler (`torch._dynamo`).

    These libraries import the compiler for two functions only. While they are imported,
    substitutes take the place of both. A substitute loads the compiler if it is really needed.
    """
    # An import makes a million objects and hardly any garbage: the garbage collector is paused.
    was_enabled = gc.isenabled()
    gc.disable()
    # Substitute 1: `torch._dynamo.utils.is_compile_supported`, in a module of our own.
    sys.modules.setdefault(UTILITIES, _Utilities(UTILITIES))
    # Substitute 2: `torch.compiler.disable`.
    compiler = torch.compiler
    disable = compiler.disable
    compiler.disable = partial(_disable_later, disable)
    try:
        import_module(name)
    finally:
        compiler.disable = disable
        _remove_substitute()
        # The command line has frozen its modules, so that the collector never walks through them:
        # freeze the new modules, too. In a notebook nothing is frozen, and nothing is frozen here.
        if gc.get_freeze_count():
            gc.freeze()
        if was_enabled:
            gc.enable()


class _Utilities(ModuleType):
    """Substitute of the module UTILITIES: loads the real module when something of it is used."""

    @staticmethod
    def is_compile_supported(device: str) -> bool:
        """Ask the real function of this name whether torch's compiler supports a type of device.

        Libraries only import the function. The compiler is loaded if they call it.
        """
        from torch._dynamo.utils import is_compile_supported

        return is_compile_supported(device)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the real `torch._dynamo.utils`, for which this module stands.

        This loads torch's compiler. Names such as __path__, which Python itself asks every module
        for, do not load it.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        _remove_substitute()
        from torch._dynamo import utils

        return getattr(utils, name)


def _remove_substitute() -> None:
    """Let the next import of UTILITIES load the real module."""
    if isinstance(sys.modules.get(UTILITIES), _Utilities):
        del sys.modules[UTILITIES]


def _disable_later(disable: Any, function: Any = None, *options: Any, **named: Any) -> Any:
    """Mark a function as never compiled, as `torch.compiler.disable` does, but on its first call.

    `torch.compiler.disable` loads the compiler, which takes a second. Libraries mark functions
    while they are imported, and most of these functions are never called.

    Args:
        disable: the real `torch.compiler.disable`.
        function: the function to mark. None in a decorator with arguments, such as
            `@disable(recursive=False)`: the result of `disable` then marks a function.
        options: further arguments of `disable`.
        named: keyword arguments of `disable`.
    """
    # The first call of `mark()` makes the marked function. `cache` keeps it for later calls.
    mark = cache(partial(disable, function, *options, **named))

    @wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return mark()(*arguments, **keywords)

    return call
