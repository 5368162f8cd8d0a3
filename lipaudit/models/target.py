"""The outputs of a Jacobian by name, free of torch: command lines read them."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

StartPoint = Literal["pixels", "embeddings"]
ENDS = ("logits", "probabilities", "loss", "hidden", "features", "tokens")
PLACED = ("logits", "probabilities", "hidden")
"""Outputs that take a position in a text."""
POSITION = re.compile(r"last|-?\d{1,9}")


class Target(NamedTuple):
    """Output of the Jacobian.

    Attributes:
        what: one of `ENDS`.
        where: position in a text: last, or an index among the tokens without padding, from 0,
            or from the end if negative; empty: not given.
    """

    what: str
    where: str = ""

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read `loss`, `logits` or `logits:5`.

        Raises:
            ValueError: the text is none of these.
        """
        what, colon, where = text.partition(":")
        placed = what in PLACED and POSITION.fullmatch(where)
        if what not in ENDS or (colon and not placed):
            ends = f"{', '.join(ENDS[:-1])} or {ENDS[-1]}; {', '.join(PLACED)} take a position"
            raise ValueError(f"it must be {ends}: logits:5, logits:-2, logits:last")
        return cls(what, where)

    @property
    def text(self) -> str:
        """Return the target in the typed form."""
        return ":".join(filter(None, self))
