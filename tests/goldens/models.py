"""Eight tiny models, one per attention mechanism, with the same weights on every machine.

Weights come from numpy: torch's normal numbers differ in the last digit between processors.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

TEXT: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 4}
SINKS: dict[str, Any] = TEXT | GROUPED | {"num_local_experts": 2, "num_experts_per_tok": 2}
CAPPED: dict[str, Any] = TEXT | GROUPED
CAPPED |= {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4}
DEBERTA: dict[str, Any] = TEXT | {
    "num_labels": 3, "relative_attention": True, "pos_att_type": ["c2p", "p2c"],
    "position_biased_input": False,
}  # fmt: skip
SWIN: dict[str, Any] = {
    "image_size": 16, "patch_size": 2, "embed_dim": 8, "window_size": 4, "depths": [2],
    "num_heads": [2], "num_labels": 5,
}  # fmt: skip
BART: dict[str, Any] = {
    "vocab_size": 40, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "max_position_embeddings": 32, "pad_token_id": 1,
    "decoder_start_token_id": 2,
}  # fmt: skip


def set_weights(model: nn.Module, seed: int = 0, gain: float = 1.5) -> nn.Module:
    """Fill every parameter from numpy: gain / sqrt(fan in) for matrices, about 1 for scales."""
    _draw(model.named_parameters(), seed, gain)
    return model.eval()


def _draw(weights: Iterable[tuple[str, torch.Tensor]], seed: int = 0, gain: float = 1.5) -> None:
    draw = np.random.default_rng(seed).standard_normal
    with torch.no_grad():
        for name, p in weights:
            noise = torch.from_numpy(draw(tuple(p.shape)))
            if p.ndim > 1:
                p.copy_(gain * noise / np.sqrt(p[0].numel()))
            else:
                p.copy_(0.1 * noise + float(name.endswith("weight")))


def hybrid() -> nn.Module:
    """Return convolutions with attention over patches between them: a small MobileViT."""
    import timm

    return set_weights(timm.create_model("mobilevit_xxs", num_classes=5, img_size=64))


def vit_tiny() -> nn.Module:
    """Return timm's ViT-Tiny for small images, in its full width and depth."""
    import timm

    return set_weights(timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=64))


def save_as(name: str, config: str, **settings: Any) -> Callable[[Path], None]:
    """Return what saves a model of transformers with these settings to a folder."""

    def save(folder: Path) -> None:
        import transformers

        made = getattr(transformers, config)(**settings)
        set_weights(getattr(transformers, name)(made)).save_pretrained(folder)

    return save


def _save_windows(folder: Path) -> None:
    """Save a Swin. Versions of transformers order its modules differently, stored names never."""
    save_as("SwinForImageClassification", "SwinConfig", **SWIN)(folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    _draw(sorted((name, p) for name, p in weights.items() if p.is_floating_point()))
    save_file(weights, file, metadata={"format": "pt"})


FOLDERS: dict[str, Callable[[Path], None]] = {
    "post-norm": save_as("BertForSequenceClassification", "BertConfig", num_labels=3, **TEXT),
    "grouped-rotary": save_as("LlamaForCausalLM", "LlamaConfig", **TEXT, **GROUPED),
    "sinks": save_as("GptOssForCausalLM", "GptOssConfig", **SINKS),
    "soft-cap": save_as("Gemma2ForCausalLM", "Gemma2Config", **CAPPED),
    "relative": save_as("DebertaV2ForSequenceClassification", "DebertaV2Config", **DEBERTA),
    "windows": _save_windows,
    "cross": save_as("BartForConditionalGeneration", "BartConfig", **BART),
}
"""What writes each model that is loaded from a directory, as `save_pretrained` lays it out."""
