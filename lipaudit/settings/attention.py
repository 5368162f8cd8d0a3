"""Options of `lipaudit attention`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator

from lipaudit.settings.measure import MeasureOptions
from lipaudit.settings.option import needs, option
from lipaudit.settings.parsing import Layers, read_head


class AttentionOptions(MeasureOptions):
    """How each head distributes its attention, and which heads are in the fragile regime.

    A row is intermediate (fragile) when g1 = p(1) (1 - p(1) + p(2)) exceeds gamma.

    [dim]Examples:[/]
      [cyan]lipaudit attention demo[/]
      [cyan]lipaudit attention demo --map 1.3 -o map.png[/]
      [cyan]lipaudit attention ./my-bert --data reviews.csv --map 3.1 --query 0[/]
    """

    samples: ClassVar[int] = 32

    layers: Layers = option(None, "Only these attention layers, e.g. 0,5-7.")
    gamma: float = option(0.1, "Rows with g1 above it are intermediate.", gt=0, lt=0.25)
    k: int = option(10, "The k of g1/gk.", gt=1)
    p_norm_tokens: int = option(2048, "Leave ||P|| out above this many tokens.", ge=0)
    # Neither of the two is a setting of the report: they change no number.
    map: str | None = option(
        None, "Draw the map of LAYER.HEAD on the first sample; -o map.png too.", exclude=True
    )
    query: int | None = option(
        None,
        "With --map: draw this row of it, the mean over the samples.",
        exclude=True,
        need=needs("map"),
        ge=0,
    )

    candidates: tuple[str, ...] = Field((), exclude=True)
    """Heads whose maps are kept while it is not known yet which is drawn."""

    @field_validator("map")
    @classmethod
    def _named(cls, text: str | None) -> str | None:
        return None if text is None else "{}.{}".format(*read_head(text))

    @property
    def draws(self) -> bool:
        """Whether there will be an attention map, which is what a PNG shows."""
        return self.map is not None
