"""What a measure is tried at before it begins, and the batch that is timed."""

from dataclasses import replace

import pytest
import torch
import transformers

from lipaudit import measure
from lipaudit.engine import preview
from lipaudit.engine.prepare import Request, prepare
from lipaudit.measures import JacobianOptions
from lipaudit.models import lifting
from lipaudit.models.sources.assembly import assemble
from lipaudit.models.sources.huggingface import describe_transformers
from lipaudit.models.spec import LoadOptions
from lipaudit.settings import RunOptions
from tests.commands import replace_parts

PASSES_OF_SURVEY = 5

MODEL = '''
import torch
from torch import nn
from lipaudit.models.spec import ModelSpec

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


LENGTHS = (12, 4)


def norms_of_texts(target):
    """A tiny GPT-2 and two texts of these lengths."""
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 30}
    spec = describe_transformers(
        transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)), LoadOptions()
    )
    net = assemble(spec, LoadOptions(device="cpu"), name="m", source="test")
    run = RunOptions(data="random", samples=2)
    job = prepare(Request("m", {"jacobian": JacobianOptions(target=target)}, run), net=net)
    mask = torch.arange(LENGTHS[0]) < torch.tensor(LENGTHS)[:, None]
    batch = replace(job.samples.batch, x=torch.ones(mask.shape, dtype=torch.long), mask=mask)
    return replace(job, samples=replace(job.samples, batch=batch))


def test_memory_of_all_positions_is_tried_at_one(monkeypatch):
    """As many positions are taken at a time as there are samples: trying all would take long."""
    job, tried = norms_of_texts("hidden:all"), []

    def parts(_net, _batches, options):
        tried.append(options.target)
        return iter(())

    replace_parts(monkeypatch, "jacobian", parts)
    preview.footprint(job, "jacobian")
    assert set(tried) == {"hidden:last"}


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
    refer = lifting.TensorWeakRef  # to each converted copy
    monkeypatch.setattr(lifting, "TensorWeakRef", lambda p: lifted.append(p.numel()) or refer(p))
    model, entries = stored
    how = {"samples": 12, "max_tokens": 8, "batch_size": 2}
    measure(model, name, weights="stored", **how)
    assert sum(lifted) / entries == pytest.approx(PASSES_OF_SURVEY + 6, rel=0.3)


def test_a_batch_is_timed_after_one_that_is_not(monkeypatch):
    clock = iter([5.0, 5.25])
    monkeypatch.setattr(preview.time, "perf_counter", lambda: next(clock))
    job = prepare(Request("demo", {"jacobian": JacobianOptions()}, RunOptions(samples=3)))
    assert preview.time_batch(job) == (3, 0.25)


def test_a_batch_for_which_memory_runs_out_has_no_time(monkeypatch):
    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    job = prepare(Request("demo", {"jacobian": JacobianOptions()}, RunOptions(samples=3)))
    job = replace(job, net=replace(job.net, call=fails))
    assert preview.time_batch(job) is None
