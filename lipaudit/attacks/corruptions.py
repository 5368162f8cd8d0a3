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

import numpy as np
from jaxtyping import Float
from PIL import Image
from scipy import ndimage, signal

from lipaudit.attacks.kinds import find_published, read_corruptions

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
    level = read_corruptions()[name][f"{find_published(max(x.shape[1:]))}"][severity - 1]
    draw = np.random.default_rng((seed, zlib.crc32(name.encode()), severity))
    how = level if isinstance(level, list) else [level]
    changed = CORRUPTIONS[name](np.moveaxis(x, 0, -1).astype(np.float64), draw, *how)
    return np.moveaxis(changed, -1, 0).clip(0, 1)


def add_gaussian_noise(x: Pixels, draw: Draw, scale: Number) -> Pixels:
    """Add normal noise."""
    return x + draw.normal(0, scale, x.shape)


def add_shot_noise(x: Pixels, draw: Draw, photons: Number) -> Pixels:
    """Count photons: the noise of a sensor in weak light."""
    return draw.poisson(x * photons) / photons


def add_impulse_noise(x: Pixels, draw: Draw, share: Number) -> Pixels:
    """Replace values by 0 or 1."""
    return np.where(draw.random(x.shape) <= share, draw.random(x.shape) <= 0.5, x)


def blur_defocus(x: Pixels, _: Draw, radius: Number, sigma: Number) -> Pixels:
    """Average over a disk with a soft edge."""
    half = max(8, math.ceil(radius))
    reach, edge = (np.arange(-n, n + 1) for n in (half, 1 if radius <= 8 else 2))
    disk = (reach**2 + reach[:, None] ** 2 <= radius**2).astype(float)
    disk /= disk.sum()
    soft = np.exp(-(edge**2 + edge[:, None] ** 2) / (2 * sigma**2))
    disk = ndimage.correlate(disk, soft / soft.sum(), mode="mirror")
    padded = np.pad(x, ((half, half), (half, half), (0, 0)), mode="reflect")
    return signal.fftconvolve(padded, disk[..., None], "valid", axes=(0, 1))


def blur_glass(x: Pixels, draw: Draw, sigma: Number, reach: int, repetitions: int) -> Pixels:
    """Blur, let near pixels replace each other, and blur again."""
    height, width, channels = x.shape
    source = list(range(height * width))
    for _ in range(repetitions):
        down, right = draw.integers(-reach, reach, (2, height, width))
        moves = (down * width + right).ravel().tolist()
        for i in range(height - reach, reach, -1):
            for at in range((i + 1) * width - reach, i * width + reach, -1):
                # The scripts mean to swap two pixels, but views of NumPy only copy one.
                source[at] = source[at + moves[at]]
    x = ndimage.gaussian_filter(x, (sigma, sigma, 0), mode="nearest")
    x = x.reshape(-1, channels)[source].reshape(x.shape)
    return ndimage.gaussian_filter(x, (sigma, sigma, 0), mode="nearest")


def drag(x: Pixels, radius: Number, sigma: Number, degrees: Number) -> Pixels:
    """Blur along a line, as ImageMagick's MotionBlurImage does.

    The weights are one half of a Gaussian. Offsets are rounded to whole pixels, and the border
    continues beyond the image.
    """
    steps, turn = np.arange(2 * radius + 1), math.radians(degrees)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    down, right = (np.ceil(steps * f(turn) - 0.5).astype(int) for f in (math.sin, math.cos))
    rows, columns = (np.arange(n) for n in x.shape[:2])
    blurred = np.zeros_like(x)
    for weight, dy, dx in zip(weights / weights.sum(), down, right, strict=True):
        blurred += weight * x.take(rows + dy, 0, mode="clip").take(columns + dx, 1, mode="clip")
    return blurred


def blur_motion(x: Pixels, draw: Draw, radius: Number, sigma: Number) -> Pixels:
    """Blur along a line in a random direction."""
    return drag(x, radius, sigma, draw.uniform(-45, 45))


def enlarge(x: Pixels, factor: Number) -> Pixels:
    """Return the middle of an image, enlarged to its size by linear interpolation.

    As `scipy.ndimage.zoom` of order 1, whose first and last points stay, and then cut.
    """
    for axis, n in enumerate(x.shape[:2]):
        cut = math.ceil(n / factor)
        size = round(cut * factor)
        places = (n - cut) // 2 + np.linspace(0, cut - 1, size)[(size - n) // 2 :][:n]
        low = places.astype(int)
        share = (places - low).reshape(-1, *[1] * (2 - axis))
        x = x.take(low, axis) * (1 - share) + x.take(low + 1, axis, mode="clip") * share
    return x


def blur_zoom(x: Pixels, _: Draw, end: Number, step: Number) -> Pixels:
    """Average over enlarged copies, as if the lens moved."""
    return np.mean([x, *(enlarge(x, factor) for factor in np.arange(1, end, step))], axis=0)


def add_snow(x: Pixels, draw: Draw, *fall: Number) -> Pixels:
    """Whiten the image, and add flakes that fall, once as they are and once turned around."""
    mean, scale, zoom, least, radius, sigma, share = fall
    flakes = enlarge(draw.normal(mean, scale, (*x.shape[:2], 1)), zoom)
    flakes = np.where(flakes < least, 0, flakes).clip(0, 1)
    flakes = drag(flakes, radius, sigma, draw.uniform(-135, -45))
    grey = x @ GREY if x.shape[2] == 3 else x.mean(2)
    white = np.maximum(x, grey[..., None] * 1.5 + 0.5)
    return share * x + (1 - share) * white + flakes + np.rot90(flakes, 2)


def draw_plasma(draw: Draw, size: int, decay: Number) -> Float[np.ndarray, "size size"]:
    """Draw a cloud in [0, 1] by the diamond-square algorithm; the size is a power of two."""
    field, step, wide = np.zeros((size, size)), size, 100.0
    while step >= 2:
        half = step // 2
        jitter = wide * draw.uniform(-wide, wide, (3, size // step, size // step))
        corners = field[::step, ::step]
        down, right = (corners + np.roll(corners, -1, axis) for axis in (0, 1))
        middle = (down + np.roll(down, -1, 1)) / 4 + jitter[0]
        field[half::step, half::step] = middle
        field[::step, half::step] = (middle + np.roll(middle, 1, 0) + right) / 4 + jitter[1]
        field[half::step, ::step] = (middle + np.roll(middle, 1, 1) + down) / 4 + jitter[2]
        step, wide = half, wide / decay
    field -= field.min()
    return field / field.max()


def add_fog(x: Pixels, draw: Draw, weight: Number, decay: Number) -> Pixels:
    """Add a random cloud, and scale to the brightest value before."""
    size = 2 ** max(1, (max(x.shape[:2]) - 1).bit_length())
    cloud = draw_plasma(draw, size, decay)[: x.shape[0], : x.shape[1], None]
    return (x + weight * cloud) * x.max() / (x.max() + weight)


def brighten(x: Pixels, _: Draw, change: Number) -> Pixels:
    """Raise the value of each pixel in HSV, its largest channel, and keep hue and saturation."""
    value = x.max(2, keepdims=True)
    new = (value + change).clip(0, 1)
    return np.where(value > 0, x * new / np.where(value > 0, value, 1), new)


def lower_contrast(x: Pixels, _: Draw, share: Number) -> Pixels:
    """Shrink the differences from the mean of each channel."""
    return share * x + (1 - share) * x.mean((0, 1))


def bend(x: Pixels, draw: Draw, alpha: Number, sigma: Number, most: Number) -> Pixels:
    """Move three points at random, and the image with them; then every pixel by smooth noise."""
    side = min(x.shape[:2])
    scale = side / find_published(max(x.shape[:2]))
    # Points (row, column); the affine map takes the moved ones back to the first ones.
    points = np.array(x.shape[:2]) // 2 + max(1, side // 3) * np.array([[1, 1], [-1, 1], [-1, -1]])
    moved = points + scale * draw.uniform(-most, most, points.shape)
    back = np.linalg.solve(np.column_stack([moved, np.ones(3)]), points)
    grid = np.indices(x.shape[:2])
    places = np.tensordot(back[:2].T, grid, 1) + back[2][:, None, None]
    noise = draw.uniform(-1, 1, grid.shape)
    noise = ndimage.gaussian_filter(noise, scale * sigma, truncate=3, axes=(1, 2))
    for at, mode in ((places, "mirror"), (grid + scale * alpha * noise, "reflect")):
        layers = np.moveaxis(x, 2, 0)
        x = np.dstack([ndimage.map_coordinates(z, at, order=1, mode=mode) for z in layers])
    return x


def pixelate(x: Pixels, _: Draw, share: Number) -> Pixels:
    """Shrink by averaging, and enlarge again."""
    sides = x.shape[1::-1]
    layers = [Image.fromarray(layer) for layer in np.moveaxis(x, 2, 0).astype(np.float32)]
    for size in ([max(1, int(n * share)) for n in sides], sides):
        layers = [layer.resize(tuple(size), Image.Resampling.BOX) for layer in layers]
    return np.dstack([np.asarray(layer, float) for layer in layers])


def compress_jpeg(x: Pixels, _: Draw, quality: int) -> Pixels:
    """Store as JPEG and read again; other than three channels one by one."""
    pixels, layers = (255 * x).round().astype(np.uint8), []
    for piece in [pixels] if x.shape[2] == 3 else np.moveaxis(pixels, 2, 0):
        Image.fromarray(piece).save(file := io.BytesIO(), "JPEG", quality=quality)
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
