"""Adversarial examples as a safetensors file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from lipaudit.cli.emit import write
from lipaudit.errors import UsageError
from lipaudit.measures.attack import AttackOptions, plan
from lipaudit.measures.measure import Part, joined


def check_target(path: Path) -> None:
    """Refuse a file that is not safetensors.

    Raises:
        UsageError: for another extension.
    """
    if path.suffix != ".safetensors":
        raise UsageError(f"--save-adv {path} must end in .safetensors")


def save_adversarial(path: Path, parts: Sequence[Part], options: AttackOptions) -> None:
    """Write one tensor per trial, `ATTACK,NORM,EPS`, and the labels `y`, in the order of ids."""
    adversarial = joined(parts, "x_adv")
    tensors = {
        f"{trial.label},{trial.norm},{trial.radius.text}": np.ascontiguousarray(adversarial[:, i])
        for i, trial in enumerate(plan(options))
    }
    write(path, save(tensors | {"y": joined(parts, "label").astype(np.int64)}))
