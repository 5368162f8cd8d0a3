"""The command `explain`: what a number means, where it holds, and what it does not mean."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from lipaudit.cli.app import command
from lipaudit.cli.tools import LEARN
from lipaudit.errors import UsageError

if TYPE_CHECKING:
    from lipaudit.results import Column
    from lipaudit.theory.bounds.catalogue import Bound

READING = {
    "exact": "The largest factor by which an infinitesimal change of the layer's input can be "
    "magnified in the head's output, at each sample. A large change may be magnified more. "
    "It is met from below: see within.",
    "norm": "The largest factor by which an infinitesimal change of the input can be magnified in "
    "the output, at each sample. It says nothing of how far away the nearest adversarial example "
    "is: see radius_first_order for a hint and `lipaudit attack` for a trial. It is met from "
    "below: see within.",
    "within": "Norms are lower estimates. The iteration stops where it estimates the error at "
    "most tol; that is no proof, and falls short where singular values crowd below the first. "
    "What is proven, for each sample with probability 0.999 over the random start vector and "
    "whatever the model: the truth is at most this share higher. Ask for less with --within; as "
    "small as tol it costs 1.4 to 2.4 times as much. 0: nothing random is left out.",
    "forward_error": "The model computes queries and keys with a relative error of its precision; "
    "where logits are in the thousands, single precision cannot tell the attention map. This is "
    "an estimate of how far ||J|| moves by it, largest over the samples. All figures of the head "
    "are right for the rounded pass; --dtype float64 gives those of the model on paper.",
    "converged": "The stop rule was met: the error is estimated at most tol (no proof), and "
    "within is at most what --within asks for (proven). Otherwise the norm is a lower estimate of "
    "unknown quality: see upper.",
    "upper": "With probability 1 - eta over the random start vector the norm is not above it. Not "
    "a proof: the proven upper bounds are those of `lipaudit bounds`.",
    "bounds.input": "one input: X, which queries, keys and values all read. queries apart: the "
    "input of the queries and that of the keys and values, varied independently; where one is "
    "made from the other, or both from one tensor (spatial reduction, class attention), they "
    "cannot move so, and the norm in what the module takes is another one, larger or smaller. "
    "keys and values: their input, the queries being constant. module input: all that the "
    "innermost module around the layer takes; norms are numerical there. `lipaudit bounds "
    "--input module` takes every norm so.",
    "g1": "Between 0 (one-hot, or spread over very many keys) and 1/2 (two keys share the row). "
    "The Jacobian of the softmax has norm at most g1, and nearly that.",
    "intermediate": "Rows that are neither near uniform nor near one-hot: small changes of the "
    "logits move much attention. A high share is what JaSMin training lowers; by itself it is no "
    "vulnerability.",
    "gk_ratio": "How much of g1 is left when the k largest keys have equal weights; what JaSMin "
    "with k > 1 pushes towards 1.",
    "support": "Over how many keys the row would spread if all had the same weight.",
    "sink_max": "Attention mass that all queries together put on one key. Sinks are normal in "
    "language models; a change of the sink token reaches every other one.",
    "splitting_gain": "Attacks that may insert copies of tokens can gain this factor on the head; "
    "1 means that duplicating tokens does not help them.",
    "robust": "An upper limit of the true robust accuracy: a stronger attack may break more. "
    "Compare only figures of the same attack, radius and samples.",
    "radius_first_order": "Distance to the nearest class if the model were linear. An attack may "
    "succeed within it, or fail beyond it.",
    "complete": "Classes are looked at by their margin, until the limit of the Jacobian norm "
    "shows that none of the others can be nearer (probability 0.999, as `upper`) or --rivals are "
    "done. If not complete, the radius given is the limit below which none of the others can lie.",
    "margin": "By how much the true class leads. Null for a misclassified sample's radius.",
    "exponent": "How fast the norm grows with the number of tokens: 0.5 is the worst that theory "
    "allows for long sequences in a fixed ball, 0 is no growth. A fit over the lengths measured.",
    "n_max": "Up to about this many tokens the worst case grows like sqrt n; beyond, it falls.",
}
"""How to read the figures that are easily misread."""


@command("explain", panel=LEARN)
def explain(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="For example bounds, bounds.sharp, g1.")
    ],
) -> None:
    """What a number means, where it holds, and what it does not mean.

    NAME is a bound, a column, a section, or SECTION.COLUMN.

    [dim]Examples:[/]
      [cyan]lipaudit explain sharp[/]
      [cyan]lipaudit explain jacobian.norm[/]
    """
    from lipaudit.theory.bounds.catalogue import SYMBOLS

    columns = _columns()
    found = [key for key in columns if name in (key, key.rpartition(".")[2])]
    found = found or [key for key in columns if key.rpartition(".")[0] == name]
    if not found:
        names = sorted({key.rpartition(".")[2] for key in columns} | set(columns))
        near = difflib.get_close_matches(name, names, 3)
        advice = f"Did you mean {' or '.join(near)}?" if near else "Try: lipaudit explain bounds"
        raise UsageError(f"nothing is called {name!r}", advice)
    typer.echo("\n\n".join("\n".join(_entry(key, columns[key])) for key in found))
    if any(_bound(key) for key in found):
        typer.echo("\n" + "\n".join(textwrap.wrap(SYMBOLS, 80)))


def _columns() -> dict[str, Column]:
    """Return every column, by row and by sample, as `section.column`."""
    from lipaudit.results import ROWS, SAMPLES

    kinds = {section: row.columns() for section, row in ROWS.items()}
    both = [*kinds.items(), *SAMPLES.items()]
    return {f"{section}.{name}": c for section, columns in both for name, c in columns.items()}


def _entry(key: str, column: Column) -> Iterator[str]:
    from lipaudit.report.cells import STATUS, UNMEASURED

    name = key.rpartition(".")[2]
    yield f"{key}: {column.meaning}"
    if bound := _bound(key):
        yield from _indented(f"{bound.formula} ({bound.source})")
        yield from _indented(f"{bound.meaning[0].upper()}{bound.meaning[1:]}.")
        if bound.null:
            yield from _indented(f"Not given everywhere: it {bound.null}.")
    if reading := READING.get(key) or (column.format != "s" and READING.get(name)):
        yield from _indented(reading)
    if column.domain and column.format not in UNMEASURED:
        where = "" if column.domain == "at X" else f": {column.domain}"
        yield from _indented(f"{column.status.capitalize()}: {STATUS[column.status]}{where}.")
    if column.better:
        yield f"  {column.better.capitalize()} is better."


def _bound(key: str) -> Bound | None:
    from lipaudit.theory.bounds.catalogue import BOUNDS

    section, _, name = key.rpartition(".")
    return BOUNDS.get(name.removeprefix("bound_")) if section in ("bounds", "scaling") else None


def _indented(text: str) -> list[str]:
    return textwrap.wrap(text, 80, initial_indent="  ", subsequent_indent="  ")
