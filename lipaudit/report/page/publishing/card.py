"""A report as a model card: figures for programs, and how they were measured for people."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from lipaudit.report.blocks import Card, Chapter, Document, Paragraph, Scorecard, Table
from lipaudit.report.cells import STATUS, standing
from lipaudit.report.page.facts import facts, versions
from lipaudit.report.page.remarks import lack, leading
from lipaudit.report.page.scorecard import scorecard
from lipaudit.results import Column, Report
from lipaudit.results.figures import finite
from lipaudit.results.history import KINDS
from lipaudit.results.summary import Accuracy, Norms, Radii, Summary, summary

TAGS = ("lipaudit", "robustness")
LIBRARIES = {"hf": "transformers", "timm": "timm"}
"""Which library loads a model, by its source."""
TASKS = {
    ("pixels", "logits"): "image-classification",
    ("pixels", "features"): "image-feature-extraction",
    ("embeddings", "logits"): "text-classification",
    ("embeddings", "features"): "feature-extraction",
    ("embeddings", "logits:last"): "text-generation",
}
"""What the Hub calls a model, by where its Jacobian begins and ends."""
UNFIT = ("random-weights", "random-data")
"""Warnings with which figures say nothing of a trained model on real data."""
METRICS = {
    "clean": "accuracy",
    "attacked": "robust_accuracy",
    "certified": "certified_accuracy",
}
POINTWISE = (
    "What is exact, empirical, or a bound at X is of the samples X that were measured and says "
    "nothing certain of any other input: it is no guarantee. "
)
PROVEN = (
    "What is certified is one, on the domain that stands beside it and nowhere else; a bound of a "
    "head is none of the model's answers."
)
UNPROVEN = "Nothing here is certified."
_HUB = re.compile(
    r"hf:(?P<name>[\w.-]+(?:/[\w.-]+)?)(?:/(?P<config>[\w.-]+))?\[(?P<split>.+)\](?:@.+)?"
)
_NO_NAME = re.compile(r"[^\w.-]+", re.ASCII)


def card(report: Report) -> Card:
    """Return the model card of a report.

    Figures go to programs only where they say something of a trained model on real data: those of
    random weights or data, of a shard, or of a run that was cut short, stand in the section alone,
    below the warning.
    """
    summed = summary(report)
    front: dict[str, Any] = {}
    if report.run.model.source in LIBRARIES:
        front["library_name"] = LIBRARIES[report.run.model.source]
    front["tags"] = list(TAGS)
    metrics = [] if unfit(report) else list(_metrics(summed))
    if metrics:
        result = {"task": {"type": _task(summed)}, "dataset": _dataset(report), "metrics": metrics}
        front["model-index"] = [{"name": _name(report.run.model.spec), "results": [result]}]
    return Card(front, _section(report))


def unfit(report: Report) -> str:
    """Say why no figure of a report may stand without its warnings; nothing where they may."""
    if report.shard is not None:
        return report.shard.name
    if report.status != "complete":
        return report.status
    warned = [warning.code for warning in summary(report).warnings if warning.code in UNFIT]
    return warned[0].replace("-", " ") if warned else ""


def _metrics(summed: Summary) -> Iterator[dict[str, Any]]:
    radii = [_radius(summed.radii)] if summed.radii else []
    norms = _norms(summed.norms) if summed.norms else ()
    for metric in (*map(_accuracy, summed.accuracy), *radii, *norms):
        if finite([metric["value"]]):
            yield metric


def _metric(kind: str, name: str, value: float | None, args: dict[str, Any]) -> dict[str, Any]:
    said = {key: of for key, of in args.items() if of or finite([of])}
    return {"type": kind, "name": name, "value": value, "args": said, "verified": False}


def _accuracy(accuracy: Accuracy) -> dict[str, Any]:
    name = KINDS[accuracy.kind][0]
    args = accuracy.model_dump(exclude={"kind", "ball", "share"})
    args["attacks"] = list(accuracy.attacks)
    named = f"{name}, {accuracy.ball}" if accuracy.ball else name
    return _metric(METRICS[accuracy.kind], named, accuracy.share, args)


def _radius(radii: Radii) -> dict[str, Any]:
    args = radii.model_dump(exclude={"median", "adversarial"})
    return _metric(
        "certified_radius", f"certified radius, {radii.norm}, median", radii.median, args
    )


def _norms(norms: Norms) -> Iterator[dict[str, Any]]:
    args = {"from": norms.start, "to": norms.end, "norm": norms.norm, "samples": norms.samples}
    for statistic in ("median", "p95", "max"):
        name = f"Jacobian norm, {statistic}"
        yield _metric("jacobian_norm", name, getattr(norms, statistic), args)


def _task(summed: Summary) -> str:
    """Name the task as the Hub does, as far as the figures tell."""
    norms = summed.norms
    return TASKS.get((norms.start, norms.end), "other") if norms else "other"


def _dataset(report: Report) -> dict[str, Any]:
    """Name the data as the Hub does: a data set of the Hub by its parts, others by their file."""
    data, hub = report.run.data, _HUB.fullmatch(report.run.data.spec)
    if hub is None:
        name = _name(data.spec)
        return {"type": name, "name": name}
    parts = {"config": hub["config"], "split": hub["split"], "revision": data.commit}
    named = {"type": hub["name"], "name": hub["name"]}
    return named | {key: value for key, value in parts.items() if value}


def _name(spec: str) -> str:
    """Name a model or data without the path on this machine, in characters that the Hub takes."""
    source, _, rest = spec.partition(":")
    place = rest.partition("@")[0] if source in ("hf", "hf-hub", "timm") else spec
    return _NO_NAME.sub("-", PurePath(place).name).strip("-.") or "unnamed"


def _section(report: Report) -> Document:
    figures = scorecard(report)
    if figures:  # what to type next is for whoever measured it, not for who reads a card
        figures = Scorecard(tuple(replace(line, command="") for line in figures.lines))
    return Document(
        title="Robustness (lipaudit)",
        facts=(),
        findings=(),
        partial=lack(report),
        notes=leading(report),
        scorecard=figures,
        chapters=(
            Chapter("measured", "How it was measured", (_measured(report),)),
            Chapter("meaning", "What the figures mean", tuple(_meaning(figures, summary(report)))),
        ),
    )


def _measured(report: Report) -> Table:
    columns = (Column(label=name, meaning="", format="s") for name in ("fact", "value"))
    rows = (*facts(report), ("versions", versions(report)))
    return Table("", tuple(columns), rows)


def _meaning(figures: Scorecard | None, summed: Summary) -> Iterator[Paragraph]:
    """Say how far each figure of a scorecard carries, and no further."""
    lines = figures.lines if figures else ()
    columns = (line.column for line in lines if standing(line.column))
    present = {column.status for column in columns} | {each.status for each in summed.bounds}
    yield Paragraph(" ".join(f"{n.capitalize()}: {STATUS[n]}." for n in STATUS if n in present))
    yield Paragraph(POINTWISE + (PROVEN if "certified" in present else UNPROVEN))
    for line in {line.column.label: line for line in lines if line.column.reading}.values():
        reading = line.column.reading.replace("\n", " ")
        yield Paragraph(f"{line.label.partition(',')[0].capitalize()}: {reading}")
