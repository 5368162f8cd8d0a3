"""Certificates of patches, held to a closed form and to every value of every pixel."""

import copy
import time
from itertools import combinations

import pytest
import torch
from torch import nn

import lipaudit
from lipaudit import ModelSpec
from lipaudit.data.batch import Batch
from lipaudit.engine.execute import Observer
from lipaudit.models.net import LoadOptions
from lipaudit.models.sources.loader import borrow
from lipaudit.wings.certificates.certificate import Proof, certify_ball
from tests.measures.cases import Plane, Small, in_order

SHAPE = (1, 2, 4)


def test_linear_classifiers_are_certified_exactly_where_no_k_patches_turn_them():
    torch.manual_seed(0)
    model, x = Plane(16).double(), torch.rand(10, 1, 4, 4, dtype=torch.float64)
    weight = (model.head.weight[0] - model.head.weight[1]).detach()
    gain = torch.maximum(weight * x.flatten(1), weight * (x.flatten(1) - 1))
    # Sums over 2x2 patches, then the k largest of the four.
    gain = gain.view(-1, 2, 2, 2, 2).sum((2, 4)).flatten(1)
    for k in (1, 2):
        largest = torch.stack([gain[:, list(c)].sum(1) for c in combinations(range(4), k)], 1)
        # Margins around what k patches can take away.
        margin = largest.amax(1) * torch.linspace(0.9, 1.1, 10, dtype=torch.float64)
        for i, m in enumerate(margin):
            each = copy.deepcopy(model)
            bias = m - (weight * x[i].flatten()).sum()
            each.head.bias = nn.Parameter(torch.stack([bias, torch.zeros_like(bias)]))
            with borrow(ModelSpec(each, (1, 4, 4)), LoadOptions(dtype="float64"), None) as net:
                proof = Proof(norm="patch", patch=(2, 2), nodes=8)
                found = certify_ball(net, Batch(x[i : i + 1], None, ("0",)), 0, k, proof)
            assert found.certified == (m > largest[i].max())
            assert (found.places == 1) == found.certified


def test_a_time_limit_ends_the_loop_over_choices_of_places():
    """There are 4,426 million choices of eight of 64 pixels."""
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), torch.rand(1, 1, 8, 8)
    with borrow(ModelSpec(model, (1, 8, 8)), LoadOptions(), None) as net:
        proof = Proof(norm="patch", patch=(1, 1), deadline=time.monotonic() + 0.1)
        found = certify_ball(net, Batch(x, None, ("0",)), 0, 8, proof)
    assert found.why in ("seconds", "broken")
    assert found.places < 1e-6


@pytest.fixture(scope="module")
def small():
    """A transformer whose samples are of its own classes, and certificates of one pixel."""
    model, x = Small().eval(), torch.rand(5, *SHAPE, generator=torch.Generator().manual_seed(1))
    x = x[3:]  # one that is certified only with splits, and one that a pixel breaks
    with torch.no_grad():
        model.into.weight.mul_(0.8)
        y = model(x).argmax(1)
    return model, (x, y), measured(model, (x, y), eps="1patch", nodes=16)


def measured(model, data, **options):
    given = {"data": data, "input_shape": data[0].shape[1:], "samples": len(data[0])}
    given |= {"order": "1", "patch_size": 1}
    return lipaudit.measure(model, "certify", **given | options).section("certify")


def test_no_value_of_a_pixel_breaks_what_is_certified(small):
    model, data, section = small
    verdicts, values = section.samples["verdict@patch,1"], torch.linspace(0, 1, 129)
    assert {"certified", "broken"} <= {*verdicts}
    for x, y, verdict in zip(*in_order(section.samples, data), verdicts, strict=True):
        moved = x.flatten().repeat(8, len(values), 1)
        moved[torch.arange(8), :, torch.arange(8)] = values
        with torch.no_grad():
            stands = bool((model(moved.view(-1, *SHAPE)).argmax(1) == y).all())
        assert stands or verdict == "broken"
        with borrow(model, LoadOptions(), SHAPE) as net:
            proof = Proof(norm="patch", patch=(1, 1), nodes=64)
            found = certify_ball(net, Batch(x[None], None, ("0",)), int(y), 1, proof)
        if verdict == "broken":  # bisection meets what breaks it, without an attack
            assert (found.certified, found.why) == (False, "broken")
        if verdict == "certified":  # some of the 8 boxes were cut, and every part has a margin
            assert found.nodes > 8
            assert found.bound > 0


@pytest.mark.parametrize(
    ("shrunk", "eps", "more", "says"),
    [
        (0.2, "1patch", {}, None),
        (0.2, "2patches", {}, "6 passes at most (one for each choice of 2 patches;"),
        (0.2, "1patch,2patches", {}, "10 passes at most (one for each choice of 1 or 2 patches;"),
        (
            0.2,
            "1patch,2patches",
            {"nodes": 16},
            "6 passes at least, unless one breaks it (one for each choice of 2 patches;",
        ),
        (0.2, "2patches", {"seconds": 0.1}, None),
        (1, "1patch,2patches", {}, None),  # attacks break the sample with two patches
    ],
)
def test_the_number_of_choices_is_told_before_the_first_proof_unless_time_is_limited(
    small, shrunk, eps, more, says
):
    model, x = copy.deepcopy(small[0]), small[1][0][:, :, :1]  # four pixels
    with torch.no_grad():
        model.into.weight.mul_(shrunk)
        data = x, model(x).argmax(1)
    seen, observer = [], Observer()
    observer.note = lambda note: seen.append(note.text) if note.code == "cost" else None
    observer.advances = lambda *_: seen.append("done")
    done = measured(model, data, **{"nodes": 1} | more, eps=eps, samples=1, observer=observer)
    # The figure is what the proofs take: all parts examined, at every radius.
    if says and "at most" in says:
        assert sum(row.nodes for row in done.rows) <= int(says.split()[0])
    assert seen[-1] == "done"
    assert len(seen) == 1 + bool(says)
    if says:
        assert seen[0].startswith(f"certify: a sample takes {says} limit: --seconds) of ")


def test_undecided_samples_say_which_share_of_places_is_proven(small):
    model, data, section = small
    assert (section.settings["norm"], section.settings["attack"]) == ("patch", "patch")
    assert (section.settings["eps"], section.settings["nodes"]) == (["1"], 16)
    once = measured(model, data, norm="patch", nodes=1)
    for each in (section, once):
        shares = each.samples["places@patch,1"]
        for verdict, why, share in zip(
            *(each.samples[f"{name}@patch,1"] for name in ("verdict", "why")), shares, strict=True
        ):
            if verdict == "undecided":
                assert why in ("nodes", "bound", "unbounded")
                assert 0 <= share < 1
            else:
                assert (share, why) == (1.0 if verdict == "certified" else None, "")
        known = [share for share in shares if share is not None]
        assert each.rows[0].places == pytest.approx(sum(known) / len(known))
    # Without splits less is proven, and nothing else.
    pairs = zip(
        once.samples["certified@patch,1"], section.samples["certified@patch,1"], strict=True
    )
    assert all(first <= second for first, second in pairs)
    assert once.rows[0].places < section.rows[0].places
