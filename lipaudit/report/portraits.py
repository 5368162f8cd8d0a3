"""One sample: its pictures, or its tokens on shades."""

from __future__ import annotations

import base64
import io
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from lipaudit.errors import InputError
from lipaudit.report.blocks import Item, Passage
from lipaudit.report.cells import describe_standing, format_number, format_value, show_controls

if TYPE_CHECKING:
    from PIL.Image import Image

TOP = 5
"""So many tokens are named beside the text."""
LEAST = 0.02
"""Nothing below this share is among them."""


@dataclass(frozen=True)
class Token:
    """One token as it is drawn.

    Attributes:
        text: itself.
        share: as it is written.
        shade: 0 to 1, of the largest share.
        top: whether it is among the few that are named.
    """

    text: str
    share: str
    shade: float
    top: bool


def shade_tokens(block: Passage) -> list[Token]:
    """Return the tokens of a text as they are drawn; space that would not show is a sign."""
    largest = max(block.shares, default=0.0) or 1.0
    order = sorted(range(len(block.shares)), key=lambda i: -block.shares[i])
    top = {i for i in order[:TOP] if block.shares[i] >= LEAST}
    return [
        Token(
            show_controls(token).strip() or "␣",
            format_value(share, block.column),
            share / largest,
            i in top,
        )
        for i, (token, share) in enumerate(zip(block.tokens, block.shares, strict=True))
    ]


def list_largest(block: Passage) -> str:
    """Name the tokens with the largest shares, largest first."""
    named = [token for token in shade_tokens(block) if token.top]
    named.sort(key=lambda token: -token.shade)
    return ", ".join(f"{token.text} {token.share}" for token in named)


def explain_shades(block: Passage) -> str:
    """Explain the shades, and count the tokens that are left out."""
    said = [f"{block.column.label} ({describe_standing(block.column)}): {list_largest(block)}"]
    if block.left_out:
        rest = format_value(max(0.0, 1 - sum(block.shares)), block.column)
        said.append(f"{format_number(block.left_out, 'd')} more tokens are left out: {rest}")
    return "; ".join(said)


def open_picture(picture: str) -> Image:
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


def draw_item(item: Item) -> Any:
    """Set the pictures of a sample side by side, with its lines below."""
    from matplotlib.figure import Figure

    said = [part for line in item.lines for part in textwrap.wrap(show_controls(line), COLUMNS)]
    height = 6.6 / max(len(item.pictures), 1) + 0.6 + LINE * len(said)
    figure = Figure(figsize=(6.6, height), layout="constrained")
    figure.suptitle(
        textwrap.fill(show_controls(item.title), COLUMNS), fontsize=10, fontweight="bold"
    )
    every = figure.subplots(1, len(item.pictures), squeeze=False)[0]
    for axes, (caption, picture) in zip(every, item.pictures, strict=True):
        axes.imshow(open_picture(picture), interpolation="nearest")
        axes.set_title(show_controls(caption), fontsize=9)
        axes.set_axis_off()
    figure.supxlabel("\n".join(said), fontsize=9, x=0.02, ha="left")
    return figure


COLUMNS = 84
"""Characters in a line of a text's picture."""
CHARACTER, LINE = 6.02 / 72, 17 / 72
"""Inches of a character and of a line in a fixed-width font of 10 points."""


def draw_passage(block: Passage) -> Any:
    """Set a text in a fixed-width font, each token on its shade."""
    from matplotlib.figure import Figure

    title, below = (
        textwrap.wrap(show_controls(t), COLUMNS) for t in (block.title, explain_shades(block))
    )
    look: dict[str, Any] = {"fontweight": "bold"}
    written = [(line, row, 0, look) for row, line in enumerate(title)]
    row, column = len(title) + 1, 0
    for token in shade_tokens(block):
        if column and column + cell_len(token.text) > COLUMNS:
            row, column = row + 1, 0
        box = {"facecolor": (0.04, 0.35, 0.65, 0.55 * token.shade), "edgecolor": "none", "pad": 1}
        look = {"bbox": box, "fontweight": "bold" if token.top else "normal"}
        written.append((token.text, row, column, look))
        column += cell_len(token.text) + 1
    written += [(line, row + 2 + i, 0, {"color": "#57606a"}) for i, line in enumerate(below)]
    height = row + len(below) + 3
    figure = Figure(figsize=((COLUMNS + 4) * CHARACTER, height * LINE))
    for line, row, column, look in written:
        x, y = (column + 2) / (COLUMNS + 4), 1 - (row + 1) / height
        figure.text(x, y, line, family="monospace", fontsize=10, va="center", **look)
    return figure
