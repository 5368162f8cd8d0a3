"""The application with all commands: importing a module registers its commands."""

from lipaudit.cli import audit, judge, measure, tools, train, watch  # noqa: F401
from lipaudit.cli.app import app as app
