"""What to do after a comparison or a judgement: sentences with commands to paste."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from lipaudit.gate.comparison import Pair
from lipaudit.gate.verdicts import Judgement, Verdict
from lipaudit.measures import find_headline
from lipaudit.report.changes import find_leading
from lipaudit.report.rows import list_distinct
from lipaudit.tables import Report
from lipaudit.tables.formats import CHARACTERS

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
    pair: Pair, reports: Mapping[str, Report], files: Mapping[str, str]
) -> Iterator[Suggestion]:
    """Yield what to do after a comparison.

    Args:
        pair: the comparison of two models.
        reports: the reports by the names of the models.
        files: the files of the reports, likewise; empty if unknown.
    """
    leading = find_leading(pair.verdicts)
    open_ones = [
        verdict
        for verdict in list_distinct(pair.verdicts)
        if verdict.status == "inconclusive" and verdict.samples_needed
    ]
    if open_ones:
        # The main figure if it is open, else a figure of the scorecard, else any; of several, the
        # one that needs the fewest samples.
        first = min(
            open_ones,
            key=lambda verdict: (
                verdict != leading,
                find_headline(verdict.metric) is None,
                verdict.samples_needed or 0,
            ),
        )
        yield from _suggest_samples(first, (reports[pair.old], reports[pair.new]))
    if not files:
        return
    old = files[pair.old]
    new = files[pair.new]
    for sample in pair.samples[:1]:  # those with losses come first
        if sample.lost:
            words = ("inspect", new, sample.id[:CHARACTERS])
            yield Suggestion(text="Look at a sample that got worse.", command=_write(*words))
    command = _write("gate", new, "--baseline", old)
    yield Suggestion(text=f"Make CI fail where {pair.new} is worse.", command=command)


def suggest_after_judgement(
    judgement: Judgement, reports: Sequence[Report], files: Sequence[str]
) -> Iterator[Suggestion]:
    """Yield what to do after a judgement.

    Args:
        judgement: the judgement.
        reports: the reports of the baseline and of the current model; empty if unknown.
        files: their files; empty if unknown.
    """
    # The verdict that needs the most samples decides how many would prove all of them.
    if judgement.outcome == "not proven":
        hardest = max(judgement.verdicts, key=lambda verdict: verdict.samples_needed or 0)
        yield from _suggest_samples(hardest, reports, "gate {new} --baseline {file}")
    command = ""
    if files:
        command = _write("compare", *files)
    yield Suggestion(text="See which samples, groups and heads changed.", command=command)


def _suggest_samples(
    verdict: Verdict, reports: Sequence[Report], judge: str = "compare {file} {new}"
) -> Iterator[Suggestion]:
    """Yield the step to measure two models on so many samples that an open change is proven.

    Args:
        verdict: the verdict, with the number of samples that would prove it.
        reports: the reports of the old and of the new model; empty if unknown.
        judge: the command that measures the new model as the old one was, and judges both.
    """
    needed = verdict.samples_needed or 0
    if not 0 < needed <= MOST * verdict.samples:
        return
    text = (
        f"Measure both models on at least {needed} samples: enough to prove a change of this size "
        f"of {verdict.subject}, which has {verdict.samples}."
    )
    command = ""
    if reports:
        old, new = reports
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

    Both are empty if the command of the report is not `lipaudit MEASURE MODEL OPTIONS`.
    """
    command = report.run.command
    found = MEASURED.fullmatch(command)
    if found is None:
        return "", ""
    folder = f"{samples}-samples"
    file = f"{folder}.json"
    target = f"-o {file}"
    if found[1] == "audit":
        file = f"{folder}/report.json"
        target = f"--run-dir {folder}"
    return f"{REPLACED.sub('', command)} -n {samples} {target}", file


def _write(*words: str) -> str:
    """Return a command of lipaudit for a shell."""
    return shlex.join(["lipaudit", *words])
