"""The measure `jacobian`: the exact norm of the whole model's Jacobian, sample by sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator

from lipaudit.errors import InputError, UsageError, few
from lipaudit.measures import base
from lipaudit.measures.base import AuditRole, Measure, NormOptions, Part, Values
from lipaudit.measures.shares import (
    HEADS_TABLE,
    PATHS_TABLE,
    UNSHARED,
    measure_shares,
    summarise_shares,
)
from lipaudit.settings.option import Need, needs, option
from lipaudit.tables import Column, Display, Layout, Note, Report, Row, Section
from lipaudit.tables.columns import (
    CONVERGED,
    NORM,
    STOPPED,
    UPPER,
    WITHIN_COLUMN,
    finite,
    median_limits,
    order,
)
from lipaudit.tables.formats import (
    describe_places,
    format_significant,
    format_value,
    name_sample,
)
from lipaudit.tables.summary import Headline, declare_clean
from lipaudit.tables.trials import ENDS, STARTS, Target, find_layer, parse_start

if TYPE_CHECKING:
    from torch import Tensor

    from lipaudit.data.batch import Batch
    from lipaudit.models.attention.numeric import Residual
    from lipaudit.models.linearize import Linearization
    from lipaudit.models.model_norms import JacobianNorms
    from lipaudit.models.net import Net


# Ends of a Jacobian in the typed form: two spellings are one setting.
StartPoint = Annotated[str, AfterValidator(parse_start)]
EndPoint = Annotated[str, AfterValidator(lambda text: Target.parse(text).text)]


# A radius needs classes to compare.
OF_CLASSES = Need(
    "--to logits", lambda options: Target.parse(options.target or "logits").what == "logits"
)


class JacobianOptions(NormOptions):
    """The exact norm of the whole model's Jacobian, sample by sample.

    With class scores also, per sample, the margin and the first-order radius: indicative at a
    point, never a certificate.

    Examples:
      lipaudit jacobian demo
      lipaudit jacobian demo --per-layer
      lipaudit jacobian demo --shares
      lipaudit jacobian demo --from layers
      lipaudit jacobian timm:vit_tiny_patch16_224 --data photos/ --from embeddings
      lipaudit jacobian ./my-bert --data reviews.csv --to features
      lipaudit jacobian ./qwen --data book.txt --to loss
    """

    samples: ClassVar[int] = 64
    scores = "asked"

    start: StartPoint | None = option(
        None,
        "Input of the Jacobian: pixels or embeddings (for text: embeddings), or the residual "
        "stream after the block of an attention layer: layer:5. layers: the usual input, and "
        "every layer.",
        "--from",
        values=lambda: STARTS,
    )
    target: EndPoint | None = option(
        None,
        "Output of the Jacobian: logits, probabilities, loss, hidden, features or tokens. At "
        "a text position: logits:5.",
        "--to",
        values=lambda: ENDS,
    )
    norm: Literal["2", "inf"] = option(
        "2", "Norm of the Jacobian: 2 (spectral) or inf (largest L1 row norm)."
    )
    shares: bool = option(
        False,
        "Also measure which heads, layers and blocks carry the most sensitive direction.",
        need=needs("norm", "2"),
    )
    direction: Literal["norm", "margin"] | None = option(
        None,
        "Direction of the shares: of the largest change of the output (norm), or of the lead of "
        "the class over the next one (margin).",
        usual="norm",
        need=Need("--shares", lambda options: options.shares),
        rare=True,
    )
    rivals: int = option(
        16,
        "Largest number of other classes to consider for the first-order radius.",
        need=OF_CLASSES,
        ge=1,
        rare=True,
    )
    per_layer: bool = option(
        False,
        "Also compute the norm of every block, from its input to its output.",
        need=needs("norm", "2"),
    )


# Smallest number of samples for which the scorecard has the 95th percentile.
FEWEST = 20


def read_norm(headline: Headline, section: Section, report: Report) -> Iterator[Row]:
    """Yield the median norm of the model, with the largest one and its sample in the text."""
    rows = [row for row in section.rows if not row.module]
    if not rows or not finite((rows[0].median, rows[0].max)):
        return
    row = rows[0]
    column = section.columns["median"]
    text = f"{row.from_} to {row.to}"
    if row.norm != "2":
        text += f", norm {row.norm}"
    text += f", {row.samples} samples; "
    if row.samples >= FEWEST:
        text += f"p95 {format_value(row.p95, column)}, "
    text += f"largest {format_value(row.max, column)}"
    norms = dict(zip(section.ids, section.samples.get("norm", ()), strict=False))
    known = [sample for sample, norm in norms.items() if finite([norm])]
    if known:
        steepest = max(known, key=lambda sample: order(norms[sample]))
        text += f" (sample {name_sample(steepest, describe_places(report))})"
    low, high = median_limits(norms.values()) or (None, None)
    sentence = ""
    if row.median is not None:
        layer = find_layer(row.from_)
        what = "the input"
        if layer is not None:
            what = f"the residual stream after layer {layer}"
        grown = format_significant(row.median)
        sentence = f"A small change of {what} grows at most {grown} times (median sample)."
    cells = {"samples": row.samples, "low": low, "high": high, "sentence": sentence}
    yield headline.row(section, row.median, column, text=text, **cells)


JACOBIAN_TABLE = Layout(
    name="jacobian",
    title="How sensitive is the whole model?",
    headlines=(
        declare_clean(11, "jacobian.correct >= -2pp"),
        Headline(
            name="first_order_radius",
            column="radius_first_order",
            words="first-order radius",
            place=50,
            rule="jacobian.radius_first_order:median >= -10%",
            labelled=True,
        ),
        Headline(
            name="jacobian_norm",
            column="norm",
            label="model sensitivity, median ‖J‖",
            words="Jacobian norm",
            meaning="||J||: how much a small change of a sample can grow in the output.",
            place=51,
            read=read_norm,
            rule="jacobian.norm:median <= +10%",
            ranks=True,
        ),
    ),
    display=Display(
        about="Jacobian norm ‖J‖: by how much a small change of a sample can grow in the model's "
        "output, in the worst direction.",
        columns=(
            *("from", "to", "module", "norm", "mean", "median", "p95", "max"),
            *("within", "samples", "converged"),
        ),
        drawings=("depth",),
        histograms=("norm",),
        titles={"norm": "How sensitive the samples are (norm ‖J‖)"},
        worst=("norm", "loss", "margin", "radius_first_order"),
        folded=False,
    ),
    sample_columns={
        "norm": Column("||J||", "Norm of the sample's Jacobian.", better="lower", reading=NORM),
        "loss": Column(
            "loss",
            "Cross-entropy loss: of the class, or the mean over the next tokens of a text.",
            unit="nat",
            better="lower",
        ),
        "upper": Column(
            "upper", "Probabilistic upper limit of norm.", status="estimate", reading=UPPER
        ),
        "products": Column("products", "Products used.", format="d"),
        "converged": Column("converged", f"{STOPPED}.", format="", reading=CONVERGED),
        "margin": Column(
            "margin",
            "f_y - max_(j != y) f_j.",
            better="higher",
            reading="Lead of the true class over the next best (for a language model: of the "
            "predicted next token). Misclassified samples have no radius.",
        ),
        "radius_first_order": Column(
            "first-order radius",
            "First-order distance to another class: min_j (f_y - f_j) / ||grad(f_y - f_j)||. "
            "A lower limit of it if `complete` is no. Not a certificate.",
            better="higher",
            status="estimate",
            reading="Distance to the nearest class if the model were linear. An attack may "
            "succeed within it, or fail beyond it.",
        ),
        "rivals": Column(
            "rivals", "Number of other classes j considered for the radius.", format="d"
        ),
        "complete": Column(
            "complete",
            "Whether no other class can be nearer.",
            format="",
            reading="Classes are considered in the order of their margin. The search ends when no "
            "further class can be nearer (probability 99.9%) or after --rivals classes. In the "
            "second case, complete is no and the radius is a lower limit.",
        ),
        "correct": Column("correct", "Whether the prediction is right.", format=""),
    },
    fixed={
        "from": Column.text("from", "Input of the Jacobian."),
        "to": Column.text("to", "Output of the Jacobian."),
        "module": Column.text(
            "module", "Block that is differentiated, or whose output is the input; empty: neither."
        ),
        "norm": Column.text("norm", "2 (spectral) or inf (largest L1 row norm).", default="2"),
        "samples": Column.count("samples", "Number of samples."),
        "mean": Column.norm("mean", "Mean norm.", "norm", "mean"),
        "median": Column.norm("median", "Median norm.", "norm", "median"),
        "p95": Column.norm("p95", "95th percentile.", "norm", "p95"),
        "max": Column.norm("max", "Largest norm.", "norm", "max"),
        "method": Column.text("method", "Method of the norm: dense VJPs or Lanczos."),
        "tol": Column("tol", "Requested relative accuracy (estimated).", domain=""),
        "within": WITHIN_COLUMN,
        "products": Column("products", "Mean number of Jacobian products per sample.", domain=""),
        "converged": Column.count("converged", f"{STOPPED}: samples.", reading=CONVERGED),
    },
)


# Columns that accompany every norm, with their types.
ALWAYS = {"norm": float, "upper": float, "within": float, "products": int, "converged": bool}
# Those that rows behind the first have, too, with `block_` before the name.
OF_BLOCKS = ("norm", "within", "products", "converged")
# Why a layer has no norm of its own.
NO_BLOCK = "no block around {} has a residual connection"
NO_ROWS = "the output of the block around {} has no row per sample"
# What did not converge, in the words of a note.
CONVERGENCE = {"converged": "norms of the model", "block_converged": "norms of blocks"}


def measure(net: Net, batches: Iterable[Batch], options: JacobianOptions) -> Iterator[Part]:
    """Yield the norms, margins and first-order radii of every sample."""
    import torch

    from lipaudit.data.batch import find_first
    from lipaudit.models.attention.numeric import compute_residual_norms

    blocks: Blocks | None = None
    first: Batch | None = None
    # Texts of one length have the same positions; those of a run come in such batches already.
    for batch in (piece for whole in batches for piece in whole.by_length(len(whole))):
        if blocks is None or first is None:
            first = find_first(batches, batch)
            blocks = _find_blocks(net, first, options)
        values, facts, norms = _measure_batch(net, batch, options, blocks.cuts, first)
        if blocks.inner:
            how: dict[str, Any] = {"seeds": [base.seed_of(i, options.seed) for i in batch.ids]}
            each = compute_residual_norms(net, batch, blocks.inner, **how, **options.accuracy)
            for block, norm in each:
                norms.append(norm)
                facts["ends"].append(("block input", "block output", block.module, norm.method))
        if norms:  # arrays (samples, rows behind the first)
            for name in OF_BLOCKS:
                of_blocks = torch.stack([getattr(norm, name) for norm in norms], 1)
                values[f"block_{name}"] = of_blocks.numpy()
        yield Part(batch.ids, values, facts, blocks.notes)


class Blocks(NamedTuple):
    """Blocks that have norms of their own.

    Attributes:
        cuts: those whose output is an input of the Jacobian, by its name: `layer:5`.
        inner: those that are differentiated themselves.
        notes: remarks on layers without a block.
    """

    cuts: dict[str, Residual]
    inner: tuple[Residual, ...]
    notes: tuple[Note, ...]


def _find_blocks(net: Net, batch: Batch, options: JacobianOptions) -> Blocks:
    """Find the blocks that the options name, by the first sample of a batch."""
    from lipaudit.measures.layers import choose_layers
    from lipaudit.models.attention.numeric import find_residuals
    from lipaudit.models.attention.survey import find_layers

    layer = find_layer(options.start)
    from_layers = layer is not None or options.start == "layers"
    if not (from_layers or options.per_layer):
        return Blocks({}, (), ())
    sites = find_layers(net, batch)
    cuts: dict[str, Residual] = {}
    alone: dict[str, list[int]] = {}
    chosen = choose_layers(sites, None if layer is None else (layer,))
    inside = find_residuals(net, batch, sites)
    around = inside
    if from_layers:
        around = find_residuals(net, batch, sites, entire=True)
    for site in chosen:
        block = around[site.index]
        if block is None or not block.by_sample:
            alone.setdefault(NO_BLOCK if block is None else NO_ROWS, []).append(site.index)
        # Layers of one block share its output: the block has the number of the first.
        elif from_layers and block not in cuts.values():
            cuts[f"layer:{site.index}"] = block
    why = [
        text.format(f"attention layer{'s' * (len(layers) > 1)} {few(layers)}")
        for text, layers in alone.items()
    ]
    text = f"{net.architecture}: {'; '.join(why)}"
    if from_layers and not cuts:
        raise InputError(text, "Use another --from, such as embeddings.")
    own = dict.fromkeys(block for block in inside if block and block.by_sample)
    notes = tuple(Note.info("no-block", text) for text in why)
    return Blocks(cuts, tuple(own) if options.per_layer else (), notes)


def _find_place(net: Net, batch: Batch, end: Target) -> Tensor | None:
    """Return the column of each text's position, -1 if it has none; None without positions."""
    from lipaudit.models.endpoints import find_places

    # The loss of a text begins with its second token.
    second = end.what == "loss" and net.classes is None
    if second or end.where:
        return find_places(batch, "1" if second else end.where)
    return None


def _measure_batch(
    net: Net,
    batch: Batch,
    options: JacobianOptions,
    cuts: Mapping[str, Residual],
    first: Batch,
) -> tuple[dict[str, Values], dict[str, Any], list[JacobianNorms]]:
    """Return norms and margins per sample, the names of input and output, and norms by layer."""
    from lipaudit.measures import drawings
    from lipaudit.models.attention.numeric import record_outputs, start_after
    from lipaudit.models.endpoints import make_sample_function, resolve_target
    from lipaudit.models.linearize import linearize
    from lipaudit.models.model_norms import compute_jacobian_norms

    end = resolve_target(net, batch, options.target)
    place = _find_place(net, batch, end)
    at = make_sample_function(net, batch, start=options.start, target=end.text, place=place)
    # The graph of one forward pass has the derivatives from its input and from every block.
    f, outputs = record_outputs(net, tuple(cuts.values()), at.f)
    whole = linearize(f, at.x)
    alone = cuts.get(options.start or "")

    around = list[str]()  # blocks that paths from the input bypass

    def cut(name: str, block: Residual) -> Linearization:
        inner = outputs[block]
        through, beside = whole.find_paths(inner)
        if not through:
            text = f"the output {at.target} of {net.architecture} does not depend on {name}"
            raise InputError(f"{text} ({block.module})", "Use another --to or --from.")
        if len(inner) != len(at.x):
            raise InputError(NO_ROWS.format(name), "Use another --from.")
        around.extend([name] * beside)
        return whole.start_at(start_after(net, block, at.f, at.x), inner)

    if alone is None:
        start = at.start
    else:
        start = str(options.start)
    linear = whole
    if alone is not None:
        linear = cut(start, alone)
    accuracy: dict[str, Any] = {
        **options.accuracy,
        "norm": options.norm,
        "seeds": [base.seed_of(i, options.seed) for i in batch.ids],
    }
    blocks = cuts.items() if alone is None else ()
    of_layers = [compute_jacobian_norms(cut(*each), **accuracy) for each in blocks]
    decides = end.what == "logits" and linear.output.ndim == 2 and linear.output.shape[1] > 1
    # The gradient of the margin is a direction of its own.
    of_margin = options.direction == "margin"
    norms = compute_jacobian_norms(
        linear,
        directions=net.kind != "image" and options.norm == "2" and not decides,
        left=options.shares and not of_margin,
        **accuracy,
    )
    values = {name: getattr(norms, name).numpy().astype(kind) for name, kind in ALWAYS.items()}
    facts: dict[str, Any] = {"from": start, "to": at.target, "method": norms.method}
    facts["around"] = around
    facts["ends"] = [
        (name, at.target, block.module, norm.method)
        for (name, block), norm in zip(cuts.items(), of_layers, strict=alone is None)
    ]
    labels = batch.y if net.classes is not None else None
    if end.what == "loss":
        values["loss"] = linear.output[:, 0].double().cpu().numpy()
        # Samples without a label, for which the predicted class is used.
        if labels is None:
            unlabelled = len(batch)
        else:
            unlabelled = int((labels < 0).sum())
        facts["unlabelled"] = 0 if net.classes is None else unlabelled
    steepest = norms.vector
    if decides:
        margins, steepest = _measure_margins(linear, labels, norms.upper, options)
        values |= margins
    if steepest is not None and net.kind != "image":
        gradient = steepest.view_as(linear.x)
        of = "margin" if decides else "direction"
        facts["gradients"] = drawings.describe_gradients(net, batch, gradient, of)
    if options.shares:
        left = norms.left
        tied = norms.tied
        if left is None or tied is None:
            left, tied = _draw_margins(linear, labels)
        else:
            assert norms.gap is not None
            values["gap"] = norms.gap.numpy()
        # The shares have a graph of their own: this one would be in memory beside it.
        whole.release()
        shares, known = measure_shares(net, batch, at, left, tied, first)
        values |= shares
        facts |= known
    return values, facts, of_layers


def _draw_margins(linear: Linearization, labels: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return u = e_y - e_j of the class y and the next best j, and that it counts."""
    import torch
    import torch.nn.functional as F

    logits = linear.output
    classes = logits.argmax(1)
    if labels is not None:
        classes = torch.where(labels < 0, classes, labels.to(classes))
    rivals = logits.scatter(1, classes[:, None], -torch.inf).argmax(1)
    difference = F.one_hot(classes, logits.shape[1]) - F.one_hot(rivals, logits.shape[1])
    return difference[:, None].to(logits), torch.ones(len(logits), 1, dtype=torch.bool)


def _measure_margins(
    linear: Linearization, labels: Tensor | None, upper: Tensor, options: JacobianOptions
) -> tuple[dict[str, Values], Tensor | None]:
    """Return margins and radii per sample, and the directions in which the margins fall most.

    Without labels, they are those of the predicted class.
    """
    import torch

    from lipaudit.models.model_norms import compute_margins

    predicted = linear.output.argmax(1)
    y = predicted if labels is None else labels
    how: dict[str, Any] = {"norm": options.norm, "upper": upper}
    margins = compute_margins(linear, y, rivals=options.rivals, **how)
    right = ((y < 0) | (predicted == y)).cpu()
    values = {
        "margin": margins.margin.numpy(),
        "radius_first_order": margins.radius.masked_fill(~right, torch.nan).numpy(),
        "rivals": margins.rivals.numpy(),
        "complete": margins.complete.numpy(),
    }
    if labels is not None and bool((labels >= 0).any()):
        values["correct"] = right.numpy()
    return values, margins.direction


def summarise(parts: Sequence[Part], options: JacobianOptions) -> list[Section]:
    """Make the section `jacobian`: one row, and a column per quantity and sample."""
    import numpy as np

    facts = parts[0].facts
    names = dict.fromkeys(name for part in parts for name in part.values)
    # Parts without any label have no column `correct`: nothing there is known to be wrong.
    arrays = {}
    for name in names:
        if not name.startswith("share_"):
            arrays[name] = np.concatenate(
                [p.values.get(name, np.ones(len(p.ids), bool)) for p in parts]
            )
    shown = JACOBIAN_TABLE.sample_columns
    columns: dict[str, Any] = {name: each for name, each in arrays.items() if name in shown}
    # The NaN of a failed norm stays NaN: it is not a value that was not computed.
    columns |= {name: columns[name].tolist() for name in ("norm", "upper")}
    several = "block_norm" in arrays
    of_blocks = {n: arrays[f"block_{n}"].T if several else () for n in OF_BLOCKS}
    # Arrays (samples, maps): of the model, then of its blocks.
    of_maps = {n: np.column_stack([arrays[n], *of_blocks[n]]) for n in OF_BLOCKS}
    ends = [{"from_": facts["from"], "to": facts["to"], "method": facts["method"]}]
    keys = ("from_", "to", "module", "method")
    ends += [dict(zip(keys, texts, strict=True)) for texts in facts.get("ends", ())]
    once = base.mark_unique(parts)  # a repeated sample counts once, as in every comparison
    rows = []
    for i, end in enumerate(ends):
        norm, within, products, converged = (of_maps[name][once, i] for name in OF_BLOCKS)
        row = JACOBIAN_TABLE.row(
            **end,
            norm=options.norm,
            samples=len(norm),
            **JACOBIAN_TABLE.reduce({"norm": norm}),
            tol=options.tol,
            within=float(within.max()),
            products=float(products.mean()),
            converged=int(converged.sum()),
        )
        rows.append(row)
    notes = [*base.notes(parts), *_write_notes(parts, arrays), *base.repeat_notes(parts)]
    kept = {}
    if several:
        kept = {"norm": of_maps["norm"]}
    section = base.make_section(
        JACOBIAN_TABLE, parts, options, rows, notes, samples=columns, arrays=kept
    )
    if options.direction == "margin":
        to = "margin"
    else:
        to = facts["to"]
    return [section, *summarise_shares(parts, options, arrays["norm"], to)]


def _write_notes(parts: Sequence[Part], arrays: Mapping[str, Values]) -> Iterator[Note]:
    """Note what the figures refer to, what is missing, and how accurate they are."""
    import numpy as np

    if guessed := sum(part.facts.get("unlabelled", 0) for part in parts):
        text = f"the loss of {guessed} samples without a label uses the predicted class"
        yield Note.info("loss-of-predicted", text)
    if names := dict.fromkeys(name for part in parts for name in part.facts.get("around", ())):
        text = (
            f"the input also reaches the output around {', '.join(names)} (as from an encoder to "
            "a decoder): norms from there hold these paths fixed"
        )
        yield Note.info("paths-fixed", text)
    for reason in dict.fromkeys(part.facts.get("unshared") for part in parts):
        if reason:
            yield Note.warn("no-shares", UNSHARED.format(reason))
    within = [arrays[name] for name in ("within", "block_within") if name in arrays]
    yield from base.lower_estimates(max(np.nanmax(each, initial=0.0) for each in within))
    if "radius_first_order" in arrays:
        text = "radius_first_order is a first-order estimate at each sample, not a certificate"
        yield Note.info("indicative", text)
        # A class that was not examined may be the nearest.
        unknown = ~arrays["complete"]
        if unknown.any():
            text = (
                f"{int(unknown.sum())} first-order radii are lower limits: the nearest class may "
                f"not be among the {int(arrays['rivals'][unknown].max())} classes considered. "
                "Raise --rivals"
            )
            yield Note.warn("radius-incomplete", text)
    for name in [name for name in CONVERGENCE if name in arrays]:
        known = ~np.isnan(arrays[name.replace("converged", "norm")])
        yield from base.note_missed(int((~arrays[name] & known).sum()), CONVERGENCE[name])
    if undefined := int(np.isnan(arrays["norm"]).sum()):
        text = f"the norms of {undefined} samples are NaN: the model overflows on them"
        yield Note.warn("not-finite", text)


def _check(net: Net, batch: Batch, options: JacobianOptions) -> None:
    """Refuse an output that the model lacks, `--per-layer` of several texts, or no text."""
    from lipaudit.models.endpoints import resolve_target

    layered = ""
    if (options.start or "").startswith("layer"):
        layered = f"--from {options.start}"
    option = "--per-layer" if options.per_layer else layered
    if net.scored and option:
        text = (
            "does not work with --score: every continuation of a prompt has its own hidden states"
        )
        raise UsageError(f"{option} {text}", f"Leave out {option} or --score.")
    if options.shares and layered:
        text = f"--shares are of paths from the input of the model, not {layered}"
        raise UsageError(text, "Leave out --shares or --from.")
    batch = batch.to(net.device, net.dtype)
    end = resolve_target(net, batch, options.target)
    if options.direction == "margin" and not (end.what == "logits" and (net.classes or 0) > 1):
        text = f"--direction margin needs the scores of classes, not {end.text}"
        raise UsageError(text, "Leave out --direction, or use --to logits of a classifier.")
    place = _find_place(net, batch, end)
    short = 0
    if place is not None:
        short = int((place < 0).sum())
    if short:
        raise InputError(
            f"{short} of {len(batch)} texts are too short for --to {end.text}",
            "Give longer texts, or an existing position (counted from 0, or from the end: -1).",
        )


JACOBIAN = Measure(
    "jacobian",
    (JACOBIAN_TABLE, HEADS_TABLE, PATHS_TABLE),
    JacobianOptions,
    measure,
    summarise,
    batch=16,
    check=_check,
    place=30,
    audit=AuditRole(
        # Enough for a gate: in 9 of 10 runs norms that grow by 10% are seen.
        samples={"quick": 64, "usual": 128, "full": 256},
        plan=lambda _asked: JacobianOptions(shares=True),
    ),
)
