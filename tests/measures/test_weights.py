"""The measure `weights`: every figure against dense products and decompositions of NumPy."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import lipaudit
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import InputError
from lipaudit.models.net import LoadOptions
from lipaudit.models.sources.loader import load_net
from tests.commands import invoke, read_figures
from tests.measures.cases import dense_norm, run_measure
from tests.models.conftest import WEIGHTS, batch_for, build
from tests.nets import Calls, draw, hf_net, own_batch, own_net


def read(net, **options):
    """Return the rows of every table, by its name."""
    sections = run_measure("weights", net, batch_for(net), **options)
    return {section.measure: section.rows for section in sections}


def wide(weight):
    return weight.detach().double().numpy()


@pytest.mark.parametrize(
    ("name", "groups"), [("timm-vit", 1), ("bert", 1), ("gpt2", 1), ("llama", 2)]
)
def test_heads_have_the_norms_of_dense_products(name, groups):
    rows = read(build(name))["weights"]
    assert [(row.layer, row.head) for row in rows] == [(i, h) for i in (0, 1) for h in range(4)]
    for row in rows:
        into, out = WEIGHTS[name](build(name).module, row.layer)
        q, k, v, o = [*(wide(weight).T for weight, _ in into), wide(out)]
        at, group = row.head, row.head // groups
        own, shared = (slice(8 * i, 8 * i + 8) for i in (at, group))
        products = {"qk": q[:, own] @ k[:, shared].T / 8**0.5, "ov": v[:, shared] @ o[own]}
        assert row.why == ""
        for column, dense in products.items():
            norm = np.linalg.norm(dense, 2)
            rank = np.linalg.norm(dense, "fro") ** 2 / norm**2
            assert row[column] == pytest.approx(norm, rel=1e-6 if column == "qk" else 1e-12)
            assert row[f"{column}_rank"] == pytest.approx(rank, rel=1e-12)


class Turned(nn.Module):
    """One head with rotary positions, whose queries and keys are scaled behind them."""

    def __init__(self, query=1.0, key=1.0, cap=None):
        super().__init__()
        self.scales, self.cap = (query, key), cap
        self.q, self.k, self.v, self.o = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        angles = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.1, 0.01])
        turned = []
        for part, scale in zip((self.q, self.k), self.scales, strict=True):
            a, b = part(x).chunk(2, -1)
            cos, sin = angles.cos(), angles.sin()
            turned.append(scale * torch.cat([a * cos - b * sin, a * sin + b * cos], -1))
        logits = turned[0] @ turned[1].mT
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        return x + self.o(logits.softmax(-1) @ self.v(x))


@pytest.mark.parametrize("scales", [(6**-0.5, 1.0), (1.3, 1.3), (-2.0, 0.25)])
def test_a_factor_behind_rotary_positions_is_part_of_the_scale(scales):
    torch.manual_seed(0)
    layer = Turned(*scales)
    (row,) = read_own(nn.Sequential(layer, nn.Linear(6, 2)))
    dense = scales[0] * scales[1] * wide(layer.q.weight).T @ wide(layer.k.weight)
    assert row.qk == pytest.approx(np.linalg.norm(dense, 2), rel=1e-6)


def test_a_soft_cap_has_no_scale_of_logits():
    torch.manual_seed(0)
    layer = Turned(cap=2.0)
    (row,) = read_own(nn.Sequential(layer, nn.Linear(6, 2)))
    assert (row.qk, row.qk_rank, row.why) == (None, None, "logits are not linear")
    dense = wide(layer.v.weight).T @ wide(layer.o.weight).T
    assert row.ov == pytest.approx(np.linalg.norm(dense, 2), rel=1e-6)


def read_own(module):
    """Return the rows of the heads of a module that reads five tokens."""
    net, batch = own_net(module, (5, 6)), own_batch(draw(0, 1, 5, 6))
    tables = {s.measure: s.rows for s in run_measure("weights", net, batch)}
    return tables["weights"]


def test_blocks_maps_and_gains_of_a_vit():
    net = build("timm-vit")
    tables = read(net)
    modules = dict(net.module.named_modules())
    maps = {row.module: row for row in tables["weights.maps"]}
    within = [f"blocks.{i}.mlp.fc{j}" for i in (0, 1) for j in (1, 2)]
    assert [*maps] == [*within, "head"]  # not qkv and proj, which the heads account for
    for name, row in maps.items():
        values = np.linalg.svd(wide(modules[name].weight), compute_uv=False)
        assert row.norm == pytest.approx(values[0], rel=1e-12)
        assert row.rank == pytest.approx((values**2).sum() / values[0] ** 2, rel=1e-12)
        assert row.condition == pytest.approx(values[0] / values[-1], rel=1e-9)
    blocks = {row.module: row for row in tables["weights.blocks"]}
    assert [*blocks] == ["blocks.0", "blocks.1", "all blocks"]
    total = 0.0
    for i in (0, 1):
        row = blocks[f"blocks.{i}"]
        assert row.ov_sum == pytest.approx(sum(r.ov for r in tables["weights"] if r.layer == i))
        mlp = math.prod(maps[f"blocks.{i}.mlp.fc{j}"].norm for j in (1, 2))
        assert row.mlp == pytest.approx(mlp, rel=1e-12)
        assert row.log10_product == pytest.approx(math.log10((1 + row.ov_sum) * (1 + mlp)))
        total += row.log10_product
    assert blocks["all blocks"].log10_product == pytest.approx(total)
    gains = {row.module: row for row in tables["weights.gains"]}
    assert len(gains) == 5
    for name, row in gains.items():
        assert row.gain == modules[name].weight.abs().max().item()


@pytest.mark.parametrize(
    ("name", "module", "gain"),
    [
        ("llama", "model.layers.1.input_layernorm", lambda w: w),
        ("gemma2", "model.layers.1.input_layernorm", lambda w: 1 + w),
        ("t5", "encoder.block.1.layer.0.layer_norm", lambda w: w),
    ],
)
def test_gains_are_those_that_the_module_multiplies_by(name, module, gain):
    (row,) = [row for row in read(build(name))["weights.gains"] if row.module == module]
    weight = build(name).module.get_submodule(module).weight
    assert row.gain == pytest.approx(gain(weight.double()).abs().max().item(), rel=1e-6)


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.qkv, self.out = norm, nn.Linear(20, 60), nn.Linear(20, 20)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 10)).permute(2, 0, 3, 1, 4)
        o = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(o.transpose(1, 2).flatten(2))


class BlockOfTwo(Block):
    def __init__(self):
        super().__init__(nn.LayerNorm(20))
        self.mlp = nn.Sequential(nn.Linear(20, 30), nn.GELU(), nn.Linear(30, 20))

    def forward(self, x):
        x = super().forward(x)
        return x + self.mlp(x)


def test_a_model_that_is_a_block_itself_has_its_mlp():
    torch.manual_seed(0)
    model = BlockOfTwo()
    (row,) = lipaudit.measure(model, "weights", input_shape=(5, 20)).section("weights.blocks").rows
    mlp = math.prod(np.linalg.norm(wide(model.mlp[i].weight), 2) for i in (0, 2))
    assert row.mlp == pytest.approx(mlp, rel=1e-9)
    assert row.log10_product == pytest.approx(math.log10((1 + row.ov_sum) * (1 + mlp)))


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_constant_block_has_the_logarithm_of_zero():
    class Constant(Block):
        def forward(self, x):
            return 0 * super().forward(x)

    model = nn.Sequential(Block(nn.LayerNorm(20)), Constant(nn.LayerNorm(20)))
    report = lipaudit.measure(model, "weights", data=draw(0, 2, 5, 20).numpy(), at_samples=True)
    rows = report.section("weights.blocks").rows
    assert [row.log10_data for row in rows[1:]] == [-math.inf, -math.inf]
    assert math.isfinite(rows[0].log10_data)


class HalvedLayerNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x) / 2


def test_outliers_are_named_and_a_variant_of_a_norm_has_no_gain():
    for kind, gain, channels in ((nn.LayerNorm, 9.0, "7: 9"), (HalvedLayerNorm, None, "")):
        torch.manual_seed(0)
        norm = kind(20)
        with torch.no_grad():
            norm.weight[7] = 9.0
            norm.weight[3] = 6.0  # 2.3 standard deviations off: no outlier
        net = own_net(nn.Sequential(Block(norm)), (6, 20))
        tables = {s.measure: s for s in run_measure("weights", net, own_batch(draw(0, 1, 6, 20)))}
        (row,) = tables["weights.gains"].rows
        assert (row.gain, row.channels) == (gain, channels)
        assert row.outliers == (1 if gain else 0)


def test_heads_whose_weights_cannot_be_attributed_say_why():
    normed = read(build("timm-qk-norm"))
    assert {row.why for row in normed["weights"]} == {"queries or keys are not linear"}
    assert all(row.qk is None and row.ov > 0 for row in normed["weights"])
    assert all(row.log10_product > 0 for row in normed["weights.blocks"])
    unread = read(build("timm-mvit"))
    assert all(row.why and row.qk is None and row.ov is None for row in unread["weights"])
    assert all(row.log10_product is None for row in unread["weights.blocks"])
    # Projections that no head accounts for are linear maps like others.
    assert any("qkv" in row.module for row in unread["weights.maps"])


def test_blocks_without_a_row_per_sample_have_no_norm_at_samples():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)  # tokens first
    module = Calls(lambda block, x: block(x.transpose(0, 1)).mean(0), layer)
    net, batch = own_net(module, (1, 8)), own_batch(draw(0, 3, 1, 8))
    tables = {s.measure: s.rows for s in run_measure("weights", net, batch)}
    assert [row.module for row in tables["weights.blocks"]] == ["parts.0"]
    with pytest.raises(InputError, match="blocks of Calls have no row per sample"):
        run_measure("weights", net, batch, at_samples=True)


def test_products_stand_beside_norms_at_samples():
    net = load_net("demo", LoadOptions(dtype="float64"))
    batch = load_data("demo", net, DataOptions(samples=3)).batch.to(net.device, net.dtype)
    sections = run_measure("weights", net, batch[:2], batch[2:], at_samples=True, tol=1e-9)
    rows = {s.measure: s.rows for s in sections}["weights.blocks"]
    inputs = []
    for block in net.module.blocks:
        with block.register_forward_pre_hook(lambda _m, args: inputs.append(args[0])):
            net.output(batch)
    logs = np.log10(
        [
            [dense_norm(block, x[None]) for x in z]
            for block, z in zip(net.module.blocks, inputs, strict=True)
        ]
    )
    expected = [*np.median(logs, 1), np.median(logs.sum(0))]
    assert [row.log10_data for row in rows] == pytest.approx(expected, rel=1e-8)


def test_figures_are_the_same_in_every_run_and_the_gate_needs_no_statistics(tmp_path):
    paths = first, again, random, other = [tmp_path / f"{i}.json" for i in range(4)]
    lines = ("demo", "demo", "demo --data random", "demo:jasmin")
    for path, line in zip(paths, lines, strict=True):
        invoke("weights", *line.split(), "-q", "-o", path)
    assert read_figures(first) == read_figures(again)
    rules = ("--fail-on", "weights.ov <= +0%", "--fail-on", "weights.blocks.log10_product <= +0")
    done = invoke("gate", random, "--baseline", first, *rules)  # other samples, same figures
    assert "pass: 16 unchanged" in done.stdout
    done = invoke("gate", other, "--baseline", first, *rules, code=1)
    assert "regressed" in done.stdout
    assert "inconclusive" not in done.stdout
    assert "not proven" not in done.stdout


@pytest.mark.parametrize("at_samples", [False, True])
def test_only_norms_at_samples_depend_on_the_samples(at_samples):
    few = (torch.rand(2, 1, 8, 8), torch.tensor([0, 1]))
    for data, code in (("random", "random-data"), (few, "fewer-samples")):
        report = lipaudit.measure("demo", "weights", data=data, at_samples=at_samples, samples=4)
        codes = {note.code for note in report.section("weights").notes}
        assert (code in codes) == at_samples


def test_only_the_output_over_the_vocabulary_is_left_out_whatever_the_sizes():
    sizes = {"vocab_size": 64, "n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 16}
    torch.manual_seed(0)
    tables = read(hf_net(GPT2LMHeadModel(GPT2Config(**sizes)).eval()))
    assert [row.module for row in tables["weights.maps"]] == [
        "transformer.h.0.mlp.c_fc", "transformer.h.0.mlp.c_proj",
    ]  # fmt: skip
    assert tables["weights.blocks"][0].mlp > 0


def test_a_singular_map_has_no_condition_number():
    net = build("timm-vit")
    weight = net.module.blocks[0].mlp.fc1.weight
    with torch.no_grad():
        weight[1] = weight[0]
        weight[:, 1] = weight[:, 0]
    rows = {row.module: row for row in read(net)["weights.maps"]}
    assert rows["blocks.0.mlp.fc1"].condition is None
    assert rows["blocks.1.mlp.fc1"].condition > 1
