"""Texts token by token, each shaded by its share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.cells import cell_len
from rich.style import Style
from rich.text import Text

from lipaudit.report.blocks import Passage
from lipaudit.report.cells import number, plain, standing, text
from lipaudit.report.draw.colours import contrast

TOP = 5
"""So many tokens are named beside the text."""
LEAST = 0.02
"""Nothing below this share is among them."""
HEAT = (86, 156, 230)
"""Behind tokens in a terminal, in darker shades for smaller shares."""


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


def drawn_tokens(block: Passage) -> list[Token]:
    """Return the tokens of a text as they are drawn; space that would not show is a sign."""
    largest = max(block.shares, default=0.0) or 1.0
    order = sorted(range(len(block.shares)), key=lambda i: -block.shares[i])
    top = {i for i in order[:TOP] if block.shares[i] >= LEAST}
    return [
        Token(plain(token).strip() or "␣", text(share, block.column), share / largest, i in top)
        for i, (token, share) in enumerate(zip(block.tokens, block.shares, strict=True))
    ]


def most(block: Passage) -> str:
    """Name the tokens with the largest shares, largest first."""
    named = [token for token in drawn_tokens(block) if token.top]
    named.sort(key=lambda token: -token.shade)
    return ", ".join(f"{token.text} {token.share}" for token in named)


def legend(block: Passage) -> str:
    """Say what the shades are, and what is left out."""
    said = [f"{block.column.label} ({standing(block.column)}): {most(block)}"]
    if block.left_out:
        rest = text(max(0.0, 1 - sum(block.shares)), block.column)
        said.append(f"{number(block.left_out, 'd')} more tokens are left out: {rest}")
    return "; ".join(said)


def shaded(block: Passage, width: int, *, colour: bool) -> Iterator[Text]:
    """Write a text, wrapped, on shades; without colours the largest shares stand in brackets."""
    line = Text()
    for token in drawn_tokens(block):
        words = token.text if colour or not token.top else f"{token.text} ({token.share})"
        if line.cell_len and line.cell_len + 1 + cell_len(words) > width:
            yield line
            line = Text()
        line.append(" " if line.cell_len else "")
        line.append(words, _style(token) if colour else Style(bold=token.top))
    yield line


def _style(token: Token) -> Style:
    if token.shade < 0.1:
        return Style(bold=token.top)
    red, green, blue = (round(channel * (0.25 + 0.75 * token.shade)) for channel in HEAT)
    ink = contrast((red, green, blue))
    return Style(color=ink, bgcolor=f"rgb({red},{green},{blue})", bold=token.top)
