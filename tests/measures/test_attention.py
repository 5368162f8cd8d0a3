"""The statistics against direct float64 computation from attention maps."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from lipaudit.data.batch import Batch
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import UsageError
from lipaudit.measures.attention import (
    ATTENTION_TABLE,
    ENTRIES,
    MEANS,
    AttentionOptions,
    layer_statistics,
    measure,
)
from lipaudit.models.attention.capture import capture
from lipaudit.models.attention.survey import find_layers
from lipaudit.models.net import LoadOptions
from lipaudit.models.sources.loader import load_net
from lipaudit.theory.heads import affine_heads
from lipaudit.theory.softmax import profile_rows, row_statistics
from tests.live import Live
from tests.measures.cases import run_measure
from tests.models.conftest import batch_for, build
from tests.nets import TEXT, hf_net


def text_model(kind: str, **more):
    config = getattr(transformers, f"{kind}Config")(**TEXT, **more, attn_implementation="eager")
    return getattr(transformers, f"{kind}Model")(config)


def text_net(module: nn.Module):
    for p in module.parameters():
        if p.ndim > 1:
            p.data.mul_(8.0)  # spread the attention
    return hf_net(module, "float64")


def by_hand(row, options):
    """Each mean of the section at one row; NaN where the row does not count."""
    p = np.sort(row[row > 0])[::-1]
    first, second = [*p, 0.0][:2]
    g1 = first * (1 - first + second)
    norm = np.linalg.eigvalsh(np.diag(p) - np.outer(p, p))[-1]
    entropy, k, count = -(p * np.log(p)).sum(), options.k, len(p)
    middle, short = g1 > max(options.gamma, 2 / count), count <= 8
    found = {
        "top1": first,
        "top2": second,
        "g1": g1,
        "softmax_norm": norm,
        "g1_ratio": g1 / norm if norm > 1e-14 else math.nan,
        "gk_ratio": g1 / (p[k - 1] * (1 - p[k - 1] + p[k])) if count > k else math.nan,
        "entropy": entropy,
        "entropy_normalized": entropy / np.log(count) if count > 1 else math.nan,
        "support": np.exp(entropy),
        "intermediate": math.nan if short else middle,
        "uniform": math.nan if short else not middle and first <= 0.5,
        "categorical": math.nan if short else not middle and first > 0.5,
    }
    assert found.keys() == set(MEANS)
    return found


def test_one_hot_rows_are_categorical_as_far_as_their_keys_are_seen():
    """Their other entries are 0 by rounding, which is no mask."""
    rows = torch.eye(9, dtype=torch.float64)[:3]
    keys = torch.tensor([9, 8, 0])  # all seen; too few seen; a padded query
    found = row_statistics(profile_rows(rows, k=2, keys=keys))
    assert found["categorical"].tolist()[0] == 1.0
    assert found["entropy_normalized"].tolist()[:2] == [0.0, 0.0]
    assert found["categorical"][1:].isnan().all()
    assert found["g1_ratio"].isnan().all()
    assert found["gk_ratio"].isnan().all()


@pytest.mark.parametrize(("attention", "gain"), [("eager", 1e4), ("sdpa", 1e6)])
def test_a_head_of_one_hot_rows_has_a_regime(attention, gain):
    torch.manual_seed(0)
    module = text_model("Bert")
    module.set_attn_implementation(attention)
    for layer in module.encoder.layer:
        layer.attention.self.query.weight.data.mul_(gain / 64)
    ids = torch.stack([torch.randperm(57)[:16] + 3 for _ in range(2)])  # no tie of equal tokens
    batch = Batch(ids, None, ("a1" * 8, "b2" * 8))
    for row in section_of(text_net(module), [batch]).rows:
        assert row.short_rows == 0
        assert row.categorical + row.intermediate == 1
        assert row.categorical > 0.5


def test_what_is_kept_of_a_sample_is_small():
    net = load_net("demo", LoadOptions(dtype="float64"))
    batch = load_data(None, net, DataOptions(samples=8)).batch.to("cpu", torch.float64)
    (part,) = measure(net, [batch], AttentionOptions())
    assert sum(values.nbytes for values in part.values.values()) / len(batch) < 2**13


def section_of(net, batches, **given):
    return run_measure("attention", net, *batches, **given)[0]


@pytest.fixture(scope="module")
def ragged():
    """A model, texts of unlike lengths, and their maps."""
    torch.manual_seed(2)
    module = text_model("Bert")
    mask = torch.ones(3, 14, dtype=torch.bool)
    mask[0, 9:] = mask[2, 11:] = False
    x = torch.randint(1, 60, (3, 14))
    batch = Batch(x, None, ("aa", "bb", "cc"), mask)
    net = text_net(module)
    with torch.no_grad():
        maps = module(input_ids=x, attention_mask=mask.long(), output_attentions=True).attentions
    return net, batch, maps


def test_the_map_is_the_models_own_without_its_padding(ragged):
    net, batch, maps = ragged
    expected = maps[1][0, 2, :9, :9].double().numpy()
    for pieces in (3, 1):
        section = section_of(net, batch.split(pieces), map="1.2")
        assert section.arrays["map@1.2"].numpy() == pytest.approx(expected, rel=2e-5, abs=1e-9)
        assert section.arrays["map_tokens@1.2"].data == (9, 9)
        assert "map" not in section.settings
    with pytest.raises(UsageError, match="layer 1"):
        section_of(net, [batch], map="1.0", layers=(0,))


def test_means_over_some_samples_follow_from_what_is_kept_of_each(ragged):
    net, batch, _ = ragged
    section = section_of(net, [batch])
    reductions = {n: c.reduction for n, c in ATTENTION_TABLE.columns.items() if c.reduction}
    for picked in ([0, 1, 2], [0, 2], [1]):
        alone = section_of(net, [batch[i : i + 1] for i in picked])
        for name, how in reductions.items():
            kept = (section.arrays[n].numpy()[:, picked] for n in (how.values, how.weights))
            means, weights = kept
            expected = [getattr(row, name) for row in alone.rows]
            assert (means * weights).sum(1) / weights.sum(1) == pytest.approx(expected, rel=2e-5)


def test_a_map_of_more_than_256_tokens_is_kept_as_means_of_blocks(causal):
    batch = text(600)  # blocks of 3
    drawn = section_of(causal, [batch], map="1.0", p_norm_tokens=0).arrays["map@1.0"].numpy()
    sites = find_layers(causal, batch)
    (p,) = capture(causal, sites, batch, lambda layer: layer.attention.attention(), layers=[1])
    means = p[0, 0].double().reshape(200, 3, 200, 3).mean((1, 3)).numpy()
    assert drawn == pytest.approx(means, rel=2e-5, abs=1e-9)


def swin_maps(net, batch):
    """P of every layer as timm computes it without a fused kernel: (windows, heads, n, n)."""
    found, hooks = [], []
    layers = [m for m in net.module.modules() if hasattr(m, "fused_attn")]
    for layer in layers:
        layer.fused_attn = False
        hooks.append(layer.attn_drop.register_forward_hook(lambda _m, _a, out: found.append(out)))
    with torch.no_grad():
        net.output(batch)
    for layer, hook in zip(layers, hooks, strict=True):
        layer.fused_attn = True
        hook.remove()
    return [list(p.chunk(len(batch))) for p in found]  # windows of a sample follow each other


def text_maps(net, batch):
    """P of every layer as transformers returns it: (1, heads, n, n), without padding."""
    mask = batch.mask
    with torch.no_grad():
        maps = net.module(input_ids=batch.x, attention_mask=mask.long(), output_attentions=True)
    return [[p[b : b + 1, :, m][..., m] for b, m in enumerate(mask)] for p in maps.attentions]


@pytest.mark.parametrize("kind", ["Bert", "GPT2", "Llama", "swin"])
def test_every_statistic_is_that_of_the_models_own_maps(kind):
    torch.manual_seed(3)
    if kind == "swin":
        net = build("timm-swin", "float64")
        batch = batch_for(net)
        layers = swin_maps(net, batch)
    else:
        grouped = {"num_key_value_heads": 2} if kind == "Llama" else {}
        net, mask = text_net(text_model(kind, **grouped)), torch.ones(2, 14, dtype=torch.bool)
        mask[1, 9:] = kind != "Bert"
        batch = Batch(torch.randint(1, 60, (2, 14)), None, ("aa", "bb"), mask)
        layers = text_maps(net, batch)
    section = section_of(net, [batch])
    assert len(section.rows) == sum(layer[0].shape[1] for layer in layers)
    for row in section.rows:
        samples = [p[:, row.head].numpy() for p in layers[row.layer]]  # (windows, n, n) each
        rows = [r for p in samples for r in p.reshape(-1, p.shape[-1])]
        each = [by_hand(row, AttentionOptions()) for row in rows]
        values = {name: [found[name] for found in each] for name in MEANS}
        means = {n: np.nanmean(v) if np.isfinite(v).any() else None for n, v in values.items()}
        expected = means | sums_by_hand(samples, rows)
        assert row.tokens == max(map(len, rows))
        assert row.uniform + row.intermediate + row.categorical == pytest.approx(1.0)
        for name, value in expected.items():
            known = value if value is None else pytest.approx(value, rel=1e-6, abs=1e-9)
            assert getattr(row, name) == known, name
    in_windows = any(len(layer[0]) > 1 for layer in layers)
    assert any(note.code == "windows" for note in section.notes) == in_windows


def sums_by_hand(samples, rows):
    """What is no mean over rows: maxima, masses on keys, norms of maps."""
    tops = [np.sort(p)[:-3:-1] for p in rows]
    masses = [p.sum((0, 1)) / p.sum() for p in samples]
    return {
        "g1_max": max(first * (1 - first + second) for first, second in tops),
        "softmax_norm_max": max(np.linalg.norm(np.diag(p) - np.outer(p, p), 2) for p in rows),
        "sink_first": np.mean([mass[0] for mass in masses]),
        "sink_max": np.mean([mass.max() for mass in masses]),
        "short_rows": sum((p > 0).sum() <= 8 for p in rows),
        "p_norm": np.mean([max(np.linalg.norm(w, 2) for w in p) for p in samples]),
    }


def test_long_maps_have_no_norm_unless_asked(ragged):
    net, batch, _ = ragged
    assert all(row.p_norm is None for row in section_of(net, [batch], p_norm_tokens=13).rows)
    assert all(row.p_norm > 0 for row in section_of(net, [batch], p_norm_tokens=14).rows)
    assert AttentionOptions().p_norm_tokens == 2048


SIZES = TEXT | {"vocab_size": 512, "num_key_value_heads": 2, "max_position_embeddings": 2048}
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
