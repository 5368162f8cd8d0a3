"""Text folders held to plain transformers: norms, accuracy, scores, attacked texts recounted."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import lipaudit
from lipaudit.errors import UsageError
from tests.attacks.text_folders import (
    FOLDERS,
    LONG,
    QUERIES,
    T5,
    TEXTS,
    Folder,
    H,
    Plain,
    compare,
    differs,
    save,
)

ALIKE = ["good film.", "a bad plot", "very great", "poor actor", "the actors", "but a film"]
"""Texts of one length, in characters."""
FEW = ("bert, characters", "t5 classifier, Unigram", "llama language model, Unigram, start")
"""Folders outside of .ci/run: an encoder, both parts, and a language model."""


def find_folder(name: str) -> Folder:
    return next(folder for folder in FOLDERS if folder.name == name)


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param(folder, marks=() if folder.name in FEW else pytest.mark.ci)
        for folder in FOLDERS
    ],
    ids=lambda folder: folder.name,
)
def test_every_figure_of_a_folder_is_that_of_plain_transformers(folder, tmp_path):
    figures = compare(folder, tmp_path)
    wrong = {what: pair for what, pair in figures.items() if differs(what, *pair)}
    assert not wrong
    if folder.classifier:
        assert figures["characters,2"][1] < figures["accuracy"][1]  # some texts were broken


def test_changed_texts_are_judged_without_padding(tmp_path):
    """ConvBERT reads padding: candidates of several lengths are not to be run together."""
    folder = Folder(
        "convbert", "character", "ConvBertForSequenceClassification",
        H | LONG | {"embedding_size": 16, "head_ratio": 1, "num_hidden_layers": 4},
    )  # fmt: skip
    plain = save(folder, tmp_path / "model")
    lines = _changed(plain, tmp_path, most=20)
    assert any(line["changes"] for line in lines)
    for line in lines:
        assert line["robust"] == (plain.classify(line["text"]) == line["label"]), line


def test_no_saved_text_is_longer_than_texts_are_cut_to(tmp_path):
    """Read again, it would be cut, and another text would be judged."""
    folder = find_folder("bert, characters")
    plain = save(folder, tmp_path / "model")
    most = len(plain.inputs(ALIKE[0])["input_ids"][0])
    lines = _changed(plain, tmp_path, most=most)
    assert any(line["changes"] for line in lines)
    assert max(len(plain.inputs(line["text"])["input_ids"][0]) for line in lines) <= most


def test_a_tokenizer_without_offsets_is_refused_in_one_line(tmp_path):
    """Its norms are measured; what its tokens stand for in a text is not known."""
    config = transformers.T5Config(
        **T5, vocab_size=384, num_labels=2, pad_token_id=0, eos_token_id=1,
        decoder_start_token_id=0,
    )  # fmt: skip
    slow = transformers.ByT5Tokenizer()
    assert not slow.is_fast
    for each in (slow, transformers.T5ForSequenceClassification(config)):
        each.save_pretrained(tmp_path / "model")
    data = tmp_path / "t.jsonl"
    data.write_text('{"text": "good film", "label": 1}\n{"text": "bad", "label": 0}')
    how = {"data": str(data), "samples": 2, "device": "cpu"}
    assert lipaudit.measure(str(tmp_path / "model"), "jacobian", **how).section("jacobian").rows
    for attack in ("words", "characters"):
        with pytest.raises(UsageError) as refused:
            lipaudit.measure(str(tmp_path / "model"), "attack", attack=attack, eps="1", **how)
        assert refused.value.message.startswith(f"{attack} cannot be changed for this model")
        assert "a fast tokenizer" in refused.value.message


def _changed(plain: Plain, path: Path, *, most: int) -> list[dict[str, Any]]:
    """Make typing errors in texts of one length, and return the lines that are saved."""
    rows = [{"text": text, "label": plain.classify(text)} for text in ALIKE]
    (path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    lipaudit.measure(
        str(path / "model"), "attack", data=str(path / "t.jsonl"), samples=len(rows),
        dtype="float64", device="cpu", attack="characters", eps="2", queries=QUERIES,
        max_tokens=most, save_adv=str(path / "adv.jsonl"),
    )  # fmt: skip
    return [json.loads(line) for line in (path / "adv.jsonl").read_text().splitlines()]


def test_rows_and_sinks_are_means_over_what_their_columns_say(tmp_path):
    """Over all rows, or over samples first: beside plain transformers on texts of all lengths."""
    plain = save(find_folder("bert, cased WordPiece"), tmp_path / "model")
    plain.module.set_attn_implementation("eager")
    rows, sinks = [], []
    for text in TEXTS:
        (p,) = plain.module(**plain.inputs(text), output_attentions=True).attentions
        p = p[0].detach()  # heads, queries, keys
        rows.append(torch.special.entr(p).sum(-1))
        sinks.append(torch.stack([p[..., 0].mean(1), p.mean(1).amax(1)]))
    assert len({len(each[0]) for each in rows}) > 3
    over_rows, over_samples = torch.cat(rows, 1).mean(1), torch.stack(sinks).mean(0)
    over_texts = torch.stack([each.mean(1) for each in rows]).mean(0)
    assert not torch.allclose(over_rows, over_texts, rtol=1e-3)  # the two can be told apart
    data = tmp_path / "t.jsonl"
    data.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    section = lipaudit.measure(
        str(tmp_path / "model"), "attention", data=str(data), samples=len(TEXTS), device="cpu",
        dtype="float64",
    ).section("attention")  # fmt: skip
    assert [row.entropy for row in section.rows] == pytest.approx(over_rows.tolist())
    assert [row.sink_first for row in section.rows] == pytest.approx(over_samples[0].tolist())
    assert [row.sink_max for row in section.rows] == pytest.approx(over_samples[1].tolist())
    meanings = {name: column.meaning for name, column in section.columns.items()}
    assert "mean over all rows (queries) of all samples" in meanings["entropy"]
    assert "then over samples" in meanings["sink_first"]
