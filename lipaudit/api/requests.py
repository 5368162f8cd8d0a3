"""Requests from Python: check and complete names, measures and options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lipaudit.engine.prepare import Request
from lipaudit.errors import UsageError, suggestion
from lipaudit.measures import MeasureOptions, option_types
from lipaudit.measures.audit import OF_ATTACK, QUICK_SAMPLES, USUAL, audit_options
from lipaudit.models.spec import ModelSpec
from lipaudit.settings import RunOptions

AnyModel = str | nn.Module | ModelSpec
Measures = str | Sequence[str] | Mapping[str, Mapping[str, Any]] | None


def name_model(model: AnyModel) -> str:
    """Return the name of a model; a module is named by its class."""
    if isinstance(model, str):
        return model
    return type(model.module if isinstance(model, ModelSpec) else model).__name__


def name_models(models: Sequence[AnyModel]) -> list[str]:
    """Return the names of several models; modules of one class are numbered."""
    names = [name_model(model) for model in models]
    # Checkpoints have distinct names; two modules of one class would not.
    modules = {i for i, model in enumerate(models) if not isinstance(model, str)}
    return [
        f"{name} {names[: i + 1].count(name)}" if i in modules and names.count(name) > 1 else name
        for i, name in enumerate(names)
    ]


def measure_request(model: str, name: str, options: Mapping[str, Any]) -> Request:
    """Return the request for one measure.

    Args:
        model: name of the model.
        name: name of the measure.
        options: options of the measure and of every run, with the names of the command line.

    Raises:
        UsageError: a measure or an option that there is not, or that makes no sense.
    """
    kind = _find_options(name)
    run, own = _split_options(options, kind)
    return Request(model, {name: kind.checked(own)}, run, command="lipaudit.measure()")


def audit_request(
    name: str,
    measures: Measures,
    options: Mapping[str, Any],
    *,
    demo: bool = False,
    quick: bool = False,
    command: str = "lipaudit.audit()",
) -> Request:
    """Return the request for an audit.

    Args:
        name: name of the model.
        measures: as in `audit`.
        options: as in `audit`.
        demo: whether the model is a demo.
        quick: whether few samples suffice.
        command: the command that the report records.

    Raises:
        UsageError: a measure or an option that there is not, or that makes no sense.
    """
    of_attack = {n: options[n] for n in OF_ATTACK if n in options}
    usual = audit_options(of_attack, demo=demo, quick=quick)
    names = [measures] if isinstance(measures, str) else USUAL if measures is None else measures
    if not names:
        raise UsageError("no measure was given", f"There are: {', '.join(option_types())}.")
    if of_attack and not {"attack", "certify"} & {*names}:
        given = ", ".join(of_attack)
        raise UsageError(
            f"{given}: these options are for attacks, and no attack was requested",
            "Leave it out.",
        )
    own: dict[str, Mapping[str, Any]] = dict.fromkeys(names, {})
    own |= measures if isinstance(measures, Mapping) else {}
    plan: dict[str, MeasureOptions] = {}
    for each, given_options in own.items():  # the user's options, else the usual ones
        kind, known = _find_options(each), usual.get(each)
        defaults = {n: getattr(known, n) for n in known.model_fields_set} if known else {}
        plan[each] = kind.checked(defaults | _rename_options(given_options, kind))
    run, _ = _split_options({n: v for n, v in options.items() if n not in of_attack}, None)
    return Request(
        name,
        plan,
        run,
        QUICK_SAMPLES if quick else {},
        optional=plan.keys(),
        partial=True,
        command=command,
    )


def _find_options(name: str) -> type[MeasureOptions]:
    known = option_types()
    if name not in known:
        raise UsageError(f"there is no measure {name!r}", suggestion(name, known))
    return known[name]


def _split_options(
    options: Mapping[str, Any], kind: type[MeasureOptions] | None
) -> tuple[RunOptions, dict[str, Any]]:
    """Split options into those of every run and those of the measure.

    Raises:
        UsageError: an option belongs to neither.
    """
    shared = RunOptions.options()
    own = {} if kind is None else kind.options()
    given = options if kind is None else _rename_options(options, kind)
    for name in given:
        if name not in shared and name not in own:
            raise UsageError(f"there is no option {name!r}", suggestion(name, [*own, *shared]))
    run = RunOptions.checked({n: v for n, v in given.items() if n not in own})
    return run, {n: v for n, v in given.items() if n in own}


def _rename_options(options: Mapping[str, Any], kind: type[MeasureOptions]) -> dict[str, Any]:
    """Return options by field name: `to` and `mode` on the command line are other names."""
    spelled = {o.flags[0].removeprefix("--"): name for name, o in kind.options().items()}
    return {spelled.get(name.replace("_", "-"), name): value for name, value in options.items()}
