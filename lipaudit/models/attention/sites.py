"""What a survey knows of each attention layer of a model, whatever the batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from lipaudit.models.attention.observe.calls import Address, Loop
from lipaudit.models.attention.project.projections import ProjectionForm, TokenIndex
from lipaudit.models.lifting import Kept, read

ONE_INPUT, APART, KEYS = "one input", "queries apart", "keys and values"
MODULE_INPUT = "module input"
"""Inputs with respect to which a norm can be computed; the last one always works."""


@dataclass(frozen=True)
class OutputMap:
    """W_O, where the layer's output is sum_h O_h W_O,h.

    Attributes:
        kept: weight of the output projection, (channels in, channels out), see `lifting.keep`.
        order: which of its rows each channel of the concatenated heads meets.
        gain: what the channel is multiplied by on the way.
    """

    kept: Tensor | Kept
    order: Tensor
    gain: Tensor

    def per_head(self, heads: int) -> Tensor:
        """Return W_O of each head, (heads, d_v, D_out)."""
        weight = read(self.kept)[self.order] * self.gain[:, None]
        return weight.view(heads, -1, weight.shape[1])


@dataclass(frozen=True)
class Structure:
    """How the tensors of a closed-form layer come about.

    Attributes:
        q, k, v: their forms; None for a query that does not depend on the input.
        joint: whether q reads the same tokens as k and v.
        out: the output projection, where there is a plain one.
    """

    q: ProjectionForm | None
    k: ProjectionForm
    v: ProjectionForm
    joint: bool
    out: OutputMap | None

    @property
    def queries(self) -> TokenIndex | None:
        """Which tokens the queries are, where they depend on the input."""
        return None if self.q is None else self.q.index


@dataclass(frozen=True)
class Site:
    """One attention layer of a model.

    Attributes:
        index: its number, in call order.
        module: path of the innermost module that computes it.
        heads: number of heads.
        kinds: what q, k and v are as functions of the layer's input: affine, rotation,
            linear-pos, local, cross-head, constant, or what keeps them from the closed form.
        reason: why there is no closed form; None where there is one.
        address: which attention call of the forward pass it is.
        layout: the axes of its q, k and v (see `calls.arrange`).
        structure: how its tensors come about; None without a closed form.
        sources: the ops at which the graph has to be cut to read it.
        explicit: whether the model writes its softmax out.
        scope: path of the innermost module that holds the layer and its projections.
        inputs: the arguments of that module which depend on the model's input; empty where its
            Jacobian cannot be taken numerically.
        inner: linear maps between what q, k and v read and what they are, beside the first ones.
        direct: whether the projections read those arguments themselves: then the norm in the
            inputs of the projections is the norm in the module's.
        line: the line of code that computes it, `file:line`.
        partners: numbers of all layers that share its maps of q and k; empty where it has them
            to itself.
        loop: the attention calls that it is, where the model's code computes its heads, or chunks
            of its queries, one by one; `address` is the last of them.
    """

    index: int
    module: str
    heads: int
    kinds: tuple[str, str, str]
    reason: str | None
    address: Address
    layout: str
    structure: Structure | None
    sources: frozenset[Address]
    explicit: bool
    scope: str
    inputs: tuple[int | str, ...]
    inner: frozenset[Address] = frozenset()
    direct: bool = False
    line: str = ""
    partners: tuple[int, ...] = ()
    loop: Loop | None = None

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The attention calls of the forward pass that it is."""
        return (self.address,) if self.loop is None else self.loop.addresses

    @property
    def closed_form(self) -> bool:
        """Whether the Jacobian has the closed form of the theory."""
        return self.structure is not None

    @property
    def reads(self) -> tuple[str, ...]:
        """The modules whose input X is; of a layer without closed form the one it is given to."""
        if not self.closed_form:
            return (self.scope,)
        return tuple(sorted({source.module for source in self.sources}))

    @property
    def reads_inside(self) -> bool:
        """Whether these are the module of the attention and its parts."""
        within = f"{self.module}." if self.module else ""
        return all(f"{name}.".startswith(within) for name in self.reads)

    @property
    def input(self) -> str:
        """In what the norm of its Jacobian is taken."""
        if self.structure is None:
            return MODULE_INPUT
        if self.structure.q is None:
            return KEYS
        return ONE_INPUT if self.structure.joint else APART


def list_loops(sites: Iterable[Site]) -> list[Loop]:
    """Return the loops that layers are computed in."""
    return [site.loop for site in sites if site.loop is not None]


def list_blocks_without_attention(module: nn.Module, sites: Sequence[Site]) -> tuple[str, ...]:
    """Return the paths of blocks without attention in stacks in which others have some.

    A stack is a list of modules that is in no other stack. Of a module that several blocks share
    each has what it holds.
    """
    holders = {id(module.get_submodule(site.module)) for site in sites}

    def holds(block: nn.Module) -> bool:
        return any(id(part) in holders for part in block.modules())

    stacks = [(name, stack) for name, stack in _walk_stacks(module) if holds(stack)]
    blocks = [(f"{name}.{i}", block) for name, stack in stacks for i, block in enumerate(stack)]
    return tuple(path for path, block in blocks if not holds(block))


def _walk_stacks(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    """Yield the outermost lists of modules."""
    for name, part in module.named_children():
        here = f"{path}.{name}" if path else name
        if isinstance(part, nn.ModuleList):
            yield here, part
        else:
            yield from _walk_stacks(part, here)
