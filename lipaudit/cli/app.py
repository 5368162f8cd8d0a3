"""The Typer application, and the decorator that gives every command its shared behaviour."""

from __future__ import annotations

import functools
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer
from rich.markup import escape

from lipaudit import __version__
from lipaudit.cli.options import Common
from lipaudit.errors import ExitCode, LipauditError

app = typer.Typer(
    name="lipaudit",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def build() -> typer.Typer:
    """Return the application with every command registered."""
    from lipaudit.cli import audit, explain, judge, measure, scaling, tools, train  # noqa: F401  (importing registers the commands)

    return app


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", help="Print the version and exit.", callback=_version),
    ] = False,
) -> None:
    """Audit how robust a transformer checkpoint is.

    Per-head [bold]Lipschitz[/] bounds beside exact norms, attention statistics, the exact
    Jacobian norm of the model, adversarial accuracy, and a gate for CI.

    Start with: [cyan]lipaudit bounds demo[/]
    """


def command(name: str, *, panel: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command: errors become one clear line and the documented exit code.

    A parameter `common: Common` is replaced by the shared options, so that they are defined once.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        app.command(name, rich_help_panel=panel)(guarded(_with_common(function)))
        return function

    return register


def guarded(body: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose errors become one line on stderr and an exit status."""

    @functools.wraps(body)
    def call(**options: Any) -> None:
        with _exit_codes(verbose=bool(options.get("verbose"))):
            signal.signal(signal.SIGTERM, _terminate)
            body(**options)

    call.__doc__ = _unwrapped(inspect.getdoc(body) or "")
    hints = get_type_hints(body, include_extras=True)
    parameters = inspect.signature(body).parameters.values()
    return _resigned(call, [p.replace(annotation=hints[p.name]) for p in parameters])


def _unwrapped(text: str) -> str:
    """Let the terminal wrap the paragraphs; lists and examples keep their lines."""
    paragraphs = text.split("\n\n")
    joined = (p if "\n " in p else p.replace("\n", " ") for p in paragraphs)
    return "\n\n".join(joined)


@contextmanager
def _exit_codes(*, verbose: bool) -> Iterator[None]:
    """Turn exceptions into one line on stderr and the documented exit status."""
    try:
        yield
    except LipauditError as error:
        if verbose:
            traceback.print_exc()
        _complain(error.message, error.advice)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt as stop:
        status = 143 if stop.args == ("terminated",) else 130
        _complain("terminated" if status == 143 else "interrupted")
        raise typer.Exit(status) from None
    except BrokenPipeError:
        # The reader went away (`| head`): Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(ExitCode.OK) from None
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if verbose:
            traceback.print_exc()
        _complain(_first_line(error), "This is a bug in lipaudit: run again with -v to see where.")
        raise typer.Exit(ExitCode.INTERNAL) from None


def _terminate(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt("terminated")


def _first_line(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    return f"internal error: {type(error).__name__}: {text}"


def _complain(message: str, advice: str = "") -> None:
    from rich.console import Console

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"[bold red]error:[/] {escape(message)}")
    if advice:
        console.print(f"[dim]  hint:[/] {escape(advice)}")


def _with_common(function: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `common` by one parameter for each shared option."""
    signature = inspect.signature(function)
    own_hints = get_type_hints(function, include_extras=True)
    own = [p.replace(annotation=own_hints[p.name]) for p in signature.parameters.values()]
    if "common" not in signature.parameters:
        return _resigned(function, own)
    hints = get_type_hints(Common, include_extras=True)
    shared = [
        inspect.Parameter(
            f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name]
        )
        for f in fields(Common)
    ]

    def call(**options: Any) -> None:
        common = Common(**{f.name: options.pop(f.name) for f in fields(Common)})
        function(common=common, **options)

    functools.update_wrapper(call, function)
    kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own if p.name != "common"]
    return _resigned(call, kept + shared)


def _resigned(
    function: Callable[..., None], parameters: list[inspect.Parameter]
) -> Callable[..., None]:
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in parameters}
    return function
