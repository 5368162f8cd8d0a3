"""The measure `jacobian`: the exact norm of the whole model's Jacobian, sample by sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator

from lipaudit.errors import InputError, UsageError
from lipaudit.measures import base
from lipaudit.measures.base import Arrays, AuditRole, Measure, NormOptions, Part, Values
from lipaudit.measures.shares import (
    HEADS_TABLE,
    PATHS_TABLE,
    UNSHARED,
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
    format_count,
    format_significant,
    format_value,
    name_sample,
)
from lipaudit.tables.summary import Headline, declare_clean
from lipaudit.tables.trials import ENDS, STARTS, Target, find_layer, parse_start

if TYPE_CHECKING:
    from lipaudit.data.batch import Batch
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


RADIUS = "radius_first_order"
# Smallest number of samples for which the scorecard has the 95th percentile.
FEWEST = 20


def read_norm(headline: Headline, section: Section, report: Report) -> Iterator[Row]:
    """Yield the figure of the section: the median Jacobian norm of the model over the samples.

    The text reads "pixels to logits, 32 samples; p95 8.1, largest 9.3 (sample 7)". The sentence is
    for readers who do not know what a norm is.
    """
    rows = [row for row in section.rows if not row.module]  # without rows of blocks
    if not rows or not finite((rows[0].median, rows[0].max)):
        return
    row = rows[0]
    column = section.columns["median"]
    text = f"{row.from_} to {row.to}"
    if row.norm != "2":
        text += f", norm {row.norm}"
    text += f", {format_count(row.samples)}; "
    if row.samples >= FEWEST:  # the 95th percentile of a few samples is about the largest norm
        text += f"p95 {format_value(row.p95, column)}, "
    text += f"largest {format_value(row.max, column)}"
    # By sample id; empty without the column of norms.
    norms = dict(zip(section.ids, section.samples.get("norm", ()), strict=False))
    known = [sample for sample, norm in norms.items() if finite([norm])]
    if known:
        steepest = max(known, key=lambda sample: order(norms[sample]))
        text += f" (sample {name_sample(steepest, describe_places(report))})"
    sentence = ""
    if row.median is not None:
        sentence = _explain_norm(row)
    low, high = median_limits(norms.values()) or (None, None)  # None: too few samples
    cells = {"samples": row.samples, "low": low, "high": high, "sentence": sentence}
    yield headline.row(section, row.median, column, text=text, **cells)


def _explain_norm(row: Row) -> str:
    """Return the median Jacobian norm of a model as a sentence: how much a small change grows."""
    origin = "the input"
    layer = find_layer(row.from_)  # 5 of layer:5; None if the norm is from the input
    if layer is not None:
        origin = f"the residual stream after layer {layer}"
    growth = format_significant(row.median)
    return f"A small change of {origin} grows at most {growth} times (median sample)."


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
        "output, in the worst direction. A norm may be too low by the share in the column within "
        "(99.9% confidence).",
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
        "norm": Column(
            "model ||J||", "Norm of the sample's Jacobian.", better="lower", reading=NORM
        ),
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
            "first-order radius, l2",
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


# Columns of every norm that rows behind the first have, too, with `block_` before the name.
OF_BLOCKS = ("norm", "within", "products", "converged")


def measure(net: Net, batches: Iterable[Batch], options: JacobianOptions) -> Iterator[Part]:
    """Yield the Jacobian norm, margin and first-order radius of every sample, batch by batch.

    Two options add norms of residual blocks around attention layers. --from layers: from the
    output of a block to the output of the model. --per-layer: from its input to its output.
    """
    import torch

    from lipaudit.data.batch import get_first_of_run
    from lipaudit.measures.sensitivity import find_blocks, measure_batch
    from lipaudit.models.attention.numeric import compute_residual_norms

    first: Batch | None = None
    # Texts of one length at a time, so that a position is the same column in all texts. Batches of
    # a run have one length already. Batches from the Python interface may have mixed lengths.
    pieces = (piece for whole in batches for piece in whole.by_length(len(whole)))
    for batch in pieces:
        if first is None:
            # The layers are found on the first samples of the run, the same in all processes. The
            # engine stores them on `batches`, so this takes nothing from the loop.
            first = get_first_of_run(batches, batch)
            blocks = find_blocks(net, first, options)
        # `of_blocks`: norms from the outputs of blocks, for --from. facts["ends"] has a tuple for
        # each of them: input, output, module of the block, and method of the norm.
        values, facts, of_blocks = measure_batch(net, batch, options, blocks.starts, first)
        if blocks.inner:  # --per-layer: append norms from the input of a block to its output
            seeds = options.list_seeds(batch.ids)
            residuals = compute_residual_norms(
                net, batch, blocks.inner, seeds=seeds, **options.accuracy
            )
            for block, norms in residuals:
                of_blocks.append(norms)
                facts["ends"].append(("block input", "block output", block.module, norms.method))
        if of_blocks:
            for name in OF_BLOCKS:
                columns = [getattr(norms, name) for norms in of_blocks]
                values[f"block_{name}"] = torch.stack(columns, 1).numpy()  # (samples, blocks)
        yield Part(batch.ids, values, facts, blocks.notes)


def summarise(parts: Sequence[Part], options: JacobianOptions) -> list[Section]:
    """Make the section `jacobian`, and with --shares the sections of shares.

    The first row is the model, all further rows are residual blocks. The section also has the
    figures of each sample.
    """
    arrays = _join_arrays(parts)
    by_row = _stack_rows(arrays)  # each figure of the model and its blocks, (samples, rows)
    rows = _make_rows(parts, by_row, options)
    stored = {}
    if len(rows) > 1:  # a single row, the model, is stored as the column `norm` already
        stored["norm"] = by_row["norm"]
    notes = [*base.notes(parts), *_write_notes(parts, arrays, by_row), *base.note_repeats(parts)]
    columns = _list_samples(arrays)
    section = base.make_section(
        JACOBIAN_TABLE, parts, options, rows, notes, samples=columns, arrays=stored
    )
    if options.norm == "inf":  # the default label is that of l2
        radius = replace(section.sample_columns[RADIUS], label="first-order radius, linf")
        described = section.sample_columns | {RADIUS: radius}
        section = section.model_copy(update={"sample_columns": described})
    output = "margin" if options.direction == "margin" else parts[0].facts["to"]
    return [section, *summarise_shares(parts, options, norm=arrays["norm"], to=output)]


def _list_samples(arrays: Arrays) -> dict[str, Any]:
    """Return the columns of the table of samples, with a value per sample.

    A norm that is NaN was computed, and the model overflowed: NaN has to stay. `make_section`
    replaces NaN by None ("not computed") in arrays, but not in lists, so norms become lists.
    """
    columns = {}
    for name, values in arrays.items():
        if name in ("norm", "upper"):
            columns[name] = values.tolist()
        elif name in JACOBIAN_TABLE.sample_columns:
            columns[name] = values
    return columns


def _stack_rows(arrays: Arrays) -> Arrays:
    """Return each figure of a norm as one array, (samples, rows): the model, then its blocks.

    Args:
        arrays: by name, such as norm or within: figures of the model, (samples,), and with
            `block_` before the name those of blocks, if there are any, (samples, blocks).
    """
    import numpy as np

    stacked = {}
    for name in OF_BLOCKS:
        columns = [arrays[name]]
        if f"block_{name}" in arrays:
            columns.append(arrays[f"block_{name}"])
        stacked[name] = np.column_stack(columns)
    return stacked


def _make_rows(parts: Sequence[Part], by_row: Arrays, options: JacobianOptions) -> list[Row]:
    """Return the row of the model, then a row per block, with statistics over the samples.

    Args:
        parts: the parts.
        by_row: norms and their accuracy, (samples, rows).
        options: the options.
    """
    facts = parts[0].facts
    # By row: input, output, module of the block, and the method of the norm.
    ends = [(facts["from"], facts["to"], "", facts["method"]), *facts.get("ends", ())]
    unique = base.mark_unique(parts)  # a repeated sample counts once, as in every comparison
    rows = []
    for i, (start, to, module, method) in enumerate(ends):
        figures = {name: values[unique, i] for name, values in by_row.items()}
        norms = figures["norm"]
        row = JACOBIAN_TABLE.row(
            from_=start,
            to=to,
            module=module,
            method=method,
            norm=options.norm,
            samples=len(norms),
            **JACOBIAN_TABLE.reduce({"norm": norms}),
            tol=options.tol,
            within=float(figures["within"].max()),
            products=float(figures["products"].mean()),
            converged=int(figures["converged"].sum()),
        )
        rows.append(row)
    return rows


def _join_arrays(parts: Sequence[Part]) -> Arrays:
    """Return the arrays of all samples by name, without the arrays of shares.

    `summarise_shares` reads these, whose shapes may differ between parts.
    """
    import numpy as np

    arrays = {}
    for name in dict.fromkeys(name for part in parts for name in part.values):
        if not name.startswith("share_"):
            # Only `correct` can be missing, in a part without any label. Its samples count as
            # correct, as samples without a label do in other parts.
            pieces = [part.values.get(name, np.ones(len(part.ids), bool)) for part in parts]
            arrays[name] = np.concatenate(pieces)
    return arrays


def _write_notes(parts: Sequence[Part], arrays: Arrays, by_row: Arrays) -> Iterator[Note]:
    """Note what the figures refer to, what is missing, and how accurate they are.

    Args:
        parts: the parts.
        arrays: the figures of all samples by name, (samples, ...).
        by_row: norms and their accuracy, (samples, rows): of the model and its blocks.
    """
    import numpy as np

    yield from _note_scope(parts)
    yield from base.note_lower_estimates(np.nanmax(by_row["within"], initial=0.0))
    if RADIUS in arrays:
        # A misclassified sample has no radius: it needs no further rivals.
        complete = arrays["complete"] | np.isnan(arrays[RADIUS])
        yield from _note_radii(complete, arrays["rivals"])
    for prefix, what in (("", "norms of the model"), ("block_", "norms of blocks")):
        if f"{prefix}norm" in arrays:
            known = ~np.isnan(arrays[f"{prefix}norm"])  # NaN has a note of its own
            missed = ~arrays[f"{prefix}converged"] & known
            yield from base.note_missed(int(missed.sum()), what)
    undefined = int(np.isnan(arrays["norm"]).sum())
    if undefined:
        yield Note.warn(
            "not-finite", f"the norms of {undefined} samples are NaN: the model overflows on them"
        )


def _note_scope(parts: Sequence[Part]) -> Iterator[Note]:
    """Note samples without a label, paths around blocks, and why there are no shares of heads."""
    unlabelled = sum(part.facts.get("unlabelled", 0) for part in parts)
    if unlabelled:
        yield Note.info(
            "loss-of-predicted",
            f"the loss of {unlabelled} samples without a label uses the predicted class",
        )
    bypassed = dict.fromkeys(name for part in parts for name in part.facts.get("around", ()))
    if bypassed:
        yield Note.info(
            "paths-fixed",
            f"the input also reaches the output around {', '.join(bypassed)} (as from an encoder "
            "to a decoder): norms from there hold these paths fixed",
        )
    for reason in dict.fromkeys(part.facts.get("unshared") for part in parts):
        if reason:
            yield Note.warn("no-shares", UNSHARED.format(reason))


def _note_radii(complete: Values, rivals: Values) -> Iterator[Note]:
    """Note what first-order radii are, and how many are only lower limits.

    Args:
        complete: whether the nearest class is surely among those considered, or the sample has no
            radius, (samples,).
        rivals: number of classes considered, (samples,).
    """
    yield Note.info(
        "indicative",
        "the first-order radius is an estimate at each sample, not a certificate",
    )
    incomplete = ~complete
    if incomplete.any():
        yield Note.warn(
            "radius-incomplete",
            f"{int(incomplete.sum())} first-order radii are lower limits: the nearest class may "
            f"not be among the {int(rivals[incomplete].max())} classes considered. "
            "Raise --rivals",
        )


def _check(net: Net, batch: Batch, options: JacobianOptions) -> None:
    """Refuse options that do not fit the model or the samples, before anything is measured.

    Raises:
        UsageError: --from, --per-layer, --shares or --direction do not work with this model.
        InputError: the model lacks the output, or a text is too short for the position of --to.
    """
    from lipaudit.measures.sensitivity import find_position
    from lipaudit.models.endpoints import resolve_target

    _check_blocks(net, options)
    batch = batch.to(net.device, net.dtype)
    end = resolve_target(net, batch, options.target)
    if options.direction == "margin" and not (end.what == "logits" and (net.classes or 0) > 1):
        raise UsageError(
            f"--direction margin needs the scores of classes, not {end.text}",
            "Leave out --direction, or use --to logits of a classifier.",
        )
    position = find_position(net, batch, end)
    if position is not None and bool((position < 0).any()):
        raise InputError(
            f"{int((position < 0).sum())} of {len(batch)} texts are too short for --to {end.text}",
            "Give longer texts, or an existing position (counted from 0, or from the end: -1).",
        )


def _check_blocks(net: Net, options: JacobianOptions) -> None:
    """Refuse Jacobians of blocks (--per-layer, --from layer:5) with --score, or with --shares.

    Raises:
        UsageError: the message names the two options. --shares work with --per-layer.
    """
    from_layer = ""
    if (options.start or "").startswith("layer"):
        from_layer = f"--from {options.start}"
    option = "--per-layer" if options.per_layer else from_layer
    if net.scored and option:
        text = (
            "does not work with --score: every continuation of a prompt has its own hidden states"
        )
        raise UsageError(f"{option} {text}", f"Leave out {option} or --score.")
    if options.shares and from_layer:
        raise UsageError(
            f"--shares are of paths from the input of the model, not {from_layer}",
            "Leave out --shares or --from.",
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
