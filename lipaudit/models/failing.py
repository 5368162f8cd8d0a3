"""Faults of a model: samples that it cannot be run on, outputs that are not one per sample."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lipaudit.data.batch import Batch
from lipaudit.errors import InputError, of_machine
from lipaudit.models.net import Net

AGREEMENT = 1e-4
"""Largest change of an output through rounding, as a share of the largest output."""


def first_failure(net: Net, batch: Batch) -> tuple[int, str, Exception | None] | None:
    """Run a model by itself on each sample of a batch, up to the first on which it fails.

    Returns:
        The place of that sample in the batch, what happens there, and what the model raised, if
        anything; None where nothing happens, or a fault of the machine is in the way.
    """
    for i in range(len(batch)):
        try:
            with torch.no_grad():
                output = net.output(batch[i : i + 1].trimmed())
        except Exception as error:  # whatever the model's own code raises
            if of_machine(error):
                return None
            said = str(error).partition("\n")[0]
            return i, f"{type(error).__name__}: {said}", error
        if not bool(output.isfinite().all()):
            return i, "its output is not finite", None
    return None


def require_per_sample(net: Net, batch: Batch, *, singly: bool) -> None:
    """Refuse a model that does not give every sample an output of its own.

    The first and the last sample are run alone and together. A model that gives other outputs
    from one pass to the next is not refused: measures say so by themselves.

    Args:
        net: the model.
        batch: samples; nothing is compared where there is only one.
        singly: whether samples are measured one at a time.

    Raises:
        InputError: it fails on two samples, gives another number of outputs, or outputs that
            depend on both.
    """
    if len(batch) < 2:
        return
    pair = batch.rows(torch.tensor([0, len(batch) - 1])).to(net.device, net.dtype)
    singles = list(pair.split(1))
    try:
        alone, again = (_outputs(net, singles) for _ in range(2))
    except InputError:
        return  # the measure names the sample
    try:
        together = _outputs(net, [pair])
    except InputError as error:
        if singly:
            return
        raise InputError(
            f"{net.info.architecture} runs on one sample and fails on two at a time "
            f"({error.message})",
            "Say --batch-size 1, or mend the model.",
        ) from error
    if len(together) != len(pair) or together.shape != alone.shape:
        raise InputError(
            f"{net.info.architecture} returns {tuple(together.shape)} for 2 samples and "
            f"{tuple(alone.shape)} for the same two, one at a time",
            "It must return one row per sample, whatever the batch.",
        )
    known = alone.isfinite() & together.isfinite()
    change, noise = (torch.where(known, each - alone, 0.0).abs() for each in (together, again))
    largest = torch.where(known, alone, 0.0).abs().amax()
    if change.amax() > AGREEMENT * largest + 10 * noise.amax():
        raise InputError(
            "the output of one sample depends on another one (beside it, outputs change by up to "
            f"{float(change.amax()):.2g})",
            "A model that uses the statistics of its batch has no figure per sample: let it use "
            "running statistics, as eval() does.",
        )


def require_padding_is_unread(net: Net, batch: Batch) -> None:
    """Refuse a model to whose outputs padding matters: the shortest text beside the longest.

    Args:
        net: the model.
        batch: texts with their mask.

    Raises:
        InputError: an output beside the other text is not the output alone.
    """
    assert batch.mask is not None
    lengths = batch.mask.sum(1)
    ends = torch.stack([lengths.argmin(), lengths.argmax()])
    try:
        require_per_sample(net, batch.rows(ends), singly=False)
    except InputError as error:
        raise InputError(
            f"{net.info.architecture} reads padding: {error.message}",
            "Attack texts of one length (--max-tokens cuts them); bounds, attention and jacobian "
            "measure each length by itself.",
        ) from error


def _outputs(net: Net, batches: Sequence[Batch]) -> Tensor:
    """Return the outputs of batches, joined.

    Raises:
        InputError: the model's own code fails, with what it said.
    """
    try:
        with torch.no_grad():
            return torch.cat([net.output(batch) for batch in batches])
    except Exception as error:  # whatever the model's own code raises
        if of_machine(error):
            raise
        said = str(error).partition("\n")[0]
        raise InputError(f"{type(error).__name__}: {said}") from error
