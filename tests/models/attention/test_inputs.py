"""In what the norm of a layer is taken: a matter of the graph, said of every row."""

import pytest
import torch
from torch import nn

from lipaudit.data.batch import Batch
from lipaudit.measures.bounds import BoundsOptions, measure, summarise
from lipaudit.models.attention.survey import survey
from tests.models.attention.tiny import WIDTH, Tiny, norms, tiny_net
from tests.nets import Calls, draw, own_batch

TOKENS = 8


def reading(inputs=lambda _m, x, y=None: (x, x if y is None else y), **parts) -> Tiny:
    """Return an attention module of one argument, or of two, and what its parts read of them."""

    def read(*given):
        x, y = inputs(*given)
        return x, y, y

    parts |= {"one": lambda: nn.LayerNorm(WIDTH), "other": lambda: nn.LayerNorm(WIDTH)}
    parts |= {"reduce": lambda: nn.Conv1d(WIDTH, WIDTH, 2, 2)}
    parts |= {"latent": lambda: nn.Parameter(torch.randn(1, 1, WIDTH)), "out": nn.Identity}
    return Tiny(read=read, change=lambda _m, _x, q, k, v: (3 * q, k, v), **parts)


def view_twice(module, x):
    """Return one tensor, by way of views."""
    y = module.one(x)
    return y.mT.contiguous().mT, y.view(-1, 4, WIDTH).reshape(x.shape)


def reorder(_module, x):
    """Return the same tokens in another order: one input all the same."""
    return x, x.view(-1, 2, TOKENS // 2, WIDTH).transpose(1, 2).reshape(x.shape)


KINDS = {  # what makes each module, and the input that its norms are of
    "plain": (reading, "one input"),
    "one norm": (lambda: reading(view_twice), "one input"),
    "cross": (reading, "queries apart"),
    "reduced, as in PVTv2": (
        lambda: reading(lambda m, x: (x, m.one(m.reduce(x.mT).mT))),
        "queries apart",
    ),
    "class, as in CaiT": (lambda: reading(lambda _, x: (x[:, :1], x)), "queries apart"),
    "two norms": (lambda: reading(lambda m, x: (m.one(x), m.other(x))), "queries apart"),
    "learned queries": (
        lambda: reading(lambda m, x: (m.latent.expand(len(x), -1, -1), x)),
        "keys and values",
    ),
}
MADE_OF_ONE = ("reduced, as in PVTv2", "class, as in CaiT", "two norms")
"""Kinds whose two inputs depend on one input of the module."""


def net_of(attention: Tiny, *, cross: bool = False):
    """Return a model of the module behind a layer of its own, which is none of its business."""

    def run(before, memory, attention, x):
        given = [before(x).tanh(), memory(x)[:, :5].tanh()]
        return attention(*given[: 1 + cross])

    torch.manual_seed(1)
    linears = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
    return tiny_net(Calls(run, *linears, attention), TOKENS)


def batch() -> Batch:
    return own_batch(draw(1, 2, TOKENS, WIDTH).double())


def rows_of(attention: Tiny, *, cross: bool = False, **options):
    """The rows of the measure, the largest norms over two samples, and the notes."""
    chosen = BoundsOptions(tol=1e-9, **options)
    net = net_of(attention, cross=cross)
    section = summarise(list(measure(net, [batch()], chosen)), chosen)[0]
    norms = torch.tensor([row.exact_max for row in section.rows], dtype=torch.float64)
    return section.rows, norms, [note.code for note in section.notes]


def given_to(attention: Tiny, *, cross: bool = False):
    net, seen = net_of(attention, cross=cross), []
    with attention.register_forward_pre_hook(lambda _m, args: seen.append(args)):
        net.output(batch())
    return seen[0]


def dense(function, *given: torch.Tensor) -> torch.Tensor:
    """The largest norm of every head over the samples, in all that `function` takes."""
    return torch.stack([norms(function, *one) for one in zip(*given, strict=True)]).amax(0)


@pytest.mark.parametrize(("name", "build", "label"), [(n, *kind) for n, kind in KINDS.items()])
def test_norms_in_the_inputs_of_the_projections_and_of_the_module(name, build, label):
    attention, cross = build(), name == "cross"
    given = given_to(attention, cross=cross)
    of_module = dense(attention.heads, *given)
    rows, found, _ = rows_of(attention, cross=cross, input="module")
    torch.testing.assert_close(found, of_module, rtol=1e-7, atol=0.0)
    names = "argument 1, argument 2" if cross else "argument 1"
    assert {row.input for row in rows} == {f"module input ({names})"}
    # Bounds hold there only where the projections read the arguments as they are.
    holds = name in ("plain", "cross", "learned queries")
    assert all((row.sharp is not None) == (row.kind != "numerical") == holds for row in rows)
    assert all(row.sharp is None or row.sharp >= row.exact for row in rows)
    x, y, _ = attention.read(attention, *given)
    want = of_module
    if label == "queries apart":
        want = dense(lambda x, y: attention.attended(x, x, y, y), x, y)
    elif name == "one norm":
        want = dense(lambda x: attention.attended(x, x, x, x), x)
    rows, found, codes = rows_of(attention, cross=cross)
    torch.testing.assert_close(found, want, rtol=1e-7, atol=0.0)
    assert {row.input for row in rows} == {label}
    assert ("inputs-apart" in codes) == (name in MADE_OF_ONE)
    # Where one input is made of the other, they differ by some per cent: what the note is for.
    if name in MADE_OF_ONE[:2]:
        assert ((found - of_module).abs() > 0.01 * of_module).any()


def test_a_numerical_norm_names_the_arguments_that_it_is_of():
    """As in CaiT: the first class token is learned, so that only the context varies."""

    def read(_module, x, context):
        keys = torch.cat([x, context], 1)
        return x, keys, keys.flip(1)

    class ClassAttention(Tiny):
        def forward(self, x, context):
            return super().forward(x, context)

    def run(before, first, second, x):
        context = before(x).tanh()
        token = first.token.expand(len(x), -1, -1)
        return second(first(token, context=context).tanh(), context)

    torch.manual_seed(2)
    token = nn.Parameter(torch.randn(1, 1, WIDTH, dtype=torch.float64))
    first, second = (ClassAttention(read=read, token=lambda: token) for _ in range(2))
    net = tiny_net(Calls(run, nn.Linear(WIDTH, WIDTH), first, second), TOKENS)
    seen = []
    with second.register_forward_pre_hook(lambda _m, args: seen.append(args)):
        net.output(batch())
    x, context = seen[0]
    learned = dense(lambda c: first.heads(first.token, c), context)
    both = dense(second.heads, x, context)
    options = BoundsOptions(tol=1e-9)
    rows = summarise(list(measure(net, [batch()], options)), options)[0].rows
    wanted = ["module input (context)"] * 2 + ["module input (x, context)"] * 2
    assert [row.input for row in rows] == wanted
    found = torch.tensor([row.exact_max for row in rows], dtype=torch.float64)
    torch.testing.assert_close(found, torch.cat([learned, both]), rtol=1e-7, atol=0.0)


def test_one_tensor_given_as_several_arguments_is_one_input():
    attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    net = tiny_net(Calls(lambda m, x: m(x, x, value=x)[0], attention), TOKENS)
    options = BoundsOptions(input="module")
    rows = summarise(list(measure(net, [batch()], options)), options)[0].rows
    assert {row.input for row in rows} == {"module input (query = key = value)"}


def test_weights_that_agree_do_not_make_one_input_of_two():
    """Else the norm would jump when a weight moves by 1e-6."""
    same, moved = KINDS["two norms"][0](), KINDS["two norms"][0]()
    moved.one.weight.data[0] += 1e-6
    (before, first, _), (after, second, _) = rows_of(same), rows_of(moved)
    assert [row.input for row in before] == [row.input for row in after]
    torch.testing.assert_close(first, second, rtol=1e-4, atol=0.0)


def test_one_input_is_one_tensor():
    """Queries by a convolution over a map, keys by a linear map over tokens."""
    pointwise = reading(
        lambda m, x: (m.conv(x.mT.unflatten(2, (2, -1))).flatten(2).mT, x),
        conv=lambda: nn.Conv2d(WIDTH, WIDTH, 1),
        to_q=nn.Identity,
    )
    (site,) = survey(net_of(pointwise), batch()).sites
    assert site.closed_form
    assert site.structure.joint


def test_tokens_in_another_order_are_no_other_input():
    """Varied independently their norms would be those of a cross-attention."""
    attention = reading(reorder)
    want = dense(attention.heads, *given_to(attention))
    rows, found, codes = rows_of(attention)
    torch.testing.assert_close(found, want, rtol=1e-7, atol=0.0)
    assert {row.kind for row in rows} == {"numerical"}
    assert "inputs-apart" not in codes
