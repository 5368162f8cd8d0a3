"""Patch attacks: beside exhaustive search, a closed form, and what is no grid."""

from itertools import combinations

import pytest
import torch
from torch import nn

from lipaudit import ModelSpec, measure
from lipaudit.attacks.balls import Ball, check_inside, distance, project
from lipaudit.attacks.evaluate import Chunk, evaluate_chunk
from lipaudit.attacks.kinds import read_plan
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import EvaluationError, UsageError
from lipaudit.models.sources.loader import LoadOptions, load_net
from lipaudit.tables.trials import parse_budget

SIDE, PATCH, PLACES = 6, (2, 3), 6


def images(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 2, SIDE, SIDE, dtype=torch.float64, generator=generator)


def patches_of(place):
    """Rows and columns of a place of the grid, counted row by row."""
    row, column = divmod(place, SIDE // PATCH[1])
    return (
        ...,
        slice(row * PATCH[0], (row + 1) * PATCH[0]),
        slice(column * PATCH[1], (column + 1) * PATCH[1]),
    )


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_linear_classifier_falls_exactly_where_the_k_best_patches_turn_it(k):
    x, w = images(48), images(1, seed=1)[0] - 0.5
    # Margin of class 0: w (z - x) + m, with thresholds around what k patches can take away.
    most = torch.maximum(-w * (1 - x), w * x)
    gains = torch.stack([most[patches_of(p)].sum((1, 2, 3)) for p in range(PLACES)], 1)
    largest = torch.stack([gains[:, list(c)].sum(1) for c in combinations(range(PLACES), k)], 1)
    margin = largest.amax(1) * torch.linspace(0.9, 1.1, 48, dtype=torch.float64)
    offset = margin - (w * x).flatten(1).sum(1)

    def f(z):
        score = (w * z).flatten(1).sum(1)[:, None] + at[: len(z), None]
        return torch.cat([score, torch.zeros_like(score)], 1)

    broken = []
    for i in range(len(x)):
        at = offset[i : i + 1]
        plan = read_plan("patch", radii=[parse_budget(f"{k}patches")], restarts=1)
        chunk = Chunk(0, x[i : i + 1], torch.zeros(1, dtype=torch.int64))
        clean, outcome = evaluate_chunk(f, chunk, plan, patch=PATCH)
        assert bool(clean.robust)
        assert outcome.distance <= k
        broken.append(not bool(outcome.robust))
    assert broken == (margin < largest.amax(1)).tolist()
    assert 0 < sum(broken) < len(broken)


@pytest.mark.ci
def test_one_pixel_of_a_digit_is_attacked_as_well_as_exhaustive_search_does():
    """Of 8x8 pixels, each may take any of the 17 grey levels of digits: every image is tried."""
    report = measure("demo", "attack", eps="1patch", patch_size=1, samples=8, steps=10)
    section = report.section("attack")
    net = load_net("demo", LoadOptions(device="cpu"))
    batch = load_data("demo", net, DataOptions(samples=8)).batch
    assert section.samples["ids"] == batch.ids
    values = torch.arange(17) / 16
    survived = []
    for x, y in zip(batch.x, batch.y, strict=True):
        each = x.flatten().repeat(64, 17, 1)
        each[torch.arange(64), :, torch.arange(64)] = values
        with torch.no_grad():
            logits = net.forward(each.reshape(-1, 1, 8, 8), batch)
        survived.append(int((logits.argmax(1) == y).all()))
    assert section.samples["robust@patch,patch,1"] == tuple(survived)
    assert 0 < sum(survived) < 8


def test_a_point_with_more_patches_or_beyond_the_box_is_outside_the_ball():
    x = images(2)
    ball = Ball("patch", 2.0, patch=PATCH)
    z = x.clone()
    for place in (0, 3):
        z[patches_of(place)] = 1 - z[patches_of(place)]
    assert torch.equal(project(z, x, ball), z)
    assert torch.equal(check_inside(z, x, ball, "mine"), z)
    assert distance(z, x, "patch", PATCH).tolist() == [2.0, 2.0]
    far = z.clone()
    far[patches_of(4)] += 1e-3  # the smallest change is undone
    assert torch.equal(project(far, x, ball), z)
    with pytest.raises(EvaluationError, match="left the ball or the box on 2 samples"):
        check_inside(far, x, ball, "mine")
    z[patches_of(0)] = 1.5
    with pytest.raises(EvaluationError, match="left the ball or the box on 2 samples"):
        check_inside(z, x, ball, "mine")


def test_models_without_patches_of_their_own_are_attacked_in_those_of_the_option():
    parts = nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    spec = ModelSpec(nn.Sequential(*parts), (3, 8, 8))
    how = {"data": (torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 0, 1])), "eps": "1/255,2patches"}
    with pytest.raises(UsageError, match="shows no grid of patches"):
        measure(spec, "attack", **how)
    report = measure(spec, "attack", **how, patch_size=4, attack="patch,fgsm")
    section = report.section("attack")
    assert {(row.attack, row.norm, row.eps_text) for row in section.rows} == {
        (name, norm, eps)
        for norm, eps, own in (("linf", "1/255", "fgsm"), ("patch", "2", "patch"))
        for name in ("worst", own)
    }
