"""Options that are typed as text, and their types."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

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
        ValueError: the text is not a list of numbers and ranges.
    """
    layers: list[int] = []
    for piece in text.split(","):
        first, dash, last = piece.partition("-")
        ends = int(first), int(last if dash else first)
        if not 0 <= ends[1] - ends[0] < MOST_LAYERS:
            raise ValueError(f"{piece} is not a range")
        layers += range(ends[0], ends[1] + 1)
    return tuple(layers)


def read_lengths(text: str) -> tuple[int, ...]:
    """Read `8:256:log6` as (8, 16, 32, 64, 128, 256): six lengths, evenly spaced in log n.

    Raises:
        ValueError: the text does not have that form.
    """
    match = LENGTHS.fullmatch(text)
    first, last, count = map(int, match.groups()) if match else (0, 0, 0)
    reachable = FEWEST <= first < last <= MOST_TOKENS
    if not reachable or not 2 <= count <= MOST_LENGTHS:
        raise ValueError("not FIRST:LAST:logCOUNT, or fewer than 2 tokens")
    steps = (math.log(last / first) * i / (count - 1) for i in range(count))
    return tuple(dict.fromkeys(round(first * math.exp(step)) for step in steps))


def read_head(text: str) -> tuple[int, int]:
    """Read LAYER.HEAD.

    Raises:
        ValueError: the text is not of that form.
    """
    layer, _, head = text.partition(".")
    if not (layer.isdecimal() and head.isdecimal()):
        raise ValueError("not LAYER.HEAD")
    return int(layer), int(head)


def read_numbers(text: str) -> tuple[float, ...]:
    """Read `0.5,0.5,0.5`."""
    return tuple(map(float, text.split(",")))


def read_keywords(text: str) -> dict[str, Any]:
    """Read `k=v,...`; values are numbers, true, false and none where they can be, else strings.

    Raises:
        ValueError: the text is not of that form.
    """
    values: dict[str, Any] = {}
    for key, equals, value in (piece.partition("=") for piece in text.split(",") if piece):
        if not (key.strip().isidentifier() and equals):
            raise ValueError("not of that form")
        word = value.strip()
        try:
            values[key.strip()] = json.loads({"none": "null"}.get(word.lower(), word.lower()))
        except ValueError:
            values[key.strip()] = word
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


def read_shard(text: str) -> tuple[int, int]:
    """Read `2/4`, the second of four.

    Raises:
        ValueError: there is no such part.
    """
    number, of = map(int, text.split("/"))
    if not 1 <= number <= of <= MOST_SHARDS:
        raise ValueError("there is no such part")
    return number, of


def read_duration(text: str) -> float:
    """Read `90`, `90s`, `30min` or `1h30m` as seconds.

    Raises:
        ValueError: the text is none of these.

    >>> read_duration("1h30m")
    5400.0
    """
    match = DURATION.fullmatch(text.replace(" ", ""))
    if match is None or not any(match.groups()):
        raise ValueError("not a time")
    hours, minutes, seconds = (float(number or 0) for number in match.groups())
    return 3600 * hours + 60 * minutes + seconds


def distinct(values: Sequence[Any]) -> Sequence[Any]:
    """Return values that are all distinct: repeats would be measured twice, with one result.

    Raises:
        ValueError: a value is repeated.
    """
    for i, value in enumerate(values):
        if value in values[:i]:
            raise ValueError(f"{getattr(value, 'text', value)} is named twice")
    return values


def _read_with(read: Callable[[str], Any], form: str = "") -> BeforeValidator:
    """Parse text, and keep values that have the type already.

    Args:
        read: returns the value of a text; its errors are replaced by `form`.
        form: what the text must be, with an example.
    """

    def convert(value: Any) -> Any:
        try:
            return read(value) if isinstance(value, str) else value
        except ValueError as error:
            raise ValueError(f"it must be {form}" if form else str(error)) from None

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


def _order_layers(layers: Any) -> Any:
    """Sort layers; a number is one layer."""
    known = (layers,) if isinstance(layers, int) else layers
    if known is not None and (not known or not 0 <= min(known) <= max(known) < MOST_LAYERS):
        raise ValueError("give at least one layer, counted from 0")
    return known and tuple(sorted({*known}))


Layers = Annotated[
    tuple[int, ...] | None,
    BeforeValidator(_order_layers),
    _read_with(read_layers, "a list of layers, for example 0,5-7"),
]
Lengths = Annotated[
    tuple[int, ...], _read_with(read_lengths, "FIRST:LAST:logCOUNT, for example 8:256:log8")
]
listed = _read_with(
    lambda text: tuple(distinct([p.strip() for p in text.split(",") if p.strip()]))
)
"""Reads a comma-separated list."""
Names = Annotated[tuple[str, ...] | None, listed]
OneHead = Annotated[
    str | None,
    _read_with(lambda text: "{}.{}".format(*read_head(text)), "LAYER.HEAD, for example 3.1"),
]
Numbers = Annotated[
    tuple[float, ...] | None,
    _read_with(read_numbers, "a list of numbers, for example 0.5,0.5,0.5"),
]
Keywords = Annotated[
    Mapping[str, Any] | None, _read_with(read_keywords, "k=v,..., for example depth=2")
]
Size = Annotated[
    Annotated[int, Field(ge=1, lt=INT64)] | None,
    _read_with(lambda text: None if text == "auto" else int(text), "auto or a positive number"),
]
Duration = Annotated[
    Annotated[float, Field(gt=0, allow_inf_nan=False)] | None,
    _read_with(read_duration, "a time like 90s, 30min or 1h30m"),
]
"""Seconds."""
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
