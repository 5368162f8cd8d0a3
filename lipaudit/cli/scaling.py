"""The command `scaling`: norms over the sequence length and the radius."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from lipaudit.cli.app import command
from lipaudit.cli.measure import MEASURE, Layers, options_of, run_measures
from lipaudit.cli.options import Common, ModelSpec

if TYPE_CHECKING:
    from lipaudit.measures.scaling import ScalingOptions


@command("scaling", panel=MEASURE)
def scaling(
    model: ModelSpec,
    common: Common,
    lengths: Annotated[str, typer.Option(help="Tokens, FIRST:LAST:logCOUNT.")] = "8:256:log8",
    mode: Annotated[
        str, typer.Option(help="real, adversarial, radius, ascent, split (comma-separated).")
    ] = "real,adversarial,radius,ascent,split",
    layers: Layers = None,
    heads: Annotated[
        str | None,
        typer.Option(help="Also these heads: 0.8,5.11 or all. Default: the strongest per layer."),
    ] = None,
    radius: Annotated[
        float | None, typer.Option(help="Worst case at this radius beside the layer's own.")
    ] = None,
    mask: Annotated[
        str, typer.Option(help="Mask of the worst case: own, none, causal or both.")
    ] = "own",
    tol: Annotated[float, typer.Option(help="Estimated relative accuracy of the norms.")] = 1e-4,
) -> None:
    """How the norms of attention layers and of the model grow with the number of tokens.

    [dim]Modes:[/]
      real         your samples at growing lengths: text cut, images resized
      adversarial  worst-case tokens: the norm grows like sqrt n up to n_max
      radius       the same tokens at growing radius
      ascent       gradient ascent on the norm, within the radius
      split        every token duplicated, and attacks that do so first

    [dim]Examples:[/]
      [cyan]lipaudit scaling demo[/]
      [cyan]lipaudit scaling ./my-bert --data book.txt --lengths 8:512:log7 -n 8[/]
      [cyan]lipaudit scaling ./my-bert --mode adversarial --heads 0.8,5.11[/]
      [cyan]lipaudit scaling timm:NAME --model-kwargs dynamic_img_size=true[/]
    """
    from lipaudit.measures import parse_layers
    from lipaudit.measures.lengths import parse_lengths
    from lipaudit.measures.scaling import ScalingOptions

    given: dict[str, object] = {"lengths": parse_lengths(lengths), "layers": parse_layers(layers)}
    given |= {"modes": tuple(mode.split(",")), "heads": heads and tuple(heads.split(","))}
    given |= {"radius": radius, "mask": mask, "tol": tol}
    options = options_of(ScalingOptions, common, given)
    _announce(model, common, options)
    longest = max(options.lengths) if "real" in options.modes else None
    run_measures(model, replace(common, max_tokens=common.max_tokens or longest), scaling=options)


def _announce(model: str, common: Common, options: ScalingOptions) -> None:
    from lipaudit.measures import MEASURES

    if common.quiet:
        return
    count = common.samples or MEASURES["scaling"].samples
    heads = "the strongest head of each layer" if options.heads is None else "the heads given"
    on_data = {"real", "split"} & set(options.modes)
    worst = set(options.modes) - {"real"}
    parts = [
        f"{count} samples at {len(options.lengths)} lengths" if on_data else "",
        f"{', '.join(m for m in options.modes if m in worst)} of {heads}" if worst else "",
    ]
    takes = "under a minute" if model.startswith("demo") else "minutes"
    told = f"scaling of {model}: {'; '.join(filter(None, parts))}; {takes}"
    typer.echo(told, err=True)
