"""Logits in the thousands: bounds that hold for the rounded pass, a label, and what helps."""

import pytest
import torch
import transformers

from lipaudit.measures.bounds import BoundsOptions, measure, summarise
from lipaudit.models.attention.survey import survey
from lipaudit.theory.bounds.record import load_bounds
from tests.nets import TEXT, hf_net, own_batch


def model(attention: str, gain: float, dtype: str = "float32"):
    torch.manual_seed(0)
    config = transformers.BertConfig(**TEXT, num_labels=3, initializer_range=0.2)
    module = transformers.AutoModelForSequenceClassification.from_config(
        config, attn_implementation=attention
    )
    for layer in module.bert.encoder.layer:
        layer.attention.self.query.weight.data.mul_(gain)
    ids = torch.stack([torch.randperm(57)[:16] + 3 for _ in range(2)])
    return hf_net(module, dtype), own_batch(ids)


def section(net, batch):
    options = BoundsOptions()
    return summarise([*measure(net, [batch], options)], options)[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("gain", [1.0, 1e4])
def test_layers_keep_their_closed_form_and_say_what_rounding_may_have_moved(attention, gain):
    net, batch = model(attention, gain)
    table = section(net, batch)
    assert all(site.closed_form for site in survey(net, batch).sites)
    for row in table.rows:
        assert all(
            getattr(row, name) is None or getattr(row, name) >= row.exact for name in load_bounds()
        )
    noted = [note for note in table.notes if note.code == "forward-error"]
    largest = max(row.forward_error for row in table.rows)
    assert (largest > 1e-4) == (gain > 1) == bool(noted)
    assert all("--dtype float64" in note.text for note in noted)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_where_single_precision_is_hopeless_it_says_what_helps(attention):
    single, double = (model(attention, 1e6, dtype) for dtype in ("float32", "float64"))
    assert any("--dtype float64" in str(site.reason) for site in survey(*single).sites)
    assert all(site.closed_form for site in survey(*double).sites)
    assert max(row.forward_error for row in section(*double).rows) < 1e-4
