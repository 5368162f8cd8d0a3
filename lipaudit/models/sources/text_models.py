"""Texts for models of transformers: tokens, pairs and padding.

Many classifiers find the last token of a text by its id: the last token that is not
`config.pad_token_id`. A text in a batch has to give the same output as alone. If the configuration
names a padding id, this id fills the batch. Otherwise padding is an id that no text of the batch
ends with.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from lipaudit.attacks.text import BEGINS, FIXED, GOES_ON, NOWHERE, Lexicon, Span
from lipaudit.errors import InputError, explain_failure, join_few
from lipaudit.models.net import Call, ModelSpec, NextToken
from lipaudit.models.sources.transformer_outputs import (
    LANGUAGE_MODELS,
    choose_output,
    choose_pooling,
    describe_classes,
    has_head,
    is_classifier,
    select_tower,
)
from lipaudit.models.sources.weight_files import read_json
from lipaudit.tables import Note, Notes

# Settings of sentence-transformers.
SENTENCES = "config_sentence_transformers.json"
# Settings in this file that change features and are not read, with advice.
UNREAD = {
    "default_prompt_name": "write the prompt in front of every text yourself",
    "truncate_dim": "features keep their whole width",
}
# Number of texts whose token ids are cached.
READINGS = 2**14
# Usual prefix of WordPiece tokens that continue a word.
GOES_ON_MARK = "##"
# Prefixes of byte-level BPE and SentencePiece tokens that begin a word.
BEGINS_MARKS = ("\u0120", "\u2581")


def read_lexicon(
    tokenizer: Any, vocabulary: int, encode: Callable[..., Mapping[str, Any]]
) -> Lexicon:
    """Return the words of a tokenizer's vocabulary, and functions that read and write them.

    Attacks that change texts use the result. They may not change special ids, ids unknown to the
    tokenizer, and tokens without a letter or digit (signs, single bytes).

    Args:
        tokenizer: a fast tokenizer of transformers: it returns the characters of each token.
        vocabulary: number of ids that the model has an embedding for.
        encode: (texts, most tokens, further options) -> the tokenizer's encoding.
    """
    count = min(vocabulary, len(tokenizer))
    tokens = [str(token) for token in tokenizer.convert_ids_to_tokens(range(count))]
    # The prefix that tells the first token of a word from later ones. WordPiece writes "##" before
    # later tokens, others write one of BEGINS_MARKS before first tokens. "": there is no prefix.
    mark = _find_mark(tokenizer)
    # Ids that an attack may neither change nor insert: special ones, such as [CLS], and tokens
    # added to the vocabulary.
    reserved = frozenset({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder})
    kinds = _classify_ids(tokens, mark, reserved)
    # An embedding may have more rows than the tokenizer has tokens.
    kinds += [FIXED] * (vocabulary - count)
    # Ids around texts, such as [SEP]: `spell` leaves them out. The unknown token is also among the
    # special ids of the tokenizer, but it stands for a word of the text, so `spell` writes it.
    special = frozenset(tokenizer.all_special_ids) - {tokenizer.unk_token_id}

    def spell(ids: Sequence[int]) -> str:
        """Return the text of some ids, without special tokens."""
        plain = [token for token in ids if token not in special]
        return str(tokenizer.decode(plain, clean_up_tokenization_spaces=False))

    @lru_cache(maxsize=READINGS)
    def read(texts: tuple[str, ...], most: int) -> tuple[tuple[int, ...], tuple[Span, ...]]:
        """Return the ids of a text, or of a pair, and the span of the characters of each id."""
        encoded = encode(texts, most, return_offsets_mapping=True)
        return tuple(encoded["input_ids"]), tuple(_find_spans(texts, encoded))

    def write(token: int) -> str:
        """Return the characters that an id adds to a word; empty for a part of a character.

        In WordPiece, these are the token without its mark: ##ing adds "ing". All other tokens are
        decoded.
        """
        text = ""
        if mark and mark not in BEGINS_MARKS:  # WordPiece, whose mark is before later tokens
            text = tokens[token].removeprefix(mark)
        # All other tokens. In WordPiece, a token that is nothing but the mark is decoded, too.
        text = text or spell([token]).strip()
        if "\ufffd" in text:  # the sign for bytes that are no whole character
            return ""
        return text

    return Lexicon(
        kinds=torch.tensor(kinds),
        spell=spell,
        encode=lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        special=special,
        reserved=reserved,
        tokens=tokens,
        read=read,
        write=write,
        marked=mark != "",
    )


def _find_spans(texts: Sequence[str], encoded: Any) -> Iterator[Span]:
    """Yield the span of each id: (0 for the first text or 1 for the second, first character, end).

    Args:
        texts: one text, or two.
        encoded: the tokenizer's encoding, with the offsets of the characters of each id.
    """
    offsets = zip(encoded.sequence_ids(0), encoded["offset_mapping"], strict=True)
    for number, (start, end) in offsets:
        if number is None:  # a special token, which stands for no characters
            yield NOWHERE
            continue
        token = texts[number][start:end]
        # The span of a token excludes the space around it.
        left = start + len(token) - len(token.lstrip())
        right = max(left, start + len(token.rstrip()))
        yield number, left, right


def _find_mark(tokenizer: Any) -> str:
    """Return the prefix that distinguishes tokens that begin a word from tokens that continue one.

    WordPiece puts ## before tokens that continue a word. Byte-level BPE and SentencePiece put a
    mark before tokens that begin a word (`BEGINS_MARKS`). Empty for other vocabularies.
    """
    # The content of a tokenizer.json. Its "decoder" joins tokens to texts, so it knows the mark.
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    model = settings["model"]
    if model.get("type") == "WordPiece":
        return str(model.get("continuing_subword_prefix") or GOES_ON_MARK)
    decoder = json.dumps(settings.get("decoder"), ensure_ascii=False)
    byte_level, sentence_piece = BEGINS_MARKS
    if "ByteLevel" in decoder:
        return byte_level
    if sentence_piece in decoder:
        return sentence_piece
    return ""


def _classify_token(token: str, mark: str) -> int:
    """Return whether a token begins a word, continues a word, or may not be changed.

    Args:
        token: the spelling of the token in the vocabulary.
        mark: the prefix that `_find_mark` returns.
    """
    plain = token.removeprefix(mark)
    is_reserved = plain.startswith(("[", "<")) and plain.endswith(("]", ">"))  # [unused1], <0x0A>
    if is_reserved or not any(letter.isalnum() for letter in plain):
        return FIXED
    if not mark:  # without a mark, every token counts as the beginning of a word
        return BEGINS
    is_marked = token.startswith(mark)
    if mark in BEGINS_MARKS:  # the mark is before tokens that begin a word
        return BEGINS if is_marked else GOES_ON
    return GOES_ON if is_marked else BEGINS


class Feed:
    """A tokenizer in front of a model: makes token ids and token types.

    Token types follow from the ids: 1 behind the first separator of a pair, else 0. Every text is
    checked for this.
    """

    def __init__(self, module: Any, tokenizer: Any, size: int) -> None:
        """Prepare a tokenizer for a model, and learn how it marks a pair of texts.

        The tokenizer encodes the text "a" and the pair "a", "b". The number of separators tells
        the two apart.

        Args:
            module: the model.
            tokenizer: a tokenizer of transformers.
            size: number of ids that the model has an embedding for.
        """
        self.tokenizer = tokenizer
        self.size = size
        # The id between the two texts of a pair, and often also behind the last text.
        self.separator: int | None = getattr(tokenizer, "sep_token_id", None)
        one_text = tokenizer("a")
        pair = tokenizer("a", "b")
        in_one = one_text["input_ids"].count(self.separator)
        in_pair = pair["input_ids"].count(self.separator)
        # A row of ids with at least this many separators is a pair. If a pair has no more of them
        # than a single text, no row counts as a pair (infinity).
        self.pair_separators = in_pair if in_pair > in_one else math.inf
        # Whether the model gets token types: 1 for the second text of a pair, else 0.
        takes_types = "token_type_ids" in inspect.signature(module.forward).parameters
        has_one_type = getattr(module.config, "type_vocab_size", None) == 1
        self.has_types = takes_types and not has_one_type and "token_type_ids" in one_text

    @property
    def unknown(self) -> int | None:
        """The id of unknown tokens; None if another special token shares it, as in GPT-2."""
        special = dict(self.tokenizer.special_tokens_map)
        unknown = special.pop("unk_token", None)
        if unknown is None or unknown in special.values():
            return None
        return self.tokenizer.unk_token_id

    def derive_types(self, x: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Return the token types of ids as a keyword argument; empty if the model takes none.

        In a pair, types are 0 up to and including the first separator, and 1 behind it. In a
        single text, all types are 0.

        Args:
            x: token ids (batch, tokens).
            mask: True at the tokens of the texts; None without padding.
        """
        if not self.has_types:
            return {}
        separators = torch.zeros_like(x)
        if self.separator is not None:
            separators = (x == self.separator).long()
        if mask is not None:
            separators = separators * mask
        is_pair = separators.sum(1, keepdim=True) >= self.pair_separators
        # For each token, the number of separators before it.
        separators_before = separators.cumsum(1) - separators
        # 1 if a separator is before the token, but 0 in a single text.
        return {"token_type_ids": separators_before.clamp(max=1) * is_pair}

    def tokenize(self, *texts: str, most: int) -> list[int]:
        """Return the token ids of a text, or of a pair of texts, cut to at most `most` tokens.

        Raises:
            InputError: the model has no embedding for one of the ids.
        """
        ids = list(self.encode(texts, most)["input_ids"])
        largest = max(ids, default=0)
        if largest >= self.size:
            raise InputError(
                f"the tokenizer has {len(self.tokenizer)} tokens, but the model has embeddings "
                f"for only {self.size}: {texts[0][:40]!r} holds "
                f"{self.tokenizer.convert_ids_to_tokens(largest)!r}, id {largest}",
                "Use the tokenizer that the model was trained with, or train the model with a "
                "larger embedding (resize_token_embeddings).",
            )
        return ids

    def encode(self, texts: Sequence[str], most: int, **more: bool) -> Mapping[str, Any]:
        """Return the tokenizer's encoding of a text, or of a pair of texts.

        Args:
            texts: one text, or two.
            most: the text is cut to this number of tokens.
            more: further options of the tokenizer.

        Raises:
            InputError: the tokenizer's token types differ from those that follow from the ids.
        """
        encoded = self.tokenizer(*texts, truncation=True, max_length=most, **more)
        ids = torch.tensor([encoded["input_ids"]], dtype=torch.long)
        derived = self.derive_types(ids).get("token_type_ids")
        if derived is not None and derived[0].tolist() != encoded["token_type_ids"]:
            raise InputError(
                f"the token types of {texts[0][:40]!r} do not follow from its token ids",
                "Remove special tokens, such as [SEP], from the texts. For a tokenizer with other "
                "types, write a py: factory that returns a ModelSpec with its own `call`.",
            )
        return encoded


# Models that build their mask from token ids if none is given.
READS_IDS = ("cohere_compass", "dpr", "flaubert", "xlm")


def find_text_config(config: Any) -> Any:
    """Return the settings of the part of a model that reads text; all settings if several do."""
    try:
        return config.get_text_config()
    except ValueError:  # several parts read text
        return config


def find_pad(config: Any) -> int | None:
    """Return the padding id of a configuration; None if it is not in the vocabulary."""
    pad = getattr(config, "pad_token_id", None)
    if pad is None or not 0 <= pad < config.vocab_size:
        return None
    return pad


@contextmanager
def pad_inputs(
    module: Any, x: Tensor, mask: Tensor | None, end: int | None
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Choose the id for padding, so that each text of a batch is read as if alone.

    Yields the ids and the mask to run the model on inside the block.

    Args:
        module: the model.
        x: token ids (batch, tokens), padded behind each text.
        mask: True at the tokens of the texts; None without padding.
        end: the id at whose position the model reads its output, if there is one. Padding with
            this id would move the position, so another id fills the batch.

    Raises:
        InputError: every id of the vocabulary ends a text of the batch.
    """
    config = find_text_config(module.config)
    pad = find_pad(config)
    # `fill` is the id for padding: the padding id of the configuration. If there is none, or if it
    # would move the position `end`, `fill` is another id that ends no text.
    fill = pad
    if pad is None or pad == end:
        fill = _find_free_id(x, mask, end, config.vocab_size)
    if fill is None:
        raise InputError(
            "no token id is free for padding: every id ends some text of the batch",
            "Use a smaller --batch-size.",
        )
    # A classifier reads its output at `end` if it has such an id, and needs no `pad_token_id`.
    # Others read it at the last token that is not `pad_token_id`. If the configuration names no
    # such id, `pad_token_id` is set to `fill` inside the block.
    needs_name = pad is None and is_classifier(module)
    with patch.object(config, "pad_token_id", fill) if needs_name else nullcontext():
        if mask is not None:
            yield x.masked_fill(~mask, fill), mask.long()
        # Without a mask, these models would look for padding among the ids.
        elif module.config.model_type in READS_IDS:
            yield x, torch.ones_like(x)
        else:
            yield x, None


def _find_free_id(x: Tensor, mask: Tensor | None, end: int | None, vocabulary: int) -> int | None:
    """Return an id for padding: an id that ends no text of a batch and is not `end`, else None.

    A classifier reads its output at the last token that is not padding, so only the last token of
    each text must differ from padding. For a batch without padding, the id is beyond the
    vocabulary, so that it occurs in no text.
    """
    if mask is None:
        return vocabulary
    last = mask.long().cumsum(1).argmax(1)  # the column of the last token of each text
    used = {*x.gather(1, last[:, None]).flatten().tolist(), end}
    return next((i for i in range(vocabulary) if i not in used), None)


# Length limit of models whose configuration and tokenizer have none.
MOST_TOKENS = 512
# Length limit of models with relative positions: longer than any text.
ENDLESS = 2**20


def describe_texts(module: Any, path: Path | None, tower: str | None) -> ModelSpec:
    """Describe the text input of a model; tokenizer and pooling are read from `path`.

    Raises:
        InputError: the model has no vocabulary, or pools its tokens in an unsupported way.
    """
    config = find_text_config(module.config)
    size = _count_ids(module, config)
    end = _find_end(module, config, tower)
    facts = describe_classes(module)
    if tower is None and module.config.is_encoder_decoder:
        text = "only the encoder's embeddings are perturbed; the decoder reads the unchanged text"
        facts["notes"] = (Note.info("encoder-moves", text), *facts.get("notes", ()))
    if not has_head(module):
        facts["notes"] = (*facts.get("notes", ()), *_note_sentence_settings(path))
    tokenizer = load_tokenizer(path)
    feed = None
    if tokenizer is not None:
        feed = Feed(module, tokenizer, size)  # the tokenizer, with checks of its ids and types
        facts |= _describe_tokenizer(feed)
    if tower is None and type(module).__name__.endswith(tuple(LANGUAGE_MODELS)):
        facts |= _describe_next_token(module, feed)
    return ModelSpec(
        module,
        (limit_tokens(module, tokenizer),),
        kind="text",
        vocabulary=size,
        pad_id=find_pad(config),
        end_id=end,
        call=_make_call(module, tower, feed, end),
        read=choose_output(module, tower, choose_pooling(path)),
        **facts,
    )


def _note_sentence_settings(path: Path | None) -> Notes:
    """Warn of settings of sentence-transformers that change features and are not read."""
    if path is None or not (path / SENTENCES).is_file():
        return ()
    settings = None
    with suppress(InputError):  # the file is optional, so a damaged one stops nothing
        settings = read_json(path / SENTENCES)
    if not isinstance(settings, dict):
        return ()
    unread = [key for key in UNREAD if settings.get(key)]
    if not unread:
        return ()
    advice = "; ".join(UNREAD[key] for key in unread)
    text = f"{SENTENCES} sets {join_few(unread)}, not read by lipaudit: {advice}"
    return (Note.warn("sentence-settings", text),)


def _count_ids(module: Any, config: Any) -> int:
    """Return the number of token ids that a model has an embedding for.

    Raises:
        InputError: the model has no vocabulary.
    """
    if not getattr(config, "vocab_size", None):
        raise InputError(
            f"{type(module).__name__} has no embedding table for token ids that could be "
            "perturbed",
            "Write a py: factory that returns a ModelSpec with `entry` and `vocabulary`.",
        )
    size = int(config.vocab_size)
    table = None
    # The table may have fewer rows. A model with two towers does not say which table it uses.
    with suppress(NotImplementedError):
        table = getattr(module.get_input_embeddings(), "weight", None)
    if isinstance(table, Tensor) and table.ndim == 2:
        return min(len(table), size)
    return size


def _describe_tokenizer(feed: Feed) -> dict[str, Any]:
    """Return the fields of a `ModelSpec` that need a tokenizer, by name."""
    facts: dict[str, Any] = {
        "tokenize": lambda text, most: feed.tokenize(text, most=most),
        "tokenize_pair": lambda first, second, most: feed.tokenize(first, second, most=most),
        "unknown_id": feed.unknown,
    }
    if getattr(feed.tokenizer, "is_fast", False):
        facts["lexicon"] = partial(read_lexicon, feed.tokenizer, feed.size, feed.encode)
    return facts


def _describe_next_token(module: Any, feed: Feed | None) -> dict[str, Any]:
    """Return the fields of a `ModelSpec` about the next token of a causal language model.

    `next_logits` is left out if the model takes no embeddings, and `next_token` without an output
    layer.
    """
    facts: dict[str, Any] = {}
    if "inputs_embeds" in inspect.signature(module.forward).parameters:
        facts["next_logits"] = partial(_score_next, module, feed)
    head = module.get_output_embeddings()
    if head is not None:
        # The call of the model returns (result, mask), and the result has the logits.
        facts["next_token"] = NextToken(head, lambda out: out[0].logits)
    return facts


def _find_end(module: Any, config: Any, tower: str | None) -> int | None:
    """Return the id that every text must end with, because the model reads its output there.

    This is so in text towers, and in classifiers with encoder and decoder. None for other models.
    """
    if tower is None and not (is_classifier(module) and module.config.is_encoder_decoder):
        return None
    end = getattr(config, "eos_token_id", None)
    if isinstance(end, list):
        end = end[0]
    if end is not None and end >= config.vocab_size:  # no text can have it
        return None
    return end


def _classify_ids(tokens: Sequence[str], mark: str, reserved: Set[int]) -> list[int]:
    """Return for each id whether it begins a word, continues a word, or is fixed.

    Args:
        tokens: the token of each id.
        mark: the prefix that tells the first token of a word from later ones; may be empty.
        reserved: ids that are fixed. Tokens without a letter or digit are fixed, too.
    """
    kinds = [_classify_token(token, mark) for token in tokens]
    for i in reserved:
        if i < len(kinds):
            kinds[i] = FIXED
    return kinds


def _make_call(module: Any, tower: str | None, feed: Feed | None, end: int | None) -> Call:
    """Return a function that runs a model: (ids, mask) -> (result, mask).

    Args:
        module: the model.
        tower: the measured tower of a model with two towers; None for other models.
        feed: derives token types from ids; None without a tokenizer.
        end: the id at whose position the model reads its output, if there is one.
    """
    run = select_tower(module, tower)
    # An encoder-decoder also needs inputs for its decoder. With a head, it makes them itself.
    needs_decoder_inputs = (
        tower is None and module.config.is_encoder_decoder and not has_head(module)
    )

    def call(x: Tensor, mask: Tensor | None) -> Any:
        """Run the model on token ids, (batch, tokens), and return its result with the mask."""
        # `pad_inputs` chooses ids and attention mask so that each text gives the same output as
        # alone.
        with pad_inputs(module, x, mask, end) as (ids, attention):
            inputs: dict[str, Any] = {}
            if feed is not None:
                inputs = feed.derive_types(ids, mask)
            if needs_decoder_inputs:
                inputs["decoder_input_ids"] = _shift_right(ids, module.config)
                # The text keeps its length, so the encoder's attention mask is right here, too.
                inputs["decoder_attention_mask"] = attention
            # The output is read from the result by `mask`, which is None without padding; the
            # attention mask may then be all ones.
            return run(attention_mask=attention, input_ids=ids, **inputs), mask

    return call


def _shift_right(ids: Tensor, config: Any) -> Tensor:
    """Return the ids that a decoder reads: a start token, then the ids without the last one.

    Args:
        ids: (batch, tokens), what the encoder reads.
        config: the configuration of the model, which may name the start token or the padding.
    """
    starts = (getattr(config, "decoder_start_token_id", None), find_pad(config), 0)
    start = next(token for token in starts if token is not None)
    column = torch.full_like(ids[:, :1], start)
    return torch.cat([column, ids[:, :-1]], 1)


def _score_next(module: Any, feed: Feed | None, z: Tensor, first: int) -> Tensor:
    """Return the logits of the token behind each position from `first` on.

    Args:
        module: the language model.
        feed: derives token types from ids; None without a tokenizer.
        z: embeddings (batch, tokens, width).
        first: the first position.

    Returns:
        (batch, tokens - first, vocabulary).
    """
    count = z.shape[1] - first
    inputs: dict[str, Any] = {}
    # Logits before `first` are not needed, and would take much memory.
    if "logits_to_keep" in inspect.signature(module.forward).parameters:
        inputs["logits_to_keep"] = count
    # Token types follow from the separators among the ids. A prompt is a single text, so ids
    # without a separator (-1) have the right types.
    if feed is not None:
        no_separators = z.new_full(z.shape[:2], -1, dtype=torch.long)
        inputs |= feed.derive_types(no_separators)
    logits: Tensor = module(inputs_embeds=z, **inputs).logits
    return logits[:, -count:]


def load_tokenizer(path: Path | None) -> Any:
    """Load the tokenizer in a directory; None if there is none.

    Raises:
        InputError: its library is missing, or its files are damaged.
    """
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


def limit_tokens(module: Any, tokenizer: Any) -> int:
    """Return the largest number of tokens of a text: the smallest limit of model and tokenizer.

    Limits from 10^6 on are ignored: tokenizers without a limit say 1e30. Relative positions, as in
    T5, have no limit, whatever the tokenizer says.
    """
    config = find_text_config(module.config)
    positions = getattr(config, "max_position_embeddings", None)
    if not positions and hasattr(config, "relative_attention_num_buckets"):
        return ENDLESS
    limits = [getattr(tokenizer, "model_max_length", None), positions]
    for name, table in module.named_modules():
        has_positions = name.endswith("position_embeddings") and isinstance(table, nn.Embedding)
        if has_positions and table.padding_idx is not None:
            # RoBERTa counts positions from the padding id + 1: rows up to the padding id are not
            # used.
            limits.append(table.num_embeddings - 1 - table.padding_idx)
    return min((int(n) for n in limits if n and 0 < n < 10**6), default=MOST_TOKENS)
