"""`lipaudit attack` of a text classifier, from end to end."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from lipaudit.data.batch import Batch
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import InputError
from lipaudit.measures.attack import AttackOptions, check
from lipaudit.models.sources.loader import load_net
from lipaudit.models.sources.text_models import read_lexicon
from tests.commands import invoke, refuse

pytestmark = pytest.mark.usefixtures("blank_charts")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "a", "very"]


def attack(*args: str) -> dict:
    """Run `lipaudit attack` and return its only section."""
    return json.loads(invoke("attack", *args, "-q", "-f", "json").stdout)["sections"][0]


def robust(rows: list[dict]) -> dict[tuple[str, str], float]:
    return {(row["attack"], row["eps_text"]): row["robust"] for row in rows}


@pytest.fixture(scope="module")
def reviews(tmp_path_factory) -> tuple[str, str]:
    """A directory with a tiny BERT that tells good from bad, and a table of labelled texts."""
    folder = tmp_path_factory.mktemp("bert")
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1},
        max_position_embeddings=16,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.BertForSequenceClassification(config)
        _train(model, transformers.BertTokenizerFast(str(folder / "vocab.txt")))
    model.save_pretrained(folder)
    table = folder / "reviews.csv"
    table.write_text("\n".join(["text,label", *map(",".join, TEXTS)]) + "\n")
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
def test_a_text_classifier_is_attacked_in_its_embeddings_by_what_a_refusal_advises(reviews, norm):
    """The refusal of attacks on images comes before the data are looked for."""
    model, table = reviews
    how = ("attack", model, "--data", "nowhere.csv", "--attack", "standard", "--eps", "0.1")
    advised = refuse(2, "--attack", *how).strip().removesuffix(".").rpartition("--attack ")[2]
    args = ("--data", table, "--attack", advised, "--norm", norm, "--eps", "0.01,100")
    found = attack(model, *args, "--steps", "5", "--queries", "20")
    rows = robust(found["rows"])
    assert (found["rows"][0]["clean"], found["rows"][0]["samples"]) == (1.0, len(TEXTS))
    assert (rows["worst", "0.01"], rows["worst", "100"]) == (1.0, 0.0)
    embedded = [row["norm"] for row in found["rows"] if row["attack"] in ("fgsm", "pgd")]
    assert embedded == [norm] * 4


def test_a_text_classifier_is_attacked_by_default(reviews):
    model, table = reviews
    found = attack(model, "--data", table)
    rows = {(row["attack"], row["norm"], row["eps_text"]): row["robust"] for row in found["rows"]}
    for name in ("words", "characters"):
        assert found["rows"][0]["clean"] == 1.0 >= rows[name, name, "1"] >= rows[name, name, "4"]
    assert rows["words", "words", "1"] < 0.5  # good and bad are near words of this model
    codes = [note["code"] for note in found["notes"]]
    assert codes.count("changed-texts") == 1


def test_a_text_classifier_without_a_tokenizer_is_attacked_word_by_word(reviews):
    """Characters are refused before the data are looked for."""
    folder, net = Path(shutil.copytree(reviews[0], "bert")), load_net(reviews[0])
    ids = torch.tensor([net.tokenize(text, 4) for text in ("bad film", "good film")])
    np.savez("t.npz", x=ids.numpy(), y=net.output(Batch(ids, None, ("", ""))).argmax(1).numpy())
    for path in folder.glob("*token*"):
        path.unlink()
    (folder / "vocab.txt").unlink()
    found = attack(str(folder), "--data", "t.npz")
    assert {row["norm"] for row in found["rows"]} == {"words"}
    assert found["rows"][0]["clean"] == 1.0
    asked = ("--data", "nowhere", "--attack", "characters")
    refuse(2, "a fast tokenizer beside config.json", "attack", str(folder), *asked)


def test_an_audit_of_a_text_classifier_finishes(reviews):
    model, table = reviews
    # Without --run-dir the folder has the last part of the model's path in its name.
    invoke("audit", f"{model}/", "--data", table, "-n", "2", "-q")
    (saved,) = Path("lipaudit-runs").glob(f"*Z-{Path(model).name}-*/report.json")
    stored = json.loads(saved.read_text())
    attacked = stored["sections"][-1]
    assert (attacked["measure"], stored["status"]) == ("attack", "complete")
    assert {row["norm"] for row in attacked["rows"]} == {"words", "characters"}


@pytest.mark.parametrize("pairs", [False, True])
def test_changed_texts_are_written_as_they_are_read(reviews, pairs):
    """What a line says of the model is what the model says of the line, read by --data."""
    net = load_net(reviews[0])
    rows = [(a, b) for a, _ in TEXTS for b in ("good", "bad film")] if pairs else TEXTS
    texts = [dict(zip(("premise", "hypothesis"), r, strict=True)) if pairs else {"text": r[0]}
             for r in rows]  # fmt: skip
    original = {" | ".join(text.values()) for text in texts}
    for text in texts:
        ids = (net.tokenize_pair if pairs else net.tokenize)(*text.values(), 16)
        text["label"] = int(net.output(Batch(torch.tensor([ids]), None, ("",))).argmax())
    Path("t.jsonl").write_text("\n".join(map(json.dumps, texts)))
    options = ("--attack", "words,characters", "--eps", "1", "--save-adv", "adv.jsonl")
    found = attack(reviews[0], "--data", "t.jsonl", *options)
    lines = [json.loads(line) for line in Path("adv.jsonl").read_text().splitlines()]
    assert (len(lines), {line["original"] for line in lines}) == (2 * len(texts), original)
    again = attack(reviews[0], "--data", "adv.jsonl", "--attack", "fgsm", "--eps", "0")
    standing = sum(line["robust"] for line in lines) / len(lines)
    assert again["rows"][0]["clean"] == standing < found["rows"][0]["clean"] == 1.0
    assert standing == sum(row["robust"] for row in found["rows"][:2]) / 2


def test_a_gate_judges_what_counts_words(reviews):
    model, table = reviews
    asked = ["attack", model, "--data", table, "--attack", "words", "--eps", "1", "-q"]
    invoke(*asked, "-o", "before.json")
    invoke("baseline", "save", "before.json", "-o", "base.json")
    for rule, code in (("words,words,1 >= -2pp", 0), ("words,words,1 >= 0.9", 1)):
        ruled = ["gate", model, "-b", "base.json", "--fail-on", f"attack.robust@{rule}", "-q"]
        invoke(*ruled, code=code)


@pytest.mark.parametrize("kind", ["ByteLevel", "Metaspace"])
def test_words_of_other_tokenizers(tmp_path, kind):
    """Marks of a beginning, where WordPiece marks what goes on; texts come back as written."""
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    raw.pre_tokenizer = getattr(tokenizers.pre_tokenizers, kind)()
    raw.decoder = getattr(tokenizers.decoders, kind)()
    special = ["<s>", "</s>", "<unk>", "<pad>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=special)
    text = "a good film , a very good film ! and such a bad one"
    raw.train_from_iterator([text] * 3, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    known = read_lexicon(fast, len(fast) + 5, lambda texts, _most, **more: fast(*texts, **more))
    ids = fast(text)["input_ids"]
    assert known.spell([0, *ids, 1]).strip() == text
    words = known.split_words([0, *ids, 1])
    assert [known.spell(w).strip() for w in words if not known.is_fixed(w)] == [
        "a", "good", "film", "a", "very", "good", "film", "and", "such", "a", "bad", "one",
    ]  # fmt: skip
    assert all(known.encode(known.spell(w)) == list(w) for w in words if not known.is_fixed(w))
    assert [known.is_fixed([i]) for i in (0, 1, 2, 3)] == [True] * 4
    assert known.is_fixed([len(fast) + 2])  # the model has room for more ids than the tokenizer


def test_special_and_reserved_tokens_are_no_words_and_unknown_embeddings_refused(reviews):
    net = load_net(reviews[0])
    assert net.changes == ("words", "characters", "suffix")
    assert replace(net, entry=torch.nn.Identity()).changes == ()
    known = net.lexicon()
    assert [token for i, token in enumerate(WORDS) if known.is_fixed([i])] == WORDS[:5]
    labelled = Batch(torch.tensor([[2, 5, 3]]), torch.tensor([0]), ("a",))
    for attacks in ("pgd", "words"):
        with pytest.raises(InputError, match="the embedding layer of") as caught:
            check(replace(net, entry=None), labelled, AttackOptions(attack=attacks, eps="1"))
        assert caught.value.advice


CORNERS = ["good", "...", "zebra", "good zebra", "bad " * 40, "a good film . a bad one ?"]


def test_corner_texts_do_not_depend_on_their_neighbours(reviews):
    """Of one token, of unknown ones, and cut: alone or beside much longer."""
    model, _ = reviews
    lines = [{"text": text, "label": "yes"} for text in CORNERS]
    Path("t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = ("--data", "t.jsonl", "--attack", "fgsm,words,characters", "--eps", "0.3,2words")
    first, second = (
        attack(model, *options, "--batch-size", size)["samples"] for size in ("1", "64")
    )
    assert first["ids"] == second["ids"]
    for name, column in first.items():
        if name.startswith("robust"):
            assert column == second[name], name
        elif name.startswith("distance"):
            assert column == pytest.approx(second[name], rel=1e-4), name
    net = load_net(model)
    wordless = {tuple(net.tokenize(text, 16)) for text in ("...", "zebra")}
    assert len(first["ids"]) == len(CORNERS)
    changed = dict(zip(first["ids"], first["distance@words,words,2"], strict=True))
    data = load_data("t.jsonl", net, DataOptions(samples=len(CORNERS), max_tokens=16)).batch
    for name, ids, mask in zip(data.ids, data.x, data.mask, strict=True):
        if tuple(ids[mask].tolist()) in wordless:
            assert changed[name] == 0


LENGTHS = [3, 4, 4, 6, 9]
"""Words of each text: half of them have four at most."""


@pytest.mark.parametrize(
    ("attacks", "eps", "whole"),
    [
        ("words", "2,3", None),
        ("words", "1,4", "4 words can replace whole texts: 3 of 5 have no more (median 4)"),
        ("words", "50", "50 words can replace whole texts: 5 of 5 have no more"),
        ("characters", "19", "19 characters can replace whole texts: 3 of 5 have no more"),
    ],
)
def test_a_budget_as_large_as_the_texts_is_said_so(reviews, attacks, eps, whole):
    lines = [{"text": " ".join(["good"] * n), "label": "yes"} for n in LENGTHS]
    Path("t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    asked = ("--data", "t.jsonl", "--attack", attacks, "--eps", eps, "--queries", "2")
    notes = attack(reviews[0], *asked)["notes"]
    said = [note["text"] for note in notes if note["code"] == "whole-texts"]
    assert len(said) == (whole is not None)
    for text in said:
        assert text.startswith(whole)
        assert f"--attack {attacks} --eps 1,2" in text


def test_a_radius_of_another_unit_is_answered(reviews):
    for attacks, eps, says in (
        ("words", "2/255", "For a ball, use --attack pgd"),
        ("fgsm", "2words", "Use --attack fgsm,words"),
    ):
        how = ("--data", reviews[1], "--attack", attacks, "--eps", eps)
        refuse(2, says, "attack", reviews[0], *how)
