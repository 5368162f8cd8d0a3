"""Run a plan: each attack on the surviving samples, with one outcome per chunk and attack.

Random numbers depend on the chunk of the original samples and on the attack, not on the device
batch or the survivors. So the start of a sample depends only on the seed, the attack, and its
position in the chunk. Square draws one window for all survivors of a chunk: there a result may
depend on the 63 other samples (never on the device batch size).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lipaudit.attacks import balls
from lipaudit.attacks.balls import Ball, Box, PatchSize, distance
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
from lipaudit.tables import Notes
from lipaudit.tables.trials import COUNTED, WHOLE

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

    from lipaudit.attacks.balls import Labels, PerSample, Samples


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
    x: Samples
    y: Labels
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
    x_adv: Samples
    distance: PerSample
    confidence: PerSample
    seconds: float
    forwards: int
    backwards: int
    nonfinite: int = 0
    notes: Notes = ()
    checks: Checks | None = None
    drafts: Sequence[Draft] | None = None


def evaluate_chunk(
    f: Classifier | ByRow,
    chunk: Chunk,
    plan: Sequence[Trial],
    *,
    box: Box | None = (0.0, 1.0),
    seed: int = 0,
    batch_size: int = CHUNK,
    patch: PatchSize | None = None,
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
    _require_precise(chunk.x)
    all_rows = torch.arange(len(chunk.x), device=chunk.x.device)
    oracle = Oracle(f, rows=all_rows, batch_size=batch_size)
    logits = _require_finite(oracle(chunk.x), "clean samples", chunk)
    if earlier:
        clean = earlier[0]
    else:
        clean = _examine_clean(oracle, chunk, logits, seed)
        yield clean
    # What all attacks on this chunk share.
    prepare = partial(
        _AttackRun,
        f=f,
        chunk=chunk,
        logits=logits,
        box=box,
        patch=patch,
        target=target,
        batch_size=batch_size,
    )
    finished = earlier[1:]
    outcome = clean  # the outcome of the previous step: its robust samples are attacked next
    # By norm and attacks of a trial: the outcome at the largest radius so far. Radii increase.
    latest: dict[object, Outcome] = {}
    for number, (trial, attack) in enumerate(list_steps(plan)):
        # The first attack of a trial gets the samples that the same attacks did not break at
        # smaller radii.
        if attack is trial.attacks[0]:
            outcome = latest.get((trial.norm, trial.attacks), clean)
        if number < len(finished):  # known from the interrupted run
            outcome = finished[number]
        else:
            attack_seed = derive_seed(seed, attack.name, chunk.number)
            run = prepare(trial=trial, attack=attack, meter=Meter(check=check), seed=attack_seed)
            outcome = run.continue_from(outcome)
            yield outcome
        latest[trial.norm, trial.attacks] = outcome


def _require_precise(x: Tensor) -> None:
    """Refuse samples in half precision."""
    if x.dtype not in (torch.float32, torch.float64):
        raise UsageError(
            f"samples are {x.dtype}, which is too coarse for small radii",
            "Use --dtype float32 or float64.",
        )


def _examine_clean(oracle: Oracle, chunk: Chunk, logits: Tensor, seed: int) -> Outcome:
    """Return the outcome of the samples without attack: correct predictions, confidence, checks.

    The checks look for signs that attacks would be weak. A second forward pass has to give the
    same logits, else the model is random. The gradient of the loss must not vanish, and must be
    finite: the meter counts those that are not.

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
        checks=examine(logits, second_logits, gradient, y, int(oracle.meter.nonfinite)),
        **oracle.meter.read(),
    )


@dataclass(frozen=True)
class _AttackRun:
    """One attack on one chunk. Other attributes are the arguments of `evaluate_chunk`.

    Attributes:
        logits: the logits of the clean samples.
        trial: norm and radius of the ball; for an attack on texts, the largest number of changes.
        attack: the attack and its settings.
        meter: counts passes.
        seed: seed of all random numbers of the attack.
    """

    f: Classifier | ByRow
    chunk: Chunk
    logits: Tensor
    box: Box | None
    patch: PatchSize | None
    target: int | None
    batch_size: int
    trial: Trial
    attack: Attack
    meter: Meter
    seed: int

    @cached_property
    def generator(self) -> torch.Generator:
        """Return the source of all random numbers, on the CPU."""
        return torch.Generator().manual_seed(self.seed)

    @cached_property
    def rivals(self) -> Tensor:
        """Return the classes but the predicted one, likeliest first, (samples, others)."""
        # Ascending, then reversed, as AutoAttack does: a descending sort would give equal logits
        # another order than AutoAttack's. (Of two equal largest logits, the class left out may be
        # another one than argmax takes.)
        descending = self.logits.sort(dim=1).indices.flip(1)
        return descending[:, 1:]

    def _report(self, **fields: Any) -> Outcome:
        """Return the outcome of the attack, with counts of passes, from all other fields."""
        return Outcome(
            trial=self.trial,
            attack=self.attack.name,
            seed=self.seed,
            **fields,
            **self.meter.read(),
        )

    def continue_from(self, last: Outcome) -> Outcome:
        """Run the attack on the samples that are robust in the previous outcome."""
        # COUNTED: words, characters and suffix, whose attacks change texts.
        if self.trial.norm in COUNTED:
            return self._rewrite(last)
        return self._search(last)

    @cached_property
    def ball(self) -> Ball:
        """Return the ball around each sample of the chunk, for an attack that changes no texts."""
        norm = self.trial.norm
        return Ball(
            norm,
            eps=float(self.trial.radius),
            box=self.box,
            mask=self.chunk.mask,
            patch=self.patch if norm == "patch" else None,
        )

    def _search(self, last: Outcome) -> Outcome:
        """Run an attack in a ball, on the samples that are not broken yet.

        The attack runs from each random start, against one target class after the other. Each of
        these runs (a turn) gets the samples that survived the previous one.

        Args:
            last: the previous outcome; its robust samples are attacked.
        """
        chunk = self.chunk
        attack, notes = adapt(self.attack, self.logits.shape[1])
        notes += note_resolution(chunk.x, self.ball, single=attack.kind.single)
        robust = last.robust.clone()
        x_adv = last.x_adv.clone()
        confidence = last.confidence.clone()
        turns = attack.turns if self.ball.eps > 0 else 0  # a ball of radius 0 needs no search
        finished = 0  # number of turns that ran
        while finished < turns and robust.any():
            rows = robust.nonzero()[:, 0]
            # `_plan_turn` may join turns against several target classes: the batch then has a copy
            # of the samples for each class.
            turn = self._plan_turn(attack, rows, finished)
            points, logits = self._run(turn)
            is_right = logits.argmax(1) == chunk.y[turn.rows]
            is_right = is_right.view(-1, len(rows))  # (copies, samples)
            finished += len(is_right)
            robust[rows] = is_right.all(0)
            chosen = _choose_copies(is_right)  # the copy that broke each sample, else the last one
            x_adv[rows] = points[chosen]
            confidence[rows] = logits[chosen].softmax(1).amax(1)
        return self._report(
            # An attack that does not suit the model has 0 turns (see `adapt`): it tried no sample.
            tried=last.robust if attack.turns else torch.zeros_like(robust),
            robust=robust,
            x_adv=x_adv,
            distance=self._update_distances(last, x_adv),
            confidence=confidence,
            notes=notes,
        )

    def _update_distances(self, last: Outcome, x_adv: Tensor) -> Tensor:
        """Return ||x_adv - x|| of every sample, (samples), from those of the previous outcome.

        Samples that were broken earlier keep their distance: a resumed run lacks their points.
        """
        rows = last.robust
        distances = last.distance.clone()
        distances[rows] = distance(
            x_adv[rows], self.chunk.x[rows], self.ball.norm, self.ball.patch
        )
        return distances

    def _plan_turn(self, attack: Attack, rows: Tensor, finished: int) -> Turn:
        """Return the next turn of an attack: one start, and one target class or several.

        With few survivors, several target classes share a batch, which has a copy of the samples
        for each class.

        Args:
            attack: the attack, adapted to the model.
            rows: the samples that survived the earlier turns.
            finished: number of pairs (start, target class) of earlier turns; each start has
                `attack.aims` targets.
        """
        restart, first = divmod(finished, attack.aims)
        most = max(CHUNK // len(rows), 1)  # copies in a batch
        copies = min(most, attack.aims - first)
        # `rivals` has the classes but the predicted one, the likeliest first. Earlier turns from
        # this start aimed at the first ones.
        targets = self.rivals[rows, first : first + copies]  # (samples, copies)
        return Turn(
            attack=attack,
            generator=self.generator,
            start=partial(_draw_starts, self.chunk.x, self.ball, self.generator, rows, copies),
            rows=rows.repeat(copies),
            target=targets.T.flatten(),
            restart=restart,
            saved=self.chunk.saved,
            check=self.meter.check,
        )

    def _run(self, turn: Turn) -> tuple[Tensor, Tensor]:
        """Run an attack once; return its points, checked to be inside the ball, and their logits.

        If a gradient was not finite, the attack runs again, with NaN in gradients replaced.
        """
        function: AttackFunction = turn.attack.kind.load()
        oracle = Oracle(self.f, rows=turn.rows, batch_size=self.batch_size, meter=self.meter)
        x = self.chunk.x[turn.rows]
        y = self.chunk.y[turn.rows]
        ball = self.ball[turn.rows]
        name = turn.attack.name
        random_state = turn.generator.get_state()
        while True:
            # Copies, because an attack may change its arguments in place.
            z = function(oracle, x.clone(), y.clone(), ball, turn)
            z = balls.check_inside(z, x, ball, name)
            # A fresh evaluation decides which points are misclassified, not the attack.
            logits = _require_finite(oracle(z), f"{name} samples", self.chunk)
            if self.meter.replaces_nan or self.meter.nonfinite == 0:
                return z, logits
            # Some gradients were not finite. Run again with the same random numbers; the meter now
            # replaces NaN.
            self.meter.replaces_nan = True
            turn.generator.set_state(random_state)

    def _rewrite(self, last: Outcome) -> Outcome:
        """Run an attack that changes texts, on the texts that are not broken yet.

        Args:
            last: the previous outcome; its robust samples are attacked.
        """
        chunk = self.chunk
        assert chunk.texts is not None
        drafts = list(last.drafts or chunk.texts.drafts)  # as earlier attacks left them
        robust = last.robust.clone()
        confidence = last.confidence.clone()
        attacked = robust
        if self.target is not None:  # a sample of the target class cannot be broken
            attacked = robust & (chunk.y != self.target)
        rows = attacked.nonzero()[:, 0]
        budget = int(self.trial.radius.value)
        if len(rows) and budget > 0:
            changed, logits = self._run_on_texts(chunk.texts, rows, budget)
            robust[rows] = self._find_robust(logits.argmax(1), chunk.y[rows])
            confidence[rows] = logits.softmax(1).amax(1).to(confidence)
            for i, draft in zip(rows.tolist(), changed, strict=True):
                drafts[i] = draft
        counts = [float(draft.changes) for draft in drafts]
        return self._report(
            tried=last.robust,
            robust=robust,
            x_adv=chunk.x,  # unchanged: the changed samples are texts, in `drafts`
            distance=chunk.x.new_tensor(counts),
            confidence=confidence,
            drafts=drafts,
        )

    def _find_robust(self, predicted: Tensor, y: Tensor) -> Tensor:
        """Say which texts are robust: predicted as their label, or as any class but the target."""
        if self.target is None:
            return predicted == y
        return predicted != self.target

    def _run_on_texts(self, texts: Texts, rows: Tensor, budget: int) -> tuple[list[Draft], Tensor]:
        """Run an attack that changes texts; return the changed texts, checked, and their logits.

        Args:
            texts: the texts of the chunk.
            rows: which of them are attacked.
            budget: largest number of changes of a text.
        """
        chunk = self.chunk
        function: RewriteFunction = self.attack.kind.load()
        oracle = TextOracle(
            texts.reader, batch_size=self.batch_size, meter=self.meter, target=self.target
        )
        originals = [texts.drafts[i] for i in rows.tolist()]
        turn = Turn(
            attack=self.attack,
            generator=self.generator,
            start=lambda: chunk.x[rows],  # a text has no random start
            rows=rows,
            # The second likeliest class of each text, as for every untargeted attack. (The class
            # of the option --target, if given, is in the oracle: the attack lowers its lead.)
            target=self.rivals[rows, 0],
        )
        changed = function(oracle, list(originals), chunk.y[rows], budget, turn)
        check_drafts(changed, originals, texts.reader.lexicon, budget, self.attack.name)
        # A fresh evaluation decides which texts are broken, not the attack.
        logits = oracle([texts.reader.read(draft) for draft in changed])
        return changed, _require_finite(logits, f"{self.attack.name} texts", chunk)


def _choose_copies(is_right: Tensor) -> Tensor:
    """Return for each sample the row of its first misclassified copy, else of its last copy.

    A batch has a copy of all samples for each target class: row copy * samples + i has copy number
    `copy` of sample i. `is_right`, (copies, samples), is True for each copy that is classified
    correctly.
    """
    copies, samples = is_right.shape
    first_wrong = (~is_right).int().argmax(0)
    copy = torch.where(is_right.all(0), copies - 1, first_wrong)
    return copy * samples + torch.arange(samples, device=is_right.device)


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
    is_finite = logits.isfinite().all(1)
    bad = int((~is_finite).sum())
    if bad:
        raise EvaluationError(
            f"the model's output is not finite on {bad} {what} of chunk {chunk.number}",
            "Try --dtype float64, or look for overflow in the model.",
        )
    return logits


def require_radius(
    trial: Trial,
    box: Box | None,
    shape: Sequence[int],
    patch: PatchSize | None,
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


def require_grid(k: Fraction, shape: Sequence[int], patch: PatchSize | None) -> None:
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
    rows, columns = patch
    if height % rows or width % columns:
        raise UsageError(
            f"patches of {rows}x{columns} pixels do not divide images of {height}x{width}",
            f"Give a side that divides both: {advise(rows)}",
        )
    places = height * width // (rows * columns)
    if k > places:
        raise UsageError(
            f"an image has {places} patches of {rows}x{columns} pixels, fewer than {k}",
            "Give fewer: --eps 1patch.",
        )
