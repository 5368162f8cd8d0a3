"""Measure checkpoints and modules from Python."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn

from lipaudit import errors
from lipaudit.data.arrays import list_forms
from lipaudit.data.batch import Samples
from lipaudit.data.loading import draw_tensors
from lipaudit.engine.execute import Observer, execute, run_job, run_shard
from lipaudit.engine.launcher import join_processes
from lipaudit.engine.outlines import Outline, outline_job, require_shared
from lipaudit.engine.prepare import Job, Request, data_options, load_options, prepare
from lipaudit.engine.results import describe_failure, make_failed
from lipaudit.errors import InputError, LipauditError, UsageError, suggestion
from lipaudit.measures import AuditOptions, find_measure, load_measures
from lipaudit.models.net import LoadOptions, ModelSpec, Net
from lipaudit.models.sources.loader import borrow, freeze_net, load_net
from lipaudit.settings import RunOptions
from lipaudit.settings.option import Settings
from lipaudit.tables import Report

AnyModel = str | nn.Module | ModelSpec
Models = list[AnyModel] | list[str] | list[nn.Module] | tuple[AnyModel, ...]
AnyData = str | os.PathLike[str] | Any | tuple[Any, Any] | None
Measures = str | Sequence[str] | Mapping[str, Mapping[str, Any]] | None


def name_models(*models: AnyModel) -> list[str]:
    """Return the names of models for reports: the checkpoint, or the class of a module.

    Several modules of one class are numbered.
    """
    names = []
    class_names = set()
    for model in models:
        if isinstance(model, str):
            names.append(model)
            continue
        module = model.module if isinstance(model, ModelSpec) else model
        name = type(module).__name__
        names.append(name)
        class_names.add(name)
    numbered = []
    for i, name in enumerate(names):
        if name in class_names and names.count(name) > 1:
            number = names[: i + 1].count(name)
            name = f"{name} {number}"
        numbered.append(name)
    return numbered


def is_demo(*models: AnyModel) -> bool:
    """Say whether all models are demos: samples, radii and the quick preset are then a demo's."""
    return all(isinstance(model, str) and model.partition(":")[0] == "demo" for model in models)


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
        raise UsageError("no measure was given", f"There are: {', '.join(load_measures())}.")
    # Options of the audit, and of every run.
    of_audit, of_run = _split_options(options, AuditOptions, RunOptions)
    if isinstance(measures, str):
        measures = [measures]
    only = None  # the names of the given measures; None: the default ones
    if measures is not None:
        only = tuple(measures)
    audit_options = AuditOptions.parse({**of_audit, "only": only})
    run = RunOptions.parse(of_run)
    request = plan_audit(model, audit_options, run, demo=demo, command=command)
    # The options of each measure by name, in the order in which the measures are given.
    planned = {name: request.measures[name] for name in only or request.measures}
    # Options that are given for one measure replace those of the audit.
    if isinstance(measures, Mapping):
        for name, given in measures.items():
            audited = planned[name]
            kind = type(audited)
            # `model_fields_set`: the options that were given a value; all others have defaults.
            from_audit = {field: getattr(audited, field) for field in audited.model_fields_set}
            (of_measure,) = _split_options(given, kind)
            planned[name] = kind.parse(from_audit | of_measure)
    # All measures are optional: those that the model or data do not allow are left out.
    return replace(request, measures=planned, optional={*planned})


def plan_audit(
    model: str, options: AuditOptions, run: RunOptions, *, demo: bool, command: str
) -> Request:
    """Return the request for an audit: the options of every measure that runs.

    Args:
        model: name of the model.
        options: options of the audit.
        run: options of every run.
        demo: whether every model is a demo, whose defaults are used.
        command: the command that the report records.

    Raises:
        UsageError: a radius, attack or norm is invalid.
    """
    measures = options.plan(demo=demo)  # the options of each measure, by name
    counts = options.counts(demo=demo)  # the default number of samples of each measure
    # Measures that the user did not ask for are left out if the model does not allow them.
    optional = {*measures} - options.required
    # partial: if a measure fails, the others still run, and the report is partial.
    return Request(model, measures, run, counts, optional=optional, partial=True, command=command)


def _split_options(
    options: Mapping[str, Any], *groups: type[Settings]
) -> tuple[dict[str, Any], ...]:
    """Divide options from Python between classes of options, such as a measure's and the run's.

    If several classes know a name, the first one takes it; but a name on the command line goes
    before a mere field. For example `seed` is a field of a measure, but an option of the run.

    Args:
        options: the options, named as on the command line or as fields of a class.
        groups: the classes of options.

    Returns:
        The options of each group, by field.

    Raises:
        UsageError: an option belongs to no group.
    """
    # By name: the number of the group that takes it, and the field. Later entries replace earlier
    # ones: so the groups come in reverse order, and options of the command line after fields.
    owners = {}
    last_first = list(enumerate(groups))[::-1]
    for number, group in last_first:
        for field in group.model_fields:
            owners[field] = (number, field)
    for number, group in last_first:
        for field, option in group.options().items():
            owners[field] = (number, field)
            # On the command line some fields have other names: `--to` is the field `target`.
            typed = option.flags[0].removeprefix("--").replace("-", "_")
            owners[typed] = (number, field)
    split: tuple[dict[str, Any], ...] = tuple({} for _ in groups)
    for name, value in options.items():
        if name not in owners:
            raise UsageError(f"there is no option {name!r}", suggestion(name, owners))
        number, field = owners[name]
        split[number][field] = value
    return split


@overload
def measure(model: AnyModel, name: str, *, shard: None = None, **options: Any) -> Report: ...


@overload
def measure(model: AnyModel, name: str, *, shard: str, **options: Any) -> None: ...


def measure(
    model: AnyModel,
    name: str,
    *,
    data: AnyData = None,
    input_shape: Sequence[int] | None = None,
    observer: Observer | None = None,
    **options: Any,
) -> Report | None:
    """Run one measure, like `lipaudit NAME MODEL`.

    Args:
        model: a MODEL of the command line, an `nn.Module` (unchanged afterwards), or a
            `ModelSpec`.
        name: the name of a measure: bounds, attention, jacobian, attack, weights, or that of a
            wing or another plug-in.
        data: a DATA of the command line, or arrays: x, or (x, y) with labels y.
        input_shape: shape of one sample, for a module that does not declare its input.
        observer: receives progress and notes; nothing is printed.
        options: options of the measure and of every run, named as on the command line with
            underscores: `samples=8, tol=1e-5, eps="2/255"`.

    Returns:
        The report; None with `shard` and `parts`: `lipaudit.merge(parts)` makes it of all shards.

    Raises:
        LipauditError: any failure; its `advice` says what to do.

    Examples:
        >>> report = measure("demo", "jacobian", samples=2)
        >>> report.section("jacobian").rows[0].samples
        2
    """
    kind = find_measure(name).options  # the class of the measure's options
    of_measure, of_run = _split_options(options, kind, RunOptions)
    measures = {name: kind.parse(of_measure)}
    run = RunOptions.parse(of_run)
    (model_name,) = name_models(model)
    request = Request(model_name, measures, run, command="lipaudit.measure()")
    with open_job(model, request, data, input_shape=input_shape) as job:
        if run.shard:
            run_shard(job, observer)
            return None
        return execute(job, observer)


@overload
def audit(
    model: AnyModel, measures: Measures = None, *, shard: None = None, **options: Any
) -> Report: ...


@overload
def audit(model: Models, measures: Measures = None, **options: Any) -> list[Report]: ...


@overload
def audit(model: AnyModel, measures: Measures = None, *, shard: str, **options: Any) -> None: ...


def audit(
    model: AnyModel | Models,
    measures: Measures = None,
    *,
    data: AnyData = None,
    input_shape: Sequence[int] | None = None,
    observer: Observer | None = None,
    **options: Any,
) -> Report | list[Report] | None:
    """Run several measures on one model, like `lipaudit audit MODEL`.

    Args:
        model: as in `measure`, or a list of models. Each model of a list is measured on the same
            samples and has its own report. `lipaudit.rank(reports)` ranks them,
            `lipaudit.render(reports, "html")` shows them side by side.
        measures: names of measures, or a dictionary from names to options. Default: bounds,
            attention, jacobian and attack, without those that model or data do not allow.
            `Report.failures` has the reason of each measure that failed.
        data: as in `measure`.
        input_shape: as in `measure`.
        observer: as in `measure`.
        options: options of every run (`samples=8, seed=1, device="cpu"`), and those of
            `lipaudit audit`, such as `eps`, `attack`, `norm`, `full`.

    Returns:
        The report, or the report of each model; None with `shard`, as in `measure`.

    Raises:
        LipauditError: any failure; its `advice` says what to do. Models that do not share samples
            are refused before any is measured.

    Examples:
        >>> report = audit("demo", ["bounds", "jacobian"], samples=2)
        >>> [section.measure for section in report.sections if "." not in section.measure]
        ['bounds', 'jacobian']
    """
    if isinstance(model, list | tuple):
        models = list(model)
    else:
        models = [model]
    if not models:
        raise UsageError("no model was given", "Give one model or a list of models.")
    demo = is_demo(*models)
    requests = [
        audit_request(name, measures, options, demo=demo, command="lipaudit.audit()")
        for name in name_models(*models)
    ]
    if requests[0].run.shard and len(models) == 1:  # some of the samples: no report yet
        with open_job(models[0], requests[0], data, input_shape=input_shape) as job:
            run_shard(job, observer)
        return None
    audits = run_audits(models, requests, data, input_shape=input_shape, observer=observer)
    # None is left out for the type checker only: no report is None here. Only the command line
    # sets `Request.place`, with which a process may measure a shard for another one.
    reports = [report for report in audits if report is not None]
    if isinstance(model, list | tuple):
        return reports
    return reports[0]


def run_audits(
    models: Sequence[AnyModel],
    requests: Sequence[Request],
    data: AnyData = None,
    *,
    input_shape: Sequence[int] | None = None,
    observer: Observer | None = None,
) -> Iterator[Report | None]:
    """Yield the report of each model; one model is in memory at a time.

    Several models are checked before any is measured; one that fails has a report with the
    reason. The results of finished batches (parts) stay on disk until all reports are complete and
    the caller has taken them.

    Args:
        models: the models.
        requests: the request of each model.
        data: as in `measure`.
        input_shape: as in `measure`.
        observer: as in `measure`.

    Yields:
        The report; None in a process that measured a shard for rank 0.

    Raises:
        LipauditError: the only model fails, or several do not share samples.
    """
    open_model = partial(open_job, data=data, input_shape=input_shape)
    if len(models) == 1:
        with open_model(models[0], requests[0]) as job, run_job(job, observer) as report:
            yield report
        return
    run = requests[0].run  # its options are those of every run
    if run.shard or run.parts:
        raise UsageError(
            "shards and folders of parts are of one model", "Audit the models one by one."
        )
    outlines = [
        _outline_model(open_model(model, request), request.model)
        for model, request in zip(models, requests, strict=True)
    ]
    require_shared(outlines)
    # `run_job` has the parts of its model on disk, and removes them when its context ends. These
    # contexts go into `stored_parts`: they end together, after the last report. The model itself
    # is freed before, at the end of `open_model`.
    with ExitStack() as stored_parts:
        all_complete = True
        for model, outline in zip(models, outlines, strict=True):
            try:
                with open_model(model, outline.request) as job:
                    report = stored_parts.enter_context(run_job(job, observer))
                    del job  # the name would keep the model while the next one is loaded
                assert report is not None, "one process measures several models"
            except Exception as error:
                if observer is not None:
                    observer.fails(outline.model, error)
                report = _report_failure(outline, error)
            all_complete &= report.status == "complete"
            yield report
        if not all_complete:
            # Take the contexts out of the stack: they never end, so no parts are removed, and
            # --resume finds them.
            stored_parts.pop_all()


def _outline_model(opened: AbstractContextManager[Job], model: str) -> Outline:
    """Return the facts of a job by which models are compared, and free the memory of its model.

    Raises:
        LipauditError: any failure; its message begins with the name of the model.
    """
    try:
        with opened as job:
            outline = outline_job(job)
            del job  # the name would keep the model while the next one is loaded
            return outline
    except LipauditError as error:
        error.message = f"{errors.visible(model)}: {error.message}"
        raise
    finally:
        gc.collect()  # a module may reference itself, and the next model needs its memory


def _report_failure(outline: Outline, error: Exception) -> Report:
    """Return the report of a model that could not be measured.

    Every section has the reason in place of figures.
    """
    failure = describe_failure(error)
    measures = outline.request.measures
    sections = tuple(make_failed(name, options, failure) for name, options in measures.items())
    return Report(status="partial", run=outline.run, samples=outline.samples, sections=sections)


@contextmanager
def open_job(
    model: AnyModel | Net,
    request: Request,
    data: AnyData = None,
    *,
    input_shape: Sequence[int] | None = None,
    samples: Samples | None = None,
) -> Iterator[Job]:
    """Load the model and the samples of a request for use inside the block.

    Args:
        model: as in `measure`, or a loaded model; a module is restored when the block ends.
        request: the request.
        data: as in `measure`.
        input_shape: as in `measure`.
        samples: samples of an earlier job on the same data.

    Raises:
        LipauditError: any failure, also inside the block, with a hint.
    """
    _require_possible(model, request)
    if isinstance(data, str | os.PathLike):
        run = request.run.model_copy(update={"data": os.fspath(data)})
        request = replace(request, run=run)
        data = None
    options = load_options(request.run)
    # Arrays: the shape of the samples x helps to load a model that declares no input.
    if data is not None:
        options = replace(options, forms=lambda: list_forms(_split_data(data)[0]))
    with _add_hints(), ExitStack() as opened:
        # Gradients cannot be computed from weights or samples made in inference mode.
        opened.enter_context(torch.inference_mode(False))
        if request.place is not None:  # before anything that takes long
            opened.enter_context(join_processes(request.place))
        net = opened.enter_context(_open_net(model, options, input_shape))
        if samples is None and data is not None:
            count = max(request.count(name) for name in request.measures)
            x, labels = _split_data(data)
            samples = draw_tensors(x, labels, net, data_options(request.run, count))
        yield prepare(request, net=net, samples=samples)


@contextmanager
def _add_hints() -> Iterator[None]:
    """Turn exceptions inside the block into errors with a hint, except for bugs of lipaudit.

    A bug keeps its type and traceback.

    Raises:
        LipauditError: the model, the data or the machine failed.
    """
    try:
        yield
    except Exception as error:
        user_error = errors.find_user_error(error)
        if user_error is None or user_error is error:
            raise
        raise user_error from error


def _open_net(
    model: AnyModel | Net, options: LoadOptions, input_shape: Sequence[int] | None
) -> AbstractContextManager[Net]:
    """Return a model for use inside a block; a module is restored when the block ends.

    Raises:
        UsageError: `input_shape` is given for a checkpoint.
    """
    if isinstance(model, Net):
        return freeze_net(model)
    if not isinstance(model, str):
        return borrow(model, options, input_shape)
    if input_shape is not None:
        text = f"{model} already defines its input shape"
        raise UsageError(text, "Leave input_shape out.")
    return nullcontext(load_net(model, options))


def _require_possible(model: AnyModel | Net, request: Request) -> None:
    """Refuse a request that this process cannot serve, before anything is loaded.

    Raises:
        UsageError: a module cannot be resumed, or a shard has no folder or has several processes.
    """
    run = request.run
    if run.resume and not isinstance(model, str):
        raise UsageError(
            "resume needs a checkpoint with a name, and a module has no name", "Leave resume out."
        )
    if run.shard and request.place is not None:
        raise UsageError(
            "--shard and a launcher of several processes both split the samples",
            "Leave --shard out, or run one process.",
        )
    if run.shard and run.parts is None:
        number, count = run.shard
        raise UsageError(
            f"--shard {number}/{count} needs a folder for its parts",
            "Add --parts FOLDER, the same for every shard; then: lipaudit merge FOLDER.",
        )


def _split_data(data: Any) -> tuple[Tensor, Tensor | None]:
    """Return the samples and the labels of an argument `data`, which is x or a tuple (x, y)."""
    x = data
    y = None
    if isinstance(data, tuple) and len(data) == 2:
        x, y = data
    labels = None if y is None else _make_tensor(y)
    return _make_tensor(x), labels


def _make_tensor(values: Any) -> Tensor:
    """Return a tensor, array or nested list as a tensor on the CPU.

    Raises:
        InputError: the values are not an array.
    """
    try:
        if not isinstance(values, Tensor):
            # A tensor can share the memory of an array only in C order and if it is writable.
            values = torch.as_tensor(np.require(values, requirements=["C", "W"]))
        if values.is_inference():
            values = values.clone()
        return values.detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        if errors.is_machine_error(error):
            raise
        raise InputError(
            f"data of type {type(values).__name__} cannot be read as an array of samples "
            f"({error})",
            "Give x or (x, y), arrays or tensors, or a name that --data takes.",
        ) from error
