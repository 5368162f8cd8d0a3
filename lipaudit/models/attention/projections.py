"""Recover, from an autograd graph, the part of a linear map behind q, k or v.

The tracer cuts the graph at every linear map y = X W + b: y is a leaf. Between y and a tensor t of
an attention call, (windows, heads, tokens, width), lies t = phi(y), made of cheap ops: reshapes,
permutations, a repetition of heads, rotary positions, a norm per head. What phi is, is asked of
J^T u, its vector-Jacobian product, with u of our choice:

1. Which token of y does a token of t read? A random u has no zero entries. So J^T u is exactly
   zero at the entries of y on which t does not depend. Each token of t gets its own set of probes,
   half of all probes. For each probe, u is nonzero only at the tokens with this probe. The probes
   that reach a row of y identify the token that reads the row. If more than half of the probes
   reach a row, two tokens read it: t mixes tokens.
2. Which channels of y feed a head? The same, with the heads numbered and columns for rows. Where
   heads share channels, either whole heads are repeated (grouped keys), or a norm runs over all
   heads before they are split (cross-head).
3. What is phi on the channels of one token, y_i -> t_i? The ops in the graph show whether phi is
   affine. If so, the values show whether phi is the same map M at all tokens (affine), or a map
   G_i of the position alone (rotation if G_i is orthogonal, else linear-pos). Any other function
   has a Jacobian G_i at X (local, such as a normalisation of queries).

The rows of M and G_i are products J^T e_c, one channel c at a time for all tokens and heads: no
two of them share an entry of y. See `graph` for the products; what is recovered is kept as a
`ProjectionForm`, which `project` applies to any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipaudit.models import graph
from lipaudit.models.attention.calls import Address, Leaf, Linear, Origin, join_linears
from lipaudit.models.graph import Probed, is_affine
from lipaudit.theory.heads import Projection


class NotClosedForm(Exception):
    """A layer is not covered by the closed form.

    Args:
        reason: what the model does instead, as a text for reports.
        kind: of q, k or v: one word for the table of layers.
    """

    def __init__(self, reason: str, kind: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = kind


@dataclass(frozen=True)
class TokenIndex:
    """The token of a linear map that each attention row reads, for any number of samples.

    Attributes:
        tokens: index of the token within its sample, (windows per sample, tokens per window).
        length: tokens per sample at the linear map.
        samples_first: whether its rows are ordered by sample, then token.
    """

    tokens: Tensor
    length: int
    samples_first: bool

    def rows(self, samples: int) -> Tensor:
        """Return the row of X behind each token of the attention, (windows, tokens), in a batch.

        X is the input of the linear map, one token per row.
        """
        sample = torch.arange(samples, device=self.tokens.device)
        sample = sample.view(-1, 1, 1)  # broadcasts with (windows per sample, tokens per window)
        if self.samples_first:  # X was (samples, tokens, channels)
            rows = sample * self.length + self.tokens
        else:  # X was (tokens, samples, channels)
            rows = self.tokens * samples + sample
        return rows.flatten(0, 1)

    def read_tokens(self, origin: Origin) -> Tensor:
        """Return the tokens X that the attention reads from the input of a linear map.

        The result is (windows * tokens, D), in the order in which the attention reads the tokens.

        Args:
            origin: holds the linear map behind q or k; each row of its input is a token.
        """
        assert origin.linear is not None  # `decode` refuses q and k without a linear map
        inputs = origin.linear.inputs
        samples = len(inputs) // self.length  # each sample has `length` rows
        return inputs[self.rows(samples).flatten()].detach()

    def is_same(self, other: TokenIndex) -> bool:
        """Say whether the attention reads the same tokens of two maps, in the same order."""
        same_order = self.samples_first == other.samples_first
        return same_order and torch.equal(self.tokens, other.tokens)

    def pick(self, values: Tensor) -> Tensor:
        """Arrange per-token values, (samples, length), as (windows, tokens)."""
        return values[:, self.tokens].flatten(0, 1)

    def resize(self, length: int, tokens: int) -> TokenIndex | None:
        """Return the index for texts of another length, or None if the index is unknown.

        Args:
            length: number of tokens of each sample at the linear map.
            tokens: number of tokens of each window in the attention.
        """
        if (length, tokens) == (self.length, self.tokens.shape[1]):
            return self
        # If the attention reads all tokens in order, the new index has all tokens in order, too.
        # Any other order (windows, selected tokens) may differ at the new length: it is unknown.
        device = self.tokens.device
        in_order = torch.arange(self.length, device=device)[None]
        if length != tokens or not torch.equal(self.tokens, in_order):
            return None
        longer = torch.arange(length, device=device)[None]
        return TokenIndex(longer, length, self.samples_first)


@dataclass(frozen=True)
class ProjectionForm:
    """How q, k or v is computed from the output of a linear map, on any batch.

    Attributes:
        kind: affine | rotation | linear-pos | local | cross-head.
        source: address of the linear map, or of several with one input: of each head of a loop,
            for example.
        index: the row of the map's output that each token reads.
        columns: the columns of the map's output that each head reads, (heads, e).
        repeat: number of repetitions of each head (grouped queries).
        mix: constant map from these columns to the channels of the head, (heads, d, e), if affine
            and not the identity.
        offset: constant added after the linear map, (heads, d), if any.
        shared: whether the local Jacobian is the same in every head and window.
    """

    kind: str
    source: tuple[Address, ...]
    index: TokenIndex
    columns: Tensor
    repeat: int
    mix: Tensor | None = None
    offset: Tensor | None = None
    shared: bool = False


LARGEST_LOCAL = 2**28  # largest number of entries of a local Jacobian: 1 GiB in float32


def decode(t: Tensor, leaves: Sequence[Leaf], samples: int) -> ProjectionForm | None:
    """Find how q, k or v is computed from the output of a linear map.

    The result says which token and which channels of this output each head reads, and which
    function it applies to them.

    Args:
        t: q, k or v, (windows, heads, tokens, width), with its graph.
        leaves: the outputs of linear maps that t depends on.
        samples: number of samples in the batch.

    Returns:
        The form; None if t is a constant (a learned query).

    Raises:
        NotClosedForm: t is not a function of linear maps of one input, token by token.
    """
    if not leaves:
        return None
    outputs, origins = zip(*leaves, strict=True)
    first, *others = origins
    if not all(map(first.reads_same, others)):
        raise NotClosedForm("is made from linear maps of several tensors", kind="multi-source")
    _require_intact(leaves)
    linears = [origin.linear for origin in origins if origin.linear is not None]
    if not linears:
        raise NotClosedForm("is not the output of a linear map", kind="unprojected")
    # t as a function of y, the outputs of all maps side by side, (tokens of all samples, columns).
    # `source.read` is a gradient in this shape: nonzero exactly where t depends on y.
    source = Probed(t, outputs, join_linears(linears).outputs)
    rows = find_token_rows(source)
    source, columns, repeat = _find_heads(source)  # now with one head of each group of equal ones
    index = attribute_rows(rows, samples, linears[0].inputs.shape[0])
    addresses = tuple(origin.address for origin in origins)
    if columns is None:  # heads share columns, as after a norm over all heads
        all_columns = (source.read != 0).any(0).nonzero().T  # those that any head reads, (1, e)
        form = ProjectionForm("cross-head", addresses, index, all_columns, repeat)
        _refuse_large(source.join_heads(), form)
        return form
    form = ProjectionForm("affine", addresses, index, columns, repeat)
    return _classify(form, source, rows, columns)


def _require_intact(leaves: Sequence[Leaf]) -> None:
    """Raise NotClosedForm if the model has changed X, the input of the linear maps, in place.

    The values of X that the maps have read are then lost. A write that leaves them as they were,
    such as one to another part of a buffer that holds X, does no harm.

    Args:
        leaves: the outputs of the maps.
    """
    if any(leaf.origin.is_overwritten for leaf in leaves):
        raise NotClosedForm("is made from a tensor that is overwritten later", kind="overwritten")


def _classify(
    form: ProjectionForm, source: Probed, rows: Tensor, columns: Tensor
) -> ProjectionForm:
    """Return the form of q, k or v with its kind: which function of a linear map's output it is.

    Let y_i be the entries of this output that the vector t_i of token i depends on. The kinds are

        affine      t_i = M y_i + c with constants M and c
        rotation    t_i = G_i y_i with an orthogonal G_i that depends on the position i (RoPE)
        linear-pos  t_i = G_i y_i with a G_i that is not orthogonal
        local       any other function of y_i, such as a norm of queries

    Args:
        form: the form with the kind affine, M the identity and c = 0.
        source: t, which is q, k or v, as a function of the output of the linear map.
        rows: the row of the output that each token reads, (windows, tokens).
        columns: the columns of the output that each head reads, (heads, e).
    """
    if not is_affine(source.t):  # judged by the ops in the graph
        _refuse_large(source, form)
        return replace(form, kind="local")
    # The cheapest test first: one matrix for all tokens, then one matrix for each position, then
    # one matrix for each token of each window.
    affine = graph.find_affine_map(source, rows, columns)
    if affine is not None:
        mix, offset = affine
        if not _is_identity(mix):
            form = replace(form, mix=mix)
        if offset.any():
            form = replace(form, offset=offset)
        return form
    local = graph.find_position_map(source, rows, columns)
    shared = local is not None  # all windows and heads have the same G_i
    if local is None:
        _refuse_large(source, form)
        local = graph.compute_map(source, rows, columns)
        # t_i = G_i y_i + c_i, with a constant at each position, has no kind of its own.
        if not graph.is_linear(source, local, rows, columns):
            return replace(form, kind="local")
    kind = "rotation" if graph.is_orthogonal(local) else "linear-pos"
    return replace(form, kind=kind, shared=shared)


def find_token_rows(source: Probed) -> Tensor:
    """Return the row of y that each token of t reads, (windows, tokens).

    Here t is q, k or v, and y is the output of a linear map.

    Args:
        source: t, (windows, heads, tokens, width), as a function of y, (rows, columns).

    Raises:
        NotClosedForm: a token does not read one row of its own.
    """
    windows, _, tokens, _ = source.t.shape
    # In most models the rows of y are the tokens in order. Two backward passes show this.
    number = torch.arange(windows * tokens, device=source.t.device)
    ordered = number.view(windows, tokens)
    touched = graph.find_touched(source.read, axis=1)  # which rows of y t depends on
    reads_all = len(touched) == len(number) and touched.all()
    if reads_all and graph.reads_only(source, ordered):
        return ordered
    # Row r of y affects the token with the number token[r], or none: -1.
    token = graph.label_affected(source, number.view(windows, 1, tokens, 1), rows=True)
    # None: a row affects several tokens. A count above 1: several rows affect one token.
    if token is None or (torch.bincount(token[token >= 0]) > 1).any():
        raise NotClosedForm("depends on several tokens", kind="mixing")
    in_order = _sort_by_label(token)
    if len(in_order) < len(number):  # some token depends on no row
        raise NotClosedForm("has tokens that do not come from the input", kind="partial")
    return in_order.view(windows, tokens)


def _sort_by_label(label: Tensor) -> Tensor:
    """Return the numbers of rows in the order of their labels, without rows of the label -1."""
    unlabelled = int((label < 0).sum())  # these come first
    return label.argsort(stable=True)[unlabelled:]


def _is_identity(mix: Tensor) -> bool:
    """Say whether matrices, (heads, d, e), are all the identity."""
    if mix.shape[-1] != mix.shape[-2]:
        return False
    identity = graph.make_identity(mix.shape[-1], mix)
    return torch.equal(mix, identity.expand_as(mix))


def attribute_rows(rows: Tensor, samples: int, total: int) -> TokenIndex:
    """Return which token of its sample each token of the attention reads, for any batch size.

    Args:
        rows: the row of the linear map that each token reads, (windows, tokens).
        samples: number of samples in the batch; windows are ordered by sample.
        total: number of rows of the linear map: the tokens of all samples.

    Raises:
        NotClosedForm: rows are ordered neither by sample, then token, nor by token, then sample.
    """
    windows = rows.shape[0]
    if windows % samples == 0 and total % samples == 0:
        length = total // samples  # tokens of a sample
        first = rows[: windows // samples]  # the rows that the first sample (number 0) reads
        # Token i of sample s is row s * length + i if samples come first, and row i * samples + s
        # if tokens come first. With s = 0, the token is the row, or the row // samples.
        by_sample = TokenIndex(first, length, samples_first=True)
        by_token = TokenIndex(first // samples, length, samples_first=False)
        for index in (by_sample, by_token):
            if torch.equal(index.rows(samples), rows):
                return index
    raise NotClosedForm("has rows that cannot be attributed to samples", kind="rows")


def _find_heads(source: Probed) -> tuple[Probed, Tensor | None, int]:
    """Find which columns of a linear map each head reads, and how often heads are repeated.

    With grouped-query attention, several heads in a row have the same keys and values.

    Args:
        source: q, k or v, (windows, heads, tokens, width), as a function of the map's output.

    Returns:
        The source with one of each group of repeated heads; the columns, (heads, e), or None if
        heads share some; the number of repetitions of each head.
    """
    t = source.t
    heads = t.shape[1]
    # Try no repetition first. If no two heads share columns, no head is repeated, and equal heads
    # are chance (or zero). Otherwise try the largest repetition first: 8 equal heads are one head
    # repeated 8 times, not two heads repeated 4 times.
    for repeat in (1, *range(heads, 1, -1)):
        if heads % repeat:
            continue
        one_of_each = source  # the first head of each group of `repeat` heads
        if repeat > 1:
            one_of_each = replace(source, t=t[:, ::repeat])
        if not torch.equal(one_of_each.t.repeat_interleave(repeat, 1), t):
            continue
        columns = _find_columns(one_of_each)
        if columns is not None or repeat > 1:
            return one_of_each, columns, repeat
    return source, None, 1  # heads share columns, and none is repeated


def _find_columns(source: Probed) -> Tensor | None:
    """Return the columns of a linear map that each head reads, (heads, e), or None if shared.

    Args:
        source: q, k or v, (windows, heads, tokens, width), as a function of the map's output y,
            (rows, columns).

    Raises:
        NotClosedForm: heads read different numbers of columns.
    """
    count = source.t.shape[1]
    number = torch.arange(count, device=source.t.device)
    # Column c of y affects the head with the number head[c], or none: -1.
    head = graph.label_affected(source, number.view(1, -1, 1, 1), rows=False)
    if head is None:
        return None
    sizes = torch.bincount(head[head >= 0], minlength=count)
    if (sizes != sizes[0]).any():
        raise NotClosedForm("uses more channels in some heads than in others", kind="ragged")
    return _sort_by_label(head).view(count, -1)


def _refuse_large(source: Probed, form: ProjectionForm) -> None:
    """Raise NotClosedForm if the Jacobians of all tokens take too much memory.

    Each vector of q, k or v has a Jacobian, (channels of the head, columns of the linear map that
    the head reads).
    """
    size = source.t.numel() * form.columns.shape[1]
    if size > LARGEST_LOCAL:
        raise NotClosedForm(f"has a local Jacobian of {size:.1e} numbers", kind="large")


@dataclass(frozen=True)
class Projected:
    """A projection on a batch, and its input.

    Attributes:
        form: how q, k or v is computed, on every batch.
        projection: the map from x to q, k or v on this batch, per head.
        x: the input of the projection, (windows, tokens, D); `capture.add_inputs` sets padded
            tokens to 0.
        index: the rows of the linear map's input that x consists of.
        linear: the linear map; several maps of one input count as one.
        leaves: the outputs of these maps, on which q, k or v depends.
    """

    form: ProjectionForm
    projection: Projection
    x: Tensor
    index: TokenIndex
    linear: Linear
    leaves: tuple[Leaf, ...]


def project(form: ProjectionForm, t: Tensor, leaves: Sequence[Leaf], samples: int) -> Projected:
    """Return the map from X to q, k or v on this batch, in the form that `decode` found.

    `decode` ran once, on a generic sample. Here, weights are read again, and every batch is
    checked against the form.

    Args:
        form: from `decode`.
        t: q, k or v, (windows, heads, tokens, width), with its graph.
        leaves: the outputs of linear maps that t depends on.
        samples: number of samples in the batch.

    Raises:
        NotClosedForm: t is computed in another way than in `decode`.
    """
    _require_intact(leaves)
    leaves, linears = _find_same_maps(form, leaves)
    # Maps of one input act like one map with all their columns side by side.
    linear = join_linears(linears)
    # Of repeated heads, only the first of each group is read.
    t = t[:, :: form.repeat]
    # t together with the tensors that it is computed from: its gradients show what it reads.
    source = Probed(t, tuple(leaf.tensor for leaf in leaves), linear.outputs)
    total = linear.inputs.shape[0]  # rows of X: the tokens of all samples
    # Which token of X each token of t reads, from `decode`; None if a text of another length may
    # have another order. `rows` has the row of X of each token of t.
    index = form.index.resize(total // samples, t.shape[2])
    if index is None:  # find it by gradients
        rows = find_token_rows(source)
        index = attribute_rows(rows, samples, total)
    else:
        rows = index.rows(samples)
        # Check by gradients that t reads no other tokens on this batch. An affine map needs no
        # such check: `_read_projection` compares it with t at all tokens.
        if form.kind != "affine" and not graph.reads_only(source, rows):
            raise NotClosedForm("reads other tokens than in the first pass", kind="changed")
    projection = _read_projection(form, source, linear, rows)
    projection = _repeat_heads(projection, form.repeat)
    x = graph.take(linear.inputs, rows, dim=0)
    return Projected(form, projection, x, index, linear, leaves)


def _find_same_maps(
    form: ProjectionForm, leaves: Sequence[Leaf]
) -> tuple[tuple[Leaf, ...], list[Linear]]:
    """Return the outputs of the linear maps behind q, k or v in the form's order, and the maps.

    Args:
        form: how q, k or v was computed in the first pass.
        leaves: the outputs of linear maps that q, k or v depends on in this pass.

    Raises:
        NotClosedForm: the maps differ from the maps of the first pass, or read several inputs.
    """
    by_address = {leaf.origin.address: leaf for leaf in leaves}
    in_order = tuple(by_address[address] for address in form.source if address in by_address)
    linears = [leaf.origin.linear for leaf in in_order if leaf.origin.linear is not None]
    has_same_maps = len(linears) == len(leaves) == len(form.source)
    if not has_same_maps or not all(map(linears[0].reads_same, linears[1:])):
        raise NotClosedForm("comes from other linear maps than in the first pass", kind="changed")
    return in_order, linears


def _read_projection(
    form: ProjectionForm, source: Probed, linear: Linear, rows: Tensor
) -> Projection:
    """Return the map from X to q, k or v on this batch, per head.

    A linear map y = x W + b is followed by a function t of y, such as rotary positions or a norm.
    The result has W and b of the linear map, and the Jacobian of this function. If the function is
    affine, t = M y + c, the result has W M^T and M b + c in place of W and b, and no Jacobian.
    Heads that are repeated (grouped keys) have one entry.

    Args:
        form: how q, k or v is computed.
        source: q, k or v as a function t(y) of the output of the linear map.
        linear: the linear map x W + b.
        rows: the row of y that each token reads, (windows, tokens). The map runs on all tokens in
            the model's order, and a window takes some of them (shifted windows, selected tokens).
    """
    # W and b of the columns that each head reads, (heads, D, e) and (heads, e).
    weight = graph.take(linear.weight, form.columns, dim=1).transpose(0, 1)
    bias = None
    if linear.bias is not None:
        bias = graph.take(linear.bias, form.columns, dim=0)
    if form.kind == "affine":
        _require_affine(form, source, rows)
        return _mix_channels(form, weight, bias)
    if form.kind != "cross-head":  # rotation, linear-pos or local: a Jacobian for each head
        local = _compute_local_map(form, source, rows)
        return Projection(weight, bias, local, form.kind)
    # A norm over all heads follows the linear map: each output channel depends on the columns of
    # all heads. `form.columns` has one row with all of them, (1, e), as if there were one head. So
    # every head gets all columns, and its own rows of the joint Jacobian.
    heads = source.t.shape[1]
    # The joint Jacobian, (windows, tokens, heads * d, e), without its axis of one joint head.
    local = _compute_local_map(form, source.join_heads(), rows)[:, 0]
    local = local.reshape(*local.shape[:2], heads, -1, local.shape[3])
    local = local.transpose(1, 2)  # (windows, heads, tokens, d, e)
    if bias is not None:
        bias = bias.expand(heads, -1)
    return Projection(weight.expand(heads, -1, -1), bias, local, form.kind)


def _require_affine(form: ProjectionForm, source: Probed, rows: Tensor) -> None:
    """Raise NotClosedForm unless t = M y + c at every token, up to rounding.

    Here t is q, k or v, and y is the output of a linear map.

    Args:
        form: holds M (None for the identity) and c (None for 0) of each head.
        source: t as a function of y.
        rows: the row of y that each token reads, (windows, tokens).
    """
    expected = source.values(rows, form.columns)  # y of each head and token
    if form.mix is not None:
        expected = expected @ form.mix.mT
    if form.offset is not None:
        expected = expected + form.offset[:, None]
    t = source.t.detach()
    if not graph.is_rounding(expected - t, graph.LINEAR_TOLERANCE, t):
        raise NotClosedForm("is no longer an affine function of its input", kind="changed")


def _mix_channels(form: ProjectionForm, weight: Tensor, bias: Tensor | None) -> Projection:
    """Return the projection t = M y + c of y = X W + b in each head: weight W M^T, bias M b + c.

    Args:
        form: holds M (None for the identity), (heads, d, e), and c (None for 0), (heads, d).
        weight: W, (heads, D, e).
        bias: b, (heads, e), or None for 0.
    """
    mix = form.mix
    if mix is not None:
        weight = weight @ mix.mT
        if bias is not None:
            bias = (mix @ bias[..., None])[..., 0]
    if bias is None:
        bias = form.offset
    elif form.offset is not None:
        bias = form.offset + bias
    return Projection(weight, bias, local=None, kind=form.kind)


def _compute_local_map(form: ProjectionForm, source: Probed, rows: Tensor) -> Tensor:
    """Return the Jacobian dt_i / dy_i of q, k or v at each token i.

    t is q, k or v. It is computed, by RoPE for example, from the output y of a linear map, with
    one token per row. t_i is the vector of token i in one head, and y_i has the entries of y that
    t_i depends on.

    Args:
        form: how t is computed, as found in the first pass: the columns of y of each head, and
            whether all windows and heads had the same Jacobians (`shared`), as in RoPE.
        source: t, (windows, heads, tokens, d), as a function of y.
        rows: the row of y that each token of t reads, (windows, tokens).

    Returns:
        (windows, heads, tokens, d, e), with e entries in each y_i. The first two axes have size 1
        if all windows and heads have the same Jacobians.
    """
    local = None
    # One Jacobian per position is much cheaper. `find_position_map` also checks it on this batch,
    # and returns None if windows or heads differ, or if t_i is not linear in y_i.
    if form.shared:
        local = graph.find_position_map(source, rows, form.columns)
    if local is None:  # one Jacobian for each window and head
        local = graph.compute_map(source, rows, form.columns)
    return local


def _repeat_heads(projection: Projection, repeat: int) -> Projection:
    """Return the projection with each head repeated, as of grouped keys and values."""
    if repeat == 1:
        return projection
    local = projection.local
    if local is not None and local.shape[1] > 1:  # not one Jacobian for all heads
        local = local.repeat_interleave(repeat, 1)
    bias = projection.bias
    if bias is not None:
        bias = bias.repeat_interleave(repeat, 0)
    weight = projection.weight.repeat_interleave(repeat, 0)
    return replace(projection, weight=weight, bias=bias, local=local)
