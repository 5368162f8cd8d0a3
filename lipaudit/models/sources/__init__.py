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

_REGISTERED = re.compile(r"^@register_model\b.*\n(?:@.*\n)*def (\w+)", re.MULTILINE)


@cache
def timm_names() -> tuple[str, ...]:
    """Return timm's architectures in order, read from its source: an import takes seconds.

    The list equals `timm.list_models()`; it is empty if timm is not installed.
    """
    package = find_spec("timm")
    folders = (package and package.submodule_search_locations) or ()
    files = (path for folder in folders for path in Path(folder, "models").rglob("*.py"))
    texts = (path.read_text(encoding="utf-8") for path in files)
    return tuple(sorted({name for text in texts for name in _REGISTERED.findall(text)}))


def demo_names() -> tuple[str, ...]:
    """Return the demos as MODEL arguments."""
    return ("demo", *(f"demo:{name}" for name in DEMOS))


def similar_models(spec: str) -> list[str]:
    """Return MODEL arguments similar to a name that was not found."""
    timm = (f"timm:{name}" for name in timm_names())
    known = {model.partition(":")[2] or model: model for model in (*demo_names(), *timm)}
    bare = spec.rpartition(":")[2].partition(".")[0]
    return [known[name] for name in similar(bare, known)]
