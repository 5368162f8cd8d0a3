"""Find the module of an attention layer: the innermost one with the attention and its projections.

Norms without closed form run this module alone, and reports name its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

from lipaudit.models import graph
from lipaudit.models.attention.calls import AttentionCall, Explicit, Origin
from lipaudit.models.attention.trace import Frame


def find_scope(frames: Sequence[Frame], call: AttentionCall) -> Frame:
    """Return the innermost module call that contains an attention and its projections.

    Every tensor behind q, k, v and the logits is computed in this module call, or is an argument
    of this call.

    Args:
        frames: the module calls in progress, the innermost one last.
        call: the attention call.
    """
    origins = [leaf.origin for leaf in call.origins.find_leaves(call.q, call.k, call.v)]
    modules = _list_projection_modules(call, origins)
    for frame in reversed(frames):
        if all(map(frame.holds, modules)) and _is_complete(frame, call, origins):
            return frame
    return frames[0]


def _is_complete(frame: Frame, call: AttentionCall, origins: Sequence[Origin]) -> bool:
    """Say whether a module call computes a whole attention, projections included.

    All tensors behind q, k, v and the logits must be arguments of the call, or be made by its
    submodules.

    Args:
        frame: the module call.
        call: the attention call.
        origins: the linear maps behind q, k and v of the attention.
    """
    # Walk back from q, k and v. Each walk ends at leaves, and at graph nodes of the arguments.
    inputs = [*frame.inputs.values()]
    stop = [t.grad_fn for t in inputs if t.grad_fn is not None]
    walks = [graph.leaves(t, stop) for t in (call.q, call.k, call.v)]
    # A module may get q, k and v as arguments and only multiply them. Then linear maps are behind
    # q, k and v (`origins`), none of them is in this module, and the walks end at several
    # arguments. The projections are in an outer module: this one is not complete. If all walks end
    # at a single argument, q, k and v are made from it here, and no projections are left out.
    has_map = any(frame.holds(origin.address.module) for origin in origins if origin.linear)
    argument_nodes = {node for _, nodes in walks for node in nodes}
    if origins and not has_map and len(argument_nodes) != 1:
        return False
    if isinstance(call.form, Explicit):
        walks.append(graph.leaves(call.form.logits, stop))
    # Every leaf that is no argument must be made inside of the module. Leaves without an origin
    # are constants.
    input_ids = {id(t) for t in inputs}
    others = [t for leaves, _ in walks for t in leaves if id(t) not in input_ids]
    other_origins = [call.origins.by_leaf.get(t) for t in others]
    return all(frame.holds(o.address.module) for o in other_origins if o is not None)


def _list_projection_modules(call: AttentionCall, origins: Sequence[Origin]) -> list[str]:
    """Return the modules whose linear maps are the projections of q, k and v.

    If q, k or v is made from several maps, the result has no module for this tensor.

    Args:
        call: the attention call.
        origins: all linear maps behind q, k and v.
    """
    modules = []
    for t in (call.q, call.k, call.v):
        leaves = call.origins.find_leaves(t)
        # v without a projection is the input of the layer, which the maps of q and k read. The
        # linear map behind it is then no projection, but a map of an earlier layer.
        is_input = any(origin.root is graph.root(t) for origin in origins)
        if len(leaves) == 1 and leaves[0].origin.linear and not is_input:
            modules.append(leaves[0].origin.address.module)
    return modules
