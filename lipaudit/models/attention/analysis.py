"""Analyse one attention call: the axes of its tensors, the forms of q, k and v, and W_O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lipaudit.data.batch import Batch
from lipaudit.errors import first_line, is_machine_error
from lipaudit.models import graph
from lipaudit.models.attention import calls, capture, projections
from lipaudit.models.attention.calls import AttentionCall, AxisLayout, Leaf, Origin
from lipaudit.models.attention.layouts import find_layouts, guess_layouts
from lipaudit.models.attention.logits import read_product
from lipaudit.models.attention.projections import NotClosedForm, ProjectionForm
from lipaudit.models.precision import HALF, refer_to_weight
from lipaudit.theory.head_norms import forward_error
from lipaudit.theory.heads import Heads


class Analysis(NamedTuple):
    """The result of an analysis, as the fields of `Site` with these names."""

    layout: AxisLayout
    kinds: tuple[str, ...]
    structure: capture.Structure | None
    reason: str | None


def analyse(call: AttentionCall, batch: Batch) -> Analysis:
    """Find the closed form of an attention call, or why there is none.

    The model may keep samples, windows, heads and tokens in any order of axes. The usual layouts
    of these axes are tried first, then the layouts that the linear maps behind q, k and v show.

    Args:
        call: the call, with the axes of the model and its graph.
        batch: the samples.
    """
    usual = guess_layouts(call.q, len(batch))
    if call.output.dtype in HALF:  # a closed form could not be compared with such an output
        kind = str(call.output.dtype).removeprefix("torch.")
        reason = f"it is computed in {kind}; switch autocast off, or use --dtype float64"
        return Analysis(usual[0], kinds=("rounded",) * 3, structure=None, reason=reason)
    analysis = _try_layouts(usual, call, batch)
    if analysis.structure is not None:
        return analysis
    # None of the usual layouts has a closed form: they may all be wrong.
    others = find_layouts(call, len(batch))
    if others:
        return _try_layouts(others, call, batch)
    return analysis


def _try_layouts(layouts: Sequence[AxisLayout], call: AttentionCall, batch: Batch) -> Analysis:
    """Return the analysis in the first layout with a closed form, or in the first layout.

    Args:
        layouts: orders of samples, windows, heads and tokens in the axes of the call.
        call: the attention call.
        batch: the samples.
    """
    failures: list[Analysis] = []
    for layout in layouts:
        kinds: list[str] = []  # of q, k and v, such as affine; filled by `_read_structure`
        try:
            structure = _read_structure(call.arrange(layout, len(batch)), batch, kinds)
        except NotClosedForm as obstacle:
            failures.append(Analysis(layout, tuple(kinds), structure=None, reason=obstacle.reason))
        except RuntimeError as error:
            if is_machine_error(error):
                raise
            # The model writes in place, or has an op without a derivative. So this layer has no
            # closed form that could be checked; other layers may have one.
            reason = f"its graph cannot be differentiated: {first_line(error)}"
            failures.append(Analysis(layout, kinds=("unread",) * 3, structure=None, reason=reason))
        else:
            return Analysis(layout, tuple(kinds), structure, reason=None)
    return failures[0]


def _read_structure(call: AttentionCall, batch: Batch, kinds: list[str]) -> capture.Structure:
    """Return how q, k and v of a call are computed, if that gives a closed form of its Jacobian.

    The closed form is compared with autograd.

    Args:
        call: the call, with axes (windows, heads, tokens, width).
        batch: the samples.
        kinds: an empty list, which gets the kinds of q, k and v, also if there is no closed form.

    Raises:
        NotClosedForm: there is no closed form.
        RuntimeError: its graph cannot be differentiated.
    """
    # The outputs of the linear maps behind q, behind k and behind v.
    leaves = [call.origins.find_leaves(t) for t in (call.q, call.k, call.v)]
    forms, problems = _decode_projections(call, leaves, len(batch), kinds)  # fills `kinds`
    try:
        # `relative`: the logits with their graph if they depend on q or k beyond q k^T, as with
        # relative positions whose embeddings are multiplied by q; else None.
        attention, relative = read_product(call, batch, queries=None)
    except NotClosedForm as obstacle:
        problems.append(obstacle.reason)
    if problems:
        raise NotClosedForm("; ".join(problems))
    q, k, v = forms
    if k is None or v is None:
        raise NotClosedForm("its keys or values are constants, or have no gradient")
    q_leaves, k_leaves, v_leaves = leaves
    # Each may be made from several linear maps of one input: take the first one.
    k_origin = k_leaves[0].origin
    if not (k_origin.reads_same(v_leaves[0].origin) and k.index.is_same(v.index)):
        raise NotClosedForm("its keys and values read different inputs")
    # A model with constant queries (q is None) has no self-attention.
    joint = q is not None and _is_joint(q, q_leaves[0].origin, k, k_origin)
    structure = capture.Structure(q, k, v, joint, out=None)
    heads, parts = capture.add_inputs(structure, attention, call, batch, relative)
    _require_resolved(heads)
    if not capture.matches_autograd(heads, parts, call):
        raise NotClosedForm("its closed form disagrees with autograd")
    return structure


def _require_resolved(heads: Heads) -> None:
    """Raise NotClosedForm if logits are so large that rounding changes P by a large part."""
    if forward_error(heads).amax() > capture.HOPELESS:
        dtype = heads.q.dtype
        reason = f"its logits are so large that {dtype} cannot resolve its attention map"
        if dtype != torch.float64:
            reason += "; use --dtype float64"
        raise NotClosedForm(reason)


def _decode_projections(
    call: AttentionCall, leaves: Sequence[Sequence[Leaf]], samples: int, kinds: list[str]
) -> tuple[list[ProjectionForm | None], list[str]]:
    """Return how q, k and v are computed from linear maps, and a text for each that is not.

    Args:
        call: the call, with axes (windows, heads, tokens, width).
        leaves: the outputs of the linear maps behind q, behind k and behind v.
        samples: number of samples in the batch.
        kinds: a list to which the kinds of q, k and v are added.

    Returns:
        The form of each (None for a constant), and the texts of obstacles such as "q depends on
        several tokens".

    Raises:
        NotClosedForm: the linear maps read the heads' parts of tokens.
    """
    forms: list[ProjectionForm | None] = []
    problems = []
    for name, leaves_of_t in zip("qkv", leaves, strict=True):
        try:
            form = projections.decode(getattr(call, name), leaves_of_t, samples)
            forms.append(form)
            kinds.append("constant" if form is None else form.kind)
        except NotClosedForm as obstacle:
            problems.append(f"{name} {obstacle.reason}")
            kinds.append(obstacle.kind)
    # `Linear(d, d)` applied to (batch, tokens, heads, d), common in tutorials, reads parts of
    # tokens: each row of its input is the part of one head. With the heads as windows, the parts
    # look like tokens of these windows. So the forms are refused if there are more windows than
    # samples. With one window for each sample, the parts are the tokens of the attention.
    reads_parts = any(leaf.origin.reads_token_parts for part in leaves for leaf in part)
    if reads_parts and (problems or len(call.q) != samples):
        kinds[:] = ["shared"] * 3
        raise NotClosedForm("one linear map is applied to each head separately")
    return forms, problems


def _is_joint(q: ProjectionForm, q_origin: Origin, k: ProjectionForm, k_origin: Origin) -> bool:
    """Say whether queries and keys read the same tokens in the same order: self-attention.

    Args:
        q: how queries are computed from a linear map.
        q_origin: this linear map.
        k: how keys are computed from a linear map.
        k_origin: this linear map.

    Raises:
        NotClosedForm: they read the same tokens in another order.
    """
    if q_origin.reads_same(k_origin) and q.index.is_same(k.index):
        return True
    if _is_reordered(q.index.read_tokens(q_origin), k.index.read_tokens(k_origin)):
        raise NotClosedForm("its keys are the tokens of its queries in another order")
    return False


def _is_reordered(one: Tensor, other: Tensor) -> bool:
    """Say whether two sets of tokens, (tokens, channels), are the same in another order.

    If the keys are the tokens of the queries rolled or flipped, queries and keys have one input.
    Norms of cross-attention treat them as two inputs, and would be wrong.
    """
    if one.shape != other.shape or torch.equal(one, other):
        return False
    # `unique` sorts the tokens.
    return torch.equal(torch.unique(one, dim=0), torch.unique(other, dim=0))


def find_output_map(linear: calls.Linear, source: graph.Probed) -> capture.OutputMap | None:
    """Return a linear map as W_O of an attention layer, if its input is the layer's heads.

    Each channel of the map's input must be one channel of the concatenated heads, times a factor.
    The result is None otherwise, for example if a gate or a norm comes before the map.

    Args:
        linear: a linear map behind the attention.
        source: the map's input t, (1, 1, tokens, channels), as a function of the attention's
            output y, (tokens, channels of all heads).
    """
    y = source.as_rows(*source.leaves)
    tokens, width = y.shape
    all_columns = torch.arange(width, device=source.t.device)[None]
    try:
        rows = projections.find_token_rows(source)  # the token of y behind each token of t
    except NotClosedForm:
        return None
    affine = None
    if rows.numel() == tokens and graph.is_affine(source.t):
        affine = graph.find_affine_map(source, rows, all_columns)
    if affine is None:
        return None
    matrices, _ = affine  # t = M y + c, with one M for each head of t
    mix = matrices[0]  # (channels of t, channels of y)
    # For each channel of y: the channel of t (so the row of W_O) that it becomes, and the factor.
    channel_of_t = mix.abs().argmax(0)
    gain = mix.gather(0, channel_of_t[None])[0]
    # M must have one entry in each column, and these must lie in different rows.
    has_one_each = ((mix != 0).sum(0) == 1).all()
    if not has_one_each or channel_of_t.bincount().amax() > 1:
        return None
    return capture.OutputMap(refer_to_weight(linear.weight), channel_of_t, gain)
