"""What every measure declares: options that several of them share, and its record."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from lipaudit.errors import UsageError
from lipaudit.settings.option import Settings, option
from lipaudit.settings.parsing import (
    Layers,
)
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
        """Of how many tokens texts have to be, where the measure needs long ones."""
        return None

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that the measure writes beside the report."""
        return ()

    def suited(self, kind: str, changes: Sequence[Norm] = COUNTED, why: str = "") -> Self:
        """Return the options for a kind of model: image, tokens or text.

        Args:
            kind: of the model.
            changes: what can be changed of its texts: words, characters.
            why: what keeps the rest from being changed.

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

    def shorten(self, layers: Mapping[int, bool]) -> Self | None:
        """Return options that take as much memory in a small part of the time; None: none do.

        Args:
            layers: those that would be measured, each with whether it has a closed form.
        """
        return None

    def draw_steepest(self, heads: Sequence[str], *, some: bool) -> Self:
        """Return options that draw what belongs to the heads with the largest norms.

        Args:
            heads: as LAYER.HEAD, the largest norm first.
            some: whether only some samples are measured, so that another head may be the first.
        """
        return self


class NormOptions(MeasureOptions):
    """Options of a measure that takes norms by Lanczos steps.

    Attributes:
        tol: relative accuracy of the norms, estimated.
        max_steps: most Lanczos steps per norm.
        within: how far the probabilistic limit may lie above a norm: what is proven.
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
        """What the solver is asked for."""
        return {"tol": self.tol, "max_steps": self.max_steps, "within": self.within}


def keep_ends(layers: Iterable[int]) -> tuple[int, ...]:
    """Return the first and the last layer: what lies between takes no more memory.

    >>> keep_ends([3, 4, 7]), keep_ends([])
    ((3, 7), ())
    """
    known = sorted(layers)
    return tuple(dict.fromkeys([*known[:1], *known[-1:]]))


@dataclass(frozen=True, kw_only=True)
class MeasureRecord:
    """A measure, as the command line, the gate and the report know it.

    Attributes:
        name: of its command and of its section.
        tables: the layouts of its sections: of the section of its own name first, then of those
            that are called NAME.SOMETHING.
        options: what it takes; the docstring is the help of its command.
        runs: of a plug-in, "module:name" of its `lipaudit.measures.Measure`, imported when a run
            begins; ours are in `lipaudit.measures.MEASURES`.
    """

    name: str
    tables: tuple[Layout, ...]
    options: type[MeasureOptions]
    runs: str = ""

    def load(self) -> Any:
        """Return what `runs` names.

        Raises:
            UsageError: it is not there, or its module cannot be imported.
        """
        try:
            return pkgutil.resolve_name(self.runs)
        except Exception as error:  # whatever the module of a plug-in raises
            reason = f"{type(error).__name__}: {error}"
            raise UsageError(
                f"the measure {self.name}: {self.runs} cannot be loaded: {reason}",
                "Update or uninstall the package that brings it.",
            ) from error
