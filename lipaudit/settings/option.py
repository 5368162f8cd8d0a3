"""One option, declared once: type, default, help, check, and spelling on a command line."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, cast, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from lipaudit.errors import UsageError, suggestion

PLAIN = (bool, int, float, Path)
"""Types that the command line reads directly; others are given as text."""

COMMAS = "omma-separated"
"""Marks, in the help of an option, that it takes several words, so that completion continues a
list."""


INT64 = 2**63
"""Integers must be between -INT64 and INT64 - 1 to fit into arrays."""


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
    """Return the need for another option: one of some values, or any value if none is given."""
    named = f" {' or '.join(map(str, values))}" if values else ""

    def holds(settings: Any) -> bool:
        value = getattr(settings, other)
        return value in values if values else value is not None

    return Need(flag(other) + named, holds)


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
        commas: whether several words may be given, separated by commas.
        usual: the default in words, if it depends on other things.
        need: when the option has an effect; None: always.
        kinds: the kinds of models it applies to (image, tokens, text); empty: all.
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
    commas: bool = False
    usual: str = ""
    need: Need | None = None
    kinds: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """Return the default for the help; None if the option is off or has no default."""
        if self.default is None or self.default is False:
            return self.usual
        return self.flags[0].removeprefix("--") if self.default is True else str(self.default)


def option(
    default: Any,
    help: str,
    *flags: str,
    panel: str = "",
    env: str = "",
    usual: str = "",
    values: Callable[[], Iterable[str]] | None = None,
    need: Need | None = None,
    kinds: tuple[str, ...] = (),
    **checks: Any,
) -> Any:
    """Declare an option: a pydantic field with its spelling on a command line.

    Args:
        default: default of the field; text of a parsed type is parsed.
        help: one line.
        flags: its spellings; by default `--` and the field's name.
        panel: heading in the help.
        env: environment variable of the option.
        usual: the default in words, for the help.
        values: returns possible words, if its type does not list them.
        need: when the option has an effect.
        kinds: the kinds of models it applies to; empty: all.
        checks: further arguments of `pydantic.Field`.
    """
    known: dict[str, Any] = {"help": help, "panel": panel, "env": env, "commas": COMMAS in help}
    known |= {"usual": usual, "need": need, "kinds": kinds}
    known |= ({"flags": flags} if flags else {}) | ({"values": values} if values else {})
    checks.setdefault("validate_default", isinstance(default, str))
    return Field(default, description=help, json_schema_extra={"option": known}, **checks)


class Settings(BaseModel):
    """A group of options: immutable, closed; fields declared by `option` can be typed."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, defer_build=True
    )

    _configured: frozenset[str] = PrivateAttr(default=frozenset())

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Return the options that can be typed on a command line, by field name."""
        described = {}
        for name, info in cls.model_fields.items():
            extra = info.json_schema_extra
            if isinstance(extra, Mapping) and "option" in extra:
                known: dict[str, Any] = {"flags": (flag(name),)}
                known |= {"values": partial(_choices, info.annotation)}
                known |= cast("Mapping[str, Any]", extra["option"])
                known["default"] = None if info.default == () else info.default
                known["kind"], known["repeats"] = _kind(info.annotation, info.metadata)
                described[name] = Option(name=name, **known)
        return described

    @model_validator(mode="after")
    def _needed(self) -> Self:
        self.require_needed()
        return self

    def require_needed(self) -> None:
        """Refuse options without an effect beside the others.

        Raises:
            UsageError: with the first of them.
        """
        for known in self.options().values():
            if known.need and self._changed(known) and not known.need.holds(self):
                raise UsageError(
                    f"{known.flags[0]} needs {known.need.text}",
                    f"Change that, or leave out {known.flags[0]}.",
                )

    def _changed(self, known: Option) -> bool:
        """Say whether an option differs from its default, which may be stored as text."""
        default = type(self).model_fields[known.name].default
        value = getattr(self, known.name)
        plain = self.model_dump(mode="json", include={known.name}).get(known.name, value)
        return value != default and plain != default

    def require_kind(self, kind: str) -> None:
        """Refuse options that do not apply to a kind of model; configured ones are ignored.

        Raises:
            UsageError: the message names the first option that was given.
        """
        for known in self.options().values():
            given = known.name not in self._configured and self._changed(known)
            if known.kinds and given and kind not in known.kinds:
                raise UsageError(
                    f"{known.flags[0]} works only for models that take "
                    f"{' or '.join(known.kinds)}; this one takes {kind}",
                    "Leave it out.",
                )

    @classmethod
    def checked(
        cls,
        values: Mapping[str, Any],
        *,
        spelled: Callable[[str], str] | None = None,
        configured: Collection[str] = (),
    ) -> Self:
        """Return settings with these values, and defaults for the others.

        Args:
            values: values by field name.
            spelled: returns the name of a field for messages; None: the command-line spelling.
            configured: values from the configuration, which may have no effect.

        Raises:
            UsageError: an option does not accept its value; the message names the option.
        """
        known = cls.options()
        spell = spelled or (lambda name: known[name].flags[0] if name in known else flag(name))
        for name, value in values.items():
            if isinstance(value, int) and not -INT64 <= value < INT64:
                raise UsageError(f"{spell(name)}: {value} is too large a number")
        try:
            settings = cls.model_validate(dict(values))
            settings._configured = frozenset(configured)
            return settings
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0]) if first["loc"] else ""
            wrong = first["msg"].removeprefix("Value error, ")
            wrong = wrong.replace("Input should be", "it must be")
            words = known[name].values() if name in known else ()
            advice = suggestion(str(first["input"]), words, "")
            raise UsageError(f"{spell(name)}: {first['input']!r}: {wrong}", advice) from None


def flag(name: str) -> str:
    """Return the spelling of an option on the command line.

    >>> flag("max_tokens")
    '--max-tokens'
    """
    return "--" + name.replace("_", "-")


def _choices(annotation: Any) -> tuple[str, ...]:
    """Return the words of a type: those of its first `Literal`.

    >>> _choices(tuple[Literal["a", "b"], ...] | None)
    ('a', 'b')
    """
    if get_origin(annotation) is Literal:
        return tuple(map(str, get_args(annotation)))
    return next(filter(None, map(_choices, get_args(annotation))), ())


def _kind(annotation: Any, metadata: Sequence[Any] = ()) -> tuple[type, bool]:
    """Return the command-line type of an annotation, and whether the option repeats."""
    if get_origin(annotation) is Annotated:
        inner, *added = get_args(annotation)
        return _kind(inner, [*added, *metadata])
    if any(isinstance(each, BeforeValidator) for each in metadata):
        return str, False  # the type parses text itself, such as `auto` beside numbers
    if get_origin(annotation) in (Union, UnionType):
        choices = [each for each in get_args(annotation) if each is not type(None)]
        return _kind(choices[0]) if len(choices) == 1 else (str, False)
    if annotation == tuple[Path, ...]:
        return Path, True
    if get_origin(annotation) is Literal or annotation not in PLAIN:
        return str, False
    return annotation, False
