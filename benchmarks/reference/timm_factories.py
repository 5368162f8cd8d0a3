"""Models of timm whose registered names cannot be made small: factories for `py:`."""

from __future__ import annotations

from typing import Any

from torch import nn


def convolutional(layer: str, side: int = 32, num_classes: int = 5, **attention: Any) -> nn.Module:
    """Return a residual network whose last two blocks hold a layer of attention."""
    from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg

    plain = {"d": 1, "gs": 0, "br": 0.5}
    blocks = (
        ByoBlockCfg(type="bottle", c=16, s=2, **plain),
        ByoBlockCfg(type="self_attn", c=32, s=2, **plain),
        ByoBlockCfg(type="self_attn", c=32, s=1, **plain),
    )
    config = ByoModelCfg(
        blocks=blocks,
        stem_chs=8,
        stem_type="3x3",
        fixed_input_size=True,
        self_attn_layer=layer,
        self_attn_kwargs=attention,
    )
    return ByobNet(config, num_classes=num_classes, img_size=side)


def pooled(side: int = 64, num_classes: int = 5) -> nn.Module:
    """Return a residual network that ends in attention pooling, as those of CLIP do."""
    from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg

    blocks = (
        ByoBlockCfg(type="bottle", d=1, c=16, s=2, gs=0, br=0.5),
        ByoBlockCfg(type="bottle", d=1, c=32, s=2, gs=0, br=0.5),
    )
    config = ByoModelCfg(
        blocks=blocks,
        stem_chs=8,
        stem_type="3x3",
        fixed_input_size=True,
        head_type="attn_abs",
        head_hidden_size=128,
    )
    return ByobNet(config, num_classes=num_classes, img_size=side)


def metaformer(num_classes: int = 5) -> nn.Module:
    """Return a MetaFormer with convolutions, then attention: a small CAFormer."""
    from timm.models.metaformer import (
        Attention,
        LayerNorm2dNoBias,
        LayerNormNoBias,
        MetaFormer,
        SepConv,
    )

    return MetaFormer(
        depths=(1, 1, 1, 1),
        dims=(16, 16, 32, 32),
        token_mixers=[SepConv, SepConv, Attention, Attention],
        norm_layers=[LayerNorm2dNoBias] * 2 + [LayerNormNoBias] * 2,
        num_classes=num_classes,
    )


def multiscale(num_classes: int = 5) -> nn.Module:
    """Return a small multi-scale vision transformer, MViTv2."""
    from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg

    config = MultiScaleVitCfg(depths=(1, 1, 1, 1), embed_dim=16, num_heads=1)
    return MultiScaleVit(config, img_size=(32, 32), num_classes=num_classes)


def bilinear(side: int = 64, num_classes: int = 5) -> nn.Module:
    """Return a residual network with bilinear attentional transforms."""
    from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg

    config = ByoModelCfg(
        blocks=tuple(ByoBlockCfg(type="bottle", d=1, c=c, s=2, gs=0, br=0.5) for c in (16, 32)),
        stem_chs=8,
        stem_type="3x3",
        fixed_input_size=True,
        attn_layer="bat",
        attn_kwargs={"block_size": 4},
    )
    return ByobNet(config, num_classes=num_classes, img_size=side)
