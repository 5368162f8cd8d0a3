"""Products with the Jacobian of an attention layer without forming it, and starts for Lanczos.

A cotangent u of O is pulled back to the rows q, k, v, from there through each token-wise
projection to x; tangents are pushed the other way. One product with J J^T costs about one
attention forward. In a single head the width D leaves it: J J^T = J_qkv (I kron W^T W) J_qkv^T
with W = [W_Q W_K W_V].

Without the derivative of P, J is P kron W_V^T: P mixes the tokens, W_V the channels. Its leading
left singular vector is J's own where attention is weak, and often near it elsewhere. For a single
head that vector is a Kronecker product. For all heads together it is sought among the images of
b kron y, for one b that all maps together send far: y is then the leading singular vector of a
matrix as small as W_V, with or without W_O behind it, and a step towards it costs little beside a
product with J.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lipaudit.theory.exact.attend import Attend, derivative
from lipaudit.theory.heads import Heads
from lipaudit.theory.policy import cut
from lipaudit.theory.spectral.lanczos import Products, random_starts, spectral_norms

_DEAD = 1e-30  # heads with smaller gradients are zero: float32 ends at 1e-38


@dataclass(frozen=True)
class _InputSide:
    """The projections that read one input, side by side: W = [W_Q W_K W_V] or a part of it."""

    source: str  # x | x_kv
    local: dict[str, Tensor | None]  # G of each, (problems or 1, tokens, d, e)
    widths: list[int]  # e of each
    weight: Tensor  # W, (heads, D, sum of e)

    def pull(self, rows: dict[str, Tensor]) -> Tensor:
        """Return cotangents of x W, side by side."""
        parts = [
            rows[name] if g is None else torch.einsum("pnd,pnde->pne", rows[name], g)
            for name, g in self.local.items()
        ]
        return torch.cat(parts, -1)

    def push(self, y: Tensor) -> dict[str, Tensor]:
        """Return tangents of the rows from those of x W."""
        parts = zip(self.local.items(), torch.split(y, self.widths, -1), strict=True)
        return {
            name: part if g is None else torch.einsum("pne,pnde->pnd", part, g)
            for (name, g), part in parts
        }

    def select(self, index: Tensor | slice) -> _InputSide:
        local = {n: g if g is None or len(g) == 1 else g[index] for n, g in self.local.items()}
        return replace(self, local=local)


@dataclass(frozen=True)
class HeadProducts:
    """J J^T u of single heads; a problem is one head on one batch row."""

    attend: Attend
    sides: list[_InputSide]
    grams: list[Tensor]  # W^T W of each side, (problems, e, e)

    def __call__(self, u: Tensor) -> Tensor:
        """Return J J^T u of every problem, (problems, n dv)."""
        # J = J_qkv (I kron W^T): J J^T u = J_qkv (I kron W^T W) J_qkv^T u, an e x e Gram per head.
        images = []
        for part, pulled in self._pull_parts(u):
            tangents: dict[str, Tensor] = {}
            for side, y, gram in zip(part.sides, pulled, part.grams, strict=True):
                tangents |= side.push(y @ gram)
            images.append(part.attend.push(tangents).flatten(1))
        return images[0] if len(images) == 1 else torch.cat(images)

    def pulled_norm(self, u: Tensor) -> Tensor:
        """Return ||J^T u|| of every problem, (J_qkv^T u)^T (I kron W^T W) (J_qkv^T u)."""
        norms = []
        for part, pulled in self._pull_parts(u):
            pairs = zip(pulled, part.grams, strict=True)
            squares = [(y * (y @ gram)).sum((1, 2)) for y, gram in pairs]
            norms.append(torch.stack(squares).sum(0).sqrt())
        return torch.cat(norms)

    def _pull_parts(self, u: Tensor) -> Iterator[tuple[HeadProducts, list[Tensor]]]:
        """Yield J_qkv^T u by sides, for a few problems at a time that fit a core's cache."""
        parts = self._parts or [self]
        for part, some in zip(parts, torch.split(u, len(parts[0].attend.q)), strict=True):
            rows = part.attend.pull(some.view_as(part.attend.o), _names(part.sides))
            yield part, [side.pull(rows) for side in part.sides]

    def select(self, index: Tensor) -> HeadProducts:
        """Return the products of these problems alone."""
        if len(index) == len(self.attend.q):
            return self
        return self._some(index.to(self.attend.q.device))

    def _some(self, index: Tensor | slice) -> HeadProducts:
        sides = [side.select(index) for side in self.sides]
        grams = [gram[index] for gram in self.grams]
        return HeadProducts(self.attend.select(index), sides, grams)

    @cached_property
    def _parts(self) -> list[HeadProducts]:
        attend, (count, n, d) = self.attend, self.attend.q.shape
        cache = attend.maps.heads.policy.cache_entries
        whole = attend.maps.kept is None or attend.pairs is not None
        if whole or attend.q.device.type != "cpu":
            return []
        parts = cut(count, 2 * n * attend.k.shape[1] + 12 * n * d, cache)
        # A list that holds the object would keep it alive.
        return [self._some(part) for part in parts] if len(parts) > 1 else []


@dataclass(frozen=True)
class LayerProducts:
    """J J^T u of all heads together; a problem is one batch row, u is (tokens, heads, d_v)."""

    attend: Attend
    sides: list[_InputSide]
    weights: list[Tensor]  # W of each side, the heads side by side: (D, heads e)
    heads: int

    def __call__(self, u: Tensor) -> Tensor:
        """Return J J^T u of every problem, (rows, n heads dv)."""
        n, dv = self.attend.o.shape[1:]
        split = u.view(-1, n, self.heads, dv).transpose(1, 2)
        return self.push(self.pull(split)).transpose(1, 2).flatten(1)

    def pull(self, u: Tensor) -> list[Tensor]:
        """J^T u for the input of each side, (rows, tokens, D); u is (rows, heads, tokens, d_v)."""
        rows = self.attend.pull(u.flatten(0, 1), _names(self.sides))
        return [
            self._split(side.pull(rows)).transpose(1, 2).flatten(2) @ weight.mT
            for side, weight in zip(self.sides, self.weights, strict=True)
        ]

    def pull_scaled(
        self, u: Tensor, size: Tensor, sketches: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return R^T J^T u of each input, with u scaled such that ||R^T J^T u|| = size.

        In each head and row; the factors, (rows, heads), come first. R, of each input, is a few
        directions of its channels: no head is pulled back to all.
        """
        rows = self.attend.pull(u.flatten(0, 1), _names(self.sides))
        each = {
            side.source: self._split(side.pull(rows)) @ (side.weight.mT @ sketches[side.source])
            for side in self.sides
        }
        squares = torch.stack([z.square().sum((2, 3)) for z in each.values()]).sum(0)
        factor = size / squares.sqrt().clamp_min(_DEAD)
        return factor, {name: torch.einsum("bhnr,bh->bnr", z, factor) for name, z in each.items()}

    def push(self, inputs: list[Tensor]) -> Tensor:
        """Return J x for a tangent x of each input: the adjoint of `pull`."""
        tangents: dict[str, Tensor] = {}
        for side, weight, x in zip(self.sides, self.weights, inputs, strict=True):
            y = (x @ weight).view(*x.shape[:2], self.heads, -1)
            tangents |= side.push(y.transpose(1, 2).flatten(0, 1))
        return self._split(self.attend.push(tangents))

    def pulled_norm(self, u: Tensor) -> Tensor:
        """Return ||J^T u|| of every problem, u as in a call."""
        n, dv = self.attend.o.shape[1:]
        inputs = self.pull(u.view(-1, n, self.heads, dv).transpose(1, 2))
        return torch.stack([x.square().sum((1, 2)) for x in inputs]).sum(0).sqrt()

    def select(self, rows: Tensor) -> LayerProducts:
        """Return the products of these batch rows alone."""
        if len(rows) * self.heads == len(self.attend.q):
            return self
        index = (rows[:, None] * self.heads + torch.arange(self.heads)).flatten()
        index = index.to(self.attend.q.device)
        sides = [side.select(index) for side in self.sides]
        return replace(self, attend=self.attend.select(index), sides=sides)

    def _split(self, rows: Tensor) -> Tensor:
        return rows.view(-1, self.heads, *rows.shape[1:])


@dataclass(frozen=True)
class OutputProducts:
    """A layer's output: sum_h O_h W_O,h, or its heads side by side."""

    layer: LayerProducts
    weight: Tensor | None  # W_O, (heads, d_v, D_out); None for heads side by side

    @property
    def channels(self) -> int:
        """Return the number of channels of one token's output."""
        if self.weight is None:
            return self.layer.heads * self.layer.attend.v.shape[2]
        return self.weight.shape[2]

    @property
    def sizes(self) -> Tensor:
        """Return ||W_O||_F^2 of each head, (heads,); 1 for heads side by side."""
        if self.weight is None:
            return self.layer.attend.v.new_ones(self.layer.heads)
        return self.weight.square().sum((1, 2))

    def __call__(self, u: Tensor) -> Tensor:
        """Return W_O^T A W_O u token by token, for A on the heads side by side."""
        after = self.layer(self._pull_output(u))
        if self.weight is None:
            return after
        flat = self.weight.flatten(0, 1)
        return (after.view(len(u), -1, len(flat)) @ flat).flatten(1)

    def pulled_norm(self, u: Tensor) -> Tensor:
        """Return ||J^T W_O u|| of every problem."""
        return self.layer.pulled_norm(self._pull_output(u))

    def image(self, t: Tensor, tokens: Tensor) -> Tensor:
        """Return sum_h a_h kron W_O,h^T t_h: t is (rows, heads, d_v), a (rows, heads, n)."""
        if self.weight is None:
            return (tokens.mT[..., None] * t[:, None]).flatten(1)
        return (tokens.mT @ torch.einsum("bhd,hdo->bho", t, self.weight)).flatten(1)

    def pull_image(self, t: Tensor, inner: Tensor) -> Tensor:
        """Return the part of that image that returns to each t, given all <a_h, a_g>."""
        if self.weight is None:
            return inner.diagonal(0, 1, 2)[..., None] * t
        after = inner @ torch.einsum("bhd,hdo->bho", t, self.weight)
        return torch.einsum("bho,hdo->bhd", after, self.weight)

    def select(self, rows: Tensor) -> OutputProducts:
        """Return the products of these batch rows alone."""
        return replace(self, layer=self.layer.select(rows))

    def _pull_output(self, u: Tensor) -> Tensor:
        if self.weight is None:
            return u
        return (u.view(len(u), -1, self.channels) @ self.weight.flatten(0, 1).mT).flatten(1)


def head_products(heads: Heads) -> HeadProducts:
    """Linearise every head of a layer separately."""
    sides, batch = _sides(heads), len(heads.q)
    grams = [(side.weight.mT @ side.weight).repeat(batch, 1, 1) for side in sides]
    return HeadProducts(derivative(heads), sides, grams)


def layer_products(heads: Heads) -> LayerProducts:
    """Linearise a layer with all heads together."""
    sides = _sides(heads)
    weights = [side.weight.transpose(0, 1).flatten(1) for side in sides]
    return LayerProducts(derivative(heads), sides, weights, heads.q.shape[1])


def value_weight(products: HeadProducts | LayerProducts) -> Tensor | None:
    """Return W_V, (heads, D, d_v); None if v is constant or not an affine map of its token."""
    side, channels = products.sides[-1], products.attend.v.shape[2]
    affine = "v" in side.local and side.local["v"] is None
    return side.weight[..., -channels:] if affine else None


def _names(sides: list[_InputSide]) -> list[str]:
    return [name for side in sides for name in side.local]


def _sides(heads: Heads) -> list[_InputSide]:
    projections = {"q": heads.to_q, "k": heads.to_k, "v": heads.to_v}
    groups = {"x": ("q", "k", "v")} if heads.x_kv is None else {"x": ("q",), "x_kv": ("k", "v")}
    sides = []
    for source, names in groups.items():
        used = {name: m for name in names if (m := projections[name]) is not None}
        weights = [projection.weight for projection in used.values()]
        local: dict[str, Tensor | None] = {}
        for name, projection in used.items():
            g = projection.local
            if g is not None:  # one G for all problems, or one each
                shared = g.shape[:2] == (1, 1)
                g = g[0] if shared else g.expand(*heads.q.shape[:2], -1, -1, -1).flatten(0, 1)
            local[name] = g
        if used:
            widths = [weight.shape[2] for weight in weights]
            sides.append(_InputSide(source, local, widths, torch.cat(weights, 2)))
    return sides


_TOKEN_STEPS = 4  # power steps: the first singular value of a map is well separated
_CHANNEL_STEPS = 12  # Lanczos steps: singular values of weights are close together


def head_guess(products: HeadProducts) -> Tensor:
    """Return the leading left vector of P kron W_V^T of every problem, (problems, n dv), or 0."""
    attend, weight = products.attend, value_weight(products)
    if weight is None:
        return torch.zeros_like(attend.o).flatten(1)
    # The norm and left vector of a Kronecker product are those of its factors.
    tokens = _token_images(attend, attend.v.new_ones(1))
    values, vectors = torch.linalg.eigh(weight.mT @ weight)
    channels = values[:, -1:].clamp_min(0.0).sqrt() * vectors[..., -1]
    return (tokens.mT * channels.repeat(len(tokens) // len(channels), 1)[:, None]).flatten(1)


def layer_guess(family: OutputProducts) -> Tensor:
    """Return the image under all values of the b kron y that they stretch most, per row, or 0."""
    layer, weight = family.layer, value_weight(family.layer)
    heads, (count, n, dv) = layer.heads, layer.attend.o.shape
    if weight is None:
        return layer.attend.o.new_zeros(count // heads, n * family.channels)
    tokens = _token_images(layer.attend, family.sizes).view(-1, heads, n)
    flat, inner = weight.transpose(0, 1).flatten(1), tokens @ tokens.mT

    def select(index: Tensor) -> Products:
        some = inner[index.to(inner.device)]
        return lambda y: (
            family.pull_image((y @ flat).view(-1, heads, dv), some).flatten(1) @ flat.mT
        )

    start = random_starts([0], len(flat)).to(flat).expand(len(inner), -1)
    few = partial(spectral_norms, tol=1e-3, max_steps=_CHANNEL_STEPS, within=math.inf)
    y = few(select, start, vectors=True).vector
    assert y is not None
    return family.image((y @ flat).view(-1, heads, dv), tokens)


def _token_images(attend: Attend, sizes: Tensor) -> Tensor:
    """P b of every problem, (problems, 1, n), for one b a row, shared by as many heads as sizes.

    Power steps on sum_h size_h P_h^T P_h are enough for a guess.
    """
    heads = len(sizes)
    rows = attend.v.new_ones(len(attend.q), 1, attend.q.shape[1])
    for _ in range(_TOKEN_STEPS):
        back = attend.maps.left(rows).view(-1, heads, attend.k.shape[1])
        b = normalize((sizes[:, None] * back).sum(1, keepdim=True), dim=-1)
        rows = attend.maps.right(b.repeat_interleave(heads, 0))
    return rows
