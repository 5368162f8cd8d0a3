"""How a model is run to be differentiated twice: what can be, what is replaced or refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lipaudit.errors import InputError
from lipaudit.models.derivative.linear_mode import LinearMode, evaluate


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def run(function, x):
    return evaluate(lambda z, _: function(z), x, torch.zeros(1))


HIDE = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool)
SHIFT = torch.linspace(-1, 1, 2 * 3 * 4, dtype=torch.float64).view(2, 3, 4)


def attention(heads=2, kv_heads=2, **options):
    """SDPA on slices of one vector: q (2, h, 3, 5), k (2, g, 4, 5), v (2, g, 4, 6)."""
    sizes = [2 * heads * 3 * 5, 2 * kv_heads * 4 * 5, 2 * kv_heads * 4 * 6]

    def call(x):
        q, k, v = x.split(sizes)
        q, k = q.view(2, heads, 3, 5), k.view(2, kv_heads, 4, 5)
        return F.scaled_dot_product_attention(q, k, v.view(2, kv_heads, 4, 6), **options)

    return call, (sum(sizes),)


def mask_from_input(x):
    q, k, v, mask = x.split([2 * 3 * 5, 2 * 4 * 5, 2 * 4 * 5, 3 * 4])
    q, k, v = q.view(2, 3, 5), k.view(2, 4, 5), v.view(2, 4, 5)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.view(3, 4))


def shared_keys(x):
    q, k = x.split([2 * 3 * 4 * 5, 1 * 3 * 4 * 5])
    q, k = q.view(2, 3, 4, 5), k.view(1, 3, 4, 5)
    return F.scaled_dot_product_attention(q, k, k)


CASES = {
    "plain": attention(),
    "scale": attention(scale=0.9),
    "causal": attention(is_causal=True),
    "bool-mask": attention(attn_mask=HIDE),
    "float-mask": attention(attn_mask=SHIFT),
    "grouped": attention(heads=6, enable_gqa=True, is_causal=True),
    "input-mask": (mask_from_input, (2 * 3 * 5 + 4 * 4 * 5 + 12,)),
    "shared-keys": (shared_keys, (180,)),
}


@pytest.mark.parametrize(("function", "shape"), CASES.values(), ids=CASES)
def test_fused_attention_can_be_differentiated_twice(function, shape):
    torch.manual_seed(0)
    x, v = rand(*shape).requires_grad_(), rand(*shape)
    y = run(function, x)
    u = rand(*y.shape).requires_grad_()
    (pullback,) = torch.autograd.grad(y, x, u, create_graph=True)
    (pushed,) = torch.autograd.grad(pullback, u, v)
    jacobian = torch.autograd.functional.jacobian(function, x.detach())
    jacobian = jacobian.reshape(y.numel(), x.numel())
    torch.testing.assert_close(y, function(x), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(pullback.flatten(), u.flatten() @ jacobian, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(pushed.flatten(), jacobian @ v.flatten(), rtol=1e-11, atol=1e-13)


def test_a_query_that_sees_no_key_has_output_and_gradient_zero():
    mask = HIDE.clone()
    mask[1] = False
    function, shape = attention(attn_mask=mask)
    x = rand(*shape).requires_grad_()
    y = run(function, x)
    (gradient,) = torch.autograd.grad(y[:, :, 1].sum(), x)
    assert torch.equal(y[:, :, 1], torch.zeros_like(y[:, :, 1]))
    assert torch.equal(gradient, torch.zeros_like(x))


def test_nan_logits_are_not_hidden_by_a_mask():
    x = rand(*attention()[1])
    x[0] = torch.nan
    assert run(attention(attn_mask=HIDE)[0], x)[0, 0, 0].isnan().all()


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


def test_one_hot_attention_is_constant_in_its_queries_and_keys():
    """However large they are: they multiply the rounding of a difference that is 0."""
    torch.manual_seed(0)
    q, k, v, u = (torch.randn(2, 9, 7, dtype=torch.float64) for _ in range(4))
    q, k = 1e9 * q, 1e9 * k
    chosen = F.one_hot((q @ k.mT).argmax(-1), 9).double()
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    sizes = [t.numel() for t in leaves]

    def attend(x):
        parts = (p.view(2, 9, 7) for p in x.split(sizes))
        return F.scaled_dot_product_attention(*parts)

    output = run(attend, torch.cat([t.flatten() for t in leaves]))
    u.requires_grad_()
    pulled = torch.autograd.grad(output, leaves, u, create_graph=True)
    assert [float(part.detach().abs().max()) for part in pulled[:2]] == [0, 0]
    torch.testing.assert_close(pulled[2], chosen.mT @ u)
    (pushed,) = torch.autograd.grad(pulled, u, (q, k, v))
    torch.testing.assert_close(pushed, chosen @ v)
