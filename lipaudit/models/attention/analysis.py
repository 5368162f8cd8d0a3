"""Work out what one attention call is: how q, k, v, the logits and the output come about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lipaudit.data.batch import Batch
from lipaudit.errors import of_machine
from lipaudit.models.attention import agreement
from lipaudit.models.attention.observe.calls import AttentionCall, Explicit
from lipaudit.models.attention.observe.layouts import layouts
from lipaudit.models.attention.observe.linears import Linear
from lipaudit.models.attention.project import probes
from lipaudit.models.attention.project.decode import decode, token_rows
from lipaudit.models.attention.project.forms import NotClosedForm, ProjectionForm
from lipaudit.models.attention.project.logits import logit_form
from lipaudit.models.attention.project.probes import Probed
from lipaudit.models.attention.sites import OutputMap, Structure
from lipaudit.models.attention.to_heads import canonical, product, with_inputs
from lipaudit.models.graph import is_affine
from lipaudit.models.lifting import keep
from lipaudit.theory.condition import forward_error

HALF = (torch.bfloat16, torch.float16)
"""Types in which a Jacobian is rounded to two or three digits."""


@dataclass(frozen=True)
class Analysis:
    """What a call is; see `Site` for the fields."""

    layout: str
    kinds: tuple[str, str, str]
    structure: Structure | None
    reason: str | None


def analyse(call: AttentionCall, batch: Batch) -> Analysis:
    """Read a call in the first layout in which it has a closed form, or else in the likeliest."""
    if call.output.dtype in HALF:
        reason = f"it is computed in {str(call.output.dtype).removeprefix('torch.')}"
        return Analysis(layouts(call, len(batch))[0], ("rounded",) * 3, None, reason)
    tried = []
    for layout in layouts(call, len(batch)):
        tried.append(_analyse(call, layout, batch))
        if tried[-1].structure is not None:
            return tried[-1]
    return tried[0]


def output_map(linear: Linear, source: Probed) -> OutputMap | None:
    """Return W_O if a linear map takes the concatenated heads, permuted and scaled at most.

    Args:
        linear: a linear map behind the attention.
        source: its input as a function of the attention's output.
    """
    rows, width = source.as_rows(source.leaf.detach()).shape
    columns = torch.arange(width, device=source.t.device)[None]
    try:
        index = token_rows(source)
    except NotClosedForm:
        return None
    plain = index.numel() == rows and is_affine(source.t)
    affine = probes.affine_map(source, index, columns) if plain else None
    if affine is None:
        return None
    mix = affine[0][0]
    order = mix.abs().argmax(0)
    gain = mix.gather(0, order[None])[0]
    single = bool(((mix != 0).sum(0) == 1).all()) and int(order.bincount().amax()) == 1
    return OutputMap(keep(linear.weight), order, gain) if single else None


def _analyse(call: AttentionCall, layout: str, batch: Batch) -> Analysis:
    try:
        return _read(call, layout, batch)
    except RuntimeError as error:
        if of_machine(error):
            raise
        # The graph is the model's own: a write in place, an op without a derivative. Whatever it
        # is, this layer has no closed form that we could vouch for, and the others may.
        reason = f"its graph cannot be differentiated: {str(error).partition(chr(10))[0]}"
        return Analysis(layout, ("unread", "unread", "unread"), None, reason)


def _read(call: AttentionCall, layout: str, batch: Batch) -> Analysis:
    arranged = canonical(call, layout, len(batch))
    parts = {name: _attempt(arranged, name, len(batch)) for name in "qkv"}
    behind = call.origins.leaves(call.q, call.k, call.v)
    unread = any(isinstance(part, NotClosedForm) for part in parts.values())
    windows = len(arranged.q) != len(batch)
    if (unread or windows) and any(leaf.origin.divided for leaf in behind):
        reason = "one map reads its heads, parts of each token, one by one"
        return Analysis(layout, ("shared", "shared", "shared"), None, reason)
    q, k, v = ("constant" if part is None else part.kind for part in parts.values())
    try:
        structure = _structure(call, arranged, parts)
        _require_agreement(structure, call, layout, batch)
    except NotClosedForm as obstacle:
        return Analysis(layout, (q, k, v), None, obstacle.reason)
    return Analysis(layout, (q, k, v), structure, None)


def _require_agreement(
    structure: Structure, call: AttentionCall, layout: str, batch: Batch
) -> None:
    """Raise NotClosedForm unless the closed form of the layer is that of autograd."""
    arranged = canonical(call, layout, len(batch))
    attention, relative = product(call, layout, batch, None)
    heads, parts = with_inputs(structure, attention, arranged, batch, relative)
    if forward_error(heads).amax() > agreement.HOPELESS:
        raise NotClosedForm(
            "rounding",
            f"its logits are so large that {arranged.q.dtype} cannot tell its attention map: "
            "use --dtype float64",
        )
    if not agreement.matches_autograd(heads, parts, arranged):
        raise NotClosedForm("wrong", "its closed form disagrees with autograd")


def _attempt(
    call: AttentionCall, name: str, samples: int
) -> ProjectionForm | NotClosedForm | None:
    t: Tensor = getattr(call, name)
    try:
        return decode(t, call.origins.leaves(t), samples)
    except NotClosedForm as obstacle:
        return obstacle


def _structure(
    call: AttentionCall,
    arranged: AttentionCall,
    parts: Mapping[str, ProjectionForm | NotClosedForm | None],
) -> Structure:
    """Put the forms together, or raise NotClosedForm with everything that is in the way."""
    problems = [
        f"{name} {part.reason}" for name, part in parts.items() if isinstance(part, NotClosedForm)
    ]
    problems += _logit_problems(call)
    if problems:
        raise NotClosedForm("several", "; ".join(problems))
    forms = {n: part for n, part in parts.items() if isinstance(part, ProjectionForm)}
    q, k, v = (forms.get(name) for name in "qkv")
    if k is None or v is None:
        raise NotClosedForm("constant", "its keys or values are constants, or have no gradient")
    if not _read_alike(arranged, ("k", k), ("v", v)):
        raise NotClosedForm("two inputs", "its keys and values read different inputs")
    joint = q is not None and _read_alike(arranged, ("q", q), ("k", k))
    if q is not None and not joint and _reordered(arranged, q, k):
        reason = "its keys are the tokens of its queries in another order"
        raise NotClosedForm("reordered", reason)
    return Structure(q, k, v, joint, out=None)


def _logit_problems(call: AttentionCall) -> list[str]:
    if not isinstance(call.form, Explicit):
        return []
    try:
        logit_form(call, call.form)
    except NotClosedForm as obstacle:
        return [obstacle.reason]
    return []


def _read_alike(
    call: AttentionCall, a: tuple[str, ProjectionForm], b: tuple[str, ProjectionForm]
) -> bool:
    """Say whether two parts of a call read the same tokens of the same input."""
    (leaf,), (other,) = (call.origins.leaves(getattr(call, name)) for name, _ in (a, b))
    index, others = a[1].index, b[1].index
    return (
        leaf.origin.reads_same(other.origin)
        and index.samples_first == others.samples_first
        and torch.equal(index.tokens, others.tokens)
    )


def _reordered(call: AttentionCall, q: ProjectionForm, k: ProjectionForm) -> bool:
    """Say whether queries and keys read the same tokens, at a generic point, in another order."""
    sides = []
    for t, form in ((call.q, q), (call.k, k)):
        (leaf,) = call.origins.leaves(t)
        assert leaf.origin.linear is not None
        inputs = leaf.origin.linear.inputs
        rows = form.index.rows(len(inputs) // form.index.length)
        sides.append(inputs[rows.flatten()].detach())
    one, other = sides
    if one.shape != other.shape or torch.equal(one, other):
        return False
    return torch.equal(*(torch.unique(t, dim=0) for t in sides))
