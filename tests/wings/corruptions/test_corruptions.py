"""Corruptions of images held to plain loops, other libraries and closed forms."""

import colorsys
import math

import numpy as np
import pytest
import torch
from scipy import fft, ndimage

from lipaudit.wings.corruptions.images import CORRUPTIONS, corrupt_image
from lipaudit.wings.corruptions.published import PUBLISHED, find_published, read_corruptions

NAMES = list(CORRUPTIONS)
CERTAIN = ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression")
"""Corruptions without chance."""


def draws(seed: int = 5) -> np.random.Generator:
    return np.random.default_rng(seed)


def picture(height: int = 24, width: int = 24, channels: int = 3) -> np.ndarray:
    return draws().random((height, width, channels))


def corrupt(name: str, x: np.ndarray, *parameters: float) -> np.ndarray:
    return CORRUPTIONS[name](x, draws(), *parameters)


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_is_an_image_that_depends_on_its_seed_alone(name):
    for shape in ((1, 8, 8), (3, 32, 40), (4, 5, 64), (3, 120, 120), (2, 1, 1)):
        x = draws().random(shape).astype(np.float32)
        for severity in range(1, 6):
            copy = corrupt_image(x, name, severity, 7)
            assert copy.shape == shape
            assert copy.min() >= 0
            assert copy.max() <= 1
        np.testing.assert_array_equal(copy, corrupt_image(x, name, 5, 7))
    x = draws().random((3, 32, 32))
    chance = name not in CERTAIN
    assert chance != np.array_equal(corrupt_image(x, name, 5, 1), corrupt_image(x, name, 5, 2))
    changes = [np.abs(corrupt_image(x, name, s, 1) - x).mean() for s in range(1, 6)]
    assert min(changes) > 0
    # Glass and elastic severities change in several numbers at once.
    assert name in ("glass_blur", "elastic_transform", "motion_blur") or changes[4] > changes[0]


def test_there_are_five_severities_of_each_published_set():
    table = read_corruptions()
    assert [*table] == NAMES
    assert {(*sets,) for sets in table.values()} == {tuple(map(str, PUBLISHED))}
    assert {len(each) for sets in table.values() for each in sets.values()} == {5}
    # The geometric mean of neighbours is where the nearest one changes: 45.25 and 119.73.
    nearest = {8: 32, 45: 32, 46: 64, 119: 64, 120: 224, 384: 224}
    assert {side: find_published(side) for side in nearest} == nearest


def test_noise_has_the_moments_of_its_parameters():
    x = np.full((200, 200, 3), 0.4)
    count = x.size
    noise = corrupt("gaussian_noise", x, 0.08) - x
    assert abs(noise.mean()) < 4 * 0.08 / math.sqrt(count)
    assert noise.std() == pytest.approx(0.08, rel=0.01)
    shot = corrupt("shot_noise", x, 60)  # a Poisson number has its mean as variance
    assert shot.mean() == pytest.approx(0.4, abs=4 * math.sqrt(0.4 / 60 / count))
    assert shot.var() == pytest.approx(0.4 / 60, rel=0.02)
    np.testing.assert_allclose(shot * 60, (shot * 60).round(), atol=1e-9)
    impulse = corrupt("impulse_noise", x, 0.09)
    for value, share in ((0.4, 0.91), (0, 0.045), (1, 0.045)):
        assert (impulse == value).mean() == pytest.approx(share, abs=4 * 0.3 / math.sqrt(count))


def convolve(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    return ndimage.correlate(x, kernel[:, :, None], mode="mirror")


def test_defocus_averages_over_a_soft_disk():
    radius, sigma = 4, 0.5
    at = [(i, j) for i in range(-8, 9) for j in range(-8, 9)]
    disk = {p: float(p[0] ** 2 + p[1] ** 2 <= radius**2) for p in at}
    near = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
    edge = {p: math.exp(-(p[0] ** 2 + p[1] ** 2) / (2 * sigma**2)) for p in near}
    kernel = np.zeros((17, 17))
    for i, j in at:
        for (a, b), weight in edge.items():
            kernel[i + 8, j + 8] += weight * disk.get((i + a, j + b), 0)
    x = picture()
    kernel /= sum(disk.values()) * sum(edge.values())
    np.testing.assert_allclose(corrupt("defocus_blur", x, radius, sigma), convolve(x, kernel))


def test_motion_follows_a_line():
    x, (radius, sigma) = picture(9, 13), (6, 2)
    turn = math.radians(draws().uniform(-45, 45))
    weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(2 * radius + 1)]
    blurred = np.zeros_like(x)
    for i, j in np.ndindex(9, 13):
        for step, weight in enumerate(weights):
            row = i + math.ceil(step * math.sin(turn) - 0.5)
            column = j + math.ceil(step * math.cos(turn) - 0.5)
            blurred[i, j] += weight * x[min(max(row, 0), 8), min(max(column, 0), 12)]
    np.testing.assert_allclose(corrupt("motion_blur", x, radius, sigma), blurred / sum(weights))


@pytest.mark.parametrize("side", [24, 31])
def test_zoom_is_that_of_scipy(side):
    x = picture(side, side)
    total = x.copy()
    factors = np.arange(1, 1.31, 0.03)
    for factor in factors:
        cut = math.ceil(side / factor)
        start = (side - cut) // 2
        part = x[start : start + cut, start : start + cut]
        large = ndimage.zoom(part, (factor, factor, 1), order=1)
        start = (len(large) - side) // 2
        total += large[start : start + side, start : start + side]
    expected = total / (len(factors) + 1)
    np.testing.assert_allclose(corrupt("zoom_blur", x, 1.31, 0.03), expected)


def test_glass_moves_pixels_as_the_published_loop_does():
    x, (sigma, reach, times) = picture(11, 14), (0.4, 2, 2)
    random, blurred = draws(), ndimage.gaussian_filter(x, (sigma, sigma, 0), mode="nearest")
    for _ in range(times):
        down, right = random.integers(-reach, reach, (2, 11, 14))
        for i in range(11 - reach, reach, -1):
            for j in range(14 - reach, reach, -1):
                a, b = i + down[i, j], j + right[i, j]
                # Each side of this swap is a view, as in the published code.
                blurred[i, j], blurred[a, b] = blurred[a, b], blurred[i, j]
    expected = ndimage.gaussian_filter(blurred, (sigma, sigma, 0), mode="nearest")
    np.testing.assert_allclose(corrupt("glass_blur", x, sigma, reach, times), expected)


def test_snow_of_one_brightness_is_known_in_closed_form():
    x = picture()
    grey = 0.299 * x[..., 0] + 0.587 * x[..., 1] + 0.114 * x[..., 2]
    white = np.maximum(x, 1.5 * grey[..., None] + 0.5)
    for least, flakes in ((0.2, 0.3), (0.4, 0)):  # below the threshold there is no snow
        snow = corrupt("snow", x, 0.3, 0, 1.25, least, 8, 3, 0.8)
        np.testing.assert_allclose(snow, 0.8 * x + 0.2 * white + 2 * flakes)


def test_fog_is_a_diamond_square_cloud():
    size, weight, decay = 8, 1.5, 1.75
    random, cloud, step, wide = draws(), np.zeros((size, size)), size, 100.0
    while step >= 2:
        half, cells = step // 2, range(0, size, step)

        def mean(i, j, *offsets):
            return sum(cloud[(i + a) % size, (j + b) % size] for a, b in offsets) / 4

        def noise(wide=wide):
            return wide * random.uniform(-wide, wide)

        near = ((-half, 0), (half, 0), (0, -half), (0, half))
        for i, j in [(i + half, j + half) for i in cells for j in cells]:
            corners = ((-half, -half), (-half, half), (half, -half), (half, half))
            cloud[i, j] = mean(i, j, *corners) + noise()
        for places in ((0, half), (half, 0)):
            for i, j in [(i + places[0], j + places[1]) for i in cells for j in cells]:
                cloud[i, j] = mean(i, j, *near) + noise()
        step, wide = half, wide / decay
    cloud = (cloud - cloud.min()) / (cloud.max() - cloud.min())
    x = picture(7, 8)
    expected = (x + weight * cloud[:7, :8, None]) * x.max() / (x.max() + weight)
    np.testing.assert_allclose(corrupt("fog", x, weight, decay), expected)


def test_brightness_is_the_value_of_hsv():
    x = picture()
    x[0] = 0
    for copy, pixel in zip(
        corrupt("brightness", x, 0.3).reshape(-1, 3), x.reshape(-1, 3), strict=True
    ):
        hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
        expected = colorsys.hsv_to_rgb(hue, saturation, min(value + 0.3, 1))
        np.testing.assert_allclose(copy, expected)


def test_contrast_keeps_the_mean_and_shrinks_the_deviation():
    x = picture()
    low = corrupt("contrast", x, 0.4)
    np.testing.assert_allclose(low.mean((0, 1)), x.mean((0, 1)))
    np.testing.assert_allclose(low.std((0, 1)), 0.4 * x.std((0, 1)))


def ramp(side: int) -> np.ndarray:
    """An image that is linear in its coordinates: linear interpolation is then exact."""
    return np.moveaxis(np.indices((side, side)), 0, -1) / side


def test_elastic_moves_three_points_and_then_each_pixel():
    side, most = 32, 2.56
    moved = draws().uniform(-most, most, (3, 2))
    bent = corrupt("elastic_transform", ramp(side), 0, 0, most)
    for point, move in zip(([26, 26], [6, 26], [6, 6]), moved, strict=True):
        for channel in (0, 1):
            there = ndimage.map_coordinates(bent[..., channel], (point + move)[:, None], order=1)
            assert there == pytest.approx(point[channel] / side)
    alpha, sigma = 3.2, 1.28
    random = draws()
    random.uniform(size=(3, 2))
    noise = random.uniform(-1, 1, (2, side, side))
    reach = int(3 * sigma + 0.5)
    weights = np.array([math.exp(-(i**2) / (2 * sigma**2)) for i in range(-reach, reach + 1)])
    window = np.lib.stride_tricks.sliding_window_view(noise, (2 * reach + 1,) * 2, (1, 2))
    smooth = np.einsum("cijab,a,b->ijc", window, weights, weights) / weights.sum() ** 2
    inner = slice(8, -8)  # where neither the noise nor a move meets the border
    bent = corrupt("elastic_transform", ramp(side), alpha, sigma, 0)[inner, inner]
    expected = (
        ramp(side)[inner, inner]
        + alpha * smooth[8 - reach : -8 + reach, 8 - reach : -8 + reach] / side
    )
    np.testing.assert_allclose(bent, expected)


@pytest.mark.parametrize(("share", "block"), [(0.5, 2), (0.25, 4)])
def test_pixelate_is_the_mean_of_blocks(share, block):
    x = torch.tensor(picture().transpose(2, 0, 1))
    means = torch.nn.functional.avg_pool2d(x, block)
    expected = means.repeat_interleave(block, 1).repeat_interleave(block, 2).permute(1, 2, 0)
    copy = corrupt("pixelate", x.permute(1, 2, 0).numpy(), share)
    np.testing.assert_allclose(copy, expected, atol=1e-6)


# The table for luminance of the JPEG standard (ITU-T T.81, table K.1).
LUMINANCE = [
    [16, 11, 10, 16, 24, 40, 51, 61],
    [12, 12, 14, 19, 26, 58, 60, 55],
    [14, 13, 16, 24, 40, 57, 69, 56],
    [14, 17, 22, 29, 51, 87, 80, 62],
    [18, 22, 37, 56, 68, 109, 103, 77],
    [24, 35, 55, 64, 81, 104, 113, 92],
    [49, 64, 78, 87, 103, 121, 120, 101],
    [72, 92, 95, 98, 112, 100, 103, 99],
]


def test_jpeg_rounds_the_cosines_of_blocks():
    grey = 0.3 + 0.4 * ndimage.gaussian_filter(picture(32, 40, 1), (2, 2, 0))
    copy = corrupt("jpeg_compression", grey, 25)
    steps = np.array(LUMINANCE) * 5000 / 25 / 100  # libjpeg's scale of a quality below 50
    blocks = (255 * copy[..., 0] - 128).reshape(4, 8, 5, 8).swapaxes(1, 2)
    cosines = fft.dctn(blocks, axes=(2, 3), norm="ortho") / steps
    # Rounding to bytes moves a coefficient by at most 4, and the least step is 20.
    assert np.abs(cosines - cosines.round()).max() < 0.2
    assert np.abs(cosines).max() > 1
    assert np.abs(copy - grey).max() > 0.01
    coloured = corrupt("jpeg_compression", grey.repeat(3, 2), 25)
    assert np.abs(coloured - copy).max() <= 1.01 / 255
