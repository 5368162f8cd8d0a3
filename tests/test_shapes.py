"""Shapes that annotations state are checked, also behind calls that passed."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest
import torch
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from lipaudit.theory.ingredients import rounding
from lipaudit.wings.certificates.rounding import round_up
from tests.shapes import checked


@checked
def twice(
    x: Float[Tensor, "n d"], rows: int | None = None, how: Literal["plain"] | None = None
) -> Float[Tensor, "n d"]:
    return (2 * x)[:rows]


@checked
@dataclass
class Pair:
    one: Float[Tensor, "2"]
    other: Float[Tensor, "2"]


@pytest.mark.parametrize(
    "call",
    [
        lambda: twice(torch.ones(3)),
        lambda: twice(torch.ones(2, 3).long()),
        lambda: twice(torch.ones(2, 3), torch.tensor(2)),
        lambda: twice(torch.ones(2, 3), how="other"),
        lambda: twice(torch.ones(2, 3), 1),
        lambda: Pair(torch.ones(2), torch.ones(3)),
        lambda: round_up(np.ones(1)),
        lambda: rounding(torch.ones(2)),
    ],
    ids=["dimensions", "dtype", "type", "literal", "result", "dataclass", "room", "theory"],
)
def test_what_no_annotation_allows_is_noticed(call):
    for _ in range(2):
        twice(torch.ones(2, 3))
        twice(torch.ones(2, 3), 2)
        twice(torch.ones(2, 3), how="plain")
        Pair(torch.ones(2), torch.ones(2))
        with pytest.raises(TypeCheckError):
            call()
