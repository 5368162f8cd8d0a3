"""A time limit: what is finished is reported and kept, what is left is measured later."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from types import SimpleNamespace

import pytest

import lipaudit
from lipaudit.data.batch import Share
from lipaudit.engine import execute
from lipaudit.errors import UsageError
from lipaudit.gate.pairing import find_fault
from lipaudit.measures import load_measures
from lipaudit.report import render
from lipaudit.schema import dumps, load, loads
from lipaudit.settings import RunOptions
from tests.commands import invoke, refuse, replace_parts

pytestmark = pytest.mark.usefixtures("elsewhere", "blank_charts")
JACOBIAN = ("jacobian", "demo", "-n", "5", "--batch-size", "2", "--tol", "0.01")


@contextmanager
def time_for(batches: int) -> Iterator[None]:
    """Let the time of whatever has a limit be up after so many batches."""
    now = chain(repeat(-math.inf, batches), repeat(math.inf))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute, "time", SimpleNamespace(monotonic=lambda: next(now)))
        yield


def test_what_is_measured_in_time_is_reported_and_the_rest_is_measured_later(monkeypatch):
    invoke(*JACOBIAN, "-o", "whole.json")
    whole = load("whole.json").sections[0]
    with time_for(2):
        done = invoke(*JACOBIAN, "--time-limit", "90s", "-o", "cut.json", code=7)
    assert "the time limit ended the run before 1 samples of jacobian" in done.stderr
    assert "--resume" in done.stderr.splitlines()[-1]
    cut = load("cut.json")
    section = cut.sections[0]
    assert (cut.status, cut.unmeasured) == ("partial", {"jacobian": 1})
    assert section.samples["norm"] == whole.samples["norm"][:4]
    assert section.rows[0].samples == 4
    note = next(note for note in section.notes if note.code == "cut-short")
    assert note.text == "the time limit ended jacobian after 4 of 5 samples"
    for format in ("table", "markdown", "html"):
        assert "time limit" in render(cut, format).decode()
    measured = listed(monkeypatch, "jacobian")
    done = invoke(*JACOBIAN, "--time-limit", "1h", "--resume", "-o", "rest.json")
    assert measured == list(whole.samples["ids"][4:])
    assert load("rest.json").sections[0] == whole


def listed(monkeypatch, name: str) -> list[str]:
    """The samples that a measure is given from now on."""
    compute, ids = load_measures()[name].compute, list[str]()

    def parts(net, batches, options):
        def taken():
            for batch in batches:
                ids.extend(batch.ids)
                yield batch

        yield from compute(net, Share(batches.first, taken()), options)

    replace_parts(monkeypatch, name, parts)
    return ids


def test_an_audit_shows_what_it_came_to():
    args = ("audit", "demo", "--only", "attention,jacobian", "-n", "2", "--time-limit", "1m")
    with time_for(1):
        invoke(*args, "--run-dir", "run", code=7)
    report = load("run/report.json")
    first, last = report.sections
    assert report.unmeasured == {"jacobian": 2}
    assert first.rows
    assert first.unmeasured == 0
    assert (last.rows, last.failure) == ((), None)
    invoke(*args, "--run-dir", "run", "--resume")
    assert load("run/report.json").status == "complete"


def test_several_models_have_one_limit():
    with time_for(1):
        reports = lipaudit.audit(
            ["demo", "demo:robust"], ["attention"], samples=1, time_limit="1min"
        )
    assert [report.unmeasured for report in reports] == [{}, {"attention": 1}]
    assert loads(dumps(reports[1])) == reports[1]


def test_a_shard_that_the_limit_ended_is_merged_in_part_and_no_gate_is_passed():
    asked = {"samples": 4, "batch_size": 1}
    with time_for(1):
        cut = lipaudit.measure("demo", "jacobian", shard="1/2", time_limit=60, **asked)
    rest = lipaudit.measure("demo", "jacobian", shard="2/2", **asked)
    whole = lipaudit.measure("demo", "jacobian", **asked).sections[0]
    merged = lipaudit.merge([cut, rest])
    section = merged.sections[0]
    assert (merged.status, merged.unmeasured) == ("partial", {"jacobian": 1})
    assert section.samples["norm"] == tuple(whole.samples["norm"][i] for i in (0, 1, 3))
    note = next(note for note in section.notes if note.code == "cut-short")
    assert note.text == "the time limit ended jacobian after 3 of 4 samples"
    assert "the time limit ended its run" in find_fault(merged, section)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("1.5s", 1.5), ("30min", 1800), ("2m", 120), ("1h30m", 5400), (45, 45)],
)
def test_times_are_read(text, seconds):
    assert RunOptions.parse({"time_limit": text}).time_limit == seconds


@pytest.mark.parametrize("text", ["", "h", "1d", "30m1h", "-5", "0s", 0, math.nan, math.inf])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(UsageError, match="--time-limit"):
        RunOptions.parse({"time_limit": text})


@pytest.mark.parametrize("args", [("train", "demo"), ("watch", ".")])
def test_a_training_has_no_limit(args):
    refuse(2, "--time-limit: only when one MODEL", *args, "--time-limit", "1h")
