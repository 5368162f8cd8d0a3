"""Every option as a page: `python -m lipaudit.settings.page > docs/options.md`."""

from __future__ import annotations

from collections.abc import Iterator

from lipaudit.settings import AuditOptions, Recipe, RunOptions, Settings, option_types
from lipaudit.settings.option import Option

HEAD = """# Options

Generated from the code by `python -m lipaudit.settings.page`. In Python, an option has the name of
its flag with underscores: `lipaudit.measure("demo", "bounds", max_tokens=64)`.
Options that all measures share can be set in [a file](configuration.md).
"""


def page() -> str:
    """Return the options of every command that measures or trains, as Markdown."""
    groups: dict[str, type[Settings]] = {"every measure, and train": RunOptions}
    groups |= {f"lipaudit {name}": kind for name, kind in option_types().items()}
    groups |= {"lipaudit audit": AuditOptions, "lipaudit train": Recipe}
    return "\n".join([HEAD, *(line for item in groups.items() for line in _table(*item))])


def _table(heading: str, group: type[Settings]) -> Iterator[str]:
    yield f"## {heading}\n"
    yield "| option | default | meaning |"
    yield "| --- | --- | --- |"
    yield from (_row(option) for option in group.options().values())
    yield ""


def _row(option: Option) -> str:
    flags = ", ".join(f"`{flag}`" for flag in option.flags)
    default = f"`{option.shown}`" if option.shown else ""
    given = f" (`{option.env}`)" if option.env else ""
    return f"| {flags} | {default} | {option.help.replace('|', chr(92) + '|')}{given} |"


if __name__ == "__main__":
    print(page(), end="")
