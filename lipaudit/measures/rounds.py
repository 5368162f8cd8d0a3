"""Attack many chunks of samples attack by attack: the cheapest attack on all of them first.

The samples that survive so far are an upper limit of robust accuracy, which only falls. So a run
that a time limit ends has an answer, and a resumed run continues after the last finished attack.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lipaudit.attacks.evaluate import Chunk, Outcome, evaluate_chunk
from lipaudit.attacks.kinds import CHUNK, PRESETS, STANDARD, STANDARD_L1, Attack, Trial, adapt
from lipaudit.attacks.oracle import ByRow, Classifier, Oracle, logits_and_gradient
from lipaudit.attacks.signs import Checks
from lipaudit.attacks.text import Reader
from lipaudit.attacks.transfer import read_examples
from lipaudit.data.batch import Batch
from lipaudit.errors import UsageError
from lipaudit.measures import base, drawings, texts
from lipaudit.measures.base import Part, Values
from lipaudit.models.net import Net
from lipaudit.tables import Note
from lipaudit.tables.report import SCORES
from lipaudit.tables.trials import COSTS, COUNTED, is_repeat

if TYPE_CHECKING:
    from lipaudit.measures.attack_options import AttackOptions

# Largest number of classes whose log-probabilities are stored.
SCORED_CLASSES = 100
# Number of broken samples stored as examples, the worst first.
DRAWN = 512
# Number of chunks that are attacked together: memory holds an example of each sample and trial.
ROUND = 8
# Seconds from which the estimate names a shorter way.
LONG = 60.0
# Seconds of `--time-limit 10m`, which is named from there.
TEN_MINUTES = 600.0
# Forward passes of a sample from which the work is estimated: fewer take less than the estimate.
COUNTED_PASSES = 100

Step = tuple[Trial, Attack]


@dataclass
class ChunkRun:
    """A chunk of samples, and the outcomes of the attacks on it so far.

    Attributes:
        batch: the samples.
        chunk: the samples, to be attacked.
        model: the attacked function.
        attacks: yields the outcomes that are still to come.
        outcomes: the outcomes so far, the clean samples first.
        logits: logits of the samples without attack.
        examples: adversarial examples that are already described, by sample id.
    """

    batch: Batch
    chunk: Chunk
    model: Classifier | ByRow
    attacks: Iterator[Outcome]
    outcomes: list[Outcome]
    logits: Tensor
    examples: dict[str, Any] = field(default_factory=dict)


def prepare_chunks(
    net: Net, options: AttackOptions, steps: Sequence[Step], incomplete: Mapping[str, Part]
) -> Callable[[Batch], ChunkRun]:
    """Return a function that prepares the attacks on a batch, new or of an interrupted run.

    Args:
        net: the model.
        options: the options.
        steps: the attacks in order.
        incomplete: incomplete parts of an interrupted run, by their first samples.
    """
    trials = options.trials()
    reader = None
    if any(trial.norm in COUNTED for trial in trials):
        reader = texts.make_reader(net)
    # Settings of `evaluate_chunk`.
    how: dict[str, Any] = {
        "box": net.box,
        "seed": options.seed,
        "batch_size": options.batch_size,
        "patch": options.choose_patch(net),
        "target": options.find_target(net),
    }
    # `check` is called before every pass of an attack, and ends the attack after a time limit.
    # Attacks on continuations run to the end, because incomplete chunks of continuations cannot be
    # resumed.
    if net.scored != "continuation":
        how["check"] = base.require_time

    def begin(batch: Batch) -> ChunkRun:
        """Return a batch with an iterator over its attacks. No attack runs yet.

        Each `next` on the iterator runs one attack and returns its outcome, so the caller can run
        one attack on all batches before the next attack. If an interrupted run stored a part of
        this batch, the outcomes and examples of the attacks that ran are taken from the part.
        """
        chunk = _make_chunk(net, batch, options, reader)
        earlier = []
        examples = {}
        part = incomplete.get(batch.ids[0])
        if part is not None:
            earlier = restore_outcomes(part, chunk, steps)
            examples = dict(part.facts.get("examples", {}))
        model = net.make_classifier(batch)
        with torch.no_grad():  # the logits without attack
            logits = torch.cat([net.output(piece) for piece in batch.split(options.batch_size)])
        attacks = evaluate_chunk(model, chunk, trials, earlier=tuple(earlier), **how)
        return ChunkRun(batch, chunk, model, attacks, earlier, logits, examples)

    return begin


def _make_chunk(net: Net, batch: Batch, options: AttackOptions, reader: Reader | None) -> Chunk:
    """Return the samples of a batch as attacks take them: points, labels, texts, saved examples.

    Args:
        net: the model.
        batch: the samples.
        options: the options.
        reader: how the model reads texts; None: no attack changes texts.
    """
    # Random numbers of attacks depend on the number of the chunk: a batch must be one chunk.
    if batch.start % CHUNK or len(batch) > CHUNK:
        raise UsageError(
            f"samples do not come in chunks of {CHUNK} (one random stream per chunk)",
            f"Split them with batch.split({CHUNK}). To limit memory, use the option batch_size.",
        )
    y = base.require_labels(batch, "an attack")
    if options.target is not None and net.scored == "continuation":
        # Attacks make the continuation (class 0) likelier. A sample is robust as long as its rival
        # (class 1) is ahead.
        y = torch.ones_like(y)
    drafts = None
    if reader is not None:
        characters = any(trial.norm == "characters" for trial in options.trials())
        drafts = texts.read_texts(reader, batch, characters=characters)
    x = net.point(batch)
    saved = None
    if options.transfer:
        files = [read_examples(path, batch.ids, x.shape[1:]) for path in options.transfer]
        saved = torch.cat([examples.to(x) for examples in files], 1)
    return Chunk(batch.start // CHUNK, x, y, net.free(batch), drafts, saved)


def attack_round(
    runs: Sequence[ChunkRun], steps: Sequence[Step], classes: int, prefix: str = ""
) -> Iterator[ChunkRun]:
    """Run each attack on all chunks before the next attack, and yield a chunk after each attack.

    Reports to the listener: progress, the estimated time, and the robust accuracy so far.

    Args:
        runs: the chunks, some perhaps of an interrupted run.
        steps: the attacks in order, of `kinds.list_steps`.
        classes: number of classes of the model.
        prefix: the samples of this round in words, for messages; "" if a message needs none.

    Raises:
        TimeOverError: the time limit is over; chunks that were yielded keep their outcomes.
    """
    # Forward passes that each attack takes at most on a sample.
    costs = [adapt(attack, classes)[0].estimate_cost(trial.radius) for trial, attack in steps]
    for run in runs:
        if not run.outcomes:
            run.outcomes.append(next(run.attacks))  # of the clean samples
    complete = 0
    _report_progress(runs, steps, costs, complete)
    _report_estimate(runs, steps, costs, classes, prefix)
    for number, (trial, attack) in enumerate(steps, 1):
        # Chunks without an outcome of this attack. All other chunks have the outcome from an
        # interrupted run. outcomes[0] is that of the clean samples.
        waiting = [run for run in runs if len(run.outcomes) <= number]
        for run in waiting:
            run.outcomes.append(next(run.attacks))
            _report_progress(runs, steps, costs, complete)
            yield run
            if number == len(steps):
                complete += len(run.batch)
        if waiting:
            seconds = _estimate_seconds(runs, steps, costs, number)
            text = _describe_survivors(runs, trial, attack, seconds)
            base.report_note("so-far", prefix + text)


def _report_progress(
    runs: Sequence[ChunkRun], steps: Sequence[Step], costs: Sequence[int], complete: int
) -> None:
    """Report progress as a number of samples: the share of the round's forward passes that ran.

    Args:
        runs: the chunks of the round.
        steps: the attacks in order.
        costs: forward passes of each attack on a sample.
        complete: samples of complete chunks, which the listener counts itself.
    """
    samples = sum(len(run.batch) for run in runs)
    done = samples  # one pass for each clean sample
    remaining = 0
    for run in runs:
        remaining += _count_remaining(run, steps, costs)
        for outcome, cost in zip(run.outcomes[1:], costs, strict=False):
            done += cost * int(outcome.tried.sum())
    base.report_progress(samples * done / (done + remaining) - complete)


def _count_remaining(run: ChunkRun, steps: Sequence[Step], costs: Sequence[int]) -> int:
    """Return the largest number of forward passes of the attacks still to come on a chunk.

    Args:
        run: the chunk.
        steps: the attacks in order.
        costs: forward passes of each attack on a sample.
    """
    clean, *attacked = run.outcomes
    correct = int(clean.robust.sum())
    # By norm and attacks: how many samples survived at the last radius. The same attacks at a
    # larger radius run on the survivors only.
    survivors: dict[Any, int] = {}
    for outcome, (trial, _) in zip(attacked, steps, strict=False):
        survivors[trial.norm, trial.attacks] = int(outcome.robust.sum())
    passes = 0
    for (trial, _), cost in zip(steps[len(attacked) :], costs[len(attacked) :], strict=True):
        passes += cost * survivors.get((trial.norm, trial.attacks), correct)
    return passes


def _estimate_seconds(
    runs: Sequence[ChunkRun], steps: Sequence[Step], costs: Sequence[int], number: int
) -> float:
    """Return the largest time in seconds of the attacks still to come, at the pace of one attack.

    The pace is that of attack `number`, the position in `outcomes`; 0 are the clean samples.

    A backward pass counts as two forward passes.
    """
    seconds = 0.0
    passes = 0
    for run in runs:
        outcome = run.outcomes[number]
        seconds += outcome.seconds
        passes += outcome.forwards + 2 * outcome.backwards
    remaining = sum(_count_remaining(run, steps, costs) for run in runs)
    return remaining * seconds / max(passes, 1)


def _report_estimate(
    runs: Sequence[ChunkRun],
    steps: Sequence[Step],
    costs: Sequence[int],
    classes: int,
    prefix: str,
) -> None:
    """Report how long all attacks take at most, and which flags make it shorter.

    Args:
        runs: the chunks of the round.
        steps: the attacks in order.
        costs: forward passes of each attack on a sample.
        classes: number of classes of the model.
        prefix: the beginning of the message.
    """
    if sum(costs) < COUNTED_PASSES:  # timing a pass would take as long as the attacks
        return
    seconds_per_pass = time_pass(runs[0].model, runs[0].chunk)
    passes = sum(_count_remaining(run, steps, costs) for run in runs)
    samples = sum(len(run.batch) for run in runs)
    seconds = seconds_per_pass * passes
    text = f"the attacks on {samples} samples take at most about {format_duration(seconds)}"
    # Balls with the standard AutoAttack, for which `--attack quick` is the shorter one.
    radii = {trial.radius for trial, _ in steps if trial.attacks in (STANDARD, STANDARD_L1)}
    options = []
    if seconds >= LONG and radii:
        quick_passes = 0  # forward passes of a sample
        for attack, radius in itertools.product(PRESETS["quick"], radii):
            quick_passes += adapt(attack, classes)[0].estimate_cost(radius)
        correct = sum(int(run.outcomes[0].robust.sum()) for run in runs)
        quick_seconds = seconds_per_pass * quick_passes * correct
        options.append(f"--attack quick (about {format_duration(quick_seconds)})")
    if seconds >= TEN_MINUTES and not base.is_limited():
        options.append("--time-limit 10m, which reports what is known by then")
    if options:
        text += f". Shorter: {', or '.join(options)}"
    base.report_note("cost", prefix + text)


def time_pass(model: Classifier | ByRow, chunk: Chunk) -> float:
    """Return the seconds of a forward pass of one sample; a gradient counts as two more."""
    oracle = Oracle(model, torch.arange(len(chunk.x), device=chunk.x.device), len(chunk.x))
    seconds = 0.0
    for _ in range(2):  # the first pass compiles kernels and fills caches
        began = time.perf_counter()
        _, gradient = logits_and_gradient(oracle, chunk.x, chunk.y)
        gradient.sum().item()  # waits for the device
        seconds = time.perf_counter() - began
    return seconds / (3 * len(chunk.x))


def format_duration(seconds: float) -> str:
    """Write a duration in the unit that suits it.

    >>> [format_duration(seconds) for seconds in (0.3, 95, 400, 20_000)]
    ['1 s', '95 s', '7 min', '5.6 h']
    """
    if seconds < 120:
        return f"{max(seconds, 1):.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _describe_survivors(
    runs: Sequence[ChunkRun], trial: Trial, attack: Attack, seconds: float
) -> str:
    """Return a message after an attack: how many samples survive so far, and what time is left.

    Args:
        runs: the chunks of the round.
        trial: the trial of the attack; samples survive in its ball.
        attack: the attack that just ran.
        seconds: estimated time of the attacks to come.
    """
    samples = 0
    survivors = 0
    for run in runs:
        clean, *attacked = run.outcomes
        robust = clean.robust.clone()
        for outcome in attacked:
            other = outcome.trial
            assert other is not None
            # An example in a smaller ball of the same norm is inside this ball, too.
            if other.norm == trial.norm and other.radius.value <= trial.radius.value:
                robust &= outcome.robust
        unique = torch.tensor([not is_repeat(name) for name in run.batch.ids])
        samples += int(unique.sum())
        survivors += int((robust.cpu() & unique).sum())
    name = attack.name
    if trial.label != name:
        name = f"{name} of {trial.label}"
    text = f"{name}, {trial.key.ball}: robust accuracy at most {survivors / samples:.1%} "
    text += f"({survivors} of {samples} samples)"
    if seconds >= 1:
        text += f"; at most about {format_duration(seconds)} left"
    return text


# Parts


def make_part(net: Net, run: ChunkRun, options: AttackOptions, notes: tuple[Note, ...]) -> Part:
    """Return the part of a chunk after some or all attacks, with all that the report needs.

    An attack that did not run yet counts as one that broke no sample. An incomplete part also
    stores the outcomes so far, from which a resumed run continues.
    """
    chunk = run.chunk
    clean, *attacked = run.outcomes
    trials = options.trials()
    by_trial: list[list[Outcome]] = []
    for trial in trials:
        by_trial.append([outcome for outcome in attacked if outcome.trial == trial])
    unknown = torch.full_like(clean.distance, torch.nan)
    not_begun = replace(clean, distance=unknown, confidence=unknown.to(clean.confidence))
    # Each attack of a trial runs on the survivors of the one before, so the last outcome is the
    # result of the trial.
    ends = [outcomes[-1] if outcomes else not_begun for outcomes in by_trial]
    arrays = _read_arrays(net, run, options, ends)
    costs = []
    squares = []  # numbers of samples robust before and after Square, behind gradient attacks
    for outcomes in by_trial:
        costs.append([sum(getattr(outcome, what) for outcome in outcomes) for what in COSTS])
        if len(outcomes) > 1 and outcomes[-1].attack == "square":
            squares.append((int(outcomes[-1].tried.sum()), int(outcomes[-1].robust.sum())))
    facts: dict[str, Any] = {
        "checks": base.read_checks(clean),
        "attacks": [len(outcomes) for outcomes in by_trial],
        "cost": costs,
        "square": squares or [(0, 0)],
        # One sign of masked gradients needs a ball that contains the centre of the box. A ball
        # contains the centre only if every entry of a sample may change.
        "box": net.box if chunk.mask is None else None,
        "nonfinite": sum(outcome.nonfinite for outcome in attacked),
    }
    if chunk.number * CHUNK < DRAWN:  # a page draws examples of the first samples only
        run.examples |= drawings.describe_examples(
            net, run.batch, chunk, [clean, *ends], options.batch_size, known=run.examples
        )
        facts["examples"] = dict(run.examples)
    if chunk.texts is not None:
        facts["texts"] = texts.describe_changes(ends, chunk.texts, run.batch.ids)
        facts["sizes"] = texts.count_units(chunk.texts)
    facts["classes"] = base.class_names(net, arrays["label"], arrays["predicted"])
    complete = len(attacked) >= sum(len(trial.attacks) for trial in trials)
    # Outcomes are stored without their adversarial examples. A run that saves examples or changes
    # texts needs the examples, so nothing is stored here: when resumed, such a run attacks the
    # chunk from the beginning.
    if not complete and options.save_adv is None and chunk.texts is None:
        outcome_arrays, outcome_facts = store_outcomes(run.outcomes)
        arrays |= outcome_arrays
        facts |= outcome_facts
    notes = (*(note for outcome in run.outcomes for note in outcome.notes), *notes)
    return Part(run.batch.ids, arrays, facts, notes, complete)


def _read_arrays(
    net: Net, run: ChunkRun, options: AttackOptions, ends: Sequence[Outcome]
) -> dict[str, Values]:
    """Return the arrays of a part, each (samples, ...).

    Args:
        net: the model.
        run: the chunk and its outcomes.
        options: the options.
        ends: the last outcome of each trial.
    """
    clean = run.outcomes[0]
    values = {
        "label": run.chunk.y,
        "predicted": run.logits.argmax(1),
        "correct": clean.robust,
        "robust": torch.stack([end.robust for end in ends], 1),
        "distance": torch.stack([end.distance for end in ends], 1),
        "confidence": torch.stack([outcome.confidence for outcome in (clean, *ends)], 1),
    }
    if net.scored == "continuation":
        losses = []
        for outcome in (clean, *ends):
            scores = texts.score_outcome(net, run.batch, run.chunk, outcome, options.batch_size)
            losses.append(-scores[:, 0])  # the first score is log p of the continuation
        values["losses"] = torch.stack(losses, 1)
    # Scores are for comparing two models class by class. Continuations have no such scores: class
    # 1, the rival of the continuation, is another token in each model.
    elif run.logits.shape[1] <= SCORED_CLASSES:
        values[SCORES] = run.logits.double().log_softmax(1)
    if options.saves_tensors:
        values["x_adv"] = torch.stack([end.x_adv for end in ends], 1)
    return {name: value.detach().cpu().numpy() for name, value in values.items()}


# Of interrupted runs

ARRAYS = ("tried", "robust", "distance", "confidence")
FIGURES = ("attack", "seed", "seconds", "forwards", "backwards", "nonfinite")


def store_outcomes(outcomes: Sequence[Outcome]) -> tuple[dict[str, Values], dict[str, Any]]:
    """Return the outcomes so far, without their examples, as arrays and facts of a part.

    A resumed run reads them with `restore_outcomes`.
    """
    arrays = {}
    for name in ARRAYS:
        columns = [getattr(outcome, name) for outcome in outcomes]
        arrays[f"outcome_{name}"] = torch.stack(columns, 1).cpu().numpy()
    facts = []
    for outcome in outcomes:
        figures = {name: getattr(outcome, name) for name in FIGURES}
        facts.append(figures | {"notes": [note.model_dump() for note in outcome.notes]})
    return arrays, {"outcomes": facts}


def restore_outcomes(part: Part, chunk: Chunk, steps: Sequence[Step]) -> list[Outcome]:
    """Return the outcomes that `store_outcomes` stored; x_adv is the sample itself.

    The examples were not stored, and are not needed: broken samples are not attacked again, and
    the next attack finds new points for the survivors.
    """
    outcomes: list[Outcome] = []
    for number, facts in enumerate(part.facts.get("outcomes", ())):
        fields: dict[str, Any] = {name: facts[name] for name in FIGURES}
        for name in ARRAYS:
            column = part.values[f"outcome_{name}"][:, number]
            fields[name] = torch.from_numpy(column).to(chunk.x.device)
        fields["notes"] = tuple(Note(**note) for note in facts["notes"])
        if number == 0:  # the clean samples
            checks = Checks(**part.facts["checks"][0])
            outcomes.append(Outcome(trial=None, x_adv=chunk.x, checks=checks, **fields))
        else:
            trial, _ = steps[number - 1]
            outcomes.append(Outcome(trial=trial, x_adv=chunk.x, **fields))
    return outcomes
