"""The softmax Jacobian against its dense eigenvalues."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lipaudit.theory.softmax import SHARES, entropy, profile_rows, row_maxima, row_statistics

ROUNDING = 1e-14
SECULAR = 5e-13  # what ||M(P_i)|| is exact to, relative


def softmax_norm(p: Tensor) -> Tensor:
    return profile_rows(p).norm


def g(p: Tensor, k: int = 1) -> Tensor:
    return profile_rows(p, k).gk


def dense(p: Tensor) -> Tensor:
    """M(p) of every row, without the cancellation in p_i - p_i^2 on the diagonal."""
    m = -p[..., :, None] * p[..., None, :]
    m.diagonal(0, -2, -1).zero_()
    return m - torch.diag_embed(m.sum(-1))


def sigmas(p: Tensor) -> Tensor:
    """Singular values of M(p), largest first."""
    return torch.linalg.eigvalsh(dense(p)).flip(0)


def row(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


logits = st.lists(st.floats(-40, 40), min_size=2, max_size=12)
# Rows with repeated entries, masked keys and one dominant key.
groups = st.lists(
    st.sampled_from([-float("inf"), 0.0, 0.0, 1.0, 2.0, 2.0 + 1e-9, 30.0]), min_size=1, max_size=12
).filter(lambda values: max(values) > -float("inf"))
rows = st.one_of(logits, groups).map(lambda values: row(*values).softmax(-1))


@settings(deadline=None, max_examples=200)
@given(rows)
def test_norm_is_the_largest_eigenvalue(p):
    torch.testing.assert_close(softmax_norm(p), sigmas(p)[0], rtol=1e-10, atol=1e-300)
    assert softmax_norm(p) <= g(p) * (1 + ROUNDING) <= 0.5 * (1 + ROUNDING) ** 2


@settings(deadline=None, max_examples=100)
@given(rows)
def test_interlacing(p):
    sigma, top = sigmas(p), p.sort(descending=True).values
    for k in range(1, len(p) + 1):
        chain = torch.stack([top[k - 1], g(p, k), sigma[k - 1]])
        following = torch.cat([chain[1:], top[k : k + 1]])
        assert (chain[: len(following)] >= following - ROUNDING).all(), k


def near_one_hot(tail, *parts):
    rest = tail * row(*parts)
    return torch.cat([1 - rest.sum(0, keepdim=True), rest])


PARTS = [(1.0, 0.3, 0.2), (0.5, 0.5, 0.0), (1.0, 1e-9, 0.0), (1, 1, 1)]
TAILS = (1e-2, 1e-6, 1e-12, 1e-17, 1e-100, 1e-300)
PEAKED = [near_one_hot(tail, *parts) for tail in TAILS for parts in PARTS]
PEAKED.append(
    row(9e-20, 0.9877429525776191, *[0.0] * 5, 0.012257047422380818, 0, 1.4e-23, 1.2e-25)
)
TIED = [row(0.3 + gap, 0.3, 0.25, 0.15 - gap) for gap in (1e-1, 1e-4, 1e-8, 1e-12, 1e-15)]


@pytest.mark.parametrize(("rows", "rtol"), [(PEAKED, 1e-10), (TIED, 1e-13)])
def test_near_one_hot_rows_and_near_ties_keep_their_digits(rows, rtol):
    for p in rows:
        torch.testing.assert_close(softmax_norm(p), sigmas(p)[0], rtol=rtol, atol=0)
        assert softmax_norm(p) <= g(p)  # not above it by the last digit


def test_facts():
    assert softmax_norm(row(0, 1, 0)) == g(row(0, 1, 0)) == 0
    assert softmax_norm(row(0, 0, 0)) == g(row(0, 0, 0)) == 0
    assert softmax_norm(row(1)) == g(row(1)) == 0
    assert softmax_norm(row(0.5, 0.5, 0)) == g(row(0.5, 0.5, 0)) == 0.5
    assert softmax_norm(row(0.4, 0.4, 0.2)) == 0.4
    assert softmax_norm(torch.full((8,), 1 / 8)) == g(torch.full((8,), 1 / 8)) == 1 / 8
    assert g(row(0.25, 0.25, 0.25, 0.25, 0), 4) == 0.1875
    assert g(row(0.5, 0.5), 3) == 0


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_map_with_a_nan_has_no_maxima_and_its_neighbours_keep_theirs(rows):
    maps = torch.eye(5, dtype=torch.float64).add(0.1).softmax(-1).repeat(3, 1, 1)
    maps[1, -rows:] = torch.nan
    plain, found = row_maxima(maps[:1]), row_maxima(maps)
    for usual, maxima in zip(plain, found, strict=True):
        assert maxima[1].isnan()
        assert torch.equal(maxima[[0, 2]], usual.expand(2))
    assert all(each.isnan() for each in row_maxima(maps[1]))


def test_uniform_maps_of_every_length():
    """A tie of all keys: ||M|| = g_1 = p_(1) = 1/n, and no rounding may lose the row."""
    for n in range(2, 60):
        p = torch.zeros(3, n, dtype=torch.float64).softmax(-1)
        g1_max, norm_max = row_maxima(p)
        assert norm_max == p.max()
        assert g1_max >= norm_max
        assert (g(p) >= softmax_norm(p)).all()
        assert (row_statistics(profile_rows(p, k=2))["g1_ratio"] >= 1).all()


@settings(deadline=None, max_examples=200)
@given(
    st.integers(0, 10**6), st.sampled_from([0.1, 1.0, 5.0, 50.0]), st.integers(1, 9), st.booleans()
)
def test_largest_norm_of_a_map(seed, spread, n, doubled):
    """Of keys that are there twice, too; some rows have no keys."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, n, n + 2, generator=generator, dtype=torch.float64) * spread
    maps = (logits.repeat(1, 2, 2) if doubled else logits).softmax(-1)
    maps[0, 1:] = 0
    g1_max, norm_max = row_maxima(maps)
    truth = torch.linalg.eigvalsh(dense(maps))[..., -1].amax(-1)
    torch.testing.assert_close(norm_max, truth, rtol=1e-12, atol=0)
    torch.testing.assert_close(norm_max, softmax_norm(maps).amax(-1), rtol=SECULAR, atol=0)
    torch.testing.assert_close(g1_max, g(maps).amax(-1), rtol=1e-14, atol=0)
    assert (g1_max >= norm_max).all()


def test_entropy_of_known_rows():
    p = torch.stack([row(0.25, 0.25, 0.25, 0.25), row(0, 1, 0, 0), row(0.5, 0, 0.5, 0)])
    torch.testing.assert_close(entropy(p).exp(), row(4, 1, 2))
    assert str(float(entropy(p)[1])) == "0.0"  # in files of rows, -0 looks like an error


def regimes(p, gamma=0.1):
    """The name of the regime of each row, None where it has none."""
    found = row_statistics(profile_rows(p), gamma=gamma)
    each = zip(*(found[name].tolist() for name in SHARES), strict=True)
    return [
        next((n for n, held in zip(SHARES, row, strict=True) if held == 1), None) for row in each
    ]


long_rows = st.lists(st.floats(-9, 9), min_size=7, max_size=30).map(
    lambda values: row(*values).softmax(-1)
)


@settings(deadline=None, max_examples=300)
@given(st.one_of(rows, long_rows), st.sampled_from([0.02, 0.1, 0.2]))
def test_regimes_confine_the_largest_entry(p, gamma):
    (kind,), keys = regimes(p[None], gamma), (p > 0).sum().item()
    threshold, first = max(gamma, 2 / keys), p.max().item()
    if keys <= 8:
        assert kind is None
        return
    largest = g(p).item()
    assume(abs(largest - threshold) > 1e-15)  # on the border itself the last digit decides
    assert (kind == "intermediate") == (largest > threshold)
    root = (1 - 4 * threshold) ** 0.5
    if kind == "uniform":
        assert first <= (1 - root) / 2 + ROUNDING
    if kind == "categorical":
        assert first >= (1 + root) / 2 - ROUNDING


def test_regimes_of_known_rows():
    uniform = torch.full((40,), 1 / 40, dtype=torch.float64)
    peaked = torch.cat([row(0.97), torch.full((39,), 0.03 / 39, dtype=torch.float64)])
    torn = torch.cat([row(0.5, 0.5 - 1e-6), torch.full((38,), 1e-6 / 38, dtype=torch.float64)])
    short = torch.cat([row(0.5, 0.5), torch.zeros(38)])
    kinds = regimes(torch.stack([uniform, peaked, torn, short]))
    assert kinds == ["uniform", "categorical", "intermediate", None]


def test_a_row_too_short_for_its_regimes_to_differ_has_none():
    """2/n >= 1/4 up to n = 8: 0.56 of 4 keys is not close to one-hot, 0.9 of 9 keys is."""
    four = row(0.56, 0.2, 0.12, 0.12)
    for n in (4, 8, 9):
        uniform, peaked = torch.full((n,), 1 / n), torch.full((n,), 0.1 / (n - 1))
        peaked[0] = 0.9
        known = ["uniform", "categorical"] if n > 8 else [None, None]
        assert regimes(torch.stack([uniform, peaked]).double()) == known
    assert regimes(four[None]) == [None]
