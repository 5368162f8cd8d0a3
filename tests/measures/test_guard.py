"""The guard of the product: a bound below the exact norm ends the run, whatever made it so."""

from __future__ import annotations

import pytest
import torch

from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import EvaluationError, ExitCode
from lipaudit.measures import bounds
from lipaudit.models.sources.loading import load_net
from lipaudit.theory.bounds import head_bounds as theory
from lipaudit.theory.bounds.catalogue import BOUNDS


@pytest.fixture(scope="module")
def demo():
    net = load_net("demo")
    return net, load_data("demo", net, DataOptions(samples=2)).batch


@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_below_the_norm_ends_the_run(demo, monkeypatch, name):
    head_bounds = theory.head_bounds

    def wrong(heads, **options):
        values = head_bounds(heads, **options)
        values[name] = values[name].clone()
        values[name][1, 2] *= 1e-7
        return values

    monkeypatch.setattr(bounds, "head_bounds", wrong)
    with pytest.raises(
        EvaluationError, match=rf"{name} of head 0\.2 \(blocks\.0\.attn\)"
    ) as caught:
        list(bounds.measure(*demo_parts(demo), bounds.BoundsOptions()))
    assert caught.value.exit_code is ExitCode.INTERNAL
    assert demo[1].ids[1] in str(caught.value)


def test_a_layer_above_the_sum_of_its_heads_ends_the_run(demo, monkeypatch):
    monkeypatch.setattr(bounds, "spectral_norm", lambda a: torch.tensor(1e-9))
    with pytest.raises(EvaluationError, match=r"sharp_rss of layer 0"):
        list(bounds.measure(*demo_parts(demo), bounds.BoundsOptions()))


def test_ties_lost_by_rounding_would_not_pass_unseen(demo, monkeypatch):
    """The fault that once printed bounds of 1.29 for a norm of 10.7, put back."""
    zeros = lambda p: (p.amax((-2, -1)) * 0, p.amax((-2, -1)) * 0)  # noqa: E731
    monkeypatch.setattr(theory, "row_maxima", zeros)
    with pytest.raises(EvaluationError, match="below the exact norm"):
        list(bounds.measure(*demo_parts(demo), bounds.BoundsOptions()))


def demo_parts(demo):
    net, batch = demo
    return net, [batch]
