"""Long sequences: the memory of the statistics, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import resource
import torch
from lipaudit.data.batch import Batch
from lipaudit.measures.attention import AttentionOptions, measure, summarise
from lipaudit.models.sources.assembly import assemble
from lipaudit.models.sources.spec import LoadOptions, ModelSpec

class One(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(50, 64)
        self.qkv = torch.nn.Linear(64, 192)

    def forward(self, x):
        q, k, v = self.qkv(self.table(x)).unflatten(-1, (3, 8, 8)).permute(2, 0, 3, 1, 4)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).flatten(1)[:, :7]

torch.set_num_threads(1)
torch.manual_seed(0)
spec = ModelSpec(One().requires_grad_(False), (TOKENS,), kind="text", vocabulary=50,
                 call=lambda x, mask: spec.module(x))
net = assemble(spec, LoadOptions(), name="one", source="py")
x = torch.randint(50, (1, TOKENS))
options = AttentionOptions(map="0.1")
[section] = summarise(list(measure(net, [Batch(x, None, ("aa",))], options)), options)
shape = section.arrays["map@0.1"].shape
assert len(section.rows) == 8 and section.rows[0].tokens == TOKENS and max(shape) == 256
assert all(row.p_norm is None for row in section.rows)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
def test_8192_tokens_and_8_heads_take_less_than_2_gb():
    """A map of all of them is 4.3 GB in float64."""
    code = CODE.replace("TOKENS", "8192")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 2e9
