"""Tables of `certify`: their columns, and the headlines that are read from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from lipaudit.measures.attack import eps_column, seconds_column
from lipaudit.tables import Column, Display, Layout, Report, Row, Section
from lipaudit.tables.columns import (
    ACCURACY,
    CERTIFIED,
    CERTIFIED_SHARE,
    OUTCOMES,
    finite,
    limit_columns,
    median_limits,
)
from lipaudit.tables.formats import format_count, format_value
from lipaudit.tables.summary import (
    CLEAN_OF_BALLS,
    Headline,
    declare_clean,
    describe_survivors,
    read_row,
)

# A lower limit of the truth, and an upper one.
_proven_column = partial(Column, better="higher", domain="ball", status="certified")
_found_column = partial(Column, better="higher", domain="ball", status="empirical")
NORM = Column.text("norm", "Norm of the ball.", needed=True)
# Differs from machine to machine, so no gate reads it.
SECONDS = seconds_column("Wall time of the proofs.")


def read_attacked(headline: Headline, section: Section, report: Report) -> Iterator[Row]:
    """Yield the robust accuracy of every ball: the share of samples that no attack broke.

    These attacks run before the proofs of `lipaudit certify`; `lipaudit attack` may run others.
    """
    attacks = str(section.settings.get("attack")).split(",")
    for row in section.rows:
        for figure in read_row(headline, section, row):
            yield describe_survivors(figure, attacks, report)


def read_certified(headline: Headline, section: Section, report: Report) -> Iterator[Row]:
    """Yield the certified accuracy of every ball, with the number of undecided samples as text."""
    for row in section.rows:
        count = (row.certified or 0) * row.samples
        text = f"{count:.0f} of {row.samples} samples"
        if row.undecided:
            text += f", {row.undecided} undecided"
        yield from read_row(headline, section, row, text)


CERTIFY_TABLE = Layout(
    name="certify",
    title="What is proven?",
    headlines=(
        declare_clean(12),
        CLEAN_OF_BALLS,
        Headline(
            name="attacked_accuracy",
            column="robust",
            label="robust accuracy",
            place=21,
            read=read_attacked,
            ranks=True,
        ),
        Headline(
            name="certified_accuracy",
            column="certified",
            label="certified accuracy",
            meaning="Share of the samples proven correct for every input of the ball, in exact "
            "arithmetic (rounding of a float32 run is not covered).",
            place=30,
            read=read_certified,
            sentence="{value:.1%} are certified at {ball} ({text}).",
            rule="certify.certified >= -2pp",
            ranks=True,
        ),
    ),
    display=Display(
        about="The true robust accuracy of these samples is between the certified share (proven) "
        "and the robust share (not broken by the attacks). eps is the radius in this norm: in "
        "units of the pixel range 0 to 1, of embeddings, or a number of changes. If all samples "
        "are certified, try a larger --eps.",
        columns=(
            *("norm", "eps_text", "clean", "certified", "robust", "undecided", "places"),
            "samples",
        ),
        worst=("radius",),
        folded=False,
    ),
    sample_columns={
        **OUTCOMES,
        "verdict": Column(
            "verdict", "Verdict: wrong, broken, certified or undecided.", domain="ball", format="s"
        ),
        "why": Column("why undecided", "Reason why a sample is undecided.", domain="", format="s"),
        "places": _proven_column(
            "places proven",
            "Share of the places of a patch (of the choices of several) that are proven.",
            format=".1%",
        ),
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
        "norm": NORM,
        "eps": eps_column("Radius, for pixels in [0, 1] or token embeddings."),
        **ACCURACY,
        "certified": CERTIFIED_SHARE,
        **limit_columns("certified"),
        "undecided": Column.count("undecided", "Samples neither broken nor certified."),
        "places": _proven_column(
            "places",
            "Share of the places of a patch that are proven, of samples that are not broken.",
            format=".1%",
        ),
        "order": Column.count(
            "order", "Proof method: 1 is affine, 2 quadratic (tighter and slower).", default=1
        ),
        "nodes": Column(
            "nodes", "Number of parts of balls that branch and bound examined.", format="d"
        ),
        "seconds": SECONDS,
    },
)


def read_radius(headline: Headline, section: Section, report: Report) -> Iterator[Row]:
    """Yield the median certified radius with its confidence limits.

    The text has the number of samples, and the median adversarial radius if attacks found any.
    """
    # The median is not finite if no sample was classified correctly.
    if not section.rows or not finite([section.rows[0].radius]):
        return
    row = section.rows[0]
    text = f"median of {format_count(row.samples)}"
    if row.radius_adversarial is not None:
        nearest = format_value(row.radius_adversarial, section.columns["radius"])
        text += f", nearest adversarial {nearest}"
    radii: Sequence[Any] = ()
    balls = report.section("certify")
    if balls:
        radii = balls.samples.get("radius", ())
    yield headline.row(
        section,
        value=row.radius,
        limits=median_limits(radii),
        text=text,
        samples=row.samples,
        norm=row.norm,
        figure=f"{headline.label}, {row.norm}",
    )


RADII_TABLE = Layout(
    name="certify.radius",
    title="How far around a sample is its class proven?",
    headlines=(
        Headline(
            name="certified_radius",
            column="radius",
            label="certified radius",
            meaning="Median radius in which the class is proven not to change.",
            place=40,
            read=read_radius,
        ),
    ),
    display=Display(
        about="Certified radius: no input nearer to the sample changes its class. Adversarial "
        "radius: an attack found a misclassified input at this distance."
    ),
    fixed={
        "norm": NORM,
        "samples": Column.count("samples", "Number of correctly classified samples."),
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
        "smallest": _proven_column("smallest", "Smallest certified radius.", better=None),
        "largest": _proven_column("largest", "Largest certified radius.", better=None),
        "passes": Column("passes", "Number of radii that were tried.", format="d"),
        "seconds": SECONDS,
    },
)
