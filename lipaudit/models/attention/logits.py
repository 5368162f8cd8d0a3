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
    """Return q, k, v and the logits of a call as `Heads`, without X and projections.

    Args:
        call: the call, with canonical axes (`AttentionCall.arrange`).
        batch: the samples.
        queries: how q is computed from X, with the token of each query; None: unknown.

    Returns:
        The heads. And the logits S with their graph, if they depend on q or k beyond the product
        q k^T (relative positions); else None.

    Raises:
        NotClosedForm: a logit depends on the product of another pair of query and key, or P is
            changed before P is multiplied by v.
    """
    fields, logits = _read_logits(call)
    q = call.q.detach()
    k = call.k.detach()
    v = call.v.detach()
    windows, _, tokens, _ = q.shape
    heads = Heads(
        x=q.new_zeros(windows, tokens, 0),  # `capture.add_inputs` replaces it
        q=q,
        k=k,
        v=v,
        causal=isinstance(call.form, Fused) and call.form.causal,
        valid=_find_valid_queries(batch.mask, queries, windows, tokens),
        to_q=None,
        to_k=None,
        to_v=None,
        # The sample of each window: every sample has the same number of windows, in order.
        sample=torch.arange(windows, device=q.device) * len(batch) // windows,
        **fields,
    )
    return heads, logits


def _find_valid_queries(
    mask: Tensor | None, queries: ProjectionForm | None, windows: int, tokens: int
) -> Tensor | None:
    """Return which queries are real tokens, not padding, (windows, tokens); None: all, or unknown.

    Args:
        mask: the real tokens of the model's input, (samples, length); None: all.
        queries: how q is computed from X, with the token of each query; None: unknown.
        windows: number of windows of the attention.
        tokens: number of queries in each window.
    """
    if mask is None or mask.all():
        return None
    if queries is not None:
        index = queries.index.resize(mask.shape[1], tokens)
        if index is not None:
            return index.pick(mask)
    # As many queries as tokens, although their order is unknown: take them for the tokens.
    if (windows, tokens) == mask.shape:
        return mask
    return None


def _read_logits(call: AttentionCall) -> tuple[dict[str, Any], Tensor | None]:
    """Return the fields of `Heads` that describe the logits S, and S with its graph.

    In most models S = s q k^T + B. The field "scale" is then s of each head, and "bias" is B (-inf
    for masked pairs) or None. In other models a logit S_ij is another function of the product
    <q_i, k_j>, or depends on q_i and k_j in further ways. Then "pairs" holds the slopes f in
    dS_ij = f_ij s d<q_i, k_j>, and "bias" holds S itself. "sink" is a logit without a key.

    The second item is S with its graph if S depends on q or k beyond q k^T, else None.
    """
    form = call.form
    if isinstance(form, Explicit):
        return _read_explicit_logits(form, (call.q @ call.k.mT).detach())
    # torch's fused attention: S = s q k^T + mask.
    scale = call.q.new_full((1, 1), form.scale)
    if form.mask is None or not form.mask.requires_grad:
        return {"scale": scale, "bias": form.mask}, None
    # The mask depends on the model's input, for example on queries times relative positions. A
    # slope of None means 1: the logits do contain s q k^T, and more.
    logits = form.scale * (call.q @ call.k.mT) + form.mask
    return {"scale": scale, "bias": logits.detach(), "pairs": Pairs(slope=None)}, logits


def _read_explicit_logits(form: Explicit, product: Tensor) -> tuple[dict[str, Any], Tensor | None]:
    """Return the fields of `Heads` that describe the logits S of a written-out softmax.

    The model's code between q k^T and S is unknown. Slopes dS_ij / d<q_i, k_j> and values of S
    show what it computes: s q k^T + B with one slope s in each head, or another function of each
    product <q_i, k_j>. A column of S without a key (a sink) takes a share of the softmax.

    A pair (i, j) is live if P_ij > 0. Slopes of other pairs do not matter for the output: they may
    be 0, as behind masked_fill, and do not count when slopes are compared.

    Args:
        form: the logits.
        product: q k^T, (windows, heads, queries, keys).

    Returns:
        The fields: "scale" (s of each head), "sink" and "bias". If S = s q k^T + B, "bias" is B.
        Otherwise "bias" is S itself, and "pairs" has the slopes relative to s.

        And S with its graph if S depends on q or k beyond q k^T (relative positions), else None.
        `read_position_terms` reads the position vectors from this graph.

    Raises:
        NotClosedForm: a logit depends on the product of another pair of query and key, or P is
            changed before P is multiplied by v.
    """
    if form.weights.isnan().any():
        raise NotClosedForm("P is NaN in some rows (all keys masked, or an overflow)")
    keys = _find_keys(form, product)  # the columns of S that belong to keys, without a sink
    # The ops between q k^T and the logits.
    ends = {edge.node for edge in form.products}
    path = [node for node in nodes(form.logits, ends) if node not in ends]
    # The ops that take the largest logit of a row. Models subtract this logit from the row.
    largest = [node for node in path if op(node) in _LARGEST]
    slope = _read_slopes(form, product, keys, largest)
    if not _is_unchanged(form, keys):
        raise NotClosedForm("P is changed between the softmax and the values")
    sink = _find_sink(form, keys)
    logits = form.logits.detach()[..., keys]
    p = form.p.detach()[..., keys]
    # A row in which all slopes are 0 has no live pairs, although P > 0: a finite number masks all
    # of its keys.
    is_live = (p > 0) & (slope != 0).any(-1, keepdim=True)
    masked = (slope == 0) & ~is_live  # their logits become -inf
    sizes = slope.where(is_live, 0.0).abs()
    # s of each head, (windows, heads, 1, 1): its largest slope.
    scale = sizes.amax((-2, -1), keepdim=True)
    fields: dict[str, Any] = {"scale": scale[..., 0, 0], "sink": sink}
    has_one_slope = _is_close(torch.where(is_live, slope, scale), scale, relative=1e-4)
    is_affine = _is_affine_path(path, has_sink=sink is not None)
    if has_one_slope and is_affine and not form.has_other_inputs:  # S = s q k^T + B
        bias = None
        if masked.any() or any(op(node) in _ADDED for node in path):
            # `shifted`: a model that subtracts the largest logit of a row shows B only up to a
            # constant in each row. With a sink, this logit stays in B, because the model subtracts
            # it from the sink, too.
            shifted = sink is None and bool(largest)
            bias = _read_bias(logits, scale * product, masked, shifted=shifted)
        return fields | {"bias": bias}, None
    # S is another function of q and k: keep S itself, and its slopes relative to s.
    fields["bias"] = logits.masked_fill(masked, -torch.inf)
    fields["pairs"] = Pairs(slope=_divide_slopes(form, slope, scale, is_live))
    return fields, form.logits if form.has_other_inputs else None


def _find_sink(form: Explicit, keys: slice) -> Tensor | None:
    """Return the logit of the sink in each row, (windows, heads, queries), or None without a sink.

    A sink is a column of the logits without a key.

    Args:
        form: the logits.
        keys: the columns of the keys: all columns, all but the last one, or all but the first one.
    """
    if keys.start is None:  # all columns
        return None
    # No known model has both a sink and position terms. The position terms would have to leave the
    # column of the sink out.
    if form.has_other_inputs:
        raise NotClosedForm(f"it has sinks, and {BESIDE}")
    # The last column (-1) if the keys start at 0, and column 0 if they start at 1.
    return form.logits.detach()[..., keys.start - 1]


def _divide_slopes(form: Explicit, slope: Tensor, scale: Tensor, is_live: Tensor) -> Tensor | None:
    """Return f, the slope of each logit over the scale s of its head; None if f is always 1.

    The slope of a logit is dS_ij / d<q_i, k_j> = f_ij s. f is 0 for pairs that do not change the
    output. The caller asks only if S is not s q k^T + B with a constant B.

    Args:
        form: the logits.
        slope: the slopes f s, (windows, heads, queries, keys).
        scale: s, (windows, heads, 1, 1).
        is_live: which pairs have P_ij > 0.
    """
    # A head without live pairs has s = 0: its f is 0 / 0 = NaN, and becomes 0.
    f = (slope / scale).where(is_live, 0.0).nan_to_num(0.0)
    rounding = _ROUNDING * torch.finfo(slope.dtype).eps
    is_one = _is_close(f.where(is_live, 1.0), torch.ones_like(f), relative=rounding)
    # If f = 1 here, is f = 1 at all samples? Yes, if the logits have other inputs: they are
    # s q k^T plus relative positions. No, if they have none: then an op is not affine (a cap on
    # logits), and f may be another number at other samples.
    if is_one and form.has_other_inputs:
        return None
    return f


def _is_affine_path(path: Sequence[Node], *, has_sink: bool) -> bool:
    """Say whether the ops from q k^T to the logits are affine, so that slopes never change.

    This is judged by the names of the ops. Values at one sample cannot show it. The largest logit
    of a row is not affine, but models subtract it from the whole row. This does not change the
    softmax, so it is allowed. A clamp that cuts off logits is not allowed: its slope is 0 or 1.
    """
    allowed = _AFFINE_OPS | SHAPE_OPS | _LARGEST
    if has_sink:  # padding may add the column of the sink
        allowed = allowed | {"ConstantPadNd"}
    return all(op(node) in allowed and not _is_cut_off(node) for node in path)


def _find_keys(form: Explicit, product: Tensor) -> slice:
    """Return which columns of the logits belong to keys: all columns, or all but one (a sink).

    A sink is a logit without a key: it takes a share of the softmax, and multiplies no value.
    """
    m = product.shape[-1]  # number of keys
    extra = form.logits.shape[-1] - m
    if extra == 0:
        return slice(None)
    if extra != 1:
        raise NotClosedForm("it has logits beyond those of its keys and one sink")
    # The sink is behind the keys (gpt-oss) or in front of them. Without its column, P must be what
    # the model multiplies the values by.
    for keys in (slice(0, m), slice(1, m + 1)):
        if _is_unchanged(form, keys):
            return keys
    raise NotClosedForm("P with its sink is changed between the softmax and the values")


def _read_slopes(form: Explicit, product: Tensor, keys: slice, largest: Sequence[Node]) -> Tensor:
    """Return the slopes dS_ij / d<q_i, k_j>, (windows, heads, queries, keys), of the logits S.

    One backward pass gives all slopes if each S_ij depends on the product <q_i, k_j> only. A
    second backward pass checks this condition. A model may subtract the largest logit from all
    logits of a row. This does not change the softmax, so gradients through the largest logit are
    left out.

    Args:
        form: the logits.
        product: q k^T.
        keys: the columns of S that belong to keys.
        largest: the graph nodes that take the largest logit of a row.

    Raises:
        NotClosedForm: S_ij depends on the product of another pair.
    """
    if largest:
        _require_subtracted(form, largest)
    # If S_ij depends on the product of its own pair only, J^T u = slopes * u for every u. Test a u
    # that is 1 in a random half of the pairs and 0 in the others.
    generator = torch.Generator(product.device).manual_seed(0)
    u = torch.rand(product.shape, generator=generator, device=product.device) < 0.5
    u = u.to(product)
    slopes = _pull_keys(form, keys, largest, torch.ones_like(u))
    # Where u is 0, `_is_close` demands exactly 0, however small the slopes of a head are.
    if not _is_close(_pull_keys(form, keys, largest, u), slopes * u, relative=1e-3):
        raise NotClosedForm("its logits mix heads or keys")
    return slopes


def _pull_keys(form: Explicit, keys: slice, largest: Sequence[Node], u: Tensor) -> Tensor:
    """Return J^T u for a cotangent u of the keys' logits, where J is their Jacobian by q k^T.

    If each logit S_ij depends on its own product <q_i, k_j> alone, with the slope
    dS_ij / d<q_i, k_j>, the result is slopes * u for every u. The caller tests this equation.

    A sink, a logit without a key, gets a cotangent, too: minus the sum of u in its row, so that a
    row sums to 0, like every gradient behind a softmax. If the sink depends on q k^T, the equation
    does not hold.

    Args:
        form: the logits.
        keys: the columns of the logits that belong to keys.
        largest: the graph nodes that take the largest logit of a row, through which no gradient
            passes (`_pull_logits`): a model that subtracts this logit does not change P.
        u: the cotangent, (windows, heads, queries, keys).

    Raises:
        NotClosedForm: the graph has no path from the logits to q k^T.
    """
    whole = u
    if keys.start is not None:  # there is a sink
        whole = u.new_zeros(form.logits.shape)
        whole[..., keys] = u
        # The sink is the column before the keys, or the last one (-1) if keys start at 0.
        whole[..., keys.start - 1] = -u.sum(-1)
    result, _ = _pull_logits(form, largest, whole.to(form.logits.dtype))
    if result is None:  # the graph is cut between q k^T and S, at a linear map of the logits
        raise NotClosedForm(BESIDE)
    return result.to(u.dtype)


def _pull_logits(
    form: Explicit, largest: Sequence[Node], u: Tensor
) -> tuple[Tensor | None, list[Tensor]]:
    """Return J^T u of the logits by q k^T, where the largest logit of each row is a constant.

    A numerically stable softmax subtracts the largest logit m of a row from the whole row. The
    softmax does not depend on m. So m is taken for a constant: gradients through m are blocked.

    Args:
        form: the logits.
        largest: the graph nodes that take the largest logit of a row.
        u: the cotangent, in the shape of the logits.

    Returns:
        J^T u, or None if the graph has no path from the logits to q k^T. And the blocked
        gradients: `_require_subtracted` reads from them whether m is only subtracted.
    """
    gradients: list[Tensor] = []

    def block(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Record the gradients that reach a node of `largest`, and pass zeros on."""
        gradients.extend(g for g in grads if g is not None)
        return tuple(None if g is None else 0 * g for g in grads)

    with ExitStack() as hooks:
        for node in largest:
            hooks.callback(node.register_prehook(block).remove)
        return form.pull(u), gradients


def _require_subtracted(form: Explicit, largest: Sequence[Node]) -> None:
    """Raise NotClosedForm unless the largest logit m of a row is subtracted from the whole row.

    For S - m, a cotangent u of the row gives m the gradient -sum(u). This is 0 if u sums to 0.

    Args:
        form: the logits.
        largest: the graph nodes that take the largest logit of a row.
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
    """Return the bias B = S - s q k^T of the logits, or None if it is only rounding error.

    A head whose B is only rounding error gets B = 0. Rounding errors grow with the logits, so each
    row has its own limit. A B that is large enough to change P is always kept, so that P stays the
    P of the model.

    Args:
        logits: S, (windows, heads, queries, keys).
        linear: s q k^T.
        masked: pairs with B = -inf.
        shifted: whether the model subtracts the largest logit of each row.
    """
    bias = (logits - linear).masked_fill(masked, -torch.inf)
    # After this subtraction, B is known up to a constant per row, on which P does not depend: let
    # the maximum of B be 0. A row that is all -inf stays as it is.
    if shifted:
        bias = bias - bias.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    largest = linear.abs().amax(-1, keepdim=True)
    eps = torch.finfo(logits.dtype).eps
    # At most `_NEGLIGIBLE`: a larger B would change P.
    rounding = (_ROUNDING * eps * largest).clamp_max(_NEGLIGIBLE)
    has_bias = (bias.abs() > rounding).any((-2, -1), keepdim=True)  # of each head
    if not has_bias.any():
        return None
    return bias.where(has_bias, 0.0)


def _is_close(a: Tensor, b: Tensor, relative: float) -> bool:
    """Say whether |a - b| <= relative |b| everywhere, several times faster than torch.allclose."""
    return bool(((a - b).abs_() <= relative * b.abs()).all())


def _is_cut_off(node: Node) -> bool:
    """Say whether an op clamps logits at a level that logits may reach at some sample.

    False for a clamp at the lowest number of float32, which serves as a mask.
    """
    # The attributes in which autograd stores the operands of these ops.
    names = {"Clamp": ("_saved_min", "_saved_max"), "Maximum": ("_saved_self", "_saved_other")}
    for name in names.get(op(node), ()):
        level = getattr(node, name, None)
        # Skip a side of a clamp without a level, and the operand of torch.maximum that holds the
        # logits: the other operand is the level.
        if level is None or getattr(level, "requires_grad", False):
            continue
        least = torch.as_tensor(level).abs().min()
        if least < _OUT_OF_REACH:
            return True
    return False


def _is_unchanged(form: Explicit, keys: slice) -> bool:
    """Say whether the model multiplies the values by P without a change, such as dropout.

    In a row whose keys are all masked, P is NaN. The model may set such rows to 0, which is no
    change.

    Args:
        form: P, and what the model multiplies the values by.
        keys: the columns of P that belong to keys, without a sink.
    """
    p = form.p.detach()[..., keys].nan_to_num(0.0)
    weights = form.weights.detach()
    return torch.equal(p.to(weights), weights)


LARGEST = 2**27  # largest number of entries in r, or in t: 1 GiB in float64
_GRADIENT_ROUNDING = 64  # times the machine epsilon of the largest gradient


def read_position_terms(heads: Heads, logits: Tensor, parts: Mapping[str, Projected]) -> Pairs:
    """Return the position vectors r and t of a layer, and the slopes f of its logits.

    In models with relative positions a logit is

        S_ij = F_ij(<q_i, k_j>) + <q_i, r_ij> + <k_j, t_ij>,    usually F_ij(x) = s x,

    where r and t do not depend on the input. So dS_ij / dq_i = f_ij s k_j + r_ij with the slope
    f_ij s = F_ij', and dS_ij / dk_j = f_ij s q_i + t_ij. r is None if all r_ij are 0, and likewise
    t.

    Args:
        heads: the heads of the layer; their `pairs` hold f (None for 1).
        logits: S with its graph, (windows, heads, queries, keys).
        parts: how q, k and v are computed from the input; "q" is missing if q is a constant.

    Raises:
        NotClosedForm: S_ij depends on more than q_i and k_j, or r or t depends on the input or is
            too large.
    """
    assert heads.pairs is not None
    # S must depend on no other linear maps than those of q and k.
    parts_of_qk = [part for name, part in parts.items() if name != "v"]
    leaves_of_qk = {id(leaf.tensor) for part in parts_of_qk for leaf in part.leaves}
    inputs, _ = leaves(logits)
    if not leaves_of_qk.issuperset(map(id, inputs)):
        raise NotClosedForm(BESIDE)
    slope = heads.pairs.slope
    is_live = heads.attention() > 0  # pairs with P_ij = 0 do not change the output
    s = heads.scale[..., None, None]
    samples = int(heads.sample[-1]) + 1  # `sample` has the number of each window's sample
    r = None
    # r_ij = dS_ij / dq_i - f_ij s k_j: the helper gets s k_j and the slope f.
    if "q" in parts:
        r = _read_vectors(logits, parts["q"], samples, s * heads.k, slope, is_live)
    # t_ij = dS_ij / dk_j - f_ij s q_i: the same with queries and keys swapped.
    swapped_slope = None if slope is None else slope.mT
    t = _read_vectors(logits.mT, parts["k"], samples, s * heads.q, swapped_slope, is_live.mT)
    if t is not None:
        t = t.transpose(2, 3)  # (1, heads, keys, queries, d) -> (1, heads, queries, keys, d)
    return Pairs(slope, with_q=r, with_k=t)


def _read_vectors(
    logits: Tensor,
    part: Projected,
    samples: int,
    product_gradients: Tensor,
    slope: Tensor | None,
    is_live: Tensor,
) -> Tensor | None:
    """Return the position vectors r_ij of q in the logits S, or None if they are 0.

    In S_ij = F(s <q_i, k_j>) + <q_i, r_ij>, the vector r_ij is a constant, and F is the identity
    or a soft cap, with the slope f_ij. The gradient of S_ij with respect to q_i is
    f_ij s k_j + r_ij, so r_ij = dS_ij / dq_i - f_ij s k_j. For the position vectors of k, the
    caller swaps q and k in all arguments.

    Args:
        logits: S with its graph, (windows, heads, queries, keys).
        part: how q is computed from the input.
        samples: number of samples in the batch.
        product_gradients: s k_j, (windows, heads, keys, d), the gradients of s <q_i, k_j>.
        slope: f, (windows, heads, queries, keys); None for 1.
        is_live: which pairs have P_ij > 0. Other pairs do not change the output: r_ij is set to 0.

    Returns:
        r, (1, heads, queries, keys, d), the same in all windows.

    Raises:
        NotClosedForm: r is too large, or differs between windows and so is no constant.
    """
    source = _probe_logits(logits, part, samples)
    channels = list[Tensor]()  # r of each channel, (heads, queries, keys)
    # The largest absolute entry in each head: of the difference of r between windows, of the
    # gradients dS_ij / dq_i, and of r.
    largest_spread = largest_gradient = largest_r = product_gradients.new_zeros(is_live.shape[1])
    for c, gradient in enumerate(_differentiate_channels(source, part)):
        product_gradient = product_gradients[..., None, :, c]  # s k_j, channel c
        if slope is not None:
            product_gradient = slope * product_gradient
        # r_ij = dS_ij / dq_i - f_ij s k_j in each window, and its mean over the windows in which
        # the pair is live (at least 1 window avoids 0 / 0).
        r_of_windows = (gradient - product_gradient).where(is_live, 0.0)
        r = r_of_windows.sum(0) / is_live.sum(0).clamp_min(1)
        spread = (r_of_windows - r).where(is_live, 0.0)
        largest_spread = torch.maximum(largest_spread, graph.find_largest(spread))
        largest_gradient = torch.maximum(largest_gradient, graph.find_largest(gradient))
        largest_r = torch.maximum(largest_r, graph.find_largest(r[None]))
        channels.append(r)
    if not (largest_spread <= graph.LINEAR_TOLERANCE * largest_gradient).all():
        raise NotClosedForm(BESIDE)
    eps = torch.finfo(largest_gradient.dtype).eps
    rounding = _GRADIENT_ROUNDING * eps * largest_gradient
    if not (largest_r > rounding).any():  # r is only rounding error of the difference
        return None
    return torch.stack(channels, -1)[None]


def _probe_logits(logits: Tensor, part: Projected, samples: int) -> Probed:
    """Return the logits S as a function S(y) of the output y of the linear map behind q.

    Gradients with respect to y have only the columns that q reads, in the order of heads. From
    these, the caller needs the gradients with respect to q_i of each head. So each column of y
    must belong to one head (no repeated heads), q_i must be a constant map of y_i (no local
    Jacobian), and S_ij must depend on no other query than q_i of its head, its own pair.

    Args:
        logits: S with its graph, (windows, heads, queries, keys).
        part: how q is computed from the input.
        samples: number of samples in the batch.

    Raises:
        NotClosedForm: position vectors cannot be read from this function, or are too large.
    """
    columns = part.form.columns
    if part.form.repeat > 1:
        raise NotClosedForm(f"{BESIDE}, behind shared keys")
    if part.projection.local is not None:
        raise NotClosedForm(f"{BESIDE}, behind a rotation or norm")
    size = logits[0].numel() * columns.shape[1]
    if size > LARGEST:
        raise NotClosedForm(f"its position terms have {size:.1e} numbers")
    all_columns = columns.flatten()  # of all heads, (heads * e,)
    source = Probed(
        logits,
        tuple(leaf.tensor for leaf in part.leaves),
        lambda *y: part.linear.outputs(*y)[:, all_columns],
    )
    _require_own_pairs(source, part.index.rows(samples), columns.shape[1])
    return source


def _differentiate_channels(source: Probed, part: Projected) -> Iterator[Tensor]:
    """Yield the derivatives dS_ij / dq_ic of logits S, one channel c of q after the other.

    q is computed from y, the output of a linear map, as q_i = M y_i + constant in each head. Each
    item has the shape of S, (windows, heads, queries, keys).

    Args:
        source: S as a function of y (so `source.t` is S). y has a row for each token, and the
            columns that q reads, in the order of heads: (tokens of all samples, heads * d).
        part: holds M, (heads, d, d), as `part.form.mix`; None for the identity.

    Raises:
        NotClosedForm: M is not square.
    """
    # Channel c of q changes by 1 in all heads, and no other channel changes, if y changes by
    # column c of M^-1 at every token. Row c of `changes`, (d, heads * d), is this change of y.
    columns = part.form.columns
    mix = part.form.mix
    if mix is None:
        identity = graph.make_identity(columns.shape[1], part.x)
        inverse = identity.expand(len(columns), -1, -1)
    elif mix.shape[-1] == mix.shape[-2]:
        inverse = torch.linalg.inv(mix)
    else:
        raise NotClosedForm(f"{BESIDE}, behind a map to another width")
    changes = inverse.permute(2, 0, 1).flatten(1)  # inverse is (heads, d, d), by column its last
    # A change m of y changes S by J m, with J = dS/dy. S_ij depends on no other query than q_i, so
    # entry ij of J m is dS_ij / dq_ic for the change of channel c.
    # Two backward passes give J m: the first one J^T u as a function of u. This is linear in u, so
    # the gradient of <J^T u, m> with respect to u is J m, for any u.
    u = torch.zeros_like(source.t, requires_grad=True)
    pulled = pull_back(source.t, source.leaves, u, create_graph=True)
    rows = source.as_rows(*pulled)  # J^T u, in the shape of y
    for change in changes:
        (gradient,) = pull_back(rows, u, change.expand_as(rows), retain_graph=True)
        yield gradient


def _require_own_pairs(source: Probed, rows: Tensor, width: int) -> None:
    """Raise NotClosedForm unless row i of a head's logits depends on the q_i of this head only.

    The test reads which entries of gradients are exactly 0.

    Args:
        source: the logits as a function of y, the output of the linear map that q is computed
            from: (rows, heads width), the columns that q reads, in the order of heads.
        rows: the row of y of each token, (windows, tokens).
        width: number of columns of each head.
    """
    windows, heads, tokens, _ = source.t.shape
    # A row of y belongs to the token whose query reads it, and a column of y to the head.
    token = torch.arange(windows * tokens, device=rows.device)
    head = torch.arange(heads, device=rows.device)
    y = source.as_rows(*source.leaves)
    own_token = token.new_full((len(y),), -1)  # of each row; -1: no query reads it
    own_token[rows.flatten()] = token
    own_head = head.repeat_interleave(width)
    token_of_logit = token.view(windows, 1, tokens, 1)
    head_of_logit = head.view(1, heads, 1, 1)
    # A row may affect no logits but its token's, and a column none but its head's. `affected` has
    # the label (token or head) of the logits that each row or column affects.
    for own, label, is_row in (
        (own_token, token_of_logit, True),
        (own_head, head_of_logit, False),
    ):
        affected = graph.label_affected(source, label, rows=is_row)  # -1: none; None: several
        if affected is None or not ((affected == own) | (affected == -1)).all():
            raise NotClosedForm(BESIDE)
