"""How models of transformers are called and read.

What the output is:

* ``...ForImageClassification`` and ``...ForSequenceClassification``: the logits.
* Causal language models: the logits of the next token, at the last real token.
* Models with a tower for images and one for text: the features of the tower asked for, with their
  projection, as `get_image_features` and `get_text_features` give them.
* Models of sound that decode to text: the encoder's features.
* Everything else, encoders above all: features, the mean of the last hidden state over the real
  tokens (for sentence encoders the pooling and normalisation their own files prescribe). Heads
  that stand in the file but are not read are named in a note.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lipaudit.errors import InputError
from lipaudit.models.sources.hf.language import text_spec
from lipaudit.models.sources.hf.padding import text_config
from lipaudit.models.sources.hf.sound import SPECTROGRAM, WAVEFORM, sound_shape
from lipaudit.models.sources.hf.task_heads import class_names, has_head, is_classifier
from lipaudit.models.sources.hf.towers import TAKES, chosen_tower
from lipaudit.models.sources.hf.vision import features, image_spec
from lipaudit.models.sources.spec import LoadOptions, ModelSpec


def hf_spec(module: Any, options: LoadOptions, *, path: Path | None = None) -> ModelSpec:
    """Say how a model of transformers is fed and what is read of its output.

    Tokenizer, image processor and pooling are looked for in `path`.
    """
    for config in (module.config, text_config(module.config)):
        _complete(config)
    text_config(module.config).use_cache = False
    tower = chosen_tower(module, options.tower)
    takes = module.main_input_name if tower is None else TAKES[tower]
    if takes == "pixel_values":
        return image_spec(module, options, path, tower)
    if takes == "input_ids":
        return text_spec(module, path, tower)
    if takes in (WAVEFORM, SPECTROGRAM):
        return _sound_spec(module)
    raise InputError(
        f"{type(module).__name__} takes {takes}: neither images, text nor sound",
        "Write a py: factory that returns a ModelSpec of kind tokens.",
    )


def _complete(config: Any) -> None:
    """Add the ids that the code of transformers asks every configuration for."""
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if not hasattr(config, name):
            setattr(config, name, None)


def _sound_spec(module: Any) -> ModelSpec:
    takes = module.main_input_name
    whole = has_head(module) or not module.config.is_encoder_decoder
    call = module if whole else module.get_encoder()
    return ModelSpec(
        module,
        sound_shape(module),
        kind="tokens",
        classifier=is_classifier(module),
        labels=class_names(module),
        call=lambda x, _mask: call(**{takes: x}),
        read=features(module, None),
        architecture=type(module).__name__,
    )
