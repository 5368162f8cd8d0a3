"""How a model is run to be differentiated twice: what can be, what is replaced or refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lipaudit.errors import InputError
from lipaudit.models.linearize import LinearMode


@pytest.mark.parametrize(
    "function",
    [
        nn.Dropout(0.1),
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True),
    ],
    ids=["dropout", "attention", "encoder layer"],
)
def test_dropout_is_refused(function):
    with LinearMode(widen=False), pytest.raises(InputError, match="dropout is on"):
        function(torch.randn(2, 3, 4))


def test_batch_statistics_are_refused_before_they_are_updated():
    norm = nn.BatchNorm1d(4)
    with LinearMode(widen=False), pytest.raises(InputError, match="uses batch statistics"):
        norm(torch.randn(5, 4, requires_grad=True))
    assert norm.num_batches_tracked in (0, 1)
    assert torch.equal(norm.running_mean, torch.zeros(4))


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("affine", [True, False])
def test_the_gradient_of_a_batch_norm_is_right_for_one_sample_too(samples, affine):
    """torch's own is wrong for a batch of one under a transposed cotangent."""
    norm = nn.BatchNorm2d(8, affine=affine).eval().double()
    norm.running_mean.copy_(torch.randn(8))
    norm.running_var.copy_(torch.rand(8) + 0.5)
    if affine:
        norm.weight.data.copy_(torch.randn(8))
        norm.bias.data.copy_(torch.randn(8))
    x = torch.randn(samples, 8, 2, 2, dtype=torch.float64, requires_grad=True)
    u = torch.randn(samples, 4, 8, dtype=torch.float64)
    with LinearMode(widen=False):
        y = norm(x)
    torch.testing.assert_close(y, norm(x))
    (gradient,) = torch.autograd.grad(y.flatten(2).transpose(1, 2), x, u)
    gain = (norm.running_var + norm.eps).rsqrt() * (norm.weight if affine else 1)
    want = (u * gain).transpose(1, 2).reshape(x.shape)
    torch.testing.assert_close(gradient, want)


def test_only_float64_runs_are_widened():
    x = torch.ones(3, dtype=torch.float64) / 3
    with LinearMode(widen=True):
        wide = [x.float(), x.to(torch.float32), torch.zeros(1, dtype=torch.float32)]
    with LinearMode(widen=False):
        narrow = x.float()
    assert {t.dtype for t in wide} == {torch.float64}
    assert narrow.dtype == torch.float32
