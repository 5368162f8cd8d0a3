"""Watching the Trainer of transformers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from torch import nn

from lipaudit.models.sources.spec import ModelSpec
from lipaudit.monitor.watching import FOLDER, Monitor, watch

Part = Callable[[nn.Module], nn.Module | ModelSpec]


class TrainerCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Watches the model of a Trainer: `Trainer(..., callbacks=[TrainerCallback(data=(x, y))])`.

    Args:
        part: returns what is watched of the Trainer's model; all of it, if None.
        to: as of `lipaudit.watch`; by default a folder in the Trainer's output_dir.
        asked: whatever else `lipaudit.watch` takes: data, measures, every, loggers...
    """

    def __init__(
        self,
        part: Part | None = None,
        *,
        to: str | os.PathLike[str] | None = None,
        **asked: Any,
    ) -> None:
        self.part, self.to, self.asked = part, to, asked
        self.monitor: Monitor | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Measure before the first step, or before the first after a checkpoint."""
        if not state.is_world_process_zero:
            return
        model = known["model"] if self.part is None else self.part(known["model"])
        to = Path(args.output_dir) / FOLDER if self.to is None else self.to
        self.monitor = watch(model, to=to, **self.asked)
        self.monitor.measure(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Measure where it is time to."""
        if self.monitor is not None:
            self.monitor(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Measure after the last step, and write the page."""
        if self.monitor is not None:
            self.monitor.close()
