"""Own modules that differ in what they make of q k^T."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.attention.own_modules import (
    HEADS,
    TOKENS,
    WIDTH,
    HeadMap,
    affine,
    attend,
    join,
    own,
    qkv,
    softmax,
    split,
)
from tests.models.attention.own_weights import add, parameter


def shared(a: Any, x: Tensor, share: HeadMap) -> Tensor:
    """Make P of q k^T as `share` does, weight the values with it, and project."""
    q, k, v = qkv(a, x)
    return a.o(join(share(q @ k.mT) @ v))


def of(**how: Any) -> Any:
    """Return the truth of the usual attention with another change or share."""
    return lambda a, x: attend(a, x, **how)


@own("softmax")
def plain_softmax(a: Any, x: Tensor) -> Tensor:
    return shared(a, x, lambda s: s.softmax(-1))


@own("softmax as a module", build=add(soft=lambda: nn.Softmax(-1)))
def softmax_module(a: Any, x: Tensor) -> Tensor:
    return shared(a, x, a.soft)


@own("softmax in another type", heads=attend)
def softmax_typed(a: Any, x: Tensor) -> Tensor:
    return shared(a, x, lambda s: F.softmax(s, dim=-1, dtype=torch.float64))


@own("exp divided by its sum")
def by_sum(a: Any, x: Tensor) -> Tensor:
    return shared(a, x, lambda s: s.exp() / s.exp().sum(-1, keepdim=True))


@own("exp divided by its sum, the largest logit taken off")
def by_sum_shifted(a: Any, x: Tensor) -> Tensor:
    def share(s: Tensor) -> Tensor:
        e = (s - s.max(-1, keepdim=True).values).exp()
        return e / e.sum(-1, keepdim=True)

    return shared(a, x, share)


@own("exp of logits less their logsumexp", "left")
def by_logsumexp(a: Any, x: Tensor) -> Tensor:
    return shared(a, x, lambda s: (s - s.logsumexp(-1, keepdim=True)).exp())


@own("exp of log_softmax", "left")
def by_log_softmax(a: Any, x: Tensor) -> Tensor:
    return shared(a, x, lambda s: s.log_softmax(-1).exp())


@own("exp of F.log_softmax", "left")
def by_functional_log_softmax(a: Any, x: Tensor) -> Tensor:
    return shared(a, x, lambda s: torch.exp(F.log_softmax(s, -1)))


@own("exp times values, divided behind", "left")
def divided_behind(a: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(a, x)
    e = (q @ k.mT).exp()
    return a.o(join((e @ v) / e.sum(-1, keepdim=True)))


@own("exp normalised by F.normalize", "left")
def by_normalize(a: Any, x: Tensor) -> Tensor:
    return shared(a, x, lambda s: F.normalize(s.exp(), p=1, dim=-1))


@own("exp times the reciprocal of its sum", "left")
def by_reciprocal(a: Any, x: Tensor) -> Tensor:
    return shared(a, x, lambda s: s.exp() * s.exp().sum(-1, keepdim=True).reciprocal())


@own("exp by einsum with the reciprocal of its sum", "left")
def by_einsum(a: Any, x: Tensor) -> Tensor:
    return shared(a, x, lambda s: torch.einsum("bhij,bhi->bhij", s.exp(), 1 / s.exp().sum(-1)))


@own("powers of two", "left", heads=of(share=lambda s: 2**s / (2**s).sum(-1, keepdim=True)))
def powers_of_two(a: Any, x: Tensor) -> Tensor:
    return shared(a, x, lambda s: 2**s / (2**s).sum(-1, keepdim=True))


def _one_more(s: Tensor) -> Tensor:
    return s.exp() / (1 + s.exp().sum(-1, keepdim=True))


@own("softmax with 1 added to the sum", "left", heads=of(share=_one_more))
def softmax_one(a: Any, x: Tensor) -> Tensor:
    return shared(a, x, _one_more)


@own("softmax over the queries", "left", heads=of(share=lambda s: softmax(s.mT).mT))
def over_queries(a: Any, x: Tensor) -> Tensor:
    return shared(a, x, lambda s: s.softmax(-2))


@own("softmax over keys that lie in axis -2", "left")
def keys_first(a: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(a, x)
    return a.o(join((k @ q.mT).softmax(-2).mT @ v))


@own(
    "softmax over axis 1 of a map without heads",
    "left",
    heads=lambda a, x: attend(
        a, x, **{n: affine(getattr(a, n), x).transpose(0, 1).flatten(1)[None] for n in "qkv"}
    ),
)
def without_heads(a: Any, x: Tensor) -> Tensor:
    q, k, v = a.q(x), a.k(x), a.v(x)
    return a.o(torch.softmax(k @ q.mT / WIDTH**0.5, 1).mT @ v)


@own(
    "softmax over keys and heads at once",
    "left",
    heads=of(
        share=lambda s: (
            softmax(s.transpose(0, 1).flatten(1)).unflatten(1, (HEADS, -1)).transpose(0, 1)
        )
    ),
)
def over_heads_too(a: Any, x: Tensor) -> Tensor:
    return shared(
        a,
        x,
        lambda s: (
            s.transpose(1, 2).flatten(2).softmax(-1).unflatten(2, (HEADS, -1)).transpose(1, 2)
        ),
    )


@own(
    "softmax over the heads",
    "left",
    heads=of(share=lambda s: softmax(s.movedim(0, -1)).movedim(-1, 0)),
)
def over_heads(a: Any, x: Tensor) -> Tensor:
    return shared(a, x, lambda s: s.softmax(1))


def _sinkhorn(s: Tensor) -> Tensor:
    e = s.exp()
    for _ in range(2):
        e = e / e.sum(-1, keepdim=True)
        e = e / e.sum(-2, keepdim=True)
    return e


def _entmax(s: Tensor) -> Tensor:
    """Sparsemax."""
    ordered = s.sort(-1, descending=True).values
    count = torch.arange(1, s.shape[-1] + 1, dtype=s.dtype)
    support = (1 + count * ordered > ordered.cumsum(-1)).sum(-1, keepdim=True)
    tau = (ordered.cumsum(-1).gather(-1, support - 1) - 1) / support
    return (s - tau).clamp_min(0)


def _renormalised(s: Tensor) -> Tensor:
    p = s.softmax(-1) * torch.ones(s.shape[-2:], dtype=s.dtype).tril()
    return p / p.sum(-1, keepdim=True)


def _linear(s: Tensor) -> Tensor:
    e = F.elu(s) + 1
    return e / e.sum(-1, keepdim=True)


_WEIGHT = torch.tensor([[0.8, 0.3], [-0.2, 0.9]], dtype=torch.float64)

for _name, _what, _outcome, _share in (
    ("sigmoid", "sigmoid attention", "left", torch.sigmoid),
    (
        "sigmoid_shifted",
        "sigmoid attention less the log of the length",
        "left",
        lambda s: torch.sigmoid(s - 1.6),
    ),
    ("relu_attention", "ReLU attention", "left", lambda s: s.relu() / TOKENS),
    (
        "squared_relu",
        "squared ReLU, divided by its sum",
        "left",
        lambda s: s.relu().square() / (s.relu().square().sum(-1, keepdim=True) + 1),
    ),
    ("raw_logits", "logits as they are", "left", lambda s: s / TOKENS),
    ("sinkhorn", "rows and columns normalised in turn (Sinkhorn)", "numerical", _sinkhorn),
    ("sparsemax", "sparsemax", "left", _entmax),
    ("tanh_map", "tanh attention", "left", torch.tanh),
    (
        "softplus",
        "softplus divided by its sum",
        "left",
        lambda s: F.softplus(s) / F.softplus(s).sum(-1, keepdim=True),
    ),
    ("elu_plus_one", "elu + 1 of logits, divided by its sum", "left", _linear),
    ("squared", "softmax, squared", "numerical", lambda s: s.softmax(-1).square()),
    (
        "sharpened",
        "softmax, squared and normalised again",
        "numerical",
        lambda s: s.softmax(-1).square() / s.softmax(-1).square().sum(-1, keepdim=True),
    ),
    ("twice", "softmax of a softmax", "numerical", lambda s: s.softmax(-1).softmax(-1)),
    ("renormalised", "softmax, masked and normalised again", "numerical", _renormalised),
    (
        "masked_behind",
        "softmax, masked behind",
        "numerical",
        lambda s: s.softmax(-1) * torch.ones(s.shape[-2:], dtype=s.dtype).tril(),
    ),
    (
        "plus_identity",
        "softmax plus the identity",
        "numerical",
        lambda s: s.softmax(-1) + torch.eye(s.shape[-1], dtype=s.dtype),
    ),
    (
        "less_mean",
        "softmax less 1 / n",
        "numerical",
        lambda s: s.softmax(-1) - 1 / s.shape[-1],
    ),
    ("scaled_map", "softmax times a number", "numerical", lambda s: 0.5 * s.softmax(-1)),
    (
        "talking",
        "heads mixed behind the softmax",
        "numerical",
        lambda s: torch.einsum("gh,...hij->...gij", _WEIGHT, s.softmax(-1)),
    ),
    (
        "dropped",
        "dropout, off",
        "read",
        lambda s: F.dropout(s.softmax(-1), 0.5, training=False),
    ),
    (
        "talking_before",
        "heads mixed before the softmax",
        "numerical",
        lambda s: torch.einsum("gh,...hij->...gij", _WEIGHT, s).softmax(-1),
    ),
    (
        "capped",
        "a soft cap of the logits",
        "read",
        lambda s: (2 * torch.tanh(s / 2)).softmax(-1),
    ),
    (
        "relu_logits",
        "ReLU of the logits before the softmax",
        "numerical",
        lambda s: s.relu().softmax(-1),
    ),
    ("clamped", "clamped logits", "numerical", lambda s: s.clamp(-0.5, 0.5).softmax(-1)),
    ("absolute", "absolute logits", "read", lambda s: s.abs().softmax(-1)),
    ("log_one", "softmax of log(1 + e^l)", "read", lambda s: F.softplus(s).softmax(-1)),
    ("cubed", "softmax of cubed logits", "read", lambda s: (s**3).softmax(-1)),
    (
        "centred",
        "logits less their mean over the keys",
        "numerical",
        lambda s: (s - s.mean(-1, keepdim=True)).softmax(-1),
    ),
    (
        "normed_logits",
        "logits divided by their norm over the keys",
        "numerical",
        lambda s: (s / s.norm(dim=-1, keepdim=True)).softmax(-1),
    ),
    (
        "convolved",
        "logits smoothed over neighbouring keys",
        "numerical",
        lambda s: (s + 0.3 * s.roll(1, -1)).softmax(-1),
    ),
    (
        "symmetric",
        "logits plus their transpose",
        "numerical",
        lambda s: (s + s.mT).softmax(-1),
    ),
    (
        "causal_filled",
        "a causal mask by masked_fill",
        "read",
        lambda s: s.masked_fill(torch.ones(s.shape[-2:]).triu(1).bool(), -torch.inf).softmax(-1),
    ),
    (
        "causal_added",
        "a causal mask that is added",
        "read",
        lambda s: (s + torch.full(s.shape[-2:], -torch.inf, dtype=s.dtype).triu(1)).softmax(-1),
    ),
    (
        "causal_where",
        "a causal mask by where, -1e9",
        "read",
        lambda s: torch.where(torch.ones(s.shape[-2:]).tril().bool(), s, -1e9).softmax(-1),
    ),
    (
        "causal_product",
        "a causal mask multiplied in behind exp",
        "left",
        lambda s: (
            s.exp()
            * torch.ones(s.shape[-2:], dtype=s.dtype).tril()
            / (s.exp() * torch.ones(s.shape[-2:], dtype=s.dtype).tril()).sum(-1, keepdim=True)
        ),
    ),
    (
        "windowed",
        "a window of three tokens",
        "read",
        lambda s: s.masked_fill(
            (torch.ones(s.shape[-2:]).tril(1) * torch.ones(s.shape[-2:]).triu(-1)) == 0, -torch.inf
        ).softmax(-1),
    ),
    (
        "distances",
        "a bias by distance",
        "read",
        lambda s: (s - 0.3 * (torch.arange(5.0)[:, None] - torch.arange(5.0)).abs().to(s)).softmax(
            -1
        ),
    ),
    (
        "masked_rows",
        "a fully masked row and nan_to_num",
        "read",
        lambda s: (
            s.masked_fill(torch.arange(TOKENS)[:, None] == 2, -torch.inf)
            .softmax(-1)
            .nan_to_num(0.0)
        ),
    ),
    (
        "top_two",
        "the two largest logits of each row, others masked",
        "read",
        lambda s: s.masked_fill(s < s.topk(2, -1).values[..., -1:], -torch.inf).softmax(-1),
    ),
    (
        "straight_through",
        "one-hot rows, straight through",
        "left",
        lambda s: (
            F.one_hot(s.argmax(-1), s.shape[-1]).to(s) - s.softmax(-1).detach() + s.softmax(-1)
        ),
    ),
):

    def _forward(a: Any, x: Tensor, share: HeadMap = _share) -> Tensor:
        return shared(a, x, share)

    _forward.__name__ = _name
    own(
        _what,
        _outcome,
        heads=of(share=_share),
        derivative=_name != "straight_through",
    )(_forward)


@own("a mask for the fused attention")
def fused_mask(a: Any, x: Tensor) -> Tensor:
    q, k, v = (split(m(x)) for m in (a.q, a.k, a.v))
    mask = torch.ones(TOKENS, TOKENS).bool()
    return a.o(join(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))


def _causal(s: Tensor) -> Tensor:
    return s.masked_fill(torch.ones(s.shape[-2:]).triu(1).bool(), -torch.inf)


@own("causal fused attention", heads=of(change=_causal))
def fused_causal(a: Any, x: Tensor) -> Tensor:
    q, k, v = (split(m(x)) for m in (a.q, a.k, a.v))
    return a.o(join(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


@own("a scale of one's own for the fused attention", heads=of(change=lambda s: s * 2 * 0.3))
def fused_scale(a: Any, x: Tensor) -> Tensor:
    q, k, v = (split(m(x)) for m in (a.q, a.k, a.v))
    return a.o(join(F.scaled_dot_product_attention(q, k, v, scale=0.3)))


BIAS = add(bias=parameter(HEADS, TOKENS, TOKENS))


@own(
    "a learned bias of the logits",
    build=BIAS,
    heads=lambda a, x: attend(a, x, change=lambda s: s + a.bias),
)
def learned_bias(a: Any, x: Tensor) -> Tensor:
    return shared(a, x, lambda s: (s + a.bias).softmax(-1))


RELATIVE = add(relative=parameter(2 * TOKENS - 1, 4))
_DISTANCE = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS) + TOKENS - 1


def of_relative(a: Any, x: Tensor) -> Tensor:
    bias = torch.einsum("hid,ijd->hij", affine(a.q, x), a.relative[_DISTANCE])
    return attend(a, x, change=lambda s: s + bias / 2)


@own("queries that meet relative positions", build=RELATIVE, heads=of_relative)
def relative(a: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(a, x)
    bias = torch.einsum("bhid,ijd->bhij", q, a.relative[_DISTANCE])
    return a.o(join((q @ k.mT + bias).softmax(-1) @ v))


def _cosine(a: Any, x: Tensor) -> Tensor:
    q, k = (F.normalize(affine(m, x), dim=-1) for m in (a.q, a.k))
    return attend(a, x, q=q * 4, k=k)


@own("cosines of queries and keys", heads=_cosine)
def cosine(a: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(a, x)
    s = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
    return a.o(join((2 * s).softmax(-1) @ v))


def _far(q: Tensor, k: Tensor) -> Tensor:
    return -(q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)


@own(
    "distances of queries and keys (L2 attention)",
    "left",
    heads=lambda a, x: softmax(_far(affine(a.q, x), affine(a.k, x))) @ affine(a.v, x),
)
def euclidean(a: Any, x: Tensor) -> Tensor:
    q, k, v = (split(m(x)) for m in (a.q, a.k, a.v))
    return a.o(join(_far(q, k).softmax(-1) @ v))


@own(
    "distances by cdist",
    "left",
    heads=lambda a, x: softmax(_far(affine(a.q, x), affine(a.k, x))) @ affine(a.v, x),
)
def by_cdist(a: Any, x: Tensor) -> Tensor:
    q, k, v = (split(m(x)) for m in (a.q, a.k, a.v))
    return a.o(join((-torch.cdist(q, k).square()).softmax(-1) @ v))


def _added(a: Any, q: Tensor, k: Tensor) -> Tensor:
    return (q[..., :, None, :] + k[..., None, :, :]).tanh() @ a.score


@own(
    "additive attention (Bahdanau)",
    "left",
    build=add(score=parameter(4)),
    heads=lambda a, x: softmax(_added(a, affine(a.q, x), affine(a.k, x))) @ affine(a.v, x),
)
def additive(a: Any, x: Tensor) -> Tensor:
    q, k, v = (split(m(x)) for m in (a.q, a.k, a.v))
    return a.o(join(_added(a, q, k).softmax(-1) @ v))


def _feature(t: Tensor) -> Tensor:
    return F.elu(t) + 1


def _by_features(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = _feature(q) @ _feature(k).mT
    return s / s.sum(-1, keepdim=True) @ v


@own(
    "linear attention",
    "left",
    heads=lambda a, x: _by_features(*(affine(m, x) for m in (a.q, a.k, a.v))),
)
def linear_attention(a: Any, x: Tensor) -> Tensor:
    q, k, v = (split(m(x)) for m in (a.q, a.k, a.v))
    q, k = _feature(q), _feature(k)
    return a.o(join(q @ (k.mT @ v) / (q @ k.sum(-2)[..., None])))


@own(
    "softmax of queries over channels, of keys over tokens (efficient attention)",
    "left",
    heads=lambda a, x: softmax(affine(a.q, x)) @ (softmax(affine(a.k, x).mT) @ affine(a.v, x)),
)
def efficient(a: Any, x: Tensor) -> Tensor:
    q, k, v = (split(m(x)) for m in (a.q, a.k, a.v))
    return a.o(join(q.softmax(-1) @ (k.softmax(-2).mT @ v)))
