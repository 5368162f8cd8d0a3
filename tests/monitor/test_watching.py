"""Watching a loop: the training is what it would be, and what is kept is true."""

from __future__ import annotations

import copy
import json
import re
import time
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import lipaudit
from lipaudit import schema
from lipaudit.errors import InputError, LipauditError, UsageError
from lipaudit.measures import MEASURES
from lipaudit.monitor import watching
from tests.monitor.conftest import trained

CHEAP = {"measures": ["jacobian"], "samples": 4}


def same(ours, theirs) -> bool:
    """Compare to the last bit, however deep."""
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == theirs


@pytest.mark.parametrize("how", [{}, {"autocast": True}, {"twice": True}])
def test_a_training_is_the_same_to_the_last_bit(module, data, tmp_path, how):
    """Weights, buffers, optimizer, gradients, flags, losses, and every random state."""
    alone = trained(copy.deepcopy(module), data, lambda step: None, **how)
    asked = {"data": data, "samples": 4, "eps": "0.05"}
    monitor = lipaudit.watch(module, every=2, to=tmp_path, strict=True, **asked)
    watched = trained(module, data, monitor, **how)
    assert [point.step for point in monitor.history.points] == [0, 2, 4]
    assert all(point.heads and point.summary.accuracy for point in monitor.history.points)
    assert {name: same(alone[name], watched[name]) for name in alone} == dict.fromkeys(alone, True)


def test_compiled_and_distributed_models_are_measured_themselves(module, data, tmp_path):
    wrapped = nn.DataParallel(torch.compile(module))
    with lipaudit.watch(wrapped, data=data, to=tmp_path / "a", strict=True, **CHEAP) as ours:
        pass
    with lipaudit.watch(module, data=data, to=tmp_path / "b", strict=True, **CHEAP) as theirs:
        pass
    assert ours.history.points[0].summary == theirs.history.points[0].summary
    assert ours.history.model == "Classifier"


def test_the_figures_are_those_of_an_audit_of_the_same_weights(module, data, tmp_path):
    options = {"samples": 6, "eps": "0.05", "seed": 1}
    monitor = lipaudit.watch(module, ["bounds", "attack"], data=data, to=tmp_path, **options)
    monitor.measure(5, epoch=0.5, loss=0.25)
    report = lipaudit.audit(module, ["bounds", "attack"], data=data, attack="pgd", **options)
    (point,) = schema.load_history(tmp_path / "history.jsonl").points
    kept = schema.load(tmp_path / point.report)
    assert point.heads == {
        f"{r.layer}.{r.head}": pytest.approx(r.exact, rel=1e-5)
        for r in report.section("bounds").rows
    }
    assert kept.section("bounds").rows == report.section("bounds").rows
    assert kept.section("attack").samples == report.section("attack").samples
    assert kept.run.model == report.run.model
    assert (point.step, point.epoch, point.figures) == (5, 0.5, {"loss": 0.25})
    assert point.suite == report.run.data.suite_id


def test_it_measures_before_the_first_step_every_so_many_and_after_the_last(
    module, data, tmp_path
):
    start = time.monotonic()
    with lipaudit.watch(module, data=data, every=3, to=tmp_path, **CHEAP) as monitor:
        for step in range(1, 8):
            monitor.step(epoch=step / 10, loss=float(step))
    passed = time.monotonic() - start
    points = schema.load_history(tmp_path / "history.jsonl").points
    assert [(p.step, p.epoch, p.figures) for p in points] == [
        (0, None, {}),
        (3, 0.3, {"loss": 3.0}),
        (6, 0.6, {"loss": 6.0}),
        (7, 0.7, {"loss": 7.0}),
    ]
    assert [p.share is None for p in points] == [True, False, False, False]
    assert all(0 < p.share <= 1 and p.seconds > 0 for p in points[1:])
    assert monitor.seconds == pytest.approx(sum(p.seconds for p in points), abs=0.01)
    assert points[-1].share >= 0.99 * monitor.seconds / passed  # of all, not of the last alone
    assert "Classifier over its training" in (tmp_path / "history.html").read_text()


def test_an_error_of_the_training_is_raised_and_not_measured(module, data, tmp_path):
    monitor = lipaudit.watch(module, data=data, to=tmp_path, **CHEAP)

    def train():
        with monitor:
            monitor(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert [p.step for p in monitor.history.points] == [0]


def test_a_measurement_that_fails_leaves_a_note_and_the_training_goes_on(module, data, tmp_path):
    monitor = lipaudit.watch(module, data=data, every=1, to=tmp_path, **CHEAP)
    with torch.no_grad():
        module.head.weight[0, 0] = float("nan")
    with pytest.warns(UserWarning, match="lipaudit, step 1: .*weights that are not finite"):
        monitor(1, loss=float("nan"))
    with torch.no_grad():
        module.head.weight[0, 0] = 0.0
    monitor(2)
    failed, measured = schema.load_history(tmp_path / "history.jsonl").points
    assert "head.weight" in failed.failures["jacobian"]
    assert failed.report == ""
    assert measured.summary.norms is not None
    assert module.training
    assert all(p.requires_grad for p in module.parameters())


def test_a_measure_that_fails_leaves_the_others_but_not_if_strict(
    module, data, tmp_path, monkeypatch
):
    def broken(*_: object) -> None:
        raise RuntimeError("no attention today")

    monkeypatch.setitem(MEASURES, "attention", replace(MEASURES["attention"], parts=broken))
    asked = {"measures": ["attention", "jacobian"], "data": data}
    monitor = lipaudit.watch(module, to=tmp_path, **asked)
    monitor.measure(0)
    (point,) = monitor.history.points
    assert point.failures == {"attention": "internal error: RuntimeError: no attention today"}
    assert point.summary.norms is not None
    strict = lipaudit.watch(module, to=tmp_path / "strict", strict=True, **asked)
    with pytest.raises(RuntimeError, match="no attention today"):
        strict.measure(0)


def test_a_full_disk_does_not_end_the_training(module, data, tmp_path, monkeypatch):
    monitor = lipaudit.watch(module, data=data, to=tmp_path, **CHEAP)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(watching.Diary, "keep", full)
    with pytest.warns(UserWarning, match="No space left"):
        monitor.measure(1)


def test_a_logger_gets_the_figures_and_one_that_fails_is_a_warning(module, data, tmp_path):
    told = []

    def poor(figures, step):
        raise ConnectionError("no store")

    loggers = [lambda figures, step: told.append((step, figures)), poor]
    monitor = lipaudit.watch(module, data=data, to=tmp_path, loggers=loggers, **CHEAP)
    with pytest.warns(UserWarning, match="no store"):
        monitor.measure(4)
    ((step, figures),) = told
    (point,) = monitor.history.points
    assert step == 4
    assert figures["lipaudit/jacobian_norm/median"] == point.summary.norms.median
    assert figures["lipaudit/seconds"] == point.seconds


def test_a_killed_training_goes_on_in_the_same_history(module, data, tmp_path):
    first = lipaudit.watch(module, data=data, every=10, to=tmp_path, **CHEAP)
    for step in (0, 10, 20):
        first(step)
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"step":30,"ti')  # killed as it wrote
    again = lipaudit.watch(module, data=data, every=10, to=tmp_path, **CHEAP)
    for step in (10, 30):
        again(step)
    points = schema.load_history(tmp_path / "history.jsonl").points
    assert [p.step for p in points] == [0, 10, 30]
    assert len({p.session for p in points}) == 2
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines[1:]] == [0, 10, 20, 10, 30]


def test_a_block_that_goes_on_measures_first_where_it_does(module, data, tmp_path):
    """And not step 0, which would supersede all that the history has."""
    asked = {"data": data, "every": 10, "to": tmp_path, **CHEAP}
    with lipaudit.watch(module, **asked) as monitor:
        for _ in range(20):
            monitor.step()
    with lipaudit.watch(module, step=10, **asked) as monitor:
        for _ in range(20):
            monitor.step()
    assert [p.step for p in monitor.history.points] == [0, 10, 20, 30]
    assert len({p.session for p in monitor.history.points[1:]}) == 1


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"data": (torch.ones(6, 3, 4, 4), torch.zeros(6).long())}, "history of other samples"),
        ({"measures": ["attention"]}, "history of other measures: jacobian"),
        ({"seed": 5}, "seed 0, not 5"),
    ],
)
def test_what_was_measured_otherwise_is_refused_before_the_training(
    module, data, tmp_path, changed, says
):
    lipaudit.watch(module, data=data, to=tmp_path, **CHEAP).measure(0)
    with pytest.raises(UsageError, match=re.escape(says)):
        lipaudit.watch(module, **{"data": data, "to": tmp_path, **CHEAP, **changed})


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"every": 0}, "every = 0"),
        ({"measures": ["bound"]}, "no measure 'bound'"),
        ({"measures": ["attack"], "data": torch.ones(4, 3, 4, 4)}, "attack needs labelled"),
        ({"tools": 1}, "no option 'tools'"),
        ({"loggers": "tensorbord"}, "no logger 'tensorbord'"),
        ({"data": "nowhere.npz"}, "what does the Classifier take"),
        ({"to": __file__}, "is a file"),
        ({"shard": "1/2"}, "a history is of all samples"),
    ],
)
def test_what_cannot_be_is_refused_before_the_training(module, data, tmp_path, asked, says):
    with pytest.raises(LipauditError, match=re.escape(says)):
        lipaudit.watch(module, **{"data": data, "to": tmp_path / "to", **asked})
    assert not (tmp_path / "to").exists()


def test_weights_that_no_process_holds_are_refused(module, data, tmp_path):
    class DTensor(nn.Parameter):
        pass

    module.head.weight = DTensor(module.head.weight.detach())
    with pytest.raises(InputError, match=r"sharded over processes \(head.weight\)") as refusal:
        lipaudit.watch(module, data=data, to=tmp_path)
    assert "lipaudit watch DIR --follow" in refusal.value.advice

    class FullyShardedDataParallel(nn.Sequential):
        pass

    with pytest.raises(InputError, match=r"sharded over processes \(all\)"):
        lipaudit.watch(FullyShardedDataParallel(nn.Linear(1, 1)), data=data, to=tmp_path)
    with pytest.raises(InputError, match="str is no model"):
        lipaudit.watch("demo", data=data, to=tmp_path)


def test_only_the_first_process_of_a_distributed_run_measures(module, data, tmp_path, monkeypatch):
    for name, value in (("is_initialized", True), ("get_rank", 1)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    with lipaudit.watch(module, data=data, to=tmp_path / "to", every=1) as monitor:
        monitor.step()
    assert not (tmp_path / "to").exists()
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    with lipaudit.watch(module, data=data, to=tmp_path / "to", **CHEAP) as monitor:
        pass
    assert len(monitor.history.points) == 1


def test_samples_without_labels_are_watched_without_accuracy(module, data, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor = lipaudit.watch(module, data=data[0], to=tmp_path)
        monitor.measure(0)
    (point,) = monitor.history.points
    assert point.summary.accuracy == ()
    assert any(w.code == "left-out" for w in point.summary.warnings)
    assert point.summary.fragile is not None
