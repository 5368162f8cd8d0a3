"""`lipaudit attack` from end to end: the paper's preset, several radii, a text classifier."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from lipaudit.cli.commands import build

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "a", "very"]


@pytest.fixture
def attack(tmp_path, monkeypatch):
    """Run `lipaudit attack` in an empty directory and return its only section."""
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> Result:
        return CliRunner().invoke(build(), ["attack", *args, "-q", "-f", "json"])

    return run


def section(done: Result) -> dict:
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["sections"][0]


def robust(rows: list[dict]) -> dict[tuple[str, str], float]:
    return {(row["attack"], row["eps_text"]): row["robust"] for row in rows}


def test_the_preset_of_the_paper(attack):
    found = section(attack("demo", "--attack", "paper", "-n", "8"))
    rows = robust(found["rows"])
    names = {(name, eps) for name in ("fgsm", "pgd") for eps in ("2/255", "4/255")}
    assert names <= rows.keys()
    assert any(name not in ("fgsm", "pgd", "worst") and eps == "2/255" for name, eps in rows)
    assert rows["worst", "4/255"] <= rows["worst", "2/255"]


def test_larger_radii_break_more(attack):
    found = section(attack("demo", "--attack", "fgsm,pgd", "--eps", "0,0.05,0.2", "-n", "32"))
    rows = robust(found["rows"])
    clean = found["rows"][0]["clean"]
    assert rows["worst", "0"] == clean
    assert clean > rows["worst", "0.05"] > rows["worst", "0.2"]
    assert rows["worst", "0.05"] <= min(rows["fgsm", "0.05"], rows["pgd", "0.05"])


@pytest.fixture
def reviews(tmp_path) -> tuple[str, str]:
    """A directory with a tiny BERT that tells good from bad, and a table of labelled texts."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "bert"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        id2label={0: "no", 1: "yes"},
        label2id={"no": 0, "yes": 1},
        max_position_embeddings=16,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.BertForSequenceClassification(config)
        _train(model, transformers.BertTokenizerFast(str(folder / "vocab.txt")))
    model.save_pretrained(folder)
    table = tmp_path / "reviews.csv"
    lines = [f"{text},{label}" for text, label in TEXTS]
    table.write_text("text,label\n" + "\n".join(lines) + "\n")
    return str(folder), str(table)


TEXTS = [("good film", "yes"), ("a very bad film", "no"), ("very good", "yes"), ("bad", "no")]
TEXTS += [("a film very good", "yes"), ("bad film", "no")]


def _train(model, tokenizer) -> None:
    inputs = tokenizer([text for text, _ in TEXTS], padding=True, return_tensors="pt")
    labels = torch.tensor([int(label == "yes") for _, label in TEXTS])
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(30):
        loss = model(**inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("norm", ["l2", "token-l2"])
def test_a_text_classifier_is_attacked_in_its_embeddings(attack, reviews, norm):
    model, table = reviews
    args = ("--data", table, "--attack", "fgsm,pgd", "--norm", norm, "--eps", "0.01,100")
    found = section(attack(model, *args))
    rows = robust(found["rows"])
    assert found["rows"][0]["clean"] == 1.0
    assert found["rows"][0]["samples"] == len(TEXTS)
    assert rows["worst", "0.01"] == 1.0
    assert rows["worst", "100"] == 0.0
    assert {row["norm"] for row in found["rows"]} == {norm}


def test_a_text_classifier_has_no_image_attacks(attack, reviews):
    model, table = reviews
    done = attack(model, "--data", table, "--attack", "standard", "--eps", "0.1")
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert Path(table).exists()
