"""Record the attention of a forward pass, with O = P V as nodes of its autograd graph.

`attribution` finds the shares of the Jacobian that pass these nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import tree_flatten

from lipaudit.models.attention.calls import (
    Address,
    AttentionCall,
    Explicit,
    hide_later_keys,
    make_additive,
)
from lipaudit.models.attention.events import AttentionMode
from lipaudit.models.attention.trace import CallStack, Frame
from lipaudit.models.requirements import AGREES, agree
from lipaudit.models.streams import Addition


@dataclass(frozen=True)
class AttentionEdges:
    """The graph edges of O, P and V of one attention call, O = P V; None: an edge is unknown.

    Attributes:
        output: the edge of O.
        pattern: the edge of P.
        value: the edge of V.
    """

    output: GradientEdge | None
    pattern: GradientEdge | None = None
    value: GradientEdge | None = None


class _NamedNode(NamedTuple):
    """The module whose output a node is.

    Attributes:
        parameters: number of its parameters.
        module: its path.
    """

    parameters: int
    module: str


class Recorder(AttentionMode):
    """Records every attention call of a forward pass, with P, V and O as parts of the graph.

    Attributes:
        call_stack: the modules that run now.
        calls: the calls by address.
        modules: the module that computed each node.
    """

    def __init__(self) -> None:
        """Start with no attention call recorded, and with no graph node assigned to a module."""
        super().__init__()
        # Whenever a module returns, `_name_node` records the graph node of its output.
        self.call_stack = CallStack(on_leave=self._name_node)
        self.calls: dict[Address, AttentionEdges] = {}
        self.modules: dict[Node, _NamedNode] = {}

    def complete(self, call: AttentionCall) -> tuple[None, Address, Tensor]:
        """Record the graph edges of O, P and V of an attention call O = P V, and return O.

        P V is computed again here, because torch's fused attention has no P in the graph. The
        model goes on with the O that is returned.

        Returns:
            None, the address of the call, and O. For the first item, the base class would call
            `on_attention`, which this class does not need.
        """
        address = self.call_stack.address("attention")
        # `parts` are P and V. They are missing if the model's output is not P V.
        output, *parts = _recompute(call) or (call.output,)
        # A view gives O a separate graph node, which stays the edge of O even if the model writes
        # into the tensor later.
        output = output.view_as(output)
        # Of O, P and V; None without a gradient.
        tensors = (output, *parts)
        edges = [get_gradient_edge(t) if t.requires_grad else None for t in tensors]
        self.calls[address] = AttentionEdges(*edges)
        return None, address, output

    def find_module(self, addition: Addition) -> str:
        """Return the path of the module that computes an addition's branch; empty if unknown."""
        for edge in addition.branches:
            if edge.node in self.modules:
                return self.modules[edge.node].module
        return ""

    def _name_node(self, frame: Frame, output: Any) -> None:
        """Record the module that has just returned as the one that computed a graph node.

        Args:
            frame: the call of the module, with the module and its name.
            output: what the module has returned. The node is that of its first tensor.
        """
        tensors = (t for t in tree_flatten(output)[0] if isinstance(t, Tensor))
        node = getattr(next(tensors, None), "grad_fn", None)
        if node is None:
            return
        # Several modules may return one tensor, such as an MLP and the dropout at the end of the
        # MLP. Keep the module with most parameters.
        parameters = len(list(frame.module.parameters()))
        # A node without a known module counts as one of a module without parameters.
        known_node = self.modules.get(node, _NamedNode(parameters=0, module=""))
        if parameters > known_node.parameters:
            self.modules[node] = _NamedNode(parameters, frame.name)


def _compute_weights(call: AttentionCall) -> Tensor:
    """Return the attention weights P of a call, (..., queries, keys)."""
    form = call.form
    if isinstance(form, Explicit):  # the model's own code has computed P
        return form.weights
    # torch's fused attention: the logits are scale q k^T + mask
    logits = form.scale * (call.q @ call.k.mT)
    mask = form.mask
    if form.causal:
        queries, keys = logits.shape[-2:]
        mask = hide_later_keys(queries, keys, mask, logits)  # the mask, and causal
    if mask is not None:  # an additive mask is -inf at hidden keys
        logits = logits + make_additive(mask, logits.dtype)
    # torch's fused attention returns 0 for a query that sees no key.
    sees_nothing = logits.isneginf().all(-1, keepdim=True)
    p = torch.softmax(logits.masked_fill(sees_nothing, 0.0), -1)
    return p.masked_fill(sees_nothing, 0.0)


def _recompute(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor] | None:
    """Compute O = P V of an attention call again, and return O, P and V.

    None if the model's output is not P V.
    """
    p = _compute_weights(call)
    # If the shapes do not fit, the output is not P V.
    if p.shape[:-1] != call.output.shape[:-1] or p.shape[-1] != call.v.shape[-2]:
        return None
    # The caller needs the gradient at P and V that comes through O. The model may also read its P
    # and V elsewhere. So compute O from new views of P and V, which nothing else reads.
    p = p.view_as(p).to(call.v.dtype)
    v = call.v.view_as(call.v)
    output = p @ v
    if agree(call.output, output, AGREES):
        return output, p, v
    return None
