"""Signs that an attack is weaker than its success rate suggests, and the notes on them.

They are those of Croce & Hein's AutoAttack (arXiv 2003.01690) and of Carlini et al., *On
Evaluating Adversarial Robustness* (arXiv 1902.06705). Counts add up over chunks; notes are made
from the sums.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from lipaudit.attacks import balls
from lipaudit.attacks.balls import Ball, Box
from lipaudit.attacks.kinds import Trial
from lipaudit.tables import Note, Notes

if TYPE_CHECKING:
    from lipaudit.attacks.balls import Labels, Logits, Samples

# Largest change of a logit between two passes of a deterministic model, as a share of the distance
# of the sample's largest logit from its median. Changes are relative to the median, so neither an
# offset common to all logits nor a class far below the others affects the test.
NOISE = 1e-4
# Further tolerance, in units of rounding of the logit.
ROUNDINGS = 4
# Largest deviation from [0, 1] and from sum 1 of an output that counts as probabilities.
SIMPLEX = 1e-5
# Share of samples that Square may break after the gradient attacks without a warning: some samples
# are broken by luck.
SQUARE_GAIN = 0.002
# Number of samples, and their share, by which an attack that is weaker or knows less may beat the
# iterative gradient attacks without a sign of masked gradients: random starts break some by luck.
LUCKY = 2
LUCKY_SHARE = 0.02


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
        """Return the sums of both counts; the number of classes is the same in both, and stays."""
        # All fields but the first one, `classes`, are added.
        _, *counts = astuple(self)
        _, *others = astuple(other)
        sums = map(operator.add, counts, others)
        return Checks(self.classes, *sums)


def examine(
    logits: Logits,
    again: Logits,
    gradient: Samples,
    y: Labels,
    nonfinite: int = 0,
) -> Checks:
    """Count signs of weak attacks: random logits, probabilities, useless gradients.

    Args:
        logits: logits of the first pass.
        again: logits of the second pass, which differ if the model is random.
        gradient: gradient of the cross-entropy, made finite.
        y: labels.
        nonfinite: number of gradients that were not finite.
    """
    correct = logits.argmax(1) == y
    largest_slope = gradient.flatten(1).abs().amax(1)
    is_flat = largest_slope == 0
    # How far each logit moved between the two passes. In both, the median logit of the sample is
    # subtracted first, because a shift of all logits changes no prediction.
    median = logits.median(1, keepdim=True).values
    median_again = again.median(1, keepdim=True).values
    change = (logits - median - again + median_again).abs()
    # A change counts if it exceeds rounding by more than a small share (NOISE) of the distance
    # from the median to the largest logit.
    height = logits.amax(1, keepdim=True) - median
    rounding = torch.finfo(logits.dtype).eps * (logits.abs() + median.abs())
    has_moved = change > NOISE * height + ROUNDINGS * rounding
    # Probabilities: between 0 and 1, with sum 1.
    is_in_range = (logits > -SIMPLEX).all(1) & (logits < 1 + SIMPLEX).all(1)
    off_one = (logits.sum(1) - 1).abs()
    is_simplex = is_in_range & (off_one < SIMPLEX)
    return Checks(
        classes=logits.shape[1],
        samples=len(y),
        correct=int(correct.sum()),
        zero_gradients=int((is_flat & correct).sum()),
        random=int(has_moved.any(1).sum()),
        probabilities=int(is_simplex.sum()),
        nonfinite=nonfinite,
    )


def note_signs(checks: Checks, *, guessing: bool = True, nonfinite: float = 0.0) -> Notes:
    """Return warnings for the counts over all samples.

    Args:
        checks: the counts.
        guessing: whether a guess is correct at a rate of 1 / classes; False skips that check.
        nonfinite: share of the gradients taken by attacks that were not finite.
    """
    # The number of samples that guessing classifies correctly with luck: the binomial mean plus
    # two standard deviations.
    mean = checks.samples / checks.classes
    lucky = mean + 2 * math.sqrt(mean * (1 - 1 / checks.classes))
    # By code: whether the sign is present, and its text.
    signs = {
        "zero-gradients": (
            checks.zero_gradients > 0,
            f"{checks.zero_gradients} of {checks.correct} correct samples have a cross-entropy "
            "gradient of exactly 0. FGSM, PGD and APGD-CE cannot attack them",
        ),
        "gradients-not-finite": (
            checks.nonfinite > 0 or nonfinite > 0,
            f"the gradient is not finite at {checks.nonfinite} of {checks.samples} samples and in "
            f"{100 * nonfinite:.2g}% of the gradients that attacks took. Attacks ignore NaN, so "
            "they are weaker than they could be",
        ),
        "randomised": (
            checks.random > 0,
            f"{checks.random} of {checks.samples} samples get different logits in a second "
            "forward pass. Attacks need a deterministic model: switch dropout and noise off",
        ),
        "probabilities": (
            checks.samples > 0 and checks.probabilities == checks.samples,
            "the outputs look like probabilities. Remove the final softmax: attacks on logits are "
            "stronger",
        ),
        "clean-accuracy-at-chance": (
            guessing and checks.correct < min(lucky, checks.samples),
            f"{checks.correct} of {checks.samples} samples are correct without an attack, no "
            f"better than guessing among {checks.classes} classes. Check labels and preprocessing",
        ),
    }
    return tuple(Note.warn(code, text) for code, (present, text) in signs.items() if present)


def note_square(before: int, after: int, samples: int) -> Notes:
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
    return (Note.warn("square-beats-gradients", text),)


def note_masking(
    trials: Sequence[Trial],
    robust: np.ndarray,
    y: np.ndarray,
    box: Box | None,
) -> Notes:
    """Warn of signs that the iterative gradient attacks were weak because gradients are masked.

    The signs are from Athalye et al. (arXiv 1802.00420) and Carlini et al. (arXiv 1902.06705):

    1. Examples of another model break samples that no attack on this model broke.
    2. Square (no gradient) or FGSM (one gradient) breaks more samples than the iterative attacks.
    3. Samples survive in an linf ball of half the box. Such a ball contains the centre of the box,
       whatever the sample, and the model is right there for samples of one class at most.

    A sign counts if it exceeds both LUCKY samples and the share LUCKY_SHARE of all samples.

    Args:
        trials: the trials: attacks that ran one after the other in balls of one radius.
        robust: whether each sample survived each trial, (samples, trials).
        y: labels of the samples.
        box: smallest and largest value of the attacked space.
    """
    lucky = max(LUCKY, LUCKY_SHARE * len(y))
    _, class_sizes = np.unique(y, return_counts=True)
    largest_class = class_sizes.max()
    # The text of each sign, by the label of its attack. A sign at a larger radius replaces the
    # sign at a smaller radius.
    signs = {}
    for trial in sorted(trials, key=lambda trial: trial.radius.value):
        ball = (trial.norm, trial.radius)
        columns = [i for i, other in enumerate(trials) if (other.norm, other.radius) == ball]
        in_ball = [trials[i] for i in columns]
        # Without iterative gradient attacks ("steps") there is nothing to compare with.
        if not any("steps" in _list_efforts(other) for other in in_ball):
            continue
        survived = robust[:, columns]
        where = f"{trial.norm} {trial.radius.text}"
        # Signs 1 and 2: a sentence, such as "fgsm broke 5 samples more than pgd", or "".
        sentence = _describe_excess(trial, in_ball, survived, lucky)
        if sentence:
            signs[trial.label] = f"{sentence} ({where})"
        # Sign 3.
        survivors = survived.all(1).sum()
        if _holds_centre(trial, box) and survivors > largest_class + lucky:
            signs["survivors"] = (
                f"{survivors} of {len(y)} samples survive {where}, a ball that holds the same "
                f"grey point for all of them, where at most {largest_class} can be right"
            )
    if not signs:
        return ()
    text = "gradients may be masked, so the true robust accuracy may be far lower: "
    return (Note.warn("gradient-masking", text + "; ".join(signs.values())),)


def _describe_excess(
    trial: Trial, in_ball: Sequence[Trial], robust: np.ndarray, lucky: float
) -> str:
    """Say that a trial broke samples that stronger attacks in the same ball did not break.

    The text is "fgsm broke 5 samples more than pgd", or for adversarial examples of another model
    "transfer broke 5 samples that no attack on this model broke". It is "" for few samples.

    Transfer is compared with all attacks on this model together. A trial of another kind is
    compared with the trials that have an iterative attack (`steps`), which should be stronger than
    FGSM or Square. If it is one of them, it cannot break more than all of them: the text is "".

    Args:
        trial: the trial.
        in_ball: all trials in the same ball, with this one; at least one has an iterative attack.
        robust: whether each sample survived each of them, (samples, trials).
        lucky: the number of samples that may be broken by luck.
    """
    survived = robust[:, in_ball.index(trial)]
    # Efforts: "points" for examples of another model, "steps" for iterative attacks.
    if _list_efforts(trial) == {"points"}:
        on_this = [i for i, other in enumerate(in_ball) if _list_efforts(other) != {"points"}]
        excess = (robust[:, on_this].all(1) & ~survived).sum()
        comparison = "that no attack on this model broke"
    else:
        iterative = [i for i, other in enumerate(in_ball) if "steps" in _list_efforts(other)]
        excess = robust[:, iterative].all(1).sum() - survived.sum()
        comparison = f"more than {', '.join(in_ball[i].label for i in iterative)}"
    if excess <= lucky:
        return ""
    return f"{trial.label} broke {excess} samples {comparison}"


def _holds_centre(trial: Trial, box: Box | None) -> bool:
    """Say whether the trial's balls are linf balls that hold the centre of the box (`low, high`).

    Every point of the box is at most half its width from the centre, in each coordinate.
    """
    if box is None or trial.norm != "linf":
        return False
    low, high = box
    return 2 * float(trial.radius) >= high - low


def _list_efforts(trial: Trial) -> set[str]:
    """Return the kinds of effort of a trial's attacks: one gradient, steps, queries..."""
    return {attack.kind.effort for attack in trial.attacks}


def note_resolution(x: Samples, ball: Ball, *, single: bool) -> Notes:
    """Warn if rounding of x + delta loses much of delta, because samples are large.

    Args:
        x: the samples.
        ball: norm and radius.
        single: whether the attack computes in float32 even if the samples are float64.
    """
    computed = x.float() if single else x
    if balls.is_resolved(computed, ball):
        return ()
    advice = "use --dtype float64" if x.dtype == torch.float32 else "scale the data down"
    dtype = str(computed.dtype).removeprefix("torch.")
    text = (
        f"{ball.norm} {ball.eps:g} is below the resolution of {dtype} at the size of these "
        f"data. Attacks miss part of the ball and robust accuracy may be too high: {advice}"
    )
    return (Note.warn("ball-below-resolution", text),)
