"""Write docs/mechanisms.md: the attention of causal language models, each in a tiny one.

Run by hand, from the root: python -m benchmarks.reference.mechanisms
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.reference.loaded import perturb
from lipaudit.data.batch import Batch
from lipaudit.models.attention.capture import Layer, capture
from lipaudit.models.attention.survey import survey
from lipaudit.models.net import LoadOptions, Net
from lipaudit.models.sources.loader import assemble
from lipaudit.models.sources.transformer_inputs import describe_transformers
from lipaudit.theory.heads import Heads, are_affine_everywhere
from tests.models.attention import own_modules

TOKENS = 7
SMALL: Mapping[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 16,
    "max_position_embeddings": 32,
    "vocab_size": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"head_dim": 4, "num_key_value_heads": 2}
LATENT = {"q_lora_rank": 6, "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2}
LATENT |= {"v_head_dim": 3, "num_key_value_heads": 4, "first_k_dense_replace": 1}
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2, "experts_implementation": "eager"}
MAMBA = {"mamba_d_state": 4, "mamba_d_conv": 4, "mamba_expand": 2}
STATES = MAMBA | {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
LINEAR |= {"linear_key_head_dim": 4, "linear_value_head_dim": 4}


@dataclass(frozen=True)
class Mechanism:
    """One mechanism, and a model that has it.

    Attributes:
        what: it is, for the page.
        models: that have it.
        config: class of the configuration of the tiny one.
        settings: beside `SMALL`.
        layer: the attention layer that shows it.
        eager: whether the model has no fused attention.
        steep: size of weights that leave most rows of P one entry.
    """

    what: str
    models: str
    config: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    layer: int = 0
    eager: bool = False
    steep: float = 4.0


def _layers(*names: str) -> dict[str, Any]:
    """Return the settings of layers of these types."""
    return {"layer_types": list(names), "num_hidden_layers": len(names)}


MECHANISMS: Mapping[str, Mechanism] = {
    "learned": Mechanism("learned positions", "GPT-2, OPT", "GPT2Config"),
    "rotary": Mechanism("rotary positions, all heads their own", "Llama 2 7B", "LlamaConfig"),
    "grouped": Mechanism(
        "rotary positions, heads that share keys",
        "Llama 3, Mistral, Qwen2",
        "LlamaConfig",
        GROUPED,
    ),
    "one-key": Mechanism(
        "one head of keys for all",
        "Falcon 7B, StarCoder",
        "GPTBigCodeConfig",
        {"multi_query": True},
    ),
    "partial": Mechanism(
        "rotary positions in a part of each head",
        "GPT-NeoX, Phi, StableLM, GLM",
        "GPTNeoXConfig",
        {"rotary_pct": 0.5},
    ),
    "interleaved": Mechanism(
        "rotary positions of neighbouring channels",
        "GPT-J, CodeGen, Cohere",
        "GPTJConfig",
        {"rotary_dim": 2},
        eager=True,
    ),
    "nope": Mechanism(
        "a layer without positions",
        "SmolLM3, Cohere 2, Llama 4",
        "SmolLM3Config",
        {"num_key_value_heads": 2, "no_rope_layers": [0]},
    ),
    "alibi": Mechanism(
        "a bias by distance (ALiBi)", "BLOOM, MPT, Falcon RW", "BloomConfig", eager=True
    ),
    "fused": Mechanism(
        "one projection for q, k and v", "Phi-3, Falcon", "Phi3Config", {"num_key_value_heads": 2}
    ),
    "window": Mechanism(
        "a sliding window",
        "Mistral, Gemma 2 and 3, Qwen2, StarCoder2",
        "MistralConfig",
        GROUPED | {"sliding_window": 3},
    ),
    "wide": Mechanism(
        "a sliding window longer than the text",
        "the same",
        "MistralConfig",
        GROUPED | {"sliding_window": 30},
    ),
    "chunked": Mechanism(
        "chunks, queries and keys of length one behind rotary positions",
        "Llama 4",
        "Llama4TextConfig",
        GROUPED | EXPERTS | {"attention_chunk_size": 3, "intermediate_size_mlp": 16},
    ),
    "tempered": Mechanism(
        "queries scaled by position",
        "Llama 4",
        "Llama4TextConfig",
        GROUPED | EXPERTS | {"no_rope_layers": [0], "floor_scale": 2, "intermediate_size_mlp": 16},
    ),
    "normed": Mechanism(
        "a norm of each query and key", "Qwen3, Gemma 3, Exaone 4", "Qwen3Config", GROUPED
    ),
    "normed-together": Mechanism(
        "a norm over the queries of all heads",
        "OLMo 2, OLMoE",
        "Olmo2Config",
        {"num_key_value_heads": 2},
    ),
    "clipped": Mechanism(
        "clipped queries, keys and values",
        "OLMo, DBRX",
        "OlmoConfig",
        {"num_key_value_heads": 2, "clip_qkv": 1.0},
    ),
    "capped": Mechanism(
        "a soft cap of the logits",
        "Gemma 2",
        "Gemma2Config",
        GROUPED | {"query_pre_attn_scalar": 4, "attn_logit_softcapping": 2.0},
        eager=True,
    ),
    "sinks": Mechanism(
        "a sink beside the keys",
        "gpt-oss",
        "GptOssConfig",
        GROUPED | EXPERTS | {"sliding_window": 3},
        eager=True,
    ),
    "shifted": Mechanism(
        "the largest logit of a row taken off, without a sink",
        "MiMo-V2-Flash",
        "MiMoV2FlashConfig",
        GROUPED | _layers("full_attention") | {"v_head_dim": 3, "mlp_layer_types": ["dense"]},
        eager=True,
    ),
    "latent": Mechanism(
        "latent queries and keys (MLA)", "DeepSeek-V2 and V3, MiniCPM3", "DeepseekV3Config", LATENT
    ),
    "difference": Mechanism(
        "the difference of two maps",
        "DiffLlama",
        "DiffLlamaConfig",
        {"num_key_value_heads": 2},
    ),
    "state-space": Mechanism(
        "attention among state-space layers",
        "Jamba, Bamba, Zamba, Nemotron-H",
        "BambaConfig",
        STATES | {"num_key_value_heads": 2, "num_hidden_layers": 2, "attn_layer_indices": [1]},
    ),
    "linear": Mechanism(
        "attention among linear attention, its output gated",
        "Qwen3-Next, MiniMax",
        "Qwen3_5TextConfig",
        GROUPED | LINEAR | _layers("linear_attention", "full_attention"),
    ),
    "experts": Mechanism(
        "experts behind the attention",
        "Mixtral, Qwen3-MoE, gpt-oss, DeepSeek",
        "MixtralConfig",
        GROUPED | EXPERTS,
    ),
    "expert-queries": Mechanism(
        "experts that make the queries",
        "JetMoE",
        "JetMoeConfig",
        {"num_key_value_heads": 2, "kv_channels": 4} | EXPERTS,
    ),
    "dynamic": Mechanism(
        "a mask made from the values",
        "Doge",
        "DogeConfig",
        {"num_key_value_heads": 2},
        steep=2.0,  # of its logits the logarithm
    ),
}


def load(name: str, dtype: str = "float64", gain: float = 1.0) -> Net:
    """Return the tiny model of a mechanism, with generic weights."""
    import transformers

    case = MECHANISMS[name]
    config = getattr(transformers, case.config)(**SMALL | case.settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager" if case.eager else "sdpa"
        )
    perturb(module, gain)
    options = LoadOptions(dtype=dtype, device="cpu")
    return assemble(describe_transformers(module, options), options, name=name, source="test")


def texts(net: Net, *, doubled: bool = False) -> Batch:
    """Return two texts, the second padded; or one that says every word twice."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(3, net.vocabulary or 0, (2, TOKENS), generator=generator)
    if doubled:
        return Batch(x[:1].repeat_interleave(2, 1)[:, :TOKENS], None, ("0",))
    mask = torch.arange(TOKENS) < torch.tensor([[TOKENS], [TOKENS - 2]])
    return Batch(x.masked_fill(~mask, net.pad_id or 0), None, ("0", "1"), mask)


def row(name: str) -> str:
    """Return the line of the table for a mechanism, as its model is read."""
    case, net = MECHANISMS[name], load(name)
    batch = texts(net)
    sites = survey(net, batch).sites
    return capture(net, sites, batch, partial(describe, case), layers=[case.layer])[0]


def describe(case: Mechanism, layer: Layer) -> str:
    """Return the line of the table for a mechanism, from the layer of a model."""
    return f"| {' | '.join(_cells(case, layer))} |"


def _cells(case: Mechanism, layer: Layer) -> tuple[str, ...]:
    kinds = ", ".join(layer.site.kinds)
    if not layer.site.closed_form:
        return case.what, case.models, kinds, "", f"numerical: {layer.site.reason}", "none"
    heads = layer.heads()
    bounds = "all" if are_affine_everywhere(heads) else "sharp, theorem3, theorem3_g1"
    return case.what, case.models, kinds, _logits(heads), "closed form", bounds


def _logits(heads: Heads) -> str:
    plain = heads.pairs is None
    parts = ["s q k^T" if plain else "a function of s q k^T"]
    parts += ["bias"] * (plain and heads.bias is not None and _biased(heads.bias))
    parts += ["sink"] * (heads.sink is not None)
    return " + ".join(parts)


def _biased(bias: torch.Tensor) -> bool:
    """Say whether there is more than a mask, and what is taken off a whole row."""
    if bias.dtype == torch.bool:
        return False
    seen = bias > -1e9
    least, most = bias.where(seen, 1e9).amin(-1), bias.where(seen, -1e9).amax(-1)
    return bool((most - least > 1e-9).any())


INTRODUCTION = """# The attention of language models, by mechanism

What lipaudit computes for each attention mechanism of the causal language models in transformers:
exact norms, bounds, or neither. A tiny model of each mechanism is tested: the norm of every head
agrees to 1e-9 with a dense Jacobian, which autograd computes in float64 with the model's own code.
No bound is below the norm by more than rounding (1e-12).

| mechanism | such as | q, k, v | logits | norm of a head | bounds |
|---|---|---|---|---|---|
"""


def page() -> str:
    """Return the page."""
    return INTRODUCTION + "\n".join(map(row, MECHANISMS)) + "\n" + LEGEND


LEGEND = """
* **q, k, v**: how they depend on the input of the layer. *affine*: x W + b. *rotation*,
  *linear-pos*: the same, times a matrix that depends on the position alone. *local*: a function of
  each token, differentiated at X (norms, clipping). *cross-head*: likewise, over the channels of
  all heads, or behind a shared latent. *multi-source*: made from linear maps of several tensors.
* **logits**: the input of the softmax. Masks of any kind may be added (causal, windows, padding).
* **norm of a head**: of d O_h / d X, per query head, with X the input of the projections. *closed
  form*: exact, to the accuracy that the run states. *numerical*: also exact, by differentiating
  the module around the layer with respect to the module's input.
* **bounds**: `hu`, `castin`, `mean_field` and `appendix_c` need affine self-attention without
  sinks, and logits that are linear in q k^T. `lipaudit bounds` names what is missing.

`--dtype float64` computes attention, norms and bounds in float64, even where the model's code
casts to float32. Attacks run the model with its casts, so their losses have seven digits.

`nn.TransformerEncoder` is measured without its fast path, as in training. That path sets outputs
at padded tokens to 0; a warning (`fast-path`) says so if the outputs differ.

Experts, and keys chosen by their scores, come from a top-k. The Jacobian is that of the choice
made at each sample; where two scores tie, the model has no derivative.

lipaudit refuses by name (exit code 4):

* kernels that torch does not dispatch: flash-attn, flex attention, TorchScript. lipaudit itself
  loads checkpoints with fused (`sdpa`) or written-out (`eager`) attention;
* models without a softmax over q k^T (Mamba, RWKV, linear attention alone). `lipaudit jacobian`
  needs no heads. In a hybrid the attention layers are read, and a note names the other blocks
  (`no-attention`);
* attention that is rearranged in chunks between the softmax and the values (Longformer).
"""


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    text = own_modules.PAGE.read_text(encoding="utf-8")
    _, heading, section = text.partition(own_modules.HEADING)
    own_modules.PAGE.write_text(f"{page()}\n{heading}{section}", encoding="utf-8")
