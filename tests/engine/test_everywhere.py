"""Every measure on two models, by every way to share it out: the report is that of one process.

A slice of it runs always; all of it, with launchers and kills, with -m slow.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lipaudit.engine.journal import Journal
from lipaudit.measures import load_measures
from tests import processes
from tests.commands import read_without_maps
from tests.simulated.conftest import SMALL

ATTACKED = ("--eps", "0.05", "--attack", "pgd", "--steps", "2")
AUDITED = ("-n", "3", "--batch-size", "1", "--eps", "0.05", "--attack", "fgsm")
CASES: dict[str, tuple[str, ...]] = {
    "bounds": ("-n", "3", "--batch-size", "1", "--layers", "0"),
    "attention": ("-n", "4", "--batch-size", "1"),
    "jacobian": ("-n", "4", "--batch-size", "1"),
    "attack": ("-n", "66", *ATTACKED),
    "certify": ("-n", "2", "--eps", "0.001", "--order", "1", "--nodes", "1"),
    "scaling": ("-n", "9", "--lengths", "4:8:log2", "--mode", "real", "--layers", "0"),
    "audit": (*AUDITED, "--only", "attention,jacobian,attack", "--quick"),
}
"""At least two batches of each."""
LAUNCHERS = {
    "torchrun": ("torch.distributed.run", "--nproc-per-node", "2", "--master-port"),
    "accelerate": (
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        "--main_process_port",
    ),
}
MODELS = {
    "demo": ["attack", "scaling", "audit"],  # an audit has the other measures
    "llama": list(CASES),
}
"""What each is measured by: certificates of demo take long."""
slow = pytest.mark.slow(seconds=26)


def command(case: str, model: tuple[str, ...], out: str, *more: str) -> tuple[str, ...]:
    folder = ("--run-dir", f"{out}.run") if case == "audit" else ()
    return (case, *model, *CASES[case], "-q", "-o", f"{out}.json", *folder, *more)


def well(commands: list[processes.Command]) -> None:
    ends = [each.ended() for each in commands]
    assert [code for code, _ in ends] == [0] * len(ends), ends


class Model:
    """A model, and the reports of one process on it."""

    def __init__(self, args: tuple[str, ...], folder: Path, cases: Sequence[str]) -> None:
        self.args = args
        first, *others = self.commands = [command(case, args, case) for case in cases]
        well([processes.begun(*first, cwd=folder, then=others)])
        self.truth = {case: read_without_maps(folder / f"{case}.json") for case in cases}


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Model:
    return Model(("demo",), tmp_path_factory.mktemp("demo"), MODELS["demo"])


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Model:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(**SMALL, num_key_value_heads=2)
    _saved(LlamaForSequenceClassification, config, folder)
    generator = np.random.default_rng(0)
    ids = generator.integers(3, SMALL["vocab_size"], size=(130, 8))
    np.savez(folder / "ids.npz", x=ids, y=np.arange(130) % 3)
    return Model(
        (str(folder / "model"), "--data", str(folder / "ids.npz")), folder, MODELS["llama"]
    )


def _saved(make: Any, given: Any, folder: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        make(given).save_pretrained(folder / "model")


@pytest.fixture
def model(request) -> Model:
    return request.getfixturevalue(request.param)


def pairs() -> Iterator[Any]:
    for name, cases in MODELS.items():
        yield from (pytest.param(name, case, id=f"{name}-{case}") for case in cases)


def test_every_measure_is_shared_out_here():
    assert load_measures().keys() <= CASES.keys()


@pytest.mark.parametrize(
    "model",
    ["demo", pytest.param("llama", marks=slow)],
    indirect=True,
)
def test_two_processes_write_what_one_writes(model, tmp_path):
    first, *others = model.commands
    well(processes.ranks(2, *first, cwd=tmp_path, then=others))
    assert not list(tmp_path.rglob("*.npz"))
    for case, truth in model.truth.items():
        assert read_without_maps(tmp_path / f"{case}.json") == truth, case


@slow
@pytest.mark.parametrize("model", MODELS, indirect=True)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers_start_them(launcher, model, tmp_path):
    (tmp_path / "commands.json").write_text(json.dumps(model.commands))
    root = str(Path(processes.__file__).parent.parent)
    how = (*LAUNCHERS[launcher], processes.free_port(), "-m", "tests.processes")
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": root}
    typed = [sys.executable, "-m", *how, str(tmp_path / "commands.json")]
    done = subprocess.run(typed, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for case, truth in model.truth.items():
        assert read_without_maps(tmp_path / f"{case}.json") == truth, case


def dawdle() -> None:
    """Take a moment for every batch, so that a kill strikes among them."""
    keep = Journal.keep

    def slowly(self: Journal, part: Any) -> None:
        time.sleep(0.1)
        keep(self, part)

    Journal.keep = slowly


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize(("model", "case"), [*pairs()], indirect=["model"])
def test_what_is_killed_goes_on_with_any_number_of_processes(case, model, tmp_path):
    """Whichever of two processes is killed, once some parts, or none, are kept."""
    chance = random.Random(f"{case} {model.args}")
    both = processes.ranks(2, *command(case, model.args, "two"), cwd=tmp_path, before=dawdle)
    parts = chance.randint(0, 2)
    while len(list(tmp_path.rglob("*.npz"))) < parts and all(each.alive for each in both):
        time.sleep(0.005)
    time.sleep(chance.uniform(0, 0.3))
    killed = chance.randrange(2)
    both[killed].process.kill()
    code, said = both[1 - killed].ended()
    assert both[killed].ended()[0] in (0, -signal.SIGKILL)
    assert code in (0, 3), said
    assert "Traceback" not in said
    (tmp_path / "lipaudit").mkdir(exist_ok=True)  # nothing was kept when it was killed
    shutil.copytree(tmp_path / "lipaudit", tmp_path / "three" / "lipaudit")
    resumed = command(case, model.args, "resumed", "--resume")
    well([processes.begun(*resumed, cwd=tmp_path)])
    well(processes.ranks(3, *resumed, cwd=tmp_path / "three"))
    for path in (tmp_path, tmp_path / "three"):
        assert read_without_maps(path / "resumed.json") == model.truth[case]
