"""The search for steep tokens against dense Jacobians, free searches and closed forms."""

import math
from dataclasses import replace

import pytest
import torch

from lipaudit.theory.products import dense_jacobian
from lipaudit.wings.growth import searches
from lipaudit.wings.growth.searches import climb, steepest_tokens
from lipaudit.wings.growth.worst_tokens import move_heads, power_law
from tests.theory.cases import growing_head


def norm(heads, x, causal):
    jacobian = dense_jacobian(move_heads(heads, x[None], causal=causal))[0, 0]
    return float(torch.linalg.matrix_norm(jacobian, 2))


def searched(heads, radius, lengths, *, seed=0, causal=False):
    ends = steepest_tokens(heads, radius, lengths, seed=seed, causal=causal)
    return [float(end.norm.max()) for end in ends]


@pytest.mark.parametrize("causal", [False, True])
def test_norms_are_those_of_whole_tokens_whatever_the_seed_and_the_rounding(causal):
    heads, radius, lengths = growing_head(2), 4.0, (2, 8)
    ends = list(steepest_tokens(heads, radius, lengths, seed=0, causal=causal))
    for n, end in zip(lengths, ends, strict=True):
        assert len(end.norm) == searches.SEARCHES
        for points, copies, found in zip(end.points, end.copies, end.norm, strict=True):
            x = points.repeat_interleave(copies, 0)
            assert len(x) == n
            assert float(x.norm(dim=1).max()) <= radius * (1 + 1e-12)
            assert float(found) == pytest.approx(norm(heads, x, causal), rel=1e-4)
    noise = torch.Generator().manual_seed(0)

    def rounded(projection):
        off = torch.randn(projection.weight.shape, generator=noise, dtype=torch.float64)
        return replace(projection, weight=projection.weight * (1 + 1e-7 * off))

    other = replace(heads, **{n: rounded(getattr(heads, n)) for n in ("to_q", "to_k", "to_v")})
    again = searched(other, radius, lengths[1:], seed=1, causal=causal)
    assert again == pytest.approx([float(ends[1].norm.max())], rel=1e-3)


def free(heads, radius, n, starts=12):
    """The best of plain ascents over all tokens, each where it likes."""
    gen = torch.Generator().manual_seed(7)
    width = heads.x.shape[2]

    def heights(rows):
        z = rows.view(len(rows), n, width)
        x = radius * z / z.norm(dim=2, keepdim=True).clamp_min(1.0)
        jacobian = dense_jacobian(move_heads(heads, x, causal=False))[:, 0]
        return torch.linalg.matrix_norm(jacobian, 2)

    start = torch.randn(starts, n * width, generator=gen, dtype=torch.float64)
    return float(climb(heights, start, steps=60).height.max())


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("radius", [0.5, 1.5])
def test_no_search_over_all_tokens_ends_higher(seed, radius):
    heads = growing_head(seed, biased="q" * (seed % 2))
    assert searched(heads, radius, (5,))[0] >= 0.9999 * free(heads, radius, 5)


def test_the_worst_case_grows_like_root_n_under_the_published_bound():
    heads, radius = growing_head(5, biased=""), 6.0
    lengths = (64, 4096)
    norms = torch.tensor(searched(heads, radius, lengths), dtype=torch.float64)
    n = torch.tensor(lengths, dtype=torch.float64)
    assert power_law(n, norms).exponent == pytest.approx(0.5, abs=0.02)
    # Two leaders -x and x that every follower is torn between (closed form at large R): each row
    # has P = (1/2, 1/2), c = v / 2, and moves by s |W_K q| when a leader does.
    wq, wk, wv = (p.weight[0] for p in (heads.to_q, heads.to_k, heads.to_v))
    a = float(heads.scale[0, 0]) * wq @ wk.mT
    sizes = [float(torch.linalg.matrix_norm(m, 2)) for m in (wv, a)]
    castin = math.sqrt(3) * sizes[0] * (sizes[1] ** 2 * radius**4 * (4 * n + 1) + n).sqrt()
    assert bool((norms <= castin).all())
    left, _, right = torch.linalg.svd(a)
    z = right[1] - (right[1] @ right[0]) * right[0]
    tilt = math.log(4096) / (sizes[1] * radius**2)
    leaders = torch.stack([z + tilt * right[0], -z + tilt * right[0]])
    for follower in (left[:, 0], -left[:, 0]):
        points = torch.cat([leaders / leaders.norm(dim=1, keepdim=True), follower[None]])
        x = radius * points.repeat_interleave(torch.tensor([1, 1, 62]), 0)
        assert norm(heads, x, False) <= 1.0001 * norms[0]


def test_growth_with_known_norms():
    flat = growing_head(3, biased="")
    zero = replace(flat.to_q, weight=0 * flat.to_q.weight)
    values = float(torch.linalg.matrix_norm(flat.to_v.weight[0], 2))
    # Without logits P is uniform and J = P kron W_V: no growth.
    assert searched(replace(flat, to_q=zero), 2.0, (4, 64)) == pytest.approx([values] * 2)
    # One token attends to itself.
    assert searched(flat, 3.0, (1,)) == pytest.approx([values])
    # Without values there is nothing to move.
    nothing = replace(flat, to_v=replace(flat.to_v, weight=0 * flat.to_v.weight))
    assert searched(nothing, 2.0, (4,)) == [0.0]


def test_steps_of_a_climb_only_rise_and_rows_are_alone():
    def heights(x):
        return -(x[:, 0] ** 4) - 100 * (x[:, 1] - x[:, 0]).square() + x[:, 0]

    start = torch.tensor([[2.0, -1.0], [0.1, 3.0], [-2.0, 0.5]], dtype=torch.float64)
    climbs = [climb(heights, start, steps=k).height for k in range(0, 40, 4)]
    for low, high in zip(climbs[:-1], climbs[1:], strict=True):
        assert bool((high >= low).all())
    top = (1 / 4) ** (1 / 3)
    assert climbs[-1].tolist() == pytest.approx([top - top**4] * 3, rel=1e-5)
    alone = climb(heights, start[1:2], steps=9)
    assert float(climb(heights, start, steps=9).height[1]) == pytest.approx(float(alone.height[0]))
