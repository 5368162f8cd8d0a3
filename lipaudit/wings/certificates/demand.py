"""Which entries of each call are needed, if the result reads only one token.

A model first runs on plain numbers, call by call. Going backwards from its results, the shapes
tell which entries of every call are read. If a row-wise call is read at one index of an axis only
(the class token; the last token), it computes only that index, and the result is repeated along
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
from lipaudit.wings.certificates.form import Form, list_forms
from lipaudit.wings.certificates.rearrangements import CONSTANT_MAKERS, MOVE_METHODS, rearrange
from lipaudit.wings.certificates.symbols import Symbols

ELEMENTWISE = frozenset(
    (
        "add",
        "radd",
        "sub",
        "rsub",
        "mul",
        "rmul",
        "multiply",
        "div",
        "truediv",
        "rtruediv",
        "divide",
        "true_divide",
        "neg",
        "negative",
        "gelu",
        "silu",
        "relu",
        "tanh",
        "sigmoid",
        "exp",
        "square",
        "pow",
        "rsqrt",
        "sqrt",
        "reciprocal",
        "dropout",
        "masked_fill",
        "contiguous",
        "clone",
        "to",
        "float",
        "double",
        "detach",
    )
)
"""Elementwise calls: the arguments broadcast to the shape of the result."""

ROW_MIXING = frozenset(("matmul", "bmm", "scaled_dot_product_attention"))
"""Calls where a row of the result depends on that row of the first argument and on all other
arguments."""

ROW_WISE = frozenset(("linear", "softmax", "layer_norm", "rms_norm", "batch_norm", *ROW_MIXING))
"""Calls where a row of the result depends only on that row of the first argument."""

REARRANGING = frozenset((*MOVE_METHODS, "view", "getitem", "expand", "expand_as", "T", "mT"))
"""Calls that only rearrange entries of their first argument."""


@dataclass(eq=False)
class Node:
    """Stands for a tensor of the trial run: a mask of the entries that later calls read."""

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


Position = tuple[int, int]
"""An axis, counted from the last, and an index along it, such as that of the class token."""


class TrialRun:
    """Runs a model on plain numbers once, and records each call of a torch function."""

    def __init__(self, like: Symbols) -> None:
        """Make the symbols of the trial, with the rules and dtype of `like`.

        Forms of these symbols pass every call of a torch function to `self.call`, so that the
        trial records the calls.
        """
        # No input symbols: the trial runs on one input, and only the recorded calls matter.
        dtype = like.model_dtype
        self.symbols = Symbols(
            0, "linf", order=1, dtype=dtype, rules=like.rules, model_dtype=dtype
        )
        # torch functions on forms of these symbols call this method in place of their rule.
        self.symbols.intercept = self.call
        self.calls: list[Call] = []

    def start(self, centre: Tensor) -> Form:
        """Return a form for the trial run: plain numbers as its centre, and a node.

        The node is a mask of the entries that later calls read, at first no entry. A trial never
        uses the coefficients and the slack of a form, so they hold placeholders.
        """
        centre = centre.to(self.symbols.model_dtype)
        no_rows = centre.new_empty(0, *centre.shape)
        form = Form(centre, no_rows, centre, self.symbols)
        unread = centre.new_zeros(centre.shape, dtype=torch.bool)
        form.__dict__["node"] = Node(unread)
        return form

    def call(self, func: Any, name: str, _rule: Any, args: Any, kwargs: Any) -> Any:
        """Run a function of torch on numbers, and record the call.

        `Symbols.intercept` is set to this method, so torch functions on forms call it in place of
        their rule for bounds. The function runs on the centres of the forms, which are plain
        numbers. The record has the nodes of the forms, which are masks of the entries that later
        calls read.
        """
        numbers, options = tree_map_only(Form, lambda form: form.centre, (args, kwargs))
        result = func(*numbers, **options)
        if result is None:  # a write into the first argument
            result = numbers[0]
        elif isinstance(result, Iterator):
            result = list(result)
        if name not in CONSTANT_MAKERS:  # a constant is no form
            result = tree_map_only(Tensor, self.start, result)
        nodes, options = tree_map_only(Form, lambda form: form.node, (args, kwargs))
        results = [form.node for form in list_forms(result)]
        self.calls.append(Call(func, name, nodes, options, results))
        if name == "iter":
            return iter(result)
        return result


class Plan:
    """The calls of torch functions in order: the name of each, and what of its result to compute.

    A call is computed at one index of an axis if later calls read nothing else, such as the class
    token; otherwise as a whole.
    """

    def __init__(self, positions: Iterable[tuple[str, Position | None]]) -> None:
        self.positions = iter(positions)

    def __call__(self, _func: Any, name: str, rule: Any, args: Any, kwargs: Any) -> Any:
        """Compute the next call of the model by its rule, but only the entries that are read.

        `Symbols.intercept` is set to this object, so torch functions on forms call it in place of
        their rule. A trial run found out for each call whether later calls read only one index of
        an axis of the result, such as the class token. `position` is this axis and index, or None.
        With a position, the arguments are narrowed to the index, and the result is expanded along
        the axis, which takes no memory.

        Args:
            name: name of the torch function.
            rule: the function of forms that computes bounds of the result.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.

        Raises:
            DeviationError: the model calls other functions than in the trial run.
        """
        expected_name, position = next(self.positions, ("nothing", None))
        if name != expected_name:
            raise DeviationError
        if position is None:
            return rule(*args, **kwargs)
        axis, _ = position
        # Number of leading arguments to narrow: all in elementwise calls, else the first alone.
        # The weights of a linear layer, for example, are not narrowed.
        along_axis = 1
        if name in ELEMENTWISE:
            along_axis = len(args)
        size = max(_get_size(value, axis) for value in args[:along_axis])
        parts = list(args)
        for i, value in enumerate(args[:along_axis]):
            # Arguments of size 1 are broadcast along the axis: they are not narrowed.
            if _get_size(value, axis) == size:
                parts[i] = _narrow(value, position)
        return _repeat_form(rule(*parts, **kwargs), position, size)


def _narrow(value: Tensor, position: Position) -> Tensor:
    """Return a tensor or form at one index of an axis (`position`), as a slice of size 1.

    All calls that read the same slice of a form get the same object. If a call turns slack of the
    slice into an error symbol, the other calls share this symbol, and so it can cancel.
    """
    axis, index = position
    if not isinstance(value, Form):
        return value.narrow(axis, index, 1)
    # A cache of slices, stored on the form.
    parts: dict[Position, Form] = value.__dict__.setdefault("parts", {})
    if position not in parts:
        part = cast("Form", value.narrow(axis, index, 1))
        # Limits of attention weights. They need all entries of the last axis, which sum to 1.
        if value.weights and axis != -1:
            low, high = value.weights
            part.weights = (low.narrow(axis, index, 1), high.narrow(axis, index, 1))
        parts[position] = part
    return parts[position]


def plan_calls(model: Callable[[Any], Any], x: Form) -> Plan | None:
    """Run the model on plain numbers, and return which entries of each call its results need.

    Return None if the run fails, or if the result does not depend on the input. Then the pass on
    forms computes all entries.
    """
    trial = TrialRun(x.symbols)
    try:
        start = trial.start(x.centre.clone())
        results = list_forms(model(start))
        for form in results:
            form.node.read[...] = True
        # From the last call to the first: at each call, the masks of its results already contain
        # what all later calls read.
        positions = [(call.name, _mark_read(call)) for call in reversed(trial.calls)]
    except (RuntimeError, TypeError, ValueError) as error:
        # Another failure, such as mismatched dtypes, only means that no entry can be left out.
        # Failures of the machine, such as no memory, are raised.
        if of_machine(error):
            raise
        return None
    if not results:
        return None
    return Plan(positions[::-1])


def _mark_read(call: Call) -> Position | None:
    """Mark which entries of its arguments a recorded call of a torch function reads.

    In the record, a `Node` stands for each tensor: a mask of the entries that later calls read.
    The nodes of the results are already complete. Three cases: a rearrangement reads the entries
    that were moved to read ones; a call whose result is read at one index of an axis reads this
    index of its arguments; any other call reads everything.

    Returns:
        The axis and the index in the second case, else None.
    """
    if call.name in REARRANGING and isinstance(call.args[0], Node):
        _mark_rearranged(call, call.args[0])
        return None
    position = _find_read_position(call)
    if position is None:
        _mark_all((call.args, call.kwargs))
        return None
    # Number of leading arguments with this axis: all in elementwise calls, else only the first.
    along_axis = 1
    if call.name in ELEMENTWISE:
        along_axis = len(call.args)
    axis, index = position
    for node in call.args[:along_axis]:
        if isinstance(node, Node) and node.read.ndim >= -axis:
            # An argument of size 1 along the axis is broadcast: its index 0 is read.
            read_index = min(index, node.read.shape[axis] - 1)
            node.read.narrow(axis, read_index, 1)[...] = True
        else:
            _mark_all(node)
    _mark_all((call.args[along_axis:], call.kwargs))
    return position


def _mark_rearranged(call: Call, node: Node) -> None:
    """Mark the entries of the first argument of a rearranging call that later calls read.

    The results of the call have masks of the entries that later calls read. To find where these
    entries come from, the call runs on the indices 0, 1, ... of the entries of the argument.

    Args:
        call: a recorded call that only moves entries, such as a transpose.
        node: the mask of its first argument.
    """
    indices = torch.arange(node.read.numel(), device=node.read.device)
    indices = indices.view(node.read.shape)
    # Other forms among the arguments, such as the `other` of `expand_as`, only lend their shapes:
    # their masks have the same shapes.
    args = tree_map_only(Node, lambda other: other.read, call.args[1:])
    moved = call.func(indices, *args, **call.kwargs)
    if len(call.results) == 1:
        moved = [moved]
    entries = node.read.view(-1)
    for result, result_indices in zip(call.results, moved, strict=True):
        entries[result_indices[result.read]] = True


def _mark_all(values: Any) -> None:
    """Mark all entries of some arguments of a call as read."""
    for node in _list_nodes(values):
        node.read[...] = True


def _find_read_position(call: Call) -> Position | None:
    """Return an axis of a call's result along which later calls read one index, and the index.

    Return None if there is no such axis, or if the call cannot be computed at one index alone. It
    can if it is elementwise or row-wise and has one result.
    """
    if call.name not in ELEMENTWISE | ROW_WISE or len(call.results) != 1:
        return None
    # `Plan` narrows positional arguments only. So a call with a keyword argument that depends on
    # the input (a node) is computed as a whole.
    if _list_nodes(call.kwargs):
        return None
    # The same holds for constant tensors among the keywords of an elementwise call: the mask of
    # `masked_fill(x, mask=mask)` may differ from token to token. In row-wise calls such tensors
    # are weights, which are the same for all rows; only an attention mask is not (`_list_axes`).
    if call.name in ELEMENTWISE and any(isinstance(each, Tensor) for each in call.kwargs.values()):
        return None
    read = call.results[0].read  # mask of the entries of the result that later calls read
    if not read.numel():
        return None
    for axis in _list_axes(call, read):
        by_index = read.movedim(axis, 0).reshape(read.shape[axis], -1)
        read_indices = by_index.any(1).nonzero()[:, 0]
        if len(read_indices) == 1 and read.shape[axis] > 1:
            return axis, int(read_indices)
    return None


def _list_axes(call: Call, read: Tensor) -> list[int]:
    """Return the axes along which each index of a call's result can be computed alone.

    Axes count from the last, as -1, -2, ... They depend on the torch function of the call: a
    softmax, for example, mixes the entries along its axis. `read` has the shape of the result.
    """
    axes = list(range(-1, -read.ndim - 1, -1))
    if call.name in ELEMENTWISE:
        return axes
    first = call.args[0]
    # If the first argument is broadcast, its rows are not the rows of the result.
    if not isinstance(first, Node) or first.read.shape[:-1] != read.shape[:-1]:
        return []
    if call.name == "softmax" and _read_argument(call, "dim") not in (-1, read.ndim - 1):
        return []
    if call.name == "layer_norm":  # mixes the last axes: as many as `normalized_shape` has
        shape = _read_argument(call, "normalized_shape")
        return axes[1 if isinstance(shape, int) else len(shape) :]
    if call.name == "batch_norm":  # mixes nothing; axis 1 has channels, each with own weights
        return [axis for axis in axes if axis % read.ndim != 1]
    if call.name == "scaled_dot_product_attention":
        # An attention mask would have to be narrowed, too, and that is not implemented.
        has_mask = len(call.args) > 3 or call.kwargs.get("attn_mask") is not None
        if has_mask or call.kwargs.get("is_causal"):
            return []
    # A product has its rows (tokens) from the first argument alone. Axes of the batch are in all
    # arguments, and only the first would be narrowed.
    if call.name in ROW_MIXING and read.ndim > 1:
        return [-2]
    return axes[1:]  # row-wise: the last axis is mixed


def _read_argument(call: Call, name: str) -> Any:
    """Return the keyword argument `name` of a call, else its second positional argument."""
    if name in call.kwargs:
        return call.kwargs[name]
    return call.args[1]


def _get_size(value: Any, axis: int) -> int:
    """Return the size of a tensor along an axis; 0 if it has no such axis or is no tensor."""
    if not isinstance(value, Tensor) or value.ndim < -axis:
        return 0
    return value.shape[axis]


def _repeat_form(form: Form, position: Position, size: int) -> Form:
    """Expand a form computed at one index of an axis to the size that the model expects.

    The slack at all other indices is NaN, so that a bound that reads them is not finite.

    Args:
        form: the form, of size 1 along the axis.
        position: the axis, and the index that was computed.
        size: the size that the model expects.
    """
    # A normalisation is stored as numerator / root + constant: expand each of these forms.
    quotient = form.pending_quotient
    if quotient:
        parts = quotient.move(lambda part: _repeat_form(part, position, size))
        result = Form.from_quotient(parts)
        result.__dict__["parts"] = {position: form}
        return result
    axis, index = position
    shape = list(form.shape)
    shape[axis] = size
    wide: Form = rearrange(form, lambda t: t.expand(shape))
    # NaN at the indices that were not computed: a bound that reads them is not finite.
    wide.slack = form.slack.new_full(shape, torch.nan)
    wide.slack.narrow(axis, index, 1).copy_(form.slack)
    # `_narrow` returns the form itself to later calls that read only this index.
    wide.__dict__["parts"] = {position: form}
    if form.weights:
        low, high = form.weights
        wide.weights = (low.expand(shape), high.expand(shape))
    return wide


def _list_nodes(values: Any) -> list[Node]:
    """Return the nodes among some values, such as arguments."""
    return [value for value in tree_leaves(values) if isinstance(value, Node)]
