"""One sample as a picture: in half blocks for terminals, and as a PNG file."""

from __future__ import annotations

import base64
import io
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.style import Style
from rich.text import Text

from lipaudit.errors import InputError
from lipaudit.report.blocks import Item, Passage
from lipaudit.report.cells import plain
from lipaudit.report.draw.passages import drawn_tokens, legend

if TYPE_CHECKING:
    from PIL.Image import Image

LEAST, GAP = 18, 2
"""Columns of a terminal that a picture gets at least, and between two."""
COLUMNS = 84
"""Characters in a line of a text's picture."""
CHARACTER, LINE = 6.02 / 72, 17 / 72
"""Size of one in inches, in a fixed-width font of 10 points."""
PAGE = 2700
"""Pixels of a line of pictures."""
WIDE = 6.6
"""Inches of a picture that has pictures side by side."""


def opened(picture: str) -> Image:
    """Read a PNG file in base64.

    Raises:
        InputError: it is none.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    except (OSError, SyntaxError, ValueError, UnidentifiedImageError) as error:
        raise InputError(
            "the report is damaged: a picture in it cannot be read", "Write it again."
        ) from error


def half_blocks(item: Item, width: int) -> Iterator[Text]:
    """Draw the pictures of a sample side by side, two rows of pixels in a line."""
    count = max(1, min(len(item.pictures), (width + GAP) // (LEAST + GAP)))
    room = (width + GAP) // count - GAP
    for start in range(0, len(item.pictures), count):
        group = item.pictures[start : start + count]
        drawn = [_lines(opened(picture), room) for _, picture in group]
        spans = [
            max(cell_len(plain(c)), len(d[0])) for (c, _), d in zip(group, drawn, strict=True)
        ]
        captions = (plain(c).ljust(span + GAP) for (c, _), span in zip(group, spans, strict=True))
        yield Text("".join(captions).rstrip())
        for i in range(max(map(len, drawn))):
            line = Text()
            for picture, span in zip(drawn, spans, strict=True):
                row = picture[i] if i < len(picture) else Text()
                line.append_text(row).append(" " * (span + GAP - row.cell_len))
            line.rstrip()
            yield line


def _lines(image: Image, width: int) -> list[Text]:
    """Return the lines of a picture, enlarged by a whole number or shrunk to some width."""
    from PIL.Image import Resampling

    times = width // image.width
    if times:
        image = image.resize((times * image.width, times * image.height), Resampling.NEAREST)
    else:
        height = max(1, round(image.height * width / image.width))
        image = image.resize((width, height), Resampling.BOX)
    colours = [
        [f"rgb{image.getpixel((x, y))}".replace(" ", "") for x in range(image.width)]
        for y in range(image.height)
    ]
    colours += [["default"] * image.width] * (len(colours) % 2)
    return [_line(*pair) for pair in zip(colours[::2], colours[1::2], strict=True)]


def _line(above: Sequence[str], below: Sequence[str]) -> Text:
    runs = groupby(zip(above, below, strict=True))
    parts = (
        ("▀" * len(list(run)), Style(color=upper, bgcolor=lower)) for (upper, lower), run in runs
    )
    return Text.assemble(*parts)


def png(shown: Item | Passage) -> bytes:
    """Draw a sample as a PNG file, dark on white."""
    import matplotlib as mpl

    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()
        mpl.rcParams["text.parse_math"] = False
        # Signs that no font here has are drawn as boxes.
        warnings.simplefilter("ignore", UserWarning)
        figure = _pictures(shown) if isinstance(shown, Item) else _text(shown)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=200)
    return file.getvalue()


def joined(pictures: Sequence[bytes]) -> bytes:
    """Set PNG files side by side, as many as fit a line."""
    from PIL import Image

    images = [Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures]
    places, x, y, right, bottom = [], 0, 0, 0, 0
    for image in images:
        if x and x + image.width > PAGE:
            x, y = 0, bottom
        places.append((x, y))
        x += image.width
        right, bottom = max(right, x), max(bottom, y + image.height)
    page = Image.new("RGB", (right, bottom), "white")
    for image, place in zip(images, places, strict=True):
        page.paste(image, place)
    file = io.BytesIO()
    page.save(file, "PNG")
    return file.getvalue()


def _pictures(item: Item) -> Any:
    from matplotlib.figure import Figure

    said = [part for line in item.lines for part in textwrap.wrap(plain(line), COLUMNS)]
    height = WIDE / max(len(item.pictures), 1) + 0.6 + LINE * len(said)
    figure = Figure(figsize=(WIDE, height), layout="constrained")
    figure.suptitle(textwrap.fill(plain(item.title), COLUMNS), fontsize=10, fontweight="bold")
    every = figure.subplots(1, len(item.pictures), squeeze=False)[0]
    for axes, (caption, picture) in zip(every, item.pictures, strict=True):
        axes.imshow(opened(picture), interpolation="nearest")
        axes.set_title(plain(caption), fontsize=9)
        axes.set_axis_off()
    figure.supxlabel("\n".join(said), fontsize=9, x=0.02, ha="left")
    return figure


def _text(block: Passage) -> Any:
    """Set a text in a fixed-width font, each token on its shade."""
    from matplotlib.figure import Figure

    title, below = _wrapped(block.title), _wrapped(legend(block))
    places, row, column = [], len(title) + 1, 0
    for token in drawn_tokens(block):
        if column and column + cell_len(token.text) > COLUMNS:
            row, column = row + 1, 0
        places.append((token, row, column))
        column += cell_len(token.text) + 1
    height = row + len(below) + 3
    figure = Figure(figsize=((COLUMNS + 4) * CHARACTER, height * LINE))
    page = _Page(figure, height)
    for i, line in enumerate(title):
        page.write(line, i, 0, fontweight="bold")
    for token, at, start in places:
        shade = {
            "facecolor": (0.04, 0.35, 0.65, 0.55 * token.shade),
            "edgecolor": "none",
            "pad": 1,
        }
        page.write(token.text, at, start, bbox=shade, fontweight="bold" if token.top else "normal")
    for i, line in enumerate(below):
        page.write(line, row + 2 + i, 0, color="#57606a")
    return figure


def _wrapped(text: str) -> Sequence[str]:
    return textwrap.wrap(plain(text), COLUMNS)


class _Page:
    """A figure to write lines on, as a typewriter does."""

    def __init__(self, figure: Any, height: int) -> None:
        self.figure, self.height = figure, height

    def write(self, text: str, row: int, column: int, **look: Any) -> None:
        """Write text from a column of a row on."""
        x, y = (column + 2) / (COLUMNS + 4), 1 - (row + 1) / self.height
        look |= {"family": "monospace", "fontsize": 10, "va": "center"}
        self.figure.text(x, y, text, **look)
