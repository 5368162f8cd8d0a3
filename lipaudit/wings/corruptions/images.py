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
from numpy.random import Generator
from PIL import Image
from scipy import ndimage, signal

from lipaudit.wings.corruptions.published import find_published, read_corruptions

if TYPE_CHECKING:
    from jaxtyping import Float

    Pixels = Float[np.ndarray, "height width channels"]


Number = int | float
# Weights of red, green and blue in a grey value (ITU-R BT.601), as in OpenCV.
GREY = (0.299, 0.587, 0.114)


def corrupt_image(x: np.ndarray, name: str, severity: int, seed: int) -> np.ndarray:
    """Return a corrupted copy of an image.

    Args:
        x: (channels, height, width), pixels in [0, 1].
        name: a key of `CORRUPTIONS`.
        severity: 1 (mild) to 5 (strong).
        seed: seed of the sample, at least 0. The random numbers depend only on the seed, the name
            and the severity.
    """
    # Parameters are published for images of three sizes: take the nearest size.
    side = find_published(max(x.shape[1:]))
    parameters = read_corruptions()[name][str(side)][severity - 1]
    if not isinstance(parameters, list):  # a corruption with a single parameter
        parameters = [parameters]
    number = zlib.crc32(name.encode())  # not `hash`, which differs between processes
    rng = np.random.default_rng((seed, number, severity))
    pixels = np.moveaxis(x, 0, -1).astype(np.float64)
    corrupt = CORRUPTIONS[name]
    changed = corrupt(pixels, rng, *parameters)
    return np.moveaxis(changed, -1, 0).clip(0, 1)


def add_gaussian_noise(x: Pixels, rng: Generator, scale: Number) -> Pixels:
    """Add normal noise."""
    noise = rng.normal(0, scale, x.shape)
    return x + noise


def add_shot_noise(x: Pixels, rng: Generator, photons: Number) -> Pixels:
    """Count photons: the noise of a sensor in weak light."""
    counts = rng.poisson(x * photons)
    return counts / photons


def add_impulse_noise(x: Pixels, rng: Generator, share: Number) -> Pixels:
    """Replace a random share of the values by 0 or 1, each with probability 1/2."""
    is_replaced = rng.random(x.shape) <= share
    is_one = rng.random(x.shape) <= 0.5
    return np.where(is_replaced, is_one, x)


def _square_distances(reach: int) -> np.ndarray:
    """Return x^2 + y^2 for whole x and y from -reach to reach, as a matrix."""
    line = np.arange(-reach, reach + 1, dtype=float)
    return line**2 + line[:, None] ** 2


def blur_defocus(x: Pixels, _: Generator, radius: Number, sigma: Number) -> Pixels:
    """Blur like a lens out of focus: average over a disk with a soft edge.

    Args:
        x: the image.
        radius: radius of the disk in pixels.
        sigma: standard deviation of the Gaussian that softens its edge.
    """
    # Half the side of the kernel: at least 8, as in the published scripts.
    reach = max(8, math.ceil(radius))
    inside = _square_distances(reach) <= radius**2
    disk = inside / inside.sum()
    # A Gaussian of 3 x 3 or, for a large disk, 5 x 5 pixels softens the edge.
    edge = 1 if radius <= 8 else 2
    exponent = _square_distances(edge) / (2 * sigma**2)
    gaussian = np.exp(-exponent)
    gaussian /= gaussian.sum()
    disk = ndimage.correlate(disk, gaussian, mode="mirror")
    margin = (reach, reach)
    padded = np.pad(x, (margin, margin, (0, 0)), mode="reflect")
    # "valid" cuts the margin off again.
    return signal.fftconvolve(padded, disk[..., None], mode="valid", axes=(0, 1))


def _soften(x: Pixels, sigma: Number) -> Pixels:
    """Blur rows and columns by a Gaussian; the border continues beyond the image."""
    return ndimage.gaussian_filter(x, (sigma, sigma, 0), mode="nearest")


def blur_glass(x: Pixels, rng: Generator, sigma: Number, reach: int, repetitions: int) -> Pixels:
    """Blur as frosted glass does: blur, let near pixels replace each other, and blur again.

    Args:
        x: the image.
        rng: source of random numbers.
        sigma: standard deviation of the Gaussian blurs.
        reach: largest distance, in rows and columns, from which a pixel comes.
        repetitions: how often each pixel is replaced.
    """
    height, width, channels = x.shape
    # For each pixel, numbered row by row: the number of the pixel that it comes from.
    source = list(range(height * width))
    for _ in range(repetitions):
        down, right = rng.integers(-reach, reach, (2, height, width))
        moves = (down * width + right).ravel().tolist()
        # Visit the pixels from the last to the first, except in a border of `reach` pixels.
        for row in range(height - reach, reach, -1):
            first = (row + 1) * width - reach
            last = row * width + reach
            for pixel in range(first, last, -1):
                # The published scripts intend to swap two pixels, but with NumPy views they only
                # copy one pixel over the other. This line does the same.
                source[pixel] = source[pixel + moves[pixel]]
    pixels = _soften(x, sigma).reshape(-1, channels)
    moved = pixels[source].reshape(x.shape)
    return _soften(moved, sigma)


def blur_along_line(x: Pixels, radius: Number, sigma: Number, degrees: Number) -> Pixels:
    """Blur along a line, as ImageMagick's MotionBlurImage does.

    Each pixel becomes a weighted mean of the pixels along a line that starts at this pixel. The
    weights are one half of a Gaussian. Positions on the line are rounded to whole pixels; beyond
    the image, the pixels of the border continue.

    Args:
        x: the image.
        radius: the line has 2 * radius + 1 points.
        sigma: standard deviation of the Gaussian, in points of the line.
        degrees: direction of the line.
    """
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    weights = weights / weights.sum()
    # The position of each step on the line, rounded to whole pixels (halves are rounded down).
    angle = math.radians(degrees)
    down = steps * math.sin(angle)
    right = steps * math.cos(angle)
    down = np.ceil(down - 0.5).astype(int)
    right = np.ceil(right - 0.5).astype(int)
    height, width = x.shape[:2]
    rows = np.arange(height)
    columns = np.arange(width)
    blurred = np.zeros_like(x)
    for weight, dy, dx in zip(weights, down, right, strict=True):
        shifted = x.take(rows + dy, axis=0, mode="clip")
        shifted = shifted.take(columns + dx, axis=1, mode="clip")
        blurred += weight * shifted
    return blurred


def blur_motion(x: Pixels, rng: Generator, radius: Number, sigma: Number) -> Pixels:
    """Blur along a line in a random direction."""
    degrees = rng.uniform(-45, 45)
    return blur_along_line(x, radius, sigma, degrees)


def enlarge(x: Pixels, factor: Number) -> Pixels:
    """Return the middle of an image, enlarged to the size of the image by linear interpolation.

    The result equals `scipy.ndimage.zoom` of order 1, cut to the size of the image. This zoom
    keeps the first and the last point in place.
    """
    for axis, n in enumerate(x.shape[:2]):  # rows, then columns
        # The middle of the axis is enlarged: `middle` points become `size` points, at least n.
        middle = math.ceil(n / factor)
        size = round(middle * factor)
        zoomed = np.linspace(0, middle - 1, size)  # their positions in the middle
        # The n central ones, as positions in x.
        start = (size - n) // 2
        first = (n - middle) // 2
        positions = first + zoomed[start : start + n]
        # Interpolate between the two points of x around each position.
        low = positions.astype(int)
        share = positions - low
        share = share.reshape(-1, *[1] * (2 - axis))  # broadcast over the axes behind this one
        below = x.take(low, axis)
        above = x.take(low + 1, axis, mode="clip")
        x = below * (1 - share) + above * share
    return x


def blur_zoom(x: Pixels, _: Generator, end: Number, step: Number) -> Pixels:
    """Average over copies of the image, enlarged by factors from 1 to `end`, like a zoom lens."""
    copies = [x]
    for factor in np.arange(1, end, step):
        copies.append(enlarge(x, factor))
    return np.mean(copies, axis=0)


def add_snow(
    x: Pixels,
    rng: Generator,
    mean: Number,
    scale: Number,
    zoom: Number,
    least: Number,
    radius: Number,
    sigma: Number,
    share: Number,
) -> Pixels:
    """Whiten the image, and add snowflakes: a layer of them, and the same layer turned around.

    Args:
        x: the image.
        rng: source of random numbers.
        mean: mean of the noise that makes the flakes.
        scale: standard deviation of this noise.
        zoom: factor by which the flakes are enlarged.
        least: flakes darker than this are removed.
        radius: radius of the motion blur of the flakes, see `blur_along_line`.
        sigma: standard deviation of this motion blur.
        share: share of the original image in the whitened one.
    """
    height, width, channels = x.shape
    flakes = rng.normal(mean, scale, (height, width, 1))
    flakes = enlarge(flakes, zoom)
    flakes = np.where(flakes < least, 0, flakes)
    degrees = rng.uniform(-135, -45)  # the direction in which the flakes fall
    flakes = blur_along_line(flakes.clip(0, 1), radius, sigma, degrees)
    if channels == 3:
        grey = x @ GREY
    else:
        grey = x.mean(2)
    paler = grey[..., None] * 1.5 + 0.5
    white = np.maximum(x, paler)
    whitened = share * x + (1 - share) * white
    turned = np.rot90(flakes, k=2)
    return whitened + flakes + turned


def draw_plasma(rng: Generator, size: int, decay: Number) -> np.ndarray:
    """Draw a cloud (size, size) in [0, 1] by the diamond-square algorithm.

    The known points are the corners of a grid of squares. Each refinement halves the squares: a
    new point is the mean of its four neighbours plus noise, and the noise gets weaker.

    Args:
        rng: source of random numbers.
        size: side of the cloud, a power of two.
        decay: factor by which the noise gets weaker at each refinement.
    """
    field = np.zeros((size, size))
    step = size  # between corners
    noise = 100.0
    while step >= 2:
        count = size // step
        # Noise up to noise^2, as in the published scripts.
        _halve_squares(field, step, noise * rng.uniform(-noise, noise, (3, count, count)))
        step //= 2
        noise = noise / decay
    field -= field.min()
    return field / field.max()


def _halve_squares(field: np.ndarray, step: int, noise: np.ndarray) -> None:
    """Set the points of a cloud that halve its squares, in place.

    A new point is the mean of its four neighbours plus noise. At an edge, the neighbours are at
    the opposite side.

    Args:
        field: (size, size), the cloud. Known points are every `step`-th of every `step`-th row:
            the corners of the squares.
        step: distance of the corners.
        noise: (3, size / step, size / step), of the points in the middle of squares, on their rows
            and on their columns.
    """
    half = step // 2
    in_middle, on_rows, on_columns = noise
    corners = field[::step, ::step]
    # Sums of each corner and the corner below, and of each corner and the corner to its right.
    down = corners + np.roll(corners, -1, axis=0)
    right = corners + np.roll(corners, -1, axis=1)
    # Diamond step: the point in the middle of four corners.
    middle = (down + np.roll(down, -1, axis=1)) / 4 + in_middle
    field[half::step, half::step] = middle
    # Square step: the point between two corners of a row, or of a column. The two other
    # neighbours of this point are points of the diamond step.
    above = np.roll(middle, 1, axis=0)
    field[::step, half::step] = (middle + above + right) / 4 + on_rows
    left = np.roll(middle, 1, axis=1)
    field[half::step, ::step] = (middle + left + down) / 4 + on_columns


def add_fog(x: Pixels, rng: Generator, weight: Number, decay: Number) -> Pixels:
    """Add a random cloud, and scale the image back to its brightest value.

    Args:
        x: the image.
        rng: source of random numbers.
        weight: weight of the cloud.
        decay: how fast the cloud gets smooth, see `draw_plasma`.
    """
    height, width, _ = x.shape
    # The smallest power of two that covers the image.
    size = 2
    while size < max(height, width):
        size *= 2
    cloud = draw_plasma(rng, size, decay)
    cloud = cloud[:height, :width, None]
    brightest = x.max()
    foggy = x + weight * cloud
    return foggy * brightest / (brightest + weight)


def brighten(x: Pixels, _: Generator, change: Number) -> Pixels:
    """Raise the brightness V of each pixel in HSV, which is the largest channel of the pixel.

    All channels are scaled by the same factor, so hue and saturation stay.
    """
    value = x.max(2, keepdims=True)
    new = (value + change).clip(0, 1)
    black = value <= 0  # a black pixel has no hue and becomes grey
    divisor = np.where(black, 1, value)
    return np.where(black, new, x * new / divisor)


def lower_contrast(x: Pixels, _: Generator, share: Number) -> Pixels:
    """Shrink the differences from the mean of each channel."""
    mean = x.mean((0, 1))
    return share * x + (1 - share) * mean


def _interpolate(x: Pixels, positions: np.ndarray, mode: str) -> Pixels:
    """Return the pixels at positions (row, column), interpolated linearly between whole positions.

    `positions` are (2, height, width). `mode` says how the image continues beyond its border, as
    in scipy.
    """
    channels = []
    for channel in np.moveaxis(x, 2, 0):
        channels.append(ndimage.map_coordinates(channel, positions, order=1, mode=mode))
    return np.dstack(channels)


def warp_elastically(
    x: Pixels, rng: Generator, alpha: Number, sigma: Number, most: Number
) -> Pixels:
    """Transform an image elastically: by a random affine map, and by smooth noise.

    Args:
        x: the image.
        rng: source of random numbers.
        alpha: weight of the noise that moves each pixel.
        sigma: standard deviation of the Gaussian that makes the noise smooth.
        most: largest move, in pixels, of the three points that define the affine map.
    """
    size = x.shape[:2]
    # The parameters are lengths in pixels of the published size: scale them to this image.
    scale = min(size) / find_published(max(size))
    # Three points (row, column), and where they move.
    third = max(1, min(size) // 3)
    middle = np.array(size) // 2
    points = middle + third * np.array([[1, 1], [-1, 1], [-1, -1]])
    moves = rng.uniform(-most, most, points.shape)
    moved = points + scale * moves
    # The affine map from the moved points back to the original points gives, for each pixel of the
    # result, its position in the image.
    with_ones = np.column_stack([moved, np.ones(3)])
    affine = np.linalg.solve(with_ones, points)  # (3, 2): two rows of a linear map, and a shift
    linear = affine[:2]
    shift = affine[2]
    grid = np.indices(size)
    positions = np.tensordot(linear.T, grid, 1) + shift[:, None, None]  # (2, height, width)
    x = _interpolate(x, positions, mode="mirror")
    noise = rng.uniform(-1, 1, grid.shape)
    noise = ndimage.gaussian_filter(noise, scale * sigma, truncate=3, axes=(1, 2))
    positions = grid + scale * alpha * noise
    return _interpolate(x, positions, mode="reflect")


def pixelate(x: Pixels, _: Generator, share: Number) -> Pixels:
    """Shrink both sides to a share of their length by averaging, and enlarge again."""
    height, width = x.shape[:2]
    columns = max(1, int(width * share))
    rows = max(1, int(height * share))
    channels = []
    for channel in np.moveaxis(x, 2, 0).astype(np.float32):
        image = Image.fromarray(channel)
        shrunk = image.resize((columns, rows), Image.Resampling.BOX)
        enlarged = shrunk.resize((width, height), Image.Resampling.BOX)
        channels.append(np.asarray(enlarged, float))
    return np.dstack(channels)


def compress_jpeg(x: Pixels, _: Generator, quality: int) -> Pixels:
    """Compress an image as JPEG, and read it again."""
    pixels = (255 * x).round().astype(np.uint8)
    if x.shape[2] == 3:
        images = [pixels]
    else:  # not red, green and blue: compress each channel alone
        images = list(np.moveaxis(pixels, 2, 0))
    compressed = []
    for image in images:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=quality)
        compressed.append(np.asarray(Image.open(file)))
    return np.dstack(compressed) / 255


# The groups of the paper, in the order of the file.
NOISE = add_gaussian_noise, add_shot_noise, add_impulse_noise
BLUR = blur_defocus, blur_glass, blur_motion, blur_zoom
WEATHER = add_snow, add_fog, brighten
DIGITAL = lower_contrast, warp_elastically, pixelate, compress_jpeg
CORRUPTIONS: dict[str, Callable[..., Pixels]] = dict(
    zip(read_corruptions(), (*NOISE, *BLUR, *WEATHER, *DIGITAL), strict=True)
)
