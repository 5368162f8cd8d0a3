"""A zoo of tiny models with random weights, one per way of writing attention."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

from lipaudit.data.batch import Batch
from lipaudit.models.attention.capture import Site
from lipaudit.models.attention.survey import survey
from lipaudit.models.net import LoadOptions, ModelSpec, Net
from lipaudit.models.sources.loader import assemble
from lipaudit.models.sources.transformer_inputs import describe_transformers
from tests.nets import TEXT

Weights = tuple[list[tuple[torch.Tensor, torch.Tensor | None]], torch.Tensor]
VOCABULARY, MOST_TOKENS = 60, 32
HF = TEXT | {"max_position_embeddings": MOST_TOKENS, "vocab_size": VOCABULARY}
HF |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PIXELS = {"image_size": 24, "patch_size": 8}


def timm_model(name: str, **kwargs) -> ModelSpec:
    import timm

    side = kwargs["img_size"]
    return ModelSpec(timm.create_model(name, num_classes=5, **kwargs), (3, side, side))


def hf_model(config: str, auto: str, attention: str = "sdpa", **kwargs) -> ModelSpec:
    import transformers

    made = getattr(transformers, config)(**kwargs)
    module = getattr(transformers, auto).from_config(made, attn_implementation=attention)
    return describe_transformers(module, LoadOptions())


def encoder(config: str, attention: str = "sdpa", **kwargs) -> ModelSpec:
    auto = "AutoModelForSequenceClassification"
    return hf_model(config, auto, attention, **(HF | {"num_labels": 5} | kwargs))


def decoder(config: str, attention: str = "sdpa", **kwargs) -> ModelSpec:
    return hf_model(config, "AutoModelForCausalLM", attention, **(HF | kwargs))


def vision(config: str, **kwargs) -> ModelSpec:
    small = HF | PIXELS | {"num_labels": 5} | kwargs
    return hf_model(config, "AutoModelForImageClassification", **small)


class Handwritten(nn.Module):
    """Attention as textbooks write it: three matrices, einsum, softmax."""

    def __init__(self, width: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(width, width) / 3) for _ in range(3))
        self.head, self.heads = nn.Linear(width, 4), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (torch.einsum("bnd,de->bne", x, w) for w in (self.wq, self.wk, self.wv))
        q, k, v = (t.unflatten(2, (self.heads, -1)) for t in (q, k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k)
        scores /= q.shape[-1] ** 0.5
        o = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2)
        return self.head(o.mean(1))


SAM = {
    "img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "neck_chans": 8,
    "window_size": 3, "global_attn_indexes": (1,),
}  # fmt: skip


def sam(*, fused: bool) -> ModelSpec:
    """SAM's image encoder: windows, then global attention, with decomposed relative positions."""
    spec = timm_model("samvit_base_patch16", **SAM)
    for part in spec.module.modules():
        if hasattr(part, "fused_attn"):
            part.fused_attn = fused
    return spec


def mvit() -> ModelSpec:
    """MViTv2: q, k and v are pooled by convolutions, and q meets relative positions."""
    from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg

    strides = ((1, 1), (2, 2))
    small = MultiScaleVitCfg(depths=(1, 1), embed_dim=16, num_heads=2, stride_q=strides)
    return ModelSpec(MultiScaleVit(small, img_size=64, num_classes=5), (3, 64, 64))


def tokens_model(module: nn.Module, width: int = 12) -> ModelSpec:
    return ModelSpec(module, (7, width), kind="tokens")


def torch_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(84, 5))


VIT = {"depth": 2, "embed_dim": 32, "num_heads": 4, "img_size": 32, "patch_size": 8}
T5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4,
    "vocab_size": VOCABULARY, "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
SWIN = {
    "embed_dim": 16, "depths": [2], "num_heads": [2], "image_size": 24, "patch_size": 2,
    "window_size": 4, "num_labels": 5,
}  # fmt: skip
MLA = {
    "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
    "num_key_value_heads": 4, "first_k_dense_replace": 2, "n_routed_experts": 2,
    "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
TIMM_SWIN = {
    "img_size": 32, "patch_size": 4, "embed_dim": 16, "depths": (2, 1), "num_heads": (2, 4),
    "window_size": 4,
}  # fmt: skip
TWINS = {
    "img_size": 64, "depths": (2, 1, 1, 1), "embed_dims": (16, 16, 16, 32),
    "num_heads": (2, 2, 2, 4), "wss": (8, 8, 4, 2),
}  # fmt: skip
CVT = {
    "embed_dim": [16, 16, 16], "num_heads": [1, 2, 2], "depth": [1, 2, 3],
    "drop_path_rate": [0.0, 0.0, 0.0], "image_size": 32, "num_labels": 5,
}  # fmt: skip
DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
DEBERTA_V3 = {"position_buckets": 4, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
ROPE = {"head_dim": 8, "num_key_value_heads": 2}
GPT_OSS = {
    "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 8,
    "experts_implementation": "eager",
}  # fmt: skip
MOBILE = {
    "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16,
    "num_feedforward_networks": 1,
}  # fmt: skip
DISTIL = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}

BUILDERS: dict[str, Callable[[], ModelSpec]] = {
    "timm-vit": lambda: timm_model("vit_tiny_patch16_224", **VIT),
    "timm-deit3": lambda: timm_model("deit3_small_patch16_224", **VIT),
    "timm-eva02": lambda: timm_model("eva02_tiny_patch14_224", **VIT),
    "timm-qk-norm": lambda: timm_model("vit_tiny_patch16_224", **VIT, qk_norm=True),
    "timm-swin": lambda: timm_model("swin_tiny_patch4_window7_224", **TIMM_SWIN),
    "timm-swinv2": lambda: timm_model("swinv2_tiny_window8_256", **TIMM_SWIN),
    "timm-cait": lambda: timm_model("cait_xxs24_224", **VIT | {"depth": 1}),
    "timm-twins": lambda: timm_model("twins_svt_small", **TWINS),
    "hf-vit": lambda: vision("ViTConfig"),
    "hf-dinov2": lambda: vision("Dinov2Config"),
    "hf-swin": lambda: hf_model("SwinConfig", "AutoModelForImageClassification", **SWIN),
    "bert": lambda: encoder("BertConfig"),
    "bert-eager": lambda: encoder("BertConfig", "eager"),
    "distilbert": lambda: encoder("DistilBertConfig", **DISTIL),
    "albert": lambda: encoder("AlbertConfig", embedding_size=16),
    "gpt2": lambda: decoder("GPT2Config", n_embd=32, n_layer=2, n_head=4, n_positions=MOST_TOKENS),
    "gptj": lambda: decoder("GPTJConfig", "eager", rotary_dim=4),
    "llama": lambda: decoder("LlamaConfig", **ROPE),
    "qwen3": lambda: decoder("Qwen3Config", **ROPE),
    "olmo2": lambda: decoder("Olmo2Config", num_key_value_heads=2),
    "t5": lambda: hf_model("T5Config", "AutoModel", **T5),
    "gemma2": lambda: decoder("Gemma2Config", "eager", **ROPE, query_pre_attn_scalar=8),
    "deberta": lambda: encoder("DebertaV2Config", "eager", **DEBERTA),
    "deberta-v3": lambda: encoder("DebertaV2Config", "eager", **DEBERTA, **DEBERTA_V3),
    "deberta-v1": lambda: encoder("DebertaConfig", "eager", **DEBERTA),
    "gpt-oss": lambda: decoder("GptOssConfig", "eager", **ROPE, **GPT_OSS),
    "deepseek-v3": lambda: decoder("DeepseekV3Config", **MLA, q_lora_rank=12),
    "deepseek-v2": lambda: decoder("DeepseekV2Config", **MLA, q_lora_rank=None),
    "mobilebert": lambda: encoder("MobileBertConfig", **MOBILE),
    "cvt": lambda: hf_model("CvtConfig", "AutoModelForImageClassification", "eager", **CVT),
    "timm-sam": lambda: sam(fused=True),
    "timm-sam-eager": lambda: sam(fused=False),
    "timm-mvit": mvit,
    "torch-encoder": lambda: tokens_model(torch_encoder()),
    "handwritten": lambda: tokens_model(Handwritten()),
}


@cache
def build(name: str, dtype: str = "float32") -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        spec = BUILDERS[name]()
        # The initial weights of most libraries make attention uniform and its Jacobian tiny.
        for p in spec.module.parameters():
            p.data = torch.randn_like(p) * (p.data.abs().mean() + p.shape[-1] ** -0.5 / 2)
    return assemble(spec, LoadOptions(dtype=dtype, device="cpu"), name=name, source="test")


def batch_for(net: Net, size: int = 2) -> Batch:
    generator = torch.Generator().manual_seed(1)
    ids = tuple(map(str, range(size)))
    if net.kind != "text":
        return Batch(
            torch.rand(size, *net.input_shape, generator=generator).to(net.dtype), None, ids
        )
    x = torch.randint(3, VOCABULARY, (size, 12), generator=generator)
    mask = torch.arange(12) < torch.tensor([[12], [7], [9]])[:size]
    return Batch(x.masked_fill(~mask, net.pad_id or 0), None, ids, mask)


@cache
def surveyed(name: str, dtype: str = "float32") -> tuple[Site, ...]:
    net = build(name, dtype)
    return survey(net, batch_for(net)).sites


@pytest.fixture
def zoo() -> Callable[..., tuple[Net, tuple[Site, ...], Batch]]:
    """Return a model of the zoo, its attention layers, and a batch for it."""

    def pick(name: str, dtype: str = "float32") -> tuple[Net, tuple[Site, ...], Batch]:
        net = build(name, dtype)
        return net, surveyed(name, dtype), batch_for(net)

    return pick


def torch_weights(module: nn.Module, i: int) -> Weights:
    attention = module[0].layers[i].self_attn
    fused = zip(attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3), strict=True)
    return [*fused], attention.out_proj.weight.T


def bert_weights(module: nn.Module, i: int) -> Weights:
    attention = module.bert.encoder.layer[i].attention
    linears = (attention.self.query, attention.self.key, attention.self.value)
    return [(m.weight, m.bias) for m in linears], attention.output.dense.weight.T


def vit_weights(module: nn.Module, i: int) -> Weights:
    attention = module.blocks[i].attn
    fused = zip(attention.qkv.weight.chunk(3), attention.qkv.bias.chunk(3), strict=True)
    return [*fused], attention.proj.weight.T


def gpt2_weights(module: nn.Module, i: int) -> Weights:
    """They are stored the other way round."""
    attention = module.transformer.h[i].attn
    fused = zip(attention.c_attn.weight.T.chunk(3), attention.c_attn.bias.chunk(3), strict=True)
    return [*fused], attention.c_proj.weight


def llama_weights(module: nn.Module, i: int) -> Weights:
    attention = module.model.layers[i].self_attn
    linears = (attention.q_proj, attention.k_proj, attention.v_proj)
    return [(m.weight, None) for m in linears], attention.o_proj.weight.T


WEIGHTS = {
    "torch-encoder": torch_weights, "bert": bert_weights, "timm-vit": vit_weights,
    "gpt2": gpt2_weights, "llama": llama_weights,
}  # fmt: skip
"""W_Q, W_K, W_V (out, in) with their biases, and W_O (in, out), of a layer of a model."""
