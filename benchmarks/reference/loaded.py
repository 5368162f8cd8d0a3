"""Load a small model through lipaudit in both precisions, with weights that hide nothing."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.reference.timm_models import Small
from lipaudit.data.batch import Batch
from lipaudit.models.net import Net
from lipaudit.models.sources.loader import LoadOptions, load_net

NARROW, WIDE = "float32", "float64"
LENGTHS = (12, 12, 9)
"""Tokens of the samples of a text: two that are measured together, and one alone."""
SEED = 1

Loader = Callable[[str], Net]
"""From a dtype to the model."""


def timm_loader(small: Small) -> Loader:
    """Return what loads a model of timm, or a class of it by `py:`."""
    by_name = ":" not in small.name
    kwargs: dict[str, Any] = {"num_classes": 5} | small.kwargs
    kwargs |= {"pretrained": False} if by_name else {}

    def loader(dtype: Any) -> Net:
        size = None if small.side is None else (small.side,)
        options = LoadOptions(model_kwargs=kwargs, device="cpu", dtype=dtype, input_size=size)
        return load_net(f"timm:{small.name}" if by_name else small.name, options)

    return loader


def transformers_loader(config: dict[str, Any], folder: Path) -> Loader:
    """Return what loads a model of transformers from a directory with this config.json.

    Experts run one by one in double precision: their grouped products take no float64. Images
    are small also where the configuration does not say how large they are.
    """
    import transformers

    images = getattr(transformers, config["architectures"][0]).main_input_name == "pixel_values"
    sized = not {"image_size", "vision_config", "text_config"}.isdisjoint(config)
    size = (64,) if images and not sized else None

    def loader(dtype: Any) -> Net:
        eager = {"experts_implementation": "eager"} if dtype == WIDE else {}
        (folder / "config.json").write_text(json.dumps(config | eager))
        given: dict[str, Any] = {"model_kwargs": {"pretrained": False}, "input_size": size}
        return load_net(str(folder), LoadOptions(device="cpu", dtype=dtype, **given))

    return loader


def pairs(loader: Loader, gains: Sequence[float]) -> Iterator[tuple[Net, Net]]:
    """Yield the model in single and in double precision, with the same generic weights.

    It is loaded once; its weights are made anew for every gain.
    """
    narrow, wide = loader(NARROW), loader(WIDE)
    first = copy.deepcopy(narrow.module.state_dict())
    for gain in gains:
        narrow.module.load_state_dict(first)
        perturb(narrow.module, gain)
        _calibrate(narrow)
        wide.module.load_state_dict(narrow.module.state_dict())
        yield narrow, wide


def perturb(module: nn.Module, gain: float) -> None:
    """Replace every weight by a generic one: zeros, ones and tiny weights hide faults.

    Matrices get entries of about gain / sqrt(inputs), norms are spread about one, biases, position
    tables and gains near zero about zero; a running variance stays positive.
    """
    generator = torch.Generator().manual_seed(SEED)

    def noise(t: Tensor) -> Tensor:
        return torch.randn(t.shape, generator=generator, dtype=torch.float32).to(t.dtype)

    with torch.no_grad():
        tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
        for name, p in module.named_parameters():
            if p.is_floating_point():
                _perturb_one(name, p, noise(p), gain, table=id(p) in tables)
        for name, b in module.named_buffers():
            if name.endswith("running_mean"):
                b.add_(0.2 * noise(b))
            elif name.endswith("running_var"):
                b.mul_((0.3 * noise(b)).exp())


def _calibrate(net: Net) -> None:
    """Let batch norms see some images, so that activations neither vanish nor overflow."""
    norms = [m for m in net.module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if not norms or net.kind != "image":
        return
    generator = torch.Generator().manual_seed(SEED + 1)
    images = torch.rand(4, *net.input_shape, generator=generator)
    with torch.random.fork_rng(), torch.no_grad():
        for norm in norms:
            norm.train()
            norm.momentum = 0.8
        with suppress(ValueError):  # one value per channel: no statistics to take
            net.call(images, None)
        for norm in norms:
            norm.eval()


def _perturb_one(name: str, p: Tensor, noise: Tensor, gain: float, *, table: bool) -> None:
    last = name.rpartition(".")[2].lower()
    size = float(p.abs().mean())
    spread = float(p.std()) if p.numel() > 1 else 0.0
    if p.numel() == 1 or (p.ndim == 1 and size > 0.01):
        p.add_(0.2 * size * noise)  # gains, scales, temperatures
    elif p.ndim < 2 or min(p.shape) == 1 or (spread < 1e-6 and size < 0.01):
        p.add_(0.3 * gain * noise)  # biases, tables of zeros
    elif table or any(word in last for word in ("pos", "embed", "table", "token", "query")):
        p.copy_(0.7 * gain * noise)
    else:
        p.copy_(max(spread, gain * (p.numel() / p.shape[0]) ** -0.5) * noise)


def batch_for(net: Net) -> Batch:
    """Return two samples, or texts of different lengths."""
    generator = torch.Generator().manual_seed(SEED)
    if net.kind != "text":
        x = torch.rand(2, *net.input_shape, generator=generator)
        return Batch(x.to(net.dtype), None, ("0", "1"))
    most, ids = min(max(LENGTHS), *net.input_shape), tuple(map(str, range(len(LENGTHS))))
    lengths = torch.tensor(LENGTHS)[:, None].clamp_max(most)
    shape = len(LENGTHS), most
    x = torch.randint(5, max(6, (net.vocabulary or 50) - 10), shape, generator=generator)
    mask = torch.arange(most) < lengths
    if net.end_id is not None:  # a model that reads the state there wants it once, at the end
        x = x.where(x != net.end_id, net.end_id + 1).scatter(1, lengths - 1, net.end_id)
    return Batch(x.masked_fill(~mask, net.pad_id or 0), None, ids, mask)


def alone(batch: Batch, i: int) -> Batch:
    """Return one sample without its padding."""
    one = batch[i : i + 1]
    if one.mask is None:
        return one
    return Batch(one.x[:, one.mask[0]], None, one.ids)
