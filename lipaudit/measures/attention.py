"""The measure `attention`: how each head distributes its attention, row by row.

Each layer's map is computed once, in float64, in chunks of query rows. Only sums and maxima are
kept, so a map of 8192 x 8192 is never in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import field_validator

from lipaudit.errors import UsageError, join_few
from lipaudit.measures import attention_rows, base
from lipaudit.measures.attention_rows import CSV, MEANS, NPZ, ROWS
from lipaudit.measures.base import Arrays, AuditRole, Measure, MeasureOptions, Part, Values
from lipaudit.settings.option import option
from lipaudit.settings.value_types import Layers, OneHead, read_head
from lipaudit.tables import Column, Display, Layout, Note, Reduction, Report, Row, Section
from lipaudit.tables.columns import HEAD, finite, largest, middle
from lipaudit.tables.report import Attended
from lipaudit.tables.summary import Headline, count_measured, list_unrepeated
from lipaudit.theory import SHORT_ROW

if TYPE_CHECKING:
    from torch import Tensor

    from lipaudit.data.batch import Batch
    from lipaudit.measures.drawings import DrawnMap
    from lipaudit.measures.layers import Reduced
    from lipaudit.models.attention.capture import Layer
    from lipaudit.models.net import Net
    from lipaudit.theory.heads import Heads


class AttentionOptions(MeasureOptions):
    """How each head distributes its attention, and which heads are in the fragile regime.

    A row of n > 8 keys is intermediate (fragile) when g1 = p(1) (1 - p(1) + p(2)) exceeds gamma
    and 2/n. Shorter rows are short: they have no regime.

    Examples:
      lipaudit attention demo
      lipaudit attention demo --map 1.3 -o map.html
      lipaudit attention demo --rows rows.csv
      lipaudit attention ./my-bert --data reviews.csv --map 3.1
    """

    reads_layers: ClassVar[bool] = True
    samples: ClassVar[int] = 32

    layers: Layers = option(None, "Measure only these attention layers, e.g. 0,5-7.")
    gamma: float = option(
        0.1,
        "Rows of n keys with g1 above this value and above 2/n count as intermediate (fragile).",
        gt=0,
        lt=0.25,
        rare=True,
    )
    k: int = option(10, "k of the columns gk and g1/gk (a number of keys).", gt=1)
    p_norm_tokens: int = option(
        2048, "Do not compute ||P|| for more tokens than this.", ge=0, rare=True
    )
    # This option changes no number, so the report does not record it as a setting.
    map: OneHead = option(
        None,
        "Draw the attention map of LAYER.HEAD for the first sample (on the HTML page).",
        exclude=True,
    )
    rows: Path | None = option(
        None,
        "Also write the statistics of every attention row to FILE.csv or FILE.npz.",
        exclude=True,
    )

    @field_validator("rows")
    @classmethod
    def _require_ending(cls, path: Path | None) -> Path | None:
        """Refuse a file of --rows with an ending that names no format."""
        if path is not None and path.suffix not in (CSV, NPZ):
            raise ValueError(f"it must end in {CSV} or {NPZ}")
        return path

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the files that the measure writes in addition to the report."""
        return () if self.rows is None else (self.rows,)

    def draw_steepest(self, sections: Sequence[Section]) -> Self:
        """Return options that draw the map of the head with the largest norm."""
        rows: list[Row] = []
        for section in sections:
            if section.measure == "bounds":
                rows += section.rows
        steepest = largest(rows, "exact", count=1)
        if not steepest:
            return self
        row = steepest[0]
        return self.model_copy(update={"map": f"{row.layer}.{row.head}"})


OVER_ROWS = "mean over all rows (queries) of all samples"
OVER_SAMPLES = "mean over a sample's rows, then over samples"
_share = partial(Column, format=".1%")
# A head is called fragile when more than this share of its rows is.
HALF = 0.5
# With a smaller share of fragile rows, a penalty on maps has no effect.
FEW = 0.05
# With a smaller share of the sensitivity in attention maps, a penalty on maps can gain little.
LITTLE = 0.2


def _average(rows: Sequence[Row], name: str) -> float:
    """Return the mean of a column over the rows."""
    return sum(finite(row[name] for row in rows)) / len(rows)


def read_fragile(headline: Headline, section: Section, report: Report) -> Iterator[Row]:
    """Yield the figure of fragile rows: their share of all attention rows, mean over heads.

    A fragile row is neither near uniform nor near one-hot. The text reads "in 5 of 24 heads over
    half; most other rows near uniform". If little of the model's sensitivity passes through
    attention maps, it says instead on how much a penalty on fragile rows can act.
    """
    rows = [row for row in section.rows if finite([row.intermediate])]
    if not rows:
        return
    share = _average(rows, "intermediate")
    uniform = _average(rows, "uniform")
    categorical = _average(rows, "categorical")
    fragile = sum(row.intermediate > HALF for row in rows)
    text = f"in {fragile} of {len(rows)} heads over half"
    # The share of the model's sensitivity that passes through attention maps, if it was measured.
    shares = report.section("jacobian.shares")
    through_maps = None
    if shares is not None:
        through_maps = middle(list_unrepeated(shares, "patterns"))
    if through_maps is not None and through_maps < LITTLE:
        text += f"; a penalty on them acts on {through_maps:.1%} of the sensitivity"
    elif share >= FEW:
        regime = "uniform" if uniform > categorical else "one-hot"
        text += f"; most other rows near {regime}"
    text += count_measured(section, report)
    yield headline.row(section, share, text=text)


ATTENTION_TABLE = Layout(
    name="attention",
    title="Where is attention fragile?",
    headlines=(
        Headline(
            name="fragile_rows",
            column="intermediate",
            label="fragile attention rows",
            meaning="Share of rows neither flat nor one-hot, where softmax reacts. It says where, "
            "not how robust: models with equal shares may differ in robust accuracy.",
            place=70,
            read=read_fragile,
            over_heads="mean",
        ),
    ),
    display=Display(
        about="An attention row is fragile (intermediate) if it is neither flat nor one-hot: the "
        "softmax then reacts most to a small change.",
        columns=(
            "head",
            *("intermediate", "uniform", "categorical", "g1", "softmax_norm", "support"),
            *("sink_max", "sink_token"),
        ),
        by="intermediate",
        maps=("intermediate",),
        titles={"intermediate": "How many rows of each head are fragile"},
        drawings=("attention", "rows"),
    ),
    fixed={
        **HEAD,
        "tokens": Column.count("tokens", "Keys of the longest sample."),
        "top1": Column("p(1)", f"Largest entry of a row; {OVER_ROWS}."),
        "top2": Column("p(2)", f"Second largest entry of a row; {OVER_ROWS}."),
        "g1": Column(
            "g1",
            f"p(1) (1 - p(1) + p(2)), bounds ||M||; {OVER_ROWS}.",
            better="lower",
            reading="0: the row is one-hot or spread over very many keys. 1/2: two keys share the "
            "row. The norm of the softmax Jacobian is at most g1, and close to it.",
            reduction=Reduction("mean", "g1", weights="rows"),
        ),
        "g1_max": Column("g1 max", "Largest g1 of any row of any sample."),
        "softmax_norm": Column(
            "||M||",
            f"||diag(p) - p p^T|| of a row; {OVER_ROWS}.",
            better="lower",
            reduction=Reduction("mean", "softmax_norm", weights="rows"),
        ),
        "softmax_norm_max": Column("||M|| max", "Largest ||M|| of any row of any sample."),
        "g1_ratio": Column("g1/||M||", f"How tight g1 is (1 is exact); {OVER_ROWS}."),
        "gk_ratio": Column(
            "g1/gk",
            f"g1 / g_k; {OVER_ROWS}.",
            reading="Ratio of g1 to gk. JaSMin training with k > 1 pushes it towards 1.",
        ),
        "entropy": Column("entropy", f"Shannon entropy of a row; {OVER_ROWS}.", unit="nat"),
        "entropy_normalized": Column(
            "entropy/log n", f"Entropy over its largest value; {OVER_ROWS}."
        ),
        "support": Column(
            "support",
            f"exp(entropy), the effective number of keys; {OVER_ROWS}.",
            reading="Number of keys that would give the same entropy with equal weights.",
        ),
        "sink_first": Column(
            "sink first", f"Share of attention on the first key; {OVER_SAMPLES}."
        ),
        "sink_max": Column(
            "sink max",
            f"Share of attention on a sample's most attended key; {OVER_SAMPLES}.",
            reading="Share of all attention that goes to one key. Sinks are normal in "
            "language models; a change of the sink token reaches every other token.",
        ),
        "sink_token": Column(
            "sink at",
            "Position of the most attended key (in its window), in most samples.",
            format="d",
        ),
        "uniform": _share(
            "uniform", "Share of the rows of all samples that are close to uniform."
        ),
        "intermediate": Column(
            "intermediate",
            "Share of the rows of all samples in the fragile regime, g1 > max(gamma, 2/n) of n "
            "keys.",
            better="lower",
            format=".1%",
            reading="Rows that are neither near uniform nor near one-hot: small changes of the "
            "logits move much attention. A high share is what JaSMin training lowers; by itself "
            "it is no vulnerability.",
            reduction=Reduction("mean", "intermediate", weights="long_rows"),
        ),
        "categorical": _share(
            "categorical", "Share of the rows of all samples that are close to one-hot."
        ),
        "short_rows": Column.count(
            "short rows",
            f"Rows with at most {SHORT_ROW} keys; the shares of regimes leave them out.",
        ),
        "p_norm": Column(
            "||P||",
            "Spectral norm of a sample's attention matrix (the largest over windows); mean "
            "over samples.",
        ),
    },
)


# Arrays of a map that is drawn: the map, and the number of its queries and keys.
MAP = ("map", "map_tokens")
# Number of entries of P processed at a time: 2 MB in float64 fit into the cache.
ENTRIES = 2**18


def measure(net: Net, batches: Iterable[Batch], options: AttentionOptions) -> Iterator[Part]:
    """Yield statistics of the attention rows of every head and sample, and the map of --map.

    The statistics are sums and maxima over the rows; see `layer_statistics`.

    Raises:
        UsageError: the model has no such head to draw.
    """
    from lipaudit.measures.layers import by_layer

    reader = _LayerReader(net, options)
    if options.map is not None:
        reader.head = read_head(options.map)
    # `projections=False`: statistics of the map need q and k, but no weights.
    parts = by_layer(net, batches, reader.read, layers=options.layers, projections=False)
    for number, part in enumerate(parts):
        if reader.windowed:  # layers whose attention stays within windows of a sample (Swin)
            layers = join_few(sorted(reader.windowed))
            note = Note.info(
                "windows",
                f"layers {layers} attend within windows of a sample: p_norm is the largest of all "
                "windows, and sinks number the keys of a window",
            )
            part = replace(part, notes=(*part.notes, note))
        if reader.head is not None and number == 0:  # the map is of the first sample
            part = reader.add_map(part)
        yield part


@dataclass
class _LayerReader:
    """Reads the statistics of layers, and the map of one head on the first sample.

    Attributes:
        net: the model.
        options: the options.
        head: layer and number of the head whose map is drawn; None: no map.
        map: its map; None before the first sample.
        windowed: layers whose attention is limited to windows of a sample.
    """

    net: Net
    options: AttentionOptions
    head: tuple[int, int] | None = None
    map: DrawnMap | None = None
    windowed: set[int] = field(default_factory=set)

    def read(self, layer: Layer) -> Reduced:
        """Return the statistics of a layer; called for every layer of every batch.

        Two things are stored on the reader: the number of the layer, if it attends within windows;
        and the first map of the head that --map names, if the layer has this head.
        """
        import torch

        from lipaudit.measures.drawings import draw_map

        if self.head is not None and self.map is None and layer.site.index == self.head[0]:
            self.map = draw_map(self.net, layer, self.head[1])
        if len(layer.attention.q) > layer.samples:  # several windows per sample: note the layer
            self.windowed.add(layer.site.index)
        with torch.inference_mode():
            return layer_statistics(layer, self.options)

    def add_map(self, part: Part) -> Part:
        """Return a part with the map that was read on its first sample.

        Raises:
            UsageError: the layer of the map is not measured.
        """
        assert self.head is not None
        if self.map is None:
            raise UsageError(
                f"layer {self.head[0]} is not measured, so there is no map of it",
                f"Give a layer from 0 to {part.facts['heads'][-1][0]} (see --layers).",
            )
        # Arrays of a part have the samples on the first axis. The map is one array for the whole
        # part: its first axis has length 1.
        arrays = (self.map.values[None], self.map.counts[None])
        values = {**part.values, **dict(zip(MAP, arrays, strict=True))}
        return replace(part, values=values, facts={**part.facts, "tokens": self.map.tokens})


def layer_statistics(layer: Layer, options: AttentionOptions) -> Reduced:
    """Return statistics of the attention rows of a layer, (samples, heads, ...): sums and maxima.

    The map P is computed for some heads at a time, and then in chunks of rows, to save memory. A
    layer that attends within windows (Swin) has one row of the batch per window of a sample.
    """
    import torch

    from lipaudit.measures.layers import max_windows, sum_windows
    from lipaudit.theory import softmax

    heads = layer.attention
    samples = layer.samples
    sample = heads.sample  # index of the sample of each window
    windows, count, queries = heads.q.shape[:3]  # windows of all samples, heads, queries
    keys = heads.k.shape[2]
    # As many heads at a time as have about ENTRIES entries of P.
    pieces = []
    for chunk in heads.policy.chunks(count, windows * queries * keys, ENTRIES):
        pieces.append(_read_map(_cast_inputs(heads.pick(chunk)), options))
    figures = {name: torch.cat([piece[name] for piece in pieces], 1) for name in pieces[0]}
    mass = figures.pop("mass")  # attention on each key, summed over the queries
    p_norm = figures.pop("p_norm")  # ||P||
    # The other figures describe each row: largest entries, entropy, norm of its softmax Jacobian.
    by_row = softmax.row_statistics(softmax.RowProfile(**figures), gamma=options.gamma)
    statistics = _reduce_rows(by_row, sample, samples)
    statistics |= attention_rows.count_rows(by_row, sample, samples)
    if options.rows is not None:
        rows = attention_rows.keep_rows(by_row, sample, samples)
        statistics[f"{ROWS}{layer.site.index}"] = rows
    statistics |= _find_sinks(sum_windows(mass, sample, samples))
    return statistics | {
        "p_norm": max_windows(p_norm, sample),
        "tokens": torch.full((samples, count), keys),
    }


def _find_sinks(received: Tensor) -> Reduced:
    """Return how much attention the first key and the most attended key of each head get.

    Args:
        received: the attention on each key, summed over the queries, (samples, heads, keys).

    Returns:
        `sink`: the shares of these two keys in all attention, (samples, heads, 2). `sink_token`:
        the position of the most attended key, (samples, heads).
    """
    import torch

    share = received / received.sum(-1, keepdim=True)
    largest = share.max(-1)  # over the keys: values and positions
    sink = torch.stack([share[..., 0], largest.values], -1)
    return {"sink": sink, "sink_token": largest.indices}


def _cast_inputs(heads: Heads) -> Heads:
    """Return heads with the inputs of P = softmax(scale q k^T + bias) in float64.

    The values v become empty, as P does not need them. The bias, which may be large, is cast row
    by row later. Tensors are made contiguous once, as each product q k^T would copy a view.
    """
    import torch

    dense: dict[str, Any] = {"dtype": torch.float64, "memory_format": torch.contiguous_format}
    return replace(
        heads,
        q=heads.q.to(**dense),
        k=heads.k.to(**dense),
        scale=heads.scale.to(**dense),
        sink=None if heads.sink is None else heads.sink.double(),
        v=heads.v[..., :0],
    )


def _read_map(heads: Heads, options: AttentionOptions) -> Reduced:
    """Compute the attention map P in chunks of rows, and return figures of its rows and keys.

    Returns:
        Figures of each row (the fields of a `RowProfile`), (batch, heads, queries); `mass`, the
        attention on each key summed over the queries, (batch, heads, keys); `p_norm`, the norm
        ||P||, (batch, heads), NaN for more tokens than `p_norm_tokens`.
    """
    import torch

    from lipaudit.theory import softmax
    from lipaudit.theory.heads import rows_in_reach
    from lipaudit.theory.matrix_norms import map_norm

    batch, count, queries = heads.q.shape[:3]
    keys = heads.k.shape[2]
    mass = heads.q.new_zeros(batch, count, keys)
    # ||P|| needs all rows of P at once: only for maps of short texts and images.
    p_norm = mass.new_full((batch, count), torch.nan)
    full_map = None
    if max(queries, keys) <= options.p_norm_tokens:
        full_map = heads.attention()
        p_norm = map_norm(full_map, tol=1e-7)
    pieces = []
    for chunk in heads.policy.chunks(queries, batch * count * keys, ENTRIES):
        if full_map is None:  # only these rows of P, on the keys that they can see
            p, key_range = rows_in_reach(heads, chunk.start, chunk.stop)
        else:
            p = full_map[:, :, chunk]
            key_range = slice(None)
        mass[..., key_range] += p.sum(-2)
        # Statistics of a row depend on the number of keys that it can see.
        visible_keys = heads.visible(chunk.start, chunk.stop).sum(-1).expand(p.shape[:-1])
        profile = softmax.profile_rows(p, options.k, keys=visible_keys)
        # Clones, because views would keep all rows in memory.
        pieces.append([figure.clone() for figure in profile])
    # One tensor per figure, of all chunks of rows.
    columns = [torch.cat(of_chunks, 2) for of_chunks in zip(*pieces, strict=True)]
    figures = dict(zip(softmax.RowProfile._fields, columns, strict=True))
    return figures | {"mass": mass, "p_norm": p_norm}


def _reduce_rows(by_row: Mapping[str, Tensor], sample: Tensor, samples: int) -> Reduced:
    """Reduce statistics of attention rows to sums and maxima over the rows of a sample and head.

    Args:
        by_row: by name, (windows of all samples, heads, rows); NaN where a row has no value.
        sample: index of the sample of each window.
        samples: number of samples.
    """
    import torch

    from lipaudit.measures.layers import max_windows, sum_windows

    # (windows, heads, statistics, rows).
    rows = torch.stack([by_row[name] for name in MEANS], 2)
    # Rows of padding have no statistic. Rows with few keys have some statistics, but no regime
    # (uniform, intermediate or categorical).
    is_padding = by_row["top1"].isnan()
    is_short = by_row["uniform"].isnan() & ~is_padding
    # Sums over the rows: of each statistic, and the numbers of rows that have it or are short.
    sums = {
        "total": rows.nan_to_num(0.0).sum(-1),
        "count": (~rows.isnan()).sum(-1).to(rows),
        "short": is_short.sum(-1).to(rows),
    }
    reduced = {name: sum_windows(value, sample, samples) for name, value in sums.items()}
    maxima = [by_row[name].nan_to_num(0.0).amax(-1) for name in ("g1", "softmax_norm")]
    return reduced | {"largest": max_windows(torch.stack(maxima, -1), sample)}


def summarise(parts: Sequence[Part], options: AttentionOptions) -> list[Section]:
    """Make the section `attention`: a row per head, with means over attention rows and samples.

    The section also has the statistics of each sample, and with --map the map of a head.
    """
    # Arrays (samples, heads, ...). Left out are the map of --map, and all rows of each layer
    # (--rows), whose sizes vary between samples.
    first = parts[0]
    rows_of_layers = [name for name in first.values if name.startswith(ROWS)]
    arrays = base.join_arrays(parts, besides=[*MAP, *rows_of_layers])
    heads = first.facts["heads"]
    distinct = base.select_unique(parts, arrays)  # figures count a repeated sample once
    rows = _make_rows(distinct, heads)
    stored = _list_compared(arrays["total"], arrays["count"])  # of all samples
    stored |= attention_rows.join_counts(distinct, [layer for layer, _, _ in heads])
    attended = {}
    if options.map is not None:
        for name in MAP:
            # The part has the map of one sample, (1, queries, keys). `make_section` transposes
            # every array, so it is transposed here as well: the report has (queries, keys).
            stored[f"{name}@{options.map}"] = first.values[name][0].T
        tokens = first.facts["tokens"]
        if tokens:
            attended[f"map@{options.map}"] = Attended(sample=first.ids[0], tokens=tokens)
    notes = (*base.notes(parts), *base.note_repeats(parts), *_note_short_rows(distinct))
    section = base.make_section(
        ATTENTION_TABLE, parts, options, rows, notes, arrays=stored, attended=attended
    )
    return [section]


def _make_rows(arrays: Arrays, heads: Sequence[tuple[int, int, str]]) -> tuple[Row, ...]:
    """Return the row of each head: means over all attention rows, and largest values.

    Args:
        arrays: figures of each sample, (samples, heads, ...): sums (`total`, `count`, `short`) and
            maxima (`largest`) over its attention rows, and figures of its keys.
        heads: layer, number and module of each head.
    """
    import numpy as np

    # The mean of each statistic: its sum over rows, by the number of rows that have it. This
    # number differs, as rows with few keys have no regime. If it is 0, 0 / 0 gives NaN.
    with np.errstate(invalid="ignore"):
        means = arrays["total"].sum(0) / arrays["count"].sum(0)  # (heads, statistics)
    maxima = arrays["largest"].max(0)  # of g_1 and ||M||, (heads, 2)
    sinks = arrays["sink"].mean(0)  # attention on the first and on the most attended key
    return base.make_rows(
        ATTENTION_TABLE,
        heads,
        **dict(zip(MEANS, means.T, strict=True)),
        tokens=arrays["tokens"].max(0),
        g1_max=maxima[:, 0],
        softmax_norm_max=maxima[:, 1],
        sink_first=sinks[:, 0],
        sink_max=sinks[:, 1],
        # The most frequent position of the most attended key.
        sink_token=[int(np.bincount(positions).argmax()) for positions in arrays["sink_token"].T],
        short_rows=arrays["short"].sum(0).astype(int),
        p_norm=arrays["p_norm"].mean(0),
    )


def _list_compared(total: Values, count: Values) -> Arrays:
    """Return the arrays, (samples, heads), from which two models are compared sample by sample.

    These are means of statistics over the attention rows of a sample. If samples differ in their
    number of rows, this number is stored, too: as `rows`, or for statistics that only long rows
    have, as `long_rows`. The comparison weights the mean of each sample by it.

    Args:
        total: the sum of each statistic over the rows, (samples, heads, statistics).
        count: the number of rows that have the statistic; if it is 0, the mean is NaN.
    """
    import numpy as np

    with np.errstate(invalid="ignore"):
        means = total / count
    compared = {}
    for column in ATTENTION_TABLE.columns.values():
        if column.reduction is not None:
            name = column.reduction.values  # name of the statistic that the column summarises
            compared[name] = means[..., MEANS.index(name)]
    # All rows have g1. Only long rows, of more than SHORT_ROW keys, have a regime (uniform,
    # intermediate or categorical).
    for name, statistic in (("rows", "g1"), ("long_rows", "uniform")):
        weights = count[..., MEANS.index(statistic)]
        if (weights != weights[:1]).any():
            compared[name] = weights
    return compared


def _note_short_rows(arrays: Arrays) -> Iterator[Note]:
    """Note if most attention rows have too few keys to be called fragile, uniform or one-hot."""
    short = int(arrays["short"].sum())
    # `count`: how many rows have each statistic, (samples, heads, statistics). All rows have g1.
    rows = int(arrays["count"][..., MEANS.index("g1")].sum())
    if 2 * short > rows:
        yield Note.info(
            "short-rows",
            f"{short} of {rows} rows have at most {SHORT_ROW} keys, too few for fragile rows "
            "to differ. The shares of regimes leave them out",
        )


def encode_files(parts: Sequence[Part], options: AttentionOptions) -> dict[Path, bytes]:
    """Return the file of `--rows`."""
    (path,) = options.files  # the file of --rows; without one, this function is not called
    return {path: attention_rows.encode_rows(parts, path.suffix)}


ATTENTION = Measure(
    "attention",
    (ATTENTION_TABLE,),
    AttentionOptions,
    measure,
    summarise,
    batch=8,
    encode_files=encode_files,
    place=20,
    audit=AuditRole(samples={"quick": 16, "full": 128}),
)
