"""Weights in files: read without running any code they may hold, and loaded strictly."""

from __future__ import annotations

import argparse
import hashlib
import pickle
import pickletools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lipaudit.data.intake import remark
from lipaudit.errors import InputError, out_of_memory
from lipaudit.results import Note

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
PREFERRED = (
    "model.safetensors",
    "pytorch_model.bin",
    "model.pt",
    "model.pth",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
OF_TRAINING = ("training_args", "optimizer", "scheduler", "scaler", "rng_state", "consolidated")
CONTAINERS = ("state_dict_ema", "model_ema", "state_dict", "model")
WRAPPERS = ("module.", "_orig_mod.", "model.")

HALF = {torch.float16, torch.bfloat16}
HASHED = 2**20
"""Entries of a weight that are hashed at a time."""

State = dict[str, Tensor]


def read_weights(path: Path) -> tuple[State, tuple[Note, ...]]:
    """Read a file of weights: the tensors by name, and remarks on what was done to get at them.

    A training checkpoint is opened as far as its state dict, an exponential moving average before
    the last weights; prefixes left by wrappers (DataParallel, compile, Lightning) are removed.

    Raises:
        InputError: the file is damaged, holds code, or holds no weights.
    """
    content = _safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
    content, notes = _find_state(content)
    state = {k: v for k, v in content.items() if isinstance(v, Tensor)}
    if not state:
        raise InputError(
            f"{path} holds no tensors by name", "Save the model's state_dict(), nothing around it."
        )
    return _unwrap_state(state), notes + half_precision(v.dtype for v in state.values())


def weight_files(names: Iterable[str]) -> list[str]:
    """Return which files of a directory are loaded for its weights, of all that it holds.

    That is the first of the usual names, whole or in shards with their index; where there is none,
    what else may hold weights: safetensors before pickled files, no state of a training run.
    """
    here = {name for name in names if "/" not in name}
    for name in PREFERRED:
        stem, suffix = name.split(".")
        if name in here:
            return [name]
        shards = {f for f in here if re.fullmatch(rf"{stem}-\d+-of-\d+\.{suffix}", f)}
        if shards and f"{name}.index.json" in here:
            return sorted(shards | {f"{name}.index.json"})
    others = sorted(f for f in here if f.endswith(SUFFIXES) and not f.startswith(OF_TRAINING))
    return [f for f in others if f.endswith(".safetensors")] or others


def find_weights(directory: Path) -> Path:
    """Return the file of weights of a directory.

    Raises:
        InputError: there is none, or several and none has the usual name.
    """
    files = weight_files(path.name for path in directory.iterdir())
    if len(files) == 1:
        return directory / files[0]
    raise InputError(
        f"{directory} has no single file of weights (found: {', '.join(files) or 'none'})",
        f"Name one of them {PREFERRED[0]}, or pass the file itself with --arch.",
    )


def mismatches(module: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """Say how a state dict differs from what a module takes; empty when it fits."""
    own = module.state_dict()
    missing = [k for k in own if k not in state]
    surplus = [k for k in state if k not in own]
    shapes = [
        f"{k} {tuple(state[k].shape)} for {tuple(own[k].shape)}"
        for k in own
        if k in state and own[k].shape != state[k].shape
    ]
    kinds = {"missing": missing, "surplus": surplus, "of another shape": shapes}
    return [f"{few(names)} {kind}" for kind, names in kinds.items() if names]


def load_strictly(module: nn.Module, state: Mapping[str, Tensor], *, origin: str) -> None:
    """Load weights, none left out and none left over.

    Raises:
        InputError: names or shapes differ.
    """
    if wrong := mismatches(module, state):
        raise InputError(
            f"the weights of {origin} do not fit {type(module).__name__}: {'; '.join(wrong)}",
            "Check --arch and --model-kwargs (num_classes, img_size, patch_size, in_chans).",
        )
    module.load_state_dict(dict(state))


def strip_prefix(state: State) -> State:
    """Return weights without the first part of their names, where all share it.

    It is the attribute of something around the model that was saved: `vit.` of a LightningModule.
    """
    first = {name.partition(".")[0] for name in state}
    return state if len(first) > 1 else {k.partition(".")[2]: v for k, v in state.items()}


def few(names: Sequence[str], most: int = 4) -> str:
    """Join names, the first few of them."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def half_precision(dtypes: Iterable[torch.dtype]) -> tuple[Note, ...]:
    """Return the note on weights that are stored in half precision, if any are."""
    names = sorted(str(d).removeprefix("torch.") for d in set(dtypes) & HALF)
    text = f"weights stored in {' and '.join(names)} were converted to float32"
    return (remark("half-precision", text),) if names else ()


def require_finite_weights(module: nn.Module, origin: str) -> None:
    """Refuse weights that are NaN or infinite, and a model without any.

    Raises:
        InputError: naming the first tensors that are.
    """
    if next(module.parameters(), None) is None:
        raise InputError(f"{origin} has no parameters", "There is nothing to audit in it.")
    bad = [n for n, p in module.named_parameters() if not bool(torch.isfinite(p).all())]
    bad += [n for n, b in module.named_buffers() if bool(torch.isnan(b).any())]
    if bad:
        raise InputError(
            f"{origin} has weights that are not finite: {few(bad)}",
            "The training run diverged or the file is damaged; take an earlier checkpoint.",
        )


def sha256(module: nn.Module) -> str:
    """Hash the sorted (name, dtype, shape, bytes) of the state dict."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        value = tensor.detach().cpu().contiguous()
        # Half precision is hashed as float32: the same, however it is kept.
        dtype = torch.float32 if value.dtype in HALF else value.dtype
        digest.update(f"{name} {dtype} {tuple(value.shape)}".encode())
        for piece in value.reshape(-1).split(HASHED):
            digest.update(piece.to(dtype).view(torch.uint8).numpy())
    return digest.hexdigest()


def _safetensors(path: Path) -> dict[str, Any]:
    try:
        return dict(load_file(path))
    except Exception as error:  # of safetensors, and of torch at its sizes
        if out_of_memory(error):
            raise
        raise InputError(
            f"{path} is not a complete safetensors file ({error})",
            "Copy or download it again; a git-lfs pointer needs `git lfs pull`.",
        ) from error


def _read_pickle(path: Path) -> Any:
    try:
        # timm's training checkpoints keep their arguments beside the weights
        with torch.serialization.safe_globals([argparse.Namespace]), catch_warnings():
            simplefilter("ignore")  # of a TorchScript archive, which is refused
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of zip files, of pickles and of PyTorch: what junk may hold
        asked = re.search(r"allocate (\d+) bytes", str(error))
        lies = asked is not None and int(asked[1]) > path.stat().st_size
        if out_of_memory(error) and not lies:
            raise
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> InputError:
    """Say why a file cannot be opened without running code, and what to do about it."""
    if "TorchScript" in str(error):
        return InputError(
            f"{path} is TorchScript, a program and not weights: it cannot be read",
            "Save the state_dict() of the module that it was made from.",
        )
    names = _globals(path)
    if names or (isinstance(error, pickle.UnpicklingError) and _is_pickle(path)):
        what = f" ({few(names)})" if names else ""
        return InputError(
            f"{path} holds more than weights{what}; it was not opened",
            "Opening it would run its code. Where you trust it, save model.state_dict() alone, "
            "best as .safetensors; torch.serialization.get_unsafe_globals_in_checkpoint(FILE) "
            "lists what it wants to run.",
        )
    return InputError(
        f"{path} is not a complete PyTorch file ({type(error).__name__}: {_first_line(error)})",
        "Copy or download it again.",
    )


def _is_pickle(path: Path) -> bool:
    """Say whether a file is a whole pickle, by its grammar alone: nothing of it runs."""
    try:
        with path.open("rb") as content:
            return len(list(pickletools.genops(content))) > 0
    except ValueError:
        return False


def _globals(path: Path) -> list[str]:
    try:
        return torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except Exception:  # of junk: it names none
        return []


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _find_state(content: Any) -> tuple[Mapping[str, Any], tuple[Note, ...]]:
    """Descend to the state dict of a training checkpoint."""
    if not isinstance(content, Mapping):
        return {}, ()
    for key in CONTAINERS:
        if isinstance(content.get(key), Mapping):
            return content[key], (
                remark("checkpoint", f"weights taken from {key!r} of the checkpoint"),
            )
    return content, ()


def _unwrap_state(state: State) -> State:
    for prefix in WRAPPERS:
        if all(k.startswith(prefix) for k in state):
            state = {k.removeprefix(prefix): v for k, v in state.items()}
    return state
