"""Signs that an attack is weaker than its success rate suggests, as counts and as notes.

The signs are those of Croce & Hein's AutoAttack (arXiv 2003.01690) and of Carlini et al., *On
Evaluating Adversarial Robustness* (arXiv 1902.06705). Counts add up over chunks; notes are made
from the sums.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lipaudit.attacks.balls import Ball, is_resolved
from lipaudit.tables import Note

NOISE = 1e-4
"""Largest change of a logit between two passes of a deterministic model, as a share of the
distance of the sample's largest logit from its median. Changes are relative to the median, so
neither an offset common to all logits nor a class far below the others affects the test."""
ROUNDINGS = 4
"""Further tolerance, in units of rounding of the logit."""
SIMPLEX = 1e-5
"""Largest deviation from [0, 1] and from sum 1 of an output that counts as probabilities."""
SQUARE_GAIN = 0.002
"""Share of samples that Square may break after the gradient attacks without a warning."""


@dataclass(frozen=True)
class Checks:
    """Counts of signs in the clean samples.

    Attributes:
        classes: number of classes.
        samples: number of samples examined.
        correct: number of samples classified correctly.
        zero_gradients: correct samples with a cross-entropy gradient of exactly 0.
        random: samples whose logits change in a second pass.
        probabilities: outputs in [0, 1] with sum 1.
        nonfinite: samples with a gradient that is not finite.
    """

    classes: int
    samples: int
    correct: int
    zero_gradients: int
    random: int
    probabilities: int
    nonfinite: int = 0

    def __add__(self, other: Checks) -> Checks:
        counts = [
            one + more for one, more in zip(astuple(self)[1:], astuple(other)[1:], strict=True)
        ]
        return Checks(self.classes, *counts)


def examine(
    logits: Float[Tensor, "batch classes"],
    again: Float[Tensor, "batch classes"],
    gradient: Float[Tensor, " batch *sample"],
    y: Int[Tensor, " batch"],
    nonfinite: int = 0,
) -> Checks:
    """Count the signs in the logits of two passes and in the cross-entropy's gradient.

    Args:
        logits: logits of the first pass.
        again: logits of the second pass.
        gradient: gradient of the cross-entropy, made finite.
        y: labels.
        nonfinite: number of gradients that were not finite.
    """
    correct = logits.argmax(1) == y
    flat = gradient.flatten(1).abs().amax(1) == 0
    median = logits.median(1, keepdim=True)[0]
    change = (logits - median - again + again.median(1, keepdim=True)[0]).abs()
    rounding = torch.finfo(logits.dtype).eps * (logits.abs() + median.abs())
    rise = logits.amax(1, keepdim=True) - median
    inside = (logits > -SIMPLEX).all(1) & (logits < 1 + SIMPLEX).all(1)
    simplex = inside & ((logits.sum(1) - 1).abs() < SIMPLEX)
    return Checks(
        classes=logits.shape[1],
        samples=len(y),
        correct=int(correct.sum()),
        zero_gradients=int((flat & correct).sum()),
        random=int((change > NOISE * rise + ROUNDINGS * rounding).any(1).sum()),
        probabilities=int(simplex.sum()),
        nonfinite=nonfinite,
    )


def note_signs(
    checks: Checks, *, guessing: bool = True, nonfinite: float = 0.0
) -> tuple[Note, ...]:
    """Return warnings for the counts over all samples.

    Args:
        checks: the counts.
        guessing: whether a guess is correct at a rate of 1 / classes; False skips that check.
        nonfinite: share of the gradients taken by attacks that were not finite.
    """
    # Two standard deviations above the expected number of lucky guesses.
    mean = checks.samples / checks.classes
    lucky = mean + 2 * math.sqrt(mean * (1 - 1 / checks.classes))
    signs = {
        "zero-gradients": checks.zero_gradients > 0,
        "gradients-not-finite": checks.nonfinite > 0 or nonfinite > 0,
        "randomised": checks.random > 0,
        "probabilities": checks.samples > 0 and checks.probabilities == checks.samples,
        "clean-accuracy-at-chance": guessing and checks.correct < min(lucky, checks.samples),
    }
    texts = {
        "zero-gradients": f"{checks.zero_gradients} of {checks.correct} correct samples have "
        "a cross-entropy gradient of exactly 0. FGSM, PGD and APGD-CE cannot attack them",
        "gradients-not-finite": f"the gradient is not finite at {checks.nonfinite} of "
        f"{checks.samples} samples and in {100 * nonfinite:.2g} % of the gradients that attacks "
        "took. Attacks ignore NaN, so they are weaker than they could be",
        "randomised": f"{checks.random} of {checks.samples} samples get different logits in a "
        "second forward pass. Attacks need a deterministic model: switch dropout and noise off",
        "probabilities": "the outputs look like probabilities. Remove the final softmax: "
        "attacks on logits are stronger",
        "clean-accuracy-at-chance": f"{checks.correct} of {checks.samples} samples are correct "
        f"without an attack, no better than guessing among {checks.classes} classes. Check labels "
        "and preprocessing",
    }
    return tuple(_make_warning(code, texts[code]) for code, present in signs.items() if present)


def note_square(before: int, after: int, samples: int) -> tuple[Note, ...]:
    """Warn if Square, which needs no gradients, broke samples that the gradient attacks did not.

    Args:
        before: robust samples before Square, after at least one gradient attack.
        after: robust samples after Square.
        samples: all samples, correct or not.
    """
    if before - after <= SQUARE_GAIN * samples:
        return ()
    text = (
        f"Square broke {before - after} samples that the gradient attacks did not break. "
        "Gradients may be masked, so the true robust accuracy may be lower"
    )
    return (_make_warning("square-beats-gradients", text),)


def note_resolution(
    x: Float[Tensor, " batch *sample"], ball: Ball, *, single: bool
) -> tuple[Note, ...]:
    """Warn if rounding of x + delta loses much of delta, because samples are large.

    Args:
        x: the samples.
        ball: norm and radius.
        single: whether the attack computes in float32 even if the samples are float64.
    """
    if is_resolved(x.float() if single else x, ball):
        return ()
    advice = "use --dtype float64" if x.dtype == torch.float32 else "scale the data down"
    dtype = "float32" if single else str(x.dtype).removeprefix("torch.")
    text = (
        f"{ball.norm} {ball.eps:g} is below the resolution of {dtype} at the size of these "
        f"data. Attacks miss part of the ball and robust accuracy may be too high: {advice}"
    )
    return (_make_warning("ball-below-resolution", text),)


def _make_warning(code: str, text: str) -> Note:
    return Note(level="warning", code=code, text=text)
