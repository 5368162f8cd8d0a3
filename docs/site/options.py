"""Every option as a page: `python docs/site/options.py > docs/options.md`."""

from __future__ import annotations

from lipaudit.measures import AuditOptions, option_types
from lipaudit.measures.base import MeasureOptions
from lipaudit.settings import RunOptions
from lipaudit.settings.option import Settings
from lipaudit.wings.training.recipe import Recipe

HEAD = """# Options

Generated from the code by `python docs/site/options.py`. In Python, an option has the name of
its flag with underscores: `lipaudit.measure("demo", "bounds", max_tokens=64)`.
Options that all measures share can be set in [a file](configuration.md).
"""


def page() -> str:
    """Return the options of every command that measures or trains, as Markdown."""
    groups: dict[str, type[Settings]] = {"every measure, and train": RunOptions}
    groups |= {f"lipaudit {name}": kind for name, kind in option_types().items()}
    groups |= {"lipaudit audit": AuditOptions, "lipaudit train": Recipe}
    lines = [HEAD]
    for heading, group in groups.items():
        lines.append(f"## {heading}\n")
        if issubclass(group, MeasureOptions):
            lines.append(f"Samples by default: {group.samples}.\n")
        lines += ["| option | default | meaning |", "| --- | --- | --- |"]
        for option in group.options().values():
            flags = ", ".join(f"`{flag}`" for flag in option.flags)
            default = f"`{option.shown}`" if option.shown else ""
            meaning = option.help.replace("|", "\\|") + f" (`{option.env}`)" * bool(option.env)
            lines.append(f"| {flags} | {default} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
