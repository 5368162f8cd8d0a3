"""The examples of the guides on watching and on training run as they stand."""

from functools import partial

import pytest
import timm

from lipaudit import schema
from tests.tutorials import TRAINER, examples, run_example

pytestmark = pytest.mark.usefixtures("blank_charts")

EXAMPLES, TRAININGS = examples("watch"), examples("train")
FOLDERS = {
    "loop": "watched",
    "trainer": "bert/lipaudit-watch",
    "lightning": "lipaudit-watch",
}
LIGHTNING = """
import lightning, timm, torch

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        size = {"img_size": 32, "patch_size": 8, "num_classes": 8}
        self.vit = timm.create_model("vit_tiny_patch16_224", **size)

    def training_step(self, batch, _):
        return torch.nn.functional.cross_entropy(self.vit(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

module, x, y = Module(), torch.rand(8, 3, 32, 32), torch.arange(8)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)
quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
settings = {"max_steps": 4, "accelerator": "cpu", **quiet}
"""
BEFORE = {"trainer": TRAINER, "lightning": LIGHTNING}


def test_the_guides_have_their_examples():
    assert list(EXAMPLES) == list(FOLDERS)
    assert list(TRAININGS) == ["loop", "trainer"]


@pytest.fixture(autouse=True)
def _shallow(monkeypatch):
    """Cut the models of timm that the guides build to one of their twelve blocks."""
    monkeypatch.setattr(timm, "create_model", partial(timm.create_model, depth=1))


@pytest.mark.parametrize("name", FOLDERS)
def test_an_example_runs_and_measures(name, elsewhere, tmp_path):
    run_example(BEFORE.get(name, "") + EXAMPLES[name])
    reports = {
        step: schema.load(tmp_path / FOLDERS[name] / f"step-{step:07}.json") for step in (0, 2, 4)
    }
    assert not any(report.failures for report in reports.values())
    assert (tmp_path / FOLDERS[name] / "report.html").exists()


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_runs(name, elsewhere):
    run_example((TRAINER if name == "trainer" else "") + TRAININGS[name])
