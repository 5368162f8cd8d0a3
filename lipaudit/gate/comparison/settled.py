"""What of two reports is fit to be compared: measures that finished, what converged in both."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lipaudit.gate.values import row_names
from lipaudit.results import Array, Report, Section

NAMED = 6
"""How many rows that are left out are named."""


def settled(reports: tuple[Report, Report]) -> tuple[tuple[Report, Report], list[str]]:
    """Leave out of both reports what failed or did not converge in one, and say what.

    A gate refuses such a report whole; a comparison shows what can be seen. A section of which
    nothing would be left stays, and is refused.

    Returns:
        Both reports, and a sentence for each section of which something was left out.
    """
    finished = [_finished(report) for report in reports]
    said = []
    for section in finished[0].sections:
        sections = [report.section(section.measure) for report in finished]
        both = [each for each in sections if each is not None]
        rows = {name for each in both for name in _stuck_rows(each)}
        samples = {name for each in both for name in _stuck_samples(each)}
        kept = [_without(each, rows, samples) for each in both]
        if len(both) < len(reports) or not (rows or samples) or not all(map(_left, kept)):
            continue
        finished = [_with(report, each) for report, each in zip(finished, kept, strict=True)]
        said.append(f"left out, not converged in one of them: {_which(rows, samples, section)}")
    return (finished[0], finished[1]), said


def _finished(report: Report) -> Report:
    """Return a report without the measures that failed; one that was cut short stays so."""
    if not report.failures:
        return report
    kept = tuple(section for section in report.sections if section.failure is None)
    status = report.status if report.unmeasured else "complete"
    return report.model_copy(update={"sections": kept, "status": status})


def _stuck_rows(section: Section) -> list[str]:
    pairs = zip(row_names(section.rows), section.rows, strict=True)
    return [name for name, row in pairs if row.cells().get("converged") is False]


def _stuck_samples(section: Section) -> list[str]:
    flags = section.samples.get("converged", ())
    return [name for name, flag in zip(section.ids, flags, strict=False) if flag is False]


def _without(section: Section, rows: Collection[str], samples: Collection[str]) -> Section:
    """Return a section without some rows and samples.

    What it keeps of each sample over all of its rows goes with any of these.
    """
    down = [i for i, name in enumerate(row_names(section.rows)) if name not in rows]
    across = [i for i, name in enumerate(section.ids) if name not in samples]
    shape = (len(section.rows), len(section.ids))
    columns = section.samples if len(down) == shape[0] else {"ids": section.ids}
    return section.model_copy(
        update={
            "rows": tuple(section.rows[i] for i in down),
            "samples": {
                n: tuple(cells[i] for i in across) for n, cells in columns.items() if cells
            },
            "arrays": {
                name: Array.of(array.numpy()[down][:, across])
                for name, array in section.arrays.items()
                if array.shape == shape
            },
        }
    )


def _left(section: Section) -> bool:
    """Tell whether a section still has rows or samples."""
    return bool(section.rows) and (section.ids != () or "ids" not in section.samples)


def _with(report: Report, section: Section) -> Report:
    sections = (section if s.measure == section.measure else s for s in report.sections)
    return report.model_copy(update={"sections": tuple(sections)})


def _which(rows: Collection[str], samples: Collection[str], section: Section) -> str:
    named: Sequence[str] = sorted(rows)
    more = ", ..." * (len(named) > NAMED)
    parts = [
        f"{len(samples)} of {len(section.ids)} samples" if samples else "",
        f"{', '.join(named[:NAMED])}{more}" if named else "",
    ]
    return f"{' and '.join(filter(None, parts))} of {section.measure}"
