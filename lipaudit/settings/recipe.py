"""How a model is fine-tuned."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from lipaudit.settings.option import Settings, needs, option
from lipaudit.settings.parsing import OneRadius

PENALTY, ADVERSARIAL = "Penalty", "Adversarial training"
DESCENT, IMAGES = "Optimization", "Image augmentation"
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
        None, "Penalty added to the loss: jasmin or specformer. Default: none.", panel=PENALTY
    )
    k: int = option(
        0,
        "JaSMin lowers log g1 with 0, and log(g1 / gk) with k > 1.",
        panel=PENALTY,
        need=JASMIN,
        ge=0,
    )
    weight: float = option(
        1e-2, "Weight of the penalty in the loss.", panel=PENALTY, need=needs("penalty"), ge=0
    )
    reduction: Literal["max", "mean"] = option(
        "mean", "How JaSMin reduces over attention rows: mean or max.", panel=PENALTY, need=JASMIN
    )
    adversarial: Literal["pgd"] | None = option(
        None, "pgd: train on adversarial examples made with PGD.", panel=ADVERSARIAL
    )
    eps: OneRadius = option(
        "2/255",
        "L-inf radius of --adversarial (pixels in [0, 1]).",
        panel=ADVERSARIAL,
        need=ATTACKED,
    )
    steps: int = option(
        5, "PGD steps for each adversarial example.", panel=ADVERSARIAL, need=ATTACKED, ge=1
    )
    epochs: int = option(40, "Number of passes over the data.", panel=DESCENT, ge=1)
    batch_size: int = 512
    optimizer: Literal["sgd", "adamw"] = option("sgd", "Optimizer: sgd or adamw.", panel=DESCENT)
    lr: float = option(0.01, "Largest learning rate.", panel=DESCENT, gt=0)
    momentum: float = option(
        0.9, "Of sgd.", panel=DESCENT, need=needs("optimizer", "sgd"), ge=0, lt=1
    )
    weight_decay: float = option(1e-4, "Weight decay of the optimizer.", panel=DESCENT, ge=0)
    clip: float = option(0.0, "Clip gradients to this norm; 0: no clipping.", panel=DESCENT, ge=0)
    schedule: Literal["cosine", "onecycle"] = option(
        "cosine",
        "Learning rate schedule: cosine (down to 0) or onecycle (up to --lr, then down).",
        panel=DESCENT,
    )
    flip: bool = option(True, "Mirror each image at random.", panel=IMAGES)
    shift: int = option(0, "Shift each image by up to this many pixels.", panel=IMAGES, ge=0)
    mixup: float = option(0.8, "Alpha of MixUp; 0: no MixUp.", panel=IMAGES, ge=0)
    cutmix: float = option(1.0, "Alpha of CutMix; 0: no CutMix.", panel=IMAGES, ge=0)
    seed: int = 0

    @field_validator("k")
    @classmethod
    def _not_one(cls, k: int) -> int:
        if k == 1:
            raise ValueError("g_1/g_1 is 1 whatever the attention: use 0 or more than 1")
        return k
