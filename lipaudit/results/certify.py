"""The rows of `certify`: what no attack can break, beside what attacks break."""

from __future__ import annotations

from typing import ClassVar

from lipaudit.results import readings
from lipaudit.results.columns import Float, Row, column, wilson_limit
from lipaudit.results.trials import TrialKey, parse_radius


class CertifyRow(Row):
    """One ball around every sample: certified accuracy beside accuracy under attack."""

    section: ClassVar[str] = "certify"
    title: ClassVar[str] = "Certificates"
    norm: str = column("norm", "Of the ball.", ..., format="s")
    eps: Float = column(
        "eps", "Radius, of pixels in [0, 1] or of token embeddings.", ..., format=".4g", domain=""
    )
    eps_text: str = column("eps", "The radius as it was typed.", "", format="s")
    samples: int = column("samples", "Number of samples.", 0, format="d")
    clean: Float | None = column(
        "clean", "Accuracy without attack.", format=".1%", better="higher", status="empirical"
    )
    robust: Float | None = column(
        "robust",
        "Accuracy under attack.",
        format=".1%",
        better="higher",
        status="empirical",
        domain="ball",
        reading=readings.ROBUST,
    )
    robust_low: Float | None = wilson_limit("low")
    robust_high: Float | None = wilson_limit("high")
    certified: Float | None = column(
        "certified",
        "Share of samples that are classified rightly on their whole ball, proven.",
        format=".1%",
        better="higher",
        status="certified",
        domain="ball",
        reading=readings.CERTIFIED,
    )
    certified_low: Float | None = wilson_limit("low")
    certified_high: Float | None = wilson_limit("high")
    undecided: int = column("undecided", "Samples neither broken nor certified.", 0, format="d")
    order: int = column(
        "order", "1: affine in the input, 2: quadratic, tighter and dearer.", 1, format="d"
    )
    nodes: int | None = column("nodes", "Parts that branch and bound looked at.", format="d")
    seconds: Float | None = column(
        "seconds", "Wall time of certificates.", format=".1f", unit="s", domain=""
    )

    @property
    def key(self) -> TrialKey:
        """Its ball."""
        return TrialKey("", self.norm, parse_radius(self.eps_text or f"{self.eps:.4g}"))


class CertifyRadiusRow(Row):
    """The largest certified radius of the samples, beside the smallest adversarial one found."""

    section: ClassVar[str] = "certify.radius"
    title: ClassVar[str] = "Certified radii"
    norm: str = column("norm", "Of the ball.", ..., format="s")
    samples: int = column("samples", "Samples that are classified rightly.", 0, format="d")
    radius: Float | None = column(
        "certified", "Median certified radius.", better="higher", status="certified", domain="ball"
    )
    radius_adversarial: Float | None = column(
        "adversarial",
        "Median of the smallest adversarial radii found.",
        better="higher",
        status="empirical",
        domain="ball",
    )
    ratio: Float | None = column(
        "ratio",
        "Median of certified over adversarial radius, sample by sample.",
        better="higher",
        status="empirical",
        domain="ball",
        reading="How much of the way to the nearest adversarial example that was found is proven "
        "to be free of any. 1 would leave nothing open; what is open may be the proof's weakness "
        "or the attack's.",
    )
    smallest: Float | None = column(
        "smallest", "Smallest certified radius.", status="certified", domain="ball"
    )
    largest: Float | None = column(
        "largest", "Largest certified radius.", status="certified", domain="ball"
    )
    passes: int | None = column("passes", "Balls that were tried.", format="d")
    seconds: Float | None = column(
        "seconds", "Wall time of certificates.", format=".1f", unit="s", domain=""
    )
