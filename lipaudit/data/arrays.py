"""Arrays of a file or in memory as a model takes them, and thumbnails of images."""

from __future__ import annotations

import base64
import gzip
import io
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from lipaudit.data import batch
from lipaudit.data.batch import DataOptions, SampleOrigin, Samples, draw_indices, make_batch
from lipaudit.errors import InputError, explain_failure, is_machine_error
from lipaudit.tables import Note, Notes

if TYPE_CHECKING:
    from lipaudit.models.net import Net

# Longer side of a thumbnail, in pixels.
SIDE = 64


def thumbnail(pixels: Tensor, box: tuple[float, float] | None = None) -> str:
    """Return an image (channels, height, width) as a small PNG file, in base64.

    The longer side is at most `SIDE` pixels. An image with other than 1 or 3 channels is shown by
    its first channel.

    Args:
        pixels: the image.
        box: the smallest and the largest value of a pixel, black and white; None: (0, 1).
    """
    low, high = box or (0.0, 1.0)
    planes = pixels.detach().cpu()
    if len(planes) not in (1, 3):
        planes = planes[:1]
    brightness = planes.sub(low).div(high - low).float().clamp(0, 1)
    codes = (brightness * 255).round().to(torch.uint8)
    # (height, width, 3), or (height, width) of a grey image.
    image = Image.fromarray(codes.movedim(0, -1).squeeze(-1).numpy())
    image.thumbnail((SIDE, SIDE), Image.Resampling.BOX)
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def to_box(pixels: Tensor, box: tuple[float, float] | None) -> Tensor:
    """Map pixels in [0, 1] to the range of values of a model (its box, None for [0, 1])."""
    low, high = box or (0.0, 1.0)
    return low + (high - low) * pixels


ARRAY_FILES = (".npz", ".safetensors")
INPUTS = ("x", "images", "inputs", "input_ids")
LABELS = ("y", "labels", "label")
# Largest distance of a value from the box that rounding explains, relative to the box's width.
ROUNDING = 1e-6
MASKS = ("attention_mask", "mask")
# Stands for the id of a token that a mask leaves out.
HIDDEN = torch.iinfo(torch.int64).min
# Names of files in the IDX format, compressed or not.
NAME = re.compile(r"[-.]idx\d-ubyte(?:\.gz)?$")
# Number types, by the third byte of an IDX file.
KINDS = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
CHANNELS = (1, 3, 4)


def holds_arrays(path: Path) -> bool:
    """Return whether a file contains arrays, judged by its name."""
    return path.suffix in ARRAY_FILES or bool(NAME.search(path.name))


def _find_array(
    names: Sequence[str], arrays: Mapping[str, Tensor], faults: Mapping[str, str], advice: str
) -> Tensor | None:
    """Return the first array with one of these names; None if there is no such array.

    Args:
        names: the usual names.
        arrays: the arrays of numbers in a file, by name.
        faults: an error message for each other array of the file, such as one of texts, by name.
        advice: the hint for such an error.

    Raises:
        InputError: only an array without numbers has one of the names.
    """
    for name in names:
        if name in arrays:
            return arrays[name]
    for name in names:
        if name in faults:
            raise InputError(faults[name], advice)
    return None


def load_arrays(path: Path) -> tuple[Tensor, Tensor | None]:
    """Return x (or images, inputs) and y (or labels), if present, of a file.

    Files are .safetensors, .npz, or IDX (the format of MNIST). An IDX file has no labels: the
    labels of `t10k-images-idx3-ubyte.gz` are in `t10k-labels-idx1-ubyte.gz` in the same folder.

    Raises:
        InputError: the file is damaged, or has no samples.
    """
    faults = dict[str, str]()  # arrays without numbers
    advice = "Copy it again, or save plain numbers: numpy.savez(FILE, x=..., y=...)."
    with explain_failure(f"{path} is not a readable array file", advice, Exception):
        if path.suffix == ".safetensors":
            arrays = load_file(path)
        elif path.suffix == ".npz":
            arrays, faults = _read_npz(path)
        else:
            arrays = _read_mnist(path)
    x = _find_array(INPUTS, arrays, faults, advice)
    y = _find_array(LABELS, arrays, faults, advice)
    if x is None:
        raise InputError(
            f"{path} has no samples (arrays: {', '.join(arrays) or 'none'})",
            f"Call the inputs {' or '.join(INPUTS)} and the labels {' or '.join(LABELS)}, or give "
            "the file of images: the labels beside it are read, too.",
        )
    mask = next((arrays[name] for name in MASKS if name in arrays), None)
    # Token ids with an attention mask: `HIDDEN` marks padding, which is removed later.
    if mask is not None and mask.shape == x.shape and x.ndim == 2 and not x.is_floating_point():
        x = x.long().masked_fill(mask == 0, HIDDEN)
    return x, y


def _read_npz(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the arrays of numbers in an .npz file, and an error message for each other array."""
    arrays = {}
    faults = {}
    # ZipFile raises an error if the file is no archive: numpy would read it as a pickle.
    with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as file:
        for name, array in file.items():
            if array.dtype.kind in "uifb":  # integers, floats and booleans
                arrays[name] = _make_native(array)
            else:  # texts, such as names of classes: an error only for x or y
                faults[name] = f"{name} of {path} holds {array.dtype}"
    return arrays, faults


def _read_mnist(path: Path) -> dict[str, Tensor]:
    """Return the images (x) of an IDX file and their labels (y), if a file beside it has labels.

    A file of labels alone gives only `labels`.
    """
    # train-images-idx3-ubyte -> train-labels-idx1-ubyte. The digit is the number of axes.
    label_name = re.sub(r"idx\d", "idx1", path.name.replace("images", "labels"))
    label_file = path.with_name(label_name)
    if label_file == path:
        return {"labels": _read_idx(path)}
    arrays = {"x": _read_idx(path)}
    if label_file.is_file():
        arrays["y"] = _read_idx(label_file)
    return arrays


def _read_idx(path: Path) -> Tensor:
    """Read an IDX file, compressed or not.

    The first four bytes are 0, 0, the type of the numbers, and the number of axes. The sizes of
    the axes (int32) and the numbers follow, both big-endian.
    """
    advice = "Copy or download it again."
    with explain_failure(f"{path} is not a readable IDX file", advice, Exception):
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":  # the first bytes of a gzip file
            data = gzip.decompress(data)
        kind = np.dtype(KINDS[data[2]])
        axes = data[3]
        shape = np.frombuffer(data, ">i4", count=axes, offset=4)
        values = np.frombuffer(data, kind, offset=4 + 4 * axes)
        return _make_native(values.reshape(shape))


def _make_native(array: np.ndarray[Any, Any]) -> Tensor:
    """Return an array as a tensor, in the byte order of this machine."""
    # The buffer of a file is read-only, but torch needs a writable array: then it is copied.
    dtype = array.dtype.newbyteorder("=")
    native = array.astype(dtype, copy=not array.flags.writeable)
    return torch.from_numpy(native)


def draw_arrays(
    x: Tensor, y: Tensor | None, net: Net, options: DataOptions, *, origin: str
) -> Samples:
    """Draw samples from tensors.

    Images are (samples, channels, height, width) or channels last. They are floats in the box of
    the model, the range of its pixels (usually [0, 1]), or uint8 in 0..255, which is mapped to the
    box. Float sequences are (samples, tokens, width). Token ids are integers (samples, tokens).

    Args:
        x: the inputs.
        y: the labels, or None.
        net: the model.
        options: number of samples and seed.
        origin: name of the data in messages.

    Raises:
        InputError: the shape does not fit the model, or values are out of range; the message names
            the origin.
    """
    _require_pairs(x, y, origin)
    order = draw_indices(len(x), options.samples, options.seed)
    chosen = x[order]
    places = [f"index {i}" for i in order]
    notes: Notes = ()
    if net.kind == "text":
        samples, notes = read_token_ids(chosen, net, origin, places)
    else:
        samples = list(_read_values(chosen, net, origin))
    labels = None
    if y is not None:
        labels = [int(label) for label in y[order]]
        if net.classes:
            full_places = [f"{origin}: {place}" for place in places]
            batch.require_classes(numbers=labels, names=labels, places=full_places, net=net)
    return Samples(
        make_batch(samples, net, labels),
        notes,
        origins=tuple(map(SampleOrigin, places)),
        # How the array was read, in lines for the user: "uint8 array of shape ...", "divided ...".
        steps=[*_list_steps(chosen, net)],
    )


def _require_pairs(x: Tensor, y: Tensor | None, origin: str) -> None:
    """Refuse arrays without samples, and labels that are not one integer per sample."""
    if x.ndim == 0 or len(x) == 0 or x.is_complex():
        raise InputError(
            f"{origin} has no samples: its inputs are {x.dtype} of shape {tuple(x.shape)}",
            "Give real numbers. The first axis of an array counts its samples.",
        )
    if y is not None and (y.shape != (len(x),) or y.is_floating_point()):
        raise InputError(
            f"{origin} has {len(x)} inputs and {y.dtype} labels of shape {tuple(y.shape)}",
            "Give one integer label per input.",
        )


def _list_steps(x: Tensor, net: Net) -> Iterator[str]:
    """Yield texts on how an array becomes samples: dtype and shape, and for images the values."""
    kind = str(x.dtype).removeprefix("torch.")
    yield f"{kind} array of shape {tuple(x.shape[1:])}"
    if net.kind == "image":
        values = x.float()
        yield f"values of all samples: {values.min():.4g} to {values.max():.4g}"
        yield "divided by 255" if x.dtype == torch.uint8 else "values not changed"


def _read_values(x: Tensor, net: Net, origin: str) -> Tensor:
    """Return images (channels first) or sequences as float32, after a check of shape and range.

    Args:
        x: the samples of a file; images may have their channels last, or be uint8.
        net: the model; `box` is the range of its input values, or None.
        origin: name of the data in messages.

    Raises:
        InputError: shapes do not fit the model, or values are not finite or outside the box.
    """
    x = _order_axes(x, net, origin)
    if x.dtype == torch.uint8:
        x = to_box(x.float() / 255, net.box)
    x = x.float()
    if not x.isfinite().all():
        raise InputError(f"{origin} holds NaN or infinite values", "Remove those samples.")
    if net.box is None:
        return x
    low, high = net.box
    smallest = x.min()
    largest = x.max()
    rounding = ROUNDING * (high - low)
    if smallest < low - rounding or largest > high + rounding:
        raise InputError(
            f"{origin} holds values from {smallest:.7g} to {largest:.7g}; the model takes "
            f"[{low:g}, {high:g}]",
            "Divide by 255, or save uint8. Do not normalise the pixels: lipaudit does that.",
        )
    return x.clamp(low, high)


def _order_axes(x: Tensor, net: Net, origin: str) -> Tensor:
    """Return samples in the order of axes that the model takes: images with their channels first.

    Raises:
        InputError: the shape of a sample is not that of the model's inputs.
    """
    input_shape = tuple(net.input_shape)
    shape = tuple(x.shape[1:])
    if net.kind == "image" and shape != input_shape:
        channels, *size = input_shape
        if shape == (*size, channels):  # channels last
            x = x.movedim(-1, 1)
        elif (1, *shape) == input_shape:  # grey images without an axis of channels: add it
            x = x[:, None]
    if tuple(x.shape[1:]) != input_shape:
        raise InputError(
            f"{origin} holds samples of shape {shape}; the model takes {input_shape}",
            "Resize them first (a folder of images is resized for you), or build the model for "
            "that size with --model-kwargs img_size=... or --input-size.",
        )
    return x


def read_token_ids(
    x: Tensor, net: Net, origin: str, places: Sequence[str]
) -> tuple[list[Tensor], Notes]:
    """Return the token ids of each text without its padding, and notes on the padding.

    Padding is a pad id of the model before the first or after the last other token, and an id that
    a mask of the file hides (`HIDDEN`). Padding stays in the texts if the model accepts only texts
    of the full length.

    Args:
        x: token ids (samples, tokens).
        net: the model.
        origin: name of the data in messages.
        places: the place of each sample, for messages.

    Raises:
        InputError: x holds no token ids, or a text is empty.
    """
    text = f"{origin} holds {x.dtype} of shape {tuple(x.shape)}"
    advice = "Give the text itself as .txt, .csv or .jsonl, or integer token ids."
    if x.is_floating_point() or x.ndim != 2 or x.shape[1] == 0:
        raise InputError(f"{text}; the model takes token ids (samples, tokens)", advice)
    x = x.long()
    inside = _find_texts(x, net)
    samples = _cut_padding(x, inside, origin, places)
    limit = net.input_shape[0]
    longest = max(map(len, samples))
    if longest > limit:
        text = f"{text}; the model takes token ids (samples, at most {limit})"
        raise InputError(text, advice)
    _require_vocabulary(torch.cat(samples), net, origin)
    if inside.all():
        return samples, _note_unnamed_padding(x, net)
    padded = int((~inside).any(1).sum())
    # Without a mask in the file, a trial run shows whether the model accepts shorter texts.
    has_mask = (x == HIDDEN).any()
    if has_mask or _is_accepted(min(samples, key=len), net):
        text = f"{padded} of {len(x)} texts of {origin} are padded; their padding was removed"
        return samples, (Note.info("padding-removed", text),)
    text = (
        f"{padded} texts of {origin} are padded (id {net.pad_id}), and the model takes only "
        f"texts of {x.shape[1]} tokens. Padding counts as tokens"
    )
    return list(x), (Note.warn("padding-kept", text),)


def _cut_padding(x: Tensor, inside: Tensor, origin: str, places: Sequence[str]) -> list[Tensor]:
    """Return the token ids of each text where `inside` is True, in a row of its own length.

    Args:
        x: token ids, (samples, tokens).
        inside: False at padding, (samples, tokens).
        origin: name of the data in messages.
        places: the place of each sample, for messages.

    Raises:
        InputError: a text is empty.
    """
    samples = []
    for place, ids, is_inside in zip(places, x, inside, strict=True):
        if not is_inside.any():
            raise InputError(f"{origin}: {place} holds padding and no text", "Remove empty texts.")
        samples.append(ids[is_inside])
    return samples


def _find_texts(x: Tensor, net: Net) -> Tensor:
    """Return a mask (samples, tokens) that is True from the first to the last token of each text.

    The pad id of the model and `HIDDEN` (ids under a mask of the file) are padding. A pad id
    between two tokens counts as a token.
    """
    is_token = x != HIDDEN
    if net.pad_id is not None:
        is_token &= x != net.pad_id
    has_begun = is_token.cumsum(1) > 0
    goes_on = is_token.flip(1).cumsum(1).flip(1) > 0  # a token is here or further right
    return has_begun & goes_on


def _require_vocabulary(ids: Tensor, net: Net, origin: str) -> None:
    """Refuse token ids that the model does not have."""
    smallest = ids.min()
    largest = ids.max()
    if smallest < 0 or (net.vocabulary is not None and largest >= net.vocabulary):
        raise InputError(
            f"{origin} holds token ids from {smallest} to {largest}; the vocabulary has "
            f"{net.vocabulary}",
            "Use the tokenizer of this model.",
        )


def _is_accepted(ids: Tensor, net: Net) -> bool:
    """Return whether a model runs on a text without padding, by a trial run."""
    one = make_batch([ids], net).to(net.device, net.dtype)
    try:
        with torch.no_grad():
            net.output(one)
    except Exception as error:  # the model's own code may raise anything
        if is_machine_error(error):
            raise
        return False
    return True


def _note_unnamed_padding(x: Tensor, net: Net) -> Notes:
    """Return a warning if texts seem to be padded, but the model declares no pad id.

    [[5, 6, 0, 0], [7, 8, 9, 0]] seem to be padded with 0: it is nowhere but at the ends, and more
    often in one text than in another.
    """
    if net.pad_id is not None:
        return ()
    # Padding may be at the end or, read from the right, at the beginning.
    for ids in (x, x.flip(1)):
        usual_end = int(ids[:, -1].mode().values)  # the most frequent last id
        is_usual = ids == usual_end
        # How often `usual_end` is repeated at the end of each text, (samples,). Read from the last
        # token to the left, the cumulative product is 1 up to the first other id, then 0.
        repeats = is_usual.flip(1).cumprod(1).sum(1)
        elsewhere = int(is_usual.sum() - repeats.sum())
        if not elsewhere and repeats.max() > max(1, int(repeats.min())):
            text = (
                f"texts end in up to {int(repeats.max())} times the id {usual_end}, which counts "
                "as a token. If it is padding, name it: pad_token_id in config.json, or "
                f"ModelSpec(..., pad_id={usual_end})"
            )
            return (Note.warn("padding-unnamed", text),)
    return ()


@dataclass(frozen=True)
class SampleForm:
    """A kind of samples, and the shape of one sample.

    Attributes:
        kind: image (values in [0, 1]), tokens (sequences of floats) or text (token ids).
        shape: shape of one sample.
        fits: whether the values of the data suit the kind.
    """

    kind: batch.SampleKind
    shape: tuple[int, ...]
    fits: bool = field(default=True, repr=False, compare=False)

    def __str__(self) -> str:
        size = " x ".join(map(str, self.shape))
        if self.kind == "image":
            return f"an image of {size} (channels, height, width) in [0, 1]"
        if len(self.shape) > 3:
            return f"a volume or video of {size} without limits"
        return f"a sequence of {size} (tokens, width) without limits"


def list_forms(x: Tensor) -> tuple[SampleForm, ...]:
    """Return the possible kinds of the samples in an array; several if the shape is ambiguous.

    >>> list_forms(torch.zeros(5, 3, 32, 32))
    (SampleForm(kind='image', shape=(3, 32, 32)),)
    >>> list_forms(torch.zeros(5, 8, 5, 4))
    (SampleForm(kind='image', shape=(8, 5, 4)), SampleForm(kind='image', shape=(4, 8, 5)))
    >>> list_forms(torch.zeros(5, 28, 28, dtype=torch.uint8))
    (SampleForm(kind='image', shape=(1, 28, 28)),)
    >>> list_forms(torch.zeros(5, 7, 16))
    (SampleForm(kind='tokens', shape=(7, 16)), SampleForm(kind='image', shape=(1, 7, 16)))
    >>> list_forms(torch.zeros(5, 12, dtype=torch.long))
    (SampleForm(kind='text', shape=(12,)),)
    >>> list_forms(torch.zeros(5, 3, 4, 16, 16))
    (SampleForm(kind='tokens', shape=(3, 4, 16, 16)),)
    """
    shape = tuple(x.shape[1:])
    if len(shape) > 3:
        return (SampleForm("tokens", shape),)
    if len(shape) == 3:
        first, middle, last = shape
        channels_first = SampleForm("image", shape)
        # (8, 5, 4) is 8 channels first or 4 channels last; (3, 32, 32) can only be channels first.
        if last in CHANNELS and first not in CHANNELS:
            channels_last = SampleForm("image", (last, first, middle))
            return channels_first, channels_last
        return (channels_first,)
    if len(shape) == 2:
        grey = (1, *shape)
        if x.dtype == torch.uint8:
            return (SampleForm("image", grey),)
        # Values outside [0, 1] are not pixels: then the samples are sequences. Values are compared
        # as floats, because torch cannot compare unsigned integers of 16 bits and more.
        are_pixels = False
        if not x.is_complex():
            values = x.float()
            are_pixels = bool(((values >= 0) & (values <= 1)).all())
        return SampleForm("tokens", shape), SampleForm("image", grey, fits=are_pixels)
    if len(shape) == 1:
        kind: batch.SampleKind = "tokens" if x.is_floating_point() else "text"
        return (SampleForm(kind, shape),)
    return ()
