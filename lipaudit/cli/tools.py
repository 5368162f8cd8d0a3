"""The commands on lipaudit itself: env, models, init, schema."""

from __future__ import annotations

import shlex
import sys
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import typer

from lipaudit.cli.app import command
from lipaudit.cli.options import Lines, Plain, completed
from lipaudit.errors import UsageError, suggestion

LEARN = "Learn"


@command("env", panel=LEARN)
def env(output: Lines, terminal: Plain) -> None:
    """Versions, devices and threads: what to paste into a bug report."""
    import torch

    from lipaudit.cli.emit import check_outputs, emit
    from lipaudit.engine.provenance import versions
    from lipaudit.models.sources.assembly import device

    check_outputs(output, ("lines", "record"))
    facts: dict[str, str] = versions() | {
        "platform": sys.platform,
        "cuda": torch.version.cuda or "none",
        "devices": ", ".join(_devices()),
        "default device": str(device("auto")),
        "threads": str(torch.get_num_threads()),
    }
    width = max(map(len, facts))
    lines = [f"{key:<{width}}  {value}" for key, value in facts.items()]
    emit({"lines": lambda: lines, "record": lambda: facts}, output)


def _devices() -> list[str]:
    """Name what torch sees, and say of each whether figures can be had on it."""
    import torch

    accelerator, names = torch.accelerator.current_accelerator(), ["cpu"]
    if accelerator is not None:
        count = torch.accelerator.device_count()
        names += [f"{accelerator.type}:{i}" for i in range(count)]
    return [f"{name}{_remark(name)}" for name in names]


def _remark(name: str) -> str:
    import torch

    from lipaudit.models.sources.assembly import device

    try:
        place = device(name)
    except UsageError as error:
        return f" (not usable: {error.message})"
    make = getattr(torch.get_device_module(place), "get_device_name", None)
    return f" ({make(place)})" if make else ""


def _bare_names() -> tuple[str, ...]:
    from lipaudit.models.sources.names import timm_names

    return timm_names()


@command("models", panel=LEARN)
def models(
    output: Lines,
    terminal: Plain,
    name: Annotated[
        str,
        typer.Argument(
            help="Part of the name of a model of timm.", autocompletion=completed(_bare_names)
        ),
    ] = "",
) -> None:
    """What can be audited: the forms of MODEL, the demos, and timm's models by name.

    [dim]Example:[/] [cyan]lipaudit models vit_tiny[/]
    """
    from lipaudit.cli.emit import emit
    from lipaudit.models.sources.names import demo_names, timm_names

    names = [f"timm:{each}" for each in timm_names() if name in each]
    if name:
        names = [each for each in demo_names() if name in each] + names
    if not names:
        advice = suggestion(name, timm_names(), "Try: vit, swin")
        raise UsageError(f"no model has {name!r} in its name", advice)
    lines = names if name else SUPPORTED.splitlines()
    listed = names if name else [*demo_names(), *names]
    emit({"lines": lambda: lines, "record": lambda: {"models": listed}}, output)


SUPPORTED = """\
MODEL is one of
  demo                      a vision transformer on handwritten digits that comes along;
                            demo:jasmin, demo:robust, demo:certified: trained defences
  timm:NAME[.TAG]           a model of timm with its pretrained weights
  hf:ORG/NAME[@REVISION]    a repository of the Hugging Face Hub (transformers, timm or peft)
  DIRECTORY                 config.json and weights, of transformers or timm
  FILE --arch timm:NAME     .safetensors, .pt, .pth, .bin or .ckpt; of a model of your own with
                            --arch py:FILE:FACTORY
  py:FILE_OR_MODULE:FACTORY a function that returns a torch module or a ModelSpec
Random weights: --model-kwargs pretrained=false

Any attention that calls scaled_dot_product_attention or softmax(q k^T) is read, whatever the
architecture. Layers whose q, k and v are token-wise functions of a linear map of X (plain,
rotary, qk-norm, grouped, latent, windows, cross-attention), and whose logits are functions of each
query and key (softcap, relative positions) beside a sink, get bounds and exact norms; others
(talking heads, convolutions) get numerical exact norms and no bounds, with the reason. Flash and
flex kernels and TorchScript cannot be read; what torch.compile wraps is run as it was before.

lipaudit models PART lists timm's names."""


@command("init", panel=LEARN)
def init(
    kind: Annotated[Literal["py"], typer.Argument(help="py: a factory of a model of your own.")],
    terminal: Plain,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where it is written.")] = Path(
        "model.py"
    ),
) -> None:
    """Write a file to start from: a model of your own, which runs as it is.

    [dim]Example:[/] [cyan]lipaudit init py -o model.py[/]
    """
    from lipaudit.engine.files import require_writable, write

    if output.suffix != f".{kind}":
        raise UsageError(f"{output} is no name of a {kind} file", f"It must end in .{kind}.")
    if output.exists():
        raise UsageError(f"{output} exists", "Name another file.")
    require_writable(output)
    example = files("lipaudit.models").joinpath("assets/model.py").read_text("utf-8")
    write(output, example.replace("py:model.py:", f"py:{output}:").encode())
    if not terminal.quiet:
        measured = f"Measure it: lipaudit bounds {shlex.quote(f'py:{output}:model')}"
        typer.echo(f"Wrote {output}. {measured}", err=True)


@command("schema", panel=LEARN)
def schema(
    output: Lines,
    terminal: Plain,
    kind: Annotated[
        Literal["report", "history"], typer.Argument(help="Of a report, or of a training.")
    ] = "report",
) -> None:
    """Print the JSON Schema of a report, or of the history of a training."""
    from lipaudit.cli.emit import emit
    from lipaudit.schema import history_schema, json_schema

    emit({"record": history_schema if kind == "history" else json_schema}, output)
