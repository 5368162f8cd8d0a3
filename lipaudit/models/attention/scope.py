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
    origins = [leaf.origin for leaf in call.origins.leaves(call.q, call.k, call.v)]
    maps = [origin for origin in origins if origin.linear]
    modules = _list_projection_modules(call, maps)
    for frame in reversed(frames):
        if all(map(frame.holds, modules)) and _is_complete(frame, call, origins):
            return frame
    return frames[0]


def _is_complete(frame: Frame, call: AttentionCall, origins: Sequence[Origin]) -> bool:
    """Say whether an attention depends only on arguments of a module call and on its submodules.

    Args:
        frame: the module call.
        call: the attention call.
        origins: the linear maps behind q, k and v of the call.
    """
    # Walk back from q, k and v to the arguments of the module call.
    inputs = [*frame.inputs.values()]
    stop = [t.grad_fn for t in inputs if t.grad_fn is not None]
    walks = [graph.leaves(t, stop) for t in (call.q, call.k, call.v)]
    # If the module contains no linear map, it gets q, k and v as arguments. Such a module only
    # multiplies them, unless all three are made from one argument.
    has_map = any(frame.holds(origin.address.module) for origin in origins if origin.linear)
    arguments_met = {node for _, hits in walks for node in hits}
    if origins and not has_map and len(arguments_met) != 1:
        return False
    if isinstance(call.form, Explicit):
        walks.append(graph.leaves(call.form.logits, stop))
    # All leaves that are no arguments must be made inside of the module.
    input_ids = {id(t) for t in inputs}
    others = [t for leaves, _ in walks for t in leaves if id(t) not in input_ids]
    other_origins = [call.origins.by_leaf.get(t) for t in others]
    return all(frame.holds(o.address.module) for o in other_origins if o is not None)


def _list_projection_modules(call: AttentionCall, maps: Sequence[Origin]) -> list[str]:
    """Return the modules whose linear maps are the projections of q, k and v.

    If q, k or v is made from several maps, the result has no module for this tensor.

    Args:
        call: the attention call.
        maps: all linear maps behind q, k and v.
    """
    modules = []
    for t in (call.q, call.k, call.v):
        leaves = call.origins.leaves(t)
        # If the maps of queries or keys read t itself (values without a projection), the map that
        # has made t belongs to an earlier layer.
        is_input = any(origin.root is graph.root(t) for origin in maps)
        if len(leaves) == 1 and leaves[0].origin.linear and not is_input:
            modules.append(leaves[0].origin.address.module)
    return modules
