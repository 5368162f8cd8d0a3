"""Interrupted and limited runs: what was finished is kept, and --resume goes on with it."""

import io
import math
import os
import pickle
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import lipaudit
from lipaudit.data.batch import ProcessBatches
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.engine import execute
from lipaudit.engine.files import Journal, decode_part, encode_part
from lipaudit.errors import EvaluationError, UsageError
from lipaudit.gate.readings import find_fault
from lipaudit.measures import load_measures
from lipaudit.measures.base import Part, sample_ids
from lipaudit.models.sources.loader import load_net
from lipaudit.report import render
from lipaudit.schema import dumps, load, loads
from lipaudit.settings import RunOptions
from lipaudit.tables import Note
from tests import processes
from tests.commands import Harmful, invoke, read_figures, replace_parts

pytestmark = pytest.mark.usefixtures("elsewhere", "blank_charts")
NORMS = ("jacobian", "demo", "-n", "6", "--batch-size", "1")
SMALL = {
    "attack": {"eps": ("0.05",), "attack": "fgsm"},
    "corrupt": {"corruption": "snow,contrast", "severity": "1,5"},
    "scaling": {"lengths": (8, 16), "modes": ("real",)},
    "smoothing": {"smooth": 0.25, "eps": "0.1", "noise_samples": "5,20"},
}


def stopped(*args: str, cwd: Path, by: signal.Signals) -> tuple[int, str]:
    """Start a command that waits once a part of it is kept, and stop it."""
    hold = partial(processes.stop_after_parts, 1, processes.wait)
    command = processes.begun(*args, cwd=cwd, before=hold)
    while not kept(cwd):
        assert command.process.is_alive()
        time.sleep(0.005)
    os.kill(command.process.pid, by)
    return command.ended()


def keep(journal: Journal, parts: list[Part]) -> None:
    for part in parts:
        journal.keep(part)


def kept(cwd: Path) -> list[Path]:
    return list(cwd.rglob("*.npz"))


@pytest.mark.parametrize(
    ("by", "code", "more"),
    [
        (signal.SIGKILL, -signal.SIGKILL, ()),
        (signal.SIGINT, 130, ("--quantize", "int4:16")),
        (signal.SIGTERM, 143, ()),
    ],
)
def test_a_stopped_run_says_how_to_go_on_and_goes_on_to_the_same_report(by, code, more, tmp_path):
    status, said = stopped(*NORMS, *more, "-o", "a.json", cwd=tmp_path, by=by)
    assert (status, Path("a.json").exists(), "Traceback" in said) == (code, False, False)
    assert ("with --resume to continue" in said) == (code > 0)
    others = ("--seed", "1"), *[("--quantize", "int8")] * bool(more)
    for other in others:  # another run is not mixed up with this one
        ended = invoke(*NORMS, *other, "--resume", "-o", "other.json")
        assert "interrupted" not in ended.stderr
    resumed = invoke(*NORMS, *more, "--resume", "-o", "a.json")
    assert "continuing from there" in resumed.stderr
    assert not kept(tmp_path)
    invoke(*NORMS, *more, "-o", "whole.json")
    assert read_figures("a.json") == read_figures("whole.json")


@pytest.mark.parametrize("name", load_measures())
def test_the_parts_of_every_measure_come_back_as_they_were(name):
    net = load_net("demo")
    measure = load_measures()[name]
    size = measure.chunk or 2
    batch = load_data("demo", net, DataOptions(samples=size + 2)).batch
    options = measure.options.parse(SMALL.get(name, {}))
    if measure.chunk is not None:
        options = options.model_copy(update={"batch_size": 4})
    parts = list(measure.compute(net, batch.split(size), options))
    keep(Journal({"measure": name}), parts)
    found = Journal({"measure": name}).read_parts(batch.ids)
    # Votes are stored sample by sample.
    assert len(parts) == (len(batch) if name == "smoothing" else 2)
    assert sample_ids(found) == batch.ids
    assert Journal({"measure": name, "seed": 1}).read_parts(batch.ids) == []
    sections = measure.summarise(parts, options)
    assert measure.summarise(found, options) == sections
    again = [decode_part(encode_part(part, name)) for part in parts]
    assert measure.summarise(again, options) == sections
    # Parts of bounds that an earlier version kept have one array more.
    for i, part in enumerate(parts if name == "bounds" else ()):
        more = replace(part, values={**part.values, "g1_max": np.ones((len(part.ids), 1))})
        older = [more if at == i else each for at, each in enumerate(parts)]
        assert measure.summarise(older, options) == sections


def test_a_part_comes_back_with_its_types_and_facts():
    values = {"a/b@c": np.arange(3), "file": np.array(["x", "yé", ""]), "map": np.eye(3)[None]}
    facts = {"heads": [[0, 1, "blocks.0"]], "plain": [None, True, "é", math.inf], "none": {}}
    note = Note(level="info", code="a", text="b")
    part = Part(("i", "j", "k"), values, facts, (note,))
    found = decode_part(encode_part(part, "own"))
    assert (found.ids, found.facts, found.notes) == (part.ids, facts, (note,))
    for name, array in values.items():
        np.testing.assert_array_equal(found.values[name], array)
        assert found.values[name].dtype == array.dtype


def numbered(count: int) -> list[Part]:
    return [Part((str(i),), {"x": np.array([float(i)])}) for i in range(count)]


def paths(journal: Journal) -> list[Path]:
    return sorted(journal.folder.glob("*.npz"))


def test_a_damaged_or_foreign_file_is_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    harm = io.BytesIO()
    np.savez(harm, header=np.array([Harmful()], dtype=object))
    other = io.BytesIO()
    np.savez(other, x=np.zeros(3))
    bad = [b"", pickle.dumps(Harmful()), harm.getvalue(), other.getvalue()]
    journal = Journal({})
    keep(journal, numbered(4))
    third = paths(journal)[2]
    for content in (third.read_bytes()[:-9], *bad):
        third.write_bytes(content)
        assert sample_ids(journal.read_parts("0123")) == ("0", "1", "3")
    assert journal.read_parts("4567") == []
    assert not (tmp_path / "harm").exists()


def test_no_byte_of_a_part_is_changed_unseen():
    """Nor is any of its beginnings a part: a machine may stop in the middle of a file."""
    journal = Journal({})
    keep(journal, numbered(1))
    (path,) = paths(journal)
    whole = path.read_bytes()
    changed = 0
    for i in range(len(whole)):
        path.write_bytes(whole[:i])
        assert journal.read_parts("0") == []
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        assert journal.read_parts("0") in ([], numbered(1))  # a date in it may change, no number
        changed += journal.read_parts("0") == []
    assert changed > len(whole) / 2
    path.write_bytes(whole)
    assert journal.read_parts("0") == numbered(1)


def test_what_cannot_be_kept_is_said(tmp_path):
    (tmp_path / "cache").touch()
    nowhere = Journal({})
    assert nowhere.refusal == ""
    keep(nowhere, numbered(2))
    assert "Not a directory" in nowhere.refusal


@pytest.mark.parametrize(
    ("fact", "why"),
    [
        (object(), "it holds a value of type object"),
        ([{1}], "it holds a value of type set"),
        ({(0, 1): 2}, "keys must be"),
    ],
)
def test_a_fact_that_is_no_json_value_is_named_with_its_measure(fact, why):
    odd = Part(("0",), {}, {"fine": np.float32(1), "what": fact})
    says = f"the fact 'what' of the measure odd is no JSON value: {why}"
    journal = Journal({"measure": "odd"})
    keep(journal, [odd])
    assert says in journal.refusal
    with pytest.raises(EvaluationError, match=re.escape(says)):
        encode_part(odd, "odd")


def test_parts_come_in_the_order_of_the_samples_and_whole():
    pairs = [Part((f"{i}", f"{i + 1}"), {"x": np.zeros(2)}) for i in (4, 0, 2)]
    journal = Journal({})
    keep(journal, pairs)
    for asked, found in (("0123456", "012345"), ("01245", "0145")):
        assert sample_ids(journal.read_parts(asked)) == tuple(found)


def test_a_run_deletes_its_own_parts_alone():
    """Shards of a run, and equal runs at once, share a folder."""
    first, second = Journal({}), Journal({})
    keep(first, numbered(2))
    keep(second, numbered(4)[2:])
    first.clear()
    assert sample_ids(Journal({}).read_parts("0123")) == ("2", "3")
    again = Journal({})
    again.read_parts("23")
    again.clear()
    assert not again.folder.exists()


def test_a_run_without_a_cache_directory_goes_on():
    Path("cache").write_text("a file where the cache would be")
    said = invoke("attention", "demo", "-n", "2").stderr
    assert said.count("not saved for --resume") == 1


def test_interrupted_runs_are_deleted_by_age():
    young, old = (Journal({"name": name}) for name in "ab")
    for journal, age_days in ((young, 29), (old, 31)):
        keep(journal, numbered(1))
        then = time.time() - age_days * 86400
        os.utime(journal.folder, (then, then))
    keep(Journal({"name": "begun"}), numbered(1))
    assert (old.folder.exists(), young.folder.exists()) == (False, True)


JACOBIAN = ("jacobian", "demo", "-n", "5", "--batch-size", "2", "--tol", "0.01")


@contextmanager
def time_for(batches: int) -> Iterator[None]:
    """Let the time of whatever has a limit be up after so many batches."""
    now = chain(repeat(-math.inf, batches), repeat(math.inf))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute, "time", SimpleNamespace(monotonic=lambda: next(now)))
        yield


def test_a_resumed_attack_knows_the_examples_of_another_model_by_their_contents():
    how = ("attack", "demo", "-n", "65", "--attack", "fgsm", "--eps")
    again = (*how, "0.1", "--transfer", "a.safetensors", "--resume", "--time-limit", "90s")
    continued = []
    for saved in ("0.1", "0.2", "0.2"):
        invoke(*how, saved, "--save-adv", "a.safetensors")
        with time_for(1):
            said = invoke(*again, code=None).stderr
        continued.append("of 65 samples of attack and began" in said)
    assert continued == [False, False, True]


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

        yield from compute(net, ProcessBatches(batches.first, taken()), options)

    replace_parts(monkeypatch, name, parts)
    return ids


def test_an_audit_shows_what_it_came_to():
    args = ("audit", "demo", "--only", "attention,jacobian", "-n", "2", "--time-limit", "1m")
    with time_for(1):
        invoke(*args, "--run-dir", "run", code=7)
    report = load("run/report.json")
    first, last = report.sections
    assert report.unmeasured == {"jacobian": 2}
    assert (bool(first.rows), first.unmeasured) == (True, 0)
    assert (last.rows, last.failure) == ((), None)
    invoke(*args, "--run-dir", "run", "--resume")
    assert load("run/report.json").status == "complete"


def test_several_models_have_one_limit():
    with time_for(1):
        both = ["demo", "demo:robust"]
        reports = lipaudit.audit(both, ["attention"], samples=1, time_limit="1min")
    assert [report.unmeasured for report in reports] == [{}, {"attention": 1}]
    assert loads(dumps(reports[1])) == reports[1]


def test_a_shard_that_the_limit_ended_is_merged_in_part_and_no_gate_is_passed(monkeypatch):
    args = ("jacobian", "demo", "-n", "4", "--batch-size", "1")
    first, second = ((*args, "--parts", "run", "--shard", f"{i}/2") for i in (1, 2))
    with time_for(1):
        said = invoke(*first, "--time-limit", "60", code=7).stderr
    assert "the time limit ended the run before 1 samples of jacobian" in said
    assert "hint: Run the same command again to measure the rest." in said
    invoke(*second)
    whole = lipaudit.measure("demo", "jacobian", samples=4, batch_size=1).sections[0]
    typed = ("merge", "run", "-o", "cut.json")
    monkeypatch.setattr("sys.argv", ["lipaudit", *typed])
    said = invoke(*typed, code=7).stderr
    assert "hint: Run the commands of the shards again" in said
    merged = load("cut.json")
    section = merged.sections[0]
    assert (merged.status, merged.unmeasured) == ("partial", {"jacobian": 1})
    assert section.samples["norm"] == tuple(whole.samples["norm"][i] for i in (0, 1, 3))
    note = next(note for note in section.notes if note.code == "cut-short")
    assert note.text == "the time limit ended jacobian after 3 of 4 samples"
    assert "the time limit ended its run" in find_fault(merged, section)
    assert "--resume" not in render(merged, "markdown").decode()  # a merge cannot resume
    invoke(*first, "--time-limit", "60")
    invoke("merge", "run", "-o", "all.json")
    assert load("all.json").sections[0] == whole


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
