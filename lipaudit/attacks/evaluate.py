"""Run a plan: each attack on the surviving samples, with one outcome per chunk and attack.

Random numbers depend on the chunk of the original samples and on the attack, not on the device
batch or the survivors. So the start of a sample depends only on the seed, the attack, and its
position in the chunk. Square draws one window for all survivors of a chunk: there a result may
depend on the 63 other samples (never on the device batch size).

Signs that an attack is weaker than its success rate suggests are those of Croce & Hein's
AutoAttack (arXiv 2003.01690) and of Carlini et al., *On Evaluating Adversarial Robustness* (arXiv
1902.06705). Counts add up over chunks; notes are made from the sums.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lipaudit.attacks import balls
from lipaudit.attacks.balls import Ball, distance
from lipaudit.attacks.kinds import CHUNK, Attack, Trial, adapt
from lipaudit.attacks.oracle import (
    AttackFunction,
    ByRow,
    Classifier,
    Meter,
    Oracle,
    Turn,
    logits_and_gradient,
)
from lipaudit.attacks.text import Draft, Reader, RewriteFunction, TextOracle, check_drafts
from lipaudit.errors import EvaluationError, UsageError
from lipaudit.tables import Note
from lipaudit.tables.trials import COUNTED, WHOLE, Norm

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
LUCKY, LUCKY_SHARE = 2, 0.02


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
        return Checks(self.classes, *map(operator.add, astuple(self)[1:], astuple(other)[1:]))


@dataclass(frozen=True)
class Chunk:
    """At most CHUNK samples that are attacked together.

    Attributes:
        number: index of the chunk, from 0; part of the seed.
        x: samples, float32 or float64, inside the box.
        y: labels.
        mask: True where a sample may change, over the first axes of x (batch, tokens).
        texts: the samples as texts, for text models.
        saved: examples of another model, for the attack transfer.
    """

    number: int
    x: Float[Tensor, " batch *sample"]
    y: Int[Tensor, " batch"]
    mask: Bool[Tensor, " batch *positions"] | None = None
    texts: Texts | None = None
    saved: Float[Tensor, " batch examples *sample"] | None = None


@dataclass(frozen=True)
class Texts:
    """The texts of a chunk, for attacks that change texts.

    Attributes:
        reader: how the model reads texts.
        drafts: the unchanged texts.
    """

    reader: Reader
    drafts: Sequence[Draft]


@dataclass(frozen=True)
class Outcome:
    """The result of one attack on one chunk.

    Attributes:
        trial: the trial of the plan; None for the clean samples, which come first.
        attack: name of the attack, `clean` for the clean samples.
        seed: seed of its random numbers, derived from (seed, attack, chunk).
        tried: samples it ran on: those not broken before, also at smaller radii.
        robust: samples that are not broken after it, judged by evaluating x_adv.
        x_adv: points inside the ball; for a robust sample the last point tried, for attacks on
            texts x.
        distance: ||x_adv - x|| in the norm of the trial; for attacks on texts the number of
            changes.
        confidence: largest softmax of the logits at x_adv, for attacks on texts at the last text.
        seconds: wall time.
        forwards: samples passed forward (see `Meter`).
        backwards: samples passed backward.
        nonfinite: gradients that were not finite.
        notes: changes of settings for this model.
        checks: signs in the clean samples; None for an attack.
        drafts: the last texts, for an attack that changes texts.
    """

    trial: Trial | None
    attack: str
    seed: int
    tried: Bool[Tensor, " batch"]
    robust: Bool[Tensor, " batch"]
    x_adv: Float[Tensor, " batch *sample"]
    distance: Float[Tensor, " batch"]
    confidence: Float[Tensor, " batch"]
    seconds: float
    forwards: int
    backwards: int
    nonfinite: int = 0
    notes: tuple[Note, ...] = ()
    checks: Checks | None = None
    drafts: Sequence[Draft] | None = None


def evaluate_chunk(
    f: Classifier | ByRow,
    chunk: Chunk,
    plan: Sequence[Trial],
    *,
    box: tuple[float, float] | None = (0.0, 1.0),
    seed: int = 0,
    batch_size: int = CHUNK,
    patch: tuple[int, int] | None = None,
) -> Iterator[Outcome]:
    """Yield the outcome of the clean samples, then one outcome per trial and attack.

    Trials run from the smallest radius to the largest. An attack gets the samples that survived
    the earlier attacks of its trial, and of the same trial at smaller radii. So a sample broken at
    one radius is broken at every larger one.

    Args:
        f: x -> logits (batch, classes) in the attacked space, deterministic, in eval mode. A
            `ByRow` also gets the positions of the samples; only fgsm and pgd can use it.
        chunk: the samples, inside the box, with labels that are classes.
        plan: the trials (see `read_plan`), suitable for the model (see `require_suitable`).
        box: smallest and largest value of the attacked space; None for embeddings.
        seed: seed of all random numbers.
        batch_size: samples per call of f. It limits memory, and changes only the rounding of f.
        patch: height and width of a patch, for attacks on patches.

    Raises:
        UsageError: the samples have half precision.
        EvaluationError: f returns no logits, or values that are not finite.
    """
    half = chunk.x.dtype not in (torch.float32, torch.float64)
    if half:
        raise UsageError(
            f"samples are {chunk.x.dtype}, which is too coarse for small radii",
            "Use --dtype float32 or float64.",
        )
    meter, x, y = Meter(), chunk.x, chunk.y
    oracle = Oracle(f, torch.arange(len(x), device=x.device), batch_size, meter)
    logits = _require_finite(oracle(x), "clean samples", chunk)
    # A second pass, with gradient, shows signs of trouble.
    again, gradient = logits_and_gradient(oracle, x, y)
    clean = Outcome(
        trial=None,
        attack="clean",
        seed=seed,
        tried=torch.ones_like(y, dtype=torch.bool),
        robust=logits.argmax(1) == y,
        x_adv=x,
        distance=x.new_zeros(len(x)),
        confidence=logits.softmax(1).amax(1),
        checks=examine(logits, again, gradient, y, int(meter.broken)),
        **meter.read(),
    )
    yield clean
    session = _Session(f, chunk, box, batch_size, logits, patch)
    ends: dict[tuple[Norm, tuple[Attack, ...]], Outcome] = {}
    # From small radii to large ones: what breaks a sample in a ball breaks it in every larger one.
    for trial in sorted(plan, key=lambda trial: trial.radius.value):
        run = session.rewrite if trial.norm in COUNTED else session.search
        last = ends.get((trial.norm, trial.attacks), clean)
        for attack in trial.attacks:
            meter, part = Meter(), derive_seed(seed, attack.name, chunk.number)
            found = run(trial, attack, last, meter, torch.Generator().manual_seed(part))
            last = Outcome(trial, attack.name, part, **found, **meter.read())
            yield last
        ends[trial.norm, trial.attacks] = last


@dataclass(frozen=True)
class _Session:
    """The attacks on a chunk, whose clean logits are known."""

    f: Classifier | ByRow
    chunk: Chunk
    box: tuple[float, float] | None
    batch_size: int
    logits: Tensor
    patch: tuple[int, int] | None

    def search(
        self, trial: Trial, attack: Attack, last: Outcome, meter: Meter, rng: torch.Generator
    ) -> dict[str, Any]:
        """Run all turns of one attack, each on the samples that survived the turn before."""
        chunk = self.chunk
        patch = self.patch if trial.norm == "patch" else None
        ball = Ball(trial.norm, float(trial.radius), self.box, chunk.mask, patch)
        fitted, notes = adapt(attack, self.logits.shape[1])
        notes += note_resolution(chunk.x, ball, single=fitted.kind.single)
        function: AttackFunction = fitted.kind.load()
        robust, x_adv, confidence = (
            each.clone() for each in (last.robust, last.x_adv, last.confidence)
        )
        ranks = self.logits.sort(dim=1)[1]  # from the least likely class to the likeliest
        number, turns = 0, fitted.turns if ball.eps > 0 else 0
        while number < turns and bool(robust.any()):
            rows = robust.nonzero()[:, 0]
            restart, first = divmod(number, fitted.aims)
            # Few survivors: several targets share a batch.
            copies = min(max(CHUNK // len(rows), 1), fitted.aims - first)
            number += copies
            where = rows.repeat(copies)
            aims = [ranks[rows, -2 - i] for i in range(first, first + copies)]
            start = partial(_draw_starts, chunk.x, ball, rng, rows, copies)
            turn = Turn(fitted, rng, start, where, torch.cat(aims), restart, chunk.saved)
            z, logits = self._run(function, turn, ball, meter)
            # Of rows run together, the first one that broke a sample counts, else the last one.
            stands = (logits.argmax(1) == chunk.y[where]).reshape(copies, -1)
            robust[rows] = stands.all(0)
            chosen = torch.where(stands.all(0), copies - 1, (~stands).int().argmax(0))
            chosen = chosen * len(rows) + torch.arange(len(rows), device=z.device)
            x_adv[rows], confidence[rows] = z[chosen], logits[chosen].softmax(1).amax(1)
        tried = last.robust if fitted.turns else torch.zeros_like(robust)
        far = distance(x_adv, chunk.x, ball.norm, patch)
        found = {"tried": tried, "robust": robust, "x_adv": x_adv, "distance": far}
        return found | {"confidence": confidence, "notes": notes}

    def _run(
        self, function: AttackFunction, turn: Turn, ball: Ball, meter: Meter
    ) -> tuple[Tensor, Tensor]:
        """Return the points of one turn, checked to be inside the ball, and their logits."""
        oracle = Oracle(self.f, turn.rows, self.batch_size, meter)
        x, y, ball = self.chunk.x[turn.rows], self.chunk.y[turn.rows], ball[turn.rows]
        name, drawn = turn.attack.name, turn.generator.get_state()
        while True:
            # Copies, because an attack may change its arguments in place.
            z = function(oracle, x.clone(), y.clone(), ball, turn)
            z = balls.check_inside(z, x, ball, name)
            # Judged by a fresh evaluation, whatever the attack found.
            logits = _require_finite(oracle(z), f"{name} samples", self.chunk)
            if meter.mends or not bool(meter.broken > 0):
                return z, logits
            meter.mends = True  # again from the same draws, with other values in place of NaN
            turn.generator.set_state(drawn)

    def rewrite(
        self, trial: Trial, attack: Attack, last: Outcome, meter: Meter, rng: torch.Generator
    ) -> dict[str, Any]:
        """Let an attack change the texts that are not broken yet, and evaluate the result."""
        chunk, texts = self.chunk, self.chunk.texts
        assert texts is not None
        after, robust = list(last.drafts or texts.drafts), last.robust.clone()
        confidence = last.confidence.clone()
        rows, budget = robust.nonzero()[:, 0], int(trial.radius.value)
        if len(rows) and budget > 0:
            runners_up = self.logits[rows].sort(dim=1)[1][:, -2]
            turn = Turn(attack, rng, lambda: chunk.x[rows], rows, runners_up)
            oracle = TextOracle(texts.reader, self.batch_size, meter)
            before, y = [texts.drafts[i] for i in rows.tolist()], chunk.y[rows]
            function: RewriteFunction = attack.kind.load()
            changed = function(oracle, list(before), y, budget, turn)
            check_drafts(changed, before, texts.reader.lexicon, budget, attack.name)
            logits = oracle([texts.reader.read(draft) for draft in changed])
            robust[rows] = _require_finite(logits, f"{attack.name} texts", chunk).argmax(1) == y
            confidence[rows] = logits.softmax(1).amax(1).to(confidence)
            for i, draft in zip(rows.tolist(), changed, strict=True):
                after[i] = draft
        counts = chunk.x.new_tensor([float(len(draft.changed)) for draft in after])
        found = {"tried": last.robust, "robust": robust, "x_adv": chunk.x, "distance": counts}
        return found | {"confidence": confidence, "drafts": after}


def _draw_starts(
    x: Tensor, ball: Ball, generator: torch.Generator, rows: Tensor, copies: int
) -> Tensor:
    """Draw for the whole chunk, so that a sample's start does not depend on the survivors."""
    return torch.cat([balls.random_start(x, ball, generator)[rows] for _ in range(copies)])


def derive_seed(seed: int, attack: str, chunk: int) -> int:
    """Return the seed of an attack's generator on a chunk: 63 bits of a hash of the three."""
    digest = hashlib.sha256(f"{seed}/{attack}/{chunk}".encode()).digest()
    # Not `hash`, which differs between processes; torch takes seeds below 2^63.
    return int.from_bytes(digest[:8], "big") >> 1


def _require_finite(logits: Tensor, what: str, chunk: Chunk) -> Tensor:
    bad = int((~logits.isfinite()).any(1).sum())
    if bad:
        raise EvaluationError(
            f"the model's output is not finite on {bad} {what} of chunk {chunk.number}",
            "Try --dtype float64, or look for overflow in the model.",
        )
    return logits


def require_radius(
    trial: Trial,
    box: tuple[float, float] | None,
    shape: Sequence[int],
    patch: tuple[int, int] | None = None,
) -> None:
    """Refuse a radius larger than the attacked space.

    Args:
        trial: norm and radius.
        box: smallest and largest value of the space.
        shape: shape of one sample.
        patch: height and width of a patch.

    Raises:
        UsageError: the radius is too large.
    """
    if trial.norm == "patch":
        require_grid(trial.radius.value, shape, patch)
    if box is None or trial.norm in WHOLE:
        return
    # The diameter of the box: in a larger ball the box alone would limit the attack.
    length = balls.measure_ones(trial.norm, shape)
    widest = (box[1] - box[0]) * length
    text = f"the radius {trial.radius.text} is larger than the range of the data {box}"
    text += f", whose diagonal is {widest:.4g}" * (length > 1)
    if float(trial.radius) > widest:
        raise UsageError(text, "Give radii for pixels in [0, 1]: 8/255, not 8.")


def require_grid(k: Fraction, shape: Sequence[int], patch: tuple[int, int] | None) -> None:
    """Refuse patches that do not form a grid of the image, or more patches than it has.

    Raises:
        UsageError: the size of the patches is unknown, it does not divide the image, or the grid
            has fewer than k places.
    """
    height, width = shape[1:]
    sides = [n for n in range(1, height + 1) if height % n == width % n == 0]

    def advise(near: int) -> str:
        return f"--patch-size {min(sides, key=lambda side: abs(side - near))}."

    if patch is None:
        raise UsageError(
            "this model shows no grid of patches", f"Give their side in pixels: {advise(16)}"
        )
    assert patch is not None
    uneven = height % patch[0] or width % patch[1]
    if uneven:
        raise UsageError(
            f"patches of {patch[0]}x{patch[1]} pixels do not divide images of {height}x{width}",
            f"Give a side that divides both: {advise(patch[0])}",
        )
    places = height * width // math.prod(patch)
    if k > places:
        raise UsageError(
            f"an image has {places} patches of {patch[0]}x{patch[1]} pixels, fewer than {k}",
            "Give fewer: --eps 1patch.",
        )


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
        "zero-gradients": (
            checks.zero_gradients > 0,
            f"{checks.zero_gradients} of {checks.correct} correct samples have a cross-entropy "
            "gradient of exactly 0. FGSM, PGD and APGD-CE cannot attack them",
        ),
        "gradients-not-finite": (
            checks.nonfinite > 0 or nonfinite > 0,
            f"the gradient is not finite at {checks.nonfinite} of {checks.samples} samples and in "
            f"{100 * nonfinite:.2g} % of the gradients that attacks took. Attacks ignore NaN, so "
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
    return (Note.warn("square-beats-gradients", text),)


def note_masking(
    trials: Sequence[Trial],
    robust: Bool[np.ndarray, "samples trials"],
    y: Int[np.ndarray, " samples"],
    box: tuple[float, float] | None,
) -> tuple[Note, ...]:
    """Warn of signs that the iterative gradient attacks were weak because gradients are masked.

    The signs are those of Athalye et al. (arXiv 1802.00420) and Carlini et al. (arXiv 1902.06705):
    examples of another model break samples that no attack on this model broke; Square, which takes
    no gradient, or FGSM, which takes one, breaks more samples than the iterative attacks; samples
    survive in an linf ball of half the box. That ball contains the centre of the box, whatever the
    sample, and a model is right there for the samples of one class at most. A sign has to be
    larger than LUCKY samples and than LUCKY_SHARE of all.

    Args:
        trials: the trials.
        robust: whether each sample survived each trial.
        y: labels.
        box: smallest and largest value of the attacked space.
    """
    lucky, signs = max(LUCKY, LUCKY_SHARE * len(y)), dict[str, str]()
    # Of each sign the last, at the largest radius.
    for trial in sorted(trials, key=lambda trial: trial.radius.value):
        inside = [
            i for i, t in enumerate(trials) if (t.norm, t.radius) == (trial.norm, trial.radius)
        ]
        efforts = {i: {attack.kind.effort for attack in trials[i].attacks} for i in inside}
        iterative = [i for i in inside if "steps" in efforts[i]]
        if not iterative:
            continue
        where = f"{trial.norm} {trial.radius.text}"
        stands, flags = robust[:, iterative].all(1), robust[:, trials.index(trial)]
        more = f"more than {', '.join(trials[i].label for i in iterative)}"
        count = int(stands.sum() - flags.sum())
        if efforts[trials.index(trial)] == {"points"}:
            own = [i for i in inside if efforts[i] != {"points"}]
            count = int((robust[:, own].all(1) & ~flags).sum())
            more = "that no attack on this model broke"
        if count > lucky:
            signs[trial.label] = f"{trial.label} broke {count} samples {more} ({where})"
        left, most = robust[:, inside].all(1).sum(), np.unique(y, return_counts=True)[1].max()
        wide = box is not None and 2 * float(trial.radius) >= box[1] - box[0]
        if wide and trial.norm == "linf" and left > most + lucky:
            signs["survivors"] = (
                f"{left} of {len(y)} samples survive {where}, a ball that holds the same grey "
                f"point for all of them, where at most {most} can be right"
            )
    text = "gradients may be masked, so the true robust accuracy may be far lower: "
    return (Note.warn("gradient-masking", text + "; ".join(signs.values())),) if signs else ()


def note_resolution(
    x: Float[Tensor, " batch *sample"], ball: Ball, *, single: bool
) -> tuple[Note, ...]:
    """Warn if rounding of x + delta loses much of delta, because samples are large.

    Args:
        x: the samples.
        ball: norm and radius.
        single: whether the attack computes in float32 even if the samples are float64.
    """
    if balls.is_resolved(x.float() if single else x, ball):
        return ()
    advice = "use --dtype float64" if x.dtype == torch.float32 else "scale the data down"
    dtype = "float32" if single else str(x.dtype).removeprefix("torch.")
    text = (
        f"{ball.norm} {ball.eps:g} is below the resolution of {dtype} at the size of these "
        f"data. Attacks miss part of the ball and robust accuracy may be too high: {advice}"
    )
    return (Note.warn("ball-below-resolution", text),)
