"""The measure `certify`: verdicts and radii, held to exact ones and to attacks by force."""

import copy
import math
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import lipaudit
from lipaudit import ModelSpec
from lipaudit.attacks.balls import Ball
from lipaudit.attacks.oracle import pgd
from lipaudit.data.batch import Batch
from lipaudit.errors import InputError, UsageError
from lipaudit.models.net import LoadOptions
from lipaudit.models.sources.loader import borrow
from lipaudit.wings.certificates import bracket
from lipaudit.wings.certificates import certificate as certificates
from lipaudit.wings.certificates.bracket import Bracket
from lipaudit.wings.certificates.certificate import Proof, certify_ball
from lipaudit.wings.certificates.certify import check
from lipaudit.wings.certificates.form import NoRuleError
from lipaudit.wings.certificates.options import CertifyOptions
from tests.measures.cases import SHAPE, Plane, Small, Words, in_order, samples
from tests.nets import draw
from tests.simulated.conftest import MODELS

EPS = ("0.01", "0.1", "0.15", "0.3")


def measured(model, data, **options):
    """Certify all of the samples; one attack step is enough where nothing else is said."""
    count = len(data[0] if isinstance(data, tuple) else data)
    given = {"data": data, "input_shape": SHAPE, "samples": count, "attack": "fgsm"} | options
    return lipaudit.measure(model, "certify", **given)


@pytest.fixture(scope="module")
def small():
    model = Small().eval()
    data = samples(model, 5, wrong=1)
    how = {"eps": ",".join(EPS), "radius": True, "tol": 0.3, "attack": "pgd"}
    return model, data, measured(model, data, **how)


def test_verdicts_are_nested_and_add_up(small):
    section = small[2].section("certify")
    verdicts = [section.samples[f"verdict@linf,{eps}"] for eps in EPS]
    outwards = ["certified", "undecided", "broken"]
    assert {*outwards, "wrong"} == {v for each in verdicts for v in each}
    for correct, line in zip(section.samples["correct"], zip(*verdicts, strict=True), strict=True):
        assert (set(line) == {"wrong"}) is not correct
        if correct:
            assert [*line] == sorted(line, key=outwards.index)
    for row, each in zip(section.rows, verdicts, strict=True):
        assert row.certified == each.count("certified") / 5
        assert row.robust == (5 - each.count("broken") - each.count("wrong")) / 5
        assert row.undecided == each.count("undecided")
        assert row.certified_low <= row.certified <= row.robust <= row.clean == 4 / 5
        why = section.samples[f"why@linf,{row.eps_text}"]
        assert [bool(w) for w in why] == [v == "undecided" for v in each]
    for name in ("radius", "radius_adversarial"):  # wrong samples have none
        known = [radius is not None for radius in section.samples[name]]
        assert known == [bool(correct) for correct in section.samples["correct"]]


class ReluAttention(Small):
    """Softmax as the only smooth function: ReLU, and no normalisation."""

    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.qkv.weight *= 2

    def forward(self, x):
        x = self.into(x.flatten(1, 2))
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v)
        return self.head(F.relu(self.up(x)).mean(1))


def test_auto_proves_more_than_order_1_where_only_softmax_is_smooth():
    model = ReluAttention().eval()
    data = samples(model, 3)
    certified = {}
    for order in ("1", "2", "auto"):
        section = measured(model, data, eps="0.18", order=order, nodes=1).section("certify")
        certified[order] = section.samples["verdict@linf,0.18"].count("certified")
    assert certified == {"1": 1, "2": 3, "auto": 3}


@pytest.mark.parametrize(("norm", "order"), [("linf", 1), ("linf", 2), ("l2", 1), ("l2", 2)])
def test_no_certificate_holds_where_attacks_succeed(small, norm, order):
    """By force: nothing gets through a certified ball; where something does, none is given."""
    model, (x, y), _ = small
    data, how = (x[2:3], y[2:3]), {"norm": norm, "order": str(order), "tol": 0.5}
    told = measured(model, data, radius=True, **how).section("certify").samples
    x, y = in_order(told, data)
    right = [i for i, correct in enumerate(told["correct"]) if correct]
    for i in right:
        assert 0 < told["radius"][i] < told["radius_adversarial"][i]
        assert not is_broken(model, x[i], y[i], Ball(norm, told["radius"][i]))
        beyond = told["radius_adversarial"][i]
        assert is_broken(model, x[i], y[i], Ball(norm, 1.1 * beyond))
        with borrow(model, LoadOptions(), SHAPE) as net:
            sample = Batch(x[i : i + 1], None, ("0",))
            proof = Proof(norm=norm, order=order)
            assert not certify_ball(net, sample, int(y[i]), beyond * (1 + 1e-5), proof).certified


def is_broken(model, x, y, ball):
    """Whether steps from many points of a ball, corners among them, end in another class."""
    exact, x, move = copy.deepcopy(model).double(), x.double(), draw(2, 32, *SHAPE).double()
    size = move.abs() if ball.norm == "linf" else move.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    start = (x + ball.eps * move / size).clamp(0, 1)
    labels = y.expand(len(start))
    z = pgd(exact, x.expand_as(start), labels, ball, start=start, steps=30)
    with torch.no_grad():
        return bool((exact(z).argmax(1) != labels).any())


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_radii_of_a_linear_model_are_the_exact_ones(norm):
    model = Plane()
    data = samples(model, 4)
    report = measured(model, data, radius=True, norm=norm, tol=0.02)
    coarse = measured(model, data, radius=True, norm=norm, tol=0.9).section("certify").samples
    told = report.section("certify").samples
    x, _ = in_order(told, data)
    with torch.no_grad():
        margin = (model(x)[:, 0] - model(x)[:, 1]).abs()
        weight = model.head.weight[0] - model.head.weight[1]
    exact = margin / (weight.abs().sum() if norm == "linf" else weight.norm())
    for certified, found, truth in zip(
        told["radius"], told["radius_adversarial"], exact.tolist(), strict=True
    ):
        assert truth / 1.021 < certified <= truth * (1 + 1e-5)
        assert truth * (1 - 1e-5) <= found < truth * 1.021
    # On the line to what is found, the boundary is met however coarse the search is.
    assert coarse["radius_adversarial"] == pytest.approx(exact.tolist(), rel=0.01)
    (row,) = report.section("certify.radius").rows
    assert row.samples == 4
    assert row.radius == pytest.approx(torch.tensor(told["radius"]).quantile(0.5).item())
    assert 1 / 1.05 < row.ratio <= 1 + 1e-5


def test_what_is_settled_is_not_tried_again(small, monkeypatch):
    """A broken ball breaks the larger ones, a certified one holds for the smaller ones."""
    model, (x, y), _ = small
    proven, attacked = [], []
    prove, attack = Bracket.prove, Bracket.attack

    def proving(self, eps):
        proven.append((self.sample.ids[0], eps))
        return prove(self, eps)

    def attacking(self, radius):
        attacked.append((self.sample.ids[0], float(radius)))
        return attack(self, radius)

    monkeypatch.setattr(Bracket, "prove", proving)
    monkeypatch.setattr(Bracket, "attack", attacking)
    told = measured(model, (x, y), eps=",".join(EPS[::-1])).section("certify").samples
    for number, name in enumerate(told["ids"]):
        verdicts = {float(eps): told[f"verdict@linf,{eps}"][number] for eps in EPS}
        broken = [eps for eps, v in verdicts.items() if v == "broken"]
        open_ = [eps for eps, v in verdicts.items() if v == "undecided"]
        certified = [eps for eps, v in verdicts.items() if v == "certified"]
        standing = sorted(certified + open_)
        assert [e for n, e in attacked if n == name] == standing + sorted(broken)[:1]
        tried = sorted(open_, reverse=True) + sorted(certified, reverse=True)[:1]
        assert [e for n, e in proven if n == name] == tried


def test_a_search_beyond_the_accuracy_of_floats_is_refused():
    with pytest.raises(UsageError, match="tol"):
        lipaudit.measure("demo", "certify", samples=1, radius=True, tol=1e-17)


def test_a_search_ends_at_the_smallest_accuracy():
    tried = []

    def examine(radius):
        tried.append(radius)
        assert len(tried) < 100

    def read_limits():
        holds = [radius for radius in tried if radius <= 0.3]
        return max(holds, default=0.0), min((r for r in tried if r > 0.3), default=1.0)

    bracket._search_radius(examine, read_limits, first=0.1, largest=1.0, tol=1e-12)
    low, high = read_limits()
    assert low <= 0.3 < high <= low * (1 + 1e-11)


def test_results_do_not_depend_on_the_batch_or_on_other_samples(small):
    model, data, _ = small
    options = {"eps": "0.03,0.1", "attack": "pgd"}
    together = measured(model, data, batch_size=4, **options).section("certify").samples
    x, y = in_order(together, data)
    alone = measured(model, (x[3:4], y[3:4]), **options).section("certify").samples
    for name, values in together.items():
        assert alone[name][0] == values[3]


def test_without_labels_or_time_it_says_so(small):
    model, (x, y), _ = small
    section = measured(model, x[:2], eps="0.01").section("certify")
    assert section.rows[0].clean is None
    assert section.samples["correct"] == section.samples["label"] == (None,) * 2
    assert set(section.samples["verdict@linf,0.01"]) <= {"certified", "undecided"}
    assert "own-predictions" in {note.code for note in section.notes}
    section = measured(model, (x, y), eps="0.01", seconds=1e-9).section("certify")
    assert set(section.samples["why@linf,0.01"]) == {"", "seconds"}
    assert section.rows[0].certified == 0
    assert "time-limit" in {note.code for note in section.notes}


def test_a_ball_that_is_too_large_is_undecided(small):
    """The norm of a sequence of tokens has no box that would end it."""
    model, (x, y), _ = small
    with borrow(model, LoadOptions(), SHAPE) as net:
        batch = Batch(x[1:2], y[1:2], ("0",))
        verdict = certify_ball(replace(net, box=None), batch, int(y[1]), 1e30, Proof())
    assert (verdict.certified, verdict.why) == (False, "unbounded")


def test_texts_move_in_their_embeddings():
    """All real tokens together in an L2 ball; what is padded does not move."""
    spec = ModelSpec(Words(), (5,), kind="text", vocabulary=50)
    ids = torch.randint(1, 50, (1, 5), generator=torch.Generator().manual_seed(0))
    report = lipaudit.measure(spec, "certify", data=ids, radius=True, samples=1, tol=0.3)
    section = report.section("certify")
    assert section.settings["norm"] == "l2"
    for radius, found in zip(
        section.samples["radius"], section.samples["radius_adversarial"], strict=True
    ):
        assert 0 < radius < found
    with borrow(spec, LoadOptions(), None) as net:
        proof = Proof(norm="l2")
        padded = torch.cat([ids, torch.zeros(1, 2, dtype=torch.long)], 1)
        label = int(net.output(Batch(ids[:1], None, ("0",))).argmax())
        short = certify_ball(net, Batch(ids[:1], None, ("0",)), label, 0.05, proof)
        long = certify_ball(
            net, Batch(padded[:1], None, ("0",), padded[:1] > 0), label, 0.05, proof
        )
    assert long.bound == pytest.approx(short.bound, rel=1e-4)


class Alone(Small):
    def forward(self, x):
        assert len(x) == 1, "one sample at a time"
        return super().forward(x)


def test_a_model_for_one_sample_at_a_time_is_certified(small):
    model, (x, y), _ = small
    alone = Alone()
    alone.load_state_dict(model.state_dict())
    row = measured(alone, (x, y), eps="0.001", batch_size=1).section("certify").rows[0]
    assert row.certified == row.clean > 0


class Ordered(Small):
    """It uses an operation that nothing is known of."""

    def forward(self, x):
        return super().forward(x.sort(-1).values)


WIDE = nn.Sequential(nn.Flatten(), nn.Linear(3 * 512 * 512, 2, bias=False))
# Its last layers are narrower: their symbols are born too late to have rows in the widest tensor.
LATE = nn.Sequential(WIDE, nn.Linear(2, 400_000), nn.Linear(400_000, 2))


@pytest.mark.parametrize(
    ("model", "shape", "changes", "error", "says"),
    [
        (Small(), SHAPE, {"classes": None}, InputError, "no class scores"),
        (Small(), SHAPE, {"classes": 1}, InputError, "one class"),
        (Ordered(), SHAPE, {}, NoRuleError, r"operation sort \(in Ordered\)"),
        (WIDE, (3, 512, 512), {}, InputError, r"takes about 18,432 GiB at order 1"),
        (LATE, (3, 512, 512), {}, InputError, r"takes about 18,432 GiB at order 1"),
    ],
)
def test_a_model_is_refused_before_anything_runs(model, shape, changes, error, says):
    batch, options = (
        Batch(torch.rand(1, *shape), None, ("0",)),
        CertifyOptions(eps=("0.1",), order="1"),
    )
    with borrow(model.eval(), LoadOptions(), shape) as net, pytest.raises(error, match=says):
        check(replace(net, **changes), batch, options)


def test_there_is_room_for_the_longest_sample_too_not_only_for_the_first(monkeypatch):
    def require_short(_net, sample, *_):
        if sample.x.shape[1] > 9:
            raise InputError("no room")

    monkeypatch.setattr("lipaudit.wings.certificates.certificate.require_room", require_short)
    options, ids = CertifyOptions(eps=("0.01",)), torch.full((3, 12), 5)
    mask = torch.arange(12) < torch.tensor([[9], [12], [7]])
    batch = Batch(ids, torch.zeros(3, dtype=torch.long), ("0", "1", "2"), mask)
    with borrow(MODELS["bert"](), LoadOptions(), None) as net:
        check(net, batch[:1], options)
        with pytest.raises(InputError, match="no room"):
            check(net, batch, options)


@pytest.mark.parametrize(
    ("given", "nodes", "seconds"),
    [
        ({}, 60_000, math.inf),
        ({"seconds": 50.0}, sys.maxsize, 50.0),
        ({"nodes": 7}, 7, math.inf),
        ({"nodes": 7, "seconds": 50.0}, 7, 50.0),
    ],
)
def test_a_limit_that_is_given_is_the_only_one(small, monkeypatch, given, nodes, seconds):
    model, (x, y), _ = small
    limits, prove = [], certificates.prove_positive

    def record(form, **how):
        limits.append(how)
        return prove(form, **how)

    monkeypatch.setattr(certificates, "prove_positive", record)
    measured(model, (x[1:2], y[1:2]), eps=EPS[0], **given)
    assert {each["nodes"] for each in limits} == {nodes}
    assert {math.isinf(each["seconds"]) for each in limits} == {math.isinf(seconds)}
    assert all(each["seconds"] <= seconds for each in limits)
