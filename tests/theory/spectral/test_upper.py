"""Spectral norms against the singular value decomposition."""

import pytest
import torch

from lipaudit.theory.spectral import map_norm, nonnegative_norm, positive_vector, spectral_norm


def test_the_certificate_of_a_nonnegative_matrix_is_an_upper_bound():
    b = torch.rand(20, 9, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    b[:, 3] = 0
    exact = torch.linalg.matrix_norm(b, 2)
    for steps in (0, 3, 10):
        assert (nonnegative_norm(b, steps) >= exact * (1 - 1e-14)).all()
    assert (nonnegative_norm(b, 10) <= exact * 1.003).all()


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_vector_proves_the_norm_and_nearly_reaches_it(dtype):
    b = torch.rand(5, 20, 24, generator=torch.Generator().manual_seed(3)).to(dtype)
    b[1], b[2, :, 3:-2] = 0.0, 0.0
    u = positive_vector(b, 10)
    norm = nonnegative_norm(b, u=u)
    assert u.shape == (5, 1, 24)
    assert (u > 0).all()
    proven = (((u @ b.mT) @ b) / u).amax((-2, -1)).sqrt()
    assert (norm >= proven).all()
    reached = torch.linalg.vector_norm(u @ b.mT, dim=-1) / torch.linalg.vector_norm(u, dim=-1)
    assert (reached[:, 0] >= 0.99 * norm).all()
