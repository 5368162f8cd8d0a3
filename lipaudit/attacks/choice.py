"""What a user asks for, read into a plan: attacks, a norm, radii. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lipaudit.attacks.kinds import AttackKind, attack_kinds
from lipaudit.attacks.plan import PRESETS, Trial, make_plan, named
from lipaudit.errors import UsageError
from lipaudit.results.trials import COUNTED, SPACES, Norm, Radius, parse_radius


def read_plan(
    attack: str,
    *,
    norm: Norm | None = None,
    radii: Sequence[Radius] = (),
    steps: int | None = None,
    restarts: int | None = None,
    queries: int | None = None,
) -> tuple[Trial, ...]:
    """Read the option `--attack`: names of attacks and presets, separated by commas.

    Every name makes trials of its own, labelled by it; `autoattack` is the preset `standard`.
    A preset, or `custom:NAME,NAME` for an ensemble, may also stand alone. An attack that is asked
    for by its own name takes the steps and queries of its kind. An attack that counts changes of
    a text takes the radii that name what it counts (`2words`); plain ones where all of them
    count, and none is named; else those of its kind. The others take the plain ones, in balls of
    the norm: linf where none is given. Further arguments and errors as in `make_plan`.
    """
    alone = attack in PRESETS or attack.startswith("custom:")
    names = [attack] if alone else [name.strip() for name in attack.split(",")]
    counts = {name: _counts(_spec(name)) for name in names}
    _refuse_units(radii, counts, norm)
    planned: list[Trial] = []
    for name, counted in counts.items():
        spec = _spec(name)
        kind = attack_kinds().get(spec.removeprefix("custom:"))
        budget = _budget(radii, counted, kind, plain=all(counts.values()))
        given = {
            "steps": kind.steps if steps is None and kind else steps,
            "restarts": restarts,
            "queries": kind.queries if queries is None and kind else queries,
        }
        trials = make_plan(spec, norm=counted or norm or "linf", radii=budget, **given)
        label = name.partition(":")[0] if alone else name
        planned += trials if spec == "paper" else [replace(t, label=label) for t in trials]
    return tuple(planned)


def _counts(spec: str) -> Norm | None:
    """Return what the attacks of a specification count; None where they search balls."""
    if not spec.startswith("custom:"):
        return None
    counted = {attack.kind.counts for attack in named(spec)}
    if len(counted) > 1:
        raise UsageError(
            f"{spec!r} puts attacks that count different things into one ensemble",
            "ask for them one by one: --attack " + spec.removeprefix("custom:"),
        )
    return counted.pop()


def _refuse_units(
    radii: Sequence[Radius], counts: Mapping[str, Norm | None], norm: Norm | None
) -> None:
    """Refuse a norm and radii that no attack would look at."""
    lost = next((r for r in radii if r.unit and r.unit not in counts.values()), None)
    if lost is not None:
        raise UsageError(
            f"no attack counts {lost.unit}, as the radius {lost.text} does",
            f"for texts add it: --attack {','.join([*counts, lost.unit])}; radii of pixels and of "
            "embeddings have no unit: --eps 2/255",
        )
    balls = [name for name, counted in counts.items() if counted is None]
    if norm in COUNTED and (balls or norm not in counts.values()):
        raise UsageError(
            f"{', '.join(balls or counts)} cannot search balls of {norm}",
            f"ask for the attack that counts them: --attack {norm} --eps 1,2",
        )
    if norm is not None and norm not in COUNTED and not balls:
        raise UsageError(
            f"{', '.join(counts)} cannot search {norm} balls: they count changes of a text",
            "leave --norm out",
        )


def _budget(
    radii: Sequence[Radius], counted: Norm | None, kind: AttackKind | None, *, plain: bool
) -> Sequence[Radius]:
    """Return the radii that are meant for an attack."""
    simple = [radius for radius in radii if not radius.unit]
    if counted is None:
        return simple
    named = [replace(r, text=str(r.value), unit="") for r in radii if r.unit == counted]
    if named or (plain and simple):
        return named or simple
    return [parse_radius(text) for text in kind.radii] if kind else []


def require_suited(
    trials: Sequence[Trial], kind: str, changes: Sequence[Norm] = COUNTED, why: str = ""
) -> None:
    """Refuse what means nothing for a kind of model: image, tokens or text.

    Args:
        trials: what is asked for.
        kind: of the model.
        changes: what can be changed of its texts.
        why: what keeps the rest from being changed.

    Raises:
        UsageError: an attack or a norm that does not, with what there is for such a model; or an
            attack that cannot be loaded.
    """
    known = [name for name, each in attack_kinds().items() if each.can_attack(kind)]
    for trial in trials:
        unable = [a.name for a in trial.attacks if not a.kind.can_attack(kind)]
        if unable:
            samples = {"image": "images", "tokens": "sequences of vectors"}.get(kind, kind)
            raise UsageError(
                f"{', '.join(unable)} cannot attack {samples}, which is what the model takes",
                f"what can: --attack {','.join(known)}",
            )
        if kind not in SPACES[trial.norm]:
            fitting = [norm for norm, spaces in SPACES.items() if kind in spaces]
            raise UsageError(
                f"{trial.norm} is a norm of tokens, and the model takes {kind}s",
                f"--norm {' or '.join(fitting)}",
            )
        if trial.norm in COUNTED and trial.norm not in changes:
            other = ",".join([*changes, "fgsm", "pgd"])
            raise UsageError(
                f"{trial.norm} cannot be changed in texts of this model: {why}",
                f"what can: --attack {other} --eps 0.1",
            )
        for attack in trial.attacks:
            attack.kind.load()


def _spec(name: str) -> str:
    if name == "autoattack":
        return "standard"
    return f"custom:{name}" if name in attack_kinds() else name
