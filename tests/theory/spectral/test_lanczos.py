"""Batched Lanczos against dense eigenvalues, and certificates against singular values."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from scipy.special import betaincinv

from lipaudit.errors import EvaluationError
from lipaudit.theory import WITHIN
from lipaudit.theory.matrix_norms import (
    map_norm,
    nonnegative_norm,
    positive_vector,
    spectral_norm,
)
from lipaudit.theory.spectral import ETA, random_starts, spectral_norms


def random_operators(count, size, seed=0):
    """Symmetric positive matrices of very different scales, (count, size, size)."""
    gen = torch.Generator().manual_seed(seed)
    factors = torch.randn(count, size, size, generator=gen, dtype=torch.float64)
    return (factors @ factors.mT) * torch.logspace(-6, 6, count, dtype=torch.float64)[
        :, None, None
    ]


def select_from(matrices):
    def select(index):
        part = matrices[index]
        return lambda u: (part @ u[..., None])[..., 0]

    return select


def largest(matrices):
    return torch.linalg.eigvalsh(matrices)[:, -1].sqrt()


def with_spectrum(values):
    """One symmetric matrix with these eigenvalues; the first eigenvector comes with it."""
    gen = torch.Generator().manual_seed(1)
    noise = torch.randn(len(values), len(values), generator=gen, dtype=torch.float64)
    basis = torch.linalg.qr(noise).Q
    return (basis * torch.as_tensor(values, dtype=torch.float64)) @ basis.T, basis


@pytest.mark.parametrize("size", [1, 2, 3, 20, 70])
def test_norms_are_roots_of_the_largest_eigenvalues(size):
    matrices = random_operators(12, size)
    norms = spectral_norms(select_from(matrices), random_starts(range(12), size), tol=1e-11)
    torch.testing.assert_close(norms.norm, largest(matrices), rtol=1e-10, atol=0)
    assert norms.converged.all()
    assert (norms.upper >= norms.norm).all()


def test_a_problem_does_not_depend_on_its_batch():
    matrices, start = random_operators(9, 40), random_starts(range(9), 40)
    together = spectral_norms(select_from(matrices), start)
    for i in range(9):
        alone = spectral_norms(select_from(matrices[i : i + 1]), start[i : i + 1])
        torch.testing.assert_close(alone.norm[0], together.norm[i], rtol=1e-13, atol=0)
        torch.testing.assert_close(alone.upper[0], together.upper[i], rtol=1e-6, atol=0)
        assert alone.products[0] == together.products[i]


def test_finished_problems_leave_the_operator():
    easy = torch.eye(30, dtype=torch.float64).expand(3, -1, -1)
    matrices = torch.cat([easy, random_operators(2, 30)])
    asked = []

    def select(index):
        asked.append(index.tolist())
        return select_from(matrices)(index)

    norms = spectral_norms(select, random_starts(range(5), 30))
    assert asked[:2] == [[0, 1, 2, 3, 4], [3, 4]]
    torch.testing.assert_close(norms.norm, largest(matrices), rtol=1e-4, atol=0)
    asked.clear()
    spectral_norms(select, random_starts(range(5), 30), rebuild=2.0)
    assert asked == [[0, 1, 2, 3, 4]]


def test_coordinates_without_start_do_not_count():
    matrices, start = random_operators(4, 12), random_starts(range(4), 12)
    matrices[1] = 0
    padded, longer = F.pad(matrices, (0, 5, 0, 5)), F.pad(start, (0, 5))
    small = spectral_norms(select_from(matrices), start, max_steps=6)
    large = spectral_norms(select_from(padded), longer, max_steps=6)
    torch.testing.assert_close(large.norm, small.norm, rtol=1e-12, atol=0)
    torch.testing.assert_close(large.upper, small.upper, rtol=1e-9, atol=0)
    # A product that vanishes is met once more, far larger: it may have underflowed.
    assert (small.norm[1], small.upper[1], small.products[1]) == (0, 0, 2)
    nothing = spectral_norms(select_from(padded), 0 * longer)
    assert nothing.norm.tolist() == [0.0] * 4
    assert nothing.converged.all()


def test_too_few_steps_are_marked():
    matrices = random_operators(5, 60)
    norms = spectral_norms(select_from(matrices), random_starts(range(5), 60), max_steps=3)
    assert not norms.converged.any()
    assert norms.products.tolist() == [3] * 5
    truth = largest(matrices)
    assert (norms.norm < truth).all()
    assert (truth <= norms.upper).all()
    assert norms.upper.isfinite().all()


@pytest.mark.parametrize("misled", [False, True])
@pytest.mark.parametrize("steps", [2, 4])
def test_the_limit_fails_no_more_often_than_it_says(steps, misled):
    matrix, basis = with_spectrum([4.0, 3.6, *torch.linspace(0, 3, 38).tolist()])
    start = random_starts(range(4000), 40)
    guess = (5 * basis[:, 1]).expand_as(start) if misled else None
    norms = spectral_norms(lambda _: lambda u: u @ matrix, start, guess=guess, max_steps=steps)
    failures = int((norms.upper < 2.0).sum())
    # The count is binomial with mean <= 4000 ETA = 4; more than 13 has probability < 1e-4.
    assert failures <= 13


def test_the_limit_after_one_step_in_closed_form():
    matrix, _ = with_spectrum(torch.linspace(0, 5, 200).tolist())
    start = random_starts([3], 200)
    norms = spectral_norms(lambda _: lambda u: u @ matrix, start, max_steps=1)
    u = start[0] / start[0].norm()
    alpha = u @ matrix @ u
    beta = (matrix @ u - alpha * u).norm()
    # <u, v>^2 is Beta(1/2, (n - 1)/2); ours bounds its density by the value at 0.
    delta = math.sqrt(betaincinv(0.5, 199 / 2, ETA))
    torch.testing.assert_close(norms.upper[0], (alpha + beta / delta).sqrt(), rtol=1e-5, atol=0)


def test_a_guess_tells_the_first_singular_value_from_one_close_to_it():
    size = 1000
    values = torch.linspace(0, 0.9, size, dtype=torch.float64)
    values[:2] = torch.tensor([1.016, 1.0])
    start = random_starts(range(300), size)
    near = torch.zeros(size, dtype=torch.float64)
    near[0], near[5:] = 0.5, 0.02

    def short(guess):
        norms = spectral_norms(lambda _: lambda u: u * values, start, guess=guess, within=0.05)
        assert norms.converged.all()
        return int((norms.norm < math.sqrt(1.016) * (1 - 1e-4)).sum())

    assert short(None) > 3
    assert short(torch.zeros_like(start)) == short(None)
    assert short(near.expand_as(start)) == 0


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_in_one_dimension_no_guess_cancels_the_start(sign):
    start = torch.tensor([[2.0], [3.0]], dtype=torch.float64)
    norms = spectral_norms(lambda _: lambda u: 9.0 * u, start, guess=sign * start)
    assert norms.norm.tolist() == pytest.approx([3.0, 3.0])


def test_the_limit_holds_with_a_guess_in_a_few_dimensions():
    # The density of a random unit vector's component is unimodal from three dimensions on only.
    for size in (2, 3):
        values = torch.ones(size, dtype=torch.float64)
        values[0] = 1.004
        start = random_starts(range(4000), size)
        guess = torch.eye(size, dtype=torch.float64)[:1].expand_as(start)
        norms = spectral_norms(lambda _, a=values: lambda u: u * a, start, guess=guess, within=0.2)
        above = norms.upper < math.sqrt(1.004) * (1 - 1e-12)
        assert int(above.sum()) <= 3 * ETA * len(start), size


def test_no_copies_of_a_converged_value_appear():
    values = [100.0, *torch.linspace(1.0, 2.0, 299).tolist()]
    matrix, _ = with_spectrum(values)
    select = select_from(matrix.float()[None])
    norms = spectral_norms(
        select, random_starts([0], 300).float(), tol=0.0, within=0.0, max_steps=60
    )
    assert norms.norm[0] == pytest.approx(10.0, rel=1e-6)
    # Without reorthogonalisation the copies of 100 would ruin det(t - T) and with it the limit.
    assert norms.upper[0] == pytest.approx(10.0, rel=1e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_product_that_is_not_finite_names_its_problem(value):
    matrices = random_operators(4, 10)
    matrices[2, 3, 3] = value
    with pytest.raises(EvaluationError, match=r"problem 2 .* step 1\b"):
        spectral_norms(select_from(matrices), random_starts(range(4), 10))


def test_starts_are_gaussian_prefixes_of_longer_ones_and_leave_the_global_generator_alone():
    state = torch.get_rng_state()
    start = random_starts(range(50), 400)
    assert torch.equal(torch.get_rng_state(), state)
    for size in (*range(1, 40), 90, 399):
        assert torch.equal(random_starts([7], size)[0], start[7, :size])
    assert start.mean().abs() < 4 / math.sqrt(start.numel())
    assert start.square().mean() == pytest.approx(1.0, abs=4 * math.sqrt(2 / start.numel()))
    assert (torch.corrcoef(start) - torch.eye(50)).abs().max() < 0.3


@pytest.mark.parametrize(
    ("dtype", "powers"),
    [(torch.float64, (-150, -60, 60, 150)), (torch.float32, (-32, -12, 12, 32))],
)
def test_norms_of_any_size(dtype, powers):
    """A is met as J (J^T u), whose square underflows or overflows long before the norm does."""
    gen = torch.Generator().manual_seed(0)
    j = torch.randn(6, 40, 50, generator=gen, dtype=torch.float64).to(dtype)
    guess = torch.randn(6, 40, generator=gen, dtype=torch.float64).to(dtype)
    start = random_starts(range(6), 40).to(dtype)

    def norms_of(power):
        # Every other one keeps its size: what is done for one is not done to its neighbours.
        factors = torch.tensor([1.0, 10.0**power] * 3, dtype=torch.float64).to(dtype)
        part = j * factors[:, None, None]
        apply = lambda u: (part @ (part.mT @ u[..., None]))[..., 0]  # noqa: E731
        guessed = guess * factors[:, None] ** 0.5
        norms = spectral_norms(lambda i: apply, start, guess=guessed, rebuild=2.0)
        return norms, factors.double()

    want, _ = norms_of(0)
    assert want.converged.all()
    rounding = 1e-12 if dtype == torch.float64 else 1e-5
    for power in powers:
        norms, factors = norms_of(power)
        torch.testing.assert_close(norms.norm / factors, want.norm, rtol=rounding, atol=0)
        torch.testing.assert_close(norms.upper / factors, want.upper, rtol=10 * rounding, atol=0)
        assert torch.equal(norms.products[::2], want.products[::2])
        assert norms.converged.all()


STARTS = 300
# Failures are binomial with mean <= STARTS ETA = 0.3: more than 4 has probability < 2e-5.
MOST = 4
CLUSTERS = {
    "wide gap": [1.0, 0.9],
    "0.99": [1.0, 0.99],
    "0.999": [1.0, 0.999],
    "0.9997": [1.0, 0.9997],
    "double": [1.0, 1.0],
    "three": [1.0, 0.9995, 0.999],
    "eight": [1 - 0.005 * i / 7 for i in range(8)],
    "crowded": [1.0, 0.99, *torch.linspace(0.9, 0.98, 10).tolist()],
}


def norms_of(cluster, **how):
    """Norms of diag(cluster, 0.8 ... 0) from many starts; the truth is 1."""
    values = torch.cat([torch.tensor(cluster), torch.linspace(0, 0.8, 60)]).double()
    start = random_starts(range(STARTS), len(values))
    return spectral_norms(lambda _: lambda u: u * values.square(), start, **how)


def below(norms, tol):
    return norms.norm < (1 - tol) * (1 - 1e-12)


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("tol", [1e-4, 1e-6])
def test_what_is_proven_within_tol_is(cluster, tol):
    """And an estimated norm carries the limit that holds."""
    for within in (tol, WITHIN):
        norms = norms_of(CLUSTERS[cluster], tol=tol, within=within)
        assert norms.converged.all()
        assert (norms.within <= within * (1 + 1e-6)).all()
        assert int((norms.upper < 1 - 1e-12).sum()) <= MOST
        assert int((norms.norm * (1 + norms.within) < 1 - 1e-12).sum()) <= MOST
        # Of those that say to be within tol, no more fail than the limit does.
        assert int((below(norms, tol) & (norms.within <= tol * (1 + 1e-6))).sum()) <= MOST


def test_an_estimate_of_the_error_is_no_proof():
    """Otherwise the tests above would prove nothing: here the estimate alone falls short."""
    norms = norms_of(CLUSTERS["0.9997"], tol=1e-6)
    short = below(norms, 1e-6)
    assert short.sum() > 10 * MOST
    assert (norms.within[short] > 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_certificate_of_a_nonnegative_matrix_is_an_upper_bound_and_nearly_reached(dtype):
    b = torch.rand(20, 9, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    b[:, 3], b[1], b[2, :, 3:-2] = 0.0, 0.0, 0.0
    exact = torch.linalg.matrix_norm(b.double(), 2)
    for steps in (0, 3, 10):
        assert (nonnegative_norm(b, steps) >= exact * (1 - 1e-14)).all()
    assert (nonnegative_norm(b, 10) <= exact * 1.003).all()
    u = positive_vector(b, 10)
    assert u.shape == (20, 1, 12)
    assert (u > 0).all()
    assert (nonnegative_norm(b, u=u) >= (((u @ b.mT) @ b) / u).amax((-2, -1)).sqrt()).all()
    reached = torch.linalg.vector_norm(u @ b.mT, dim=-1) / torch.linalg.vector_norm(u, dim=-1)
    assert (reached[:, 0] >= 0.99 * nonnegative_norm(b, u=u)).all()


def test_the_spectral_norm_is_that_of_the_svd():
    a = torch.randn(3, 4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(spectral_norm(a), torch.linalg.matrix_norm(a, 2))


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0, 20.0])
def test_the_norm_of_a_map_is_never_too_small(spread):
    logits = torch.randn(30, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    p = (spread * logits).softmax(-1)
    p[:10, 5:] = 0
    p[10:20] = p[10:20].tril()
    p[20, :, 3:] = 0  # keys that no query sees
    p[21] = 0
    exact = torch.linalg.matrix_norm(p, 2)
    assert (map_norm(p) >= exact * (1 - 1e-14)).all()
    assert (map_norm(p) <= exact * (1 + 1e-6)).all()
    assert (map_norm(torch.eye(7, dtype=torch.float64).roll(1, 0)) - 1).abs() < 1e-12
