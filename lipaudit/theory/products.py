"""Products with the Jacobian of an attention layer, starts for Lanczos, and the Jacobian itself.

One product with J J^T costs about one attention forward: see `attend`. In a single head the width
D leaves it: J J^T = J_qkv (I kron W^T W) J_qkv^T with W = [W_Q W_K W_V].

Without the derivative of P, J is P kron W_V^T: P mixes the tokens, W_V the channels. Its leading
left singular vector is J's own where attention is weak, and often near it elsewhere. For a single
head that vector is a Kronecker product. For all heads together it is sought among the images of
b kron y, for one b that all maps together send far: y is then the leading singular vector of a
matrix as small as W_V, with or without W_O behind it, and a step towards it costs little beside a
product with J.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lipaudit.theory.attend import (
    Attend,
    anchor_outputs,
    linearize_attention,
    logit_gradients,
    map_rows,
    mean_value,
    weighted_differences,
)
from lipaudit.theory.heads import Heads, local_map, projections
from lipaudit.theory.spectral import Products, random_starts, spectral_norms

if TYPE_CHECKING:
    from jaxtyping import Float

    from lipaudit.theory.heads import PerHead

_DEAD = 1e-30
"""Heads with smaller gradients are zero: float32 ends at 1e-38."""
_TOKEN_STEPS = 4
"""Power steps to the tokens of a guess: the first singular value of a map is well separated."""
_CHANNEL_STEPS = 12
"""Lanczos steps to its channels: singular values of weights are close together."""


@dataclass(frozen=True)
class HeadProducts:
    """J J^T u of single heads, u -> A u, (problems, n dv).

    Attributes:
        attend: the derivative of the outputs.
        grams: W^T W of each input, (heads, e, e), shared by all batch rows; or (problems, e, e).
    """

    attend: Attend
    grams: list[Tensor]

    def __call__(self, u: Tensor) -> Tensor:
        """Return J J^T u of every problem: of every head on every batch row, (problems, n dv)."""
        # J = J_qkv (I kron W^T): `push` multiplies by J_qkv, the derivative of the outputs in
        # [q k v] = x W, and `pull` by its transpose. J J^T u = J_qkv (I kron W^T W) J_qkv^T u
        # needs only the small Gram matrix W^T W of each head, not the width D of the tokens.
        # `pulled` and `grams` have an item for every input that the projections read: one input
        # in self-attention; two if keys and values read another one than queries.
        pulled = self.attend.pull(u.view_as(self.attend.o))  # J_qkv^T u, (problems, tokens, e)
        images = [_times_gram(y, gram) for y, gram in zip(pulled, self.grams, strict=True)]
        return self.attend.push(images).flatten(1)

    def pulled_norm(self, u: Tensor) -> Tensor:
        """Return ||J^T u|| of every problem: of every head on every batch row.

        J^T u = W y for the gradient y = J_qkv^T u in [q k v] = x W: the square is y^T W^T W y. If
        queries and keys read two inputs, each has its own y and W, and the squares are added.
        """
        square = u.new_zeros(len(u))  # it stays 0 if q, k and v do not depend on the tokens
        pulled = self.attend.pull(u.view_as(self.attend.o))
        for y, gram in zip(pulled, self.grams, strict=True):
            products = y * _times_gram(y, gram)
            square = square + products.sum((1, 2))
        # Where W y nearly cancels, rounding may make the square negative.
        return square.clamp_min(0.0).sqrt()

    def select(self, index: Tensor) -> HeadProducts:
        """Return the products of some of the problems, given their indices."""
        if len(index) == len(self.attend.q):  # all of them
            return self
        index = index.to(self.attend.q.device)
        # Problems are ordered by batch row, then by head. If all batch rows share the Gram
        # matrices, there is one per head, and the head of a problem is its index modulo heads.
        grams = [gram[index % len(gram)] for gram in self.grams]
        return HeadProducts(self.attend.select(index), grams)

    def guess(self) -> Tensor:
        """Guess the leading left singular vector of J in every problem, (problems, n dv).

        If the attention map P is held constant, J is P kron W_V^T. The guess is the leading left
        singular vector of this matrix; 0 if the values are not x W_V + b.
        """
        attend = self.attend
        weight = attend.value_weight
        if weight is None:
            return torch.zeros_like(attend.o).flatten(1)
        # The leading left singular vector of a Kronecker product is the Kronecker product of the
        # factors' leading left singular vectors. Of P it is P b for the best unit vector b, up to
        # its length, (problems, 1, n). A single weight: every head has a b of its own.
        tokens = _token_images(attend, sizes=attend.v.new_ones(1))
        values, vectors = torch.linalg.eigh(weight.mT @ weight)
        norm = values[:, -1:].clamp_min(0.0).sqrt()  # ||W_V||
        channels = norm * vectors[..., -1]  # of W_V^T, (heads, dv)
        channels = channels.repeat(len(tokens) // len(channels), 1)
        return (tokens.mT * channels[:, None]).flatten(1)


@dataclass(frozen=True)
class LayerProducts:
    """J J^T u of all heads together: of sum_h O_h W_O,h, or of the heads side by side.

    A problem is one batch row here, but one head on one batch row in `attend`.

    Attributes:
        attend: the derivative of the outputs of all heads.
        weights: W of each input, the heads side by side, (D, heads e).
        out: W_O, (heads, d_v, D_out); None for heads side by side.
        gains: factor of each head's output, where they are side by side.
    """

    attend: Attend
    weights: list[Tensor]
    out: Tensor | None
    gains: Tensor

    def __call__(self, u: Tensor) -> Tensor:
        """Return J J^T u of every batch row, (rows, n channels), for all heads together.

        J is the Jacobian of the layer's output sum_h O_h W_O,h in its inputs X: one input, or two
        if keys and values read another one than queries. Without W_O, J is that of the O_h times
        their gains, side by side.
        """
        return self._push(self.pull(u))

    def _push(self, moves: list[Tensor]) -> Tensor:
        """Return the move of the layer's output, (rows, n channels), for a move of every input X.

        The output is sum_h O_h W_O,h, or without W_O the O_h times their gains, side by side.

        Args:
            moves: a move of each input, (rows, tokens, D).
        """
        count = len(self.gains)
        # x W is the move of q, k and v of all heads: e channels for each head.
        by_head = []
        for x, weight in zip(moves, self.weights, strict=True):
            y = torch.unflatten(x @ weight, 2, (count, -1))  # (rows, tokens, heads, e)
            by_head.append(y.transpose(1, 2).flatten(0, 1))  # (rows heads, tokens, e)
        o = self.attend.push(by_head)  # moves of the O_h, (rows heads, n, dv)
        o = torch.unflatten(o, 0, (-1, count))
        o = o.transpose(1, 2)  # (rows, n, heads, dv)
        if self.out is None:
            o = self.gains[:, None] * o
        else:  # W_O adds up the heads: the gains are factors of its rows already
            o = o.flatten(2) @ self.out.flatten(0, 1)
        return o.flatten(1)

    def pull(self, u: Tensor) -> list[Tensor]:
        """Return J^T u, the gradient of <u, output> in every input X, (rows, tokens, D).

        The output is sum_h O_h W_O,h, or without W_O the O_h times their gains, side by side.

        Args:
            u: a vector in the output space of every batch row, (rows, n * channels).
        """
        n, dv = self.attend.o.shape[1:]
        count = len(self.gains)
        # The gradients in the outputs O_h of the heads: u W_O,h^T, or gain_h times the part of u
        # that belongs to head h.
        if self.out is not None:
            u = u.view(len(u), n, -1) @ self.out.flatten(0, 1).mT
        in_outputs = u.reshape(len(u), n, count, dv)
        if self.out is None:
            in_outputs = self.gains[:, None] * in_outputs
        by_head = in_outputs.transpose(1, 2).flatten(0, 1)  # (rows * heads, n, dv)
        gradients = []
        # For every input X: y is the gradient in X W = [q k v] of each head, with e channels. The
        # product with W^T of all heads side by side gives the gradient in X, summed over heads.
        for y, weight in zip(self.attend.pull(by_head), self.weights, strict=True):
            y = torch.unflatten(y, 0, (-1, count))  # (rows, heads, tokens, e)
            y = y.transpose(1, 2).flatten(2)  # (rows, tokens, heads * e)
            gradients.append(y @ weight.mT)
        return gradients

    def pulled_norm(self, u: Tensor) -> Tensor:
        """Return ||J^T u|| of every batch row, over all inputs together."""
        square = u.new_zeros(len(u))
        for gradient in self.pull(u):
            square = square + gradient.square().sum((1, 2))
        return square.sqrt()

    def select(self, rows: Tensor) -> LayerProducts:
        """Return the products of some of the batch rows, given their indices."""
        count = len(self.gains)
        if len(rows) * count == len(self.attend.q):  # all of them
            return self
        # `attend` has a problem for every head of a row. They are ordered by row, then by head.
        index = rows[:, None] * count + torch.arange(count)
        index = index.flatten().to(self.attend.q.device)
        return replace(self, attend=self.attend.select(index))

    def guess(self) -> Tensor:
        """Guess the leading left singular vector of J in every batch row, (rows, n channels).

        If the attention maps P_h are held constant, J sends a move X of the tokens to the move
        sum_h P_h X W_V,h W_O,h of the output. The guess is this move for an X = b y^T. First a
        vector b over the tokens is chosen for which the P_h b are long, and then the best y over
        the channels. The guess is 0 if the values are no affine map of the tokens.
        """
        attend = self.attend
        weight = attend.value_weight  # W_V,h, (heads, D, dv)
        problems, n, dv = attend.o.shape
        count = len(self.gains)
        if weight is None:
            channels = count * dv
            if self.out is not None:
                channels = self.out.shape[2]
            return attend.o.new_zeros(problems // count, n * channels)
        # The weight of each head in the choice of b (`sizes`): all equal without W_O, where each
        # head has its own channels, scaled by its gain. Otherwise ||W_O,h||_F^2. W_O includes the
        # gains; without it they become factors of W_V.
        if self.out is None:
            sizes = attend.v.new_ones(count)
            weight = self.gains[:, None, None] * weight
        else:
            sizes = self.out.square().sum((1, 2))
        a = _token_images(attend, sizes).view(-1, count, n)  # P_h b of every head of a batch row
        values = weight.transpose(0, 1).flatten(1)  # W_V of all heads side by side, (D, heads dv)
        path = _ValuePath(a, values, self.out)
        # y: near the leading right singular vector of the map F from y to the output's move.
        start = random_starts([0], weight.shape[1]).to(weight)
        y = _find_leading(path.gram, start.expand(len(a), -1))
        return path.image(y)


@dataclass(frozen=True)
class _ValuePath:
    """The move of the outputs if the tokens move by b y^T and the maps P_h are held constant.

    With a_h = P_h b and t_h = W_V,h^T y, it is F y = sum_h a_h kron (W_O,h^T t_h). Without W_O it
    has the blocks a_h kron t_h, side by side.

    Attributes:
        a: the a_h, (rows, heads, n).
        values: W_V of all heads side by side, (D, heads dv).
        out: W_O, (heads, dv, D_out), or None.
    """

    a: Tensor
    values: Tensor
    out: Tensor | None

    def _project(self, y: Tensor) -> Tensor:
        """Return t_h of every head, (rows, heads, dv)."""
        return torch.unflatten(y @ self.values, 1, (self.a.shape[1], -1))

    def image(self, y: Tensor) -> Tensor:
        """Return F y, the move of the output if the tokens move by b y^T, (rows, n channels).

        b is a fixed vector over the tokens, y one over their channels. If the attention maps P_h
        are held constant, the output of head h moves by P_h b y^T W_V,h = a_h t_h^T with
        a_h = P_h b and t_h = W_V,h^T y. So F y = sum_h a_h kron (W_O,h^T t_h) behind W_O; without
        W_O, F y has the a_h kron t_h side by side.
        """
        t = self._project(y)  # t_h, (rows, heads, dv)
        a = self.a.mT  # (rows, n, heads)
        if self.out is None:
            image = a[..., None] * t[:, None]
        else:
            image = a @ torch.einsum("bhd,hdo->bho", t, self.out)
        return image.flatten(1)

    def gram(self, y: Tensor) -> Tensor:
        """Return F^T F y, (rows, D), where F y is the move of the output for a move b y^T.

        b is a fixed vector over the tokens, y one over their D channels, and F y =
        sum_h a_h kron (W_O,h^T t_h) with a_h = P_h b (`a`) and t_h = W_V,h^T y. W_V,h is a part of
        `values`, W_O,h of `out`. F y is not formed: as <a kron c, a' kron c'> = <a, a'> <c, c'>,

            F^T F y = sum_h W_V,h r_h,   r_h = W_O,h sum_g <a_h, a_g> W_O,g^T t_g.

        Without W_O, the a_h kron t_h are side by side, and r_h = ||a_h||^2 t_h.
        """
        t = self._project(y)  # t_h, (rows, heads, dv)
        inner = self.a @ self.a.mT  # <a_h, a_g> of all pairs of heads
        if self.out is None:
            r = inner.diagonal(0, 1, 2)[..., None] * t
        else:
            projected = inner @ torch.einsum("bhd,hdo->bho", t, self.out)
            r = torch.einsum("bho,hdo->bhd", projected, self.out)
        return r.flatten(1) @ self.values.mT  # sum_h W_V,h r_h


def _find_leading(multiply: Products, start: Tensor) -> Tensor:
    """Return vectors near the leading eigenvectors of positive semidefinite A, by Lanczos steps.

    Args:
        multiply: y -> A y for all problems at once.
        start: start vectors, one per problem.
    """
    norms = spectral_norms(
        lambda _: multiply,  # problems are never dropped: `rebuild` is above 1
        start,
        tol=1e-3,
        max_steps=_CHANNEL_STEPS,
        within=math.inf,  # no proof is needed: the estimate of the error alone decides
        rebuild=2.0,
        vectors=True,
    )
    assert norms.vector is not None
    return norms.vector


def head_products(heads: Heads) -> HeadProducts:
    """Return the map u -> J J^T u of every head of a layer, on every batch row.

    J = J_qkv (I kron W^T): a move of the tokens x moves [q k v] = x W, and J_qkv is the derivative
    of the outputs in [q k v]. So J J^T = J_qkv (I kron W^T W) J_qkv^T needs only the Gram matrix
    W^T W of each head.
    """
    attend = linearize_attention(heads)
    # One group of weights W, (heads, D, channels), for each input: for the tokens, or for those of
    # the queries and those of keys and values.
    return HeadProducts(attend, [group.weight.mT @ group.weight for group in attend.groups])


def _times_gram(y: Tensor, gram: Tensor) -> Tensor:
    """Return y W^T W of every problem, (problems, tokens, e).

    Args:
        y: rows of every problem: of all heads on a batch row, then on the next row.
        gram: W^T W of every problem, or of every head. All batch rows then share it, because with
            few tokens reading a copy for each problem takes longer than the products.
    """
    by_row = y.view(-1, len(gram), *y.shape[1:])  # (batch rows, heads, tokens, e)
    return torch.einsum("bhne,hef->bhnf", by_row, gram).flatten(0, 1)


def layer_products(
    heads: Heads, out: Float[Tensor, "heads dv Dout"] | None, gains: Float[Tensor, " heads"]
) -> LayerProducts:
    """Return the map u -> J J^T u of all heads of a layer together, on every batch row.

    Args:
        heads: the heads.
        out: W_O of each head, for the Jacobian of sum_h O_h W_O,h. None for the Jacobian of the
            outputs O_h side by side.
        gains: a factor for the output of each head. Without `out`, O_h is multiplied by its gain.
            With `out`, W_O includes the gains already: only the number of heads is read.
    """
    attend = linearize_attention(heads)
    # One matrix for each input, (D, heads * e): W = [W_Q W_K W_V] of all heads side by side.
    # `group.weight` is (heads, D, e), so the axis of the heads moves behind D before it is joined
    # with e.
    weights = [group.weight.transpose(0, 1).flatten(1) for group in attend.groups]
    if out is not None:
        out = out.to(heads.v)
    return LayerProducts(attend, weights, out, gains.to(heads.v))


def _token_images(attend: Attend, sizes: Tensor) -> Tensor:
    """Return P_h b of every problem, (problems, 1, n), for a unit vector b that makes them long.

    b is a vector over the keys, near the leading eigenvector of sum_h size_h P_h^T P_h. The images
    serve as start vectors (`guess`), so a few power steps are enough.

    Args:
        attend: the attention of all problems, each one head on one batch row.
        sizes: the weights size_h. One weight for each head: all heads of a batch row share one b.
            A single weight: every head has a b of its own.
    """
    # Problems are ordered by batch row, then by head: `count` problems in a row share one b. It is
    # the number of heads, or 1.
    count = len(sizes)
    problems, n, _ = attend.q.shape
    images = attend.v.new_ones(problems, 1, n)
    for _ in range(_TOKEN_STEPS):
        # A power step: b is sum_h size_h P_h^T images_h, divided by its length. P comes in blocks.
        pulled = attend.v.new_zeros(problems, 1, attend.k.shape[1])
        for p, queries, keys in map_rows(attend.heads, attend.p):
            pulled[..., keys] += images[..., queries] @ p
        by_head = pulled.view(-1, count, pulled.shape[2])  # (problems / count, count, m)
        total = (sizes[:, None] * by_head).sum(1, keepdim=True)
        b = normalize(total, dim=-1).repeat_interleave(count, 0)  # of every problem
        parts = []
        for p, _, keys in map_rows(attend.heads, attend.p):
            parts.append(b[..., keys] @ p.mT)
        images = torch.cat(parts, 2)
    return images


def sketched_vjp_x(
    heads: Heads,
    u: Float[Tensor, "batch heads n dv"],
    size: PerHead,
    sketches: dict[str, Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the gradient J^T u, summed over the heads of a layer, in a few directions.

    The purpose is to test the closed form of J^T u: the caller compares the result R^T J^T u with
    autograd. J is the Jacobian of the heads, and R has r directions of the D channels of an input.
    A few random directions show an error as well as all channels, at less cost.

    First u is scaled in each head and batch row such that ||R^T J^T u|| is `size`: otherwise an
    error in a head with small gradients would not show in the sum over the heads.

    Args:
        heads: the heads of one layer.
        u: a gradient in the outputs of the heads.
        size: the requested norm ||R^T J^T u|| for each head and batch row.
        sketches: R of each input, (D, r): `x`, and `x_kv` if keys and values have their own input.

    Returns:
        u after scaling, and R^T J^T u summed over the heads, (batch, tokens, r), for each input.

    >>> from lipaudit.theory.heads import affine_heads
    >>> x, eye = torch.tensor([[[3.0, 4.0]]]), torch.eye(2)[None]
    >>> heads, size = affine_heads(x, eye, eye, 2 * eye), torch.full((1, 1), 8.0**0.5)
    >>> sketched_vjp_x(heads, torch.ones(1, 1, 1, 2), size, {"x": torch.eye(2)})[1]
    {'x': tensor([[[2., 2.]]])}
    """
    attend = linearize_attention(heads)
    square = torch.zeros_like(size)  # ||R^T J^T u||^2 before the scaling, over all inputs
    pulled = {}
    by_group = attend.pull(u.flatten(0, 1))
    for group, y in zip(attend.groups, by_group, strict=True):
        # y is the gradient in x W, so R^T J^T u is y (W^T R) for each token. W^T R is small, and
        # the gradient in all D channels is never computed.
        directions = group.weight.mT @ sketches[group.source]
        z = torch.unflatten(y, 0, size.shape) @ directions
        square = square + z.square().sum((2, 3))
        pulled[group.source] = z
    # The factor of each head and row. A gradient of 0 stays 0.
    factor = size / square.sqrt().clamp_min(_DEAD)
    rows = {}
    for source, z in pulled.items():
        rows[source] = torch.einsum("bhnr,bh->bnr", z, factor)  # the sum over the heads
    return u * factor[..., None, None], rows


def dense_jacobian(heads: Heads) -> Float[Tensor, "batch heads outputs inputs"]:
    """Return J of every head as a matrix, (n dv) x (n D), or x (n D + m Dkv) with two inputs.

    Memory for batch x heads x n x m x dv x D numbers: for small cases.

    >>> from lipaudit.theory.heads import affine_heads
    >>> x, eye = torch.tensor([[[3.0, 4.0]]]), torch.eye(2)[None]
    >>> dense_jacobian(affine_heads(x, eye, eye, 2 * eye))
    tensor([[[[2., 0.],
              [0., 2.]]]])
    """
    # Block (i, j) of J, output token i by input token j, is
    #     J_ij = P_ij Phi^v_j + c_ij (b_ij^T Phi^k_j) + delta_ij T_i Phi^q_i,
    # where c_ij = P_ij (v_j - o_i) and T_i = sum_j c_ij a_ij^T. Phi^q, Phi^k and Phi^v are the
    # Jacobians of the projections. a and b are the gradients of logit ij in query i and in key j:
    # s k_j and s q_i for logits s q k^T.
    # In einsum: b batch, h head, i query, j key, a channel of values, d of queries, x of tokens.
    p = heads.attention()
    v = heads.v
    # Values less their mean: v_j - o_i cancels less, and J stays the same if rows of P sum to 1.
    # They do not with a sink, a constant logit that takes a share of the probability.
    if heads.sink is None:
        v = v - mean_value(p, v)
    rows = anchor_outputs(p, v, heads.sink_share())
    c = weighted_differences(p, v, rows)
    # Phi^q, Phi^k, Phi^v, each (#batch, heads, #tokens, d, D); zero for a constant.
    phi_q, phi_k, phi_v = (local_map(to) @ to.weight.mT[:, None] for to in projections(heads))
    # P_ij Phi^v_j + c_ij (b_ij^T Phi^k_j)
    over_keys = torch.einsum("bhij,bhjax->bhiajx", p, phi_v)
    b = logit_gradients(heads, "k", slice(None))
    u = torch.einsum("bhjid,bhjdx->bhijx", b, phi_k)  # b_ij^T Phi^k_j
    over_keys += torch.einsum("bhija,bhijx->bhiajx", c, u)
    # delta_ij T_i Phi^q_i
    a = logit_gradients(heads, "q", slice(None))
    t = torch.einsum("bhija,bhijd->bhiad", c, a)  # T_i
    diagonal = torch.einsum("bhiad,bhidx->bhaxi", t, phi_q)
    over_queries = torch.diag_embed(diagonal).permute(0, 1, 4, 2, 5, 3)  # (b, h, i, a, j, x)
    if heads.x_kv is None:
        jacobian = (over_keys + over_queries).flatten(4)
    else:  # queries read another input than keys and values: its columns come first
        jacobian = torch.cat([over_queries.flatten(4), over_keys.flatten(4)], 4)
    return jacobian.flatten(2, 3)
