"""The commands that measure a model: one sub-command per measure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lipaudit.cli.app import command
from lipaudit.cli.options import Common, ModelSpec

if TYPE_CHECKING:
    from lipaudit.measures import Options

MEASURE = "Measure a checkpoint"
Layers = Annotated[
    str | None, typer.Option("--layers", help="Only these attention layers, e.g. 0,5-7.")
]


@command("bounds", panel=MEASURE)
def bounds(
    model: ModelSpec,
    common: Common,
    layers: Layers = None,
    tol: Annotated[float, typer.Option(help="Relative tolerance of the exact norms.")] = 1e-4,
) -> None:
    """Lipschitz bounds of every attention head beside its exact Jacobian norm.

    For each head: the exact norm ||J|| of its Jacobian on each sample, and the upper bounds of
    Hu 2024, Castin 2024, Yudin 2025 and lipaudit's own, far tighter one (sharp).

    [dim]Examples:[/]
      [cyan]lipaudit bounds demo[/]
      [cyan]lipaudit bounds timm:vit_base_patch16_224 --data photos/ --samples 16[/]
      [cyan]lipaudit bounds ./my-bert --data reviews.csv --layers 0,5-7 -o bounds.json[/]
    """
    from lipaudit.measures import parse_layers
    from lipaudit.measures.bounds import BoundsOptions

    options = BoundsOptions(seed=common.seed or 0, layers=parse_layers(layers), tol=tol)
    _run(model, common, bounds=options)


def _run(model: str, common: Common, **measures: Options) -> None:
    from lipaudit.cli.emit import emit
    from lipaudit.cli.run import run

    emit(run(model, common, measures), common)
