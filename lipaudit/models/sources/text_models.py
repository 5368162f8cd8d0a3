"""Texts for models of transformers: tokens, pairs, padding; and which output is measured.

The output:

* ``...ForImageClassification`` and ``...ForSequenceClassification``: the logits.
* Causal language models: the logits of the next token, at the last real token.
* Models with an image tower and a text tower: the projected features of the tower that `--tower`
names, as `get_image_features` and `get_text_features` return them.
* Models of sound that decode to text: the encoder's features.
* All others, mostly encoders: features, the mean of the last hidden state over the real tokens
(for sentence encoders the pooling and normalisation of their own files). A note names heads in the
file that are not used.

Many classifiers find the last token of a text by its id: the last one that is not
`config.pad_token_id`. A text in a batch has to give the same output as alone. If the configuration
names a padding id, it fills the batch. If not, the model reads the very last token, and padding is
an id that no text of the batch ends with.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipaudit.attacks.text import BEGINS, FIXED, GOES_ON, NOWHERE, Lexicon, Span
from lipaudit.errors import InputError, explain_failure
from lipaudit.models.net import NO_DECISION, ModelSpec, NextToken
from lipaudit.models.sources.weight_files import read_json
from lipaudit.tables import Note

Pooling = Callable[[Any, Tensor | None], Tensor]

CLASSIFIERS = {
    "ForImageClassification": "AutoModelForImageClassification",
    "ForImageClassificationWithTeacher": "AutoModelForImageClassification",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForAudioClassification": "AutoModelForAudioClassification",
}
LANGUAGE_MODELS = {"ForCausalLM": "AutoModelForCausalLM", "LMHeadModel": "AutoModelForCausalLM"}
# Supported heads by the ending of their class name, with the auto class that loads each.
HEADS = CLASSIFIERS | LANGUAGE_MODELS
# Problem types of classifiers that make no single decision, with a description.
UNDECIDED = {
    "multi_label_classification": "is a multi-label model",
    "regression": "predicts numbers, not classes",
}
# Input of each tower.
TOWERS = {"image": "pixel_values", "text": "input_ids"}
SWITCH = re.compile(r"pooling_mode_(.*?)(_tokens?)?")


def has_head(module: Any) -> bool:
    """Say whether a model's output comes from a head; otherwise it is features."""
    return type(module).__name__.endswith(tuple(HEADS))


def is_classifier(module: Any) -> bool:
    """Say whether a model's output is class logits."""
    return type(module).__name__.endswith(tuple(CLASSIFIERS))


def describe_classes(module: Any) -> dict[str, Any]:
    """Return the fields of a `ModelSpec` about classes: their presence, names, architecture.

    The placeholders LABEL_0, LABEL_1, ... are not names. Scores whose largest entry is not a
    decision count as features, and a note says so.
    """
    name = type(module).__name__
    classifier = is_classifier(module)
    problem = str(getattr(module.config, "problem_type", None))
    facts: dict[str, Any] = {"architecture": name, "classifier": classifier}
    if classifier and problem in UNDECIDED:
        text = (
            f"{name} {UNDECIDED[problem]} (problem_type in config.json), so it has no "
            "accuracy and no margins. Its outputs are measured as features"
        )
        return facts | {"classifier": False, "notes": (Note.warn(NO_DECISION, text),)}
    known = module.config.id2label or {}  # a file may hold null
    names = [str(known.get(i, f"LABEL_{i}")) for i in range(len(known))]
    if classifier and not all(name.startswith("LABEL_") for name in names):
        facts["labels"] = tuple(names)
    return facts


def mean_pooling(result: Any, mask: Tensor | None) -> Tensor:
    """Average the last hidden state over the real tokens, or over space for feature maps.

    Raises:
        InputError: the result has no last hidden state, or its padding is unknown.
    """
    hidden = getattr(result, "last_hidden_state", None)
    if hidden is None:
        raise InputError(
            f"a {type(result).__name__} has no last hidden state to use as features",
            "Name the class as transformers does (...ForSequenceClassification), or write a py: "
            "factory that returns ModelSpec(..., read=lambda result: TENSOR).",
        )
    if hidden.ndim == 4:  # a feature map: its two equal axes are spatial
        channels_last = hidden.shape[1] == hidden.shape[2] != hidden.shape[3]
        if channels_last:
            hidden = hidden.flatten(1, 2)
        else:
            hidden = hidden.flatten(2).transpose(1, 2)
    if mask is None:
        return hidden.mean(1)
    if mask.shape[1] != hidden.shape[1]:
        raise InputError(
            f"the last hidden state has {hidden.shape[1]} tokens for texts of {mask.shape[1]}, so "
            "padding cannot be recognised",
            "Give texts of one length, as token ids in an .npz file.",
        )
    weight = mask.to(hidden.dtype)[:, :, None]
    return (hidden * weight).sum(1) / weight.sum(1)


def _read_next_token(result: Any, mask: Tensor | None) -> Tensor:
    logits: Tensor = result.logits
    if mask is None:
        return logits[:, -1]
    samples = torch.arange(len(logits), device=logits.device)
    last = mask.long().sum(1) - 1
    return logits[samples, last]


def read_tower(result: Any, mask: Tensor | None) -> Tensor:
    """Return the projected features in the result of a tower, not normalised."""
    pooled: Tensor | None = getattr(result, "pooler_output", None)
    if pooled is None:
        return mean_pooling(result, None)
    return pooled


def choose_output(
    module: Any, tower: str | None, pooling: Pooling = mean_pooling
) -> Callable[[Any], Tensor]:
    """Return the function from a pair of a result and its mask to the measured output."""
    read = pooling
    if tower is not None:
        read = read_tower
    elif is_classifier(module):
        read = _read_classes
    elif has_head(module):
        read = _read_next_token
    return lambda pair: read(*pair)


def _read_classes(result: Any, mask: Tensor | None) -> Tensor:
    # A configuration may ask for tuples (return_dict) instead of named outputs.
    logits: Tensor
    if hasattr(result, "logits"):
        logits = result.logits
    else:
        logits = result[0]
    return logits


def choose_pooling(path: Path | None) -> Pooling:
    """Return the pooling that a directory of sentence-transformers prescribes, else the mean.

    Raises:
        InputError: the pooling is neither the mean nor the first token.
    """
    if path is None or not (path / "modules.json").is_file():
        return mean_pooling
    file = path / "1_Pooling" / "config.json"
    with explain_failure(f"the pooling in {path} cannot be read", "Copy or download it again."):
        modules = read_json(path / "modules.json")
        steps = {module["type"].rpartition(".")[2] for module in modules}
        settings = {"pooling_mode": "mean"}
        if file.is_file():
            settings = read_json(file)
        # Older files have a switch for each mode.
        on: list[str] = []
        for key, value in settings.items():
            switch = SWITCH.fullmatch(key)
            if switch and value:
                on.append(switch[1])
        mode = str(settings.get("pooling_mode", "+".join(on)))
    poolings: dict[str, Pooling] = {
        "mean": mean_pooling,
        "cls": lambda result, _mask: result.last_hidden_state[:, 0],
    }
    unknown = steps - {"Transformer", "Pooling", "Normalize"}
    if unknown or mode not in poolings:
        raise InputError(
            f"{path} pools its tokens in a way that is not supported: {unknown or mode}",
            "Remove modules.json to read the mean over tokens, or write a py: factory.",
        )
    pooling = poolings[mode]
    if "Normalize" not in steps:
        return pooling
    return lambda result, mask: F.normalize(pooling(result, mask), dim=1)


# Number of texts whose token ids are cached.
READINGS = 2**14
# Prefix of WordPiece tokens that continue a word.
GOES_ON_MARK = "##"
# Prefixes of byte-level BPE and SentencePiece tokens that begin a word.
BEGINS_MARKS = ("\u0120", "\u2581")


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
    tokens = [str(token) for token in tokenizer.convert_ids_to_tokens(range(count))]
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
    reserved = frozenset({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder})
    for token in reserved:
        if token < count:
            kinds[token] = FIXED
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
            if piece is None:
                spans.append(NOWHERE)
                continue
            token = texts[piece][start:end]
            # The span of a token excludes the space around it.
            left = start + len(token) - len(token.lstrip())
            right = max(left, start + len(token.rstrip()))
            spans.append((piece, left, right))
        return tuple(encoded["input_ids"]), tuple(spans)

    def write(token: int) -> str:
        text = ""
        if mark and mark not in BEGINS_MARKS:
            text = tokens[token].removeprefix(mark)
        text = text or spell([token]).strip()
        if "\ufffd" in text:
            return ""
        return text

    return Lexicon(
        torch.tensor(kinds),
        spell,
        lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]),
        special,
        reserved,
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
        self.tokenizer = tokenizer
        self.size = size
        self.separator: int | None = getattr(tokenizer, "sep_token_id", None)
        one = tokenizer("a")
        two = tokenizer("a", "b")
        alone = list(one["input_ids"]).count(self.separator)
        both = list(two["input_ids"]).count(self.separator)
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
        ends = torch.zeros_like(x)
        if self.separator is not None:
            ends = (x == self.separator).long()
        if mask is not None:
            ends = ends * mask
        pair = ends.sum(1, keepdim=True) >= self.separators
        before = ends.cumsum(1) - ends
        return {"token_type_ids": before.clamp(max=1) * pair}

    def ids(self, *texts: str, most: int) -> list[int]:
        """Return the ids of a text, or of a pair, cut to a number of tokens.

        Raises:
            InputError: the model has no embedding for one of the ids.
        """
        ids = list(self.encode(texts, most)["input_ids"])
        largest = max(ids, default=0)
        if largest >= self.size:
            raise InputError(
                f"the tokenizer has {len(self.tokenizer)} tokens, but the model has "
                "embeddings for "
                f"only {self.size}: {texts[0][:40]!r} holds "
                f"{self.tokenizer.convert_ids_to_tokens(largest)!r}, id {largest}",
                "Use the tokenizer that the model was trained with, or train the model "
                "with a larger "
                "embedding (resize_token_embeddings).",
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


# Models that build their mask from token ids if none is given.
READS_IDS = ("cohere_compass", "dpr", "flaubert", "xlm")


def find_text_config(config: Any) -> Any:
    """Return the settings of the part that reads text, or all settings if none or several do."""
    try:
        return config.get_text_config()
    except ValueError:
        return config


def find_pad(config: Any) -> int | None:
    """Return the padding id of a configuration; None if it is not in the vocabulary."""
    pad: int | None = getattr(config, "pad_token_id", None)
    if pad is None or not 0 <= pad < config.vocab_size:
        return None
    return pad


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
    fill: int | None = pad
    if pad is None or pad == end:
        # An id that ends no text; without padding, one beyond the vocabulary, which no text has.
        size: int = config.vocab_size
        fill = size
        if mask is not None:
            last = mask.long().cumsum(1).argmax(1)
            used = {*x.gather(1, last[:, None]).flatten().tolist(), end}
            fill = next((i for i in range(size) if i not in used), None)
    if fill is None:
        taken = "no token id is free for padding: every id ends some text of the batch"
        raise InputError(taken, "Use a smaller --batch-size.")
    # A classifier finds the end of a text by the id that its configuration names.
    named = pad is None and is_classifier(module)
    with patch.object(config, "pad_token_id", fill) if named else nullcontext():
        if mask is not None:
            yield x.masked_fill(~mask, fill), mask.long()
        elif module.config.model_type in READS_IDS:
            yield x, torch.ones_like(x)
        else:
            yield x, None


MOST_TOKENS = 512
# Default length limit for models without one.
ENDLESS = 2**20


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
    size = int(config.vocab_size)
    table = None
    with suppress(NotImplementedError):  # a model with two towers
        table = getattr(module.get_input_embeddings(), "weight", None)
    if isinstance(table, Tensor) and table.ndim == 2:
        size = min(len(table), size)
    # The id whose state the model reads, if it does that: every text must end with it.
    end = None
    if tower is not None or (is_classifier(module) and module.config.is_encoder_decoder):
        end = getattr(config, "eos_token_id", None)
        if isinstance(end, list):
            end = end[0]
        if end is not None and end >= config.vocab_size:
            end = None
    facts = describe_classes(module)
    if tower is None and module.config.is_encoder_decoder:
        text = "only the encoder's embeddings are perturbed; the decoder reads the unchanged text"
        facts["notes"] = (Note.info("encoder-moves", text), *facts.get("notes", ()))
    tokenizer = load_tokenizer(path)
    feed = None
    if tokenizer is not None:
        feed = Feed(module, tokenizer, size)
        facts["tokenize"] = lambda text, most: feed.ids(text, most=most)
        facts["tokenize_pair"] = lambda first, second, most: feed.ids(first, second, most=most)
        facts["unknown_id"] = feed.unknown
        if getattr(tokenizer, "is_fast", False):
            facts["lexicon"] = partial(read_lexicon, tokenizer, size, feed.encode)
    if tower is None and type(module).__name__.endswith(tuple(LANGUAGE_MODELS)):
        if "inputs_embeds" in inspect.signature(module.forward).parameters:
            facts["next_logits"] = partial(_score_next, module, feed)
        head = module.get_output_embeddings()
        if head is not None:
            facts["next_token"] = NextToken(head, lambda out: out[0].logits)
    return ModelSpec(
        module,
        (limit_tokens(module, config, tokenizer),),
        kind="text",
        vocabulary=size,
        pad_id=find_pad(config),
        end_id=end,
        call=_make_call(module, tower, feed, end),
        read=choose_output(module, tower, choose_pooling(path)),
        **facts,
    )


def _make_call(
    module: Any, tower: str | None, feed: Feed | None, end: int | None
) -> Callable[[Tensor, Tensor | None], Any]:
    """Return a function that runs a model on ids and their mask, and passes the mask on."""
    run = module
    if tower is not None:
        run = getattr(module, f"get_{tower}_features")
    config = module.config
    decoder = tower is None and config.is_encoder_decoder and not has_head(module)

    def call(x: Tensor, mask: Tensor | None) -> Any:
        with pad_inputs(module, x, mask, end) as (ids, attention):
            inputs: dict[str, Any] = {}
            if feed is not None:
                inputs = feed.types(ids, mask)
            if decoder:
                # The decoder of a model without a head reads the same text, one token later.
                begin = (getattr(config, "decoder_start_token_id", None), find_pad(config), 0)
                start = torch.full_like(x[:, :1], next(i for i in begin if i is not None))
                inputs["decoder_input_ids"] = torch.cat([start, ids[:, :-1]], 1)
                inputs["decoder_attention_mask"] = None if mask is None else mask.long()
            return run(attention_mask=attention, input_ids=ids, **inputs), mask

    return call


def _score_next(module: Any, feed: Feed | None, z: Tensor, first: int) -> Tensor:
    """Return the next-token logits of embeddings, from position `first` on."""
    last = z.shape[1] - first
    # The logits of a prompt are large, and not needed.
    keeps = "logits_to_keep" in inspect.signature(module.forward).parameters
    inputs: dict[str, Any] = {}
    if keeps:
        inputs = {"logits_to_keep": last}
    if feed is not None:
        inputs |= feed.types(z.new_full(z.shape[:2], -1, dtype=torch.long))
    logits: Tensor = module(inputs_embeds=z, **inputs).logits
    return logits[:, -last:]


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


def limit_tokens(module: Any, config: Any, tokenizer: Any) -> int:
    """Return the largest number of tokens; tokenizers without a limit say 1e30.

    Relative positions, as in T5, have no limit, whatever the tokenizer says.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if not positions and hasattr(config, "relative_attention_num_buckets"):
        return ENDLESS
    limits = [getattr(tokenizer, "model_max_length", None), positions]
    for name, table in module.named_modules():
        placed = name.endswith("position_embeddings") and isinstance(table, nn.Embedding)
        if placed and table.padding_idx is not None:
            # RoBERTa counts positions from behind the padding id.
            limits.append(table.num_embeddings - 1 - table.padding_idx)
    return min((int(n) for n in limits if n and 0 < n < 10**6), default=MOST_TOKENS)
