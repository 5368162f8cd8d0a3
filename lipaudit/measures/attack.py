"""The measure `attack`: accuracy under attack, sample by sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lipaudit.attacks import kinds
from lipaudit.attacks.kinds import CHUNK, Trial
from lipaudit.measures import base
from lipaudit.measures.attack_options import (
    DEMO_EPS,
    EPS,
    OF_AUDIT,
    TABLE,
    TRANSFER,
    AttackOptions,
    plan_attacks,
)
from lipaudit.measures.base import Arrays, AuditRole, Measure, Part, Values
from lipaudit.measures.rating import (
    FEWEST_OF_CLASS,
    FEWEST_RATED,
    compute_calibration_error,
    find_worst_classes,
)
from lipaudit.settings.option import repeat_option
from lipaudit.tables import Column, Display, Layout, Note, Row, Section
from lipaudit.tables.columns import ACCURACY, OUTCOMES
from lipaudit.tables.report import SCORES
from lipaudit.tables.summary import CLEAN_OF_BALLS, Headline, declare_clean, read_worst
from lipaudit.tables.trials import COSTS, TrialKey, worst_cases

if TYPE_CHECKING:
    from lipaudit.data.batch import Batch
    from lipaudit.measures.rounds import ChunkRun
    from lipaudit.models.net import Net


# Largest number of samples times classes whose log-probabilities are stored: about 10 bytes each.
MOST_SCORES = 2**16

eps_column = partial(Column, "eps", format=".4g", domain="", needed=True)
seconds_column = partial(Column, "seconds", format=".1f", unit="s", domain="")

ece_column = partial(Column, format=".1%", better="lower", status="empirical")

ATTACK_TABLE = Layout(
    name="attack",
    title="Which attacks succeed?",
    headlines=(
        declare_clean(10, "attack.correct >= -2pp"),
        CLEAN_OF_BALLS,
        Headline(
            name="attacked_accuracy",
            column="robust",
            label="robust accuracy",
            meaning="Share of samples that stay correct under all attacks of this radius. At most "
            "this share is robust: other attacks or changes may break more.",
            place=20,
            read=read_worst,
            rule="attack.robust >= -2pp",
            ranks=True,
        ),
    ),
    display=Display(
        about="Share of the samples that stay correct under each attack, with 95% limits. A "
        "stronger attack can only lower it. eps is the radius in this norm: in units of the pixel "
        "range 0 to 1, of embeddings, or a number of changes.",
        columns=(
            *("attack", "norm", "eps_text", "clean", "robust", "samples"),
            *("untried", "robust_class", "class", "ece_clean", "ece", *COSTS),
        ),
        drawings=("accuracies", "classes"),
        folded=False,
    ),
    sample_columns={
        **OUTCOMES,
        "distance": Column(
            "distance",
            "Distance from the sample to the last example tried, in the norm of the attack. "
            "For texts and patches: the number of changes.",
            domain="",
        ),
        "confidence": Column(
            "confidence", "Largest softmax. @ATTACK: of the last example tried.", domain=""
        ),
        "loss": Column(
            "loss",
            "Negative log-likelihood of the continuation in nats (with --score mean: per token). "
            "@ATTACK: for the example that broke the sample, else the highest value found.",
            better="lower",
            status="empirical",
            domain="",
        ),
    },
    fixed={
        "attack": Column.text(
            "attack", "Name of the attack; worst = all attacks together.", needed=True
        ),
        "norm": Column.text(
            "norm",
            "Norm of the perturbation, or the unit that is changed (words, characters, suffix, "
            "patch).",
            needed=True,
        ),
        "eps": eps_column(
            "Radius, for pixels in [0, 1] or token embeddings; or the number of changes."
        ),
        **ACCURACY,
        "untried": Column(
            "untried",
            "Of the single changes of the surviving texts, the share that was not tried.",
            better="lower",
            status="empirical",
            domain="ball",
            format=".1%",
            reading="0: a step of the search tried every replacement or typing error. Two or more "
            "changes are found one by one, so their combinations are never all tried.",
        ),
        "robust_class": Column.share(
            "worst class",
            f"Lowest accuracy under attack of a class with at least {FEWEST_OF_CLASS} samples.",
            domain="ball",
            status="empirical",
            reading="It is low by chance if the class has few samples. Of classes with equal "
            "accuracy, the one with the most samples is named.",
        ),
        "class": Column.text("worst class is", "The worst class, and its number of samples."),
        "ece_clean": ece_column("clean ECE", "Expected calibration error without attack."),
        "ece": ece_column(
            "ECE",
            "Expected calibration error on the attacked samples.",
            domain="ball",
            reading="How far confidence is from accuracy (Guo et al., 2017). Confidence has 15 "
            "bins of equal width. The figure is |accuracy - mean confidence|, averaged over the "
            "bins by their samples. Few samples make it too high; with fewer than 30 it is "
            "empty. An attacked sample counts at the first example that broke it, else at the "
            "last one tried.",
        ),
        "seconds": seconds_column("Wall time."),
        "forwards": Column("forwards", "Forward passes, counted in samples.", format="d"),
        "backwards": Column("backwards", "Backward passes, counted in samples.", format="d"),
    },
)


def measure(net: Net, batches: Iterable[Batch], options: AttackOptions) -> Iterator[Part]:
    """Yield a part for each chunk of samples, again after every attack if the run can be resumed.

    A chunk is a batch of up to 64 samples, with random numbers of its own. A round is up to 8
    chunks. The first attack runs on all chunks of a round, then the second attack, and so on. So a
    time limit leaves out attacks, not samples, as far as possible.

    Raises:
        UsageError: a batch has more than 64 samples, or does not begin at a multiple of 64.
        InputError: samples have no labels, or the embedding of token ids was not found.
    """
    from lipaudit.attacks.transfer import note_source
    from lipaudit.data.batch import find_unfinished
    from lipaudit.measures import texts
    from lipaudit.measures.losses import move_losses
    from lipaudit.measures.rounds import ROUND, Round, make_part, prepare_chunks

    steps = kinds.list_steps(options.trials())
    notes = (
        *map(note_source, options.transfer),
        *texts.note_target(net, options.find_target(net)),
    )
    # Incomplete parts of an interrupted run, to resume it. None: nobody stores incomplete parts of
    # this run, so none are yielded below.
    incomplete = find_unfinished(batches)
    # For a model that scores continuations, `move_losses` needs the adversarial examples of all
    # attacks, and incomplete parts do not store examples. So chunks are attacked one by one, each
    # to its end.
    scores_continuations = net.scored == "continuation"
    yields_incomplete = incomplete is not None and not scores_continuations
    size = 1 if scores_continuations else ROUND  # chunks of a round
    # A run is a chunk with an iterator that runs its attacks.
    runs = prepare_chunks(net, options, steps, incomplete=incomplete or {}, batches=batches)
    while group := list(islice(runs, size)):
        prefix = _name_round(group)
        # A model without classes was refused by `check`: the 2 is never used.
        round_of_runs = Round(group, steps, classes=net.classes or 2, prefix=prefix)
        for run in round_of_runs.attack():  # the run of a chunk, after each attack on this chunk
            is_complete = len(run.outcomes) > len(steps)  # the clean samples, and one per attack
            if scores_continuations and is_complete:
                run.outcomes += list(move_losses(net, run, options))
            if is_complete or yields_incomplete:
                yield make_part(net, run, options, notes)


def _name_round(group: Sequence[ChunkRun]) -> str:
    """Return the beginning of a message about a round: the numbers of its samples.

    Empty for the first round: most runs have a single round, and need no numbers.
    """
    first = group[0].batch.start
    if first == 0:
        return ""
    last = group[-1].batch
    return f"samples {first + 1} to {last.start + len(last)}: "


def check(net: Net, batch: Batch, options: AttackOptions) -> None:
    """Refuse a model, samples or a radius that the attacks do not work with.

    Raises:
        InputError: the model has no classes, samples have no labels, or the embedding of token
            ids was not found.
        UsageError: an attack cannot work on such samples, or a radius exceeds the box, the range
            of input values.
    """
    from lipaudit.attacks.evaluate import require_radius
    from lipaudit.attacks.transfer import find_examples
    from lipaudit.models.net import NEEDED

    advice = "Attack a classifier with labels, or the scores of a language model (--score sum)."
    base.require_decision(net, advice)
    base.require_labels(batch, "an attack")
    options.find_target(net)  # raises if the model has no such class
    trials = options.trials()
    # `changes`: the units of a text that attacks can change, such as words. `why`: the reason for
    # the error message if a trial changes other units.
    kinds.require_suitable(trials, net.kind, changes=net.changes, why=NEEDED)
    for trial in trials:
        require_radius(trial, net.box, net.input_shape, patch=options.choose_patch(net))
    for path in options.transfer:
        find_examples(path, batch.ids, batch.x.shape[1:])


class _Result(NamedTuple):
    """The samples under attack: in one trial, or in all trials of a ball together.

    Attributes:
        robust: whether no attack broke the sample.
        unfinished: whether attacks on the sample are still to come.
        confidence: largest softmax at the first example that broke it, else at the last one.
        cost: seconds, forward passes and backward passes over all samples.
    """

    robust: Values
    unfinished: Values
    confidence: Values
    cost: Values


# Results of the worst cases of balls, or of trials.
_Results = dict[TrialKey, _Result]


def summarise(parts: Sequence[Part], options: AttackOptions) -> list[Section]:
    """Make the section `attack`: a row for the worst case of each ball, then one per trial.

    A trial is some attacks in one ball (a norm and a radius). In the worst case of a ball, a
    sample is robust if no trial inside the ball broke it.
    """
    from lipaudit.measures.losses import note_losses

    trials = options.trials()
    of_trials = _read_results(parts, trials)
    worst = {}
    # By ball: the trials inside it, in this ball or a smaller one of the same norm.
    for ball, inside in worst_cases(of_trials).items():
        worst[ball] = _join_results(ball, {key: of_trials[key] for key in inside})
    rows = _make_rows(parts, trials, worst | of_trials)
    columns = _list_samples(parts, of_trials, worst)
    notes = [*dict.fromkeys(_write_notes(parts, trials))]  # each once
    if _are_continuations(parts):
        # Their losses, (samples, 1 + trials): without attack, then in each trial.
        losses = base.join_parts(parts, "losses").astype(float)
        names = ["loss", *(key.column("loss") for key in of_trials)]
        loss_columns = dict(zip(names, losses.T, strict=True))
        columns |= loss_columns
        notes.append(note_losses(base.select_unique(parts, loss_columns), options.target))
    arrays = _join_scores(parts)
    section = base.make_section(
        ATTACK_TABLE, parts, options, rows, notes, samples=columns, arrays=arrays
    )
    return [section]


def _are_continuations(parts: Sequence[Part]) -> bool:
    """Say whether the model scores one continuation of a prompt against a rival token.

    These are two classes in the arrays, but no classes for a reader: the rival of each sample is
    another token, and guessing does not make half of the samples right.
    """
    return "losses" in parts[0].values  # only parts of such a model have losses


def _join_scores(parts: Sequence[Part]) -> Arrays:
    """Return the log-probabilities of classes, (samples, classes), to compare two models.

    No array if they are missing for some samples, or too many to store.
    """
    if all(SCORES in part.values for part in parts):
        scores = base.join_parts(parts, SCORES)
        if scores.size <= MOST_SCORES:
            return {SCORES: scores}
    return {}


def _make_rows(
    parts: Sequence[Part], trials: Sequence[Trial], results: _Results
) -> tuple[Row, ...]:
    """Return a row for each result: accuracy with limits, calibration, worst class and cost.

    Args:
        parts: the parts.
        trials: the trials.
        results: results of the worst cases and of the trials, in the order of the rows.
    """
    import numpy as np

    from lipaudit.measures import texts

    unique = base.mark_unique(parts)  # a repeated sample counts once in a share
    of_rows = list(results.values())
    robust = np.stack([result.robust[unique] for result in of_rows], 1)
    shares = base.make_share_columns("robust", robust)
    # Until all attacks of a row ran, the robust accuracy of the row is an upper limit. It may fall
    # to any lower value, so there is no lower confidence limit.
    is_limit = np.array([result.unfinished.any() for result in of_rows])
    shares["robust_low"] = np.where(is_limit, np.nan, shares["robust_low"])
    if not _are_continuations(parts):  # those have no worst class, and no calibration
        shares |= _rate(parts, of_rows, robust)
    # (rows, 3): seconds, forward passes, backward passes.
    costs = np.array([result.cost for result in of_rows])
    untried = {trial.key: texts.compute_untried_share(parts, trial) for trial in trials}
    return base.make_rows(
        ATTACK_TABLE,
        attack=[key.attack for key in results],
        norm=[key.norm for key in results],
        eps=[float(key.radius) for key in results],
        eps_text=[key.radius.text for key in results],
        samples=int(unique.sum()),
        clean=base.join_parts(parts, "correct")[unique].mean(),
        **shares,
        untried=[untried.get(key, np.nan) for key in results],
        seconds=costs[:, 0].round(3),
        forwards=costs[:, 1].astype(int),
        backwards=costs[:, 2].astype(int),
    )


def _read_results(parts: Sequence[Part], trials: Sequence[Trial]) -> _Results:
    """Return the result of each trial on all samples: survivors, confidences and costs."""
    import numpy as np

    # Arrays are (samples, trials). Of confidence, a column without attack comes first.
    robust = base.join_parts(parts, "robust")
    confidence = base.join_parts(parts, "confidence")[:, 1:]
    unfinished = _mark_unfinished(parts, trials)
    # (trials, 3): seconds, forward and backward passes, summed over the parts.
    costs = np.sum([part.facts["cost"] for part in parts], axis=0)
    results = {}
    for i, trial in enumerate(trials):
        results[trial.key] = _Result(
            robust=robust[:, i],
            unfinished=unfinished[:, i],
            confidence=confidence[:, i],
            cost=costs[i],
        )
    return results


def _join_results(ball: TrialKey, results: _Results) -> _Result:
    """Return the worst case of a ball, from the results of all trials inside it.

    A trial in a smaller ball counts, too, because its examples are inside this ball. The cost is
    the sum over the trials at exactly the radius of the ball.
    """
    import numpy as np

    from lipaudit.attacks.transfer import find_first

    # (samples, trials).
    inside = results.values()
    robust: Values = np.stack([result.robust for result in inside], 1)
    confidence = np.stack([result.confidence for result in inside], 1)
    # For each sample, the first trial that broke it, else the last trial.
    first = find_first(~robust)
    return _Result(
        robust=np.asarray(robust.all(1)),
        unfinished=np.any([result.unfinished for result in inside], axis=0),
        confidence=confidence[np.arange(len(first)), first],
        cost=np.sum([r.cost for key, r in results.items() if key.radius == ball.radius], axis=0),
    )


def _list_samples(
    parts: Sequence[Part],
    of_trials: _Results,
    worst: _Results,
) -> Arrays:
    """Return the columns of the samples: without attack, by trial, and for each ball's worst case.

    Args:
        parts: the parts.
        of_trials: results of the trials.
        worst: results of the worst cases.
    """
    import numpy as np

    columns = {name: base.join_parts(parts, name) for name in ("label", "predicted", "correct")}
    distances = dict(zip(of_trials, base.join_parts(parts, "distance").T, strict=True))
    for key, result in {**of_trials, **worst}.items():
        # Attacks may be missing after a time limit: a sample that is robust so far is unknown
        # (NaN), and a broken sample stays broken.
        unknown = result.robust.astype(bool) & result.unfinished
        columns[key.column("robust")] = np.where(unknown, np.nan, result.robust)
        if key in distances:
            columns[key.column("distance")] = distances[key]
    if _are_continuations(parts):  # a confidence between two classes says nothing about them
        return columns
    # The first column of confidence, (samples, 1 + trials), is without attack.
    columns["confidence"] = base.join_parts(parts, "confidence")[:, 0].astype(float).round(6)
    for key, result in of_trials.items():
        columns[key.column("confidence")] = result.confidence.astype(float).round(6)
    return columns


def _rate(parts: Sequence[Part], results: Sequence[_Result], robust: Values) -> dict[str, Any]:
    """Return the columns of the calibration error and of the worst class, a value per result.

    With fewer than FEWEST_RATED samples, there are no columns of the calibration error.

    Args:
        parts: the parts.
        results: the results.
        robust: whether no attack broke a sample, (samples that repeat no earlier one, results).
    """
    import numpy as np

    unique = base.mark_unique(parts)
    columns: dict[str, Any] = {}
    if unique.sum() >= FEWEST_RATED:
        # The first column of confidence, (samples, 1 + trials), is without attack.
        clean = base.join_parts(parts, "confidence")[unique, 0]
        correct = base.join_parts(parts, "correct")[unique]
        columns["ece_clean"] = compute_calibration_error(clean, correct)
        columns["ece"] = []
        for result, survived in zip(results, robust.T, strict=True):
            error = np.nan  # unknown until all attacks ran
            if not result.unfinished.any():
                error = compute_calibration_error(result.confidence[unique], survived)
            columns["ece"].append(error)
    labels = base.join_parts(parts, "label")[unique]
    names = base.join_facts(parts, "classes")
    return columns | find_worst_classes(labels, robust, names)


def _mark_unfinished(parts: Sequence[Part], trials: Sequence[Trial]) -> Values:
    """Return for each sample and trial whether attacks of the trial are still to come.

    Attacks are missing after a time limit. The result has the shape (samples, trials).
    """
    import numpy as np

    planned = np.array([len(trial.attacks) for trial in trials])
    # How many attacks of each trial ran, (parts, trials): the same for all samples of a part.
    ran = np.array([part.facts["attacks"] for part in parts])
    return np.repeat(ran < planned, [len(part.ids) for part in parts], axis=0)


def _note_limits(parts: Sequence[Part], trials: Sequence[Trial]) -> Iterator[Note]:
    """Warn which attacks did not run on all samples, because of a time limit; nothing if all ran.

    A part holds the results of some samples. Its facts["attacks"] has, for each trial, how many
    of the trial's attacks ran on these samples, from the first one on.
    """
    samples = len(base.sample_ids(parts))
    partial_runs = []
    for i, trial in enumerate(trials):
        for count, attack in enumerate(trial.attacks, 1):
            # This is attack number `count` of the trial: it ran if at least `count` attacks ran.
            attacked = sum(len(part.ids) for part in parts if part.facts["attacks"][i] >= count)
            if attacked < samples:
                partial_runs.append(f"{attack.name} ({trial.key.ball}) on {attacked}")
    if partial_runs:
        yield Note.warn(
            "upper-limit",
            "robust accuracy is an upper limit, because not all attacks ran on all "
            f"{samples} samples: {', '.join(partial_runs)}",
        )


def _write_notes(parts: Sequence[Part], trials: Sequence[Trial]) -> Iterator[Note]:
    """Yield all notes: signs of weak attacks first, then a time limit, then what options say."""
    from lipaudit.measures import texts

    unique = base.mark_unique(parts)
    has_classes = not _are_continuations(parts)
    yield from _note_weakness(parts, len(unique), guessing=has_classes)
    unfinished = list(_note_limits(parts, trials))
    yield from unfinished
    if not unfinished:  # masked gradients show in a comparison of all attacks
        yield from _note_masked(parts, trials, unique)
    if unique.sum() < FEWEST_RATED and has_classes:
        yield Note.info("left-out", f"a calibration error (ECE) needs {FEWEST_RATED} samples")
    yield from texts.note_changes(parts, trials)
    yield from base.note_repeats(parts)
    for trial in trials:
        yield from trial.notes  # on the choice of settings
    yield from base.notes(parts)


def _note_weakness(parts: Sequence[Part], samples: int, *, guessing: bool) -> Iterator[Note]:
    """Warn of signs of weak attacks.

    Signs are: properties of the clean samples, such as gradients of 0; gradients that are not
    finite; and samples that only Square broke, which needs no gradients.

    Args:
        parts: the parts.
        samples: number of samples.
        guessing: whether a guess is right with probability 1 / classes.
    """
    import numpy as np

    from lipaudit.attacks.signs import note_signs, note_square

    nonfinite = sum(part.facts["nonfinite"] for part in parts)
    # The cost of a trial: seconds, forward passes, and last its number of backward passes.
    gradients = sum(cost[-1] for part in parts for cost in part.facts["cost"])
    share = nonfinite / max(gradients, 1)
    yield from note_signs(base.sum_checks(parts), guessing=guessing, nonfinite=share)
    # Numbers of robust samples before and after Square, summed over parts and trials. After a time
    # limit, Square may have run in more trials on one part than on another.
    squares = [pair for part in parts for pair in part.facts["square"]]
    before, after = np.sum(squares, axis=0)
    yield from note_square(int(before), int(after), samples)


def _note_masked(parts: Sequence[Part], trials: Sequence[Trial], unique: Values) -> Iterator[Note]:
    """Warn of masked gradients. All attacks must have run.

    Masked gradients show in a comparison: weak attacks break more samples than strong ones.
    """
    from lipaudit.attacks.signs import note_masking

    robust = base.join_parts(parts, "robust")[unique].astype(bool)
    labels = base.join_parts(parts, "label")[unique]
    box = parts[0].facts.get("box")  # a list if it was stored
    yield from note_masking(trials, robust, labels, box=tuple(box) if box else None)


def encode_files(parts: Sequence[Part], options: AttackOptions) -> dict[Path, bytes]:
    """Return the file of `--save-adv`: a table of changed texts, or tensors of examples."""
    from lipaudit.attacks.transfer import encode_examples
    from lipaudit.measures import texts

    (path,) = options.files  # the file of --save-adv; without one, this function is not called
    if path.suffix == TABLE:
        return {path: texts.encode_table(parts)}
    content = encode_examples(
        chunks=[part.values["x_adv"] for part in parts],
        broken=~base.join_parts(parts, "robust").astype(bool),
        labels=base.join_parts(parts, "label"),
        ids=base.sample_ids(parts),
        trials=[str(trial.key) for trial in options.trials()],
    )
    return {path: content}


ATTACK = Measure(
    "attack",
    (ATTACK_TABLE,),
    AttackOptions,
    measure,
    summarise,
    batch=CHUNK,
    chunk=CHUNK,
    encode_files=encode_files,
    check=check,
    place=40,
    moved={
        TRANSFER: repeat_option(
            AttackOptions,
            TRANSFER,
            help="Also try on a MODEL the examples that attack --save-adv of another one wrote.",
            usual="those of the first report, if their file is unchanged",
        )
    },
    audit=AuditRole(
        options=dict.fromkeys(OF_AUDIT, "")
        | {"eps": f" Default: {EPS}, of a demo {DEMO_EPS}; of words and characters 1,2,4."},
        # Enough for a gate: in 9 of 10 runs a drop of 8 points is seen.
        samples={"quick": 64, "usual": 256, "full": 512},
        plan=plan_attacks,
    ),
)
