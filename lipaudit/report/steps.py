"""What to do after a comparison or a judgement: sentences with commands to paste."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lipaudit.gate.comparison import Pair
from lipaudit.gate.verdicts import Judgement, Verdict
from lipaudit.measures import find_headline
from lipaudit.report.changes import find_leading
from lipaudit.report.rows import list_distinct
from lipaudit.tables import Report
from lipaudit.tables.formats import CHARACTERS, format_count

# A change that needs more times as many samples is as good as none: no step asks for them.
MOST = 100
# The command of a measurement: the measure, MODEL and options.
MEASURED = re.compile(r"lipaudit (?!gate|compare|merge)(\w+) [^-].*")
# Options that depend on the number of samples, or name the files of a run.
REPLACED = re.compile(
    r" (-n|--samples|-q?o|--output|--run-dir|--parts)[ =]('[^']*'|\S+)| --resume"
)


class Suggestion(NamedTuple):
    """One thing to do next, a point of a list (`blocks.Points`).

    Attributes:
        mark: the mark of a note; steps have none.
        text: a sentence.
        command: a command to paste; empty for none.
    """

    mark: str = ""
    text: str = ""
    command: str = ""


def suggest_after_comparison(
    pair: Pair, reports: Sequence[Report], files: Sequence[str]
) -> Iterator[Suggestion]:
    """Yield what to do after a comparison of two models.

    The steps are to measure more samples if a change is not proven, to look at a sample that got
    worse, and to use the gate.

    Args:
        pair: the comparison of two models.
        reports: the reports of the old and of the new model.
        files: the files of these reports; empty if unknown.
    """
    for verdict in _sort_unproven(pair)[:1]:  # empty if all changes are proven
        yield from _suggest_samples(verdict, reports)
    if not files:
        return
    old, new = files
    for sample in pair.samples[:1]:  # samples that got worse come first, if there are any
        if sample.lost:
            command = _write("inspect", new, sample.id[:CHARACTERS])
            yield Suggestion(text="Look at a sample that got worse.", command=command)
    command = _write("gate", new, "--baseline", old)
    yield Suggestion(text=f"Make CI fail where {pair.new} is worse.", command=command)


def _sort_unproven(pair: Pair) -> list[Verdict]:
    """Return the verdicts on changes that more samples may prove, the most useful verdict first.

    The main figure, such as robust accuracy, comes first, then figures of the scorecard, then all
    others; among these, the figure that needs the fewest samples.
    """
    leading = find_leading(pair.verdicts)  # on the main figure
    unproven = [
        verdict
        for verdict in list_distinct(pair.verdicts)
        if verdict.status == "inconclusive" and verdict.samples_needed
    ]
    unproven.sort(
        key=lambda verdict: (
            verdict != leading,
            find_headline(verdict.metric) is None,
            verdict.samples_needed or 0,
        )
    )
    return unproven


def suggest_after_judgement(
    judgement: Judgement, reports: Sequence[Report], files: Sequence[str]
) -> Iterator[Suggestion]:
    """Yield what to do after a judgement of the gate: measure more samples, and compare.

    Args:
        judgement: the judgement.
        reports: the reports of the baseline and of the current model; empty if unknown.
        files: the files of these reports; empty if unknown.
    """
    if judgement.outcome == "not proven":
        # To prove all verdicts, as many samples are needed as for the hardest one.
        hardest = max(judgement.verdicts, key=lambda verdict: verdict.samples_needed or 0)
        yield from _suggest_samples(hardest, reports, judge="gate {new} --baseline {file}")
    command = ""
    if files:
        command = _write("compare", *files)
    yield Suggestion(text="See which samples, groups and heads changed.", command=command)


def _suggest_samples(
    verdict: Verdict, reports: Sequence[Report], judge: str = "compare {file} {new}"
) -> Iterator[Suggestion]:
    """Yield the step to measure two models on enough samples to prove a change.

    Nothing is suggested if the number is unknown, or over MOST times the number of samples today.

    Args:
        verdict: the verdict on the change, with the number of samples that would prove it.
        reports: the reports of the old and of the new model; empty if unknown.
        judge: a command that measures the model {new} on the samples of the report {file} of the
            old model, and compares the two.
    """
    needed = verdict.samples_needed or 0
    if not 0 < needed <= MOST * verdict.samples:
        return
    text = (
        f"Measure both models on at least {format_count(needed)}: enough to prove a change of "
        f"this size of {verdict.subject}, which has {verdict.samples}."
    )
    command = ""
    if reports:
        old, new = reports
        # Other figures of the report may have more samples than this one.
        count = max(needed, old.run.data.samples)
        command, file = repeat_command(old, count)
        if command:
            if count > needed:
                text += f" The command takes {count}, so that no figure gets fewer than before."
            model = shlex.quote(new.run.model.spec)
            command += f" && lipaudit {judge.format(new=model, file=file)}"
    yield Suggestion(text=text, command=command)


def repeat_command(report: Report, samples: int) -> tuple[str, str]:
    """Return the command that measures a model again on more samples, and the file of its report.

    For example, `lipaudit attack demo -n 8` and 64 samples give `lipaudit attack demo -n 64 -o
    64-samples.json` and `64-samples.json`. Both are empty if the command of the report is not
    `lipaudit MEASURE MODEL OPTIONS`.
    """
    command = report.run.command
    match = MEASURED.fullmatch(command)  # its first group is the measure
    if match is None:
        return "", ""
    name = f"{samples}-samples"
    file = f"{name}.json"
    output = f"-o {file}"
    if match[1] == "audit":  # an audit writes a folder
        file = f"{name}/report.json"
        output = f"--run-dir {name}"
    # Without the old options for the number of samples and the files.
    return f"{REPLACED.sub('', command)} -n {samples} {output}", file


def _write(*words: str) -> str:
    """Return a command of lipaudit for a shell."""
    return shlex.join(["lipaudit", *words])
