"""Run a plan: each attack on the surviving samples, with one outcome per chunk and attack.

Random numbers depend on the chunk of the original samples and on the attack, not on the device
batch or the survivors. So the start of a sample depends only on the seed, the attack, and its
position in the chunk. Square draws one window for all survivors of a chunk: there a result may
depend on the 63 other samples (never on the device batch size).
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lipaudit.attacks.balls import Ball, check_inside, distance, random_start
from lipaudit.attacks.oracle import (
    AttackFunction,
    ByRow,
    Classifier,
    Meter,
    Oracle,
    Turn,
    logits_and_gradient,
)
from lipaudit.attacks.plan import CHUNK, Attack, Trial, adapt
from lipaudit.attacks.sanity import Checks, examine, note_resolution
from lipaudit.attacks.text import Draft, Reader, RewriteFunction, TextOracle, check_drafts
from lipaudit.errors import EvaluationError, UsageError
from lipaudit.tables import Note
from lipaudit.tables.trials import COUNTED, Norm


@dataclass(frozen=True)
class Chunk:
    """At most CHUNK samples that are attacked together.

    Attributes:
        number: index of the chunk, from 0; part of the seed.
        x: samples, float32 or float64, inside the box.
        y: labels.
        mask: True where a sample may change, over the first axes of x (batch, tokens).
        texts: the samples as texts, for text models.
    """

    number: int
    x: Float[Tensor, " batch *sample"]
    y: Int[Tensor, " batch"]
    mask: Bool[Tensor, " batch *positions"] | None = None
    texts: Texts | None = None


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
        chunk: the chunk's number.
        trial: the trial of the plan; None for the clean samples, which come first.
        attack: name of the attack, `clean` for the clean samples.
        seed: seed of its random numbers, derived from (seed, attack, chunk).
        tried: samples it ran on: those not broken before, also at smaller radii.
        robust: samples that are not broken after it, judged by evaluating x_adv.
        x_adv: points inside the ball; for a robust sample the last point tried, for attacks on
            texts x.
        distance: ||x_adv - x|| in the norm of the trial; for attacks on texts the number of
            changes.
        seconds: wall time.
        forwards: samples passed forward (see `Meter`).
        backwards: samples passed backward.
        nonfinite: gradients that were not finite.
        notes: changes of settings for this model.
        checks: signs in the clean samples; None for an attack.
        drafts: the last texts, for an attack that changes texts.
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


def evaluate_chunk(
    f: Classifier | ByRow,
    chunk: Chunk,
    plan: Sequence[Trial],
    *,
    box: tuple[float, float] | None = (0.0, 1.0),
    seed: int = 0,
    batch_size: int = CHUNK,
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

    Raises:
        UsageError: the samples have half precision.
        EvaluationError: f returns no logits, or values that are not finite.
    """
    if chunk.x.dtype not in (torch.float32, torch.float64):
        raise UsageError(
            f"samples are {chunk.x.dtype}, which is too coarse for small radii",
            "Use --dtype float32 or float64.",
        )
    clean, logits = _classify(f, chunk, seed, batch_size)
    yield clean
    session = _Session(f, chunk, box, seed, batch_size, logits)
    ends: dict[tuple[Norm, tuple[Attack, ...]], Outcome] = {}
    for trial in sorted(plan, key=lambda trial: trial.radius.value):
        run = session.rewrite if trial.norm in COUNTED else session.search
        last = ends.get((trial.norm, trial.attacks), clean)
        for attack in trial.attacks:
            last = run(trial, attack, last)
            yield last
        ends[trial.norm, trial.attacks] = last


def _classify(
    f: Classifier | ByRow, chunk: Chunk, seed: int, batch_size: int
) -> tuple[Outcome, Tensor]:
    """Classify the samples, and examine a second pass with gradient for signs of trouble."""
    meter, x, y = Meter(), chunk.x, chunk.y
    oracle = Oracle(f, torch.arange(len(x), device=x.device), batch_size, meter)
    logits = _require_finite(oracle(x), "clean samples", chunk)
    again, gradient = logits_and_gradient(oracle, x, y)
    clean = _count_passes(
        meter,
        chunk=chunk.number,
        trial=None,
        attack="clean",
        seed=seed,
        tried=torch.ones_like(y, dtype=torch.bool),
        robust=logits.argmax(1) == y,
        x_adv=x,
        distance=x.new_zeros(len(x)),
        checks=examine(logits, again, gradient, y, int(meter.broken)),
    )
    return clean, logits


def _count_passes(meter: Meter, **found: Any) -> Outcome:
    """Return an outcome with its passes and time."""
    return Outcome(
        seconds=time.perf_counter() - meter.began,
        forwards=meter.forwards,
        backwards=meter.backwards,
        nonfinite=int(meter.broken),
        **found,
    )


@dataclass(frozen=True)
class _Session:
    """The attacks on a chunk, whose clean logits are known."""

    f: Classifier | ByRow
    chunk: Chunk
    box: tuple[float, float] | None
    seed: int
    batch_size: int
    logits: Tensor

    def search(self, trial: Trial, attack: Attack, last: Outcome) -> Outcome:
        """Run all turns of one attack, each on the samples that survived the turn before."""
        meter, chunk = Meter(), self.chunk
        ball = Ball(trial.norm, float(trial.radius), self.box, chunk.mask)
        seed = derive_seed(self.seed, attack.name, chunk.number)
        generator = torch.Generator().manual_seed(seed)
        fitted, notes = adapt(attack, self.logits.shape[1])
        notes += note_resolution(chunk.x, ball, single=fitted.kind.single)
        function: AttackFunction = fitted.kind.load()
        robust, x_adv = last.robust.clone(), last.x_adv.clone()
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
            start = partial(_draw_starts, chunk.x, ball, generator, rows, copies)
            turn = Turn(fitted, generator, start, where, torch.cat(aims), restart)
            z, logits = self._run(function, turn, ball, meter)
            # Of rows run together, the first one that broke a sample counts, else the last one.
            stands = (logits.argmax(1) == chunk.y[where]).reshape(copies, -1)
            robust[rows] = stands.all(0)
            chosen = torch.where(stands.all(0), copies - 1, (~stands).int().argmax(0))
            x_adv[rows] = z[chosen * len(rows) + torch.arange(len(rows), device=z.device)]
        return _count_passes(
            meter,
            chunk=chunk.number,
            trial=trial,
            attack=attack.name,
            seed=seed,
            tried=last.robust if fitted.turns else torch.zeros_like(robust),
            robust=robust,
            x_adv=x_adv,
            distance=distance(x_adv, chunk.x, ball.norm),
            notes=notes,
        )

    def _run(
        self, function: AttackFunction, turn: Turn, ball: Ball, meter: Meter
    ) -> tuple[Tensor, Tensor]:
        """Return the points of one turn, checked to be inside the ball, and their logits."""
        oracle = Oracle(self.f, turn.rows, self.batch_size, meter)
        x, y, ball = self.chunk.x[turn.rows], self.chunk.y[turn.rows], ball[turn.rows]
        name, drawn = turn.attack.name, turn.generator.get_state()
        while True:
            z = function(oracle, x.clone(), y.clone(), ball, turn)
            z = check_inside(z, x, ball, name)
            logits = _require_finite(oracle(z), f"{name} samples", self.chunk)
            if meter.mends or not bool(meter.broken > 0):
                return z, logits
            meter.mends = True  # again from the same draws, with other values in place of NaN
            turn.generator.set_state(drawn)

    def rewrite(self, trial: Trial, attack: Attack, last: Outcome) -> Outcome:
        """Let an attack change the texts that are not broken yet, and evaluate the result."""
        meter, chunk, texts = Meter(), self.chunk, self.chunk.texts
        assert texts is not None
        seed = derive_seed(self.seed, attack.name, chunk.number)
        after, robust = list(last.drafts or texts.drafts), last.robust.clone()
        rows, budget = robust.nonzero()[:, 0], int(trial.radius.value)
        if len(rows) and budget > 0:
            runners_up = self.logits[rows].sort(dim=1)[1][:, -2]
            generator = torch.Generator().manual_seed(seed)
            turn = Turn(attack, generator, lambda: chunk.x[rows], rows, runners_up)
            oracle = TextOracle(texts.reader, self.batch_size, meter)
            before, y = [texts.drafts[i] for i in rows.tolist()], chunk.y[rows]
            function: RewriteFunction = attack.kind.load()
            changed = function(oracle, list(before), y, budget, turn)
            check_drafts(changed, before, texts.reader.lexicon, budget, attack.name)
            logits = oracle([texts.reader.read(draft) for draft in changed])
            robust[rows] = _require_finite(logits, f"{attack.name} texts", chunk).argmax(1) == y
            for i, draft in zip(rows.tolist(), changed, strict=True):
                after[i] = draft
        return _count_passes(
            meter,
            chunk=chunk.number,
            trial=trial,
            attack=attack.name,
            seed=seed,
            tried=last.robust,
            robust=robust,
            x_adv=chunk.x,
            distance=chunk.x.new_tensor([float(len(draft.changed)) for draft in after]),
            drafts=after,
        )


def _draw_starts(
    x: Tensor, ball: Ball, generator: torch.Generator, rows: Tensor, copies: int
) -> Tensor:
    """Draw for the whole chunk, so that a sample's start does not depend on the survivors."""
    return torch.cat([random_start(x, ball, generator)[rows] for _ in range(copies)])


def derive_seed(seed: int, attack: str, chunk: int) -> int:
    """Return the seed of an attack's generator on a chunk: 63 bits of a hash of the three."""
    digest = hashlib.sha256(f"{seed}/{attack}/{chunk}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _require_finite(logits: Tensor, what: str, chunk: Chunk) -> Tensor:
    bad = int((~logits.isfinite()).any(1).sum())
    if bad:
        raise EvaluationError(
            f"the model's output is not finite on {bad} {what} of chunk {chunk.number}",
            "Try --dtype float64, or look for overflow in the model.",
        )
    return logits


def require_radius(trial: Trial, box: tuple[float, float] | None, shape: Sequence[int]) -> None:
    """Refuse a radius larger than the attacked space.

    Args:
        trial: norm and radius.
        box: smallest and largest value of the space.
        shape: shape of one sample.

    Raises:
        UsageError: the radius is too large.
    """
    if box is None or trial.norm in COUNTED:
        return
    entries = {"linf": 1, "l2": math.prod(shape), "token-l2": shape[-1]}[trial.norm]
    widest = (box[1] - box[0]) * math.sqrt(entries)
    if float(trial.radius) > widest:
        diagonal = f", whose diagonal is {widest:.4g}" * (entries > 1)
        raise UsageError(
            f"the radius {trial.radius.text} is larger than the range of the data {box}{diagonal}",
            "Give radii for pixels in [0, 1]: 8/255, not 8.",
        )
