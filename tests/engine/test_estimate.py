"""What takes long is said before it begins."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
import transformers
from typer.testing import CliRunner

from lipaudit import measure
from lipaudit.cli.commands import build
from lipaudit.engine import estimate
from lipaudit.engine.prepare import Request, prepare
from lipaudit.measures import MEASURES
from lipaudit.models import lifting
from lipaudit.models.lifting import held
from lipaudit.models.sources.assembly import assemble
from lipaudit.models.sources.hf.outputs import hf_spec
from lipaudit.models.sources.spec import LoadOptions
from lipaudit.settings import BoundsOptions, JacobianOptions, RunOptions

MODEL = '''
import torch
from torch import nn
from lipaudit.models.sources.spec import ModelSpec

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


@pytest.mark.parametrize(
    ("options", "forward", "told"),
    [
        (["-n", "3"], 10.0, "2 heads have no closed form.* roughly 10 min to 5 h on 3 samples"),
        (["-n", "3", "-q"], 10.0, None),
        (["-n", "3", "--layers", "1"], 10.0, None),
        (["-n", "3", "--model-kwargs", "gated=false"], 10.0, None),
        (["-n", "3"], 0.01, None),
    ],
    ids=["long", "quiet", "other layers", "closed form", "short"],
)
def test_heads_without_a_closed_form_are_announced(options, forward, told, tmp_path, monkeypatch):
    monkeypatch.setattr(estimate, "_forward", lambda _job, _samples: forward)
    (tmp_path / "own.py").write_text(MODEL)
    command = ["bounds", f"py:{tmp_path / 'own.py'}:make", "--data", "random", *options]
    done = CliRunner().invoke(build(), command)
    assert done.exit_code == 0, done.stderr
    if told is None:
        assert "roughly" not in done.stderr
    else:
        assert len(re.findall(told, done.stderr)) == 1


@pytest.mark.parametrize(
    ("options", "forward", "told"),
    [
        (["--eps", "0.1,0.2"], 1.0, "3 samples take roughly 63 s to 2 min"),  # 21 rows: below
        (["--eps", "0.1", "--order", "1"], 10.0, "3 samples take roughly 6 min "),  # 11 rows
        (["--eps", "0.1,0.2", "-q"], 1.0, None),
        (["--eps", "0.1"], 0.01, None),
    ],
    ids=["long", "order 1", "quiet", "short"],
)
def test_certificates_are_announced(options, forward, told, tmp_path, monkeypatch):
    """A ball takes a forward per input, pair of inputs and number that a module returns."""
    monkeypatch.setattr(estimate, "_forward", lambda _job, _samples: forward)
    (tmp_path / "own.py").write_text(
        "from torch import nn\n"
        "from lipaudit import ModelSpec\n"
        "def make():\n"
        "    layers = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))\n"
        "    return ModelSpec(layers, (2, 2), kind='tokens', classifier=True)\n"
    )
    command = ["certify", f"py:{tmp_path / 'own.py'}:make", "-n", "3", *options]
    done = CliRunner().invoke(build(), command)
    assert done.exit_code == 0, done.stderr
    assert ("roughly" in done.stderr) is (told is not None)
    assert told is None or f"certificates of {told}" in done.stderr


@pytest.mark.parametrize(
    ("shard", "processes", "own"),
    [(None, 1, 16), (None, 2, 8), (None, 3, 8), (None, 9, 4), ((1, 2), 1, 8), ((1, 2), 2, 4)],
)
def test_what_is_shared_out_takes_a_process_its_part_of_the_time(
    shard, processes, own, monkeypatch
):
    """Sixteen samples in batches of four: a process takes whole ones."""
    monkeypatch.setattr(estimate, "_forward", lambda _job, _samples: 1.0)
    run = RunOptions(samples=16, shard=shard)
    job = replace(prepare(Request("demo", {"bounds": BoundsOptions()}, run)), processes=processes)
    assert job.own == {"bounds": own}
    survey = estimate.SURVEY
    assert estimate.cost(job).least == survey + own * estimate.READ["bounds"]


@pytest.mark.parametrize(
    ("forward", "told"),
    [(0.000613, "0.61 ms"), (0.3174, "320 ms"), (2.54, "2.5 s"), (123.0, "120 s")],
)
def test_the_time_of_a_forward_is_written_out(forward, told):
    job = prepare(Request("demo", {"bounds": BoundsOptions()}, RunOptions(samples=1)))
    said = estimate.takes(job, estimate.Pace(forward, forward))
    assert said.endswith(f"a forward of a sample takes {told})")


LENGTHS = (12, 4)
LAST = estimate.MOST_PRODUCTS
FORWARDS = {
    "loss": estimate.PASS,
    "logits:all": LAST * sum(LENGTHS) / 2,
    "logits:-2": LAST,
    None: LAST,
}


def norms_of_texts(target):
    """A tiny GPT-2 and two texts of these lengths."""
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 30}
    spec = hf_spec(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)), LoadOptions())
    net = assemble(spec, LoadOptions(device="cpu"), name="m", source="test")
    run = RunOptions(data="random", samples=2)
    job = prepare(Request("m", {"jacobian": JacobianOptions(target=target)}, run), net=net)
    mask = torch.arange(LENGTHS[0]) < torch.tensor(LENGTHS)[:, None]
    batch = replace(job.samples.batch, x=torch.ones(mask.shape, dtype=torch.long), mask=mask)
    return replace(job, samples=replace(job.samples, batch=batch))


@pytest.mark.parametrize(("target", "forwards"), FORWARDS.items())
def test_a_norm_at_every_position_takes_a_norm_for_each_and_a_loss_one_pass(
    target, forwards, monkeypatch
):
    monkeypatch.setattr(estimate, "_forward", lambda _job, _samples: 1.0)
    assert estimate.cost(norms_of_texts(target)).least == 2 * forwards


def test_classes_make_no_norm_to_features_short(monkeypatch):
    monkeypatch.setattr(estimate, "_forward", lambda _job, _samples: 1.0)
    options = [JacobianOptions(target=target) for target in ("logits", "features", "loss")]
    jobs = [
        prepare(Request("demo", {"jacobian": each}, RunOptions(samples=2))) for each in options
    ]
    costs = [estimate.cost(job).least / 2 for job in jobs]
    assert costs == [15.0, LAST, estimate.PASS]


def test_memory_of_all_positions_is_tried_at_one(monkeypatch):
    """As many positions are taken at a time as there are samples: trying all would take long."""
    job, tried = norms_of_texts("hidden:all"), []

    def parts(_net, _batches, options):
        tried.append(options.target)
        return iter(())

    monkeypatch.setitem(MEASURES, "jacobian", replace(MEASURES["jacobian"], parts=parts))
    estimate.footprint(job, "jacobian")
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
    room = lifting._room
    monkeypatch.setattr(lifting, "_room", lambda p, *to: lifted.append(p.numel()) or room(p, *to))
    model, entries = stored
    how = {"samples": 12, "max_tokens": 8, "batch_size": 2}
    measure(model, name, weights="stored", **how)
    assert sum(lifted) / entries == pytest.approx(estimate.LIFTED + 6, rel=0.3)


def test_time_that_lifting_takes_is_not_multiplied_by_what_reading_does(stored, monkeypatch):
    monkeypatch.setattr(estimate, "_forward", lambda _job, _samples: 1.0)
    monkeypatch.setattr(estimate, "_lifting", lambda job: 0.75 * held(job.net.module))
    costs = [
        estimate.cost(
            prepare(Request(stored[0], {"bounds": BoundsOptions()}, RunOptions(samples=8, **how)))
        )
        for how in ({}, {"weights": "stored"})
    ]
    forwards = estimate.SURVEY + 8 * estimate.READ["bounds"]
    assert costs[0].least == forwards
    assert costs[1].least == 0.25 * forwards + 0.75 * (estimate.LIFTED + 2)


def test_a_forward_that_a_busy_machine_delays_is_not_what_a_forward_takes(monkeypatch):
    took = [0.5, 0.02, 0.3, 0.01, *4 * [0.02]]
    clock = accumulate(second for each in took for second in (0.0, each))
    job = prepare(Request("demo", {"jacobian": JacobianOptions()}, RunOptions(samples=1)))
    monkeypatch.setattr(estimate.time, "perf_counter", lambda: next(clock))
    assert estimate._forward(job, 1) == pytest.approx(0.01)
