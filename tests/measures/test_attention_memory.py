"""Long sequences: the memory of the statistics."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lipaudit.data.batch import Batch
from lipaudit.measures.attention import ENTRIES, layer_statistics, measure
from lipaudit.models.attention.capture import capture
from lipaudit.models.attention.survey import find_layers
from lipaudit.models.sources.loading import load_net
from lipaudit.settings.attention import AttentionOptions
from lipaudit.theory.heads import affine_heads
from tests.live import Live

transformers = pytest.importorskip("transformers")

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


@pytest.mark.slow(seconds=21)
def test_8192_tokens_and_8_heads_take_less_than_2_gb():
    """A map of all of them is 4.3 GB in float64."""
    code = CODE.replace("TOKENS", "8192")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 2e9


SIZES = {
    "vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 2048,
}  # fmt: skip
OPTIONS = AttentionOptions(p_norm_tokens=0)


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    """A Mistral whose window is shorter than the texts, surveyed on a short one."""
    path = tmp_path_factory.mktemp("mistral")
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SIZES, sliding_window=300)
    transformers.MistralForCausalLM(config).save_pretrained(path)
    net = load_net(str(path))
    find_layers(net, text(64))
    return net


def text(tokens: int) -> Batch:
    ids = torch.randint(512, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    return Batch(ids, None, (f"{tokens}",), None)


@pytest.mark.parametrize("causal", [True, False])
def test_statistics_of_a_head_keep_blocks_of_rows(causal):
    """A block has 2 MB, the map of the head 134 MB; some ten blocks are alive at a time."""
    heads = affine_heads(torch.randn(1, 4096, 4), *torch.randn(3, 1, 4, 4))
    layer, live = SimpleNamespace(attention=replace(heads, causal=causal), samples=1), Live()
    with live:
        layer_statistics(layer, OPTIONS)
    assert live.most < 16 * 8 * ENTRIES


def test_statistics_of_a_causal_model_keep_no_map_and_no_logits(causal):
    """Only the model's mask and what torch makes of it have tokens^2 entries, for all heads."""
    tokens = 2048
    batch, live = text(tokens), Live()
    find_layers(causal, batch)
    with live:
        list(measure(causal, [batch], OPTIONS))
    mask = tokens**2
    assert live.largest <= 4 * mask  # float32, inside the model's own attention
    assert live.most < (4 + 1 + 2) * mask  # it, the mask, and what grows as the tokens do
    assert live.most < 4 * 4 * mask / 2  # the maps of the four heads


def test_a_window_stays_boolean_and_statistics_are_those_of_whole_maps(causal):
    batch = text(700)
    layers = capture(causal, find_layers(causal, batch), batch, lambda layer: layer, layers=[0])
    heads = layers[0].attention
    assert heads.bias.dtype == torch.bool
    assert heads.bias.shape[:2] == (1, 1)
    p = heads.to(torch.float64).attention()
    assert (p[..., 600, :301] == 0).all()
    cast = replace(heads, bias=heads.bias_rows(0, 700))
    for options in (OPTIONS, AttentionOptions()):
        read = layer_statistics(layers[0], options)
        same = layer_statistics(replace(layers[0], attention=cast), AttentionOptions())
        for name in set(read) - {"p_norm"}:
            torch.testing.assert_close(read[name], same[name], rtol=1e-10, atol=1e-12)
