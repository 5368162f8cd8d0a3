"""A small member of every model type of transformers, by rules on the names of its settings."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

MOST_PARAMETERS = 3e7
VOCABULARY, CLASSES = 60, 5
HEADS, WIDTH = 4, 32

RULES = """
2: num_hidden_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers
2: num_encoder_layers depth num_layers num_self_attends_per_block
32: hidden_size d_model n_embd dim embed_dim encoder_hidden_size decoder_hidden_size projection_dim
32: out_hidden_size text_hidden_size word_embed_proj_dim embedding_size emb_dim hidden_dim
32: d_latents encoder_hidden_dim text_embed_dim backbone_dim cross_attention_hidden_size
32: true_hidden_size intra_bottleneck_size input_embedding_size embedding_dim bottleneck_dim
32: channels latent_dim feature_size projector_hidden_size output_hidden_size lru_width
32: attention_hidden_size fpn_hidden_size pooler_output_size vision_hidden_size pooler_hidden_size
48: intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff d_inner mlp_dim n_inner
48: moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size
48: ffn_hidden_size expert_ffn_hidden_size intermediate_size_mlp dense_intermediate_size
48: shared_intermediate_size
4: num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads
4: num_cross_attention_heads num_self_attention_heads index_n_heads linear_num_heads
4: swa_num_attention_heads num_attention_heads_per_layer
2: num_key_value_heads linear_num_key_heads linear_num_value_heads num_kv_heads
2: swa_num_key_value_heads multi_query_group_num num_global_key_value_heads
8: head_dim d_kv kv_channels qk_nope_head_dim qk_rope_head_dim v_head_dim attention_head_dim
8: index_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim global_head_dim
8: swa_head_dim attention_head_size qkv_channels swa_v_head_dim mamba_d_state ssm_state_size
8: state_size query_pre_attn_scalar sliding_window local_attention mamba_d_head mamba_head_dim
8: chunk_size mamba_chunk_size hidden_size_per_layer_input attention_chunk_size
16: kv_lora_rank q_lora_rank qk_head_dim num_mel_bins
4: num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts
4: zero_expert_num ffn_num_experts index_topk rotary_dim
2: num_experts_per_tok moe_topk moe_top_k moe_k top_k_experts n_mamba_heads mamba_expand
1: n_group topk_group first_k_dense_replace num_global_layers mamba_n_groups n_groups
64: max_position_embeddings n_positions max_source_positions max_target_positions n_ctx
64: max_2d_position_embeddings num_position_embeddings max_seq_len block_size max_cache
64: max_encoder_position_embeddings max_decoder_position_embeddings
60: vocab_size vocab_size_per_layer_input decoder_vocab_size
32: image_size
8: patch_size relative_attention_num_buckets mamba_n_heads mamba_num_heads num_queries num_latents
0: num_kv_shared_layers num_nextn_predict_layers
"""
"""What a number becomes at most, by the name of the setting."""


def _rules() -> dict[str, int]:
    lines = [line.partition(": ") for line in RULES.strip().splitlines()]
    return {name: int(value) for value, _, names in lines for name in names.split()}


NUMBERS = _rules()
LAYERS = tuple(RULES.replace("2: ", "").split()[:10])
"""What the number of layers is called."""


LISTS: dict[str, Any] = {
    "depths": 1,
    "num_heads": 2,
    "hidden_sizes": (16, 16, 32, 32, 32, 32, 32),
    "embed_dims": (16, 16, 32, 32),
    "embed_dim": (16, 16, 32, 32),
    "encoder_layers": 1,
    "num_attention_heads": 2,
    "mrope_section": (2, 1, 1),
    "neck_hidden_sizes": (8, 16, 16, 32, 32, 32, 64),
}
"""What each entry of a list becomes, by its name."""

SWIN = {"embed_dim": 16, "window_size": 4, "patch_size": 4, "depths": [2, 1], "num_heads": [2, 2]}
TYPES: dict[str, dict[str, Any]] = {
    "swin": SWIN,
    "swinv2": SWIN,
    "donut-swin": SWIN,
    "maskformer-swin": {"embed_dim": 16, "window_size": 4, "patch_size": 4},
    "dinat": {"embed_dim": 16},
    "focalnet": {"embed_dim": 16, "patch_size": 2},
    "gptj": {"rotary_dim": 4},
    "xlm": {"emb_dim": WIDTH},
    "ctrl": {"n_embd": WIDTH, "dff": 48},
    "funnel": {
        "block_sizes": [1, 1],
        "block_repeats": [1, 1],
        "num_decoder_layers": 1,
        "d_head": 8,
    },
    "xlnet": {"d_head": 8},
    "big_bird": {"attention_type": "original_full"},
    "longformer": {"attention_window": [4, 4]},
    "led": {"attention_window": [4, 4]},
    "reformer": {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16]},
    "canine": {"num_hash_buckets": 64, "downsampling_rate": 2, "local_transformer_stride": 4},
    "perceiver": {"num_blocks": 1, "num_self_attends_per_block": 2},
    "mobilebert": {"embedding_size": 16},
    "albert": {"embedding_size": 16},
    "electra": {"embedding_size": 16},
    "segformer": {"patch_sizes": [7, 3, 3, 3]},
    "levit": {
        "hidden_sizes": [16, 16, 32],
        "key_dim": [8, 8, 8],
        "num_attention_heads": [2, 2, 2],
    },
    "hiera": {"embed_dim": 16, "image_size": [32, 32], "num_heads": [1, 2, 2, 4]},
    "cvt": {"embed_dim": [16, 16, 32], "num_heads": [1, 2, 2], "depth": [1, 2, 3]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "rwkv": {"attention_hidden_size": WIDTH},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "mpnet": {"relative_attention_num_buckets": 32, "pad_token_id": 1},
    "xmod": {"default_language": "en_XX"},
    "esm": {"pad_token_id": 1, "mask_token_id": 3},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 2},
    "bamba": {"attn_layer_indices": [1]},
    "zamba2": {
        "mamba_headdim": 32,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "kv_channels": 16,
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "mistral4": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 8,
        },
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8}},
    "glm5_next_text": {"num_key_value_heads": HEADS},
    "glm5_next": {},
    "yolos": {"num_detection_tokens": 8},
    "bit": {"num_groups": 4},
    "luke": {"entity_vocab_size": 20, "entity_emb_size": 16},
    "mamba2": {"num_heads": 8},
    "efficientnet": {"width_coefficient": 0.2, "depth_coefficient": 0.3, "hidden_dim": 1280},
    "autoformer": {"prediction_length": 8},
    "informer": {"prediction_length": 8},
    "time_series_transformer": {"prediction_length": 8},
    "nemotron": {"num_key_value_heads": 2},
    "llama4": {"pad_token_id": 0},
    "emu3": {"pad_token_id": 0},
}
"""What a type needs beyond the rules."""


HEADLESS = frozenset(
    {"bart", "bigbird_pegasus", "led", "mbart", "mvp", "plbart", "t5", "mt5", "umt5"}
)
"""Their classifiers want an end of sentence in every sample, which takes a tokenizer."""


def types() -> tuple[str, ...]:
    """Return every model type of transformers that has a model without a head."""
    from transformers.models.auto import modeling_auto

    return tuple(sorted(modeling_auto.MODEL_MAPPING_NAMES))


def architecture(name: str) -> str:
    """Return the class whose output lipaudit reads: a classifier where there is one."""
    from transformers.models.auto import modeling_auto as auto

    if name in HEADLESS:
        return auto.MODEL_MAPPING_NAMES[name]
    for heads in (
        auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_MAPPING_NAMES,
    ):
        if name in heads:
            return heads[name] if isinstance(heads[name], str) else heads[name][0]
    raise KeyError(name)


def small_config(name: str) -> dict[str, Any]:
    """Return the content of config.json of a small model of a type.

    Raises:
        Exception: whatever transformers raises where the rules do not give a model.
        ValueError: it is not small.
    """
    from transformers import CONFIG_MAPPING

    full = CONFIG_MAPPING[name]().to_dict()
    reasons = []
    for rules in (
        NUMBERS,
        NUMBERS | {"head_dim": 16, "hidden_size": 64, "num_key_value_heads": 4},
    ):
        small = shrunk(full, rules) | TYPES.get(name, {})
        small |= {"architectures": [architecture(name)], "model_type": name}
        small["id2label"] = {str(i): f"LABEL_{i}" for i in range(CLASSES)}
        small["label2id"] = {label: int(i) for i, label in small["id2label"].items()}
        try:
            require_small(name, small)
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {str(error).strip()[:160]}")
        else:
            return small
    raise ValueError(reasons[0])


def require_small(name: str, config: dict[str, Any]) -> None:
    """Build the model without memory, and count its parameters."""
    import transformers

    made = transformers.CONFIG_MAPPING[name].from_dict(config)
    build = getattr(transformers, architecture(name))
    try:
        with torch.device("meta"):
            module = build(made)
    except TypeError:
        module = build(made)
    size = sum(p.numel() for p in module.parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters are left")


def shrunk(config: dict[str, Any], rules: dict[str, int]) -> dict[str, Any]:
    """Apply the rules to a configuration and to those inside it."""
    depth = next((config[k] for k in LAYERS if isinstance(config.get(k), int)), None)
    kept = _kept_layers(config, depth)
    made = {
        key: _setting(key, value, rules, depth, kept)
        for key, value in config.items()
        if key not in ("stage_names", "out_features", "out_indices") or depth is None
    }
    for key in LAYERS:
        if isinstance(config.get(key), int) and config[key] == depth:
            made[key] = len(kept)
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads == groups and isinstance(heads, int):
        made["num_key_value_heads"] = made["num_attention_heads"]
    made |= _tokens(config)
    return made


def _kept_layers(config: dict[str, Any], depth: int | None) -> list[int]:
    """Return one layer of each type, two at least."""
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if not isinstance(kinds, list) or depth is None or len(kinds) != depth:
        return [0, 1]
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    return sorted(first)[:4] if len(first) > 1 else [0, min(1, depth - 1)]


def _setting(
    key: str, value: Any, rules: dict[str, int], depth: int | None, kept: list[int]
) -> Any:
    if key == "per_layer_config" and isinstance(value, dict):
        return {str(i): value[str(k)] for i, k in enumerate(kept) if str(k) in value}
    if isinstance(value, dict):
        nested = key.endswith("config") or "rope" in key or "model_type" in value
        return shrunk(value, rules) if nested else value
    if value is None:
        return {"vocab_size": VOCABULARY, "head_dim": rules["head_dim"]}.get(key)
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and key in rules:
        return min(value, rules[key]) if value > 0 else value
    if isinstance(value, list):
        return _list(key, value, depth, kept)
    return value


def _list(key: str, value: list[Any], depth: int | None, kept: list[int]) -> list[Any]:
    if key in LISTS:
        rule = LISTS[key]
        return [rule[i] if isinstance(rule, tuple) else rule for i in range(len(value))]
    if depth is not None and len(value) == depth > 4 and key != "architectures":
        return [value[i] for i in kept]
    if key == "image_size":
        return [32] * len(value)
    if key.endswith(("_indexes", "_indices", "_index")) and all(isinstance(v, int) for v in value):
        return [1] if key != "out_indices" else value
    return value


@cache
def _ids() -> dict[str, int]:
    return {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def _tokens(config: dict[str, Any]) -> dict[str, Any]:
    """Bring special tokens into the vocabulary, each to a place of its own at its end."""
    names = [k for k in config if k.endswith(("_token_id", "_token_index"))]
    made: dict[str, Any] = {}
    if config.get("is_encoder_decoder"):
        made |= {"pad_token_id": 0, "decoder_start_token_id": 1}
    for number, name in enumerate(names):
        value = config[name]
        if isinstance(value, list):
            value = value[0] if value else None
        if isinstance(value, int) and value >= 0:
            made[name] = _ids().get(name, VOCABULARY - 1 - number % 20)
    return made
