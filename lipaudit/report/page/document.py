"""One page out of one report, or out of several side by side."""

from __future__ import annotations

from collections.abc import Sequence

from lipaudit.report.blocks import Block, Document, Paragraph, Part, Table
from lipaudit.report.cells import STATUS
from lipaudit.report.page.diagnosis import diagnosis
from lipaudit.report.page.views import TITLES, blocks, comparison, listed
from lipaudit.results import Column, Report, labels

LEGEND = " ".join(f"{name.capitalize()}: {meaning}." for name, meaning in STATUS.items())


def document(*reports: Report, lead: Sequence[Part] = ()) -> Document:
    """Lay out a report; several reports are set side by side, below the parts that lead."""
    return _single(reports[0]) if len(reports) == 1 else _several(reports, lead)


def facts(report: Report) -> tuple[tuple[str, str], ...]:
    """Return what was audited and how: all that is needed to read the numbers."""
    run, model, data = report.run, report.run.model, report.run.data
    return (
        ("model", f"{model.spec} ({model.source}, {model.architecture})"),
        ("weights", f"{model.parameters:,} parameters, sha256 {model.weights_sha256[:16]}"),
        ("data", f"{data.spec}, {data.samples} samples, suite {data.suite_id[:16]}"),
        ("run", f"{run.device}, {run.dtype}, seed {run.seed}, {run.created}"),
        ("command", run.command),
        ("status", report.status),
        *([("reason", run.reason)] if run.reason else []),
    )


def _single(report: Report) -> Document:
    run = report.run
    found = tuple((finding.text, finding.source) for finding in diagnosis(report))
    preprocess = "; ".join(f"{name} {listed(value)}" for name, value in run.preprocess.items())
    versions = {"lipaudit": run.lipaudit} | run.versions
    last = (
        Paragraph(LEGEND),
        *([Paragraph(f"Preprocessing: {preprocess}.")] if preprocess else []),
        Paragraph(", ".join(f"{name} {version}" for name, version in versions.items()) + "."),
    )
    return Document(
        title=f"lipaudit: {run.model.spec}",
        facts=facts(report),
        findings=found,
        parts=(
            *(
                Part(s.measure, TITLES.get(s.measure, s.measure), blocks(s))
                for s in report.sections
            ),
            Part("reading", "How to read the figures", last),
        ),
        partial=report.status == "partial",
    )


def _several(reports: Sequence[Report], lead: Sequence[Part]) -> Document:
    names = labels(reports)
    measures = dict.fromkeys(s.measure for report in reports for s in report.sections)
    parts = []
    for measure in measures:
        sections = {
            name: section
            for name, report in zip(names, reports, strict=True)
            if (section := report.section(measure)) is not None
        }
        parts.append(Part(measure, TITLES.get(measure, measure), comparison(sections)))
    return Document(
        title=f"lipaudit: {len(reports)} models side by side",
        facts=(),
        findings=(),
        parts=(
            Part("models", "Models", (_models(names, reports),)),
            *lead,
            *parts,
            Part("reading", "How to read the figures", (Paragraph(LEGEND),)),
        ),
        partial=any(report.status == "partial" for report in reports),
    )


def _models(names: Sequence[str], reports: Sequence[Report]) -> Block:
    columns = ("fact", *names)
    told = [dict(facts(report)) for report in reports]
    keys = dict.fromkeys(name for each in told for name in each)
    return Table(
        title="What was audited",
        columns=tuple(Column(label=name, meaning="", format="s") for name in columns),
        rows=tuple((key, *(each.get(key) for each in told)) for key in keys),
    )
