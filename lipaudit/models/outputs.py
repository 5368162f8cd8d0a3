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
from lipaudit.errors import InputError, explain_failure, is_machine_error, join_few
from lipaudit.models.net import Call, ModelSpec, Net, NextToken, OutputForm, Read, watch_modules
from lipaudit.models.precision import HALF, exact_arithmetic, find_dtype, list_devices
from lipaudit.tables import Note, Notes

# The sample of loading for texts.
PROBE_TEXT = "a blank sample"
PROBE_TOKENS = 8
# Largest deviation of the sum of probabilities from 1, in float32.
SIMPLEX = 1e-5


def _return_scores(scores: Any, *_args: Any, **_options: Any) -> Any:
    """Return the scores that a sigmoid takes: they serve as the logits of its output.

    The function takes the arguments of a sigmoid (`out=`, for example), and ignores all but one.
    """
    return scores


# For each function that turns scores into probabilities: the one that turns them into logits.
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


class WatchedPass(TorchFunctionMode):
    """A forward pass: its result, and the softmax or sigmoid that it applies last.

    Attributes:
        result: the result of the model.
        probabilities: the output of that softmax or sigmoid.
        function: the function of torch that the model called for it.
        logits: computes the logits from the scores that the function got.
    """

    result: Any = None
    probabilities: Any = None
    function: Any = None
    logits: Callable[[], Any]

    def __torch_function__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch that the model calls; record it if it is a softmax or sigmoid.

        A later softmax or sigmoid replaces an earlier one, so the last one is left in the end.
        """
        options = kwargs or {}
        output = function(*args, **options)
        if function in TWINS:
            # `TWINS` has a function that computes logits from the same arguments, such as
            # log_softmax for softmax, so that logits do not suffer from p rounded to 0 or 1.
            self.probabilities = output
            self.function = function
            self.logits = partial(TWINS[function], *args, **options)
        return output


def run_watched(call: Call, x: Tensor, mask: Tensor | None) -> WatchedPass:
    """Run a model, and watch the softmax or sigmoid that it applies last."""
    with WatchedPass() as watched:
        watched.result = call(x, mask)
    return watched


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
    return result


def find_form(output: Tensor, watched: WatchedPass) -> OutputForm:
    """Return the form of a model's scores: logits, probabilities, their logarithms, or sigmoids.

    Args:
        output: the scores, (..., classes), of at least two classes.
        watched: the forward pass, with the softmax or sigmoid that it applied last.
    """
    values = output.detach().double()
    if _sums_to_one(values.exp()):
        return "log-probabilities"
    # From 0 to 1, up to the rounding error SIMPLEX.
    in_unit_interval = (values > -SIMPLEX).all() & (values < 1 + SIMPLEX).all()
    if in_unit_interval and _sums_to_one(values):
        return "probabilities"
    if output is watched.probabilities and watched.function in SIGMOIDS:
        return "sigmoids"
    return "logits"


def _sums_to_one(values: Tensor) -> bool:
    """Say whether the values of every sample sum to 1 over the classes, the last axis."""
    deviation = (values.sum(-1) - 1).abs()
    return bool((deviation < SIMPLEX).all())


def note_form(form: OutputForm) -> Notes:
    """Return the note on outputs that are no logits; none for logits."""
    if form in TEXTS:
        return (Note.info(form, TEXTS[form]),)
    return ()


def convert_outputs(
    form: OutputForm, call: Call, read: Read, scorer: NextToken | None
) -> tuple[Call, Read, NextToken | None]:
    """Return the functions that run and read a model, changed so that its scores are logits.

    The best logits come from the argument of the model's last softmax or sigmoid, without
    rounding. If the output was changed after that (such as an average of several models), the
    logits are computed from the output p: log p for probabilities, log(p / (1 - p)) for sigmoids.

    Args:
        form: the form of the scores.
        call: runs the module on (x, mask).
        read: returns the output from a result: the scores of a classifier.
        scorer: how a language model scores the next token; None for other models. The scores are
            then those of the next token, and the output stays as it is.
    """
    if form not in ("probabilities", "sigmoids"):  # logits, or log p, which serve as logits
        return call, read, scorer
    # The scores p: those of the next token of a language model, else the output.
    read_scores = read
    if scorer is not None:
        read_scores = scorer.read

    def read_logits(watched: WatchedPass) -> Tensor:
        """Return the logits of scores p, which a model has made by softmax or sigmoid.

        `watched` holds the result of the model, and its last softmax or sigmoid.
        """
        output = read_scores(watched.result)
        # If the model returns the output of that function, the logits come from its input.
        if output is watched.probabilities:
            return watched.logits()
        # Otherwise compute the logits from p. Limits avoid infinite logits if p is 0 or 1.
        limits = torch.finfo(output.dtype)
        if form == "sigmoids":
            return output.logit(limits.eps)
        return output.clamp_min(limits.tiny).log()

    watched_call = partial(run_watched, call)
    if scorer is None:
        return watched_call, read_logits, None
    # Of a language model, only the scores of the next token become logits. Its output is read by
    # `read` as before, from the result that the watched call holds.
    return (
        watched_call,
        lambda watched: read(watched.result),
        NextToken(scorer.head, read_logits),
    )


def is_saturated(logits: Tensor) -> bool:
    """Say whether a logit is log p of a probability p = 0, in any of the samples.

    `convert_outputs` replaces p = 0 by the smallest positive float, so that log p is finite. Such
    a logit is constant near the sample, so its derivative says nothing.
    """
    tiny = torch.finfo(logits.dtype).tiny
    # In the precision and on the device of the logits, because log may round differently there.
    smallest = torch.full_like(logits[..., :1], tiny).log()
    return bool((logits == smallest).any())


@dataclass(frozen=True)
class Probe:
    """Facts about a model from forward passes on samples that loading makes.

    Attributes:
        output: the output on the first sample with a finite output, else on the last sample.
        form: the form of the scores.
        undefined: whether no output was finite.
        notes: remarks.
        entry: the embedding module, if one was named or found.
        tokens_first: whether the output of `entry` is (tokens, batch, width).
    """

    output: Tensor
    form: OutputForm
    undefined: bool
    notes: Notes
    entry: nn.Module | None = None
    tokens_first: bool = False


class EntrySearch:
    """Find the embedding module of a model in a forward pass on a sample.

    Args:
        spec: the model.
        x: the sample, as a batch of one.
    """

    def __init__(self, spec: ModelSpec, x: Tensor) -> None:
        """Prepare lists, in which `observe` records modules during a forward pass on x."""
        self.spec = spec
        self.x = x
        # Names of modules whose argument is the ids of the sample.
        self.readers: list[str] = []
        # Names of modules whose argument is other ids of the same shape: positions or types.
        self.similar_readers: list[str] = []
        # Names of modules whose output is (tokens, batch, width).
        self.tokens_first: set[str] = set()

    def list_candidates(self) -> list[tuple[str, nn.Module]]:
        """Return the modules that may embed the input, with their names."""
        return [
            (name, part)
            for name, part in self.spec.module.named_modules()
            if self._may_embed(name, part)
        ]

    def _may_embed(self, name: str, part: nn.Module) -> bool:
        """Say whether a module may embed the input: patches of an image, or ids of a text."""
        if self.spec.kind == "image":
            attribute = name.rpartition(".")[2]  # the last part of the path
            return "PatchEmbed" in type(part).__name__ or "patch_embed" in attribute
        if self.spec.kind == "text":
            return part is self.spec.entry or isinstance(part, nn.Embedding)
        return False

    def observe(self, name: str, args: tuple[Any, ...], output: Any) -> None:
        """Record whether a module embeds the ids of the sample, after its call in a forward pass.

        Args:
            name: the module, which may be the embedding.
            args: its arguments.
            output: its output.
        """
        if self.spec.kind == "image":  # the module was chosen by its name: no test is needed
            self.readers.append(name)
            return
        # The model may transpose its ids, (batch, tokens), before it embeds them. The output of
        # the embedding is then (tokens, batch, width). As many samples as tokens cannot show this.
        expected = self.x
        transposed = expected.mT
        if isinstance(output, Tensor) and output.shape[:2] == transposed.shape != expected.shape:
            self.tokens_first.add(name)
        # A separate question: whether the argument of the module is the ids, in either order.
        if not args or not isinstance(args[0], Tensor):
            return
        argument = args[0]
        if argument.shape != expected.shape:
            expected = transposed
        if argument.shape != expected.shape:  # the argument has neither shape
            return
        if (argument == expected).all():
            self.readers.append(name)
        else:  # numbers of positions or types, or ids that the model has changed
            self.similar_readers.append(name)

    def add_entry(self, probe: Probe) -> Probe:
        """Add the embedding module to the facts that a forward pass has shown.

        The description of the model may name the embedding module. Otherwise it is the first
        module whose argument was the ids of the sample, else other ids of the same shape.
        """
        entry = self.spec.entry
        names = self.readers + self.similar_readers
        if entry is None and names:
            entry = self.spec.module.get_submodule(names[0])
        # Whether the embedding module, by any of its names, returned (tokens, batch, width).
        tokens_first = any(
            part is entry and name in self.tokens_first for name, part in self.list_candidates()
        )
        return replace(probe, entry=entry, tokens_first=tokens_first)


def probe_model(spec: ModelSpec, call: Call, read: Read) -> Probe:
    """Run a model on a blank sample, and on noise if the first output is undefined or no logits.

    Raises:
        InputError: the model cannot run, or its output is no tensor of floats.
    """
    device = next(list_devices(spec.module))
    samples = make_probes(spec, device, find_dtype(spec.module))
    search = EntrySearch(spec, samples[0])
    check = "--input-size and --model-kwargs" if spec.kind == "image" else "--model-kwargs"
    explained = explain_failure(
        f"{type(spec.module).__name__} cannot be run on a sample ({spec.kind}) of shape "
        f"{spec.input_shape}",
        f"Check {check}. If the model needs other arguments, write a py: factory that returns a "
        "ModelSpec with its own `call(x, mask)`.",
    )
    observing = watch_modules(search.list_candidates(), search.observe)
    with explained, observing, exact_arithmetic(device), torch.no_grad():
        probe = _run_probes(spec, call, read, samples)
    _require_floats(probe.output, samples[0])
    return search.add_entry(probe)


def _run_probes(spec: ModelSpec, call: Call, read: Read, samples: list[Tensor]) -> Probe:
    """Run samples until one shows that the output is logits, and return facts about the output.

    The facts are of the first sample with a finite output, else of the last sample. Scores count
    as probabilities, log-probabilities or sigmoids only if all finite outputs show this form.

    Args:
        spec: the model.
        call: runs it on (x, mask).
        read: returns the output from a result.
        samples: the samples, each as a batch of one.

    Raises:
        Exception: the model fails on every sample; the exception on the first sample is raised.
    """
    probe = None
    failures = []
    for x in samples:
        try:
            watched = run_watched(call, x, mask=None)
            output = read(watched.result)
        except Exception as error:  # a model may refuse a blank sample, and raise anything
            if is_machine_error(error):
                raise
            failures.append(error)
            continue
        undefined = not output.isfinite().all()
        form = find_score_form(spec, watched, output)
        if probe is None or probe.undefined:  # no finite output before
            probe = Probe(output, form, undefined, note_choice(spec, watched.result))
        elif not undefined and form != probe.form:
            # Two finite outputs show different forms. One of them only looks like probabilities:
            # its logits happen to sum to 1.
            probe = replace(probe, form="logits")
        if not undefined and form == "logits":
            break
    if probe is None:
        raise failures[0]
    return probe


def make_probes(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Return a blank sample, and noise except for texts, each as a batch of one."""
    if spec.kind == "text":
        length = min(PROBE_TOKENS, *spec.input_shape)
        if spec.tokenize:
            ids = spec.tokenize(PROBE_TEXT, length)
        else:
            # Any id except that of padding: many models have no finite output for padding alone.
            plain = next(i for i in (1, 2, 3) if i not in (spec.pad_id, spec.end_id))
            ids = [plain] * length
            if spec.end_id is not None:
                ids[-1:] = [spec.end_id]
        return [torch.tensor([ids], device=device)]
    # Grey pixels, and zeros for floats: inputs that most models accept.
    grey = 0.5 if spec.kind == "image" else 0.0
    blank = torch.full((1, *spec.input_shape), grey, dtype=dtype)
    noise = torch.rand(blank.shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return [blank.to(device), noise.to(device)]


def find_score_form(spec: ModelSpec, watched: WatchedPass, output: Tensor) -> OutputForm:
    """Return the form of a model's scores, such as logits or probabilities, after a forward pass.

    Scores are the output of a classifier, or a language model's scores of the next token. Any
    other output is features or a single number, and is used as it is, like logits.
    """
    if spec.classifier and output.ndim == 2 and output.shape[1] > 1:
        return find_form(output, watched)
    if spec.next_token is None:
        return "logits"
    return find_form(spec.next_token.read(watched.result), watched)


def note_choice(spec: ModelSpec, result: Any) -> Notes:
    """Return the note on a model that returns several tensors, of which one is measured."""
    # No note if the description of the model chooses a tensor, or if one is named `logits`.
    if spec.read is not None or not isinstance(result, tuple | list) or hasattr(result, "logits"):
        return ()
    shapes = [tuple(t.shape[1:]) for t in result if isinstance(t, Tensor)]
    if len(shapes) < 2:
        return ()
    return (
        Note.warn(
            "first-output",
            f"the model returns several tensors ({join_few(shapes)} per sample); the first is "
            "measured. To choose, write a py: factory that returns ModelSpec(..., read=lambda "
            "result: TENSOR)",
        ),
    )


def _require_floats(output: Tensor, x: Tensor) -> None:
    """Refuse an output of integers, or of half precision in a run in float32.

    Args:
        output: the output of the model.
        x: the sample, in the precision of the run.
    """
    is_rounded = output.dtype in HALF and x.dtype == torch.float32
    if is_rounded or not output.is_floating_point():
        raise InputError(
            f"the model returns {str(output.dtype).removeprefix('torch.')} in a run in float32",
            "Let the model return its scores (logits), not a decision, which has no gradient. "
            "Switch autocast off in its code, or use --dtype float64, which overrides it.",
        )


def complete_form(net: Net, batch: Batch) -> Net:
    """Return the model with its form of output (logits, probabilities, ...), if it was unknown.

    Loading runs a model on a blank sample and on noise. If the output is infinite or NaN on both,
    the form stays unknown (`undefined`). Then the first sample of the run decides.

    Raises:
        InputError: the output on the first sample is not finite.
    """
    if not net.undefined:
        return net
    one = batch[:1].trim().to(net.device, net.dtype)
    with exact_arithmetic(net.device), torch.no_grad():
        watched = run_watched(net.call, one.x, one.mask)
        output = net.read(watched.result)
    if not output.isfinite().all():
        raise InputError(
            f"the model's output is not finite, neither on a blank sample nor on {one.ids[0]}",
            "Check the weights. A masked class needs a finite logit.",
        )
    form = find_score_form(net, watched, output)
    call, read, scorer = convert_outputs(form, net.call, net.read, net.next_token)
    return replace(
        net,
        form=form,
        undefined=False,
        notes=net.notes + note_form(form),
        call=call,
        read=read,
        next_token=scorer,
    )
