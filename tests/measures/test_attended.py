"""Whose attention a map shows: tokens by name, and patches where they lie in the picture."""

import base64
import io

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

from lipaudit.errors import EvaluationError
from lipaudit.measures import tokens
from lipaudit.measures.attention import AttentionOptions, measure, summarise
from tests.nets import own_batch, own_net

SMALL = {"embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5, "pretrained": False}


def net_of(module, shape):
    return own_net(module.eval(), shape, kind="image")


def vit(name="vit_tiny_patch16_224", size=(32, 32), **changes):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return timm.create_model(name, img_size=size, patch_size=8, **SMALL | changes)


def pictures(height, width, count=2):
    return own_batch(
        torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(0))
    )


@pytest.mark.parametrize(
    ("name", "size", "changes"),
    [
        ("vit_tiny_patch16_224", (32, 32), {}),
        ("vit_tiny_patch16_224", (16, 40), {}),
        ("vit_tiny_patch16_224", (32, 32), {"class_token": False, "global_pool": "avg"}),
        ("vit_tiny_patch16_224", (24, 32), {"reg_tokens": 4}),
        ("deit_tiny_distilled_patch16_224", (32, 32), {}),
    ],
)
def test_patches_lie_where_the_model_says(name, size, changes):
    """timm's own words, which nothing here reads: the grid, and how many tokens stand before."""
    module = vit(name, size, **changes)
    count, rows, columns, first = tokens.patches(net_of(module, (3, *size)), pictures(*size)[:1])
    assert (rows, columns) == tuple(module.patch_embed.grid_size)
    assert first == module.num_prefix_tokens
    assert count == first + rows * columns


class Shuffled(nn.Module):
    """Patches in another order than the picture's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).flip(1)


def test_what_is_no_row_of_patches_is_none():
    shuffled = vit()
    shuffled.patch_embed = Shuffled(shuffled.patch_embed)
    assert tokens.patches(net_of(shuffled, (3, 32, 32)), pictures(32, 32)[:1]) is None
    sizes = {"embed_dim": 16, "depths": (1, 1), "num_heads": (2, 4), "window_size": 2}
    windows = timm.create_model("swin_tiny_patch4_window7_224", img_size=32, **sizes)
    assert tokens.patches(net_of(windows, (3, 32, 32)), pictures(32, 32)[:1]) is None


def section_of(net, batch, **options):
    how = AttentionOptions(**options)
    return summarise(list(measure(net, batch.split(1), how)), how)[0]


def test_a_map_of_a_picture_keeps_its_patches_and_the_picture():
    net, batch = net_of(vit(size=(16, 24)), (3, 16, 24)), pictures(16, 24)
    section = section_of(net, batch, map="1.2")
    assert list(section.attended) == ["map@1.2"]
    whose = section.attended["map@1.2"]
    assert (whose.sample, whose.grid, whose.first) == (batch.ids[0], (2, 3), 1)
    assert whose.tokens == (
        "CLS", "patch 0,0", "patch 0,1", "patch 0,2", "patch 1,0", "patch 1,1", "patch 1,2",
    )  # fmt: skip
    pixels = np.array(Image.open(io.BytesIO(base64.b64decode(whose.image))))
    np.testing.assert_allclose(pixels / 255, batch.x[0].permute(1, 2, 0), atol=1 / 255)


def test_a_row_keeps_that_of_the_first_sample():
    net, batch = net_of(vit(), (3, 32, 32)), pictures(32, 32)
    whole, row = section_of(net, batch, map="1.2"), section_of(net, batch, map="1.2", query=3)
    first = row.arrays["first_row@1.2,3"].numpy()
    np.testing.assert_allclose(first, whole.arrays["map@1.2"].numpy()[3], rtol=1e-5)
    assert row.attended == {"first_row@1.2,3": whole.attended["map@1.2"]}


def test_what_cannot_be_found_out_costs_no_figure(monkeypatch):
    def fails(*_: object) -> None:
        raise EvaluationError("not met")

    monkeypatch.setattr(tokens, "patches", fails)
    section = section_of(net_of(vit(), (3, 32, 32)), pictures(32, 32), map="0.0")
    assert section.attended == {}
    assert section.arrays["map@0.0"].shape == (17, 17)


def test_without_a_map_nothing_is_kept():
    assert section_of(net_of(vit(), (3, 32, 32)), pictures(32, 32)).attended == {}
