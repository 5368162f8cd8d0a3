"""Measure saved models under other versions of packages, for `.ci/matrix`.

python -m tests.versions save FOLDER
python -m tests.versions measure FOLDER OUT.json
python -m tests.versions compare OUT.json REFERENCE.json
"""

import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np

from tests.goldens.models import FOLDERS, GROUPED, TEXT, save_as
from tests.goldens.test_values import PASSING, number_tables, run_command, walk

MODELS = FOLDERS | {
    "encoder-decoder": save_as(
        "T5ForConditionalGeneration",
        "T5Config",
        **{"vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_heads": 4},
        **{"num_layers": 1, "decoder_start_token_id": 0, "pad_token_id": 0},
    ),
    "scaled-embeddings": save_as("GemmaForCausalLM", "GemmaConfig", **TEXT | GROUPED),
    "normed-queries": save_as("Qwen3ForCausalLM", "Qwen3Config", **TEXT | GROUPED),
    "learnt-positions": save_as(
        "GPT2LMHeadModel",
        "GPT2Config",
        **{"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32},
    ),
    "patches": save_as(
        "ViTForImageClassification",
        "ViTConfig",
        **{"image_size": 16, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "intermediate_size": 24, "num_labels": 5},
    ),
}
"""Models that are saved once, beside the embedded demo; every environment reads the same files."""
PACKAGES = ("torch", "transformers", "timm", "numpy")
PIXELS = "pixels.npz"
FLOOR = 1e-2
"""Differences are relative; figures below this count as this large."""


def save(folder: Path) -> None:
    """Save every model, and images."""
    for name, write in MODELS.items():
        write(folder / name)
    np.savez(folder / PIXELS, x=np.random.default_rng(0).random((1, 3, 16, 16), np.float32))


def measure(folder: Path, out: Path) -> None:
    """Measure every model; write figures by model, measure and cell, and versions."""
    figures = {}
    report = out.with_suffix(".report.json")
    for name in ("demo", *MODELS):
        model = name if name == "demo" else str(folder / name)
        images = ("--data", str(folder / PIXELS)) * (name in ("windows", "patches"))
        size = () if name == "demo" or images else ("--max-tokens", "6")
        for command in ("bounds", "attention", "jacobian"):
            report.unlink(missing_ok=True)
            tight = () if command == "attention" else ("--tol", "1e-9")
            fixed = (*tight, "--samples", "1", "--dtype", "float64", "-q", "-o", str(report))
            try:
                run_command(command, model, *images, *size, *fixed)
            except AssertionError as error:
                figures[f"{name} {command}"] = str(error)
                continue
            for place, value in walk(number_tables(json.loads(report.read_text()))):
                if place.rpartition(".")[2] not in (*PASSING, "module"):
                    figures[f"{name}{place}"] = value
    versions = {"Python": platform.python_version()} | {name: version(name) for name in PACKAGES}
    out.write_text(json.dumps({"versions": versions, "figures": figures}))


def compare(out: Path, reference: Path) -> str:
    """Return two cells of a table: the versions, and the largest difference of figures."""
    found, truth = (json.loads(path.read_text()) for path in (out, reference))
    differences = {
        place: _difference(found["figures"].get(place), value)
        for place, value in truth["figures"].items()
    }
    models: dict[str, float] = {}
    for place, difference in differences.items():
        model = place.split(".")[0].split()[0]
        models[model] = max(difference, models.get(model, 0.0))
    *others, worst = sorted(models, key=lambda name: models[name])
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    second = max(models[name] for name in others)
    return (
        f"{versions} | {len(differences):,} figures of {len(models)} models: "
        f"{models[worst]:.1e} ({worst}), others {second:.1e}"
    )


def _difference(found: object, value: object) -> float:
    if isinstance(found, int | float) and isinstance(value, int | float):
        return abs(found - value) / max(abs(value), FLOOR)
    return 0.0 if found == value else float("inf")


if __name__ == "__main__":
    command, *paths = sys.argv[1:]
    if said := {"save": save, "measure": measure, "compare": compare}[command](*map(Path, paths)):
        print(said)
