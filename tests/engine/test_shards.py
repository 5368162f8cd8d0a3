"""Shards of a run: their parts make the report of one process; what does not fit is refused."""

import json
import os
import pickle
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import lipaudit
from lipaudit.attacks.kinds import CHUNK
from lipaudit.data.batch import ProcessBatches
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.engine.files import decode_part, encode_part
from lipaudit.errors import EvaluationError, InputError, UsageError
from lipaudit.measures import load_measures
from lipaudit.measures.attention import AttentionOptions
from lipaudit.measures.base import Part
from lipaudit.measures.jacobian import JacobianOptions
from lipaudit.models.sources.loader import load_net
from lipaudit.schema import load
from lipaudit.tables import Report
from tests import processes
from tests.commands import (
    Harmful,
    break_measure,
    invoke,
    read_figures,
    read_without_maps,
    refuse,
    replace_parts,
)
from tests.simulated.conftest import MODELS, samples

pytestmark = pytest.mark.usefixtures("blank_charts")

AUDIT = ("audit", "demo", "--only", "bounds,attention", "-n", "5", "--batch-size", "4")
CASES: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "bounds": ("demo", "bounds", 3, {"layers": "0", "radius": "0.1", "batch_size": 1}),
    "attention": ("demo", "attention", 10, {}),
    "jacobian": ("demo", "jacobian", 10, {"batch_size": 2, "tol": 1e-2}),
    "attack": ("demo", "attack", 2 * CHUNK + 2, {"eps": "0.05", "attack": "pgd", "steps": 3}),
    "random": ("demo", "attack", CHUNK + 2, {"eps": "0.1", "attack": "square", "queries": 9}),
    "corrupt": ("demo", "corrupt", 7, {"corruption": "fog,jpeg", "batch_size": 2}),
    "certify": ("bert", "certify", 2, {"eps": "0.01", "order": "1", "nodes": 1}),
    "smoothing": ("demo", "smoothing", 10, {"smooth": 0.25, "noise_samples": "9,40"}),
    "weights": ("demo", "weights", 3, {"at_samples": True, "batch_size": 1, "tol": 1e-2}),
    "scaling": ("demo", "scaling", 5, {"lengths": "4:8:log2", "layers": 0, "mode": "real,radius"}),
    "text bounds": ("bert", "bounds", 9, {"layers": "1"}),
    "text map": ("bert", "attention", 5, {"map": "0.0", "batch_size": 2}),
    "text jacobian": ("bert", "jacobian", 17, {"per_layer": True, "tol": 1e-2}),
    "positions": ("llama", "jacobian", 3, {"target": "hidden:1", "batch_size": 1, "tol": 1e-2}),
    "words": ("bert", "attack", CHUNK + 2, {"attack": "words", "eps": "1", "queries": 5}),
}
"""Model, measure, samples, options; where there are fewer than three batches, shards are empty."""


def run(case: str, **more: Any) -> Report | None:
    model, name, count, options = CASES[case]
    how = samples(model, count) | {"samples": count} | options | more
    return lipaudit.measure(MODELS[model](), name, **how)


def measure_shards(case: str, of: int, *folders: Path) -> None:
    """Measure all shards of a run into one folder, or each into its own."""
    for i in range(of):
        folder = folders[i % len(folders)]
        assert run(case, shard=f"{i + 1}/{of}", parts=folder) is None


@pytest.mark.parametrize("case", CASES)
def test_merged_shards_are_the_report_of_one_process(case, tmp_path):
    assert {name for _, name, _, _ in CASES.values()} == load_measures().keys()
    measure_shards(case, 3, tmp_path / "run")
    merged = lipaudit.merge(tmp_path / "run")
    assert read_figures(merged) == read_figures(run(case))


def list_parts(folder: Path) -> list[tuple[str, ...]]:
    """The samples of each part in a folder."""
    return [decode_part(path.read_bytes()).ids for path in folder.rglob("*.npz")]


def test_a_shard_measures_whole_batches_of_its_own_and_folders_may_be_apart(tmp_path):
    folders = [tmp_path / f"{i}" for i in (1, 2)]
    measure_shards("jacobian", 2, *folders)
    whole = run("jacobian")
    everything = whole.section("jacobian").ids
    measured = [{*sum(list_parts(folder), ())} for folder in folders]
    assert [len(ids) for ids in measured] == [6, 4]
    assert measured[0] | measured[1] == {*everything}
    assert measured[0] == {name for i, name in enumerate(everything) if i // 2 % 2 == 0}
    both, again = lipaudit.merge(*reversed(folders)), lipaudit.merge(*folders, folders[0])
    assert read_figures(both) == read_figures(again) == read_figures(whole)


SURVEYED = {"attention": AttentionOptions(), "jacobian": JacobianOptions(per_layer=True)}


def test_a_model_is_surveyed_at_the_first_batch_of_the_run():
    """What layers are is found out once: a shard must not find it out at other samples."""
    for name, options in SURVEYED.items():
        net, seen = load_net("demo"), []
        first, second = load_data("demo", net, DataOptions(samples=4)).batch.split(2)
        net.module.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        (part,) = load_measures()[name].compute(net, ProcessBatches(first, [second]), options)
        assert part.ids == second.ids
        # A survey is at points near the samples: none of its passes sees the second batch.
        near = [[(x[0] - (2 * b.x[0] - 1)).abs().max() for b in (first, second)] for x in seen]
        assert [one < other for one, other in near[:3]] == [True] * 3
        assert near[-1][1] < near[-1][0]


def test_an_empty_shard_is_not_needed(tmp_path):
    for i in (1, 2):
        run("attention", shard=f"{i}/3", parts=tmp_path / "two")
    run("attention", shard="3/3", parts=tmp_path / "empty")
    assert list_parts(tmp_path / "empty") == []
    for folders in (["two"], ["empty", "two"]):
        merged = lipaudit.merge(*(tmp_path / folder for folder in folders))
        assert read_figures(merged) == read_figures(run("attention"))


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    """The parts of three shards, each in its own folder."""
    folder = tmp_path_factory.mktemp("stored")
    measure_shards("jacobian", 3, *(folder / f"{i}" for i in (1, 2, 3)))
    return folder


@pytest.fixture
def three(stored, tmp_path) -> list[Path]:
    """A copy of these folders."""
    return [Path(shutil.copytree(stored / f"{i}", tmp_path / f"{i}")) for i in (1, 2, 3)]


def refused(*folders: Path) -> InputError:
    with pytest.raises(InputError) as error:
        lipaudit.merge(*folders)
    return error.value


def test_missing_samples_are_named_with_their_shards(three):
    first, second, third = three
    error = refused(first, third)
    ids = run("jacobian").section("jacobian").ids
    lost = [name for name in ids if name in {*sum(list_parts(second), ())}]
    text = f"4 of 10 samples of jacobian are missing, such as {', '.join(lost[:3])}"
    assert error.message == f"{text}; shards not finished: 2/3"
    assert error.advice == "Measure shard 2/3 with the same options and the same parts."
    assert "shards not finished: 2/3, 3/3" in refused(first).message
    # What another number of shards has measured is the same run.
    run("jacobian", shard="2/2", parts=first)
    assert "2 of 10 samples" in refused(first, third).message


def test_what_is_no_folder_of_parts_is_refused(tmp_path):
    assert "no folder of parts is given" in refused().message
    (tmp_path / "file").touch()
    assert "file is no folder of parts" in refused(tmp_path / "file").message
    assert "has no parts of a run" in refused(tmp_path).message
    assert "lipaudit merge FOLDER" in refused(tmp_path).advice


OTHER = "shards 1/3 and 2/3 are not from the same run: they differ in "
DIFFERING = [
    ({"seed": 1}, "seed, data, samples, jacobian"),
    ({"tol": 1e-1}, "jacobian"),
    ({"dtype": "float64"}, "dtype"),
    ({"samples": 12}, "data, samples"),
    ({"data": "demo:train"}, "data, samples"),
    ({"batch_size": 3}, "batch_size"),
]


@pytest.mark.parametrize(("changes", "what"), DIFFERING)
def test_a_shard_of_another_run_is_refused_with_what_differs(three, changes, what):
    first, second, third = three
    with pytest.raises(UsageError, match=f"has parts of another run, which differs in {what}"):
        run("jacobian", shard="2/3", parts=second, **changes)
    shutil.rmtree(second)
    run("jacobian", shard="2/3", parts=second, **changes)
    error = refused(first, second, third)
    assert error.message.startswith(OTHER + what)
    assert "same command" in error.advice


def test_files_of_other_contents_are_another_run(tmp_path):
    how = ("attack", "demo", "-n", "65", "--attack", "fgsm", "--eps", "0.1")
    saved = tmp_path / "a.safetensors"
    for i, eps in ((1, "0.1"), (2, "0.2")):
        invoke(*how[:-1], eps, "--save-adv", saved)
        shard = ("--shard", f"{i}/2", "--parts", tmp_path / f"{i}")
        invoke(*how, "--transfer", saved, *shard)
    error = refused(tmp_path / "1", tmp_path / "2")
    assert error.message.endswith("they differ in attack")


def rewrite(folder: Path, **changes: Any) -> None:
    """Change what a folder says about the run of its shard."""
    (path,) = folder.glob("shard-*.json")
    document = json.loads(path.read_text())
    document["run"] |= changes
    path.write_text(json.dumps(document))


def test_other_weights_versions_or_devices_are_refused(three):
    (path,) = three[1].glob("shard-*.json")
    text = path.read_text()
    before = json.loads(text)["run"]
    for changes, says in (
        ({"model": before["model"] | {"weights_sha256": "f" * 64}}, "differ in model"),
        ({"versions": before["versions"] | {"torch": "0.1"}}, "differ in versions"),
        ({"lipaudit": "9"}, "differ in lipaudit"),
        ({"device": "cuda (A)"}, "differ in device"),
    ):
        rewrite(three[1], **changes)
        assert says in refused(*three).message
        path.write_text(text)
    for folder, card in zip(three, "ABA", strict=True):
        rewrite(folder, device=f"cuda ({card})")
    assert lipaudit.merge(*three).run.device == "cuda (A), cuda (B)"
    for folder in three:
        rewrite(folder, lipaudit="9")
    assert "written by lipaudit 9, and this is" in refused(*three).message


def test_damaged_or_foreign_parts_are_refused_and_run_nothing(three, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = next(three[1].rglob("*.npz"))
    good = path.read_bytes()
    foreign = encode_part(Part(("f" * 16,), {}), "jacobian")
    for content in (b"", good[:-40], pickle.dumps(Harmful()), b"[1]", foreign):
        path.write_bytes(content)
        assert "2 of 10 samples of jacobian are missing" in refused(*three).message
    # All shards have finished, so there is none to name.
    assert (
        refused(*three).advice == "Measure all samples with the same options and the same parts."
    )
    path.write_bytes(good)
    described = three[1] / "shard-2-of-3.json"
    text = described.read_text()
    for content in ("", text[:-9], "[]", text.replace('"number"', '"digit"')):
        described.write_text(content)
        assert "cannot read" in refused(*three).message
    described.write_text(text)
    for folder in three:
        (path,) = folder.glob("shard-*.json")
        path.write_text(path.read_text().replace('"jacobian":', '"of-a-plug-in":'))
    assert "there is no measure 'of-a-plug-in'" in refused(*three).message
    assert not Path("harm").exists()


def test_what_is_no_shard_is_refused():
    for text in ("0/2", "3/2", "2", "1/", "-1/2", "1/2/3"):
        with pytest.raises(UsageError, match="--shard"):
            run("attention", shard=text)
    with pytest.raises(UsageError, match="--shard 1/2 needs a folder") as error:
        run("attention", shard="1/2")
    assert "--parts FOLDER" in error.value.advice
    with pytest.raises(UsageError, match="of one model"):
        lipaudit.audit(["demo", "demo:robust"], ["attention"], shard="1/2", parts="run")


@pytest.fixture
def command(elsewhere):
    return lambda *args, code=0: invoke(*args, "-q", code=code).output


WRITES = {
    "attack": ("-n", CHUNK + 2, "--attack", "fgsm", "--eps", "0.1", "--save-adv",
               "made.safetensors"),
    "certify": ("-n", 2, "--eps", "0.01", "--nodes", "4", "--order", "1", "--proofs", "made.npz"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_a_merge_writes_the_files_of_the_run_but_not_elsewhere(command, name):
    args = (name, "demo", *map(str, WRITES[name]))
    file = Path(args[-1])
    for i in (1, 2):
        command(*args, "--shard", f"{i}/2", "--parts", "run")
    assert not file.exists()
    command("merge", "run", "-o", "all.json")
    made = file.read_bytes()
    file.unlink()
    command(*args, "-o", "one.json")
    assert file.read_bytes() == made
    assert read_figures("all.json") == read_figures("one.json")
    Path("below").mkdir()
    os.chdir("below")
    for path in Path("../run").glob("shard-*"):
        path.write_text(path.read_text().replace(str(file), f"../{file}"))
    refuse(4, f"the run writes ../{file}, which is not below", "merge", "../run")
    os.chdir("..")
    assert list(Path("below").iterdir()) == []


@pytest.fixture(scope="module")
def half(tmp_path_factory) -> Path:
    """The parts of the first shard of an audit."""
    folder = tmp_path_factory.mktemp("half") / "run"
    invoke(*AUDIT, "--shard", "1/2", "--parts", folder, "-q")
    return folder


def test_an_audit_in_shards_is_the_audit_of_one_process(command, half):
    """But for the map of the most amplifying head of all, which no shard knows."""
    command(*AUDIT, "--shard", "2/2", "--parts", "rest")
    command("merge", "rest", half, "-o", "all.json")
    command(*AUDIT, "--run-dir", "one")
    merged, one = load("all.json"), load("one/report.json")
    maps = [[n for n in r.section("attention").arrays if "map@" in n] for r in (one, merged)]
    assert [len(names) for names in maps] == [1, 0]
    assert read_without_maps(merged) == read_without_maps(one)


def test_an_audit_from_python_in_shards_is_that_of_one_process(tmp_path):
    how: dict[str, Any] = {"samples": 5, "batch_size": 2, "certify": True, "quick": True}
    for i in (1, 2):
        assert lipaudit.audit("demo", shard=f"{i}/2", parts=tmp_path, **how) is None
    merged, whole = lipaudit.merge(tmp_path), lipaudit.audit("demo", **how)
    assert {"bounds", "attention", "jacobian.shares", "attack", "certify"} <= {
        section.measure for section in merged.sections
    }
    assert read_figures(merged) == read_figures(whole)


def test_a_measure_that_failed_in_a_shard_has_failed_until_it_is_measured(
    command, half, monkeypatch
):
    shutil.copytree(half, "run")
    second = (*AUDIT, "--shard", "2/2", "--parts", "run")
    with monkeypatch.context() as broken:
        break_measure(broken, "attention", EvaluationError("no figures", "Try it again."))
        said = command(*second, code=3)
    assert "attention failed: no figures" in said
    said = command("merge", "run", "-o", "all.json", code=3)
    assert "attention failed: no figures" in said
    assert "Try it again. Run the commands of the shards again" in said
    merged = load("all.json")
    assert merged.status == "partial"
    assert merged.failures.keys() == {"attention"}
    assert len(merged.section("bounds").samples["ids"]) == 5
    command(*second)
    command("merge", "run", "-o", "all.json")
    command(*AUDIT, "--run-dir", "one")
    assert read_without_maps("all.json") == read_without_maps("one/report.json")


def test_what_one_process_does_is_not_shared_out_and_a_shard_writes_no_report(
    command, monkeypatch
):
    asked = ("attention", "demo", "-n", "2", "--shard", "1/2")
    assert "--shard 1/2 needs a folder for its parts" in command(*asked, code=2)
    asked = (*asked, "--parts", "run")
    for more in (("-o", "a.json"), ("-f", "json")):
        assert "has no effect with --shard" in command(*asked, *more, code=2)
    said = command(*AUDIT, *asked[-4:], "--run-dir", "one", code=2)
    assert "--run-dir has no effect with --shard" in said
    done = invoke(*asked)
    assert done.stdout == ""
    assert "shard 1/2: its parts are in run\nnext:   lipaudit merge run" in done.stderr
    several = (("watch", "."), ("train", "demo"), ("audit", "demo", "demo:jasmin"))
    for args in several:
        for option in (("--shard", "1/2"), ("--parts", "run")):
            said = command(*args, *option, code=2)
            assert f"{option[0]}: only when one MODEL is measured" in said
    processes.pose(monkeypatch, rank=0)
    attack = ("attack", "demo", "-n", "4", "--eps", "0.1")
    for args, says in (
        *((args, "several processes: only when one MODEL") for args in several),
        ((*attack, *asked[-4:]), "both split the samples"),
    ):
        assert says in " ".join(command(*args, code=2).split())


SMALL = ("jacobian", "demo", "-n", "8", "--batch-size", "2")


def list_starts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first samples of the batches that `jacobian` is given from now on."""
    compute, starts = load_measures()["jacobian"].compute, list[int]()

    def list_batches(net, batches, options):
        each = list(batches)
        starts.extend(batch.start for batch in each)
        return compute(net, ProcessBatches(batches.first, each), options)

    replace_parts(monkeypatch, "jacobian", list_batches)
    return starts


def test_a_stopped_shard_continues_with_the_same_command(command, monkeypatch):
    compute = load_measures()["jacobian"].compute

    def stop_after_one(net, batches, options):
        yield next(compute(net, batches, options))
        raise KeyboardInterrupt

    first, second = ((*SMALL, "--parts", "run", "--shard", f"{i}/2") for i in (1, 2))
    with monkeypatch.context() as patch:
        replace_parts(patch, "jacobian", stop_after_one)
        said = invoke(*first, code=130).stderr
    assert "finished batches are kept: run the same command to continue" in said
    starts = list_starts(monkeypatch)
    command(*second)
    monkeypatch.setattr("sys.argv", ["lipaudit", "merge", "run"])
    said = refuse(4, "2 of 8 samples of jacobian are missing", "merge", "run")
    assert "shards not finished: 1/2" in said
    command(*first)
    assert starts == [2, 6, 4]
    command("merge", "run", "-o", "all.json")
    command(*SMALL, "-o", "one.json")
    assert read_figures("all.json") == read_figures("one.json")


def test_the_advice_is_the_command_of_the_missing_shard(elsewhere, monkeypatch):
    typed = [*SMALL, "--shard=1/3", "--parts", "a  run"]
    monkeypatch.setattr("sys.argv", ["lipaudit", *typed])
    invoke(*typed)
    said = refuse(4, "shards not finished: 2/3, 3/3", "merge", "a  run")
    command = "lipaudit jacobian demo -n 8 --batch-size 2 --shard 2/3 --parts 'a  run'"
    assert f"hint: Measure them: {command}" in said


def test_a_run_in_a_folder_of_parts_measures_what_shards_left(command, monkeypatch):
    parts = (*SMALL, "--parts", "run")
    command(*parts, "--shard", "2/2")
    starts = list_starts(monkeypatch)
    command(*parts, "-o", "all.json")
    assert starts == [0, 4]
    command("merge", "run", "-o", "again.json")  # the parts are kept
    command(*parts, "-o", "third.json")
    assert starts == [0, 4]
    command(*SMALL, "-o", "one.json")
    for name in ("all", "again", "third"):
        assert read_figures(f"{name}.json") == read_figures("one.json")


def test_parts_of_a_module_are_merged_and_never_read(tmp_path):
    """Its code is unknown: another one may have made them."""
    net, seen = load_net("demo"), []
    net.module.register_forward_pre_hook(lambda *_: seen.append(1))
    how = {"data": "demo", "samples": 2, "input_shape": (1, 8, 8), "parts": tmp_path}
    shape = net.input_shape
    passes = []
    for _ in range(2):
        seen.clear()
        lipaudit.measure(net.module, "jacobian", shard="1/1", **how | {"input_shape": shape})
        passes.append(len(seen))
    assert passes[0] == passes[1] > 0
    assert lipaudit.merge(tmp_path).section("jacobian").rows[0].samples == 2


def test_a_part_that_cannot_be_stored_ends_the_shard(command, monkeypatch):
    Path("run").touch()
    assert "run is a file" in command(*SMALL, "--parts", "run", "--shard", "1/2", code=2)

    def fail(path, content):
        raise EvaluationError(f"cannot write {path.name}: No space left on device")

    monkeypatch.setattr("lipaudit.engine.files.write", fail)  # descriptions are still written
    said = command(*SMALL, "--parts", "full", "--shard", "1/2", code=3)
    assert "a part of jacobian cannot be stored: cannot write" in " ".join(said.split())


def measure_both(cwd: Path, *, stopped: Sequence[int] = ()) -> list[processes.Command]:
    """Begin both shards at once, in one folder; some of them wait once they have kept a part."""
    begun = []
    for i in (1, 2):
        args = (*SMALL, "--parts", "run", "--shard", f"{i}/2", "-q")
        hold = processes.nothing
        if i in stopped:
            hold = partial(processes.stop_after_parts, 1, processes.wait)
        (cwd / f"{i}").mkdir(exist_ok=True)
        begun.append(processes.begun(*args, cwd=cwd, before=hold))
    return begun


def test_shards_at_once_in_one_folder_do_each_other_no_harm(elsewhere, tmp_path):
    first, second = measure_both(tmp_path, stopped=[1])
    assert second.ended()[0] == 0
    while len(list_parts(tmp_path / "run")) < 3:
        assert first.process.is_alive()
        time.sleep(0.005)
    first.process.kill()
    first.ended()
    assert "2 of 8 samples" in refused(tmp_path / "run").message
    assert [each.ended()[0] for each in measure_both(tmp_path)] == [0, 0]
    invoke(*SMALL, "-o", "one.json")
    assert read_figures(lipaudit.merge(tmp_path / "run")) == read_figures("one.json")


OLD = Path(__file__).parent / "shard1.json"


def test_a_shard_of_an_earlier_version_is_refused_with_what_to_do():
    said = refuse(4, "shard1.json is no folder of parts", "merge", OLD)
    assert "--shard i/n --parts FOLDER" in said
    for command in (("report", OLD), ("gate", OLD, "-b", OLD), ("inspect", OLD)):
        code = 5 if command[0] == "gate" else 4
        assert "--parts FOLDER" in refuse(
            code, "is a shard that an earlier version wrote", *command
        )
