"""Commands on lipaudit itself: explain, env, models, check, init, schema."""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lipaudit.cli.app import BY_MEASURE, ModelArgument, Output, Terminal
from lipaudit.cli.measure import refuse_partial_run, typed_command
from lipaudit.cli.output import check_outputs, emit_facts
from lipaudit.engine.files import require_writable, write
from lipaudit.errors import UsageError, suggestion
from lipaudit.measures import AuditOptions, option_types
from lipaudit.models.sources import demo_names, timm_names
from lipaudit.schema import json_schema
from lipaudit.settings import RunOptions
from lipaudit.tables.columns import group_values
from lipaudit.tables.plugins import collect, explain_missing, load_wings
from lipaudit.theory.bounds.record import SYMBOLS

if TYPE_CHECKING:
    from lipaudit.report.topics import Topic

# Longest line of text on a wide terminal: longer ones are hard to read.
WIDEST = 100


@cache
def list_explanations() -> tuple[Topic, ...]:
    """Return all topics of `explain`: results and options."""
    from lipaudit.report.topics import list_options, list_topics

    # The groups of options by name: of measures, of wings (plug-ins), and of many commands.
    groups = {**option_types(), **collect(type, name="options")}
    groups |= {"every measure": RunOptions, "every command": Output, "most commands": Terminal}
    return (*list_topics(), *list_options(groups))


WORD = "A word, such as bounds, theorem 3, g1 or pgd. Without it: a list of all words."
Words = Annotated[list[str] | None, typer.Argument(metavar="[NAME]", help=WORD)]


def explain(output: Output, terminal: Terminal, name: Words = None) -> None:
    """What a number means, where it holds, and what it does not mean.

    NAME is any word of a page, a table or a JSON file. Examples: a bound, a column or its heading,
    a section, an attack, a verdict, a rule of the gate, an option.

    Examples:
      lipaudit explain theorem 3
      lipaudit explain jacobian.norm:median
    """
    from lipaudit.report.topics import find_topics

    topics: Sequence[Topic] = list_explanations()
    text = " ".join(name or ())
    if text:
        known = topics
        topics = find_topics(text, known)
        if not topics:
            names = (name for topic in known for name in topic.names)
            typeable = dict.fromkeys(name for name in names if name.isascii())
            advice = suggestion(text, typeable, "lipaudit explain lists every name.")
            raise UsageError(f"nothing is called {text!r}", advice)
        lines = _explain_topics(topics)
    else:
        lines = _list_names(topics)
    emit_facts([asdict(topic) for topic in topics], output, lines)


def _explain_topics(topics: Iterable[Topic]) -> list[str]:
    """Return the lines that explain topics; of topics with equal texts, the text once."""
    from lipaudit.report.topics import FORMULA

    lines: list[str] = []
    printed = set()
    # Topics with equal meanings are in one line; a paragraph of several is printed once.
    for meaning, alike in group_values((topic.meaning, topic) for topic in topics).items():
        if lines:
            lines.append("")
        titles = ", ".join(topic.title for topic in alike)
        lines += _wrap(f"{titles}: {meaning}", later="  ")
        for topic in alike:
            for paragraph in topic.details:
                if paragraph not in printed:
                    printed.add(paragraph)
                    lines += _wrap(paragraph, first="  ", later="  ")
    if any(paragraph.startswith(FORMULA) for paragraph in printed):
        lines += ["", *_wrap(SYMBOLS)]
    return lines


def _list_names(topics: Iterable[Topic]) -> list[str]:
    """Return the lines that list all topics by group."""
    lines = _wrap("lipaudit explain NAME explains one of these, or a heading of a page.")
    groups = group_values((topic.group, topic.name) for topic in topics)
    for group, names in groups.items():
        if group:
            text = ", ".join(dict.fromkeys(names))
            lines += ["", group, *_wrap(text, first="  ", later="  ")]
    return lines


def _wrap(text: str, first: str = "", later: str = "") -> list[str]:
    """Return the lines of a text for the terminal, with indents of the first and later lines."""
    width = min(shutil.get_terminal_size().columns, WIDEST)
    whole_words: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=later, **whole_words)


def _emit_facts(facts: Mapping[str, Any], output: Output) -> None:
    """Write facts as lines, each with a name and a value, or as JSON.

    A list or a dictionary of values takes a line for each, the name only in the first.
    """
    lines = []
    width = max(map(len, facts)) + 2
    indent = " " * width
    for name, value in facts.items():
        values = [value]
        if isinstance(value, list):
            values = value
        # The map of modules to devices has the key "" for all modules without an entry.
        elif isinstance(value, dict):
            values = [f"{key or 'all else'}: {inner}" for key, inner in value.items()]
        start = name.ljust(width)  # of the first line: the name
        for item in values:
            text = "none" if item is None else str(item)
            lines += _wrap(text, first=start, later=indent)
            start = indent
    emit_facts(facts, output, lines)


def env(output: Output, terminal: Terminal) -> None:
    """Versions, devices and threads: what to paste into a bug report."""
    import torch

    from lipaudit.engine.results import versions
    from lipaudit.models.sources.offload import find_device

    check_outputs(output, ("lines", "record"))  # text or JSON
    facts = versions() | {
        "platform": sys.platform,
        "cuda": torch.version.cuda or "none",
        "devices": ", ".join(_list_devices()),
        "default device": str(find_device("auto")),
        "threads": str(torch.get_num_threads()),
        "wings": ", ".join(point.name for point in load_wings()) or "none",
    }
    missing = explain_missing()
    if missing:
        facts["missing"] = missing
    _emit_facts(facts, output)


def _list_devices() -> Iterator[str]:
    """Yield the CPU and the GPUs of this machine, with their names, or why one is not usable."""
    import torch

    from lipaudit.models.sources.offload import find_device

    names = ["cpu"]
    count = torch.accelerator.device_count()  # 0 without one
    if count:
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None:
            names += [f"{accelerator.type}:{i}" for i in range(count)]
    for name in names:
        try:
            device = find_device(name)
        except UsageError as error:
            yield f"{name} (not usable: {error.message})"
            continue
        # The name of a GPU; the module of the CPU has no such function.
        describe = getattr(torch.get_device_module(device), "get_device_name", None)
        if describe is not None:
            name += f" ({describe(device)})"
        yield name


def models(
    output: Output,
    terminal: Terminal,
    name: Annotated[str, typer.Argument(help="Part of the name of a model.")] = "",
) -> None:
    """The demos and timm's models, by name.

    MODEL is one of these, or hf:ORG/NAME[@REVISION] of the Hugging Face Hub. It can be a directory
    with config.json and weights. A file of weights needs --arch timm:NAME or py:FILE:FACTORY.
    py:FILE_OR_MODULE:FACTORY is a function that returns a torch module or a ModelSpec.

    Any attention that calls scaled_dot_product_attention or softmax(q k^T) is read, in any
    architecture. `lipaudit check MODEL` shows which layers have a closed form.

    Example: lipaudit models vit_tiny
    """
    all_names = (*demo_names(), *(f"timm:{model}" for model in timm_names()))
    names = [model for model in all_names if name in model]
    if not names:
        advice = suggestion(name, timm_names(), "Try: vit, swin")
        raise UsageError(f"no model has {name!r} in its name", advice)
    emit_facts({"models": names}, output, names)


def check(
    model: ModelArgument,
    run: Annotated[RunOptions, BY_MEASURE],
    output: Output,
    terminal: Terminal,
) -> None:
    """What an audit would read and measure: a dry run.

    Loads model and data, and surveys the attention layers: which have a closed form, why others
    have none, the first samples with their labels. Each measure is listed with its number of
    samples. Nothing is measured.

    Example: lipaudit check ./vit --data val/
    """
    from lipaudit.api import is_demo, plan_audit
    from lipaudit.cli.progress import OnStderr
    from lipaudit.engine.prepare import preview

    check_outputs(output, ("lines", "record"))  # text or JSON
    refuse_partial_run("a dry run", run)
    # The plan of an audit without options, which most people run next.
    request = plan_audit(model, AuditOptions(), run, demo=is_demo(model), command=typed_command())
    with OnStderr(terminal):
        facts = preview(request)
    _emit_facts(facts, output)


KIND = typer.Argument(help="Kind of file: py, a factory for your own model.")
Target = Annotated[Path, typer.Option("--output", "-o", help="File to write.")]


def init(
    kind: Annotated[Literal["py"], KIND], terminal: Terminal, output: Target = Path("model.py")
) -> None:
    """Write a file to start from: a model of your own, which runs as it is.

    Example: lipaudit init py -o model.py
    """
    if output.suffix != f".{kind}":
        raise UsageError(
            f"{output} is not the name of a {kind} file", f"Choose a name that ends in .{kind}."
        )
    if output.exists():
        raise UsageError(f"{output} exists", "Choose another file.")
    require_writable(output)
    example = files("lipaudit.models").joinpath("assets/model.py").read_text("utf-8")
    write(output, example.replace("py:model.py:", f"py:{output}:").encode())
    model = shlex.quote(f"py:{output}:model")
    terminal.tell(f"Wrote {output}. Measure it: lipaudit bounds {model}")


def schema(output: Output, terminal: Terminal) -> None:
    """Print the JSON Schema of a report."""
    emit_facts(json_schema(), output)
