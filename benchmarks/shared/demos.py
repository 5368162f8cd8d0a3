"""Train the demo checkpoints again: `python -m benchmarks.shared.demos [NAME ...]`.

With the same version of torch on the same kind of machine the result repeats to the last bit;
elsewhere to a few tenths of a per cent of accuracy. `--digits` writes the images again, too, out
of scikit-learn.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from lipaudit.data.batch import Batch, identify_samples
from lipaudit.models.net import LoadOptions, Net
from lipaudit.models.precision import seed_device
from lipaudit.models.sources.loader import assemble, load_net
from lipaudit.models.sources.timm import DigitsViT, load_demo
from lipaudit.tables.trials import parse_radius
from lipaudit.wings.training.loop import Epoch, train
from lipaudit.wings.training.recipe import Recipe

CREDIT = "E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, CC BY 4.0"
GREYS = 16

STANDARD = Recipe(
    epochs=60,
    batch_size=64,
    optimizer="adamw",
    lr=4e-3,
    weight_decay=0.05,
    schedule="onecycle",
    flip=False,
    shift=1,
    mixup=0.0,
    cutmix=0.0,
)
RECIPES = {
    "standard": STANDARD,
    "jasmin": STANDARD.model_copy(update={"penalty": "jasmin", "k": 10, "weight": 1e-2}),
    "robust": STANDARD.model_copy(
        update={"adversarial": "pgd", "eps": parse_radius("0.1"), "epochs": 40, "lr": 2e-3}
    ),
}
"""What trains each of the demos: robust goes on from standard, the others begin anew."""


def make_demo(seed: int) -> Net:
    """Return a demo model with random weights."""
    with seed_device(seed, torch.device("cpu")):
        model = DigitsViT()
        torch.nn.init.normal_(model.pos_embed, std=0.02)
        torch.nn.init.normal_(model.cls_token, std=0.02)
    name = "DigitsViT (untrained)"
    spec = replace(load_demo(), module=model, entry=model.patch_embed, architecture=name)
    return assemble(spec, LoadOptions(), name="demo", source="demo")


def train_demo(recipe: Recipe, net: Net | None = None) -> Iterator[tuple[Net, Epoch]]:
    """Train a demo model on the training digits, from scratch or on, and yield every epoch."""
    net = net or make_demo(recipe.seed)
    for epoch in train(net, load_shipped("train"), recipe, held_out=load_shipped("test")):
        yield net, epoch


def load_shipped(part: str) -> Batch:
    """Return the images that come with the package, train or test, in the order of the file."""
    with as_file(files("lipaudit.data") / "assets" / f"digits_{part}.npz") as path:
        stored = np.load(path)
        x, y = torch.from_numpy(stored["x"]) / 255, torch.from_numpy(stored["y"])
    return Batch(x, y, identify_samples(list(x), y.tolist()))


def load_sklearn_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scikit-learn's digits as (train x, train y, test x, test y), pixels in [0, 1]."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    images = torch.as_tensor(data.images, dtype=torch.float32)[:, None] / GREYS
    images = (images * 255).round() / 255
    labels = torch.as_tensor(data.target)
    part, test = train_test_split(
        np.arange(len(labels)), test_size=0.2, random_state=0, stratify=data.target
    )
    return images[part], labels[part], images[test], labels[test]


def write_digits(folder: Path) -> None:
    """Write the images of both parts, 8 bits a pixel."""
    train_x, train_y, test_x, test_y = load_sklearn_digits()
    for name, x, y in (("train", train_x, train_y), ("test", test_x, test_y)):
        pixels = (x * 255).round().to(torch.uint8).numpy()
        np.savez_compressed(folder / f"digits_{name}.npz", x=pixels, y=y.numpy(), credit=CREDIT)


def main() -> None:
    """Train the demos and write their weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(RECIPES), metavar="NAME")
    parser.add_argument("--directory", type=Path, default=Path(__file__).parents[2] / "lipaudit")
    parser.add_argument("--digits", action="store_true", help="write the images again, too")
    asked = parser.parse_args()
    folders = {layer: asked.directory / layer / "assets" for layer in ("models", "data")}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    if asked.digits:
        write_digits(folders["data"])
    for name in asked.names:
        start = load_net("demo") if name == "robust" else None
        *_, (net, last) = train_demo(RECIPES[name], start)
        facts = {"held_out_accuracy": f"{last.accuracy:.4f}", "data": CREDIT}
        facts["recipe"] = RECIPES[name].model_dump_json()
        stored = save(net.module.state_dict(), facts)
        (folders["models"] / f"demo_{name}.safetensors").write_bytes(stored)


if __name__ == "__main__":
    main()
