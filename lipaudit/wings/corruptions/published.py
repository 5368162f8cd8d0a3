"""The published corruptions of images: their parameters, and the sizes of the published sets."""

from __future__ import annotations

import functools
import math
from importlib.resources import files
from typing import Any

# Sides of the published sets of corrupted images, and their names.
PUBLISHED = {32: "CIFAR-10-C", 64: "Tiny ImageNet-C", 224: "ImageNet-C"}


@functools.cache
def read_corruptions() -> dict[str, dict[str, list[Any]]]:
    """Return the parameters of corruptions of images by name, image side and severity.

    The side in pixels, as text, is that of a published set of images (PUBLISHED): the parameters
    of severity s are `read_corruptions()[name]["224"][s - 1]`.
    """
    import tomllib

    file = files("lipaudit.wings.corruptions") / "assets" / "corruptions.toml"
    return tomllib.loads(file.read_text("utf-8"))


def find_published(side: int) -> int:
    """Return the side in pixels of the published set of images that is nearest to a given side.

    Distances are measured by ratio: 45 is nearer to 32 than to 64.

    >>> [find_published(side) for side in (8, 45, 46, 119, 120, 384)]
    [32, 32, 64, 64, 224, 224]
    """
    return min(PUBLISHED, key=lambda known: abs(math.log(known / side)))
