"""A command of one's own: its docstring is its help, its parameters are its options."""

from __future__ import annotations

from lipaudit import schema
from lipaudit.cli.app import Output, Terminal
from lipaudit.cli.judge import Saved
from lipaudit.cli.output import emit_facts
from lipaudit.errors import InputError


def unsure(report: Saved, output: Output, terminal: Terminal) -> None:
    """List the samples that the model is least sure of, from a report of `confidence`.

    Example: lipaudit unsure confidence.json
    """
    section = schema.load(report).section("confidence")
    if section is None:
        advice = "Measure it: lipaudit confidence MODEL -o confidence.json."
        raise InputError(f"{report} has no section confidence", advice)
    pairs = sorted(zip(section.samples["confidence"], section.ids, strict=True))[:10]
    lines = [f"{name} {confidence:.1%}" for confidence, name in pairs]
    terminal.tell("sample and confidence:")
    emit_facts({name: confidence for confidence, name in pairs}, output, lines)
