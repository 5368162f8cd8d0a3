"""Kinds of attacks: a table of ours, and those of plug-ins. Nothing here needs torch."""

from __future__ import annotations

import functools
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lipaudit.errors import UsageError
from lipaudit.tables.plugins import entries
from lipaudit.tables.trials import COUNTED, SPACES, WORST, Norm

GROUP = "lipaudit.attacks"
"""Entry point group of attacks that other packages add."""


@dataclass(frozen=True)
class AttackKind:
    """A kind of attack: its function, and the models and balls it suits.

    Its function is called as `function(f, x, y, ball, turn)` and returns x_adv, in the shape of x:

    - f: x -> logits (batch, classes); differentiable in x (see `oracle.logits_and_gradient`); its
    passes are counted. It evaluates exactly the given samples, in their order.
    - x, y: samples (batch, ...) that are still classified correctly, and their int64 labels.
    - ball: a `balls.Ball`: the norm, radius, box and mask that x_adv must respect.
    - turn: an `oracle.Turn`: the settings (`turn.attack.steps`, ...), a seeded generator, a random
    start, and for targeted attacks the target class of each row.

    The result is checked to be inside the ball, and judged by a fresh evaluation of f.

    An attack that changes words or characters is called as `function(oracle, drafts, y, budget,
    turn)` and returns the changed drafts. It gets a `text.TextOracle` in place of f, `text.Draft`s
    in place of x, and the number of changes in place of the ball. The result is checked against
    that number, and judged by a fresh evaluation, too.

    Attributes:
        function: `module:function`; imported when the attack first runs.
        norms: norms of the balls that it supports.
        masked: whether it respects masked positions, and supports a model that needs to know the
            samples (text).
        targeted: whether it aims at one class after the other, perhaps several in one batch.
        effort: cost of a turn: one gradient, in which case restarts add nothing; `steps`
            gradients; `queries` forward passes; or, for every change of a text (`edits`), a
            gradient and `queries` forward passes, in which case restarts add nothing.
        steps: default iterations; None: those of `Attack`.
        queries: default forward passes; None: those of `Attack`.
        radii: default radii; empty: a radius must be given.
        single: whether it computes in float32 even if the samples are float64.
    """

    function: str
    norms: tuple[Norm, ...] = ("linf", "l2", "token-l2")
    masked: bool = True
    targeted: bool = False
    effort: Literal["gradient", "steps", "queries", "edits"] = "steps"
    steps: int | None = None
    queries: int | None = None
    radii: tuple[str, ...] = ()
    single: bool = False

    @property
    def counts(self) -> Norm | None:
        """Return the unit of changes of a text; None for attacks on balls."""
        return next((norm for norm in self.norms if norm in COUNTED), None)

    def can_attack(self, kind: str) -> bool:
        """Say whether it can attack a kind of model: image, tokens or text."""
        able = self.masked or kind != "text"
        return able and any(kind in SPACES[norm] for norm in self.norms)

    @property
    def package(self) -> str:
        """Return the name of the package of its function."""
        return self.function.partition(":")[0].partition(".")[0]

    def load(self) -> Callable[..., Any]:
        """Import the function.

        Raises:
            UsageError: the function does not exist, or its module cannot be imported.
        """
        try:
            function: Callable[..., Any] = pkgutil.resolve_name(self.function)
        except Exception as error:
            raise UsageError(
                f"the attack {self.function} cannot be loaded: {type(error).__name__}: {error}",
                f"Update {self.package}, or leave the attack out.",
            ) from error
        return function


def _auto(function: str, **how: Any) -> AttackKind:
    """Return the kind of an attack of AutoAttack, which supports no tokens and no masks."""
    return AttackKind(f"lipaudit.attacks.{function}", norms=("linf", "l2"), masked=False, **how)


def _rewriter(name: Norm) -> AttackKind:
    """Return the kind of an attack of ours that changes texts."""
    return AttackKind(
        f"lipaudit.attacks.text:rewrite_{name}",
        norms=(name,),
        effort="edits",
        queries=100,
        radii=("1", "2", "4"),
    )


ATTACKS: dict[str, AttackKind] = {
    "fgsm": AttackKind("lipaudit.attacks.steps:fgsm_turn", effort="gradient"),
    "pgd": AttackKind("lipaudit.attacks.steps:pgd_turn", steps=40),
    "apgd-ce": _auto("autoattack:apgd"),
    "apgd-dlr": _auto("autoattack:apgd"),
    "apgd-t": _auto("autoattack:apgd", targeted=True),
    "fab-t": _auto("autoattack:fab", targeted=True, single=True),
    "square": _auto("autoattack:square", effort="queries"),
    "words": _rewriter("words"),
    "characters": _rewriter("characters"),
}
"""lipaudit's own attacks, by the name that --attack takes."""

RESERVED = frozenset({"autoattack", "clean", "custom", "paper", "quick", "standard", WORST})
"""Words of --attack that are not names of attacks, so plug-ins cannot use them."""


@functools.cache
def attack_kinds() -> Mapping[str, AttackKind]:
    """Return every attack by its name: ours, then those of installed packages.

    Raises:
        UsageError: a plug-in cannot be loaded, or its name is already in use.
    """
    plugins = entries(GROUP, AttackKind, taken=ATTACKS.keys() | RESERVED)
    for name, kind in plugins.items():
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise UsageError(
                f"the plug-in {name!r} ({GROUP}) of {kind.package} has an invalid name: only "
                "letters, digits, dots and dashes are allowed in --attack",
                f"Update {kind.package}, or uninstall it.",
            )
    return ATTACKS | plugins
