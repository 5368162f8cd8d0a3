"""How a model is fine-tuned."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from lipaudit.settings.option import Settings, needs, option
from lipaudit.settings.parsing import OneRadius

PENALTY, ADVERSARIAL = "Penalty", "Adversarial training"
DESCENT, IMAGES = "Optimization", "Augmentation of images"
JASMIN, ATTACKED = needs("penalty", "jasmin"), needs("adversarial", "pgd")


class Recipe(Settings):
    """Everything that decides the outcome of a training run, besides model and data.

    The defaults are those of Yudin et al., arXiv 2507.07814 (SGD with momentum 0.9, weight decay
    1e-4, cosine schedule, 40 epochs, batches of 512, flips, CutMix, MixUp); what the paper does
    not give is ours: `lr`, `mixup`, `cutmix`, `steps`.

    Attributes:
        batch_size: samples per step.
        seed: of everything random.
    """

    penalty: Literal["jasmin", "specformer"] | None = option(
        None, "jasmin or specformer; none if not given.", panel=PENALTY
    )
    k: int = option(0, "Of JaSMin: 0, or more than 1.", panel=PENALTY, need=JASMIN, ge=0)
    weight: float = option(
        1e-2, "Factor of the penalty in the loss.", panel=PENALTY, need=needs("penalty"), ge=0
    )
    reduction: Literal["max", "mean"] = option(
        "mean", "Of JaSMin over rows: mean or max.", panel=PENALTY, need=JASMIN
    )
    adversarial: Literal["pgd"] | None = option(
        None, "pgd: train on adversarial examples.", panel=ADVERSARIAL
    )
    eps: OneRadius = option(
        "2/255",
        "L-inf radius of the examples, in pixels of [0, 1].",
        panel=ADVERSARIAL,
        need=ATTACKED,
    )
    steps: int = option(5, "Their PGD steps.", panel=ADVERSARIAL, need=ATTACKED, ge=1)
    epochs: int = option(40, "Passes over the data.", panel=DESCENT, ge=1)
    batch_size: int = 512
    optimizer: Literal["sgd", "adamw"] = option("sgd", "sgd or adamw.", panel=DESCENT)
    lr: float = option(0.01, "Highest learning rate.", panel=DESCENT, gt=0)
    momentum: float = option(
        0.9, "Of sgd.", panel=DESCENT, need=needs("optimizer", "sgd"), ge=0, lt=1
    )
    weight_decay: float = option(1e-4, "Of the optimizer.", panel=DESCENT, ge=0)
    clip: float = option(0.0, "Cut gradients to this norm; 0 for none.", panel=DESCENT, ge=0)
    schedule: Literal["cosine", "onecycle"] = option(
        "cosine", "cosine (to 0) or onecycle (up to lr, then down).", panel=DESCENT
    )
    flip: bool = option(True, "Mirror each image at random.", panel=IMAGES)
    shift: int = option(0, "Move each image by up to so many pixels.", panel=IMAGES, ge=0)
    mixup: float = option(0.8, "Alpha of MixUp, 0 for none.", panel=IMAGES, ge=0)
    cutmix: float = option(1.0, "Alpha of CutMix, 0 for none.", panel=IMAGES, ge=0)
    seed: int = 0

    @field_validator("k")
    @classmethod
    def _not_one(cls, k: int) -> int:
        if k == 1:
            raise ValueError("g_1/g_1 is 1 whatever the attention: use 0 or more than 1")
        return k
