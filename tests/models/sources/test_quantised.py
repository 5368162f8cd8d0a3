"""Weights of few bits: rounded on loading, to the values that a search and torchao find."""

import copy
import json
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from lipaudit import measure
from lipaudit.errors import InputError, UsageError
from lipaudit.models.net import ModelSpec
from lipaudit.models.sources.loader import LoadOptions, assemble, load_net
from lipaudit.schema import load
from tests.commands import invoke
from tests.models.sources.cases import build, configure, figures, refused, save, vit
from tests.nets import hf_net

GPT = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32}
LLAMA = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "initializer_range": 0.3,
}  # fmt: skip


class Packed(nn.Module):
    """Attention with packed projections, a convolution and an output layer."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv1d(16, 16, 1)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.wide = nn.Linear(16, 32)
        self.output = nn.Linear(32, 3)

    def forward(self, x):
        x = self.patches(x.mT).mT
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.output(self.wide(x).relu().mean(1))


def packed():
    torch.manual_seed(0)
    module = Packed().eval()
    module.wide.weight.data[0] = 0.0  # a channel without a largest entry
    return module


def load_own(module, **how):
    options = LoadOptions(device="cpu", **how)
    spec = ModelSpec(module, (5, 16), kind="tokens")
    return assemble(spec, options, name="m", source="test")


def measure_points(weight, rounded, bits, group):
    """Return how far a rounded weight lies from the 2^bits points of its group, and the best."""
    rows, now = (w.double().reshape(-1, group or weight.shape[1]) for w in (weight, rounded))
    step = rows.abs().amax(1, keepdim=True) / ((2**bits - 1) / 2)
    points = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)) * step
    off, best = ((w[:, :, None] - points[:, None]).abs().amin(2) for w in (now, rows))
    return off / step, (now - rows).abs() / step, best / step


MODELS = {
    "packed": (packed, load_own, 4),  # names no output
    "gpt2": (lambda: build("GPT2LMHeadModel", **GPT), hf_net, 4),  # transposed, and a tied head
    "vit": (vit, hf_net, 6),
    "llama": (lambda: build("LlamaForCausalLM", **LLAMA), hf_net, 14),
}


@pytest.mark.parametrize("how", ["int8", "int4", "int4:8"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_of_linear_layers_are_the_nearest_points_of_their_groups(name, how):
    make, wrap, count = MODELS[name]
    module = make()
    before = {key: p.clone() for key, p in module.named_parameters()}
    net = wrap(copy.deepcopy(module), quantize=how)
    bits, group = int(how[3]), int(how[5:] or 0)
    changed = []
    for key, after in net.module.named_parameters():
        if torch.equal(after, before[key]):
            continue
        changed.append(key)
        turned = name == "gpt2"
        was, now = (w.T if turned else w for w in (before[key], after))
        # A half (the largest entry is one) may go either way, so distances are compared.
        off, moved, best = measure_points(was, now, bits, group)
        assert off.nan_to_num().max() < 1e-4
        assert (moved - best).nan_to_num().abs().max() < 1e-4
    assert len(changed) == count
    assert not any(word in key for key in changed for word in ("patch", "head", "wte", "embed"))
    left = {"gpt2": "lm_head", "vit": "classifier", "llama": "lm_head"}.get(name)
    assert (f"left as they are: {left}" if left else "no linear layer is left") in net.quantised
    assert f"weights of {count} linear layers" in net.quantised
    assert [note.code for note in net.notes if note.code == "quantised"] == ["quantised"]
    assert net.weights_sha256 != wrap(module).weights_sha256


class Tied(nn.Sequential):
    """An inner layer that shares its weight with the output, which is listed first."""

    def __init__(self):
        super().__init__(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
        self[2].weight = self[0].weight

    def forward(self, x):
        return self[0](self[1](self[2](x)).mean(1))

    def get_classifier(self):
        return self[0], None


def test_outputs_of_every_name_keep_their_values_and_what_is_tied_to_them():
    from timm.models.deit import VisionTransformerDistilled

    size = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
    deit = ModelSpec(VisionTransformerDistilled(**size, num_classes=3), (3, 8, 8))
    tied = ModelSpec(Tied(), (5, 16), kind="tokens")
    for spec, same, moved in ((deit, ("head", "head_dist"), 4), (tied, ("0", "2"), 1)):
        before = copy.deepcopy(spec.module.state_dict())
        options = LoadOptions(device="cpu", quantize="int4")
        net = assemble(spec, options, name="m", source="test")
        now = net.module.state_dict()
        assert all(torch.equal(now[f"{n}.weight"], before[f"{n}.weight"]) for n in same)
        assert sum(not torch.equal(now[n], before[n]) for n in before) == moved
        assert f"left as they are: {', '.join(same)}" in net.quantised


def test_a_module_of_ones_own_gets_its_weights_back():
    module = packed()
    before = copy.deepcopy(module.state_dict())
    report = measure(module, "jacobian", input_shape=(5, 16), samples=1, quantize="int4")
    assert report.run.options == {"quantize": "int4"}
    assert "int4" in report.run.model.quantised
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_half_precision_is_rounded_as_the_float32_weights_that_it_holds():
    half = build("LlamaForCausalLM", **LLAMA).bfloat16()
    whole = copy.deepcopy(half).float()
    nets = [hf_net(module, quantize="int4:16") for module in (half, whole)]
    assert nets[0].weights_sha256 == nets[1].weights_sha256


@pytest.mark.parametrize("how", ["int8", "int4", "int4:16"])
def test_torchao_rounds_to_the_same_bits(how):
    pytest.importorskip("torchao", reason="needs torchao, the independent quantiser")
    from torchao.quantization import IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerAxis, PerGroup

    module = build("LlamaForCausalLM", **LLAMA)
    theirs = copy.deepcopy(module)
    config = IntxWeightOnlyConfig(
        weight_dtype=getattr(torch, how[:4]),
        granularity=PerGroup(int(how[5:])) if how[5:] else PerAxis(0),
    )
    quantize_(theirs, config, lambda part, name: type(part) is nn.Linear and name != "lm_head")
    for part in theirs.modules():
        if type(part) is nn.Linear and part is not theirs.lm_head:
            part.weight = nn.Parameter(part.weight.dequantize())
    ours = hf_net(module, quantize=how)
    assert ours.weights_sha256 == hf_net(theirs).weights_sha256


def test_compare_and_gate_say_what_quantisation_cost(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    invoke("jacobian", "demo", "-n", "8", "-q", "-o", "fp.json")
    invoke("jacobian", "demo", "-n", "8", "-q", "-o", "int4.json", "--quantize", "int4:16")
    known = load("int4.json").run
    for command, says in (
        ("compare fp.json int4.json", "What changed from demo to demo int4:16?"),
        ("compare fp.json int4.json --details", "quantize: not given became int4:16"),
        ("report int4.json --details", known.model.quantised),
    ):
        assert says in " ".join(invoke(*command.split(), columns=200).stdout.split())
    rule = ("--fail-on", "jacobian.norm:median <= +0.1%", "-b", "fp.json", "-q")
    passed = invoke("gate", "int4.json", *rule, code=None)
    again = ("gate", "demo", "--quantize", "int4:16", *rule, "--report", "now.json")
    measured = invoke(*again, code=None)
    assert (measured.stdout, measured.exit_code) == (passed.stdout, passed.exit_code)
    run = load("now.json").run
    assert (run.options, run.model) == (known.options, known.model)


def test_what_cannot_be_rounded_is_refused(tmp_path):
    vit().save_pretrained(tmp_path)
    says = refused(tmp_path, UsageError, quantize="int8", weights="stored")
    assert "--weights stored keeps them" in says
    (tmp_path / "own.py").write_text(
        "from torch import nn\ndef net(): return nn.Sequential(nn.Conv2d(3, 3, 2), nn.Flatten())\n"
    )
    says = refused(f"py:{tmp_path}/own.py:net", InputError, quantize="int8", input_size=(3, 2, 2))
    assert "has no linear layer to round" in says


def save_torchao(path, name, dtype):
    """Save a Llama that torchao quantised, through transformers; return its float model."""
    pytest.importorskip("torchao", reason="needs torchao, which writes the checkpoint")
    from torchao import quantization
    from torchao.quantization.granularity import PerGroup
    from transformers import TorchAoConfig

    how = {
        "int8": quantization.Int8WeightOnlyConfig(),
        "float8": quantization.Float8WeightOnlyConfig(),
        "int4": quantization.IntxWeightOnlyConfig(torch.int4, PerGroup(16)),
    }[name]
    theirs = save_quantised(path, TorchAoConfig(how), dtype)
    values = {
        n: p.dequantize() for n, p in theirs.named_parameters() if type(p) is not nn.Parameter
    }
    assert len(values) == 14
    whole = AutoModelForCausalLM.from_pretrained(path / "float", dtype=dtype)
    whole.load_state_dict(values, strict=False)
    return whole


def save_bitsandbytes(path, name, dtype):
    """Save a Llama that bitsandbytes quantised; return its float model."""
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes, which writes the checkpoint")
    from transformers import BitsAndBytesConfig

    how = {
        "int8": {"load_in_8bit": True},
        "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "double": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    }[name]
    save_quantised(path, BitsAndBytesConfig(**how), dtype)
    return AutoModelForCausalLM.from_pretrained(path / "quantised").dequantize(dtype)


def save_quantised(path, config, dtype):
    build("LlamaForCausalLM", **LLAMA).to(dtype).save_pretrained(path / "float")
    load = AutoModelForCausalLM.from_pretrained
    theirs = load(path / "float", quantization_config=config, dtype=dtype)
    theirs.save_pretrained(path / "quantised")
    return theirs


@pytest.mark.parametrize(
    ("save", "name", "dtype"),
    [
        *((save_torchao, name, torch.float32) for name in ("int8", "int4")),
        *((save_torchao, name, torch.bfloat16) for name in ("int8", "float8")),
        *((save_bitsandbytes, name, torch.float32) for name in ("int8", "nf4", "double")),
    ],
)
def test_a_checkpoint_is_read_as_its_library_dequantises_it(tmp_path, save, name, dtype):
    says = "" if save is save_bitsandbytes else "14 as torchao"
    assert_read_as(tmp_path / "quantised", save(tmp_path, name, dtype), says)


def test_a_module_that_torchao_quantised_is_measured_and_stays_quantised():
    pytest.importorskip("torchao", reason="needs torchao, which quantises the module")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    quantize_(module, Int8WeightOnlyConfig())
    weights = [module[0].weight, module[2].weight]
    report = measure(module, "jacobian", input_shape=(1, 8), samples=1, data="random")
    assert "2 as torchao Int8Tensor" in report.run.model.quantised
    assert [module[0].weight, module[2].weight][0] is weights[0]
    assert type(module[2].weight).__name__ == "Int8Tensor"


# Every layer fills whole words of 32 bits, whatever its number of bits.
WIDE = LLAMA | {"num_key_value_heads": 4, "intermediate_size": 64}


def is_linear(name, part):
    return type(part) is nn.Linear and name != "lm_head"


def pack(values, bits):
    """Pack the rows of integers into int32, the first one in the lowest bits."""
    words = []
    for row in values.tolist():
        whole = sum(value << bits * i for i, value in enumerate(row))
        words.append([whole >> 32 * i & 2**32 - 1 for i in range(len(row) * bits // 32)])
    return torch.tensor(words).to(torch.int32)


def save_state(path, module, state, how):
    """Save a model with other weights, and how these are quantised."""
    module.save_pretrained(path)
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    configure(path, quantization_config=how)


def save_codes(path, layout, bits, *, order, first=1):
    """Save a Llama of random codes as the formats of GPTQ and AWQ say; return its float model."""
    module, generator = build("LlamaForCausalLM", **WIDE).half(), torch.Generator().manual_seed(1)
    state, values = module.state_dict(), {}
    for name in [n for n, part in module.named_modules() if is_linear(n, part)]:
        outputs, inputs = state.pop(f"{name}.weight").shape
        codes, zeros = (
            torch.randint(low, 2**bits, (rows, outputs), generator=generator)
            for low, rows in ((0, inputs), (first, inputs // 16))
        )
        scales = torch.rand(inputs // 16, outputs, generator=generator).add(0.1).half() / 2**bits
        group = torch.arange(inputs) // 16
        if order:
            group = group[torch.randperm(inputs, generator=generator)]
            state[f"{name}.g_idx"] = group.int()
        values[f"{name}.weight"] = ((codes - zeros[group]).half() * scales[group]).T
        if layout == "gemm":
            mixed = [0, 2, 4, 6, 1, 3, 5, 7]
            codes, zeros = (t.unflatten(1, (-1, 8))[..., mixed].flatten(1) for t in (codes, zeros))
            state[f"{name}.qweight"] = pack(codes, bits)
        else:
            state[f"{name}.qweight"] = pack(codes.T, bits).T.contiguous()
            state[f"{name}.bias"] = torch.zeros(outputs).half()
        state[f"{name}.qzeros"] = pack(zeros - int(layout == "gptq"), bits)
        state[f"{name}.scales"] = scales
    how = {"quant_method": "awq", "version": layout}
    if layout != "gemm":
        how = {"quant_method": "gptq", "bits": bits, "checkpoint_format": layout}
    save_state(path, module, state, how)
    module.load_state_dict(values, strict=False)
    return module


def assert_read_as(path, whole, says):
    """Compare a directory with its float model, loaded at once and one layer at a time."""
    path, ways = str(path), []
    for weights in ("converted", "stored"):
        net = load_net(path, LoadOptions(weights=weights))
        assert net.weights_sha256 == hf_net(whole).weights_sha256
        assert net.parameters == whole.num_parameters()
        assert says in net.quantised
        ways.append(figures(path, "bounds", max_tokens=6, weights=weights)[0])
    assert ways[0] == ways[1]
    return net


@pytest.mark.parametrize(
    ("layout", "bits", "how"),
    [
        ("gptq", 3, {"order": True}),
        ("gptq", 8, {"order": False}),
        ("gptq_v2", 4, {"order": False, "first": 0}),
        ("gemm", 4, {"order": False, "first": 0}),
        pytest.param("gptq", 2, {"order": False}, marks=pytest.mark.ci),
        pytest.param("gptq", 4, {"order": True}, marks=pytest.mark.ci),
        pytest.param("gptq_v2", 3, {"order": False, "first": 0}, marks=pytest.mark.ci),
    ],
)
def test_codes_of_gptq_and_awq_are_read_as_their_formats_say(tmp_path, layout, bits, how):
    whole = save_codes(tmp_path, layout, bits, **how)
    name = {"gemm": "awq"}.get(layout, layout)
    later = assert_read_as(tmp_path, whole, f"14 as {name} int{bits}")
    assert "weights stay in float16, quantised form" in str(later.notes)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda name, v: None if "0.mlp.up_proj.scales" in name else v, "'scales'"),
        (lambda name, v: v[:, :-1] if "qzeros" in name else v, "cannot be dequantised as gptq"),
        (lambda name, v: v.short() if "qweight" in name else v, "packed in torch.int16"),
        (lambda name, v: v.repeat(1, 4) if "qzeros" in name else v, "16 bits"),
        (lambda name, v: v.repeat(2, 1)[:3] if "scales" in name else v, "scales (3, 32) differ"),
        (lambda name, v: v * 0 + 99 if "g_idx" in name else v, "a group without a scale"),
        (lambda name, v: v - 1 if "g_idx" in name else v, "a group without a scale"),
        # These would broadcast.
        (lambda name, v: v[:1] if "g_idx" in name else v, "codes (64, 32) with groups (1,)"),
        (
            lambda name, v: v.repeat(2, 1) if "qzeros" in name else v,
            "zeros (8, 32) and scales (4, 32)",
        ),
        (lambda name, v: v[:, :1] if "qweight" in name else v, "codes (64, 1) with groups (64,)"),
    ],
)
@pytest.mark.parametrize("weights", ["converted", "stored"])
def test_damaged_codes_are_refused_by_the_name_of_their_layer(tmp_path, weights, damage, says):
    save_codes(tmp_path, "gptq", 4, order="g_idx" in damage.__code__.co_consts)
    change = {n: damage(n, v) for n, v in load_file(tmp_path / "model.safetensors").items()}
    change = {n: v.contiguous() for n, v in change.items() if v is not None}
    save_file(change, tmp_path / "model.safetensors", metadata={"format": "pt"})
    text = refused(tmp_path, weights=weights)
    assert "model.layers." in text
    assert says in text


@pytest.mark.parametrize(
    ("kind", "prefix", "parts", "count"),
    [
        ("GPT2LMHeadModel", "transformer.", ("attn.c_proj",), 1),  # square: would load transposed
        ("GPT2LMHeadModel", "", ("c_attn", "c_proj", "c_fc"), 4),
        ("GPT2Model", "transformer.", ("c_attn", "c_proj", "c_fc"), 4),
        ("GPT2Model", "", ("attn.c_proj",), 1),
    ],
)
def test_codes_of_layers_that_hold_their_weights_transposed_are_turned(
    tmp_path, kind, prefix, parts, count
):
    module = build("GPT2LMHeadModel", **GPT | {"n_embd": 32, "n_inner": 64}).half()
    state, generator = module.state_dict(), torch.Generator().manual_seed(1)
    whole = module if kind == "GPT2LMHeadModel" else module.transformer
    state = {n: v.clone() for n, v in state.items() if n != "lm_head.weight"}
    for name in [n for n, part in module.named_modules() if n.endswith(parts)]:
        inputs, outputs = state.pop(f"{name}.weight").shape
        codes, zeros = (
            torch.randint(1, 16, (rows, outputs), generator=generator) for rows in (inputs, 2)
        )
        scales = torch.rand(2, outputs, generator=generator).half() / 16
        group = torch.arange(inputs) // (inputs // 2)
        module.get_submodule(name).weight.data = (codes - zeros[group]).half() * scales[group]
        state[f"{name}.qweight"] = pack(codes.T, 4).T.contiguous()
        state[f"{name}.qzeros"], state[f"{name}.scales"] = pack(zeros - 1, 4), scales
    state = {n.replace("transformer.", prefix): v for n, v in state.items()}
    save_state(tmp_path, module, state, {"quant_method": "gptq", "bits": 4})
    configure(tmp_path, architectures=[kind])
    assert_read_as(tmp_path, whole, f"({count} as gptq int4")


def read_float(path, values):
    """Return the float model of a directory whose quantised weights have these values."""
    whole = build("LlamaForCausalLM", **json.loads((path / "config.json").read_text()))
    state = load_file(path / "model.safetensors")
    whole.load_state_dict({n: state[n] for n in whole.state_dict() if n in state} | values)
    return whole


@pytest.mark.slow(seconds=60)
def test_a_checkpoint_of_gptqmodel_is_read_as_gptqmodel_dequantises_it(tmp_path, monkeypatch):
    monkeypatch.setenv("GPTQMODEL_CPU_WORKERS", "2")
    monkeypatch.chdir(tmp_path)  # it writes a log
    gptqmodel = pytest.importorskip("gptqmodel", reason="needs gptqmodel, which writes it")
    sizes = WIDE | {"hidden_size": 64, "intermediate_size": 96}  # its groups have 32 inputs
    save(build("LlamaForCausalLM", **sizes), tmp_path / "float")
    config = gptqmodel.QuantizeConfig(
        bits=4, group_size=32, sym=False, desc_act=True, format="gptq", device="cpu"
    )
    how = {"backend": gptqmodel.BACKEND.GPTQ_TORCH}
    model = gptqmodel.GPTQModel.load(str(tmp_path / "float"), config, **how)
    ids = torch.randint(0, 48, (8, 24), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in ids]
    model.quantize(data, batch_size=1)
    model.save(str(tmp_path / "q"))
    theirs = gptqmodel.GPTQModel.load(
        str(tmp_path / "q"), device="cpu", dtype=torch.float16, **how
    ).model
    parts = {n: part for n, part in theirs.named_modules() if hasattr(part, "qweight")}
    values = {f"{n}.weight": part.dequantize_weight().T.clone() for n, part in parts.items()}
    assert_read_as(tmp_path / "q", read_float(tmp_path / "q", values), "14 as gptq int4")


def test_a_checkpoint_of_autoawq_is_read_as_autoawq_dequantises_it(tmp_path):
    gemm = pytest.importorskip("awq.modules.linear.gemm", reason="needs autoawq, which packs it")
    from awq.models._config import AwqConfig
    from awq.quantize.quantizer import AwqQuantizer
    from awq.utils.packing_utils import dequantize_gemm

    module = build("LlamaForCausalLM", **WIDE).half()
    state, values = module.state_dict(), {}
    quantiser = AwqQuantizer.__new__(AwqQuantizer)  # without its search for scales
    quantiser.zero_point, quantiser.w_bit, quantiser.group_size = True, 4, 16
    for name, part in module.named_modules():
        if is_linear(name, part):
            part.weight.data, *rest = quantiser.pseudo_quantize_tensor(part.weight.data)
            scales, zeros = (each.T.contiguous() for each in rest)
            packed = gemm.WQLinear_GEMM.from_linear(part, 4, 16, False, scales, zeros)
            del state[f"{name}.weight"]
            state |= {f"{name}.{key}": value for key, value in packed.state_dict().items()}
            codes = packed.qweight, packed.qzeros, packed.scales
            values[f"{name}.weight"] = dequantize_gemm(*codes, 4, 16).T
    save_state(tmp_path, module, state, AwqConfig(q_group_size=16).to_transformers_dict())
    assert_read_as(tmp_path, read_float(tmp_path, values), "14 as awq int4")


def save_compressed(path, *schemes):
    """Save a Llama that compressed-tensors compressed, with one scheme per group of layers."""
    from compressed_tensors import compressors, quantization
    from compressed_tensors.quantization.utils import calculate_qparams

    module = build("LlamaForCausalLM", **WIDE).half()
    groups = {
        targets: quantization.QuantizationScheme(
            targets=[targets],
            weights=quantization.QuantizationArgs(**weights),
            input_activations=quantization.QuantizationArgs(**inputs) if inputs else None,
        )
        for targets, weights, inputs in schemes
    }
    config = quantization.QuantizationConfig(config_groups=groups, ignore=["lm_head"])
    quantization.apply_quantization_config(module, config)
    parts = {n: p for n, p in module.named_modules() if hasattr(p, "quantization_scheme")}
    for part in parts.values():
        how = part.quantization_scheme.weights
        rows = part.weight.data
        if how.strategy == "group":
            rows = rows.unflatten(1, (-1, how.group_size))
        low, high = rows.amin(-1), rows.amax(-1)
        if how.strategy == "tensor":
            low, high = rows.min()[None], rows.max()[None]
        shape = part.weight_scale.shape
        scale, zero = calculate_qparams(low.reshape(shape), high.reshape(shape), how)
        part.weight_scale.data.copy_(scale)
        if hasattr(part, "weight_zero_point"):
            part.weight_zero_point.data.copy_(zero)
    compressor = compressors.ModelCompressor.from_pretrained_model(module)
    compressor.compress_model(module)
    module.save_pretrained(path)
    compressor.update_config(str(path))
    compressor.decompress_model(module)
    return {f"{n}.weight": part.weight.detach().clone() for n, part in parts.items()}


GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 16}
ROWS = {"num_bits": 8, "strategy": "channel"}
TOKENS = {"num_bits": 8, "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("weights", "inputs", "layout"),
    [
        (GROUPS, None, "pack-quantized"),
        (GROUPS | {"symmetric": False}, None, "pack-quantized"),
        (ROWS | {"num_bits": 3}, None, "pack-quantized"),
        (ROWS, TOKENS, "int-quantized"),
        (ROWS | {"type": "float", "strategy": "tensor"}, TOKENS | {"type": "float"}, "float-q"),
    ],
)
def test_a_checkpoint_of_compressed_tensors_is_read_as_it_decompresses_it(
    tmp_path, weights, inputs, layout
):
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors, which writes it")
    values = save_compressed(tmp_path, ("Linear", weights, inputs))
    assert f'"format": "{layout}' in (tmp_path / "config.json").read_text()
    assert_read_as(tmp_path, read_float(tmp_path, values), "stored as compressed-tensors")


def test_schemes_that_differ_are_refused(tmp_path):
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors, which writes it")
    save_compressed(tmp_path, ("re:.*mlp.*", GROUPS, None), ("re:.*attn.*", ROWS, None))
    assert "with schemes that differ between layers" in refused(tmp_path)


@pytest.mark.parametrize("groups", [{"FP8": ["Linear"]}, {"FP8": None}, ["Linear"]])
def test_schemes_without_a_description_are_refused(tmp_path, groups):
    build("LlamaForCausalLM", **LLAMA).save_pretrained(tmp_path)
    how = {"quant_method": "compressed-tensors", "config_groups": groups}
    configure(tmp_path, quantization_config=how)
    assert "with schemes that config.json only names" in refused(tmp_path)


@pytest.fixture
def fp8(tmp_path):
    """Save a Llama whose weights are float8 with a scale per 16 x 16 block; return both."""
    module = build("LlamaForCausalLM", **LLAMA)
    module.save_pretrained(tmp_path)
    weights, values = load_file(tmp_path / "model.safetensors"), {}
    for name in [n for n in weights if "proj" in n]:
        blocks = weights[name].unfold(0, 16, 16).unfold(1, 16, 16)
        scale = blocks.abs().amax((2, 3)) / 448
        spread = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)
        weights[name] = (weights[name] / spread).to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = scale
        values[name] = weights[name].float() * spread
    how = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    save_state(tmp_path, module, weights, how)
    module.load_state_dict(values, strict=False)
    return str(tmp_path), module


def test_blocks_of_float8_are_dequantised_on_loading(fp8):
    path, whole = fp8
    assert_read_as(path, whole, "stored as fp8")
    assert "rounds float weights" in refused(path, UsageError, quantize="int8")


@pytest.mark.parametrize("weights", ["converted", "stored"])
def test_float_weights_are_not_said_to_be_dequantised(tmp_path, weights):
    module = build("LlamaForCausalLM", **LLAMA)
    module.save_pretrained(tmp_path)
    configure(tmp_path, quantization_config={"quant_method": "fp8"})
    net = load_net(str(tmp_path), LoadOptions(weights=weights))
    assert (net.quantised, net.weights_sha256) == ("", hf_net(module).weights_sha256)
    (note,) = (note for note in net.notes if note.code == "not-quantised")
    assert "names fp8, but all weights are stored as floats" in note.text


class Coded(torch.Tensor):
    """A parameter as those of torchao are, without the library: codes that say their values."""

    def dequantize(self):
        return self.as_subclass(torch.Tensor) * 0.5


Coded.__module__ = "torchao.quantization"


def test_tied_weights_of_torchao_stay_tied_and_count_once():
    module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)), nn.Flatten(), nn.Linear(80, 3))
    codes = module[0].weight.detach().as_subclass(Coded)
    for part in (module[0], module[2]):
        part._parameters["weight"] = codes
    net = load_own(module)
    ours = [net.module[i].weight for i in (0, 2)]
    assert ours[0] is ours[1]
    assert torch.equal(ours[0], codes.dequantize())
    assert "1 as torchao Coded" in net.quantised


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("hqq", "is quantised by hqq, which lipaudit cannot dequantise"),
        ("eetq", "There are: torchao, bitsandbytes"),
        ("torch-ao", "Did you mean 'torchao'?"),
        ("gptq checkpoint_format marlin", "is quantised by gptq in the layout marlin, which"),
        ("awq version gemv", "is quantised by awq in the layout gemv, which"),
        ("torchao", "its library is not installed | Run pip install torchao."),
        ("compressed-tensors", "Run pip install compressed-tensors."),
    ],
)
def test_a_method_that_cannot_be_read_is_refused_by_name(tmp_path, method, says):
    if "Run" in says and find_spec(method.replace("-", "_")):
        pytest.skip(f"{method} is installed")
    build("LlamaForCausalLM", **LLAMA).save_pretrained(tmp_path)
    method, *field = method.split()
    configure(
        tmp_path, quantization_config={"quant_method": method, **dict([field] if field else [])}
    )
    assert says in refused(tmp_path)


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "says"),
    [
        ("wide", torch.int8, (32, 1), ""),
        ("wide", torch.float8_e4m3fn, (), ""),
        ("wide", torch.int8, None, "wide.weight of {path} hold integers, without a scale"),
        ("wide", torch.uint8, (32, 1), "wide.weight_scale surplus"),
        ("wide", torch.int32, None, "wide.weight of {path} hold integers, without a scale"),
        ("wide", torch.int8, (1, 16), "with a float32 scale of (1, 16)"),
        # of a square weight: either axis
        ("attention.out_proj", torch.int8, (16,), "or one per output channel: (16, 1)"),
    ],
)
def test_weights_of_a_file_are_multiplied_by_their_scales(tmp_path, name, dtype, shape, says):
    (tmp_path / "own.py").write_text(
        "from lipaudit import ModelSpec\nfrom tests.models.sources.test_quantised import Packed\n"
        "def net(): return ModelSpec(Packed(), (5, 16), kind='tokens')\n"
    )
    module, path = packed(), tmp_path / "w.safetensors"
    state = {name: value.clone() for name, value in module.state_dict().items()}
    key = f"{name}.weight"
    draw = torch.Generator().manual_seed(0)
    state[key] = torch.randint(-100, 100, state[key].shape, generator=draw).to(dtype)
    if shape is not None:
        state[f"{key}_scale"] = torch.rand(shape) + 0.01
    save_file(state, path)
    arch = f"py:{tmp_path}/own.py:net"
    if says:
        assert says.format(path=path) in refused(path, arch=arch)
        return
    net = load_net(str(path), LoadOptions(arch=arch))
    assert torch.equal(net.module.wide.weight, state[key].float() * state[f"{key}_scale"])
    assert "scaled-weights" in {note.code for note in net.notes}


def test_integers_in_a_directory_are_no_weights(tmp_path):
    build("LlamaForCausalLM", **LLAMA).save_pretrained(tmp_path)
    weights, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name].mul(99).to(torch.int8)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert f"{name} of {tmp_path} hold integers, without a scale" in refused(tmp_path)
    configure(tmp_path, quantization_config="int8")
    assert "is not a model that transformers knows" in refused(tmp_path)
