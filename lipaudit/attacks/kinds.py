"""Kinds of attacks, ours and those of plug-ins, and the trials that `--attack` asks for.

Nothing here needs torch.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final, Literal

from lipaudit.errors import UsageError, suggestion
from lipaudit.tables import Note, Notes
from lipaudit.tables.plugins import collect, load_object
from lipaudit.tables.trials import (
    COUNTED,
    SPACES,
    WHOLE,
    WORST,
    Norm,
    Radius,
    TrialKey,
    list_units,
    parse_radius,
)

# Number of samples that share one random stream: part of every result, so it is no option.
CHUNK: Final = 64


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
        effort: what one run on a sample costs. Only attacks of `steps` and `queries` have
            restarts.
            gradient: one gradient.
            steps: `steps` gradients.
            queries: `queries` forward passes.
            edits: for every change of a text, a gradient and `queries` forward passes.
            points: a forward pass for every example of `--transfer`.
            swaps: `steps` times a gradient and `queries` forward passes.
        steps: default iterations; None: those of `Attack`.
        queries: default forward passes; None: those of `Attack`.
        restarts: default starts; None: those of `Attack`.
        radii: default radii; empty: a radius must be given.
        single: whether it computes in float32 even if the samples are float64.
    """

    function: str
    norms: tuple[Norm, ...] = ("linf", "l2", "token-l2")
    masked: bool = True
    targeted: bool = False
    effort: Literal["gradient", "steps", "queries", "edits", "points", "swaps"] = "steps"
    steps: int | None = None
    queries: int | None = None
    restarts: int | None = None
    radii: tuple[str, ...] = ()
    single: bool = False

    @property
    def counts(self) -> Norm | None:
        """Return the unit in which the attack counts changes; None for attacks on balls."""
        return next((norm for norm in self.norms if norm in WHOLE), None)

    def can_attack(self, kind: str) -> bool:
        """Say whether the attack suits a kind of model: image, tokens or text."""
        if kind == "text" and not self.masked:  # texts have padding, which must not change
            return False
        # SPACES has the kinds of model to which a norm applies.
        return any(kind in SPACES[norm] for norm in self.norms)

    @property
    def package(self) -> str:
        """Return the name of the package of its function."""
        return self.function.partition(":")[0].partition(".")[0]

    def load(self) -> Callable[..., Any]:
        """Import the function that runs the attack, and return it.

        Raises:
            UsageError: the function does not exist, or its module cannot be imported.
        """
        function: Callable[..., Any] = load_object(self.function)
        return function


_ball = functools.partial(AttackKind, norms=("linf", "l2", "l1", "token-l2"))
# AutoAttack searches images as a whole: no norms of tokens, no positions that must not change.
_auto = functools.partial(AttackKind, norms=("linf", "l2", "l1"), masked=False)
# Number of single changes of a text that a step tries by default. A text of 12 words has no more.
# On texts of 60 words and a model without gradients, 600 break nine tenths of what all 3,000 do.
SINGLE_CHANGES = 600
_rewrite = functools.partial(
    AttackKind, effort="edits", queries=SINGLE_CHANGES, radii=("1", "2", "4")
)
# Suffixes: steps of a search, and suffixes that each step tries.
_suffix = functools.partial(
    AttackKind, norms=("suffix",), effort="swaps", steps=20, queries=128, radii=("1", "3", "5")
)
# lipaudit's own attacks, by the name that --attack takes.
ATTACKS: dict[str, AttackKind] = {
    "fgsm": _ball("lipaudit.attacks.oracle:fgsm", effort="gradient"),
    "pgd": _ball("lipaudit.attacks.oracle:pgd_turn", steps=40),
    "apgd-ce": _auto("lipaudit.attacks.autoattack:apgd"),
    "apgd-dlr": _auto("lipaudit.attacks.autoattack:apgd"),
    "apgd-t": _auto("lipaudit.attacks.autoattack:apgd", targeted=True),
    "fab-t": _auto("lipaudit.attacks.autoattack:fab", targeted=True, single=True),
    "square": _auto("lipaudit.attacks.autoattack:square", effort="queries"),
    "patch": AttackKind(
        "lipaudit.attacks.oracle:fill_patches",
        norms=("patch",),
        masked=False,
        steps=20,
        restarts=64,
        radii=("1", "2"),
    ),
    "transfer": _ball("lipaudit.attacks.transfer:try_examples", masked=False, effort="points"),
    "words": _rewrite("lipaudit.attacks.rewriting:rewrite_words", norms=("words",)),
    "characters": _rewrite("lipaudit.attacks.rewriting:rewrite_characters", norms=("characters",)),
    "suffix": _suffix("lipaudit.attacks.suffixes:search_suffix"),
    "random": _suffix("lipaudit.attacks.suffixes:draw_suffix"),
}
# Kinds of typing errors, each of which changes a word.
TYPING = ("swap", "remove", "replace", "insert")
# Words of --attack that are not names of attacks, so plug-ins cannot use them.
RESERVED = frozenset({"autoattack", "clean", "custom", "paper", "quick", "standard", WORST})


@functools.cache
def attack_kinds() -> Mapping[str, AttackKind]:
    """Return every attack by its name: ours, then those of installed packages.

    Raises:
        UsageError: a plug-in cannot be loaded, or its name is already in use.
    """
    taken = ATTACKS.keys() | RESERVED
    return ATTACKS | collect(AttackKind, "attacks", taken, check=_find_fault)


def _find_fault(name: str, kind: AttackKind) -> str:
    """Return what is wrong with the name of a plug-in's attack; empty if nothing is."""
    if re.fullmatch(r"\w[\w.-]*", name):
        return ""
    return "has an invalid name: only letters, digits, dots and dashes are allowed in --attack"


@dataclass(frozen=True)
class Attack:
    """One attack and its settings.

    Attributes:
        name: its name in `attack_kinds`.
        steps: iterations per start.
        restarts: starts per sample, or per sample and target.
        targets: number of target classes, the likeliest first.
        queries: forward passes per sample and start.
        place: where a suffix stands: behind or before the text.
    """

    name: str
    steps: int = 100
    restarts: int = 1
    targets: int = 9
    queries: int = 5000
    place: Literal["behind", "before"] = "behind"

    @property
    def kind(self) -> AttackKind:
        """Return the kind of the attack."""
        return attack_kinds()[self.name]

    @property
    def aims(self) -> int:
        """Return the number of classes that each start aims at, one after the other."""
        return self.targets if self.kind.targeted else 1

    @property
    def turns(self) -> int:
        """Return the largest number of runs on a sample: starts times target classes per start."""
        if self.kind.effort in ("steps", "queries"):
            return self.restarts * self.aims
        return 1  # attacks with another effort have no restarts

    def estimate_cost(self, radius: Radius) -> int:
        """Return the largest cost of the attack on one sample, in forward passes.

        A gradient costs 3: a forward pass, and a backward pass that takes twice as long. The cost
        of one run, which depends on the kind of attack, is multiplied by the number of runs
        (`turns`: starts times target classes).
        """
        if not radius.value:  # nothing can change: the attack does not run
            return 0
        changes = int(radius.value)  # the budget of an attack that counts changes
        costs = {
            "gradient": 3,
            "steps": 3 * self.steps,
            "queries": self.queries,
            "edits": (self.queries + 3) * changes,  # queries and a gradient for every change
            "points": 1,  # or more: the file of `--transfer` says how many
            "swaps": self.steps * (self.queries + 3),  # queries and a gradient for every step
        }
        return costs[self.kind.effort] * self.turns


# The standard AutoAttack, in its order: the cheapest attack first, so that few samples remain for
# Square's 5000 queries.
STANDARD = (Attack("apgd-ce"), Attack("apgd-t"), Attack("fab-t"), Attack("square"))
# AutoAttack in l1 balls (arXiv 2103.01208): more starts, and fewer targets.
STANDARD_L1 = (Attack("apgd-ce", restarts=5), Attack("apgd-t", targets=5), *STANDARD[2:])
# Lists of attacks with a name.
PRESETS: dict[str, tuple[Attack, ...]] = {
    "autoattack": STANDARD,
    # The attacks of Yudin et al. (arXiv 2507.07814) differ from radius to radius: `_plan_paper`.
    "paper": (),
    "standard": STANDARD,
    "quick": (Attack("apgd-ce", steps=20), Attack("apgd-t", steps=20, targets=3)),
}


@dataclass(frozen=True)
class Trial:
    """Attacks run one after the other in one ball, each on the surviving samples.

    Attributes:
        label: name of the result.
        norm: linf, l2, l1, token-l2 (the largest l2 norm of a token's perturbation), words,
            characters, suffix or patch.
        radius: eps, in units of the attacked space; else a number of words, characters, tokens of
            a suffix, or patches.
        attacks: the attacks, in order.
        notes: notes on the choice of settings.
    """

    label: str
    norm: Norm
    radius: Radius
    attacks: tuple[Attack, ...]
    notes: Notes = ()

    def place_suffixes(self, place: Literal["behind", "before"]) -> Trial:
        """Return the trial with suffixes behind or before the texts."""
        attacks = tuple(replace(attack, place=place) for attack in self.attacks)
        return replace(self, attacks=attacks)

    @property
    def key(self) -> TrialKey:
        """Return the key of the trial in a report."""
        return TrialKey(self.label, self.norm, self.radius)


def list_steps(plan: Sequence[Trial]) -> list[tuple[Trial, Attack]]:
    """Return (trial, attack) for all attacks of a plan in the order in which they run.

    A plan is a list of trials: attacks that run one after the other in balls of one radius. The
    cheapest trial runs first. Of trials with equal cost, the smaller radius comes first: a sample
    broken at a small radius counts as broken at larger radii and needs no further attack.
    """

    def rank(trial: Trial) -> tuple[int, Fraction]:
        """Return the cost of a trial, then its radius."""
        cost = sum(attack.estimate_cost(trial.radius) for attack in trial.attacks)
        return cost, trial.radius.value

    return [(trial, attack) for trial in sorted(plan, key=rank) for attack in trial.attacks]


def read_plan(
    attack: str,
    *,
    norm: Norm | None = None,
    radii: Sequence[Radius] = (),
    steps: int | None = None,
    restarts: int | None = None,
    queries: int | None = None,
) -> tuple[Trial, ...]:
    """Return the trials of the option `--attack`: names of attacks and presets, with commas.

    A trial is a list of attacks that run one after the other in balls of one radius. Every name
    makes one trial per radius, labelled by the name; `autoattack` is `standard`.
    `custom:NAME,NAME` is one ensemble.

    An attack on balls gets the radii without a unit (`2/255`). An attack that counts changes, such
    as replaced words, gets the first of these lists that is not empty:

    1. the radii with its unit (`2words`);
    2. the radii without a unit, if no name is an attack on balls (`--attack words --eps 2`);
    3. its default radii.

    Args:
        attack: names, separated by commas.
        norm: norm of the balls; None means linf.
        radii: the radii; `paper` has its own.
        steps: iterations in place of the attack's own.
        restarts: starts in place of the attack's own.
        queries: forward passes of Square, and per change of a text, in place of the attack's own.

    Raises:
        UsageError: a name is unknown, no radius is given, or no attack uses the norm or a radius.
    """
    settings = {"steps": steps, "restarts": restarts, "queries": queries}
    typed_settings: dict[str, Any] = {name: n for name, n in settings.items() if n is not None}
    for name, value in typed_settings.items():
        if value < 1:
            raise UsageError(f"{name} is {value}", "Give a number of at least 1.")
    if attack.startswith("custom:"):
        names = [attack]  # the commas of custom:NAME,NAME are inside one ensemble
    else:
        names = [name.strip() for name in attack.split(",")]
    ensembles = {name: _find_attacks(name) for name in names}
    units = {name: _find_unit(name, attacks) for name, attacks in ensembles.items()}
    _refuse_units(radii, units, norm)
    only_counts = all(units.values())  # a unit for every attack: none searches balls
    plan = []
    for name, attacks in ensembles.items():
        unit = units[name]
        fitting = _choose_radii(radii, attacks, unit, only_counts)
        notes = _note_settings(name, typed_settings)
        for trial in _plan_radii(name, attacks, unit or norm or "linf", fitting):
            # Typed settings replace those of the attacks.
            as_typed = tuple(replace(each, **typed_settings) for each in trial.attacks)
            plan.append(replace(trial, attacks=as_typed, notes=trial.notes + notes))
    return tuple(plan)


def _note_settings(name: str, typed_settings: Mapping[str, Any]) -> Notes:
    """Return a note on the settings that the user changed in a preset; none for other attacks."""
    if not typed_settings or name not in PRESETS:
        return ()
    listed = ", ".join(f"{setting} = {value}" for setting, value in typed_settings.items())
    preset = "standard" if name == "autoattack" else name  # two names of one preset
    return (Note.info("preset-changed", f"the preset {preset} was changed: {listed}"),)


def _find_attacks(name: str) -> tuple[Attack, ...]:
    """Return the attacks that one name of --attack stands for.

    A name is a preset, an ensemble `custom:NAME,NAME`, or a single attack.
    """
    if name in PRESETS:
        return PRESETS[name]
    kinds = attack_kinds()
    if not name.startswith("custom:") and name not in kinds:
        raise UsageError(f"unknown attack preset {name!r}", suggestion(name, [*PRESETS, *kinds]))
    members = [member.strip() for member in name.removeprefix("custom:").split(",")]
    for member in members:
        if member not in kinds:
            raise UsageError(f"unknown attack {member!r} in {name!r}", suggestion(member, kinds))
    if len(members) > 1:
        return tuple(Attack(member) for member in members)
    # A single attack has the defaults of its kind; attacks of an ensemble have those of `Attack`.
    defaults = {}
    for setting in ("steps", "queries", "restarts"):
        value = getattr(kinds[members[0]], setting)
        if value:
            defaults[setting] = value
    return (Attack(members[0], **defaults),)


def _find_unit(name: str, attacks: Sequence[Attack]) -> Norm | None:
    """Return the unit (words, patch...) in which the attacks of one name count changes.

    None if the attacks search balls, where the radius is a distance.

    Raises:
        UsageError: the attacks have different units.
    """
    units = {attack.kind.counts for attack in attacks}
    if len(units) > 1:
        raise UsageError(
            f"{name!r} mixes attacks whose radii have different units",
            f"List them one by one: --attack {name.removeprefix('custom:')}",
        )
    return units.pop() if units else None


def _choose_radii(
    radii: Sequence[Radius], attacks: Sequence[Attack], unit: Norm | None, only_counts: bool
) -> list[Radius]:
    """Return the typed radii that an attack or an ensemble takes, without units.

    `--eps 2/255,2words` has a plain radius, for attacks on balls, and a radius with a unit, for
    the attack words.

    Args:
        radii: the typed radii.
        attacks: the attack, or all attacks of the ensemble.
        unit: the unit in which these attacks count changes; None: the attacks search balls.
        only_counts: whether no attack of the plan searches balls; plain radii then count changes.
    """
    plain = [radius for radius in radii if not radius.unit]
    if unit is None:
        return plain
    counts = [replace(r, text=str(r.value), unit="") for r in radii if r.unit == unit]
    if counts:
        return counts
    if only_counts and plain:  # `--attack words --eps 2`: nothing else can take the plain radius
        return plain
    if len(attacks) == 1:  # the default radii of the attack
        return [parse_radius(text) for text in attacks[0].kind.radii]
    return []  # an ensemble has no default radii; `_plan_radii` asks for some


def _refuse_units(
    radii: Sequence[Radius], units: Mapping[str, Norm | None], norm: Norm | None
) -> None:
    """Refuse a norm or a radius that no attack would use.

    WHOLE has the norms whose radius is a whole number of changes: words, characters, suffix
    tokens, patches. All other norms are distances, which attacks on balls use.

    Args:
        radii: the typed radii.
        units: the unit in which each attack counts changes, by attack; None for attacks on balls.
        norm: the typed norm.
    """
    for radius in radii:
        if radius.unit and radius.unit not in units.values():
            raise UsageError(
                f"no requested attack changes {radius.unit}, which is the unit of the radius "
                f"{radius.text}",
                f"Use --attack {','.join([*units, radius.unit])}. For balls of pixels or "
                "embeddings, give a radius without a unit: --eps 2/255.",
            )
    on_balls = [name for name, unit in units.items() if unit is None]
    # A norm that counts changes needs attacks that count in this unit, and no attack on balls.
    if norm in WHOLE and (on_balls or norm not in units.values()):
        raise UsageError(
            f"{', '.join(on_balls or units)} cannot change {norm}",
            f"Use --attack {norm} --eps 1,2.",
        )
    # A norm that is a distance needs an attack on balls.
    if norm is not None and norm not in WHOLE and not on_balls:
        raise UsageError(
            f"{', '.join(units)} cannot search {norm} balls: their radius is a number of changes",
            "Leave --norm out.",
        )


def _plan_radii(
    name: str, attacks: tuple[Attack, ...], norm: Norm, radii: Sequence[Radius]
) -> list[Trial]:
    """Return the trials of one name of --attack: one per radius, all with the same attacks.

    A trial is a list of attacks that run one after the other in balls of one radius. The attacks
    of the preset `paper` differ from radius to radius.

    Raises:
        UsageError: there is no radius, or a number of changes is not whole.
    """
    if name == "paper":
        return _plan_paper(norm, radii)
    if not radii:
        raise UsageError("no attack radius was given", "Add a radius, for example --eps 2/255.")
    for radius in radii:
        # WHOLE: norms that count words, characters, tokens or patches.
        if norm in WHOLE and radius.value.denominator != 1:
            raise UsageError(
                f"the radius {radius.text} is not a whole number of {list_units(norm)[-1]}",
                f"Give whole numbers: --attack {norm} --eps 1,2. For a ball, use --attack pgd.",
            )
    if norm == "l1" and attacks == STANDARD:  # AutoAttack has other settings in l1
        attacks = STANDARD_L1
    label = name.partition(":")[0]  # `custom` for custom:NAME,NAME
    return [Trial(label, norm, radius, attacks) for radius in radii]


def _plan_paper(norm: Norm, radii: Sequence[Radius]) -> list[Trial]:
    """Return the attacks of Yudin et al. (arXiv 2507.07814), as far as the paper states them."""
    if radii or norm != "linf":
        raise UsageError(
            "the preset paper fixes its norm (linf) and its radii (2/255 and 4/255)",
            "Leave out --eps and --norm, or use another preset.",
        )
    two = parse_radius("2/255")
    four = parse_radius("4/255")
    fgsm = (Attack("fgsm"),)
    pgd = (Attack("pgd", steps=4),)
    auto = tuple(replace(attack, steps=10) for attack in STANDARD)
    own_step = Note.info(
        "own-step-size",
        "PGD: the paper gives 4 steps, but no step size and no start. lipaudit uses steps of 2.5 "
        "eps / steps from a random point and keeps the best iterate",
    )
    own_queries = Note.info(
        "own-queries",
        "AutoAttack: the paper gives 10 iterations. 9 targets and 5000 Square queries are "
        "lipaudit's choice",
    )
    return [
        *(Trial("fgsm", "linf", radius, fgsm) for radius in (two, four)),
        *(Trial("pgd", "linf", radius, pgd, notes=(own_step,)) for radius in (two, four)),
        Trial("autoattack", "linf", two, auto, notes=(own_queries,)),
    ]


def require_suitable(
    trials: Sequence[Trial], kind: str, changes: Sequence[Norm] = COUNTED, why: str = ""
) -> None:
    """Refuse attacks and norms that do not suit a kind of model: image, tokens or text.

    Args:
        trials: the requested trials: attacks in balls of one norm and radius.
        kind: kind of the model.
        changes: for a model of texts, the units that attacks can change: words, characters...
        why: why other units cannot be changed.

    Raises:
        UsageError: an attack or a norm does not suit the model (the message lists what does), or
            an attack cannot be loaded.
    """
    for trial in trials:
        for attack in trial.attacks:
            _require_suitable_attack(attack, trial.norm, kind)
        # SPACES has the kinds of model to which a norm applies; norms in WHOLE count changes.
        if kind not in SPACES[trial.norm]:
            fitting = [n for n, kinds in SPACES.items() if kind in kinds and n not in WHOLE]
            raise UsageError(
                f"{trial.norm} is a norm for token embeddings, but the model takes {kind}s",
                f"--norm {' or '.join(fitting)}",
            )
        if trial.norm in COUNTED and trial.norm not in changes:
            raise UsageError(
                f"{trial.norm} cannot be changed for this model: {why}",
                f"Use --attack {','.join([*changes, 'fgsm', 'pgd'])} --eps 0.1.",
            )


def _require_suitable_attack(attack: Attack, norm: Norm, kind: str) -> None:
    """Refuse an attack that does not suit a kind of model, or balls of a norm.

    Raises:
        UsageError: as above, or the attack cannot be loaded.
    """
    if not attack.kind.can_attack(kind):
        # All but `transfer`, which needs a file.
        suitable = [n for n, k in attack_kinds().items() if k.can_attack(kind) and n != "transfer"]
        # What the model takes, in words; `text` stays.
        samples = {"image": "images", "tokens": "sequences of vectors"}.get(kind, kind)
        raise UsageError(
            f"{attack.name} cannot attack {samples}, the input of this model",
            f"Use --attack {','.join(suitable)}.",
        )
    attack.kind.load()  # raises if it cannot be imported
    norms = attack.kind.norms
    if norm not in norms:
        raise UsageError(
            f"{attack.name} cannot search {norm} balls, only {', '.join(norms)}",
            "Use --attack fgsm,pgd.",
        )


def adapt(attack: Attack, classes: int) -> tuple[Attack, Notes]:
    """Return an attack adapted to the number of classes, at least 2, with notes on the changes.

    The DLR loss is a ratio of differences of sorted logits. Against a target class the loss needs
    four classes, else three. With two classes the attacks with this loss do not run (0 restarts):
    the cross-entropy of other attacks already uses the only difference of logits. An attack with
    more targets than there are wrong classes gets all wrong classes.
    """
    if attack.name in ("apgd-t", "apgd-dlr") and classes == 2:
        text = f"{attack.name} did not run: its DLR loss needs 3 classes, and the model has 2"
        return replace(attack, restarts=0), (Note.info("attack-skipped", text),)
    if attack.name == "apgd-t" and classes == 3:
        text = (
            "apgd-t used the untargeted DLR loss: the targeted one needs 4 classes, and "
            "the model has 3"
        )
        return replace(attack, name="apgd-dlr"), (Note.info("attack-replaced", text),)
    if attack.kind.targeted and attack.targets > classes - 1:
        text = (
            f"{attack.name} targets all {classes - 1} other classes, fewer than the "
            f"{attack.targets} requested"
        )
        return replace(attack, targets=classes - 1), (Note.info("fewer-targets", text),)
    return attack, ()
