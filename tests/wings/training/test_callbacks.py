"""The Trainers of transformers and of Lightning, and the examples of the guides, run for real."""

import csv
from functools import partial
from importlib import import_module

import pytest
import timm
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import lipaudit
from lipaudit import schema
from tests.nets import Classifier
from tests.tutorials import TRAINER, examples, run_example
from tests.wings.training.conftest import median, reports

pytestmark = pytest.mark.usefixtures("blank_charts")

CHEAP = {"measures": ["jacobian"], "samples": 2}


IDS = torch.randint(1, 50, (8, 6), generator=torch.Generator().manual_seed(0))
TEXTS = [
    {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": n % 2}
    for n, row in enumerate(IDS)
]


def bert(folder, *callbacks, steps, resumed=None, **arguments):
    """Train a small model for some steps; return it."""
    torch.manual_seed(0)
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=50, intermediate_size=8, num_labels=2, **size)
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    quiet |= {"per_device_train_batch_size": 4, "logging_steps": 1}
    given = TrainingArguments(str(folder), max_steps=steps, **quiet | arguments)
    model = BertForSequenceClassification(config)
    Trainer(model, given, train_dataset=TEXTS, callbacks=list(callbacks)).train(resumed)
    return model


def callback(*part, **options):
    return lipaudit.monitor.TrainerCallback(*part, data=IDS, strict=True, **CHEAP, **options)


def test_a_trainer_is_watched_and_trains_as_it_would(tmp_path):
    alone = bert(tmp_path / "alone", steps=2)
    watched = bert(tmp_path / "watched", callback(every=2), steps=2)
    weights = zip(alone.parameters(), watched.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in weights)
    known = reports(tmp_path / "watched/lipaudit-watch")
    assert sorted(known) == [0, 2]
    assert median(known[0]) != median(known[2])


def test_a_trainer_that_goes_on_from_a_checkpoint_goes_on_in_the_folder(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1}
    bert(tmp_path, callback(every=1), steps=1, **saving)
    resumed = str(tmp_path / "checkpoint-1")
    bert(tmp_path, callback(every=1), steps=2, resumed=resumed, **saving)
    assert sorted(reports(tmp_path / "lipaudit-watch")) == [0, 1, 2]
    part = callback(lambda model: model.bert, to=tmp_path / "part")  # of the model may be watched
    bert(tmp_path, part, steps=1)
    assert part.monitor.report.run.model.spec == "BertModel, step 1"


def test_lightning_is_watched(data, tmp_path):
    library = import_module("lightning.pytorch")
    callback_of = lipaudit.monitor.LightningCallback
    assert issubclass(callback_of, library.Callback)

    class Module(library.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Classifier()

        def training_step(self, batch, _):
            x, y = batch
            loss = nn.functional.cross_entropy(self.model(x), y)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fitted(*callbacks, folder):
        library.seed_everything(0, verbose=False)
        module = Module()
        loggers = import_module("lightning.pytorch.loggers")
        how = {
            f"enable_{name}": False for name in ("progress_bar", "model_summary", "checkpointing")
        }
        how |= {"max_steps": 5, "accelerator": "cpu", "log_every_n_steps": 1}
        how |= {"default_root_dir": folder, "callbacks": list(callbacks)}
        trainer = library.Trainer(logger=loggers.CSVLogger(folder, name="", version=""), **how)
        trainer.fit(module, DataLoader(TensorDataset(*data), batch_size=4, shuffle=True))
        return module

    alone = fitted(folder=tmp_path / "alone")
    asked = {"data": data, "every": 2, "strict": True, **CHEAP}
    callback = callback_of(lambda module: module.model, **asked)
    watched = fitted(callback, folder=tmp_path / "watched")
    pairs = zip(alone.state_dict().values(), watched.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    known = reports(tmp_path / "watched/lipaudit-watch")
    assert sorted(known) == [0, 2, 4, 5]
    rows = list(csv.DictReader((tmp_path / "watched/metrics.csv").open()))
    name = "lipaudit/jacobian_norm/median"
    logged = {int(row["step"]): float(row[name]) for row in rows if row[name]}
    assert logged == {step: pytest.approx(median(each)) for step, each in known.items()}


EXAMPLES, TRAININGS = examples("watch"), examples("train")
FOLDERS = {"loop": "watched", "trainer": "bert/lipaudit-watch", "lightning": "lipaudit-watch"}
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
    """Cut the models of timm that the guides build to one block of twelve, a quarter as wide."""
    small = partial(timm.create_model, depth=1, embed_dim=48)
    monkeypatch.setattr(timm, "create_model", small)


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
