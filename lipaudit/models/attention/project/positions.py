"""What q and k of a layer meet beside each other: vectors that position alone fixes.

In S_ij = s <q_i, k_j> + <q_i, r_ij> + <k_j, t_ij> + bias the gradients of the logits in q_i and
k_j are s k_j + r_ij and s q_i + t_ij: r and t are what is left of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lipaudit.models.attention.project import probes
from lipaudit.models.attention.project.forms import NotClosedForm
from lipaudit.models.attention.project.logits import BESIDE
from lipaudit.models.attention.project.probes import Probed
from lipaudit.models.attention.project.projected import Projected
from lipaudit.models.graph import leaves
from lipaudit.theory.heads import Heads, Pairs

LARGEST = 2**27  # numbers in r, or in t: 1 GiB in float64
_ROUNDING = 64  # times the machine epsilon of the largest gradient


def position_terms(heads: Heads, logits: Tensor, parts: Mapping[str, Projected]) -> Pairs:
    """Return r and t of a layer, the same in all windows, beside its slope.

    Args:
        heads: the layer; its `pairs` hold the slope.
        logits: S with its graph, (windows, heads, queries, keys).
        parts: where its q, k and v come from.

    Raises:
        NotClosedForm: S_ij depends on more than q_i and k_j; what they meet depends on the input;
            or it is too large.
    """
    assert heads.pairs is not None
    sides = {name: parts[name] for name in "qk" if name in parts}
    known = {id(part.leaf) for part in sides.values()}
    if any(id(leaf) not in known for leaf in leaves(logits)[0]):
        raise NotClosedForm("x-dependent-bias", BESIDE)
    slope, live, s = heads.pairs.slope, heads.attention() > 0, heads.scale[..., None, None]
    terms: dict[str, Tensor | None] = {"q": None, "k": None}
    for name, part in sides.items():
        turned = name == "k"
        columns = part.form.columns
        side = _Side(
            source=_source(logits.mT if turned else logits, part),
            rows=part.index.rows(int(heads.sample[-1]) + 1),
            columns=torch.arange(columns.numel()).view_as(columns.cpu()),
            moves=_moves(part),
            plain=s * (heads.q if turned else heads.k),
            slope=slope if slope is None or not turned else slope.mT,
            live=live.mT if turned else live,
        )
        terms[name] = side.term()
    t = terms["k"]
    return Pairs(slope, terms["q"], None if t is None else t.transpose(2, 3))


def _source(logits: Tensor, part: Projected) -> Probed:
    """Return the logits as a function of the columns of one linear map that made q (or k)."""
    mix, repeat = part.form.mix, part.form.repeat
    if part.projection.local is not None or repeat > 1:
        how = "shared keys" if repeat > 1 else "a rotation or norm"
        raise NotClosedForm("x-dependent-bias", f"{BESIDE}, behind {how}")
    if mix is not None and mix.shape[-1] != mix.shape[-2]:
        raise NotClosedForm("x-dependent-bias", f"{BESIDE}, behind a map to another width")
    size = logits[0].numel() * part.form.columns.shape[1]
    if size > LARGEST:
        raise NotClosedForm("large", f"its queries or keys meet {size:.1e} numbers of positions")
    columns = part.form.columns.flatten()
    return Probed(logits, part.leaf, lambda y: part.linear.outputs(y)[:, columns])


def _moves(part: Projected) -> Tensor:
    """Return the changes of every row of a source that move one channel each."""
    mix, (heads, width) = part.form.mix, part.form.columns.shape
    unit = torch.eye(width, dtype=part.leaf.dtype, device=part.leaf.device)
    inverse = unit.expand(heads, -1, -1) if mix is None else torch.linalg.inv(mix)
    return inverse.permute(2, 0, 1).flatten(1)


@dataclass(frozen=True)
class _Side:
    """The logits as a function of q (or, with queries and keys turned round, of k).

    Attributes:
        source: S, (windows, heads, tokens, others), and what made its tokens.
        rows: where these stand in the linear map, (windows, tokens).
        columns: which of the columns of `source` each head reads, (heads, d).
        moves: of each channel of q, the change of all columns, the same at every token, that
            moves this channel alone: (d, heads * d).
        plain: s k_j of all others, (windows, heads, others, d).
        slope: f, or None for 1.
        live: P_ij > 0; the other pairs do not matter.
    """

    source: Probed
    rows: Tensor
    columns: Tensor
    moves: Tensor
    plain: Tensor
    slope: Tensor | None
    live: Tensor

    def term(self) -> Tensor | None:
        """Return r, (1, heads, tokens, others, d), or None for 0."""
        self._require_own_pairs()
        parts, live = [], self.live
        apart = size = largest = self.plain.new_zeros(live.shape[1])
        for c, gradient in enumerate(self._gradients()):
            plain = self.plain[..., None, :, c]
            plain = plain if self.slope is None else self.slope * plain
            rest = (gradient - plain).where(live, 0.0)
            mean = rest.sum(0) / live.sum(0).clamp_min(1)
            apart = torch.maximum(apart, _largest((rest - mean).where(live, 0.0)))
            size = torch.maximum(size, _largest(gradient))
            largest = torch.maximum(largest, _largest(mean[None]))
            parts.append(mean)
        if not bool((apart <= probes.LINEAR_TOLERANCE * size).all()):
            raise NotClosedForm("x-dependent-bias", BESIDE)
        rounding = _ROUNDING * torch.finfo(size.dtype).eps * size
        return torch.stack(parts, -1)[None] if bool((largest > rounding).any()) else None

    def _gradients(self) -> Iterator[Tensor]:
        """Yield dS_ij / dq_ic of all pairs, (windows, heads, tokens, others), channel by channel.

        J^T u is linear in u: its own vector-Jacobian product with a move of all tokens is J times
        that move. As S_ij depends on q_i alone, entry ij of it is the move of q_i: d products for
        all pairs, where one key after the other would take as many as there are keys.
        """
        t, leaf = self.source.t, self.source.leaf
        u = torch.zeros_like(t, requires_grad=True)
        (pulled,) = torch.autograd.grad(t, leaf, u, create_graph=True)
        rows = self.source.as_rows(pulled)
        for move in self.moves:
            (image,) = torch.autograd.grad(rows, u, move.expand_as(rows), retain_graph=True)
            yield image

    def _require_own_pairs(self) -> None:
        """Check by exact zeros that row i of the logits of a head depends on its q_i only."""
        windows, heads, tokens, _ = self.source.t.shape
        number = torch.arange(windows * tokens, device=self.rows.device)
        by_row = probes.fed_labels(self.source, number.view(windows, 1, tokens, 1), rows=True)
        head = torch.arange(heads, device=self.rows.device)
        by_column = probes.fed_labels(self.source, head.view(1, heads, 1, 1), rows=False)
        for labels, place, want in (
            (by_row, self.rows.flatten(), number),
            (by_column, self.columns.flatten(), head.repeat_interleave(self.columns.shape[1])),
        ):
            expected = None if labels is None else torch.full_like(labels, -1)
            if labels is None or expected is None:
                raise NotClosedForm("x-dependent-bias", BESIDE)
            expected[place.to(labels.device)] = want
            if not bool(((labels == expected) | (labels == -1)).all()):
                raise NotClosedForm("x-dependent-bias", BESIDE)


def _largest(t: Tensor) -> Tensor:
    """Return the largest size of an entry of each head, the second axis."""
    return t.abs().amax((0, 2, 3))
