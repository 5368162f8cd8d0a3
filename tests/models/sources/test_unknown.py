"""Texts of which the tokenizer knows less than two thirds."""

import json

import pytest

from lipaudit.data.loading import DataOptions, load_data
from lipaudit.models.sources.loading import LoadOptions, load_net
from tests.attacks.text_folders import LONG, TEXTS, Folder, H, Plain, save

ENGLISH = TEXTS[:4]
CYRILLIC = ["хороший фильм good", "очень плохо", "a актёры играют film good и плохо"]


@pytest.mark.parametrize(("texts", "warned"), [(ENGLISH, False), (CYRILLIC, True)])
@pytest.mark.parametrize("kind", ["cased", "unigram", "word"])
def test_a_warning_says_how_many_tokens_are_unknown(tmp_path, kind, texts, warned):
    folder = Folder("bert", kind, "BertForSequenceClassification", H | LONG)
    save(folder, tmp_path / "model")
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    net = load_net(str(tmp_path / "model"), LoadOptions(device="cpu"))
    notes = load_data(str(tmp_path / "t.jsonl"), net, DataOptions(samples=len(texts))).notes
    found = [note.text for note in notes if note.code == "unknown-tokens"]
    tokenizer = Plain(folder, tmp_path / "model").tokenizer
    ids = [i for text in texts for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
    share = ids.count(tokenizer.unk_token_id) / len(ids)
    assert (share > 1 / 3) == warned == bool(found)
    assert all(text.startswith(f"{100 * share:.0f} % of the tokens are unknown") for text in found)


def test_an_unknown_id_that_also_ends_texts_is_not_counted(tmp_path):
    gpt2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "eos_token_id": "</s>", "pad_token_id": None}
    folder = Folder(
        "gpt2", "bytes", "GPT2ForSequenceClassification", gpt2, ("</s>",), "$A:0 </s>:0",
        {"eos_token": "</s>", "unk_token": "</s>"},
    )  # fmt: skip
    save(folder, tmp_path)
    assert load_net(str(tmp_path), LoadOptions(device="cpu")).unknown_id is None
