"""An accelerator with little memory, or without float64: the CPU's figures, or a clear error."""

import gc
import json
from collections.abc import Callable

import pytest

import lipaudit
from benchmarks.shared.demos import load_shipped
from lipaudit.errors import EvaluationError
from lipaudit.models.net import LoadOptions
from lipaudit.models.sources.loader import load_net
from lipaudit.wings.training.loop import train
from lipaudit.wings.training.recipe import Recipe
from tests.commands import invoke
from tests.simulated import device
from tests.simulated.conftest import samples
from tests.simulated.test_measures import same

pytestmark = pytest.mark.simulated

MEASURES = {
    "bounds": {},
    "attention": {},
    "jacobian": {},
    "attack": {"attack": "pgd", "steps": 3, "eps": "8/255"},
}
BATCH = 16
"""Samples: enough that they, and not the survey of the model, decide how much memory is taken."""


def sections(measure: str, where: str, **options):
    options = samples("demo", BATCH) | MEASURES[measure] | options
    report = lipaudit.measure("demo", measure, device=where, **options)
    return [section.model_dump(mode="json") for section in report.sections]


def peak(run: Callable[[], object]) -> int:
    """How much memory a call takes, in bytes."""
    extension = device.start()
    gc.collect()  # what an earlier report held is no part of it
    before = extension.used()
    extension.restart_peak()
    run()
    return extension.peak() - before


@pytest.mark.parametrize("measure", MEASURES)
def test_less_memory_means_smaller_batches_and_the_same_figures(simulated, measure):
    whole, single = (
        peak(lambda n=n: sections(measure, simulated, batch_size=n)) for n in (BATCH, 1)
    )
    assert single < whole
    with device.memory((2 * single + whole) // 3):
        assert not same(sections(measure, "cpu"), sections(measure, simulated, batch_size=BATCH))
    for share in (0.02, 0.3):
        with (
            device.memory(int(share * single)),
            pytest.raises(EvaluationError, match="out of memory"),
        ):
            sections(measure, simulated)


@pytest.mark.parametrize("share", [0.05, 0.6])
def test_training_without_memory_is_said_so(simulated, share, tmp_path):
    def run():
        net = load_net("demo", LoadOptions(device=simulated))
        list(train(net, load_shipped("train")[:64], Recipe(epochs=1, batch_size=32)))

    arguments = ["train", "demo", "--data", "demo:train", "--samples", "64", "--epochs", "1"]
    arguments += ["--batch-size", "32", "--device", simulated, "--out", str(tmp_path / "out")]
    with device.memory(int(share * peak(run))):
        done = invoke(*arguments, code=None)
    assert done.exit_code == 3
    assert "out of memory" in done.output
    assert "bug" not in done.output


def test_env_tells_which_devices_can_be_used(simulated):
    def read() -> str:
        return json.loads(invoke("env", "-f", "json").stdout)["devices"]

    assert read() == "cpu, simulated:0, simulated:1"
    with device.no_float64():
        assert "simulated:1 (not usable: device 'simulated:1' is not available" in read()
