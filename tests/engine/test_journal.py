"""Interrupted measures: what was finished is kept, and --resume gives what one run gives."""

import io
import json
import math
import os
import pickle
import re
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from lipaudit.data.loading import DataOptions, load_data
from lipaudit.engine.journal import (
    Journal,
    decode_part,
    encode_part,
    pack_parts,
    unpack_parts,
)
from lipaudit.errors import EvaluationError
from lipaudit.measures import load_measures, option_types
from lipaudit.measures.base import Part, sample_ids
from lipaudit.models.sources.loader import load_net
from lipaudit.tables import Note
from tests import processes

ATTACK = ("attack", "demo", "--eps", "0.05", "--attack", "pgd", "-n", "66", "--steps", "3")
NORMS = ("jacobian", "demo", "-n", "6", "--batch-size", "1")
SMALL = {
    "attack": {"eps": ("0.05",), "attack": "fgsm"},
    "scaling": {"lengths": (8, 16), "modes": ("real",)},
}


def run(*args: str, cwd: Path) -> tuple[str, str]:
    """What a command prints, and what it says."""
    command = processes.begun(*args, "-f", "json", cwd=cwd)
    code, said = command.ended()
    assert code == 0, said
    return command.stdout.read_text(), said


def stopped(*args: str, cwd: Path, by: signal.Signals) -> tuple[int, str]:
    """Start a command that waits once a part of it is kept, and stop it."""
    hold = partial(processes.hold_after_parts, 1)
    command = processes.begun(*args, "-f", "json", cwd=cwd, before=hold)
    while not kept(cwd):
        assert command.alive
        time.sleep(0.005)
    command.send(by)
    return command.ended()


def keep(journal: Journal, parts: list[Part]) -> None:
    for part in parts:
        journal.keep(part)


def kept(cwd: Path) -> list[Path]:
    return list((cwd / "lipaudit").rglob("*.npz"))


def numbers(text: str) -> list[dict]:
    """The sections of a report without what is measured with a clock."""
    sections = json.loads(text)["sections"]
    for row in sections[0]["rows"]:
        row.pop("seconds", None)
    return sections


def test_a_killed_run_goes_on_to_the_same_report(tmp_path):
    status, _ = stopped(*ATTACK, cwd=tmp_path, by=signal.SIGKILL)
    assert status == -signal.SIGKILL
    resumed, said = run(*ATTACK, "--resume", cwd=tmp_path)
    assert "continuing from there" in said
    assert not kept(tmp_path)
    assert numbers(resumed) == numbers(run(*ATTACK, cwd=tmp_path)[0])


@pytest.mark.parametrize(("by", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_says_how_to_go_on(by, code, tmp_path):
    status, said = stopped(*NORMS, "-o", "a.json", cwd=tmp_path, by=by)
    assert status == code
    assert not (tmp_path / "a.json").exists()
    assert "with --resume to continue" in said
    assert "Traceback" not in said
    _, other = run(*NORMS, "--seed", "1", "--resume", cwd=tmp_path)
    assert "interrupted" not in other  # another run is not mixed up with this one


@pytest.mark.parametrize("name", load_measures())
def test_the_parts_of_every_measure_come_back_as_they_were(name, tmp_path):
    net = load_net("demo")
    measure = load_measures()[name]
    size = measure.chunk or 2
    batch = load_data("demo", net, DataOptions(samples=size + 2)).batch
    options = option_types()[name].parse(SMALL.get(name, {}))
    if measure.chunk is not None:
        options = options.model_copy(update={"batch_size": 4})
    parts = list(measure.compute(net, batch.split(size), options))
    keep(Journal({"measure": name}, tmp_path), parts)
    found = Journal({"measure": name}, tmp_path).read_parts(batch.ids)
    assert len(parts) == 2
    assert sample_ids(found) == batch.ids
    assert measure.summarise(found, options) == measure.summarise(parts, options)
    assert Journal({"measure": name, "seed": 1}, tmp_path).read_parts(batch.ids) == []
    # Parts of bounds that an earlier version kept have one array more.
    for i, part in enumerate(parts if name == "bounds" else ()):
        more = replace(part, values={**part.values, "g1_max": np.ones((len(part.ids), 1))})
        older = [more if at == i else each for at, each in enumerate(parts)]
        assert measure.summarise(older, options) == measure.summarise(parts, options)
    assert measure.summarise(unpack_parts(pack_parts(parts, name)), options) == measure.summarise(
        parts, options
    )


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


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harm",)


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
    journal = Journal({}, tmp_path)
    keep(journal, numbered(4))
    third = paths(journal)[2]
    for content in (third.read_bytes()[:-9], *bad):
        third.write_bytes(content)
        assert sample_ids(journal.read_parts("0123")) == ("0", "1", "3")
    assert journal.read_parts("4567") == []
    assert not (tmp_path / "harm").exists()


def test_no_byte_of_a_part_is_changed_unseen(tmp_path):
    """Nor is any of its beginnings a part: a machine may stop in the middle of a file."""
    journal = Journal({}, tmp_path)
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


def refuse(path, _content):
    raise EvaluationError(f"cannot write {path}: No space left on device")


def test_what_cannot_be_kept_is_measured_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr("lipaudit.engine.journal.write", refuse)
    journal = Journal({}, tmp_path)
    assert journal.refusal == ""
    keep(journal, numbered(2))
    assert "No space left" in journal.refusal
    (tmp_path / "file").touch()
    nowhere = Journal({}, tmp_path / "file")
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
def test_a_fact_that_is_no_json_value_is_named_with_its_measure(fact, why, tmp_path):
    odd = Part(("0",), {}, {"fine": np.float32(1), "what": fact})
    says = f"the fact 'what' of the measure odd is no JSON value: {why}"
    journal = Journal({"measure": "odd"}, tmp_path)
    keep(journal, [odd])
    assert says in journal.refusal
    with pytest.raises(EvaluationError, match=re.escape(says)):
        pack_parts([odd], "odd")


def test_parts_come_in_the_order_of_the_samples_and_whole(tmp_path):
    pairs = [Part((f"{i}", f"{i + 1}"), {"x": np.zeros(2)}) for i in (4, 0, 2)]
    journal = Journal({}, tmp_path)
    keep(journal, pairs)
    for asked, found in (("0123456", "012345"), ("01245", "0145")):
        assert sample_ids(journal.read_parts(asked)) == tuple(found)


def test_a_run_deletes_its_own_parts_alone(tmp_path):
    """Shards of a run, and equal runs at once, share a folder."""
    first, second = Journal({}, tmp_path), Journal({}, tmp_path)
    keep(first, numbered(2))
    keep(second, numbered(4)[2:])
    first.clear()
    assert sample_ids(Journal({}, tmp_path).read_parts("0123")) == ("2", "3")
    again = Journal({}, tmp_path)
    again.read_parts("23")
    again.clear()
    assert not again.folder.exists()


def test_a_run_without_a_cache_directory_goes_on(tmp_path):
    (tmp_path / "lipaudit").write_text("a file where the cache would be")
    _, said = run("attention", "demo", "-n", "2", cwd=tmp_path)
    assert said.count("not saved for --resume") == 1


def interrupted(root: Path, name: str, *, age_days: float) -> Path:
    """What an interrupted run leaves behind, so many days old; its folder."""
    journal = Journal({"name": name}, root)
    keep(journal, numbered(1))
    then = time.time() - age_days * 86400
    os.utime(journal.folder, (then, then))
    return journal.folder


def test_interrupted_runs_are_deleted_by_age(tmp_path):
    young, old = interrupted(tmp_path, "b", age_days=29), interrupted(tmp_path, "a", age_days=31)
    keep(Journal({"name": "begun"}, tmp_path), numbered(1))
    assert (old.exists(), young.exists()) == (False, True)
