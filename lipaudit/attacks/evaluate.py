"""Running a plan: each attack on the samples that still stand, one outcome per chunk and attack.

Random numbers belong to a chunk of the original samples and to an attack, never to a device batch
or to the survivors: the start of a sample depends on the seed, the attack, and its place in its
chunk alone. Only Square draws one window for all survivors of a chunk, so there a sample's result
may depend on its 63 neighbours (never on the device batch size).
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
    margins,
)
from lipaudit.attacks.plan import CHUNK, Attack, Trial, adapt
from lipaudit.attacks.sanity import Checks, examine, note_resolution, refuse_training
from lipaudit.attacks.text import Draft, Reader, RewriteFunction, TextOracle, check_drafts
from lipaudit.errors import EvaluationError, UsageError
from lipaudit.tables import Note
from lipaudit.tables.trials import COUNTED, Norm


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


def evaluate(
    f: Classifier,
    x: Float[Tensor, " batch *sample"],
    y: Int[Tensor, " batch"],
    plan: Sequence[Trial],
    *,
    box: tuple[float, float] | None = (0.0, 1.0),
    seed: int = 0,
    batch_size: int = CHUNK,
) -> Iterator[Outcome]:
    """Attack samples chunk by chunk: `evaluate_chunk` on each of `chunks(x, y)`."""
    for chunk in chunks(x, y):
        yield from evaluate_chunk(f, chunk, plan, box=box, seed=seed, batch_size=batch_size)


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
    the attacks before it: those of its trial, and of the same trial at smaller radii. So what is
    broken at a radius is broken at every larger one.

    Args:
        f: x -> logits (batch, classes) in the attacked space, deterministic, in eval mode. A
            `ByRow` is told which samples of the chunk it gets; only fgsm and pgd can use it.
        chunk: the samples.
        plan: the trials (see `read_plan`).
        box: smallest and largest value of the attacked space; None for embeddings.
        seed: of all random numbers.
        batch_size: samples per call of f. It bounds memory and changes nothing else, but for the
            rounding of f itself.

    Raises:
        UsageError: samples outside the box, labels that are no classes, a half-precision sample,
            a module in training mode, a radius beyond the box, an attack that cannot run here.
        EvaluationError: f gives no logits, or values that are not finite.
    """
    _refuse(f, chunk, plan, box)
    clean, logits = _classify(f, chunk, seed, batch_size)
    yield clean
    ends: dict[tuple[Norm, tuple[Attack, ...]], Outcome] = {}
    for trial in sorted(plan, key=lambda trial: trial.radius.value):
        session = _Session(f, chunk, seed, batch_size, logits, margins(logits, chunk.y))
        ball = Ball(trial.norm, float(trial.radius), box, chunk.mask)
        last = ends.get((trial.norm, trial.attacks), clean)
        for attack in trial.attacks:
            if trial.norm in COUNTED:
                last = _rewrite(session, trial, attack, last)
            else:
                last = _search(session, trial, attack, ball, last)
            yield last
        ends[trial.norm, trial.attacks] = last


@dataclass(frozen=True)
class _Session:
    f: Classifier | ByRow
    chunk: Chunk
    seed: int
    batch_size: int
    logits: Tensor
    closest: Tensor


def _classify(
    f: Classifier | ByRow, chunk: Chunk, seed: int, batch_size: int
) -> tuple[Outcome, Tensor]:
    """Classify the samples; a second pass, with gradient, looks for signs of trouble."""
    meter = Meter()
    oracle = Oracle(f, torch.arange(len(chunk.x), device=chunk.x.device), batch_size, meter)
    logits = _require_finite(oracle(chunk.x), "clean samples", chunk)
    _refuse_labels(chunk.y, logits.shape[1])
    again, gradient = logits_and_gradient(oracle, chunk.x, chunk.y)
    clean = _count_passes(
        meter,
        chunk=chunk.number,
        trial=None,
        attack="clean",
        seed=seed,
        tried=torch.ones_like(chunk.y, dtype=torch.bool),
        robust=logits.argmax(1) == chunk.y,
        x_adv=chunk.x,
        distance=chunk.x.new_zeros(len(chunk.x)),
        checks=examine(logits, again, gradient, chunk.y, int(meter.broken)),
    )
    return clean, logits


def _count_passes(meter: Meter, **found: Any) -> Outcome:
    """Return an outcome with what it took."""
    return Outcome(
        seconds=time.perf_counter() - meter.began,
        forwards=meter.forwards,
        backwards=meter.backwards,
        nonfinite=int(meter.broken),
        **found,
    )


def _search(session: _Session, trial: Trial, attack: Attack, ball: Ball, last: Outcome) -> Outcome:
    """Run all turns of one attack, each on the samples that the one before left standing."""
    meter, chunk = Meter(), session.chunk
    seed = derive_seed(session.seed, attack.name, chunk.number)
    generator = torch.Generator().manual_seed(seed)
    fitted, notes = adapt(attack, session.logits.shape[1])
    notes += note_resolution(chunk.x, ball)
    robust, x_adv = last.robust.clone(), last.x_adv.clone()
    number, turns = 0, fitted.turns if ball.eps > 0 else 0
    while number < turns and bool(robust.any()):
        rows = robust.nonzero()[:, 0]
        start = partial(_draw_starts, chunk.x, ball, generator, rows)
        room = max(CHUNK // len(rows), 1) if fitted.kind.together else 1
        copies = min(room, turns - number)
        oracle = Oracle(session.f, rows.repeat(copies), session.batch_size, meter)
        known = session.logits[rows], session.closest[rows]
        turn = Turn(fitted, number, generator, start, copies, *known)
        drawn = generator.get_state()
        z, margin, stands = _search_once(oracle, chunk, ball, turn)
        if not meter.mends and bool(meter.broken > 0):  # once more, with other values for NaN
            meter.mends = True
            generator.set_state(drawn)
            z, margin, stands = _search_once(oracle, chunk, ball, turn)
        nearest = margin.reshape(copies, -1).amin(0)
        session.closest[rows] = torch.minimum(session.closest[rows], nearest)
        x_adv[rows], robust[rows] = _select_first(z, stands, copies)
        number += copies
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


def _select_first(z: Tensor, stands: Tensor, copies: int) -> tuple[Tensor, Tensor]:
    """Return, of turns that were run together, the first that broke a sample, else the last."""
    each = stands.reshape(copies, -1)
    turn = torch.where(each.all(0), copies - 1, (~each).int().argmax(0))
    sample = torch.arange(each.shape[1], device=z.device)
    return z[turn * each.shape[1] + sample], each.all(0)


def _rewrite(session: _Session, trial: Trial, attack: Attack, last: Outcome) -> Outcome:
    """Let an attack change the texts that still stand, and judge what it makes of them."""
    meter, chunk = Meter(), session.chunk
    assert chunk.texts is not None  # see _refuse_attack
    seed = derive_seed(session.seed, attack.name, chunk.number)
    before, budget = list(chunk.texts.drafts), int(trial.radius.value)
    after, robust = list(last.drafts or before), last.robust.clone()
    rows = robust.nonzero()[:, 0]
    if len(rows) and budget > 0:
        turn = Turn(attack, 0, torch.Generator().manual_seed(seed), lambda: chunk.x[rows])
        oracle = TextOracle(chunk.texts.reader, session.batch_size, meter)
        changed, robust[rows] = _change_texts(oracle, chunk, rows, budget, turn)
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


def _change_texts(
    oracle: TextOracle, chunk: Chunk, rows: Tensor, budget: int, turn: Turn
) -> tuple[list[Draft], Tensor]:
    """Attack some texts, check what comes back, and judge that by a fresh forward pass."""
    assert chunk.texts is not None
    function: RewriteFunction = turn.attack.kind.load()
    before, y = [chunk.texts.drafts[i] for i in rows.tolist()], chunk.y[rows]
    after = function(oracle, list(before), y, budget, turn)
    check_drafts(after, before, oracle.reader.lexicon, budget, turn.attack.name)
    ids = [oracle.reader.read(draft) for draft in after]
    logits = _require_finite(oracle(ids), f"{turn.attack.name} texts", chunk)
    return after, logits.argmax(1) == y


def _draw_starts(x: Tensor, ball: Ball, generator: torch.Generator, rows: Tensor) -> Tensor:
    """Draw for the whole chunk, so that a sample's start does not depend on who still stands."""
    return random_start(x, ball, generator)[rows]


def _search_once(
    oracle: Oracle, chunk: Chunk, ball: Ball, turn: Turn
) -> tuple[Tensor, Tensor, Tensor]:
    """Attack some samples, project what comes back, and judge that by a fresh forward pass.

    Returns the points, their margins, and which of them are classified rightly.
    """
    rows, attack = oracle.rows, turn.attack
    x, y, ball = chunk.x[rows], chunk.y[rows], ball[rows]
    function: AttackFunction = attack.kind.load()
    z = check_inside(function(oracle, x.clone(), y.clone(), ball, turn), x, ball, attack.name)
    logits = _require_finite(oracle(z), f"{turn.attack.name} samples", chunk)
    return z, margins(logits, y), logits.argmax(1) == y


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


def _refuse(
    f: Classifier | ByRow, chunk: Chunk, plan: Sequence[Trial], box: tuple[float, float] | None
) -> None:
    """Refuse a training-mode model and what would give wrong numbers without an error."""
    refuse_training(f)
    if chunk.x.dtype not in (torch.float32, torch.float64):
        raise UsageError(
            f"samples are {chunk.x.dtype}, which is too coarse for small radii",
            "Use --dtype float32 or float64.",
        )
    for trial in plan:
        require_radius(trial, box, chunk.x.shape[1:])
        for attack in trial.attacks:
            _refuse_attack(f, chunk, trial, attack)
    if box is not None:
        _refuse_outside(chunk.x, box)


def require_radius(trial: Trial, box: tuple[float, float] | None, shape: Sequence[int]) -> None:
    """Refuse a radius that is larger than the attacked space.

    Args:
        trial: norm and radius.
        box: smallest and largest value of the space.
        shape: of one sample.

    Raises:
        UsageError: it is.
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


def _refuse_attack(f: Classifier | ByRow, chunk: Chunk, trial: Trial, attack: Attack) -> None:
    """Refuse what the attack cannot work on, and an attack that cannot be loaded."""
    kind, advice = attack.kind, "Use --attack fgsm,pgd."
    if trial.norm in COUNTED and chunk.texts is None:
        raise UsageError(f"{attack.name} changes texts, and the samples are not texts", advice)
    if trial.norm not in kind.norms:
        known = ", ".join(kind.norms)
        raise UsageError(f"{attack.name} cannot search {trial.norm} balls, only {known}", advice)
    if not kind.masked and (chunk.mask is not None or isinstance(f, ByRow)):
        raise UsageError(
            f"{attack.name} cannot attack text: it supports no masks and no per-sample inputs",
            advice,
        )
    kind.load()


def _refuse_outside(x: Tensor, box: tuple[float, float]) -> None:
    low, high = float(x.min()), float(x.max())
    if low < box[0] - 1e-6 or high > box[1] + 1e-6:
        raise UsageError(
            f"samples lie in [{low:.4g}, {high:.4g}], outside of {list(box)}",
            "Give pixels in [0, 1], before any normalisation.",
        )


def _refuse_labels(y: Tensor, classes: int) -> None:
    if classes < 2:
        raise UsageError(
            "the model has only one class, so an attack cannot change its decision",
            "Use a classifier with two or more classes.",
        )
    if y.dtype != torch.int64 or int(y.min()) < 0 or int(y.max()) >= classes:
        raise UsageError(
            f"labels ({y.dtype}, {int(y.min())} to {int(y.max())}) do not fit a model with "
            f"{classes} classes",
            "Check --data: every attacked sample needs an integer label.",
        )
