"""Read logits: s q k^T + bias, any function of each pair (q_i, k_j), a sink, position vectors.

`read_product` reads q, k, v and the logits of a call. `read_position_terms` finds the vectors that
q and k are multiplied by in addition: in S_ij = s <q_i, k_j> + <q_i, r_ij> + <k_j, t_ij> + bias
the gradients of the logits with respect to q_i and k_j are s k_j + r_ij and s q_i + t_ij. So r and
t are these gradients without the first terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lipaudit.data.batch import Batch
from lipaudit.models import graph
from lipaudit.models.attention.calls import AttentionCall, Explicit, Fused
from lipaudit.models.attention.projections import NotClosedForm, Projected, ProjectionForm
from lipaudit.models.graph import SHAPE_OPS, Probed, leaves, nodes, op
from lipaudit.theory.heads import Heads, Pairs
from lipaudit.theory.pullback import pull_back

_ADDED = {"Add", "Clamp", "MaskedFill", "Maximum", "Rsub", "Sub", "Where"}
"""Ops that may put a bias into the logits."""
_AFFINE_OPS = {"Div", "Mul", "Neg", "Split"} | _ADDED
_LARGEST = {"Amax", "Max"}  # the largest logit of a row, subtracted from all of them
_ROUNDING = 4  # times the machine epsilon of the row's largest logit
_NEGLIGIBLE = 1e-5  # in a logit: P moves by this share, far below every tolerance
_OUT_OF_REACH = 1e9  # a level that no logit reaches: the lowest number of float32 stands for -inf


BESIDE = "its logits depend on the input not only through q k^T"


def read_product(
    call: AttentionCall, batch: Batch, queries: ProjectionForm | None
) -> tuple[Heads, Tensor | None]:
    """Return q, k, v and the logits of a call, without X and projections.

    Args:
        call: the call, with its axes in order (`AttentionCall.arrange`).
        batch: the samples.
        queries: the form of q, which has their tokens, if known.

    Returns:
        The heads, and S with its graph if it depends on q or k beyond their product.

    Raises:
        NotClosedForm: a logit depends on another pair's product, or P is changed before its
            product with v.
    """
    fields, logits = _read_logits(call)
    q = call.q.detach()
    k = call.k.detach()
    v = call.v.detach()
    windows = q.shape[0]
    tokens = q.shape[2]
    # Which queries are real tokens, (windows, tokens).
    mask = batch.mask
    valid = None
    if mask is not None and not bool(mask.all()):
        # Windows and tokens of the queries may be arranged in any way: by their index, if known.
        index = None
        if queries is not None:
            index = queries.index.resize(mask.shape[1], tokens)
        if index is not None:
            valid = index.pick(mask)
        elif (windows, tokens) == mask.shape:
            valid = mask
    heads = Heads(
        x=q.new_zeros(windows, tokens, 0),
        q=q,
        k=k,
        v=v,
        causal=isinstance(call.form, Fused) and call.form.causal,
        valid=valid,
        to_q=None,
        to_k=None,
        to_v=None,
        sample=torch.arange(windows, device=q.device) * len(batch) // windows,
        **fields,
    )
    return heads, logits


def _read_logits(call: AttentionCall) -> tuple[dict[str, Any], Tensor | None]:
    """Return the fields of `Heads` for the logits, and S with its graph as in `read_product`.

    They are scale s, bias B with S = s q k^T + B, sink, and pairs with the slope f,
    dS_ij = f_ij s d<q_i, k_j>. With pairs, which change the Jacobian, not only P, the bias is S.
    Masked entries of it are -inf; so is every entry of a query whose keys are all masked.
    """
    form = call.form
    if isinstance(form, Explicit):
        return _read_explicit_logits(form, (call.q @ call.k.mT).detach())
    scale = call.q.new_full((1, 1), form.scale)
    if form.mask is None or not form.mask.requires_grad:
        return {"scale": scale, "bias": form.mask}, None
    # The mask depends on the input, as relative positions times the queries do.
    logits = form.scale * (call.q @ call.k.mT) + form.mask
    return {"scale": scale, "bias": logits.detach(), "pairs": Pairs(None)}, logits


def _read_explicit_logits(form: Explicit, product: Tensor) -> tuple[dict[str, Any], Tensor | None]:
    """Return the same as `_read_logits` for a written-out softmax, given q k^T."""
    keys = _find_keys(form, product)
    # The ops between q k^T and the logits.
    ends = {edge.node for edge in form.products}
    path = [node for node in nodes(form.logits, ends) if node not in ends]
    largest = [node for node in path if op(node) in _LARGEST]
    slope = _read_slopes(form, product, keys, largest)
    if not _is_unchanged(form, keys):
        raise NotClosedForm("P is changed between the softmax and the values")
    sink = None
    if keys.start is not None:
        sink = form.logits.detach()[..., keys.start - 1]
    # No known model has both; position terms would have to exclude the sink.
    if form.others and sink is not None:
        raise NotClosedForm(f"it has sinks, and {BESIDE}")
    logits = form.logits.detach()[..., keys]
    p = form.p.detach()[..., keys]
    # Pairs without weight do not move the output, whatever their slope is.
    is_live = (p > 0) & (slope != 0).any(-1, keepdim=True)
    sizes = torch.where(is_live, slope, 0.0).abs()
    scale = sizes.amax((-2, -1), keepdim=True)  # s of each head
    is_scaled = _is_close(torch.where(is_live, slope, scale), scale, 1e-4)
    masked = (slope == 0) & ~is_live
    fields: dict[str, Any] = {"scale": scale[..., 0, 0], "sink": sink}
    if is_scaled and not form.others and _is_affine_path(path, has_sink=sink is not None):
        # S = s q k^T + B
        ops = {op(node) for node in path}
        shifted = sink is None and not _LARGEST.isdisjoint(ops)
        bias = None
        if masked.any() or not _ADDED.isdisjoint(ops):
            bias = _read_bias(logits, scale * product, masked, shifted=shifted)
        return fields | {"bias": bias}, None
    # f: the slope of each pair relative to the scale of its head, 1 everywhere for plain logits.
    f = torch.where(is_live, slope / scale, 0.0).nan_to_num(0.0)
    rounding = _ROUNDING * torch.finfo(slope.dtype).eps
    is_one = _is_close(torch.where(is_live, f, 1.0), torch.ones_like(f), rounding)
    bias = logits.masked_fill(masked, -torch.inf)
    # f = 1 is stored where an op may bend the logits at other samples: they are not s q k^T + B.
    pairs = Pairs(None if is_one and form.others else f)
    relative = form.logits if form.others else None
    return fields | {"bias": bias, "pairs": pairs}, relative


def _is_affine_path(path: Sequence[Node], *, has_sink: bool) -> bool:
    """Say whether ops from q k^T to the logits are affine: slopes are the same at all samples."""
    allowed = _AFFINE_OPS | SHAPE_OPS | _LARGEST
    if has_sink:
        allowed = allowed | {"ConstantPadNd"}
    return all(op(node) in allowed and not _is_cut_off(node) for node in path)


def _find_keys(form: Explicit, product: Tensor) -> slice:
    """Return which logits of a row belong to keys: those whose weights multiply values."""
    m = product.shape[-1]  # number of keys
    extra = form.logits.shape[-1] - m
    if extra == 0:
        return slice(None)
    if extra != 1:
        raise NotClosedForm("it has logits beyond those of its keys and one sink")
    # The sink is behind the keys (gpt-oss) or in front of them.
    for keys in (slice(0, m), slice(1, m + 1)):
        if _is_unchanged(form, keys):
            return keys
    raise NotClosedForm("P with its sink is changed between the softmax and the values")


def _read_slopes(form: Explicit, product: Tensor, keys: slice, largest: Sequence[Node]) -> Tensor:
    """Return dS_ij / d<q_i, k_j>, after checking that S_ij depends on no other product.

    The largest logit of a row does not count if it is subtracted from all of them: the softmax
    stays the same. With a sink the cotangents of a row sum to 0, and the check covers the sink.

    Args:
        form: the logits.
        product: q k^T.
        keys: columns of the keys.
        largest: the nodes of the largest logit of each row.
    """
    if largest:
        _require_subtracted(form, largest)

    def pull(cotangent: Tensor) -> Tensor:
        """Return the slopes times a cotangent of the keys' logits, minus its sum at the sink."""
        whole = cotangent
        if keys.start is not None:
            whole = cotangent.new_zeros(form.logits.shape)
            whole[..., keys] = cotangent
            whole[..., keys.start - 1] = -cotangent.sum(-1)
        result, _ = _pull_logits(form, largest, whole.to(form.logits.dtype))
        if result is None:  # a linear map of the logits, where the graph is cut
            raise NotClosedForm(BESIDE)
        return result.to(cotangent.dtype)

    # If S_ij depends on the product of its own pair only, J^T u = slopes * u for every u.
    generator = torch.Generator(product.device).manual_seed(0)
    u = torch.rand(product.shape, generator=generator, device=product.device) < 0.5
    u = u.to(product)
    slopes = pull(torch.ones_like(u))
    # Where u is 0 exactly 0: a small share of a large head's logits is large in another head.
    if not _is_close(pull(u), slopes * u, 1e-3):
        raise NotClosedForm("its logits mix heads or keys")
    return slopes


def _pull_logits(
    form: Explicit, largest: Sequence[Node], u: Tensor
) -> tuple[Tensor | None, list[Tensor]]:
    """Return J^T u of the logits in q k^T, and the gradients that reach the largest logits.

    These gradients go no further: J^T u lacks the part through the largest logit of each row.
    """
    gradients: list[Tensor] = []

    def block(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        gradients.extend(g for g in grads if g is not None)
        return tuple(None if g is None else 0 * g for g in grads)

    with ExitStack() as hooks:
        for node in largest:
            hooks.callback(node.register_prehook(block).remove)
        return form.pull(u), gradients


def _require_subtracted(form: Explicit, largest: Sequence[Node]) -> None:
    """Raise NotClosedForm unless a row's largest logit is subtracted equally from all of them.

    Cotangents that sum exactly to 0 over a row then give no gradient to it.
    """
    logits = form.logits
    generator = torch.Generator(logits.device).manual_seed(1)
    # Small integers add up to exactly 0 in floating point; random real numbers would not.
    u = torch.randint(-9, 10, logits.shape, generator=generator, device=logits.device)
    u = u.to(logits.dtype)
    u[..., -1] -= u.sum(-1)
    _, gradients = _pull_logits(form, largest, u)
    if any(bool((gradient != 0).any()) for gradient in gradients):
        raise NotClosedForm("its logits depend on the largest one of their row")


def _read_bias(logits: Tensor, linear: Tensor, masked: Tensor, *, shifted: bool) -> Tensor | None:
    """Return B = S - s q k^T; 0 in heads where it is rounding error only, None if in all heads.

    Rows are judged separately, because heads differ in the size of their rounding errors. Rounding
    that would change P is kept, so that P equals the model's.

    Args:
        logits: S, (windows, heads, queries, keys).
        linear: s q k^T.
        masked: pairs with B = -inf.
        shifted: whether the model subtracts the largest logit of each row.
    """
    bias = (logits - linear).masked_fill(masked, -torch.inf)
    if shifted:  # a constant of a row drops out of P: let the largest bias be 0
        bias = bias - bias.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    largest = linear.abs().amax(-1, keepdim=True)
    rounding = _ROUNDING * torch.finfo(logits.dtype).eps * largest
    rounding = rounding.clamp_max(_NEGLIGIBLE)
    rows = (bias.abs() > rounding).any(-1, keepdim=True)
    has_no_bias = ~rows.any(-2, keepdim=True)  # of each head
    if has_no_bias.all():
        return None
    return bias.masked_fill(has_no_bias, 0.0)


def _is_close(a: Tensor, b: Tensor, relative: float) -> bool:
    """Say whether |a - b| <= relative |b| everywhere; `torch.allclose` is several times slower."""
    return bool(((a - b).abs_() <= relative * b.abs()).all())


def _is_cut_off(node: Node) -> bool:
    """Say whether an op cuts logits off at a level that they may reach, at X or elsewhere."""
    # Where autograd stores the levels of these ops.
    names = {"Clamp": ("_saved_min", "_saved_max"), "Maximum": ("_saved_self", "_saved_other")}
    for name in names.get(op(node), ()):
        level = getattr(node, name, None)
        if level is None or getattr(level, "requires_grad", False):  # logits, not a level
            continue
        least = torch.as_tensor(level).abs().min()
        if float(least) < _OUT_OF_REACH:
            return True
    return False


def _is_unchanged(form: Explicit, keys: slice) -> bool:
    """Say whether these columns of P multiply the values unchanged; a NaN row counts as zeros."""
    p = form.p.detach()[..., keys].nan_to_num(0.0)
    weights = form.weights.detach()
    return torch.equal(p.to(weights), weights)


LARGEST = 2**27  # largest number of entries in r, or in t: 1 GiB in float64
_GRADIENT_ROUNDING = 64  # times the machine epsilon of the largest gradient


def read_position_terms(heads: Heads, logits: Tensor, parts: Mapping[str, Projected]) -> Pairs:
    """Return r and t of a layer, the same in all windows, with its slope.

    Args:
        heads: the heads of the layer; their `pairs` hold the slope.
        logits: S with its graph, (windows, heads, queries, keys).
        parts: the origins of its q, k and v.

    Raises:
        NotClosedForm: S_ij depends on more than q_i and k_j, r or t depends on the input, or they
            are too large.
    """
    assert heads.pairs is not None
    sides = {name: parts[name] for name in "qk" if name in parts}
    own_leaves = {id(leaf.tensor) for part in sides.values() for leaf in part.leaves}
    inputs, _ = leaves(logits)
    if any(id(leaf) not in own_leaves for leaf in inputs):
        raise NotClosedForm(BESIDE)
    slope = heads.pairs.slope
    is_live = heads.attention() > 0
    s = heads.scale[..., None, None]
    samples = int(heads.sample[-1]) + 1
    r = None
    t = None
    if "q" in sides:
        r = _read_term(logits, sides["q"], samples, s * heads.k, slope, is_live)
    if "k" in sides:  # the same with queries and keys swapped
        swapped_slope = None if slope is None else slope.mT
        t = _read_term(logits.mT, sides["k"], samples, s * heads.q, swapped_slope, is_live.mT)
        if t is not None:
            t = t.transpose(2, 3)
    return Pairs(slope, r, t)


def _read_term(
    logits: Tensor,
    part: Projected,
    samples: int,
    plain: Tensor,
    slope: Tensor | None,
    is_live: Tensor,
) -> Tensor | None:
    """Return r_ij = dS_ij / dq_i - f_ij s k_j, (1, heads, tokens, others, d), or None for 0.

    Args:
        logits: S as a function of q, (windows, heads, tokens, others).
        part: the origin of q.
        samples: number of samples in the batch.
        plain: s k_j for all others, (windows, heads, others, d).
        slope: f, or None for 1.
        is_live: P_ij > 0; the other pairs do not matter.

    Raises:
        NotClosedForm: r is too large, or differs between windows.
    """
    columns = part.form.columns
    if part.form.repeat > 1:
        raise NotClosedForm(f"{BESIDE}, behind shared keys")
    if part.projection.local is not None:
        raise NotClosedForm(f"{BESIDE}, behind a rotation or norm")
    size = logits[0].numel() * columns.shape[1]
    if size > LARGEST:
        raise NotClosedForm(f"its position terms have {size:.1e} numbers")
    all_columns = columns.flatten()
    outputs = tuple(leaf.tensor for leaf in part.leaves)

    def read_columns(*y: Tensor) -> Tensor:
        """Return the columns of q of the map's output, in the order of the heads."""
        return part.linear.outputs(*y)[:, all_columns]

    source = Probed(logits, outputs, read_columns)
    _require_own_pairs(source, part.index.rows(samples), columns.shape[1])
    channels = list[Tensor]()  # r of each channel, (heads, tokens, others)
    # The largest entries in each head: of how far windows differ, of the gradients, of r.
    largest_spread = largest_gradient = largest = plain.new_zeros(is_live.shape[1])
    for c, gradient in enumerate(_differentiate_channels(source, part)):
        product_gradient = plain[..., None, :, c]  # f_ij s k_j
        if slope is not None:
            product_gradient = slope * product_gradient
        r = (gradient - product_gradient).where(is_live, 0.0)
        mean = r.sum(0) / is_live.sum(0).clamp_min(1)  # over the windows
        spread = (r - mean).where(is_live, 0.0)
        largest_spread = torch.maximum(largest_spread, graph.find_largest(spread))
        largest_gradient = torch.maximum(largest_gradient, graph.find_largest(gradient))
        largest = torch.maximum(largest, graph.find_largest(mean[None]))
        channels.append(mean)
    if not bool((largest_spread <= graph.LINEAR_TOLERANCE * largest_gradient).all()):
        raise NotClosedForm(BESIDE)
    eps = torch.finfo(largest_gradient.dtype).eps
    rounding = _GRADIENT_ROUNDING * eps * largest_gradient
    if not bool((largest > rounding).any()):
        return None
    return torch.stack(channels, -1)[None]


def _differentiate_channels(source: Probed, part: Projected) -> Iterator[Tensor]:
    """Yield the gradients dS_ij / dq_ic of all pairs for one channel c of q after the other.

    Args:
        source: S as a function of the columns of q, in the order of the heads.
        part: the origin of q.

    Raises:
        NotClosedForm: q has another width than these columns.
    """
    # Changes of the columns of the map, the same at every token, of which each changes one channel
    # of q in all heads: (d, heads * d). q = M y for a mix M of channels, so y changes by M^-1.
    columns = part.form.columns
    mix = part.form.mix
    if mix is None:
        unit = torch.eye(columns.shape[1], dtype=part.x.dtype, device=part.x.device)
        inverse = unit.expand(len(columns), -1, -1)
    elif mix.shape[-1] == mix.shape[-2]:
        inverse = torch.linalg.inv(mix)
    else:
        raise NotClosedForm(f"{BESIDE}, behind a map to another width")
    moves = inverse.permute(2, 0, 1).flatten(1)
    # J^T u is linear in u, so its vector-Jacobian product with a change of all tokens is J times
    # that change. As S_ij depends on q_i alone, entry ij is the effect of changing q_i: d products
    # suffice for all pairs, instead of one product per key.
    u = torch.zeros_like(source.t, requires_grad=True)
    pulled = pull_back(source.t, source.leaves, u, create_graph=True)
    rows = source.as_rows(*pulled)
    for move in moves:
        (gradient,) = pull_back(rows, u, move.expand_as(rows), retain_graph=True)
        yield gradient


def _require_own_pairs(source: Probed, rows: Tensor, width: int) -> None:
    """Check by exact zeros that row i of a head's logits depends on its q_i only.

    Args:
        source: S as a function of the columns of q, in the order of the heads.
        rows: rows of its tokens in the linear map, (windows, tokens).
        width: number of columns of each head.
    """
    windows, heads, tokens, _ = source.t.shape
    # Each row of the map affects the logits of its own token alone, or none (-1).
    token = torch.arange(windows * tokens, device=rows.device)
    token_of_row = graph.label_affected(source, token.view(windows, 1, tokens, 1), rows=True)
    if token_of_row is None:
        raise NotClosedForm(BESIDE)
    expected = torch.full_like(token_of_row, -1)
    expected[rows.flatten().to(expected.device)] = token
    if not bool(((token_of_row == expected) | (token_of_row == -1)).all()):
        raise NotClosedForm(BESIDE)
    # Each column affects the logits of its own head alone, or none.
    head = torch.arange(heads, device=rows.device)
    head_of_column = graph.label_affected(source, head.view(1, heads, 1, 1), rows=False)
    if head_of_column is None:
        raise NotClosedForm(BESIDE)
    expected = head.repeat_interleave(width)
    if not bool(((head_of_column == expected) | (head_of_column == -1)).all()):
        raise NotClosedForm(BESIDE)
