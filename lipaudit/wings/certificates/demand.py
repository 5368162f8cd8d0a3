"""Which entries of each call are needed, if the result reads only one token.

A model first runs on plain numbers, call by call. Going backwards from its results, the shapes
tell which entries of every call are read. If a row-wise call is read at one place of an axis only
(the class token; the last token), it computes only that place, and the result is repeated along
the axis without memory. **Entries that are not read have a slack of NaN**: if they were read after
all, no range would be finite and nothing would be certified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lipaudit.errors import of_machine
from lipaudit.wings.certificates.affine import MOVES, rearrange
from lipaudit.wings.certificates.form import Form, list_forms
from lipaudit.wings.certificates.symbols import Symbols

ELEMENTWISE = frozenset(
    (
        *("add", "radd", "sub", "rsub", "mul", "rmul", "multiply", "div", "truediv", "rtruediv"),
        *("divide", "true_divide", "neg", "negative", "gelu", "silu", "relu", "tanh", "sigmoid"),
        *("exp", "square", "pow", "rsqrt", "sqrt", "reciprocal", "dropout", "masked_fill"),
        *("contiguous", "clone", "to", "float", "double", "detach"),
    )
)
"""Elementwise calls: the arguments broadcast to the shape of the result."""

ROW_MIXING = frozenset(("matmul", "bmm", "scaled_dot_product_attention"))
"""Calls where a row of the result depends on that row of the first argument and on all other
arguments."""

ROW_WISE = frozenset(("linear", "softmax", "layer_norm", "rms_norm", "batch_norm", *ROW_MIXING))
"""Calls where a row of the result depends only on that row of the first argument."""

REARRANGING = frozenset((*MOVES, "view", "getitem", "expand", "expand_as", "T", "mT"))
"""Calls that only rearrange entries of their first argument."""


@dataclass(eq=False)
class Node:
    """A tensor of the trial run: which of its entries are read."""

    read: Tensor


class Call(NamedTuple):
    """A call of the trial run, with nodes in the place of forms.

    Attributes:
        func, name: the function of torch and its name.
        args, kwargs: its arguments.
        results: the resulting nodes.
    """

    func: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Node]


class DeviationError(Exception):
    """A model calls other functions than in its trial run."""


Cut = tuple[int, int]
"""An axis (counted from the last) and the only index along it that is used."""


class TrialRun:
    """Runs every call of a model on numbers, and records it."""

    def __init__(self, like: Symbols) -> None:
        # A pass without inputs that move: only the calls of the model matter.
        dtype = like.model_dtype
        self.symbols = Symbols(
            0, "linf", order=1, dtype=dtype, rules=like.rules, model_dtype=dtype
        )
        # Every call on a form of these symbols comes here in place of its rule.
        self.symbols.intercept = self.call
        self.calls: list[Call] = []

    def start(self, centre: Tensor) -> Form:
        """Return a form with numbers and a node, on which the model runs in a trial.

        Its coefficients and slack are never read.
        """
        centre = centre.to(self.symbols.model_dtype)
        no_rows = centre.new_empty(0, *centre.shape)
        form = Form(centre, no_rows, centre, self.symbols)
        unread = centre.new_zeros(centre.shape, dtype=torch.bool)
        form.__dict__["node"] = Node(unread)
        return form

    def call(self, func: Any, name: str, _rule: Any, args: Any, kwargs: Any) -> Any:
        """Run a call on the centres of its forms, and record it with their nodes."""
        numbers, options = tree_map_only(Form, lambda form: form.centre, (args, kwargs))
        result = func(*numbers, **options)
        if result is None:  # a write into the first argument
            result = numbers[0]
        elif isinstance(result, Iterator):
            result = list(result)
        is_constant = name.endswith("_like") or name.startswith("new_")
        if not is_constant:
            result = tree_map_only(Tensor, self.start, result)
        nodes, options = tree_map_only(Form, lambda form: form.node, (args, kwargs))
        results = [form.node for form in list_forms(result)]
        self.calls.append(Call(func, name, nodes, options, results))
        if name == "iter":
            return iter(result)
        return result


class Plan:
    """The part of every call of a pass to compute: its name, and where it is cut."""

    def __init__(self, cuts: Iterable[tuple[str, Cut | None]]) -> None:
        self.cuts = iter(cuts)

    def __call__(self, _func: Any, name: str, rule: Any, args: Any, kwargs: Any) -> Any:
        """Apply a rule; if later calls read one place of an axis only, to that place alone.

        Such a place is the class token. The result is repeated along the axis, without memory.

        Raises:
            DeviationError: the model calls other functions than in the trial run.
        """
        expected_name, cut = next(self.cuts, ("nothing", None))
        if name != expected_name:
            raise DeviationError
        if cut is None:
            return rule(*args, **kwargs)
        axis, _ = cut
        along_axis = 1  # number of leading arguments that have the axis
        if name in ELEMENTWISE:
            along_axis = len(args)
        size = max(_get_size(value, axis) for value in args[:along_axis])
        parts = list(args)
        for i, value in enumerate(args[:along_axis]):
            # Arguments of size 1 are broadcast along the axis: they stay.
            if _get_size(value, axis) == size:
                parts[i] = _narrow(value, cut)
        return _repeat_form(rule(*parts, **kwargs), cut, size)


def _narrow(value: Tensor, cut: Cut) -> Tensor:
    """Return the only place that is used; of a form, the same part for all readers.

    So they share its symbols, too.
    """
    axis, place = cut
    if not isinstance(value, Form):
        return value.narrow(axis, place, 1)
    parts: dict[Cut, Form] = value.__dict__.setdefault("parts", {})
    if cut not in parts:
        part = cast("Form", value.narrow(axis, place, 1))
        if value.weights and axis != -1:
            low, high = value.weights
            part.weights = (low.narrow(axis, place, 1), high.narrow(axis, place, 1))
        parts[cut] = part
    return parts[cut]


def plan(model: Callable[[Any], Any], x: Form) -> Plan | None:
    """Run the model on numbers, and return the part of every call that its results need.

    None if the run fails, or if its result contains no form.
    """
    trial = TrialRun(x.symbols)
    try:
        start = trial.start(x.centre.clone())
        results = list_forms(model(start))
        for form in results:
            form.node.read[...] = True
        # From the results backwards: a call is read where later ones read its results.
        cuts = [(call.name, _mark_read(call)) for call in reversed(trial.calls)]
    except (RuntimeError, TypeError, ValueError) as error:  # of other types than its weights, say
        if of_machine(error):
            raise
        return None
    if not results:
        return None
    return Plan(cuts[::-1])


def _mark_read(call: Call) -> Cut | None:
    """Mark the entries that a call reads; return the axis along which one place suffices."""
    if call.name in REARRANGING and isinstance(call.args[0], Node):
        _mark_rearranged(call, call.args[0])
        return None
    cut = _find_cut(call)
    if cut is None:
        _mark_all((call.args, call.kwargs))
        return None
    along_axis = 1  # number of leading arguments that have the axis
    if call.name in ELEMENTWISE:
        along_axis = len(call.args)
    axis, place = cut
    for node in call.args[:along_axis]:
        if isinstance(node, Node) and node.read.ndim >= -axis:
            # An argument of size 1 along the axis is broadcast: all of it is read.
            read_place = place
            if node.read.shape[axis] == 1:
                read_place = 0
            node.read.narrow(axis, read_place, 1)[...] = True
        else:
            _mark_all(node)
    _mark_all((call.args[along_axis:], call.kwargs))
    return cut


def _mark_rearranged(call: Call, node: Node) -> None:
    """Mark the entries of a call's first argument that end up where its results are read.

    The call runs on the indices of the entries.
    """
    indices = torch.arange(node.read.numel(), device=node.read.device)
    indices = indices.view(node.read.shape)
    args = tree_map_only(Node, lambda other: other.read, call.args[1:])
    moved = call.func(indices, *args, **call.kwargs)
    if len(call.results) == 1:
        moved = [moved]
    entries = node.read.view(-1)
    for result, result_indices in zip(call.results, moved, strict=True):
        entries[result_indices[result.read]] = True


def _mark_all(values: Any) -> None:
    """Mark all entries of the nodes among some values as read."""
    for node in _list_nodes(values):
        node.read[...] = True


def _find_cut(call: Call) -> Cut | None:
    """Return the axis along which only one place of a row-wise call is read, and the place."""
    if (
        call.name not in ELEMENTWISE | ROW_WISE
        or len(call.results) != 1
        or _list_nodes(call.kwargs)
    ):
        return None
    if call.name in ELEMENTWISE and any(isinstance(each, Tensor) for each in call.kwargs.values()):
        return None
    read = call.results[0].read
    if not read.numel():
        return None
    for axis in _list_axes(call, read):
        if read.ndim > 1:
            by_place = read.movedim(axis, 0).flatten(1)
        else:
            by_place = read[:, None]
        places = by_place.any(1).nonzero()[:, 0]
        if len(places) == 1 and read.shape[axis] > 1:
            return axis, int(places)
    return None


def _list_axes(call: Call, read: Tensor) -> list[int]:
    """Return the axes along which the results of a call are independent, counted from the last."""
    axes = list(range(-1, -read.ndim - 1, -1))
    if call.name in ELEMENTWISE:
        return axes
    first = call.args[0]
    if not isinstance(first, Node) or first.read.shape[:-1] != read.shape[:-1]:
        return []
    if call.name == "softmax" and _read_argument(call, "dim") not in (-1, read.ndim - 1):
        return []
    if call.name == "layer_norm":
        shape = _read_argument(call, "normalized_shape")
        return axes[1 if isinstance(shape, int) else len(shape) :]
    if call.name == "batch_norm":
        return [axis for axis in axes if axis % read.ndim != 1]
    if call.name == "scaled_dot_product_attention":
        has_mask = len(call.args) > 3 or call.kwargs.get("attn_mask") is not None
        if has_mask or call.kwargs.get("is_causal"):
            return []
    if call.name in ROW_MIXING and read.ndim > 1:
        return [-2]
    return axes[1:]


def _read_argument(call: Call, name: str) -> Any:
    """Return an argument by name, or the second of those by position."""
    if name in call.kwargs:
        return call.kwargs[name]
    return call.args[1]


def _get_size(value: Any, axis: int) -> int:
    """Return the size of a tensor along an axis; 0 without one."""
    if not isinstance(value, Tensor) or value.ndim < -axis:
        return 0
    return value.shape[axis]


def _repeat_form(form: Form, cut: Cut, size: int) -> Form:
    """Repeat a form of one place along its axis, and mark the other places as not computed."""
    quotient = form.pending_quotient
    if quotient:
        parts = quotient.move(lambda part: _repeat_form(part, cut, size))
        result = Form.from_quotient(parts)
        result.__dict__["parts"] = {cut: form}
        return result
    axis, place = cut
    shape = list(form.shape)
    shape[axis] = size
    wide: Form = rearrange(form, lambda t: t.expand(shape))
    # NaN where nothing was computed: a range that reads it is not finite, and proves nothing.
    wide.slack = torch.full(shape, torch.nan, dtype=form.slack.dtype, device=form.device)
    wide.slack.narrow(axis, place, 1).copy_(form.slack)
    # Later calls that read the place alone take the form itself (`_narrow`).
    wide.__dict__["parts"] = {cut: form}
    if form.weights:
        low, high = form.weights
        wide.weights = (low.expand(shape), high.expand(shape))
    return wide


def _list_nodes(values: Any) -> list[Node]:
    """Return the nodes among some values, such as arguments."""
    return [value for value in tree_leaves(values) if isinstance(value, Node)]
