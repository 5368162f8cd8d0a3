"""The declaration of a measure: shared options, and its record."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from lipaudit.errors import UsageError
from lipaudit.settings.option import Settings, option
from lipaudit.settings.parsing import Layers
from lipaudit.tables.report import Layout
from lipaudit.tables.trials import COUNTED, Norm
from lipaudit.theory.policy import TOL
from lipaudit.theory.policy import WITHIN as PROVEN_WITHIN


class MeasureOptions(Settings):
    """Options of a measure; they become the section's `settings`.

    The docstring of a subclass is the help of its command.

    Attributes:
        seed: of everything random.
        layers: which attention layers; None is all.
    """

    samples: ClassVar[int] = 8
    """Default number of samples."""
    once: ClassVar[Mapping[str, Any]] = {}
    """Values of newer options for older reports that do not have them."""
    labelled: ClassVar[bool] = False
    """Whether the measure needs labels."""
    reads_heads: ClassVar[bool] = False
    """Whether the measure needs attention heads."""
    scores: ClassVar[Literal["never", "asked", "always"]] = "never"
    """When it has a language model score continuations: it may read texts alone, do so where
    --score is given, or have no other way to measure one."""

    seed: int = 0
    layers: Layers = None

    @property
    def tokens(self) -> int | None:
        """Return the number of tokens that texts need, if the measure needs long ones."""
        return None

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the files that the measure writes in addition to the report."""
        return ()

    def suited(self, kind: str, changes: Sequence[Norm] = COUNTED, why: str = "") -> Self:
        """Return the options for a kind of model: image, tokens or text.

        Args:
            kind: kind of the model.
            changes: the units of its texts that can be changed: words, characters.
            why: why other units cannot be changed.

        Raises:
            UsageError: the options do not suit such a model.
        """
        return self

    def unkept(self) -> dict[str, Any]:
        """Return the options that can be typed but are not settings of the report."""
        return {n: getattr(self, n) for n in self.options() if n not in self.model_dump()}

    def outline(self, samples: int) -> str:
        """Describe before the run what will be measured, if that is not obvious."""
        return ""

    def shorten(self, layers: Mapping[int, bool]) -> Self | None:
        """Return options with the same memory and a small part of the time; None if impossible.

        Args:
            layers: the layers to measure, each with whether it has a closed form.
        """
        return None

    def draw_steepest(self, heads: Sequence[str], *, some: bool) -> Self:
        """Return options that draw the maps of the heads with the largest norms.

        Args:
            heads: as LAYER.HEAD, the largest norm first.
            some: whether only a part of the samples is measured; another head may then be the
                first.
        """
        return self


class NormOptions(MeasureOptions):
    """Options of a measure that takes norms by Lanczos steps.

    Attributes:
        tol: relative accuracy of the norms, estimated.
        max_steps: most Lanczos steps per norm.
        within: proven relative error: how far the probabilistic limit may be above a norm.
    """

    tol: float = option(
        TOL, "Relative accuracy at which the iteration stops (estimated, not proven).", gt=0, lt=1
    )
    max_steps: int = 300
    within: float = option(
        PROVEN_WITHIN,
        "Proven relative accuracy of the norms (probability 99.9 %).",
        gt=0,
        allow_inf_nan=False,
    )

    @property
    def accuracy(self) -> dict[str, Any]:
        """Return the accuracy for the solver."""
        return {"tol": self.tol, "max_steps": self.max_steps, "within": self.within}


def keep_ends(layers: Iterable[int]) -> tuple[int, ...]:
    """Return the first and the last layer: layers between them need no more memory.

    >>> keep_ends([3, 4, 7]), keep_ends([])
    ((3, 7), ())
    """
    known = sorted(layers)
    return tuple(dict.fromkeys([*known[:1], *known[-1:]]))


@dataclass(frozen=True, kw_only=True)
class MeasureRecord:
    """A measure, as the command line, the gate and the report know it.

    Attributes:
        name: name of its command and its section.
        tables: layouts of its sections: first the section NAME, then those called NAME.SOMETHING.
        options: class of its options; the docstring is the help of its command.
        runs: for plug-ins, "module:name" of the `lipaudit.measures.Measure`, imported when a run
            begins; ours are in `lipaudit.measures.MEASURES`.
    """

    name: str
    tables: tuple[Layout, ...]
    options: type[MeasureOptions]
    runs: str = ""

    def load(self) -> Any:
        """Return the object named by `runs`.

        Raises:
            UsageError: the object does not exist, or its module cannot be imported.
        """
        try:
            return pkgutil.resolve_name(self.runs)
        except Exception as error:  # the module of a plug-in may raise anything
            reason = f"{type(error).__name__}: {error}"
            raise UsageError(
                f"the measure {self.name}: {self.runs} cannot be loaded: {reason}",
                "Update or uninstall the package that brings it.",
            ) from error
