"""The measure `weights`: norms of heads, MLPs and normalisations, from the weights alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from lipaudit.errors import InputError, StructureError, is_machine_error
from lipaudit.measures import base
from lipaudit.measures.base import Facts, Measure, NormOptions, Part
from lipaudit.settings.option import Need, option, repeat_option
from lipaudit.tables import Column, Display, Layout, Note, Notes, Section
from lipaudit.tables.columns import HEAD

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lipaudit.data.batch import Batch
    from lipaudit.models.attention.capture import Layer, Site
    from lipaudit.models.attention.numeric import Residual
    from lipaudit.models.net import Net
    from lipaudit.theory.heads import Heads, Projection

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
        titles={
            "qk": "How steep the logits of each head can be (norm of W_QK)",
            "ov": "How much each head can write (norm of W_OV)",
        },
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
    """Yield parts: the first has the rows of all tables as facts, since weights need no samples.

    With `at_samples`, every part also has the Jacobian norm of each residual block at its samples.
    """
    import torch

    from lipaudit.data.batch import get_first_of_run
    from lipaudit.models.attention.numeric import compute_residual_norms, find_residuals
    from lipaudit.models.attention.survey import find_layers

    blocks: tuple[Residual, ...] = ()
    for number, batch in enumerate(batches):
        facts: Facts = {}
        notes: Notes = ()
        values = {}
        if number == 0:
            # A run on one sample shows which weights the heads use: the first of the whole run,
            # which may be in the batch of another process.
            first = get_first_of_run(batches, batch)[:1].trim()
            sites = find_layers(net, first)
            # The whole residual block (attention and MLP) around each layer, None if it has none.
            # Layers may share a block: `blocks` has each block once.
            around = find_residuals(net, first, sites, entire=True)
            blocks = tuple(dict.fromkeys(filter(None, around)))
            if options.at_samples:
                _require_rows(net, blocks)
            facts, notes = _read_tables(net, first, sites, around)
        if options.at_samples and blocks:
            seeds = options.list_seeds(batch.ids)
            pairs = compute_residual_norms(net, batch, blocks, seeds=seeds, **options.accuracy)
            # (samples, blocks).
            values["blocks"] = torch.stack([norms.norm for _, norms in pairs], 1).numpy()
        yield Part(batch.ids, values, facts, notes)


def _require_rows(net: Net, blocks: Iterable[Residual]) -> None:
    """Refuse --at-samples if the input or output of a block has a row per token or window.

    Norms at each sample need blocks with a row per sample (`by_sample`).
    """
    if not all(block.by_sample for block in blocks):
        raise InputError(
            f"--at-samples: blocks of {net.architecture} have no row per sample",
            "Leave out --at-samples.",
        )


def _read_tables(
    net: Net, sample: Batch, sites: Sequence[Site], around: Sequence[Residual | None]
) -> tuple[dict[str, list[Cells]], Notes]:
    """Return the rows of every table by its name, and notes.

    Args:
        net: the model.
        sample: one sample: the model runs once, to find the weights that each head uses.
        sites: the attention layers.
        around: the residual block of each layer; None if it has none.
    """
    from lipaudit.models.attention.capture import capture

    notes = [Note.info("weights-only", "only figures at X depend on the samples")]
    # A bound of a block x + f(x) needs a Lipschitz constant of f on all inputs. Kim et al. 2021
    # show that attention has none.
    text = "the product of the weights' norms is no bound: attention has no Lipschitz constant"
    notes.append(Note.info("no-bound", text))
    if any("rotation" in site.kinds[:2] for site in sites):  # queries or keys are rotated
        notes.append(Note.info("rotary", "||W_QK|| is that of tokens at one rotary position"))
    heads = []
    for rows in capture(net, sites, sample, _read_heads):
        heads += rows
    maps, gains = _read_modules(net, set(_list_weights(sites)))
    tables = {HEADS.name: heads, BLOCKS.name: [], MAPS.name: maps, GAINS.name: gains}
    for block in dict.fromkeys(filter(None, around)):
        inside = [head for head in heads if around[head["layer"]] == block]
        row = _multiply_norms(block.module, inside, maps)
        tables[BLOCKS.name].append(row)
    return tables, tuple(notes)


def _read_modules(net: Net, used: set[str | int]) -> tuple[list[Cells], list[Cells]]:
    """Return two tables: the linear maps that are part of no head, and the normalisations.

    Args:
        net: the model.
        used: linear maps that are part of a head (W_Q, W_K, W_V, W_O), by the name of the module
            or the memory address of the weight.
    """
    import torch

    maps = []
    gains = []
    # The output layer over the vocabulary is left out: it belongs to no block, and its singular
    # values take minutes. Models of transformers have this method.
    output = getattr(net.module, "get_output_embeddings", lambda: None)()
    for name, part in net.module.named_modules():
        weight = getattr(part, "weight", None)
        kind = type(part).__name__.lower()
        if not isinstance(weight, torch.Tensor) or "embedding" in kind or part is output:
            continue
        if "layernorm" in kind or "rmsnorm" in kind:
            gain = _read_gains(part, weight.detach())
            gains.append({"module": name, **gain})
        elif weight.ndim == 2 and name not in used and weight.data_ptr() not in used:
            figures = _read_map(weight.detach().double())
            maps.append({"module": name, **figures})
    return maps, gains


def _multiply_norms(block: str, heads: Sequence[Cells], maps: Sequence[Cells]) -> Cells:
    """Return the row of a block: log10 of (1 + sum ||W_OV||) (1 + MLP).

    MLP is the product of the norms of the block's linear maps outside of heads, 0 if there are
    none. Each 1 is a skip connection. If some head has no linear W_OV, the row has no product.

    Args:
        block: path of the block.
        heads: rows of the heads in it.
        maps: rows of all linear maps of the model outside of heads.
    """
    row: Cells = {"module": block, "mlp": None}
    prefix = f"{block}." if block else ""  # "": the model itself is the block
    norms = [linear["norm"] for linear in maps if linear["module"].startswith(prefix)]
    if norms:
        row["mlp"] = math.prod(norms)
    if all("ov" in head for head in heads):
        ov_sum = math.fsum(head["ov"] for head in heads)
        mlp = row["mlp"] or 0.0
        row["ov_sum"] = ov_sum
        row["log10_product"] = math.log10((1 + ov_sum) * (1 + mlp))
    return row


def _read_heads(layer: Layer) -> list[Cells]:
    """Return a row per head of a layer: norms and stable ranks of W_QK and W_OV.

    The cell `why` says why a product is missing, and is empty if none is.
    """
    from lipaudit.theory.matrix_norms import product_values

    site = layer.site
    products, why = _read_products(layer)
    cells = {"layer": site.index, "module": site.module, "why": why}
    rows = [{**cells, "head": head} for head in range(site.heads)]
    for name, product in products.items():
        # (heads, rank): the singular values.
        values = product_values(product.left.double().cpu(), product.right.double().cpu())
        values = product.scale.double().cpu()[:, None] * values
        for row, of_head in zip(rows, values, strict=True):
            row[name], row[f"{name}_rank"] = _compute_norm_and_rank(of_head)
    return rows


def _read_products(layer: Layer) -> tuple[dict[str, Product], str]:
    """Return W_QK (`qk`) and W_OV (`ov`) of a layer, and why one is missing; "" if none is."""
    if layer.site.reason:
        return {}, layer.site.reason
    try:
        heads = layer.heads()
    except StructureError as error:  # the sample differs from the survey
        return {}, error.reason
    products = _find_products(heads)
    reasons = []
    if "qk" not in products:
        curved = _has_curved_logits(heads)
        reasons.append(f"{'logits' if curved else 'queries or keys'} are not linear")
    if "ov" not in products:
        reasons.append("has no linear W_V W_O")
    return products, "; ".join(reasons)


class Product(NamedTuple):
    """A matrix of each head: scale * left @ right^T.

    Attributes:
        left: (heads, D, d).
        right: (heads, D', d).
        scale: (heads,) or (1,).
    """

    left: Tensor
    right: Tensor
    scale: Tensor


def _find_products(heads: Heads) -> dict[str, Product]:
    """Return |s| W_Q W_K^T (`qk`, with the scale s of the logits) and W_V W_O (`ov`) of each head.

    A product is missing if its factors are not linear maps of the input. Only singular values of
    the products are used, and these do not depend on the sign of s.
    """
    import torch

    products = {}
    # A `Product` is scale * left @ right^T. First, how q, k and v depend on the input: weights,
    # (heads, D, d), and the kind of map.
    q = heads.to_q
    k = heads.to_k
    v = heads.to_v
    # Rotary embeddings cancel in q k^T between tokens at equal positions, except for a factor.
    # Other kinds, such as a normalisation of the queries, are no linear map.
    if q and k and {q.kind, k.kind} <= {"affine", "rotation"} and not _has_curved_logits(heads):
        # The scale is (1 or samples, 1 or heads): the model ran on one sample.
        scale = heads.scale[0].abs() * _read_factor(q) * _read_factor(k)
        products["qk"] = Product(q.weight, k.weight, scale)
    if v and v.kind == "affine" and heads.out is not None:  # W_O is (heads, d, D)
        products["ov"] = Product(v.weight, heads.out.mT, torch.ones(1))
    return products


def _has_curved_logits(heads: Heads) -> bool:
    """Say whether the logits are another function of q k^T than s q k^T + B, such as a soft cap.

    The slope of such logits differs from sample to sample: it is no scale s of the weights.
    """
    return heads.pairs is not None and heads.pairs.slope is not None


def _read_factor(projection: Projection) -> float:
    """Return the factor c that a rotation of queries or keys also multiplies them by; mostly 1.

    A rotation is a matrix G_i of each position i with G_i G_i^T = c^2 I. c is not 1 if the model
    scales rotated queries before the product, or as in YaRN.
    """
    if projection.local is None:  # affine: any factor is in W
        return 1.0
    lengths = projection.local.double().square().sum(-1)  # c^2, of each row of each G_i
    return math.sqrt(lengths.mean())


def _list_weights(sites: Sequence[Site]) -> Iterator[str | int]:
    """Yield the linear maps that are part of a head: W_Q, W_K and W_V by module, W_O by address.

    The address is where the weight is in memory: weights of W_O have no module path here.
    """
    from lipaudit.models.precision import WeightReference

    for site in sites:
        structure = site.structure
        if structure is None:
            continue
        for form in (structure.q, structure.k, structure.v):
            if form is not None:  # `source`: the linear maps that compute q, k or v
                yield from (address.module for address in form.source)
        if structure.out is not None:
            weight = structure.out.reference
            if isinstance(weight, WeightReference):  # weights stored in another precision
                weight = weight.stored
            yield weight.data_ptr()


def _read_map(weight: Tensor) -> Cells:
    """Return the norm, the stable rank and the condition number of a linear map."""
    import torch

    from lipaudit.theory.matrix_norms import product_values

    rows, columns = weight.shape
    tall = weight if rows >= columns else weight.mT  # the transpose has the same singular values
    values = product_values(tall)  # singular values, largest first
    norm, rank = _compute_norm_and_rank(values)
    smallest = float(values[-1])
    # Singular values below this are rounding: the matrix may be singular.
    noise = max(rows, columns) * torch.finfo(weight.dtype).eps * norm
    condition = None
    if smallest > noise:
        condition = norm / smallest
    return {"norm": norm, "rank": rank, "condition": condition}


def _compute_norm_and_rank(values: Tensor) -> tuple[float, float | None]:
    """Return the spectral norm ||W|| and the stable rank ||W||_F^2 / ||W||^2 of a matrix W.

    The matrix 0 has no stable rank.

    Args:
        values: the singular values of W, largest first.
    """
    norm = float(values[0])
    if norm == 0.0:
        return norm, None
    # Divided first, so that no square overflows.
    squares = (values / norm).square()
    return norm, float(squares.sum())


def _read_gains(part: nn.Module, weight: Tensor) -> Cells:
    """Return the largest gain and the outlier channels of a normalisation.

    No cells if the module is a variant whose gain is unknown.
    """
    gain = _find_gain(part, weight)
    if gain is None:
        return {}
    gain = gain.double().cpu()
    deviation = (gain - gain.mean()).abs()
    outliers = int((deviation > OUTLIER * gain.std(correction=0)).sum())
    farthest = deviation.argsort(descending=True, stable=True)
    shown = farthest[: min(NAMED, outliers)].tolist()
    channels = ", ".join(f"{channel}: {float(gain[channel]):.3g}" for channel in shown)
    return {"gain": float(gain.abs().amax()), "outliers": outliers, "channels": channels}


def _find_gain(part: nn.Module, weight: Tensor) -> Tensor | None:
    """Return the gain of each channel of a normalisation; None if the module is no such map.

    The gains are the module's weight, or 1 + weight (Gemma). A run on a random row x decides. Let
    x have mean 0 and variance 1. LayerNorm and RMSNorm f then map c x to gain * x + bias, for any
    large c. The bias cancels in (f(c x) - f(-c x)) / 2, the odd part of f.
    """
    import torch

    x = torch.randn(1, 1, len(weight), generator=torch.Generator().manual_seed(0)).double()
    x = torch.nn.functional.layer_norm(x, x.shape[2:]).to(weight)
    try:
        with torch.no_grad():
            # The factor is so large that the epsilon of the normalisation does not matter.
            odd = (part(1e3 * x) - part(-1e3 * x)) / 2
    except (RuntimeError, TypeError, ValueError) as error:  # it takes other inputs
        if is_machine_error(error):
            raise
        return None
    if odd.shape != x.shape:
        return None
    for gain in (weight, 1 + weight):
        difference = (odd - gain * x).abs().amax()
        if difference <= TRIAL * odd.abs().amax():
            return gain
    return None


def summarise(parts: Sequence[Part], options: WeightsOptions) -> list[Section]:
    """Make a section of each table that has rows: heads, blocks, linear maps, normalisations.

    The rows are facts of the first part. Here the table of blocks gets a last row, all blocks
    together, and with `at_samples` the Jacobian norms of blocks (medians over the samples).
    """
    import numpy as np

    facts = next(part.facts for part in parts if part.facts)  # the first part has all rows
    blocks: list[Cells] = [dict(row) for row in facts[BLOCKS.name]]
    # The product of the norms of all blocks is a sum of logarithms.
    all_blocks: Cells = {"module": "all blocks"}
    if all("log10_product" in row for row in blocks):
        all_blocks["log10_product"] = math.fsum(row["log10_product"] for row in blocks)
    if blocks and options.at_samples:
        norms = base.join_parts(parts, "blocks")[base.mark_unique(parts)]  # (samples, blocks)
        with np.errstate(divide="ignore"):  # log10(0) is -inf, for a constant block
            logs = np.log10(norms)
        for row, of_block in zip(blocks, logs.T, strict=True):
            row["log10_data"] = float(np.median(of_block))
        all_blocks["log10_data"] = float(np.median(logs.sum(1)))
    if len(blocks) > 1:
        blocks.append(all_blocks)
    cells = {**facts, BLOCKS.name: blocks}
    # Only the first section has the settings and the notes.
    notes = [*base.notes(parts)]
    if options.at_samples:  # only these figures depend on the samples
        notes += base.note_repeats(parts)
    settings_and_notes = {"settings": options.model_dump(), "notes": notes}
    sections = []
    for table in TABLES:
        rows = tuple(table.row(**row) for row in cells[table.name])
        if rows:
            sections.append(table.section(rows=rows, **settings_and_notes))
        settings_and_notes = {}
    return sections


WEIGHTS = Measure("weights", TABLES, WeightsOptions, measure, summarise, batch=1, place=49)
