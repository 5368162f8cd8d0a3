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

from lipaudit.errors import is_machine_error
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
        """Prepare to run a model on plain numbers once, and to record its calls of torch.

        The numbers are wrapped in forms (`make_form`), because a form passes every call of a torch
        function on. Bounds are not computed.

        Args:
            like: the symbols (unknowns) of the pass that follows, for its rules and dtype.
        """
        # No symbols of inputs: the trial runs on one input, so nothing is unknown.
        dtype = like.model_dtype
        self.symbols = Symbols(
            inputs=0,
            norm="linf",
            order=1,
            dtype=dtype,
            rules=like.rules,
            model_dtype=dtype,
        )
        # torch functions on forms of these symbols call this method in place of their rule.
        self.symbols.intercept = self.record_call
        self.calls: list[Call] = []

    def make_form(self, numbers: Tensor) -> Form:
        """Wrap a plain tensor in a form, with a mask of the entries that later calls read.

        The numbers are the centre of the form, and the mask is its `node`; so far nothing is read.
        """
        centre = numbers.to(self.symbols.model_dtype)
        # A trial uses neither the coefficients of symbols nor the slack: these are placeholders.
        no_coefficients = centre.new_empty(0, *centre.shape)
        form = Form(centre, no_coefficients, slack=centre, symbols=self.symbols)
        # `form.node`: only forms of a trial have this attribute, so the class does not declare it.
        form.__dict__["node"] = Node(read=centre.new_zeros(centre.shape, dtype=torch.bool))
        return form

    def record_call(self, func: Any, name: str, _rule: Any, args: Any, kwargs: Any) -> Any:
        """Run a function of torch on plain numbers, and record the call.

        The arguments and the result are forms, which hold plain numbers as their centre. Each form
        has a node, a mask that will say which of its entries later calls read. The record of the
        call has these nodes in place of the forms.
        """
        numbers, options = tree_map_only(Form, lambda form: form.centre, (args, kwargs))
        result = func(*numbers, **options)
        if result is None:  # a function such as __setitem__ changes its first argument
            result = numbers[0]
        elif isinstance(result, Iterator):  # iter(x): a list, so that its tensors become forms
            result = list(result)
        if name not in CONSTANT_MAKERS:  # zeros_like, for example, does not read its argument
            result = tree_map_only(Tensor, self.make_form, result)
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
        """Compute bounds of the next call of the model, only at the entries that are read later.

        A torch function on forms (sets of inputs with bounds) calls this object in place of its
        rule. A trial run of the model on plain numbers found the `position` of each call: an axis
        of the result and the single index along it that later calls read, such as the index of the
        class token. Then the rule runs on this index of the arguments alone, and its result is
        expanded to the full size of the axis without memory. If later calls read more, the
        position is None, and the rule runs on everything.

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
        # Number of arguments to narrow: all of an elementwise call, and the first one of other
        # calls. The second one may be the weight of a linear layer, which is needed as a whole.
        count = 1
        if name in ELEMENTWISE:
            count = len(args)
        size = max(_get_size(value, axis) for value in args[:count])
        narrowed = list(args)
        for i, value in enumerate(args[:count]):
            # Arguments of size 1 are broadcast along the axis: they are not narrowed.
            if _get_size(value, axis) == size:
                narrowed[i] = _narrow(value, position)
        return _repeat_form(rule(*narrowed, **kwargs), position, size)


def _narrow(value: Tensor, position: Position) -> Tensor:
    """Return a tensor or form at one index of an axis (`position`), as a slice of size 1.

    A slice of a form is made once and kept in the form's attribute `slices`, so that all calls get
    the same object. A call may turn the slack of the slice (a radius) into an error symbol (an
    unknown). Other calls then share this symbol, and it can cancel.
    """
    axis, index = position
    if not isinstance(value, Form):
        return value.narrow(axis, index, 1)
    slices: dict[Position, Form] = value.__dict__.setdefault("slices", {})
    if position not in slices:
        part = cast("Form", value.narrow(axis, index, 1))
        # Keep the bounds of attention weights, unless the keys (the last axis) are narrowed: the
        # bounds are for rows of weights that sum to 1.
        if value.weights and axis != -1:
            low, high = value.weights
            part.weights = (low.narrow(axis, index, 1), high.narrow(axis, index, 1))
        slices[position] = part
    return slices[position]


def plan_calls(model: Callable[[Any], Any], x: Form) -> Plan | None:
    """Find which entries of each call the results of a model need, by a run on plain numbers.

    The plan has the calls of torch functions in order. Return None if the run fails, or if the
    result does not depend on the input: the pass that computes bounds then computes all entries.
    """
    trial = TrialRun(x.symbols)
    try:
        results = list_forms(model(trial.make_form(x.centre.clone())))
        for form in results:  # the results of the model are needed as a whole
            form.node.read[...] = True
        # From the last call to the first: at each call, the masks of its results already contain
        # what all later calls read. `_mark_read` marks what the call reads of its arguments.
        positions = [(call.name, _mark_read(call)) for call in reversed(trial.calls)]
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        if is_machine_error(error):  # such as no memory
            raise
        # Any other failure, such as mismatched dtypes, only means that no entry can be left out.
        return None
    if not results:
        return None
    return Plan(positions[::-1])


def _mark_read(call: Call) -> Position | None:
    """Mark which entries of its arguments a recorded call of a torch function reads.

    In the record, each tensor is a `Node`: a mask of the entries that are read later. The calls
    are visited from the last to the first, so the masks of this call's results are complete. If
    they say that only the class token of layer_norm(x, ...) is read, (batch, tokens, channels),
    the class token of x is marked, and (-2, 0) is returned.

    Returns:
        The axis and index at which alone the call has to be computed; None if it is computed as a
        whole. Axes are -1, -2, ... from the last one: so they are the same axes in an argument
        that has fewer axes and is broadcast.
    """
    # A transpose, for example, only moves entries: it reads those that later calls read.
    if call.name in REARRANGING and isinstance(call.args[0], Node):
        _mark_rearranged(call, call.args[0])
        return None
    # If later calls read one index of an axis, and the call computes each index of the axis alone,
    # the call reads this index of its arguments. Otherwise it reads everything.
    position = _find_read_position(call)
    if position is None:
        _mark_all((call.args, call.kwargs))
        return None
    # Number of leading arguments with this axis: all in elementwise calls, else only the first.
    count = 1
    if call.name in ELEMENTWISE:
        count = len(call.args)
    axis, index = position
    for node in call.args[:count]:
        if isinstance(node, Node) and node.read.ndim >= -axis:  # it has the axis
            # An argument of size 1 along the axis is broadcast: its index 0 is read.
            read_index = min(index, node.read.shape[axis] - 1)
            node.read.narrow(axis, read_index, 1)[...] = True
        else:
            _mark_all(node)
    _mark_all((call.args[count:], call.kwargs))
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
    entries = node.read.view(-1)  # a view: what is written here is marked in the node
    for result, result_indices in zip(call.results, moved, strict=True):
        entries[result_indices[result.read]] = True


def _mark_all(values: Any) -> None:
    """Mark all entries of some arguments of a call as read."""
    for node in _list_nodes(values):
        node.read[...] = True


def _find_read_position(call: Call) -> Position | None:
    """Return an axis of a call's result along which later calls read one index, and the index.

    For example (-2, 0) for a layer norm of (batch, tokens, channels) of which only the class token
    is read. Return None if the call must be computed as a whole.
    """
    # Other calls mix entries in ways that are not known here.
    if call.name not in ELEMENTWISE | ROW_WISE or len(call.results) != 1:
        return None
    # Only positional arguments are narrowed to the index. A keyword argument must not need it: it
    # may neither depend on the input (a node), nor be a tensor in an elementwise call, such as
    # the mask of `masked_fill(x, mask=mask)`. In row-wise calls tensors are weights, which are the
    # same for all rows; for an attention mask see `_list_axes`.
    if _list_nodes(call.kwargs):
        return None
    if call.name in ELEMENTWISE and any(isinstance(each, Tensor) for each in call.kwargs.values()):
        return None
    read = call.results[0].read  # mask of the entries of the result that later calls read
    if not read.numel():
        return None
    for axis in _list_axes(call, read):
        # A row of the mask for each index along the axis.
        by_index = read.movedim(axis, 0).reshape(read.shape[axis], -1)
        read_indices = by_index.any(1).nonzero()[:, 0]
        if len(read_indices) == 1 and read.shape[axis] > 1:
            return axis, int(read_indices)
    return None


def _list_axes(call: Call, read: Tensor) -> list[int]:
    """Return the axes along which each index of a call's result can be computed alone.

    A linear layer on (batch, tokens, channels), for example, computes each token alone, and mixes
    the channels: its axes are -2 and -3. Axes count from the last one.

    Args:
        call: a call of an elementwise or row-wise function of torch.
        read: a mask of the shape of the result.
    """
    axes = list(range(-1, -read.ndim - 1, -1))  # -1, -2, ... -ndim
    if call.name in ELEMENTWISE:
        return axes
    first = call.args[0]
    # If the first argument is broadcast, its rows are not the rows of the result.
    if not isinstance(first, Node) or first.read.shape[:-1] != read.shape[:-1]:
        return []
    # The other functions are row-wise: they mix the last axis. Some mix other axes, too, or have
    # arguments that would have to be narrowed.
    if call.name == "softmax" and _read_argument(call, "dim") not in (-1, read.ndim - 1):
        return []
    if call.name == "layer_norm":  # mixes the last axes: as many as `normalized_shape` has
        shape = _read_argument(call, "normalized_shape")
        return axes[len(shape) :]
    if call.name == "batch_norm":  # mixes nothing; axis 1 has channels, each with own weights
        return [axis for axis in axes if axis % read.ndim != 1]
    if call.name == "scaled_dot_product_attention":
        # An attention mask would have to be narrowed, too, and that is not implemented.
        has_mask = len(call.args) > 3 or call.kwargs.get("attn_mask") is not None
        if has_mask or call.kwargs.get("is_causal"):
            return []
    # A product a @ b has its rows (axis -2) from a alone. Its batch axes are axes of b as well,
    # which is not narrowed.
    if call.name in ROW_MIXING and read.ndim > 1:
        return [-2]
    return axes[1:]  # all but the last


def _read_argument(call: Call, name: str) -> Any:
    """Return the keyword argument `name` of a call, else its second positional argument."""
    if name in call.kwargs:
        return call.kwargs[name]
    return call.args[1]


def _get_size(value: Any, axis: int) -> int:
    """Return the size of a tensor along an axis (-1, -2, ...); 0 without such an axis.

    The size of values that are no tensors, such as numbers, is 0 as well.
    """
    if not isinstance(value, Tensor) or value.ndim < -axis:
        return 0
    return value.shape[axis]


def _repeat_form(form: Form, position: Position, size: int) -> Form:
    """Expand a form that was computed at one index of an axis to the size that the model expects.

    A class token (1, 1, channels) becomes (1, tokens, channels), for example. All indices share
    the memory of the computed one. Only this one has its slack (a radius that is added to bounds).
    The slack of the others is NaN: if a call reads them after all, its bounds are not finite and
    prove nothing.

    Args:
        form: the form, of size 1 along the axis.
        position: the axis, and the index that was computed.
        size: the size that the model expects.
    """
    # The result of a normalisation may still be a quotient, numerator / root + constant, that is
    # not computed. Then each of its forms is expanded in the same way, and the result is again a
    # quotient, which gives tighter bounds.
    quotient = form.pending_quotient
    if quotient:
        wide = Form.from_quotient(quotient.move(lambda part: _repeat_form(part, position, size)))
    else:
        axis, index = position
        shape = list(form.shape)
        shape[axis] = size
        wide = rearrange(form, lambda t: t.expand(shape))
        wide.slack = form.slack.new_full(shape, torch.nan)
        wide.slack.narrow(axis, index, 1).copy_(form.slack)
        if form.weights:  # bounds of attention weights
            low, high = form.weights
            wide.weights = (low.expand(shape), high.expand(shape))
    # `slices` is the attribute in which `_narrow` keeps slices of a form: later calls that read
    # only this index get the computed form itself, which may still be a quotient.
    wide.__dict__["slices"] = {position: form}
    return wide


def _list_nodes(values: Any) -> list[Node]:
    """Return the nodes among some values, such as arguments."""
    return [value for value in tree_leaves(values) if isinstance(value, Node)]
