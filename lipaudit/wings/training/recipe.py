"""The options of a training."""

from __future__ import annotations

from functools import partial
from typing import Literal

from pydantic import field_validator

from lipaudit.settings.option import Need, Settings, needs, option
from lipaudit.settings.value_types import OneRadius

PENALTY = "Penalty"
ADVERSARIAL = "Adversarial training"
DESCENT = "Optimization"
IMAGES = "Image augmentation"
jasmin_option = partial(option, panel=PENALTY, need=needs("penalty", "jasmin"))
attack_option = partial(option, panel=ADVERSARIAL, need=needs("adversarial", "pgd"))
descent_option = partial(option, panel=DESCENT)
picture_option = partial(option, panel=IMAGES)


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
    k: int = jasmin_option(0, "JaSMin lowers log g1 with 0, and log(g1 / gk) with k > 1.", ge=0)
    weight: float = option(
        1e-2, "Weight of the penalty in the loss.", panel=PENALTY, need=needs("penalty"), ge=0
    )
    reduction: Literal["max", "mean"] = jasmin_option(
        "mean",
        "How JaSMin reduces over attention rows: mean or max.",
        rare=True,
    )
    adversarial: Literal["pgd"] | None = option(
        None, "pgd: train on adversarial examples made with PGD.", panel=ADVERSARIAL
    )
    eps: OneRadius = attack_option("2/255", "L-inf radius of --adversarial (pixels in [0, 1]).")
    steps: int = attack_option(5, "PGD steps for each adversarial example.", ge=1, rare=True)
    epochs: int = descent_option(40, "Number of passes over the data.", ge=1)
    batch_size: int = 512
    optimizer: Literal["sgd", "adamw"] = descent_option(
        "sgd", "Optimizer: sgd or adamw.", rare=True
    )
    lr: float = descent_option(0.01, "Largest learning rate.", gt=0)
    momentum: float = descent_option(
        0.9, "Of sgd.", need=needs("optimizer", "sgd"), ge=0, lt=1, rare=True
    )
    weight_decay: float = descent_option(1e-4, "Weight decay of the optimizer.", ge=0, rare=True)
    clip: float = descent_option(
        0.0, "Clip gradients to this norm; 0: no clipping.", ge=0, rare=True
    )
    schedule: Literal["cosine", "onecycle"] = descent_option(
        "cosine",
        "Learning rate schedule: cosine (down to 0) or onecycle (up to --lr, then down).",
        rare=True,
    )
    flip: bool = picture_option(True, "Mirror each image at random.", rare=True)
    shift: int = picture_option(0, "Shift each image by up to this many pixels.", ge=0, rare=True)
    mixup: float = picture_option(0.8, "Alpha of MixUp; 0: no MixUp.", ge=0, rare=True)
    cutmix: float = picture_option(1.0, "Alpha of CutMix; 0: no CutMix.", ge=0, rare=True)
    noise: float = picture_option(
        0.0,
        "Standard deviation of Gaussian noise on the input.",
        need=Need("a training without --adversarial", lambda recipe: not recipe.adversarial),
        ge=0,
        allow_inf_nan=False,
    )
    seed: int = 0

    # With k = 1 the penalty is log(g1 / g1), a constant.
    @field_validator("k")
    @classmethod
    def _not_one(cls, k: int) -> int:
        if k == 1:
            raise ValueError("g_1/g_1 is 1 whatever the attention: use 0 or more than 1")
        return k
