"""Every broken text, recounted by plain transformers from the characters that were saved."""

import json

import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from typer.testing import CliRunner

from lipaudit.cli.commands import build

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
TEXTS = [
    "A Good film,  with GREAT actors!",
    "The  bad film (and a very poor plot).",
    "Über-cool café — it's naïve #### but good",
    " good\tbad\nfilm ",
    "zebra 日本 film; the end...",
    "Great, great; great? a plot",
    "don't go: the actors are poor and the plot is bad",
    "a very very long film " * 12,
]
MOST = 32
CASES = ["uncased", "cased", "bytes", "unigram", "word", "character"]


def tokenizer_of(kind: str) -> transformers.PreTrainedTokenizerFast:
    """Train a tokenizer of a kind on the texts."""
    model, pre, decoder, trainer = {
        "uncased": (models.WordPiece, pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(),
                    trainers.WordPieceTrainer),
        "cased": (models.WordPiece, pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(),
                  trainers.WordPieceTrainer),
        "bytes": (models.BPE, pre_tokenizers.ByteLevel(add_prefix_space=False),
                  decoders.ByteLevel(), trainers.BpeTrainer),
        "unigram": (models.Unigram, pre_tokenizers.Metaspace(), decoders.Metaspace(),
                    trainers.UnigramTrainer),
        "word": (models.WordLevel, pre_tokenizers.Whitespace(), None, trainers.WordLevelTrainer),
        "character": (models.BPE, pre_tokenizers.Split("", "isolated"), decoders.Fuse(),
                      trainers.BpeTrainer),
    }[kind]  # fmt: skip
    unknown = {} if kind == "unigram" else {"unk_token": "[UNK]"}
    own = tokenizers.Tokenizer(model(**unknown))
    own.pre_tokenizer, own.decoder = pre, decoder
    if kind == "uncased":
        own.normalizer = normalizers.BertNormalizer(lowercase=True)
    more = {"unk_token": "[UNK]"} if kind == "unigram" else {}
    if kind == "bytes":
        more["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    size = {"bytes": 320, "word": 40}.get(kind, 110)
    learnt = [text for text in TEXTS if "zebra" not in text]
    own.train_from_iterator(
        learnt * 3, trainer(vocab_size=size, special_tokens=SPECIAL, show_progress=False, **more)
    )
    around = [(name, own.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    own.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=around
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", model_max_length=MOST,
    )  # fmt: skip


def classifier(vocabulary: int) -> transformers.PreTrainedModel:
    """Return a classifier with random weights that leans on its words."""
    config = transformers.DistilBertConfig(
        vocab_size=vocabulary, dim=16, n_layers=1, n_heads=2, hidden_dim=16, num_labels=3,
        max_position_embeddings=MOST, initializer_range=0.7, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return transformers.DistilBertForSequenceClassification(config).eval()


def typing_errors(old: str, new: str) -> int:
    """Count letters put in, left out, replaced or swapped, at most 3 (by trying them all)."""
    reached, letters = {old}, sorted(set(new))
    for count in range(3):
        if new in reached:
            return count
        reached = {
            error
            for word in reached
            for i in range(len(word) + 1)
            for error in (
                word[:i] + word[i + 1 :],
                word[:i] + word[i : i + 2][::-1] + word[i + 2 :],
                *(word[:i] + c + word[i:] for c in letters),
                *(word[:i] + c + word[i + 1 :] for c in letters),
            )
        }
    return 3


def distance(kind: str, old: str, new: str) -> int:
    """Count changed words, or characters in all changed words; 99 where other bytes changed."""
    before, after = old.split(), new.split()
    if len(before) != len(after):
        return 99
    changed = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    for _, new_word in changed:
        assert new_word
    blank = ["".join(c if c.isspace() else "" for c in text) for text in (old, new)]
    if blank[0] != blank[1]:
        return 99
    return len(changed) if kind == "words" else sum(typing_errors(*pair) for pair in changed)


@pytest.mark.parametrize("kind", CASES)
def test_every_broken_text_breaks_the_model_from_its_characters(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = tokenizer_of(kind)
    model = classifier(len(tokenizer))
    for each in (tokenizer, model):
        each.save_pretrained("model")
    tokenizer = transformers.AutoTokenizer.from_pretrained("model")

    def classify(text: str) -> int:
        inputs = tokenizer(text, truncation=True, max_length=MOST, return_tensors="pt")
        inputs.pop("token_type_ids", None)
        with torch.no_grad():
            return int(model(**inputs).logits.argmax())

    labels = {text: classify(text) for text in TEXTS}
    rows = [json.dumps({"text": text, "label": label}) for text, label in labels.items()]
    (tmp_path / "texts.jsonl").write_text("\n".join(rows))
    asked = ("attack", "model", "--data", "texts.jsonl", "--attack", "words,characters")
    asked += ("--eps", "1,2", "--save-adv", "adv.jsonl", "-q", "-f", "json")
    done = CliRunner().invoke(build(), asked)
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in (tmp_path / "adv.jsonl").read_text().splitlines()]
    assert {line["original"] for line in lines} == set(TEXTS)
    broken = [line for line in lines if not line["robust"]]
    assert len(broken) >= 4  # the test sees some
    for line in lines:
        name, _, budget = line["trial"].split(",")
        assert distance(name, line["original"], line["text"]) <= int(budget), line
        fooled = classify(line["text"]) != labels[line["original"]]
        assert fooled == (not line["robust"]), line
