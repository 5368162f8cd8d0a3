"""Trials: an attack in a ball, as the key of rows, per-sample columns and gate rules.

Also samples, and the inputs and outputs of a Jacobian by name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal, NamedTuple

from lipaudit.errors import UsageError

# Of a perturbation: of a ball (token-l2 is the largest l2 norm of a token's), or how many words or
# characters of a text, or patches of an image, are changed, or tokens of a suffix are added.
Norm = Literal["linf", "l2", "l1", "token-l2", "words", "characters", "suffix", "patch"]
# The norms that count changes of a text, and all that count: a radius is then a whole number.
COUNTED: tuple[Norm, ...] = ("words", "characters", "suffix")
WHOLE: tuple[Norm, ...] = (*COUNTED, "patch")
# Norm of each unit of a radius, as typed.
UNITS: dict[str, Norm] = {
    "word": "words",
    "words": "words",
    "character": "characters",
    "characters": "characters",
    "token": "suffix",
    "tokens": "suffix",
    "patch": "patch",
    "patches": "patch",
}
# Kinds of model to which each norm applies.
SPACES: dict[Norm, tuple[str, ...]] = {
    "linf": ("image", "tokens", "text"),
    "l2": ("image", "tokens", "text"),
    "l1": ("image", "tokens", "text"),
    "token-l2": ("tokens", "text"),
    "words": ("text",),
    "characters": ("text",),
    "suffix": ("text",),
    "patch": ("image",),
}
# Name of all attacks together: a sample is robust if no attack broke it.
WORST = "worst"
# Cost columns of a trial.
COSTS = ("seconds", "forwards", "backwards")
# No sign, infinity or underscore, which float() would take: a radius is typed by people.
# Three digits of an exponent are enough for any float.
_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?"
_RADIUS = re.compile(rf"({_NUMBER})(?:\s*/\s*({_NUMBER}))?")
# Largest number of radii in a range: a typing error must not start a run of days.
_MOST = 1000
_COUNT = re.compile(rf"(\d+)\s*({'|'.join(UNITS)})")


@dataclass(frozen=True)
class Radius:
    """A radius eps as typed, with its exact value; spellings of one value are equal.

    Attributes:
        text: the radius as typed, such as `2/255`.
        value: its exact value.
        unit: the norm of the typed unit (`2words`); empty for a plain number.
    """

    text: str = field(compare=False)
    value: Fraction
    unit: str = ""

    def __float__(self) -> float:
        return float(self.value)


def parse_radius(text: str) -> Radius:
    """Read a radius exactly: a decimal or a quotient of two (`0.03`, `2/255`, `1.1/255`).

    Raises:
        UsageError: the text is not a non-negative number, is too large for a float, or divides by
            zero.
    """
    radius = _read_radius(text)
    if radius is None:
        raise UsageError(f"{text!r} is not a radius", "Write it as 2/255, 1.1/255 or 0.03.")
    return radius


def parse_budget(text: str) -> Radius:
    """Read a radius, or a number of changes with its unit: `2words`, `3tokens`, `1patch`.

    Raises:
        UsageError: the text is neither.
    """
    match = _COUNT.fullmatch(text.strip())  # the number and the unit
    if match is None:
        return parse_radius(text)
    return replace(parse_radius(match[1]), text=text.strip(), unit=UNITS[match[2]])


def parse_range(text: str) -> tuple[Radius, ...]:
    """Read one radius or budget, or START:STOP:COUNT: evenly spaced radii with both ends.

    The radii in between are exact. They are written like STOP, over its denominator or as
    decimals, if this needs few digits; else as fractions in lowest terms.

    >>> [radius.text for radius in parse_range("0:8/255:5")]
    ['0', '2/255', '4/255', '6/255', '8/255']
    >>> [radius.text for radius in parse_range("0.1:0.2:4")]
    ['0.1', '2/15', '1/6', '0.2']

    Raises:
        UsageError: the text is neither.
    """
    if ":" not in text:
        return (parse_budget(text),)
    match = re.fullmatch(r"([^:]*):([^:]*):\s*(\d{1,4})\s*", text)
    if match is not None:
        start = _read_radius(match[1])
        stop = _read_radius(match[2])
        count = int(match[3])
        if start and stop and start.value < stop.value and 2 <= count <= _MOST:
            return _space_evenly(start, stop, count)
    raise UsageError(
        f"{text!r} is not a range of radii",
        "Write it as START:STOP:COUNT, for example 0:8/255:9, with START below STOP and a "
        f"COUNT from 2 to {_MOST}.",
    )


def _space_evenly(start: Radius, stop: Radius, count: int) -> tuple[Radius, ...]:
    """Return evenly spaced radii (at least two), from `start` to `stop`, as exact fractions."""
    step = (stop.value - start.value) / (count - 1)
    inside = []
    for i in range(1, count - 1):
        value = start.value + i * step
        inside.append(Radius(text=_spell_like(stop.text, value), value=value))
    return (start, *inside, stop)


def _spell_like(text: str, value: Fraction) -> str:
    """Return a radius as text, with the denominator of another radius, if that has one.

    >>> _spell_like("8/255", Fraction(2, 255)), _spell_like("0.2", Fraction(2, 15))
    ('2/255', '2/15')
    """
    _, slash, divisor = text.partition("/")
    numerator = value * Fraction(divisor or 1)
    if 10**6 % numerator.denominator == 0:  # the numerator has at most six decimals
        return f"{float(numerator):.15g}{slash}{divisor}"
    return str(value)


def _read_radius(text: str) -> Radius | None:
    """Return the exact radius in a text such as `0.03` or `2/255`; None if it is no radius."""
    match = _RADIUS.fullmatch(text.strip())
    if match is None:
        return None
    divisor = Fraction(match[2] or 1)
    if divisor == 0:
        return None
    value = Fraction(match[1]) / divisor
    if value > sys.float_info.max:  # attacks compute with floats
        return None
    return Radius(text=text.strip(), value=value)


def list_units(norm: str) -> list[str]:
    """Return the unit in which a norm counts, singular and plural: of suffix, token and tokens."""
    return [unit for unit, counted in UNITS.items() if counted == norm]


@dataclass(frozen=True)
class TrialKey:
    """The key of a trial in a report.

    Attributes:
        attack: name of the attack or ensemble, `WORST` for all together; empty for figures of the
            ball.
        norm: linf, l2, l1, token-l2, words, characters, suffix or patch.
        radius: eps.
    """

    attack: str
    norm: str
    radius: Radius

    @classmethod
    def parse(cls, text: str) -> TrialKey | None:
        """Parse the text that `str(key)` gives, such as `pgd,linf,2/255`; None for other texts."""
        words = text.split(",")
        if len(words) not in (2, 3):
            return None
        *attack, norm, eps = words  # `attack` is a list of one name; of none for a ball
        radius = _read_radius(eps)
        if radius is None:
            return None
        return cls(attack="".join(attack), norm=norm, radius=radius)

    def __str__(self) -> str:
        """Write the key as in a report's columns: `pgd,linf,2/255`, for a ball `linf,2/255`."""
        parts = (self.attack, self.norm, self.radius.text)
        return ",".join(filter(None, parts))

    @property
    def ball(self) -> str:
        """Return the ball in words: `linf 2/255`, `2 words`, `1 patch`."""
        if self.norm not in WHOLE:  # the radius is a distance, not a number of changes
            return f"{self.norm} {self.radius.text}"
        singular, plural = list_units(self.norm)
        unit = singular if self.radius.value == 1 else plural
        return f"{self.radius.text} {unit}"

    @property
    def typed(self) -> str:
        """Return the radius as typed in --eps: `2/255`, or `2words` if the norm counts changes."""
        if self.norm not in WHOLE:  # the radius is a distance, not a number of changes
            return self.radius.text
        # Most norms that count have the name of their unit: `2words`, `1patch`. The norm `suffix`
        # counts tokens: `3tokens`.
        unit = self.norm if self.norm in UNITS else list_units(self.norm)[-1]
        return f"{self.radius.text}{unit}"

    def column(self, kind: str) -> str:
        """Return the name of a per-sample column: `robust@pgd,linf,2/255`."""
        return f"{kind}@{self}"

    def matches(self, word: str) -> bool:
        """Return whether a word of a selector matches: `linf`, `2/255`, `attack=pgd`, `eps=0.1`.

        Radii are compared by value: 2/4 matches 0.5.
        """
        key, equals, value = word.partition("=")
        if not equals:
            return word in (self.attack, self.norm) or self.radius == _read_radius(word)
        if key == "eps":
            return self.radius == _read_radius(value)
        names = {"attack": self.attack, "norm": self.norm}
        return names.get(key) == value


def worst_cases(trials: Iterable[TrialKey]) -> dict[TrialKey, list[TrialKey]]:
    """Return, for every ball, the trials inside this ball, by the key of the worst case (WORST).

    A trial is an attack in a ball. Trials inside a ball have the same norm and the same or a
    smaller radius.

    >>> small, large = (TrialKey("pgd", "linf", parse_radius(eps)) for eps in ("2/255", "4/255"))
    >>> [(str(ball), len(inside)) for ball, inside in worst_cases([small, large]).items()]
    [('worst,linf,2/255', 1), ('worst,linf,4/255', 2)]
    """
    trials = list(trials)
    balls = {}
    for trial in trials:
        ball = replace(trial, attack=WORST)
        same_norm = [inner for inner in trials if inner.norm == ball.norm]
        balls[ball] = [inner for inner in same_norm if inner.radius.value <= ball.radius.value]
    return balls


def parse_column(name: str) -> tuple[str, TrialKey | None]:
    """Split the name of a per-sample column into its kind and its trial (attack and ball) or None.

    >>> kind, trial = parse_column("robust@pgd,linf,2/255")
    >>> kind, trial.attack, float(trial.radius) == 2 / 255
    ('robust', 'pgd', True)
    >>> parse_column("margin")
    ('margin', None)
    """
    kind, _, text = name.partition("@")
    trial = TrialKey.parse(text)
    if trial is None:
        return name, None
    return kind, trial


# Samples


# Per-sample columns of yes and no (true and false, or 1 and 0): their mean is a share.
FLAGS = frozenset({"certified", "complete", "converged", "correct", "robust"})


def count_distinct(ids: Iterable[str]) -> int:
    """Return how many ids belong to samples that repeat no earlier one."""
    return sum(not is_repeat(name) for name in ids)


def is_repeat(name: str) -> bool:
    """Return whether an id belongs to a repetition of an earlier sample: it ends in -2, -3, ...

    >>> is_repeat("0123456789abcdef-2"), is_repeat("0123456789abcdef")
    (True, False)
    """
    return re.fullmatch(r"[0-9a-f]{16}-\d+", name) is not None


# Inputs and outputs of a Jacobian, by name


ENDS = ("logits", "probabilities", "loss", "hidden", "features", "tokens")
PLACED = ("logits", "probabilities", "hidden")
"""Outputs that take a position in a text."""
POSITION = re.compile(r"last|-?\d{1,9}")
STARTS = ("pixels", "embeddings", "layers", "layer:")
"""Inputs of a Jacobian; `layer:` takes an attention layer, `layers` are all of them."""
LAYER = re.compile(r"layer:([0-9]{1,9})")


def parse_start(text: str) -> str:
    """Read `pixels`, `embeddings`, `layers` or `layer:5`; return it in the typed form.

    Raises:
        ValueError: the text is none of these.
    """
    layer = find_layer(text)
    if layer is not None:
        return f"layer:{layer}"  # without leading zeros
    if text not in STARTS[:-1]:  # all words but the last, `layer:`
        raise ValueError("it must be pixels, embeddings, layers or one layer: layer:5")
    return text


def find_layer(start: str | None) -> int | None:
    """Return the number in `layer:5`; None for other inputs of a Jacobian.

    >>> find_layer("layer:5")
    5
    """
    match = LAYER.fullmatch(start or "")
    if match is None:
        return None
    return int(match[1])


class Target(NamedTuple):
    """Output of the Jacobian.

    Attributes:
        what: one of `ENDS`.
        where: position in a text: last, or an index among the tokens without padding, from 0,
            or from the end if negative; empty: not given.
    """

    what: str
    where: str = ""

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read an output of the Jacobian, such as `loss`, `logits` or `logits:5`.

        The number behind the colon is a position in the text, which only some outputs have.

        Raises:
            ValueError: the text is none of these.
        """
        what, colon, where = text.partition(":")
        # ENDS are all outputs, PLACED those that take a position.
        has_position = what in PLACED and POSITION.fullmatch(where)
        if what not in ENDS or (colon and not has_position):
            ends = f"{', '.join(ENDS[:-1])} or {ENDS[-1]}"
            positions = f"{', '.join(PLACED)} take a position: logits:5, logits:-2, logits:last"
            raise ValueError(f"it must be {ends}; {positions}")
        return cls(what=what, where=where)

    @property
    def text(self) -> str:
        """Return the target in the typed form."""
        return ":".join(filter(None, self))
