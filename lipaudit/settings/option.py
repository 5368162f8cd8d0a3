"""One option, declared once: type, default, help, check, and spelling on a command line."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin

import pydantic
from pydantic import BaseModel, BeforeValidator, Field

from lipaudit.errors import UsageError, suggestion

# Attributes of `Option` that a field declares; the others follow from the field.
DECLARED = frozenset({"panel", "env", "usual", "values", "need", "kinds", "metavar", "rare"})
S = TypeVar("S", bound="Settings")
# Types that the command line reads directly; others are given as text.
PLAIN = (bool, int, float, Path)

# Integers must be between -INT64 and INT64 - 1 to fit into arrays.
INT64 = 2**63


@dataclass(frozen=True)
class Need:
    """The condition under which an option has an effect; otherwise giving it is an error.

    Attributes:
        text: the condition, as a text after the option's name.
        holds: returns whether settings fulfil the condition.
    """

    text: str
    holds: Callable[[Any], bool]


def needs(other: str, *values: Any) -> Need:
    """Return the condition that another option is given.

    Args:
        other: the name of the other option.
        values: the values that fulfil the condition; empty: any value does.
    """
    text = flag(other)
    if values:
        text += f" {' or '.join(map(str, values))}"

    def holds(settings: Any) -> bool:
        # Whether the option `other` has one of the values, or any value if none are listed.
        value = getattr(settings, other)
        if values:
            return value in values
        return value is not None

    return Need(text=text, holds=holds)


@dataclass(frozen=True)
class Option:
    """The properties of an option that a command line needs.

    Attributes:
        name: name of its field.
        flags: its spellings, the long one first.
        kind: type on the command line: bool, int, float, Path, or str for texts parsed here.
        default: default in the help; None shows nothing.
        help: one line.
        panel: heading in the help.
        env: environment variable of the option.
        repeats: whether it may be given several times.
        values: returns possible words, for shells and errors; not always all of them.
        usual: the default in words, if it depends on other things.
        need: when the option has an effect; None: always.
        kinds: the kinds of models it applies to (image, tokens, text); empty: all.
        metavar: word for its value in the help, such as FOLDER; empty: by its kind.
        rare: whether only `--help-all` shows it, so that `--help` fits on one screen.
    """

    name: str
    flags: tuple[str, ...]
    kind: type
    default: Any
    help: str
    panel: str = ""
    env: str = ""
    repeats: bool = False
    values: Callable[[], Iterable[str]] = tuple
    usual: str = ""
    need: Need | None = None
    kinds: tuple[str, ...] = ()
    metavar: str = ""
    rare: bool = False

    @property
    def shown(self) -> str:
        """Return the default to show in the help, such as `auto`; empty: the help shows none.

        Without a default, or for a switch that is off, this is `usual`: words for a default that
        depends on other things, or empty. For a switch that is on by default, this is the first
        spelling without dashes: `flip` for --flip/--no-flip. All other defaults are shown as text.
        """
        if self.default is None or self.default is False:
            return self.usual
        if self.default is True:
            return self.flags[0].removeprefix("--")
        return str(self.default)


def option(default: Any, help: str, *flags: str, **how: Any) -> Any:
    """Declare a field of `Settings` that people can type.

    Args:
        default: the default; a text is parsed like a text from the command line.
        help: one line for the help.
        flags: the spellings of the option; by default `--` and the name of the field.
        how: attributes of `Option` (panel, env, usual, values, need, kinds, metavar, rare), and
            arguments of `pydantic.Field` that check values (ge, lt).
    """
    # The attributes are stored with the field; `Settings.options` reads them.
    attributes: dict[str, Any] = {"help": help}
    if flags:
        attributes["flags"] = flags
    for name in DECLARED & how.keys():
        attributes[name] = how.pop(name)
    # A default given as text must be validated, so that pydantic parses it.
    how.setdefault("validate_default", isinstance(default, str))
    return Field(default, description=help, json_schema_extra={"option": attributes}, **how)


def add_options(kind: type[S], added: Mapping[str, Any]) -> type[S]:
    """Return a class of settings with more options.

    Args:
        kind: the class.
        added: the options by name, as `repeat_option` returns them.
    """
    # pydantic.create_model takes each field as (type, declaration).
    fields: dict[str, Any] = {name: (field.annotation, field) for name, field in added.items()}
    extended: type[S] = pydantic.create_model(
        kind.__name__, __base__=kind, __module__=kind.__module__, **fields
    )
    return extended


def repeat_option(source: type[Settings], name: str, **how: Any) -> Any:
    """Return a copy of an option of another class of settings, with some attributes changed.

    Args:
        source: the settings that have the option.
        name: the name of the option.
        how: the changed attributes, such as need or exclude.
    """
    known = copy(source.model_fields[name])
    extra: Any = known.json_schema_extra
    known.exclude = how.pop("exclude", known.exclude)
    known.json_schema_extra = {"option": extra["option"] | how}
    return known


class Settings(BaseModel):
    """A group of options: immutable, closed; fields declared by `option` can be typed."""

    # Validators are built when first used: a command pays for its own options only.
    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, defer_build=True
    )

    # Names of values from the configuration: they may have no effect on the model at hand.
    _configured: frozenset[str] = pydantic.PrivateAttr(default=frozenset())

    @classmethod
    def complete(cls) -> type[Self]:
        """Return the class with all options; a subclass may add options of installed measures."""
        return cls

    def __new__(cls, **_values: Any) -> Self:
        """Return an instance of `cls.complete()`, which may have more options than this class."""
        return super().__new__(cls.complete())

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Return the options that can be typed on a command line, by field name.

        These are the fields declared by `option`. Fields without such a declaration can be given
        in Python only. `complete` adds the options of installed plug-ins to this class.
        """
        described = {}
        for name, info in cls.complete().model_fields.items():
            extra: Any = info.json_schema_extra or {}
            if "option" in extra:
                kind, repeats = _find_type(info.annotation, info.metadata)
                # Defaults from the field; attributes declared by `option` replace them.
                attributes: dict[str, Any] = {
                    "flags": (flag(name),),
                    "values": partial(_list_choices, info.annotation),
                    # (): an option that may be repeated, and is not given at all. The help would
                    # show "()", so it shows no default.
                    "default": None if info.default == () else info.default,
                    "kind": kind,
                    "repeats": repeats,
                }
                attributes |= extra["option"]
                described[name] = Option(name=name, **attributes)
        return described

    def require_needed(self) -> Self:
        """Refuse an option that has no effect because the condition in `need` does not hold.

        Raises:
            UsageError: the message names the first such option.
        """
        for known in self.options().values():
            if known.need and self._differs(known) and not known.need.holds(self):
                name = known.flags[0]
                raise UsageError(
                    f"{name} needs {known.need.text}", f"Change that, or leave out {name}."
                )
        return self

    _check_needs = pydantic.model_validator(mode="after")(require_needed)

    def _differs(self, known: Option) -> bool:
        """Return whether an option differs from its default.

        A default may be declared as a text such as "8/255", and the value is the parsed text. Such
        a default equals the value only when the value is written as text (JSON). Other defaults
        are compared as values. So the option differs only if both comparisons say so.
        """
        default = type(self).model_fields[known.name].default
        value = getattr(self, known.name)
        as_text = self.model_dump(mode="json", include={known.name}).get(known.name, value)
        return value != default and as_text != default

    def require_kind(self, kind: str) -> None:
        """Refuse options that do not apply to models of a kind (image, tokens or text).

        Options from a configuration file are for all models, so they are not refused.

        Raises:
            UsageError: the message names the first option that was given.
        """
        for known in self.options().values():
            is_given = known.name not in self._configured and self._differs(known)
            if is_given and known.kinds and kind not in known.kinds:
                raise UsageError(
                    f"{known.flags[0]} works only for models that take "
                    f"{' or '.join(known.kinds)}; this one takes {kind}",
                    "Leave it out.",
                )

    @classmethod
    def parse(
        cls,
        values: Mapping[str, Any],
        *,
        spelled: Callable[[str], str] | None = None,
        configured: Collection[str] = (),
    ) -> Self:
        """Return settings with these values, and defaults for all other options.

        Args:
            values: values by field name.
            spelled: returns the name of a field for messages; None: the command-line spelling.
            configured: names of values from a configuration file. These values may have no effect
                on the model, which is an error for values from the command line.

        Raises:
            UsageError: an option does not accept its value; the message names the option.
        """
        kind = cls.complete()  # the class with the options of installed plug-ins
        known = kind.options()
        # How messages write the name of a field.
        spell = spelled or (lambda name: known[name].flags[0] if name in known else flag(name))
        accepted = dict(values)
        for name, value in values.items():
            # JSON and the command line read integers of any size, but arrays do not store them.
            if isinstance(value, int) and not -INT64 <= value < INT64:
                raise UsageError(f"{spell(name)}: {value} is too large a number")
            # A number or a list, as Python users give them, for an option whose values are texts.
            if name in known and _is_text(kind.model_fields[name].annotation):
                accepted[name] = _write_text(value)
        try:
            settings = kind.model_validate(accepted)
        except pydantic.ValidationError as error:
            name, reason, advice = _explain_invalid(error, known)
            raise UsageError(f"{spell(name)}: {reason}", advice) from None
        settings._configured = frozenset(configured)
        return settings


def _explain_invalid(
    error: pydantic.ValidationError, known: Mapping[str, Option]
) -> tuple[str, str, str]:
    """Return the first field that does not accept its value, the reason, and advice.

    Args:
        error: the error of pydantic.
        known: the options by the names of their fields.
    """
    first = error.errors()[0]
    name = ""
    if first["loc"]:  # the field first, then the position inside its value
        name = str(first["loc"][0])
    reason = first["msg"].removeprefix("Value error, ")
    reason = reason.replace("Input should be", "it must be")
    value = first["input"]
    if isinstance(value, Path):
        value = str(value)  # as typed: not PosixPath('...')
    if not reason.startswith(repr(value)):
        reason = f"{value!r}: {reason}"
    words = known[name].values() if name in known else ()
    return name, reason, suggestion(str(value), words, otherwise="")


def _write_text(value: Any) -> Any:
    """Return a number or a list as text, for an option whose values are texts.

    In Python, such options may be given as order=1 or attack=["fgsm", "pgd"]. Other values are
    returned unchanged.
    """
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return value


def flag(name: str) -> str:
    """Return the spelling of an option on the command line.

    >>> flag("max_tokens")
    '--max-tokens'
    """
    return "--" + name.replace("_", "-")


def _list_choices(annotation: Any) -> tuple[str, ...]:
    """Return the words that a type accepts: the words of the first `Literal` in the type.

    >>> _list_choices(tuple[Literal["a", "b"], ...] | None)
    ('a', 'b')
    """
    if get_origin(annotation) is Literal:
        return tuple(map(str, get_args(annotation)))
    for inner in get_args(annotation):
        choices = _list_choices(inner)
        if choices:
            return choices
    return ()


def _is_text(annotation: Any) -> bool:
    """Return whether all values of a type, except None, are text or words of a `Literal`."""
    if get_origin(annotation) in (Union, UnionType):
        return all(inner is type(None) or _is_text(inner) for inner in get_args(annotation))
    return annotation is str or get_origin(annotation) is Literal


def _find_type(annotation: Any, metadata: Sequence[Any] = ()) -> tuple[type, bool]:
    """Return the type of an option on the command line, and whether it may be given repeatedly.

    Types that the command line does not know are typed as text, which pydantic parses.

    Args:
        annotation: the type of a field.
        metadata: the validators and other objects that `Annotated` adds to the type.
    """
    if get_origin(annotation) is Annotated:
        inner, *added = get_args(annotation)
        return _find_type(inner, [*added, *metadata])
    if any(isinstance(item, BeforeValidator) for item in metadata):
        return str, False  # the type has its own parser of text, for example `auto` or a number
    if get_origin(annotation) in (Union, UnionType):
        choices = [inner for inner in get_args(annotation) if inner is not type(None)]
        if len(choices) == 1:  # TYPE | None
            return _find_type(choices[0])
        return str, False
    if annotation == tuple[Path, ...]:  # --option A --option B
        return Path, True
    if annotation in PLAIN:
        return annotation, False
    return str, False
