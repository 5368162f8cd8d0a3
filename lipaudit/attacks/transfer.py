"""Transfer attacks: the examples that attacks on another model saved, tried on this one.

The file of `--save-adv`, which is written and read here, holds tensors with the names of trials.

What breaks one model often breaks another (Papernot et al., arXiv 1605.07277). Where the examples
of another model break samples that the model's own attacks cannot break, those attacks were weak:
gradients are masked (Athalye et al., *Obfuscated Gradients*, arXiv 1802.00420).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lipaudit.attacks.balls import Ball, project
from lipaudit.attacks.oracle import Classifier, Turn, choose_closer, margins
from lipaudit.errors import InputError, explain_failure
from lipaudit.tables import Note

if TYPE_CHECKING:
    from jaxtyping import Float

    from lipaudit.attacks.balls import Labels, Samples

# Metadata key of `--save-adv`: the ids of the original samples, as JSON.
MADE_OF = "made_of"
# Its tensors that are no trials: the first example that broke each sample, and the labels.
FIRST = "x"
LABELS = "y"
SAVE = "Save them with lipaudit attack OTHER --save-adv FILE.safetensors"


def find_first(broken: np.ndarray) -> np.ndarray:
    """Return the index of the first trial that broke each sample, else of the last trial.

    `broken`, (samples, trials), says which trial broke which sample.
    """
    last = broken.shape[1] - 1
    return np.where(broken.any(1), broken.argmax(1), last)


def encode_examples(
    chunks: Sequence[Float[np.ndarray, "_ trials ..."]],
    broken: np.ndarray,
    labels: np.ndarray,
    ids: Sequence[str],
    trials: Sequence[str],
) -> bytes:
    """Return the file of `--save-adv`, a safetensors file that `--data` and `--transfer` read.

    For `--data`, `x` holds for each sample the first example that broke it, in the order of the
    trials, else the last one tried; `y` holds the labels. For `--transfer`, a tensor per trial
    holds its examples. The metadata hold the sample ids.

    Args:
        chunks: the examples of some samples each; embeddings of shorter texts are padded with
            zeros.
        broken: which trial broke which sample, (samples, trials).
        labels: the true class of each sample.
        ids: ids of the samples.
        trials: names of the trials: attacks in balls of one radius.
    """
    from safetensors.numpy import save

    # Axis 2 of (samples, trials, ...) has the tokens of a text, which are padded to equal lengths.
    # For images this axis has equal sizes already.
    longest = max(x.shape[2] for x in chunks)
    padded = []
    for x in chunks:
        widths = [(0, 0)] * x.ndim
        widths[2] = (0, longest - x.shape[2])
        padded.append(np.pad(x, widths))
    x_adv = np.concatenate(padded)  # (samples, trials, ...)
    tensors = {name: np.ascontiguousarray(x_adv[:, i]) for i, name in enumerate(trials)}
    first = x_adv[np.arange(len(labels)), find_first(broken)]
    tensors[FIRST] = np.ascontiguousarray(first)
    tensors[LABELS] = labels.astype(np.int64)
    return save(tensors, {MADE_OF: json.dumps(ids)})


def find_examples(
    path: Path, ids: Sequence[str], shape: Sequence[int]
) -> tuple[list[Tensor], list[int]]:
    """Return (tensors, rows): the examples in a file of `--save-adv`, and indices of samples.

    The file has adversarial examples for another model. A trial is an attack on the other model
    in one ball. `tensors` has the examples of each trial, for all samples of the file:
    (samples of the file, *shape). `rows` has the index along the first axis for each of `ids`.

    The tensors are mapped from the file: values are read from the disk only when they are used.

    Args:
        path: the file.
        ids: ids of the samples.
        shape: shape of one sample.

    Raises:
        InputError: the file is of another kind, lacks some of the samples, or has other shapes.
    """
    names, tensors = _open_examples(path)
    row_of_id = {name: row for row, name in enumerate(names)}
    missing = [name for name in ids if name not in row_of_id]
    if missing:
        raise InputError(
            f"{path} has no examples of {len(missing)} of the {len(ids)} samples, as of "
            f"{missing[:1]}",
            f"{SAVE} on the same samples: the same --data, --seed and --samples.",
        )
    for tensor in tensors:
        if tensor.shape != (len(names), *shape) or not tensor.is_floating_point():
            raise InputError(
                f"the examples in {path} are not samples of shape {tuple(shape)}",
                "Use examples of a model with inputs of the same size.",
            )
    return tensors, [row_of_id[name] for name in ids]


def _open_examples(path: Path) -> tuple[list[str], list[Tensor]]:
    """Return the sample ids in a file of `--save-adv`, and the examples of each trial.

    A trial is an attack, or several one after the other, in balls of one radius.

    Raises:
        InputError: there is no such file, or it has no ids or no examples.
    """
    from safetensors import safe_open

    if not path.is_file():
        raise InputError(f"there is no file {path}", f"{SAVE}.")
    text = f"{path} is not a complete safetensors file"
    with explain_failure(text, f"{SAVE}."), safe_open(path, "pt") as file:
        names = json.loads((file.metadata() or {}).get(MADE_OF, "[]"))
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    # Labels are no examples. FIRST is the tensor with the first example that broke each sample. A
    # trial has the same example, so FIRST is used only if the file has no trials.
    tensors.pop(LABELS, None)
    first = tensors.pop(FIRST, None)
    examples = list(tensors.values())
    if not examples and first is not None:
        examples = [first]
    has_ids = isinstance(names, list) and names and all(isinstance(name, str) for name in names)
    if not (has_ids and examples):
        raise InputError(f"{path} has no adversarial examples of samples", f"{SAVE}.")
    return names, examples


def read_examples(
    path: Path, ids: Sequence[str], shape: Sequence[int]
) -> Float[Tensor, " samples trials *sample"]:
    """Return the saved examples of some samples; see `find_examples`.

    Raises:
        InputError: as `find_examples`, or a value is not finite.
    """
    tensors, rows = find_examples(path, ids, shape)
    examples = torch.stack([tensor[rows] for tensor in tensors], 1)
    if not examples.isfinite().all():
        raise InputError(f"{path} has values that are not finite", f"{SAVE}.")
    return examples


def hash_file(path: Path) -> str:
    """Return the SHA-256 of the contents of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def note_source(path: Path) -> Note:
    """Return the note on a file of examples that were tried, with a hash of its contents."""
    digest = hash_file(path)[:16]
    text = f"transfer tried the examples of {path.name} (sha256 {digest}), moved into each ball"
    return Note.info("transferred-examples", text)


def find_saved(files: Mapping[str, str], folder: Path) -> tuple[Path, ...]:
    """Return the files of examples that an earlier run saved, if they still exist.

    A file is looked for in the folder of the report, by its path and by its name, then by its path
    alone. Only a file with the same contents counts.

    Args:
        files: path of each file, as typed for that run, and the SHA-256 of its contents.
        folder: the folder of the report of that run.
    """
    found = []
    for name, digest in files.items():
        if Path(name).suffix != ".safetensors":
            continue
        for path in (folder / name, folder / Path(name).name, Path(name)):
            if path.is_file() and hash_file(path) == digest:
                found.append(path)
                break
    return tuple(found)


@torch.no_grad()
def try_examples(
    f: Classifier,
    x: Samples,
    y: Labels,
    ball: Ball,
    turn: Turn,
) -> Samples:
    """Try the saved examples of another model; return the one with the smallest margin per sample.

    An example outside of the ball, found at a larger radius, is projected onto the ball.

    Args:
        f: x -> logits (batch, classes).
        x: samples.
        y: labels.
        ball: the ball.
        turn: the examples of the chunk, and the rows of the samples.
    """
    assert turn.saved is not None
    best = x
    lowest = x.new_full((len(x),), torch.inf)
    # One example of every sample at a time: `saved` is (samples, examples, ...).
    for examples in turn.saved[turn.rows].unbind(1):
        z = project(examples, x, ball)
        margin = margins(f(z), y)
        best, lowest = choose_closer(z, margin, best, lowest)
    return best
