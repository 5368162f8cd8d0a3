"""What to run: radii, attacks with their settings, and the presets. Nothing here needs torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from lipaudit.attacks.kinds import AttackKind, attack_kinds
from lipaudit.errors import UsageError, suggestion
from lipaudit.results import Note
from lipaudit.results.trials import COUNTED, Norm, Radius, TrialKey, parse_radius

CHUNK: Final = 64
"""Samples that share a random stream: a constant of the method, recorded with every result."""


@dataclass(frozen=True)
class Attack:
    """One attack and how hard it tries.

    Attributes:
        name: its name in `attack_kinds`.
        steps: iterations per start.
        restarts: starts per sample, or per sample and target.
        targets: how many other classes are aimed at, the likeliest first.
        queries: forward passes per sample and start.
        hope: a sample is given up where not even so many times the progress of its last stretch,
            step for step, would break it by the end; infinite: never.
    """

    name: str
    steps: int = 100
    restarts: int = 1
    targets: int = 9
    queries: int = 5000
    hope: float = math.inf

    @property
    def kind(self) -> AttackKind:
        """Where it is and what it can work on."""
        return attack_kinds()[self.name]

    @property
    def turns(self) -> int:
        """How often it runs on a sample that survives every time."""
        if self.kind.effort in ("gradient", "edits"):
            return 1
        return self.restarts * (self.targets if self.kind.targeted else 1)

    def passes(self, radius: Radius) -> tuple[int, int]:
        """Forward passes without and with a gradient, on a sample that survives every time."""
        changes = int(radius.value)
        each = {
            "gradient": (0, 1),
            "steps": (0, self.steps),
            "queries": (self.queries, 0),
            "edits": (self.queries * changes, changes),
        }
        plain, gradients = each[self.kind.effort]
        return plain * self.turns, gradients * self.turns


STANDARD = (Attack("apgd-ce"), Attack("apgd-t"), Attack("fab-t"), Attack("square"))
LEAN = tuple(replace(attack, hope=4.0) for attack in STANDARD)
QUICK = (Attack("apgd-ce", steps=20), Attack("apgd-t", steps=20, targets=3))


@dataclass(frozen=True)
class Trial:
    """Attacks run one after the other in one ball, each on the samples that still stand.

    Attributes:
        label: what the result is called.
        norm: linf, l2, token-l2 (the largest l2 norm of a token's perturbation), words or
            characters.
        radius: eps, in units of the attacked space; for words and characters how many.
        attacks: in the order in which they run.
        notes: what a reader must know of the choice of settings.
    """

    label: str
    norm: Norm
    radius: Radius
    attacks: tuple[Attack, ...]
    notes: tuple[Note, ...] = ()

    @property
    def key(self) -> TrialKey:
        """What the result is known by in a report."""
        return TrialKey(self.label, self.norm, self.radius)


def make_plan(
    spec: str,
    *,
    norm: Norm = "linf",
    radii: Sequence[Radius] = (),
    steps: int | None = None,
    restarts: int | None = None,
    queries: int | None = None,
) -> tuple[Trial, ...]:
    """Turn a preset's name, or `custom:apgd-ce,square`, into trials: one per radius.

    Args:
        spec: paper, standard, quick, or `custom:` and names of attacks.
        norm: the norm of the ball.
        radii: one or more radii; the preset `paper` brings its own.
        steps: iterations in place of the preset's.
        restarts: starts in place of the preset's.
        queries: largest number of queries of Square in place of the preset's.

    Raises:
        UsageError: an unknown preset or attack, no radius, or a radius that `paper` fixes.
    """
    given = {"steps": steps, "restarts": restarts, "queries": queries}
    changes = {name: value for name, value in given.items() if value is not None}
    for name, value in changes.items():
        if value < 1:
            raise UsageError(f"{name} is {value}", "it must be at least 1")
    trials = _builder(spec)(norm, radii)
    return tuple(_changed(trial, changes, spec) for trial in trials) if changes else trials


def _builder(spec: str) -> Callable[[Norm, Sequence[Radius]], tuple[Trial, ...]]:
    if spec.startswith("custom:"):
        return lambda norm, radii: _ensemble("custom", named(spec), norm, radii)
    if spec not in PRESETS:
        known = ("autoattack", *PRESETS, *attack_kinds())
        raise UsageError(f"unknown attack preset {spec!r}", suggestion(spec, known))
    return PRESETS[spec]


def named(spec: str) -> tuple[Attack, ...]:
    """Return the attacks that `custom:NAME,NAME` names."""
    names = [name.strip() for name in spec.removeprefix("custom:").split(",")]
    for name in names:
        if name not in attack_kinds():
            advice = suggestion(name, attack_kinds())
            raise UsageError(f"unknown attack {name!r} in {spec!r}", advice)
    return tuple(Attack(name) for name in names)


def _changed(trial: Trial, changes: dict[str, int], spec: str) -> Trial:
    """Apply settings of the user's own; a fixed preset then says it is no longer itself."""
    attacks = tuple(
        replace(
            attack,
            steps=changes.get("steps", attack.steps),
            restarts=changes.get("restarts", attack.restarts),
            queries=changes.get("queries", attack.queries),
        )
        for attack in trial.attacks
    )
    if spec.startswith("custom:"):
        return replace(trial, attacks=attacks)
    settings = ", ".join(f"{name} = {value}" for name, value in changes.items())
    note = _info("preset-changed", f"the preset {spec} was changed: {settings}")
    return replace(trial, attacks=attacks, notes=(*trial.notes, note))


def _ensemble(
    label: str,
    attacks: tuple[Attack, ...],
    norm: Norm,
    radii: Sequence[Radius],
    notes: tuple[Note, ...] = (),
) -> tuple[Trial, ...]:
    if not radii:
        raise UsageError("no radius was given", "add one, as in --eps 2/255")
    uneven = next((r.text for r in radii if norm in COUNTED and r.value.denominator != 1), None)
    if uneven is not None:
        raise UsageError(
            f"the radius {uneven} is no number of {norm}",
            f"count them: --attack {norm} --eps 1,2; balls of embeddings are for --attack pgd",
        )
    return tuple(Trial(label, norm, radius, attacks, notes) for radius in radii)


def _paper(norm: Norm, radii: Sequence[Radius]) -> tuple[Trial, ...]:
    """Build the attacks of Yudin et al. (arXiv 2507.07814), as far as the paper describes them."""
    if radii or norm != "linf":
        raise UsageError(
            "the preset paper fixes its norm (linf) and its radii (2/255 and 4/255)",
            "leave out --eps and --norm, or use another preset",
        )
    two, four = parse_radius("2/255"), parse_radius("4/255")
    fgsm, pgd = (Attack("fgsm"),), (Attack("pgd", steps=4),)
    auto = tuple(replace(attack, steps=10) for attack in STANDARD)
    return (
        Trial("fgsm", "linf", two, fgsm),
        Trial("fgsm", "linf", four, fgsm),
        Trial("pgd", "linf", two, pgd, (_OWN_STEP,)),
        Trial("pgd", "linf", four, pgd, (_OWN_STEP,)),
        Trial("autoattack", "linf", two, auto, (_OWN_QUERIES,)),
    )


def _info(code: str, text: str) -> Note:
    return Note(level="info", code=code, text=text)


_OWN_STEP = _info(
    "own-step-size",
    "PGD: the paper states 4 steps but no step size and no start; ours are 2.5 eps / steps from a "
    "random point, and the iterate closest to success counts",
)
_GIVES_UP = _info(
    "gives-up",
    "lean is AutoAttack that gives a sample up, within an attack, where its progress promises "
    "that the rest of the steps will not break it: no proof; --attack standard takes all steps",
)
_OWN_QUERIES = _info(
    "own-queries",
    "AutoAttack: the paper states 10 iterations; 9 targets and 5000 queries of Square are ours",
)

PRESETS: dict[str, Callable[[Norm, Sequence[Radius]], tuple[Trial, ...]]] = {
    "paper": _paper,
    "standard": lambda norm, radii: _ensemble("standard", STANDARD, norm, radii),
    "lean": lambda norm, radii: _ensemble("lean", LEAN, norm, radii, (_GIVES_UP,)),
    "quick": lambda norm, radii: _ensemble("quick", QUICK, norm, radii),
}


def adapt(attack: Attack, classes: int) -> tuple[Attack, tuple[Note, ...]]:
    """Fit an attack to a number of classes >= 2, and say what was changed.

    The targeted DLR loss needs four classes and the untargeted one three; with two, the
    cross-entropy already moves along the only logit difference there is, so nothing is left to
    run: an attack without restarts.
    """
    if attack.name in ("apgd-t", "apgd-dlr") and classes == 2:
        text = f"{attack.name} did not run: the DLR loss needs 3 classes, the model has 2"
        return replace(attack, restarts=0), (_info("attack-skipped", text),)
    if attack.name == "apgd-t" and classes == 3:
        text = "apgd-t ran with the untargeted DLR loss: the model has 3 classes, it needs 4"
        return replace(attack, name="apgd-dlr"), (_info("attack-replaced", text),)
    if attack.kind.targeted and attack.targets > classes - 1:
        text = f"{attack.name} aims at {classes - 1} classes, not {attack.targets}: all there are"
        return replace(attack, targets=classes - 1), (_info("fewer-targets", text),)
    return attack, ()
