"""`certify --smooth`: limits and radii held to exact ones, and what must not change the votes."""

import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import lipaudit
from lipaudit import ModelSpec
from lipaudit.data.batch import identify_samples
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import EvaluationError, InputError, UsageError
from lipaudit.models.net import LoadOptions
from lipaudit.models.sources.loader import borrow, load_net
from lipaudit.wings.certificates.denoiser import hash_denoiser
from lipaudit.wings.certificates.smoothing import (
    SmoothingOptions,
    certify_radius,
    limit_share,
    measure,
)
from tests.measures.cases import SHAPE, Bag, Plane, samples
from tests.nets import own_batch

NORMAL = NormalDist()


@pytest.mark.parametrize("alpha", [0.001, 0.05])
@pytest.mark.parametrize("copies", [1, 20, 137])
def test_the_limit_of_a_share_solves_its_equation(copies, alpha):
    """P(B >= votes) = alpha at the limit, with the sum in fractions."""
    votes = np.array(sorted({0, 1, copies // 2, copies - 1, copies}))
    limits = limit_share(votes, copies, alpha)
    assert limits[0] == 0
    assert limits[-1] == pytest.approx(alpha ** (1 / copies), rel=1e-12)
    for k, limit in zip(votes.tolist()[1:], limits.tolist()[1:], strict=True):
        p, above = Fraction(limit), range(k, copies + 1)
        tail = sum(math.comb(copies, i) * p**i * (1 - p) ** (copies - i) for i in above)
        assert float(tail) == pytest.approx(alpha, rel=1e-9)


def test_radii_of_votes_are_those_of_the_normal_distribution_and_of_the_authors_logs():
    shares = np.array([0.0, 0.3, 0.5, 0.6, 0.999])
    radii = certify_radius(shares, 0.5)
    assert radii[:3].tolist() == [0, 0, 0]
    assert radii[3:] == pytest.approx([0.5 * NORMAL.inv_cdf(p) for p in (0.6, 0.999)])
    # The largest radii of data/certify/{cifar10,imagenet}/*/noise_0.25/test/sigma_0.25 in
    # github.com/locuslab/smoothing: 100,000 copies, of which 0, 1, 2... have another class. The
    # logs fit alpha = 0.01.
    logged = "0.978 0.955 0.941 0.929 0.92 0.913 0.906 0.9 0.894 0.889 0.885 0.88"
    votes = 100_000 - np.arange(12)
    assert [f"{r:.3g}" for r in certify_radius(limit_share(votes, 100_000, 0.01), 0.25)] == (
        logged.split()
    )


def distances(model, data):
    """Return the distance of each sample from the plane, by its id."""
    x, y = data
    with torch.no_grad():
        logits, weight = model(x), model.head.weight[0] - model.head.weight[1]
    distance = (logits[:, 0] - logits[:, 1]).abs() / weight.norm()
    return dict(zip(identify_samples([*x], y.tolist()), distance.tolist(), strict=True))


def measured(model, data, **options):
    count = len(data[0])
    given = {"data": data, "input_shape": SHAPE, "samples": count, "smooth": 0.25} | options
    return lipaudit.measure(model, "certify", **given).section("smoothing")


def test_radii_of_a_plane_are_below_its_distance_and_approach_it():
    model = Plane()
    data = samples(model, 6)
    distance = distances(model, data)
    told = measured(model, data, noise_samples="999,40000", batch_size=4096).samples
    assert told["predicted"] == told["label"]
    most = 0.25 * NORMAL.inv_cdf(0.001 ** (1 / 40000))
    for name, radius in zip(told["ids"], told["radius"], strict=True):
        limit = min(distance[name], most)
        # The limit is 3.1 standard deviations of the share below it, here 0.005 of radius.
        assert limit - 0.01 < radius <= limit


@pytest.mark.parametrize(("alpha", "copies"), [(0.3, 50), (0.05, 400)])
def test_a_certificate_is_wrong_as_often_as_it_says(alpha, copies):
    """The limit is below the true share with probability alpha, and not far below.

    On the plane each class has half of the votes: there it would be wrong twice as often if it
    came from the copies that chose the class.
    """
    model, count = Plane(), 400
    x, y = samples(model, count)
    distance = distances(model, (x, y))
    weight = model.head.weight[1] - model.head.weight[0]
    away = torch.tensor([*distance.values()]) * (2 * y - 1) / weight.norm()
    on_it = x - (away[:, None] * weight.detach()).view(x.shape)
    spread = math.sqrt(alpha * (1 - alpha) / count)
    for points, far in ((x, distance), (on_it, {})):
        told = measured(model, (points, y), alpha=alpha, noise_samples=f"30,{copies}").samples
        cells = zip(told["ids"], told["share"], strict=True)
        wrong = sum(share > NORMAL.cdf(far.get(name, 0) / 0.25) for name, share in cells) / count
        assert alpha / 3 < wrong < alpha + 3 * spread


class Votes(nn.Module):
    """Gives class 1 to every input, or by the sign of the first pixel around 1/2."""

    def __init__(self, sure):
        super().__init__()
        self.sure, self.weight = sure, nn.Parameter(torch.ones(1))

    def forward(self, x):
        first = torch.ones(len(x)) if self.sure else x.flatten(1)[:, 0] - 0.5
        return torch.stack([-first, first], 1) * self.weight


def test_figures_are_those_of_hand_computed_cases():
    x, y = torch.full((3, *SHAPE), 0.5), torch.tensor([1, 1, 0])
    x[:, :, 1] += torch.arange(3).view(3, 1, 1) / 10
    radius = 0.25 * NORMAL.inv_cdf(0.001 ** (1 / 500))
    eps = f"0.1,{radius - 1e-6:.6f},{radius + 1e-6:.6f}"
    section = measured(Votes(sure=True), (x, y), noise_samples="10,500", eps=eps)
    assert section.samples["predicted"] == (1, 1, 1)
    assert section.samples["votes"] == (500,) * 3
    assert section.samples["radius"] == pytest.approx([radius] * 3)
    assert [row.certified for row in section.rows] == [2 / 3, 2 / 3, 0]
    assert [row.certified_high for row in section.rows] == sorted(
        (row.certified_high for row in section.rows), reverse=True
    )
    row = section.rows[0]
    assert (row.clean, row.noisy, row.smoothed, row.abstained) == (2 / 3, 2 / 3, 2 / 3, 0)
    texts = {note.code: note.text for note in section.notes}
    assert texts.keys() == {"smoothed", "largest-radius"}
    assert texts["smoothed"].endswith("Each fails with probability at most 0.001")
    # Each class has half of the votes: nothing is proven, whatever the label.
    section = measured(Votes(sure=False), (x, y), noise_samples="10,500")
    assert section.samples["predicted"] == (None,) * 3
    assert section.samples["radius"] == section.samples["correct"] == (0,) * 3
    assert [row.eps_text for row in section.rows] == ["0.125", "0.25", "0.5"]
    assert {(row.certified, row.smoothed, row.abstained) for row in section.rows} == {(0, 0, 3)}
    assert section.sample_columns["radius"].domain.endswith("with probability 1 - alpha")


def test_votes_depend_on_neither_the_batch_size_nor_other_samples_but_on_the_seed():
    model = Plane()
    data = samples(model, 6)
    x, y = data
    whole = measured(model, data, noise_samples="10,33")
    other = measured(model, data, noise_samples="10,33", batch_size=7)
    assert whole.samples == other.samples
    alone = measured(model, (x[2:3], y[2:3]), noise_samples="10,33").samples
    place = whole.samples["ids"].index(alone["ids"][0])
    assert {n: v[place] for n, v in whole.samples.items()} == {n: v[0] for n, v in alone.items()}
    again = measured(model, data, noise_samples="10,33", seed=1)
    assert sorted(again.samples["votes"]) != sorted(whole.samples["votes"])


def test_texts_get_noise_on_their_embeddings_whatever_they_are_padded_with():
    """Noise of the mean of n tokens has the deviation sigma / sqrt(n): radii are known."""
    model = Bag()
    spec = ModelSpec(model, (5,), kind="text", vocabulary=50)
    ids = torch.randint(1, 50, (3, 5), generator=torch.Generator().manual_seed(0))
    y = model(ids).argmax(1)
    given = {"smooth": 0.5, "noise_samples": "20,20000", "batch_size": 4096, "samples": 3}
    report = lipaudit.measure(spec, "certify", data=(ids, y), **given)
    told = report.section("smoothing").samples
    exact = distances(model, (ids, y))
    for name, radius in zip(told["ids"], told["radius"], strict=True):
        limit = min(math.sqrt(5) * exact[name], 0.5 * NORMAL.inv_cdf(0.001 ** (1 / 20000)))
        assert 0.85 * limit < radius <= limit
    with pytest.raises(UsageError, match="--denoiser works only for models that take image"):
        lipaudit.measure(spec, "certify", data=(ids, y), denoiser="py:a.py:b", **given)


class Hidden(Bag):
    """The mean of the padding."""

    def forward(self, ids, mask=None):
        return super().forward(ids, None if mask is None else ~mask)


def test_padding_of_texts_neither_gets_noise_nor_changes_that_of_tokens():
    ids = torch.randint(1, 50, (3, 5), generator=torch.Generator().manual_seed(0))
    y, real = torch.zeros(3, dtype=torch.long), torch.arange(5) < torch.tensor([[2], [4], [3]])

    def count(model, *batches):
        spec, options = ModelSpec(model, (5,), kind="text"), {"smooth": 5, "noise_samples": "9,90"}
        with borrow(spec, LoadOptions()) as net:
            parts = [*measure(net, batches, SmoothingOptions(**options))]
        return [part.values["votes"][0].tolist() for part in parts]

    whole = own_batch(ids, real, y)
    votes = count(Bag(), whole)
    assert votes == count(Bag(), *(replace(b, mask=None) for b in whole.split(1)))
    assert all(0 < number < 90 for _, numbers in votes for number in numbers)
    # Padding on the left is not cut off.
    for _, numbers in count(Hidden(), own_batch(ids, real.flip(1), y)):
        assert sorted(numbers) == [0, 90]


DENOISERS = """
from pathlib import Path
import torch
from torch import nn

class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
    def forward(self, x):
        return 0.25 + self.scale * x

class Flat(nn.Module):
    def forward(self, x):
        return x.flatten(1)

class Rough(nn.Module):
    def forward(self, x):
        return x.half()

class Clamp(nn.Module):
    def __init__(self):
        super().__init__()
        top = Path(__file__).with_suffix(".txt")
        self.register_buffer("top", torch.tensor(float(top.read_text())))
    def forward(self, x):
        return x.clamp(0, self.top)

class Bad(nn.Module):
    def forward(self, x):
        raise RuntimeError("no such layer")

def text():
    return "half"
"""


def test_a_denoiser_stands_between_the_noise_and_the_model(tmp_path):
    Path(tmp_path, "denoise.py").write_text(DENOISERS)
    model, place = Plane(), f"py:{tmp_path}/denoise.py"
    data = samples(model, 3)

    class Both(Plane):
        def forward(self, x):
            return super().forward(0.25 + 0.5 * x)

    section = measured(model, data, denoiser=f"{place}:Half", noise_samples="10,200")
    both = measured(Both(), data, noise_samples="10,200")
    assert section.samples == both.samples
    refused = [
        (f"{place}:Flat", InputError, r"returned \(1, 12, torch.float32\) for samples of \(1, 1,"),
        (f"{place}:Rough", InputError, r"returned \(1, 1, 3, 4, torch.float16\) for"),
        (f"{place}:Bad", InputError, "failed .RuntimeError: no such layer"),
        (f"{place}:text", InputError, "returned str, not an nn.Module"),
        (f"{place}:nothing", InputError, "has no 'nothing'"),
        ("denoise.py:Half", UsageError, "must be py:FILE:FACTORY"),
    ]
    for reference, error, says in refused:
        with pytest.raises(error, match=says):
            measured(model, data, denoiser=reference)


def test_a_denoiser_is_known_by_its_source_and_its_buffers(tmp_path):
    hashes = []
    for top, more in (("1", ""), ("2", ""), ("1", "# v2"), ("1", "")):
        Path(tmp_path, "den.py").write_text(DENOISERS + more)
        Path(tmp_path, "den.txt").write_text(top)
        hashes.append(hash_denoiser(f"py:{tmp_path}/den.py:Clamp"))
    assert hashes[0] == hashes[3]
    assert len({*hashes}) == 3


def test_no_search_in_the_ball_changes_the_vote():
    """PGD on the averaged loss of noisy copies, to 0.99 of each radius; fresh copies judge."""
    sigma, copies = 0.25, 400
    given = {"smooth": sigma, "samples": 3, "noise_samples": "100,2000", "batch_size": 512}
    told = lipaudit.measure("demo", "certify", **given).section("smoothing").samples
    net, generator = load_net("demo"), torch.Generator().manual_seed(5)
    batch = load_data("demo", net, DataOptions(samples=3)).batch
    x = dict(zip(batch.ids, batch.x, strict=True))
    tried = 0
    for name, label, radius in zip(told["ids"], told["predicted"], told["radius"], strict=True):
        if label is None:
            continue
        tried += 1
        z = x[name][None].clone()
        for _ in range(10):
            z.requires_grad_()
            noisy = z + sigma * torch.randn(copies, *z.shape[1:], generator=generator)
            logits = net.call(noisy, None)
            loss = F.cross_entropy(logits, torch.full((copies,), label))
            (gradient,) = torch.autograd.grad(loss, z)
            moved = z.detach() + 0.25 * radius * gradient / gradient.norm() - x[name]
            z = x[name] + moved * min(1.0, 0.99 * radius / float(moved.norm()))
        fresh = z + sigma * torch.randn(4000, *z.shape[1:], generator=generator)
        with torch.no_grad():
            votes = net.call(fresh, None).argmax(1).bincount(minlength=10)
        assert votes.argmax() == label
        assert votes[label] > 2000
    assert tried >= 2


def test_output_that_is_not_finite_under_noise_is_an_error():
    class Rooted(Plane):
        def forward(self, x):
            return super().forward(x.log())

    model = Rooted()
    data = samples(model, 2)
    with pytest.raises(EvaluationError, match="not finite under noise of 0.5"):
        measured(model, data, smooth=0.5)
