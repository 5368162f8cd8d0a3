"""From the embedding of a text model on: the tensors that are handed out stay what they are."""

import pytest
import torch
from torch import nn

from lipaudit.measures import jacobian
from lipaudit.measures.base import in_order, join_parts
from tests.nets import own_batch, own_net


class InPlace(nn.Module):
    """A model that scales its embeddings in place, as CTRL and GIT do; padding is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6)
        self.out = nn.Linear(6, 3, bias=False)

    def forward(self, ids, mask=None):
        x = self.table(ids)
        x *= 5.0
        weight = torch.ones_like(ids) if mask is None else mask.to(ids.dtype)
        total = (torch.tanh(x) * weight[..., None]).sum(1)
        return self.out(total / weight.sum(1, keepdim=True))


def test_a_model_that_writes_into_its_embeddings_is_measured_where_it_is():
    torch.manual_seed(0)
    net = own_net(InPlace().double(), (4,), "float64", kind="text", vocabulary=20)
    batch = own_batch(torch.tensor([[3, 7, 1, 4], [2, 2, 9, 5]]))
    table = net.module.table.weight
    z = net.embedding(batch)
    assert torch.equal(z, table[batch.x])
    assert torch.equal(net.forward(z, batch), net.output(batch))
    assert torch.equal(z, table[batch.x])

    def plain(z):
        return net.module.out(torch.tanh(5.0 * z).mean(0))

    (part,) = jacobian.measure(net, [batch], jacobian.JacobianOptions())
    dense = torch.stack([torch.autograd.functional.jacobian(plain, one).flatten(1) for one in z])
    want = torch.linalg.matrix_norm(dense, 2)
    torch.testing.assert_close(torch.from_numpy(part.values["norm"]), want, rtol=1e-6, atol=0)


def test_writing_into_embeddings_is_not_taken_for_reading_padding():
    torch.manual_seed(0)
    net = own_net(InPlace(), (4,), kind="text", vocabulary=20)
    mask = torch.tensor([[True, True, False, False], [True, True, True, True]])
    batch = own_batch(torch.tensor([[3, 7, 0, 0], [2, 2, 9, 4]]), mask)
    together, alone = (
        join_parts(in_order(list(parts), batch.ids), "norm")
        for parts in (
            jacobian.measure(net, [batch], jacobian.JacobianOptions()),
            jacobian.measure(net, batch.split(1), jacobian.JacobianOptions()),
        )
    )
    assert together == pytest.approx(alone, rel=1e-4)
