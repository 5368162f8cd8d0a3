"""The Typer application: its commands by name, shared options, help, and errors as exit codes."""

from __future__ import annotations

import inspect
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import typer
import typer.core

from lipaudit import __version__
from lipaudit.cli.output import say
from lipaudit.engine.launcher import find_place
from lipaudit.errors import LipauditError, UsageError, explain_error, suggestion, visible
from lipaudit.settings import RunOptions
from lipaudit.settings.option import Settings, option
from lipaudit.tables.columns import group_values
from lipaudit.tables.plugins import collect, explain_missing, load_object

MEASURING = "Measure a checkpoint"
COMPARE = "Compare and gate"
LEARN = "Learn"
# The heading of a command in the help, and its function as module:function.
Entry = tuple[str, str]
# The commands of the core by name. The module is imported when its command is called, so `gate`
# and `report` load nothing that measures. Every measure, also that of a plug-in, is a command,
# too: `Commands` makes it from the options.
COMMANDS = {
    "audit": (MEASURING, "lipaudit.cli.measure:audit"),
    "merge": (MEASURING, "lipaudit.cli.measure:merge"),
    "report": (COMPARE, "lipaudit.cli.judge:report"),
    "inspect": (COMPARE, "lipaudit.cli.judge:inspect"),
    "compare": (COMPARE, "lipaudit.cli.judge:compare"),
    "gate": (COMPARE, "lipaudit.cli.judge:gate"),
    "baseline": (COMPARE, "lipaudit.cli.judge:baselines"),
    "explain": (LEARN, "lipaudit.cli.tools:explain"),
    "env": (LEARN, "lipaudit.cli.tools:env"),
    "models": (LEARN, "lipaudit.cli.tools:models"),
    "check": (LEARN, "lipaudit.cli.tools:check"),
    "init": (LEARN, "lipaudit.cli.tools:init"),
    "schema": (LEARN, "lipaudit.cli.tools:schema"),
}
# The help lists these first, under a heading of their own, in the order in which people need them.
START = "Start here"
FIRST = ("audit", "check", "bounds", "attack", "gate")
HELP_ALL = "help_all"
# Kind of all parameters of a command's function.
KEYWORD = inspect.Parameter.KEYWORD_ONLY
METAVARS = {int: "N", float: "X", Path: "FILE"}
# The default that help shows where a command runs several measures.
BY_MEASURE = {"samples": "by measure"}
OTHER_FILE = "A TOML file in place of lipaudit.toml and pyproject.toml."
Config = Annotated[
    Path | None, typer.Option(metavar="FILE", help=OTHER_FILE, rich_help_panel="Run")
]
NAMES = "demo, timm:NAME, hf:ORG/NAME, a folder, a file, py:FILE:FACTORY."
MODEL: Any = typer.Argument(metavar="MODEL", help=NAMES)
ModelArgument = Annotated[str, MODEL]
output_option = partial(option, panel="Output")


class Output(Settings):
    """Where a result goes."""

    format: str | None = output_option(
        None, "Format of stdout, such as table, json, csv, markdown or html.", "--format", "-f"
    )
    output: tuple[Path, ...] = output_option(
        (), "Also write FILE: .json, .csv, .md, .tex, .html, .txt (gate: .xml).", "--output", "-o"
    )


class Extent(Settings):
    """How much of a report stdout gets."""

    details: bool = output_option(False, "Print all sections, not only the first screen.")


class Several(Extent):
    """How much of reports stdout gets, and what several of them are ranked by."""

    rank_by: str | None = output_option(
        None,
        "Rank several models by METRIC, such as jacobian.norm:p95. `order` keeps the given order.",
        usual="accuracy under attack, else certified, else the median norm",
        rare=True,
    )

    def check_ranking(self, count: int) -> None:
        """Check the option --rank-by, if it is given, for a number of models or reports.

        Raises:
            UsageError: the metric is unknown, or there are fewer than two to rank.
        """
        if self.rank_by is None:
            return
        from lipaudit.gate.ranking import ORDER, make_rule

        if self.rank_by != ORDER:
            make_rule(self.rank_by)  # for its error, if the metric is unknown
        if count < 2:
            raise UsageError("--rank-by needs several models, and one was given", "Leave it out.")


class Terminal(Settings):
    """The messages on stderr."""

    quiet: bool = output_option(False, "Print no progress and no notes.", "--quiet", "-q")
    verbose: bool = output_option(
        False, "Print tracebacks and details.", "--verbose", "-v", rare=True
    )

    def tell(self, text: str) -> None:
        """Print lines on stderr, unless the command is quiet."""
        if not self.quiet:
            say(text)


def read_config(path: Path | None) -> dict[str, Any]:
    """Return the configuration, from `path` or from the file in the working directory.

    Raises:
        UsageError: `path` is missing, a file is not valid TOML, or a table has a plain value.
    """
    for name in ("lipaudit.toml", "pyproject.toml"):
        if path is None and Path(name).is_file():
            path = Path(name)
    if path is None:
        return {}
    document = _load_toml(path)
    # lipaudit.toml does not need the table [tool.lipaudit] of pyproject.toml.
    tool = document.get("tool", {})
    if isinstance(tool, dict) and "lipaudit" in tool:
        values = tool["lipaudit"]
    elif path.name == "pyproject.toml":
        values = {}
    else:
        values = document
    if not isinstance(values, dict) or not isinstance(values.get("gate", {}), dict):
        raise UsageError(
            f"tool.lipaudit and gate in {path} must be tables", "Write [tool.lipaudit] or [gate]."
        )
    return values


def _load_toml(path: Path) -> dict[str, Any]:
    """Return the content of a configuration file; raise UsageError if it is unreadable."""
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        is_syntax = isinstance(error, tomllib.TOMLDecodeError)
        advice = 'Write text in quotes: key = "value".' if is_syntax else "Check the path."
        raise UsageError(f"cannot read the configuration {path}: {error}", advice) from None


def read_defaults(path: Path | None) -> dict[str, Any]:
    """Return the options of every run that the configuration sets, by name.

    Raises:
        UsageError: a key is not an option, or its value has the wrong type or is invalid, even if
            the command line overrides it.
    """
    options = {name.replace("_", "-"): each for name, each in RunOptions.options().items()}
    values = {}
    for key, value in read_config(path).items():
        if key == "gate":  # a table that only the command gate reads
            continue
        if key not in options:
            advice = suggestion(key, sorted(options))
            raise UsageError(f"unknown key {key!r} in the lipaudit configuration", advice)
        # pydantic would take true as a number.
        is_flag = options[key].kind is bool
        if isinstance(value, bool) != is_flag:
            expected = "true or false" if is_flag else "a value"
            raise UsageError(f"{key} in the lipaudit configuration is {value!r}: give {expected}")
        values[options[key].name] = value
    if values:  # raise the errors of invalid values, which name the key
        where = "in the lipaudit configuration"
        # `spelled` returns how a message names an option.
        RunOptions.parse(values, spelled=lambda name: f"{name.replace('_', '-')} {where}")
    return values


@dataclass(eq=False)
class Commands(Mapping[str, Any]):
    """Commands by name; each is created, and its module imported, when it is first used.

    Attributes:
        entries: heading and function of each, as in COMMANDS.
        extensible: whether measures are commands, too, and wings add more.
        cache: the commands that were used.
    """

    entries: Mapping[str, Entry]
    extensible: bool
    cache: dict[str, Any] = field(default_factory=dict)

    def load_wings(self) -> dict[str, Entry]:
        """Return heading and function of every command that a wing (a plug-in) adds."""
        if not self.extensible:  # the group `baseline` has its own commands only
            return {}
        from lipaudit.measures import load_measures

        taken = {*self.entries, *load_measures()}  # names that a wing cannot use
        return collect(tuple, name="commands", taken=taken, check=_find_fault)

    def find_entry(self, name: str) -> tuple[str, Any]:
        """Return the heading of a command in the help, and its function or its group.

        Commands are declared by lipaudit or by a wing (a plug-in), or they are made of a measure.
        The last two are only in an extensible group: all of lipaudit, but not `baseline`.

        Raises:
            KeyError: there is no such command.
        """
        # Importing wings takes time: commands of lipaudit itself do without.
        commands = self.entries if name in self.entries else self.load_wings()
        if name in commands:
            panel, function = commands[name]
            return panel, load_object(function)
        if not self.extensible:
            raise KeyError(name)
        # Every measure is a command, too. If there is no such measure, `make_measure` raises the
        # KeyError.
        return MEASURING, load_object("lipaudit.cli.measure:make_measure")(name)

    def __getitem__(self, name: str) -> Any:
        """Return the command with a name, or the group of commands with this name."""
        if name not in self.cache:
            _, function = self.find_entry(name)
            if not isinstance(function, Group):
                function = make_command(name, function)
            self.cache[name] = function
        return self.cache[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names of all commands: measures, then other commands, then those of wings.

        A wing is a plug-in. A group of commands that is not extensible, such as `baseline`, has
        only its own commands: `load_wings` returns none then.
        """
        if self.extensible:
            from lipaudit.measures import option_types

            yield from option_types()  # the options of each measure, by its name
        yield from {**self.entries, **self.load_wings()}

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _find_fault(_name: str, command: tuple[Any, ...]) -> str:
    """Return why a command that a wing (a plug-in) declares cannot be used; empty if it can.

    A command is declared as its heading in the help, and its function as text: module:function.
    """
    if len(command) == 2 and all(isinstance(item, str) for item in command):
        return ""
    return "is not a pair: the heading in the help, and module:function"


class Group(typer.core.TyperGroup):
    """A group of commands, which its help lists under headings."""

    def __init__(self, *, members: Mapping[str, Entry] | None = None, **settings: Any) -> None:
        # `members` has the heading and the function of each command, by name. Without `members`,
        # the group has all commands of lipaudit, with measures and commands of wings (plug-ins).
        super().__init__(**settings)
        self.commands: Any = Commands(members or COMMANDS, extensible=members is None)

    def make_context(self, *args: Any, **how: Any) -> Any:
        """Read the words up to the command."""
        with translate_click_errors():
            return super().make_context(*args, **how)

    def invoke(self, ctx: Any) -> Any:
        """Read the words behind the command, and run it."""
        with translate_click_errors():
            return super().invoke(ctx)

    def main(self, *args: Any, **how: Any) -> Any:
        """Run the command line.

        A plug-in that cannot be used ends the command with one line and an exit code.
        """
        try:
            return super().main(*args, **how)
        except LipauditError as error:
            sys.exit(_report_error(error, verbose=False))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a line of help for each command, from the docstring of its function.

        click's own method creates all commands for their help, which takes 0.06 s.
        """
        names = list(self.commands)
        # The commands that most people need come first, under the heading START.
        first = [name for name in FIRST if name in names]
        rows = []
        for name in dict.fromkeys([*first, *names]):
            panel, function = self.commands.find_entry(name)
            if name in first:
                panel = START
            if isinstance(function, Group):
                text = function.help or ""
            else:
                text = inspect.getdoc(function) or ""
            summary = text.partition("\n\n")[0]
            rows.append((panel, (name, " ".join(summary.split()))))
        write_panels(formatter, rows)
        missing = explain_missing()  # names wings (plug-ins) that are not installed, if any
        if missing:
            formatter.write_paragraph()
            formatter.write_text(missing)


@contextmanager
def translate_click_errors() -> Iterator[None]:
    """Raise errors of click in this block, such as an unknown option, as `UsageError`.

    If a command is unknown, the advice names the wings (plug-ins) that are not installed.

    Raises:
        UsageError: the words on the command line cannot be read.
    """
    try:
        yield
    except Exception as error:
        # Errors of click, and of the copy of click inside typer, have the attribute `ctx`. A
        # command line without words raises NoArgsIsHelpError, which prints the help: no error.
        if not hasattr(error, "ctx") or type(error).__name__ == "NoArgsIsHelpError":
            raise
        # Messages of lipaudit begin with a small letter and have no full stop.
        message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
        command = error.ctx.command_path if error.ctx else "lipaudit"
        advice = f"{command} --help lists what can be typed."
        if message.startswith("No such"):
            advice = explain_missing() or advice
        raise UsageError(message[0].lower() + message[1:], advice) from None


def write_panels(formatter: Any, rows: Iterable[tuple[str, tuple[str, str]]]) -> None:
    """Write lines of help, each with its heading, under the headings."""
    for panel, lines in group_values(rows).items():
        with formatter.section(panel):
            formatter.write_dl(lines)


class Command(typer.core.TyperCommand):
    """A command whose `--help` fits a screen; `--help-all` shows the rare options, too.

    Attributes:
        rare: names of the options that only `--help-all` shows.
    """

    rare: frozenset[str] = frozenset()

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of a command, for --help (short) or --help-all.

        The short help has the first paragraph of the text, its examples, and the common options in
        one list. --help-all has the whole text, and all options under headings.
        """
        shows_all = bool(ctx.params.get(HELP_ALL))
        self.format_usage(ctx, formatter)
        for number, text in enumerate((self.help or "").split("\n\n")):
            if shows_all or number == 0 or text.startswith("Example"):
                formatter.write_paragraph()
                # A list or an example has indented lines. click wraps text, but not after \b.
                if "\n " in text:
                    text = f"\b\n{text}"
                with formatter.indentation():
                    formatter.write_text(text)
        write_panels(formatter, self._list_rows(ctx, shows_all))

    def _list_rows(self, ctx: Any, shows_all: bool) -> Iterator[Any]:
        """Yield each parameter's heading and a pair of its spelling and its help.

        Without `shows_all`, rare options are left out, and all options have one heading.
        """
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)  # None if the parameter is hidden
            if record is None or (parameter.name in self.rare and not shows_all):
                continue
            panel = None
            if shows_all:
                panel = getattr(parameter, "rich_help_panel", None)
            # click spells an argument as in the usage, with brackets or dots.
            if parameter.param_type_name == "argument":
                panel = "Arguments"
                record = (parameter.metavar or parameter.name, record[1])
            yield panel or "Options", record


def _print_version(is_on: bool) -> None:
    """Print the version and exit, if the flag --version is on."""
    if is_on:
        typer.echo(__version__)
        raise typer.Exit


def _print_all_options(ctx: typer.Context, is_on: bool) -> None:
    """Print the whole help and exit, if the flag --help-all is on."""
    if is_on:
        # `Command.format_help` reads this value, which click stores only after this callback.
        ctx.params[HELP_ALL] = True
        typer.echo(ctx.get_help(), color=ctx.color)
        raise typer.Exit


EVERY = "Show every option, also those that few people need."
HelpAll = Annotated[
    bool, typer.Option("--help-all", is_eager=True, callback=_print_all_options, help=EVERY)
]
Version = Annotated[
    bool,
    typer.Option("--version", "-V", help="Print the version and exit.", callback=_print_version),
]
# Help without colours and frames: importing rich's takes as long as everything else.
make_typer = partial(typer.Typer, rich_markup_mode=None, pretty_exceptions_enable=False)
app = make_typer(
    name="lipaudit",
    cls=Group,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback()
def _describe_all(  # typer shows the docstring as help of `lipaudit`, and --version has a callback
    version: Version = False,
) -> None:
    """Audit how robust a transformer checkpoint is.

    Per-head Lipschitz bounds beside exact norms, attention statistics, the exact Jacobian norm of
    the model, adversarial accuracy, and a gate for CI.

    Start with: lipaudit audit demo
    """


def make_command(name: str, function: Callable[..., None]) -> Any:
    """Return the command for a function; errors become one line and an exit code.

    A parameter of the function whose type is a group of options (`Settings`) becomes one parameter
    of the command for each option. Values come from the command line, else from the configuration
    file, else from the defaults. `Annotated[GROUP, {name: text}]` replaces defaults in the help.

    Args:
        name: name of the command.
        function: the function that it calls; its docstring is the help.
    """
    groups, parameters, rare = _read_parameters(function)

    def call(**typed: Any) -> None:
        """Call the function of the command; errors become one line and an exit code.

        `typed` has the value of each option by name; None means that the option was not typed.
        """
        try:
            # Schedulers end a job by SIGTERM: keep finished work, as after Ctrl-C.
            signal.signal(signal.SIGTERM, _terminate)
            function(**_parse_values(function, groups, typed))
        # Help, the version and verdicts of the gate end with these exceptions.
        except (typer.Exit, typer.Abort):
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raise typer.Exit(_report_error(error, verbose=typed.get("verbose", False))) from None

    # Typer reads the options of a command from the signature of its function.
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    # A paragraph of the docstring becomes one line, which the terminal wraps. Lists and examples,
    # with indented lines, keep their lines.
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    text = "\n\n".join(p if "\n " in p else p.replace("\n", " ") for p in paragraphs)
    # Typer makes commands of an application: here of one with a single command.
    single = make_typer(add_completion=False)
    single.command(name, cls=Command, help=text)(call)
    command: Any = typer.main.get_command(single)
    command.rare = rare
    return command


class _CommandParameters(NamedTuple):
    """The parameters of a command.

    Attributes:
        groups: the groups of options, by the function's parameter.
        all: the command-line parameters.
        rare: names of those that only `--help-all` shows.
    """

    groups: dict[str, type[Settings]]
    all: list[inspect.Parameter]
    rare: frozenset[str]


def _read_parameters(function: Callable[..., None]) -> _CommandParameters:
    """Return the parameters of a command, made from the parameters of its function.

    A parameter of the function is a plain argument, or a group of options (`Settings`). The
    command has a parameter for each option of a group.
    """
    hints = get_type_hints(function, include_extras=True)
    groups = {}
    plain = []
    options: list[inspect.Parameter] = []
    rare = {"config"}  # names of the options that only --help-all shows
    for parameter in inspect.signature(function).parameters.values():
        hint = hints[parameter.name]
        kind = hint
        # Annotated[GROUP, {...}] gives the defaults that the help shows, by option name.
        defaults: Mapping[str, str] = {}
        if get_origin(hint) is Annotated:
            kind, defaults = get_args(hint)[:2]
        if hasattr(kind, "options"):  # a group of options
            groups[parameter.name] = kind
            options += _list_parameters(kind, defaults)
            rare.update(name for name, each in kind.options().items() if each.rare)
        else:
            plain.append(parameter.replace(annotation=hint, kind=KEYWORD))
    parameters = plain + options
    if RunOptions in groups.values():  # only options of a run can be configured
        parameters.append(inspect.Parameter("config", KEYWORD, default=None, annotation=Config))
    # Without rare options, --help shows all options, and the command needs no --help-all.
    if rare & {p.name for p in parameters}:
        parameters.append(inspect.Parameter(HELP_ALL, KEYWORD, default=False, annotation=HelpAll))
    return _CommandParameters(groups, parameters, frozenset(rare))


def _parse_values(
    function: Callable[..., None], groups: Mapping[str, type[Settings]], typed: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a command's function, by the names of its parameters.

    Args:
        function: the function.
        groups: the groups of options, by the function's parameter.
        typed: the values of all arguments and options on the command line; None: not typed.
    """
    values = {}
    for name in inspect.signature(function).parameters:
        kind = groups.get(name)
        if kind is None:  # a plain argument, no group of options
            values[name] = typed[name]
            continue
        given = {
            option: typed[option] for option in kind.options() if typed.get(option) is not None
        }
        # The configuration file sets options of every run. The command line takes precedence.
        configured = read_defaults(typed["config"]) if kind is RunOptions else {}
        only_configured = configured.keys() - given.keys()
        values[name] = kind.parse({**configured, **given}, configured=only_configured)
    return values


def _list_parameters(group: Any, usual: Mapping[str, str]) -> Iterator[inspect.Parameter]:
    """Yield the command-line parameters of a group of options; None means not typed.

    Args:
        group: the group.
        usual: what the help shows as default in place of an option's own, by name.
    """
    for name, each in group.options().items():
        # A flag that is on by default needs a way to switch it off.
        flags = each.flags
        if each.kind is bool and each.default is True:
            flags = (f"{flags[0]}/--no-{flags[0].removeprefix('--')}", *flags[1:])
        # The help text names the default, `shown`. The parameter itself has None, which means "not
        # typed": then the configuration may set the option.
        default = replace(each, usual=usual.get(name, each.usual)).shown
        spelling = typer.Option(
            *flags,
            metavar=each.metavar or METAVARS.get(each.kind, ""),
            help=each.help + (f" [default: {default}]" if default else ""),
            rich_help_panel=each.panel or None,
            envvar=each.env or None,
            show_default=False,
        )
        kind: Any = each.kind
        if each.repeats:
            kind = list[each.kind]  # type: ignore[name-defined]
        annotation = Annotated[kind | None, spelling]
        yield inspect.Parameter(name, KEYWORD, default=None, annotation=annotation)


def _terminate(_number: int, _frame: object) -> None:
    """End the process at SIGTERM as Ctrl-C does."""
    raise KeyboardInterrupt("terminated")


def _report_error(error: BaseException, *, verbose: bool) -> int:
    """Print an error on stderr, and return its exit code."""
    if isinstance(error, KeyboardInterrupt):
        is_terminated = error.args == ("terminated",)  # by SIGTERM, see `_terminate`
        process = None  # the rank, if a launcher such as torchrun started several
        with suppress(UsageError):
            process = find_place()
        if process is None or process.rank == 0:  # of several processes, the first one prints
            complain("terminated" if is_terminated else "interrupted")
        # 128 plus the number of the signal, as in shells: SIGINT is 2, SIGTERM 15.
        return 143 if is_terminated else 130
    if verbose:
        say("".join(traceback.format_exception(error)))
    fault = explain_error(error)
    complain(fault.message, fault.advice)
    return int(fault.exit_code)


def complain(message: str, advice: str = "") -> None:
    """Print on stderr what happened and what to do."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"[bold red]error:[/] {escape(visible(message))}")
    if advice:
        console.print(f"[dim]  hint:[/] {escape(visible(advice))}")
