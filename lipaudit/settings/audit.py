"""What an audit measures, in which order and on how many samples."""

from __future__ import annotations

from typing import Any

from lipaudit.settings.attack import AttackOptions
from lipaudit.settings.attention import AttentionOptions
from lipaudit.settings.bounds import BoundsOptions
from lipaudit.settings.jacobian import JacobianOptions
from lipaudit.settings.measure import MeasureOptions

QUICK_SAMPLES = {"attention": 16, "bounds": 8, "jacobian": 64, "attack": 64}
FULL_SAMPLES = {"attention": 128, "bounds": 32, "jacobian": 256, "attack": 512}
DEMO_EPS, EPS = "0.1", "2/255"


def audit_options(eps: Any = None, *, demo: bool, quick: bool) -> dict[str, MeasureOptions]:
    """Return what an audit measures, in this order.

    Args:
        eps: radii of the attacks; None is 0.1 for a demo, 2/255 for other models of images, and
            for text what its attacks usually take.
        demo: whether the model is a demo.
        quick: the quick preset of AutoAttack in place of all of it.

    Raises:
        UsageError: for a bad radius.
    """
    attack = "fgsm,pgd,quick" if quick else "fgsm,pgd,autoattack"
    given = {} if eps is None else {"eps": eps}
    usual = {"usual": attack, "usual_eps": DEMO_EPS if demo else EPS}
    return {
        "bounds": BoundsOptions(),
        "attention": AttentionOptions(),
        "jacobian": JacobianOptions(),
        "attack": AttackOptions.checked(given | usual),
    }
