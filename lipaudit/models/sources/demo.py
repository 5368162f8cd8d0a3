"""The demo checkpoints: small vision transformers that read handwritten digits.

They were trained on the 1437 training images of scikit-learn's `load_digits` (8x8 pixels; "Optical
Recognition of Handwritten Digits", UCI machine learning repository, credit E. Alpaydin and
C. Kaynak, CC BY 4.0) by `benchmarks.shared.demos`. The 360 images held out are the data set
`demo`. Parameters carry timm's names: timm's VisionTransformer loads the same files.
"""

from __future__ import annotations

import math
from importlib.resources import as_file, files

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from lipaudit.errors import InputError, suggestion
from lipaudit.models.net import ModelSpec
from lipaudit.models.sources.names import DEMOS

WIDTH, HIDDEN, DEPTH, HEADS, PATCH, SIZE, CLASSES = 48, 96, 3, 4, 2, 8, 10
MEAN, STD = 0.5, 0.5
AS_TIMM = (
    "vit_tiny_patch16_224",
    {
        "img_size": SIZE,
        "patch_size": PATCH,
        "in_chans": 1,
        "num_classes": CLASSES,
        "embed_dim": WIDTH,
        "depth": DEPTH,
        "num_heads": HEADS,
        "mlp_ratio": HIDDEN / WIDTH,
    },
)
"""The architecture of timm that the demos are, with its arguments."""


class Attention(nn.Module):
    """Multi-head self-attention with one fused projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        return self.fc2(F.gelu(self.fc1(x)))


class EncoderBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.attn = Attention()
        self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    """Cut an image into patches and embed each."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(1, WIDTH, PATCH, PATCH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 1, height, width) to (batch, patches, width)."""
        return self.proj(x).flatten(2).transpose(1, 2)


class DigitsViT(nn.Module):
    """A vision transformer for 8x8 digits: 17 tokens, 58,570 parameters, class token read out.

    Square images of other sizes work, too, with interpolated position embeddings.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + (SIZE // PATCH) ** 2, WIDTH))
        self.blocks = nn.Sequential(*(EncoderBlock() for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, 1, 8, 8), normalised, to logits (batch, 10)."""
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        positions: Tensor = self.pos_embed
        tokens = x.shape[1]
        if tokens != positions.shape[1]:  # another size of images: interpolate the grid
            first, grid = positions[:, :1], positions[:, 1:]
            side, known = math.isqrt(tokens - 1), SIZE // PATCH
            grid = grid.mT.reshape(1, WIDTH, known, known)
            grid = F.interpolate(grid, (side, side), mode="bicubic", antialias=True)
            positions = torch.cat([first, grid.flatten(2).mT], 1)
        return self.head(self.norm(self.blocks(x + positions))[:, 0])


def load_demo(name: str = "standard") -> ModelSpec:
    """Load a shipped checkpoint.

    Raises:
        InputError: no demo has this name.
    """
    if name not in DEMOS:
        raise InputError(f"there is no demo {name!r}", suggestion(name, DEMOS))
    module = DigitsViT()
    with as_file(files("lipaudit.models") / "assets" / f"demo_{name}.safetensors") as path:
        module.load_state_dict(load_file(path))
    return describe_demo(module, DEMOS[name])


def describe_demo(module: DigitsViT, history: str) -> ModelSpec:
    """Describe the input of a demo model and its training."""
    return ModelSpec(
        module,
        (1, SIZE, SIZE),
        mean=(MEAN,),
        std=(STD,),
        labels=tuple("0123456789"),
        entry=module.patch_embed,
        architecture=f"DigitsViT ({history})",
    )
