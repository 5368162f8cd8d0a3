"""The application with every command: importing a file of commands registers them."""

from __future__ import annotations

import typer

from lipaudit.cli import audit, explain, judge, measure, tools, train  # noqa: F401
from lipaudit.cli.app import app


def build() -> typer.Typer:
    """Return the application with every command registered."""
    return app
