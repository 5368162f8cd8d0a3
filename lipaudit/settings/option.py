"""One option, declared once: type, default, help, check, and spelling on a command line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, PlainSerializer

from lipaudit.errors import UsageError, suggestion
from lipaudit.tables.trials import Radius, parse_radius, parse_range

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
    """Return the condition that another option is given: with one of `values`, or with any value.

    Args:
        other: the name of the other option.
        values: the values that it may have; none: any.
    """
    text = flag(other)
    if values:
        text += f" {' or '.join(map(str, values))}"

    def holds(settings: Any) -> bool:
        # Whether settings fulfil the condition.
        value = getattr(settings, other)
        if values:
            return value in values
        return value is not None

    return Need(text, holds)


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
        """Return the default for the help, such as `auto`; empty shows none.

        Of a switch that is on by default it is the first spelling: `flip` for --flip/--no-flip.
        """
        if self.default is None or self.default is False:
            return self.usual
        if self.default is True:
            return self.flags[0].removeprefix("--")
        return str(self.default)


def option(default: Any, help: str, *flags: str, **how: Any) -> Any:
    """Declare a field of `Settings` that people can type.

    Args:
        default: its default; a text is parsed as if a person had typed it.
        help: one line.
        flags: its spellings; by default `--` and the field's name.
        how: attributes of `Option` (panel, env, usual, values, need, kinds, metavar, rare), and
            arguments of `pydantic.Field` that check values (ge, lt).
    """
    # The attributes are stored with the field; `Settings.options` reads them.
    attributes: dict[str, Any] = {"help": help}
    if flags:
        attributes["flags"] = flags
    for name in DECLARED & how.keys():
        attributes[name] = how.pop(name)
    # Defaults of parsed types are stored as text, as a person would type them.
    how.setdefault("validate_default", isinstance(default, str))
    return Field(default, description=help, json_schema_extra={"option": attributes}, **how)


def add_options(kind: type[S], added: Mapping[str, Any]) -> type[S]:
    """Return a class of settings with more options.

    Args:
        kind: the class.
        added: the options by name, as `repeat_option` returns them.
    """
    # As pydantic takes fields: (type, declaration).
    fields: dict[str, Any] = {name: (field.annotation, field) for name, field in added.items()}
    extended: type[S] = pydantic.create_model(
        kind.__name__, __base__=kind, __module__=kind.__module__, **fields
    )
    return extended


def repeat_option(source: type[Settings], name: str, **how: Any) -> Any:
    """Declare an option of other settings again, with other attributes (need, exclude...).

    Args:
        source: the settings that have the option.
        name: its name.
        how: the attributes that differ.
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
        """Return the class with the options that measures add; as a rule the class itself."""
        return cls

    def __new__(cls, **_values: Any) -> Self:
        """Return an instance of the complete class."""
        return super().__new__(cls.complete())

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Return the options that can be typed on a command line, by field name."""
        described = {}
        for name, info in cls.complete().model_fields.items():
            extra: Any = info.json_schema_extra or {}
            if "option" in extra:
                kind, repeats = _find_type(info.annotation, info.metadata)
                # Derived from the field, unless `option` declares them.
                attributes: dict[str, Any] = {
                    "flags": (flag(name),),
                    "values": partial(_list_choices, info.annotation),
                    "default": None if info.default == () else info.default,
                    "kind": kind,
                    "repeats": repeats,
                }
                attributes |= extra["option"]
                described[name] = Option(name=name, **attributes)
        return described

    def require_needed(self) -> Self:
        """Refuse an option that has no effect, because it needs another one that is not set.

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
        """Say whether an option differs from its default, which may be the text that gives it."""
        default = type(self).model_fields[known.name].default
        value = getattr(self, known.name)
        as_text = self.model_dump(mode="json", include={known.name}).get(known.name, value)
        return value != default and as_text != default

    def require_kind(self, kind: str) -> None:
        """Refuse options that do not apply to models of a kind (image, tokens or text).

        Those of a configuration file are for all models, so they are not refused.

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
        """Return settings with these values, and defaults for the others.

        Args:
            values: values by field name.
            spelled: returns the name of a field for messages; None: the command-line spelling.
            configured: names of the values from a configuration file, which may have no effect.

        Raises:
            UsageError: an option does not accept its value; the message names the option.
        """
        kind = cls.complete()
        known = kind.options()
        spell = spelled or (lambda name: known[name].flags[0] if name in known else flag(name))
        accepted = dict(values)
        for name, value in values.items():
            # JSON and the command line read integers of any size.
            if isinstance(value, int) and not -INT64 <= value < INT64:
                raise UsageError(f"{spell(name)}: {value} is too large a number")
            if name in known and _is_text(kind.model_fields[name].annotation):
                accepted[name] = _write_text(value)
        try:
            settings = kind.model_validate(accepted)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            name = ""
            if first["loc"]:  # the field, and the position inside of its value
                name = str(first["loc"][0])
            reason = first["msg"].removeprefix("Value error, ")
            reason = reason.replace("Input should be", "it must be")
            words = known[name].values() if name in known else ()
            advice = suggestion(str(first["input"]), words, "")
            raise UsageError(f"{spell(name)}: {first['input']!r}: {reason}", advice) from None
        settings._configured = frozenset(configured)
        return settings


def _write_text(value: Any) -> Any:
    """Return the text of an option that Python may give as a number or a list.

    Examples are order=1 and attack=["fgsm", "pgd"]. Other values stay as they are.
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
    """Return the words that a type accepts: those of the first `Literal` in it.

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
    """Say whether all values of a type, except None, are text or words of a `Literal`."""
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
        return str, False  # the type parses text itself, such as `auto` beside numbers
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


# A number with its unit, or nothing; then hours, minutes and seconds in this order.
_TIME = r"(?:(\d+(?:\.\d+)?)%s)?"
DURATION = re.compile(_TIME % "h" + _TIME % "m(?:in)?" + _TIME % "s?")
# Smallest number of tokens: worst-case tokens are two points.
FEWEST = 2
MOST_LENGTHS = 1000
MOST_TOKENS = 10**7
MOST_LAYERS = 10**5
MOST_PIXELS = 10**5
# Limit above any real use, so that a typing error does not fill the memory.
MOST_SHARDS = 10**5


def _require(fits: object) -> None:
    """Refuse a text; `_read_with` says what it must be."""
    if not fits:
        raise ValueError("the text does not have the form of the option")


def _read_integers(pattern: str, text: str) -> list[int]:
    """Return the integers in the groups of a pattern; -1 for a group that matches nothing.

    Spaces around the signs / : . - do not matter.

    Raises:
        ValueError: the text does not match the pattern.
    """
    compact = re.sub(r"\s*([/:.-])\s*", r"\1", text.strip())
    match = re.fullmatch(pattern, compact)
    if match is None:
        raise ValueError(f"{text!r} has another form")
    return [int(number or -1) for number in match.groups()]


def read_layers(text: str) -> tuple[int, ...]:
    """Read `0,5-7` as (0, 5, 6, 7)."""
    layers: list[int] = []
    for piece in text.split(","):
        first, last = _read_integers(r"(\d+)(?:-(\d+))?", piece)
        if last < 0:  # a single layer
            last = first
        _require(first <= last < first + MOST_LAYERS)
        layers += range(first, last + 1)
    return tuple(layers)


def read_lengths(text: str) -> tuple[int, ...]:
    """Read `8:256:log6` as (8, 16, 32, 64, 128, 256): six lengths with equal ratios."""
    first, last, count = _read_integers(r"(\d+):(\d+):log(\d+)", text)
    _require(FEWEST <= first < last <= MOST_TOKENS and 2 <= count <= MOST_LENGTHS)
    lengths = []
    for i in range(count):
        # Even steps of the logarithm, because growth is fitted by a power law, a line over log n.
        step = math.log(last / first) * i / (count - 1)
        lengths.append(round(first * math.exp(step)))
    return tuple(dict.fromkeys(lengths))  # rounding may give a length twice


def read_quantization(text: str) -> tuple[int, int]:
    """Read `int4:32` as (4, 32): bits, and the size of a group of inputs; 0 without groups."""
    match = re.fullmatch(r"int([48])(?::(\d+))?", text.strip())
    if match is None or match[2] == "0":
        raise ValueError(f"{text!r} has another form")
    return int(match[1]), int(match[2] or 0)


def read_head(text: str) -> tuple[int, int]:
    """Read LAYER.HEAD."""
    layer, head = _read_integers(r"(\d+)\.(\d+)", text)
    return layer, head


def read_keywords(text: str) -> dict[str, Any]:
    """Read `NAME=VALUE,...`; a value is a number, true, false or none if it can be, else text."""
    values: dict[str, Any] = {}
    for piece in filter(None, text.split(",")):
        before, equals, after = piece.partition("=")
        key = before.strip()
        word = after.strip()
        _require(key.isidentifier() and equals)
        values[key] = word
        as_json = word.lower()
        if as_json == "none":
            as_json = "null"
        with suppress(ValueError):  # no JSON value: the word stays a text
            values[key] = json.loads(as_json)
    return values


def write_keywords(values: Mapping[str, Any]) -> str:
    """Write values in the form that `read_keywords` reads.

    >>> write_keywords({"depth": 2, "pretrained": False})
    'depth=2,pretrained=false'
    """
    words = []
    for key, value in values.items():
        word = str(value)
        if value is None or isinstance(value, bool):
            word = word.lower()
        words.append(f"{key}={word}")
    return ",".join(words)


def read_shard(text: str) -> tuple[int, int]:
    """Read `2/4`, the second of four."""
    number, count = _read_integers(r"(\d+)/(\d+)", text)
    _require(1 <= number <= count <= MOST_SHARDS)
    return number, count


def read_duration(text: str) -> float:
    """Read `90`, `90s`, `30min` or `1h30m` as seconds.

    >>> read_duration("1h30m")
    5400.0
    """
    match = DURATION.fullmatch(text.replace(" ", ""))
    _require(match is not None and any(match.groups()))
    assert match is not None
    hours, minutes, seconds = (float(number or 0) for number in match.groups())
    return 3600 * hours + 60 * minutes + seconds


def require_distinct(values: Sequence[Any]) -> Sequence[Any]:
    """Return the values, if none is repeated: it would be measured twice, with one result.

    Raises:
        ValueError: a value is repeated.
    """
    for i, value in enumerate(values):
        if value in values[:i]:
            raise ValueError(f"{getattr(value, 'text', value)} is named twice")
    return values


def _read_with(read: Callable[[str], Any], form: str = "") -> BeforeValidator:
    """Return a step of pydantic's validation that parses text; other values stay as they are.

    Args:
        read: returns the value of a text; its errors are replaced by `form`.
        form: what the text must be, with an example; empty keeps the errors of `read`.
    """

    def convert(value: Any) -> Any:
        # Python may pass a value of the right type, which is not parsed.
        if not isinstance(value, str):
            return value
        try:
            return read(value)
        except ValueError as error:
            reason = f"it must be {form}" if form else str(error)
            raise ValueError(reason) from None

    return BeforeValidator(convert)


def _read_radius(value: Any, *, parse: Callable[[str], Any] = parse_radius) -> Any:
    """Parse a radius: a text, or a number by its decimal spelling, so 0.1 is exactly one tenth.

    Args:
        value: the radius; values of other types stay as they are.
        parse: parses a text.
    """
    if not isinstance(value, int | float | str) or isinstance(value, bool):
        return value
    try:
        return parse(str(value))
    except UsageError as error:  # a ValueError, so that the message names the option
        raise ValueError(f"{error.message}. {error.advice}") from None


def _read_radii(values: Any) -> Any:
    """Parse radii and ranges of radii: a text with commas, one value, or several."""
    if isinstance(values, str):
        values = list(filter(str.strip, values.split(",")))
    if not isinstance(values, Iterable):
        values = (values,)
    radii: list[Any] = []
    for value in values:
        radius = _read_radius(value, parse=parse_range)
        if isinstance(radius, tuple):  # a range of radii
            radii += radius
        else:
            radii.append(radius)
    return tuple(require_distinct(radii))


def _require_balls(radii: tuple[Radius, ...], counted: tuple[str, ...] = ()) -> tuple[Radius, ...]:
    """Return the radii, if all are positive and certificates exist for them.

    Args:
        radii: the radii of balls, without a unit; or numbers of changes, such as 2 words.
        counted: the units for which certificates exist.
    """
    for radius in radii:
        if radius.unit and radius.unit not in counted:
            raise ValueError(f"certificates hold for balls, not for changed {radius.unit}")
        if not radius.value:
            raise ValueError("give a radius above 0")
    return radii


def _order_layers(layers: Any) -> Any:
    """Return layers in order, each once; None stays None.

    From Python, one layer may be given as a number.
    """
    if layers is None:
        return None
    if isinstance(layers, int):
        layers = (layers,)
    if not layers or not 0 <= min(layers) <= max(layers) < MOST_LAYERS:
        raise ValueError("give at least one layer, counted from 0")
    return tuple(sorted({*layers}))


Layers = Annotated[
    tuple[int, ...] | None,
    BeforeValidator(_order_layers),
    _read_with(read_layers, "a list of layers, for example 0,5-7"),
]
Lengths = Annotated[
    tuple[int, ...], _read_with(read_lengths, "FIRST:LAST:logCOUNT, for example 8:256:log8")
]


# Reads a comma-separated list.
def _split_list(text: str) -> tuple[str, ...]:
    """Return the words between commas, each once."""
    words = [word.strip() for word in text.split(",")]
    return tuple(require_distinct(list(filter(None, words))))


read_list = _read_with(_split_list)
Names = Annotated[tuple[str, ...] | None, read_list]
OneHead = Annotated[
    str | None,
    _read_with(lambda text: "{}.{}".format(*read_head(text)), "LAYER.HEAD, for example 3.1"),
]
Quantization = Annotated[
    str | None,
    _read_with(
        lambda text: text.strip() if read_quantization(text) else None,
        "int8 or int4, and with groups of 32 inputs int8:32 or int4:32",
    ),
]
Numbers = Annotated[
    tuple[float, ...] | None,
    _read_with(
        lambda text: tuple(map(float, text.split(","))), "a list of numbers, for example 0.5,0.5"
    ),
]
Keywords = Annotated[
    Mapping[str, Any] | None, _read_with(read_keywords, "k=v,..., for example depth=2")
]
Size = Annotated[
    Annotated[int, Field(ge=1, lt=INT64)] | None,
    _read_with(lambda text: None if text == "auto" else int(text), "auto or a positive number"),
]
# Two numbers from 1 to 10^9.
PAIR = r"([1-9]\d{0,8}),([1-9]\d{0,8})"
TwoCounts = Annotated[
    str, _read_with(lambda text: "{},{}".format(*_read_integers(PAIR, text)), "like 100,1000")
]
# Seconds.
Duration = Annotated[
    Annotated[float, Field(gt=0, allow_inf_nan=False)] | None,
    _read_with(read_duration, "a time like 90s, 30min or 1h30m"),
]
ShardNumber = Annotated[
    tuple[int, int] | None, _read_with(read_shard, "i/n, for example 1/4 to 4/4")
]
Side = Annotated[int, Field(ge=1, le=MOST_PIXELS)]
Sizes = Annotated[
    Annotated[tuple[Side, ...], Field(max_length=3)] | None,
    BeforeValidator(lambda sizes: (sizes,) if isinstance(sizes, int) else sizes),
    _read_with(
        lambda text: tuple(map(int, text.split(","))),
        "a side (224), height,width or channels,height,width",
    ),
]
# An exact attack radius together with the typed text, which the JSON stores.
OneRadius = Annotated[Radius, BeforeValidator(_read_radius), PlainSerializer(lambda r: r.text)]
Radii = Annotated[
    tuple[Radius, ...],
    BeforeValidator(_read_radii),
    PlainSerializer(lambda radii: [radius.text for radius in radii]),
]
# Radii of certificates: of balls, and numbers of changes that can be certified, too.
Balls = Annotated[Radii, AfterValidator(_require_balls)]
Regions = Annotated[Radii, AfterValidator(partial(_require_balls, counted=("patch", "words")))]
