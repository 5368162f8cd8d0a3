"""The measures of an audit, their order and their numbers of samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import field_validator, model_validator

from lipaudit.errors import UsageError, suggestion
from lipaudit.measures.attack import AttackOptions
from lipaudit.measures.attention import AttentionOptions
from lipaudit.measures.bounds import BoundsOptions
from lipaudit.measures.certify import BallNorm, CertifyOptions
from lipaudit.measures.jacobian import JacobianOptions
from lipaudit.measures.measure import MeasureOptions
from lipaudit.measures.registry import load_measures
from lipaudit.settings.option import Need, Settings, option
from lipaudit.settings.parsing import Names
from lipaudit.theory.policy import NODES

QUICK_SAMPLES = {"attention": 16, "bounds": 8, "jacobian": 64, "attack": 64, "certify": 4}
FULL_SAMPLES = {"attention": 128, "bounds": 32, "jacobian": 256, "attack": 512, "certify": 32}
DEMO_EPS, EPS = "0.1", "2/255"
USUAL = ("bounds", "attention", "jacobian", "attack")
OF_ATTACK = ("eps", "attack", "norm")
"""Options of attack that an audit also takes."""
SECONDS = 20.0
"""Seconds per sample for certificates in an audit; a started ball is finished."""


def _of_attack(name: str, default: str = "") -> Any:
    """Return an option of the attacks as an option of the audit."""
    known = AttackOptions.options()[name]
    attacked = Need(
        "a measure attack or certify",
        lambda options: not {"attack", "certify"}.isdisjoint(options.names),
    )
    return option(None, known.help + default, *known.flags, need=attacked)


class AuditOptions(Settings):
    """What an audit measures, and where its report goes."""

    quick: bool = option(False, "Fewer samples, quick attacks.")
    full: bool = option(
        False,
        "More samples, all of AutoAttack.",
        need=Need("a run without --quick", lambda options: not options.quick),
    )
    only: Names = option(None, f"Measures to run; default: {', '.join(USUAL)}.")
    skip: Names = option(None, "Measures to leave out.")
    certify: bool = option(
        False, f"Also compute certificates, at the radii --eps: up to {SECONDS:g} s a sample."
    )
    eps: str | None = _of_attack("eps", f" Default: {EPS}, of a demo {DEMO_EPS}.")
    attack: str | None = _of_attack("attack")
    norm: str | None = _of_attack("norm")
    run_dir: Path | None = option(None, "Folder for the reports.")

    @field_validator("only", "skip")
    @classmethod
    def _known(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for name in names or ():
            if name not in load_measures():
                raise UsageError(
                    f"there is no measure {name!r}", suggestion(name, load_measures())
                )
        return names

    @model_validator(mode="after")
    def _some(self) -> AuditOptions:
        surplus = [name for name in self.skip or () if name not in (self.only or USUAL)]
        if surplus:
            raise UsageError(f"--skip {surplus[0]}: an audit does not run it by default")
        if not self.names:
            raise UsageError("no measure is left to run", "Choose a measure with --only.")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Return the requested measures, in order."""
        wanted = {*(USUAL if self.only is None else self.only)}
        wanted |= {"certify"} if self.certify else set()
        return tuple(name for name in load_measures() if name in wanted - {*(self.skip or ())})

    @property
    def required(self) -> frozenset[str]:
        """Return the measures that the user named: it is an error if one cannot run."""
        attacked = any(getattr(self, name) for name in OF_ATTACK)
        return frozenset((*(self.only or ()), *["attack"] * attacked))

    def plan(self, *, demo: bool) -> dict[str, MeasureOptions]:
        """Return the options of every measure.

        Raises:
            UsageError: for a bad radius, attack or norm.
        """
        given = {name: value for name in OF_ATTACK if (value := getattr(self, name)) is not None}
        usual = audit_options(given, demo=demo, quick=self.small(demo=demo))
        others = (name for name in self.names if name not in usual)
        usual |= {name: load_measures()[name].options() for name in others}
        return {name: usual[name] for name in self.names}

    def small(self, *, demo: bool) -> bool:
        """Say whether the audit is quick, which is the default on a demo."""
        return self.quick or (demo and not self.full)

    def counts(self, *, demo: bool) -> Mapping[str, int]:
        """Return the number of samples of each measure that does not use its default."""
        return QUICK_SAMPLES if self.small(demo=demo) else FULL_SAMPLES if self.full else {}


def audit_options(
    attack: Mapping[str, Any] | None = None, *, demo: bool, quick: bool
) -> dict[str, MeasureOptions]:
    """Return the options of what an audit usually measures, in this order, and of certificates.

    Args:
        attack: options of the attacks in place of the usual: radii are 0.1 for a demo, 2/255 for
            other models of images, and for text what its attacks usually take. Certificates are
            of the balls among them.
        demo: whether the model is a demo.
        quick: the quick preset of AutoAttack in place of all of it.

    Raises:
        UsageError: for a bad radius, attack or norm.
    """
    names = "fgsm,pgd,quick" if quick else "fgsm,pgd,autoattack"
    usual = {"usual": names, "usual_eps": DEMO_EPS if demo else EPS}
    attacks = AttackOptions.checked(dict(attack or {}) | usual)
    return {
        "bounds": BoundsOptions(),
        "attention": AttentionOptions(),
        "jacobian": JacobianOptions(),
        "attack": attacks,
        # Of the attacked balls.
        "certify": CertifyOptions(
            eps=tuple(radius for radius in attacks.eps if radius.value and not radius.unit),
            usual_eps=attacks.usual_eps,
            norm=attacks.norm if attacks.norm in get_args(BallNorm) else None,
            seconds=SECONDS,
            nodes=NODES,
        ),
    }
