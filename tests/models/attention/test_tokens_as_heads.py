"""A layer whose tokens stand where heads do elsewhere is refused, never measured per token."""

import pytest
import torch
from torch import nn

from lipaudit.errors import InputError
from lipaudit.measures import attention, bounds
from lipaudit.models.attention.survey import survey
from tests.nets import own_batch, own_net


class TokensFirst(nn.Module):
    """Every token attends to 3 memories of its own: (batch, tokens, 1, width) queries."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8)
        self.q, self.k, self.v = (nn.Linear(8, n * 8) for n in (1, 3, 3))
        self.out = nn.Linear(8, 3)

    def forward(self, ids, mask=None):
        x = self.table(ids)
        q, k, v = (
            t(x).unflatten(-1, (-1, 8)) * torch.tanh(x)[:, :, None]
            for t in (self.q, self.k, self.v)
        )
        p = torch.softmax(q @ k.transpose(-1, -2), -1)
        return self.out((p @ v).squeeze(2).mean(1))


def net_and_batch(tokens: int):
    torch.manual_seed(0)
    net = own_net(TokensFirst(), (32,), kind="text", vocabulary=30)
    ids = torch.randint(0, 30, (2, tokens), generator=torch.Generator().manual_seed(1))
    return net, own_batch(ids)


def test_the_survey_says_that_heads_cannot_be_told_from_tokens():
    (site,) = survey(*net_and_batch(16))
    assert not site.closed_form
    assert "heads and tokens cannot be distinguished" in site.reason
    assert not site.inputs


@pytest.mark.parametrize(
    ("run", "options"),
    [(bounds.measure, bounds.BoundsOptions()), (attention.measure, attention.AttentionOptions())],
)
def test_another_length_is_refused(run, options):
    net, batch = net_and_batch(12)
    with pytest.raises(InputError, match="heads and tokens cannot be distinguished"):
        list(run(net, [batch], options))
