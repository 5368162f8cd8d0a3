"""Which part of a linear map feeds which part of q, k or v: exact zeros of a few products."""

import pytest
import torch

from lipaudit.models.attention.project import probes
from lipaudit.models.attention.project.probes import Probed

HEADS = 12


def probed(columns: torch.Tensor) -> Probed:
    """Heads of two channels, each with its columns of y, in both tokens of one window."""
    y = torch.randn(2, 2 * HEADS, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return Probed((y[:, columns] * 1e-12).transpose(0, 1)[None], (y,), lambda t: t)


def heads_of(source: Probed) -> torch.Tensor | None:
    return probes.label_fed(source, torch.arange(HEADS).view(1, HEADS, 1, 1), rows=False)


def test_every_column_has_the_head_that_it_feeds():
    columns = torch.randperm(2 * HEADS, generator=torch.Generator().manual_seed(1))
    labels = heads_of(probed(columns.view(HEADS, 2)))
    assert labels[columns].tolist() == [h for h in range(HEADS) for _ in range(2)]


@pytest.mark.parametrize("pair", [(0, 11), (3, 4), (7, 8)])
def test_a_column_that_feeds_two_heads_is_noticed(pair):
    columns = torch.arange(2 * HEADS).view(HEADS, 2).clone()
    columns[pair[1], 0] = columns[pair[0], 0]
    assert heads_of(probed(columns)) is None


def test_a_column_that_feeds_nothing_has_no_head():
    columns = torch.arange(2 * HEADS).view(HEADS, 2).clone()
    columns[5, 1] = columns[5, 0]
    assert heads_of(probed(columns))[11] == -1


def test_twelve_heads_take_six_products(monkeypatch):
    """C(6, 3) = 20 halves of six; with one for a bit and one against it they took nine."""
    pulls, real = [], Probed.pull
    monkeypatch.setattr(Probed, "pull", lambda *args: pulls.append(1) or real(*args))
    heads_of(probed(torch.arange(2 * HEADS).view(HEADS, 2)))
    assert len(pulls) == 6
