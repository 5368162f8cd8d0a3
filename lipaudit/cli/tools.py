"""The commands on lipaudit itself: env, models, schema."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from lipaudit.cli.app import command
from lipaudit.errors import UsageError

LEARN = "Learn"
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@command("env", panel=LEARN)
def env(as_json: AsJson = False) -> None:
    """Versions, devices and threads: what to paste into a bug report."""
    import torch

    from lipaudit.engine.provenance import versions

    facts: dict[str, str] = versions() | {
        "platform": sys.platform,
        "cuda": torch.version.cuda or "none",
        "devices": ", ".join(_devices()),
        "threads": str(torch.get_num_threads()),
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        width = max(map(len, facts))
        typer.echo("\n".join(f"{key:<{width}}  {value}" for key, value in facts.items()))


def _devices() -> list[str]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["cpu", *(torch.cuda.get_device_name(i) for i in range(count))]


@command("models", panel=LEARN)
def models(
    name: Annotated[str, typer.Argument(help="Part of a timm model's name.")] = "",
) -> None:
    """What can be audited: the forms of MODEL, the demos, and timm's models by name.

    [dim]Example:[/] [cyan]lipaudit models vit_tiny[/]
    """
    if name:
        import timm

        names = timm.list_models(f"*{name}*")
        if not names:
            raise UsageError(f"timm has no model with {name!r} in its name", "Try: vit, swin")
        typer.echo("\n".join(f"timm:{model}" for model in names))
        return
    typer.echo(SUPPORTED)


SUPPORTED = """\
MODEL is one of
  demo                      a vision transformer on handwritten digits that comes along;
                            demo:jasmin and demo:robust are its trained defences
  timm:NAME[.TAG]           a model of timm with its pretrained weights
  hf:ORG/NAME[@REVISION]    a repository of the Hugging Face Hub (transformers or timm)
  DIRECTORY                 config.json and weights, of transformers or timm
  FILE --arch timm:NAME     .safetensors, .pt, .pth, .bin or .ckpt
  py:FILE_OR_MODULE:FACTORY a function that returns a torch module or a ModelSpec
Random weights: --model-kwargs pretrained=false

Any attention that calls scaled_dot_product_attention or softmax(q k^T) is read, whatever the
architecture. Layers whose q, k and v are token-wise functions of a linear map of X (plain,
rotary, qk-norm, grouped, latent, windows, cross-attention), and whose logits are functions of each
query and key (softcap, relative positions) beside a sink, get bounds and exact norms; others
(talking heads, convolutions) get numerical exact norms and no bounds, with the reason. Flash and
flex kernels, torch.compile and TorchScript cannot be read.

lipaudit models PART lists timm's names."""


@command("schema", panel=LEARN)
def schema() -> None:
    """Print the JSON Schema of a report."""
    from lipaudit.schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))
