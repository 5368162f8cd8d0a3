"""Classifiers from models without classes: zero-shot, and by the scores of continuations.

Zero-shot classifiers are made of image-text models, as in Radford et al., Learning Transferable
Visual Models From Natural Language Supervision (arXiv 2103.00020, section 3.1): the text
embeddings of class names are the last layer of the image tower. A class is the mean of the
normalised embeddings of its prompts, normalised again. The logits are `scale * cosine + bias`, as
the model's own code computes them. The sigmoid of SigLIP keeps their order, so the prediction is
the same.

Language models score continuations of a prompt: each score acts as the logit of a class.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipaudit.data.batch import Batch, Task
from lipaudit.errors import InputError, UsageError, explain_failure, join_few
from lipaudit.models.net import ModelSpec, Net
from lipaudit.models.precision import exact_arithmetic, lift_parameters, widen_half
from lipaudit.models.requirements import agree
from lipaudit.models.sources import text_models, transformer_outputs
from lipaudit.tables import Note

# The prompt of Radford et al.
PROMPT = "a photo of a {}"
# Number of prompts per pass of the text tower.
TEXTS = 64
# Largest relative deviation from the logits of the model's own code, in float32.
DEVIATION = 1e-4

Score = Literal["sum", "mean"]
PER = {"sum": "summed over their tokens", "mean": "the mean of their tokens"}
# Largest accepted relative difference between two ways to run a model; far above rounding.
AGREES = 1e-3
# Number of tokens used for that comparison.
TRIED = 6


def read_class_names(path: Path, flag: str = "--classes") -> tuple[str, ...]:
    """Read the names of classes from a text file, one per line; empty lines do not count.

    Args:
        path: the file.
        flag: the option that names it, for messages.

    Raises:
        InputError: the file cannot be read, has fewer than two names, or a name twice.
    """
    advice = f"{flag} takes a text file with one class name per line"
    # `lipaudit train` has an option --classes that takes a number.
    advice += "; only train takes a number." if flag == "--classes" else "."
    with explain_failure(f"{path} cannot be read as class names", advice, OSError, ValueError):
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    names = tuple(filter(None, map(str.strip, lines)))
    if len(names) < 2:
        raise InputError(f"{path} has {len(names)} class names: two are needed", advice)
    # Labels of data are matched without case, and with spaces for underscores.
    counts = Counter(name.casefold().replace("_", " ") for name in names)
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise InputError(
            f"{path} has a class name twice: {join_few(repeated)}", "Give each class its own name."
        )
    return names


def read_prompts(text: str | None) -> tuple[str, ...]:
    """Read the prompts of --prompt, separated by |.

    Raises:
        UsageError: a prompt does not have exactly one {} for the class name.
    """
    if text is None:
        text = PROMPT
    prompts = tuple(map(str.strip, text.split("|")))
    wrong = [prompt for prompt in prompts if prompt.count("{}") != 1]
    if wrong:
        raise UsageError(
            f"--prompt {join_few(wrong)!r} must have one {{}} for the class name",
            f"For example --prompt '{PROMPT}'.",
        )
    return prompts


def make_zero_shot(
    module: Any, spec: ModelSpec, prompts: Sequence[str], path: Path | None
) -> ModelSpec:
    """Make a classifier from the image tower of an image-text model, such as CLIP.

    The logit of a class is scale * cosine + bias, with the cosine between the features of the
    image and the mean text embedding of the class.

    Args:
        module: a model of transformers.
        spec: description of the image tower, with the names of the classes.
        prompts: texts with {} for the name of a class.
        path: directory of the tokenizer.

    Raises:
        InputError: the tokenizer is missing, a prompt is too long, or the model's own code
            computes other logits.
    """
    names = spec.labels or ()
    texts = [prompt.replace("{}", name) for name in names for prompt in prompts]
    inputs = _tokenize(module, texts, path)

    @cache  # computed on the first call, which is made while the model is loaded
    def embed_classes(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return weight (classes, width) and bias (1,) of a linear layer on normalised features.

        The weight of a class is the mean embedding of its prompts, normalised, times the model's
        logit scale.
        """
        # Inference mode is off: its tensors could not become part of a graph later.
        with torch.inference_mode(False), torch.no_grad():
            ids = {key: value.to(device) for key, value in inputs.items()}
            embeddings = _embed_texts(module, ids, dtype)
            scale = module.logit_scale.to(device, dtype).exp()
            # SigLIP has a bias, CLIP has none.
            bias = getattr(module, "logit_bias", torch.zeros(1)).to(device, dtype)
            # Refuse a model whose own code computes other logits, on a blank image.
            blank = torch.zeros(1, *spec.input_shape, device=device, dtype=dtype)
            _require_cosines(module, blank, ids, scale * embeddings, bias)
            by_class = embeddings.view(len(names), len(prompts), -1)
            return scale * F.normalize(by_class.mean(1), dim=-1), bias

    def read(result: Any) -> Tensor:
        """Return the logits of images, (batch, classes): scale * cosine + bias.

        Args:
            result: the output of the image tower, and a mask.
        """
        features = widen_half(transformer_outputs.read_tower(*result))
        weight, bias = embed_classes(features.device, features.dtype)
        return F.normalize(features, dim=-1) @ weight.T + bias

    # Facts for the report: the classes, by number and hash, and the prompts.
    shown = " | ".join(prompts)
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]
    facts = f"{len(names)} classes (sha256 {digest}), prompt {shown!r}"
    notes = (
        Note.info(
            "zero-shot",
            f"zero-shot classifier with {len(names)} classes: {type(module).__name__} compares "
            f"images with {shown!r}, and the text embeddings are fixed",
        ),
        *spec.notes,
    )
    return replace(
        spec, read=read, preprocess={**spec.preprocess, "zero-shot": facts}, notes=notes
    )


def _tokenize(module: Any, texts: Sequence[str], path: Path | None) -> dict[str, Tensor]:
    """Return the inputs of the text tower (input_ids, attention_mask), each (texts, tokens).

    Args:
        module: the image-text model.
        texts: the texts.
        path: directory of the tokenizer.

    Raises:
        InputError: there is no tokenizer, or a text is too long.
    """
    kind = type(module).__name__
    tokenizer = text_models.load_tokenizer(path)
    if tokenizer is None:
        raise InputError(
            f"{kind} has no tokenizer in its folder, and --classes needs it",
            "Copy tokenizer.json and tokenizer_config.json into it.",
        )
    limit = text_models.limit_tokens(module, tokenizer)
    # SigLIP reads the state at the last position, and was trained with texts padded to the limit.
    padding: dict[str, Any] = {"padding": True}
    if module.config.model_type.startswith("siglip"):
        padding = {"padding": "max_length", "max_length": limit}
    tokens = tokenizer(texts, return_tensors="pt", **padding)
    length = tokens["input_ids"].shape[1]
    if length > limit:
        raise InputError(
            f"a prompt has {length} tokens, and {kind} reads at most {limit}",
            "Shorten --prompt or the names of the classes.",
        )
    # The tokenizer may return more than the tower takes, such as token types.
    expected = inspect.signature(module.get_text_features).parameters
    return {key: value for key, value in tokens.items() if key in expected}


def _embed_texts(module: Any, ids: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return the normalised embeddings of texts, (texts, width).

    Args:
        module: the image-text model.
        ids: inputs of the text tower (input_ids, attention_mask), each (texts, tokens).
        dtype: dtype of the embeddings.
    """
    features = []
    # In chunks of `TEXTS` texts, to bound the memory.
    for start in range(0, len(ids["input_ids"]), TEXTS):
        chunk = {key: value[start : start + TEXTS] for key, value in ids.items()}
        output = module.get_text_features(**chunk)
        features.append(transformer_outputs.read_tower(output, mask=None))
    return F.normalize(torch.cat(features).to(dtype), dim=-1)


def _require_cosines(
    module: Any, blank: Tensor, ids: dict[str, Tensor], weight: Tensor, bias: Tensor
) -> None:
    """Check, on an image and two texts, that the model's own logits are scale * cosine + bias.

    Args:
        module: the image-text model.
        blank: an image, (1, channels, height, width).
        ids: inputs of the text tower (input_ids, attention_mask), each (texts, tokens).
        weight: scale * the normalised embeddings of the texts, (texts, width).
        bias: (1,).

    Raises:
        InputError: the model computes its logits in another way.
    """
    two_texts = {key: value[:2] for key, value in ids.items()}
    logits = module(pixel_values=blank, **two_texts).logits_per_image
    output = module.get_image_features(pixel_values=blank)
    image = F.normalize(transformer_outputs.read_tower(output, mask=None), dim=-1)
    difference = logits - image @ weight[:2].T - bias
    size = logits.abs().max().clamp(min=1)
    if not difference.abs().max() <= DEVIATION * size:  # NaN is refused, too
        raise InputError(
            f"{type(module).__name__} computes its logits in another way than scale * cosine + "
            "bias",
            "Write a py: factory that returns a ModelSpec with its own `read`.",
        )


def score_continuations(net: Net, task: Task, how: Score) -> Net:
    """Return a language model as a classifier of the possible continuations of a prompt.

    A score is log p(continuation | prompt): the sum, or the mean, of log p(t | tokens before t)
    over the tokens t of the continuation.

    A classifier needs a second class. So a single continuation is compared with a rival: the same
    continuation with one token replaced. At each token, the lead is log p(token) minus log p of
    the likeliest other token. The token with the smallest lead is replaced by that other token.
    All other terms of the rival's score are those of the continuation, so its score is lower by
    the smallest lead. So the continuation scores higher than its rival exactly if all leads are
    positive: if greedy decoding gives all its tokens.

    Samples are packed (see `data.continuations.pack`). The attacked space is the embeddings of the
    prompt; the embeddings of the continuation do not change.

    Args:
        net: the language model.
        task: the kind of question, and the names of the classes.
        how: sum or mean over the tokens of a continuation.

    Raises:
        InputError: the logits of a token depend on more than the embeddings up to that token.
    """
    entry = net.entry
    if entry is None:
        raise InputError(
            f"the embedding layer of {net.architecture} was not found",
            "Write a py: factory that returns a ModelSpec with its `entry`.",
        )
    _require_causal(net, entry)
    # Number of continuations of each prompt. 0 stands for a single continuation: the classes are
    # then this continuation and its rival.
    count = len(task.classes)
    if task.kind == "continuation":
        count = 0
    continuations = f"{task.kind} ({', '.join(task.classes)})"
    note = Note.info("scores", f"scores are log-likelihoods, {PER[how]}, of the {continuations}")

    def call(x: Tensor, mask: Tensor | None) -> Tensor:
        return _score_rows(net, entry, x, mask, how, count)

    return replace(
        net,
        labels=task.classes,
        notes=(*net.notes, note),
        # `call` replaces that of the model, so it must again let the model's own code see weights
        # in the precision of the run if they stay in half precision as stored (--weights stored).
        call=lift_parameters(call),
        read=lambda scores: scores,
        classes=len(task.classes),
        scored=task.kind,
        form="logits",
    )


def _score_rows(
    net: Net, entry: nn.Module, x: Tensor, mask: Tensor | None, how: Score, count: int
) -> Tensor:
    """Return the scores of each sample, (batch, classes): log p of continuations of a prompt.

    1. A packed sample is split into one row per continuation, which has the prompt and that
       continuation: [a b | c | d e] becomes [a b c *] and [a b d e]. The shorter row is filled up
       with any token (*) of the sample, which is not scored.
    2. The rows are embedded, so that attacks change the prompt only.
    3. The model runs on the rows without their last tokens, [a b c] and [a b d]. Its logits at b,
       the last token of the prompt, score c and d. Its logits at d score e.
    4. log p of the tokens of each continuation is summed or averaged.

    Args:
        net: the language model.
        entry: its embedding layer.
        x: packed samples (batch, tokens): a prompt, then its continuations, where a token of
            continuation i = 1, 2, ... is its id + i * vocabulary.
        mask: True at tokens of the samples, False at padding; None without padding.
        how: sum or mean over tokens.
        count: number of continuations of a prompt; 0: a single continuation, which gets a rival.
    """
    assert net.next_logits is not None
    # Step 1.
    vocabulary = net.vocabulary or 0
    ids = x % vocabulary
    part = x // vocabulary  # 0: the prompt; i: continuation i; -1: padding
    if mask is not None:
        part = part.masked_fill(~mask, -1)
    # Row i has the prompt and continuation i.
    numbers = torch.arange(1, max(count, 1) + 1, device=x.device)[:, None]
    in_prompt = part == 0  # (batch, tokens)
    in_continuation = part[:, None] == numbers  # (batch, rows, tokens)
    columns = _list_columns(in_prompt[:, None] | in_continuation)  # (batch, rows, length)
    # From here on, the rows of all samples follow one another: (batch * rows, length).
    samples = torch.arange(len(x), device=x.device)[:, None, None]
    row_ids = ids[samples, columns].flatten(0, 1)
    is_scored = in_continuation.gather(2, columns).flatten(0, 1)
    # Step 2. Attacks replace the output of the first call of `entry`. Prompts take their
    # embeddings from this call, and continuations from a second call. So attacks change prompts
    # only.
    of_prompts = entry(ids)
    of_continuations = entry(ids)
    z = torch.where(in_prompt[..., None], of_prompts, of_continuations)
    z = z[samples, columns].flatten(0, 1)
    # Step 3. Logits at a position score the next token. They are needed from the last token of the
    # shortest prompt (`first`) up to the last token but one of a row.
    # In the example, first = 1, the position of b.
    first = int(is_scored.int().argmax(1).min()) - 1
    # Rows with the same input run once. The last token of a row is never an input, so rows of a
    # sample with continuations of one token have the same input, the prompt. `is_run` marks the
    # rows that run, and `run_of_row` is the number of the run of each row.
    is_run, run_of_row = _merge_equal_rows(in_continuation.sum(2) == 1)
    # The model computes logits from position `first` on.
    logits = net.next_logits(z[is_run, :-1], first)  # (runs, length - 1 - first, vocabulary)
    # Step 4. The logits at position t score token t + 1 of a row: leave out all tokens before
    # first + 1.
    is_scored = is_scored[:, first + 1 :]
    tokens = row_ids[:, first + 1 :][is_scored][:, None]  # the scored tokens of all rows
    rows, positions = is_scored.nonzero(as_tuple=True)
    # log p of every id at each scored token, (scored tokens, vocabulary)
    logs = widen_half(logits[run_of_row[rows], positions]).log_softmax(1)
    return _sum_log_probabilities(logs, tokens, is_scored, how, count)


def _list_columns(in_row: Tensor) -> Tensor:
    """Return the columns of the tokens of each row, in their order: (batch, rows, length).

    Shorter rows are filled up with other tokens at the end. In a causal model, these do not change
    the logits of the tokens before.

    Args:
        in_row: whether a token of a sample belongs to a row, (batch, rows, tokens).
    """
    length = int(in_row.sum(2).max())  # of the longest row
    # Sorting puts the columns of the row first; a stable sort keeps the order of the tokens.
    columns = in_row.int().argsort(dim=2, descending=True, stable=True)
    return columns[..., :length]


def _sum_log_probabilities(
    logs: Tensor, tokens: Tensor, is_scored: Tensor, how: Score, count: int
) -> Tensor:
    """Return the scores of each sample from log p at every scored token.

    The scores are (batch, count) for several continuations of a prompt. A margin needs a second
    class. So a single continuation is compared with a rival, one token of which differs: the
    scores are (batch, 2), the continuation first.

    Args:
        logs: log p of every id at each scored token, (scored tokens, vocabulary).
        tokens: the ids of the scored tokens, (scored tokens, 1).
        is_scored: True where the scored tokens are, (batch * rows, positions). A row is one
            continuation of one sample.
        how: sum or mean over tokens.
        count: number of continuations of a prompt; 0: a single continuation, which gets a rival.
    """
    log_p = logs.gather(1, tokens)[:, 0]  # of the scored tokens themselves
    divisor: Any = 1
    if how == "mean":
        divisor = is_scored.sum(1)
    # Put the values back to their rows and positions, with 0 at all others, to sum over a row.
    table = log_p.new_zeros(is_scored.shape).index_put((is_scored,), log_p)
    scores = table.sum(1) / divisor
    if count:
        return scores.view(-1, count)
    # At each token, the lead is log p of the token minus log p of the likeliest other id. The
    # rival is the same continuation, but its token with the smallest lead is replaced by that
    # other id. So the rival's score is lower by this lead.
    other = logs.scatter(1, tokens, -math.inf).amax(1)
    table = log_p.new_full(is_scored.shape, math.inf).index_put((is_scored,), log_p - other)
    lead = table.amin(1)
    return torch.stack([scores, scores - lead / divisor], 1)


def _merge_equal_rows(is_single: Tensor) -> tuple[Tensor, Tensor]:
    """Find rows with the same input, so that the model runs only one of them.

    A row is a prompt with one continuation, and the model reads all tokens of a row but the last.
    If the continuation is a single token, the model reads the prompt alone. So all rows of a
    sample with such continuations have the same input, and only the first of them runs.

    Args:
        is_single: whether the continuation of a row is a single token, (batch, rows).

    Returns:
        A mask of the rows that run, (batch * rows,). And for each row the index, among the rows
        that run, of the row with the same result.
    """
    rows = torch.arange(is_single.shape[1], device=is_single.device)
    first_single = is_single.int().argmax(1)[:, None]
    # For each row, the row of the same sample that runs for it: (batch, rows).
    running_row = torch.where(is_single, first_single, rows)
    is_run = (running_row == rows).flatten()
    # The same among the rows of all samples, which follow one another: (batch * rows,).
    samples = torch.arange(len(is_single), device=is_single.device)[:, None]
    running_row = (samples * len(rows) + running_row).flatten()
    run_number = is_run.cumsum(0) - 1  # 0 for the first row that runs, 1 for the second, ...
    return is_run, run_number[running_row]


def _require_causal(net: Net, entry: nn.Module) -> None:
    """Refuse a language model whose logits at a token depend on later tokens.

    There are two tests. Without the last token, the logits at all other tokens must be the same
    up to a tolerance. And the gradient of the logits at the first token must be exactly 0 at all
    later embeddings: this shows an influence that is below the tolerance. Also, embeddings must
    give the same logits as their token ids.

    Args:
        net: the language model.
        entry: its embedding layer.
    """
    # A text of `size` ids, all in the vocabulary: 1, 2, 3, ...
    size = min(TRIED, *net.input_shape)
    ids = torch.arange(1, size + 1, device=net.device)[None] % (net.vocabulary or size)

    next_logits = net.next_logits
    assert next_logits is not None
    # The logits at all tokens, from position 0 on. If weights stay in half precision as stored,
    # the model's own code must find copies in the dtype of the run: `lift_parameters` provides
    # them.
    score = lift_parameters(lambda embeddings: next_logits(embeddings, 0))
    with exact_arithmetic(net.device), torch.no_grad():
        z = lift_parameters(entry)(ids)
        logits = score(z)
        without_last = score(z[:, :-1])
        logits_of_ids = net.output(Batch(ids, y=None, ids=("",)))
        # The gradient of the logits at the first token, with respect to all embeddings. Of
        # squares, because the plain sum of centred logits is constant.
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            first = score(leaf)[:, 0]
            (gradient,) = torch.autograd.grad(first.square().sum(), leaf)
    reads_later_tokens = gradient[:, 1:].any()
    advice = "Use a causal language model, or leave --score out."
    if not agree(logits_of_ids, logits[:, -1], AGREES):
        raise InputError(
            f"{net.architecture} gives different logits for embeddings and for their token ids: "
            "it cannot score continuations",
            advice,
        )
    if reads_later_tokens or not agree(without_last, logits[:, :-1], AGREES):
        raise InputError(
            f"{net.architecture} looks at later tokens: it cannot score continuations", advice
        )
