"""Texts of which the tokenizer knows less than two thirds."""

import json

import pytest

import lipaudit
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import InputError
from lipaudit.models.sources.loader import LoadOptions, load_net
from tests.attacks.text_folders import LONG, TEXTS, Folder, H, Plain, save

ENGLISH = TEXTS[:4]
CYRILLIC = ["хороший фильм good", "очень плохо", "a актёры играют film good и плохо"]


@pytest.mark.parametrize(("texts", "warned"), [(ENGLISH, False), (CYRILLIC, True)])
@pytest.mark.parametrize("kind", ["cased", "unigram", "word"])
def test_a_warning_says_how_many_tokens_are_unknown(tmp_path, kind, texts, warned):
    folder = Folder("bert", kind, "BertForSequenceClassification", H | LONG)
    save(folder, tmp_path / "model")
    table = write(tmp_path, [{"text": text} for text in texts])
    net = load_net(str(tmp_path / "model"), LoadOptions(device="cpu"))
    notes = load_data(table, net, DataOptions(samples=len(texts))).notes
    found = [note.text for note in notes if note.code == "unknown-tokens"]
    tokenizer = Plain(folder, tmp_path / "model").tokenizer
    ids = [i for text in texts for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
    share = ids.count(tokenizer.unk_token_id) / len(ids)
    assert (share > 1 / 3) == warned == bool(found)
    assert all(text.startswith(f"{100 * share:.0f}% of the tokens are unknown") for text in found)


def test_an_unknown_id_that_also_ends_texts_is_not_counted(tmp_path):
    gpt2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "eos_token_id": "</s>", "pad_token_id": None}
    folder = Folder(
        "gpt2", "bytes", "GPT2ForSequenceClassification", gpt2, ("</s>",), "$A:0 </s>:0",
        {"eos_token": "</s>", "unk_token": "</s>"},
    )  # fmt: skip
    save(folder, tmp_path)
    assert load_net(str(tmp_path), LoadOptions(device="cpu")).unknown_id is None


KINDS = {
    "multi_label_classification": "BertForSequenceClassification is a multi-label model",
    "regression": "BertForSequenceClassification predicts numbers, not classes",
}


def write(path, rows):
    """Write a table of texts; return its path."""
    (path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(path / "t.jsonl")


@pytest.fixture(params=KINDS)
def folder(tmp_path, request):
    """Return a model folder with a table of lists of labels, and what is said of the model."""
    problem = {"problem_type": request.param}
    kind = Folder("bert", "word", "BertForSequenceClassification", H | LONG | problem)
    save(kind, tmp_path / "model")
    write(tmp_path, [{"text": text, "labels": [0, 2]} for text in TEXTS])
    return kind, tmp_path, KINDS[request.param]


@pytest.mark.parametrize(("measure", "options"), [("attack", {}), ("certify", {"eps": "0.01"})])
def test_no_accuracy_is_made_of_the_largest_logit(folder, measure, options):
    _, path, said = folder
    how = {"data": str(path / "t.jsonl"), "samples": 4, "device": "cpu"}
    with pytest.raises(InputError) as refused:
        lipaudit.measure(str(path / "model"), measure, **how, **options)
    assert refused.value.message.startswith(said)


def test_norms_are_measured_and_a_warning_says_why_there_are_no_margins(folder):
    kind, path, said = folder
    how = {"samples": len(TEXTS), "device": "cpu", "dtype": "float64", "max_tokens": 32}
    report = lipaudit.measure(
        str(path / "model"), "jacobian", data=str(path / "t.jsonl"), tol=1e-9, **how
    )
    section = report.section("jacobian")
    notes = {note.code: note for note in section.notes}
    assert notes["no-decision"].level == "warning"
    assert notes["no-decision"].text.startswith(said)
    assert not {"margin", "correct", "radius_first_order"} & section.samples.keys()
    plain = Plain(kind, path / "model")
    places = report.places
    texts = [TEXTS[int(places[name].split()[1]) - 1] for name in section.ids]
    truth = [plain.differentiate(text)[1] for text in texts]
    assert section.samples["norm"] == pytest.approx(truth, rel=1e-7)


def test_lists_of_labels_are_refused_with_their_line_by_a_model_of_one_class(tmp_path):
    save(Folder("bert", "word", "BertForSequenceClassification", H | LONG), tmp_path / "model")
    rows = [{"text": "good film", "label": 1}, {"text": "bad plot", "label": [0, 2]}]
    data = write(tmp_path, rows)
    with pytest.raises(InputError, match=r"line 2 has a list in 'label', and a sample has only"):
        lipaudit.measure(str(tmp_path / "model"), "attack", data=data, samples=2)
