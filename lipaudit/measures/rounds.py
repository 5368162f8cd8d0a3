"""Attack many chunks of samples attack by attack: the cheapest attack on all of them first.

The samples that survive so far are an upper limit of robust accuracy, which only falls. So a run
that a time limit ends has an answer, and a resumed run continues after the last finished attack.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
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
from lipaudit.measures.base import Arrays, Facts, Part
from lipaudit.models.net import Net
from lipaudit.tables import Note, Notes
from lipaudit.tables.report import SCORES
from lipaudit.tables.trials import COSTS, COUNTED, Radius, is_repeat

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

# An attack of a trial.
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
    net: Net,
    options: AttackOptions,
    steps: Sequence[Step],
    incomplete: Mapping[str, Part],
    batches: Iterable[Batch],
) -> Iterator[ChunkRun]:
    """Yield each batch with an iterator over its attacks. No attack runs yet.

    Each `next` on the iterator runs one attack and returns its outcome, so the caller can run one
    attack on all batches before the next attack. If an interrupted run stored a part of a batch,
    the outcomes and examples of the attacks that ran are taken from the part.

    Args:
        net: the model.
        options: the options.
        steps: the attacks in order.
        incomplete: incomplete parts of an interrupted run, by their first samples.
        batches: the samples.
    """
    trials = options.trials()
    reader = None
    if any(trial.norm in COUNTED for trial in trials):
        reader = texts.make_reader(net)
    settings = _make_settings(net, options)
    for batch in batches:
        chunk = _make_chunk(net, batch, options, reader)
        earlier = []  # the outcomes of the interrupted run
        examples = {}
        part = incomplete.get(batch.ids[0])
        if part is not None:
            earlier = restore_outcomes(part, chunk, steps)
            examples = dict(part.facts.get("examples", {}))
        model = net.make_classifier(batch)
        with torch.no_grad():  # the logits without attack
            logits = torch.cat([net.output(piece) for piece in batch.split(options.batch_size)])
        attacks = evaluate_chunk(model, chunk, trials, earlier=tuple(earlier), **settings)
        yield ChunkRun(batch, chunk, model, attacks, earlier, logits=logits, examples=examples)


def _make_settings(net: Net, options: AttackOptions) -> Facts:
    """Return the keyword arguments of `evaluate_chunk` that are equal for all chunks."""
    settings: Facts = {
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
        settings["check"] = base.require_time
    return settings


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
    chunk_texts = None
    if reader is not None:
        characters = any(trial.norm == "characters" for trial in options.trials())
        chunk_texts = texts.read_texts(reader, batch, characters=characters)
    x = net.point(batch)  # what attacks move: pixels, or the embeddings of tokens
    saved = None  # the examples of all files, (samples, examples, ...)
    if options.transfer:
        files = [read_examples(path, batch.ids, x.shape[1:]) for path in options.transfer]
        saved = torch.cat([examples.to(x) for examples in files], 1)
    return Chunk(
        number=batch.start // CHUNK,
        x=x,
        y=y,
        mask=net.find_free_tokens(batch),
        texts=chunk_texts,
        saved=saved,
    )


@dataclass
class Round:
    """Chunks that are attacked together: each attack runs on all chunks before the next attack.

    Attributes:
        runs: the chunks, some perhaps of an interrupted run.
        steps: the attacks in order, of `kinds.list_steps`.
        classes: number of classes of the model.
        prefix: the samples of this round in words, for messages; "" if a message needs none.
    """

    runs: Sequence[ChunkRun]
    steps: Sequence[Step]
    classes: int
    prefix: str = ""

    def attack(self) -> Iterator[ChunkRun]:
        """Run one attack after another on all chunks; yield a chunk whenever it was attacked.

        Reports to the listener: progress, the estimated time, and the robust accuracy so far.

        Raises:
            TimeOverError: the time limit is over; chunks that were yielded keep their outcomes.
        """
        # `next(run.attacks)` runs one attack. Before the attacks, it runs the model on the clean
        # samples: outcomes[0], so that outcomes[i] is that of attack i = 1, 2, ...
        for run in self.runs:
            if not run.outcomes:
                run.outcomes.append(next(run.attacks))
        # Samples on which all attacks ran. Chunks that were complete before an interruption are
        # not in `self.runs`.
        complete = 0
        self._report_progress(complete)
        self._report_estimate()
        for number, (trial, attack) in enumerate(self.steps, 1):
            # Chunks of an interrupted run may have the outcome of this attack already.
            waiting = [run for run in self.runs if len(run.outcomes) <= number]
            for run in waiting:
                run.outcomes.append(next(run.attacks))
                self._report_progress(complete)
                yield run
                # The listener counts a complete chunk when it is yielded: only now here, too.
                if number == len(self.steps):
                    complete += len(run.batch)
            if waiting:
                text = self._describe_survivors(trial, attack)
                seconds = self._estimate_seconds(number)
                if seconds >= 1:
                    text += f"; at most about {format_duration(seconds)} left"
                base.report_note("so-far", self.prefix + text)

    @cached_property
    def costs(self) -> list[int]:
        """The forward passes that each attack takes at most on a sample."""
        return [self._estimate_cost(attack, trial.radius) for trial, attack in self.steps]

    def _estimate_cost(self, attack: Attack, radius: Radius) -> int:
        """Return the forward passes that an attack takes at most on a sample of this model."""
        adapted, _ = adapt(attack, self.classes)
        return adapted.estimate_cost(radius)

    def _count_samples(self) -> int:
        return sum(len(run.batch) for run in self.runs)

    def _count_remaining_passes(self) -> int:
        """Return the largest number of forward passes of the attacks still to come."""
        passes = 0
        for run in self.runs:
            clean, *attacked = run.outcomes
            correct = int(clean.robust.sum())
            # By norm and attacks: how many samples survived at the last radius. `robust` is of all
            # attacks of the trial so far, so the last step of a trial counts. The same attacks at
            # a larger radius run on the survivors only. `attacked` has the outcomes of the
            # first steps: the steps behind them are still to come.
            survivors = {}
            for outcome, (trial, _) in zip(attacked, self.steps, strict=False):
                survivors[trial.norm, trial.attacks] = int(outcome.robust.sum())
            ran = len(attacked)
            for (trial, _), cost in zip(self.steps[ran:], self.costs[ran:], strict=True):
                passes += cost * survivors.get((trial.norm, trial.attacks), correct)
        return passes

    def _report_progress(self, complete: int) -> None:
        """Report progress as a number of samples: their number x the share of passes that ran.

        If half of all forward passes on 100 samples ran, the progress is 50 samples.

        Args:
            complete: samples of complete chunks. The listener counts these itself, so they are
                subtracted.
        """
        samples = self._count_samples()
        passes = samples  # passes that ran: at first, one for each clean sample
        # `costs`: the passes of each attack on a sample. The outcomes of a run are those of the
        # clean samples, and of as many attacks as ran.
        for run in self.runs:
            for outcome, cost in zip(run.outcomes[1:], self.costs, strict=False):
                passes += cost * int(outcome.tried.sum())
        all_passes = passes + self._count_remaining_passes()
        base.report_progress(samples * passes / all_passes - complete)

    def _estimate_seconds(self, number: int) -> float:
        """Return the largest time of the attacks still to come: their passes x seconds per pass.

        Args:
            number: the attack that ran last, 1, 2, ...; it gives the seconds per pass. A backward
                pass counts as two forward passes.
        """
        seconds = 0.0
        passes = 0
        for run in self.runs:
            outcome = run.outcomes[number]
            seconds += outcome.seconds
            passes += outcome.forwards + 2 * outcome.backwards
        seconds_per_pass = seconds / max(passes, 1)
        return self._count_remaining_passes() * seconds_per_pass

    def _describe_survivors(self, trial: Trial, attack: Attack) -> str:
        """Return a message after an attack: how many samples survive so far.

        Args:
            trial: the trial of the attack; samples survive in its ball.
            attack: the attack that just ran.
        """
        samples = 0
        survivors = 0
        for run in self.runs:
            clean, *attacked = run.outcomes
            robust = clean.robust.clone()  # the samples that are right without attack
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
        text = f"{name}, {trial.key.ball}: "
        if not samples:  # repeats do not count, and a later round may have nothing else
            return text + "all samples repeat earlier ones"
        share = f"{survivors / samples:.1%} ({survivors} of {samples} samples)"
        return f"{text}robust accuracy at most {share}"

    def _report_estimate(self) -> None:
        """Report how long all attacks take at most, and which flags make the run shorter."""
        if sum(self.costs) < COUNTED_PASSES:  # timing a pass would take as long as the attacks
            return
        seconds_per_pass = time_pass(self.runs[0].model, self.runs[0].chunk)
        seconds = seconds_per_pass * self._count_remaining_passes()
        text = f"the attacks on {self._count_samples()} samples take at most about "
        text += format_duration(seconds)
        options = []
        quick_passes = self._count_quick()
        if seconds >= LONG and quick_passes:
            quick = format_duration(seconds_per_pass * quick_passes)
            options.append(f"--attack quick (about {quick})")
        if seconds >= TEN_MINUTES and not base.is_limited():
            options.append("--time-limit 10m, which reports what is known by then")
        if options:
            text += f". Shorter: {', or '.join(options)}"
        base.report_note("cost", self.prefix + text)

    def _count_quick(self) -> int:
        """Return the forward passes of `--attack quick`, run in place of the standard AutoAttack.

        0 if no trial of the round is the standard AutoAttack.
        """
        radii = {t.radius for t, _ in self.steps if t.attacks in (STANDARD, STANDARD_L1)}
        passes = 0  # of a sample
        for attack, radius in itertools.product(PRESETS["quick"], radii):
            passes += self._estimate_cost(attack, radius)
        # Only samples that are right without attack are attacked.
        return passes * sum(int(run.outcomes[0].robust.sum()) for run in self.runs)


def time_pass(model: Classifier | ByRow, chunk: Chunk) -> float:
    """Return the seconds of a forward pass of one sample.

    The time is that of a forward pass and a gradient, which counts as two more passes.
    """
    size = len(chunk.x)
    rows = torch.arange(size, device=chunk.x.device)  # all samples of the chunk
    oracle = Oracle(model, rows, batch_size=size)
    seconds = 0.0
    for _ in range(2):  # the first pass compiles kernels and fills caches
        began = time.perf_counter()
        _, gradient = logits_and_gradient(oracle, chunk.x, chunk.y)
        gradient.sum().item()  # waits for the device
        seconds = time.perf_counter() - began
    return seconds / (3 * size)


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


# Parts


def make_part(net: Net, run: ChunkRun, options: AttackOptions, notes: Notes) -> Part:
    """Return the part of a chunk after some or all attacks, with all that the report needs.

    An incomplete part also stores the outcomes so far, from which a resumed run continues.
    """
    trials = options.trials()
    clean, *attacked = run.outcomes
    by_trial = []
    for trial in trials:
        by_trial.append([outcome for outcome in attacked if outcome.trial == trial])
    ends = _find_ends(clean, by_trial)
    arrays = _read_arrays(net, run, options, ends)
    facts = _count_work(by_trial)
    facts["checks"] = base.read_checks(clean)
    facts["nonfinite"] = sum(outcome.nonfinite for outcome in attacked)
    # A test for masked gradients uses balls that contain the centre of the box (grey images). A
    # ball contains the centre only if every entry of a sample may change: without a mask.
    facts["box"] = net.box if run.chunk.mask is None else None
    facts["classes"] = base.name_classes(net, arrays["label"], arrays["predicted"])
    facts |= _describe_samples(net, run, options, ends)
    complete = len(attacked) >= sum(len(trial.attacks) for trial in trials)
    # For resuming, outcomes are stored without their adversarial examples. A run that saves
    # examples or changes texts needs them. So nothing is stored of such a run: when resumed, it
    # attacks the chunk from the beginning.
    if not complete and options.save_adv is None and run.chunk.texts is None:
        outcome_arrays, outcome_facts = store_outcomes(run.outcomes)
        arrays |= outcome_arrays
        facts |= outcome_facts
    notes = (*(note for outcome in run.outcomes for note in outcome.notes), *notes)
    return Part(run.batch.ids, arrays, facts, notes, complete=complete)


def _find_ends(clean: Outcome, by_trial: Sequence[Sequence[Outcome]]) -> list[Outcome]:
    """Return the result of each trial: the outcome of the last of its attacks that ran.

    Each attack of a trial runs on the survivors of the one before. A trial that has not begun
    counts as one that broke no sample.

    Args:
        clean: the outcome of the clean samples.
        by_trial: the outcomes of the attacks of each trial.
    """
    unknown = torch.full_like(clean.distance, torch.nan)
    not_begun = replace(clean, distance=unknown, confidence=unknown.to(clean.confidence))
    return [outcomes[-1] if outcomes else not_begun for outcomes in by_trial]


def _count_work(by_trial: Sequence[Sequence[Outcome]]) -> Facts:
    """Return the work of each trial, and the success of the attack Square, as facts of a part.

    Args:
        by_trial: the outcomes of the attacks of each trial that ran.

    Returns:
        `attacks`: the number of attacks that ran, of each trial. `cost`: their seconds, forward
        passes and backward passes. `square`: the numbers of samples that were robust before and
        after Square, for each trial in which it ran last, after gradient attacks.
    """
    counts = []
    costs = []
    squares = []
    for outcomes in by_trial:
        counts.append(len(outcomes))
        costs.append([sum(getattr(outcome, what) for outcome in outcomes) for what in COSTS])
        if len(outcomes) > 1 and outcomes[-1].attack == "square":
            square = outcomes[-1]
            squares.append((int(square.tried.sum()), int(square.robust.sum())))
    # Without any, a pair of zeros: the pairs of all parts are added up.
    return {"attacks": counts, "cost": costs, "square": squares or [(0, 0)]}


def _describe_samples(
    net: Net, run: ChunkRun, options: AttackOptions, ends: Sequence[Outcome]
) -> Facts:
    """Describe adversarial examples and changed texts, as facts of a part.

    Args:
        net: the model.
        run: the chunk and its outcomes; it keeps the examples for the parts after later attacks.
        options: the options.
        ends: the result of each trial.
    """
    facts: Facts = {}
    chunk = run.chunk
    if chunk.number * CHUNK < DRAWN:  # a page draws examples of the first samples only
        outcomes = [run.outcomes[0], *ends]
        run.examples |= drawings.describe_examples(
            net, run.batch, chunk, outcomes, options.batch_size, known=run.examples
        )
        facts["examples"] = dict(run.examples)
    if chunk.texts is not None:
        facts["texts"] = texts.describe_changes(ends, chunk.texts, run.batch.ids)
        facts["sizes"] = texts.count_units(chunk.texts)
    return facts


def _read_arrays(
    net: Net, run: ChunkRun, options: AttackOptions, ends: Sequence[Outcome]
) -> Arrays:
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
            scores = texts.score_outcome(net, run, outcome, options.batch_size)
            losses.append(-scores[:, 0])  # the first score is log p of the continuation
        values["losses"] = torch.stack(losses, 1)
    elif run.logits.shape[1] <= SCORED_CLASSES:
        # For comparing two models class by class. Not of continuations: class 1, the rival of the
        # continuation, is another token in each model.
        values[SCORES] = run.logits.double().log_softmax(1)
    if options.saves_tensors:
        values["x_adv"] = torch.stack([end.x_adv for end in ends], 1)
    return {name: value.detach().cpu().numpy() for name, value in values.items()}


# Of interrupted runs

ARRAYS = ("tried", "robust", "distance", "confidence")
FIGURES = ("attack", "seed", "seconds", "forwards", "backwards", "nonfinite")


def store_outcomes(outcomes: Sequence[Outcome]) -> tuple[Arrays, Facts]:
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
    """Return the outcomes of an interrupted run, as `store_outcomes` stored them in a part.

    The adversarial examples were not stored: `x_adv` is the sample itself in their place. They are
    not needed, as broken samples are not attacked again, and the next attack finds new examples of
    the survivors.
    """
    outcomes = []
    for number, facts in enumerate(part.facts.get("outcomes", ())):
        fields: dict[str, Any] = {name: facts[name] for name in FIGURES}
        for name in ARRAYS:
            column = part.values[f"outcome_{name}"][:, number]
            fields[name] = torch.from_numpy(column).to(chunk.x.device)
        fields["notes"] = tuple(Note(**note) for note in facts["notes"])
        trial = None
        if number == 0:  # the clean samples
            fields["checks"] = Checks(**part.facts["checks"][0])
        else:
            trial, _ = steps[number - 1]
        outcomes.append(Outcome(trial=trial, x_adv=chunk.x, **fields))
    return outcomes
