"""Callbacks that watch the Trainers of transformers and of Lightning.

`TrainerCallback` and `LightningCallback` are attributes of `lipaudit.monitor`. Each class is
created on first use, from the installed packages.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from lipaudit.errors import UsageError
from lipaudit.models.net import ModelSpec
from lipaudit.monitor.watching import FOLDER, Monitor, watch

Part = Callable[[nn.Module], nn.Module | ModelSpec]


class WatchingCallback:
    """Watches the model of a trainer: `Trainer(..., callbacks=[TrainerCallback(data=(x, y))])`.

    Args:
        part: returns the part of the trainer's model to watch; None: all of it.
        to: as in `lipaudit.watch`; by default a folder in the trainer's folder.
        asked: other arguments of `lipaudit.watch`: data, measures, every, loggers...
    """

    def __init__(
        self, part: Part | None = None, *, to: str | os.PathLike[str] | None = None, **asked: Any
    ) -> None:
        super().__init__()
        self.part, self.to, self.asked = part, to, asked
        self.monitor: Monitor | None = None

    def start_watching(self, model: Any, folder: str, step: int, **usual: Any) -> None:
        """Measure before the first step, or before the first one after a checkpoint."""
        model = model if self.part is None else self.part(model)
        to = Path(folder) / FOLDER if self.to is None else self.to
        self.monitor = watch(model, to=to, **(usual | self.asked))
        self.monitor.measure(step)

    def finish_step(self, step: int) -> None:
        """Measure if this step is due."""
        if self.monitor is not None:
            self.monitor(step)

    def on_train_end(self, *_: Any, **known: Any) -> None:
        """Measure after the last step, and write the page."""
        if self.monitor is not None:
            self.monitor.close()


@cache
def make_trainer_callback() -> type:
    """Return the callback of transformers' Trainer."""
    import transformers

    class TrainerCallback(WatchingCallback, transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            if state.is_world_process_zero:
                self.start_watching(known["model"], args.output_dir, state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            self.finish_step(state.global_step)

    return TrainerCallback


@cache
def make_lightning_callback() -> type:
    """Return the callback of Lightning's Trainer."""
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError as error:
        if error.name != "lightning":  # Lightning itself is broken: say what it says
            raise
        raise UsageError("Lightning is not installed", "Run pip install lightning.") from None

    class LightningCallback(WatchingCallback, Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            folder = trainer.log_dir or trainer.default_root_dir  # log_dir: every process asks
            if trainer.is_global_zero:
                usual = {"loggers": [each.log_metrics for each in trainer.loggers]}
                self.start_watching(pl_module, folder, trainer.global_step, **usual)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            self.finish_step(trainer.global_step)

    return LightningCallback
