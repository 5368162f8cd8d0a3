"""Requirements before any measurement: a fixed, differentiable function of each sample.

A model is refused if it mixes samples, reads padding, is random, or changes when it is observed. A
gradient that is not the derivative (a straight-through estimator, `detach`, a part under
`no_grad`, a wrong backward pass) gives a warning: autograd then describes another function.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lipaudit.data.batch import Batch
from lipaudit.errors import (
    InputError,
    UsageError,
    explain_failure,
    first_line,
    is_machine_error,
    summarise_error,
)
from lipaudit.models.net import Net
from lipaudit.models.precision import (
    Widening,
    can_autocast,
    compute_values,
    exact_arithmetic,
    name_dtypes,
    widen_casts,
)
from lipaudit.tables import Note, Notes

# Largest difference between two equal results, relative to the largest entry (float32 rounding).
SAME = 1e-5
# Largest relative difference between two ways to compute a result, with different rounding.
AGREES = 1e-4
RANDOM = "the model is random: two forward passes over the same samples differ"
# Advice on a model whose output changes from one forward pass to the next.
REPEAT = "Switch off dropout, noise and random choices, and state that a forward pass changes."


def agree(a: Tensor, b: Tensor, tolerance: float = SAME, *, each: int | None = None) -> bool:
    """Say whether two tensors are equal up to a tolerance.

    Args:
        a: a tensor.
        b: another tensor.
        tolerance: largest difference of two entries, relative to the largest entry of a.
        each: an axis, such as that of heads. Each slice along it is compared separately, relative
            to its own largest entry, so that a large head cannot hide an error of a small head.
            None: all entries are compared together.
    """
    if a.shape != b.shape:
        return False
    gap = _find_largest(a - b, each)
    size = _find_largest(a, each)
    return bool((gap <= tolerance * size).all())


def _find_largest(t: Tensor, each: int | None) -> Tensor:
    """Return the largest absolute entry of a tensor, or of each of its slices, in float64.

    Args:
        t: the tensor.
        each: the axis of the slices; None: the whole tensor.
    """
    largest = t.abs()
    axes = [axis for axis in range(t.ndim) if axis != each]
    if axes:
        largest = largest.amax(axes)
    return largest.double()


def require_repeat(net: Net, batch: Batch, other: Batch, output: Tensor) -> None:
    """Refuse a model that is random, or whose output for a sample depends on another sample.

    Outputs are compared sample by sample (`each=0`), relative to the largest entry of a sample.

    Args:
        net: the model.
        batch: two samples.
        other: the same first sample, and another second sample.
        output: the output on `batch`.

    Raises:
        InputError: the model is random, or its first sample depends on the second one.
    """
    with torch.no_grad(), widen_casts(net.dtype):
        if not agree(output, net.output(batch), each=0):
            raise InputError(RANDOM, REPEAT)
        beside_other = net.output(other)
        if not agree(output[:1], beside_other[:1], each=0):
            raise InputError(
                "the output of a sample depends on the other samples of its batch",
                "Use a model without batch statistics or attention across the batch.",
            )


def is_random(net: Net, batch: Batch) -> bool:
    """Say whether two forward passes of a model over the same samples differ."""
    with exact_arithmetic(net.device), torch.no_grad():
        # Outputs that are not finite are no sign of randomness: measures report them.
        first = net.output(batch).nan_to_num()
        second = net.output(batch).nan_to_num()
    return not agree(first, second, each=0)


def require_fixed(net: Net, batch: Batch) -> None:
    """Raise InputError if a model is random, as a run on the first sample shows.

    One sample: the model may take no batch of two, nor the mask of texts of unequal length.
    """
    if is_random(net, batch[:1].trim().to(net.device, net.dtype)):
        raise InputError(RANDOM, REPEAT)


@dataclass(frozen=True)
class SampleFailure:
    """The failure of a model on a sample.

    Attributes:
        index: the sample in its batch.
        reason: a description.
        cause: the exception of the model, if it raised one.
    """

    index: int
    reason: str
    cause: Exception | None = None


def find_first_failure(net: Net, batch: Batch) -> SampleFailure | None:
    """Return the first sample of a batch for which a model's output or its gradient fails.

    Each sample runs alone. None if there is no failure, or if the machine fails (memory).
    """
    for i in range(len(batch)):
        sample = batch[i : i + 1].trim()
        try:
            with torch.no_grad():
                output = net.output(sample)
            if not output.isfinite().all():
                return SampleFailure(i, "its output is not finite")
            # Gradients of a text model need its embedding module.
            if net.kind != "text" or net.entry is not None:
                with torch.enable_grad():
                    point = net.point(sample).detach().requires_grad_()
                    _compute_gradient(net.forward(point, sample).sum(), point)
        except Exception as error:  # the model's own code may raise anything
            if is_machine_error(error):
                return None
            return SampleFailure(i, summarise_error(error), error)
    return None


def require_per_sample(net: Net, batch: Batch, *, singly: bool) -> None:
    """Refuse a model whose output does not have an independent row per sample.

    The first and the last sample run alone and together, and the outputs are compared. A random
    model is not refused here: the measures note it.

    Args:
        net: the model.
        batch: samples; a single sample is not compared.
        singly: whether samples are measured one at a time.

    Raises:
        InputError: the model fails on two samples, returns another number of outputs, or outputs
            that depend on both samples.
    """
    if len(batch) < 2:
        return
    pair = batch.rows(torch.tensor([0, len(batch) - 1])).to(net.device, net.dtype)
    alone = None

    def run_alone() -> Tensor:
        """Return the outputs of both samples, of which each runs alone."""
        return torch.cat([net.output(sample) for sample in pair.split(1)])

    try:
        with torch.no_grad():
            alone = run_alone()
            again = run_alone()
            together = net.output(pair)
    except Exception as error:  # the model's own code may raise anything
        if is_machine_error(error):
            raise
        # Accept this if the model fails on a single sample, too (`alone` is None): the measure
        # will name the sample. Also accept it if samples are measured one at a time.
        if alone is None or singly:
            return
        raise InputError(
            f"{net.architecture} runs on one sample but fails on a batch of two "
            f"({summarise_error(error)})",
            "Use --batch-size 1, or fix the model.",
        ) from error
    if len(together) != len(pair) or together.shape != alone.shape:
        raise InputError(
            f"{net.architecture} returns {tuple(together.shape)} for 2 samples and "
            f"{tuple(alone.shape)} for the same two, one at a time",
            "Fix the model: it must return one row per sample for every batch size.",
        )
    _require_independent(alone, again, together)


def _require_independent(alone: Tensor, again: Tensor, together: Tensor) -> None:
    """Refuse a model if two samples in one batch give other outputs than each of them alone.

    Args:
        alone: outputs of the two samples, each run alone, (2, ...).
        again: the same from a second run. It differs from `alone` if the model is random.
        together: outputs of both samples in one batch.
    """
    # NaN and infinities are left out: the measures report them.
    finite = alone.isfinite() & together.isfinite()
    change = (together - alone).where(finite, 0.0).abs().amax()
    noise = (again - alone).where(finite, 0.0).abs().amax()  # not 0 for a random model
    largest = alone.where(finite, 0.0).abs().amax()
    # Two more passes of a random model may differ by more than `noise`, so allow ten times as
    # much.
    if change > AGREES * largest + 10 * noise:
        raise InputError(
            "the output of one sample depends on another one (beside it, outputs change by up to "
            f"{float(change):.2g})",
            "A BatchNorm needs running statistics; nn.TransformerEncoder and "
            "nn.MultiheadAttention need batch_first=True where samples are in the first axis.",
        )


def require_padding_is_unread(net: Net, batch: Batch) -> None:
    """Refuse a model whose outputs depend on padding: run the shortest text beside the longest.

    Args:
        net: the model.
        batch: texts with their mask.

    Raises:
        InputError: an output in the batch differs from the output alone.
    """
    advice = (
        "Let its forward take (ids, mask) and leave padding out, or attack texts of equal length "
        "(--max-tokens cuts them). bounds, attention and jacobian handle lengths separately."
    )
    pair = _pick_extreme_lengths(batch)
    explained = explain_failure(
        f"{net.architecture} cannot be run on texts of several lengths", advice
    )
    with explained, torch.no_grad():
        net.output(pair.to(net.device, net.dtype))
    try:
        require_per_sample(net, pair, singly=False)
    except InputError as error:
        raise InputError(f"{net.architecture} reads padding: {error.message}", advice) from error


def _pick_extreme_lengths(batch: Batch) -> Batch:
    """Return the shortest and the longest text of a batch; without a mask, the first two samples.

    Without a mask, all texts have the same length.
    """
    if batch.mask is None:
        return batch[:2]
    lengths = batch.mask.sum(1)
    return batch.rows(torch.stack([lengths.argmin(), lengths.argmax()]))


def require_autocast(net: Net, batch: Batch, autocast: str | None) -> Notes:
    """Refuse a model that cannot run under autocast, or a device without autocast.

    Args:
        net: the model.
        batch: samples, of which the first is run.
        autocast: bfloat16 or float16; None: there is nothing to check.

    Returns:
        A note on which figures are computed under autocast, or a warning if autocast does not
        change the output.

    Raises:
        UsageError: torch does not support the dtype on the device, or the model fails in it.
    """
    if autocast is None:
        return ()
    where = f"--autocast {autocast}"
    if not can_autocast(net.device, autocast):
        raise UsageError(
            f"{where}: torch {torch.__version__} does not support it on {net.device.type}",
            "Use the other half precision, or --device cuda.",
        )
    first = batch[:1].trim().to(net.device, net.dtype)
    with exact_arithmetic(net.device), torch.no_grad():
        exact = net.output(first)
        try:
            deployed = net.deploy(autocast).output(first)
        except Exception as error:  # the model's own code may raise anything
            if is_machine_error(error):
                raise
            raise UsageError(
                f"{where}: {net.architecture} fails ({first_line(error)})",
                "Use the other half precision, or leave it out.",
            ) from error
    if torch.equal(exact, deployed):
        text = f"{where} does not change the output of a sample: the model may switch it off"
        return (Note.warn("autocast", text),)
    text = (
        f"{where}: predictions are those of the plain forward pass in {autocast}, and may depend "
        "on the batch size. Attacks follow gradients in float32. Norms and bounds are not rounded"
    )
    return (Note.info("autocast", text),)


def note_fast_path(net: Net, batch: Batch) -> Notes:
    """Warn if PyTorch's fast path through `nn.TransformerEncoder` changes the model's output.

    The fast path is separate code that PyTorch may run if no gradients are needed. All measures
    run the model without it. So the warning says that the deployed model may give other outputs.
    Here the shortest and the longest sample run as one batch, without the fast path and with it.
    """
    if not any(isinstance(part, nn.TransformerEncoder) for part in net.module.modules()):
        return ()
    pair = _pick_extreme_lengths(batch).to(net.device, net.dtype)
    with (
        # If the model fails here, the measures name the sample.
        suppress(Exception),
        # The fast path uses nested tensors, for which torch warns that they are a prototype.
        warnings.catch_warnings(action="ignore"),
        # This switches the fast path off now, and restores the user's setting at the end.
        exact_arithmetic(net.device),
        torch.no_grad(),
    ):
        measured = net.output(pair)
        torch.backends.mha.set_fastpath_enabled(True)
        if not agree(measured, net.output(pair), AGREES):
            text = (
                "without gradients, PyTorch takes a fast path through nn.TransformerEncoder that "
                "sets outputs at padded tokens to 0. Outputs of this model then differ from those "
                "measured here. To run what was measured, call "
                "torch.backends.mha.set_fastpath_enabled(False)"
            )
            return (Note.warn("fast-path", text),)
    return ()


# Lengths of a step, relative to the length of the sample.
#
# A central difference D(h) = (g(h) - g(-h)) / 2h of g(t) = w . f(x + t u) has three errors:
# h^2 g''' / 6; rounding, eps |g| / h; and the kinks (ReLU, maxima) between x - h u and x + h u, of
# which a smaller h has fewer. In float64, at one of these steps all three errors are small. A
# wrong gradient differs at every step. A step of medium length comes first: it is enough for most
# models, and each further step costs two forward passes. The smallest steps are for networks with
# many kinks.
STEPS = (1e-4, 1e-3, 1e-5, 1e-6, 1e-7)
# Smallest difference, relative to the derivative, that rounding does not explain.
DIFFERS = 0.01
# Largest number of parameters of a model that is compared in float64 (the copy takes 2 GB).
WIDENED = 2**28


def compare_derivative(net: Net, batch: Batch) -> Notes:
    """Warn if autograd's gradient of a model is not the derivative of its output.

    Causes are a straight-through estimator, `detach` or a wrong backward pass. The gradient is
    compared with finite differences along one random direction, at two samples and in float64. If
    the model is too large for float64, or the model's own code fails, nothing is compared.

    Args:
        net: the model.
        batch: samples.

    Returns:
        A warning if parts of the model compute in half precision. And a warning if a gradient
        differs from the derivative: it says that the model is random, or names the sample.
    """
    if sum(p.numel() for p in net.module.parameters()) > WIDENED:
        return ()
    pair = batch[:2].trim()
    widening = Widening()  # the model's own conversions to half precision become float64, too
    try:
        with _widen_tensors(net.module), exact_arithmetic(net.device), widening:
            errors = _measure_gradient_errors(net, pair.to(net.device, torch.float64))
    except Exception as error:  # the model's own code may raise anything: the measures report it
        if is_machine_error(error):
            raise
        return ()
    notes: Notes = ()
    if widening.halves and net.dtype != torch.float64:
        text = (
            f"parts of the model are computed in {' and '.join(name_dtypes(widening.halves))}, so "
            "figures carry its rounding errors. To avoid them, use --dtype float64"
        )
        notes = (Note.warn("half-precision-parts", text),)
    sample = int(errors.argmax())
    if not errors[sample] > DIFFERS:
        return notes
    if is_random(net, pair.to(net.device, net.dtype)):
        text = f"{RANDOM}. Figures change from run to run, and gradients are of one pass each"
        return (*notes, Note.warn("random-model", text))
    return (
        *notes,
        Note.warn(
            "no-derivative",
            "the gradient of this model is not its derivative (they differ by "
            f"{float(errors[sample]):.0%} at sample {pair.ids[sample]}). Norms and gradient "
            "attacks of this run do not describe the function that the model computes",
        ),
    )


@contextmanager
def _widen_tensors(module: nn.Module) -> Iterator[None]:
    """Convert the tensors of a module to float64 inside the block, and restore them afterwards.

    Buffers, such as running statistics, are converted as well as weights: in float32 they would
    round the output.
    """
    tensors = [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
    originals = [t.data for t in tensors]
    try:
        for t in tensors:
            t.data = compute_values(t).detach().double()
        yield
    finally:
        for t, original in zip(tensors, originals, strict=True):
            t.data = original


def _measure_gradient_errors(net: Net, batch: Batch) -> Tensor:
    """Compare autograd with finite differences: return a relative error per sample, (samples,).

    Let f be the model and J its Jacobian at a sample x. Let u be a random direction of the input,
    and w a random direction of the output. Autograd gives the slope <J^T w, u>. It is compared
    with the central difference D(h) = <w, f(x + h u) - f(x - h u)> / 2h, for several steps h. The
    smallest error over h is returned.

    Args:
        net: the model, in float64.
        batch: the samples.
    """
    x = net.point(batch)
    generator = torch.Generator().manual_seed(0)
    # u, and its length ||u||, which is that of the sample.
    u, length = _draw_direction(x, net.find_free_tokens(batch), generator)
    axes = tuple(range(1, x.ndim))
    with torch.enable_grad():
        point = x.clone().requires_grad_()
        output = net.forward(point, batch)
        w = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
        gradient = _compute_gradient((output * w).sum(), point)  # J^T w
    slope = (gradient * u).sum(axes)
    # The usual slope along a random u with n entries other than 0 is ||J^T w|| ||u|| / sqrt(n).
    # At padding u is 0, so n is an average over the samples.
    entries = u.count_nonzero() / len(u)  # n
    steepness = torch.linalg.vector_norm(gradient, dim=axes)
    usual_slope = steepness * length / entries.sqrt()
    # Rounding error of <w, f>. D(h) has two such errors, divided by 2h: rounding / h in all.
    eps = torch.finfo(torch.float64).eps
    terms = (output.detach() * w).abs()
    rounding = eps * terms.flatten(1).sum(1)
    errors = torch.full_like(slope, torch.inf)
    for h in STEPS:
        with torch.no_grad():
            ahead = net.forward(x + h * u, batch)
            behind = net.forward(x - h * u, batch)
        difference = (ahead - behind) * w
        quotient = difference.flatten(1).sum(1) / (2 * h)  # D(h)
        errors = torch.minimum(errors, _compare_slopes(quotient, slope, usual_slope, rounding / h))
        if (errors <= DIFFERS).all():  # no sample differs: no further step is needed
            break
    return errors


def _compare_slopes(
    quotient: Tensor, slope: Tensor, usual_slope: Tensor, rounding: Tensor
) -> Tensor:
    """Return the difference of two slopes, relative to the largest of three slopes.

    All tensors are (samples,).

    Args:
        quotient: the slope by finite differences.
        slope: the slope by autograd. By chance it may be very small.
        usual_slope: the usual size of a slope along a random direction. The difference is relative
            to at least this, so that a small slope does not make it large.
        rounding: rounding error of the quotient; a difference up to this does not count.
    """
    # With the quotient in the scale, the result is at most 1 if autograd's gradient is 0.
    scale = torch.stack([slope.abs(), usual_slope, quotient.abs()]).amax(0)
    difference = ((quotient - slope).abs() - rounding).clamp_min(0)
    return difference / scale.clamp_min(1e-300)  # a tiny number avoids 0 / 0


def _draw_direction(
    x: Tensor, free: Tensor | None, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return a random direction u at each sample, and its length, which is that of the sample.

    A step h u is then relative to the sample. The length is at least 1, because a sample may be 0.

    Args:
        x: the samples.
        free: mask of the tokens that may change, (samples, tokens): u is 0 at all other tokens,
            such as padding; None: all may change.
        generator: draws u.
    """
    u = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
    if free is not None:
        u = u * free[..., None]
    axes = tuple(range(1, x.ndim))
    length = torch.linalg.vector_norm(x, dim=axes, keepdim=True).clamp_min(1.0)
    u = u * length / torch.linalg.vector_norm(u, dim=axes, keepdim=True)
    return u, length.flatten()


def _compute_gradient(value: Tensor, point: Tensor) -> Tensor:
    """Return the gradient of a value at a point; zeros if the value does not depend on it."""
    if not value.requires_grad:
        return torch.zeros_like(point)
    return torch.autograd.grad(value, point, materialize_grads=True)[0]
