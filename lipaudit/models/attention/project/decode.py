"""Recover from an autograd graph which part of which linear map made q, k or v.

The tracer cuts the graph at every linear map y = X W + b: y is a leaf. Between y and a tensor t of
an attention call, (windows, heads, tokens, width), lies t = phi(y), made of cheap ops: reshapes,
permutations, a repetition of heads, rotary positions, a norm per head. What phi is, is asked of
J^T u, its vector-Jacobian product, with u of our choice:

1. Which token of y does a token of t read? Of a random u no entry vanishes, so that an exact zero
   of J^T u says that nothing leads there. Each token of t is given a set of probes of its own,
   half of them all, and u is restricted to the tokens of one probe after the other: the rows of y
   that are touched spell the sets. A row that more than half of the probes touch feeds two tokens:
   t mixes tokens.
2. Which channels of y feed a head? The same, with the heads numbered and columns for rows. Where
   heads share channels, either whole heads are repeated (grouped keys), or a norm runs over all
   heads before they are split (cross-head).
3. What is phi, then, on the channels of one token, y_i -> t_i? By the ops in the graph it is
   affine or it is not; by the values it is the same map M everywhere (affine), a map G_i of the
   position alone (rotation where it is orthogonal, else linear-pos), or a function with a
   Jacobian G_i at X (local: a norm of queries).

The rows of M and G_i are products J^T e_c, one channel c at a time for all tokens and heads: no
two of them share an entry of y. See `probes` for the products; what is recovered is kept as a
`ProjectionForm`, and `projected` applies it to any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lipaudit.models.attention.observe.origins import Leaf
from lipaudit.models.attention.project import probes
from lipaudit.models.attention.project.forms import NotClosedForm, ProjectionForm, TokenIndex
from lipaudit.models.attention.project.probes import Probed
from lipaudit.models.graph import is_affine

LARGEST_LOCAL = 2**28  # numbers in a local Jacobian: 1 GiB in float32


def decode(t: Tensor, leaves: Sequence[Leaf], samples: int) -> ProjectionForm | None:
    """Work out how a tensor of an attention call, (windows, heads, tokens, width), was made.

    Args:
        t: q, k or v, with its graph.
        leaves: what it was made from.
        samples: number of samples in the batch.

    Returns:
        The form, or None for a constant (a learned query).

    Raises:
        NotClosedForm: it is not a token-wise function of one linear map.
    """
    if not leaves:
        return None
    if len(leaves) > 1:
        raise NotClosedForm("multi-source", "is made from several linear maps")
    (y, origin) = leaves[0]
    if origin.linear is None:
        raise NotClosedForm("unprojected", "is not the output of a linear map")
    source = Probed(t, y, origin.linear.outputs)
    rows = token_rows(source)
    source, columns, repeat = _heads(source)
    index = by_sample(rows, samples, origin.linear.inputs.shape[0])
    if columns is not None:
        plain = ProjectionForm("affine", origin.address, index, columns, repeat)
        return _refine(source, rows, plain)
    every = (source.read != 0).any(0).nonzero().T
    form = ProjectionForm("cross-head", origin.address, index, every, repeat)
    _refuse_large(source.merged(), form)
    return form


def token_rows(source: Probed) -> Tensor:
    """Find the row of y that each token reads, (windows, tokens)."""
    windows, _, tokens, _ = source.t.shape
    number = torch.arange(windows * tokens, device=source.t.device)
    if probes.in_order(source, number.view(windows, tokens)):
        return number.view(windows, tokens)
    token = probes.fed_labels(source, number.view(windows, 1, tokens, 1), rows=True)
    if token is None:
        raise NotClosedForm("mixing", "depends on several tokens")
    times = torch.bincount(token[token >= 0], minlength=number.numel())
    if (times > 1).any():
        raise NotClosedForm("mixing", "depends on several tokens")
    if (times == 0).any():
        raise NotClosedForm("partial", "has tokens that are not made from the input")
    # Row r of y feeds token[r], -1 none: sorted by token, behind those that feed none.
    return token.argsort()[int((token < 0).sum()) :].view(windows, tokens)


def by_sample(rows: Tensor, samples: int, total: int) -> TokenIndex:
    """Attribute the rows of y that are read to samples and their tokens.

    Args:
        rows: of y, (windows, tokens).
        samples: number of samples in the batch; windows are ordered by sample.
        total: number of rows of y.

    Raises:
        NotClosedForm: rows are ordered neither by sample, then token, nor by token, then sample.
    """
    if rows.shape[0] % samples == 0 and total % samples == 0:
        first = rows[: rows.shape[0] // samples]
        for index in (
            TokenIndex(first, total // samples, samples_first=True),
            TokenIndex(first // samples, total // samples, samples_first=False),
        ):
            if torch.equal(index.rows(samples), rows):
                return index
    raise NotClosedForm("rows", "has rows that cannot be attributed to samples")


def _heads(source: Probed) -> tuple[Probed, Tensor | None, int]:
    """Find the columns of y that each distinct head reads, (heads, e), and how often it stands.

    Returns:
        The source without repeated heads; the columns, None where heads share them; the number of
        times that each head is repeated.
    """
    columns = _head_columns(source)
    if columns is not None:
        return source, columns, 1
    unique, repeat = _undo_repeat(source.t)
    source = replace(source, t=unique)
    return source, None if repeat == 1 else _head_columns(source), repeat


def _head_columns(source: Probed) -> Tensor | None:
    heads = source.t.shape[1]
    number = torch.arange(heads, device=source.t.device).view(1, heads, 1, 1)
    head = probes.fed_labels(source, number, rows=False)
    if head is None:
        return None
    sizes = torch.bincount(head[head >= 0], minlength=heads)
    if (sizes != sizes[0]).any():
        raise NotClosedForm("ragged", "takes more channels in some heads than in others")
    return head.argsort(stable=True)[int((head < 0).sum()) :].view(heads, -1)


def _undo_repeat(t: Tensor) -> tuple[Tensor, int]:
    """Return the distinct heads of grouped keys or values, and how often each is repeated.

    Only for heads that share what they read: others may be equal by accident, or be zero.
    """
    heads = t.shape[1]
    for repeat in range(heads, 1, -1):
        unique = t[:, ::repeat]
        if heads % repeat == 0 and torch.equal(unique.repeat_interleave(repeat, 1), t):
            return unique, repeat
    return t, 1


def _refine(source: Probed, rows: Tensor, form: ProjectionForm) -> ProjectionForm:
    """Tell affine, rotation, linear-pos and local apart."""
    if not is_affine(source.t):
        _refuse_large(source, form)
        return replace(form, kind="local")
    affine = probes.affine_map(source, rows, form.columns)
    if affine is not None:
        mix, offset = affine
        mixed, moved = not _is_identity(mix), bool(offset.any())
        return replace(form, mix=mix if mixed else None, offset=offset if moved else None)
    return _by_position(source, rows, form)


def _by_position(source: Probed, rows: Tensor, form: ProjectionForm) -> ProjectionForm:
    """Tell t_i = G_i y_i, orthogonal or not, from what is affine in y with a constant."""
    local = probes.position_map(source, rows, form.columns)
    shared = local is not None
    if local is None:
        _refuse_large(source, form)
        local = probes.local_map(source, rows, form.columns)
        if not probes.is_linear(source, local, rows, form.columns):
            return replace(form, kind="local")
    kind = "rotation" if probes.is_orthogonal(local) else "linear-pos"
    return replace(form, kind=kind, shared=shared)


def _refuse_large(source: Probed, form: ProjectionForm) -> None:
    size = source.t.numel() * form.columns.shape[1]
    if size > LARGEST_LOCAL:
        raise NotClosedForm("large", f"has a local Jacobian of {size:.1e} numbers")


def _is_identity(mix: Tensor) -> bool:
    eye = torch.eye(mix.shape[-1], dtype=mix.dtype, device=mix.device)
    return mix.shape[-1] == mix.shape[-2] and torch.equal(mix, eye.expand_as(mix))
