"""Options of `lipaudit attack`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from lipaudit.attacks.kinds import attack_kinds
from lipaudit.attacks.plan import CHUNK, PRESETS, Trial, read_plan
from lipaudit.results.trials import Norm
from lipaudit.settings.measure import MeasureOptions
from lipaudit.settings.option import option
from lipaudit.settings.parsing import Radii


class AttackOptions(MeasureOptions):
    """Adversarial accuracy under FGSM, PGD and AutoAttack, sample by sample.

    The radius is in pixel space [0, 1]; normalisation happens inside the model. For text the
    perturbation is added to the token embeddings.

    [dim]Examples:[/]
      [cyan]lipaudit attack demo --eps 0.1[/]
      [cyan]lipaudit attack timm:vit_small_patch16_224 --data val/ --eps 1/255,2/255[/]
      [cyan]lipaudit attack timm:vit_small_patch16_224 --data val/ --attack paper[/]
    """

    samples: ClassVar[int] = 128
    labelled: ClassVar[bool] = True

    eps: Radii = option((), "Radii in pixel space [0, 1]: 2/255 or 1/255,0.03.")
    attack: str = option(
        "fgsm,pgd,autoattack",
        "fgsm, pgd, autoattack (comma-separated), paper, standard, quick, or "
        "custom:apgd-ce,apgd-t,fab-t,square.",
        values=lambda: ("autoattack", *PRESETS, *attack_kinds()),
    )
    norm: Norm = option("linf", "linf, l2, or token-l2 (embeddings).")
    steps: int | None = option(None, "Iterations, in place of the own.", gt=0)
    restarts: int | None = option(None, "Random starts.", gt=0)
    queries: int | None = option(None, "Most queries of Square.", gt=0)
    save_adv: Path | None = option(
        None, "Write the adversarial examples (.safetensors).", exclude=True
    )
    logical_chunk: Literal[64] = CHUNK
    """Samples that share a random stream: recorded, and never another number."""
    batch_size: int = Field(CHUNK, exclude=True)
    """Samples on the device at a time; changes nothing else."""
    first_chunk: int = Field(0, exclude=True)
    """Number of the first chunk of a run that goes on."""

    @field_validator("save_adv")
    @classmethod
    def _tensors(cls, path: Path | None) -> Path | None:
        if path is not None and path.suffix != ".safetensors":
            raise ValueError("it must end in .safetensors")
        return path

    @model_validator(mode="after")
    def _possible(self) -> AttackOptions:
        self.trials()
        return self

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that the measure writes beside the report."""
        return () if self.save_adv is None else (self.save_adv,)

    def trials(self) -> tuple[Trial, ...]:
        """Return what is run: attacks one after the other, in each ball.

        Raises:
            UsageError: an unknown attack, or no radius.
        """
        return read_plan(
            self.attack,
            norm=self.norm,
            radii=self.eps,
            steps=self.steps,
            restarts=self.restarts,
            queries=self.queries,
        )
