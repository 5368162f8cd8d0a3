"""How often weights that are kept as stored are converted."""

import pytest
import torch
import transformers

from lipaudit import measure
from lipaudit.models import precision

PASSES_OF_SURVEY = 5


@pytest.fixture
def stored(tmp_path):
    """A Llama in bfloat16, and how many entries its weights have."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    module = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    module.save_pretrained(tmp_path)
    return str(tmp_path), sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("name", ["attention", "bounds"])
def test_weights_are_lifted_once_for_a_survey_and_once_for_a_batch(stored, name, monkeypatch):
    lifted = []
    refer = precision.TensorWeakRef  # to each converted copy
    monkeypatch.setattr(precision, "TensorWeakRef", lambda p: lifted.append(p.numel()) or refer(p))
    model, entries = stored
    how = {"samples": 12, "max_tokens": 8, "batch_size": 2}
    measure(model, name, weights="stored", **how)
    assert sum(lifted) / entries == pytest.approx(PASSES_OF_SURVEY + 6, rel=0.3)
