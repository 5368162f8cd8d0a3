"""The commands that measure a model: one sub-command per measure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from lipaudit.cli.app import command
from lipaudit.cli.options import Common, ModelSpec
from lipaudit.errors import UsageError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from lipaudit.measures import Options
    from lipaudit.measures.attack import AttackOptions

MEASURE = "Measure a checkpoint"
Within = Annotated[
    float, typer.Option(help="Proven relative accuracy of the norms (probability 0.999).")
]
Layers = Annotated[
    str | None, typer.Option("--layers", help="Only these attention layers, e.g. 0,5-7.")
]


@command("bounds", panel=MEASURE)
def bounds(
    model: ModelSpec,
    common: Common,
    layers: Layers = None,
    tol: Annotated[float, typer.Option(help="Estimated relative accuracy of the norms.")] = 1e-4,
    within: Within = 0.03,
    input: Annotated[
        str,
        typer.Option(help="Norms in what the projections read, or what their module takes."),
    ] = "projections",
) -> None:
    """Lipschitz bounds of every attention head beside its exact Jacobian norm.

    For each head: the exact norm ||J|| of its Jacobian on each sample, and the upper bounds of
    Hu 2024, Castin 2024, Yudin 2025 and lipaudit's own, far tighter one (sharp).

    --input module takes the norms in what the module around each layer takes, where that is
    something else than the projections read: numerically, and without bounds.

    [dim]Examples:[/]
      [cyan]lipaudit bounds demo[/]
      [cyan]lipaudit bounds timm:vit_base_patch16_224 --data photos/ --samples 16[/]
      [cyan]lipaudit bounds ./my-bert --data reviews.csv --layers 0,5-7 -o bounds.json[/]
    """
    from lipaudit.measures import parse_layers
    from lipaudit.measures.bounds import BoundsOptions

    given: dict[str, object] = {"layers": parse_layers(layers), "tol": tol, "within": within}
    given["input"] = input
    run_measures(model, common, bounds=options_of(BoundsOptions, common, given))


@command("attention", panel=MEASURE)
def attention(
    model: ModelSpec,
    common: Common,
    layers: Layers = None,
    gamma: Annotated[float, typer.Option(help="Rows with g1 above it are intermediate.")] = 0.1,
    k: Annotated[int, typer.Option(help="The k of g1/gk.")] = 10,
    p_norm_tokens: Annotated[
        int, typer.Option(help="Leave ||P|| out above this many tokens.")
    ] = 2048,
    map: Annotated[
        str | None,
        typer.Option(help="Draw the map of LAYER.HEAD on the first sample; -o map.png too."),
    ] = None,
    query: Annotated[
        int | None,
        typer.Option(help="With --map: draw this row of it, the mean over the samples."),
    ] = None,
) -> None:
    """How each head distributes its attention, and which heads are in the fragile regime.

    A row is intermediate (fragile) when g1 = p(1) (1 - p(1) + p(2)) exceeds gamma.

    [dim]Examples:[/]
      [cyan]lipaudit attention demo[/]
      [cyan]lipaudit attention demo --map 1.3 -o map.png[/]
      [cyan]lipaudit attention ./my-bert --data reviews.csv --map 3.1 --query 0[/]
    """
    from lipaudit.measures import parse_layers
    from lipaudit.measures.attention import AttentionOptions

    if query is not None and map is None:
        raise UsageError("--query needs --map", "Example: --map 3.1 --query 0")
    given: dict[str, object] = {"layers": parse_layers(layers), "gamma": gamma, "k": k}
    given |= {"p_norm_tokens": p_norm_tokens, "map": map, "query": query}
    run_measures(model, common, attention=options_of(AttentionOptions, common, given))


@command("jacobian", panel=MEASURE)
def jacobian(
    model: ModelSpec,
    common: Common,
    start: Annotated[
        str | None, typer.Option("--from", help="pixels or embeddings; text: embeddings.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--to", help="logits, probabilities, features or tokens.")
    ] = None,
    norm: Annotated[str, typer.Option(help="2 (spectral), or inf (largest L1 row norm).")] = "2",
    tol: Annotated[float, typer.Option(help="Estimated relative accuracy of the norms.")] = 1e-4,
    within: Within = 0.03,
    rivals: Annotated[
        int, typer.Option(help="Most classes to look at for the first-order radius.")
    ] = 16,
    per_layer: Annotated[
        bool, typer.Option("--per-layer", help="Also the norm of every block, input to output.")
    ] = False,
) -> None:
    """The exact norm of the whole model's Jacobian, sample by sample.

    With class scores also, per sample, the margin and the first-order radius: indicative at a
    point, never a certificate.

    [dim]Examples:[/]
      [cyan]lipaudit jacobian demo[/]
      [cyan]lipaudit jacobian demo --per-layer[/]
      [cyan]lipaudit jacobian timm:vit_tiny_patch16_224 --data photos/ --from embeddings[/]
      [cyan]lipaudit jacobian ./my-bert --data reviews.csv --to features[/]
    """
    from lipaudit.measures.jacobian import JacobianOptions

    given: dict[str, object] = {"start": start, "target": target, "norm": norm, "tol": tol}
    given |= {"rivals": rivals, "within": within, "per_layer": per_layer}
    run_measures(model, common, jacobian=options_of(JacobianOptions, common, given))


@command("attack", panel=MEASURE)
def attack(
    model: ModelSpec,
    common: Common,
    eps: Annotated[
        str | None, typer.Option(help="Radii in pixel space [0, 1]: 2/255 or 1/255,0.03.")
    ] = None,
    attack: Annotated[
        str,
        typer.Option(
            help="fgsm, pgd, autoattack (comma-separated), paper, standard, quick, "
            "or custom:apgd-ce,apgd-t,fab-t,square."
        ),
    ] = "fgsm,pgd,autoattack",
    norm: Annotated[str, typer.Option(help="linf, l2, or token-l2 (embeddings).")] = "linf",
    steps: Annotated[int | None, typer.Option(help="Iterations, in place of the own.")] = None,
    restarts: Annotated[int | None, typer.Option(help="Random starts.")] = None,
    queries: Annotated[int | None, typer.Option(help="Most queries of Square.")] = None,
    save_adv: Annotated[
        Path | None, typer.Option(help="Write the adversarial examples (.safetensors).")
    ] = None,
) -> None:
    """Adversarial accuracy under FGSM, PGD and AutoAttack, sample by sample.

    The radius is in pixel space [0, 1]; normalisation happens inside the model. For text the
    perturbation is added to the token embeddings.

    [dim]Examples:[/]
      [cyan]lipaudit attack demo --eps 0.1[/]
      [cyan]lipaudit attack timm:vit_small_patch16_224 --data val/ --eps 1/255,2/255[/]
      [cyan]lipaudit attack timm:vit_small_patch16_224 --data val/ --attack paper[/]
    """
    from lipaudit.measures.attack import AttackOptions, plan

    given: dict[str, object] = {"attack": attack, "norm": norm}
    given |= {"steps": steps, "restarts": restarts}
    given |= {"queries": queries, "eps": tuple(eps.split(",")) if eps else ()}
    given["keep_adversarial"] = save_adv is not None
    options = options_of(AttackOptions, common, given)
    plan(options)  # refuse bad radii before anything is loaded
    if save_adv is None:
        run_measures(model, common, attack=options)
    else:
        _run_and_save(model, common, options, save_adv)


def _run_and_save(model: str, common: Common, options: AttackOptions, path: Path) -> None:
    from lipaudit.cli.adversarial import check_target, save_adversarial
    from lipaudit.cli.emit import emit
    from lipaudit.cli.run import run

    check_target(path)
    report = run(
        model,
        common,
        {"attack": options},
        keep=lambda _name, parts, _samples: save_adversarial(path, parts, options),
    )
    emit(report, common)


Given = TypeVar("Given", bound="BaseModel")


def options_of(kind: type[Given], common: Common, given: Mapping[str, object]) -> Given:
    """Check the options of a measure, or a recipe.

    Raises:
        UsageError: for a value that it does not take.
    """
    from pydantic import ValidationError

    try:
        return kind.model_validate({"seed": common.seed or 0, **given})
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]).replace("_", "-")
        option = {"start": "from", "target": "to", "modes": "mode"}.get(name, name)
        wrong = first["msg"].removeprefix("Value error, ")
        raise UsageError(f"--{option}: {first['input']!r}: {wrong}") from None


def run_measures(model: str, common: Common, **measures: Options) -> None:
    """Run measures on a model and write what was asked for."""
    from lipaudit.cli.emit import emit
    from lipaudit.cli.run import run

    emit(run(model, common, measures), common)
