"""Stores of metrics: TensorBoard and MLflow for real, W&B by what its runs are asked to do."""

import math
import re
import sys
from types import SimpleNamespace

import pytest

from lipaudit.errors import UsageError
from lipaudit.monitor.loggers import LOGGERS, collect_figures, loggers
from lipaudit.tables.summary import summary
from tests.report.conftest import make_report


@pytest.fixture(scope="module")
def report():
    return make_report()


ROBUST = "lipaudit/attacked_accuracy/linf_2_255"


def write(name: str, folder) -> None:
    (log,) = loggers(name, folder)
    for step in (10, 20):
        log({ROBUST: step / 100, "lipaudit/seconds": 0.5}, step)


def test_tensorboard_has_every_figure_at_its_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write("tensorboard", tmp_path)
    write("tensorboard", tmp_path)  # another session of the same training
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {ROBUST, "lipaudit/seconds"}
    seen = [(e.step, pytest.approx(e.value)) for e in events.Scalars(ROBUST)]
    assert seen == [(10, 0.1), (20, 0.2), (10, 0.1), (20, 0.2)]


def test_mlflow_has_every_figure_at_its_step(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    try:
        with mlflow.start_run() as run:
            write("mlflow", tmp_path)
        client = mlflow.MlflowClient()
        seen = client.get_metric_history(run.info.run_id, ROBUST)
    finally:
        mlflow.set_tracking_uri(before)
    assert [(metric.step, metric.value) for metric in seen] == [(10, 0.1), (20, 0.2)]


class Run:
    """What a run of W&B is called with; its own step may be ahead of ours."""

    def __init__(self):
        self.defined, self.rows = [], []

    def define_metric(self, name, step_metric=None):
        self.defined.append((name, step_metric))

    def log(self, data, step=None, commit=None):
        self.rows.append((data, step))


def test_a_run_of_wandb_is_given_a_step_of_our_own(tmp_path, monkeypatch):
    run = Run()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    write("wandb", tmp_path)
    assert run.defined == [("lipaudit/step", None), ("lipaudit/*", "lipaudit/step")]
    assert [(row["lipaudit/step"], row[ROBUST], step) for row, step in run.rows] == [
        (10, 0.1, None),
        (20, 0.2, None),
    ]


def test_wandb_without_a_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None))
    with pytest.raises(UsageError, match="no W&B run is active"):
        loggers("wandb", tmp_path)


@pytest.mark.parametrize("name", LOGGERS)
def test_a_package_that_is_missing_is_named_with_its_extra(name, tmp_path, monkeypatch):
    package = {"tensorboard": "torch.utils.tensorboard"}.get(name, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=re.escape(name)) as refusal:
        loggers([name], tmp_path)
    assert refusal.value.advice == f"Install it: pip install 'lipaudit[{name}]'"


def test_a_function_is_a_logger(tmp_path):
    told = []
    for log in loggers(lambda figures, step: told.append((figures, step)), tmp_path):
        log({"a": 1.0}, 2)
    assert told == [({"a": 1.0}, 2)]


def test_the_figures_are_those_of_the_scorecard(report):
    figures = collect_figures(report)
    summed = summary(report)
    assert figures["lipaudit/jacobian_norm/median"] == summed.norms.median
    assert figures["lipaudit/heads/steepest"] == summed.heads.steepest[0].exact
    assert figures["lipaudit/fragile_rows"] == summed.fragile.share
    attacked = {
        f"lipaudit/attacked_accuracy/{a.norm}_{a.eps.replace('/', '_')}": a.share
        for a in summed.accuracy
        if a.kind == "attacked"
    }
    assert attacked
    assert {n: v for n, v in figures.items() if "attacked" in n} == attacked


def test_what_is_not_finite_is_not_logged(report):
    section = report.section("jacobian")
    row = section.rows[0].replace(median=math.nan)
    broken = section.model_copy(update={"rows": (row, *section.rows[1:])})
    whole = report.model_copy(update={"sections": (broken,)})
    assert "lipaudit/jacobian_norm/median" not in collect_figures(whole)
    assert "lipaudit/jacobian_norm/max" in collect_figures(whole)
