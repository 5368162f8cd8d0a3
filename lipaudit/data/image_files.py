"""Files of images: those of a folder, and the steps from each to the pixels that a model takes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from lipaudit.errors import InputError, explain_failure
from lipaudit.tables import Note, Notes

if TYPE_CHECKING:
    from lipaudit.models.net import Net

SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"),
    *(".pnm", ".jfif", ".jpe", ".jp2", ".j2k", ".avif", ".apng", ".dib", ".tga"),
)
# Files beside pictures that nobody takes for one.
SIDECARS = frozenset(
    {"", ".txt", ".md", ".json", ".jsonl", ".csv", ".tsv", ".xml", ".yaml", ".yml", ".html", ".db"}
)
COLOUR_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
# Formats whose greys Pillow reads as 32-bit integers, although they have at most 16 bits.
SHORT_FORMATS = ("PNG", "PPM")
# EXIF tag of the orientation; its values other than upright, and those that exchange width and
# height.
ORIENTATION = 0x0112
TURNED = range(2, 9)
SIDEWAYS = range(5, 9)
# Tags of TIFF files: bits per sample, compression, photometric interpretation, planar
# configuration and sample format.
DEPTHS = 258
COMPRESSION = 259
PHOTOMETRIC = 262
PLANES = 284
SAMPLE_FORMAT = 339

Preprocessing = Literal["model", "resize", "none"]


def list_pictures(folder: Path) -> tuple[list[Path], Notes]:
    """Return the pictures of a folder or of its direct sub-folders, and notes on files left out.

    Hidden files and folders are left out: macOS writes `._x.png` beside `x.png`.

    Raises:
        InputError: there are no pictures, or some beside and some inside sub-folders.
    """
    # glob is not used: it silently skips folders that cannot be read.
    entries = _list_visible(folder)
    inside = []  # the entries of direct sub-folders, of which there may be one per class
    for entry in filter(Path.is_dir, entries):
        inside += _list_visible(entry)
    # Pictures in deeper folders are not read: a note or the error names the first one.
    deeper: list[Path] = []
    for entry in filter(Path.is_dir, inside):
        deeper += filter(is_picture, sorted(entry.rglob("*")))
    pictures = []
    others = []
    for entry in entries + inside:
        if is_picture(entry):
            pictures.append(entry)
        elif entry.suffix.lower() not in SIDECARS and entry.is_file():  # not a text or table
            others.append(entry)
    if not pictures:
        raise _explain_no_pictures(folder, deeper)
    # {True} if all pictures are beside the sub-folders, {False} if all are inside of them.
    are_beside = {file.parent == folder for file in pictures}
    if len(are_beside) > 1:
        raise InputError(
            f"{folder} holds images both beside and inside sub-folders",
            "Put all images into one folder, or into one sub-folder per class.",
        )
    notes = _note_left_out("images in deeper folders", deeper, folder)
    notes += _note_left_out("files of other formats", others, folder)
    return pictures, notes


def _explain_no_pictures(folder: Path, deeper: Sequence[Path]) -> InputError:
    """Return the error on a folder without pictures; it names one that lies deeper, if any does.

    Args:
        folder: the folder.
        deeper: pictures in folders inside of its sub-folders, which are not read.
    """
    advice = f"Give a folder of {', '.join(SUFFIXES[:4])} ... files, or of one folder per class."
    if deeper:
        advice = f"Images are deeper, such as {deeper[0]}: try --data {deeper[0].parents[1]}."
    return InputError(f"{folder} holds no images, nor do its folders", advice)


def _note_left_out(kind: str, files: Sequence[Path], folder: Path) -> Notes:
    """Warn of files that are not read, if there are any."""
    if not files:
        return ()
    first = files[0].relative_to(folder)
    text = f"{len(files)} {kind} were not read (the first: {first})"
    return (Note.warn("files-left-out", text),)


def _list_visible(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def is_picture(file: Path) -> bool:
    """Say whether a file is a picture, by its name."""
    return file.suffix.lower() in SUFFIXES and not file.name.startswith(".")


def find_common_shape(folder: Path) -> tuple[int, int, int] | None:
    """Return (channels, height, width) of the pictures of a folder.

    Return None if the pictures have different shapes, or if no picture can be opened.

    Raises:
        InputError: as in `list_pictures`.
    """
    shapes = set()
    pictures, _ = list_pictures(folder)
    for file in pictures:
        with suppress(InputError), explain_images(file), Image.open(file) as image:
            width, height = image.size
            # A camera held sideways stores an orientation: width and height are exchanged. Pillow
            # has already done that for TIFF files.
            orientation = image.getexif().get(ORIENTATION)
            if orientation in SIDEWAYS and image.format != "TIFF":
                width, height = height, width
            channels = 3
            # One band is grey, two are grey with opacity. A palette (P) has one band of colours.
            if len(image.getbands()) < 3 and not image.mode.startswith("P"):
                channels = 1
            shapes.add((channels, height, width))
        if len(shapes) > 1:
            return None
    if shapes:
        return shapes.pop()
    return None


@contextmanager
def explain_images(name: object) -> Iterator[None]:
    """Turn Pillow's exceptions, and its warning about too many pixels, into an `InputError`.

    Raises:
        InputError: the block cannot read a picture.
    """
    advice = "Remove it, shrink it or copy it again, or leave such images out with --skip-bad."
    failure = explain_failure(f"{name} is not a readable image", advice, Exception)
    with failure, warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning):
        yield


class ImageStep(NamedTuple):
    """A step of reading a picture.

    Attributes:
        text: what was done to it.
        note: the note to users on all pictures with this step, if it may change results.
    """

    text: str
    note: Note | None = None


class Picture(NamedTuple):
    """The pixels of a picture (channels, height, width) in [0, 1], and what was done to it."""

    pixels: Tensor
    steps: list[ImageStep]


def read_image(source: Path | Image.Image, name: str, net: Net) -> Picture:
    """Read one picture, from a file or as decoded by a data set, as pixels in [0, 1].

    Raises:
        InputError: it is damaged, or its values have no known range; the message names it.
    """
    prepare = net.prepare
    assert prepare is not None
    with explain_images(name):
        if isinstance(source, Image.Image):
            image, steps = decode(source, name)
        else:
            with Image.open(source) as opened:
                image, steps = decode(opened, name)
        # `prepare` turns the picture into pixels. It may be a function of the user in place of a
        # `Resizing`, and then its steps are unknown.
        if isinstance(prepare, Resizing):
            pixels, more = prepare.apply(image, name)
            return Picture(pixels, steps + more)
        return Picture(prepare(image), [*steps, ImageStep("the model's own function `prepare`")])


def decode(image: Image.Image, name: str = "an image") -> tuple[Image.Image, list[ImageStep]]:
    """Return a picture upright and with 8 bits per channel, and the steps that were taken.

    Args:
        image: a picture as Pillow opens it.
        name: the name of the picture in errors.

    Raises:
        InputError: the values have no known range, or Pillow reads them wrongly.
    """
    kind = image.format or "in memory"
    frames = getattr(image, "n_frames", 1)
    image.load()  # only now: counting the frames moves through the file
    steps = [ImageStep(f"{image.mode}, {image.width} x {image.height} pixels ({kind})")]
    if frames > 1:
        note = Note.info("first-frame", "only the first of several frames is read")
        steps.append(ImageStep(f"the first of {frames} frames", note))
    _require_readable(image, name)
    if image.mode.startswith("I") or image.mode == "F":
        image, done = _reduce_depth(image, name)  # keeps the EXIF tags, read below
        steps.append(done)
    orientation = image.getexif().get(ORIENTATION)
    if orientation in TURNED:
        image = ImageOps.exif_transpose(image)
        note = Note.info("turned", "the image is turned upright, as its EXIF orientation says")
        steps.append(ImageStep(f"turned upright (EXIF orientation {orientation})", note))
    return image, steps


def _require_readable(image: Image.Image, name: str) -> None:
    """Refuse TIFF files whose values Pillow reads wrongly.

    Raises:
        InputError: the file holds signed bytes; or 16 bits per colour, in separate planes (all of
            red, then all of green, ...) without compression.
    """
    # The tags of a TIFF file are numbers. SAMPLE_FORMAT 2: signed integers. PLANES 2: one plane
    # after another. COMPRESSION 1: none. DEPTHS: the bits of each channel.
    tags = getattr(image, "tag_v2", {})
    is_signed = image.mode == "L" and 2 in tags.get(SAMPLE_FORMAT, ())
    is_planar = tags.get(PLANES) == 2 and tags.get(COMPRESSION) == 1
    if is_signed or (is_planar and 16 in tags[DEPTHS]):
        raise InputError(
            f"{name} holds signed numbers, or planes of 16 bits, which Pillow reads wrongly",
            "Save it with 8 bits, as PNG.",
        )


def _reduce_depth(image: Image.Image, name: str) -> tuple[Image.Image, ImageStep]:
    """Convert a grey image of 16 bits, or of floats in [0, 1], to 8 bits.

    Returns:
        The image, and the step for the list of steps.

    Raises:
        InputError: the image has other floats, or integers of 32 bits: their range is unknown.
    """
    has_16_bits = image.mode.startswith("I;16") or image.format in SHORT_FORMATS
    values = np.array(image, dtype=np.float64)
    smallest = values.min()
    largest = values.max()
    if has_16_bits:
        values /= 257  # 65535 / 255
        text = "16 bits to 8: divided by 257 and rounded"
    elif image.mode == "F" and 0 <= smallest <= largest <= 1:
        values *= 255
        text = "floats in [0, 1] to 8 bits: times 255 and rounded"
    else:
        number = "32-bit integers" if image.mode == "I" else "floats"
        raise InputError(
            f"{name} holds {number} from {smallest:.4g} to {largest:.4g}, and the range that they "
            "belong to is unknown",
            "Save images with 8 or 16 bits, or as floats in [0, 1].",
        )
    tags = getattr(image, "tag_v2", {})  # of TIFF files
    if tags.get(PHOTOMETRIC) == 0:  # 0 is white: Pillow inverts only images of 8 bits
        values = 255 - values
        text = f"{text}, inverted"
    reduced = Image.fromarray(values.round().astype(np.uint8))
    reduced.getexif().update(image.getexif())
    return reduced, ImageStep(text)


@dataclass(frozen=True)
class Resizing:
    """How pictures of any size become pixels of the shape that a model takes.

    Pictures of that size are not resized, unless `choice` is "model". Others go through the steps
    of the model; without steps they are scaled to cover the size and cropped in the middle.

    Attributes:
        shape: (channels, height, width).
        steps: the model's own steps by name; the last one returns a tensor in [0, 1].
        choice: model (its steps, at every size), resize (not its steps), none (no other size), or
            None: its steps for pictures of another size.
        guess: whose steps they are, if the weights may have been trained with others.
    """

    shape: Sequence[int]
    steps: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    choice: Preprocessing | None = None
    guess: str = ""

    def __call__(self, image: Image.Image) -> Tensor:
        """Return the pixels of a picture."""
        decoded, _ = decode(image)
        pixels, _ = self.apply(decoded)
        return pixels

    def apply(self, image: Image.Image, name: str = "an image") -> tuple[Tensor, list[ImageStep]]:
        """Return the pixels of a decoded picture in [0, 1], and the steps that were taken.

        Args:
            image: the picture, (width, height) of any size.
            name: its name in errors.

        Returns:
            The pixels (channels, height, width) of the model's shape, and the steps.

        Raises:
            InputError: no picture has the model's number of channels; or this picture has another
                size and `choice` (--preprocess) is "none", so it must not be resized.
            ValueError: the picture is so narrow that scaling would give too many pixels.
        """
        channels, height, width = self.shape
        if channels not in COLOUR_MODES:
            raise InputError(
                f"the model takes {channels} channels, and image files have 1, 3 or 4",
                "Give an .npz file with x of shape (samples, channels, height, width).",
            )
        image, done = _convert(image, COLOUR_MODES[channels])
        has_size = image.size == (width, height)
        if self.choice == "none" and not has_size:
            raise InputError(
                f"{name} has {image.width} x {image.height} pixels; the model takes {width} x "
                f"{height}",
                "Resize the images first, or leave --preprocess none out.",
            )
        # By default a picture of another size is resized by the model's own steps, if it has some.
        # With --preprocess model, its steps apply to every picture; with resize, those below.
        if self.choice == "model" or (self.choice is None and self.steps and not has_size):
            return self._follow_model(image, done)
        if not has_size:
            image = _cover(image, width, height)
            done.append(
                ImageStep(f"scaled to cover {width} x {height}, then cropped in the middle")
            )
        done.append(ImageStep("divided by 255"))
        # (height, width, channels), also of a grey image, which Pillow gives without channels.
        pixels = np.atleast_3d(np.asarray(image, dtype=np.float32) / 255)
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy()), done

    def _follow_model(
        self, image: Image.Image, done: list[ImageStep]
    ) -> tuple[Tensor, list[ImageStep]]:
        """Apply the model's own preprocessing; return the pixels and the list of all steps.

        Args:
            image: the image, with the channels of the model.
            done: the steps so far; the model's steps are added to this list.
        """
        _, height, width = self.shape
        # Raises an error for a narrow strip, which scaling would make too large.
        _find_covering_scale(image, width, height)
        value: Any = image
        for name, step in self.steps.items():
            value = step(value)
            if isinstance(value, Image.Image):
                columns, rows = value.size
            else:  # a tensor, (channels, rows, columns)
                *_, rows, columns = value.shape
            done.append(ImageStep(f"{name}: {columns} x {rows} pixels"))
        if tuple(value.shape) != tuple(self.shape):
            raise InputError(
                f"the model's own resizing makes images of shape {tuple(value.shape)}, not "
                f"{tuple(self.shape)}",
                "Give --input-size, to which images are scaled and cropped in the middle.",
            )
        # `guess` names the architecture that these steps come from. The weights may have been
        # trained with other steps: warn.
        if self.guess and self.choice is None:
            text = (
                f"resized and cropped as the pretrained weights of {self.guess} want it. If these "
                "weights were trained without the crop, give --preprocess resize"
            )
            done[-1] = ImageStep(done[-1].text, Note.warn("default-resizing", text))
        return value, done


def _convert(image: Image.Image, mode: str) -> tuple[Image.Image, list[ImageStep]]:
    """Convert a picture to a mode of Pillow, such as RGB; also return the step, if any."""
    if image.mode == mode:
        return image, []
    text = f"{image.mode} to {mode}"
    note = None
    *_, last_band = image.getbands()
    # A band of opacity is called A or a. A palette image has the opacity in `info`.
    is_transparent = last_band in "Aa" or "transparency" in image.info
    if is_transparent and mode != "RGBA":
        text += ", transparency dropped"
        note = Note.warn("transparency", "transparency is dropped: the colours behind it are read")
    return image.convert(mode), [ImageStep(text, note)]


def _cover(image: Image.Image, width: int, height: int) -> Image.Image:
    """Scale a picture until it covers width x height, and crop it in the middle."""
    scale = _find_covering_scale(image, width, height)
    scaled_width = max(width, round(image.width * scale))
    scaled_height = max(height, round(image.height * scale))
    image = image.resize((scaled_width, scaled_height), Image.Resampling.BICUBIC)
    left = (scaled_width - width) // 2
    top = (scaled_height - height) // 2
    return image.crop((left, top, left + width, top + height))


def _find_covering_scale(image: Image.Image, width: int, height: int) -> float:
    """Return the smallest scale at which a picture covers width x height.

    Raises:
        ValueError: the scaled picture would be too large, as of a strip one pixel wide.
    """
    scale = max(width / image.width, height / image.height)
    pixels = image.width * image.height * scale**2
    if pixels > (Image.MAX_IMAGE_PIXELS or math.inf):
        raise ValueError(f"{image.width}x{image.height} pixels are too narrow to be scaled")
    return scale


def collect_notes(places: Sequence[str], steps: Sequence[Sequence[ImageStep]]) -> Notes:
    """Return the different notes of the steps of pictures, once each.

    The number of pictures with this note, and the first of these pictures, are put in front.

    Args:
        places: the file of each picture, or its place in the data.
        steps: the steps that were taken for each picture; a step may have a note.
    """
    places_by_note: dict[Note, list[str]] = {}
    for place, done in zip(places, steps, strict=True):
        for step in done:
            if step.note is not None:
                places_by_note.setdefault(step.note, []).append(place)
    notes = []
    for note, of_note in places_by_note.items():
        lead = f"{len(of_note)} of {len(places)} images (the first: {of_note[0]})"
        notes.append(note.add_lead(lead))
    return tuple(notes)
