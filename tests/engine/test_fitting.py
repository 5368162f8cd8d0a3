"""How often weights that are kept as stored are converted."""

import pytest
import torch
import transformers

from lipaudit import measure
from lipaudit.models import precision

PASSES_OF_SURVEY = 5

MODEL = '''
import torch
from torch import nn
from lipaudit.models.net import ModelSpec

class Attention(nn.Module):
    """Two heads; gated logits have no closed form."""

    def __init__(self, gated):
        super().__init__()
        self.qkv, self.gated = nn.Linear(8, 24), gated

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        logits = q @ k.mT
        p = (logits * x.mean((1, 2))[:, None, None, None] if self.gated else logits).softmax(-1)
        return (p @ v).transpose(1, 2).flatten(2)

def make(gated=True):
    layers = nn.Sequential(Attention(gated), Attention(False))
    return ModelSpec(layers, (5, 8), kind="tokens", classifier=False)
'''


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
