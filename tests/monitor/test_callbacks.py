"""The Trainers of transformers and of Lightning, trained for real with the callback."""

import csv
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import lipaudit
from tests.monitor.conftest import Classifier, median, reports

pytestmark = pytest.mark.usefixtures("blank_charts")

CHEAP = {"measures": ["jacobian"], "samples": 2}


@pytest.fixture(scope="module")
def texts():
    ids = torch.randint(1, 50, (8, 6), generator=torch.Generator().manual_seed(0))
    rows = [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": n % 2}
        for n, row in enumerate(ids)
    ]
    return ids, rows


def bert(rows, folder, *callbacks, steps=4, **arguments):
    """Train a small model for some steps; return its trainer."""
    torch.manual_seed(0)
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=50, intermediate_size=8, num_labels=2, **size)
    given = TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
        **{"save_strategy": "no", **arguments},
    )
    model = BertForSequenceClassification(config)
    return Trainer(model, given, train_dataset=rows, callbacks=list(callbacks))


def test_a_trainer_is_watched_and_trains_as_it_would(texts, tmp_path):
    ids, rows = texts
    alone = bert(rows, tmp_path / "alone", steps=2)
    alone.train()
    callback = lipaudit.monitor.TrainerCallback(data=ids, strict=True, every=2, **CHEAP)
    watched = bert(rows, tmp_path / "watched", callback, steps=2)
    watched.train()
    weights = zip(alone.model.parameters(), watched.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in weights)
    known = reports(tmp_path / "watched/lipaudit-watch")
    assert sorted(known) == [0, 2]
    assert median(known[0]) != median(known[2])


def test_a_trainer_that_goes_on_from_a_checkpoint_goes_on_in_the_folder(texts, tmp_path):
    ids, rows = texts

    def callback():
        return lipaudit.monitor.TrainerCallback(data=ids, every=1, strict=True, **CHEAP)

    saving = {"save_strategy": "steps", "save_steps": 1}
    bert(rows, tmp_path, callback(), steps=1, **saving).train()
    bert(rows, tmp_path, callback(), steps=2, **saving).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-1")
    )
    assert sorted(reports(tmp_path / "lipaudit-watch")) == [0, 1, 2]


def test_a_part_of_the_model_may_be_watched(texts, tmp_path):
    ids, rows = texts
    asked = {"data": ids, "to": tmp_path / "part", **CHEAP}
    callback = lipaudit.monitor.TrainerCallback(lambda model: model.bert, strict=True, **asked)
    bert(rows, tmp_path, callback, steps=1).train()
    assert callback.monitor.report.run.model.spec == "BertModel, step 1"


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
        trainer = library.Trainer(
            max_steps=5,
            accelerator="cpu",
            callbacks=list(callbacks),
            default_root_dir=folder,
            logger=loggers.CSVLogger(folder, name="", version=""),
            log_every_n_steps=1,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
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
