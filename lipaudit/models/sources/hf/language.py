"""Models of transformers that take text: token ids, and what is read behind them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lipaudit.data.intake import remark
from lipaudit.errors import InputError
from lipaudit.models.net import NextToken
from lipaudit.models.sources.hf.lexicon import lexicon
from lipaudit.models.sources.hf.padding import end_of, known_pad, padded, text_config
from lipaudit.models.sources.hf.pairs import Feed
from lipaudit.models.sources.hf.pooling import Pooling, sentence_pooling
from lipaudit.models.sources.hf.task_heads import (
    class_names,
    has_head,
    is_classifier,
    is_language_model,
)
from lipaudit.models.sources.hf.towers import reads_last_position, tower_call, tower_features
from lipaudit.models.sources.spec import ModelSpec
from lipaudit.results import Note

MOST_TOKENS = 512
ENDLESS = 2**20
"""Tokens of the longest text of a model that has no limit."""


def text_spec(module: Any, path: Path | None, tower: str | None) -> ModelSpec:
    """Say how a model is fed text, looking for its tokenizer and pooling in `path`.

    Raises:
        InputError: it has no vocabulary, or pools its tokens in a way that is not supported.
    """
    config = text_config(module.config)
    if not getattr(config, "vocab_size", None):
        raise InputError(
            f"{type(module).__name__} has no vocabulary: it takes no token ids, or does not look "
            "them up in a table of embeddings that could be perturbed",
            "Write a py: factory that returns a ModelSpec with `entry` and `vocabulary`.",
        )
    tokenizer, size = _tokenizer(path), _embeddings(module, config)
    feed = None if tokenizer is None else Feed(module, tokenizer, size)
    call, read = _text_output(module, sentence_pooling(path), tower, feed)
    return ModelSpec(
        module,
        (_most_tokens(module, config, tokenizer),),
        kind="text",
        classifier=is_classifier(module),
        labels=class_names(module),
        vocabulary=size,
        next_token=_scores(module, tower),
        tokenize=None if feed is None else feed.one,
        tokenize_pair=feed.two if feed is not None and feed.pairs else None,
        pad_id=known_pad(config) or 0,
        end_id=_end_id(module, tower),
        lexicon=partial(lexicon, tokenizer, size)
        if getattr(tokenizer, "is_fast", False)
        else None,
        next_logits=_next_logits(module, feed),
        call=call,
        read=read,
        entry=module.get_input_embeddings() if _tokens_first(module) else None,
        architecture=type(module).__name__,
        notes=_still_decoder(module, tower),
    )


def _still_decoder(module: Any, tower: str | None) -> tuple[Note, ...]:
    """Say of a model that reads a text twice which of the two embeddings moves."""
    if tower is not None or not module.config.is_encoder_decoder:
        return ()
    text = (
        "only the embeddings that the encoder reads move; the decoder reads the same text unmoved"
    )
    return (remark("encoder-moves", text),)


def _embeddings(module: Any, config: Any) -> int:
    """Return how many token ids the model has an embedding for."""
    try:
        table = getattr(module.get_input_embeddings(), "weight", None)
    except NotImplementedError:  # of a model with two towers
        table = None
    size: int = config.vocab_size
    return min(len(table), size) if isinstance(table, Tensor) and table.ndim == 2 else size


def _end_id(module: Any, tower: str | None) -> int | None:
    """Return the id whose state alone is read, where a model does that: every text must end so."""
    if tower is None and not _reads_the_end(module):
        return None
    config = text_config(module.config)
    end = end_of(config)
    return end if end is not None and end < config.vocab_size else None


def _reads_the_end(module: Any) -> bool:
    return is_classifier(module) and module.config.is_encoder_decoder


def _tokens_first(module: Any) -> bool:
    """Say whether a model turns its ids to (tokens, batch): a row is then no sample."""
    return str(module.config.model_type) == "xlnet"


def _tokenizer(path: Path | None) -> Any:
    from transformers import AutoTokenizer

    files = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json")
    if path is None or not any((path / f).is_file() for f in files):
        return None
    return AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)


def _most_tokens(module: Any, config: Any, tokenizer: Any) -> int:
    """Return how many tokens the model takes; tokenizers without a limit say 1e30.

    Relative positions, as T5's, end nowhere, whatever a tokenizer says.
    """
    own = getattr(config, "max_position_embeddings", None)
    if not own and hasattr(config, "relative_attention_num_buckets"):
        return ENDLESS
    limits = [getattr(tokenizer, "model_max_length", None), getattr(config, "n_positions", None)]
    limits += [getattr(config, "max_position_embeddings", None)]
    limits += _behind_padding(module)
    return min((int(n) for n in limits if n and 0 < n < 10**6), default=MOST_TOKENS)


def _behind_padding(module: Any) -> list[int]:
    """Return the room in tables of positions that begin behind the padding id, as RoBERTa's do."""
    tables = [m for n, m in module.named_modules() if n.endswith("position_embeddings")]
    return [
        t.num_embeddings - 1 - t.padding_idx
        for t in tables
        if isinstance(t, nn.Embedding) and t.padding_idx is not None
    ]


def _text_output(
    module: Any, pooling: Pooling, tower: str | None, feed: Feed | None
) -> tuple[Any, Any]:
    """Return `call` and `read` by kind of model; `call` passes the mask on to `read`."""
    run = module if tower is None else tower_call(module, tower)
    inputs = _text_inputs(module, tower, feed)
    end = _end_id(module, tower)

    def call(x: Tensor, mask: Tensor | None) -> Any:
        with padded(module, x, mask, end) as (ids, attention):
            return run(attention_mask=attention, **inputs(ids, mask)), mask

    if tower is not None:
        return call, lambda out: tower_features(out[0])
    if not has_head(module):
        return call, lambda out: pooling(*out)
    if is_classifier(module):
        return call, lambda out: out[0].logits
    return call, lambda out: _next_token(out[0].logits, out[1])


def _scores(module: Any, tower: str | None) -> NextToken | None:
    """Say how a causal language model scores the next token, at every position."""
    if tower is not None or not has_head(module) or is_classifier(module):
        return None
    head = module.get_output_embeddings()
    return None if head is None else NextToken(head, lambda out: out[0].logits)


def _text_inputs(
    module: Any, tower: str | None, feed: Feed | None
) -> Callable[[Tensor, Tensor | None], Any]:
    """Return what makes the inputs of a model of ids and their mask."""

    def types(x: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        return {} if feed is None else feed.types(x, mask)

    if _tokens_first(module):
        # Looked up here, one sample per row; the model turns the embeddings as it does the ids.
        embed = module.get_input_embeddings()
        return lambda x, mask: {"inputs_embeds": embed(x), **types(x, mask)}
    decoder, end = _decoder_inputs(module), _end_id(module, tower)

    def inputs(x: Tensor, mask: Tensor | None) -> dict[str, Any]:
        if end is not None and tower is None:
            _require_ends(module, x, mask, end)
        if tower is not None and mask is not None and reads_last_position(module):
            raise InputError(
                f"the text tower of {type(module).__name__} reads the last position, padding or "
                "not: in a batch, a short text's features would depend on the longest",
                "Give texts of one length, as token ids in an .npz file padded as in training.",
            )
        attention = None if mask is None else mask.long()
        return {"input_ids": x, **types(x, mask), **decoder(x, attention)}

    return inputs


def _require_ends(module: Any, x: Tensor, mask: Tensor | None, end: int) -> None:
    """Refuse what the model's own code refuses: it reads the state of the last end of a text."""
    ends = ((x == end) if mask is None else (x == end) & mask).sum(1)
    if int(ends.min()) == 0 or int(ends.max()) != int(ends.min()):
        raise InputError(
            f"{type(module).__name__} reads the state at the end of a text: each must hold the id "
            f"{end} of the end (eos_token_id), and all equally often",
            "Put the tokenizer's files beside config.json, or end the token ids with it.",
        )


def _decoder_inputs(module: Any) -> Callable[[Tensor, Tensor | None], dict[str, Any]]:
    """An encoder-decoder without a head reads the same text, one token later."""
    if not module.config.is_encoder_decoder or has_head(module):
        return lambda x, mask: {}
    known = (getattr(module.config, "decoder_start_token_id", None), known_pad(module.config), 0)
    start = next(i for i in known if i is not None)

    def inputs(x: Tensor, mask: Tensor | None) -> dict[str, Any]:
        shifted = torch.cat([torch.full_like(x[:, :1], start), x[:, :-1]], 1)
        return {"decoder_input_ids": shifted, "decoder_attention_mask": mask}

    return inputs


def _next_logits(module: Any, feed: Feed | None) -> Callable[[Tensor, int], Tensor] | None:
    """Return the logits behind embeddings of a language model; None for other models."""
    known = inspect.signature(module.forward).parameters
    if not is_language_model(module) or "inputs_embeds" not in known:
        return None

    def run(z: Tensor, first: int) -> Tensor:
        last = z.shape[1] - first
        # The logits of a prompt are large, and nothing is read of them.
        few = {"logits_to_keep": last} if "logits_to_keep" in known else {}
        types = {} if feed is None else feed.types(z.new_full(z.shape[:2], -1, dtype=torch.long))
        out = module(inputs_embeds=z, **types, **few)
        logits: Tensor = out.logits[:, -last:]
        return logits

    return run


def _next_token(logits: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return logits[:, -1]
    return logits[torch.arange(len(logits), device=logits.device), mask.long().sum(1) - 1]
