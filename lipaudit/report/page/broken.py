"""Samples that were both measured and attacked: which of them the attack broke."""

from __future__ import annotations

from dataclasses import dataclass

from lipaudit.report.page.correlation import Correlation, spearman
from lipaudit.results import Report, Section
from lipaudit.results.figures import finite
from lipaudit.results.trials import WORST, TrialKey, parse_column

FEATURES = {"norm": "‖J‖", "radius_first_order": "first-order radius"}
"""Figures of a sample that may tell what attacks break, and what they are called."""


@dataclass(frozen=True)
class Breakage:
    """One attack on the samples that the model classifies rightly.

    Attributes:
        trial: the attack and its ball.
        broken: whether the attack broke a sample, by sample id; every one has a finite norm.
        features: finite per-sample figures of the jacobian section, by name and sample id.
    """

    trial: TrialKey
    broken: dict[str, bool]
    features: dict[str, dict[str, float]]

    @property
    def column(self) -> str:
        """Name the per-sample column of the attack section."""
        return self.trial.column("robust")

    @property
    def attack(self) -> str:
        """Name the attack: `pgd at linf 2/255`."""
        attack = "the worst attack" if self.trial.attack == WORST else self.trial.attack
        return f"{attack} at {self.trial.ball}"

    def correlation(self, feature: str) -> Correlation | None:
        """Correlate a figure with being broken, None where too few samples have it."""
        known = [name for name in self.broken if name in self.features[feature]]
        values = [self.features[feature][name] for name in known]
        return spearman(values, [float(self.broken[name]) for name in known])


def breakage(report: Report) -> Breakage | None:
    """Return what was broken by the attack that splits the samples most evenly.

    The worst case over all attacks is taken where it was recorded. None without per-sample
    columns of both sections, and where every attack breaks all samples or none.
    """
    attack, jacobian = report.section("attack"), report.section("jacobian")
    if attack is None or jacobian is None:
        return None
    features = {name: _finite_column(jacobian, name) for name in FEATURES}
    columns = ((name, *parse_column(name)) for name in attack.samples)
    trials = {t: name for name, kind, t in columns if t and kind == "robust"}
    worst = [trial for trial in trials if trial.attack == WORST] or list(trials)
    attacked = [Breakage(t, _broken(attack, trials[t], features["norm"]), features) for t in worst]
    split = [a for a in attacked if len(set(a.broken.values())) == 2]
    return min(split, key=_imbalance, default=None)


def _imbalance(attacked: Breakage) -> float:
    return abs(sum(attacked.broken.values()) / len(attacked.broken) - 0.5)


def _finite_column(section: Section, name: str) -> dict[str, float]:
    values = zip(section.ids, section.samples.get(name, ()), strict=False)
    return {key: float(value) for key, value in values if finite([value])}  # type: ignore[arg-type]


def _broken(attack: Section, column: str, measured: dict[str, float]) -> dict[str, bool]:
    correct = attack.samples.get("correct", (1,) * len(attack.ids))
    rows = zip(attack.ids, correct, attack.samples[column], strict=True)
    return {i: not ok for i, right, ok in rows if right and ok is not None and i in measured}
