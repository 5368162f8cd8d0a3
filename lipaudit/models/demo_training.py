"""Train the demo checkpoints again: `python -m lipaudit.models.demo_training [NAME ...]`.

Needs scikit-learn, which holds the digits. With the same version of torch on the same kind of
machine the result repeats to the last bit; elsewhere to a few tenths of a per cent of accuracy.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from lipaudit.models.demo import MEAN, STD, DigitsViT

CREDIT = "E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, CC BY 4.0"
EPOCHS, BATCH, RATE, DECAY = 60, 64, 4e-3, 0.05
GREYS = 16


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the digits as (train x, train y, test x, test y), pixels as uint8 over 255."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    images = torch.as_tensor(data.images, dtype=torch.float32)[:, None] / GREYS
    images = (images * 255).round() / 255
    labels = torch.as_tensor(data.target)
    train, test = train_test_split(
        np.arange(len(labels)), test_size=0.2, random_state=0, stratify=data.target
    )
    return images[train], labels[train], images[test], labels[test]


def shifted(x: Tensor, rng: torch.Generator) -> Tensor:
    """Move each image by up to one pixel in each direction, background coming in."""
    padded = F.pad(x, (1, 1, 1, 1))
    windows = padded.unfold(2, x.shape[2], 1).unfold(3, x.shape[3], 1)
    dy, dx = torch.randint(3, (2, len(x)), generator=rng)
    return windows[torch.arange(len(x)), :, dy, dx]


def train_standard(x: Tensor, y: Tensor, seed: int = 0) -> DigitsViT:
    """Train without any defence: AdamW, one-cycle rate, one-pixel shifts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DigitsViT()
        torch.nn.init.normal_(model.pos_embed, std=0.02)
        torch.nn.init.normal_(model.cls_token, std=0.02)
    rng = torch.Generator().manual_seed(seed)
    steps = -(-len(x) // BATCH) * EPOCHS
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for _ in range(EPOCHS):
        for index in torch.split(torch.randperm(len(x), generator=rng), BATCH):
            logits = model((shifted(x[index], rng) - MEAN) / STD)
            loss = F.cross_entropy(logits, y[index])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
    return model.eval()


def accuracy(model: DigitsViT, x: Tensor, y: Tensor) -> float:
    """Return the share of images that the model labels rightly."""
    with torch.no_grad():
        return float((model((x - MEAN) / STD).argmax(1) == y).float().mean())


RECIPES = {"standard": train_standard}
"""What trains each of the demos from (images, labels)."""


def main() -> None:
    """Train the demos, write their weights and the held-out images."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(RECIPES), metavar="NAME")
    parser.add_argument("--directory", type=Path, default=Path(__file__).parents[1])
    asked = parser.parse_args()
    models, data = (asked.directory / layer / "assets" for layer in ("models", "data"))
    for folder in (models, data):
        folder.mkdir(parents=True, exist_ok=True)
    x, y, test_x, test_y = digits()
    for name in asked.names:
        model = RECIPES[name](x, y)
        facts = {"held_out_accuracy": f"{accuracy(model, test_x, test_y):.4f}", "data": CREDIT}
        save_file(model.state_dict(), models / f"demo_{name}.safetensors", facts)
    pixels = (test_x * 255).round().to(torch.uint8).numpy()
    np.savez_compressed(data / "digits_test.npz", x=pixels, y=test_y.numpy(), credit=CREDIT)


if __name__ == "__main__":
    main()
