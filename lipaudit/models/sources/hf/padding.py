"""Padding: a position is masked because it was padded, never because of its id.

Many classifiers look for the last token of a text by its id: the last that is not
`config.pad_token_id`. A text is read here as the model reads it alone. Where the configuration
names a padding id, that fills the batch. Where it names none, the model reads the very last token,
and an id is taken for padding that no text of the batch ends with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lipaudit.errors import InputError
from lipaudit.models.sources.hf.task_heads import is_classifier

READS_IDS = ("cohere_compass", "dpr", "flaubert", "xlm")
"""Models that mask by id what no mask is given for."""


def text_config(config: Any) -> Any:
    """Return the settings of the part that reads text; of all where none, or several, do."""
    try:
        return config.get_text_config()
    except ValueError:
        return config


def end_of(config: Any) -> int | None:
    """Return the id of the end of a text; the first of several."""
    end = getattr(config, "eos_token_id", None)
    return end[0] if isinstance(end, list) else end


def known_pad(config: Any) -> int | None:
    """Return the padding id of a configuration; None where it names none of the vocabulary."""
    pad = getattr(config, "pad_token_id", None)
    return pad if pad is not None and 0 <= pad < config.vocab_size else None


@contextmanager
def padded(
    module: Any, x: Tensor, mask: Tensor | None, end: int | None
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the ids and the mask to run a model on; it reads each text as if it were alone.

    Args:
        module: the model.
        x: token ids (batch, tokens), padded behind each text.
        mask: True at the tokens of the texts; None where nothing is padded.
        end: the id whose state is read, where a model does that: never to be padded with.

    Raises:
        InputError: every id of the vocabulary ends some text of the batch.
    """
    config = text_config(module.config)
    own = known_pad(config)
    fill = own if own is not None and own != end else _free_id(config, x, mask, end)
    with ExitStack() as undo:
        if own is None and is_classifier(module):
            undo.callback(setattr, config, "pad_token_id", config.pad_token_id)
            config.pad_token_id = fill
        if mask is None:
            told = torch.ones_like(x) if module.config.model_type in READS_IDS else None
            yield x, told
            return
        for part in module.modules():
            if getattr(part, "summary_type", None) == "last":  # of the padded text, else
                undo.callback(part.register_forward_pre_hook(_last_of(mask)).remove)
        yield x.masked_fill(~mask, fill), mask.long()


def _last_of(mask: Tensor) -> Any:
    """Return a hook that hands a module the hidden states of the last token of every text."""
    last = mask.long().cumsum(1).argmax(1)

    def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        rows = torch.arange(len(last), device=last.device)
        return (args[0][rows, last][:, None], *args[1:])

    return hook


def _free_id(config: Any, x: Tensor, mask: Tensor | None, end: int | None) -> int:
    """Return an id that ends no text; without padding one that is not in the vocabulary."""
    size: int = config.vocab_size
    if mask is None:
        return size
    last = x.gather(1, mask.long().cumsum(1).argmax(1, keepdim=True))
    used = {*last.flatten().tolist(), end}
    free = next((i for i in range(size) if i not in used), None)
    if free is None:
        raise InputError(
            "every token id ends some text of a batch, and none is left to pad with",
            "Measure fewer texts at a time, with --batch-size.",
        )
    return free
