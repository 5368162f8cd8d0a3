"""Watching a training: measures every so many steps, or of every checkpoint of a directory.

The callbacks of transformers and Lightning are loaded, with those libraries, when they are used.
"""

from __future__ import annotations

from lipaudit.monitor.watching import Monitor as Monitor
from lipaudit.monitor.watching import watch as watch

CALLBACKS = {
    "LightningCallback": "lipaudit.monitor.lightning:LightningCallback",
    "TrainerCallback": "lipaudit.monitor.trainer:TrainerCallback",
}
"""Where each callback is."""


def __getattr__(name: str) -> object:
    if name not in CALLBACKS:
        raise AttributeError(f"module 'lipaudit.monitor' has no attribute {name!r}")
    from pkgutil import resolve_name

    return resolve_name(CALLBACKS[name])
