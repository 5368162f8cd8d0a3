"""Training: repeats to the last bit, also in two parts; leaves everything else as it was."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.shared.demos import RECIPES, load_shipped, make_demo
from lipaudit.data.batch import identify_samples
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import EvaluationError, UsageError
from lipaudit.models.sources.loader import load_net
from lipaudit.wings.training.loop import (
    Training,
    flip_images,
    make_mix,
    shift_images,
    split_batches,
    train,
)
from lipaudit.wings.training.recipe import Recipe
from tests.nets import Classifier, own_net, seeded

QUICK = Recipe(epochs=3, batch_size=64, lr=0.05, shift=1)


def seeded_net(make):
    return own_net(seeded(make), (1, 8, 8), kind="image")


def net_with_dropout():
    return seeded_net(lambda: Classifier(8, 8, 10))


@pytest.fixture(scope="module")
def digits():
    return load_shipped("train")[:200]


def weights(net):
    return {name: t.clone() for name, t in net.module.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_in_two_parts_is_the_same_run_and_another_seed_is_another(digits):
    whole, other = net_with_dropout(), net_with_dropout()
    epochs = list(train(whole, digits, QUICK))
    for cut in (1, 2):
        again = net_with_dropout()
        torch.rand(3)
        np.random.rand(3)
        rest = list(train(again, digits, QUICK, state=epochs[cut - 1].state))
        assert [e.number for e in rest] == list(range(cut + 1, 4))
        assert [e.loss for e in rest] == [e.loss for e in epochs[cut:]]
        assert same(weights(again), weights(whole))
    next(train(other, digits, QUICK.model_copy(update={"seed": 1})))
    assert not same(weights(other), epochs[0].state["model"])


@pytest.mark.parametrize("name", ["jasmin", "specformer"])
def test_a_penalty_goes_down_and_is_resumed(name):
    recipe = RECIPES["standard"].model_copy(update={"epochs": 3, "penalty": name, "weight": 0.05})
    runs = {}
    for weight in (0.0, 0.05):
        net = make_demo(0)
        with_weight = recipe.model_copy(update={"weight": weight})
        runs[weight] = list(train(net, load_shipped("train")[:96], with_weight))
    assert runs[0.05][-1].penalty < runs[0.0][-1].penalty
    again = make_demo(0)
    rest = list(train(again, load_shipped("train")[:96], recipe, state=runs[0.05][0].state))
    assert [e.penalty for e in rest] == [e.penalty for e in runs[0.05][1:]]
    assert same(weights(again), runs[0.05][-1].state["model"])


def small_net():
    layers = (nn.Flatten, lambda: nn.Linear(64, 24), nn.ReLU, lambda: nn.Linear(24, 10))
    return seeded_net(lambda: nn.Sequential(*(make() for make in layers)))


def test_gradients_are_cut_to_a_norm(digits):
    """With plain descent, one step moves the weights by no more than lr times that norm."""
    for clip in (0.0, 1e-3):
        net, recipe = small_net(), QUICK.model_copy(update={"epochs": 1, "batch_size": 200})
        before = weights(net)
        recipe = recipe.model_copy(update={"clip": clip, "weight_decay": 0.0})
        list(train(net, digits, recipe))
        moved = sum((t - before[n]).square().sum() for n, t in weights(net).items()) ** 0.5
        assert (moved <= recipe.lr * 1e-3 * 1.01) == bool(clip)


@pytest.mark.parametrize("changes", [{"penalty": "specformer"}, {"penalty": "jasmin", "k": 3}])
def test_double_precision_trains_alike(changes, digits):
    recipe = RECIPES["standard"].model_copy(update={"epochs": 1, "weight": 0.05, **changes})
    nets = make_demo(0), make_demo(0)
    nets[1].module.double()
    single, double = (next(train(net, digits, recipe)) for net in nets)
    assert double.state["model"]["cls_token"].dtype == torch.float64
    assert single.penalty == pytest.approx(double.penalty, rel=1e-4)
    assert single.loss == pytest.approx(double.loss, rel=1e-4)


def test_the_callers_state_is_left_alone(digits):
    net = net_with_dropout()
    torch.manual_seed(5)
    np.random.seed(5)
    before, numbers = torch.get_rng_state(), np.random.get_state()[1].copy()
    for epoch in train(net, digits, QUICK):
        assert not any(m.training for m in net.module.modules())
        if epoch.number == 2:
            break  # an abandoned run puts the model back, too
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numbers)
    assert not any(m.training for m in net.module.modules())
    assert not any(p.requires_grad for p in net.module.parameters())


def test_the_recipe_of_the_demo_learns():
    net, recipe = make_demo(0), RECIPES["standard"].model_copy(update={"epochs": 4})
    epochs = list(train(net, load_shipped("train")[:600], recipe, held_out=load_shipped("test")))
    assert epochs[-1].loss < epochs[0].loss
    assert epochs[-1].accuracy > 0.15
    assert epochs[-1].lr < max(e.lr for e in epochs)


def test_adversarial_examples_are_in_the_ball_and_worse(digits):
    net = net_with_dropout()
    recipe = QUICK.model_copy(update={"adversarial": "pgd", "eps": "0.1"})
    list(train(net, digits, QUICK))
    run = Training(net, digits, recipe)
    net.module.train()
    z = run.attack(digits.x, digits.y)
    assert net.module.training
    net.module.eval()
    assert (z - digits.x).abs().max() <= 0.1 + 1e-6
    assert z.min() >= 0
    assert z.max() <= 1
    loss = nn.functional.cross_entropy
    moved, still = (loss(net.read(net.call(x, None)), digits.y) for x in (z, digits.x))
    assert moved > still


class Listening(nn.Module):
    """A linear classifier that keeps its inputs."""

    def __init__(self):
        super().__init__()
        self.head, self.seen = nn.Linear(64, 10), []

    def forward(self, x):
        if self.training:
            self.seen.append(x)
        return self.head(x.flatten(1))


def test_noise_is_added_to_every_input_and_resumed(digits):
    plain = Recipe(epochs=2, batch_size=64, lr=0.05, flip=False, mixup=0, cutmix=0)
    noisy, nets = (
        plain.model_copy(update={"noise": 0.3}),
        [seeded_net(Listening) for _ in range(3)],
    )
    list(train(nets[0], digits, plain))
    epochs = list(train(nets[1], digits, noisy))
    list(train(nets[2], digits, noisy, state=epochs[0].state))
    assert same(weights(nets[2]), weights(nets[1]))
    # The order of the first epoch is drawn before any noise.
    first, other = (torch.cat(net.module.seen)[: len(digits)] for net in nets[:2])
    noise = (other - first).flatten()
    assert noise.std() == pytest.approx(0.3, rel=0.02)
    assert abs(noise.mean()) < 4 * 0.3 / len(noise) ** 0.5
    assert other.min() < -0.3


@pytest.mark.parametrize("how", [{"noise": 0.1}, {"adversarial": "pgd", "eps": "0.1"}])
def test_texts_take_no_noise_and_no_attack(digits, how):
    net = replace(small_net(), kind="text")
    with pytest.raises(UsageError, match="works only for images"):
        next(train(net, digits, Recipe(**how)))


@pytest.mark.parametrize(
    ("change", "held_out", "message"),
    [
        (lambda b: replace(b, y=None), False, "label"),
        (lambda b: replace(b, y=b.y - 1), False, "label"),
        (lambda b: replace(b, y=b.y - 1), True, "held-out data needs samples"),
        (lambda b: b[:0], False, "needs samples"),
    ],
)
def test_data_without_labels_are_refused(digits, change, held_out, message):
    pair = (digits, change(digits)) if held_out else (change(digits), None)
    with pytest.raises(UsageError, match=message):
        next(train(small_net(), pair[0], QUICK, held_out=pair[1]))


def test_models_without_classes_and_losses_without_limit(digits):
    with pytest.raises(UsageError, match="classifier"):
        next(train(replace(small_net(), classes=None), digits, QUICK))
    one_step = {"epochs": 1, "batch_size": 200, "lr": 1e38, "weight_decay": 100.0}
    for wild, says in (({"lr": 1e30}, "loss is not finite"), (one_step, "weights are not finite")):
        with pytest.raises(EvaluationError, match=says):
            list(train(net_with_dropout(), digits, QUICK.model_copy(update=wild)))


def test_a_sample_left_over_is_trained_on_with_others(digits):
    sizes = [len(part) for part in split_batches(torch.arange(129), 64)]
    assert sizes == [64, 65]
    assert torch.equal(torch.cat(split_batches(torch.arange(129), 64)), torch.arange(129))
    assert [len(part) for part in split_batches(torch.arange(3), 1)] == [1, 1, 1]
    assert len(list(train(net_with_dropout(), digits[:129], QUICK))) == 3


def test_a_penalty_that_no_row_can_have_is_refused(digits):
    recipe = QUICK.model_copy(update={"penalty": "jasmin", "k": 17, "epochs": 1})
    with pytest.raises(UsageError, match="k = 17"):
        list(train(make_demo(0), digits, recipe))
    list(train(make_demo(0), digits, recipe.model_copy(update={"k": 16})))


def test_shifts_move_every_image_within_reach_and_flips_mirror_about_half():
    x = torch.zeros(50, 1, 5, 5)
    x[:, :, 2, 2] = 1
    moved = shift_images(x, 1, torch.Generator().manual_seed(0))
    places = {tuple(place) for place in moved.nonzero()[:, 2:].tolist()}
    assert moved.sum() == 50
    assert places == {(i, j) for i in (1, 2, 3) for j in (1, 2, 3)}
    x = torch.rand(200, 2, 3, 4)
    made = flip_images(x, torch.Generator().manual_seed(0))
    kept = (made == x).flatten(1).all(1)
    assert torch.equal(made[~kept], x[~kept].flip(-1))
    assert 70 < int(kept.sum()) < 130


def test_mixing_shares_out_the_classes():
    mix = make_mix(0.8, 1.0, classes=10)
    x, y = torch.rand(8, 1, 8, 8), torch.arange(8)
    before = x.clone()
    mixed, target = mix(x, y)
    assert torch.equal(x, before)
    assert not torch.equal(mixed, x)
    torch.testing.assert_close(target.sum(1), torch.ones(8))
    assert (target > 0).sum(1).max() == 2
    for size in (7, 1):
        odd, shares = mix(x[:size], y[:size])
        assert odd.shape == x[:size].shape
        assert torch.equal(odd[-1], x[size - 1])
        assert torch.equal(shares[-1], torch.eye(10)[size - 1])
        torch.testing.assert_close(shares.sum(1), torch.ones(size))


def test_shipped_digits_have_the_ids_of_loading():
    loaded = load_data("demo", make_demo(0), DataOptions(samples=360)).batch
    test = load_shipped("test")
    assert set(test.ids) == set(loaded.ids)
    assert identify_samples(list(test.x), test.y.tolist()) == test.ids


def test_recipes_that_make_no_sense():
    for wrong in ({"k": 1}, {"epochs": 0}, {"eps": "two"}, {"penalty": "none"}, {"epoch": 3}):
        with pytest.raises((ValueError, UsageError)):
            Recipe(**wrong)


@pytest.mark.slow(seconds=31)
def test_the_shipped_demo_is_what_its_recipe_makes():
    """To the last bit where it was made; elsewhere as good."""
    net, test = make_demo(0), load_shipped("test")
    *_, last = train(net, load_shipped("train"), RECIPES["standard"], held_out=test)
    with torch.no_grad():
        mine, theirs = (each.output(test).argmax(1) for each in (net, load_net("demo")))
    assert last.accuracy > 0.96
    assert (mine == theirs).double().mean() > 0.95
