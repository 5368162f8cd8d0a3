"""Points of a ball, as the symbols e and as inputs, and what forms say of them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.shared import balls
from lipaudit.wings.certificates.form import Form


@pytest.fixture
def points() -> Callable[[Form, int], tuple[Tensor, Tensor]]:
    """Return e (count, n) in the unit ball, corners among them, and the inputs they stand for."""

    def draw(x: Form, count: int) -> tuple[Tensor, Tensor]:
        e = balls.draw_symbols(x, count, torch.Generator().manual_seed(count))
        return e, balls.inputs_at(x, e)

    return draw


@pytest.fixture
def excess() -> Callable[[Form, Tensor, Tensor], float]:
    return balls.excess
