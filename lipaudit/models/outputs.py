"""The output of a model: the tensor that is measured, and its form.

Classifiers return logits, log-probabilities log p, probabilities p, or a sigmoid of each score.
Every measure takes logits: margins f_y - f_j, the softmax, the cross-entropy. Where z are the
logits, log p = z - logsumexp(z), so log p has the margins, the softmax and the cross-entropy of z,
and p has none of them. The form is found once, on loading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lipaudit.data.batch import Batch
from lipaudit.errors import InputError, explain_failure, few, of_machine
from lipaudit.models.net import ModelSpec, Net, NextToken, OutputForm, watch_modules
from lipaudit.models.precision import devices, exact_arithmetic, precision
from lipaudit.tables import Note

PROBE_TEXT = "a blank sample"
PROBE_TOKENS = 8
# Largest deviation of the sum of probabilities from 1, in float32.
SIMPLEX = 1e-5
HALF = {torch.float16, torch.bfloat16}
Call = Callable[[Tensor, Tensor | None], Any]
Read = Callable[[Any], Tensor]


def _return_scores(scores: Any, *_args: Any, **_options: Any) -> Any:
    return scores


# Functions that turn scores into probabilities, and those that turn the same scores into logits.
SOFTMAXES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.softmax: F.log_softmax,
    torch.softmax: torch.log_softmax,
    torch.special.softmax: torch.special.log_softmax,
    Tensor.softmax: Tensor.log_softmax,
}
SIGMOIDS = (torch.sigmoid, Tensor.sigmoid, torch.special.expit, F.sigmoid)
TWINS = SOFTMAXES | dict.fromkeys(SIGMOIDS, _return_scores)

TEXTS = {
    "probabilities": "the model returns probabilities p. Its logits here are log p, with the same "
    "classes, margins and loss as the scores before the softmax",
    "log-probabilities": "the model returns log-probabilities, which serve as logits",
    "sigmoids": "the model returns a sigmoid of each score. Its logits here are the scores before "
    "the sigmoid, and probabilities and losses are those of their softmax",
}


class FinalActivation(TorchFunctionMode):
    """Watch the softmax or sigmoid that a forward pass applies last.

    Attributes:
        output: its output.
        function: the function.
        logits: computes the logits from the same scores.
    """

    output: Any = None
    function: Any = None
    logits: Callable[[], Any]

    def __torch_function__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch, and keep it if it is a softmax or a sigmoid."""
        options = kwargs or {}
        output = function(*args, **options)
        if function in TWINS:
            self.output = output
            self.function = function
            self.logits = partial(TWINS[function], *args, **options)
        return output


@dataclass(frozen=True)
class Activated:
    """The result of a forward pass, and the softmax or sigmoid that was applied last.

    Attributes:
        result: the result of the model.
        final: the last activation.
    """

    result: Any
    final: FinalActivation


def run_watched(call: Call, x: Tensor, mask: Tensor | None) -> Activated:
    """Run a model, and watch the softmax or sigmoid that it applies last."""
    with FinalActivation() as final:
        return Activated(call(x, mask), final)


def find_main_output(result: Any) -> Tensor:
    """Find the output tensor in the result of a model: itself, its logits, or its first item.

    Raises:
        InputError: the result holds no tensor.
    """
    if isinstance(result, Mapping) and "logits" in result:
        result = result["logits"]
    elif hasattr(result, "logits"):
        result = result.logits
    elif isinstance(result, (tuple, list)) and result:
        result = result[0]
    if not isinstance(result, Tensor):
        raise InputError(
            f"the model returned {type(result).__name__}, not a tensor or an output with logits",
            "Write a py: factory that returns ModelSpec(..., read=lambda result: TENSOR).",
        )
    output: Tensor = result
    return output


def find_form(output: Tensor, final: FinalActivation) -> OutputForm:
    """Return the form of scores, (..., classes).

    Args:
        output: the scores, of at least two classes.
        final: the softmax or sigmoid that the forward pass applied last.
    """
    values = output.detach().double()
    if bool(((values.exp().sum(-1) - 1).abs() < SIMPLEX).all()):
        return "log-probabilities"
    inside = (values > -SIMPLEX).all() & (values < 1 + SIMPLEX).all()
    if bool(inside & ((values.sum(-1) - 1).abs() < SIMPLEX).all()):
        return "probabilities"
    alone = output is final.output and final.function in SIGMOIDS
    return "sigmoids" if alone else "logits"


def note_form(form: OutputForm) -> tuple[Note, ...]:
    """Return the note on outputs that are no logits; none for logits."""
    if form in TEXTS:
        return (Note.info(form, TEXTS[form]),)
    return ()


def convert_outputs(
    form: OutputForm, call: Call, read: Read, scorer: NextToken | None
) -> tuple[Call, Read, NextToken | None]:
    """Return the functions that run and read a model, so that its scores are logits.

    If the output is that of the last softmax or sigmoid itself, logits come from the same scores,
    without rounding. Otherwise, for example after an average of several models, they are log p.

    Args:
        form: the form of the output.
        call: runs the module on (x, mask).
        read: returns the output from a result; the scores of a language model are not in it.
        scorer: how a language model scores the next token; then its scores have this form.
    """
    if form not in ("probabilities", "sigmoids"):
        return call, read, scorer

    def read_plain(watched: Activated) -> Tensor:
        return read(watched.result)

    def read_logits(watched: Activated) -> Tensor:
        output = (read if scorer is None else scorer.read)(watched.result)
        if output is watched.final.output:
            logits: Tensor = watched.final.logits()
            return logits
        limits = torch.finfo(output.dtype)
        if form == "sigmoids":
            return output.logit(limits.eps)
        return output.clamp_min(limits.tiny).log()

    if scorer is None:
        return partial(run_watched, call), read_logits, None
    return partial(run_watched, call), read_plain, NextToken(scorer.head, read_logits)


def is_saturated(logits: Tensor) -> bool:
    """Say whether a probability was so small that its logarithm was cut, and has no derivative."""
    tiny = torch.finfo(logits.dtype).tiny
    smallest = torch.full_like(logits[..., :1], tiny).log()
    return bool((logits == smallest).any())


@dataclass(frozen=True)
class Probe:
    """Facts about a model from forward passes on samples that loading makes.

    Attributes:
        output: its output on the first sample on which it is finite, else on the first sample.
        form: the form of its scores.
        undefined: whether no output was finite.
        notes: remarks.
        entry: its embedding module, if one was named or found.
        tokens_first: whether the output of `entry` is (tokens, batch, width).
    """

    output: Tensor
    form: OutputForm
    undefined: bool
    notes: tuple[Note, ...]
    entry: nn.Module | None = None
    tokens_first: bool = False


class EntrySearch:
    """Find the embedding module of a model in a forward pass on a sample.

    Args:
        spec: the model.
        x: the sample, as a batch of one.
    """

    def __init__(self, spec: ModelSpec, x: Tensor) -> None:
        self.spec = spec
        self.x = x
        self.image = spec.kind == "image"
        # Names of modules by whether they take the ids themselves.
        self.readers: dict[bool, list[str]] = {True: [], False: []}
        # Names of modules whose output is (tokens, batch, width).
        self.turned: set[str] = set()

    def list_parts(self) -> list[tuple[str, nn.Module]]:
        """Return the modules that may be the embedding, by name."""
        if self.image:
            return [
                (name, part)
                for name, part in self.spec.module.named_modules()
                if "PatchEmbed" in type(part).__name__ or "patch_embed" in name.rpartition(".")[2]
            ]
        return [
            (name, part)
            for name, part in self.spec.module.named_modules()
            if self.spec.kind == "text" and (part is self.spec.entry or is_table(part))
        ]

    def see(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        """Note what a module takes and returns."""
        if self.image:
            self.readers[True].append(name)
            return
        columns = self.x.mT  # ids of a model with tokens first
        if isinstance(out, Tensor) and out.shape[:2] == columns.shape != self.x.shape:
            self.turned.add(name)
        taken = None
        if args:
            taken = args[0]
        for ids in (self.x, columns):
            if isinstance(taken, Tensor) and taken.shape == ids.shape:
                self.readers[bool((taken == ids).all())].append(name)
                break

    def choose(self, found: Probe) -> Probe:
        """Return the facts with the embedding: the named one, else the first that takes the ids.

        Tables of positions and types may take tensors of the same shape.
        """
        entry = self.spec.entry
        names = self.readers[True] + self.readers[False]
        if entry is None and names:
            entry = self.spec.module.get_submodule(names[0])
        turned = any(part is entry and n in self.turned for n, part in self.list_parts())
        return replace(found, entry=entry, tokens_first=turned)


def is_table(module: nn.Module) -> bool:
    """Say whether a module is a table of embeddings."""
    return isinstance(module, nn.Embedding)


def probe_model(spec: ModelSpec, call: Call, read: Read) -> Probe:
    """Run a model on a blank sample, and on noise if its output is then undefined or no logits.

    Raises:
        InputError: the model cannot run, or its output is no tensor of floats.
    """
    device = next(devices(spec.module))
    samples = make_probes(spec, device, precision(spec.module))
    search = EntrySearch(spec, samples[0])
    check = "--input-size and --model-kwargs" if spec.kind == "image" else "--model-kwargs"
    explained = explain_failure(
        f"{type(spec.module).__name__} cannot be run on a sample ({spec.kind}) of shape "
        f"{spec.input_shape}",
        f"Check {check}. If the model needs other arguments, write a py: factory that returns a "
        "ModelSpec with its own `call(x, mask)`.",
    )
    watched = watch_modules(search.list_parts(), search.see)
    with explained, watched, exact_arithmetic(device), torch.no_grad():
        found = _run_probes(spec, call, read, samples)
    _require_floats(found.output, samples[0])
    return search.choose(found)


def _run_probes(spec: ModelSpec, call: Call, read: Read, samples: list[Tensor]) -> Probe:
    """Run samples until one has finite logits, and return what is known then.

    Raises:
        Exception: that of the model on the first sample, if it fails on each.
    """
    found: Probe | None = None
    failures: list[Exception] = []
    for x in samples:
        try:
            passed = run_watched(call, x, None)
            output = read(passed.result)
        except Exception as error:  # a model may refuse a blank sample, and raise anything
            if of_machine(error):
                raise
            failures.append(error)
            continue
        undefined = not bool(output.isfinite().all())
        form = read_form(spec, passed, output)
        if found is None or found.undefined:
            found = Probe(output, form, undefined, note_choice(spec, passed.result))
        elif not undefined and form != found.form:
            # The scores of one sample may sum to 1 by chance.
            found = replace(found, form="logits")
        if not undefined and form == "logits":
            break
    if found is None:
        raise failures[0]
    return found


def make_probes(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Return a blank sample, and noise except for texts, each as a batch of one."""
    if spec.kind == "text":
        most = min(PROBE_TOKENS, *spec.input_shape)
        # A text of padding alone is undefined in many models.
        plain = next(i for i in (1, 2, 3) if i not in (spec.pad_id, spec.end_id))
        if spec.tokenize:
            ids = spec.tokenize(PROBE_TEXT, most)
        else:
            ids = [plain] * most
        if not (spec.end_id is None or spec.tokenize):
            ids = [*ids[1:], spec.end_id]
        return [torch.tensor([ids], device=device)]
    # Grey pixels, and zeros for floats: inputs that most models accept.
    grey = 0.5 if spec.kind == "image" else 0.0
    blank = torch.full((1, *spec.input_shape), grey, dtype=dtype)
    noise = torch.rand(blank.shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return [blank.to(device), noise.to(device)]


def read_form(spec: ModelSpec, passed: Activated, output: Tensor) -> OutputForm:
    """Return the form of the scores of a forward pass: of classes, or of the next token."""
    if spec.classifier and output.ndim == 2 and output.shape[1] > 1:
        return find_form(output, passed.final)
    if spec.next_token is None:
        return "logits"
    return find_form(spec.next_token.read(passed.result), passed.final)


def note_choice(spec: ModelSpec, result: Any) -> tuple[Note, ...]:
    """Return the note on a model that returns several tensors, of which one is measured."""
    if spec.read is not None or not isinstance(result, tuple | list) or hasattr(result, "logits"):
        return ()
    shapes = [tuple(t.shape[1:]) for t in result if isinstance(t, Tensor)]
    text = (
        f"the model returns several tensors ({few(shapes)} per sample); the first is "
        "measured. To choose, write a py: factory that returns ModelSpec(..., read=lambda "
        "result: TENSOR)"
    )
    if len(shapes) > 1:
        return (Note.warn("first-output", text),)
    return ()


def _require_floats(output: Tensor, x: Tensor) -> None:
    halved = output.dtype in HALF and x.dtype == torch.float32
    if halved or not output.is_floating_point():
        raise InputError(
            f"the model returns {str(output.dtype).removeprefix('torch.')} in a run in float32",
            "Let the model return its scores (logits), not a decision, which has no gradient. "
            "Switch autocast off in its code, or use --dtype float64, which overrides it.",
        )


def settle_output(net: Net, batch: Batch) -> Net:
    """Return a model whose output was undefined on loading, checked on a sample of the run.

    Raises:
        InputError: the output on the first sample is not finite.
    """
    if not net.undefined:
        return net
    one = batch[:1].trim().to(net.device, net.dtype)
    with exact_arithmetic(net.device), torch.no_grad():
        passed = run_watched(net.call, one.x, one.mask)
        output = net.read(passed.result)
    if not bool(output.isfinite().all()):
        raise InputError(
            f"the model's output is not finite, neither on a blank sample nor on {one.ids[0]}",
            "Check the weights. A masked class needs a finite logit.",
        )
    form = read_form(net, passed, output)
    call, read, scorer = convert_outputs(form, net.call, net.read, net.next_token)
    how: dict[str, Any] = {"call": call, "read": read, "next_token": scorer}
    notes = net.notes + note_form(form)
    return replace(net, form=form, undefined=False, notes=notes, **how)
