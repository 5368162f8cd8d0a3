"""Made-up samples, for a first look at a model without data: `random`."""

from __future__ import annotations

from importlib.resources import files

import torch
from torch import Tensor

from lipaudit.data.batch import Origin
from lipaudit.data.drawing import Drawn
from lipaudit.data.intake import DataOptions, Intake, warning
from lipaudit.data.text import windows
from lipaudit.results import Note

CONTRAST = 0.2
"""Standard deviation of the pixels, about that of photographs."""


def random_samples(net: Intake, options: DataOptions) -> Drawn:
    """Make samples without labels: 1/f noise for images, a text of ours, or Gaussian tokens."""
    rng = torch.Generator().manual_seed(options.seed)
    notes: tuple[Note, ...] = ()
    origins: list[Origin] = []
    if net.kind == "image":
        x, what = [noise_image(net.sample_shape, rng) for _ in range(options.samples)], "1/f noise"
    elif net.kind == "tokens":
        x = [torch.randn(net.sample_shape, generator=rng) for _ in range(options.samples)]
        what = "Gaussian tokens"
    elif net.tokenize is not None:
        story, what = _text(), "a text that comes with lipaudit"
        x, origins, notes = windows(story, net, options, origin="random", after=story)
    else:
        x, what = _token_ids(net, options, rng), "random token ids"
    text = (
        f"--data random: the samples are {what}, not data of yours; figures at a point depend on "
        "the point, so give --data what the model meets in use"
    )
    return Drawn(x, None, (warning("random-data", text), *notes), origins=origins)


def noise_image(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Draw an image whose amplitude falls with frequency as 1/f, as in photographs.

    Mean 0.5 and standard deviation 0.2 before what leaves [0, 1] is cut off.
    """
    _, height, width = shape
    spectrum = torch.fft.rfft2(torch.randn(shape, generator=rng))
    rows, columns = torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)
    frequency = torch.hypot(rows, columns).clamp_min(1 / max(height, width))
    image = torch.fft.irfft2(spectrum / frequency, s=(height, width))
    spread = image.std(unbiased=False).clamp_min(torch.finfo(image.dtype).tiny)
    return (0.5 + CONTRAST * (image - image.mean()) / spread).clamp(0, 1)


def _text() -> str:
    return (files("lipaudit.data") / "assets" / "text.txt").read_text("utf-8")


def _token_ids(net: Intake, options: DataOptions, rng: torch.Generator) -> list[Tensor]:
    length = min(options.max_tokens, *net.sample_shape)
    ids = torch.randint(net.vocabulary or 1, (options.samples, length), generator=rng)
    if net.end_id is not None:  # once, and at the end, as a tokenizer puts it
        ids[ids == net.end_id] = (net.end_id + 1) % (net.vocabulary or 1)
        ids[:, -1] = net.end_id
    return list(ids)
