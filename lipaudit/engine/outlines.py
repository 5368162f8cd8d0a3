"""What is known of a model and its samples before it is measured, to compare several models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lipaudit.engine.prepare import Job, Request
from lipaudit.engine.results import describe_run, list_origins
from lipaudit.errors import InputError, UsageError
from lipaudit.models.net import Kind
from lipaudit.tables import Run


@dataclass(frozen=True)
class Outline:
    """Facts about a job that stay in memory while other models are loaded.

    Attributes:
        request: the request.
        kind: kind of its inputs.
        classes: number of classes; None without classes.
        names: class names, if the checkpoint has them.
        labels: class numbers of the samples; None without labels.
        run: the run, as in the report.
        samples: places of the samples, as in the report; empty for random samples.
    """

    request: Request
    kind: Kind
    classes: int | None
    names: tuple[str, ...] | None
    labels: tuple[int, ...] | None
    run: Run
    samples: dict[str, tuple[str, ...]]

    @property
    def model(self) -> str:
        """Return the MODEL argument."""
        return self.request.model


def outline_job(job: Job) -> Outline:
    """Return the facts of a job by which `require_shared` compares several models."""
    net = job.net
    y = job.samples.batch.y
    return Outline(
        job.request,
        kind=net.kind,
        classes=net.classes,
        names=net.labels,
        labels=None if y is None else tuple(y.tolist()),
        run=describe_run(job),
        samples=list_origins(job.samples),
    )


def require_shared(outlines: Sequence[Outline]) -> None:
    """Check that several models can be measured on the same samples, before any is measured.

    Args:
        outlines: facts about each model and its samples.

    Raises:
        UsageError: a model is named twice.
        InputError: inputs, classes or samples of the models differ.
    """
    first, *others = outlines
    data = first.run.data
    names = {first.model}
    for other in others:
        if other.model in names:
            raise UsageError(f"{other.model} is named twice", "Name each model once.")
        names.add(other.model)
        if not _have_same_samples(first, other):
            raise InputError(
                f"{first.model} ({first.kind}, {data.spec}) and {other.model} ({other.kind}, "
                f"{other.run.data.spec}) do not read the same samples",
                "Give --data for both: images or a table of texts. Random samples fit one model.",
            )
        reason = _compare_classes(first, other)
        if reason:
            raise InputError(
                f"{reason}, so the labels of {data.spec} cannot fit both",
                "Use class names in the data that both models know, or audit them separately.",
            )


def _have_same_samples(first: Outline, other: Outline) -> bool:
    """Return whether two models read the same samples as the same kind of input."""
    if first.kind != other.kind:
        return False
    if first.run.data.suite_id == other.run.data.suite_id:
        return True
    # Ids differ where two models read one file at two sizes: then the places are equal.
    places = first.samples.get("place")
    return bool(places) and places == other.samples.get("place")


def _compare_classes(first: Outline, other: Outline) -> str:
    """Return why the labels of the samples mean different classes in two models, else "".

    They do if the models have different numbers of classes, or if no class among the labels has a
    name that both models know.
    """
    # Labels are class numbers. If each model has other numbers for the same samples, they were
    # looked up by the names of its classes, and so they fit.
    if first.labels is None or first.labels != other.labels:
        return ""
    if first.classes and other.classes and first.classes != other.classes:
        return f"{first.model} has {first.classes} classes, {other.model} {other.classes}"
    reason = ""
    for label in {*first.labels} - {-1}:  # -1: a sample without a label
        names = _list_names(first, label)
        other_names = _list_names(other, label)
        # One class with a common name, or without names: the numbers may mean the same.
        if not names or not other_names or not {*names}.isdisjoint(other_names):
            return ""
        name = ", ".join(names)
        other_name = ", ".join(other_names)
        if not reason:
            reason = f"the class {name!r} of {first.model} is {other_name!r} in {other.model}"
    return reason


def _list_names(outline: Outline, label: int) -> list[str]:
    """Return the names of a class in a model; empty if it has only a number."""
    known = dict(enumerate(outline.names or ()))
    text = known.get(label, "").casefold().replace("_", " ")
    names = []
    # ImageNet has several names for a class, like `tabby, tabby cat`.
    for piece in text.split(","):
        name = piece.strip()
        if name not in ("", f"label {label}"):
            names.append(name)
    return names
