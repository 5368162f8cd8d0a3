"""Fixtures of the layers in `cases`."""

from collections.abc import Callable

import pytest

from lipaudit.theory.policy import Policy
from tests.theory import cases


@pytest.fixture(scope="session")
def random_layer() -> Callable[..., cases.Layer]:
    """The factory: random_layer("rotary", seed=3, gain=2.0, n=9, keys=4, ...), float64."""
    return cases.random_layer


POLICIES = {
    "dense": Policy(),  # small layers take exact block norms
    "formula": Policy(dense_entries=0),
    "single": Policy(dense_entries=0, single_keys=1, single_blocks=1),
}


@pytest.fixture(params=POLICIES, scope="session")
def policy(request) -> Policy:
    """Every way in which small layers are bounded."""
    return POLICIES[request.param]


@pytest.fixture(params=cases.CASES)
def layer(request) -> cases.Layer:
    """One random float64 layer of every kind."""
    return cases.random_layer(request.param)
