"""What a projection of the tokens is, whatever the batch; and why there may be none."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lipaudit.models.attention.observe.origins import Address


class NotClosedForm(Exception):
    """A layer does something that the closed form does not cover.

    Args:
        kind: one word for the table of layers.
        reason: what the model does instead, for the reader of a report.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


@dataclass(frozen=True)
class TokenIndex:
    """Which token of a linear map each attention row reads, for any number of samples.

    Attributes:
        tokens: index of the token within its sample, (windows per sample, tokens per window).
        length: tokens per sample at the linear map.
        samples_first: whether its rows are ordered by sample, then token.
    """

    tokens: Tensor
    length: int
    samples_first: bool

    def rows(self, samples: int) -> Tensor:
        """Return the row of X for each (window, token) of a batch."""
        sample = torch.arange(samples, device=self.tokens.device).view(-1, 1, 1)
        if self.samples_first:
            return (sample * self.length + self.tokens).flatten(0, 1)
        return (self.tokens * samples + sample).flatten(0, 1)

    def pick(self, values: Tensor) -> Tensor:
        """Arrange per-token values, (samples, length), as (windows, tokens)."""
        return values[:, self.tokens].flatten(0, 1)

    def resized(self, length: int, tokens: int) -> TokenIndex | None:
        """Return the same index for longer or shorter samples, where that is obvious."""
        if (length, tokens) == (self.length, self.tokens.shape[1]):
            return self
        every = [torch.arange(n, device=self.tokens.device)[None] for n in (self.length, length)]
        if length != tokens or not torch.equal(self.tokens, every[0]):
            return None
        return TokenIndex(every[1], length, self.samples_first)


@dataclass(frozen=True)
class ProjectionForm:
    """How q, k or v comes out of a linear map: enough to build its Projection on any batch.

    Attributes:
        kind: affine | rotation | linear-pos | local | cross-head.
        source: the linear map.
        index: which of its rows, each a token.
        columns: which of its columns feed each head, (heads, e).
        repeat: how often each head is repeated (grouped queries).
        mix: constant map from these columns to the channels of the head, (heads, d, e), where it
            is affine and not the identity.
        offset: what is added after the linear map, (heads, d), if anything is.
        shared: whether the local Jacobian is the same in every head and window.
    """

    kind: str
    source: Address
    index: TokenIndex
    columns: Tensor
    repeat: int
    mix: Tensor | None = None
    offset: Tensor | None = None
    shared: bool = False
