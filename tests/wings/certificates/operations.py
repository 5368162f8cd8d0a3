"""Operations with a rule, by name: functions of (samples, TOKENS, WIDTH)."""

import functools
import importlib
import operator

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

TOKENS, WIDTH = 4, 6


def weights(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


W, B = weights(5, WIDTH, seed=1), weights(5, seed=2)
KERNEL = weights(4, 3, 2, 2, seed=3)
SCALE, SQUARE = weights(WIDTH, seed=4), weights(WIDTH, WIDTH, seed=5)
PLACES = torch.tensor([2, 0, 0])
NORM = nn.BatchNorm1d(TOKENS, dtype=torch.float64).eval()
NORM.running_mean, NORM.running_var = weights(TOKENS, seed=5), 0.5 + weights(TOKENS).square()
NORM.requires_grad_(requires_grad=False).weight.data = weights(TOKENS, seed=6)
MASK = torch.tensor([True, True, False, True])
FAR = torch.finfo(torch.float32).min


def _heads(x):
    return (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in (x, 1.5 * x + 0.2, 2 * x - 1))


def _attention(x, **options):
    return F.scaled_dot_product_attention(*_heads(x), **options)


def _eager(x):
    q, k, v = _heads(x)
    logits = q @ k.transpose(-2, -1) / 3**0.5
    logits = logits + torch.zeros(TOKENS).masked_fill(~MASK, FAR)
    return F.dropout(logits.softmax(dim=-1), 0.1, training=False) @ v


def image(x):
    """Three channels of 4 x 2 pixels."""
    return x.reshape(-1, 3, 4, 2)


def _grouped(x):
    q, k, v = _heads(x)
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)


def _constant_queries(x):
    _, k, v = _heads(x)
    q = weights(2, 3, 3).expand(len(x), -1, -1, -1)
    return F.scaled_dot_product_attention(q, k, v)


def _multi_head(x, **options):
    t = x.transpose(0, 1)
    into, bias, out, last = (
        weights(*shape, seed=7) / 3 for shape in ((18, 6), (18,), (6, 6), (6,))
    )
    result, p = F.multi_head_attention_forward(
        t, t, t, 6, 2, into, bias, None, None, False, 0.0, out, last, training=False, **options
    )
    return torch.cat([result.transpose(0, 1), p @ x], -1)


def _einops(x):
    einops = importlib.import_module("einops")
    layers = importlib.import_module("einops.layers.torch")
    y = layers.Rearrange("b t (h d) -> b h t d", h=2)(x)
    y = einops.rearrange(y, "b h t d -> b t (h d)")
    y = y + einops.repeat(x[:, 0], "b d -> b t d", t=4)
    return einops.reduce(y, "b t d -> b d", "mean") + einops.einsum(x, x, "b t d, b t d -> b d")


def _shortcut_in_place(x):
    y = x * 2
    kept = y
    y += x
    return y * kept  # both names have what was added


def _relu_in_place(x):
    y = x * 2
    F.relu(y, inplace=True)
    return y + x


def _after_a_norm(x):
    """What a normalisation leaves pending is of its input as it was."""
    y = 2 * x
    normed = F.rms_norm(y, (WIDTH,), None, 1e-6)
    y += normed
    return F.linear(normed, torch.ones(3, WIDTH).to(x.dtype)) + y.mean((1, 2), keepdim=True)


def _copy_first(x):
    y = x * 2
    kept = y.clone()
    y += 1
    return y * kept


def log_softmax_far(x):
    """Keys of nearly no weight have finite logarithms."""
    far = torch.tensor([0.0, -1.0, 0.5, -2000.0, 2.0, -3000.0])
    return (x + far).log_softmax(-1) * torch.tensor([1.0, 1.0, 1.0, 1e-3, 1.0, 1e-3])


OPERATIONS = {
    "linear": lambda x: F.linear(x, W, B),
    "linear-vector": lambda x: (
        F.linear(F.layer_norm(x, (WIDTH,)), SCALE) + F.linear(F.gelu(x), SCALE, B[0])
    ),
    "matmul-right": lambda x: x @ W.T,
    "matmul-left": lambda x: weights(3, TOKENS) @ x,
    "conv2d": lambda x: F.conv2d(x.reshape(-1, 3, 4, 2), KERNEL, stride=(2, 1), padding=(1, 0)),
    "conv2d-lists": lambda x: F.conv2d(x.reshape(-1, 3, 4, 2), KERNEL, stride=[2, 1], padding=[1]),
    "conv2d-groups": lambda x: F.conv2d(x.reshape(-1, 6, 2, 2), KERNEL[:, :3], groups=2),
    "batch_norm": NORM,
    "scalars": lambda x: 2 - (x * 3 - 1) / 7,
    "tensors": lambda x: (x - SCALE) * SCALE / (1 + SCALE.square()),
    "alpha": lambda x: torch.add(x, x[:, :1], alpha=3),
    "negative": lambda x: 3 - x.mT.mT,
    "residual": lambda x: x + F.linear(x, W[:1]),
    "mean": lambda x: x.mean(1),
    "sum": lambda x: x.sum((1, 2), keepdim=True),
    "cat": lambda x: torch.cat([SCALE.expand(len(x), 1, -1), x], 1),
    "stack": lambda x: torch.stack([x[:, 0], x[:, 1]], 2),
    "index": lambda x: x[:, 1:, ::2],
    "moves": lambda x: x.transpose(1, 2).reshape(len(x), 2, 3, TOKENS).permute(0, 3, 1, 2),
    "chunk": lambda x: x.chunk(2, -1)[1] - x.split(3, dim=-1)[0],
    "unbind": lambda x: functools.reduce(torch.sub, x.unbind(1)),
    "masked_fill": lambda x: x.masked_fill(MASK[:, None], 2.0),
    "masked_fill-names": lambda x: torch.tanh(x.masked_fill(mask=MASK[:, None], value=0.5)),
    "gelu": lambda x: F.gelu(3 * x),
    "gelu-tanh": lambda x: F.gelu(3 * x, approximate="tanh"),
    "silu": lambda x: F.silu(3 * x),
    "relu": lambda x: F.relu(x),
    "tanh": lambda x: torch.tanh(2 * x),
    "sigmoid": lambda x: x.sigmoid(),
    "exp": lambda x: torch.exp(x),
    "square": lambda x: x**2,
    "roots": lambda x: torch.rsqrt(x.pow(2) + 0.5) + (x.square() + 1).sqrt(),
    "quotient": lambda x: x / (1 + x**2),
    "product": lambda x: x * x.flip(1),
    "gate": lambda x: F.silu(x) * (x @ weights(WIDTH, WIDTH)),
    "broadcast-product": lambda x: x * x[..., :1],
    "forms-matmul": lambda x: x @ x.transpose(-1, -2),
    "softmax": lambda x: (3 * x).softmax(-1),
    "attention": _attention,
    "attention-causal": functools.partial(_attention, is_causal=True),
    "attention-mask": functools.partial(_attention, attn_mask=MASK.expand(TOKENS, TOKENS)),
    "attention-eager": _eager,
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,), SCALE, SCALE),
    "rms_norm": lambda x: F.rms_norm(x, (WIDTH,), SCALE, 1e-6),
    "mlp": lambda x: F.linear(F.gelu(F.linear(x, W)), W.mT) + x,
    "abs": lambda x: x.abs(),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "prelu": lambda x: F.prelu(x, SCALE[:TOKENS]),
    "maximum": lambda x: torch.maximum(x, x.flip(1)) + torch.minimum(x, SCALE),
    "clamp": lambda x: x.clamp(-0.3, 0.4) + x.clip(min=0.1) + x.clamp_min(0) - x.clamp_max(0.2),
    "relu6": lambda x: F.relu6(9 * x) + F.hardtanh(x),
    "hardswish": lambda x: F.hardswish(3 * x) + F.hardsigmoid(3 * x),
    "amax": lambda x: x.amax(1) - x.min(1).values + x.max(1)[0],
    "max-axes": lambda x: x.amax((1, 2), keepdim=True),
    "log": lambda x: torch.log(1 + x * x),
    "sine": lambda x: torch.sin(2 * x) + torch.cos(x),
    "mish": lambda x: F.mish(2 * x),
    "softplus": lambda x: F.softplus(3 * x, 2.0),
    "softplus-jumps": lambda x: F.softplus(3 * x, 2, 1) + F.softplus(3 * x, 2, 4.0),
    "elu": lambda x: F.elu(2 * x) + F.elu(x, 0.7),
    "logsumexp": lambda x: (
        torch.logsumexp(3 * x, 1, keepdim=True) + torch.logsumexp(x, -1)[..., None]
    ),
    "conv1d-same": lambda x: F.conv1d(x, weights(TOKENS, 2, 2), padding="same", groups=2),
    "conv2d-same": lambda x: F.conv2d(image(x), weights(2, 3, 3, 2), padding="same"),
    "avg_pool1d": lambda x: F.avg_pool1d(x, 2),
    "std": lambda x: x.std(-1),
    "norms": lambda x: torch.cat([x.norm(dim=-1), torch.linalg.vector_norm(x, dim=-1)], -1),
    "max_pool2d": lambda x: F.max_pool2d(image(x), (3, 2), (2, 1), (1, 0)),
    "erf": lambda x: torch.erf(x),
    "powers": lambda x: x**3 + x.pow(4) - x**1,
    "log_softmax": lambda x: (3 * x).log_softmax(-1),
    "softmax-axis": lambda x: (3 * x).softmax(1),
    "einsum": lambda x: torch.einsum("bik,bjk->bij", x, 2 * x + 1),
    "einsum-sums": lambda x: torch.einsum("bikl,jk->bji", x[:, :, None], SQUARE[:2, :1]),
    "matmul-broadcast": lambda x: x[:, None] @ weights(2, WIDTH, 3),
    "matmul-forms-broadcast": lambda x: x[:, None] @ torch.stack([x, 2 * x], 1).mT,
    "matmul-vector": lambda x: x @ SCALE,
    "vectors": lambda x: torch.stack([t[0] @ t[1] + t[1] @ SCALE for t in x]),
    "addmm": lambda x: torch.stack([torch.addmm(SCALE, t, SQUARE, beta=2, alpha=0.5) for t in x]),
    "baddbmm": lambda x: torch.baddbmm(
        x[:, :1], batch1=x, batch2=x.new_ones(len(x), 6, 6), beta=0.3
    ),
    "conv1d": lambda x: F.conv1d(x, weights(2, TOKENS, 3), padding=1, stride=2),
    "avg_pool2d": lambda x: F.avg_pool2d(image(x), 3, 2, 1),
    "adaptive_avg_pool": lambda x: F.adaptive_avg_pool2d(image(x), (3, 1)),
    "var": lambda x: (
        x.var(-1, unbiased=False, keepdim=True) + x.var(1, correction=None, keepdim=True)
    ),
    "all-axes": lambda x: torch.stack([t.var(True) + t.sum(()) + t.mean(dim=[]).sum() for t in x]),
    "empty": lambda x: torch.cat([x[:, :0] * x[:, :0], x], 1) + F.linear(x[..., :0], W[:1, :0]),
    "glu": lambda x: F.glu(x) + F.glu(x.mT, 1).mT[..., :3],
    "where-uint8": lambda x: torch.where(MASK[:, None].byte(), x, SCALE),
    "where": lambda x: (
        torch.where(MASK[:, None], x, SCALE) + torch.where(MASK[:, None], 0.0, x * x)
    ),
    "pad": lambda x: F.pad(x, (1, 0, 0, 2), value=0.5),
    "reflection": lambda x: F.pad(image(x), (1, 0, 2, 1), mode="reflect").flatten(1),
    "max-padded": lambda x: F.max_pool2d(F.pad(image(x), (1, 1), value=-torch.inf), 2, 1),
    "gather": lambda x: (
        x.gather(1, PLACES[None, :, None].expand(len(x), -1, WIDTH)) + x[:, PLACES]
    ),
    "repeats": lambda x: x.repeat_interleave(2, 1).roll(1, 2).broadcast_to(len(x), 8, 6),
    "unfold": lambda x: F.unfold(image(x), (2, 2), padding=1).mT @ weights(12, 2),
    "windows": lambda x: x.unfold(1, 3, 1),
    "like": lambda x: x + torch.ones_like(x) - x.new_zeros(WIDTH) * 2,
    "layer_norm-axes": lambda x: F.layer_norm(x, (TOKENS, WIDTH), SQUARE[:4]),
    "group_norm": lambda x: F.group_norm(x, 2, SCALE[:4], SCALE[:4]),
    "normalize": lambda x: F.normalize(x, dim=-1) + F.normalize(x, dim=1),
    "grouped-queries": _grouped,
    "constant-queries": _constant_queries,
    "einops": _einops,
    "number-first": lambda x: 2 - x + (2 + x) * 3,
    "tensor-first": lambda x: torch.ones(WIDTH) - x,
    "alpha-rounded": lambda x: (
        torch.add(x, torch.full((WIDTH,), 16777213.0).to(x.dtype), alpha=0.1) / 1e6
    ),
    "alpha-sub": lambda x: torch.sub(torch.ones(WIDTH), x, alpha=0.1),
    "quotients-first": lambda x: 2 / (x * x + 1) + torch.ones(WIDTH) / (1 + x * x),
    "einsum-broadcast": lambda x: (
        torch.einsum("bhtd,bhde->bhte", x[:, None], weights(1, 3, WIDTH, 2))
        + torch.einsum("bhde,bhtd->bhte", weights(1, 3, WIDTH, 2), x[:, None])
    ),
    "constant-left": lambda x: torch.ones(2, TOKENS).to(x.dtype) @ x,
    "transposed": lambda x: torch.stack([each.T for each in x]),
    "in-place-chain": lambda x: x.clone().add_(1).mul_(x).neg_(),
    "in-place-sub": lambda x: operator.isub(x * 1, 2 * x),
    "in-place-div": lambda x: operator.itruediv(x * 1, 4),
    "in-place-curves": lambda x: F.silu(F.relu(x * 1, inplace=True), inplace=True),
    "in-place-mask": lambda x: (x + 1).masked_fill_(torch.tensor([True, *[False] * 5]), 0.0),
    "in-place-names": _shortcut_in_place,
    "in-place-relu": _relu_in_place,
    "in-place-norm": _after_a_norm,
    "in-place-copy": _copy_first,
    "heads": _multi_head,
    "heads-mask": lambda x: _multi_head(x, attn_mask=torch.ones(4, 4, dtype=torch.bool).triu(1)),
    "heads-bias": lambda x: _multi_head(
        x, attn_mask=SQUARE[:4, :4], key_padding_mask=~MASK.expand(len(x), -1)
    ),
    "uint8": lambda x: x * MASK[:, None].byte() - MASK[:, None].byte() + x.sub(MASK.byte()[0]),
    "log_softmax-far": log_softmax_far,
    "casts": lambda x: x + 1e-9 * (x.float() + x.double() + x.type(x.dtype) + x.type_as(x)),
    "cast_of_a_constant": lambda x: x * torch.full((), 0.5).type_as(x),
    "cast_of_bytes": lambda x: x * (torch.full((), 200, dtype=torch.uint8).type_as(x) * 2),
    "cast_of_a_mask": lambda x: x * (1 - torch.ones((), dtype=torch.bool).to(x)) + x,
    "names": lambda x: torch.true_divide(
        torch.divide(torch.multiply(x, 2.0), 3.0), 0.5
    ).negative(),
    "names-of-copies": lambda x: x.contiguous() + x.detach() * x.data,
    "names-of-axes": lambda x: (
        x.swapaxes(1, 2).swapdims(0, 1).movedim(0, 2) * x.unsqueeze(1).squeeze(1)
    ),
    "names-of-shapes": lambda x: x.view(len(x), -1).view_as(x) + x.mT.reshape_as(x),
    "names-of-parts": lambda x: torch.concat(
        [x.narrow(1, 1, 2).tensor_split(2, 1)[1], x.select(1, 2)[:, None].expand_as(x[:, 2:])], 1
    ),
    "names-of-places": lambda x: (
        x.index_select(1, PLACES).repeat(1, 2, 1)[:, :3]
        + torch.take_along_dim(x, PLACES[None, :, None], 1)
    ),
    "names-of-products": lambda x: torch.bmm(x, x.mT) + x.mT.__rmatmul__(SQUARE[:4]),
    "like-filled": lambda x: (
        (x * torch.full_like(x, 3.0) + x.new_full((WIDTH,), 2.0) * x.new_tensor([0.5]))
        - torch.zeros_like(x)
    ),
    "amin": lambda x: F.adaptive_avg_pool1d(x, 4) * x.amin(-1, keepdim=True),
    "reciprocal": lambda x: (1 + x * x).reciprocal() + torch.linalg.vector_norm(x, dim=1)[:, None],
}
