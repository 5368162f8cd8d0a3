"""Zero-shot classifiers: the text embeddings of class names are the last layer of an image tower.

As in Radford et al., Learning Transferable Visual Models From Natural Language Supervision
(arXiv 2103.00020, section 3.1): a class is the mean of the normalised embeddings of its prompts,
normalised again. The logits are `scale * cosine + bias`, as the model's own code computes them.
The sigmoid of SigLIP keeps their order, so the prediction is the same.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.errors import UsageError, explain_failure, refuse
from lipaudit.models.net import ModelSpec
from lipaudit.models.sources.text_models import (
    find_text_config,
    limit_tokens,
    load_tokenizer,
    read_tower,
)
from lipaudit.models.sources.weights import few
from lipaudit.tables import Note

# The prompt of Radford et al.
PROMPT = "a photo of a {}"
# Number of prompts per pass of the text tower.
TEXTS = 64
# Largest relative deviation from the logits of the model's own code, in float32.
DEVIATION = 1e-4


def read_class_names(path: Path) -> tuple[str, ...]:
    """Read the names of classes from a text file, one per line; empty lines do not count.

    Raises:
        InputError: the file cannot be read, has fewer than two names, or a name twice.
    """
    advice = "--classes takes a text file with one class name per line; only train takes a number."
    with explain_failure(f"{path} cannot be read as class names", advice, OSError, ValueError):
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    names = tuple(filter(None, map(str.strip, lines)))
    refuse(len(names) < 2, f"{path} has {len(names)} class names: two are needed", advice)
    # Labels of data are matched without case, and with spaces for underscores.
    counts = Counter(name.casefold().replace("_", " ") for name in names)
    twice = [name for name, count in counts.items() if count > 1]
    refuse(twice, f"{path} has a class name twice: {few(twice)}", "Give each class its own name.")
    return names


def read_prompts(text: str | None) -> tuple[str, ...]:
    """Read the prompts of --prompt, separated by |.

    Raises:
        UsageError: a prompt does not have exactly one {} for the class name.
    """
    prompts = tuple(prompt.strip() for prompt in (PROMPT if text is None else text).split("|"))
    wrong = [prompt for prompt in prompts if prompt.count("{}") != 1]
    advice = f"For example --prompt '{PROMPT}'."
    refuse(
        wrong, f"--prompt {few(wrong)!r} must have one {{}} for the class name", advice, UsageError
    )
    return prompts


def make_zero_shot(
    module: Any, spec: ModelSpec, prompts: Sequence[str], path: Path | None
) -> ModelSpec:
    """Make a classifier from the image tower of an image-text model.

    Args:
        module: a model of transformers.
        spec: description of its image tower, with the names of the classes.
        prompts: texts with {} for the name.
        path: directory of the tokenizer.

    Raises:
        InputError: the tokenizer is missing, a prompt is too long, or the model's own code
            computes other logits.
    """
    names, kind = spec.labels or (), type(module).__name__
    tokenizer = load_tokenizer(path)
    refuse(
        tokenizer is None,
        f"{kind} has no tokenizer in its folder, and --classes needs it",
        "Copy tokenizer.json and tokenizer_config.json into it.",
    )
    config = find_text_config(module.config)
    most = limit_tokens(module, config, tokenizer)
    texts = [prompt.replace("{}", name) for name in names for prompt in prompts]
    # SigLIP was trained on padded texts, and reads the last position.
    padded = module.config.model_type.startswith("siglip")
    fill = {"padding": "max_length", "max_length": most} if padded else {"padding": True}
    tokens = dict(tokenizer(texts, return_tensors="pt", **fill))
    length = tokens["input_ids"].shape[1]
    text = f"a prompt has {length} tokens, and {kind} reads at most {most}"
    refuse(length > most, text, "Shorten --prompt or the names of the classes.")
    known = inspect.signature(module.get_text_features).parameters
    inputs = {key: value for key, value in tokens.items() if key in known}

    @cache  # computed once per run, in its precision, on the blank sample of loading
    def embed_classes(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return weight (classes, width) and bias of the last layer."""
        with torch.inference_mode(False), torch.no_grad():
            ids = {key: value.to(device) for key, value in inputs.items()}
            rows = [range(i, min(i + TEXTS, len(texts))) for i in range(0, len(texts), TEXTS)]
            chunks = ({k: v[row.start : row.stop] for k, v in ids.items()} for row in rows)
            features = [read_tower(module.get_text_features(**chunk), None) for chunk in chunks]
            each = F.normalize(torch.cat(features).to(dtype), dim=-1)
            mean = each.view(len(names), len(prompts), -1).mean(1)
            scale = module.logit_scale.to(device, dtype).exp()
            bias = getattr(module, "logit_bias", torch.zeros(1)).to(device, dtype)
            x = torch.zeros(1, *spec.input_shape, device=device, dtype=dtype)
            own = module(pixel_values=x, **{key: value[:2] for key, value in ids.items()})
            image = F.normalize(
                read_tower(module.get_image_features(pixel_values=x), None), dim=-1
            )
            error = (own.logits_per_image - image @ (scale * each[:2]).T - bias).abs().max()
            refuse(  # a NaN too, which compares as False
                not error <= DEVIATION * own.logits_per_image.abs().max().clamp(min=1),
                f"{kind} computes its logits in another way than scale * cosine + bias",
                "Write a py: factory that returns a ModelSpec with its own `read`.",
            )
            return scale * F.normalize(mean, dim=-1), bias

    def read(result: Any) -> Tensor:
        features = read_tower(*result)
        weight, bias = embed_classes(features.device, features.dtype)
        return F.normalize(features, dim=-1) @ weight.T + bias

    shown = " | ".join(prompts)
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]
    facts = f"{len(names)} classes (sha256 {digest}), prompt {shown!r}"
    note = Note.info(
        "zero-shot",
        f"zero-shot classifier with {len(names)} classes: {kind} compares images with {shown!r}, "
        "and the text embeddings are fixed",
    )
    return replace(
        spec,
        read=read,
        preprocess={**spec.preprocess, "zero-shot": facts},
        notes=(note, *spec.notes),
    )
