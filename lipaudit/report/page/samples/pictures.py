"""What samples look like: their pictures, what attacks made of them, their tokens."""

from __future__ import annotations

from collections.abc import Sequence

from lipaudit.errors import InputError
from lipaudit.report.blocks import Gallery, Item, Passage
from lipaudit.report.cells import significant
from lipaudit.report.page.views.common import CHARACTERS
from lipaudit.results import Column, Report
from lipaudit.results.report import Example
from lipaudit.results.trials import TrialKey

DRAWN = (
    "Pictures of them and of what attacks made of them: in the html format, or of one, "
    "lipaudit inspect REPORT SAMPLE in a terminal with colours or with -o sample.png."
)
SHARES = {
    "margin": Column(
        label="share of the gradient",
        meaning="Of the margin's gradient: ||grad_t m||^2 / sum_s ||grad_s m||^2 over tokens s, "
        "m = f_y - max_(j != y) f_j.",
        format=".1%",
    ),
    "direction": Column(
        label="share of the steepest direction",
        meaning="||v_t||^2 of the unit vector v along which the output changes most.",
        format=".1%",
        status="estimate",
    ),
}
"""What the shade of a token says, by what was differentiated."""


def gallery(report: Report, names: Sequence[str]) -> list[Gallery]:
    """Draw samples that are pictures, what attacks made of them, and the difference."""
    section = report.section("attack")
    drawn = section.examples if section else {}
    items = tuple(_item(report, name, drawn[name]) for name in names if name in drawn)
    said = DRAWN if any(item.pictures for item in items) else ""
    return [Gallery(said, items, folded=len(names) > 1)] if items else []


def passages(report: Report, names: Sequence[str]) -> list[Passage]:
    """Show the tokens of samples, with how the gradient is shared out among them."""
    section = report.section("jacobian")
    kept = section.gradients if section else {}
    return [
        Passage(
            _named(report, name),
            kept[name].tokens,
            kept[name].shares,
            SHARES[kept[name].of],
            kept[name].left_out,
            folded=len(names) > 1,
        )
        for name in names
        if name in kept
    ]


def _named(report: Report, sample: str) -> str:
    """Return the beginning of the id of a sample, and where it is found."""
    return ", ".join(filter(None, (sample[:CHARACTERS], report.found("place").get(sample))))


def _item(report: Report, sample: str, example: Example) -> Item:
    trial = TrialKey.parse(example.trial)
    (true, said), before, after = example.classes, example.before, example.after
    by = "" if trial is None else f" by {trial.attack}, {trial.ball}"
    pictures = (
        ("sample", example.image),
        ("adversarial", example.adversarial),
        (f"difference × {significant(example.times, '.2g')}", example.difference),
    )
    became = [f'the text became "{example.text}"'] if example.text else []
    return Item(
        title=_named(report, sample),
        pictures=tuple(pair for pair in pictures if pair[1]),
        lines=(
            f"true class {true}: score {before[0]:.0%} became {after[0]:.0%}",
            f"taken for {said}: score {before[1]:.0%} became {after[1]:.0%}{by}",
            *became,
        ),
    )


def portrait(report: Report, sample: str) -> Item | Passage:
    """Return what shows a sample: its pictures, or its tokens.

    Raises:
        InputError: the report keeps neither of it.
    """
    shown: list[Item | Passage] = []
    items = (item for block in gallery(report, [sample]) for item in block.items)
    shown += [item for item in items if item.pictures]
    shown += passages(report, [sample])
    if shown:
        return shown[0]
    advice = (
        "A report keeps, of the ten worst samples, pictures of those that an attack broke and the "
        "tokens of texts that jacobian measured: lipaudit inspect REPORT names them."
    )
    raise InputError(f"the report keeps no picture of sample {sample[:CHARACTERS]}", advice)
