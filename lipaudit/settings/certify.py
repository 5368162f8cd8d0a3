"""The measure `certify`: its options and its tables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from lipaudit.attacks.kinds import attack_kinds
from lipaudit.attacks.plan import Trial, read_plan, require_suitable
from lipaudit.errors import UsageError
from lipaudit.settings.attack import AttackOptions
from lipaudit.settings.measure import MeasureOptions, MeasureRecord
from lipaudit.settings.option import Need, option
from lipaudit.settings.parsing import Balls, Radii
from lipaudit.tables.columns import Column, count_column, text_column
from lipaudit.tables.common import ACCURACY, CERTIFIED, CERTIFIED_SHARE, OUTCOMES, wilson_limit
from lipaudit.tables.report import Layout
from lipaudit.tables.trials import COUNTED, Norm, Radius, parse_radius
from lipaudit.theory.policy import NODES

BallNorm = Literal["linf", "l2"]


SOME = parse_radius("1/255")
"""Placeholder radius for planning attacks before the radius search."""


class CertifyOptions(MeasureOptions):
    """What no attack can break: certified accuracy beside accuracy under attack.

    An attack runs first and breaks what it can. For the other samples lipaudit tries to prove that
    every input in the ball keeps the class. The true robust accuracy is between certified
    accuracy and accuracy under attack. Balls are of pixels in [0, 1], or of token embeddings.

    [dim]Examples:[/]
      [cyan]lipaudit certify demo --eps 0.005[/]
      [cyan]lipaudit certify demo --radius -n 4[/]
      [cyan]lipaudit certify py:model.py:load --data val/ --eps 1/255,2/255 --seconds 20[/]
      [cyan]lipaudit certify ./my-bert --data reviews.csv --eps 0.01 --norm l2[/]
    """

    samples: ClassVar[int] = 8
    scores = "always"

    eps: Balls = option((), "Radii for pixels in [0, 1] or token embeddings: 1/255 or 1/255,0.01.")
    norm: BallNorm | None = option(None, "linf (default for images) or l2 (default for text).")
    radius: bool = option(False, "Also search for the largest certified radius of every sample.")
    tol: float = option(
        0.1,
        "Relative accuracy of the radius search.",
        need=Need("--radius", lambda options: options.radius),
        gt=0,
        lt=1,
    )
    order: Literal["auto", "1", "2"] = option(
        "auto",
        "Proof method: 1 (affine, fast), 2 (quadratic, tighter and slower), or auto "
        "(2 if the input is small).",
    )
    attack: str = option(
        "pgd",
        "Attacks to run before the proof: fgsm, pgd, autoattack (comma-separated), quick, or "
        "custom:...",
        values=AttackOptions.options()["attack"].values,
    )
    nodes: int | None = option(
        None,
        "Largest number of parts into which branch and bound may split a ball.",
        ge=1,
        usual=f"{NODES}, no limit with --seconds",
    )
    seconds: float | None = option(
        None, "Time limit per sample. Results then depend on the machine.", gt=0
    )
    usual_eps: Radii = Field((), exclude=True)
    """Default radii of images."""

    @model_validator(mode="after")
    def _possible(self) -> CertifyOptions:
        self.trials(self.eps or (SOME,))
        return self

    def suited(self, kind: str, changes: Sequence[Norm] = COUNTED, why: str = "") -> Self:
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
        require_suitable(filled.trials(eps or (SOME,)), kind, changes, why)
        return filled

    @property
    def most_nodes(self) -> int | None:
        """Return the largest number of parts of a ball; None if --seconds is the only limit."""
        return NODES if self.nodes is None and self.seconds is None else self.nodes

    def outline(self, samples: int) -> str:
        """Note the limits of the search before it begins."""
        return f"{samples} samples; limits of a proof: {self.limits}"

    @property
    def limits(self) -> str:
        """Return the limits of a proof, and whether they come from the user or a default."""
        most, seconds = self.most_nodes, self.seconds
        time = "no time limit (default)" if seconds is None else f"{seconds:g} s (--seconds)"
        if most is None:
            return f"{time}, no limit on parts of a ball (default with --seconds)"
        by = "default" if self.nodes is None else "--nodes"
        return f"{time}, {most:,} parts of a ball ({by})"

    def trials(self, radii: Sequence[Radius]) -> tuple[Trial, ...]:
        """Return the attacks on these balls, the smallest ball first.

        Raises:
            UsageError: an attack is unknown, or does not work on balls.
        """
        named = self.attack.removeprefix("custom:").split(",")
        for kind in (attack_kinds().get(name.strip()) for name in named):
            if kind is not None and kind.counts:
                raise UsageError(
                    f"--attack {self.attack}: certificates hold for balls, not for changed "
                    f"{kind.counts}",
                    "Use --attack pgd.",
                )
        planned = read_plan(self.attack, norm=self.norm, radii=radii)
        return tuple(sorted(planned, key=lambda trial: trial.radius.value))


_proven_column = partial(Column, better="higher", domain="ball", status="certified")
_found_column = partial(Column, better="higher", domain="ball", status="empirical")
SECONDS = Column("seconds", "Wall time of the proofs.", format=".1f", unit="s", domain="")

CERTIFY_TABLE = Layout(
    name="certify",
    title="Certificates",
    sample_columns={
        **OUTCOMES,
        "verdict": Column(
            "verdict", "Verdict: wrong, broken, certified or undecided.", domain="ball", format="s"
        ),
        "why": Column("why undecided", "Reason why a sample is undecided.", domain="", format="s"),
        "certified": _proven_column(
            "certified",
            "Whether it is proven that no input in the ball changes the class.",
            format="d",
            reading=CERTIFIED,
        ),
        "radius": _proven_column(
            "certified radius",
            "Largest certified radius of the sample.",
            reading="Every input closer than this is proven to have the same class. Larger "
            "balls may be safe too, but that is not proven.",
        ),
        "radius_adversarial": _found_column(
            "adversarial radius",
            "Distance of the nearest adversarial example that attacks found.",
            reading="The nearest adversarial example is at most this far away. Empty if the "
            "attacks found none.",
        ),
    },
    fixed={
        "norm": text_column("norm", "Norm of the ball.", needed=True),
        "eps": Column(
            "eps",
            "Radius, for pixels in [0, 1] or token embeddings.",
            format=".4g",
            domain="",
            needed=True,
        ),
        **ACCURACY,
        "certified": CERTIFIED_SHARE,
        "certified_low": wilson_limit("low"),
        "certified_high": wilson_limit("high"),
        "undecided": count_column("undecided", "Samples neither broken nor certified."),
        "order": count_column(
            "order", "Proof method: 1 is affine, 2 quadratic (tighter and slower).", default=1
        ),
        "nodes": Column(
            "nodes", "Number of parts of balls that branch and bound examined.", format="d"
        ),
        "seconds": SECONDS,
    },
)


RADII_TABLE = Layout(
    name="certify.radius",
    title="Certified radii",
    fixed={
        "norm": text_column("norm", "Norm of the ball.", needed=True),
        "samples": count_column("samples", "Number of correctly classified samples."),
        "radius": _proven_column("certified", "Median certified radius."),
        "radius_adversarial": _found_column(
            "adversarial", "Median distance to the nearest adversarial example found."
        ),
        "ratio": _found_column(
            "ratio",
            "Median over the samples of certified radius / adversarial radius.",
            reading="Proven share of the way to the nearest adversarial example found. At 1 the "
            "radius is known exactly; below 1, the proof or the attack could be stronger.",
        ),
        "smallest": Column(
            "smallest", "Smallest certified radius.", status="certified", domain="ball"
        ),
        "largest": Column(
            "largest", "Largest certified radius.", status="certified", domain="ball"
        ),
        "passes": Column("passes", "Number of radii that were tried.", format="d"),
        "seconds": SECONDS,
    },
)


CERTIFY = MeasureRecord(
    name="certify", tables=(CERTIFY_TABLE, RADII_TABLE), options=CertifyOptions
)
