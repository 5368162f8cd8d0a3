"""Models of packages that nobody here wrote, beside timm and transformers: every number is true.

Run by hand, from the root, where the packages are installed (.ci/others makes such a place):
python -m benchmarks.reference.others [NAME...] [--write]

A NAME chooses the models whose names contain it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.reference.comparison import Outcome, compare
from benchmarks.reference.limits import OutOfTime, time_limit
from benchmarks.reference.page import fill
from lipaudit.models.net import LoadOptions, ModelSpec, Net
from lipaudit.models.sources.loader import assemble

SECONDS = 120
"""Of the processor that a model may take."""
WIDTH, TOKENS, CLASSES = 16, 16, 5
IMAGE, SEQUENCE = (3, 32, 32), (TOKENS, WIDTH)
PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"
HEADING = "## Models of other packages\n"
PACKAGES = {
    "vit_pytorch": "vit-pytorch",
    "x_transformers": "x-transformers",
    "local_attention": "local-attention",
    "torchvision": "torchvision",
    "open_clip": "open_clip_torch",
    "monai": "monai",
    "linformer": "linformer",
    "performer_pytorch": "performer-pytorch",
    "nystrom_attention": "nystrom-attention",
    "conformer": "conformer",
    "agent_attention_pytorch": "agent-attention-pytorch",
    "axial_attention": "axial-attention",
}
"""By the module that is imported, the package to install."""


class Pooled(nn.Module):
    """A module that returns tokens, with a mean and a head behind it."""

    def __init__(self, body: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        out = self.body(x)
        out = out[0] if isinstance(out, tuple) else out
        return self.head(out.flatten(1, -2).mean(1))


@dataclass(frozen=True)
class Other:
    """A model of a package.

    Attributes:
        package: the module to import.
        path: the class or function in it, `module:name`.
        given: its arguments.
        shape: of a sample.
        kind: of the samples.
        change: makes a model of logits out of what the class gives.
    """

    package: str
    path: str
    given: Mapping[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] = IMAGE
    kind: str = "image"
    change: Callable[[nn.Module], nn.Module] = lambda module: module

    def load(self, dtype: str) -> Net:
        """Return the model, with the same weights each time."""
        where, _, name = self.path.partition(":")
        make = getattr(importlib.import_module(where), name)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module = self.change(make(**self.given)).eval()
        spec = ModelSpec(module, self.shape, kind=self.kind)
        return assemble(spec, LoadOptions(dtype=dtype, device="cpu"), name="m", source="test")


def list_vits() -> dict[str, Other]:
    """Return models of vit-pytorch for images."""
    plain: dict[str, Any] = {"image_size": 32, "patch_size": 8, "num_classes": CLASSES}
    plain |= {"dim": WIDTH, "depth": 2, "heads": 2, "mlp_dim": 24, "dim_head": 8}
    small = {"num_classes": CLASSES, "dim": WIDTH, "dim_head": 8}
    known: dict[str, tuple[str, Mapping[str, Any]]] = {
        "vit": ("ViT", plain),
        "simple_vit": ("SimpleViT", plain),
        "simple_vit_with_qk_norm": ("SimpleViT", plain),
        "simple_vit_with_register_tokens": ("SimpleViT", plain),
        "simple_vit_with_fft": ("SimpleViT", plain | {"freq_patch_size": 8}),
        "simple_vit_with_value_residual": ("SimpleViT", plain),
        "simple_vit_with_sparse_gating": ("SimpleViTWithSparseGating", plain),
        "simple_vit_with_hyper_connections": ("SimpleViT", plain | {"num_residual_streams": 2}),
        "simple_vit_with_relative_proj_pos_bias": ("SimpleViT", plain),
        "simple_vit_with_patch_dropout": ("SimpleViT", plain),
        "simple_vit_with_specialized_cls": ("SimpleViT", plain),
        "vit_with_patch_merger": ("ViT", plain | {"depth": 4, "patch_merge_layer": 2}),
        "vit_with_patch_dropout": ("ViT", plain),
        "vit_with_decorr": ("ViT", plain),
        "vit_for_small_dataset": ("ViT", plain),
        "deepvit": ("DeepViT", plain),
        "cait": ("CaiT", plain | {"cls_depth": 1}),
        "parallel_vit": ("ViT", plain),
        "normalized_vit": ("nViT", plain),
        "learnable_memory_vit": ("ViT", plain),
        "cvt": ("CvT", {"num_classes": CLASSES}),
        "twins_svt": (
            "TwinsSVT",
            {
                "num_classes": CLASSES,
                "s1_emb_dim": 8,
                "s2_emb_dim": 8,
                "s3_emb_dim": 8,
                "s4_emb_dim": 8,
                "s1_local_patch_size": 4,
                "s2_local_patch_size": 2,
                "s3_local_patch_size": 2,
                "s4_local_patch_size": 1,
                "s2_patch_size": 1,
                "s3_patch_size": 1,
                "s4_patch_size": 1,
                "s3_depth": 1,
                "peg_kernel_size": 3,
            },
        ),
        "xcit": ("XCiT", plain | {"cls_depth": 1}),
        "max_vit": ("MaxViT", small | {"depth": (1,), "window_size": 4, "dim_conv_stem": 8}),
        "scalable_vit": (
            "ScalableViT",
            {
                "num_classes": CLASSES,
                "dim": 8,
                "heads": (1, 2),
                "depth": (1, 1),
                "ssa_dim_key": (8, 8),
                "reduction_factor": (2, 1),
                "window_size": (4, 2),
            },
        ),
        "rvt": ("RvT", plain),
        "vit_5": ("ViT", plain),
        "jumbo_vit": ("JumboViT", plain),
        "pit": ("PiT", plain | {"depth": (1, 1)}),
        "simple_flash_attn_vit": ("SimpleViT", plain),
        "levit": (
            "LeViT",
            {
                "image_size": 32,
                "num_classes": CLASSES,
                "dim": WIDTH,
                "depth": 1,
                "heads": 2,
                "mlp_mult": 1,
                "stages": 2,
                "dim_key": 8,
                "dim_value": 8,
            },
        ),
        "nest": (
            "NesT",
            {
                "image_size": 32,
                "patch_size": 4,
                "dim": 8,
                "heads": 2,
                "num_hierarchies": 2,
                "block_repeats": (1, 1),
                "num_classes": CLASSES,
            },
        ),
        "cct": (
            "CCT",
            {
                "img_size": 32,
                "embedding_dim": WIDTH,
                "num_layers": 2,
                "num_heads": 2,
                "mlp_ratio": 1,
                "num_classes": CLASSES,
            },
        ),
    }
    return {
        f"vit-pytorch {module}.{name}": Other("vit_pytorch", f"vit_pytorch.{module}:{name}", given)
        for module, (name, given) in known.items()
    }


def list_encoders() -> dict[str, Other]:
    """Return encoders of x-transformers with one option each."""
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "rotary": {"rotary_pos_emb": True},
        "alibi": {"alibi_pos_bias": True},
        "one key head": {"attn_one_kv_head": True},
        "two key heads": {"heads": 4, "attn_kv_heads": 2},
        "memory of keys": {"attn_num_mem_kv": 3},
        "zero key": {"attn_add_zero_kv": True},
        "talking heads": {"attn_pre_talking_heads": True},
        "norm of queries": {"attn_qk_norm": True},
        "gated values": {"attn_gate_values": True},
        "head scale": {"attn_head_scale": True},
        "soft cap": {"attn_softclamp_logits": True},
        "relative bias": {"rel_pos_bias": True},
        "sandwich norm": {"sandwich_norm": True},
        "sparse top-k": {"attn_sparse_topk": 4},
        "macaron": {"macaron": True},
        "residual attention": {"residual_attn": True},
        "sigmoid": {"attn_sigmoid": True},
        "flash": {"attn_flash": True},
        "value residual": {"add_value_residual": True},
    }
    base = {"dim": WIDTH, "depth": 2, "heads": 2, "attn_dim_head": 8}
    return {
        f"x-transformers Encoder, {what}": Other(
            "x_transformers", "x_transformers:Encoder", base | given, SEQUENCE, "tokens", Pooled
        )
        for what, given in options.items()
    }


def list_further() -> dict[str, Other]:
    """Return models of the other packages."""
    local: dict[str, Any] = {"dim": WIDTH, "window_size": 4, "dim_head": 8, "heads": 2}
    vision = {"image_size": 32, "num_classes": CLASSES}
    swin = {"patch_size": [4, 4], "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2]}
    swin |= {"window_size": [4, 4], "num_classes": CLASSES}
    tower = {"image_size": 32, "patch_size": 8, "width": 16, "layers": 2, "heads": 2}
    tower |= {"mlp_ratio": 2.0, "output_dim": CLASSES}
    block = "monai.networks.blocks.selfattention:SABlock"
    sequence: dict[str, Any] = {"shape": SEQUENCE, "kind": "tokens", "change": Pooled}
    return {
        "local-attention LocalMHA": Other(
            "local_attention", "local_attention.transformer:LocalMHA", local, **sequence
        ),
        "local-attention LocalMHA, causal": Other(
            "local_attention",
            "local_attention.transformer:LocalMHA",
            local | {"causal": True, "qk_rmsnorm": True},
            **sequence,
        ),
        "torchvision VisionTransformer": Other(
            "torchvision",
            "torchvision.models:VisionTransformer",
            vision
            | {"patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24},
        ),
        "torchvision MaxVit": Other(
            "torchvision",
            "torchvision.models.maxvit:MaxVit",
            {
                "input_size": (32, 32),
                "stem_channels": 8,
                "partition_size": 4,
                "block_channels": [8, 8],
                "block_layers": [1, 1],
                "head_dim": 4,
                "stochastic_depth_prob": 0.0,
                "num_classes": CLASSES,
            },
        ),
        "torchvision SwinTransformer": Other(
            "torchvision", "torchvision.models:SwinTransformer", swin
        ),
        "open_clip VisionTransformer": Other(
            "open_clip", "open_clip.transformer:VisionTransformer", tower
        ),
        "monai SABlock": Other("monai", block, {"hidden_size": WIDTH, "num_heads": 2}, **sequence),
        "monai SABlock, relative positions": Other(
            "monai",
            block,
            {
                "hidden_size": WIDTH,
                "num_heads": 2,
                "rel_pos_embedding": "decomposed",
                "input_size": (4, 4),
            },
            **sequence,
        ),
        "monai ViT": Other(
            "monai",
            "monai.networks.nets:ViT",
            {
                "in_channels": 3,
                "img_size": (32, 32),
                "patch_size": (8, 8),
                "hidden_size": WIDTH,
                "mlp_dim": 24,
                "num_layers": 2,
                "num_heads": 2,
                "spatial_dims": 2,
            },
            change=Pooled,
        ),
        "monai TransformerBlock": Other(
            "monai",
            "monai.networks.blocks.transformerblock:TransformerBlock",
            {"hidden_size": WIDTH, "mlp_dim": 24, "num_heads": 2},
            **sequence,
        ),
    }


def list_small_packages() -> dict[str, Other]:
    """Return models of packages that hold one kind of attention each."""
    small = {"dim": WIDTH, "depth": 2, "heads": 2, "dim_head": 8}
    known: dict[str, tuple[str, dict[str, Any]]] = {
        "linformer:Linformer": ("linformer", small | {"seq_len": TOKENS, "k": 8}),
        "performer_pytorch:Performer": ("performer-pytorch", small),
        "nystrom_attention:Nystromformer": ("nystrom-attention", small | {"num_landmarks": 4}),
        "conformer:ConformerBlock": (
            "conformer",
            {"dim": WIDTH, "dim_head": 8, "heads": 2, "ff_mult": 1, "conv_kernel_size": 3},
        ),
        "agent_attention_pytorch:AgentTransformer": (
            "agent-attention-pytorch",
            small | {"num_agent_tokens": 4},
        ),
        "axial_attention:AxialAttention": (
            "axial-attention",
            {"dim": WIDTH, "heads": 2, "dim_index": 2, "num_dimensions": 1},
        ),
    }
    others = {}
    for path, (package, given) in known.items():
        module, _, name = path.partition(":")
        others[f"{package} {name}"] = Other(module, path, given, SEQUENCE, "tokens", Pooled)
    return others


def list_others() -> dict[str, Other]:
    """Return every model by its name on the page."""
    return {**list_vits(), **list_encoders(), **list_further(), **list_small_packages()}


def find_outcome(name: str, other: Other) -> Outcome:
    """Compare one model, in its time."""
    try:
        other.load("float32")
    except Exception as error:  # of the package: another version has other arguments
        return Outcome(name, other.package, "unbuilt", [f"{type(error).__name__}: {error}"])
    try:
        with time_limit(SECONDS):
            return compare(name, other.package, other.load)
    except OutOfTime:
        return Outcome(name, other.package, "unfinished", [f"not finished in {SECONDS} s"])


def format_row(outcome: Outcome) -> str:
    """Return the row of a model in the table of the page."""
    reasons = {text.partition(": ")[2][:160].replace("|", "/") for text in outcome.reasons}
    reasons |= {f"no truth for {text[:120]}" for text in outcome.unchecked}
    known = "; ".join(sorted(reasons))
    shares = f"{outcome.closed} of {outcome.layers}"
    return f"| {outcome.name} | {outcome.outcome} | {shares} | {outcome.checked} | {known} |"


def is_complete(outcome: Outcome) -> bool:
    """Say whether every layer has a closed form, and every number was checked."""
    return outcome.outcome == "ok" and not outcome.reasons and not outcome.unchecked


def format_complete(outcomes: Sequence[Outcome]) -> str:
    """Return the list of models that are read completely."""
    complete = [outcome for outcome in outcomes if is_complete(outcome)]
    names = "; ".join(outcome.name for outcome in complete)
    checked = sum(outcome.checked for outcome in complete)
    return fill(f"**ok**, every layer has a closed form ({checked:,} numbers checked): {names}.")


def format_section(outcomes: Sequence[Outcome]) -> str:
    """Return the section of the page."""
    versions = [
        f"{package} {importlib.metadata.version(package)}" for package in PACKAGES.values()
    ]
    lines = [
        HEADING,
        "`.ci/others` installs these packages, runs `pytest -m others` and writes this section.",
        "",
        fill(f"{', '.join(versions)}."),
        "",
        format_complete(outcomes),
        "",
        "| model | outcome | layers with a closed form | numbers checked | reasons |",
        "|---|---|--:|--:|---|",
    ]
    lines += [format_row(outcome) for outcome in outcomes if not is_complete(outcome)]
    return "\n".join(lines) + "\n"


def choose_others(words: Sequence[str]) -> dict[str, Other]:
    """Return the models whose names contain one of the words; without words all."""
    known = list_others()
    if not words:
        return known
    return {name: other for name, other in known.items() if any(word in name for word in words)}


def main() -> None:
    """Print rows of models; --write writes the section of the page, for which all run."""
    warnings.filterwarnings("ignore")
    words = [word for word in sys.argv[1:] if word != "--write"]
    if words and "--write" in sys.argv:
        raise SystemExit("--write writes the whole table: leave the names out.")
    outcomes = []
    for name, other in choose_others(words).items():
        outcome = find_outcome(name, other)
        outcomes.append(outcome)
        print(format_row(outcome), flush=True)
    if "--write" in sys.argv:
        text = PAGE.read_text(encoding="utf-8").partition(HEADING)[0].rstrip()
        PAGE.write_text(f"{text}\n\n{format_section(outcomes)}", encoding="utf-8")


if __name__ == "__main__":
    main()
