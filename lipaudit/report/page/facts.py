"""What was audited and how."""

from __future__ import annotations

from lipaudit.results import Data, Model, Report


def facts(report: Report) -> tuple[tuple[str, str], ...]:
    """Return what was audited and how: all that is needed to read the numbers."""
    run, model, data = report.run, report.run.model, report.run.data
    return (
        ("model", f"{model.spec} ({model.source}, {model.architecture})"),
        ("weights", f"{model.parameters:,} parameters, sha256 {model.weights_sha256[:16]}"),
        ("data", f"{data.spec}, {data.samples} samples, suite {data.suite_id[:16]}"),
        *_commits(report),
        ("run", f"{run.device}, {run.dtype}, seed {run.seed}, {run.created}"),
        ("command", run.command),
        (
            "status",
            report.status if report.shard is None else f"{report.status}, {report.shard.name}",
        ),
        *([("reason", run.reason)] if run.reason else []),
    )


def versions(report: Report) -> str:
    """Name the packages that the figures depend on, with their versions."""
    known = {"lipaudit": report.run.lipaudit} | report.run.versions
    return ", ".join(f"{name} {version}" for name, version in known.items())


def _commits(report: Report) -> list[tuple[str, str]]:
    """Return which states of repositories of the Hugging Face Hub were read."""
    read: dict[str, Model | Data] = {"model": report.run.model, "data": report.run.data}
    return [
        (f"{name} commit", f"{of.commit[:12]} ({of.revision})")
        for name, of in read.items()
        if of.commit
    ]
