"""Say which layer's change explains that of a norm, from Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

from lipaudit.api.measuring import AnyData, prepared
from lipaudit.api.requests import AnyModel, audit_request
from lipaudit.engine.attribution import attribute as swapped
from lipaudit.engine.observer import Observer
from lipaudit.errors import UsageError, suggestion
from lipaudit.gate import Attribution
from lipaudit.settings import JacobianOptions
from lipaudit.settings.jacobian import SWAPPED, Grouping


def attribute(
    old: AnyModel,
    new: AnyModel,
    *,
    groups: Grouping = "layer",
    data: AnyData = None,
    input_shape: Sequence[int] | None = None,
    observer: Observer | None = None,
    **options: Any,
) -> Attribution:
    """Say which layer's change explains that of the norm: `lipaudit compare --attribute`.

    The layers that differ are swapped one by one, each alone and all but it, and what is seen is
    set beside the first-order change. `lipaudit.render` writes the result.

    Args:
        old: as `model` of `measure`.
        new: a model of the same architecture.
        groups: what is swapped at a time: `layer` (attention, MLP and norms apart) or `block`.
        data: as of `measure`.
        input_shape: as of `measure`, for modules.
        observer: is told of the cost before it is spent, and of the progress.
        options: any option of every run (8 samples where it says none), and of `jacobian` those
            that say from where to where the Jacobian is taken, and how exactly.

    Raises:
        LipauditError: whatever goes wrong, with what to do about it.

    Examples:
        >>> shown = attribute("demo", "demo:robust", groups="block", samples=2)
        >>> shown.layers[3].layer, len(shown.layers)
        ('blocks.0', 8)
    """
    if groups not in get_args(Grouping):
        advice = suggestion(str(groups), get_args(Grouping))
        raise UsageError(f"there is no grouping {groups!r}", advice)
    if {"norm", "per_layer"} & options.keys():
        raise UsageError("an attribution is of the spectral norm of the model", "Leave it out.")
    known = JacobianOptions.options()
    names = {*known, *(o.flags[0].removeprefix("--").replace("-", "_") for o in known.values())}
    own = {name: value for name, value in options.items() if name in names}
    run = {name: value for name, value in options.items() if name not in names}
    request = audit_request("attribution", {"jacobian": own}, run)
    request = replace(request, counts={"jacobian": SWAPPED})
    named = all(isinstance(model, str) for model in (old, new))
    shapes = [input_shape if named or not isinstance(m, str) else None for m in (old, new)]
    with (
        prepared(old, request, data, input_shape=shapes[0]) as job,
        prepared(new, request, data, input_shape=shapes[1], samples=job.samples) as other,
    ):
        return swapped(job, other.net, grouping=groups, observer=observer)
