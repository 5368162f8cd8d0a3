"""Which source --data names, made-up samples, and what every source shares."""

import torch

from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import UsageError


def test_without_data_a_demo_takes_its_own_and_others_noise(image_taker):
    from dataclasses import replace

    net = image_taker((1, 8, 8), classes=10)
    demo = replace(net, source="demo")
    assert load_data(None, demo).spec == "demo"
    assert load_data(None, net).spec == "random"


def test_the_demo_data_are_labelled_digits(image_taker):
    samples = load_data("demo", image_taker((1, 8, 8), classes=10), DataOptions(samples=360))
    assert samples.notes == ()
    assert samples.batch.x.shape == (360, 1, 8, 8)
    assert samples.batch.y.bincount().min() > 30


def test_random_samples_warn_whatever_the_kind(image_taker, text_taker, token_taker):
    for net in (image_taker(), text_taker(), text_taker(tokenize=None), token_taker()):
        samples = load_data("random", net, DataOptions(samples=3, max_tokens=6))
        assert [(n.level, n.code) for n in samples.notes] == [("warning", "random-data")]
        assert len(samples.batch) == 3
        assert samples.batch.y is None
        assert samples.batch.x.shape[1:] == (net.input_shape if net.kind != "text" else (6,))


def test_noise_falls_with_frequency_as_one_over_f(image_taker):
    """The mean power over rings of frequency has slope -2 in a double logarithmic plot."""
    x = load_data("random", image_taker((1, 64, 64)), DataOptions(samples=64)).batch.x
    assert 0 <= x.min() < x.max() <= 1
    power = torch.fft.fft2(x[:, 0].double() - x.double().mean((1, 2, 3))[:, None, None]).abs() ** 2
    f = torch.fft.fftfreq(64, dtype=torch.float64)
    radius = torch.hypot(f[:, None], f)
    rings = [(radius > r / 64 - 0.5 / 64) & (radius <= r / 64 + 0.5 / 64) for r in range(2, 20)]
    level = torch.stack([power[:, ring].mean().log() for ring in rings])
    at = torch.stack([radius[ring].mean().log() for ring in rings])
    slope = torch.cov(torch.stack([at, level]))[0, 1] / at.var()
    assert -2.3 < slope < -1.7


def test_random_samples_depend_on_the_seed_alone(image_taker, token_taker):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    for net in (image_taker(), token_taker()):
        few = load_data("random", net, DataOptions(samples=2, seed=3)).batch
        many = load_data("random", net, DataOptions(samples=4, seed=3)).batch
        other = load_data("random", net, DataOptions(samples=4, seed=4)).batch
        assert many.ids[:2] == few.ids
        assert not set(many.ids) & set(other.ids)
    assert torch.equal(torch.get_rng_state(), state)


def test_random_text_is_never_short(text_taker):
    samples = load_data("random", text_taker(64), DataOptions(samples=50, max_tokens=64))
    assert samples.batch.x.shape == (50, 64)
    assert samples.batch.mask is None
    assert len(set(samples.batch.ids)) == 50


def test_the_suite_is_its_samples_whatever_their_order(image_taker):
    net = image_taker((1, 8, 8), classes=10)
    whole = [load_data("demo", net, DataOptions(samples=360, seed=s)) for s in (0, 1)]
    part = load_data("demo", net, DataOptions(samples=359))
    assert whole[0].batch.ids != whole[1].batch.ids
    assert whole[0].suite_id == whole[1].suite_id != part.suite_id


def test_fewer_samples_than_asked_for_are_noted(image_taker):
    net = image_taker((1, 8, 8), classes=10)
    samples = load_data("demo", net, DataOptions(samples=361))
    assert [n.text for n in samples.notes] == [
        "demo has 360 samples, fewer than the 361 requested"
    ]


def test_repeated_samples_have_ids_of_their_own(read):
    assert len(set(read("t.csv", "text\nsame\nsame\nsame\n", samples=3).batch.ids)) == 3


def test_data_that_are_not_there_or_not_known(tmp_path, image_taker, refused):
    for samples in (0, -1):
        message = refused("random", image_taker(), UsageError, samples=samples)
        assert "leaves no sample to measure" in message
    assert "there is no data 'nowhere'" in refused("nowhere", image_taker())
    (tmp_path / "a.xlsx").write_text("x")
    assert "has an unsupported format" in refused(tmp_path / "a.xlsx", image_taker())
    assert "1x8x8" in refused("demo", image_taker())
