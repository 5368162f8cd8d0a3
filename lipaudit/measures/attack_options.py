"""The options of the measure `attack`: which attacks run, in which balls, on which model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from lipaudit.attacks import kinds
from lipaudit.attacks.kinds import CHUNK, Attack, Trial
from lipaudit.errors import UsageError, join_few
from lipaudit.measures.base import AuditRequest, MeasureOptions
from lipaudit.settings.option import Need, option
from lipaudit.settings.value_types import Radii, require_distinct
from lipaudit.tables.trials import COUNTED, WHOLE, Norm, parse_budget

if TYPE_CHECKING:
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


def _need_effort(*efforts: str) -> Need:
    """Return the condition of an option such as --steps: an attack must run that uses it.

    `efforts` says what such an attack is limited by (`AttackKind.effort`): steps, queries...
    """

    def has_such_attack(options: AttackOptions) -> bool:
        """Return whether these options run an attack that is limited by one of `efforts`.

        True as well while attacks or radii are left out, because they depend on the model. `adapt`
        fills them in later, and checks the condition again.
        """
        has_radii = options.eps or options.attack == "paper"  # `paper` has radii of its own
        if options.attack is None or not has_radii:
            return True
        planned = (attack for trial in options.trials() for attack in trial.attacks)
        return any(attack.kind.effort in efforts for attack in planned)

    names = [name for name, kind in kinds.ATTACKS.items() if kind.effort in efforts]
    return Need(f"an attack that takes it: {', '.join(names)}", has_such_attack)


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
        values=lambda: (*kinds.PRESETS, *kinds.attack_kinds()),
    )
    norm: Norm | None = option(
        None, "linf (default for images), l2, l1, or token-l2 (default for embeddings of texts)."
    )
    steps: int | None = option(
        None,
        "Number of iterations of every attack.",
        usual=f"{kinds.Attack.steps}; pgd: {kinds.ATTACKS['pgd'].steps}; "
        f"patch: {kinds.ATTACKS['patch'].steps}; suffix: {kinds.ATTACKS['suffix'].steps}",
        need=_need_effort("steps", "swaps"),
        gt=0,
        rare=True,
    )
    restarts: int | None = option(
        None,
        "Random starts.",
        usual=f"{kinds.Attack.restarts}; patch: {kinds.ATTACKS['patch'].restarts}",
        need=_need_effort("steps", "queries"),
        gt=0,
        rare=True,
    )
    queries: int | None = option(
        None,
        "Largest number of queries: in all of square, for each change of a text, or for each step "
        "of suffix. Smaller sets of changes are tried whole.",
        usual=f"{kinds.Attack.queries}; words and characters: {kinds.SINGLE_CHANGES}; "
        f"suffix: {kinds.ATTACKS['suffix'].queries}",
        need=_need_effort("queries", "edits", "swaps"),
        gt=0,
        rare=True,
    )
    suffix_place: Literal["behind", "before"] = option(
        "behind",
        "Where suffix and random put their tokens: behind or before the text.",
        need=_need_effort("swaps"),
        kinds=("text",),
        rare=True,
    )
    target: str | None = option(
        None,
        "Class (name, letter or number) that attacks on texts aim at: a sample is broken if the "
        "model answers it. Of a continuation: continuation, to make it likelier.",
        need=_need_effort("edits", "swaps"),
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
    def _require_ending(cls, path: Path | None) -> Path | None:
        """Refuse a file of --save-adv with an ending that names no format."""
        if path is not None and path.suffix not in (".safetensors", TABLE):
            raise ValueError(f"it must end in .safetensors, or in {TABLE} for changed texts")
        return path

    @field_validator("attack")
    @classmethod
    def _refuse_repeats(cls, attack: str | None) -> str | None:
        """Refuse an attack that is named twice, in a list or in an ensemble `custom:fgsm,pgd`.

        The text is checked with and without the prefix `custom:`.
        """
        text = attack or ""
        for listed in (text, text.removeprefix("custom:")):
            names = [name.strip() for name in listed.split(",")]
            require_distinct([name for name in names if name])
        return attack

    @model_validator(mode="after")
    def _require_plan(self) -> AttackOptions:
        """Refuse attacks and radii that do not fit together: `trials` raises the error.

        Attacks or radii that are left out depend on the kind of model: `adapt` fills them in
        later, and checks them.
        """
        # `usual_eps`: default radii, which `adapt` may fill in. Without any, no radii will follow.
        are_radii_known = self.eps or not self.usual_eps
        if self.attack is not None and are_radii_known:
            self.trials()
        return self

    def adapt_scores(self, changes: Sequence[Norm]) -> Self:
        """Return the options for a language model that scores continuations of prompts.

        By default the attacks change embeddings. If the user named attacks, or gave a radius such
        as 2words, these attacks run instead. Attacks that change the prompt need a tokenizer.

        Args:
            changes: the units of the prompts that attacks can change: words, characters.
        """
        has_units = any(radius.unit for radius in self.eps)  # 2words: an attack on prompts
        if self.attack is not None or has_units:
            # `why` explains the error that a model without such a tokenizer gets.
            return self.adapt(
                "text", changes, why="this needs a fast tokenizer beside config.json"
            )
        return self.model_copy(update={"attack": EMBEDDINGS}).adapt("text", changes)

    def adapt(self, kind: str, changes: Sequence[Norm] = COUNTED, why: str = "") -> Self:
        """Return the options with default attacks, norm and radii filled in for a kind of model.

        The report records the result as its settings.

        Args:
            kind: image, tokens or text.
            changes: the units of the model's texts that attacks can change.
            why: the reason, for error messages, why other units cannot be changed.

        Raises:
            UsageError: an attack or a norm does not apply to this kind, or there is no radius.
        """
        is_text = kind == "text"
        if not is_text:
            self._refuse_units_of_texts("images" if kind == "image" else "sequences of vectors")
        attack = self.attack or self._choose_attacks(is_text, changes)
        # Without radii of the user, attacks on balls get `usual_eps`. Attacks that count changes
        # (words, patches) have default radii of their own, and `paper` has fixed ones: then `eps`
        # stays empty, and `trials` below takes these radii.
        has_own_radii = attack in ("paper", "patch") or (is_text and attack != EMBEDDINGS)
        eps = self.eps
        if not eps and not has_own_radii:
            eps = self.usual_eps
        # Attacks and radii are now known: check that they suit the model and the file of
        # --save-adv. The default norm follows below: until then `trials` takes linf, which suits
        # every model.
        chosen = self.model_copy(update={"attack": attack, "eps": eps})
        chosen.require_needed()
        trials = chosen.trials()
        kinds.require_suitable(trials, kind, changes, why)
        self._require_storable(trials)
        queries = _find_queries(trials) or self.queries
        # WHOLE: norms that count changes (words, characters, suffix, patch). All other attacks
        # search a ball: if there is such an attack, it gets a default norm.
        counting = [trial for trial in trials if trial.norm in WHOLE]
        norm = self.norm
        if norm is None and len(counting) < len(trials):
            norm = "token-l2" if is_text else "linf"
        # If `eps` is empty, `trials` took the default radii of attacks that count changes. Record
        # them as a user would type them: 1words, 2words.
        radii = eps or tuple(parse_budget(trial.key.typed) for trial in counting)
        return chosen.model_copy(update={"norm": norm, "eps": radii, "queries": queries})

    def _refuse_units_of_texts(self, samples: str) -> None:
        """Refuse radii such as `2words` for a model of other `samples`, such as images."""
        for radius in self.eps:
            if radius.unit in COUNTED:
                raise UsageError(
                    f"the radius {radius.text} counts changes of a text, but the model takes "
                    f"{samples}",
                    "Give a radius without a unit: --eps 2/255.",
                )

    def _require_storable(self, trials: Sequence[Trial]) -> None:
        """Refuse a file of --save-adv that cannot store the examples of all trials.

        A file of tensors cannot store changed texts: no trial may change texts. A table (.jsonl)
        can store nothing else: every trial must change texts.
        """
        if self.save_adv is None:
            return
        # COUNTED: the units in which trials change texts.
        if any((trial.norm in COUNTED) == self.saves_tensors for trial in trials):
            raise UsageError(
                f"--save-adv {self.save_adv} cannot store the results of all these attacks",
                f"In separate runs, save changed texts to {TABLE}, other samples to .safetensors.",
            )

    def _choose_attacks(self, is_text: bool, changes: Sequence[Norm]) -> str:
        """Return the default attacks: by the units of the typed radii, else by the kind of model.

        A radius `2words` asks for the attack words, a radius without a unit for attacks on balls.
        Without radii, texts are attacked in all units that can be changed (`changes`).
        """
        # An attack that counts changes has the name of its unit: words.
        usual = EMBEDDINGS if is_text else self.usual  # attacks on balls
        names = [radius.unit or usual for radius in self.eps]
        if is_text and not names:
            names = [name for name in TEXTS.split(",") if name in changes]
        return ",".join(dict.fromkeys(names or [usual]))

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that the measure writes beside the report."""
        return () if self.save_adv is None else (self.save_adv,)

    @property
    def saves_tensors(self) -> bool:
        """Say whether examples are saved as tensors, not as a table of texts."""
        return self.save_adv is not None and self.save_adv.suffix != TABLE

    def identify(self) -> dict[str, Any]:
        """Return the options that figures depend on; files are replaced by hashes of their bytes.

        So a changed file under the same name is seen as a change of the options.
        """
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
            # Class 0 is the continuation. Class 1, its rival, is another token in each sample.
            names = names[:1]
        target = self.target.casefold()
        by_name = [name.casefold() for name in names]
        by_number = numbers[: len(names)]
        for classes in (by_name, by_number):
            if target in classes:
                return classes.index(target)
        raise UsageError(
            f"--target {self.target} is not a class of this model",
            f"Give one of its classes: {join_few(names)}.",
        )

    def trials(self) -> tuple[Trial, ...]:
        """Return the trials that the options ask for: each is some attacks in one ball.

        With --transfer, the examples of another model are also tried in every ball, in a trial of
        their own with the label `transfer`. `--attack pgd,transfer` has these trials already, and
        nothing is added. `--attack custom:pgd,transfer` has one trial of two attacks in each ball,
        so the trials `transfer` are added.

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
        return self._add_transfer(tuple(t.place_suffixes(self.suffix_place) for t in plan))

    def _add_transfer(self, plan: tuple[Trial, ...]) -> tuple[Trial, ...]:
        """Return a plan of attacks, and for --transfer a further trial in each of its balls.

        Raises:
            UsageError: the plan has the attack transfer without --transfer, or --transfer has no
                ball.
        """
        # The balls of the plan, each once. The norms in WHOLE count changes: they have no balls.
        balls = dict.fromkeys((t.norm, t.radius) for t in plan if t.norm not in WHOLE)
        # Whether some trial, or an ensemble such as custom:pgd,transfer, has the attack transfer.
        has_transfer = any(attack.name == TRANSFER for trial in plan for attack in trial.attacks)
        missing = ""
        if has_transfer and not self.transfer:
            missing = "the examples of another model"
        elif self.transfer and not balls:
            missing = "a ball"
        if missing:
            raise UsageError(
                f"the attack transfer needs {missing}",
                "Use --attack pgd --eps 2/255 --transfer FILE.safetensors.",
            )
        # Add trials with the label `transfer`, even if an ensemble has an attack of this name.
        if self.transfer and all(trial.label != TRANSFER for trial in plan):
            attacks = (Attack(TRANSFER),)
            plan += tuple(
                Trial(label=TRANSFER, norm=norm, radius=radius, attacks=attacks)
                for norm, radius in balls
            )
        return plan


def _find_queries(trials: Sequence[Trial]) -> int | None:
    """Return the number of queries of all attacks on texts; None if there is no single number."""
    # COUNTED are the units of texts: words, characters, tokens of a suffix.
    of_texts = [trial for trial in trials if trial.norm in COUNTED]
    numbers = {attack.queries for trial in of_texts for attack in trial.attacks}
    return numbers.pop() if len(numbers) == 1 else None


def plan_attacks(request: AuditRequest) -> AttackOptions:
    """Return the options of the attacks in an audit: what the user typed, and defaults of audits.

    The default attacks and radii (`usual`, `usual_eps`) are for images. For other models, `adapt`
    chooses the defaults.

    Raises:
        UsageError: for a bad radius, attack or norm.
    """
    ensemble = "quick" if request.size == "quick" else "autoattack"
    given = {name: request.given[name] for name in OF_AUDIT if name in request.given}
    given["usual"] = f"fgsm,pgd,{ensemble}"
    given["usual_eps"] = DEMO_EPS if request.demo else EPS
    return AttackOptions.parse(given)
