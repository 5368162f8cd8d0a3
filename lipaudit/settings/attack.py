"""The measure `attack`: its options and its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from lipaudit.attacks.kinds import ATTACKS, attack_kinds
from lipaudit.attacks.plan import CHUNK, PRESETS, Trial, read_plan, require_suitable
from lipaudit.errors import UsageError
from lipaudit.settings.measure import MeasureOptions, MeasureRecord
from lipaudit.settings.option import Need, option
from lipaudit.settings.parsing import Radii, distinct
from lipaudit.tables.columns import Column, text_column
from lipaudit.tables.common import ACCURACY, OUTCOMES
from lipaudit.tables.report import Layout
from lipaudit.tables.trials import COUNTED, Norm, parse_budget

IMAGES = "fgsm,pgd,autoattack"


TEXTS = ",".join(COUNTED)


EMBEDDINGS = "fgsm,pgd"
"""Default attacks of images, texts, and embeddings of texts."""


TABLE = ".jsonl"
"""File endings for changed texts."""


def _attack(*efforts: str) -> Need:
    """Return the need of an option that applies to attacks of a certain effort."""

    def holds(options: AttackOptions) -> bool:
        if options.attack is None or not (options.eps or options.attack == "paper"):
            return True  # the attacks are not known yet: `suited` checks again
        planned = (attack for trial in options.trials() for attack in trial.attacks)
        return any(attack.kind.effort in efforts for attack in planned)

    known = ", ".join(name for name, kind in ATTACKS.items() if kind.effort in efforts)
    return Need(f"an attack that takes {' or '.join(efforts)}: {known}", holds)


class AttackOptions(MeasureOptions):
    """Adversarial accuracy under FGSM, PGD and AutoAttack, sample by sample.

    The radius is in pixel space [0, 1]; normalisation happens inside the model. For texts,
    --attack words or characters changes that many words or characters. Other attacks change the
    token embeddings. For language models, they attack the scores of continuations, choices or
    labels, in the embeddings of the prompt (--score).

    [dim]Examples:[/]
      [cyan]lipaudit attack demo --eps 0.1[/]
      [cyan]lipaudit attack timm:vit_small_patch16_224 --data val/ --eps 1/255,2/255[/]
      [cyan]lipaudit attack timm:vit_small_patch16_224 --data val/ --attack paper[/]
      [cyan]lipaudit attack ./bert --data reviews.csv --attack words --eps 1,2[/]
      [cyan]lipaudit attack ./gpt2 --data questions.jsonl --eps 0.1[/]
    """

    samples: ClassVar[int] = 128
    labelled: ClassVar[bool] = True
    scores = "always"

    eps: Radii = option(
        (),
        "Attack radii for pixels in [0, 1]: 2/255 or 1/255,0.03; for words and characters "
        "how many.",
    )
    attack: str | None = option(
        None,
        "Comma-separated attacks, or standard, quick, lean, paper, custom:... "
        f"Default {IMAGES}; texts {TEXTS}; embeddings {EMBEDDINGS}.",
        values=lambda: ("autoattack", *PRESETS, *attack_kinds()),
    )
    norm: Norm | None = option(
        None, "linf (default for images), l2, or token-l2 (default for text)."
    )
    steps: int | None = option(
        None, "Number of iterations of every attack.", need=_attack("steps"), gt=0
    )
    restarts: int | None = option(None, "Random starts.", need=_attack("steps", "queries"), gt=0)
    queries: int | None = option(
        None,
        "Largest number of queries: of Square in all, of words and characters for each change.",
        need=_attack("queries", "edits"),
        gt=0,
    )
    save_adv: Path | None = option(
        None,
        "Save the adversarial examples to FILE.safetensors (images, embeddings) or "
        "FILE.jsonl (changed texts). --data reads both, except embeddings.",
        exclude=True,
    )
    usual: str = Field(IMAGES, exclude=True)
    """Default attacks of images."""
    usual_eps: Radii = Field((), exclude=True)
    """Default radii of images."""
    logical_chunk: Literal[64] = CHUNK
    """Number of samples that share one random stream; a constant that reports record."""
    batch_size: int = Field(CHUNK, exclude=True)
    """Number of samples on the device at a time; no effect on results."""

    @field_validator("save_adv")
    @classmethod
    def _tensors(cls, path: Path | None) -> Path | None:
        if path is not None and path.suffix not in (".safetensors", TABLE):
            raise ValueError(f"it must end in .safetensors, or in {TABLE} for changed texts")
        return path

    @field_validator("attack")
    @classmethod
    def _once(cls, names: str | None) -> str | None:
        for part in (names or "", (names or "").partition(":")[2]):
            distinct([name.strip() for name in part.split(",") if name.strip()])
        return names

    @model_validator(mode="after")
    def _possible(self) -> AttackOptions:
        if self.attack is not None and (self.eps or not self.usual_eps):
            self.trials()
        return self

    def suited(self, kind: str, changes: Sequence[Norm] = COUNTED, why: str = "") -> Self:
        """Fill in the attacks, norm and radii that a kind of model usually gets, and check them.

        Raises:
            UsageError: an attack or a norm means nothing for it, or there is no radius.
        """
        text = kind == "text"
        counted = next((radius for radius in self.eps if radius.unit), None)
        if counted is not None and not text:
            raise UsageError(
                f"the radius {counted.text} counts {counted.unit} of a text, but the model "
                f"takes {'images' if kind == 'image' else 'sequences of vectors'}",
                "Give a radius without a unit: --eps 2/255.",
            )
        meant = dict.fromkeys(radius.unit or EMBEDDINGS for radius in self.eps)
        of_text = ",".join(meant or [name for name in COUNTED if name in changes]) or EMBEDDINGS
        attack = self.attack or (of_text if text else self.usual)
        own = attack == "paper" or (text and attack != EMBEDDINGS)
        eps = self.eps if self.eps or own else self.usual_eps
        named = self.model_copy(update={"attack": attack, "eps": eps})
        named.require_needed()
        trials = named.trials()
        require_suitable(trials, kind, changes, why)
        rewritten = [trial for trial in trials if trial.norm in COUNTED]
        table = self.save_adv is not None and self.save_adv.suffix == TABLE
        # A table holds changed texts, a file of tensors all else.
        if self.save_adv is not None and len(rewritten) != len(trials) * table:
            raise UsageError(
                f"--save-adv {self.save_adv} cannot store the results of all these attacks",
                f"Save changed texts to a {TABLE} file and perturbed samples to a "
                ".safetensors file, in separate runs.",
            )
        # The norm is that of the balls, if there are any; a plan may bring its own radii.
        usual: Norm = "token-l2" if text else "linf"
        norm = self.norm or (usual if len(rewritten) < len(trials) else None)
        radii = eps or tuple(parse_budget(f"{t.radius.text}{t.norm}") for t in rewritten)
        return named.model_copy(update={"norm": norm, "eps": radii})

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that the measure writes beside the report."""
        return () if self.save_adv is None else (self.save_adv,)

    def shorten(self, layers: Mapping[int, bool]) -> Self:
        """Return the options themselves: each step of an attack takes what one gradient takes."""
        return self

    def trials(self) -> tuple[Trial, ...]:
        """Return the trials: attacks one after the other, in each ball.

        Raises:
            UsageError: an attack is unknown, or there is no radius.
        """
        return read_plan(
            self.attack or self.usual,
            norm=self.norm,
            radii=self.eps,
            steps=self.steps,
            restarts=self.restarts,
            queries=self.queries,
        )


ATTACK_TABLE = Layout(
    name="attack",
    title="Attacks",
    sample_columns={
        **OUTCOMES,
        "distance": Column(
            "distance",
            "Distance from the sample to the last example tried, in the norm of the attack. "
            "For texts: the number of changes.",
            domain="",
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
        "attack": text_column(
            "attack", "Name of the attack; worst = all attacks together.", needed=True
        ),
        "norm": text_column(
            "norm",
            "Norm of the perturbation, or the unit that is changed (words, characters).",
            needed=True,
        ),
        "eps": Column(
            "eps",
            "Radius, for pixels in [0, 1] or token embeddings; or the number of changes.",
            format=".4g",
            domain="",
            needed=True,
        ),
        **ACCURACY,
        "seconds": Column("seconds", "Wall time.", format=".1f", unit="s", domain=""),
        "forwards": Column("forwards", "Forward passes, counted in samples.", format="d"),
        "backwards": Column("backwards", "Backward passes, counted in samples.", format="d"),
    },
)


ATTACK = MeasureRecord(name="attack", tables=(ATTACK_TABLE,), options=AttackOptions)
