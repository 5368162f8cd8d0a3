"""Dual bounds and branch and bound against points, exact arithmetic and full enumeration."""

import itertools
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from lipaudit.wings.certificates.branch import (
    Nodes,
    ascend,
    bound_nodes,
    make_problem,
    prove_bounds,
    prove_positive,
    restrict_to_face,
    start_nodes,
)
from lipaudit.wings.certificates.prove import ball, bound_margins, hull, margins, run


class Mixer(nn.Module):
    """ReLUs before and behind an attention over three tokens."""

    def __init__(self, dim=6):
        super().__init__()
        self.first, self.up = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.down, self.head = nn.Linear(2 * dim, dim), nn.Linear(dim, 4)

    def forward(self, x):
        x = x + F.relu(self.first(x))
        x = x + (x @ x.transpose(-2, -1) / 6).softmax(-1) @ x
        return self.head((x + self.down(F.relu(self.up(x)))).mean(1))


def _mixer(seed):
    torch.manual_seed(seed)
    model = Mixer().requires_grad_(requires_grad=False)
    x = torch.randn(1, 3, 6)
    return model, x, int(model(x).argmax())


def _pass(model, x, label, eps, norm, dtype=torch.float64):
    form = ball(x, eps, norm=norm, dtype=dtype)
    return form, margins(run(model, form), label)


def _record(model, call, read):
    """Call, and return what is read of the output of both layers before a ReLU."""
    seen = []
    hooks = [
        each.register_forward_hook(lambda _m, _i, out: seen.append(read(out)))
        for each in (model.first, model.up)
    ]
    call()
    for hook in hooks:
        hook.remove()
    return seen[-2:]  # a pass begins with a trial


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("seed", range(3))
def test_any_multipliers_bound_what_their_part_holds(norm, seed, points):
    """Random multipliers and any part of the signs of a point: below its margin."""
    model, x, label = _mixer(seed)
    start_form, form = _pass(model, x, label, 0.15, norm)
    problem = make_problem(form)
    _, inputs = points(start_form, 200)
    exact = model.double()
    logits = exact(inputs)
    others = [j for j in range(4) if j != label]
    truth = logits[:, [label]] - logits[:, others]
    single = _mixer(seed)[0]
    ranges = _record(single, lambda: run(single, start_form), lambda form: form.range())
    signs = _record(exact, lambda: exact(inputs), lambda out: out.flatten(1) > 0)
    mixed = [((low < 0) & (high > 0)).flatten() for low, high in ranges]
    signs = torch.cat([s[:, m] for s, m in zip(signs, mixed, strict=True)], 1)
    k = len(problem.slope)
    assert signs.shape[1] == k > 2
    generator = torch.Generator().manual_seed(seed)
    for share in (0.0, 0.3, 1.0):
        known = torch.rand(len(inputs), k, generator=generator) < share
        state = torch.where(known, torch.where(signs, 1, -1), 0)
        which = torch.randint(3, (len(inputs),), generator=generator)
        y = 0.3 * torch.randn(2, len(inputs), k, generator=generator, dtype=torch.float64)
        nodes = Nodes(which, state, y)
        own = truth.gather(1, which[:, None])[:, 0]
        assert (prove_bounds(problem, nodes) <= own).all()
        value, better = ascend(problem, start_nodes(problem, which), steps=20, rate=1e-2)
        assert (value <= own).all()
        value, _ = ascend(problem, Nodes(which, state, better.y), steps=20, rate=1e-2)
        assert (value <= own).all()


def test_the_bound_that_is_claimed_in_rational_arithmetic():
    """`prove_bounds` lies below the exact dual value of the same multipliers, closely."""
    model, x, label = _mixer(0)
    _, form = _pass(model, x, label, 0.15, "linf", torch.float32)
    problem = make_problem(form)
    _, nodes = ascend(
        problem.to(torch.float32),
        start_nodes(problem.to(torch.float32), torch.arange(3)),
        steps=10,
        rate=1e-2,
    )
    claimed = prove_bounds(problem, nodes)

    def exact(t):
        return [Fraction(v) for v in t.double().flatten().tolist()]

    for row in range(3):
        y1, y2 = (exact(nodes.y[i, row]) for i in (0, 1))
        a, m = exact(problem.slope), exact(problem.offset)
        w = [q * (1 - s) - p * s for p, q, s in zip(y1, y2, a, strict=True)]
        v = [-(p + q) * o for p, q, o in zip(y1, y2, m, strict=True)]
        t = exact(problem.margins.slopes[row])
        for weight, slopes in zip(w, problem.relus.slopes, strict=True):
            t = [total + weight * each for total, each in zip(t, exact(slopes), strict=True)]
        for column, each in zip(problem.columns.tolist(), v, strict=True):
            t[column] += each
        value = exact(problem.margins.centre)[row] - exact(problem.margins.spread)[row] + sum(v)
        for weight, c, spread in zip(
            w, exact(problem.relus.centre), exact(problem.relus.spread), strict=True
        ):
            value += weight * c - abs(weight) * spread
        value -= sum(abs(each) for each in t)
        assert Fraction(claimed[row].item()) <= value
        assert value - Fraction(claimed[row].item()) < Fraction(1, 10**10)


def _plane(seed):
    """A ReLU network of two inputs, and the least margin of every radius on a fine grid."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    ).requires_grad_(requires_grad=False)
    x = torch.randn(1, 2)
    return model, x, int(model(x).argmax())


@pytest.mark.parametrize("seed", range(3))
def test_branching_settles_relu_networks(seed):
    """Affine between ReLUs, a network is decided completely: up to the radius of the truth."""
    model, x, label = _plane(seed)
    side = torch.linspace(-1, 1, 101, dtype=torch.float64)
    grid = torch.cartesian_prod(side, side)
    truth = nn.Sequential(*model).double()

    def least(eps):
        logits = truth(x.double() + eps * grid)
        return (
            (logits[:, [label]] - logits).masked_fill(torch.arange(3) == label, torch.inf).amin()
        )

    low, high = 0.0, 64.0
    assert least(high) < 0
    for _ in range(20):  # to 64 / 2^20, far less than what is left between the radii below
        middle = (low + high) / 2
        low, high = (middle, high) if least(middle) > 0 else (low, middle)
    model, x, label = _plane(seed)
    below = prove_positive(_pass(model, x, label, 0.9 * low, "linf")[1])
    above = prove_positive(_pass(model, x, label, 1.02 * low + 1e-3, "linf")[1], nodes=500)
    assert below.certified
    assert not above.certified
    assert below.bound <= least(0.9 * low) + 1e-9


def test_relus_whose_input_is_always_0_hide_no_proof():
    """In float64 their offset is so small that it is 0 in the precision of the search."""
    model, x, label = _plane(0)
    model, x = model.double(), x.double()
    pruned = nn.Sequential(*model)
    pruned[0], pruned[2] = nn.Linear(2, 10).double(), nn.Linear(10, 8).double()
    with torch.no_grad():  # the same function, with two units more
        pruned[0].weight.copy_(F.pad(model[0].weight, (0, 0, 0, 2)))
        pruned[0].bias.copy_(F.pad(model[0].bias, (0, 2)))
        pruned[2].weight.copy_(F.pad(model[2].weight, (0, 2), value=1.0))
        pruned[2].bias.copy_(model[2].bias)
    verdicts = []
    for each in (model, pruned):
        out = _pass(each, x, label, 2.5, "linf")[1]
        assert out.range()[0].max() < 0
        verdicts.append(prove_positive(out).certified)
    assert verdicts == [True, True]


def test_relus_that_matter_by_their_upper_line_alone_are_split():
    """relu(x + y) + relu(x - y) is at most 2 on the box, and 3 by the upper lines."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    verdicts = {}
    for constant in (1.9, 2.1, 2.9, 3.1):
        weights = ([[1, 1], [1, -1]], [0, 0], [[-1, -1], [0, 0]], [constant, 0])
        for parameter, values in zip(model.parameters(), weights, strict=True):
            parameter.data = torch.tensor(values, dtype=torch.float32)
        out = _pass(model, torch.zeros(1, 2), 0, 1.0, "linf")[1]
        decision = prove_positive(out, nodes=100)
        verdicts[constant] = decision.certified
        assert decision.bound <= constant - 2
    assert verdicts == {1.9: False, 2.1: True, 2.9: True, 3.1: True}


def test_every_one_of_many_open_margins_is_proven():
    model, x, label = _plane(0)
    out = _pass(model, x, label, 2.5, "linf")[1]
    assert out.range()[0].max() < 0
    many = out.repeat(20)  # more margins than have faces of their own
    decision = prove_positive(many)
    assert decision.certified
    assert set(decision.leaves.which.tolist()) == set(range(40))
    assert prove_positive(many, leaves=decision.leaves).certified


def test_lines_prove_more_than_forms_and_branching_more_than_lines():
    verdicts = set()
    for seed, limit in ((3, 0.2743), (5, 0.0991), (8, 0.0219)):  # from here on open
        model, x, label = _mixer(seed)
        assert _pass(model, x, label, 0.95 * limit, "linf")[1].range()[0].min() > 0
        for more in (1.0, 1.03, 1.06):
            out = _pass(model, x, label, more * limit, "linf")[1]
            root, branched = (prove_positive(out, nodes=nodes) for nodes in (0, 100))
            assert out.range()[0].min() <= min(0, root.bound) <= root.bound <= branched.bound
            assert root.certified == (root.bound > 0)
            assert branched.certified == (branched.bound > 0)
            verdicts.add((root.certified, branched.certified))
    assert {(False, False), (False, True), (True, True)} == verdicts


def test_a_second_pass_is_run_only_where_the_first_spared_symbols_and_proved_nothing():
    model, x, label = _mixer(3)
    plane, points = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), []
    plane.register_forward_hook(lambda *_: points.append(0))
    seen = model.register_forward_hook(lambda *_: points.append(0))
    rich, few, passes = [], [], []
    for eps in (0.05, 0.2, 0.25, 0.3, 0.6, 1.2):
        points.clear()
        out = bound_margins(model, ball(x, eps), label)
        passes.append(len(points) // 2)  # a pass begins with a trial
        few.append(float(out.range()[0].min()))
        rich.append(float(_pass(model, x, label, eps, "linf")[1].range()[0].min()))
    # All that one rich pass proves is proven, and what the first proved costs one pass.
    assert [low > 0 for low in few] == [low > 0 for low in rich]
    assert passes == sorted(passes)
    assert {1, 2} == set(passes)
    again = passes.index(2)
    assert few[again:] == rich[again:]
    # Without attention nothing is spared, nor in balls other than boxes.
    other, form = ball(x[:, 0], 50.0), ball(x, 1.2, norm="l2")
    for function, inputs, which in ((plane, other, 0), (model, form, label)):
        points.clear()
        assert bound_margins(function, inputs, which).range()[0].min() < 0
        assert len(points) == 2
    seen.remove()


def test_nothing_is_certified_where_an_attack_succeeds(points):
    attacked = 0
    for seed in range(8):
        model, x, label = _mixer(seed)
        for eps in (0.2, 0.4):
            _, inputs = points(ball(x, eps, dtype=torch.float32), 1000)
            if (_mixer(seed)[0].double()(inputs).argmax(1) != label).any():
                attacked += 1
                out = _pass(model, x, label, eps, "linf", torch.float32)[1]
                assert not prove_positive(out, nodes=100).certified
    assert attacked >= 4


def test_limits_are_reported_and_margins_without_relus_need_no_search():
    model, x, label = _mixer(1)
    out = _pass(model, x, label, 0.5, "linf")[1]
    verdict = prove_positive(out, nodes=50)
    assert (verdict.certified, verdict.limit) == (False, "nodes")
    assert prove_positive(out, seconds=0.0).limit == "seconds"
    assert verdict.bound <= 0
    assert verdict.relus > 0
    linear = nn.Linear(4, 3).requires_grad_(requires_grad=False)
    x = torch.randn(1, 4)
    small, large = (
        prove_positive(margins(run(linear, ball(x, eps)), int(linear(x).argmax())))
        for eps in (1e-6, 1e3)
    )
    assert (small.certified, small.nodes, large.certified) == (True, 0, False)


def test_relus_that_no_margin_depends_on_are_left_out():
    model, x, label = _mixer(0)
    model.down.weight[:, ::2] = 0
    _, form = _pass(model, x, label, 0.4, "linf")
    first, last = form.symbols.relu_calls
    births = last.numbers
    read = (form.generators[births] != 0).any(1)
    assert 0 < read.sum() < len(read)
    problem = make_problem(form)
    assert (problem.depth == 0).sum() == len(first.slope)
    assert torch.equal(problem.offset[problem.depth == 1], last.offset[read])


def test_errors_that_rows_share_cancel():
    """A column for every symbol says more than a radius of each row."""
    model, x, label = _mixer(2)
    _, form = _pass(model, x, label, 0.1, "linf")
    whole = make_problem(form)
    apart = make_problem(form, numbers=0)
    assert whole.relus.slopes.shape[1] > apart.relus.slopes.shape[1] == 18 + len(apart.slope)
    first = start_nodes(whole, torch.arange(3))
    better, _ = ascend(whole, first, steps=100, rate=3e-3)
    value, _ = ascend(apart, first, steps=100, rate=3e-3)
    assert (better > value + 1e-4).all()


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_face_bounds_no_less_than_the_box_and_the_same_where_it_was_taken(norm):
    model, x, label = _mixer(1)
    problem = make_problem(_pass(model, x, label, 0.1, norm)[1])
    _, nodes = ascend(problem, start_nodes(problem, torch.arange(3)), steps=20, rate=1e-2)
    value, t = bound_nodes(problem, nodes)
    face = restrict_to_face(problem, t, 0.0, few=4)
    assert face.relus.slopes.shape[1] < problem.relus.slopes.shape[1]
    torch.testing.assert_close(bound_nodes(face, nodes)[0], value, rtol=0, atol=1e-12)
    generator = torch.Generator().manual_seed(0)
    above = 0.0
    for size in (1e-3, 1e-1, 1.0, 100.0):
        y = nodes.y + size * torch.randn(nodes.y.shape, generator=generator).double()
        off = bound_nodes(face, Nodes(nodes.which, nodes.state, y))[0]
        off = off - bound_nodes(problem, Nodes(nodes.which, nodes.state, y))[0]
        assert (off > -1e-9).all()
        above = max(above, off.max().item())
    assert above > 1e-6


@pytest.mark.parametrize("slot", [0, 1])
def test_each_multiplier_adds_nothing_positive_where_its_part_holds(slot):
    """At a point, with the errors that its ReLUs have there: one multiplier at a time."""
    model, x, label = _plane(0)
    form, out = _pass(model, x, label, 3.0, "linf")
    problem = make_problem(out)
    side = 2 * torch.rand(300, 2, generator=torch.Generator().manual_seed(0)).double() - 1
    e = torch.zeros(len(side), problem.relus.slopes.shape[1], dtype=torch.float64)
    e[:, :2] = side
    for depth in (0, 1):  # a ReLU of the second call reads the errors of the first
        own = problem.depth == depth
        z = (problem.relus.centre + e @ problem.relus.slopes.mT)[:, own]
        error = (z.relu() - problem.slope[own] * z) / problem.offset[own] - 1
        e[:, problem.columns[own]] = error
    z = problem.relus.centre + e @ problem.relus.slopes.mT
    truth = problem.margins.centre[0] + e @ problem.margins.slopes[0]
    assert e.abs().max() <= 1 + 1e-9
    k, which = len(problem.slope), torch.zeros(len(e), dtype=torch.long)
    seen = set()
    for unit in range(k):
        for known in (False, True):
            state = torch.zeros(len(e), k, dtype=torch.long)
            state[:, unit] = torch.where(z[:, unit] > 0, 1, -1) * known
            y = torch.zeros(2, len(e), k, dtype=torch.float64)
            y[slot, :, unit] = 1.0
            value, t = bound_nodes(problem, Nodes(which, state, y))
            added = value + t.abs().sum(1) + (t * e).sum(1) - truth
            assert (added < 1e-9).all()
            seen |= {(int(s), bool(a < -1e-3)) for s, a in zip(state[:, unit], added, strict=True)}
    equation = 1 if slot else -1
    assert seen >= {(0, True), (-equation, True), (equation, False)}
    assert (equation, True) not in seen


@pytest.mark.parametrize("most", [1, pytest.param(2, marks=pytest.mark.ci), 3])
def test_branching_bounds_words_by_their_largest_few(most):
    """What the pass leaves open is proven, and no margin above that of all replacements."""
    torch.manual_seed(most)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    x, near = torch.randn(1, 3, 4).double(), torch.randn(3, 4, 4).double()
    moves = torch.zeros(12, 1, 3, 4, dtype=torch.float64)
    for token in range(3):
        moves[4 * token : 4 * token + 4, 0, token] = near[token]
    texts = [
        x[0] + sum(move[0] for move in some)
        for count in range(most + 1)
        for tokens in itertools.combinations(moves.split(4), count)
        for some in itertools.product(*tokens)
    ]
    with torch.no_grad():
        gaps = model(torch.stack(texts)) @ torch.tensor([1.0, -1.0]).double()
    start_form = hull(x, moves, [4, 4, 4], most)

    def prove(share):
        """Shift the margin so that the least one is a share of what the pass is off by."""
        low = float(margins(run(model, start_form).reshape(-1), 0).range()[0])
        lift = share * (float(gaps.min()) - low) - float(gaps.min())
        out = run(lambda z: model(z) + torch.tensor([lift, 0.0]), hull(x, moves, [4, 4, 4], most))
        form = margins(out.reshape(-1), 0)
        return float(form.range()[0]) > 0, prove_positive(form, nodes=200).certified

    assert prove(1.01) == (True, True)
    assert prove(0.7) == (False, True)
    assert prove(-0.001) == (False, False)
