"""Chunks of samples, and what an attack did to one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from lipaudit.attacks.plan import CHUNK, Trial
from lipaudit.attacks.sanity import Checks
from lipaudit.attacks.text.rewrite import Draft, Reader
from lipaudit.results import Note


@dataclass(frozen=True)
class Chunk:
    """At most CHUNK samples that are attacked together.

    Attributes:
        number: which chunk of the data it is, from 0: part of the seed.
        x: samples, float32 or float64, inside the box.
        y: labels.
        mask: True where a sample may change, over the first axes of x (batch, tokens).
        texts: the samples as texts, where they are any.
    """

    number: int
    x: Float[Tensor, " batch *sample"]
    y: Int[Tensor, " batch"]
    mask: Bool[Tensor, " batch *positions"] | None = None
    texts: Texts | None = None


@dataclass(frozen=True)
class Texts:
    """Samples as texts, for attacks that change those.

    Attributes:
        reader: how the model reads them.
        drafts: each of them, unchanged.
    """

    reader: Reader
    drafts: Sequence[Draft]


@dataclass(frozen=True)
class Outcome:
    """What one attack did to one chunk.

    Attributes:
        chunk: the chunk's number.
        trial: which trial of the plan; None for the clean samples, which come first.
        attack: name of the attack, `clean` for the clean samples.
        seed: of the random numbers used, derived from (seed, attack, chunk).
        tried: samples it ran on: those that stood before it, at smaller radii too.
        robust: samples that stand after it, judged by evaluating x_adv as it is given here.
        x_adv: inside the ball; for a sample that stands, the last point tried. Where texts were
            changed, x.
        distance: ||x_adv - x|| in the norm of the trial; where texts were changed, how often.
        seconds: wall time.
        forwards: samples passed forward (see `Meter`).
        backwards: samples passed backward.
        nonfinite: gradients that were not finite.
        notes: what was changed for this model.
        checks: what the clean samples showed; None for an attack.
        drafts: the texts as they were last changed, for an attack that changes them.
    """

    chunk: int
    trial: Trial | None
    attack: str
    seed: int
    tried: Bool[Tensor, " batch"]
    robust: Bool[Tensor, " batch"]
    x_adv: Float[Tensor, " batch *sample"]
    distance: Float[Tensor, " batch"]
    seconds: float
    forwards: int
    backwards: int
    nonfinite: int = 0
    notes: tuple[Note, ...] = ()
    checks: Checks | None = None
    drafts: Sequence[Draft] | None = None


def chunks(
    x: Float[Tensor, " batch *sample"],
    y: Int[Tensor, " batch"],
    mask: Bool[Tensor, " batch *positions"] | None = None,
) -> Iterator[Chunk]:
    """Cut samples into numbered chunks of CHUNK, in order."""
    for number, start in enumerate(range(0, len(x), CHUNK)):
        part = slice(start, start + CHUNK)
        yield Chunk(number, x[part], y[part], None if mask is None else mask[part])
