"""Commands on lipaudit itself: explain, env, models, check, init, schema."""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lipaudit.cli.app import app, command
from lipaudit.cli.options import (
    BY_MEASURE,
    Lines,
    ModelArgument,
    Output,
    Plain,
    Terminal,
    complete_words,
)
from lipaudit.errors import UsageError, suggestion
from lipaudit.measures import AuditOptions
from lipaudit.settings import RunOptions

if TYPE_CHECKING:
    from lipaudit.report.topics import Topic

LEARN = "Learn"
WIDEST = 100


@cache
def list_explanations() -> tuple[Topic, ...]:
    """Return all topics of `explain`: results, options and commands."""
    from lipaudit.measures import option_types
    from lipaudit.report.topics import list_options, list_topics
    from lipaudit.settings import Recipe, Settings

    groups: dict[str, type[Settings]] = {**option_types(), "train": Recipe}
    groups |= {"every measure": RunOptions, "every command": Output, "most commands": Terminal}
    return (*list_topics(), *list_options(groups), *_commands(typer.main.get_command(app)))


def known_names() -> list[str]:
    """Return all names that can be explained."""
    return list(dict.fromkeys(name for topic in list_explanations() for name in topic.names))


def _commands(command: object, path: str = "") -> Iterator[Topic]:
    from lipaudit.report.topics import Topic

    for name, each in getattr(command, "commands", {}).items():
        full = f"{path} {name}".strip()
        short = (each.help or "").partition("\n")[0]
        yield Topic("Commands", full, f"lipaudit {full}", short)
        yield from _commands(each, full)


@command("explain", panel=LEARN)
def explain(
    output: Lines,
    terminal: Plain,
    name: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]",
            autocompletion=complete_words(known_names),
            help="A word, such as bounds, theorem 3, g1 or pgd. Without it: a list of all words.",
        ),
    ] = None,
) -> None:
    """What a number means, where it holds, and what it does not mean.

    NAME is any word of a page, a table or a JSON file. Examples: a bound, a column or its heading,
    a section, an attack, a verdict, a rule of the gate, an option.

    [dim]Examples:[/]
      [cyan]lipaudit explain theorem 3[/]
      [cyan]lipaudit explain jacobian.norm:median[/]
    """
    from lipaudit.cli.emit import emit
    from lipaudit.report.topics import FORMULA, find_topics
    from lipaudit.theory.bounds.record import SYMBOLS

    text = " ".join(name or ())
    entries = find_topics(text, list_explanations()) if text else list_explanations()
    if not entries:
        advice = suggestion(text, known_names(), "lipaudit explain lists every name.")
        raise UsageError(f"nothing is called {text!r}", advice)
    lines: list[str] = []
    if text:
        titles: dict[tuple[str, ...], list[str]] = {}  # topics with equal texts share them
        for topic in entries:
            titles.setdefault((topic.meaning, *topic.details), []).append(topic.title)
        for (meaning, *details), named in titles.items():
            lines += [""] * bool(lines) + _wrap(f"{', '.join(named)}: {meaning}", "", "  ")
            lines += [line for paragraph in details for line in _wrap(paragraph, "  ", "  ")]
        if any(text.startswith(FORMULA) for topic in entries for text in topic.details):
            lines += ["", *_wrap(SYMBOLS)]
    else:
        groups: dict[str, dict[str, None]] = {}
        for topic in entries:
            groups.setdefault(topic.group, {})[topic.name] = None
        lines += _wrap("lipaudit explain NAME explains one of these, or a heading of a page.")
        for group, names in groups.items():
            lines += ["", group, *_wrap(", ".join(names), "  ", "  ")] if group else []
    record = [asdict(topic) for topic in entries]
    emit({"lines": lambda: lines, "record": lambda: record}, output)


def _wrap(text: str, first: str = "", rest: str = "") -> list[str]:
    width = min(shutil.get_terminal_size().columns, WIDEST)
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


@command("env", panel=LEARN)
def env(output: Lines, terminal: Plain) -> None:
    """Versions, devices and threads: what to paste into a bug report."""
    import torch

    from lipaudit.cli.emit import check_outputs, emit
    from lipaudit.engine.provenance import versions
    from lipaudit.models.sources.offload import find_device

    check_outputs(output, ("lines", "record"))
    names, count = ["cpu"], torch.accelerator.device_count()
    if count and (accelerator := torch.accelerator.current_accelerator()):  # old versions raise
        names += [f"{accelerator.type}:{i}" for i in range(count)]
    devices = []
    for name in names:
        try:
            place = find_device(name)
        except UsageError as error:
            devices.append(f"{name} (not usable: {error.message})")
            continue
        # The CPU lacks this function.
        describe = getattr(torch.get_device_module(place), "get_device_name", None)
        devices.append(f"{name} ({describe(place)})" if describe else name)
    facts: dict[str, str] = versions() | {
        "platform": sys.platform,
        "cuda": torch.version.cuda or "none",
        "devices": ", ".join(devices),
        "default device": str(find_device("auto")),
        "threads": str(torch.get_num_threads()),
    }
    width = max(map(len, facts))
    lines = [f"{key:<{width}}  {value}" for key, value in facts.items()]
    emit({"lines": lambda: lines, "record": lambda: facts}, output)


def _list_names() -> tuple[str, ...]:
    from lipaudit.models.sources.names import timm_names

    return timm_names()


@command("models", panel=LEARN)
def models(
    output: Lines,
    terminal: Plain,
    name: Annotated[
        str,
        typer.Argument(
            help="Part of the name of a model of timm.", autocompletion=complete_words(_list_names)
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


@command("check", panel=LEARN)
def check(
    model: ModelArgument,
    run: Annotated[RunOptions, BY_MEASURE],
    output: Lines,
    terminal: Terminal,
) -> None:
    """What an audit would read and measure, and in how much memory: a dry run.

    Loads model and data, and surveys the attention layers: which have a closed form, why others
    have none, the first samples with their labels. Each measure is listed with its samples and
    memory, or with what it needs. Nothing is measured.

    [dim]Example:[/] [cyan]lipaudit check ./vit --data val/[/]
    """
    from lipaudit.cli.emit import check_outputs, emit
    from lipaudit.cli.measure import require_alone, typed_command
    from lipaudit.cli.progress import mute_libraries
    from lipaudit.engine.prepare import Request
    from lipaudit.engine.preview import preview

    check_outputs(output, ("lines", "record"))
    require_alone(run, "a dry run", unlimited=True)
    # The plan of an audit without options, which most people run next.
    demo, options = model.partition(":")[0] == "demo", AuditOptions()
    plan, counts = options.plan(demo=demo), options.counts(demo=demo)
    request = Request(model, plan, run, counts, optional=plan.keys(), command=typed_command())
    with mute_libraries(quiet=terminal.quiet):
        seen = preview(request)
    emit({"lines": lambda: _print_plan(seen), "record": lambda: seen}, output)


def _print_plan(seen: dict[str, Any]) -> list[str]:
    """Print the result of a dry run: labels in the margin, with their texts."""
    lines: list[str] = []
    for name, text in _list_rows(seen):
        lines += _wrap(text, f"{name:<10}", " " * (10 if name else 12))
    for text in seen["notes"]:
        lines += _wrap(f"note: {text}", "", " " * 6)
    return lines


def _list_rows(seen: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield labels for the margin, with their texts."""
    from lipaudit.models.memory import format_size

    lacks: dict[str, list[str]] = {}  # equal needs of several measures share a row
    for name, reason in seen["needs"].items():
        lacks.setdefault(reason, []).append(name)
    left_out = [("not run", f"{', '.join(names)}: {why}") for why, names in lacks.items()]
    if "architecture" not in seen:
        yield "model", f"{seen['model']}: the shape of its input is unknown"
        yield from left_out
        return
    classes = f"{seen['classes']} classes" if seen["classes"] else "no classes"
    yield "model", f"{seen['model']}: {seen['architecture']}, {seen['parameters']:,} parameters"
    yield "", f"takes {seen['takes']}, {classes}; on {seen['device']} in {seen['dtype']}"
    rest = "all else" if len(seen["device_map"]) > 1 else "all"
    for place in dict.fromkeys(seen["device_map"].values()):
        names = [name or rest for name, own in seen["device_map"].items() if own == place]
        yield "", f"{place}: {', '.join(names)}"
    if seen["layers"]:
        heads = f"{seen['heads']} in {seen['layers']} layers"
        yield "heads", f"{heads}, {seen['closed_form']} with a closed form"
    for why, count in seen["numerical"].items():
        yield "", f"{count} without: {why}"
    yield "data", f"{seen['data']}, {seen['samples']} samples; the first:"
    for each in seen["first"]:
        shape = " x ".join(map(str, each["shape"])) + " tokens" * (seen["takes"] == "text")
        label = "no label" if each["label"] is None else f"label {each['label']}"
        label += f" ({each['class']})" * (each["class"] not in ("", str(each["label"])))
        place = each["place"] or each["id"][:12]
        yield "", ", ".join(filter(None, (place, shape, label, each["text"])))
    for name, planned in seen["measures"].items():
        needed = f"; the memory is unknown: {planned['unknown']}"
        if planned["bytes"] is not None:
            taken = format_size(planned["bytes"])
            needed = f", in roughly {taken} of memory, libraries and all (estimate)"
        yield name, f"{planned['samples']} samples, {planned['batch']} at a time{needed}"
    yield from left_out
    time = "unknown: memory ran out with several samples at once"
    if (forward := seen["forward"]) is not None:
        passed = f"{forward['seconds']:.2g} s for a forward pass of {forward['samples']} samples"
        time = f"{passed}; a run shows the remaining time"
    yield "time", time
    if (free := seen["memory"]["free"]) is not None:
        yield "memory", f"{format_size(free)} are free"


SUPPORTED = """\
MODEL is one of
  demo                      a small vision transformer for digits; also demo:jasmin, demo:robust
  timm:NAME[.TAG]           a model of timm with its pretrained weights
  hf:ORG/NAME[@REVISION]    a repository of the Hugging Face Hub (transformers or timm)
  DIRECTORY                 config.json and weights, of transformers or timm
  FILE --arch timm:NAME     .safetensors, .pt, .pth, .bin or .ckpt; or --arch py:FILE:FACTORY
  py:FILE_OR_MODULE:FACTORY a function that returns a torch module or a ModelSpec
Random weights: --model-kwargs pretrained=false

Any attention that calls scaled_dot_product_attention or softmax(q k^T) is read, in any
architecture. A layer gets bounds and exact norms if its q, k and v are token-wise functions of a
linear map of X. Examples: plain, rotary, qk-norm, grouped, latent, windows, cross-attention. Its
logits may be functions of each query and key (softcap, relative positions), also with a sink.
Other layers (talking heads, convolutions) get numerical exact norms, no bounds, and the reason.
Flash and flex kernels and TorchScript cannot be read. A model in torch.compile runs uncompiled.

lipaudit models PART lists timm's names."""


@command("init", panel=LEARN)
def init(
    kind: Annotated[
        Literal["py"], typer.Argument(help="Kind of file: py, a factory for your own model.")
    ],
    terminal: Plain,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path(
        "model.py"
    ),
) -> None:
    """Write a file to start from: a model of your own, which runs as it is.

    [dim]Example:[/] [cyan]lipaudit init py -o model.py[/]
    """
    from lipaudit.engine.files import require_writable, write

    if output.suffix != f".{kind}":
        raise UsageError(
            f"{output} is not the name of a {kind} file", f"Choose a name that ends in .{kind}."
        )
    if output.exists():
        raise UsageError(f"{output} exists", "Choose another file.")
    require_writable(output)
    example = files("lipaudit.models").joinpath("assets/model.py").read_text("utf-8")
    write(output, example.replace("py:model.py:", f"py:{output}:").encode())
    measured = f"Measure it: lipaudit bounds {shlex.quote(f'py:{output}:model')}"
    terminal.tell(f"Wrote {output}. {measured}")


@command("schema", panel=LEARN)
def schema(output: Lines, terminal: Plain) -> None:
    """Print the JSON Schema of a report."""
    from lipaudit.cli.emit import emit
    from lipaudit.schema import json_schema

    emit({"record": json_schema}, output)
