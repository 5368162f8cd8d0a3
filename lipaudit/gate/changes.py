"""Compare reports sample by sample: figures, heads, and samples whose result changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from lipaudit.errors import BaselineError, UsageError
from lipaudit.gate.comparable import REPEAT, SPOILING, has_same_weights, list_differences
from lipaudit.gate.judging import TOLERANCE, Contrast, examine, judge_change
from lipaudit.gate.pairing import find_unsettled, match_samples, name_rows
from lipaudit.gate.rules import Rule, no_change
from lipaudit.gate.statistics import ALPHA, compute_two_sided, correct_by_holm
from lipaudit.gate.verdicts import Verdict
from lipaudit.tables import Column, Report, Section, model_labels
from lipaudit.tables.columns import Float, Frozen
from lipaudit.tables.figures import order
from lipaudit.tables.trials import FLAGS, TrialKey, parse_column


class HeadChange(Verdict):
    """The verdict on the change of one head, with 95 % limits for this head alone.

    Its p-value is two-sided, of "it has not changed beyond the accuracy of norms" (Student's t);
    `p_adjusted` is the same after Holm's correction over the heads of the column.

    Attributes:
        layer: layer of the head.
        head: number of the head in the layer.
    """

    layer: int
    head: int

    @property
    def stands(self) -> bool:
        """Return whether the change is proven after the correction over all heads (at 5 %)."""
        return self.p_adjusted is not None and self.p_adjusted <= ALPHA


class SampleChange(Frozen):
    """One sample in both reports.

    Attributes:
        id: its id.
        place: its place in the data; empty if unknown.
        figures: its figures in both reports, by metric (`jacobian.norm`); yes is 1 and no is 0.
        lost: the metrics that changed from yes to no.
        gained: the metrics that changed from no to yes.
    """

    id: str
    place: str
    figures: dict[str, tuple[Float, Float]]
    lost: tuple[str, ...] = ()
    gained: tuple[str, ...] = ()


class Pair(Frozen):
    """The comparison of one model with the first.

    Attributes:
        old: name of the first model.
        new: name of the other.
        verdicts: one per metric: improved, regressed, unchanged, not comparable, or inconclusive
            (its 95 % interval contains 0). A column of rows is judged by its median over the rows,
            sample by sample; without values per sample it is compared without an interval.
        heads: changes of heads, column by column.
        samples: the shared samples, those with the most losses first, the most gains last.
        warnings: differences that invalidate the comparison: other data, samples or settings.
        notes: other differences.
    """

    old: str
    new: str
    verdicts: tuple[Verdict, ...]
    heads: tuple[HeadChange, ...]
    samples: tuple[SampleChange, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


class Comparison(Frozen):
    """The result of `lipaudit compare`.

    Attributes:
        models: names of the models in the order given.
        pairs: every further model, compared with the first.
    """

    models: tuple[str, ...]
    pairs: tuple[Pair, ...]


MAPPED = {"bounds": ("exact", "sharp"), "attention": ("softmax_norm", "intermediate")}
"""Columns compared head by head. In other sections: all columns with a better direction."""
LISTED = 6
"""Number of left-out rows that a note names."""
UNFINISHED = "Finish the run (same command with --resume), or merge its shards."


def compare(reports: Sequence[Report]) -> Comparison:
    """Compare every report with the first one on their shared samples.

    Intervals hold for each metric alone: a comparison explores, the gate decides.

    Raises:
        UsageError: there are fewer than two reports.
        BaselineError: the reports have nothing in common.
    """
    if len(reports) < 2:
        raise UsageError("compare needs at least two reports", "lipaudit compare A.json B.json")
    names = model_labels(reports)
    matched, by_place = match_samples(reports, names)
    pairs = tuple(
        _compare_two(matched[0], report, (names[0], name), by_place.get(name, ""))
        for report, name in zip(matched[1:], names[1:], strict=True)
    )
    verdicts = [verdict for pair in pairs for verdict in pair.verdicts]
    if all(verdict.reason for verdict in verdicts):
        reason = verdicts[0].reason if verdicts else "they have no common section"
        whole = all(r.shard is None and r.status == "complete" for r in reports)
        raise BaselineError(
            f"the reports cannot be compared: {reason}", REPEAT if whole else UNFINISHED
        )
    return Comparison(models=tuple(names), pairs=pairs)


def _compare_two(old: Report, new: Report, names: tuple[str, str], by_place: str) -> Pair:
    measured = [{s.measure: s for s in r.sections if s.failure is None} for r in (old, new)]
    differing = list_differences(new, old)
    warnings = [text for name, text in differing.items() if name.split()[0] in SPOILING]
    warnings += [by_place] if by_place else []
    warnings += ["both reports are of the same weights"] if has_same_weights(new, old) else []
    # Sections and columns of one report alone, and whether it is the first.
    unpaired = [(name, name in measured[0]) for name in measured[0].keys() ^ measured[1].keys()]
    verdicts, heads = list[Verdict](), list[HeadChange]()
    sampled = list[tuple[Rule, Contrast]]()
    for measure in (name for name in measured[0] if name in measured[1]):
        before, after = (sections[measure] for sections in measured)
        warnings += _describe_left_out(before, after)
        for name, column in _list_columns(before, after):
            metric = f"{measure}.{name}"
            figures = [_list_figures(section, name) for section in (before, after)]
            if not all(figures):
                unpaired += [(metric, bool(figures[0]))] if any(figures) else []
                continue
            stats = ["median"]
            if name in before.sample_columns:
                stats = ["mean"] if name in FLAGS else ["median", "p95"]
            for stat in stats:
                rule = no_change(f"{metric}:{stat}", column, chain(*figures), (before, after))
                examined = examine(rule, new, old, lenient=True)
                if isinstance(examined, Verdict):
                    verdicts.append(examined)
                    continue
                verdicts += (judge_change(rule, contrast) for contrast in examined)
                if rule.per_sample and stat != "p95":  # its samples are those of the median
                    sampled += ((rule, contrast) for contrast in examined)
            if name in MAPPED.get(measure, (name,)) and {"layer", "head"} <= after.columns.keys():
                rule = no_change(f"{metric}:each", column, chain(*figures), (before, after))
                heads += _judge_heads(rule, old, new)
    notes = [
        f"not compared, because only {names[0] if first else names[1]} has it: {name}"
        for name, first in sorted(unpaired)
    ]
    notes += (text for name, text in differing.items() if name.split()[0] not in SPOILING)
    return Pair(
        old=names[0],
        new=names[1],
        verdicts=tuple(verdicts),
        heads=tuple(heads),
        samples=_list_samples(sampled, old.found("place") | new.found("place")),
        warnings=tuple(warnings),
        notes=tuple(notes),
    )


def _list_columns(before: Section, after: Section) -> Iterator[tuple[str, Column]]:
    """Yield the columns with a better direction, per-sample columns first."""
    sampled = before.sample_columns
    for name, column in {**sampled, **before.columns, **after.columns, **sampled}.items():
        if column.better or (name in sampled and name == "correct"):
            yield name, column


def _list_figures(section: Section, name: str) -> list[float]:
    """Return the figures of a column: of all trials, or of all rows."""
    if name in section.sample_columns:
        columns = section.samples.items()
        cells: list[Any] = [v for c, each in columns if parse_column(c)[0] == name for v in each]
    else:
        # Rows of balls and attacks repeat what their samples say.
        plain = not section.sample_columns
        cells = [row.get(name) for row in section.rows if plain or "layer" in row]
    return [float(cell) for cell in cells if isinstance(cell, int | float)]


def _describe_left_out(before: Section, after: Section) -> Iterator[str]:
    """Say which rows and samples of two sections are not compared."""
    measure, (rows, samples) = before.measure, find_unsettled((before, after))
    which = [f"{len(samples)} of {len(before.ids)} samples"] if samples else []
    if rows:
        more = ", ..." if len(rows) > LISTED else ""
        which.append(", ".join(sorted(map(str, rows))[:LISTED]) + more)
    if which:
        yield f"left out, because not converged in one report: {' and '.join(which)} of {measure}"
    one, two = set(before.ids), set(after.ids)
    if one != two and one & two:
        yield (
            f"compared over the {len(one & two)} shared samples (of {len(one)} and {len(two)}): "
            f"{measure}"
        )


def _judge_heads(rule: Rule, old: Report, new: Report) -> Iterator[HeadChange]:
    """Yield the change of every head in a column; none if the models cannot be compared."""
    examined, section = examine(rule, new, old, lenient=True), new.section(rule.measure)
    if isinstance(examined, Verdict) or section is None:
        return
    # Two-sided, and beyond the accuracy of norms: a head may move either way.
    tests = {
        contrast.name: compute_two_sided(contrast.changes, TOLERANCE)
        for contrast in examined
        if contrast.changes.size
    }
    adjusted = dict(zip(tests, correct_by_holm([*tests.values()], ALPHA)[0], strict=True))
    rows = dict(zip(name_rows(section), section.rows, strict=True))
    for contrast in examined:
        name = contrast.name
        fields = dict(judge_change(rule, contrast))
        fields |= {"p": tests.get(name), "p_adjusted": adjusted.get(name)}
        yield HeadChange(**fields, layer=rows[name]["layer"], head=rows[name]["head"])


def _list_samples(
    contrasts: Sequence[tuple[Rule, Contrast]], places: Mapping[str, str]
) -> tuple[SampleChange, ...]:
    """Return all shared samples with their figures, the worst change first."""
    figures: dict[str, dict[str, tuple[float, float]]] = {}
    turned: dict[str, dict[str, float]] = {}
    owners: dict[tuple[str, str], str] = {}
    for rule, contrast in contrasts:
        trial, metric = TrialKey.parse(contrast.name), f"{rule.measure}.{rule.column}"
        # Attacks and certificates repeat what others say of the same ball: the first one counts.
        owner = owners.setdefault((rule.column, trial.ball if trial else ""), rule.measure)
        if rule.column in FLAGS and owner != rule.measure:
            continue
        name = metric + (f"@{contrast.name}" if contrast.name else "")
        values = zip(contrast.ids, contrast.before, contrast.now, contrast.changes, strict=False)
        for sample, before, now, worse in values:
            figures.setdefault(sample, {})[name] = float(before), float(now)
            if rule.column in FLAGS and worse:
                turned.setdefault(sample, {})[name] = float(worse)
    samples = [
        SampleChange(
            id=sample,
            place=places.get(sample, ""),
            figures=known,
            lost=tuple(name for name, worse in turned.get(sample, {}).items() if worse > 0),
            gained=tuple(name for name, worse in turned.get(sample, {}).items() if worse < 0),
        )
        for sample, known in figures.items()
    ]

    def rank(change: SampleChange) -> tuple[int, float]:
        norm = change.figures.get("jacobian.norm", (None, None))[1]
        return len(change.gained) - len(change.lost), -order(norm)

    # Those that lost most first; of equal ones that with the larger norm.
    return tuple(sorted(samples, key=rank))
