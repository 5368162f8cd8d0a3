"""A small member of every family of timm: one per module, more where it has more attentions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Small:
    """A model of timm made small.

    Attributes:
        name: of the architecture.
        side: of the images; None is the model's own.
        kwargs: of the architecture.
    """

    name: str
    side: int | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)


VIT = {"depth": 2, "embed_dim": 32, "num_heads": 4, "img_size": 32, "patch_size": 8}
EVA = VIT | {"mlp_ratio": 2}
SWIN = {"img_size": 32, "patch_size": 4, "embed_dim": 16, "depths": (2, 1), "num_heads": (2, 4)}
FOUR = {"depths": (1, 1, 1, 1)}


def vit(name: str, **kwargs: Any) -> Small:
    return Small(name, 32, VIT | kwargs)


ATTENTION: dict[str, Small] = {
    "beit": vit("beit_base_patch16_224"),
    "beitv2": vit("beitv2_base_patch16_224"),
    "botnet": Small(
        "py:benchmarks.reference.timm_factories:convolutional",
        32,
        {"layer": "bottleneck", "num_heads": 2},
    ),
    "halonet": Small(
        "py:benchmarks.reference.timm_factories:convolutional",
        64,
        {"side": 64, "layer": "halo", "num_heads": 2} | {"block_size": 4, "halo_size": 1},
    ),
    "lambdanet": Small(
        "py:benchmarks.reference.timm_factories:convolutional",
        32,
        {"layer": "lambda", "num_heads": 2, "r": 3} | {"dim_head": 8},
    ),
    "bat": Small("py:benchmarks.reference.timm_factories:bilinear", 64),
    "clip-resnet": Small("py:benchmarks.reference.timm_factories:pooled", 64),
    "cait": Small(
        "cait_xxs24_224",
        32,
        {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2} | {"num_heads": 4},
    ),
    "coat": Small(
        "py:timm.models.coat:CoaT",
        64,
        {"img_size": 64, "patch_size": 4, "embed_dims": (16, 16, 16, 16)}
        | {"num_heads": 2, "crpe_window": {3: 1, 5: 1}, "mlp_ratios": (2, 2, 2, 2)}
        | {"serial_depths": (1, 1, 1, 1), "parallel_depth": 1},
    ),
    "coat-lite": Small(
        "py:timm.models.coat:CoaT",
        64,
        {"img_size": 64, "patch_size": 4, "embed_dims": (16, 16, 16, 16)}
        | {"num_heads": 2, "crpe_window": {3: 1, 5: 1}, "mlp_ratios": (2, 2, 2, 2)}
        | {"serial_depths": (1, 1, 1, 1)},
    ),
    "convit": vit("convit_tiny", depth=3, local_up_to_layer=2),
    "cpubone": Small("cpubone_nano", 64),
    "crossvit": Small(
        "crossvit_tiny_240",
        48,
        {"img_size": 48, "img_scale": (1.0, 1.0), "patch_size": (8, 16)}
        | {
            "embed_dim": (16, 32),
            "depth": ((1, 2, 0),),
            "num_heads": (2, 2),
            "mlp_ratio": (2, 2, 1),
        },
    ),
    "csatv2": Small("csatv2", 64),
    "davit": Small(
        "davit_tiny",
        64,
        FOUR | {"embed_dims": (8, 16, 16, 32), "num_heads": (2, 2, 2, 4)} | {"window_size": 4},
    ),
    "deepseek_vit": vit("deepseek_vit_412m"),
    "deit": vit("deit_tiny_patch16_224"),
    "deit-distilled": vit("deit_tiny_distilled_patch16_224"),
    "deit3": vit("deit3_small_patch16_224"),
    "edgenext": Small("edgenext_xx_small", 64, {"dims": (8, 16, 24, 32), "depths": (1, 2, 2, 2)}),
    "efficientformer": Small(
        "py:timm.models.efficientformer:EfficientFormer",
        224,
        {"num_vit": 1} | {"embed_dims": (8, 16, 16, 32), "depths": (1, 1, 1, 2)},
    ),
    "efficientformer_v2": Small(
        "py:timm.models.efficientformer_v2:EfficientFormerV2",
        64,
        {"img_size": 64, "num_vit": 1}
        | {"embed_dims": (8, 16, 16, 32), "depths": (1, 1, 2, 2), "mlp_ratios": 2}
        | {"downsamples": (False, True, True, True)},
    ),
    "efficientvit_mit": Small("efficientvit_b0", 64),
    "efficientvit_msra": Small("efficientvit_m0", 64, {"img_size": 64}),
    "eva02": Small("eva02_tiny_patch14_224", 32, EVA),
    "eva": Small("eva_giant_patch14_224", 32, EVA),
    "pe-core": Small("vit_pe_core_tiny_patch16_384", 32, EVA),
    "pe-spatial": Small("vit_pe_spatial_tiny_patch16_512", 32, EVA),
    "rope-vit": Small("vit_small_patch16_rope_224", 32, EVA),
    "rope-mixed-vit": Small("vit_small_patch16_rope_mixed_224", 32, EVA),
    "dinov3": Small("vit_small_patch16_dinov3", 32, EVA),
    "fastvit": Small("fastvit_sa12", 64, {"layers": (1, 1, 1, 1), "embed_dims": (32, 32, 32, 64)}),
    "gcvit": Small(
        "py:timm.models.gcvit:GlobalContextVit",
        32,
        {"img_size": 32, "depths": (1, 1, 2, 1)}
        | {"embed_dim": 16, "num_heads": (2, 2, 2, 4), "window_ratio": (8, 8, 16, 32)},
    ),
    "gemma4_vit": Small("gemma4_vit_167m_enc", 48, {"embed_dim": 32, "depth": 2, "num_heads": 4}),
    "hiera": Small(
        "hiera_tiny_224",
        32,
        {"img_size": (32, 32), "embed_dim": 16, "num_heads": 1} | {"stages": (1, 1, 2, 1)},
    ),
    "hieradet_sam2": Small(
        "sam2_hiera_tiny",
        32,
        {"embed_dim": 16, "num_heads": 1, "stages": (1, 1, 2, 1)}
        | {"global_att_blocks": (3,), "window_spec": (4, 4, 2, 1)},
    ),
    "iformer": Small("iformer_t", 64),
    "levit": Small(
        "levit_128s",
        64,
        {"img_size": 64, "embed_dim": (32, 32, 48), "key_dim": 8}
        | {"num_heads": (2, 2, 4), "depth": (1, 1, 1)},
    ),
    "lowformer": Small("lowformer_b0", 64),
    "coatnet": Small(
        "coatnet_pico_rw_224",
        64,
        {"img_size": 64, "depths": (1, 1, 1, 1)} | {"embed_dim": (32, 32, 32, 64)},
    ),
    "maxvit": Small(
        "maxvit_pico_rw_256",
        64,
        {"img_size": 64, "depths": (1, 1, 1, 1)} | {"embed_dim": (32, 32, 32, 32)},
    ),
    "metaformer": Small("py:benchmarks.reference.timm_factories:metaformer", 64),
    "mobilenetv4-hybrid": Small("mobilenetv4_hybrid_medium", 32),
    "mobilenetv5": Small("mobilenetv5_base", 32),
    "mobilevit": Small("mobilevit_xxs", 32),
    "mobilevitv2": Small("mobilevitv2_050", 64),
    "mvitv2": Small("py:benchmarks.reference.timm_factories:multiscale", 32),
    "naflexvit": Small(
        "naflexvit_base_patch16_gap",
        32,
        {"depth": 2, "embed_dim": 32} | {"num_heads": 4, "patch_size": 8},
    ),
    "nest": Small(
        "py:timm.models.nest:Nest",
        32,
        {"img_size": 32, "embed_dims": (16, 16, 32)}
        | {"num_heads": (2, 2, 4), "depths": (1, 1, 1), "patch_size": 2},
    ),
    "nextvit": Small(
        "py:timm.models.nextvit:NextViT",
        32,
        {"in_chans": 3, "depths": (1, 1, 5, 1)} | {"stem_chs": (16, 16, 16)},
    ),
    "pit": Small(
        "pit_ti_224",
        64,
        {"img_size": 64, "base_dims": (8, 8, 16), "depth": (1, 1, 1)} | {"heads": (2, 2, 2)},
    ),
    "pvt_v2": Small(
        "pvt_v2_b0", 64, FOUR | {"embed_dims": (16, 16, 16, 32)} | {"num_heads": (1, 1, 2, 2)}
    ),
    "pvt_v2-linear": Small(
        "pvt_v2_b2_li", 64, FOUR | {"embed_dims": (16, 16, 16, 32)} | {"num_heads": (1, 1, 2, 2)}
    ),
    "qwen3_vit": Small("qwen3_vit_88m", 64, {"embed_dim": 32, "depth": 2, "num_heads": 4}),
    "qwen3_vit-enc": Small("qwen3_vit_88m_enc", 32, {"embed_dim": 32, "depth": 2, "num_heads": 4}),
    "repvit": Small("repvit_m0_9", 64),
    "shvit": Small("shvit_s1", 64),
    "swiftformer": Small("swiftformer_xs", 64),
    "swin": Small("swin_tiny_patch4_window7_224", 32, SWIN | {"window_size": 4}),
    "swinv2": Small("swinv2_tiny_window8_256", 32, SWIN | {"window_size": 4}),
    "swinv2_cr": Small("swinv2_cr_tiny_224", 32, SWIN | {"window_size": 4}),
    "tiny_vit": Small(
        "tiny_vit_5m_224",
        64,
        {"embed_dims": (16, 16, 32, 32), "depths": (1, 1, 1, 1)}
        | {"num_heads": (2, 2, 2, 2), "window_sizes": (4, 4, 4, 2)},
    ),
    "tnt": Small(
        "tnt_s_legacy_patch16_224",
        32,
        {"img_size": 32, "patch_size": 8, "embed_dim": 32}
        | {"inner_dim": 8, "depth": 2, "num_heads_outer": 4, "num_heads_inner": 2},
    ),
    "twins-svt": Small(
        "twins_svt_small",
        32,
        FOUR
        | {"img_size": 32, "depths": (2, 1, 1, 1)}
        | {"embed_dims": (16, 16, 16, 32), "num_heads": (2, 2, 2, 4)}
        | {"wss": (4, 2, 2, 2)},
    ),
    "twins-pcpvt": Small(
        "twins_pcpvt_small",
        32,
        FOUR | {"img_size": 32} | {"embed_dims": (16, 16, 16, 32), "num_heads": (1, 2, 2, 4)},
    ),
    "visformer": Small(
        "visformer_tiny",
        64,
        {"img_size": 64, "embed_dim": 32, "num_heads": 2} | {"depth": (1, 2, 1)},
    ),
    "vit": vit("vit_tiny_patch16_224"),
    "vit-qk-norm": vit("vit_tiny_patch16_224", qk_norm=True),
    "vit-parallel": vit("vit_small_patch16_36x1_224"),
    "vit-parallel-two": vit("vit_small_patch16_18x2_224"),
    "vit-reg": vit("vit_small_patch14_reg4_dinov2"),
    "vit-22b-style": vit("vit_base_patch16_xp_224"),
    "siglip": vit("vit_base_patch16_siglip_224"),
    "vit-clip": vit("vit_base_patch16_clip_224"),
    "vit-diff": vit("vit_dlittle_patch16_reg1_gap_256"),
    "aimv2": vit("aimv2_large_patch14_224"),
    "vit-hybrid": Small(
        "vit_tiny_r_s16_p8_224",
        32,
        {"img_size": 32, "depth": 2, "embed_dim": 32} | {"num_heads": 4},
    ),
    "vit-relpos": vit("vit_relpos_small_patch16_224"),
    "vit-relpos-rw": vit("vit_relpos_small_patch16_rpn_224"),
    "vit-srelpos": vit("vit_srelpos_small_patch16_224"),
    "sam": Small(
        "samvit_base_patch16_224",
        64,
        {"img_size": 64, "embed_dim": 32, "depth": 2}
        | {"num_heads": 4, "patch_size": 8, "window_size": 4, "global_attn_indexes": (1,)},
    ),
    "vitamin": Small("vitamin_small_224", 32, {"img_size": 32, "depth": 2, "num_heads": 4}),
    "volo": Small(
        "py:timm.models.volo:VOLO",
        64,
        {"img_size": 64, "embed_dims": (16, 32, 32, 32)}
        | {"layers": (1, 1, 1, 1), "num_heads": (2, 2, 2, 2)},
    ),
    "xcit": Small(
        "xcit_nano_12_p16_224",
        32,
        {"img_size": 32, "embed_dim": 32, "depth": 2} | {"num_heads": 4},
    ),
}
"""Families with attention, by a name of ours."""

OTHERS: dict[str, Small] = {
    "byobnet": Small("test_byobnet", 64),
    "convmixer": Small("py:timm.models.convmixer:ConvMixer", 32, {"dim": 16, "depth": 2}),
    "convnext": Small("test_convnext", 64),
    "cspnet": Small("cs3darknet_focus_s", 64),
    "cspnext": Small("cspnext_tiny", 64),
    "densenet": Small("densenet121", 64, {"block_config": (1, 1, 1, 1)}),
    "dla": Small("dla46x_c", 64),
    "dpn": Small("dpn48b", 64),
    "efficientnet": Small("test_efficientnet", 64),
    "efficientvim": Small("efficientvim_m1", 32),
    "fasternet": Small("fasternet_t0", 64),
    "focalnet": Small("py:timm.models.focalnet:FocalNet", 64, FOUR | {"embed_dim": 16}),
    "ghostnet": Small("ghostnet_050", 64),
    "hardcorenas": Small("hardcorenas_a", 64),
    "hgnet": Small("hgnetv2_b0", 64),
    "hrnet": Small("hrnet_w18_small", 64),
    "inception_next": Small("inception_next_atto", 64),
    "inception_resnet_v2": Small("inception_resnet_v2", 96),
    "inception_v3": Small("inception_v3", 96),
    "inception_v4": Small("inception_v4", 96),
    "lcnetv2": Small("lcnetv2_small", 64),
    "mambaout": Small("test_mambaout", 64),
    "mlp_mixer": Small(
        "py:timm.models.mlp_mixer:MlpMixer",
        32,
        {"img_size": 32, "patch_size": 8} | {"num_blocks": 2, "embed_dim": 32},
    ),
    "gmlp": Small("gmlp_ti16_224", 224),
    "mobilenetv3": Small("mobilenetv3_small_050", 64),
    "nasnet": Small("nasnetalarge", 64, {"stem_size": 16, "num_features": 192}),
    "nfnet": Small("test_nfnet", 64),
    "poolformer": Small(
        "py:timm.models.metaformer:MetaFormer", 64, FOUR | {"dims": (16, 16, 32, 32)}
    ),
    "pnasnet": Small("pnasnet5large", 96),
    "rdnet": Small("rdnet_tiny", 64),
    "regnet": Small("regnetx_002", 64),
    "repghost": Small("repghostnet_050", 64),
    "res2net": Small("res2net50_48w_2s", 64, {"layers": (1, 1, 1, 1)}),
    "resnest": Small("resnest14d", 64),
    "resnet": Small("test_resnet", 64),
    "resnetv2": Small("resnetv2_50", 64, {"layers": (1, 1, 1, 1)}),
    "rexnet": Small("rexnet_100", 64),
    "selecsls": Small("selecsls42", 64),
    "senet": Small("legacy_seresnet18", 64),
    "sequencer": Small(
        "sequencer2d_s", 64, {"layers": (1, 1, 1, 1), "embed_dims": (16, 16, 32, 32)}
    ),
    "sknet": Small("skresnet18", 64),
    "starnet": Small("starnet_s050", 64),
    "tresnet": Small("tresnet_m", 64, {"layers": (1, 1, 1, 1)}),
    "vgg": Small("py:timm.models.vgg:VGG", 32, {"cfg": (16, "M", 16, "M"), "mlp_ratio": 0.05}),
    "vovnet": Small("vovnet39a", 64),
    "xception": Small("legacy_xception", 64),
    "xception_aligned": Small("xception41", 64),
}
"""Families without attention: their Jacobian is measured, bounds are refused."""

TIMM: dict[str, Small] = ATTENTION | OTHERS
