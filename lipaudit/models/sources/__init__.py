"""The MODEL argument: its forms, and known names, without importing torch or timm."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from lipaudit.errors import similar

# Demo checkpoints, by name, with a description.
DEMOS = {
    "standard": "trained without any defence",
    "jasmin": "trained with the JaSMin penalty, k = 10",
    "robust": "trained on adversarial examples, L-inf 0.1",
}
FORMS = "demo, timm:NAME, hf:ORG/NAME, a directory, a file of weights with --arch, py:FILE:FACTORY"

# Names of the functions in timm's source that are decorated with @register_model.
_REGISTERED = re.compile(r"^@register_model\b.*\n(?:@.*\n)*def (\w+)", re.MULTILINE)


@cache
def timm_names() -> tuple[str, ...]:
    """Return the sorted names of timm's architectures, without an import that takes seconds.

    The list equals `timm.list_models()`; it is empty if timm is not installed.
    """
    package = find_spec("timm")
    if package is None:
        return ()
    names = set()
    for folder in package.submodule_search_locations or ():
        for path in Path(folder, "models").rglob("*.py"):
            # Functions that are decorated with @register_model.
            names.update(_REGISTERED.findall(path.read_text(encoding="utf-8")))
    return tuple(sorted(names))


def demo_names() -> tuple[str, ...]:
    """Return the demos as MODEL arguments."""
    return ("demo", *(f"demo:{name}" for name in DEMOS))


def similar_models(spec: str) -> list[str]:
    """Return the MODEL arguments most similar to one that was not found, to suggest them.

    For "resnet5", suggest "timm:resnet50" and others.
    """
    # MODEL arguments by their names without a prefix.
    by_name = {"demo": "demo"} | {name: f"demo:{name}" for name in DEMOS}
    by_name |= {name: f"timm:{name}" for name in timm_names()}
    # The typed name, without a prefix such as `timm:` and timm's name of weights, such as `.in1k`.
    name = spec.rpartition(":")[2].partition(".")[0]
    return [by_name[known] for known in similar(name, by_name)]
