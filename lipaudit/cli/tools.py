"""Commands on lipaudit itself: explain, env, models, check, init, schema."""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
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
from lipaudit.cli.streams import say
from lipaudit.errors import UsageError, suggestion
from lipaudit.settings import AuditOptions, RunOptions

if TYPE_CHECKING:
    from lipaudit.report.topics import Topic

LEARN = "Learn"
WIDEST = 100


@cache
def list_explanations() -> tuple[Topic, ...]:
    """Return all topics of `explain`: results, options and commands."""
    from lipaudit.report.topics import list_options, list_topics
    from lipaudit.settings import Recipe, Settings, option_types

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
    from lipaudit.report.topics import find_topics

    text = " ".join(name or ())
    entries = find_topics(text, list_explanations()) if text else list_explanations()
    if not entries:
        advice = suggestion(text, known_names(), "lipaudit explain lists every name.")
        raise UsageError(f"nothing is called {text!r}", advice)
    lines = list(_format_topics(entries) if text else _format_index(entries))
    record = [asdict(topic) for topic in entries]
    emit({"lines": lambda: lines, "record": lambda: record}, output)


def _format_topics(entries: Sequence[Topic]) -> Iterator[str]:
    """Yield the lines that explain topics; topics with equal texts share them."""
    from lipaudit.theory.bounds.record import SYMBOLS

    texts: dict[tuple[str, ...], list[str]] = {}
    for topic in entries:
        texts.setdefault((topic.meaning, *topic.details), []).append(topic.title)
    for number, ((meaning, *details), titles) in enumerate(texts.items()):
        yield from [""] if number else []
        yield from _wrap(f"{', '.join(titles)}: {meaning}", "", "  ")
        for paragraph in details:
            yield from _wrap(paragraph, "  ", "  ")
    if any(topic.formula for topic in entries):
        yield ""
        yield from _wrap(SYMBOLS)


def _format_index(entries: Sequence[Topic]) -> Iterator[str]:
    """Yield the names under their topics."""
    groups: dict[str, dict[str, None]] = {}
    for topic in entries:
        groups.setdefault(topic.group, {})[topic.name] = None
    yield from _wrap("lipaudit explain NAME explains one of these, or a heading of a page.")
    for group, names in groups.items():
        if group:
            yield from ("", group)
            yield from _wrap(", ".join(names), "  ", "  ")


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
    facts: dict[str, str] = versions() | {
        "platform": sys.platform,
        "cuda": torch.version.cuda or "none",
        "devices": ", ".join(_list_devices()),
        "default device": str(find_device("auto")),
        "threads": str(torch.get_num_threads()),
    }
    width = max(map(len, facts))
    lines = [f"{key:<{width}}  {value}" for key, value in facts.items()]
    emit({"lines": lambda: lines, "record": lambda: facts}, output)


def _list_devices() -> list[str]:
    """Name torch's devices, and say for each whether lipaudit can use it."""
    import torch

    names, count = ["cpu"], torch.accelerator.device_count()
    if count and (accelerator := torch.accelerator.current_accelerator()):  # old versions raise
        names += [f"{accelerator.type}:{i}" for i in range(count)]
    return [f"{name}{_find_remark(name)}" for name in names]


def _find_remark(name: str) -> str:
    import torch

    from lipaudit.models.sources.offload import find_device

    try:
        place = find_device(name)
    except UsageError as error:
        return f" (not usable: {error.message})"
    # The CPU lacks this function.
    make = getattr(torch.get_device_module(place), "get_device_name", None)
    return f" ({make(place)})" if make else ""


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
    """Print the result of a dry run."""
    lines: list[str] = []
    for name, text in _list_rows(seen):
        lines += _wrap(text, f"{name:<10}", " " * (10 if name else 12))
    for text in seen["notes"]:
        lines += _wrap(f"note: {text}", "", " " * 6)
    return lines


def _list_rows(seen: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield labels for the margin, with their texts."""
    from lipaudit.models.memory import format_size

    if "architecture" not in seen:
        yield "model", f"{seen['model']}: the shape of its input is unknown"
        yield from _list_lacks(seen)
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
        yield "", _format_sample(each, seen["takes"])
    for name, planned in seen["measures"].items():
        yield name, f"{planned['samples']} samples, {_format_memory(planned)}"
    yield from _list_lacks(seen)
    yield "time", _format_time(seen["forward"])
    if (free := seen["memory"]["free"]) is not None:
        yield "memory", f"{format_size(free)} are free"


def _list_lacks(seen: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the needs of measures that cannot run; equal needs are merged."""
    for reason in dict.fromkeys(seen["needs"].values()):
        names = [name for name, own in seen["needs"].items() if own == reason]
        yield "not run", f"{', '.join(names)}: {reason}"


def _format_time(forward: dict[str, Any] | None) -> str:
    if forward is None:
        return "unknown: memory ran out with several samples at once"
    count, seconds = forward["samples"], forward["seconds"]
    return f"{seconds:.2g} s for a forward pass of {count} samples; a run shows the remaining time"


def _format_sample(seen: dict[str, Any], takes: str) -> str:
    """Format the place, size, label and text of a sample."""
    shape = " x ".join(map(str, seen["shape"])) + (" tokens" if takes == "text" else "")
    label = "no label" if seen["label"] is None else f"label {seen['label']}"
    name = f" ({seen['class']})" if seen["class"] not in ("", str(seen["label"])) else ""
    place = seen["place"] or seen["id"][:12]
    return ", ".join(filter(None, (place, shape, label + name, seen["text"])))


def _format_memory(planned: dict[str, Any]) -> str:
    """Format the memory and batch size of a measure."""
    from lipaudit.models.memory import format_size

    together = f"{planned['batch']} at a time"
    if planned["bytes"] is None:
        return f"{together}; the memory is unknown: {planned['unknown']}"
    taken = format_size(planned["bytes"])
    return f"{together}, in roughly {taken} of memory, libraries and all (estimate)"


SUPPORTED = """\
MODEL is one of
  demo                      a small vision transformer for digits; also demo:jasmin, demo:robust
  timm:NAME[.TAG]           a model of timm with its pretrained weights
  hf:ORG/NAME[@REVISION]    a repository of the Hugging Face Hub (transformers, timm or peft)
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
    if not terminal.quiet:
        measured = f"Measure it: lipaudit bounds {shlex.quote(f'py:{output}:model')}"
        say(f"Wrote {output}. {measured}")


@command("schema", panel=LEARN)
def schema(output: Lines, terminal: Plain) -> None:
    """Print the JSON Schema of a report."""
    from lipaudit.cli.emit import emit
    from lipaudit.schema import json_schema

    emit({"record": json_schema}, output)
