"""Several models on the same samples: what is known of each before any is measured."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lipaudit.data.batch import Origin
from lipaudit.engine.prepare import Job
from lipaudit.engine.provenance import describe_run, list_origins, make_failed
from lipaudit.errors import InputError, LipauditError, UsageError, visible
from lipaudit.models.net import Kind
from lipaudit.tables import Report, Run

TAKES: Mapping[Kind, str] = {"image": "images", "text": "text", "tokens": "sequences of numbers"}
APART = "Audit them separately."


@dataclass(frozen=True)
class Outline:
    """What is kept of a job while the models of others are in memory.

    Attributes:
        model: as it was named.
        kind: of its inputs.
        classes: how many it has; None: none.
        names: of the classes, where the checkpoint knows them.
        labels: of the samples, as the model numbers its classes; None: they have none.
        ids: of the samples.
        origins: where they are found; empty of samples that are made up.
        counts: how many of them each measure takes.
        measures: the options of each, as its section has them.
        run: as the report will have it.
        samples: where they are found, as the report will have it.
    """

    model: str
    kind: Kind
    classes: int | None
    names: tuple[str, ...] | None
    labels: tuple[int, ...] | None
    ids: tuple[str, ...]
    origins: tuple[Origin, ...]
    counts: Mapping[str, int]
    measures: Mapping[str, dict[str, Any]]
    run: Run
    samples: dict[str, tuple[str, ...]]


def outline_job(job: Job) -> Outline:
    """Keep what several models are compared by."""
    net, batch = job.net, job.samples.batch
    return Outline(
        model=job.request.model,
        kind=net.kind,
        classes=net.classes,
        names=net.info.labels,
        labels=None if batch.y is None else tuple(batch.y.tolist()),
        ids=batch.ids,
        origins=job.samples.origins,
        counts=job.counts,
        measures={name: options.model_dump() for name, options in job.request.measures.items()},
        run=describe_run(job),
        samples=list_origins(job.samples),
    )


@contextmanager
def name_errors(model: str) -> Iterator[None]:
    """Say in errors which of several models they are of; free the memory of it at the end.

    Raises:
        LipauditError: what the block raises, with the model's name in front.
    """
    try:
        yield
    except LipauditError as error:
        error.message = f"{visible(model)}: {error.message}"
        raise
    finally:
        gc.collect()  # a module may hold itself, and the next one takes its place


def require_shared(outlines: Sequence[Outline]) -> None:
    """Refuse models that cannot be measured on the same samples.

    Raises:
        UsageError: a model is named twice.
        InputError: they take other inputs, have other classes, or do not see the same samples.
    """
    first, *others = outlines
    for i, other in enumerate(others, start=1):
        if other.model in (each.model for each in outlines[:i]):
            raise UsageError(f"{other.model} is named twice", "Name each model once.")
        if other.kind != first.kind:
            raise InputError(
                f"{first.model} takes {TAKES[first.kind]}, {other.model} {TAKES[other.kind]}, "
                "so they cannot share samples",
                APART,
            )
        _require_same_samples(first, other)
        _require_same_classes(first, other)


def _require_same_samples(first: Outline, other: Outline) -> None:
    if first.ids == other.ids or (first.origins and first.origins == other.origins):
        return
    specs = [each.run.data.spec for each in (first, other)]
    if specs[0] != specs[1]:
        text = f"{first.model} would be measured on {specs[0]}, but {other.model} on {specs[1]}"
        raise InputError(text, "Give samples that both can read with --data.")
    advice = f"Give --data that both can read: a folder of images, a table of texts. {APART}"
    if not first.origins:
        advice = "Random samples depend on the model's input: give real samples with --data."
    raise InputError(
        f"{first.model} and {other.model} do not read the same samples from {specs[0]}", advice
    )


def _require_same_classes(first: Outline, other: Outline) -> None:
    """Refuse labels that mean other classes in each model; equal numbers alone say nothing."""
    if first.labels is None or first.labels != other.labels:
        return
    said = ""
    if first.classes and other.classes and first.classes != other.classes:
        said = f"{first.model} has {first.classes} classes, {other.model} {other.classes}"
    pairs = [
        (_list_names(first, i), _list_names(other, i)) for i in sorted({*first.labels} - {-1})
    ]
    if pairs and all(one and two and not {*one} & {*two} for one, two in pairs):
        one, two = (", ".join(names) for names in pairs[0])
        said = f"the class {one!r} of {first.model} is {two!r} in {other.model}"
    if said:
        raise InputError(
            f"{said}, so the labels of {first.run.data.spec} cannot fit both",
            f"Use class names in the data that both models know. {APART}",
        )


def _list_names(outline: Outline, label: int) -> list[str]:
    """Return what a class is called; nothing where it has no name but its number."""
    if not outline.names or label >= len(outline.names):
        return []
    # ImageNet has names like `tabby, tabby cat`: one name in common is enough.
    name = outline.names[label].casefold().replace("_", " ")
    words = (word.strip() for word in name.split(","))
    return [word for word in words if word and word != f"label {label}"]


def make_failed_report(outline: Outline, error: Exception) -> Report:
    """Return the report of a model that could not be measured: every section says why."""
    sections = tuple(make_failed(*each, error) for each in outline.measures.items())
    return Report(run=outline.run, status="partial", samples=outline.samples, sections=sections)
