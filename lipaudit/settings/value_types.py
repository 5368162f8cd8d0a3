"""Types of the values of options, and how the text that a person types is read as such a value."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from lipaudit.errors import UsageError
from lipaudit.settings.option import INT64
from lipaudit.tables.trials import Radius, parse_radius, parse_range

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
    """Raise a ValueError if a condition on a text is false; `_read_with` words the message."""
    if not fits:
        raise ValueError("the text does not have the form of the option")


def _read_integers(pattern: str, text: str) -> list[int]:
    """Return the integers in the groups of a pattern; -1 for a group without a match.

    Spaces around the signs / : . - are ignored.

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
        _require(first <= last < first + MOST_LAYERS)  # else: ValueError
        layers += range(first, last + 1)
    return tuple(layers)


def read_lengths(text: str) -> tuple[int, ...]:
    """Read `8:256:log6` as (8, 16, 32, 64, 128, 256): six lengths with equal ratios."""
    first, last, count = _read_integers(r"(\d+):(\d+):log(\d+)", text)
    _require(FEWEST <= first < last <= MOST_TOKENS and 2 <= count <= MOST_LENGTHS)
    lengths = []
    for i in range(count):
        # Equal steps of log n: growth is fitted by a power law, which is a line over log n.
        exponent = math.log(last / first) * i / (count - 1)
        lengths.append(round(first * math.exp(exponent)))
    return tuple(dict.fromkeys(lengths))  # rounding may give a length twice


def read_quantization(text: str) -> tuple[int, int]:
    """Read `int4:32` as (4, 32): bits, and inputs per group; `int8` as (8, 0): without groups."""
    match = re.fullmatch(r"int([48])(?::(\d+))?", text.strip())
    if match is None or match[2] == "0":
        raise ValueError(f"{text!r} has another form")
    return int(match[1]), int(match[2] or 0)


def read_head(text: str) -> tuple[int, int]:
    """Read LAYER.HEAD, such as `3.1`, as (3, 1)."""
    layer, head = _read_integers(r"(\d+)\.(\d+)", text)
    return layer, head


# In Python's spelling or JSON's, in any case.
CONSTANTS = {"true": True, "false": False, "none": None, "null": None}


def read_keywords(text: str) -> dict[str, Any]:
    """Read `NAME=VALUE,...`; a value is read as a number, true, false or none, or else as text."""
    values = {}
    for piece in filter(None, text.split(",")):
        before, equals, after = piece.partition("=")
        key = before.strip()
        word = after.strip()
        _require(key.isidentifier() and equals)
        values[key] = _read_word(word)
    return values


def _read_word(word: str) -> Any:
    """Return the value of a word: a number, a quoted text, a constant, or the word itself."""
    with suppress(ValueError):  # no JSON value
        return json.loads(word)
    return CONSTANTS.get(word.lower(), word)


def write_keywords(values: Mapping[str, Any]) -> str:
    """Write values in the form that `read_keywords` reads.

    >>> write_keywords({"depth": 2, "pretrained": False})
    'depth=2,pretrained=false'
    >>> write_keywords({"variant": "2"})
    'variant="2"'
    """
    words = []
    for key, value in values.items():
        word = str(value)
        if value is None or isinstance(value, bool):
            word = word.lower()
        # A text that would be read as another value, such as "2" or "true", needs its quotes; and
        # infinity is Infinity in JSON, because inf is a text.
        elif isinstance(value, str | float) and _read_word(word.strip()) != value:
            word = json.dumps(value)
        words.append(f"{key}={word}")
    return ",".join(words)


def read_shard(text: str) -> tuple[int, int]:
    """Read `2/4`, the second of four shards, as (2, 4)."""
    number, count = _read_integers(r"(\d+)/(\d+)", text)
    _require(1 <= number <= count <= MOST_SHARDS)
    return number, count


def read_duration(text: str) -> float:
    """Read `90`, `90s`, `30min` or `1h30m` as seconds.

    >>> read_duration("1h30m")
    5400.0
    """
    match = DURATION.fullmatch(text.replace(" ", ""))
    if match is None or not any(match.groups()):
        raise ValueError(f"{text!r} has another form")
    hours, minutes, seconds = (float(number or 0) for number in match.groups())
    return 3600 * hours + 60 * minutes + seconds


def require_distinct(values: Sequence[Any]) -> Sequence[Any]:
    """Return the values; refuse a repeated value, whose results would overwrite each other.

    Raises:
        ValueError: a value is repeated.
    """
    for i, value in enumerate(values):
        if value in values[:i]:
            # A radius has its text as typed, such as 2/255; other values are printed.
            raise ValueError(f"{getattr(value, 'text', value)} is named twice")
    return values


def _read_with(read: Callable[[str], Any], form: str = "") -> BeforeValidator:
    """Return a step of pydantic's validation that parses text; other values stay as they are.

    Args:
        read: returns the value of a text, or raises ValueError.
        form: the form of the text with an example, for the message in place of the message of
            `read`; empty keeps the message of `read`.
    """

    def convert(value: Any) -> Any:
        # Parse a text by `read`. A value from Python may have the right type already.
        if not isinstance(value, str):
            return value
        try:
            return read(value)
        except ValueError as error:
            reason = f"it must be {form}" if form else str(error)
            raise ValueError(reason) from None

    return BeforeValidator(convert)


def _read_radius(value: Any, *, parse: Callable[[str], Any] = parse_radius) -> Any:
    """Parse a radius exactly: a text, or a number as its decimal text, so that 0.1 is 1/10.

    Args:
        value: the radius; values of other types are returned unchanged.
        parse: parses a text.
    """
    if not isinstance(value, int | float | str) or isinstance(value, bool):
        return value
    try:
        return parse(str(value))
    except UsageError as error:  # pydantic adds the name of the option to a ValueError
        raise ValueError(f"{error.message}. {error.advice}") from None


def _read_radii(values: Any) -> Any:
    """Return the radii of an option as a tuple: of a text with commas, one value, or several.

    Ranges give all their radii: `0:4/255:3` is 0, 2/255 and 4/255.
    """
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
    """Return the radii; refuse radius 0, and units for which no certificates exist.

    Args:
        radii: radii of balls, without a unit, or numbers of changes, such as 2 words.
        counted: the units for which certificates exist.
    """
    for radius in radii:
        if radius.unit and radius.unit not in counted:
            raise ValueError(f"certificates hold for balls, not for changed {radius.unit}")
        if not radius.value:
            raise ValueError("give a radius above 0")
    return radii


def _order_layers(layers: Any) -> Any:
    """Return layers in order and without repetitions; None stays None.

    From Python, a single layer may be given as a number.
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
    """Return the words between commas; refuse a repeated word."""
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
