"""The Typer application, and the decorator that gives every command its shared behaviour."""

from __future__ import annotations

import functools
import inspect
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
import typer.core

from lipaudit import __version__
from lipaudit.cli.options import Output, Terminal, complete_words, read_config, resolve_group
from lipaudit.cli.streams import say
from lipaudit.errors import UsageError, as_user_meets, bug, visible
from lipaudit.settings import RunOptions, Settings
from lipaudit.settings.option import Option

HELP_ALL = "help_all"
SHARED = (RunOptions, Output, Terminal)
"""Groups of options that the configuration file gives defaults."""


RARE = {
    *("max_tokens", "text_column", "label_column", "score", "skip_bad"),  # data
    *("model_kwargs", "mean", "std", "input_size", "tower"),  # model
    *("seed", "dtype", "weights", "device_map", "shard", "time_limit", "offline"),  # run
    *("config", "verbose", "rank_by"),
    *("tol", "within", "layer_within", "splitting", "concat", "input", "heads", "mask"),  # norms
    *("gamma", "p_norm_tokens", "query", "rivals"),
    *(
        "steps",
        "restarts",
        "queries",
        "save_adv",
        "order",
        "nodes",
    ),
    *("momentum", "weight_decay", "clip", "schedule", "reduction", "optimizer"),  # training
    *("flip", "shift", "mixup", "cutmix", "classes", "watch", "poll", "logger", "skip"),
}
"""Options that few people need: `--help-all` shows them, `--help` fits a screen without them."""


class _Untyped:
    """A command whose help shows no type where there is none to type: of flags, of lists."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, those for help and completion among them."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
            elif parameter.nargs != 1:
                parameter.display_type_rich = _nothing
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


def _nothing(ctx: Any) -> None:
    """Show no type of an argument: its name says what it is."""


class Command(_Untyped, typer.core.TyperCommand):
    """A command whose `--help` fits a screen; `--help-all` shows the rare options, too."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help: what people use first, in one panel, or all that there is."""
        if ctx.params.get(HELP_ALL):
            super().format_help(ctx, formatter)
            return
        brief = copy(self)
        summary, *paragraphs = (self.help or "").split("\n\n")
        brief.help = "\n\n".join([summary, *(p for p in paragraphs if p.startswith("[dim]Ex"))])
        brief.params = [copy(each) for each in self.params if each.name not in RARE]
        for parameter in brief.params:
            parameter.rich_help_panel = None  # type: ignore[attr-defined]
            parameter.show_envvar = False  # type: ignore[attr-defined]
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


def command(
    name: str,
    *,
    panel: str = "",
    parent: typer.Typer = app,
    usual: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command: errors become one clear line and the documented exit code.

    A parameter whose type is a group of options stands for all of them; the group comes resolved:
    what was typed, else what the configuration file says, else the defaults.

    Args:
        name: as it is typed.
        panel: the heading of the help under which it stands.
        parent: the application or the group of commands that has it.
        usual: what its options that have no default of their own do, by name, for the help.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        body = guard(with_groups(function, usual or {}))
        parent.command(name, rich_help_panel=panel or None, cls=Command)(body)
        return function

    return register


def guard(body: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose errors become one line on stderr and an exit status."""

    @functools.wraps(body)
    def call(**options: Any) -> None:
        options.pop(HELP_ALL, None)
        with _exit_codes(verbose=bool(options.get("verbose"))):
            signal.signal(signal.SIGTERM, _terminate)
            body(**options)

    call.__doc__ = _unwrap_paragraphs(inspect.getdoc(body) or "")
    hints = get_type_hints(body, include_extras=True)
    known = inspect.signature(body).parameters.values()
    parameters = [p.replace(annotation=hints[p.name]) for p in known]
    if RARE & {p.name for p in known}:
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(HELP_ALL, kind, default=False, annotation=HelpAll))
    return _set_signature(call, parameters)


def _unwrap_paragraphs(text: str) -> str:
    """Let the terminal wrap the paragraphs; lists and examples keep their lines."""
    paragraphs = text.split("\n\n")
    joined = (p if "\n " in p else p.replace("\n", " ") for p in paragraphs)
    return "\n\n".join(joined)


@contextmanager
def _exit_codes(*, verbose: bool) -> Iterator[None]:
    """Turn exceptions into one line on stderr and the documented exit status."""
    try:
        yield
    except KeyboardInterrupt as stop:
        status = 143 if stop.args == ("terminated",) else 130
        if not _follows():
            complain("terminated" if status == 143 else "interrupted")
        raise typer.Exit(status) from None
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if verbose:
            say(traceback.format_exc())
        shown = as_user_meets(error) or bug(error)
        complain(shown.message, shown.advice)
        raise typer.Exit(shown.exit_code) from None


def _follows() -> bool:
    """Tell whether a launcher started this process beside a first one, which says what is."""
    from lipaudit.engine.launcher import find_place

    with suppress(UsageError):
        place = find_place()
        return place is not None and place.rank > 0
    return False


def _terminate(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt("terminated")


def complain(message: str, advice: str = "") -> None:
    """Say on stderr what happened, and what to do about it."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"[bold red]error:[/] {escape(visible(message))}")
    if advice:
        console.print(f"[dim]  hint:[/] {escape(visible(advice))}")


def with_groups(function: Callable[..., None], usual: Mapping[str, str]) -> Callable[..., None]:
    """Replace each parameter that is a group of options by one parameter for each of them."""
    signature = inspect.signature(function)
    hints = get_type_hints(function, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if _is_group(hint)}
    own = [
        p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for p in signature.parameters.values()
        if p.name not in groups
    ]
    if not groups:
        return _set_signature(function, own)

    def call(**typed: Any) -> None:
        shared = any(group in SHARED for group in groups.values())
        defaults = read_config(typed.get("config")) if shared else {}
        values = {
            name: resolve_group(group, typed, defaults if group in SHARED else {})
            for name, group in groups.items()
        }
        function(**{p.name: typed[p.name] for p in own}, **values)

    functools.update_wrapper(call, function)
    return _set_signature(
        call, own + [p for group in groups.values() for p in _parameters(group, usual)]
    )


def _is_group(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Settings)


def _parameters(group: type[Settings], usual: Mapping[str, str]) -> list[inspect.Parameter]:
    """Return the parameters by which a command line reads a group; None is not typed."""
    return [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[_type(option), _spell_option(option)],
        )
        for name, known in group.options().items()
        for option in [replace(known, usual=usual.get(name, known.usual))]
    ]


def _type(option: Option) -> Any:
    return list[option.kind] | None if option.repeats else option.kind | None  # type: ignore[name-defined]


def _spell_option(option: Option) -> Any:
    """Return how an option is typed and explained."""
    flags = option.flags
    if option.kind is bool and option.default is True:
        flags = (f"{flags[0]}/--no-{flags[0].removeprefix('--')}", *flags[1:])
    # Said here, since the default of what is typed is None: then the configuration may say.
    default = f" [dim]\\[default: {option.shown}][/]" if option.shown else ""
    return typer.Option(
        *flags,
        metavar="FILE" if option.kind is Path else None,
        help=option.help + default,
        rich_help_panel=option.panel or None,
        envvar=option.env or None,
        show_default=False,
        autocompletion=complete_words(option.values, commas=option.commas),
    )


def _set_signature(
    function: Callable[..., None], parameters: list[inspect.Parameter]
) -> Callable[..., None]:
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in parameters}
    return function
