"""The function whose Jacobian is computed, from an input of the model to an output.

The head of a language model maps every position of a text to the vocabulary. Here the head gets
only the requested position: the logits of a long text would be larger than everything else
together. Only the loss of a language model needs the logits of all positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lipaudit.data.batch import Batch
from lipaudit.errors import EvaluationError, InputError, is_machine_error
from lipaudit.models.linearize import Function
from lipaudit.models.net import Net, NextToken, watch_modules
from lipaudit.models.outputs import is_saturated
from lipaudit.models.precision import exact_arithmetic
from lipaudit.models.requirements import AGREES, agree
from lipaudit.tables.trials import PLACED, Target

TRIED = 8
"""Number of tokens used to check the head."""

Forward = Callable[[], Any]
"""Runs the model on given samples and returns its raw result."""


def find_places(batch: Batch, where: str) -> Tensor:
    """Return the column of the token at a position in every text of a batch, (samples,).

    Positions count the tokens without padding, which may be on either side.

    Args:
        batch: the texts.
        where: "last", or an index of a token as text, from the end if negative ("-2").

    Returns:
        The column; -1 for texts without this position.
    """
    is_token = find_tokens(batch)
    # A stable sort by "is padding" puts padding last and keeps the order of the tokens.
    # columns[b, i] is then the column of the i-th token of text b.
    columns = torch.argsort((~is_token).long(), dim=1, stable=True)
    lengths = is_token.sum(1, keepdim=True)  # (samples, 1)
    position = -1 if where == "last" else int(where)
    positions = torch.full_like(lengths, position)
    if position < 0:  # counted from the end
        positions += lengths
    exists = (positions >= 0) & (positions < lengths)
    column = columns.gather(1, positions.where(exists, 0))
    return column.masked_fill(~exists, -1)[:, 0]


def find_tokens(batch: Batch) -> Tensor:
    """Return a mask of the columns of texts that are tokens, not padding, (samples, columns)."""
    if batch.mask is None:
        return torch.ones_like(batch.x, dtype=torch.bool)
    return batch.mask


def compute_next_logits(scorer: NextToken, place: Tensor, forward: Forward) -> Tensor:
    """Return the logits of the token after column `place` of every sample, (samples, vocabulary).

    The head runs on the hidden states of these columns only, (samples, 1, width). So the logits of
    all other positions are never computed.

    Args:
        scorer: the head of the language model, and how to read its logits.
        place: the column of each sample, (samples,).
        forward: runs the model on the samples.
    """
    with _replace_head_input(scorer, lambda states: pick_columns(states, place)[:, None]):
        return scorer.read(forward())[:, 0]


def pick_columns(states: Tensor, place: Tensor) -> Tensor:
    """Return states[b, place[b]] of every sample b, (samples, width)."""
    samples = torch.arange(len(states), device=states.device)
    return states[samples, place.to(states.device)]


def compute_text_loss(part: Batch, logits: Tensor) -> Tensor:
    """Return the mean cross-entropy of each text's own next tokens, in nat, (samples, 1).

    The loss of the tokens x_0, ..., x_(n - 1) of a text is L = -1 / (n - 1) sum_(t = 1)^(n - 1)
    log p(x_t | x_0, ..., x_(t - 1)). A text of one token has no loss (NaN).

    Args:
        part: the texts, with a mask of their tokens.
        logits: (samples, tokens, vocabulary).
    """
    is_token = find_tokens(part).to(logits.device)  # the head may be on another device
    # A token is scored if it and the token before it are no padding.
    scored = is_token[:, :-1] & is_token[:, 1:]
    # Select the scored tokens before the loss. A loss of NaN at padding would stay NaN if it were
    # multiplied by zero afterwards.
    tokens = part.x.to(logits.device)[:, 1:][scored]
    predictions = logits[:, :-1][scored]
    losses = F.cross_entropy(predictions, tokens, reduction="none")  # all texts, one after another
    text = scored.nonzero()[:, 0]  # the text of each loss
    sums = logits.new_zeros(len(logits)).index_add(0, text, losses)
    means = sums / scored.sum(1)
    return means[:, None]


def scores_each_token(net: Net, batch: Batch) -> bool:
    """Say whether the head of a language model scores each position separately.

    If so, the head can run on the hidden states of one position. The test takes a few tokens, and
    compares the logits of the last token: once the head runs on all tokens, and once on the last
    token only.
    """
    scorer = net.next_token
    text = batch.x[:1, :TRIED].to(net.device)
    if scorer is None or not text.numel():
        return False
    last_column = text.new_tensor([text.shape[1] - 1])

    with exact_arithmetic(net.device), torch.no_grad():
        all_logits = scorer.read(net.call(text, None))[0]  # (tokens, vocabulary)
        try:
            last_logits = compute_next_logits(scorer, last_column, lambda: net.call(text, None))
        except (IndexError, RuntimeError, ValueError) as error:
            if is_machine_error(error):
                raise
            return False  # the head does not accept the states of a single position
    return agree(all_logits[-1:], last_logits, tolerance=AGREES)


def _replace_head_input(scorer: NextToken, change: Callable[[Tensor], Tensor]) -> RemovableHandle:
    """Run the head on `change(states)` in place of its input, inside the returned context."""

    def replace_states(_head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        states, *others = args  # the hidden states are the first argument of the head
        return change(states), *others

    return scorer.head.register_forward_pre_hook(replace_states)


@dataclass(frozen=True)
class SampleFunction:
    """The function whose Jacobian is computed, and the samples of a batch as its arguments.

    Attributes:
        f: (z, index) -> output, where row i of z is a point of sample index[i] of the batch.
        x: the samples, (batch, *in).
        start: the space of the samples: pixels, tokens or embeddings.
        target: the name of the output: `logits` or `logits:last` as typed, or `scores`, or
            `log-probabilities` of a model that returns probabilities.
    """

    f: Function
    x: Tensor
    start: str
    target: str


def resolve_target(net: Net, batch: Batch, target: str | None) -> Target:
    """Return which output of a model to differentiate, with the position in the text if any.

    By default the logits: of the classes, or of a causal language model's next token after the
    last token of a text. For a model without logits, the features.

    Args:
        net: the model.
        batch: samples, to test the head of a language model.
        target: the output that the user asks for, such as `logits:5`; None: the default.

    Raises:
        InputError: the model lacks this output.
    """
    # Whether the logits are those of the next token, after a position of a text.
    has_next_logits = net.classes is None and net.next_token is not None
    # A language model whose head cannot run on one position has no logits by default. If the user
    # asks for logits, `make_sample_function` reports the obstacle.
    if has_next_logits and target is None:
        has_next_logits = scores_each_token(net, batch)
    has_logits = net.classes is not None or has_next_logits
    default = "logits" if has_logits else "features"
    what, where = Target.parse(target or default)
    name = net.architecture
    known = _list_outputs(net, has_logits=has_logits)
    if what not in known:
        raise InputError(
            f"{name} has no single output {what!r} per sample",
            f"Use --to {', '.join(known[:-1])} or {known[-1]}.",
        )
    # Outputs at one position of a text, such as logits: the last position by default.
    if what == "hidden" or (has_next_logits and what in PLACED):
        return Target(what, where=where or "last")
    if where:
        raise InputError(
            f"the {what} of {name} are those of a whole sample and have no position",
            f"Use --to {what}.",
        )
    return Target(what, where="")


def _list_outputs(net: Net, *, has_logits: bool) -> list[str]:
    """Return the names of the outputs that a model has for each sample, such as features."""
    outputs = ["logits", "probabilities", "loss"] if has_logits else []
    # If the model scores several continuations of a prompt, hidden states differ between
    # continuations: a sample has no hidden states, tokens or features.
    if not net.scored:
        outputs += ["features", "tokens"]
        if net.kind == "text":
            outputs.append("hidden")
    return outputs


def make_sample_function(
    net: Net,
    batch: Batch,
    *,
    start: str | None,
    target: str | None,
    place: Tensor | None = None,
) -> SampleFunction:
    """Return the function whose Jacobian is computed, from an input of the model to an output.

    The loss of a classifier is the cross-entropy with the label, or with the predicted class if a
    sample has no label. `compute_text_loss` computes the loss of a language model.

    Args:
        net: the model.
        batch: the samples at which the function is evaluated.
        start: the input: pixels or embeddings. None, `layers` or `layer:5` mean the input of the
            whole model: pixels of images, embeddings of texts.
        target: the output, such as `logits` or `logits:5` (of the token at position 5). None: the
            default of `resolve_target`.
        place: the column of the token in each text, (samples,); replaces the position in `target`.

    Raises:
        InputError: the model lacks this input or output.
    """
    end = resolve_target(net, batch, target)
    space = _resolve_start(net, start)
    is_embedded = space == "embeddings"
    if place is None and end.where:
        place = find_places(batch, end.where)
    scorer = _choose_head(net, batch, end.what)

    def f(z: Tensor, index: Tensor) -> Tensor:
        """Return the output at z, whose row i is a point of sample index[i] of the batch."""
        # The labels of these samples, and the column of the token whose output is returned.
        labels = None if batch.y is None else batch.y[index]
        column = None if place is None else place[index]
        part = replace(batch.rows_without_ids(index), y=labels)

        def forward() -> Any:
            """Run the model on z: its input, or (`is_embedded`) the embeddings of the texts.

            In the second case it also gets the token ids, to compute positions and masks.
            """
            if not is_embedded:
                return net.call(z, part.mask)
            with net.replace_embedding(z):
                return net.call(part.x, part.mask)

        output = _read_output(net, end.what, part, forward, scorer, place=column)
        if end.what == "logits":
            _require_derivative(net, output)
        # If the model is spread over devices, the output may be on another device than z.
        return output.to(z.device)

    x = _embed(net, batch, scorer) if is_embedded else batch.x.detach()
    return SampleFunction(f, x, space, _name_target(net, end))


def _choose_head(net: Net, batch: Batch, what: str) -> NextToken | None:
    """Return the head of a language model if an output is read at it; None for other outputs.

    These outputs are logits, probabilities, loss and hidden states.

    Args:
        net: the model.
        batch: samples, to test the head.
        what: the output, such as `logits`.

    Raises:
        InputError: the head cannot run on the hidden states of one position.
    """
    if net.classes is not None or what in ("features", "tokens"):
        return None
    scorer = net.next_token
    if scorer is not None and not scores_each_token(net, batch):
        raise InputError(
            f"the head of {net.architecture} does not score each position separately",
            "Use --to features, --to tokens, or the logits at the last position.",
        )
    return scorer


def _require_derivative(net: Net, logits: Tensor) -> None:
    """Raise EvaluationError if logits have no derivative: log p of a probability p = 0.

    The logits of a model that returns probabilities p are log p.
    """
    if net.form == "probabilities" and is_saturated(logits):
        raise EvaluationError(
            f"a probability of {net.architecture} is 0 in {logits.dtype}: log p has no "
            "derivative there",
            "Use --dtype float64, or let the model return its scores before the softmax.",
        )


def _embed(net: Net, batch: Batch, scorer: NextToken | None) -> Tensor:
    """Return the embeddings of a batch of texts, (samples, tokens, width), from a forward pass.

    The pass also runs the head of a language model. The head gets the first token only, because
    the logits of all tokens are large, and nothing reads them.
    """
    if scorer is None:
        return net.embedding(batch)
    with _replace_head_input(scorer, lambda states: states[:, :1]):
        return net.embedding(batch)


def _resolve_start(net: Net, start: str | None) -> str:
    """Return the space in which a model is differentiated: pixels, tokens (floats) or embeddings.

    Args:
        net: the model.
        start: pixels or embeddings, if the user asks for one of them.

    Raises:
        InputError: the model lacks this input.
    """
    if start == "pixels" and net.kind == "text":
        raise InputError("text has no pixels", "Use --from embeddings.")
    if net.kind == "text" or start == "embeddings":
        if net.entry is None:
            raise InputError(
                f"the embedding module of {net.architecture} was not found",
                "Use --from pixels, or write a py: factory that names it: ModelSpec(..., "
                "entry=MODULE).",
            )
        return "embeddings"
    if net.kind == "image":
        return "pixels"
    return net.kind


def _name_target(net: Net, end: Target) -> str:
    """Return the name of a target for the report, such as `log-probabilities` or `logits:last`."""
    if end.what == "logits" and net.scored:  # scores of a prompt's continuations
        return "scores"
    if end.what == "logits" and net.form == "probabilities":
        return end.text.replace("logits", "log-probabilities")
    return end.text


def _read_output(
    net: Net,
    what: str,
    part: Batch,
    forward: Forward,
    scorer: NextToken | None,
    place: Tensor | None,
) -> Tensor:
    """Run the model on some samples and return one of its outputs, (samples, *out).

    Args:
        net: the model.
        what: which output: logits, probabilities, loss, features, tokens or hidden.
        part: the samples, with their labels.
        forward: runs the model on the samples and returns the raw result.
        scorer: the head of a language model, if the output is read at the head; else None.
        place: for each text, the column of the token whose output is returned; None: the output of
            the whole sample.
    """
    if what in ("logits", "probabilities"):
        if scorer is None or place is None:  # logits of classes
            logits = net.read(forward())
        else:
            logits = compute_next_logits(scorer, place, forward)
        if what == "logits":
            return logits
        return torch.softmax(logits, -1)
    if what == "loss":
        if scorer is None:
            return _compute_class_loss(net.read(forward()), part.y)
        return compute_text_loss(part, scorer.read(forward()))
    if what == "features":
        return _read_features(net, forward)
    states = _read_states(net, what, part, forward, scorer)
    if what == "tokens" or place is None:
        return states
    return pick_columns(states, place)


def _compute_class_loss(logits: Tensor, y: Tensor | None) -> Tensor:
    """Return the cross-entropy of each sample with its label, (samples, 1).

    A sample without a label (-1, or y is None) gets the predicted class as its label.
    """
    labels = logits.detach().argmax(1)  # the predicted class: a constant, without a gradient
    if y is not None:
        labels = y.where(y >= 0, labels)
    return F.cross_entropy(logits, labels, reduction="none")[:, None]


def _read_states(
    net: Net, what: str, part: Batch, forward: Forward, scorer: NextToken | None
) -> Tensor:
    """Return the last hidden states of a model, one vector per token, (samples, tokens, width).

    With a head (`hidden` of a language model) these are the inputs of the head. Otherwise they are
    the output of the last normalisation layer that returns (samples, tokens, width), set to 0 at
    padding.

    `tokens` are all vectors of a sample, which may also be patches of an image. From `hidden`, the
    caller picks the vector of one token of a text by its column. So `hidden` needs exactly one
    vector per token id.

    Args:
        net: the model.
        what: `tokens` or `hidden`.
        part: the samples. For `hidden`, `part.x` has the token ids of texts, (samples, tokens).
        forward: runs the model on the samples.
        scorer: the head of a language model; None without such a head, and for `tokens`.

    Raises:
        InputError: no normalisation layer returns such a tensor, or `hidden` has no vector per
            token id.
    """
    if scorer is not None:  # `hidden` of a language model
        states = _read_head_input(scorer, forward)
    else:
        states = _read_last_norm(net, forward)
        if part.mask is not None and part.mask.shape == states.shape[:2]:
            states = states * part.mask[..., None]
    if what == "hidden" and states.shape[:2] != part.x.shape:
        raise InputError(
            f"the last hidden states of {net.architecture} do not have one vector per token",
            "Use --to tokens or --to features.",
        )
    return states


def _read_head_input(scorer: NextToken, forward: Forward) -> Tensor:
    """Run a language model, and return the hidden states that its head gets for all tokens."""
    head_inputs: list[Tensor] = []

    def record_input(states: Tensor) -> Tensor:
        """Record the hidden states, and return the first token alone as the head's input.

        Nothing reads the logits, and logits of all tokens would need much memory.
        """
        head_inputs.append(states)
        return states[:, :1]

    with _replace_head_input(scorer, record_input):
        forward()
    return head_inputs[0]


def _read_last_norm(net: Net, forward: Forward) -> Tensor:
    """Run a model, and return the last output of a normalisation layer, (samples, tokens, width).

    Outputs of another number of axes do not count.
    """
    norms = [m for m in net.module.modules() if "Norm" in type(m).__name__]
    outputs = _record(norms, pick=lambda _args, output: output, forward=forward)
    sequences = [t for t in outputs if t.ndim == 3]  # in the order of the calls
    if not sequences:
        raise InputError("no token features were found", "Use --to features.")
    return sequences[-1]


def _read_features(net: Net, forward: Forward) -> Tensor:
    """Return the features of samples: the input of a classifier's last linear layer.

    For a model without classes, the features are the output.
    """
    if net.classes is None:
        return net.read(forward())
    linears = [module for module in net.module.modules() if isinstance(module, nn.Linear)]
    inputs = _record(linears, pick=lambda args, _output: args[0], forward=forward)
    if not inputs:
        raise InputError(
            f"{net.architecture} has no linear layer, whose input would be its features",
            "Use --to logits.",
        )
    return inputs[-1]


def _record(
    modules: Sequence[nn.Module], pick: Callable[[tuple[Any, ...], Any], Tensor], forward: Forward
) -> list[Tensor]:
    """Run the model, and return `pick(arguments, output)` for every call of some modules.

    The results are in the order of the calls.
    """
    tensors: list[Tensor] = []

    def record(_name: str, args: tuple[Any, ...], output: Any) -> None:
        tensors.append(pick(args, output))

    with watch_modules((("", module) for module in modules), record):
        forward()
    return tensors
