"""Which sample a model cannot be run on, where measuring it has failed."""

from __future__ import annotations

import torch

from lipaudit.data.batch import Batch
from lipaudit.errors import of_machine
from lipaudit.models.net import Net


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
