"""Which axis of an attention call is a head, a window, a sample: any order, any folding."""

from itertools import permutations, product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lipaudit

WIDTH, D, TOKENS = 8, 3, 2
FOLDINGS = ((3,), (1, 2), (2, 1), (1, 1, 1))
"""How many of the three leading axes lie in each axis of the model."""
ORDERS = tuple("".join(order) for order in permutations("bhw"))
COUNTS = ((2, 3), (3, 2), (2, 2), (2, 4), (4, 2), (1, 3), (3, 1), (1, 1))
"""Heads and windows."""


def write_out(q, k, v):
    """Attend by a softmax in the open."""
    return (q @ k.mT / D**0.5).softmax(-1) @ v


def flatten_axes(t, counts):
    """Join neighbouring axes, as many as each count says."""
    for place, count in enumerate(counts):
        t = t.flatten(place, place + count - 1)
    return t


class Folded(nn.Module):
    """Attention within windows whose samples, heads and windows lie in any order in any axes."""

    def __init__(self, heads, windows, order, folding, attend):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(WIDTH, heads * D) for _ in range(3))
        self.out = nn.Linear(heads * D, WIDTH)
        self.heads, self.windows, self.attend = heads, windows, attend
        self.order, self.folding = order, folding

    def fold(self, t):
        """Return t, (b, w i, h d), with the leading axes of the model."""
        t = t.unflatten(1, (self.windows, -1)).unflatten(-1, (self.heads, -1))
        t = t.permute(*("bwihd".index(axis) for axis in f"{self.order}id"))
        return flatten_axes(t, self.folding)

    def unfold(self, t, samples):
        """Return t as `fold` has taken it."""
        sizes = {"b": samples, "h": self.heads, "w": self.windows}
        t = t.reshape(*(sizes[axis] for axis in self.order), *t.shape[-2:])
        t = t.permute(*(f"{self.order}id".index(axis) for axis in "bwihd"))
        return t.flatten(-2).flatten(1, 2)

    def forward(self, x):
        parts = (self.fold(part(x)) for part in (self.q, self.k, self.v))
        return (x + self.out(self.unfold(self.attend(*parts), len(x)))).mean(1)


class Shared(nn.Module):
    """Heads that share one key, in the axis of the queries or before it, within windows."""

    def __init__(self, heads, windows, order, folding, attend):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * D) for n in (heads, 1, 1))
        self.out = nn.Linear(heads * D, WIDTH)
        self.heads, self.windows, self.attend = heads, windows, attend
        self.order, self.folding = order, folding

    def forward(self, x):
        q = self.q(x).unflatten(1, (self.windows, -1)).unflatten(-1, (self.heads, -1))
        q = q.permute(*("bwihd".index(axis) for axis in f"{self.order}d"))
        sizes = q.shape[:-1]
        q = flatten_axes(q, self.folding)
        k, v = (part(x).unflatten(1, (self.windows, -1)) for part in (self.k, self.v))
        if self.order.index("b") > self.order.index("w"):
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        if self.folding[0] == 2:
            k, v = k.flatten(0, 1), v.flatten(0, 1)
        while k.ndim < q.ndim:
            k, v = k.unsqueeze(-3), v.unsqueeze(-3)
        o = self.attend(q, k.expand(*q.shape[:-2], *k.shape[-2:]), v)
        o = o.reshape(*sizes, D).permute(*(f"{self.order}d".index(axis) for axis in "bwihd"))
        return (x + self.out(o.flatten(-2).flatten(1, 2))).mean(1)


def attend_by_hand(module, x):
    """Return P and O of every head of one sample, (heads, windows, ...), from the weights."""
    parts = []
    for part in (module.q, module.k, module.v):
        y = x @ part.weight.T + part.bias
        parts.append(y.view(module.windows, -1, y.shape[-1] // D, D).permute(2, 0, 1, 3))
    q, k, v = parts
    logits = (q[:, :, :, None] * k[:, :, None]).sum(-1) / D**0.5
    e = logits.exp()
    p = e / e.sum(-1, keepdim=True)
    return p, p @ v


def measure_truth(module, x):
    """Return the median norm of every head, and the mean largest entry of its rows, dense."""
    norms, tops = [], []
    for one in x:
        jacobian = torch.autograd.functional.jacobian(lambda z: attend_by_hand(module, z)[1], one)
        norms.append(torch.linalg.matrix_norm(jacobian.reshape(module.heads, -1, one.numel()), 2))
        tops.append(attend_by_hand(module, one)[0].amax(-1).mean((1, 2)))
    return torch.stack(norms).quantile(0.5, 0), torch.stack(tops).mean(0)


def check(module, samples):
    """Compare the norms and statistics of every head with the truth."""
    x = torch.randn(samples, module.windows * TOKENS, WIDTH, dtype=torch.float64)
    norms, tops = measure_truth(module, x)
    rows = lipaudit.measure(module, "bounds", data=x, dtype="float64", tol=1e-10)
    rows = rows.section("bounds").rows
    case = module.heads, module.windows, samples
    assert [row.head for row in rows] == list(range(module.heads)), case
    assert [row.exact for row in rows] == pytest.approx(norms.tolist(), rel=1e-6), case
    assert all("numerical" not in row.kind for row in rows), case
    rows = lipaudit.measure(module, "attention", data=x, dtype="float64")
    rows = rows.section("attention").rows
    assert [row.top1 for row in rows] == pytest.approx(tops.tolist(), rel=1e-6), case


CASES = [*product(ORDERS, FOLDINGS, (F.scaled_dot_product_attention, write_out))]
SHARED_ORDERS = ("bwhi", "bwih", "wbhi", "wbih")
SHARED = [*product(SHARED_ORDERS, ((2, 2), (1, 1, 2), (2, 1, 1), (1, 1, 1, 1)), (write_out,))]
SHARED += [(order, (2, 2), F.scaled_dot_product_attention) for order in SHARED_ORDERS]


def pick(cases):
    """Combine the cases with numbers of heads and windows; leave all but every 13th to .ci/run.

    13 has no divisor in common with the number of values of any axis, so every value is kept.
    """
    table = [(*case, *counts) for case, counts in product(cases, COUNTS)]
    return [
        pytest.param(*c, marks=() if i % 13 == 0 else pytest.mark.ci) for i, c in enumerate(table)
    ]


@pytest.mark.parametrize(("order", "folding", "attend", "heads", "windows"), pick(CASES))
def test_heads_and_windows_in_any_order(order, folding, attend, heads, windows):
    module = Folded(heads, windows, order, folding, attend).double().eval()
    check(module, samples=1 + (heads + windows) % 3)


@pytest.mark.parametrize(("order", "folding", "attend", "heads", "windows"), pick(SHARED))
def test_heads_that_share_a_key_in_any_axis_of_the_queries(order, folding, attend, heads, windows):
    module = Shared(heads, windows, order, folding, attend).double().eval()
    check(module, samples=1 + (heads + windows) % 3)


class Streams(Folded):
    """Windows that attend to the tokens of the first window, too, as the streams of ProphetNet."""

    def forward(self, x):
        q, k, v = (self.fold(part(x)) for part in (self.q, self.k, self.v))
        k, v = (torch.cat([t[:, :, :1].expand_as(t), t], -2) for t in (k, v))
        return (x + self.out(self.unfold(self.attend(q, k, v), len(x)))).mean(1)


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_windows_that_share_some_of_their_keys_are_no_more_queries_of_them(samples):
    module = Streams(2, 3, "bhw", (1, 1, 1), F.scaled_dot_product_attention).double().eval()
    x = torch.randn(samples, 3 * TOKENS, WIDTH, dtype=torch.float64)

    def attend(one):
        q, k, v = (module.fold(part(one[None]))[0] for part in (module.q, module.k, module.v))
        k, v = (torch.cat([t[:, :1].expand_as(t), t], -2) for t in (k, v))
        p = (q @ k.mT / D**0.5).softmax(-1)
        return p, p @ v

    rows = lipaudit.measure(module, "attention", data=x, dtype="float64").section("attention").rows
    norms = [torch.linalg.matrix_norm(attend(one)[0], 2).amax(1) for one in x]
    truth = torch.stack(norms).mean(0)
    assert [row.p_norm for row in rows] == pytest.approx(truth.tolist(), rel=1e-6)
    rows = lipaudit.measure(module, "bounds", data=x, dtype="float64", tol=1e-10)
    norms = []
    for one in x:
        jacobian = torch.autograd.functional.jacobian(lambda z: attend(z)[1], one)
        norms.append(torch.linalg.matrix_norm(jacobian.reshape(2, -1, one.numel()), 2))
    truth = torch.stack(norms).quantile(0.5, 0)
    assert [row.exact for row in rows.section("bounds").rows] == pytest.approx(
        truth.tolist(), rel=1e-6
    )
