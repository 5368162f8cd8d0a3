"""How a model is fine-tuned."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from lipaudit.attacks.plan import parse_radius


class Recipe(BaseModel):
    """Everything that decides the outcome of a training run, besides model and data.

    The defaults are those of Yudin et al., arXiv 2507.07814 (SGD with momentum 0.9, weight decay
    1e-4, cosine schedule, 40 epochs, batches of 512, flips, CutMix, MixUp); what the paper does
    not give is ours: `lr`, `mixup`, `cutmix`, `steps`.

    Attributes:
        epochs: passes over the data.
        batch_size: samples per step.
        optimizer: sgd or adamw.
        lr: highest learning rate.
        momentum: of sgd.
        weight_decay: of the optimizer.
        schedule: cosine (from lr to 0) or onecycle (up to lr, then down).
        flip: mirror each image with probability one half.
        shift: move each image by up to so many pixels, background coming in.
        mixup: alpha of MixUp; 0 leaves it out.
        cutmix: alpha of CutMix; 0 leaves it out.
        penalty: jasmin or specformer; None trains without.
        k: of JaSMin; 0 or more than 1.
        reduction: of JaSMin over rows, max or mean.
        weight: factor of the penalty in the loss.
        adversarial: pgd trains on adversarial examples in place of the samples.
        eps: their L-inf radius in pixels of [0, 1], as text (2/255).
        steps: their number of PGD steps.
        seed: of everything random.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    epochs: int = Field(40, ge=1)
    batch_size: int = Field(512, ge=1)
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: float = Field(0.01, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: float = Field(1e-4, ge=0)
    schedule: Literal["cosine", "onecycle"] = "cosine"
    flip: bool = True
    shift: int = Field(0, ge=0)
    mixup: float = Field(0.8, ge=0)
    cutmix: float = Field(1.0, ge=0)
    penalty: Literal["jasmin", "specformer"] | None = None
    k: int = Field(0, ge=0)
    reduction: Literal["max", "mean"] = "mean"
    weight: float = Field(1e-2, ge=0)
    adversarial: Literal["pgd"] | None = None
    eps: str = "2/255"
    steps: int = Field(5, ge=1)
    seed: int = 0

    @field_validator("k")
    @classmethod
    def _not_one(cls, k: int) -> int:
        if k == 1:
            raise ValueError("g_1/g_1 is 1 whatever the attention: use 0 or more than 1")
        return k

    @field_validator("eps")
    @classmethod
    def _radius(cls, eps: str) -> str:
        return parse_radius(eps).text
