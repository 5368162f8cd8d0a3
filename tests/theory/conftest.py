"""Fixtures of the layers in `cases`."""

from collections.abc import Callable

import pytest

from tests.theory import cases


@pytest.fixture(scope="session")
def random_layer() -> Callable[..., cases.Layer]:
    """The factory: random_layer("rotary", seed=3, gain=2.0, n=9, keys=4, ...), float64."""
    return cases.random_layer


@pytest.fixture(params=cases.CASES)
def layer(request) -> cases.Layer:
    """One random float64 layer of every kind."""
    return cases.random_layer(request.param)
