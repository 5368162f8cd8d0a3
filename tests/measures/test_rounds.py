"""Attacks round by round: what survives so far, a time limit that cuts in, and what goes on."""

import itertools
import re
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

import lipaudit
from lipaudit.attacks import kinds
from lipaudit.engine import execute
from lipaudit.engine.execute import Observer
from lipaudit.engine.prepare import Request, prepare
from lipaudit.gate.readings import find_fault
from lipaudit.measures import base
from lipaudit.measures.attack import AttackOptions
from lipaudit.report import render
from lipaudit.schema import load
from lipaudit.settings import RunOptions
from tests.commands import invoke, read_figures, read_sections

pytestmark = pytest.mark.usefixtures("elsewhere", "blank_charts")
SHORT = {"eps": "0.03,0.06", "attack": "fgsm,pgd,quick,square", "steps": 2, "queries": 40}
COMMAND = ("attack", "demo", "-n", "66")
for name, value in SHORT.items():
    COMMAND += (f"--{name}", str(value))


@cache
def attack_all():
    return lipaudit.measure("demo", "attack", samples=66, **SHORT)


def plan(attack, eps, **given):
    return AttackOptions.parse({"attack": attack, "eps": eps} | given).trials()


def test_the_cheapest_trial_runs_first_and_of_equal_trials_the_smallest_ball():
    steps = kinds.list_steps(plan("autoattack,pgd,fgsm", "0.2,0.1"))
    order = [(attack.name, trial.radius.text) for trial, attack in steps]
    auto = ("apgd-ce", "apgd-t", "fab-t", "square")
    assert order == [
        *itertools.product(("fgsm",), ("0.1", "0.2")),
        *itertools.product(("pgd",), ("0.1", "0.2")),
        *((name, "0.1") for name in auto),
        *((name, "0.2") for name in auto),
    ]


class Hearing(Observer):
    def __init__(self):
        self.notes = []

    def note(self, note):
        self.notes.append(note)

    def heard(self, code):
        return [note.text for note in self.notes if note.code == code]


def run(observer, samples=70, **given):
    request = Request("demo", {"attack": AttackOptions.parse(given)}, RunOptions(samples=samples))
    return execute.execute(prepare(request), observer).section("attack")


def test_survivors_are_reported_after_every_attack_and_only_fall():
    """The last line of a ball has the report's figure; all samples are in every line."""
    observer = Hearing()
    section = run(observer, eps="0.03,0.06", attack="pgd,fgsm", steps=4)
    found = [
        re.fullmatch(r"(\w+), linf ([\d.]+): robust accuracy at most .*\((\d+) of 70.*", text)
        for text in observer.heard("so-far")
    ]
    lines = [(match[1], match[2], int(match[3])) for match in found]
    assert [line[:2] for line in lines] == [
        *(("fgsm", "0.03"), ("fgsm", "0.06"), ("pgd", "0.03"), ("pgd", "0.06"))
    ]
    for eps in ("0.03", "0.06"):
        counts = [count for _, radius, count in lines if radius == eps]
        flags = {n: section.samples[f"robust@{n},linf,{eps}"] for n in ("fgsm", "worst")}
        assert counts == [sum(flags["fgsm"]), sum(flags["worst"])]
        assert counts[0] > counts[1] > 0


def test_a_long_attack_names_shorter_ways(monkeypatch):
    monkeypatch.setattr("lipaudit.measures.rounds.time_pass", lambda *_: 1e-2)

    class Stopping(Hearing):
        def note(self, note):
            super().note(note)
            if note.code == "cost":
                raise KeyboardInterrupt

    observer = Stopping()
    with pytest.raises(KeyboardInterrupt):
        run(observer, samples=8, eps="0,0.3", attack="autoattack")
    # All eight are right. 100 steps of APGD-CE, of APGD-T and FAB-T at 9 targets, three passes a
    # step, and 5,000 queries of Square; of quick, 20 steps and 20 at 3 targets.
    passes, short = 8 * (300 + 2700 + 2700 + 5000), 8 * (60 + 180)
    assert observer.heard("cost") == [
        f"the attacks on 8 samples take at most about {passes / 6000:.0f} min. Shorter: "
        f"--attack quick (about {short / 100:.0f} s), or --time-limit 10m, which reports what "
        "is known by then"
    ]


def end_after(monkeypatch, calls, clock):
    """Let the time limit be over after so many looks at a clock."""
    now = itertools.chain(itertools.repeat(0.0, calls), itertools.repeat(1e12))
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: next(now)))


@pytest.mark.parametrize(("clock", "calls"), [(execute, 5), (execute, 13), (base, 9)])
def test_a_limited_run_reports_upper_limits_and_goes_on_later(monkeypatch, clock, calls):
    """The limit is over within PGD, between the two attacks of `quick`, or within a pass."""
    whole = attack_all().section("attack")
    with monkeypatch.context() as patch:
        end_after(patch, calls, clock)
        done = invoke(*COMMAND, "--time-limit", "90s", "-o", "cut.json", code=7)
    assert "the time limit ended the run before 66 samples of attack" in done.stderr
    cut = load("cut.json")
    section = cut.section("attack")
    assert (cut.status, section.unmeasured) == ("partial", 66)
    assert "the time limit" in find_fault(cut, section)
    (limit,) = [note.text for note in section.notes if note.code == "upper-limit"]
    for found, row in zip(section.rows, whole.rows, strict=True):
        finished = row.attack == "fgsm" or (row.attack, calls) == ("pgd", 13)
        finished |= (row.attack, row.eps_text, calls) == ("quick", "0.03", 13)
        if finished:
            assert {**found, "seconds": 0} == {**row, "seconds": 0}
        else:
            assert (found.robust_low, found.ece) == (None, None)
            assert row.robust <= found.robust <= found.clean
    for eps in ("0.03", "0.06"):
        worst = section.samples[f"robust@worst,linf,{eps}"]
        at_last = whole.samples[f"robust@worst,linf,{eps}"]
        broken = whole.samples[f"robust@fgsm,linf,{eps}"]
        for now, later, early in zip(worst, at_last, broken, strict=True):
            assert now in ((0,) if early == 0 else (0, None))  # broken is certain
            assert now is None or later == 0
    assert "square (linf 0.03) on 0" in limit
    assert "fgsm" not in limit
    page = " ".join(render(cut, "markdown").decode().split())
    assert "at most: not all attacks ran" in page
    share = section.rows[1].robust
    assert f"≤ {share:.1%}" in done.stdout
    assert f"At most {share:.1%} survive all " in page
    again = invoke(*COMMAND, "--resume", "-o", "rest.json")
    assert "finished 0 of 66 samples of attack and began 66" in again.stderr
    assert "fgsm" not in again.stderr  # ran before
    assert read_figures("rest.json") == read_figures(attack_all())


def test_an_attack_is_ended_within_its_passes(monkeypatch):
    """Square alone would take 10,000 queries."""
    end_after(monkeypatch, 50, base)
    long = {"attack": "square", "eps": 0.05, "queries": 10_000, "samples": 8}
    report = lipaudit.measure("demo", "attack", time_limit="1h", **long)
    assert report.unmeasured == {"attack": 8}
    assert report.section("attack").rows == ()


def test_a_limit_within_the_last_square_of_a_run_leaves_a_report(monkeypatch):
    """Square has run at two radii on 64 samples, and at one on the others."""
    given = {"eps": "0.03,0.06", "attack": "custom:fgsm,square", "queries": 20, "samples": 66}
    whole = lipaudit.measure("demo", "attack", **given).section("attack")
    with monkeypatch.context() as patch:
        end_after(patch, 7, execute)
        cut = lipaudit.measure("demo", "attack", time_limit="60", **given).section("attack")
    assert cut.unmeasured == 2
    (limit,) = [note.text for note in cut.notes if note.code == "upper-limit"]
    assert limit.endswith(": square (linf 0.06) on 64")
    for eps, known in (("0.03", 66), ("0.06", 64)):
        name = f"robust@worst,linf,{eps}"
        assert cut.samples[name][:known] == whole.samples[name][:known]


def test_a_round_of_repeats_counts_no_sample():
    """Nine chunks of one image: the last one is a round of its own, without a new sample."""
    x, y = np.full((513, 1, 8, 8), 0.25, np.float32), np.zeros(513, int)
    observer = Hearing()
    given = {"eps": 0.1, "attack": "fgsm", "samples": len(x)}
    report = lipaudit.measure("demo", "attack", data=(x, y), observer=observer, **given)
    alone = lipaudit.measure("demo", "attack", data=(x[:1], y[:1]), **given | {"samples": 1})
    robust = alone.section("attack").rows[0].robust
    for row in report.section("attack").rows:
        assert (row.samples, row.robust) == (1, robust)
    first, last = observer.heard("so-far")
    assert "of 1 samples)" in first
    assert last == "samples 513 to 513: fgsm, linf 0.1: all samples repeat earlier ones"


def test_shards_that_a_limit_ended_are_merged_to_upper_limits(monkeypatch):
    given = {"eps": 0.06, "attack": "fgsm,pgd", "steps": 4, "samples": 70}
    whole = lipaudit.measure("demo", "attack", **given)
    args = ("attack", "demo", "-n", "70", "--eps", "0.06", "--attack", "fgsm,pgd", "--steps", "4")
    first, second = ((*args, "--parts", "run", "--shard", f"{i}/2") for i in (1, 2))
    with monkeypatch.context() as patch:
        end_after(patch, 1, execute)
        invoke(*first, "--time-limit", "60", code=7)
    invoke(*second)
    invoke("merge", "run", "-o", "cut.json", code=7)
    merged = load("cut.json")
    section, complete = merged.section("attack"), whole.section("attack")
    assert (merged.status, merged.unmeasured) == ("partial", {"attack": 64})
    known = section.samples["robust@pgd,linf,0.06"]
    assert known[64:] == complete.samples["robust@pgd,linf,0.06"][64:]
    assert set(known[:64]) == {None, 0}  # the samples that were wrong without attack
    assert section.samples["robust@fgsm,linf,0.06"] == complete.samples["robust@fgsm,linf,0.06"]
    invoke(*first)
    invoke("merge", "run", "-o", "all.json")
    assert read_sections("all.json") == read_sections(whole)
