"""The Typer application, and the decorator with the shared behaviour of all commands."""

from __future__ import annotations

import functools
import inspect
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
import typer.core

from lipaudit import __version__
from lipaudit.cli.options import Config, read_defaults, resolve_group
from lipaudit.cli.streams import say
from lipaudit.errors import UsageError, explain_error, visible
from lipaudit.settings import RunOptions

HELP_ALL = "help_all"
RARE = {
    *("max_tokens", "text_column", "label_column", "score", "skip_bad"),  # data
    *("model_kwargs", "mean", "std", "input_size", "tower"),  # model
    *("seed", "dtype", "weights", "device_map", "shard", "time_limit", "offline"),  # run
    *("config", "verbose", "rank_by"),
    *("tol", "within", "layer_within", "splitting", "concat", "input", "heads", "mask"),  # norms
    *("gamma", "p_norm_tokens", "query", "rivals"),
    *("steps", "restarts", "queries", "save_adv", "order", "nodes"),
    *("momentum", "weight_decay", "clip", "schedule", "reduction", "optimizer"),  # training
    *("flip", "shift", "mixup", "cutmix", "classes", "skip"),
}
"""Options that only --help-all shows, so that --help fits on one screen."""


class _Untyped:
    """A command whose help shows types only for values: not for flags and lists."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, including those for help and completion."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
            elif parameter.nargs != 1:
                parameter.display_type_rich = _show_nothing
        return parameters


def _show_all_options(ctx: typer.Context, asked: bool) -> None:
    if asked:
        ctx.params[HELP_ALL] = True
        typer.echo(ctx.get_help(), color=ctx.color)
        raise typer.Exit


HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all",
        is_eager=True,
        callback=_show_all_options,
        help="Show every option, also those that few people need.",
    ),
]


def _show_nothing(ctx: Any) -> None:
    """Hide the type of an argument: its name is clear."""


class Command(_Untyped, typer.core.TyperCommand):
    """A command whose `--help` fits a screen; `--help-all` shows the rare options, too.

    Parameters are created on first use: the overview of commands needs none, and creating all of
    them takes longer than everything else.
    """

    def __init__(self, name: str, *, callback: Any, **settings: Any) -> None:
        super().__init__(name, callback=callback, **settings)
        self.function = inspect.unwrap(callback)
        # Python reads a cached property only if the instance has no attribute of that name.
        del self.params, self.callback

    @functools.cached_property
    def complete(self) -> Any:
        """Return the command with its parameters, as Typer creates it."""
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command()(make_callback(self.function))
        return typer.main.get_command(single)

    @functools.cached_property
    def params(self) -> list[Any]:  # type: ignore[override]
        """Return its arguments and options."""
        return list(self.complete.params)

    @functools.cached_property
    def callback(self) -> Callable[..., Any]:  # type: ignore[override]
        """Return the function that it calls."""
        callback: Callable[..., Any] = self.complete.callback
        return callback

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help: the common options in one panel, or all options."""
        if ctx.params.get(HELP_ALL):
            super().format_help(ctx, formatter)
            return
        brief = copy(self)
        summary, *paragraphs = (self.help or "").split("\n\n")
        brief.help = "\n\n".join([summary, *(p for p in paragraphs if p.startswith("[dim]Ex"))])
        brief.params = [copy(each) for each in self.params if each.name not in RARE]
        for parameter in brief.params:
            parameter.rich_help_panel = None
            parameter.show_envvar = False
            parameter.metavar = parameter.metavar or ""
        typer.core.TyperCommand.format_help(brief, ctx, formatter)


class Group(_Untyped, typer.core.TyperGroup):
    """A group of commands."""


app = typer.Typer(
    name="lipaudit",
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _describe_all(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", help="Print the version and exit.", callback=_print_version
        ),
    ] = False,
) -> None:
    """Audit how robust a transformer checkpoint is.

    Per-head [bold]Lipschitz[/] bounds beside exact norms, attention statistics, the exact
    Jacobian norm of the model, adversarial accuracy, and a gate for CI.

    Start with: [cyan]lipaudit bounds demo[/]
    """


def command(
    name: str, *, panel: str = "", parent: typer.Typer = app
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command: errors become one line and the documented exit code.

    A parameter whose type is a group of options represents all options of the group. Their values
    come from the command line, else the configuration file, else the defaults. A group annotated
    with a dictionary takes the defaults in the help from it, by option name.

    Args:
        name: name of the command.
        panel: heading in the help.
        parent: the application or the enclosing group of commands.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def listed() -> None: ...

        # The terminal wraps paragraphs; lists and examples keep their lines.
        paragraphs = (inspect.getdoc(function) or "").split("\n\n")
        joined = (p if "\n " in p else p.replace("\n", " ") for p in paragraphs)
        parent.command(name, rich_help_panel=panel or None, cls=Command, help="\n\n".join(joined))(
            _set_signature(listed, [])
        )
        return function

    return register


def make_callback(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command for Typer: one parameter per option, an exit status per error."""
    hints = get_type_hints(function, include_extras=True)
    known = inspect.signature(function).parameters
    groups = {n: hints[n] for n in known if hasattr(_plain_type(hints[n]), "options")}
    kinds = {name: _plain_type(group) for name, group in groups.items()}

    def call(**typed: Any) -> None:
        try:
            # Schedulers end a job by SIGTERM: keep finished work, as after Ctrl-C.
            signal.signal(signal.SIGTERM, _terminate)
            defaults = read_defaults(typed["config"]) if RunOptions in kinds.values() else {}
            values = {
                name: resolve_group(kind, typed, defaults if kind is RunOptions else {})
                for name, kind in kinds.items()
            }
            function(**{name: typed[name] for name in known if name not in groups}, **values)
        except KeyboardInterrupt as stop:
            # 128 plus the number of the signal, as in shells: SIGINT is 2, SIGTERM 15.
            status = 143 if stop.args == ("terminated",) else 130
            if not _is_follower():
                complain("terminated" if status == 143 else "interrupted")
            raise typer.Exit(status) from None
        # Help, the version and verdicts of the gate end with these exceptions.
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            if typed.get("verbose"):
                say(traceback.format_exc())
            shown = explain_error(error)
            complain(shown.message, shown.advice)
            raise typer.Exit(shown.exit_code) from None

    parameters = [
        p.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, p in known.items()
        if name not in groups
    ]
    parameters += [p for group in groups.values() for p in _list_parameters(group)]
    kind = inspect.Parameter.KEYWORD_ONLY
    if RunOptions in kinds.values():  # only options of a run can be configured
        parameters.append(inspect.Parameter("config", kind, default=None, annotation=Config))
    # A command without rare options shows all options in --help.
    if RARE & {p.name for p in parameters}:
        parameters.append(inspect.Parameter(HELP_ALL, kind, default=False, annotation=HelpAll))
    return _set_signature(call, parameters)


def _plain_type(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _is_follower() -> bool:
    """Say whether a launcher started this process after a first one, which prints the errors."""
    from lipaudit.engine.launcher import find_place

    with suppress(UsageError):
        place = find_place()
        return place is not None and place.rank > 0
    return False


def _terminate(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt("terminated")


def complain(message: str, advice: str = "") -> None:
    """Print on stderr what happened and what to do."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"[bold red]error:[/] {escape(visible(message))}")
    if advice:
        console.print(f"[dim]  hint:[/] {escape(visible(advice))}")


def _list_parameters(group: Any) -> Iterator[inspect.Parameter]:
    """Yield the command-line parameters of a group of options; None means not typed."""
    usual = get_args(group)[1] if get_origin(group) is Annotated else {}
    for name, option in _plain_type(group).options().items():
        # A flag that is on by default needs a way to switch it off.
        flags = option.flags
        if option.kind is bool and option.default is True:
            flags = (f"{flags[0]}/--no-{flags[0].removeprefix('--')}", *flags[1:])
        # In the text, because the default of the parameter is None: the configuration may set it.
        shown = replace(option, usual=usual.get(name, option.usual)).shown
        spelling = typer.Option(
            *flags,
            metavar="FILE" if option.kind is Path else None,
            help=option.help + (f" [dim]\\[default: {shown}][/]" if shown else ""),
            rich_help_panel=option.panel or None,
            envvar=option.env or None,
            show_default=False,
        )
        kind: Any = list[option.kind] if option.repeats else option.kind  # type: ignore[name-defined]
        keyword = inspect.Parameter.KEYWORD_ONLY
        annotation = Annotated[kind | None, spelling]
        yield inspect.Parameter(name, keyword, default=None, annotation=annotation)


def _set_signature(
    function: Callable[..., None], parameters: list[inspect.Parameter]
) -> Callable[..., None]:
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in parameters}
    return function
