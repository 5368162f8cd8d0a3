"""Several models on the same samples: check them before any is measured."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lipaudit.data.batch import SampleOrigin
from lipaudit.engine.prepare import Job
from lipaudit.engine.provenance import describe_run, list_origins, make_failed
from lipaudit.errors import InputError, LipauditError, UsageError, visible
from lipaudit.models.net import Kind
from lipaudit.tables import Report, Run

TAKES: Mapping[Kind, str] = {"image": "images", "text": "text", "tokens": "sequences of numbers"}


@dataclass(frozen=True)
class Outline:
    """Facts about a job that stay in memory while other models are loaded.

    Attributes:
        model: the MODEL argument.
        kind: kind of its inputs.
        classes: number of classes; None without classes.
        names: class names, if the checkpoint has them.
        labels: class numbers of the samples; None without labels.
        ids: ids of the samples.
        origins: places of the samples in the data; empty for random samples.
        measures: options of each measure, as in its section.
        run: the run, as in the report.
        samples: places of the samples, as in the report.
    """

    model: str
    kind: Kind
    classes: int | None
    names: tuple[str, ...] | None
    labels: tuple[int, ...] | None
    ids: tuple[str, ...]
    origins: tuple[SampleOrigin, ...]
    measures: Mapping[str, dict[str, Any]]
    run: Run
    samples: dict[str, tuple[str, ...]]


def outline_job(job: Job) -> Outline:
    """Return the facts by which several models are compared."""
    net, batch = job.net, job.samples.batch
    return Outline(
        model=job.request.model,
        kind=net.kind,
        classes=net.classes,
        names=net.labels,
        labels=None if batch.y is None else tuple(batch.y.tolist()),
        ids=batch.ids,
        origins=job.samples.origins,
        measures={name: options.model_dump() for name, options in job.request.measures.items()},
        run=describe_run(job),
        samples=list_origins(job.samples),
    )


@contextmanager
def name_errors(model: str) -> Iterator[None]:
    """Name the model in every error of the block, and free its memory at the end.

    Raises:
        LipauditError: the error of the block, with the model's name in front.
    """
    try:
        yield
    except LipauditError as error:
        error.message = f"{visible(model)}: {error.message}"
        raise
    finally:
        gc.collect()  # a module may reference itself, and the next model needs its memory


def require_shared(outlines: Sequence[Outline]) -> None:
    """Refuse models that cannot be measured on the same samples.

    Raises:
        UsageError: a model is named twice.
        InputError: inputs, classes or samples of the models differ.
    """
    first, *others = outlines
    for i, other in enumerate(others, start=1):
        if other.model in (each.model for each in outlines[:i]):
            raise UsageError(f"{other.model} is named twice", "Name each model once.")
        if other.kind != first.kind:
            raise InputError(
                f"{first.model} takes {TAKES[first.kind]}, {other.model} {TAKES[other.kind]}, "
                "so they cannot share samples",
                "Audit them separately.",
            )
        # Ids differ where two models read one file at two sizes: then the places are equal.
        if first.ids != other.ids and not (first.origins and first.origins == other.origins):
            raise InputError(
                f"{first.model} and {other.model} do not read the same samples: "
                f"{first.run.data.spec} and {other.run.data.spec}",
                "Give --data that both can read: a folder of images, a table of texts. Random "
                "samples depend on the model's input.",
            )
        if reason := _compare_classes(first, other):
            raise InputError(
                f"{reason}, so the labels of {first.run.data.spec} cannot fit both",
                "Use class names in the data that both models know, or audit them separately.",
            )


def _compare_classes(first: Outline, other: Outline) -> str:
    """Return why labels mean other classes in another model; empty if they may not.

    Labels that differ were matched by name, so they mean the same.
    """
    if first.labels is None or first.labels != other.labels:
        return ""
    if first.classes and other.classes and first.classes != other.classes:
        return f"{first.model} has {first.classes} classes, {other.model} {other.classes}"
    pairs = [(_list_names(first, i), _list_names(other, i)) for i in {*first.labels} - {-1}]
    if not pairs or not all(one and two and not {*one} & {*two} for one, two in pairs):
        return ""
    one, two = (", ".join(names) for names in pairs[0])
    return f"the class {one!r} of {first.model} is {two!r} in {other.model}"


def _list_names(outline: Outline, label: int) -> list[str]:
    """Return the names of a class; empty if it has only a number."""
    if not outline.names or label >= len(outline.names):
        return []
    # ImageNet has names like `tabby, tabby cat`: one common name suffices.
    words = outline.names[label].casefold().replace("_", " ").split(",")
    return [w.strip() for w in words if w.strip() not in ("", f"label {label}")]


def make_failed_report(outline: Outline, error: Exception) -> Report:
    """Return the report of a model that could not be measured: every section has the reason."""
    sections = tuple(make_failed(*each, error) for each in outline.measures.items())
    return Report(run=outline.run, status="partial", samples=outline.samples, sections=sections)
