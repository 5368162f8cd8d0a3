"""Shares of heads, layers and blocks in the worst direction of the model, for `jacobian`.

Their computation and its proof are in `lipaudit.models.attribution`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lipaudit.errors import LipauditError, first_line, is_machine_error, join_few
from lipaudit.measures import base
from lipaudit.measures.base import Arrays, Columns, Facts, MeasureOptions, Part, Values
from lipaudit.tables import Column, Display, Layout, Note, Reduction, Report, Row, Section
from lipaudit.tables.columns import HEAD, finite, group_values, largest, middle
from lipaudit.tables.formats import format_value, join_texts
from lipaudit.tables.summary import Headline, list_unrepeated

if TYPE_CHECKING:
    from torch import Tensor

    from lipaudit.data.batch import Batch
    from lipaudit.models.endpoints import SampleFunction
    from lipaudit.models.linearize import Function
    from lipaudit.models.net import Net

READING = (
    "Exact at the samples, along one direction. If the part were held constant there, the norm "
    "would fall by at most this share. A negative share works against the rest. Shares of "
    "different layers overlap, so they do not add up. A small share of a steep head means that "
    "later layers do not pass on its changes."
)


def _describe_share(label: str, meaning: str, values: str, **how: Any) -> Column:
    """Return the column of a share: its label, meaning and format. Its value is a median.

    Args:
        label: label of the column.
        meaning: what the share says, for reports.
        values: name of the array with the share of each sample, whose median is the value.
        how: attributes of the column that differ from the usual ones of a share.
    """
    reduction = Reduction("median", values)
    usual: dict[str, Any] = {"format": ".1%", "reading": READING, "reduction": reduction}
    return Column(label, meaning, **(usual | how))


def _describe_total(label: str, what: str) -> Column:
    """Return the column of the share of all parts of one kind together, such as all MLPs.

    Args:
        label: label of the column.
        what: the parts in words.
    """
    return Column(
        label,
        f"Share of the sensitivity that passes through {what}.",
        format=".1%",
        reading="Exact at the sample, along one direction. With all these parts held constant, "
        "the norm would fall by at most this share. A path may pass attention and MLPs, so the "
        "shares of both overlap.",
    )


ENDS = {
    "from": Column.text("from", "Input of the Jacobian."),
    "to": Column.text("to", "Output of the Jacobian; margin: of the lead over the next class."),
}


def read_sources(headline: Headline, section: Section, report: Report) -> Iterator[Row]:
    """Yield the share of the sensitivity that passes through attention maps, median over samples.

    If no attention map could be read, the figure is the share through attention in any way. The
    text has the share of all MLPs, and the head with the largest share.
    """
    rows = [row for row in section.rows if finite([row.share])]
    if not rows:
        return
    column = section.columns["share"]
    # The shares of all attention, of all attention maps and of all MLPs: medians over the samples.
    attention, maps, mlps = (middle(list_unrepeated(section, name)) for name in OF_ALL)
    head = largest(rows, "share", count=1)[0]
    texts = [f"head {head.layer}.{head.head} carries most ({format_value(head.share, column)})"]
    if mlps is not None:
        texts.insert(0, f"MLPs {format_value(mlps, column)}")
    if maps is None:
        metric = f"{section.measure}.attention"
        label = "sensitivity through attention"
        text = join_texts(texts)
        yield headline.row(section, attention, column, metric=metric, figure=label, text=text)
        return
    # A path may pass a map and an MLP: the shares do not add up.
    text = join_texts([*texts, "paths overlap"])
    yield headline.row(section, maps, column, text=text)


# Shares of all parts of one kind together, in the order of the arrays of `models.attribution`.
OF_ALL = ("attention", "patterns", "mlps")
HEADS_TABLE = Layout(
    name="jacobian.shares",
    title="Which heads carry the sensitivity?",
    headlines=(
        Headline(
            name="sensitivity_in_maps",
            column="patterns",
            label="sensitivity via attention maps",
            meaning="Share of the most sensitive direction that passes any attention map, then "
            "any MLP, then the head that carries most. A path may pass several, so the shares do "
            "not add up.",
            place=52,
            read=read_sources,
        ),
    ),
    display=Display(
        about="Share of each head in the direction in which the model is most sensitive. At "
        "each sample, it is the sum of what passes through its attention map (pattern) and its "
        "values; medians need not add up.",
        columns=("head", "share", "pattern", "value", "share_max", "sample", "carried"),
        by="share",
        maps=("share",),
        titles={"share": "How much of the sensitivity each head carries"},
    ),
    sample_columns={
        "gap": Column(
            "gap",
            "Relative distance of the two largest singular values.",
            format=".2g",
            reading="With a small gap there are several directions that are nearly as sensitive, "
            "with other shares. Shares are averaged over directions whose values agree to tol. "
            "Lanczos sees at most two of them, and equal values as one.",
        ),
        "attention": _describe_total("attention", "any attention"),
        "patterns": _describe_total("patterns", "any attention map, so through a softmax"),
        "mlps": _describe_total("MLPs", "any branch without attention"),
    },
    fixed={
        **HEAD,
        **ENDS,
        "share": _describe_share("share", "Share in the sensitivity (median).", "share"),
        "pattern": _describe_share(
            "pattern", "Part of the share through its attention map.", "pattern"
        ),
        "value": _describe_share("value", "Part of the share through its values.", "value"),
        "share_max": _describe_share(
            "share max",
            "Largest share of the head over the samples.",
            "share",
            reduction=Reduction("max", "share"),
        ),
        "carried": Column.norm(
            "carried",
            "Norm of the Jacobian times the share of the head.",
            "carried",
            signed=True,
            reading=f"In the unit of the norm, so that two models can be compared. {READING}",
        ),
        "sample": Column.text("sample", "The sample with the largest share."),
        "samples": Column.count("samples", "Number of samples."),
    },
)
PATHS_TABLE = Layout(
    name="jacobian.paths",
    title="Where does the sensitivity come from, layer by layer?",
    display=Display(
        about="Shares of attention, MLP and skip connection at every step of the model. The "
        "parts of a step add up to 1 at each sample; their medians need not.",
        columns=("step", "layer", "part", "share", "pattern", "value", "mlp", "rest"),
        drawings=("paths",),
    ),
    fixed={
        "step": Column.count("step", "Step of the model, in the order of execution.", needed=True),
        "part": Column.text("part", "attention, MLP, both in parallel, or the whole block."),
        "layer": Column(
            "layer", "Attention layer of the step, or the last one before it.", format="d"
        ),
        "module": Column.text("module", "Module that computes the part."),
        **ENDS,
        "share": _describe_share(
            "share", "Share of the part in the sensitivity (median).", "share"
        ),
        "pattern": _describe_share("pattern", "Share through attention maps.", "pattern"),
        "value": _describe_share("value", "Share through values.", "value"),
        "mlp": _describe_share("MLP", "Share through branches without attention.", "mlp"),
        "rest": _describe_share("rest", "Share that passes around the part.", "rest"),
        "samples": Column.count("samples", "Number of samples."),
    },
)
# Quantities of heads and of steps, in the order of the arrays of `models.attribution`.
OF_HEADS = ("share", "pattern", "value")
OF_PATHS = ("share", "pattern", "value", "mlp")
# Why there are no shares, in the order of the samples.
UNSHARED = "no shares of heads: {}"


def measure_shares(
    net: Net,
    batch: Batch,
    at: SampleFunction,
    directions: Tensor,
    counted: Tensor,
    first: Batch,
) -> tuple[Arrays, Facts]:
    """Return the shares of heads and blocks at every sample, as values and facts of a part.

    If shares cannot be computed, there are no values, and the fact `unshared` is the reason.

    Args:
        net: the model.
        batch: the samples.
        at: the function from input to output, and the samples as its points.
        directions: directions of the output, (samples, directions, outputs). Shares are measured
            along each; those of a sample are their mean.
        counted: which directions enter the mean, (samples, directions).
        first: the first sample of the run; the attention layers are found by running it.
    """
    from lipaudit.measures.layers import list_heads
    from lipaudit.models.attention.survey import find_layers
    from lipaudit.models.attribution import compute_shares, join_shares

    # A model that scores continuations runs on a row per continuation of a prompt: prompts are
    # taken one by one, so that all rows belong to the same sample.
    size = 1 if net.scored else len(batch)
    shares_of_pieces = []
    try:
        sites = find_layers(net, first)
        for start in range(0, len(batch), size):
            rows = slice(start, start + size)
            # `compute_shares` numbers the rows of a piece from 0, and `at.f` numbers the rows of
            # the whole batch: shift the numbers.
            f = _number_from(at.f, start)
            shares_of_pieces.append(
                compute_shares(net, sites, f, at.x[rows], directions[rows], counted[rows])
            )
    except (LipauditError, RuntimeError) as error:
        # The norm does not need shares, so the run continues without them. For example, an
        # operation of the model may have a first derivative but no second one. An error of the
        # machine (memory, device) ends the run.
        if is_machine_error(error):
            raise
        return {}, {"unshared": first_line(error)}
    shares = join_shares(shares_of_pieces)
    values = {
        "share_heads": shares.heads.numpy(),
        "share_paths": shares.paths.numpy(),
        "share_totals": shares.totals.numpy(),
    }
    modules = {site.index: site.module for site in sites}
    facts = {
        "heads": list_heads(sites),
        # Branches with a skip connection.
        "steps": [[step.part, step.layer, step.module] for step in shares.steps],
        # Layers without shares of heads, because their attention was not found in the graph.
        "missing": [[layer, modules[layer], why] for layer, why in shares.missing.items()],
        # Layers with shares of whole heads only: not split into attention map and values.
        "unsplit": list(shares.unsplit),
    }
    return values, facts


def _number_from(f: Function, start: int) -> Function:
    """Return f(z, index) for samples that are numbered from 0, and from `start` in f."""
    return lambda z, index: f(z, index + start)


def summarise_shares(
    parts: Sequence[Part], options: MeasureOptions, norm: Values, to: str
) -> list[Section]:
    """Make the sections `jacobian.shares` and `jacobian.paths`, if shares were measured.

    Args:
        parts: the parts of `jacobian`.
        options: its options.
        norm: the norm of each sample.
        to: name of the output; `margin` if shares are of the direction of the margin.
    """
    # Parts that say what the columns of their shares are: facts["heads"] for heads, facts["steps"]
    # for the branches with a skip connection through which a sample passes. Other parts have no
    # shares, or are of a batch of texts that are no neighbours in the data: the engine splits its
    # part by samples, and only the piece of the first sample keeps the facts.
    described = [part for part in parts if "steps" in part.facts]
    if not described:
        return []
    ends = {"from": described[0].facts["from"], "to": to}
    sections = [_make_heads_section(parts, described, options, norm, ends)]
    # A table of steps has a meaning only if the model takes the same steps on all samples.
    steps = described[0].facts["steps"]
    if steps and all(part.facts["steps"] == steps for part in described):
        sections.append(_make_paths_section(parts, steps, options, ends))
    return sections


def _make_heads_section(
    parts: Sequence[Part],
    described: Sequence[Part],
    options: MeasureOptions,
    norm: Values,
    ends: Mapping[str, str],
) -> Section:
    """Make the section `jacobian.shares`: a row per head, with medians over the samples.

    Args:
        parts: all parts.
        described: the parts that have the facts of shares.
        options: the options of the measure.
        norm: the Jacobian norm of each sample.
        ends: names of the input and the output of the Jacobian.
    """
    import numpy as np

    heads = described[0].facts["heads"]
    # The share of a head, the share through its attention map, and through its values.
    arrays = _join_columns(parts, "share_heads", columns=OF_HEADS, rows=len(heads))
    arrays["carried"] = arrays["share"] * norm[:, None]  # in the unit of the norm
    unique = base.mark_unique(parts)
    shares = arrays["share"][unique]
    rows = base.make_rows(
        HEADS_TABLE,
        heads,
        **ends,
        **_reduce(arrays, unique),
        share_max=base.reduce_columns(shares, np.max),
        sample=_name_largest(shares, np.array(base.sample_ids(parts))[unique]),
        samples=int(unique.sum()),
    )
    notes = [*base.notes(parts), *_write_notes(described)]
    # For each sample: the shares of all attention, all maps and all MLPs together.
    totals = _join(parts, "share_totals", (len(OF_ALL),))
    figures = dict(zip(OF_ALL, totals.T, strict=True))
    # The relative distance of the two largest singular values: with a small one, shares are those
    # of one of several directions that are nearly as sensitive.
    figures["gap"] = _join(parts, "gap", shape=())
    return base.make_section(
        HEADS_TABLE, parts, options, rows, notes, samples=figures, arrays=arrays
    )


def _name_largest(shares: Values, ids: Values) -> list[str]:
    """Return for each head the id of the sample with its largest share; "" if all are NaN.

    Args:
        shares: (samples, heads).
        ids: (samples,).
    """
    import numpy as np

    # The row of the largest share of each head; NaN counts as the smallest.
    largest = np.where(np.isnan(shares), -np.inf, shares).argmax(0)
    samples = []
    for i, of_head in zip(largest, shares.T, strict=True):
        samples.append("" if np.isnan(of_head[i]) else str(ids[i]))
    return samples


def _make_paths_section(
    parts: Sequence[Part],
    steps: Sequence[tuple[str, int, str]],
    options: MeasureOptions,
    ends: Mapping[str, str],
) -> Section:
    """Make the section `jacobian.paths`: a row per step (part, layer, module) of the model.

    A step is a branch with a skip connection: attention, MLP, both in parallel, or a whole block.
    """
    # The share of a step, and how much of it passes attention maps, values and MLPs.
    arrays = _join_columns(parts, "share_paths", columns=OF_PATHS, rows=len(steps))
    arrays["rest"] = 1 - arrays["share"]  # what passes around the step, by its skip connection
    unique = base.mark_unique(parts)
    kinds, layers, modules = zip(*steps, strict=True)
    rows = base.make_rows(
        PATHS_TABLE,
        step=list(range(len(steps))),
        part=kinds,
        layer=[None if layer < 0 else layer for layer in layers],  # -1: before any attention
        module=modules,
        **ends,
        **_reduce(arrays, unique),
        samples=int(unique.sum()),
    )
    return base.make_section(PATHS_TABLE, parts, options, rows, arrays=arrays)


def _reduce(arrays: Arrays, unique: Values) -> Columns:
    """Return the cells of each column: medians over the samples that repeat no earlier one.

    Args:
        arrays: shares by column, (samples, rows).
        unique: whether a sample repeats no earlier one, (samples,).
    """
    import numpy as np

    return {name: base.reduce_columns(a[unique], np.median) for name, a in arrays.items()}


def _join_columns(parts: Sequence[Part], name: str, columns: Sequence[str], rows: int) -> Arrays:
    """Return an array (samples, rows, columns) of all parts as one array per column."""
    values = _join(parts, name, (rows, len(columns)))
    return dict(zip(columns, values.transpose(2, 0, 1), strict=True))


def _join(parts: Sequence[Part], name: str, shape: tuple[int, ...]) -> Values:
    """Return one array of all parts, (samples, *shape).

    Samples of some parts get NaN: parts without the array, because shares could not be computed,
    and parts with an array of another shape, because the model took other steps on these samples.
    """
    import numpy as np

    pieces = []
    for part in parts:
        values = part.values.get(name)
        if values is None or values.shape[1:] != shape:
            values = np.full((len(part.ids), *shape), np.nan)
        pieces.append(values)
    return np.concatenate(pieces)


def _write_notes(parts: Sequence[Part]) -> Iterator[Note]:
    """Note which layers have no shares of heads, and which have no shares through the map P.

    Among the facts, `missing` lists layers whose attention was not found in the graph, with
    reasons, and `unsplit` lists layers whose attention map P could not be read.
    """
    reasons = group_values(
        (why, f"{index} ({module})") for index, module, why in parts[0].facts["missing"]
    )
    for why, layers in reasons.items():
        yield Note.warn(
            "no-share", f"no shares of the heads of attention layers {join_few(layers)}: {why}"
        )
    unsplit = parts[0].facts["unsplit"]
    if unsplit:
        yield Note.info(
            "no-pattern",
            f"attention layers {join_few(unsplit)}: shares of whole heads only, as P could not be "
            "read",
        )
