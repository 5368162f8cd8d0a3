"""Options that are typed as text, and their types."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, PlainSerializer

from lipaudit.errors import UsageError
from lipaudit.settings.option import INT64
from lipaudit.tables.trials import Radius, parse_budget, parse_radius

LENGTHS = re.compile(r"(\d+):(\d+):log(\d+)")
_TIME = r"(?:(\d+(?:\.\d+)?)%s)?"
DURATION = re.compile(_TIME % "h" + _TIME % "m(?:in)?" + _TIME % "s?")
FEWEST = 2
"""Smallest number of tokens: worst-case tokens are two points."""
MOST_LENGTHS, MOST_TOKENS, MOST_LAYERS, MOST_PIXELS = 1000, 10**7, 10**5, 10**5
MOST_SHARDS = 10**5
"""Limit above any real use, so that a typing error does not fill the memory."""


def read_layers(text: str) -> tuple[int, ...]:
    """Read `0,5-7` as (0, 5, 6, 7).

    Raises:
        UsageError: the text is not a list of numbers and ranges.
    """
    layers: set[int] = set()
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(
                f"--layers {text!r} is not a list of layers", "Write for example 0,5-7."
            )
        ends = int(first), int(last or first)
        if not ends[0] <= ends[1] < MOST_LAYERS:
            raise UsageError(
                f"--layers {piece.strip()!r} is not a range of layers",
                "Give the smaller number first: 5-7.",
            )
        span = range(ends[0], ends[1] + 1)
        if twice := layers.intersection(span):
            raise UsageError(
                f"--layers {text!r} names layer {min(twice)} twice", "Name each layer once."
            )
        layers.update(span)
    return tuple(sorted(layers))


def read_lengths(text: str) -> tuple[int, ...]:
    """Read `8:256:log6` as (8, 16, 32, 64, 128, 256): six lengths, evenly spaced in log n.

    Raises:
        UsageError: the text does not have that form.
    """
    match = LENGTHS.fullmatch(text)
    first, last, count = map(int, match.groups()) if match else (0, 0, 0)
    reachable = FEWEST <= first < last <= MOST_TOKENS
    if not reachable or not 2 <= count <= MOST_LENGTHS:
        raise UsageError(
            f"--lengths {text!r} is not FIRST:LAST:logCOUNT",
            "Write for example 8:256:log8 (at least 2 tokens).",
        )
    steps = (math.log(last / first) * i / (count - 1) for i in range(count))
    return tuple(dict.fromkeys(round(first * math.exp(step)) for step in steps))


def read_head(text: str) -> tuple[int, int]:
    """Read LAYER.HEAD.

    Raises:
        ValueError: when it is not that.
    """
    layer, _, head = text.partition(".")
    if not (layer.isdecimal() and head.isdecimal()):
        raise ValueError("name a head as LAYER.HEAD, for example 3.1")
    return int(layer), int(head)


def read_numbers(text: str) -> tuple[float, ...]:
    """Read `0.5,0.5,0.5`.

    Raises:
        ValueError: the text is not a list of numbers.
    """
    try:
        return tuple(float(piece) for piece in text.split(","))
    except ValueError:
        raise ValueError("it must be a list of numbers, for example 0.5,0.5,0.5") from None


def read_keywords(text: str) -> dict[str, Any]:
    """Read `k=v,...`; values are numbers, true, false and none where they can be, else strings.

    Raises:
        ValueError: when it is not of that form.
    """
    literals = {"true": True, "false": False, "none": None, "null": None}
    values: dict[str, Any] = {}
    for key, equals, value in (piece.partition("=") for piece in text.split(",") if piece):
        if not (key.strip().isidentifier() and equals):
            raise ValueError("it must be k=v,..., for example depth=2")
        values[key.strip()] = word = value.strip()
        for read in (float, int, lambda word: literals[word.lower()]):  # the last that fits
            with suppress(ValueError, KeyError):
                values[key.strip()] = read(word)
    return values


def write_keywords(values: Mapping[str, Any]) -> str:
    """Write values in the form that `read_keywords` reads.

    >>> write_keywords({"depth": 2, "pretrained": False})
    'depth=2,pretrained=false'
    """
    plain = {
        k: str(v).lower() if v is None or v is True or v is False else v for k, v in values.items()
    }
    return ",".join(f"{key}={value}" for key, value in plain.items())


def read_size(text: str) -> int | None:
    """Read a number of samples, or auto as None.

    Raises:
        ValueError: the text is neither.
    """
    if text == "auto":
        return None
    if not text.isdecimal() or not 1 <= int(text) < INT64:
        raise ValueError("it must be auto or a positive number")
    return int(text)


def read_shard(text: str) -> tuple[int, int]:
    """Read `2/4`, the second of four.

    Raises:
        ValueError: when it is not that.
    """
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of) <= MOST_SHARDS):
        raise ValueError(
            f"it must be i/n, for example 1/4 to 4/4, with at most {MOST_SHARDS} shards"
        )
    return int(number), int(of)


def read_duration(text: str) -> float:
    """Read `90`, `90s`, `30min` or `1h30m` as seconds.

    Raises:
        ValueError: when it is none of these.

    >>> read_duration("1h30m")
    5400.0
    """
    match = DURATION.fullmatch(text.replace(" ", ""))
    if match is None or not any(match.groups()):
        raise ValueError("it must be a time like 90s, 30min or 1h30m")
    hours, minutes, seconds = (float(number or 0) for number in match.groups())
    return 3600 * hours + 60 * minutes + seconds


def write_duration(seconds: float) -> str:
    """Write seconds in the form that `read_duration` reads.

    >>> write_duration(5400)
    '1h30min'
    """
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    pieces = (hours, "h"), (minutes, "min"), (rest, "s")
    return "".join(f"{number:g}{unit}" for number, unit in pieces if number)


def read_sizes(text: str) -> tuple[int, ...]:
    """Read `224`, `28,28` or `1,28,28`.

    Raises:
        ValueError: when it is none of these.
    """
    pieces = [piece.strip() for piece in text.split(",")]
    if not all(piece.isdecimal() for piece in pieces):
        raise ValueError("it must be a side (224), height,width or channels,height,width")
    return tuple(map(int, pieces))


def _lasting(seconds: float | None) -> float | None:
    if seconds is not None and not 0 < seconds < math.inf:
        raise ValueError("it must be longer than zero and finite")
    return seconds


def _is_shape(sizes: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if sizes is not None and not (len(sizes) <= 3 and all(1 <= n <= MOST_PIXELS for n in sizes)):
        raise ValueError(f"sizes are 1 to {MOST_PIXELS}, and three at most: channels,height,width")
    return sizes


def distinct(values: Sequence[Any]) -> Sequence[Any]:
    """Return values that are all distinct: repeats would be measured twice, with one result.

    Raises:
        ValueError: a value is repeated.
    """
    for i, value in enumerate(values):
        if value in values[:i]:
            raise ValueError(f"{getattr(value, 'text', value)} is named twice")
    return values


def _read_with(read: Callable[[str], Any], *, many: bool = False) -> BeforeValidator:
    """Parse text, keep values that have the type; where many are possible, a number is one."""

    def convert(value: Any) -> Any:
        alone = many and isinstance(value, int) and not isinstance(value, bool)
        return read(value) if isinstance(value, str) else (value,) if alone else value

    return BeforeValidator(convert)


def _radius(value: Any) -> Any:
    """Parse text, and numbers in their decimal spelling: 0.1 is one tenth."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return parse_radius(str(value)) if number or isinstance(value, str) else value


def _radii(values: Any) -> Any:
    values = list(filter(str.strip, values.split(","))) if isinstance(values, str) else values
    each = values if isinstance(values, Iterable) else (values,)
    return tuple(distinct([parse_budget(v) if isinstance(v, str) else _radius(v) for v in each]))


def _balls(radii: tuple[Radius, ...]) -> tuple[Radius, ...]:
    for radius in radii:
        if radius.unit:
            raise ValueError(f"certificates hold for balls, not for changed {radius.unit}")
        if not radius.value:
            raise ValueError("give a radius above 0")
    return radii


def _order_layers(layers: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Sort layers and remove repeats, as `read_layers` does."""
    if layers is not None and (not layers or min(layers) < 0):
        raise ValueError("give at least one layer, counted from 0")
    return None if layers is None else tuple(sorted(set(layers)))


Layers = Annotated[
    tuple[int, ...] | None, _read_with(read_layers, many=True), AfterValidator(_order_layers)
]
Lengths = Annotated[tuple[int, ...], _read_with(read_lengths)]
listed = _read_with(
    lambda text: tuple(distinct([p.strip() for p in text.split(",") if p.strip()]))
)
"""Reads a comma-separated list."""
Names = Annotated[tuple[str, ...] | None, listed]
Numbers = Annotated[tuple[float, ...] | None, _read_with(read_numbers)]
Keywords = Annotated[Mapping[str, Any] | None, _read_with(read_keywords)]
Size = Annotated[int | None, _read_with(read_size)]
Duration = Annotated[float | None, _read_with(read_duration), AfterValidator(_lasting)]
"""Seconds."""
ShardNumber = Annotated[tuple[int, int] | None, _read_with(read_shard)]
Sizes = Annotated[
    tuple[int, ...] | None, _read_with(read_sizes, many=True), AfterValidator(_is_shape)
]
OneRadius = Annotated[
    Radius, BeforeValidator(_radius), PlainSerializer(lambda radius: radius.text)
]
"""An exact attack radius together with the typed text, which the JSON stores."""
Radii = Annotated[
    tuple[Radius, ...],
    BeforeValidator(_radii),
    PlainSerializer(lambda radii: [radius.text for radius in radii]),
]
Balls = Annotated[Radii, AfterValidator(_balls)]
"""Radii of certificates."""
