"""Run a plan: each attack on the surviving samples, with one outcome per chunk and attack.

Random numbers depend on the chunk of the original samples and on the attack, not on the device
batch or the survivors. So the start of a sample depends only on the seed, the attack, and its
position in the chunk. Square draws one window for all survivors of a chunk: there a result may
depend on the 63 other samples (never on the device batch size).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lipaudit.attacks import balls
from lipaudit.attacks.balls import Ball, distance
from lipaudit.attacks.kinds import CHUNK, Attack, Trial, adapt, list_steps
from lipaudit.attacks.oracle import (
    AttackFunction,
    ByRow,
    Classifier,
    Meter,
    Oracle,
    Turn,
    logits_and_gradient,
)
from lipaudit.attacks.signs import Checks, examine, note_resolution
from lipaudit.attacks.text import Draft, Reader, RewriteFunction, TextOracle, check_drafts
from lipaudit.errors import EvaluationError, UsageError
from lipaudit.tables import Note
from lipaudit.tables.trials import COUNTED, WHOLE, Norm

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


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
    earlier: Sequence[Outcome] = (),
    check: Callable[[], None] = lambda: None,
    target: int | None = None,
) -> Iterator[Outcome]:
    """Yield the outcome of the clean samples, then one outcome per trial and attack.

    A trial is a list of attacks in one ball. The cheapest trial runs first; of trials with equal
    cost, the smallest radius runs first (see `kinds.list_steps`). An attack gets the samples that
    survived the earlier attacks of its trial, and the same attacks at smaller radii. So a sample
    that is broken at one radius counts as broken at every larger radius.

    Args:
        f: x -> logits (batch, classes) in the attacked space, deterministic, in eval mode. A
            model that also needs the positions of the samples is a `ByRow`; only fgsm and pgd can
            use it.
        chunk: the samples, inside the box, with labels that are classes.
        plan: the trials (see `read_plan`), suitable for the model (see `require_suitable`).
        box: smallest and largest value of the attacked space; None for embeddings.
        seed: seed of all random numbers.
        batch_size: samples per call of f. It limits memory, and changes only the rounding of f.
        patch: height and width of a patch, for attacks on patches.
        earlier: outcomes of an interrupted run on this chunk, which are not yielded again.
        check: called before every pass of an attack; it may raise to end the run.
        target: the class that attacks on texts aim at. Only this prediction breaks a text, and
            texts of this class are not attacked. None: any wrong class breaks a sample.

    Raises:
        UsageError: the samples have half precision.
        EvaluationError: f returns no logits, or values that are not finite.
    """
    if chunk.x.dtype not in (torch.float32, torch.float64):
        raise UsageError(
            f"samples are {chunk.x.dtype}, which is too coarse for small radii",
            "Use --dtype float32 or float64.",
        )
    oracle = Oracle(f, torch.arange(len(chunk.x), device=chunk.x.device), batch_size)
    logits = _require_finite(oracle(chunk.x), "clean samples", chunk)
    if earlier:
        clean = earlier[0]
    else:
        clean = _examine_clean(oracle, chunk, logits, seed)
        yield clean
    session = _Session(f, chunk, box, batch_size, logits, patch, target)
    finished = earlier[1:]
    outcome = clean  # the outcome of the previous step: its robust samples are attacked next
    # By norm and attacks: the outcome at the largest radius so far. Radii increase.
    latest: dict[tuple[Norm, tuple[Attack, ...]], Outcome] = {}
    for number, (trial, attack) in enumerate(list_steps(plan)):
        # The first attack of a trial gets the samples that the same attacks did not break at
        # smaller radii.
        if attack is trial.attacks[0]:
            outcome = latest.get((trial.norm, trial.attacks), clean)
        if number < len(finished):  # known from the interrupted run
            outcome = finished[number]
        else:
            # COUNTED: words, characters and suffix, whose attacks change texts.
            run = session.rewrite if trial.norm in COUNTED else session.search
            meter = Meter(check=check)
            attack_seed = derive_seed(seed, attack.name, chunk.number)
            generator = torch.Generator().manual_seed(attack_seed)
            fields = run(trial, attack, outcome, meter, generator)
            outcome = Outcome(trial, attack.name, attack_seed, **fields, **meter.read())
            yield outcome
        latest[trial.norm, trial.attacks] = outcome


def _examine_clean(oracle: Oracle, chunk: Chunk, logits: Tensor, seed: int) -> Outcome:
    """Return the outcome of the samples without attack: correct predictions, confidence, checks.

    The checks look for signs that attacks would be weak. A second forward pass has to give the
    same logits, else the model is random. The gradient of the loss must not vanish.

    Args:
        oracle: the model, with a meter that counts passes.
        chunk: the samples.
        logits: the logits of the samples from the first pass.
        seed: seed of the run.
    """
    x = chunk.x
    y = chunk.y
    second_logits, gradient = logits_and_gradient(oracle, x, y)
    return Outcome(
        trial=None,
        attack="clean",
        seed=seed,
        tried=torch.ones_like(y, dtype=torch.bool),
        robust=logits.argmax(1) == y,
        x_adv=x,
        distance=x.new_zeros(len(x)),
        confidence=logits.softmax(1).amax(1),
        checks=examine(logits, second_logits, gradient, y, int(oracle.meter.broken)),
        **oracle.meter.read(),
    )


@dataclass(frozen=True)
class _Session:
    """The attacks on a chunk: the arguments of `evaluate_chunk`, and the clean logits."""

    f: Classifier | ByRow
    chunk: Chunk
    box: tuple[float, float] | None
    batch_size: int
    logits: Tensor
    patch: tuple[int, int] | None
    target: int | None

    def search(
        self, trial: Trial, attack: Attack, last: Outcome, meter: Meter, rng: torch.Generator
    ) -> dict[str, Any]:
        """Run one attack in a ball, on the samples that are not broken yet.

        A turn is one run of the attack from one random start, against one target class per row.
        Each turn gets the samples that survived the previous turn.

        Args:
            trial: norm and radius of the ball.
            attack: the attack and its settings.
            last: the previous outcome; its robust samples are attacked.
            meter: counts passes.
            rng: source of all random numbers.

        Returns:
            Fields of an `Outcome`.
        """
        chunk = self.chunk
        patch = self.patch if trial.norm == "patch" else None
        ball = Ball(trial.norm, float(trial.radius), self.box, chunk.mask, patch)
        fitted, notes = adapt(attack, self.logits.shape[1])
        notes += note_resolution(chunk.x, ball, single=fitted.kind.single)
        function: AttackFunction = fitted.kind.load()
        robust = last.robust.clone()
        x_adv = last.x_adv.clone()
        confidence = last.confidence.clone()
        ranks = self.logits.sort(dim=1)[1]  # from the least likely class to the likeliest
        turns = fitted.turns if ball.eps > 0 else 0  # a ball of radius 0 needs no search
        number = 0  # number of turns that ran
        while number < turns and bool(robust.any()):
            rows = robust.nonzero()[:, 0]
            # The number of the start, and the number of the target class: each start has `aims`
            # targets, which run one after the other.
            restart, first = divmod(number, fitted.aims)
            # With few survivors, several targets share a batch: the batch repeats the samples once
            # (a copy) for each target.
            room = max(CHUNK // len(rows), 1)
            copies = min(room, fitted.aims - first)
            number += copies
            # `ranks` ends with the predicted class. The first target is the runner-up, at -2.
            targets = [ranks[rows, -2 - i] for i in range(first, first + copies)]
            start = partial(_draw_starts, chunk.x, ball, rng, rows, copies)
            turn = Turn(
                attack=fitted,
                generator=rng,
                start=start,
                rows=rows.repeat(copies),
                target=torch.cat(targets),
                restart=restart,
                saved=chunk.saved,
                check=meter.check,
            )
            points, logits = self._run(function, turn, ball, meter)
            right = logits.argmax(1) == chunk.y[turn.rows]
            right = right.reshape(copies, -1)  # (copies, samples)
            robust[rows] = right.all(0)
            chosen = _choose_copies(right)  # the copy that broke each sample, else the last one
            x_adv[rows] = points[chosen]
            confidence[rows] = logits[chosen].softmax(1).amax(1)
        # Samples that were broken earlier keep their distance: a resumed run lacks their points.
        attacked = last.robust
        distances = last.distance.clone()
        distances[attacked] = distance(x_adv[attacked], chunk.x[attacked], ball.norm, patch)
        return {
            "tried": attacked if fitted.turns else torch.zeros_like(robust),
            "robust": robust,
            "x_adv": x_adv,
            "distance": distances,
            "confidence": confidence,
            "notes": notes,
        }

    def _run(
        self, function: AttackFunction, turn: Turn, ball: Ball, meter: Meter
    ) -> tuple[Tensor, Tensor]:
        """Run an attack once; return its points, checked to be inside the ball, and their logits.

        If a gradient was not finite, the attack runs again, with NaN in gradients replaced.
        """
        oracle = Oracle(self.f, turn.rows, self.batch_size, meter)
        x = self.chunk.x[turn.rows]
        y = self.chunk.y[turn.rows]
        ball = ball[turn.rows]
        name = turn.attack.name
        random_state = turn.generator.get_state()
        while True:
            # Copies, because an attack may change its arguments in place.
            z = function(oracle, x.clone(), y.clone(), ball, turn)
            z = balls.check_inside(z, x, ball, name)
            # A fresh evaluation decides which points are misclassified, not the attack.
            logits = _require_finite(oracle(z), f"{name} samples", self.chunk)
            if meter.mends or not bool(meter.broken > 0):
                return z, logits
            # Some gradients were not finite. Run again with the same random numbers; the meter now
            # replaces NaN.
            meter.mends = True
            turn.generator.set_state(random_state)

    def rewrite(
        self, trial: Trial, attack: Attack, last: Outcome, meter: Meter, rng: torch.Generator
    ) -> dict[str, Any]:
        """Run an attack that changes texts, on the texts that are not broken yet.

        Args:
            trial: its radius is the largest number of changes.
            attack: the attack and its settings.
            last: the previous outcome; its robust samples are attacked.
            meter: counts passes.
            rng: source of all random numbers.

        Returns:
            Fields of an `Outcome`.
        """
        chunk = self.chunk
        texts = chunk.texts
        assert texts is not None
        reader = texts.reader
        drafts = list(last.drafts or texts.drafts)
        robust = last.robust.clone()
        confidence = last.confidence.clone()
        attacked = robust
        if self.target is not None:  # a sample of the target class cannot be broken
            attacked = robust & (chunk.y != self.target)
        rows = attacked.nonzero()[:, 0]
        budget = int(trial.radius.value)
        if len(rows) and budget > 0:
            runners_up = self.logits[rows].sort(dim=1)[1][:, -2]  # the second likeliest classes
            turn = Turn(attack, rng, lambda: chunk.x[rows], rows, runners_up)
            oracle = TextOracle(reader, self.batch_size, meter, self.target)
            originals = [texts.drafts[i] for i in rows.tolist()]
            y = chunk.y[rows]
            function: RewriteFunction = attack.kind.load()
            changed = function(oracle, list(originals), y, budget, turn)
            check_drafts(changed, originals, reader.lexicon, budget, attack.name)
            logits = oracle([reader.read(draft) for draft in changed])
            logits = _require_finite(logits, f"{attack.name} texts", chunk)
            predicted = logits.argmax(1)
            if self.target is None:
                robust[rows] = predicted == y
            else:
                robust[rows] = predicted != self.target
            confidence[rows] = logits.softmax(1).amax(1).to(confidence)
            for i, draft in zip(rows.tolist(), changed, strict=True):
                drafts[i] = draft
        counts = [float(draft.changes) for draft in drafts]
        return {
            "tried": last.robust,
            "robust": robust,
            "x_adv": chunk.x,
            "distance": chunk.x.new_tensor(counts),
            "confidence": confidence,
            "drafts": drafts,
        }


def _choose_copies(right: Bool[Tensor, "copies samples"]) -> Int[Tensor, " samples"]:
    """Return for each sample the row of its first misclassified copy, else of its last copy.

    A batch repeats all samples once for each target class. A repetition is a copy: row
    copy * samples + i has copy number `copy` of sample i. `right` is True for each copy that is
    classified correctly.
    """
    copies, samples = right.shape
    first_wrong = (~right).int().argmax(0)
    copy = torch.where(right.all(0), copies - 1, first_wrong)
    return copy * samples + torch.arange(samples, device=right.device)


def _draw_starts(
    x: Tensor, ball: Ball, generator: torch.Generator, rows: Tensor, copies: int
) -> Tensor:
    """Return random points (copies * rows, ...) in the balls of some rows of a chunk.

    The points are drawn for the whole chunk, then selected. So the start of a sample does not
    depend on which other samples survived.
    """
    starts = []
    for _ in range(copies):
        start = balls.random_start(x, ball, generator)
        starts.append(start[rows])
    return torch.cat(starts)


def derive_seed(seed: int, attack: str, chunk: int) -> int:
    """Return the seed of an attack's generator on a chunk: 63 bits of a hash of the three."""
    text = f"{seed}/{attack}/{chunk}"
    digest = hashlib.sha256(text.encode()).digest()
    # Not `hash`, which differs between processes; torch takes seeds below 2^63.
    return int.from_bytes(digest[:8], "big") >> 1


def _require_finite(logits: Tensor, what: str, chunk: Chunk) -> Tensor:
    """Return the logits, or raise an error if the logits of a sample are not finite."""
    finite = logits.isfinite().all(1)
    bad = int((~finite).sum())
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
    """Refuse a radius larger than the attacked space, such as 8 in place of 8/255.

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
    if box is None or trial.norm in WHOLE:  # WHOLE: the radius is a number of changes, no distance
        return
    # The diameter of the box: in a larger ball the box alone would limit the attack.
    low, high = box
    diagonal = (high - low) * balls.measure_ones(trial.norm, shape)
    if float(trial.radius) > diagonal:
        raise UsageError(
            f"the radius {trial.radius.text} is larger than the range of the data {box}, whose "
            f"diagonal in the norm {trial.norm} is {diagonal:.4g}",
            "Give radii for pixels in [0, 1]: 8/255, not 8.",
        )


def require_grid(k: Fraction, shape: Sequence[int], patch: tuple[int, int] | None) -> None:
    """Refuse patches that do not form a grid of the image, or more patches than it has.

    Args:
        k: the number of patches that an attack fills.
        shape: shape of an image, (channels, height, width).
        patch: height and width of a patch; None: unknown.

    Raises:
        UsageError: the size of the patches is unknown, it does not divide the image, or the grid
            has fewer than k places.
    """
    height, width = shape[1:]

    def advise(wanted: int) -> str:
        """Return the option with the side nearest to the wanted one that divides the image."""
        sides = [n for n in range(1, height + 1) if height % n == width % n == 0]
        nearest = min(sides, key=lambda side: abs(side - wanted))
        return f"--patch-size {nearest}."

    if patch is None:
        raise UsageError(
            "this model shows no grid of patches", f"Give their side in pixels: {advise(16)}"
        )
    if height % patch[0] or width % patch[1]:
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
