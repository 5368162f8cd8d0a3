"""One attention layer at one point, with everything that the theory needs.

Notation of the theory: X (tokens x D) enters the projections, q_i, k_j, v_j enter the product,
P = row-softmax(S), o_i = sum_j P_ij v_j, and Phi^q_i = dq_i / dx_i. The logits S are
scale q k^T + bias, or any function of the pairs (q_i, k_j): see `Pairs`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lipaudit.theory import POLICY, Policy
from lipaudit.theory.spectral import divide_by_powers, shift_exponent

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Shaped

    PerHead = Float[Tensor, "batch heads"]

MASK = 9e3
"""A bias entry this far below the largest of its row hides the key. Common masks are -inf, the
most negative number and -1e4; position biases and windows of Swin (-100) are far smaller."""
_HIDES_ROW = torch.finfo(torch.float32).min / 2
"""A row whose largest bias is at most this sees no key."""


@dataclass(frozen=True)
class Projection:
    """A token-wise map x_i -> y_i of every head with local Jacobian Phi_i = G_i W^T.

    Attributes:
        weight: W, per head; D input channels, e intermediate channels.
        bias: added to x W; only affine maps need it (their y is x W + b).
        local: G_i, the Jacobian of what follows the linear map (rotary position, qk-norm);
            None for an affine map, where it is the identity and e = d.
        kind: affine | rotation | linear-pos | local | cross-head.
    """

    weight: Float[Tensor, "heads D e"]
    bias: Float[Tensor, "heads e"] | None = None
    local: Float[Tensor, "#batch #heads tokens d e"] | None = None
    kind: str = "affine"


@dataclass(frozen=True)
class Pairs:
    """The derivatives of logits S_ij(q_i, k_j) other than s <q_i, k_j> plus a constant.

    dS_ij = <a_ij, dq_i> + <b_ij, dk_j>, a_ij = f_ij s k_j + r_ij, b_ij = f_ij s q_i + t_ij. A
    soft cap S = c tanh(s q.k / c) has its slope as f; relative positions times the queries (keys)
    are r (t).

    Attributes:
        slope: f; None where it is 1.
        with_q: r; None where it is 0.
        with_k: t; None where it is 0.
    """

    slope: Float[Tensor, "#batch #heads n m"] | None = None
    with_q: Float[Tensor, "#batch #heads n m d"] | None = None
    with_k: Float[Tensor, "#batch #heads n m d"] | None = None


@dataclass(frozen=True, kw_only=True)
class Heads:
    """All heads of one attention layer on a batch.

    P is computed on first use, once in each precision, and kept as long as the heads: pass the
    same heads to all functions. Heads derived by `to`, `pick` and `with_same_map` share P;
    `dataclasses.replace` computes it again. Never write to any of the tensors, nor to P.

    A batch row is a sample, or one window of a sample (`sample` says which). Padding is encoded
    in the data: padded keys have P = 0 through `bias`, padded queries are False in `valid`, and
    padded tokens are zero rows of `x`.

    Attributes:
        x: input of the query projection (and of the others if `x_kv` is None).
        x_kv: input of the key and value projections if it is another tensor (cross-attention,
            spatial reduction); the Jacobian is then with respect to (X_q, X_kv) together.
        q, k, v: the rows that enter the attention product, after bias, rotary position, qk-norm;
            grouped key and value heads are already repeated.
        scale: s of the logits, one number or one per (batch, head).
        bias: added to the logits (mask or position bias), broadcastable, or None; if boolean (a
            quarter of the memory), 0 where True and -inf where False.
        causal: whether key j > query i is masked on top of `bias` (aligned at the first token).
        valid: valid query rows; None when all are. Padded rows have P_i = 0 here.
        to_q, to_k, to_v: the projections; None for a constant (a learned query).
        out: W_O of every head (d_v x D_out) if the layer's output is sum_h O_h W_O,h; or None.
        sample: index of the sample of each batch row.
        pairs: derivatives of the logits if they are not scale q k^T plus a constant; `bias` then
            holds all logits at X, and `scale` belongs to the pairs.
        sink: a constant logit beside those of the keys, with the value 0: the rows of P sum to
            less than 1; None without.
        policy: chunk sizes of computations.
    """

    x: Float[Tensor, "batch n D"]
    x_kv: Float[Tensor, "batch m Dkv"] | None = None
    q: Float[Tensor, "batch heads n d"]
    k: Float[Tensor, "batch heads m d"]
    v: Float[Tensor, "batch heads m dv"]
    scale: Float[Tensor, "#batch #heads"]
    bias: Shaped[Tensor, "#batch #heads #n #m"] | None = None
    causal: bool = False
    valid: Bool[Tensor, "batch n"] | None = None
    to_q: Projection | None
    to_k: Projection | None
    to_v: Projection | None
    out: Float[Tensor, "heads dv Dout"] | None = None
    sample: Int[Tensor, " batch"]
    pairs: Pairs | None = None
    sink: Float[Tensor, "#batch #heads #n"] | None = None
    policy: Policy = POLICY
    _maps: dict[torch.dtype, Tensor] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    """P, with the sink as a last key, in each precision that was asked for."""

    @property
    def fits_memory(self) -> bool:
        """Return whether P of all heads of a sample has at most `map_limit` entries.

        P is then stored. Otherwise its rows are computed chunk by chunk, wherever they are needed.
        """
        entries = self.q.shape[1] * self.q.shape[2] * self.k.shape[2]
        return entries <= self.policy.map_limit

    @property
    def key_input(self) -> Float[Tensor, "batch m Dkv"]:
        """Return the input of the key and value projections."""
        return self.x if self.x_kv is None else self.x_kv

    def rows(
        self, start: int, stop: int, *, whole: bool = False
    ) -> Float[Tensor, "batch heads rows m"]:
        """Return rows of the attention map P = softmax(s q k^T + bias), in the dtype of q.

        The rows are those of the queries start..stop-1. Rows of padded queries are zero. Rows in
        which every key is masked are zero as well.

        Args:
            start: the first query.
            stop: one more than the last query.
            whole: whether to return the probability of the sink too, in a last column. A sink is a
                constant logit beside the logits of the keys. With a sink, a row without this
                column sums to less than 1.
        """
        logits = self._logits(start, stop)
        sees_nothing = None  # which rows have every key masked; only a bias can do this
        if self.bias is not None:
            sees_nothing = logits.amax(-1, keepdim=True) == -torch.inf
            # Softmax of such a row would be NaN (0 / 0), and so would every gradient through P.
            logits.masked_fill_(sees_nothing, 0.0)
        if self.sink is not None:
            sink = self.sink
            if sink.shape[-1] > 1:  # one logit per query; otherwise all queries share one
                sink = sink[..., start:stop]
            shape = logits.shape[:-1]  # (batch, heads, rows)
            sink_logits = sink[..., None].expand(*shape, 1)
            logits = torch.cat([logits, sink_logits], -1)

        p = torch.softmax(logits, -1)
        if sees_nothing is not None:
            # All of such a row becomes zero, also for the sink.
            p = p.masked_fill(sees_nothing, 0.0)
        if self.sink is not None and not whole:
            p = p[..., :-1]
        if self.valid is not None:  # False for padded queries
            p = p * self.valid[:, None, start:stop, None]
        return p

    def _logits(self, start: int, stop: int) -> Tensor:
        """Return s q k^T + bias of the queries start..stop-1, -inf where a key is masked."""
        q = self.q[..., start:stop, :]
        if self.pairs is None:
            logits = (self.scale[..., None, None] * q) @ self.k.mT  # (batch, heads, rows, m)
        else:  # the model computes other logits than s q k^T: `bias`, added below, holds them all
            logits = q.new_zeros(*q.shape[:-1], self.k.shape[2])
        if self.causal:
            logits = logits.masked_fill(self._future(start, stop), -torch.inf)
        if self.bias is not None:
            logits = logits + self.bias_rows(start, stop)
        return logits

    def attention(self, *, whole: bool = False) -> Float[Tensor, "batch heads n keys"]:
        """Return the attention map P of all queries, and store it for the next call.

        With `whole` the probability of the sink is the last column, as in `rows`.
        """
        p = self._maps.get(self.q.dtype)
        if p is None or self._lacks_graph(p):
            p = self._compute_map()
            if not p.requires_grad:  # a stored P with a graph would keep the graph in memory
                self._maps[self.q.dtype] = p
        if whole or self.sink is None:
            return p
        p_of_keys = p[..., :-1]
        if self.valid is not None:  # contiguous as from `rows`, so that sums round alike
            p_of_keys = p_of_keys.contiguous()
        return p_of_keys

    def _lacks_graph(self, p: Tensor) -> bool:
        """Return whether a stored P cannot be used because gradients must pass through it.

        A stored P has no graph.
        """
        if not torch.is_grad_enabled():
            return False
        if p.is_inference():  # autograd refuses tensors that were computed in inference mode
            return True
        sources = (self.q, self.k, self.scale, self.bias, self.sink)
        return any(t is not None and t.requires_grad for t in sources)

    def _compute_map(self) -> Tensor:
        """Compute P for all queries, with the probability of the sink as a last column.

        A large map is filled chunk by chunk: the temporaries of softmax stay small.
        """
        if self.fits_memory:
            return self.rows(0, self.q.shape[2], whole=True)
        keys = self.k.shape[2]
        if self.sink is not None:
            keys += 1
        p = self.q.new_empty(*self.q.shape[:3], keys)
        for start, stop in self.row_blocks():
            p[:, :, start:stop] = self.rows(start, stop, whole=True)
        return p

    def sink_share(self) -> Float[Tensor, "batch heads n 1"] | None:
        """Return the probability that each query gives to the sink; None without a sink.

        A sink is a constant logit beside those of the keys, with the value 0.
        """
        if self.sink is None:
            return None
        if self.fits_memory:
            return self.attention(whole=True)[..., -1:]
        shares = []
        for start, stop in self.row_blocks():
            p = self.rows(start, stop, whole=True)
            shares.append(p[..., -1:])
        return torch.cat(shares, 2)

    def visible(self, start: int, stop: int) -> Bool[Tensor, "#batch #heads rows m"]:
        """Return which keys the queries start..stop-1 can see, independent of P.

        A bias hides a key if its entry is `MASK` or more below the largest of its row. It hides a
        whole row if no entry is above `_HIDES_ROW`, half of the most negative float32 number. P
        does not show this: with very different logits, a visible key may also have P = 0.
        """
        shape = (1, 1, stop - start, self.k.shape[2])
        seen = self.q.new_ones(shape, dtype=torch.bool)
        if self.causal:
            seen = seen & ~self._future(start, stop)
        if self.bias is not None:
            bias = self.bias_rows(start, stop).masked_fill(~seen, -torch.inf)
            highest = bias.amax(-1, keepdim=True)
            # The difference comes first: in `highest - MASK`, a very large bias would absorb MASK.
            seen = (bias.sub_(highest) > -MASK) & (highest > _HIDES_ROW)
        if self.valid is not None:
            seen = seen & self.valid[:, None, start:stop, None]
        return seen

    def row_blocks(self) -> list[tuple[int, int]]:
        """Return the chunks (start, stop) of queries in which P is computed.

        The only chunk has all queries if P fits into memory.
        """
        count, n = self.q.shape[1:3]
        if self.fits_memory:
            return [(0, n)]
        row_entries = count * self.k.shape[2]  # of one query in all heads
        return [(chunk.start, chunk.stop) for chunk in self.policy.chunks(n, row_entries)]

    def bias_rows(self, start: int, stop: int) -> Float[Tensor, "#batch #heads #rows #m"]:
        """Return the bias of the logits of the queries start..stop-1; 0 without a bias."""
        if self.bias is None:  # one 0 for all pairs, (#batch, #heads, 1, 1) as the scale
            return torch.zeros_like(self.scale)[..., None, None]
        rows = self.bias
        if rows.shape[-2] > 1:  # one row per query
            rows = rows[..., start:stop, :]
        if rows.dtype != torch.bool:
            return rows.to(self.q.dtype)
        # A mask: True where the query sees the key.
        return self.q.new_zeros(rows.shape).masked_fill_(~rows, -torch.inf)

    def is_causal(self) -> bool:
        """Return whether no query sees a later key: by the flag, or by the masks in the bias.

        P is not used, because a key with P = 0 at this X may be visible.
        """
        if self.bias is None or self.causal:  # the flag alone decides
            return self.causal
        # Tokens of two inputs have no common order, and a single token has no later key under any
        # mask: the masks in the bias say nothing.
        if self.x_kv is not None or self.x.shape[1] == 1:
            return False
        for start, stop in self.row_blocks():
            later = self.visible(start, stop).triu(start + 1)  # visible keys j > i
            if later.any():
                return False
        return True

    def _future(self, start: int, stop: int) -> Tensor:
        """Return which keys j > i are later than the queries i = start..stop-1, (rows, m)."""
        shape = (stop - start, self.k.shape[2])
        return self.q.new_ones(shape, dtype=torch.bool).triu(start + 1)

    def to(self, dtype: torch.dtype) -> Heads:
        """Return the same heads with every floating-point tensor in another precision."""
        heads: Heads = cast_floats(self, dtype)
        if torch.promote_types(self.q.dtype, dtype) == dtype:
            # A cast to higher precision keeps the logits, so stored maps P remain correct. One to
            # lower precision rounds the logits: P is then computed again.
            heads._share_maps(self._maps)
        return heads

    def row(self, b: int) -> Heads:
        """Return one batch row (all heads)."""
        return self.pick(slice(b, b + 1), axis=0)

    def pick(self, index: slice, axis: Literal[0, 1] = 1) -> Heads:
        """Return some of the heads of all batch rows (axis 1), or some batch rows (axis 0).

        The result has its part of the stored maps P, which are not computed again.
        """
        # These have the axis of heads, and those added below the axis of batch rows alone. W_O
        # (`out`) has heads, but no batch rows.
        with_axis = ["q", "k", "v", "scale", "bias", "to_q", "to_k", "to_v", "pairs", "sink"]
        changes: dict[str, Any] = {}
        if axis == 0:
            with_axis += ["x", "x_kv", "valid", "sample"]
        elif self.out is not None:
            changes["out"] = self.out[index]
        for name in with_axis:
            changes[name] = _slice(getattr(self, name), axis, index)
        maps = {}
        for dtype, p in self._maps.items():
            maps[dtype] = _slice_axis(p, axis, index).contiguous()
        return replace(self, **changes)._share_maps(maps)

    def with_same_map(self, **changes: Any) -> Heads:
        """Return the heads with other values or projections, and with the stored maps P.

        P does not depend on values and projections, so P is not computed again.

        Raises:
            ValueError: a change could affect P.

        >>> heads = affine_heads(torch.zeros(2, 5, 3), *torch.ones(3, 1, 3, 4))
        >>> heads.with_same_map(v=2 * heads.v).attention() is heads.attention()
        True
        """
        wrong = set(changes) - _BESIDE_MAP
        if wrong:
            raise ValueError(f"these can change P: {', '.join(sorted(wrong))}")
        return replace(self, **changes)._share_maps(self._maps)

    def _share_maps(self, maps: dict[torch.dtype, Tensor]) -> Heads:
        """Take over the maps P of other heads, and return self."""
        object.__setattr__(self, "_maps", maps)  # frozen, and `replace` would not share P
        return self


_BESIDE_MAP = frozenset(("v", "to_q", "to_k", "to_v", "out", "policy"))
"""Arguments that do not change P."""


def affine_heads(
    x: Float[Tensor, "batch n D"],
    wq: Float[Tensor, "heads D d"],
    wk: Float[Tensor, "heads D d"],
    wv: Float[Tensor, "heads D dv"],
) -> Heads:
    """Return plain self-attention at x: no biases, no mask, scale 1 / sqrt d, one row per sample.

    >>> heads = affine_heads(torch.zeros(2, 5, 3), *torch.ones(3, 1, 3, 4))
    >>> heads.attention().shape, heads.attention()[0, 0, 0, 0]
    (torch.Size([2, 1, 5, 5]), tensor(0.2000))
    """
    return Heads(
        x=x,
        q=x[:, None] @ wq,
        k=x[:, None] @ wk,
        v=x[:, None] @ wv,
        scale=x.new_full((1, 1), wq.shape[2] ** -0.5),
        to_q=Projection(wq),
        to_k=Projection(wk),
        to_v=Projection(wv),
        sample=torch.arange(len(x), device=x.device),
    )


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return a tensor, or a record with tensors, in another precision if it is floating-point.

    Anything else is returned unchanged.
    """
    if isinstance(value, (Heads, Projection, Pairs)):
        changes: dict[str, Any] = {}
        for entry in fields(value):
            if entry.init:  # all fields but the stored maps P
                changes[entry.name] = cast_floats(getattr(value, entry.name), dtype)
        return replace(value, **changes)
    if isinstance(value, Tensor) and value.is_floating_point():
        # Contiguous: q, k and v of a model are views of one tensor, and each product with a view
        # would copy it again.
        return value.to(dtype, memory_format=torch.contiguous_format)
    return value


def _slice(value: Any, axis: int, index: slice) -> Any:
    """Return a tensor or record of heads for some batch rows (axis 0) or some heads (axis 1).

    A tensor whose axis has length 1 is shared by all rows or heads, and returned unchanged.
    """
    if isinstance(value, Projection):
        local = _slice(value.local, axis, index)
        if axis == 0:  # weight and bias have no batch axis
            return replace(value, local=local)
        bias = value.bias
        if bias is not None:
            bias = bias[index]
        return replace(value, weight=value.weight[index], bias=bias, local=local)
    if isinstance(value, Pairs):
        tensors = (value.slope, value.with_q, value.with_k)
        return Pairs(*(_slice(tensor, axis, index) for tensor in tensors))
    if value is None or value.shape[axis] == 1:
        return value
    return _slice_axis(value, axis, index)


def _slice_axis(t: Tensor, axis: int, index: slice) -> Tensor:
    """Slice the batch axis (0) or the head axis (1)."""
    if axis == 0:
        return t[index]
    return t[:, index]


def rows_in_reach(
    heads: Heads, start: int, stop: int
) -> tuple[Float[Tensor, "batch heads rows keys"], slice]:
    """Return P for the queries start..stop-1 and the keys that they can see, and these keys.

    The keys are one slice. A causal mask shows the keys up to the last query, a mask of a sliding
    window those from the first window to the last. Otherwise the slice has all keys. P is 0 on all
    other keys, so products with P can skip them.

    >>> from lipaudit.theory.heads import affine_heads
    >>> heads = replace(affine_heads(torch.zeros(1, 8, 3), *torch.ones(3, 1, 3, 4)), causal=True)
    >>> rows_in_reach(heads, 1, 2)
    (tensor([[[[0.5000, 0.5000]]]]), slice(0, 2, None))
    """
    bias = heads.bias
    keys = slice(None)
    if bias is None:
        if heads.causal:
            keys = slice(0, stop)
    elif bias.dtype == torch.bool and bias.shape[-1] > 1 and not heads.causal:
        # A mask with a column for each key: True where the query sees the key. With the causal
        # flag on top, keys must be counted from the first one, so all of them stay.
        rows = bias
        if rows.shape[-2] > 1:  # one row per query
            rows = rows[..., start:stop, :]
        visible = rows.flatten(0, 2).any(0).nonzero()  # indices of keys that some query can see
        keys = slice(0, 1)  # if no key is visible: one key with P = 0, as a tensor needs one
        if len(visible):
            keys = slice(int(visible[0]), int(visible[-1]) + 1)
        bias = bias[..., keys]
    # P on these keys needs their rows of k and their bias only. v and x_kv have no effect: v must
    # have as many keys as k, and x_kv is left out.
    fewer_keys = replace(heads, k=heads.k[:, :, keys], v=heads.v[:, :, keys], bias=bias, x_kv=None)
    return fewer_keys.rows(start, stop), keys


def projections(heads: Heads) -> tuple[Projection, Projection, Projection]:
    """Return the projections to q, k and v.

    Rows that do not depend on the tokens, as learned queries, have a projection with W = 0.
    """
    return (
        heads.to_q or _make_constant(heads.x, heads.q),
        heads.to_k or _make_constant(heads.key_input, heads.k),
        heads.to_v or _make_constant(heads.key_input, heads.v),
    )


def _make_constant(x: Tensor, rows: Tensor) -> Projection:
    """Return the projection of rows that do not depend on x: W = 0."""
    weight = x.new_zeros(rows.shape[1], x.shape[-1], rows.shape[-1])
    return Projection(weight, kind="constant")


def are_affine(heads: Heads) -> bool:
    """Return whether the formulas for affine heads apply.

    The formulas need q = x W_Q + b_Q without rotary position or qk-norm, the same for k and v,
    logits s q k^T plus a constant, and no sink (a constant logit beside those of the keys).
    """
    # `pairs` describes all other logits. `local` is the Jacobian of rotary position or qk-norm.
    if heads.pairs is not None or heads.sink is not None:
        return False
    return all(projection.local is None for projection in projections(heads))


def are_affine_everywhere(heads: Heads) -> bool:
    """Return whether the published bounds apply: hu, castin, mean_field, appendix_c, theorem3.

    These bounds need self-attention. Queries, keys and values must all be affine maps of the
    tokens, and none may be a constant.
    """
    has_constant = None in (heads.to_q, heads.to_k, heads.to_v)
    return not has_constant and heads.x_kv is None and are_affine(heads)


def local_map(projection: Projection) -> Float[Tensor, "#batch #heads #tokens d e"]:
    """Return G_i of every token: the Jacobian of what follows the linear map of a projection.

    A rotary position or qk-norm may follow; the whole projection has the Jacobian G_i W^T. In an
    affine projection nothing follows W, and one identity matrix is returned for all tokens.
    """
    if projection.local is not None:
        return projection.local
    width = projection.weight.shape[-1]
    eye = torch.eye(width).to(projection.weight)
    return eye[None, None, None]


def factor(projection: Projection) -> Float[Tensor, "heads 1 r e"]:
    """Return R with R^T R = W^T W: ||R y|| = ||W y||, and the width D leaves the computation."""
    return torch.linalg.qr(projection.weight, mode="r").R[:, None]


def narrow_jacobians(projection: Projection) -> Float[Tensor, "#batch #heads #tokens d r"]:
    """Return Phi_i = G_i W^T, the Jacobian of a projection, with fewer columns for the same norms.

    It is G_i R^T with R^T R = W^T W: ||A G_i R^T|| = ||A Phi_i|| for every matrix A.
    """
    return local_map(projection) @ factor(projection).mT


def select_tokens(per_token: Tensor, chunk: slice) -> Tensor:
    """Return the entries of some tokens (third axis); an axis of length 1 serves all tokens."""
    if per_token.shape[2] == 1:
        return per_token
    return per_token[:, :, chunk]


_SWAMPED = 16
"""How many times larger than x W_V the bias of the values may be. It drops out of J (without a
sink, rows of P sum to 1), but a large bias costs the values their last digits."""


def unit_values(heads: Heads) -> tuple[Heads, Float[Tensor, " heads"]]:
    """Return the heads with values divided by c, and c of every head, float64 on the CPU.

    The Jacobian is proportional to the values. Callers compute its norm for values of about size
    one and multiply by c, so nothing overflows or underflows on the way. c is the power of two
    next to the largest entry of dv / dx (`to_v`), or of v if v does not depend on the tokens.

    >>> from lipaudit.theory.heads import affine_heads
    >>> heads = affine_heads(torch.ones(1, 2, 3), *torch.full((3, 2, 3, 4), 1e-30))
    >>> unit, c = unit_values(heads)
    >>> unit.v[0, 0, 0], c[0] < 1e-29, torch.equal(unit.v * c[0].float(), heads.v)
    (tensor([1.9015, 1.9015, 1.9015, 1.9015]), tensor(True), True)
    """
    if heads.to_v is None:
        v, exponents = divide_by_powers(heads.v, 0, 2, 3)  # all axes but the heads
        return heads.with_same_map(v=v), exponents.double().exp2()
    to_v, exponents = _divide_projection(heads.to_v)
    v = shift_exponent(heads.v, -exponents[:, None, None])
    # A bias b of the values does not change the Jacobian if rows of P sum to 1. They do not with a
    # sink, a constant logit that takes a share of the probability. With `local`, something follows
    # x W_V + b, such as a norm, and b matters.
    if to_v.local is None and to_v.bias is not None and heads.sink is None:
        # v = x W_V + b. If b is more than _SWAMPED times larger than x W_V, the sum has lost
        # digits of x W_V: compute the values without b.
        bias = to_v.bias[:, None]
        without_bias = (v - bias).abs().amax((0, 2, 3))  # (heads,)
        largest_bias = bias.abs().amax((1, 2))
        # `not <=` in place of `>`, so that a NaN counts as too large.
        if not (largest_bias <= _SWAMPED * without_bias).all():
            v = heads.key_input[:, None] @ to_v.weight
    return heads.with_same_map(v=v, to_v=to_v), exponents.double().exp2()


def _divide_projection(to_v: Projection) -> tuple[Projection, Tensor]:
    """Return the projection to the values divided by 2^exponent, and the exponent of each head.

    The projection has the Jacobian G W^T: G (`local`) is that of what follows x W + b, such as a
    norm. W and G are each divided by a power of two that brings their largest entry to about one.
    The returned exponent is the sum of the two. b is inside of G, beside x W, so it is divided by
    the power of W alone.
    """
    weight = to_v.weight
    if weight.stride(0) == 0:
        # All heads share one weight in memory (stride 0). It is divided once, and stays shared.
        weight = weight[:1]
    weight, exponents = divide_by_powers(weight, 1, 2)
    weight = weight.expand_as(to_v.weight)
    bias = to_v.bias
    if bias is not None:
        bias = shift_exponent(bias, -exponents[:, None])
    local = to_v.local
    if local is not None:
        local, local_exponents = divide_by_powers(local, 0, 2, 3, 4)
        exponents = exponents + local_exponents
    exponents = exponents.expand(len(weight))
    return replace(to_v, weight=weight, bias=bias, local=local), exponents
