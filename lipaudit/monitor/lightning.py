"""Watching the Trainer of Lightning, under either of its names."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lipaudit.errors import UsageError
from lipaudit.monitor.trainer import Part
from lipaudit.monitor.watching import FOLDER, Monitor, watch

NAMES = ("lightning.pytorch", "pytorch_lightning")


def _bases() -> tuple[type, ...]:
    """Return the Callback of each package that is in use, else of one that is installed."""
    used = [name for name in NAMES if name in sys.modules]
    known = used or [name for name in NAMES if find_spec(name.partition(".")[0])][:1]
    if not known:
        raise UsageError(
            "Lightning is not installed", "Install it: pip install lightning, or pytorch-lightning"
        )
    return tuple(import_module(name).Callback for name in known)


class LightningCallback(*_bases()):  # type: ignore[misc]
    """Watches the module of a Trainer: `Trainer(callbacks=[LightningCallback(data=(x, y))])`.

    Figures go to the Trainer's own loggers, too.

    Args:
        part: returns what is watched of the LightningModule; all of it, if None.
        to: as of `lipaudit.watch`; by default a folder in the Trainer's log_dir.
        asked: whatever else `lipaudit.watch` takes: data, measures, every, loggers...
    """

    def __init__(
        self,
        part: Part | None = None,
        *,
        to: str | os.PathLike[str] | None = None,
        **asked: Any,
    ) -> None:
        super().__init__()
        self.part, self.to, self.asked = part, to, asked
        self.monitor: Monitor | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Measure before the first step, or before the first after a checkpoint."""
        folder = trainer.log_dir  # a collective: every process asks
        if not trainer.is_global_zero:
            return
        model = pl_module if self.part is None else self.part(pl_module)
        own = Path(folder or trainer.default_root_dir) / FOLDER
        asked = {"loggers": [each.log_metrics for each in trainer.loggers]} | self.asked
        self.monitor = watch(model, to=own if self.to is None else self.to, **asked)
        self.monitor.measure(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Measure where it is time to."""
        if self.monitor is not None:
            self.monitor(trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Measure after the last step, and write the page."""
        if self.monitor is not None:
            self.monitor.close()
