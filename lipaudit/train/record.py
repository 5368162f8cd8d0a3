"""The directory of a training run: a checkpoint after every epoch, a record, the model."""

from __future__ import annotations

import io
import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipaudit import __version__
from lipaudit.engine.files import ordinary_mode, require_folder, write
from lipaudit.engine.results import versions
from lipaudit.errors import EvaluationError, InputError, UsageError, out_of_memory
from lipaudit.models.sources.weights import read_json

if TYPE_CHECKING:
    from lipaudit.data.loading import Samples
    from lipaudit.models.net import LoadOptions, Net
    from lipaudit.settings import Recipe
    from lipaudit.train import Epoch

CHECKPOINT, RECORD = "checkpoint.pt", "train.json"
TAKEN = (CHECKPOINT, RECORD, "config.json", "model.safetensors")


def check_target(out: Path, *, resume: bool) -> None:
    """Refuse to overwrite another run or a model, or to continue without a run."""
    if resume and not (out / CHECKPOINT).exists():
        raise UsageError(f"{out} has no unfinished training to resume", "Leave --resume out.")
    held = next((name for name in TAKEN if (out / name).exists()), None)
    if held and not resume:
        raise UsageError(
            f"{out} already contains {held}",
            "Give another --out, or add --resume to continue the training in it.",
        )
    require_folder(out)


def read_record(out: Path) -> dict[str, Any]:
    """Return the record in the directory of a run."""
    record = read_json(out / RECORD)
    if not isinstance(record, dict):
        raise InputError(f"{out / RECORD} is not the record of a training", "Give another --out.")
    return record


class TrainingRecord:
    """The directory of a run: a checkpoint after every epoch, and a record."""

    def __init__(
        self,
        out: Path,
        net: Net,
        data: Samples,
        held_out: Samples | None,
        recipe: Recipe,
        *,
        command: str,
    ) -> None:
        self.out, self.device, self.command = out, str(net.device), command
        out.mkdir(parents=True, exist_ok=True)  # not before: a command refused leaves nothing
        self.notes = [note.text for note in net.notes + data.notes]
        self.same: dict[str, dict[str, Any] | None] = {
            "model": {
                "spec": net.name,
                "weights_sha256": net.weights_sha256,
                "preprocess": dict(net.preprocess),
                "dtype": str(net.dtype).removeprefix("torch."),
            },
            "data": _describe(data),
            "held_out": None if held_out is None else _describe(held_out),
            "recipe": recipe.model_dump(mode="json"),
        }
        self.epochs: list[dict[str, Any]] = []

    def read_state(self) -> dict[str, Any] | None:
        """Return the state of an interrupted run, None for a new one.

        Raises:
            UsageError: the directory belongs to another run.
            InputError: the checkpoint is damaged.
        """
        import torch

        if not (self.out / CHECKPOINT).exists():
            return None
        try:
            stored = torch.load(self.out / CHECKPOINT, weights_only=True, map_location="cpu")
            kept, epochs, state = stored["run"], stored["epochs"], dict(stored["state"])
        except Exception as error:  # pickle, zip and torch have their own exceptions
            if out_of_memory(error):
                raise
            raise InputError(f"{self.out / CHECKPOINT} is damaged ({error})") from None
        if changed := [name for name in self.same if kept.get(name) != self.same[name]]:
            raise UsageError(
                f"{self.out} was trained with another {' and another '.join(changed)}",
                f"Repeat the command of {self.out / RECORD}, or give another --out.",
            )
        self.epochs = epochs
        return state

    def keep(self, epoch: Epoch) -> None:
        """Write an epoch: the record, and everything needed to continue."""
        import torch

        facts = ("number", "loss", "penalty", "accuracy", "lr")
        self.epochs.append({name: getattr(epoch, name) for name in facts})
        stored = {"run": self.same, "epochs": self.epochs, "state": epoch.state}
        buffer = io.BytesIO()
        torch.save(stored, buffer)
        write(self.out / CHECKPOINT, buffer.getvalue())
        self.write_record(finished=False)

    def write_record(self, *, finished: bool) -> None:
        """Write the record, and whether the run is complete."""
        record = {
            "schema": "lipaudit.train",
            "command": self.command,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "lipaudit": __version__,
            "versions": versions(),
            "device": self.device,
            "notes": self.notes,
            **self.same,
            "finished": finished,
            "epochs": self.epochs,
        }
        write(self.out / RECORD, (json.dumps(record, indent=2) + "\n").encode())


def _describe(samples: Samples) -> dict[str, Any]:
    return {
        "spec": samples.spec,
        "samples": len(samples.batch),
        "suite_id": samples.suite_id,
    }


def save_model(net: Net, out: Path, options: LoadOptions) -> bool:
    """Write the model atomically; return whether `out` is now a MODEL."""
    from lipaudit.models.sources.loading import save_net

    try:
        with tempfile.TemporaryDirectory(dir=out) as folder:
            complete = save_net(net, Path(folder), options)
            for path in [p for p in Path(folder).rglob("*") if p.is_file()]:
                target = out / path.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                path.chmod(ordinary_mode())
                path.replace(target)
    except OSError as error:
        raise EvaluationError(f"cannot write to {out}: {error.strerror}") from None
    return complete
