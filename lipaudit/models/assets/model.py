"""A model for lipaudit: `lipaudit bounds py:model.py:model`."""

import torch
from torch import nn

import lipaudit


class Block(nn.Module):
    """Self-attention as lipaudit reads it: any scaled_dot_product_attention, or a softmax."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x plus its attention; both are (batch, tokens, width)."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Classifier(nn.Module):
    """Replace it by your own."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, kernel_size=8, stride=8)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(64, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits, (batch, classes), of (batch, 3, 32, 32)."""
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.blocks(tokens).mean(1))


def model(classes: int = 10) -> lipaudit.ModelSpec:
    """Build the model; `--model-kwargs classes=4` gives the arguments."""
    module = Classifier(classes)
    # Load your weights here:
    # module.load_state_dict(torch.load("weights.pt", weights_only=True))
    return lipaudit.ModelSpec(
        module,
        input_shape=(3, 32, 32),
        mean=(0.5, 0.5, 0.5),  # what your training subtracted from pixels of [0, 1],
        std=(0.5, 0.5, 0.5),  # and divided them by
    )


# A model of several inputs, with an output of its own: `call` runs it, `read` finds the tensor.


class Conditional(nn.Module):
    """Takes images and a number for each, and returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.shift = Classifier(), nn.Linear(1, 10)

    def forward(self, images: torch.Tensor, ages: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return scores, (batch, classes), of (batch, 3, 32, 32) and (batch, 1)."""
        return {"scores": self.body(images) + self.shift(ages)}


def conditional(age: float = 0.5) -> lipaudit.ModelSpec:
    """Build the model at a fixed second input: `lipaudit bounds py:model.py:conditional`."""
    module = Conditional()

    def call(x: torch.Tensor, mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Run the module on normalised images; texts have a mask, True at their tokens."""
        return module(x, x.new_full((len(x), 1), age))

    return lipaudit.ModelSpec(
        module,
        input_shape=(3, 32, 32),
        call=call,
        read=lambda result: result["scores"],
    )
