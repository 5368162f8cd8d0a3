"""Train the demo checkpoints again: `python -m lipaudit.train.demos [NAME ...]`.

With the same version of torch on the same kind of machine the result repeats to the last bit;
elsewhere to a few tenths of a per cent of accuracy. `--digits` writes the images again, too, out
of scikit-learn.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

from lipaudit.data.batch import Batch, sample_ids
from lipaudit.models.net import Net
from lipaudit.models.precision import seeded
from lipaudit.models.sources.assembly import assemble
from lipaudit.models.sources.demo import WIDTH, DigitsViT, demo_spec
from lipaudit.models.sources.loading import load_net
from lipaudit.models.sources.spec import LoadOptions
from lipaudit.results.trials import parse_radius
from lipaudit.settings.recipe import Recipe
from lipaudit.train.loop import Epoch, accuracy, train

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
FIRST = Recipe(
    epochs=6,
    batch_size=8,
    penalty="certified",
    eps=parse_radius("0.03"),
    weight=1.0,
    optimizer="adamw",
    lr=2e-3,
    weight_decay=0.05,
    clip=10.0,
    schedule="onecycle",
    flip=False,
    mixup=0.0,
    cutmix=0.0,
)
"""What trains certified before its own recipe does: the radius grows, accuracy comes later."""
RECIPES = {
    "standard": STANDARD,
    "jasmin": STANDARD.model_copy(update={"penalty": "jasmin", "k": 10, "weight": 1e-2}),
    "robust": STANDARD.model_copy(
        update={"adversarial": "pgd", "eps": parse_radius("0.1"), "epochs": 40, "lr": 2e-3}
    ),
    "certified": FIRST.model_copy(update={"epochs": 3, "ramp": 0.0, "weight": 0.5}),
}
"""What trains each of the demos, on from what `begun` gives."""


def untrained(seed: int) -> Net:
    """Return a demo model with random weights."""
    with seeded(seed, torch.device("cpu")):
        model = DigitsViT()
        torch.nn.init.normal_(model.pos_embed, std=0.02)
        torch.nn.init.normal_(model.cls_token, std=0.02)
    return assemble(demo_spec(model, "untrained"), LoadOptions(), name="demo", source="demo")


def begun(name: str) -> Net:
    """Return what a demo is trained from: random weights, those of standard, or its first run."""
    if name == "robust":
        return load_net("demo")
    net = untrained(RECIPES[name].seed)
    if name == "certified":
        near_linear(net.module)
        *_, (net, _) = trained(FIRST, net)
    return net


def near_linear(module: nn.Module) -> None:
    """Scale random weights of a demo model so that bounds of it say something from the start.

    Every block multiplies the box that its bounds put around what is not linear in the image; in a
    usual start they say nothing at any radius. Large positions make normalisations nearly linear
    and let attention go by position, and later branches begin small.
    """
    factors = {"attn.proj": 0.1, "mlp.fc1": 0.3, "mlp.fc2": 0.1}
    with torch.no_grad():
        for name, weight in module.named_parameters():
            first, (part, _, kind) = name.startswith("blocks.0."), name.rpartition(".")
            if name in ("pos_embed", "cls_token"):
                weight.mul_(200)
            elif kind == "weight" and part.endswith("attn.qkv"):
                weight[: 2 * WIDTH].mul_(2)
                weight[2 * WIDTH :].mul_(1.0 if first else 0.3)
            elif kind == "weight" and not (first and part.endswith("attn.proj")):
                weight.mul_(next((f for key, f in factors.items() if part.endswith(key)), 1.0))


def trained(recipe: Recipe, net: Net | None = None) -> Iterator[tuple[Net, Epoch]]:
    """Train a demo model on the training digits, from scratch or on, and yield every epoch."""
    net = net or untrained(recipe.seed)
    for epoch in train(net, shipped("train"), recipe, held_out=shipped("test")):
        yield net, epoch


def shipped(part: str) -> Batch:
    """Return the images that come with the package, train or test, in the order of the file."""
    with as_file(files("lipaudit.data") / "assets" / f"digits_{part}.npz") as path:
        stored = np.load(path)
        x, y = torch.from_numpy(stored["x"]) / 255, torch.from_numpy(stored["y"])
    return Batch(x, y, sample_ids(list(x), y.tolist()))


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
    train_x, train_y, test_x, test_y = digits()
    for name, x, y in (("train", train_x, train_y), ("test", test_x, test_y)):
        pixels = (x * 255).round().to(torch.uint8).numpy()
        np.savez_compressed(folder / f"digits_{name}.npz", x=pixels, y=y.numpy(), credit=CREDIT)


def main() -> None:
    """Train the demos and write their weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(RECIPES), metavar="NAME")
    parser.add_argument("--directory", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--digits", action="store_true", help="write the images again, too")
    asked = parser.parse_args()
    folders = {layer: asked.directory / layer / "assets" for layer in ("models", "data")}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    if asked.digits:
        write_digits(folders["data"])
    for name in asked.names:
        *_, (net, last) = trained(RECIPES[name], begun(name))
        facts = {"held_out_accuracy": f"{last.accuracy:.4f}", "data": CREDIT}
        facts["recipe"] = RECIPES[name].model_dump_json()
        weights = net.module.state_dict()
        if name == "certified":  # in half precision, so that the package stays below a megabyte
            weights = {key: weight.half() for key, weight in weights.items()}
            net.module.load_state_dict(weights)
            facts["held_out_accuracy"] = f"{accuracy(net, shipped('test'), 360):.4f}"
        stored = save(weights, facts)
        (folders["models"] / f"demo_{name}.safetensors").write_bytes(stored)


if __name__ == "__main__":
    main()
