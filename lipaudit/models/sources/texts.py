"""Texts for models of transformers: vocabulary, pairs, padding, and the call of the model.

Many classifiers find the last token of a text by its id: the last one that is not
`config.pad_token_id`. A text in a batch has to give the same output as alone. If the configuration
names a padding id, it fills the batch. If not, the model reads the very last token, and padding is
an id that no text of the batch ends with.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lipaudit.attacks.text import BEGINS, FIXED, GOES_ON, NOWHERE, Lexicon, Span
from lipaudit.data.samples import remark
from lipaudit.errors import InputError, explain_failure
from lipaudit.models.net import ModelSpec, NextToken
from lipaudit.models.sources.outputs import (
    LANGUAGE_MODELS,
    Pooling,
    choose_pooling,
    describe_classes,
    has_head,
    is_classifier,
    read_tower,
)

READINGS = 2**14
"""Number of texts whose token ids are cached."""
GOES_ON_MARK = "##"
"""Prefix of WordPiece tokens that continue a word."""
BEGINS_MARKS = ("\u0120", "\u2581")
"""Prefixes of byte-level BPE and SentencePiece tokens that begin a word."""


def read_lexicon(
    tokenizer: Any, vocabulary: int, encode: Callable[..., Mapping[str, Any]]
) -> Lexicon:
    """Read the vocabulary of a tokenizer of transformers that returns character offsets.

    Attacks may not change special ids, ids unknown to the tokenizer, and tokens without a letter
    or digit (signs, single bytes). In a vocabulary without marks every id begins a word. Spelled
    texts have no special tokens except unknown words.

    Args:
        tokenizer: a tokenizer of transformers.
        vocabulary: number of ids that the model has an embedding for.
        encode: (texts, most tokens, further options) -> the tokenizer's encoding.
    """
    count = min(vocabulary, len(tokenizer))
    tokens = [str(token) for token in tokenizer.convert_ids_to_tokens(list(range(count)))]
    # The mark of WordPiece, byte-level BPE, SentencePiece, or none.
    stored = json.loads(tokenizer.backend_tokenizer.to_str())
    decoder = json.dumps(stored.get("decoder"), ensure_ascii=False)
    byte_level, sentence_piece = BEGINS_MARKS
    mark: str | None = sentence_piece if sentence_piece in decoder else None
    if stored["model"].get("type") == "WordPiece":
        mark = str(stored["model"].get("continuing_subword_prefix") or GOES_ON_MARK)
    elif "ByteLevel" in decoder:
        mark = byte_level
    kinds = [_classify_token(token, mark) for token in tokens]
    for special in (*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder):
        if special < count:
            kinds[special] = FIXED
    # An embedding may have more rows than the tokenizer has tokens.
    kinds += [FIXED] * (vocabulary - count)
    special = frozenset(tokenizer.all_special_ids) - {tokenizer.unk_token_id}

    def spell(ids: Sequence[int]) -> str:
        shown = [token for token in ids if token not in special]
        return str(tokenizer.decode(shown, clean_up_tokenization_spaces=False))

    @lru_cache(maxsize=READINGS)
    def read(texts: tuple[str, ...], most: int) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        encoded: Any = encode(texts, most, return_offsets_mapping=True)
        places = zip(encoded.sequence_ids(0), encoded["offset_mapping"], strict=True)
        spans: list[Span] = []
        for piece, (start, end) in places:
            token = "" if piece is None else texts[piece][start:end]
            # The span of a token excludes the space around it.
            left = start + len(token) - len(token.lstrip())
            right = max(left, start + len(token.rstrip()))
            spans.append(NOWHERE if piece is None else (piece, left, right))
        return tuple(encoded["input_ids"]), tuple(spans)

    def write(token: int) -> str:
        text = tokens[token].removeprefix(mark) if mark and mark not in BEGINS_MARKS else ""
        text = text or spell([token]).strip()
        return "" if "\ufffd" in text else text

    return Lexicon(
        torch.tensor(kinds),
        spell,
        lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]),
        special,
        tokens,
        read,
        write,
        marked=mark is not None,
    )


def _classify_token(token: str, mark: str | None) -> int:
    plain = token.removeprefix(mark or "")
    reserved = plain.startswith(("[", "<")) and plain.endswith(("]", ">"))  # [unused1], <0x0A>
    if reserved or not any(letter.isalnum() for letter in plain):
        return FIXED
    if mark is None or token.startswith(mark) == (mark in BEGINS_MARKS):
        return BEGINS
    return GOES_ON


class Feed:
    """A tokenizer in front of a model.

    Token types follow from the ids: 1 behind the first separator of a pair, else 0. Every text is
    checked for this.
    """

    def __init__(self, module: Any, tokenizer: Any, size: int) -> None:
        """Read the separator off two examples.

        Args:
            module: the model.
            tokenizer: a tokenizer of transformers.
            size: number of ids that the model has an embedding for.
        """
        self.tokenizer, self.size = tokenizer, size
        self.separator: int | None = getattr(tokenizer, "sep_token_id", None)
        one, two = tokenizer("a"), tokenizer("a", "b")
        alone, both = (list(each["input_ids"]).count(self.separator) for each in (one, two))
        self.separators = both if both > alone else math.inf
        takes = "token_type_ids" in inspect.signature(module.forward).parameters
        single = getattr(module.config, "type_vocab_size", None) == 1
        self.typed = takes and not single and "token_type_ids" in one

    @property
    def unknown(self) -> int | None:
        """The id of unknown tokens; None if another special token shares it, as in GPT-2."""
        named = self.tokenizer.special_tokens_map
        others = {token for name, token in named.items() if name != "unk_token"}
        known = named.get("unk_token") in {None, *others}
        return None if known else self.tokenizer.unk_token_id

    def types(self, x: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Return the token types for the model; nothing if it takes none."""
        if not self.typed:
            return {}
        ends = (x == self.separator).long() if self.separator is not None else 0 * x
        ends = ends if mask is None else ends * mask
        pair = ends.sum(1, keepdim=True) >= self.separators
        return {"token_type_ids": (ends.cumsum(1) - ends).clamp(max=1) * pair}

    def ids(self, *texts: str, most: int) -> list[int]:
        """Return the ids of a text, or of a pair, cut to a number of tokens.

        Raises:
            InputError: the model has no embedding for one of the ids.
        """
        ids = list(self.encode(texts, most)["input_ids"])
        if ids and max(ids) >= self.size:
            token = self.tokenizer.convert_ids_to_tokens(max(ids))
            raise InputError(
                f"the tokenizer has {len(self.tokenizer)} tokens, but the model has embeddings "
                f"for only {self.size}: {texts[0][:40]!r} holds {token!r}, id {max(ids)}",
                "Use the tokenizer that the model was trained with, or train the model with a "
                "larger embedding (resize_token_embeddings).",
            )
        return ids

    def encode(self, texts: Sequence[str], most: int, **more: bool) -> Mapping[str, Any]:
        """Return the encoding of a text, or of a pair, cut to a number of tokens.

        Raises:
            InputError: its token types do not follow from its ids.
        """
        encoded = self.tokenizer(*texts, truncation=True, max_length=most, **more)
        ids = list(encoded["input_ids"])
        usual = self.types(torch.tensor([ids], dtype=torch.long)).get("token_type_ids")
        if usual is not None and usual[0].tolist() != list(encoded["token_type_ids"]):
            raise InputError(
                f"the token types of {texts[0][:40]!r} do not follow from its token ids",
                "Remove special tokens, such as [SEP], from the texts. For a tokenizer with other "
                "types, write a py: factory that returns a ModelSpec with its own `call`.",
            )
        return encoded


READS_IDS = ("cohere_compass", "dpr", "flaubert", "xlm")
"""Models that build their mask from token ids if none is given."""


def find_text_config(config: Any) -> Any:
    """Return the settings of the part that reads text, or all settings if none or several do."""
    try:
        return config.get_text_config()
    except ValueError:
        return config


def find_pad(config: Any) -> int | None:
    """Return the padding id of a configuration; None if it is not in the vocabulary."""
    pad = getattr(config, "pad_token_id", None)
    return pad if pad is not None and 0 <= pad < config.vocab_size else None


@contextmanager
def pad_inputs(
    module: Any, x: Tensor, mask: Tensor | None, end: int | None
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the ids and the mask to run a model on, so that each text is read as if alone.

    Args:
        module: the model.
        x: token ids (batch, tokens), padded behind each text.
        mask: True at the tokens of the texts; None without padding.
        end: the id whose state the model reads, if it does that; never used for padding.

    Raises:
        InputError: every id of the vocabulary ends a text of the batch.
    """
    config = find_text_config(module.config)
    pad = find_pad(config)
    last = None if mask is None else mask.long().cumsum(1).argmax(1)
    fill: int | None = pad
    if pad is None or pad == end:
        # An id that ends no text; without padding, one beyond the vocabulary, which no text has.
        size: int = config.vocab_size
        used = set() if last is None else {*x.gather(1, last[:, None]).flatten().tolist(), end}
        fill = size if last is None else next((i for i in range(size) if i not in used), None)
    if fill is None:
        raise InputError(
            "no token id is free for padding: every id ends some text of the batch",
            "Use a smaller --batch-size.",
        )

    with ExitStack() as undo:
        if pad is None and is_classifier(module):
            undo.callback(setattr, config, "pad_token_id", config.pad_token_id)
            config.pad_token_id = fill
        if mask is None:
            ones = torch.ones_like(x) if module.config.model_type in READS_IDS else None
            yield x, ones
            return
        yield x.masked_fill(~mask, fill), mask.long()


MOST_TOKENS = 512
ENDLESS = 2**20
"""Default length limit for models without one."""


def describe_texts(module: Any, path: Path | None, tower: str | None) -> ModelSpec:
    """Describe the text input of a model; tokenizer and pooling are read from `path`.

    Raises:
        InputError: the model has no vocabulary, or pools its tokens in an unsupported way.
    """
    config = find_text_config(module.config)
    if not getattr(config, "vocab_size", None):
        raise InputError(
            f"{type(module).__name__} has no embedding table for token ids that could be "
            "perturbed",
            "Write a py: factory that returns a ModelSpec with `entry` and `vocabulary`.",
        )
    try:
        table = getattr(module.get_input_embeddings(), "weight", None)
    except NotImplementedError:  # for a model with two towers
        table = None
    size: int = config.vocab_size
    if isinstance(table, Tensor) and table.ndim == 2:
        size = min(len(table), size)
    tokenizer = _load_tokenizer(path)
    feed = None if tokenizer is None else Feed(module, tokenizer, size)
    # The id whose state the model reads, if it does that: every text must end with it.
    end = None
    if tower is not None or (is_classifier(module) and module.config.is_encoder_decoder):
        end = getattr(config, "eos_token_id", None)
        end = end[0] if isinstance(end, list) else end
        end = end if end is not None and end < config.vocab_size else None
    facts = describe_classes(module)
    if tower is None and module.config.is_encoder_decoder:
        text = "only the encoder's embeddings are perturbed; the decoder reads the unchanged text"
        facts["notes"] = (remark("encoder-moves", text), *facts.get("notes", ()))
    if feed is not None:
        facts["tokenize"] = lambda text, most: feed.ids(text, most=most)
        facts["tokenize_pair"] = lambda first, second, most: feed.ids(first, second, most=most)
        facts["unknown_id"] = feed.unknown
    if feed is not None and getattr(tokenizer, "is_fast", False):
        facts["lexicon"] = partial(read_lexicon, tokenizer, size, feed.encode)
    if tower is None and type(module).__name__.endswith(tuple(LANGUAGE_MODELS)):
        if "inputs_embeds" in inspect.signature(module.forward).parameters:
            facts["next_logits"] = partial(_score_next, module, feed)
        if (head := module.get_output_embeddings()) is not None:
            facts["next_token"] = NextToken(head, lambda out: out[0].logits)
    return ModelSpec(
        module,
        (_limit_tokens(module, config, tokenizer),),
        kind="text",
        vocabulary=size,
        pad_id=find_pad(config) or 0,
        end_id=end,
        call=_make_call(module, tower, feed, end),
        read=_make_read(module, tower, choose_pooling(path)),
        **facts,
    )


def _make_call(
    module: Any, tower: str | None, feed: Feed | None, end: int | None
) -> Callable[[Tensor, Tensor | None], Any]:
    """Return a function that runs a model on ids and their mask, and passes the mask on."""
    run = module if tower is None else getattr(module, f"get_{tower}_features")
    config = module.config
    decoder = tower is None and config.is_encoder_decoder and not has_head(module)

    def call(x: Tensor, mask: Tensor | None) -> Any:
        with pad_inputs(module, x, mask, end) as (ids, attention):
            inputs: dict[str, Any] = {} if feed is None else feed.types(ids, mask)
            if decoder:
                # The decoder of a model without a head reads the same text, one token later.
                begin = (getattr(config, "decoder_start_token_id", None), find_pad(config), 0)
                start = torch.full_like(x[:, :1], next(i for i in begin if i is not None))
                inputs["decoder_input_ids"] = torch.cat([start, ids[:, :-1]], 1)
                inputs["decoder_attention_mask"] = None if mask is None else mask.long()
            return run(attention_mask=attention, input_ids=ids, **inputs), mask

    return call


def _make_read(module: Any, tower: str | None, pooling: Pooling) -> Callable[[Any], Tensor]:
    """Return a function from a result and its mask to the output."""

    def read_next_token(out: Any) -> Tensor:
        logits, mask = out[0].logits, out[1]
        if mask is None:
            return logits[:, -1]
        return logits[torch.arange(len(logits), device=logits.device), mask.long().sum(1) - 1]

    if tower is not None:
        return lambda out: read_tower(out[0])
    if not has_head(module):
        return lambda out: pooling(*out)
    return (lambda out: out[0].logits) if is_classifier(module) else read_next_token


def _score_next(module: Any, feed: Feed | None, z: Tensor, first: int) -> Tensor:
    """Return the next-token logits of embeddings, from position `first` on."""
    last = z.shape[1] - first
    # The logits of a prompt are large, and not needed.
    keeps = "logits_to_keep" in inspect.signature(module.forward).parameters
    inputs: dict[str, Any] = {"logits_to_keep": last} if keeps else {}
    if feed is not None:
        inputs |= feed.types(z.new_full(z.shape[:2], -1, dtype=torch.long))
    logits: Tensor = module(inputs_embeds=z, **inputs).logits
    return logits[:, -last:]


def _load_tokenizer(path: Path | None) -> Any:
    from transformers import AutoTokenizer

    files = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json")
    if path is None or not any((path / f).is_file() for f in files):
        return None
    with explain_failure(
        f"the tokenizer in {path} cannot be loaded",
        "Install the missing library (often `pip install sentencepiece protobuf` or "
        "tiktoken), update transformers, or put tokenizer.json beside config.json.",
    ):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)


def _limit_tokens(module: Any, config: Any, tokenizer: Any) -> int:
    """Return the largest number of tokens; tokenizers without a limit say 1e30.

    Relative positions, as in T5, have no limit, whatever the tokenizer says.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if not positions and hasattr(config, "relative_attention_num_buckets"):
        return ENDLESS
    limits = [getattr(tokenizer, "model_max_length", None), getattr(config, "n_positions", None)]
    limits.append(positions)
    tables = [m for n, m in module.named_modules() if n.endswith("position_embeddings")]
    limits += [  # RoBERTa counts positions from behind the padding id
        table.num_embeddings - 1 - table.padding_idx
        for table in tables
        if isinstance(table, nn.Embedding) and table.padding_idx is not None
    ]
    return min((int(n) for n in limits if n and 0 < n < 10**6), default=MOST_TOKENS)
