"""Common corruptions of images, after ImageNet-C (Hendrycks & Dietterich, 2019, arXiv 1903.12261).

A corruption is a function of pixels (height, width, channels) in [0, 1], a random generator and
the parameters of a severity, which `assets/corruptions.toml` holds as published, with their units.

Differences from the scripts that made the published sets: results stay floating-point numbers,
where the scripts store bytes and ImageNet-C also a JPEG of quality 85. NumPy and SciPy compute
what ImageMagick (motion blur) and OpenCV (filters, affine maps) did. `frost` is left out, because
it needs photographs of frost.
"""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from scipy import ndimage, signal

from lipaudit.wings.corruptions.published import find_published, read_corruptions

if TYPE_CHECKING:
    from jaxtyping import Float

    Pixels = Float[np.ndarray, "height width channels"]


Draw = np.random.Generator
Number = int | float
# Weights of red, green and blue in a grey value (ITU-R BT.601), as in OpenCV.
GREY = (0.299, 0.587, 0.114)


def corrupt_image(
    x: Float[np.ndarray, "channels height width"], name: str, severity: int, seed: int
) -> Float[np.ndarray, "channels height width"]:
    """Return a corrupted copy of an image.

    Args:
        x: pixels in [0, 1].
        name: a key of `CORRUPTIONS`.
        severity: 1 (mild) to 5 (strong).
        seed: of the sample, at least 0; the result depends on it, the name and the severity alone.
    """
    side = find_published(max(x.shape[1:]))
    by_side = read_corruptions()[name]
    parameters = by_side[str(side)][severity - 1]
    if not isinstance(parameters, list):
        parameters = [parameters]
    number = zlib.crc32(name.encode())
    draw = np.random.default_rng((seed, number, severity))
    pixels = np.moveaxis(x, 0, -1).astype(np.float64)
    corrupt = CORRUPTIONS[name]
    changed = corrupt(pixels, draw, *parameters)
    return np.moveaxis(changed, -1, 0).clip(0, 1)


def add_gaussian_noise(x: Pixels, draw: Draw, scale: Number) -> Pixels:
    """Add normal noise."""
    noise = draw.normal(0, scale, x.shape)
    return x + noise


def add_shot_noise(x: Pixels, draw: Draw, photons: Number) -> Pixels:
    """Count photons: the noise of a sensor in weak light."""
    counts = draw.poisson(x * photons)
    return counts / photons


def add_impulse_noise(x: Pixels, draw: Draw, share: Number) -> Pixels:
    """Replace values by 0 or 1."""
    replaced = draw.random(x.shape) <= share
    salt = draw.random(x.shape) <= 0.5
    return np.where(replaced, salt, x)


def _square_distances(reach: int) -> Float[np.ndarray, "size size"]:
    """Return x^2 + y^2 for whole x and y from -reach to reach."""
    line = np.arange(-reach, reach + 1, dtype=float)
    return line**2 + line[:, None] ** 2


def blur_defocus(x: Pixels, _: Draw, radius: Number, sigma: Number) -> Pixels:
    """Average over a disk with a soft edge."""
    half = max(8, math.ceil(radius))
    inside = _square_distances(half) <= radius**2
    disk = inside.astype(float)
    disk /= disk.sum()
    edge = 1 if radius <= 8 else 2
    gaussian = np.exp(-_square_distances(edge) / (2 * sigma**2))
    gaussian /= gaussian.sum()
    disk = ndimage.correlate(disk, gaussian, mode="mirror")
    margin = (half, half)
    padded = np.pad(x, (margin, margin, (0, 0)), mode="reflect")
    return signal.fftconvolve(padded, disk[..., None], "valid", axes=(0, 1))


def _soften(x: Pixels, sigma: Number) -> Pixels:
    """Blur rows and columns by a Gaussian; the border continues beyond the image."""
    return ndimage.gaussian_filter(x, (sigma, sigma, 0), mode="nearest")


def blur_glass(x: Pixels, draw: Draw, sigma: Number, reach: int, repetitions: int) -> Pixels:
    """Blur, let near pixels replace each other, and blur again."""
    height, width, channels = x.shape
    source = list(range(height * width))
    for _ in range(repetitions):
        down, right = draw.integers(-reach, reach, (2, height, width))
        moves = down * width + right
        moves = moves.ravel().tolist()
        for i in range(height - reach, reach, -1):
            first = (i + 1) * width - reach
            last = i * width + reach
            for at in range(first, last, -1):
                # The scripts mean to swap two pixels, but views of NumPy only copy one.
                source[at] = source[at + moves[at]]
    pixels = _soften(x, sigma).reshape(-1, channels)
    moved = pixels[source].reshape(x.shape)
    return _soften(moved, sigma)


def drag(x: Pixels, radius: Number, sigma: Number, degrees: Number) -> Pixels:
    """Blur along a line, as ImageMagick's MotionBlurImage does.

    The weights are one half of a Gaussian. Offsets are rounded to whole pixels, and the border
    continues beyond the image.
    """
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    weights = weights / weights.sum()
    angle = math.radians(degrees)
    down = steps * math.sin(angle)
    right = steps * math.cos(angle)
    down = np.ceil(down - 0.5).astype(int)
    right = np.ceil(right - 0.5).astype(int)
    height, width, _channels = x.shape
    rows = np.arange(height)
    columns = np.arange(width)
    blurred = np.zeros_like(x)
    for weight, dy, dx in zip(weights, down, right, strict=True):
        shifted = x.take(rows + dy, 0, mode="clip")
        shifted = shifted.take(columns + dx, 1, mode="clip")
        blurred += weight * shifted
    return blurred


def blur_motion(x: Pixels, draw: Draw, radius: Number, sigma: Number) -> Pixels:
    """Blur along a line in a random direction."""
    degrees = draw.uniform(-45, 45)
    return drag(x, radius, sigma, degrees)


def enlarge(x: Pixels, factor: Number) -> Pixels:
    """Return the middle of an image, enlarged to its size by linear interpolation.

    As `scipy.ndimage.zoom` of order 1, whose first and last points stay, and then cut.
    """
    for axis, n in enumerate(x.shape[:2]):
        cut = math.ceil(n / factor)
        size = round(cut * factor)
        zoomed = np.linspace(0, cut - 1, size)
        start = (size - n) // 2
        first = (n - cut) // 2
        places = first + zoomed[start:][:n]
        low = places.astype(int)
        share = places - low
        if axis == 0:
            share = share[:, None, None]
        else:
            share = share[:, None]
        below = x.take(low, axis)
        above = x.take(low + 1, axis, mode="clip")
        x = below * (1 - share) + above * share
    return x


def blur_zoom(x: Pixels, _: Draw, end: Number, step: Number) -> Pixels:
    """Average over enlarged copies, as if the lens moved."""
    copies = [x]
    for factor in np.arange(1, end, step):
        copies.append(enlarge(x, factor))
    return np.mean(copies, axis=0)


def add_snow(
    x: Pixels,
    draw: Draw,
    mean: Number,
    scale: Number,
    zoom: Number,
    least: Number,
    radius: Number,
    sigma: Number,
    share: Number,
) -> Pixels:
    """Whiten the image, and add flakes that fall, once as they are and once turned around."""
    height, width, channels = x.shape
    flakes = draw.normal(mean, scale, (height, width, 1))
    flakes = enlarge(flakes, zoom)
    flakes = np.where(flakes < least, 0, flakes)
    degrees = draw.uniform(-135, -45)
    flakes = drag(flakes.clip(0, 1), radius, sigma, degrees)
    if channels == 3:
        grey = x @ GREY
    else:
        grey = x.mean(2)
    paler = grey[..., None] * 1.5 + 0.5
    white = np.maximum(x, paler)
    whitened = share * x + (1 - share) * white
    turned = np.rot90(flakes, 2)
    return whitened + flakes + turned


def draw_plasma(draw: Draw, size: int, decay: Number) -> Float[np.ndarray, "size size"]:
    """Draw a cloud in [0, 1] by the diamond-square algorithm; the size is a power of two."""
    field = np.zeros((size, size))
    step = size
    wide = 100.0
    while step >= 2:
        half = step // 2
        count = size // step
        in_middle, on_rows, on_columns = wide * draw.uniform(-wide, wide, (3, count, count))
        corners = field[::step, ::step]
        # Sums of each corner and the next one, below it and to its right.
        down = corners + np.roll(corners, -1, 0)
        right = corners + np.roll(corners, -1, 1)
        four = down + np.roll(down, -1, 1)
        middle = four / 4 + in_middle
        field[half::step, half::step] = middle
        above = np.roll(middle, 1, 0)
        four = middle + above + right
        field[::step, half::step] = four / 4 + on_rows
        left = np.roll(middle, 1, 1)
        four = middle + left + down
        field[half::step, ::step] = four / 4 + on_columns
        step = half
        wide = wide / decay
    field -= field.min()
    return field / field.max()


def add_fog(x: Pixels, draw: Draw, weight: Number, decay: Number) -> Pixels:
    """Add a random cloud, and scale to the brightest value before."""
    height, width, _ = x.shape
    # The smallest power of two that covers the image.
    size = 2
    while size < max(height, width):
        size *= 2
    cloud = draw_plasma(draw, size, decay)
    cloud = cloud[:height, :width, None]
    brightest = x.max()
    foggy = x + weight * cloud
    return foggy * brightest / (brightest + weight)


def brighten(x: Pixels, _: Draw, change: Number) -> Pixels:
    """Raise the value of each pixel in HSV, its largest channel, and keep hue and saturation."""
    value = x.max(2, keepdims=True)
    new = (value + change).clip(0, 1)
    black = value <= 0
    divisor = np.where(black, 1, value)
    return np.where(black, new, x * new / divisor)


def lower_contrast(x: Pixels, _: Draw, share: Number) -> Pixels:
    """Shrink the differences from the mean of each channel."""
    mean = x.mean((0, 1))
    return share * x + (1 - share) * mean


def _look_up(x: Pixels, places: Float[np.ndarray, "2 height width"], mode: str) -> Pixels:
    """Return the pixels at places between whole ones, by linear interpolation."""
    layers = []
    for layer in np.moveaxis(x, 2, 0):
        moved = ndimage.map_coordinates(layer, places, order=1, mode=mode)
        layers.append(moved)
    return np.dstack(layers)


def bend(x: Pixels, draw: Draw, alpha: Number, sigma: Number, most: Number) -> Pixels:
    """Move three points at random, and the image with them; then every pixel by smooth noise."""
    sides = x.shape[:2]
    scale = min(sides) / find_published(max(sides))
    # Points (row, column); the affine map takes the moved ones back to the first ones.
    third = max(1, min(sides) // 3)
    middle = np.array(sides) // 2
    points = middle + third * np.array([[1, 1], [-1, 1], [-1, -1]])
    moves = draw.uniform(-most, most, points.shape)
    moved = points + scale * moves
    with_ones = np.column_stack([moved, np.ones(3)])
    affine = np.linalg.solve(with_ones, points)
    linear = affine[:2]
    shift = affine[2]
    grid = np.indices(sides)
    turned = np.tensordot(linear.T, grid, 1)
    places = turned + shift[:, None, None]
    x = _look_up(x, places, "mirror")
    noise = draw.uniform(-1, 1, grid.shape)
    noise = ndimage.gaussian_filter(noise, scale * sigma, truncate=3, axes=(1, 2))
    places = grid + scale * alpha * noise
    return _look_up(x, places, "reflect")


def pixelate(x: Pixels, _: Draw, share: Number) -> Pixels:
    """Shrink by averaging, and enlarge again."""
    height, width, _channels = x.shape
    columns = max(1, int(width * share))
    rows = max(1, int(height * share))
    layers = []
    for values in np.moveaxis(x, 2, 0).astype(np.float32):
        image = Image.fromarray(values)
        shrunk = image.resize((columns, rows), Image.Resampling.BOX)
        enlarged = shrunk.resize((width, height), Image.Resampling.BOX)
        layers.append(np.asarray(enlarged, float))
    return np.dstack(layers)


def compress_jpeg(x: Pixels, _: Draw, quality: int) -> Pixels:
    """Store as JPEG and read again; other than three channels one by one."""
    pixels = (255 * x).round().astype(np.uint8)
    if x.shape[2] == 3:
        pieces = [pixels]
    else:
        pieces = list(np.moveaxis(pixels, 2, 0))
    layers = []
    for piece in pieces:
        file = io.BytesIO()
        Image.fromarray(piece).save(file, "JPEG", quality=quality)
        layers.append(np.asarray(Image.open(file)))
    return np.dstack(layers) / 255


# The groups of the paper, in the order of the file.
NOISE = add_gaussian_noise, add_shot_noise, add_impulse_noise
BLUR = blur_defocus, blur_glass, blur_motion, blur_zoom
WEATHER = add_snow, add_fog, brighten
DIGITAL = lower_contrast, bend, pixelate, compress_jpeg
CORRUPTIONS: dict[str, Callable[..., Pixels]] = dict(
    zip(read_corruptions(), (*NOISE, *BLUR, *WEATHER, *DIGITAL), strict=True)
)
