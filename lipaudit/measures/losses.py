"""Attacks on the loss of continuations, which a language model scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lipaudit.attacks.evaluate import Chunk, Outcome, Texts, evaluate_chunk
from lipaudit.attacks.kinds import Trial
from lipaudit.attacks.oracle import ByRow
from lipaudit.data.batch import Batch
from lipaudit.measures.base import Arrays
from lipaudit.measures.texts import forward_pieces, score_outcome
from lipaudit.models.net import Net
from lipaudit.tables import Note
from lipaudit.tables.trials import COSTS, COUNTED, parse_column

if TYPE_CHECKING:
    from lipaudit.measures.attack_options import AttackOptions
    from lipaudit.measures.rounds import ChunkRun

# Relative drop of a score above which a loss counts as raised, beyond rounding.
SMALL = 1e-3
# More nats than any text has.
FAR = 1e6


def move_losses(net: Net, run: ChunkRun, options: AttackOptions) -> Iterator[Outcome]:
    """Attack every sample again, to raise the loss of its continuation; an outcome per trial.

    The attacks that ran before lower the margin, not the loss, and skip samples that are wrong
    already. Here the same attacks raise the loss -log p of every sample, right or wrong. For each
    sample, the outcome has one of two points (or texts): that of the attacks on the margin, or
    that of the attacks on the loss. A point that breaks the sample is preferred, then the point
    with the higher loss. The sample is robust only if neither point breaks it. With a target, the
    continuation, attacks lower the loss.

    Args:
        net: the model, which scores continuations (see `models.sources.classifiers`): the first
            score is log p, the log-probability of the continuation.
        run: a chunk of samples, and the outcomes of all attacks before.
        options: the options of the attacks.
    """
    sign = 1 if options.target is None else -1  # 1 raises the loss; -1 lowers it
    clean, *attacked = run.outcomes
    last_of_trial = {outcome.trial: outcome for outcome in attacked if outcome.trial is not None}
    for trial, on_margin in last_of_trial.items():
        outcomes = _attack_loss(net, run, options, trial, sign)
        on_loss = outcomes[-1]
        # Scores at the two points, (samples, scores); the first one is log p.
        before, after = (
            score_outcome(net, run, outcome, options.batch_size)
            for outcome in (on_margin, on_loss)
        )
        is_right_after = after.argmax(1) == run.chunk.y
        has_higher_loss = sign * after[:, 0] < sign * before[:, 0]  # with sign 1: a lower log p
        # The points that break a sample: neither, both, or only one. `clean.robust`: right without
        # attack; a sample that is wrong without attack is broken by neither.
        only_margin_broke = clean.robust & ~on_margin.robust & is_right_after
        only_loss_broke = on_margin.robust & ~is_right_after
        # Only the one point breaks the sample: take it. Neither or both: take the higher loss.
        takes_loss = only_loss_broke | (has_higher_loss & ~only_margin_broke)
        # The work of these attacks; `run.outcomes` has that of the attacks on the margin.
        work = (*COSTS, "nonfinite")
        costs = {what: sum(getattr(outcome, what) for outcome in outcomes) for what in work}
        yield replace(
            _merge_outcomes(takes_loss, on_loss, on_margin),
            robust=on_margin.robust & is_right_after,
            notes=(),
            **costs,
        )


def _attack_loss(
    net: Net, run: ChunkRun, options: AttackOptions, trial: Trial, sign: int
) -> list[Outcome]:
    """Run the attacks of a trial on the loss -log p of each continuation.

    Args:
        net: the model, whose first score is log p of the continuation.
        run: a chunk of samples.
        options: the options of the attacks.
        trial: the attacks, and the ball.
        sign: 1 raises the loss; -1 lowers it.
    """
    chunk = run.chunk
    size = options.batch_size
    texts = chunk.texts
    if trial.norm in COUNTED:
        model, texts = _make_text_classifier(net, run.batch, chunk, sign)
    else:
        model = _make_point_classifier(net, run.batch, chunk.x, sign, size)
    # Attacks need a classifier. In this one, the label of all samples is class 0.
    relabelled = replace(chunk, y=torch.zeros_like(chunk.y), texts=texts)
    _clean, *outcomes = evaluate_chunk(
        model, relabelled, [trial], box=net.box, seed=options.seed, batch_size=size
    )
    return outcomes


def _merge_outcomes(chosen: Tensor, one: Outcome, other: Outcome) -> Outcome:
    """Return an outcome with the points or texts of `one` where `chosen`, else those of `other`.

    Args:
        chosen: whether a sample takes the point or text of `one`, (samples,).
        one: the outcome of some attacks.
        other: the outcome of other attacks; it gives all other attributes.
    """
    drafts = other.drafts
    if drafts is not None and one.drafts is not None:
        drafts = list(drafts)
        for i in chosen.nonzero().flatten().tolist():
            drafts[i] = one.drafts[i]
    return replace(
        other,
        # Points are embeddings, (samples, tokens, width).
        x_adv=torch.where(chosen[:, None, None], one.x_adv, other.x_adv),
        distance=torch.where(chosen, one.distance, other.distance),
        drafts=drafts,
    )


def _make_point_classifier(net: Net, batch: Batch, x: Tensor, sign: int, size: int) -> ByRow:
    """Return a classifier of points in which attacks raise the loss -log p of each continuation.

    The model scores continuations: its first output is log p, the log-probability of the
    continuation. Class 0, the label of all samples, has the logit log p; class 1 has a constant
    logit, the floor. The cross-entropy softplus(floor - log p) rises as log p falls, and its
    gradient has the direction of the gradient of -log p. The margin is log p - floor: the iterate
    with the smallest margin has the highest loss.

    Args:
        net: the model, whose first score is log p of the continuation.
        batch: the samples.
        x: the clean points.
        sign: 1 raises the loss; -1 lowers it, with -log p in place of log p.
        size: number of samples at a time.
    """
    log_p = sign * forward_pieces(net, batch, x, size)[:, 0]
    # Slightly below log p of the clean sample: all samples are classified as class 0 at first, so
    # all are attacked, and the gradient of the softplus is not flat there.
    floor = log_p - SMALL * (1 + log_p.abs())

    def make_logits(z: Tensor, rows: Tensor) -> Tensor:
        """Return log p and the floor as the logits of two classes, (rows, 2)."""
        log_p = sign * net.forward(z, batch.rows_without_ids(rows))[:, 0]
        return torch.stack([log_p, floor[rows]], 1)

    return ByRow(make_logits)


def _make_text_classifier(net: Net, batch: Batch, chunk: Chunk, sign: int) -> tuple[ByRow, Texts]:
    """Return a classifier of two classes whose attack raises the loss -log p of a continuation.

    p is the probability that the model gives a continuation behind its prompt. A search for
    changed texts runs the model in two ways: on embeddings (to rank words by gradients), and on
    token ids (by the reader of the texts). Both get the two logits of `_make_two_logits` here.

    Args:
        net: the model, whose first score is log p.
        batch: the samples.
        chunk: the samples, with their texts.
        sign: 1 raises the loss; -1 lowers it (a target).

    Returns:
        The classifier of embeddings, and the texts, whose reader returns the two logits.
    """
    assert chunk.texts is not None
    reader = chunk.texts.reader
    make_logits = partial(_make_two_logits, sign=sign)
    two_class_reader = replace(
        reader,
        output=lambda ids, mask: make_logits(reader.output(ids, mask)),
        forward=lambda z, ids, mask: make_logits(reader.forward(z, ids, mask)),
    )
    # `rows_without_ids` leaves out the names of the samples only: its x has the token ids.
    model = ByRow(lambda z, rows: make_logits(net.forward(z, batch.rows_without_ids(rows))))
    return model, replace(chunk.texts, reader=two_class_reader)


def _make_two_logits(scores: Tensor, sign: int) -> Tensor:
    """Return the logits sign * log p and -FAR of two classes, (rows, 2).

    Attacks lower the margin of class 0, the label of all samples: sign * log p + FAR. With sign 1
    they lower log p and so raise the loss; with sign -1 they raise log p. An attack would end once
    the margin is negative. It never is, as -FAR is below any log p, so it goes on to the end.

    Args:
        scores: log p of the continuation, then log p of its rivals, which have no effect here:
            (rows, scores).
        sign: 1 or -1.
    """
    log_p = sign * scores[:, 0].double()
    return torch.stack([log_p, torch.full_like(log_p, -FAR)], 1)


def note_losses(losses: Arrays, target: str | None) -> Note:
    """Note the mean loss of continuations, without attack and under each attack.

    Args:
        losses: loss of every distinct sample without change (`loss`) and under each attack
            (`loss@ATTACK,NORM,EPS`).
        target: the class that the attacks aim at: the continuation, or None.
    """
    attacked = []
    for name, values in losses.items():
        _, trial = parse_column(name)
        if trial is not None:  # None: the column without attack
            attacked.append(f"{values.mean():#.3g} by {trial.attack} ({trial.ball})")
    verb = "raised" if target is None else "lowered"
    clean = losses["loss"].mean()
    text = f"the mean loss of a continuation ({clean:#.3g} nats) was {verb} to "
    return Note.info("loss", text + ", ".join(attacked))
