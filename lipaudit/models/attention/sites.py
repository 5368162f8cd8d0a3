"""The results of a survey for each attention layer of a model, independent of the batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    """W_O, if the layer's output is sum_h O_h W_O,h.

    Attributes:
        kept: weight of the output projection, (channels in, channels out), see `lifting.keep`.
        order: its row for each channel of the concatenated heads.
        gain: factor of each channel before the projection.
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
    """The origins of the tensors of a closed-form layer.

    Attributes:
        q, k, v: their forms; None for a query that does not depend on the input.
        joint: whether q reads the same tokens as k and v.
        out: the output projection, if there is a plain one.
    """

    q: ProjectionForm | None
    k: ProjectionForm
    v: ProjectionForm
    joint: bool
    out: OutputMap | None

    @property
    def queries(self) -> TokenIndex | None:
        """Return the tokens of the queries, if these depend on the input."""
        return None if self.q is None else self.q.index


@dataclass(frozen=True)
class Site:
    """One attention layer of a model.

    Attributes:
        index: its number, in call order.
        module: path of the innermost module that computes it.
        heads: number of heads.
        kinds: kinds of q, k and v as functions of the layer's input: affine, rotation, linear-pos,
            local, cross-head, constant, or the obstacle to a closed form.
        reason: why there is no closed form; None if there is one.
        address: address of its attention call in the forward pass.
        layout: the axes of its q, k and v (see `calls.arrange`).
        structure: origins of its tensors; None without a closed form.
        sources: the ops at which the graph must be cut to read it.
        explicit: whether the model writes its softmax out.
        scope: path of the innermost module that holds the layer and its projections.
        inputs: arguments of that module that depend on the model's input; empty if the Jacobian
            cannot be computed numerically.
        inner: further linear maps between the input and q, k and v.
        direct: whether the projections read these arguments directly: the norm with respect to the
            projections' inputs is then the module's.
        line: the line of code that computes it, `file:line`.
        partners: numbers of all layers that share its maps of q and k; empty if none do.
        loop: its attention calls, if the model computes heads, or chunks of queries, one by one;
            `address` is the last one.
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
        """Return the addresses of its attention calls in the forward pass."""
        return (self.address,) if self.loop is None else self.loop.addresses

    @property
    def closed_form(self) -> bool:
        """Return whether the Jacobian has the closed form of the theory."""
        return self.structure is not None

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the modules whose input is X; without a closed form, the module of the layer."""
        if not self.closed_form:
            return (self.scope,)
        return tuple(sorted({source.module for source in self.sources}))

    @property
    def reads_inside(self) -> bool:
        """Return whether these are the attention's module and its parts."""
        within = f"{self.module}." if self.module else ""
        return all(f"{name}.".startswith(within) for name in self.reads)

    @property
    def input(self) -> str:
        """Return the input with respect to which the norm is computed."""
        if self.structure is None:
            return MODULE_INPUT
        if self.structure.q is None:
            return KEYS
        return ONE_INPUT if self.structure.joint else APART


def list_loops(sites: Iterable[Site]) -> list[Loop]:
    """Return the loops of layers that are computed in parts."""
    return [site.loop for site in sites if site.loop is not None]


def list_blocks_without_attention(module: nn.Module, sites: Sequence[Site]) -> tuple[str, ...]:
    """Return the paths of blocks without attention, in stacks of which other blocks have some.

    A stack is a list of modules that is not inside another stack. A module shared by several
    blocks counts in each.
    """
    # By identity: blocks may share one attention module under several paths.
    holders = {id(module.get_submodule(site.module)) for site in sites}

    def holds(block: nn.Module) -> bool:
        return any(id(part) in holders for part in block.modules())

    lists = {n: part for n, part in module.named_modules() if isinstance(part, nn.ModuleList)}
    blocks = [
        (f"{name}.{i}", block)
        for name, stack in lists.items()
        if holds(stack) and not any(name.startswith(f"{outer}.") for outer in lists)
        for i, block in enumerate(stack)
    ]
    return tuple(path for path, block in blocks if not holds(block))
