"""Measures through their own functions, and Jacobians of plain autograd to hold them to."""

from typing import Any

import torch
from torch import Tensor

from lipaudit.data.batch import Batch
from lipaudit.measures import load_measures
from lipaudit.models.net import Net
from lipaudit.tables import Section


def run_measure(name: str, net: Net, *batches: Batch, **options: Any) -> list[Section]:
    """Measure batches, and return the sections."""
    known = load_measures()[name]
    given = known.options(**options)
    return known.summarise(list(known.compute(net, batches, given)), given)


def dense(function: Any, x: Tensor) -> Tensor:
    """The Jacobian of a function: (outputs, inputs)."""
    jacobian = torch.autograd.functional.jacobian(function, x, vectorize=True)
    return jacobian.reshape(-1, x.numel())


def dense_norm(function: Any, x: Tensor) -> float:
    return float(torch.linalg.matrix_norm(dense(function, x), 2))
