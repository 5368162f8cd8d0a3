"""Shards of a run: merged, they are what one process writes; what does not fit is refused."""

import pickle
from base64 import b64encode
from pathlib import Path
from typing import Any
from zlib import compress

import pytest

import lipaudit
from lipaudit.attacks.kinds import CHUNK
from lipaudit.data.batch import Share
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.engine.files import pack_parts
from lipaudit.errors import EvaluationError, InputError, UsageError
from lipaudit.measures import load_measures
from lipaudit.measures.attention import AttentionOptions
from lipaudit.measures.jacobian import JacobianOptions
from lipaudit.models.sources.loader import load_net
from lipaudit.report import render
from lipaudit.schema import dumps, load, loads
from lipaudit.tables import Report
from tests import processes
from tests.commands import (
    Harmful,
    break_measure,
    invoke,
    read_figures,
    read_without_maps,
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


def run(case: str, **more: Any) -> Report:
    model, name, count, options = CASES[case]
    how = samples(model, count) | {"samples": count} | options | more
    return lipaudit.measure(MODELS[model](), name, **how)


def shards(case: str, of: int, **more: Any) -> list[Report]:
    """All shards of a run, read from their files."""
    each = (run(case, shard=f"{i + 1}/{of}", **more) for i in range(of))
    return [loads(dumps(report)) for report in each]


@pytest.mark.parametrize("case", CASES)
def test_merged_shards_are_the_report_of_one_process(case):
    assert {name for _, name, _, _ in CASES.values()} == load_measures().keys()
    first, second, third = shards(case, 3)
    assert first.shard.name == "shard 1 of 3"
    assert all(report.run.data.samples == CASES[case][2] for report in (first, third))
    merged = lipaudit.merge([third, first, second])
    assert merged.shard is None
    assert read_figures(merged) == read_figures(run(case))


def test_a_shard_measures_whole_batches_of_its_own():
    parts = [set(r.section("jacobian").samples["ids"]) for r in shards("jacobian", 2)]
    everything = run("jacobian").section("jacobian").samples["ids"]
    assert [len(part) for part in parts] == [6, 4]
    assert parts[0] | parts[1] == set(everything)
    assert parts[0] == {name for i, name in enumerate(everything) if i // 2 % 2 == 0}


SURVEYED = {"attention": AttentionOptions(), "jacobian": JacobianOptions(per_layer=True)}


def test_a_model_is_surveyed_at_the_first_batch_of_the_run():
    """What layers are is found out once: a shard must not find it out at other samples."""
    for name, options in SURVEYED.items():
        net, seen = load_net("demo"), []
        first, second = load_data("demo", net, DataOptions(samples=4)).batch.split(2)
        net.module.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        (part,) = load_measures()[name].compute(net, Share(first, [second]), options)
        assert part.ids == second.ids
        # A survey is at points near the samples: none of its passes sees the second batch.
        near = [[(x[0] - (2 * b.x[0] - 1)).abs().max() for b in (first, second)] for x in seen]
        assert [one < other for one, other in near[:3]] == [True] * 3
        assert near[-1][1] < near[-1][0]


def test_an_empty_shard_says_so_everywhere():
    *_, empty = shards("attention", 3)
    assert empty.sections[0].rows == ()
    for format in ("table", "markdown", "html"):
        assert "shard 3 of 3" in " ".join(render(empty, format).decode().split())


@pytest.fixture(scope="module")
def three() -> list[Report]:
    return shards("jacobian", 3)


def refused(reports: list[Report]) -> InputError:
    with pytest.raises(InputError) as error:
        lipaudit.merge(reports)
    return error.value


def test_a_missing_or_doubled_shard_is_named(three):
    first, _, third = three
    error = refused([first, third])
    assert error.message.startswith("shards given: 1/3, 3/3;")
    assert "shards given: 1/3, 2/3, 3/3, 3/3;" in refused([third, *three]).message
    assert "1/3, 1/2, 2/2" in refused([first, *shards("jacobian", 2)]).message
    assert "is not a shard" in refused([first, run("jacobian")]).message
    assert "shards given: none" in refused([]).message


OTHER = "shards 1 and 2 are not from the same run: they differ in "


@pytest.mark.parametrize(
    ("changes", "says", "advice"),
    [
        ({"seed": 1}, f"{OTHER}seed, data", "same command"),
        ({"tol": 1e-1}, f"{OTHER}jacobian", "same command"),
        ({"dtype": "float64"}, f"{OTHER}dtype", "same command"),
        ({"samples": 12}, f"{OTHER}data, samples", "same command"),
        ({"data": "demo:train"}, f"{OTHER}data, samples", "same command"),
        ({"batch_size": 3}, "batch sizes differ", "--batch-size"),
    ],
)
def test_a_shard_of_another_run_is_refused_with_what_differs(three, changes, says, advice):
    other = run("jacobian", shard="2/3", **changes)
    error = refused([three[0], other, three[2]])
    assert says in error.message
    assert advice in error.advice


def changed(report: Report, **run: Any) -> Report:
    return report.model_copy(update={"run": report.run.model_copy(update=run)})


def test_other_weights_versions_or_devices_are_refused(three):
    first, second, third = three
    model = second.run.model.model_copy(update={"weights_sha256": "f" * 64})
    versions = second.run.versions | {"torch": "0.1"}
    for changes, says in (
        ({"model": model}, "differ in model"),
        ({"versions": versions}, "differ in versions"),
        ({"lipaudit": "9"}, "differ in lipaudit"),
        ({"device": "cuda (A)"}, "differ in device"),
    ):
        assert says in refused([first, changed(second, **changes), third]).message
    cards = [changed(r, device=f"cuda ({card})") for r, card in zip(three, "ABA", strict=True)]
    assert lipaudit.merge(cards).run.device == "cuda (A), cuda (B)"


def test_damaged_or_foreign_parts_are_refused_and_run_nothing(three, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = three[1].shard.parts["jacobian"]
    harm = b64encode(compress(pickle.dumps(Harmful()))).decode()
    numbers = b64encode(b"[1]").decode()
    for text in ("", good[:-40], "?", harm, numbers, pack_parts([], "attack")):
        shard = three[1].shard.model_copy(update={"parts": {"jacobian": text}})
        bad = three[1].model_copy(update={"shard": shard})
        refused([three[0], bad, three[2]])
    assert not Path("harm").exists()


def test_what_needs_all_samples_is_refused_in_a_shard(tmp_path):
    with pytest.raises(UsageError, match="a shard has only some"):
        run("attack", shard="1/2", save_adv=tmp_path / "a.safetensors")
    for text in ("0/2", "3/2", "2", "1/", "-1/2", "1/2/3"):
        with pytest.raises(UsageError, match="--shard"):
            run("attention", shard=text)


@pytest.fixture
def command(elsewhere):
    return lambda *args, code=0: invoke(*args, "-q", code=code).output


@pytest.fixture(scope="module")
def halves(tmp_path_factory) -> list[str]:
    """The reports of both shards of an audit."""
    folder = tmp_path_factory.mktemp("halves")
    for i in (1, 2):
        invoke(*AUDIT, "--shard", f"{i}/2", "--run-dir", folder / f"part{i}", "-q")
    return [str(folder / f"part{i}/report.json") for i in (1, 2)]


def test_an_audit_in_shards_is_the_audit_of_one_process(command, halves):
    """But for the map of the most amplifying head of all, which no shard knows."""
    command("merge", *reversed(halves), "-o", "all.json")
    command(*AUDIT, "--run-dir", "one")
    merged, one = load("all.json"), load("one/report.json")
    maps = [[n for n in r.section("attention").arrays if "map@" in n] for r in (one, merged)]
    assert [len(names) for names in maps] == [1, 0]
    assert read_without_maps(merged) == read_without_maps(one)


def test_a_measure_that_failed_in_a_shard_has_failed(command, halves, monkeypatch):
    with monkeypatch.context() as broken:
        break_measure(broken, "attention", EvaluationError("no figures"))
        command(*AUDIT, "--shard", "2/2", "--run-dir", "part2", code=3)
    said = command("merge", halves[0], "part2/report.json", "-o", "all.json", code=3)
    assert "attention failed: no figures" in said
    merged = load("all.json")
    assert merged.status == "partial"
    assert merged.failures.keys() == {"attention"}
    assert len(merged.section("bounds").samples["ids"]) == 5


def test_what_one_process_does_is_not_shared_out_and_a_shard_is_written(command, monkeypatch):
    asked = ("attention", "demo", "-n", "2", "--shard")
    assert "-o shard-1.json" in command(*asked, "1/2", code=2)
    command(*asked, "1/2", "-o", "a.json")
    command(*asked, "2/2", "-f", "json")
    several = (("watch", "."), ("train", "demo"), ("audit", "demo", "demo:jasmin"))
    for args in several:
        said = command(*args, "--shard", "1/2", code=2)
        assert "--shard: only when one MODEL is measured" in said
    processes.pose(monkeypatch, rank=0)
    attack = ("attack", "demo", "-n", "4", "--eps", "0.1")
    for args, says in (
        *((args, "several processes: only when one MODEL") for args in several),
        ((*attack, "--save-adv", "a.safetensors"), "a.safetensors needs all samples"),
        ((*attack, "--shard", "1/2", "-o", "b.json"), "both split the samples"),
    ):
        assert says in " ".join(command(*args, code=2).split())


def test_a_shard_goes_on_where_it_was_stopped_and_not_where_another_was(command, monkeypatch):
    args = ("jacobian", "demo", "-n", "8", "--batch-size", "2", "-o", "a.json")
    compute, asked = load_measures()["jacobian"].compute, []

    def stop_after_one(net, batches, options):
        yield next(compute(net, batches, options))
        raise KeyboardInterrupt

    def list_batches(net, batches, options):
        each = list(batches)
        asked.extend(each)
        return compute(net, Share(batches.first, each), options)

    replace_parts(monkeypatch, "jacobian", stop_after_one)
    command(*args, "--shard", "1/2", code=130)
    replace_parts(monkeypatch, "jacobian", list_batches)
    command(*args, "--shard", "2/2", "--resume")
    command(*args, "--shard", "1/2", "--resume")
    assert [batch.start for batch in asked] == [2, 6, 4]
