"""Token ids that their owner has padded: every figure is that of the text alone."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import jacrev
from transformers import BertConfig, BertForSequenceClassification

import lipaudit
from lipaudit import ModelSpec
from lipaudit.errors import InputError
from tests.nets import TEXT, Calls

TEXTS = [[5, 9, 7], [8, 4, 11, 3, 10, 6], [12, 13], [21, 22, 23, 24, 25]]


def pad(fill, side="right", length=8):
    rows = []
    for ids in TEXTS:
        fills = [fill] * (length - len(ids))
        rows.append(ids + fills if side == "right" else fills + ids)
    return np.array(rows)


def bert(**how):
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**TEXT | how, num_labels=3)).eval()
    for p in model.parameters():
        p.data *= 3
    return model


def true_norm(model, ids):
    """Return the spectral norm of the logits' derivative by the word embeddings."""
    model = model.double()
    table = model.bert.embeddings.word_embeddings.weight.detach()
    x = table[torch.tensor([ids])]
    j = jacrev(lambda z: model(inputs_embeds=z).logits[0])(x).reshape(3, -1)
    return torch.linalg.matrix_norm(j, 2).item()


@pytest.mark.parametrize(("fill", "side"), [(0, "right"), (0, "left"), (31, "right")])
def test_padding_of_a_model_s_own_id_is_removed(fill, side):
    x = pad(fill, side)
    report = lipaudit.audit(
        bert(pad_token_id=fill), ["jacobian", "bounds"], data=x, samples=4, dtype="float64"
    )
    section = report.section("jacobian")
    order = [int(place.removeprefix("index ")) for place in report.samples["place"]]
    truth = [true_norm(bert(pad_token_id=fill), TEXTS[i]) for i in order]
    assert section.samples["norm"] == pytest.approx(truth, rel=1e-6)
    assert "padding-removed" in {note.code for note in section.notes}
    alone = [
        lipaudit.measure(bert(), "bounds", data=np.array([ids]), samples=1, dtype="float64")
        for ids in TEXTS
    ]
    norms = [max(row.exact_max for row in each.section("bounds").rows) for each in alone]
    found = max(row.exact_max for row in report.section("bounds").rows)
    assert found == pytest.approx(max(norms), rel=1e-6)


def test_a_mask_in_the_file_is_read(tmp_path):
    x = pad(7)  # an id that texts have, too
    mask = np.array([[1] * len(ids) + [0] * (8 - len(ids)) for ids in TEXTS])
    np.savez(tmp_path / "x.npz", input_ids=x, attention_mask=mask)
    report = lipaudit.measure(
        bert(), "jacobian", data=str(tmp_path / "x.npz"), samples=4, dtype="float64"
    )
    order = [int(place.removeprefix("index ")) for place in report.samples["place"]]
    truth = [true_norm(bert(), TEXTS[i]) for i in order]
    assert report.section("jacobian").samples["norm"] == pytest.approx(truth, rel=1e-6)


def mean(embed, head, ids):
    return head(embed(ids).tanh().mean(1))


def build(function, length=8):
    torch.manual_seed(0)
    parts = nn.Embedding(40, 6), nn.Linear(6 if function is mean else 6 * length, 3)
    return Calls(function, *parts)


def test_a_module_that_takes_no_mask_reads_each_text_alone():
    spec = ModelSpec(build(mean), (8,), kind="text", pad_id=0)
    report = lipaudit.measure(spec, "jacobian", data=pad(0), samples=4, dtype="float64")
    module = build(mean).double()
    truth = []
    for place in report.samples["place"]:
        ids = TEXTS[int(place.removeprefix("index "))]
        z = module.parts[0](torch.tensor([ids])).detach()
        j = jacrev(lambda z: module.parts[1](z.tanh().mean(1)))(z).reshape(3, -1)
        truth.append(torch.linalg.matrix_norm(j, 2).item())
    assert report.section("jacobian").samples["norm"] == pytest.approx(truth, rel=1e-6)
    with pytest.raises(InputError, match="texts of several lengths") as refused:
        lipaudit.measure(spec, "attack", data=(pad(0), np.zeros(4, int)), samples=4, eps="0.1")
    assert "(ids, mask)" in refused.value.advice


def test_a_module_of_one_length_keeps_its_padding_and_says_so():
    spec = ModelSpec(build(lambda e, h, ids: h(e(ids).flatten(1))), (8,), kind="text", pad_id=0)
    report = lipaudit.measure(spec, "jacobian", data=pad(0), samples=4)
    said = {note.code: note.text for note in report.section("jacobian").notes}
    assert "Padding counts as tokens" in said["padding-kept"]


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_that_nothing_names_is_suspected(side):
    spec = ModelSpec(build(mean), (8,), kind="text")
    report = lipaudit.measure(spec, "jacobian", data=pad(0, side), samples=4)
    said = {note.code: note.text for note in report.section("jacobian").notes}
    assert "pad_id=0" in said["padding-unnamed"]
    whole = np.array([ids[:2] for ids in TEXTS])
    report = lipaudit.measure(spec, "jacobian", data=whole, samples=4)
    assert "padding-unnamed" not in {note.code for note in report.section("jacobian").notes}


def test_a_text_of_padding_alone_is_refused():
    x = pad(0)
    x[2] = 0
    with pytest.raises(InputError, match="index 2 holds padding and no text"):
        lipaudit.measure(bert(), "jacobian", data=x, samples=4)
