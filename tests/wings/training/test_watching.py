"""Watching a loop: the training is what it would be, and what is kept is true."""

import copy
import math
import re
import time
import warnings

import pytest
import torch
from torch import nn

import lipaudit
from lipaudit.errors import InputError, LipauditError
from lipaudit.measures import summarise
from lipaudit.tables.summary import find_figures
from lipaudit.wings.training.watching import collect_figures
from tests.commands import break_measure
from tests.nets import own_net
from tests.report.conftest import keep, make_report
from tests.wings.training.conftest import median, reports, trained

pytestmark = pytest.mark.usefixtures("blank_charts")


@pytest.fixture
def watch(module, data, tmp_path):
    """Watch the module cheaply, but for what is asked for."""
    cheap = {"measures": ["jacobian"], "samples": 4, "data": data, "to": tmp_path}
    return lambda watched=module, **asked: lipaudit.watch(watched, **cheap | asked)


@pytest.mark.parametrize("how", [{}, {"autocast": True}, {"twice": True}])
def test_a_training_is_the_same_to_the_last_bit(module, data, tmp_path, how):
    """Weights, buffers, optimizer, gradients, flags, losses, and every random state."""
    alone = trained(copy.deepcopy(module), data, lambda step: None, **how)
    asked = {"data": data, "samples": 2, "eps": "0.05"}
    monitor = lipaudit.watch(module, every=2, to=tmp_path, strict=True, **asked)
    watched = trained(module, data, monitor, **how)
    known = reports(tmp_path)
    assert sorted(known) == [0, 2, 4]
    assert all(each.section("bounds") and each.section("attack") for each in known.values())
    torch.testing.assert_close(watched, alone, rtol=0, atol=0)


def test_compiled_and_distributed_models_are_measured_themselves(module, watch):
    net = own_net(copy.deepcopy(module), (3, 4, 4), kind="image")
    wrapped = nn.DataParallel(torch.compile(module))
    ours, of_net, theirs = (watch(each, strict=True) for each in (wrapped, net, module))
    net.module.train()
    for monitor in (ours, of_net, theirs):
        monitor.measure(0)
        assert monitor.report.section("jacobian") == ours.report.section("jacobian")
    assert net.module.training
    assert ours.report.run.model == theirs.report.run.model
    assert ours.report.run.model.spec == "Restless, step 0"


def test_the_figures_are_those_of_an_audit_of_the_same_weights(module, data, tmp_path):
    options = {"samples": 6, "eps": "0.05", "seed": 1}
    monitor = lipaudit.watch(module, ["bounds", "attack"], data=data, to=tmp_path, **options)
    monitor.measure(5)
    report = lipaudit.audit(module, ["bounds", "attack"], data=data, attack="pgd", **options)
    (kept,) = reports(tmp_path).values()
    assert kept.section("bounds").rows == report.section("bounds").rows
    assert kept.section("attack").samples == report.section("attack").samples
    ours, theirs = (each.run.model for each in (kept, report))
    assert ours.model_copy(update={"spec": theirs.spec}) == theirs
    assert ours.spec == f"{theirs.spec}, step 5"
    assert kept.run.data.suite_id == report.run.data.suite_id


def test_it_measures_before_the_first_step_every_so_many_and_after_the_last(watch, tmp_path):
    start = time.monotonic()
    with watch(every=3) as monitor:
        for _ in range(7):
            monitor.step()
    assert sorted(reports(tmp_path)) == [0, 3, 6, 7]
    assert 0 < monitor.seconds < time.monotonic() - start
    page = (tmp_path / "report.html").read_text()
    places = [page.index(f"Restless, step {step}") for step in (0, 3, 6, 7)]
    assert places == sorted(places)

    def fail():
        with watch(to=tmp_path / "to") as monitor:
            monitor(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):  # is raised, and not measured after the last step
        fail()
    assert sorted(reports(tmp_path / "to")) == [0]


def test_a_measurement_that_fails_is_a_warning_and_the_training_goes_on(module, watch, tmp_path):
    monitor = watch(every=1)
    with torch.no_grad():
        module.head.weight[0, 0] = float("nan")
    with pytest.warns(UserWarning, match="lipaudit, step 1: .*weights that are not finite"):
        monitor(1)
    with torch.no_grad():
        module.head.weight[0, 0] = 0.0
    monitor(2)
    assert sorted(reports(tmp_path)) == [2]
    assert module.training
    assert all(p.requires_grad for p in module.parameters())


def test_a_measure_that_fails_leaves_the_others_but_not_if_strict(watch, monkeypatch):
    break_measure(monkeypatch, "attention", RuntimeError("no attention today"))
    monitor = watch(measures=["attention", "jacobian"])
    monitor.measure(0)
    failed = {name: each.reason for name, each in monitor.report.failures.items()}
    assert failed == {"attention": "internal error: RuntimeError: no attention today"}
    assert monitor.report.section("jacobian").rows
    with pytest.raises(RuntimeError, match="no attention today"):
        watch(measures=["attention"], strict=True).measure(0)


def test_a_folder_that_cannot_be_written_to_does_not_end_the_training(watch, tmp_path):
    monitor = watch(to=tmp_path / "to")
    (tmp_path / "to").write_text("a file in its place")
    with pytest.warns(UserWarning, match="the operating system refused: .*File exists"):
        monitor.measure(1)


def test_a_logger_gets_the_figures_and_one_that_fails_is_a_warning(watch):
    told = []

    def poor(figures, step):
        raise ConnectionError("no store")

    monitor = watch(loggers=[lambda figures, step: told.append((step, figures)), poor])
    with pytest.warns(UserWarning, match="no store"):
        monitor.measure(4)
    ((step, figures),) = told
    assert step == 4
    assert figures["lipaudit/jacobian_norm/median"] == median(monitor.report)
    assert figures["lipaudit/seconds"] == pytest.approx(monitor.seconds, abs=1e-3)


def test_figures_of_loggers_are_those_of_the_scorecard_as_far_as_they_are_finite():
    report = make_report()
    summed, figures = summarise(report), collect_figures(report)
    values = {row.name: row.value for row in summed.rows}
    assert figures["lipaudit/heads/steepest"] == values["steepest_head"]
    assert figures["lipaudit/fragile_rows"] == values["fragile_rows"]
    assert figures["lipaudit/tightest_bound"] == values["tightest_bound"]
    assert figures["lipaudit/certified_radius/linf"] == values["certified_radius"]
    norms = report.section("jacobian").rows[0]
    for name in ("median", "p95", "max"):
        assert figures[f"lipaudit/jacobian_norm/{name}"] == norms[name]
    attacked = {
        f"lipaudit/attacked_accuracy/{row.norm}_{row.radius.replace('/', '_')}": row.value
        for row in find_figures(summed, "attacked_accuracy")
    }
    assert len(attacked) == 3
    assert {n: v for n, v in figures.items() if "attacked" in n} == attacked
    section = report.section("jacobian")
    row = section.rows[0].replace(median=math.nan)
    broken = section.model_copy(update={"rows": (row, *section.rows[1:])})
    logged = collect_figures(keep(report, broken)).keys() & {
        f"lipaudit/jacobian_norm/{name}" for name in ("median", "max")
    }
    assert logged == {"lipaudit/jacobian_norm/max"}


def test_a_training_that_goes_on_replaces_the_reports_of_its_steps(module, watch, tmp_path):
    """The page shows no step that the training has not come to again."""
    with watch(every=10) as monitor:
        for _ in range(30):
            monitor.step()
    before = reports(tmp_path)
    with torch.no_grad():
        module.head.weight *= 2
    with watch(every=10, step=10) as monitor:
        for _ in range(10):
            monitor.step()
    after = reports(tmp_path)
    assert sorted(after) == [0, 10, 20, 30]
    same = {step for step in after if median(after[step]) == median(before[step])}
    assert same == {0, 30}
    page = (tmp_path / "report.html").read_text()
    assert "Restless, step 20" in page
    assert "Restless, step 30" not in page


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"every": 0}, "every = 0"),
        ({"measures": ["bound"]}, "no measure 'bound'"),
        ({"measures": ["attack"], "data": torch.ones(4, 3, 4, 4)}, "attack needs labelled"),
        ({"tools": 1}, "no option 'tools'"),
        ({"loggers": "tensorbord"}, "loggers are functions"),
        ({"data": "nowhere.npz"}, "there is no data 'nowhere.npz'"),
        ({"to": __file__}, "is a file"),
        ({"shard": "1/2"}, "a training is measured on all samples"),
        ({"parts": "run"}, "parts is not possible here"),
    ],
)
def test_what_cannot_be_is_refused_before_the_training(watch, tmp_path, asked, says):
    with pytest.raises(LipauditError, match=re.escape(says)):
        watch(**{"to": tmp_path / "to"} | asked)
    assert not (tmp_path / "to").exists()


def test_weights_that_no_process_holds_are_refused(module, watch):
    named = type("DTensor", (nn.Parameter,), {})
    module.head.weight = named(module.head.weight.detach())
    with pytest.raises(InputError, match=r"sharded over processes \(head.weight\)") as refusal:
        watch()
    assert "lipaudit watch FOLDER" in refusal.value.advice
    named = type("FullyShardedDataParallel", (nn.Sequential,), {})
    with pytest.raises(InputError, match=r"sharded over processes \(all\)"):
        watch(named(nn.Linear(1, 1)))
    with pytest.raises(InputError, match="str is not a model"):
        watch("demo")


def test_only_the_first_process_of_a_distributed_run_measures(watch, tmp_path, monkeypatch):
    for name, value in (("is_initialized", True), ("get_rank", 1)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    with watch(to=tmp_path / "to", every=1) as monitor:
        monitor.step()
    assert not (tmp_path / "to").exists()
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    with watch(to=tmp_path / "to"):
        pass
    assert sorted(reports(tmp_path / "to")) == [0]


def test_samples_without_labels_are_watched_without_accuracy(module, data, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor = lipaudit.watch(module, data=data[0], to=tmp_path)
        monitor.measure(0)
    summed = summarise(monitor.report)
    assert not any(row.name.endswith("accuracy") for row in summed.rows)
    assert any(note.code == "left-out" for note in summed.notes)
    assert find_figures(summed, "steepest_head")
