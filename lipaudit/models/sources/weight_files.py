"""Files of weights: read without running code, and loaded strictly."""

from __future__ import annotations

import argparse
import hashlib
import inspect
import pickle
import re
import tarfile
import zipfile
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from pydantic_core import from_json
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lipaudit.errors import (
    InputError,
    explain_failure,
    is_out_of_memory,
    join_few,
    summarise_error,
)
from lipaudit.models.precision import HALF, compute_values, name_dtypes
from lipaudit.tables import Note, Notes

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
# Suffix of a program of torch.export.
PROGRAM = ".pt2"
# Suffixes of archives.
PACKED = (".gz", ".xz", ".bz2", ".zst", ".zip", ".tar", ".tgz")
# First bytes of a file of torch without an archive around it.
PICKLE = b"\x80\x02"
# First bytes of the text that stands for a large file until git-lfs fetches it.
POINTER = b"version https://git-lfs"
# Usual names of the weights in a folder, the best first.
PREFERRED = ("model.safetensors", "pytorch_model.bin", "model.pt", "model.pth")
# First parts of the names of files beside a model: states of a training, copies, LoRA.
BESIDE = re.compile("adapter|training_args|optimizer|scheduler|scaler|rng_state|consolidated")
# Usual names of the weights in a checkpoint, the best first.
CONTAINERS = ("state_dict_ema", "model_ema", "state_dict", "model_state_dict", "model")

# Name of the number of models whose weights were averaged.
COUNTER = "n_averaged"

# Stored weights that a scale turns into values.
SCALED = {torch.int8, torch.float8_e4m3fn, torch.float8_e5m2}
# Number of entries of a weight hashed at a time.
HASHED = 2**20

State = dict[str, Tensor]


def holds_weights(path: Path) -> bool:
    """Say whether a file holds weights: by its suffix, else by its content.

    The content decides for names such as `model.pth.tar`, which are usually no archives of tar,
    but files of torch.save.
    """
    if path.suffix in SUFFIXES:
        return True
    # A program of torch.export (.pt2) and a real archive of tar are no weights.
    if path.suffix == PROGRAM or tarfile.is_tarfile(path):
        return False
    # torch.save writes an archive with data.pkl; older versions write a bare pickle.
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("data.pkl") for name in archive.namelist())
    except zipfile.BadZipFile:
        pass  # no archive, or a damaged one
    # A pointer of git-lfs stands for the file: reading it explains how to fetch the weights.
    return _begins_with(path, PICKLE) or _begins_with(path, POINTER)


def advise_on_file(path: Path) -> str:
    """Return advice for a file that is no file of weights, judged by the name of the file."""
    if path.suffix == ".py":
        return f"Name the function that returns the model: py:{path}:FUNCTION."
    if path.suffix in PACKED:
        return "It is packed: unpack it first."
    return (
        f"Give a file that ends in {', '.join(SUFFIXES)}. ONNX, GGUF and exported programs have "
        "no gradients. A function of your own may load other files and return "
        "the model: py:FILE.py:FUNCTION."
    )


def _begins_with(path: Path, content: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(content)) == content


def require_fetched(path: Path) -> None:
    """Refuse a file that git-lfs has not fetched yet: it still holds a pointer, a short text.

    Raises:
        InputError: the file is a pointer.
    """
    if _begins_with(path, POINTER):
        raise InputError(
            f"{path} is a pointer of git-lfs, and not the file itself",
            "Run `git lfs install` and `git lfs pull` in its repository.",
        )


def read_weights(path: Path) -> tuple[State, Notes]:
    """Read a file of weights: the tensors by name, and notes on how they were found.

    A training checkpoint holds several sets of weights by name. The exponential moving average is
    preferred to the last weights (`CONTAINERS` has the order).

    Raises:
        InputError: the file is damaged, holds code, or holds no weights.
    """
    require_fetched(path)
    if path.suffix == ".safetensors":
        with explain_failure(
            f"{path} is not a complete safetensors file",
            "Copy or download it again.",
        ):
            content = load_file(path)
    else:
        content = _read_pickle(path)
    state, notes = _choose_state(content, path)
    state, notes_on_scales = _apply_scales(state, path)
    notes += notes_on_scales
    notes += note_half_precision(value.dtype for value in state.values())
    return state, notes


def _choose_state(content: Any, path: Path) -> tuple[State, Notes]:
    """Choose one model's weights in the content of a file, and return them with notes.

    A training checkpoint may hold several sets of weights, such as "model" and "model_ema".

    Raises:
        InputError: there are none, or several sets without a usual name.
    """
    notes: Notes = ()
    state = _find_tensors(content)  # weights at the top of the file
    states = {}  # sets of weights inside of a checkpoint, by their keys
    if isinstance(content, Mapping):
        for key, part in content.items():
            tensors = _find_tensors(part)
            if tensors:
                states[key] = tensors
    # Prefer sets under the usual keys, in the order of `CONTAINERS`. Without a usual key, take the
    # weights at the top of the file, else the only set of weights.
    choices = [key for key in CONTAINERS if key in states]
    if not choices and not state and len(states) == 1:
        choices = [*states]
    if choices:
        key = choices[0]
        state = states[key]
        notes = (Note.info("checkpoint", f"weights were taken from {key!r} of the checkpoint"),)
    if COUNTER in state:  # of torch.optim.swa_utils.AveragedModel, around the averaged model
        averaged = f"weights are the average of {int(state.pop(COUNTER))} models"
        notes += (Note.info("averaged-weights", averaged),)
    if not state:
        content_text = "no named tensors"
        if states:
            content_text = f"several sets of weights: {join_few([*states])}"
        raise InputError(f"{path} holds {content_text}", "Save only the model's state_dict().")
    return state, notes


def _find_tensors(content: Any) -> State:
    """Return the tensors of a dictionary by name; nothing if the content is no dictionary."""
    if not isinstance(content, Mapping):
        return {}
    return {name: value for name, value in content.items() if isinstance(value, Tensor)}


def _apply_scales(state: State, path: Path) -> tuple[State, Notes]:
    """Multiply int8 and float8 weights by their scales: one number, or one per output channel.

    The scale of the weight NAME is stored as `NAME_scale`.

    Raises:
        InputError: a scale has a shape that is not accepted.
    """
    values = dict(state)
    scaled_dtypes = set[torch.dtype]()
    for name, weight in state.items():
        if weight.dtype not in SCALED or weight.ndim < 2 or not name.endswith("weight"):
            continue
        scale = values.pop(f"{name}_scale", None)
        if scale is None:
            # A float8 weight may be a plain cast, without a scale. Integers are refused later, if
            # the model has floats under this name.
            continue
        values[name] = weight.float() * _arrange_scale(scale, weight, name, path)
        scaled_dtypes.add(weight.dtype)
    if not scaled_dtypes:
        return values, ()
    dtypes = " and ".join(name_dtypes(scaled_dtypes))
    return values, (
        Note.info("scaled-weights", f"weights stored in {dtypes} were multiplied by their scales"),
    )


def _arrange_scale(scale: Tensor, weight: Tensor, name: str, path: Path) -> Tensor:
    """Return the scale of a weight as a factor that broadcasts: (1, 1, ...) or (outputs, 1, ...).

    For a square weight (n, n), a scale of shape (n,) is refused. Some layers store their weights
    transposed, so the scale may belong to the inputs.

    Args:
        scale: the stored scale.
        weight: the stored weight, (outputs, inputs, ...).
        name: the name of the weight, for the message.
        path: the file.

    Raises:
        InputError: the scale has a shape that is not accepted, or is no float.
    """
    outputs = len(weight)
    column = (outputs, *[1] * (weight.ndim - 1))  # (outputs, 1, ...): a scale per output
    accepted = [column]
    if outputs != weight.shape[1]:
        accepted.append((outputs,))
    fits = scale.numel() == 1 or tuple(scale.shape) in accepted
    if not fits or not scale.is_floating_point():
        raise InputError(
            f"{name} of {path} is {join_few(name_dtypes([weight.dtype]))} of shape "
            f"{tuple(weight.shape)}, with a {join_few(name_dtypes([scale.dtype]))} scale of "
            f"{tuple(scale.shape)}",
            f"Store {name}_scale with one number, or one per output channel: {column}; or save "
            "float weights.",
        )
    return scale.float().reshape(-1, *column[1:])


def _read_pickle(path: Path) -> Any:
    """Open a pickled file without running code.

    Raises:
        InputError: the file cannot be opened without running code, or is damaged. The message
            gives one of three reasons: the file holds objects that are not weights, it is a
            program (TorchScript), or it is not complete.
    """
    try:
        # timm's training checkpoints store their arguments beside the weights
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # junk may raise anything
        if is_out_of_memory(error):
            raise
        # The classes and functions in the file that torch does not regard as safe. torch lists
        # them for zip archives only. For a bare pickle it raises an error, and the list is empty.
        names = []
        with suppress(Exception):
            names = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        reason = f"is not a complete PyTorch file ({summarise_error(error)})"
        advice = "Copy or download it again."
        if names or isinstance(error, pickle.UnpicklingError):
            # Without names, the message is "holds more than weights (or is damaged)": torch raises
            # the same error for both.
            objects = join_few(names) or "or is damaged"
            reason = f"holds more than weights ({objects}), so it was not opened"
            advice = (
                "Opening it could run code. If you trust it, save only model.state_dict(), best "
                "as .safetensors."
            )
        elif "TorchScript" in str(error):  # torch advises to open it without this check
            reason = "is TorchScript (a program), not a weights file"
            advice = "Save the state_dict() of the model that it was made from."
        raise InputError(f"{path} {reason}", advice) from error


def list_weight_files(names: Iterable[str]) -> list[str]:
    """Return the files of a directory that hold its weights.

    The first of the usual names that exists is taken, as one file or as shards with their index,
    such as `model-00001-of-00002.safetensors` and `model.safetensors.index.json`. Without a usual
    name, all safetensors files are taken, or else all pickled files, but not files of a training
    state.
    """
    top = {name for name in names if "/" not in name}
    for name in PREFERRED:
        stem, suffix = name.split(".")
        if name in top:
            return [name]
        pattern = re.compile(rf"{stem}-\d+-of-\d+\.{suffix}")
        shards = [file for file in top if pattern.fullmatch(file)]
        index = f"{name}.index.json"
        if shards and index in top:
            return sorted([*shards, index])
    others = sorted(f for f in top if f.endswith(SUFFIXES) and not BESIDE.match(f))
    return [f for f in others if f.endswith(".safetensors")] or others


def find_misfit(expected: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str:
    """Describe how stored weights differ from those of a module; empty if they fit.

    Args:
        expected: the weights of the module by name; tied weights are one object with two names.
        state: the stored weights by name; of tied weights, one name is enough.
    """
    # Ids (`id`) of the module's weights that are stored under at least one of their names.
    present_ids = set[int]()
    wrong_shapes = []
    for name, tensor in expected.items():
        if name not in state:
            continue
        present_ids.add(id(tensor))
        stored = state[name]
        if stored.shape != tensor.shape:
            wrong_shapes.append(f"{name} {tuple(stored.shape)} for {tuple(tensor.shape)}")
    missing = [k for k, t in expected.items() if k not in state and id(t) not in present_ids]
    surplus = [key for key in state if key not in expected]
    return describe_misfit(missing, surplus, wrong_shapes)


def describe_misfit(missing: Sequence[str], surplus: Sequence[str], shapes: Sequence[str]) -> str:
    """Name the weights that are missing, surplus or of another shape; empty if none is."""
    kinds = {"missing": missing, "surplus": surplus, "of another shape": shapes}
    return "; ".join(f"{join_few(names)} {kind}" for kind, names in kinds.items() if names)


def load_strictly(module: nn.Module, state: Mapping[str, Tensor], origin: Path) -> None:
    """Load weights into a model. No weight may be missing, and none may be surplus.

    Args:
        module: the model.
        state: the weights by name.
        origin: the file, for messages.

    Raises:
        InputError: names or shapes differ, or integers are stored for floats.
    """
    expected = module.state_dict(keep_vars=True)
    misfit = find_misfit(expected, state)
    if misfit:
        implied_arguments = " ".join(guess_arguments(module, state))
        advice = (
            "Check --arch and --model-kwargs (such as num_classes, img_size), and that the file "
            "has the weights of this model alone."
        )
        if implied_arguments:
            advice = f"The shapes imply --model-kwargs {implied_arguments}. {advice}"
        raise InputError(
            f"the weights of {origin} do not fit {type(module).__name__}: {misfit}", advice
        )
    integer_weights = []
    for name, value in state.items():
        is_integer = not value.is_floating_point() and not value.is_complex()
        if is_integer and expected[name].is_floating_point():
            integer_weights.append(name)
    refuse_codes(integer_weights, origin)
    _require_equal_ties(expected, state, origin)
    # Not strict, because tied weights may be stored once; everything else was checked above.
    module.load_state_dict(dict(state), strict=False)


def _require_equal_ties(
    expected: Mapping[str, Tensor], state: Mapping[str, Tensor], origin: Path
) -> None:
    """Refuse a file with two different values of one weight of the module, under its two names.

    Args:
        expected: the weights of the module by name; tied weights are one object with two names.
        state: the stored weights by name, of the same shapes.
        origin: the file, for the message.

    Raises:
        InputError: tied weights differ: the module cannot hold both.
    """
    first_names = dict[int, str]()  # by `id`
    for name, value in state.items():
        first = first_names.setdefault(id(expected[name]), name)
        if name == first:
            continue
        # A byte is read as a float: torch promotes no float8.
        values = [x.float() if x.dtype.itemsize == 1 else x for x in (state[first], value)]
        dtype = torch.promote_types(values[0].dtype, values[1].dtype)
        one, other = (x.to(dtype) for x in values)
        # NaN equals NaN here: what is not finite is refused later, by its own message.
        if not torch.allclose(one, other, rtol=0, atol=0, equal_nan=True):
            raise InputError(
                f"{first} and {name} are one weight of the module, and differ in {origin}",
                "Build the module without this tie, as it was trained.",
            )


# Usual names of the arguments that give the width and the number of classes of a model.
WIDTHS = ("embed_dim", "hidden_dim", "hidden_size", "d_model", "dim", "width")
CLASSES = ("num_classes", "n_classes", "classes", "num_labels")
# Names of lists of equal blocks.
BLOCKS = re.compile(r"^((?:\w+\.)*(?:blocks|layers|layer|h|resblocks))\.(\d+)\.")
DEPTHS = ("depth", "num_layers", "n_layers", "num_hidden_layers", "layers")


def guess_arguments(module: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """Return the arguments that would make a model fit weights, as NAME=VALUE.

    The number of classes, the width and the depth are compared with the shapes of the weights. An
    argument has the name that the module's class uses, or else a usual name.

    Args:
        module: the model that the weights do not fit.
        state: the weights.
    """
    expected = module.state_dict()
    parameters = inspect.signature(type(module).__init__).parameters

    def choose_name(names: Sequence[str]) -> str:
        """Return the first of some names that the module's class takes, else the usual one."""
        return next((name for name in names if name in parameters), names[0])

    guesses = {}
    classifier = ""
    # Most norm layers have the width of the model. So count the norm layers of each pair of widths
    # (in the model, in the file), and compare the most frequent pair.
    widths = Counter[tuple[int, int]]()
    for name, tensor in expected.items():
        if name not in state:
            continue
        if tensor.ndim == 2 and name.endswith("weight"):
            classifier = name  # in the end, the last matrix of the model
        if tensor.ndim == 1 and "norm" in name.lower():
            widths[len(tensor), len(state[name])] += 1
    if classifier and len(expected[classifier]) != len(state[classifier]):
        guesses[choose_name(CLASSES)] = len(state[classifier])
    if widths:
        width, stored_width = max(widths, key=widths.__getitem__)
        if width != stored_width:
            guesses[choose_name(WIDTHS)] = stored_width
    depth = _count_blocks(expected)
    stored_depth = _count_blocks(state)
    if depth != stored_depth and depth and stored_depth:
        guesses[choose_name(DEPTHS)] = stored_depth
    return [f"{name}={value}" for name, value in guesses.items()]


def _count_blocks(state: Mapping[str, Tensor]) -> int:
    """Return the number of blocks of the longest list (12 for blocks.0 to blocks.11), else 0."""
    count = 0
    for name in state:
        match = BLOCKS.match(name)
        if match:
            count = max(count, int(match[2]) + 1)
    return count


def refuse_codes(names: Sequence[str], origin: object) -> None:
    """Refuse weights that are stored as integers.

    Args:
        names: the names of these weights; empty if there are none.
        origin: the file or directory, for the message.

    Raises:
        InputError: there are such weights; the message names the first ones.
    """
    if names:
        raise InputError(
            f"{join_few(names)} of {origin} hold integers, without a scale",
            "Save float weights. A file for --arch may have NAME_scale beside an int8 weight: one "
            "number, or one per output channel.",
        )


def strip_prefix(state: State) -> State:
    """Remove the first part of all names, such as `module.`, as long as all weights share it.

    DataParallel, torch.compile and Lightning wrap the model whose weights they save.
    """
    while True:
        first = {name.partition(".")[0] for name in state}
        if len(first) != 1 or not all("." in name for name in state):
            return state
        state = {name.partition(".")[2]: value for name, value in state.items()}


def match_names(state: State, module: nn.Module) -> tuple[State, Notes]:
    """Return stored weights by their names in a module, without a prefix such as `model.`.

    Lightning adds such a prefix: "model.head.bias" -> "head.bias". The prefix to remove is the one
    that gives the most names of the module. Lightning also saves weights without this prefix, such
    as "loss.weight". They are left out if all weights of the module are found. Otherwise they
    stay, and the later error names them as surplus.

    Args:
        state: the stored weights by name.
        module: the model.

    Returns:
        The weights by their names in the module, and a note on weights that were left out.
    """
    expected = module.state_dict()
    # The two prefixes without which most names fit, each with its number of these names.
    ranking = _count_prefixes(state, expected).most_common(2)
    prefix, matches = ranking[0] if ranking else ("", 0)
    renamed = _remove_prefix(state, prefix)
    others = [name for name in state if not name.startswith(prefix)]  # such as loss.weight
    # If a second prefix fits more than half as many names, the checkpoint has a second model, such
    # as a teacher. It is unknown which model is meant, so nothing is left out.
    has_second_model = any(count > matches / 2 for _, count in ranking[1:])
    is_complete = set(expected) <= set(renamed) - set(others)
    if not others or has_second_model or not is_complete:
        return renamed, ()
    matched = {name: value for name, value in renamed.items() if name not in others}
    text = f"weights beside the model {prefix.rstrip('.')!r} were left out: {join_few(others)}"
    return matched, (Note.info("weights-beside", text),)


def _remove_prefix(state: State, prefix: str) -> State:
    """Return weights by their names without a prefix.

    A name keeps its prefix if another weight already has the name without it.
    """
    renamed = {}
    for name, value in state.items():
        short = name.removeprefix(prefix)
        if short in state:
            short = name
        renamed[short] = value
    return renamed


def _count_prefixes(names: Iterable[str], expected: Container[str]) -> Counter[str]:
    """Return the prefixes before expected names: for each, the number of names that have it.

    For the name `model.head.bias`, if `head.bias` is expected, the prefix is `model.`.
    """
    prefixes = Counter[str]()
    for name in names:
        # Every end of a dotted name: a.b.c, b.c, c.
        end = name
        dot = "."
        while dot:
            if end in expected:
                prefixes[name.removesuffix(end)] += 1
            _, dot, end = end.partition(".")
    return prefixes


def note_half_precision(dtypes: Iterable[torch.dtype]) -> Notes:
    """Return the note on weights stored in half precision, if there are any."""
    halves = set(dtypes) & HALF
    if not halves:
        return ()
    return (
        Note.info(
            "half-precision",
            f"weights stored in {' and '.join(name_dtypes(halves))} were converted to float32",
        ),
    )


def hash_weights(module: nn.Module, origin: str, *, bare: bool = False) -> str:
    """Return a hash over the sorted (name, dtype, shape, bytes) of the weights of a module.

    Args:
        module: the module.
        origin: name of the module in errors.
        bare: whether a module without parameters is accepted.

    Raises:
        InputError: the module cannot be measured: it is TorchScript, has no parameters, or has
            tensors without values (on the meta device, or of a lazy module), in a quantised dtype
            of torch, sparse, NaN or infinite. The message names the first such tensors.
    """
    _require_measurable(module, origin, bare)
    digest = hashlib.sha256()
    for name, tensor in _list_state(module):
        # Weights that lipaudit itself keeps in quantised form are dequantised here. (Only tensors
        # of torch's own quantised dtypes were refused above.)
        value: Any = compute_values(tensor).detach().cpu().contiguous()
        # Half precision is hashed as float32: loading may have converted it (--weights).
        dtype = value.dtype
        if dtype in HALF:
            dtype = torch.float32
        digest.update(f"{name} {dtype} {tuple(value.shape)}".encode())
        # In pieces: a second copy of the largest weight would double the memory.
        for piece in value.reshape(-1).split(HASHED):
            # Each piece is copied. `numpy()` marks the memory of its tensor as not resizable. If
            # this were the weight's own memory, `offload.Placement.move` would later take the
            # weight for one in a mapped file, and not move it to the disk.
            digest.update(piece.to(dtype, copy=True).view(torch.uint8).numpy())
    return digest.hexdigest()


def _list_state(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the sorted (name, value) of a state dict.

    Values are parameters and buffers, without the extra state that some modules add.
    """
    state = sorted(module.state_dict(keep_vars=True).items())
    return [(name, value) for name, value in state if "_extra_state" not in name]


def _require_measurable(module: nn.Module, origin: str, bare: bool) -> None:
    """Refuse a module that cannot be measured (see `hash_weights`).

    Args:
        module: the module.
        origin: name of the module in errors.
        bare: whether a module without parameters is accepted.
    """
    original = "Give the original module, with its weights loaded (run a lazy module once)."
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(f"{origin} is TorchScript, whose modules cannot be read", original)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor) or tensor.is_meta:
            raise InputError(f"{name} of {origin} has no values", original)
    if not bare and next(module.parameters(), None) is None:
        raise InputError(f"{origin} has no parameters", "Give a model with parameters.")
    not_dense = [
        name
        for name, value in _list_state(module)
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized
    ]
    if not_dense:
        raise InputError(
            f"{origin} has weights that are quantised or sparse: {join_few(not_dense)}",
            "Load the model before it was quantised, or make its weights dense (to_dense()).",
        )
    _require_finite(module, origin)


def _require_finite(module: nn.Module, origin: str) -> None:
    """Refuse weights that are infinite or NaN, and buffers that are NaN.

    Buffers may hold infinities, such as masks.
    """
    parameters = module.named_parameters()
    not_finite = [name for name, p in parameters if not compute_values(p).isfinite().all()]
    not_finite += [name for name, buffer in module.named_buffers() if torch.isnan(buffer).any()]
    if not_finite:
        raise InputError(
            f"{origin} has weights that are not finite: {join_few(not_finite)}",
            "Use an earlier checkpoint: the training diverged or the file is damaged.",
        )


def read_json(path: Path) -> Any:
    """Read a JSON file of a model or a run.

    Raises:
        InputError: the file is unreadable, not JSON, or nested too deeply.
    """
    advice = "Copy or download it again."
    with explain_failure(f"{path} is not JSON", advice, OSError, ValueError):
        return from_json(path.read_bytes())
