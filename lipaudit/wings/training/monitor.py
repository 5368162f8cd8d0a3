"""Watching a training: measure every n-th step, or every checkpoint of a directory.

The callbacks of transformers and Lightning, and these libraries, are loaded on first use.
"""

from __future__ import annotations

from lipaudit.wings.training.watching import Monitor as Monitor
from lipaudit.wings.training.watching import make_lightning_callback, make_trainer_callback
from lipaudit.wings.training.watching import watch as watch

CALLBACKS = {
    "LightningCallback": make_lightning_callback,
    "TrainerCallback": make_trainer_callback,
}


def __getattr__(name: str) -> object:
    # Python calls this for a name that the module lacks. The classes of callbacks are created on
    # first use, because their creation imports transformers or Lightning.
    if name not in CALLBACKS:
        raise AttributeError(f"module 'lipaudit.wings.training.monitor' has no attribute {name!r}")
    callback = CALLBACKS[name]()
    # pickle looks a class up by these two names.
    callback.__qualname__ = name
    callback.__module__ = __name__
    return callback
