"""The inputs and outputs of a Jacobian by name, free of torch: command lines read them."""

from __future__ import annotations

import re
from typing import NamedTuple

ENDS = ("logits", "probabilities", "loss", "hidden", "features", "tokens")
PLACED = ("logits", "probabilities", "hidden")
"""Outputs that take a position in a text."""
POSITION = re.compile(r"last|-?\d{1,9}")
STARTS = ("pixels", "embeddings", "layers", "layer:")
"""Inputs of a Jacobian; `layer:` takes an attention layer, `layers` are all of them."""
LAYER = re.compile(r"layer:([0-9]{1,9})")


def parse_start(text: str) -> str:
    """Read `pixels`, `embeddings`, `layers` or `layer:5`; return it in the typed form.

    Raises:
        ValueError: the text is none of these.
    """
    layer = find_layer(text)
    if layer is None and text not in STARTS[:-1]:
        raise ValueError("it must be pixels, embeddings, layers or one layer: layer:5")
    return text if layer is None else f"layer:{layer}"


def find_layer(start: str | None) -> int | None:
    """Return the layer of `layer:5`, None of other inputs.

    >>> find_layer("layer:5")
    5
    """
    found = LAYER.fullmatch(start or "")
    return int(found[1]) if found else None


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
