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
    from lipaudit.measures.attack import AttackOptions

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
    net: Net, options: AttackOptions, steps: Sequence[Step], begun: Mapping[str, Part]
) -> Callable[[Batch], ChunkRun]:
    """Return a function that begins the attacks on a batch, or continues those of a part.

    Args:
        net: the model.
        options: the options.
        steps: the attacks in order.
        begun: incomplete parts of an interrupted run, by their first samples.
    """
    trials = options.trials()
    reader = None
    if any(trial.norm in COUNTED for trial in trials):
        reader = texts.make_reader(net)
    spelled = any(trial.norm == "characters" for trial in trials)
    how: dict[str, Any] = {"box": net.box, "seed": options.seed, "batch_size": options.batch_size}
    how["patch"] = options.choose_patch(net)
    how["target"] = target = options.find_target(net)
    if net.scored != "continuation":
        how["check"] = base.require_time

    def begin(batch: Batch) -> ChunkRun:
        if batch.start % CHUNK or len(batch) > CHUNK:
            raise UsageError(
                f"samples do not come in chunks of {CHUNK} (one random stream per chunk)",
                f"Split them with batch.split({CHUNK}). To limit memory, use the option "
                "batch_size.",
            )
        y = base.require_labels(batch, "an attack")
        if target is not None and net.scored == "continuation":
            y = torch.ones_like(y)  # its rival has to stay ahead
        drafts = None
        if reader is not None:
            drafts = texts.read_texts(reader, batch, characters=spelled)
        number = batch.start // CHUNK
        point = net.point(batch)
        each = [read_examples(path, batch.ids, point.shape[1:]) for path in options.transfer]
        saved = None
        if each:
            saved = torch.cat([e.to(point) for e in each], 1)
        chunk = Chunk(number, point, y, net.free(batch), drafts, saved)
        part = begun.get(batch.ids[0])
        earlier = []
        examples = {}
        if part is not None:
            earlier = restore_outcomes(part, chunk, steps)
            examples = dict(part.facts.get("examples", {}))
        model = net.make_classifier(batch)
        with torch.no_grad():
            pieces = [net.output(piece) for piece in batch.split(options.batch_size)]
        attacks = evaluate_chunk(model, chunk, trials, earlier=tuple(earlier), **how)
        return ChunkRun(batch, chunk, model, attacks, earlier, torch.cat(pieces), examples)

    return begin


def attack_round(
    runs: Sequence[ChunkRun], steps: Sequence[Step], classes: int, lead: str = ""
) -> Iterator[ChunkRun]:
    """Yield each chunk after each attack on it, and report what survives and what is left.

    Args:
        runs: the chunks, some perhaps of an interrupted run.
        steps: the attacks in order, of `kinds.list_steps`.
        classes: number of classes of the model.
        lead: the samples of this round in words; empty if it has all.

    Raises:
        TimeOverError: the time limit is over; chunks that were yielded keep their outcomes.
    """
    costs = [adapt(attack, classes)[0].estimate_cost(trial.radius) for trial, attack in steps]
    fresh = [run for run in runs if not run.outcomes]
    for run in fresh:
        run.outcomes.append(next(run.attacks))
    complete = 0
    _report_progress(runs, steps, costs, complete)
    _announce(runs, steps, costs, classes, lead)
    for number, (trial, attack) in enumerate(steps, 1):
        moved = []
        for run in runs:
            if len(run.outcomes) > number:  # known from an interrupted run
                continue
            run.outcomes.append(next(run.attacks))
            moved.append(run)
            _report_progress(runs, steps, costs, complete)
            yield run
            if number == len(steps):
                complete += len(run.batch)
        if moved:
            left = _estimate_seconds(runs, steps, costs, number)
            base.report_note("so-far", lead + _describe_survivors(runs, trial, attack, left))


def _report_progress(
    runs: Sequence[ChunkRun], steps: Sequence[Step], costs: Sequence[int], complete: int
) -> None:
    """Report the share of the passes that are done, in samples beside the complete ones."""
    samples = sum(len(run.batch) for run in runs)
    done = samples
    left = 0
    for run in runs:
        left += _count_left(run, steps, costs)
        for outcome, cost in zip(run.outcomes[1:], costs, strict=False):
            done += cost * int(outcome.tried.sum())
    base.report_progress(samples * done / (done + left) - complete)


def _count_left(run: ChunkRun, steps: Sequence[Step], costs: Sequence[int]) -> int:
    """Return the forward passes that the attacks to come take at most."""
    clean, *attacked = run.outcomes
    correct = int(clean.robust.sum())
    # A broken sample is not attacked at larger radii.
    alive: dict[Any, int] = {}
    for outcome, (trial, _) in zip(attacked, steps, strict=False):
        alive[trial.norm, trial.attacks] = int(outcome.robust.sum())
    left = 0
    for (trial, _), cost in zip(steps[len(attacked) :], costs[len(attacked) :], strict=True):
        left += cost * alive.get((trial.norm, trial.attacks), correct)
    return left


def _estimate_seconds(
    runs: Sequence[ChunkRun], steps: Sequence[Step], costs: Sequence[int], number: int
) -> float:
    """Return the seconds that the attacks to come take at most, at the pace of the last one."""
    seconds = 0.0
    passes = 0
    for run in runs:
        outcome = run.outcomes[number]
        seconds += outcome.seconds
        passes += outcome.forwards + 2 * outcome.backwards
    left = sum(_count_left(run, steps, costs) for run in runs)
    return left * seconds / max(passes, 1)


def _announce(
    runs: Sequence[ChunkRun],
    steps: Sequence[Step],
    costs: Sequence[int],
    classes: int,
    lead: str,
) -> None:
    """Say how long all attacks take at most, and which flags make it shorter."""
    if sum(costs) < COUNTED_PASSES:
        return
    first = runs[0]
    pace = time_pass(first.model, first.chunk)
    passes = sum(_count_left(run, steps, costs) for run in runs)
    samples = sum(len(run.batch) for run in runs)
    seconds = pace * passes
    text = f"the attacks on {samples} samples take at most about {format_duration(seconds)}"
    radii = {trial.radius for trial, _ in steps if trial.attacks in (STANDARD, STANDARD_L1)}
    shorter = []
    if seconds >= LONG and radii:
        short = 0
        for attack, radius in itertools.product(PRESETS["quick"], radii):
            short += adapt(attack, classes)[0].estimate_cost(radius)
        correct = sum(int(run.outcomes[0].robust.sum()) for run in runs)
        shorter.append(f"--attack quick (about {format_duration(pace * short * correct)})")
    if seconds >= TEN_MINUTES and not base.is_limited():
        shorter.append("--time-limit 10m, which reports what is known by then")
    if shorter:
        text += f". Shorter: {', or '.join(shorter)}"
    base.report_note("cost", lead + text)


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
    runs: Sequence[ChunkRun], trial: Trial, attack: Attack, left: float
) -> str:
    """Say how many samples survive all attacks in a ball so far, and how long the rest takes."""
    samples = 0
    alive = 0
    for run in runs:
        clean, *attacked = run.outcomes
        robust = clean.robust.clone()
        for outcome in attacked:
            tried = outcome.trial
            assert tried is not None
            if tried.norm == trial.norm and tried.radius.value <= trial.radius.value:
                robust &= outcome.robust
        once = torch.tensor([not is_repeat(name) for name in run.batch.ids])
        samples += int(once.sum())
        alive += int((robust.cpu() & once).sum())
    name = attack.name
    if trial.label != name:
        name = f"{name} of {trial.label}"
    text = f"{name}, {trial.key.ball}: robust accuracy at most {alive / samples:.1%} "
    text += f"({alive} of {samples} samples)"
    if left >= 1:
        text += f"; at most about {format_duration(left)} left"
    return text


# Parts


def make_part(net: Net, run: ChunkRun, options: AttackOptions, sources: tuple[Note, ...]) -> Part:
    """Return what is known of a chunk; an attack that did not run yet broke no sample."""
    batch = run.batch
    chunk = run.chunk
    clean, *attacked = run.outcomes
    by_trial = []
    for trial in options.trials():
        by_trial.append([o for o in attacked if o.trial == trial])
    unknown = torch.full_like(clean.distance, torch.nan)
    begun = replace(clean, distance=unknown, confidence=unknown.to(clean.confidence))
    # Each attack of a trial runs on what the one before left: the last outcome is the trial's.
    ends = []
    for each in by_trial:
        ends.append(each[-1] if each else begun)
    counts = [len(each) for each in by_trial]
    complete = all(n >= len(t.attacks) for n, t in zip(counts, options.trials(), strict=True))
    values = {
        "label": chunk.y,
        "predicted": run.logits.argmax(1),
        "correct": clean.robust,
        "robust": torch.stack([end.robust for end in ends], 1),
        "distance": torch.stack([end.distance for end in ends], 1),
        "confidence": torch.stack([each.confidence for each in (clean, *ends)], 1),
    }
    # The rival of a continuation depends on the model: it is no class that two models share.
    if net.scored != "continuation" and run.logits.shape[1] <= SCORED_CLASSES:
        values[SCORES] = run.logits.double().log_softmax(1)
    if net.scored == "continuation":
        size = options.batch_size
        at = [texts.score_outcome(net, batch, chunk, each, size) for each in (clean, *ends)]
        values["losses"] = torch.stack([-scores[:, 0] for scores in at], 1)
    if options.saves_tensors:
        values["x_adv"] = torch.stack([end.x_adv for end in ends], 1)
    # The samples robust before and after Square, if gradient attacks ran before it.
    squares = [each[-1] for each in by_trial if len(each) > 1 and each[-1].attack == "square"]
    facts: dict[str, Any] = {
        "checks": base.read_checks(clean),
        "attacks": counts,
        "cost": [[sum(getattr(o, what) for o in each) for what in COSTS] for each in by_trial],
        "square": [(int(o.tried.sum()), int(o.robust.sum())) for o in squares] or [(0, 0)],
        "box": net.box if chunk.mask is None else None,
        "nonfinite": sum(o.nonfinite for o in attacked),
    }
    if chunk.number * CHUNK < DRAWN:
        some = [clean, *ends]
        run.examples |= drawings.describe_examples(
            net, batch, chunk, some, options.batch_size, known=run.examples
        )
        facts["examples"] = dict(run.examples)
    if chunk.texts is not None:
        fixed = chunk.texts.reader.lexicon.is_fixed
        drafts = chunk.texts.drafts
        facts["texts"] = texts.describe_changes(ends, chunk.texts, batch.ids)
        facts["sizes"] = {  # what can be changed of each text
            "words": [sum(not fixed(word) for word in draft.words) for draft in drafts],
            "characters": [sum(map(len, draft.texts)) for draft in drafts],
        }
    remarks = (*(note for o in run.outcomes for note in o.notes), *sources)
    arrays = {name: value.detach().cpu().numpy() for name, value in values.items()}
    facts["classes"] = base.class_names(net, arrays["label"], arrays["predicted"])
    # Examples to save, and changed texts, are not stored half-way: their chunk begins anew.
    if not complete and options.save_adv is None and chunk.texts is None:
        stored, described = store_outcomes(run.outcomes)
        arrays |= stored
        facts |= described
    return Part(batch.ids, arrays, facts, remarks, complete)


# Of interrupted runs

ARRAYS = ("tried", "robust", "distance", "confidence")
FIGURES = ("attack", "seed", "seconds", "forwards", "backwards", "nonfinite")


def store_outcomes(outcomes: Sequence[Outcome]) -> tuple[dict[str, Values], dict[str, Any]]:
    """Return the outcomes so far without their points, as arrays and facts of a part."""
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
    """Return the outcomes that `store_outcomes` stored, with the sample itself as the point.

    Samples broken before are attacked no more, so their points do not matter.
    """
    outcomes = []
    for number, facts in enumerate(part.facts.get("outcomes", ())):
        columns: Mapping[str, Any] = {
            name: torch.from_numpy(part.values[f"outcome_{name}"][:, number]).to(chunk.x.device)
            for name in ARRAYS
        }
        figures = {name: facts[name] for name in FIGURES}
        outcome = Outcome(
            trial=steps[number - 1][0] if number else None,
            x_adv=chunk.x,
            notes=tuple(Note(**note) for note in facts["notes"]),
            checks=None if number else Checks(**part.facts["checks"][0]),
            **columns,
            **figures,
        )
        outcomes.append(outcome)
    return outcomes
