"""What all measures take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from lipaudit.results.trials import COUNTED, Norm
from lipaudit.settings.option import Settings
from lipaudit.settings.parsing import Layers


class MeasureOptions(Settings):
    """Options of a measure; they become the section's `settings`.

    The docstring of a subclass is the help of its command.

    Attributes:
        seed: of everything random.
        layers: which attention layers; None is all.
    """

    samples: ClassVar[int] = 8
    """How many samples it takes when nobody says."""
    once: ClassVar[Mapping[str, Any]] = {}
    """What reports that are older than an option, and do not have it, were measured with."""
    labelled: ClassVar[bool] = False
    """Whether it needs labels."""
    scores: ClassVar[Literal["never", "asked", "always"]] = "never"
    """When it has a language model score continuations: it may read texts alone, do so where
    --score is given, or have no other way to measure one."""

    seed: int = 0
    layers: Layers = None

    @property
    def tokens(self) -> int | None:
        """Of how many tokens texts have to be, where the measure needs long ones."""
        return None

    @property
    def draws(self) -> bool:
        """Whether there will be an attention map, which is what a PNG shows."""
        return False

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that the measure writes beside the report."""
        return ()

    def suited(self, kind: str, changes: Sequence[Norm] = COUNTED) -> Self:
        """Return the options for a kind of model: image, tokens or text.

        Args:
            kind: of the model.
            changes: what can be changed of its texts: words, characters.

        Raises:
            UsageError: what they ask for means nothing for such a model.
        """
        return self

    def unkept(self) -> dict[str, Any]:
        """Return the options that can be typed and are no settings of the report."""
        return {n: getattr(self, n) for n in self.options() if n not in self.model_dump()}

    def outline(self, samples: int) -> str:
        """Say before it begins what will be measured, where that is not obvious."""
        return ""
