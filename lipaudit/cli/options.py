"""The options that most commands share, defined once."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from lipaudit.cli.config import table
from lipaudit.errors import UsageError

MODEL = "Model"
DATA = "Data"
OUTPUT = "Output"
RUN = "Run"

READING = frozenset(
    {"arch", "model_kwargs", "mean", "std", "input_size", "tower"}
    | {"max_tokens", "text_column", "label_column"}
)

ModelSpec = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="demo, timm:NAME, hf:ORG/NAME, a directory, a weights file (with --arch) "
        "or py:FILE:FACTORY.",
    ),
]


def _option(*names: str, help: str, panel: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


@dataclass(frozen=True)
class Common:
    """Shared options as the user gave them; None means not given."""

    data: Annotated[
        str | None,
        _option(
            "--data",
            help="demo, an image folder, .npz, .safetensors, .csv, .tsv, .jsonl, .txt, "
            "hf:NAME or random.",
            panel=DATA,
            envvar="LIPAUDIT_DATA",
        ),
    ] = None
    samples: Annotated[
        int | None, _option("--samples", "-n", help="How many samples to use.", panel=DATA)
    ] = None
    max_tokens: Annotated[
        int | None, _option("--max-tokens", help="Cut texts to this many tokens.", panel=DATA)
    ] = None
    text_column: Annotated[
        str | None, _option("--text-column", help="Column of a table with texts.", panel=DATA)
    ] = None
    label_column: Annotated[
        str | None, _option("--label-column", help="Column with labels.", panel=DATA)
    ] = None
    arch: Annotated[
        str | None,
        _option("--arch", help="Architecture of a weights file: timm:NAME.", panel=MODEL),
    ] = None
    model_kwargs: Annotated[
        str | None,
        _option("--model-kwargs", help="k=v,... for the model's constructor.", panel=MODEL),
    ] = None
    mean: Annotated[
        str | None, _option("--mean", help="Override the pixel mean, R,G,B.", panel=MODEL)
    ] = None
    std: Annotated[
        str | None, _option("--std", help="Override the pixel deviation, R,G,B.", panel=MODEL)
    ] = None
    input_size: Annotated[
        int | None, _option("--input-size", help="Override the image size.", panel=MODEL)
    ] = None
    tower: Annotated[
        str | None,
        _option("--tower", help="Which tower of a model with two: image or text.", panel=MODEL),
    ] = None
    format: Annotated[
        str | None,
        _option(
            "--format", "-f", help="What stdout gets: table, json, markdown, html.", panel=OUTPUT
        ),
    ] = None
    output: Annotated[
        list[Path] | None,
        _option(
            "--output",
            "-o",
            help="Also write FILE (.json, .md, .html, .txt; .png: a map); repeatable.",
            panel=OUTPUT,
        ),
    ] = None
    quiet: Annotated[
        bool, _option("--quiet", "-q", help="No progress, no notes on stderr.", panel=OUTPUT)
    ] = False
    verbose: Annotated[
        bool, _option("--verbose", "-v", help="Tracebacks and details.", panel=OUTPUT)
    ] = False
    seed: Annotated[
        int | None, _option("--seed", help="Seed of everything random.", panel=RUN)
    ] = None
    device: Annotated[
        str | None, _option("--device", help="auto, cpu, cuda, cuda:1, mps.", panel=RUN)
    ] = None
    dtype: Annotated[str | None, _option("--dtype", help="float32 or float64.", panel=RUN)] = None
    batch_size: Annotated[
        str | None, _option("--batch-size", help="auto, or samples at a time.", panel=RUN)
    ] = None
    resume: Annotated[
        bool,
        _option("--resume", help="Go on with an interrupted run of the same command.", panel=RUN),
    ] = False
    offline: Annotated[
        bool, _option("--offline", help="Never reach for the network.", panel=RUN)
    ] = False
    config: Annotated[
        Path | None,
        _option("--config", help="A TOML file in place of pyproject.toml.", panel=RUN),
    ] = None

    def reading(self) -> dict[str, Any]:
        """Return what was given of the options that decide how the model and data are read."""
        return {
            name: value for name in sorted(READING) if (value := getattr(self, name)) is not None
        }

    def resolved(self) -> Common:
        """Fill what was not given from the configuration file, and check the ranges.

        Raises:
            UsageError: for an impossible value, or a configuration key that does not exist.
        """
        known = {f.name.replace("_", "-"): f.name for f in fields(self)}
        given = table(self.config, known=frozenset(known))
        missing = {known[k]: v for k, v in given.items() if not getattr(self, known[k])}
        full = replace(self, **missing)
        for name in ("samples", "max_tokens", "input_size"):
            value = getattr(full, name)
            if value is not None and value < 1:
                option = "--" + name.replace("_", "-")
                raise UsageError(f"{option} must be at least 1, not {value}")
        return full
