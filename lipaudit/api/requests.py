"""Requests: names of models, and options split into those of a measure and of every run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from lipaudit.engine.prepare import Request
from lipaudit.errors import UsageError, suggestion
from lipaudit.measures import AuditOptions, option_types
from lipaudit.models.net import ModelSpec
from lipaudit.settings import RunOptions, Settings

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
    if name not in option_types():
        raise UsageError(f"there is no measure {name!r}", suggestion(name, option_types()))
    kind = option_types()[name]
    own, shared = _split_options(options, kind, RunOptions)
    run = RunOptions.checked(shared)
    return Request(model, {name: kind.checked(own)}, run, command="lipaudit.measure()")


def audit_request(
    model: str, measures: Measures, options: Mapping[str, Any], *, demo: bool, command: str
) -> Request:
    """Return the request for an audit from Python.

    Args:
        model: name of the model.
        measures: as in `audit`.
        options: as in `audit`.
        demo: whether every model is a demo.
        command: the command that the report records.

    Raises:
        UsageError: a measure or an option that there is not, or that makes no sense.
    """
    if measures is not None and not measures:
        raise UsageError("no measure was given", f"There are: {', '.join(option_types())}.")
    own, shared = _split_options(options, AuditOptions, RunOptions)
    names = (measures,) if isinstance(measures, str) else measures and tuple(measures)
    # Radii of a command line are text; from Python they may be numbers, or lists of them.
    for option, value in own.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            own[option] = str(value)
        elif isinstance(value, list | tuple):
            own[option] = ",".join(map(str, value))
    extent = AuditOptions.checked({**own, "only": names})
    request = plan_audit(model, extent, RunOptions.checked(shared), demo=demo, command=command)
    plan = {name: request.measures[name] for name in names or request.measures}
    for name, given in measures.items() if isinstance(measures, Mapping) else ():
        usual, kind = plan[name], type(plan[name])
        changed = {n: getattr(usual, n) for n in usual.model_fields_set}
        plan[name] = kind.checked(changed | _split_options(given, kind)[0])
    return replace(request, measures=plan, optional={*plan})


def plan_audit(
    model: str, options: AuditOptions, run: RunOptions, *, demo: bool, command: str
) -> Request:
    """Return the request for an audit.

    Raises:
        UsageError: a radius, attack or norm is invalid.
    """
    plan, counts = options.plan(demo=demo), options.counts(demo=demo)
    optional = {*plan} - options.required
    return Request(model, plan, run, counts, optional=optional, partial=True, command=command)


def _split_options(
    options: Mapping[str, Any], *groups: type[Settings]
) -> tuple[dict[str, Any], ...]:
    """Return the options of each group, by field name; the first group with a name takes it.

    On the command line some fields have other names, such as `to` and `mode`.

    Raises:
        UsageError: an option belongs to no group.
    """
    split: tuple[dict[str, Any], ...] = tuple({} for _ in groups)
    known: dict[str, tuple[int, str]] = {}
    for i, group in enumerate(groups):
        for name, each in group.options().items():
            known.setdefault(each.flags[0].removeprefix("--").replace("-", "_"), (i, name))
            known.setdefault(name, (i, name))
    # In Python also fields that cannot be typed: `layers` of every measure.
    for i, group in enumerate(groups):
        known = {name: (i, name) for name in group.model_fields} | known
    for name, value in options.items():
        if name not in known:
            raise UsageError(f"there is no option {name!r}", suggestion(name, known))
        place, field = known[name]
        split[place][field] = value
    return split
