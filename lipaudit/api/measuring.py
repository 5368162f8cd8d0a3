"""Measure a checkpoint or a module from Python."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn

from lipaudit.api.requests import (
    AnyModel,
    Measures,
    audit_request,
    measure_request,
    name_model,
    name_models,
)
from lipaudit.data.images import list_forms
from lipaudit.data.loading import Samples, draw_tensors
from lipaudit.engine.execute import Observer, execute, run_job
from lipaudit.engine.prepare import Job, Request, data_options, load_options, prepare
from lipaudit.engine.several import (
    make_failed_report,
    name_errors,
    outline_job,
    require_shared,
)
from lipaudit.errors import (
    InputError,
    UsageError,
    find_user_error,
    of_machine,
)
from lipaudit.models.net import Net
from lipaudit.models.sources.loading import borrow, freeze_net, load_net
from lipaudit.tables import Report

Models = list[AnyModel] | list[str] | list[nn.Module] | tuple[AnyModel, ...]
AnyData = str | os.PathLike[str] | Any | tuple[Any, Any] | None


def measure(
    model: AnyModel,
    name: str,
    *,
    data: AnyData = None,
    input_shape: Sequence[int] | None = None,
    observer: Observer | None = None,
    **options: Any,
) -> Report:
    """Run one measure, like `lipaudit NAME MODEL`.

    Args:
        model: a MODEL of the command line, an `nn.Module` (unchanged afterwards), or a
            `ModelSpec`.
        name: bounds, attention, jacobian, attack, certify, scaling, or the measure of a plug-in.
        data: a DATA of the command line, or arrays: x, or (x, y) with labels y.
        input_shape: shape of one sample, for a module that does not declare its input.
        observer: receives progress and notes; nothing is printed.
        options: options of the measure and of every run, named as on the command line with
            underscores: `samples=8, tol=1e-5, eps="2/255"`.

    Raises:
        LipauditError: any failure; its `advice` says what to do.

    Examples:
        >>> report = measure("demo", "jacobian", samples=2)
        >>> report.section("jacobian").rows[0].samples
        2
    """
    request = measure_request(name_model(model), name, options)
    with open_job(model, request, data, input_shape=input_shape) as job:
        return execute(job, observer)


@overload
def audit(model: AnyModel, measures: Measures = None, **options: Any) -> Report: ...


@overload
def audit(model: Models, measures: Measures = None, **options: Any) -> list[Report]: ...


def audit(
    model: AnyModel | Models,
    measures: Measures = None,
    *,
    data: AnyData = None,
    input_shape: Sequence[int] | None = None,
    observer: Observer | None = None,
    **options: Any,
) -> Report | list[Report]:
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
            `lipaudit audit`: `eps`, `attack`, `norm`, `full`, `certify`.

    Raises:
        LipauditError: any failure; its `advice` says what to do. Models that do not share samples
            are refused before any is measured.

    Examples:
        >>> report = audit("demo", ["bounds", "jacobian"], samples=2)
        >>> [section.measure for section in report.sections]
        ['bounds', 'bounds.layers', 'jacobian']
    """
    models = list(model) if isinstance(model, list | tuple) else [model]
    if not models:
        raise UsageError("no model was given", "Give one model or a list of models.")
    demo = all(isinstance(each, str) and each.partition(":")[0] == "demo" for each in models)
    requests = [
        audit_request(name, measures, options, demo=demo, command="lipaudit.audit()")
        for name in name_models(models)
    ]
    audits = run_audits(models, requests, data, input_shape=input_shape, observer=observer)
    reports = [report for report in audits if report is not None]
    return reports if isinstance(model, list | tuple) else reports[0]


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
    reason. Finished parts stay on disk until all reports are taken and complete.

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
    pairs = [*zip(models, requests, strict=True)]
    if len(pairs) == 1:
        with (
            open_job(*pairs[0], data, input_shape=input_shape) as job,
            run_job(job, observer) as report,
        ):
            yield report
        return
    outlines = []
    for model, request in pairs:
        with (
            name_errors(request.model),
            open_job(model, request, data, input_shape=input_shape) as job,
        ):
            outlines.append(outline_job(job))
            del job  # the name would keep the model in memory while the next one is loaded
    require_shared(outlines)
    with ExitStack() as stored:
        whole = True
        for (model, request), outline in zip(pairs, outlines, strict=True):
            try:
                with open_job(model, request, data, input_shape=input_shape) as job:
                    report = stored.enter_context(run_job(job, observer))
                    del job
                assert report is not None, "one process measures several models"
            except Exception as error:
                if observer is not None:
                    observer.fails(request.model, error)
                report = make_failed_report(outline, error)
            whole &= report.status == "complete"
            yield report
        if not whole:
            stored.pop_all()  # the parts stay, for --resume


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
    if request.run.resume and not isinstance(model, str):
        raise UsageError(
            "resume needs a checkpoint with a name, and a module has no name", "Leave resume out."
        )
    if isinstance(data, str | os.PathLike):
        run = request.run.model_copy(update={"data": os.fspath(data)})
        request, data = replace(request, run=run), None
    options = load_options(request.run)
    if data is not None:
        options = replace(options, forms=lambda: list_forms(_split_data(data)[0]))
    try:
        with ExitStack() as opened:
            if isinstance(model, Net):
                net = opened.enter_context(freeze_net(model))
            elif not isinstance(model, str):
                net = opened.enter_context(borrow(model, options, input_shape))
            elif input_shape is not None:
                text = f"{model} already defines its input shape"
                raise UsageError(text, "Leave input_shape out.")
            else:
                net = load_net(model, options)
            if samples is None and data is not None:
                most = max(request.count(name) for name in request.measures)
                x, labels = _split_data(data)
                samples = draw_tensors(x, labels, net, data_options(request.run, most))
            yield prepare(request, net=net, samples=samples)
    except Exception as error:
        # A bug keeps its type and traceback; any other failure is an error with a hint.
        if (fault := find_user_error(error)) is None or fault is error:
            raise
        raise fault from error


def _split_data(data: Any) -> tuple[Tensor, Tensor | None]:
    """Return samples and labels of x or (x, y)."""
    x, y = data if isinstance(data, tuple) and len(data) == 2 else (data, None)
    return _make_tensor(x), None if y is None else _make_tensor(y)


def _make_tensor(values: Any) -> Tensor:
    """Return an array or nested list as a tensor on the host.

    Raises:
        InputError: the values are not an array.
    """
    try:
        if not isinstance(values, Tensor):
            # A tensor can share the memory of an array only in C order and if it is writable.
            values = torch.as_tensor(np.require(values, requirements=["C", "W"]))
        return values.detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        if of_machine(error):
            raise
        raise InputError(
            f"data of type {type(values).__name__} cannot be read as an array of samples "
            f"({error})",
            "Give x or (x, y), arrays or tensors, or a name that --data takes.",
        ) from error
