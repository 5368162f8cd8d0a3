"""The measure `weights`: norms of heads, MLPs and normalisations, from the weights alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from lipaudit.errors import InputError, StructureError, of_machine
from lipaudit.measures import base
from lipaudit.measures.base import Measure, NormOptions, Part
from lipaudit.settings.option import Need, option, repeat_option
from lipaudit.tables import Column, Display, Layout, Note, Section
from lipaudit.tables.columns import HEAD

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lipaudit.data.batch import Batch
    from lipaudit.models.attention.capture import Layer, Site
    from lipaudit.models.attention.numeric import Residual
    from lipaudit.models.net import Net

# A row as plain values, by column.
Cells = dict[str, Any]


AT_SAMPLES = Need("--at-samples", lambda options: options.at_samples)
_of_norms = partial(repeat_option, NormOptions, need=AT_SAMPLES)


class WeightsOptions(NormOptions):
    """What the weights alone say, without data, in seconds: norms, ranks, gains, outliers.

    The figures are the same in every run: a gate rule on them needs no statistics.

    Examples:
      lipaudit weights demo
      lipaudit weights timm:vit_tiny_patch16_224
      lipaudit weights ./my-bert --at-samples --data reviews.csv -n 8
    """

    # One, which shows what the weights are used for.
    samples: ClassVar[int] = 1

    at_samples: bool = option(False, "Also compute the Jacobian norm of every block at samples.")
    tol: float = _of_norms("tol")
    within: float = _of_norms("within")

    @property
    def reads_samples(self) -> bool:
        """Say whether figures depend on the samples: the weights do not."""
        return self.at_samples


# Channels whose gain is this many standard deviations from the mean of their layer are outliers
# [Kovaleva et al. 2021].
OUTLIER = 3.0
# Number of outliers that a row names.
NAMED = 3
# Largest relative error of the gain of a normalisation in a trial, in float32.
TRIAL = 1e-3

_column = partial(Column, domain="the weights")
_norm_column = partial(_column, better="lower")
_rank_column = partial(
    _column, format=".1f", reading="||W||_F^2 / ||W||^2: about the number of large directions."
)

HEADS = Layout(
    name="weights",
    title="What do the weights of the heads say?",
    display=Display(
        about="W_QK decides how steep logits can be, W_OV how much a head can write.",
        columns=("head", "qk", "qk_rank", "ov", "ov_rank", "why"),
        by="ov",
        maps=("qk", "ov"),
        folded=False,
    ),
    fixed={
        **HEAD,
        "qk": _norm_column("||W_QK||", "Spectral norm of s W_Q W_K^T, s the scale of the logits."),
        "qk_rank": _rank_column("rank QK", "Stable rank of W_QK."),
        "ov": _norm_column("||W_OV||", "Spectral norm of W_V W_O."),
        "ov_rank": _rank_column("rank OV", "Stable rank of W_OV."),
        "why": Column.text("why not", "Why the weights cannot be attributed to the head."),
    },
)

BLOCKS = Layout(
    name="weights.blocks",
    title="What do the norms of the weights multiply to?",
    display=Display(about="This product of norms is no bound of the model: see the notes."),
    fixed={
        "module": Column.text("block", "Block, or all blocks together.", needed=True),
        "ov_sum": _norm_column("sum ||W_OV||", "Sum of ||W_OV|| over the heads of the block."),
        "mlp": _norm_column("MLP", "Product of the norms of the block's other linear layers."),
        "log10_product": _norm_column(
            "log10 product", "log10 of (1 + sum ||W_OV||) (1 + MLP); of all blocks: the sum."
        ),
        "log10_data": Column("log10 at X", "log10 of the block's ||J||, median.", better="lower"),
    },
)

MAPS = Layout(
    name="weights.maps",
    title="How large are the other linear maps?",
    display=Display(about="Linear layers that no head accounts for, mostly MLPs.", by="norm"),
    fixed={
        "module": Column.text("module", "Linear layer.", needed=True),
        "norm": _norm_column("||W||", "Spectral norm."),
        "rank": _rank_column("rank", "Stable rank."),
        "condition": _column("condition", "Largest over smallest singular value, if not 0."),
    },
)

GAINS = Layout(
    name="weights.gains",
    title="Which channels do normalisations amplify?",
    display=Display(about=f"Outliers: gains {OUTLIER:g} standard deviations off.", by="gain"),
    fixed={
        "module": Column.text(
            "module", "LayerNorm or RMSNorm; without a gain if it is a variant.", needed=True
        ),
        "gain": _norm_column("gain", "Largest absolute gain of a channel."),
        "outliers": Column.count("outliers", "Number of outlier channels [Kovaleva et al. 2021]."),
        "channels": Column.text("channels", "The farthest outliers, with their gains."),
    },
)
TABLES = (HEADS, BLOCKS, MAPS, GAINS)


def measure(net: Net, batches: Iterable[Batch], options: WeightsOptions) -> Iterator[Part]:
    """Yield the rows as facts of the first part; with `at_samples`, norms of blocks of each."""
    import torch

    from lipaudit.data.batch import find_first
    from lipaudit.models.attention.numeric import compute_residual_norms, find_residuals
    from lipaudit.models.attention.survey import find_layers

    for number, batch in enumerate(batches):
        facts, notes, values = dict[str, Any](), tuple[Note, ...](), {}
        if not number:
            first = find_first(batches, batch)[:1].trim()
            sites = find_layers(net, first)
            around = find_residuals(net, first, sites, entire=True)
            blocks = tuple(dict.fromkeys(filter(None, around)))
            mixed = options.at_samples and not all(block.by_sample for block in blocks)
            if mixed:
                raise InputError(
                    f"--at-samples: blocks of {net.architecture} have no row per sample",
                    "Leave out --at-samples.",
                )
            facts, notes = _read_tables(net, first, sites, around)
        if options.at_samples and blocks:
            seeds = [base.seed_of(i, options.seed) for i in batch.ids]
            each = compute_residual_norms(net, batch, blocks, seeds=seeds, **options.accuracy)
            values = {"blocks": torch.stack([norm.norm for _, norm in each], 1).numpy()}
        yield Part(batch.ids, values, facts, notes)


def _read_tables(
    net: Net, sample: Batch, sites: Sequence[Site], around: Sequence[Residual | None]
) -> tuple[dict[str, list[Cells]], tuple[Note, ...]]:
    """Return the rows of every table by its name, and notes."""
    import torch

    from lipaudit.models.attention.capture import capture

    # A bound of x + f(x) needs one of f on all inputs: Kim et al. 2021 show that there is none.
    text = "the product of the weights' norms is no bound: attention has no Lipschitz constant"
    notes = [Note.info("weights-only", "only figures at X depend on the samples")]
    notes.append(Note.info("no-bound", text))
    if any("rotation" in site.kinds[:2] for site in sites):
        notes.append(Note.info("rotary", "||W_QK|| is that of tokens at one rotary position"))
    heads = [row for rows in capture(net, sites, sample, _read_heads) for row in rows]
    maps, gains, used = list[Cells](), list[Cells](), {*_list_used(sites)}
    # A head over the vocabulary is no map of a block, and takes minutes.
    output = getattr(net.module, "get_output_embeddings", lambda: None)()
    for name, part in net.module.named_modules():
        weight, kind = getattr(part, "weight", None), type(part).__name__.lower()
        if not isinstance(weight, torch.Tensor) or "embedding" in kind or part is output:
            continue
        if "layernorm" in kind or "rmsnorm" in kind:
            gains.append({"module": name, **_read_gains(part, weight.detach())})
        elif weight.ndim == 2 and not {name, weight.data_ptr()} & used:
            maps.append({"module": name, **_read_map(weight.detach().double())})
    blocks = list[Cells]()
    for block in dict.fromkeys(filter(None, around)):
        inside = [m["norm"] for m in maps if m["module"].startswith(f"{block.module}.")]
        inner = [head for head in heads if around[head["layer"]] == block]
        row: Cells = {"module": block.module, "mlp": math.prod(inside) if inside else None}
        if all("ov" in head for head in inner):
            row["ov_sum"] = math.fsum(head["ov"] for head in inner)
            row["log10_product"] = math.log10((1 + row["ov_sum"]) * (1 + (row["mlp"] or 0.0)))
        blocks.append(row)
    rows = (heads, blocks, maps, gains)
    return dict(zip((table.name for table in TABLES), rows, strict=True)), tuple(notes)


def _read_heads(layer: Layer) -> list[Cells]:
    """Return a row per head of a layer: norms and stable ranks of W_QK and W_OV."""
    import torch

    from lipaudit.theory.spectral import product_values

    site, why = layer.site, layer.site.reason
    products: dict[str, tuple[Tensor, ...]] = {}
    try:
        heads = None if why else layer.heads()
    except StructureError as error:  # the sample differs from the survey
        heads, why = None, error.reason
    if heads is not None:
        q, k, v = heads.to_q, heads.to_k, heads.to_v
        # A rotation is the identity at equal positions; a norm of queries is no linear map.
        if q and k and {q.kind, k.kind} <= {"affine", "rotation"}:
            products["qk"] = q.weight, k.weight, heads.scale[0].abs()
        if v and v.kind == "affine" and heads.out is not None:
            products["ov"] = v.weight, heads.out.mT, torch.ones(1)
        without = {"qk": "queries or keys are not linear", "ov": "has no linear W_V W_O"}
        why = "; ".join(text for name, text in without.items() if name not in products)
    row = {"layer": site.index, "module": site.module, "why": why}
    rows: list[Cells] = [{**row, "head": head} for head in range(site.heads)]
    for name, factors in products.items():
        a, b, scale = (t.double().cpu() for t in factors)
        values = scale[:, None] * product_values(a, b)
        for row, own in zip(rows, values, strict=True):
            row[name], row[f"{name}_rank"] = _reduce(own)
    return rows


def _list_used(sites: Sequence[Site]) -> Iterator[str | int]:
    """Yield the modules, or the addresses of the weights, that rows of heads account for."""
    from lipaudit.models.precision import Kept

    for structure in (site.structure for site in sites if site.structure is not None):
        for form in filter(None, (structure.q, structure.k, structure.v)):
            yield from (address.module for address in form.source)
        if structure.out is not None:
            kept = structure.out.kept
            yield (kept.stored if isinstance(kept, Kept) else kept).data_ptr()


def _read_map(weight: Tensor) -> Cells:
    """Return the norm, the stable rank and the condition number of a linear map."""
    import torch

    from lipaudit.theory.spectral import product_values

    values = product_values(weight if weight.shape[0] >= weight.shape[1] else weight.mT)
    norm, rank = _reduce(values)
    least = float(values[-1])
    # Singular values below this are rounding: the matrix may be singular.
    noise = max(weight.shape) * torch.finfo(weight.dtype).eps * norm
    return {"norm": norm, "rank": rank, "condition": norm / least if least > noise else None}


def _reduce(values: Tensor) -> tuple[float, float | None]:
    """Return the norm and the stable rank of a matrix by its singular values."""
    norm = float(values[0])
    return norm, float((values / norm).square().sum()) if norm else None


def _read_gains(part: nn.Module, weight: Tensor) -> Cells:
    """Return the largest gain and the outliers of a normalisation; nothing if it is another map.

    The gains are its weight, or 1 + weight (Gemma): a trial shows which. At a large row of mean 0
    a LayerNorm and an RMSNorm divide alike: the odd part of the output is the gains times the row
    at size 1.
    """
    import torch

    x = torch.randn(1, 1, len(weight), generator=torch.Generator().manual_seed(0)).double()
    x = torch.nn.functional.layer_norm(x, x.shape[2:]).to(weight)
    try:
        with torch.no_grad():
            odd = (part(1e3 * x) - part(-1e3 * x)) / 2
    except (RuntimeError, TypeError, ValueError) as error:  # it takes other inputs
        if of_machine(error):
            raise
        return {}
    for gain in (weight, 1 + weight) if odd.shape == x.shape else ():
        if (odd - gain * x).abs().amax() <= TRIAL * odd.abs().amax():
            wide = gain.double().cpu()
            away = (wide - wide.mean()).abs()
            far = int((away > OUTLIER * wide.std(correction=0)).sum())
            order = away.argsort(descending=True, stable=True)[: min(NAMED, far)].tolist()
            channels = ", ".join(f"{channel}: {float(wide[channel]):.3g}" for channel in order)
            return {"gain": float(wide.abs().amax()), "outliers": far, "channels": channels}
    return {}


def summarise(parts: Sequence[Part], options: WeightsOptions) -> list[Section]:
    """Make the section of the heads, and one of each other table with rows."""
    import numpy as np

    facts = next(part.facts for part in parts if part.facts)
    tables: dict[str, list[Cells]] = {name: [*map(dict, rows)] for name, rows in facts.items()}
    blocks = tables[BLOCKS.name]
    whole: Cells = {"module": "all blocks"}
    if blocks and all("log10_product" in row for row in blocks):
        whole["log10_product"] = math.fsum(row["log10_product"] for row in blocks)
    if blocks and options.at_samples:
        logs = np.log10(base.join_parts(parts, "blocks"))[base.mark_unique(parts)]
        logs = np.column_stack([logs, logs.sum(1)])
        for row, median in zip((*blocks, whole), np.median(logs, 0).tolist(), strict=True):
            row["log10_data"] = median
    blocks += [whole] if len(blocks) > 1 else []
    about = {"settings": options.model_dump(), "notes": base.notes(parts)}
    sections = ((table, tuple(table.row(**row) for row in tables[table.name])) for table in TABLES)
    return [t.section(rows=rows, **(about if t is HEADS else {})) for t, rows in sections if rows]


WEIGHTS = Measure("weights", TABLES, WeightsOptions, measure, summarise, batch=1)
