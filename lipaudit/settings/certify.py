"""Options of `lipaudit certify`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from lipaudit.attacks.choice import read_plan, require_suited
from lipaudit.attacks.kinds import attack_kinds
from lipaudit.attacks.plan import Trial
from lipaudit.errors import UsageError
from lipaudit.results.trials import COUNTED, Norm, Radius, parse_radius
from lipaudit.settings.attack import AttackOptions
from lipaudit.settings.measure import MeasureOptions
from lipaudit.settings.option import Need, option
from lipaudit.settings.parsing import Balls, Radii
from lipaudit.theory.accuracy import NODES

BallNorm = Literal["linf", "l2"]
SOME = parse_radius("1/255")
"""A radius to plan attacks with where only a search will say of which."""


class CertifyOptions(MeasureOptions):
    """What no attack can break: certified accuracy beside accuracy under attack.

    An attack runs first and settles what can be broken; of the other samples it is proven, where
    the proof succeeds, that no input of the ball is classified otherwise. The true robust
    accuracy lies between the two. Balls are of pixels in [0, 1], or of token embeddings.

    [dim]Examples:[/]
      [cyan]lipaudit certify demo --eps 0.005[/]
      [cyan]lipaudit certify demo --radius -n 4[/]
      [cyan]lipaudit certify py:model.py:load --data val/ --eps 1/255,2/255 --seconds 20[/]
      [cyan]lipaudit certify ./my-bert --data reviews.csv --eps 0.01 --norm l2[/]
    """

    samples: ClassVar[int] = 8
    scores = "always"

    eps: Balls = option(
        (), "Radii of pixels in [0, 1] or of token embeddings: 1/255 or 1/255,0.01."
    )
    norm: BallNorm | None = option(None, "linf or l2. By default linf; for text l2.")
    radius: bool = option(False, "Also the largest certified radius of every sample.")
    tol: float = option(
        0.1,
        "Relative width at which the search for a radius ends.",
        need=Need("--radius", lambda options: options.radius),
        gt=0,
        lt=1,
    )
    order: Literal["auto", "1", "2"] = option(
        "auto", "1 (affine forms), 2 (quadratic: tighter, dearer), or auto: 2 for few inputs."
    )
    attack: str = option(
        "pgd",
        "What runs first: fgsm, pgd, autoattack (comma-separated), quick, or custom:...",
        values=AttackOptions.options()["attack"].values,
    )
    nodes: int | None = option(
        None,
        "Parts of a ball that branch and bound looks at, at most.",
        ge=1,
        usual=f"{NODES}, without limit beside --seconds",
    )
    seconds: float | None = option(
        None,
        "Time limit of a sample; what it cuts short depends on the machine. By default none.",
        gt=0,
    )
    usual_eps: Radii = Field((), exclude=True)
    """Radii of images where none is given."""

    @model_validator(mode="after")
    def _possible(self) -> CertifyOptions:
        self.trials(self.eps or (SOME,))
        return self

    def suited(self, kind: str, changes: Sequence[Norm] = COUNTED) -> Self:
        """Fill in the norm and the radii that a kind of model usually gets, and check them.

        Raises:
            UsageError: an attack or a norm means nothing for it, or there is no radius.
        """
        norm: BallNorm = self.norm or ("l2" if kind == "text" else "linf")
        eps = self.eps if self.eps or kind == "text" else self.usual_eps
        if not eps and not self.radius:
            raise UsageError(
                "no radius was given", "Add one, as in --eps 1/255, or search for it: --radius."
            )
        filled = self.model_copy(update={"norm": norm, "eps": eps, "nodes": self.most_nodes})
        require_suited(filled.trials(eps or (SOME,)), kind, changes)
        return filled

    @property
    def most_nodes(self) -> int | None:
        """The limit of parts of a ball; None: --seconds, given alone, is the only limit."""
        return NODES if self.nodes is None and self.seconds is None else self.nodes

    def outline(self, samples: int) -> str:
        """Say before it begins which limits hold."""
        nodes, seconds = self.most_nodes, self.seconds
        limits = [
            f"{seconds:g} s a sample" if seconds is not None else "",
            f"{nodes:,} parts of a ball" if nodes is not None else "",
        ]
        return f"{samples} samples; a proof ends after {' or '.join(filter(None, limits))}"

    def trials(self, radii: Sequence[Radius]) -> tuple[Trial, ...]:
        """Return what attacks these balls, the smallest first.

        Raises:
            UsageError: an unknown attack, or one that searches no balls.
        """
        named = self.attack.removeprefix("custom:").split(",")
        for kind in (attack_kinds().get(name.strip()) for name in named):
            if kind is not None and kind.counts:
                raise UsageError(
                    f"--attack {self.attack}: certificates are of balls, not of changed "
                    f"{kind.counts}",
                    "Use --attack pgd.",
                )
        planned = read_plan(self.attack, norm=self.norm, radii=radii)
        return tuple(sorted(planned, key=lambda trial: trial.radius.value))
