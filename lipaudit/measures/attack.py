"""The measure `attack`: accuracy under attack, sample by sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from lipaudit.attacks import kinds
from lipaudit.attacks.kinds import CHUNK, Attack, Trial
from lipaudit.errors import UsageError, few
from lipaudit.measures import base
from lipaudit.measures.base import AuditRequest, AuditRole, Measure, MeasureOptions, Part, Values
from lipaudit.measures.rating import (
    FEWEST_OF_CLASS,
    FEWEST_RATED,
    calibration_error,
    find_worst_classes,
)
from lipaudit.settings.option import Need, Radii, option, repeat_option, require_distinct
from lipaudit.tables import Column, Display, Layout, Note, Section
from lipaudit.tables.columns import ACCURACY, OUTCOMES
from lipaudit.tables.report import SCORES
from lipaudit.tables.summary import CLEAN_OF_BALLS, Headline, declare_clean, read_worst
from lipaudit.tables.trials import COSTS, COUNTED, WHOLE, Norm, parse_budget, worst_cases

if TYPE_CHECKING:
    from lipaudit.data.batch import Batch
    from lipaudit.models.net import Net


# Default attacks of images, texts, and embeddings of texts.
IMAGES, TEXTS, EMBEDDINGS = "fgsm,pgd,autoattack", "words,characters", "fgsm,pgd"
# The demos are of digits, which larger changes leave readable.
DEMO_EPS, EPS = "0.1", "2/255"
# Options that an audit also takes.
OF_AUDIT = ("eps", "attack", "norm")
# The attack of --transfer.
TRANSFER = "transfer"
# File ending for changed texts; any other example is a tensor.
TABLE = ".jsonl"
# Largest number of samples times classes whose log-probabilities are stored: about 10 bytes each.
MOST_SCORES = 2**16


def _attack(*efforts: str) -> Need:
    """Return the need of an option that applies to attacks of a certain effort."""

    def holds(options: AttackOptions) -> bool:
        if options.attack is None or not (options.eps or options.attack == "paper"):
            return True  # the attacks are not known yet: `adapt` checks again
        planned = (attack for trial in options.trials() for attack in trial.attacks)
        return any(attack.kind.effort in efforts for attack in planned)

    known = ", ".join(name for name, kind in kinds.ATTACKS.items() if kind.effort in efforts)
    return Need(f"an attack that takes it: {known}", holds)


class AttackOptions(MeasureOptions):
    """Adversarial accuracy under FGSM, PGD and AutoAttack, sample by sample.

    The radius is in pixel space [0, 1]; normalisation happens inside the model. For texts,
    --attack words or characters changes that many words or characters. Other attacks change the
    token embeddings. For language models, they attack the scores of continuations, choices or
    labels: --attack words, characters or suffix change the prompt itself, others its embeddings
    (--score). --attack patch puts any values into that many patches of an image.

    Examples:
      lipaudit attack demo --eps 0.1
      lipaudit attack timm:vit_small_patch16_224 --data val/ --eps 1/255,2/255
      lipaudit attack timm:vit_small_patch16_224 --data val/ --attack paper
      lipaudit attack timm:vit_small_patch16_224 --data val/ --eps 1patch,2patches
      lipaudit attack ./bert --data reviews.csv --attack words --eps 1,2
      lipaudit attack ./gpt2 --data questions.jsonl --eps 0.1
      lipaudit attack ./gpt2 --data questions.jsonl --attack suffix --eps 3,5
    """

    samples: ClassVar[int] = 128
    labelled: ClassVar[bool] = True
    deploys: ClassVar[bool] = True
    scores = "always"

    eps: Radii = option(
        (),
        "Attack radii for pixels in [0, 1]: 2/255, 1/255,0.03 or START:STOP:COUNT like 0:8/255:9; "
        "for words, characters, tokens of a suffix, patches how many.",
    )
    attack: str | None = option(
        None,
        "Comma-separated attacks, or standard, quick, paper, custom:... "
        f"Default {IMAGES}; texts {TEXTS}; embeddings {EMBEDDINGS}.",
        values=lambda: ("autoattack", *kinds.PRESETS, *kinds.attack_kinds()),
    )
    norm: Norm | None = option(
        None, "linf (default for images), l2, l1, or token-l2 (default for text)."
    )
    steps: int | None = option(
        None,
        "Number of iterations of every attack.",
        usual=f"{kinds.Attack.steps}; pgd: {kinds.ATTACKS['pgd'].steps}; "
        f"patch: {kinds.ATTACKS['patch'].steps}; suffix: {kinds.ATTACKS['suffix'].steps}",
        need=_attack("steps", "swaps"),
        gt=0,
        rare=True,
    )
    restarts: int | None = option(
        None,
        "Random starts.",
        usual=f"{kinds.Attack.restarts}; patch: {kinds.ATTACKS['patch'].restarts}",
        need=_attack("steps", "queries"),
        gt=0,
        rare=True,
    )
    queries: int | None = option(
        None,
        "Largest number of queries: in all of square, for each change of a text, or for each step "
        "of suffix. Smaller sets of changes are tried whole.",
        usual=f"{kinds.Attack.queries}; words and characters: {kinds.SINGLE_CHANGES}; "
        f"suffix: {kinds.ATTACKS['suffix'].queries}",
        need=_attack("queries", "edits", "swaps"),
        gt=0,
        rare=True,
    )
    suffix_place: Literal["behind", "before"] = option(
        "behind",
        "Where suffix and random put their tokens: behind or before the text.",
        need=_attack("swaps"),
        kinds=("text",),
        rare=True,
    )
    target: str | None = option(
        None,
        "Class (name, letter or number) that attacks on texts aim at: a sample is broken if the "
        "model answers it. Of a continuation: continuation, to make it likelier.",
        need=_attack("edits", "swaps"),
        kinds=("text",),
        rare=True,
    )
    patch_size: int | None = option(
        None,
        "Side of the patches in pixels.",
        need=Need(
            "--attack patch",
            lambda options: not options.attack or any(t.norm == "patch" for t in options.trials()),
        ),
        kinds=("image",),
        usual="of the model's own patches",
        ge=1,
        rare=True,
    )
    save_adv: Path | None = option(
        None,
        "Save the adversarial examples to FILE.safetensors (images, embeddings) or "
        "FILE.jsonl (changed texts). --data reads both, except embeddings.",
        exclude=True,
        rare=True,
    )
    transfer: tuple[Path, ...] = option(
        (),
        "Also try the examples that --save-adv of another model wrote to FILE.safetensors: the "
        "attack transfer, in every ball; repeatable.",
        kinds=("image", "tokens"),
        exclude=True,
        rare=True,
    )
    # Default attacks of images.
    usual: str = Field(IMAGES, exclude=True)
    # Default radii of images.
    usual_eps: Radii = Field((), exclude=True)
    # Number of samples that share one random stream; a constant that reports record.
    logical_chunk: Literal[64] = CHUNK
    # Number of samples on the device at a time; no effect on results.
    batch_size: int = Field(CHUNK, exclude=True)

    @field_validator("save_adv")
    @classmethod
    def _tensors(cls, path: Path | None) -> Path | None:
        if path is not None and path.suffix not in (".safetensors", TABLE):
            raise ValueError(f"it must end in .safetensors, or in {TABLE} for changed texts")
        return path

    @field_validator("attack")
    @classmethod
    def _once(cls, names: str | None) -> str | None:
        # No name twice: neither in the whole list nor in that behind `custom:`.
        text = names or ""
        ensemble = text.removeprefix("custom:")
        for listed in (text, ensemble):
            stripped = [name.strip() for name in listed.split(",")]
            require_distinct([name for name in stripped if name])
        return names

    @model_validator(mode="after")
    def _possible(self) -> AttackOptions:
        if self.attack is not None and (self.eps or not self.usual_eps):
            self.trials()
        return self

    def adapt_scores(self, changes: Sequence[Norm]) -> Self:
        """Fill in the attacks for a language model that scores: by default on embeddings."""
        counts = any(radius.unit for radius in self.eps)
        if self.attack is not None or counts:
            return self.adapt("text", changes, "this needs a fast tokenizer beside config.json")
        return self.model_copy(update={"attack": EMBEDDINGS}).adapt("text", changes)

    def adapt(self, kind: str, changes: Sequence[Norm] = COUNTED, why: str = "") -> Self:
        """Fill in the attacks, norm and radii that a kind of model usually gets, and check them.

        Raises:
            UsageError: an attack or a norm means nothing for it, or there is no radius.
        """
        text = kind == "text"
        counted = next((radius for radius in self.eps if radius.unit in COUNTED), None)
        if counted is not None and not text:
            taken = "images" if kind == "image" else "sequences of vectors"
            reason = f"the radius {counted.text} counts changes of a text"
            advice = "Give a radius without a unit: --eps 2/255."
            raise UsageError(f"{reason}, but the model takes {taken}", advice)
        meant = dict.fromkeys(radius.unit or EMBEDDINGS for radius in self.eps)
        usual_of_text = [name for name in TEXTS.split(",") if name in changes]
        of_text = ",".join(meant or usual_of_text) or EMBEDDINGS
        of_image = ",".join(dict.fromkeys(r.unit or self.usual for r in self.eps)) or self.usual
        attack = self.attack or (of_text if text else of_image)
        own = attack in ("paper", "patch") or (text and attack != EMBEDDINGS)
        eps = self.eps if self.eps or own else self.usual_eps
        named = self.model_copy(update={"attack": attack, "eps": eps})
        named.require_needed()
        trials = named.trials()
        kinds.require_suitable(trials, kind, changes, why)
        rewritten = [trial for trial in trials if trial.norm in COUNTED]
        whole = [trial for trial in trials if trial.norm in WHOLE]
        table = self.save_adv is not None and self.save_adv.suffix == TABLE
        # A table holds changed texts, a file of tensors all else.
        unsuited = self.save_adv is not None and len(rewritten) != len(trials) * table
        if unsuited:
            raise UsageError(
                f"--save-adv {self.save_adv} cannot store the results of all these attacks",
                f"In separate runs, save changed texts to {TABLE}, other samples to .safetensors.",
            )
        # Reports say how many changes of a text were tried at most.
        tried = {attack.queries for trial in rewritten for attack in trial.attacks}
        queries = tried.pop() if len(tried) == 1 else self.queries
        # The norm is that of the balls, if there are any; a plan may bring its own radii.
        usual: Norm = "token-l2" if text else "linf"
        norm = self.norm or (usual if len(whole) < len(trials) else None)
        radii = eps or tuple(parse_budget(trial.key.typed) for trial in whole)
        return named.model_copy(update={"norm": norm, "eps": radii, "queries": queries})

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that the measure writes beside the report."""
        return () if self.save_adv is None else (self.save_adv,)

    @property
    def saves_tensors(self) -> bool:
        """Say whether examples are saved as tensors, not as a table of texts."""
        return self.save_adv is not None and self.save_adv.suffix != TABLE

    def identify(self) -> dict[str, Any]:
        """Return all that figures depend on among the options; of files, the contents."""
        from lipaudit.attacks.transfer import hash_file

        return dict(self) | {"transfer": [hash_file(path) for path in self.transfer]}

    def choose_patch(self, net: Net) -> tuple[int, int] | None:
        """Return height and width of the patches that attacks fill; None if unknown."""
        return net.patch if self.patch_size is None else (self.patch_size, self.patch_size)

    def find_target(self, net: Net) -> int | None:
        """Return the class that attacks on texts aim at; None without `target`.

        Raises:
            UsageError: the model has no such class.
        """
        if self.target is None:
            return None
        numbers = [str(number) for number in range(net.classes or 0)]
        names = list(net.labels or numbers)
        if net.scored == "continuation":
            names = names[:1]  # its rival differs from sample to sample
        lower = [name.casefold() for name in names]
        for known in (lower, numbers[: len(names)]):
            if self.target.casefold() in known:
                return known.index(self.target.casefold())
        raise UsageError(
            f"--target {self.target} is not a class of this model",
            f"Give one of its classes: {few(names)}.",
        )

    def trials(self) -> tuple[Trial, ...]:
        """Return the trials: attacks one after the other, in each ball.

        Raises:
            UsageError: an attack is unknown, there is no radius, or --transfer has no file or
                no ball.
        """
        plan = kinds.read_plan(
            self.attack or self.usual,
            norm=self.norm,
            radii=self.eps,
            steps=self.steps,
            restarts=self.restarts,
            queries=self.queries,
        )
        plan = tuple(trial.place_suffixes(self.suffix_place) for trial in plan)
        balls = dict.fromkeys((t.norm, t.radius) for t in plan if t.norm not in WHOLE)
        asked = any(each.name == TRANSFER for trial in plan for each in trial.attacks)
        wrong = bool(self.transfer) < asked or (self.transfer and not balls)
        if wrong:
            needed = "a ball" if self.transfer else "the examples of another model"
            raise UsageError(
                f"the attack transfer needs {needed}",
                "Use --attack pgd --eps 2/255 --transfer FILE.safetensors.",
            )
        if self.transfer and all(trial.label != TRANSFER for trial in plan):
            own = (Attack(TRANSFER),)
            plan += tuple(Trial(TRANSFER, norm, radius, own) for norm, radius in balls)
        return plan


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
            meaning="Share of samples that stay correct under all attacks of this radius.",
            place=20,
            read=read_worst,
            rule="attack.robust >= -2pp",
            ranks=True,
        ),
    ),
    display=Display(
        about="Share of the samples that stay correct under each attack, with 95% limits. A "
        "stronger attack can only lower it.",
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
    """Yield, for each chunk of samples, the outcomes of the trials after every attack.

    The cheapest attack runs first, on up to 512 samples, then the next one.

    Raises:
        UsageError: a batch is not a chunk of the run, so `logical_chunk` would be wrong.
        InputError: samples without labels, or token ids whose embedding nothing shows.
    """
    from lipaudit.attacks.transfer import note_source
    from lipaudit.data.batch import find_unfinished
    from lipaudit.measures import texts
    from lipaudit.measures.rounds import ROUND, attack_round, make_part, prepare_chunks

    steps = kinds.list_steps(options.trials())
    target = options.find_target(net)
    sources = (*map(note_source, options.transfer), *texts.note_target(net, target))
    begun = find_unfinished(batches)
    begin = prepare_chunks(net, options, steps, begun or {})
    # Of continuations, examples are needed at the end: their chunks are attacked one by one.
    scored = net.scored == "continuation"
    left = iter(batches)
    while group := list(islice(left, 1 if scored else ROUND)):
        runs = [begin(batch) for batch in group]
        for run in attack_round(runs, steps, net.classes or 2, _name_round(group)):
            complete = len(run.outcomes) > len(steps)
            if scored and complete:
                how = {"box": net.box, "seed": options.seed, "batch_size": options.batch_size}
                outcomes = tuple(run.outcomes)
                run.outcomes += texts.move_losses(
                    net, run.batch, run.chunk, outcomes, target, **how
                )
            if complete or (begun is not None and not scored):
                yield make_part(net, run, options, sources)


def _name_round(group: Sequence[Batch]) -> str:
    """Name the samples of a round by their positions; nothing if they are the first ones."""
    first = group[0].start
    if first == 0:
        return ""
    return f"samples {first + 1} to {group[-1].start + len(group[-1])}: "


def check(net: Net, batch: Batch, options: AttackOptions) -> None:
    """Refuse a model, samples or a radius that the attacks do not work with.

    Raises:
        InputError: a model without classes, samples without labels, or token ids whose embedding
            nothing shows.
        UsageError: an attack that cannot work on such samples, or a radius beyond the box.
    """
    from lipaudit.attacks.evaluate import require_radius
    from lipaudit.attacks.transfer import find_examples
    from lipaudit.models.net import NEEDED

    advice = "Attack a classifier with labels, or the scores of a language model (--score sum)."
    base.require_decision(net, advice)
    base.require_labels(batch, "an attack")
    options.find_target(net)
    trials = options.trials()
    kinds.require_suitable(trials, net.kind, net.changes, NEEDED)
    for trial in trials:
        require_radius(trial, net.box, net.input_shape, options.choose_patch(net))
    for path in options.transfer:
        find_examples(path, batch.ids, batch.x.shape[1:])


def summarise(parts: Sequence[Part], options: AttackOptions) -> list[Section]:
    """Make the section `attack`: a row for the worst case of each ball, then one per trial."""
    import numpy as np

    from lipaudit.attacks.transfer import find_first
    from lipaudit.measures import texts

    keys = [trial.key for trial in options.trials()]
    unfinished = dict(zip(keys, _mark_unfinished(parts, options.trials()).T, strict=True))
    columns = {name: base.join_parts(parts, name) for name in ("label", "predicted", "correct")}
    distance = dict(zip(keys, base.join_parts(parts, "distance").T, strict=True))
    robust = dict(zip(keys, base.join_parts(parts, "robust").T, strict=True))
    sure = dict(zip((None, *keys), base.join_parts(parts, "confidence").T, strict=True))
    cost = dict(zip(keys, np.sum([part.facts["cost"] for part in parts], axis=0), strict=True))
    balls = worst_cases(keys)
    for ball, inside in balls.items():
        # Robust in a ball: no attack within it broke the sample. Its cost is of its own trials.
        flags, likely = (np.stack([each[k] for k in inside], 1) for each in (robust, sure))
        robust[ball] = flags.all(1)
        unfinished[ball] = np.any([unfinished[key] for key in inside], axis=0)
        sure[ball] = likely[np.arange(len(likely)), find_first(~flags)]
        cost[ball] = np.sum([cost[key] for key in inside if key.radius == ball.radius], axis=0)
    for key in (*keys, *balls):
        # Broken is certain; a sample that not all attacks have tried may still be broken.
        unknown = robust[key].astype(bool) & unfinished[key]
        columns[key.column("robust")] = np.where(unknown, np.nan, robust[key])
        columns |= {key.column("distance"): distance[key]} if key in distance else {}
    raised: dict[str, Values] = {}
    if "losses" in parts[0].values:  # attacks on continuations
        names = ["loss", *(key.column("loss") for key in keys)]
        raised = dict(zip(names, base.join_parts(parts, "losses").astype(float).T, strict=True))
    # A repeated sample counts once in a share.
    order, once = [*balls, *keys], base.mark_unique(parts)
    flags = np.stack([robust[key][once] for key in order], 1)
    known = base.join_facts(parts, "classes")
    is_limit = np.array([unfinished[key].any() for key in order])
    rated: dict[str, Any] = {}
    if not raised:  # a continuation and its rival are no classes
        for each in (None, *keys):
            name = each.column("confidence") if each else "confidence"
            columns[name] = sure[each].astype(float).round(6)
        if once.sum() >= FEWEST_RATED:
            rated["ece_clean"] = calibration_error(sure[None][once], columns["correct"][once])
            rated["ece"] = [
                np.nan if limit else calibration_error(sure[key][once], hits)
                for key, hits, limit in zip(order, flags.T, is_limit, strict=True)
            ]
        rated |= find_worst_classes(columns["label"][once], flags, known)
    shares = base.share_columns("robust", flags)
    # An upper limit has no lower end.
    shares["robust_low"] = np.where(is_limit, np.nan, shares["robust_low"])
    costs = np.array([cost[key] for key in order])
    left = {trial.key: texts.share_untried(parts, trial) for trial in options.trials()}
    rows = base.make_rows(
        ATTACK_TABLE,
        attack=[key.attack for key in order],
        norm=[key.norm for key in order],
        eps=[float(key.radius) for key in order],
        eps_text=[key.radius.text for key in order],
        samples=int(once.sum()),
        clean=columns["correct"][once].mean(),
        **shares,
        untried=[left.get(key, np.nan) for key in order],
        **rated,
        seconds=costs[:, 0].round(3),
        forwards=costs[:, 1].astype(int),
        backwards=costs[:, 2].astype(int),
    )
    remarks = _write_notes(parts, options.trials(), len(once))
    remarks += (texts.note_losses(raised, options.target),) if raised else ()
    columns |= raised
    arrays: dict[str, Values] = {}
    if all(SCORES in part.values for part in parts):
        scores = base.join_parts(parts, SCORES)
        if scores.size <= MOST_SCORES:
            arrays[SCORES] = scores
    return [
        base.make_section(
            ATTACK_TABLE, parts, options, rows, remarks, samples=columns, arrays=arrays
        )
    ]


def _mark_unfinished(parts: Sequence[Part], trials: Sequence[Trial]) -> Values:
    """Return for each sample and trial whether attacks of the trial are still to come."""
    import numpy as np

    planned = [len(trial.attacks) for trial in trials]
    rows = []
    for part in parts:
        counts = part.facts["attacks"]
        row = np.array(counts) < np.array(planned)
        rows += [row] * len(part.ids)
    return np.array(rows)


def _note_limits(parts: Sequence[Part], trials: Sequence[Trial]) -> tuple[Note, ...]:
    """Say which attacks did not run on all samples; nothing if all did."""
    samples = len(base.sample_ids(parts))
    lacking = []
    for i, trial in enumerate(trials):
        for number, attack in enumerate(trial.attacks, 1):
            tried = sum(len(part.ids) for part in parts if part.facts["attacks"][i] >= number)
            if tried < samples:
                lacking.append(f"{attack.name} ({trial.key.ball}) on {tried}")
    if not lacking:
        return ()
    text = (
        "robust accuracy is an upper limit, because not all attacks ran on all "
        f"{samples} samples: {', '.join(lacking)}"
    )
    return (Note.warn("upper-limit", text),)


def _write_notes(parts: Sequence[Part], trials: Sequence[Trial], samples: int) -> tuple[Note, ...]:
    import numpy as np

    from lipaudit.attacks.signs import note_masking, note_signs, note_square
    from lipaudit.measures import texts

    # A continuation and its rival are not two classes: the task is as hard as choosing a text.
    taken = sum(cost[-1] for part in parts for cost in part.facts["cost"])
    remarks = note_signs(
        base.sum_checks(parts),
        guessing="losses" not in parts[0].values,
        nonfinite=sum(part.facts["nonfinite"] for part in parts) / max(taken, 1),
    )
    before, after = np.sum([part.facts["square"] for part in parts], axis=(0, 1))
    remarks += note_square(int(before), int(after), samples)
    once = base.mark_unique(parts)
    flags, labels = (base.join_parts(parts, name)[once] for name in ("robust", "label"))
    box = parts[0].facts.get("box")  # a list if it was stored
    limits = _note_limits(parts, trials)
    remarks += limits
    if not limits:  # an attack that did not run breaks nothing, and masks nothing
        remarks += note_masking(trials, flags.astype(bool), labels, tuple(box) if box else None)
    if once.sum() < FEWEST_RATED and "losses" not in parts[0].values:
        text = f"a calibration error (ECE) needs {FEWEST_RATED} samples"
        remarks += (Note.info("left-out", text),)
    planned = (note for trial in trials for note in trial.notes)
    remarks += (*texts.note_changes(parts, trials), *base.repeat_notes(parts), *planned)
    return tuple(dict.fromkeys(remarks + base.notes(parts)))


def encode_files(parts: Sequence[Part], options: AttackOptions) -> dict[Path, bytes]:
    """Return the file of `--save-adv`: changed texts, or tensors."""
    from lipaudit.attacks.transfer import encode_examples
    from lipaudit.measures import texts

    (path,) = options.files
    if path.suffix == TABLE:
        return {path: texts.table(parts)}
    content = encode_examples(
        [part.values["x_adv"] for part in parts],
        ~base.join_parts(parts, "robust").astype(bool),
        base.join_parts(parts, "label"),
        base.sample_ids(parts),
        [str(trial.key) for trial in options.trials()],
    )
    return {path: content}


def plan_attacks(asked: AuditRequest) -> AttackOptions:
    """Return the attacks of an audit.

    Raises:
        UsageError: for a bad radius, attack or norm.
    """
    ensemble = "quick" if asked.size == "quick" else "autoattack"
    given = {name: asked.given[name] for name in OF_AUDIT if name in asked.given}
    given["usual"] = f"fgsm,pgd,{ensemble}"
    given["usual_eps"] = DEMO_EPS if asked.demo else EPS
    return AttackOptions.parse(given)


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
        options=dict.fromkeys(OF_AUDIT, "") | {"eps": f" Default: {EPS}, of a demo {DEMO_EPS}."},
        # Enough for a gate: in 9 of 10 runs a drop of 8 points is seen.
        samples={"quick": 64, "usual": 256, "full": 512},
        plan=plan_attacks,
    ),
)
