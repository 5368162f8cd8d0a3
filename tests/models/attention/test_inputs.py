"""In what the norm of a layer is taken: a matter of the graph, said of every row."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lipaudit.data.batch import Batch
from lipaudit.measures.bounds import BoundsOptions, measure, summarise
from lipaudit.models.attention.survey import survey
from tests.nets import draw, own_batch, own_net

TOKENS, WIDTH, HEADS = 8, 8, 2


class Attention(nn.Module):
    """An attention module; subclasses say what its projections read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.one, self.other = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.reduce = nn.Conv1d(WIDTH, WIDTH, 2, 2)

    def inputs(self, x):
        return x, x

    def attended(self, x, y):
        q, k, v = self.to_q(x), self.to_k(y), self.to_v(y)
        q, k, v = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(3 * q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x):
        return self.attended(*self.inputs(x))


class Reduced(Attention):
    """Keys and values from fewer tokens, as in PVTv2."""

    def inputs(self, x):
        return x, self.one(self.reduce(x.mT).mT)


class Class(Attention):
    """A query from the first token only, as in CaiT and XCiT."""

    def inputs(self, x):
        return x[:, :1], x


class TwoNorms(Attention):
    def inputs(self, x):
        return self.one(x), self.other(x)


class OneNorm(Attention):
    """One tensor, by way of views."""

    def inputs(self, x):
        y = self.one(x)
        return y.mT.contiguous().mT, y.view(-1, 4, WIDTH).reshape(x.shape)


class Pointwise(Attention):
    """Queries by a convolution over a map, keys by a linear map over tokens."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 1)
        self.to_q = nn.Identity()

    def inputs(self, x):
        return self.conv(x.mT.unflatten(2, (2, -1))).flatten(2).mT, x


class Reversed(Attention):
    """Keys and values from the same tokens in another order: one input all the same."""

    def inputs(self, x):
        return x, x.view(-1, 2, TOKENS // 2, WIDTH).transpose(1, 2).reshape(x.shape)


class Cross(Attention):
    """Keys and values from another argument of the module."""

    def forward(self, x, y):
        return self.attended(x, y)


class Whole(nn.Module):
    """The module in a model: behind a layer of its own, which is none of its business."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.before, self.memory = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = attention

    def forward(self, x):
        given = [self.before(x).tanh()]
        if isinstance(self.attention, Cross):
            given.append(self.memory(x)[:, :5].tanh())
        return self.attention(*given)


def net_of(attention: Attention):
    return own_net(Whole(attention).double(), (TOKENS, WIDTH), "float64", classifier=False)


def batch() -> Batch:
    return own_batch(draw(1, 2, TOKENS, WIDTH).double())


def rows_of(attention: Attention, **options):
    """The rows of the measure, the largest norms over two samples, and the notes."""
    chosen = BoundsOptions(tol=1e-9, **options)
    section = summarise(list(measure(net_of(attention), [batch()], chosen)), chosen)[0]
    rows = section.rows
    return (
        rows,
        torch.tensor([row.exact_max for row in rows], dtype=torch.float64),
        [n.code for n in section.notes],
    )


def given_to(attention: Attention):
    net, seen = net_of(attention), []
    with attention.register_forward_pre_hook(lambda _m, args: seen.append(args)):
        net.output(batch())
    return seen[0]


def dense(attention: Attention, function, *given: torch.Tensor) -> torch.Tensor:
    """The largest norm of every head over the samples, in all that `function` takes."""
    norms = []
    for one in zip(*given, strict=True):
        parts = torch.autograd.functional.jacobian(
            lambda *xs: function(*(x[None] for x in xs))[0], one
        )
        whole = torch.cat([part.flatten(2) for part in parts], 2).unflatten(1, (HEADS, -1))
        norms.append(torch.linalg.matrix_norm(whole.transpose(0, 1).flatten(1, 2), 2))
    return torch.stack(norms).amax(0)


@pytest.mark.parametrize("kind", [Attention, Reduced, Class, TwoNorms, OneNorm, Cross])
def test_norms_in_the_input_of_the_module(kind):
    attention = kind()
    given = given_to(attention)
    want = dense(attention, attention, *given)
    rows, found, _ = rows_of(attention, input="module")
    torch.testing.assert_close(found, want, rtol=1e-7, atol=0.0)
    assert {row.input for row in rows} == {"module input"}


@pytest.mark.parametrize(
    ("kind", "label"),
    [(Attention, "one input"), (OneNorm, "one input"), (Cross, "queries apart")]
    + [(Reduced, "queries apart"), (Class, "queries apart"), (TwoNorms, "queries apart")],
)
def test_norms_in_the_inputs_of_the_projections(kind, label):
    attention = kind()
    given = given_to(attention)
    x, y = given if kind is Cross else attention.inputs(*given)
    if label == "one input":
        want = dense(attention, lambda x: attention.attended(x, x), x)
    else:
        want = dense(attention, attention.attended, x, y)
    rows, found, codes = rows_of(attention)
    torch.testing.assert_close(found, want, rtol=1e-7, atol=0.0)
    assert {row.input for row in rows} == {label}
    assert ("inputs-apart" in codes) == (kind in (Reduced, Class, TwoNorms))


@pytest.mark.parametrize("kind", [Reduced, Class])
def test_the_two_norms_differ_where_one_input_is_made_of_the_other(kind):
    """By some per cent: what the note is for."""
    apart, together = (rows_of(kind(), input=name)[1] for name in ("projections", "module"))
    assert ((apart - together).abs() > 0.01 * together).any()


@pytest.mark.parametrize(
    ("kind", "holds"),
    [(Attention, True), (Cross, True), (Reduced, False), (Class, False), (OneNorm, False)],
)
def test_bounds_are_given_in_the_module_input_where_they_hold_there(kind, holds):
    rows, _, _ = rows_of(kind(), input="module")
    assert all((row.sharp is not None) == holds for row in rows)
    assert all(row.sharp is None or row.sharp >= row.exact for row in rows)
    assert all((row.kind == "numerical") != holds for row in rows)


def test_weights_that_agree_do_not_make_one_input_of_two():
    """Else the norm would jump when a weight moves by 1e-6."""
    same, moved = TwoNorms(), TwoNorms()
    moved.one.weight.data[0] += 1e-6
    (before, first, _), (after, second, _) = rows_of(same), rows_of(moved)
    assert [row.input for row in before] == [row.input for row in after]
    torch.testing.assert_close(first, second, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize(
    ("kind", "joint"),
    [(Attention, True), (OneNorm, True), (Pointwise, True)]
    + [(Reduced, False), (Class, False), (TwoNorms, False), (Cross, False)],
)
def test_one_input_is_one_tensor(kind, joint):
    (site,) = survey(net_of(kind()), batch()).sites
    assert site.closed_form
    assert site.structure.joint == joint


def test_tokens_in_another_order_are_no_other_input():
    """Varied independently their norms would be those of a cross-attention."""
    attention = Reversed()
    want = dense(attention, attention, *given_to(attention))
    rows, found, codes = rows_of(attention)
    torch.testing.assert_close(found, want, rtol=1e-7, atol=0.0)
    assert {row.kind for row in rows} == {"numerical"}
    assert "inputs-apart" not in codes


def test_a_query_that_is_constant_has_the_input_of_keys_and_values():
    class Learned(Attention):
        def __init__(self):
            super().__init__()
            self.latent = nn.Parameter(torch.randn(1, 1, WIDTH))

        def inputs(self, x):
            return self.latent.expand(len(x), -1, -1), x

    rows, found, _ = rows_of(Learned())
    attention = Learned()
    want = dense(attention, attention, *given_to(attention))
    torch.testing.assert_close(found, want, rtol=1e-7, atol=0.0)
    assert {row.input for row in rows} == {"keys and values"}
