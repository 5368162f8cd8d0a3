"""Classifiers of models that have no classes: zero-shot, and by the scores of continuations.

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
from lipaudit.errors import InputError, UsageError, explain_failure, few
from lipaudit.models.net import ModelSpec, Net
from lipaudit.models.precision import exact_arithmetic, lift_parameters, widen_half
from lipaudit.models.requirements import agree
from lipaudit.models.sources import text_models
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
    advice = f"{flag} takes a text file with one class name per line."
    if flag == "--classes":
        advice = f"{advice.removesuffix('.')}; only train takes a number."
    with explain_failure(f"{path} cannot be read as class names", advice, OSError, ValueError):
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    stripped = map(str.strip, lines)
    names = tuple(name for name in stripped if name)
    if len(names) < 2:
        raise InputError(f"{path} has {len(names)} class names: two are needed", advice)
    # Labels of data are matched without case, and with spaces for underscores.
    counts = Counter(name.casefold().replace("_", " ") for name in names)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise InputError(
            f"{path} has a class name twice: {few(twice)}", "Give each class its own name."
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
            f"--prompt {few(wrong)!r} must have one {{}} for the class name",
            f"For example --prompt '{PROMPT}'.",
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
    names = spec.labels or ()
    kind = type(module).__name__
    tokenizer = text_models.load_tokenizer(path)
    if tokenizer is None:
        raise InputError(
            f"{kind} has no tokenizer in its folder, and --classes needs it",
            "Copy tokenizer.json and tokenizer_config.json into it.",
        )
    config = text_models.find_text_config(module.config)
    most = text_models.limit_tokens(module, config, tokenizer)
    texts = [prompt.replace("{}", name) for name in names for prompt in prompts]
    # SigLIP was trained on padded texts, and reads the last position.
    fill: dict[str, Any] = {"padding": True}
    if module.config.model_type.startswith("siglip"):
        fill = {"padding": "max_length", "max_length": most}
    tokens = dict(tokenizer(texts, return_tensors="pt", **fill))
    length = tokens["input_ids"].shape[1]
    if length > most:
        raise InputError(
            f"a prompt has {length} tokens, and {kind} reads at most {most}",
            "Shorten --prompt or the names of the classes.",
        )
    known = inspect.signature(module.get_text_features).parameters
    inputs = {key: value for key, value in tokens.items() if key in known}

    @cache  # computed once per run, in its precision, on the blank sample of loading
    def embed_classes(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return weight (classes, width) and bias of the last layer."""
        with torch.inference_mode(False), torch.no_grad():
            ids = {key: value.to(device) for key, value in inputs.items()}
            texts = _embed_texts(module, ids, dtype)
            scale = module.logit_scale.to(device, dtype).exp()
            bias = getattr(module, "logit_bias", torch.zeros(1)).to(device, dtype)
            blank = torch.zeros(1, *spec.input_shape, device=device, dtype=dtype)
            _require_cosines(module, blank, ids, scale * texts, bias)
            classes = texts.view(len(names), len(prompts), -1).mean(1)
            return scale * F.normalize(classes, dim=-1), bias

    def read(result: Any) -> Tensor:
        features = widen_half(text_models.read_tower(*result))
        weight, bias = embed_classes(features.device, features.dtype)
        return F.normalize(features, dim=-1) @ weight.T + bias

    shown = " | ".join(prompts)
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]
    facts = f"{len(names)} classes (sha256 {digest}), prompt {shown!r}"
    text = (
        f"zero-shot classifier with {len(names)} classes: {kind} compares images with {shown!r}, "
        "and the text embeddings are fixed"
    )
    notes = (Note.info("zero-shot", text), *spec.notes)
    preprocess = {**spec.preprocess, "zero-shot": facts}
    return replace(spec, read=read, preprocess=preprocess, notes=notes)


def _embed_texts(module: Any, ids: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return the normalised embeddings of texts, (texts, width)."""
    features = []
    for start in range(0, len(ids["input_ids"]), TEXTS):
        chunk = {key: value[start : start + TEXTS] for key, value in ids.items()}
        output = module.get_text_features(**chunk)
        features.append(text_models.read_tower(output, None))
    embeddings = torch.cat(features).to(dtype)
    return F.normalize(embeddings, dim=-1)


def _require_cosines(
    module: Any, blank: Tensor, ids: dict[str, Tensor], weight: Tensor, bias: Tensor
) -> None:
    """Check, on an image and two texts, that the model's own logits are scale * cosine + bias.

    Args:
        module: the image-text model.
        blank: an image, (1, channels, height, width).
        ids: what its text tower reads.
        weight: scale * the normalised embeddings of the texts.
        bias: of the logits.

    Raises:
        InputError: they are not.
    """
    two = {key: value[:2] for key, value in ids.items()}
    own = module(pixel_values=blank, **two).logits_per_image
    output = module.get_image_features(pixel_values=blank)
    image = F.normalize(text_models.read_tower(output, None), dim=-1)
    rest = own - image @ weight[:2].T - bias
    size = own.abs().max().clamp(min=1)
    if not rest.abs().max() <= DEVIATION * size:  # NaN is refused, too
        raise InputError(
            f"{type(module).__name__} computes its logits in another way than scale * cosine + "
            "bias",
            "Write a py: factory that returns a ModelSpec with its own `read`.",
        )


def score_continuations(net: Net, task: Task, how: Score) -> Net:
    """Return a language model as a classifier of the possible continuations of a prompt.

    A score is log p(continuation | prompt): the sum, or the mean, over its tokens t of log p(t |
    tokens before t). A single continuation gets a rival: the same continuation with its weakest
    token (the one least ahead of the likeliest other token) replaced by that other token. The
    continuation is ahead of its rival exactly if greedy decoding gives all of its tokens.

    Samples are packed (see `data.continuations.pack`). The attacked space is the embeddings of the
    prompt; the embeddings of the continuation do not change.

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
    count = len(task.classes)
    if task.kind == "continuation":
        count = 0
    what = f"{task.kind} ({', '.join(task.classes)})"
    note = Note.info("scores", f"scores are log-likelihoods, {PER[how]}, of the {what}")

    def call(x: Tensor, mask: Tensor | None) -> Tensor:
        return _score_rows(net, entry, x, mask, how, count)

    return replace(
        net,
        labels=task.classes,
        notes=(*net.notes, note),
        call=lift_parameters(call),
        read=lambda scores: scores,
        classes=len(task.classes),
        scored=task.kind,
        form="logits",
    )


def _score_rows(
    net: Net, entry: nn.Module, x: Tensor, mask: Tensor | None, how: Score, count: int
) -> Tensor:
    """Return the scores of each sample, (batch, classes).

    Args:
        net: the language model.
        entry: its embedding layer.
        x: packed samples (batch, tokens).
        mask: True at their tokens.
        how: sum or mean over tokens.
        count: number of continuations of a prompt; 0: a single one and its rival.
    """
    assert net.next_logits is not None
    vocabulary = net.vocabulary or 0
    ids = x % vocabulary
    part = x // vocabulary
    if mask is not None:
        part = part.masked_fill(~mask, -1)
    # The model gets a row for each continuation: the prompt, the continuation, and tokens behind
    # it, which the continuation does not see. (batch, rows, length)
    each = torch.arange(1, max(count, 1) + 1, device=x.device)[:, None]
    prompt = part == 0
    answer = part[:, None] == each
    wanted = prompt[:, None] | answer
    length = int(wanted.sum(2).max())
    order = wanted.int().argsort(dim=2, descending=True, stable=True)
    order = order[..., :length]
    follows = answer.gather(2, order).flatten(0, 1)
    # Prompts and continuations are embedded separately, so that replacing the first output of
    # `entry` changes prompts only.
    moving = entry(ids)
    still = entry(ids)
    z = torch.where(prompt[..., None], moving, still)
    samples = torch.arange(len(z), device=z.device)[:, None, None]
    z = z[samples, order].flatten(0, 1)
    first = int(follows.int().argmax(1).min()) - 1
    where = follows[:, first + 1 :]
    every = ids[samples, order].flatten(0, 1)
    tokens = every[:, first + 1 :][where][:, None]
    # No score needs the logits behind the last token. Without it, all continuations of one token
    # have the same row, the prompt, which runs once.
    single = answer.sum(2) == 1
    numbers = torch.arange(single.shape[1], device=x.device)
    shared = torch.where(single, single.int().argmax(1)[:, None], numbers)
    runs = (shared == numbers).flatten()
    row_of = (samples[..., 0] * len(numbers) + shared).flatten()
    run_of = runs.cumsum(0)[row_of] - 1
    logits = net.next_logits(z[runs, :-1], first)
    rows, places = where.nonzero(as_tuple=True)
    logs = widen_half(logits[run_of[rows], places]).log_softmax(1)
    chosen = logs.gather(1, tokens)[:, 0]
    divisor: Any = 1
    if how == "mean":
        divisor = where.sum(1)
    table = chosen.new_zeros(where.shape).index_put((where,), chosen)
    scores = table.sum(1) / divisor
    if count:
        return scores.view(-1, count)
    # The likeliest other token at each place: greedy decoding takes it where it is ahead.
    other = logs.scatter(1, tokens, -math.inf).amax(1)
    table = chosen.new_full(where.shape, math.inf).index_put((where,), chosen - other)
    ahead = table.amin(1)
    return torch.stack([scores, scores - ahead / divisor], 1)


def _require_causal(net: Net, entry: nn.Module) -> None:
    """Check that a token's logits depend on the embeddings up to that token, and on no others."""
    size = min(TRIED, *net.input_shape)
    ids = torch.arange(1, size + 1, device=net.device)[None] % (net.vocabulary or size)

    next_logits = net.next_logits
    assert next_logits is not None
    score = lift_parameters(lambda z: next_logits(z, 0))
    with exact_arithmetic(net.device), torch.no_grad():
        z = lift_parameters(entry)(ids)
        whole = score(z)
        start = score(z[:, :-1])
        usual = net.output(Batch(ids, None, ("",)))
        with torch.enable_grad():
            moved = z.detach().requires_grad_()
            first = score(moved)[:, 0]
            (ahead,) = torch.autograd.grad(first.square().sum(), moved)
    advice = "Use a causal language model, or leave --score out."
    if not agree(usual, whole[:, -1], AGREES):
        raise InputError(
            f"{net.architecture} gives different logits for embeddings and for their token ids: "
            "it cannot score continuations",
            advice,
        )
    if bool((ahead[:, 1:] != 0).any()) or not agree(start, whole[:, :-1], AGREES):
        raise InputError(
            f"{net.architecture} looks at later tokens: it cannot score continuations", advice
        )
