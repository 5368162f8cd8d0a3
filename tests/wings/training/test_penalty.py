"""The penalty that a model's run gives: capture's maps, the gradients of written-out attention."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.shared.demos import load_shipped, make_demo
from lipaudit.data.batch import Batch
from lipaudit.errors import InputError, UsageError
from lipaudit.models.attention.capture import capture
from lipaudit.theory.penalties import jasmin, jasmin_rows
from lipaudit.wings.training import penalty
from lipaudit.wings.training.penalty import SpecformerPenalty, attention_penalty
from tests import processes
from tests.models.attention import own_modules
from tests.nets import own_net

NAMES = ["timm-vit", "timm-swin", "bert", "bert-eager", "gpt2", "llama", "torch-encoder"]
NAMES += ["handwritten", "t5"]


def from_capture(net, sites, batch, **how):
    found = capture(net, sites, batch, lambda layer: layer.attention.attention())
    return sum(jasmin(p, **how) * len(p) / len(batch) for p in found)


@pytest.mark.parametrize("entries", [2**22, 100], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", NAMES)
def test_the_penalty_is_that_of_captures_maps(zoo, name, entries):
    net, sites, batch = zoo(name)
    for how in ({"k": 0, "reduction": "max"}, {"k": 3, "reduction": "mean"}):
        expected = from_capture(net, sites, batch, **how)
        with attention_penalty(net.module, mask=batch.mask, entries=entries, **how) as read:
            net.module.requires_grad_(True)
            output = net.output(batch)
            found = read()
        net.module.requires_grad_(False)
        torch.testing.assert_close(found, expected.to(found), rtol=2e-4, atol=2e-5)
        assert found.requires_grad
        with torch.no_grad():
            torch.testing.assert_close(output.detach(), net.output(batch))


def gradients(module, x, **how):
    module.zero_grad()
    with attention_penalty(module, **how) as read:
        loss = module(x).square().sum() + 0.1 * read()
    loss.backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("how", [{"k": 0, "reduction": "max"}, {"k": 3, "reduction": "mean"}])
def test_gradients_are_those_of_written_out_attention(zoo, how):
    net, _, batch = zoo("timm-vit")
    fused = deepcopy(net.module).double().requires_grad_(True)
    written = deepcopy(fused)
    for module in written.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    ours, theirs = (gradients(m, batch.x.double(), **how) for m in (fused, written))
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-6, atol=1e-9)


def compute_gradients(images: torch.Tensor, *, parallel: bool) -> dict[str, torch.Tensor]:
    """Take one step of a training loop as the guide has it, and return the gradients."""
    module = make_demo(0).module.double().requires_grad_(True)
    model = DistributedDataParallel(module) if parallel else module
    with attention_penalty(model, k=3, reduction="mean") as read:
        loss = model(images).square().mean() + 0.1 * read()
    loss.backward()
    return {name: p.grad for name, p in module.named_parameters()}


def run_rank(rank: int, port: int, images: torch.Tensor, folder: Path) -> None:
    store = distributed.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.save(compute_gradients(images.chunk(2)[rank], parallel=True), folder / f"{rank}.pt")
    distributed.barrier()


def test_two_processes_have_the_gradients_of_one(tmp_path):
    """Each adds the penalty of its own samples; DistributedDataParallel averages the gradients."""
    images, port = load_shipped("train").x[:6].double(), int(processes.free_port())
    ranks = [processes.forked(run_rank, rank, port, images, tmp_path) for rank in range(2)]
    for process in ranks:
        process.join(300)
    assert [process.exitcode for process in ranks] == [0, 0]
    alone = compute_gradients(images, parallel=False)
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), alone)


def test_autocast_gives_the_penalty_of_its_own_maps(zoo):
    net, _, batch = zoo("timm-vit")
    values = []
    for dtype in (torch.float32, torch.bfloat16):
        context = torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16)
        with attention_penalty(net.module, k=3, reduction="mean") as read, context:
            net.output(batch)
            values.append(read())
    assert values[1].dtype == torch.float32
    assert values[1] != values[0]
    torch.testing.assert_close(values[1], values[0], rtol=2e-2, atol=0)


@pytest.mark.parametrize("seen", ["all", "some"])
@pytest.mark.parametrize("k", [0, 3, 7])
def test_gradients_reach_queries_keys_and_a_learned_mask(k, seen):
    generator = torch.Generator().manual_seed(0)
    q, keys = torch.randn(2, 2, 3, 5, 4, dtype=torch.float64, generator=generator)
    mask = torch.randn(3, 1, 5, dtype=torch.float64, generator=generator)
    if seen == "some":
        mask[0, 0, :4] = mask[1] = -torch.inf
    inputs = [t.requires_grad_(True) for t in (q, keys, mask)]
    ours, _ = penalty.fused_rows(*inputs, k)
    theirs, _ = jasmin_rows(torch.softmax(q @ keys.mT + mask, -1).nan_to_num(0.0), k)
    torch.testing.assert_close(ours, theirs)
    upstream = torch.randn(ours.shape, dtype=torch.float64, generator=generator)
    for mine, other in zip(
        torch.autograd.grad(ours, inputs, upstream),
        torch.autograd.grad(theirs, inputs, upstream),
        strict=True,
    ):
        assert mine.abs().max() > 0
        torch.testing.assert_close(mine, other.nan_to_num(0.0))


def test_dropout_and_autocast_are_no_obstacle():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train()
    x = torch.randn(3, 7, 16)
    with (
        attention_penalty(model, k=2, reduction="mean") as read,
        torch.autocast("cpu", torch.bfloat16),
    ):
        model(x)
        value = read()
    value.backward()
    assert value.dtype == torch.float32
    assert value.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_every_reading_begins_anew(zoo):
    net, _, batch = zoo("timm-vit")
    with attention_penalty(net.module) as read:
        with pytest.raises(InputError, match="batch size"):
            net.module.forward_features(batch.x)
        net.output(batch)
        one = read()
        net.output(batch)
        net.output(batch)
        two = read()
        with pytest.raises(InputError, match="no attention"):
            read()
    torch.testing.assert_close(two, 2 * one)
    assert not net.module._forward_pre_hooks


def test_a_mask_may_be_of_numbers_and_has_to_fit(zoo):
    net, _, batch = zoo("bert")
    values = []
    for mask in (batch.mask, batch.mask.long()):
        with attention_penalty(net.module, reduction="mean", mask=mask) as read:
            net.output(batch)
            values.append(read())
    assert values[0] == values[1]
    with attention_penalty(net.module, mask=batch.mask[:, 1:]) as read:
        net.output(batch)
        with pytest.raises(InputError, match="does not fit the queries of any attention"):
            read()


class Attention(nn.Module):
    """Attention of three heads, in an axis of their own or folded into the batch."""

    def __init__(self, folded):
        super().__init__()
        self.read, self.folded = nn.Linear(6, 36), folded

    def forward(self, x):
        q, k, v = self.read(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        if not self.folded:
            return torch.softmax(q @ k.mT, -1) @ v
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        return torch.bmm(torch.softmax(torch.bmm(q, k.mT), -1), v)


@pytest.mark.parametrize("reduction", ["max", "mean"])
def test_a_mask_fits_heads_folded_into_the_batch(reduction):
    apart, folded = Attention(False), Attention(True)
    folded.load_state_dict(apart.state_dict())
    x, mask = torch.randn(2, 5, 6), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    values = []
    for model in (apart, folded):
        with attention_penalty(model, reduction=reduction, mask=mask) as read:
            model(x)
            values.append(read())
    torch.testing.assert_close(*values)


def test_the_batch_is_found_inside_of_what_a_model_is_given(zoo):
    net, _, batch = zoo("timm-vit")

    class Wrapped(nn.Module):
        def forward(self, sample):
            return net.module(sample["pixels"])

    nested = {"pixels": batch.x}
    beside_a_number = {"gain": torch.tensor(1.0), "pixels": batch.x}
    values = []
    for model, sample in (
        (net.module, batch.x),
        (Wrapped(), nested),
        (Wrapped(), beside_a_number),
    ):
        with attention_penalty(model) as read:
            model(sample)
            values.append(read())
    assert values[0] == values[1] == values[2]


@pytest.mark.parametrize(
    "how", [{"name": "x"}, {"k": 1}, {"k": -2}, {"reduction": "sum"}], ids=str
)
def test_other_penalties_and_ways_are_refused_at_once(zoo, how):
    message = "not a penalty on attention" if "name" in how else "reduction"
    with (
        pytest.raises(UsageError, match=message),
        attention_penalty(zoo("timm-vit")[0].module, **how),
    ):
        pass


@pytest.mark.parametrize("name", ["timm-vit", "bert", "gpt2", "torch-encoder", "llama"])
def test_specformer_takes_each_head_its_own_columns(zoo, name):
    net, sites, batch = zoo(name)
    found = capture(net, sites, batch, lambda layer: layer.heads())
    exact = 0.0
    for heads in found:
        for projection in (heads.to_q, heads.to_k, heads.to_v):
            each = {tuple(w.flatten().tolist()): w for w in projection.weight}  # grouped: once
            exact += sum(float(torch.linalg.matrix_norm(w, 2)) ** 2 for w in each.values())
    read = SpecformerPenalty(net, batch)
    for _ in range(200):
        value = read()
    assert float(value) == pytest.approx(exact, rel=1e-3)
    net.module.requires_grad_(True)
    read().backward()
    touched = [p for p in net.module.parameters() if p.grad is not None]
    net.module.requires_grad_(False)
    assert touched
    for weight in touched:
        weight.data.mul_(2)
    assert read() > 2 * value
    for weight in touched:
        weight.data.div_(2)


def test_specformer_takes_heads_of_a_loop():
    """Each head has a matrix of its own for q, k and v."""
    module, x = own_modules.model("a loop over a ParameterList: three matrices per head")
    net = own_net(module, (own_modules.TOKENS, own_modules.WIDTH), "float64")
    read = SpecformerPenalty(net, Batch(x, None, ("a", "b")))
    for _ in range(200):
        value = read()
    exact = sum(torch.linalg.matrix_norm(w, 2).square().sum() for w in module.own.w)
    assert float(value) == pytest.approx(float(exact), rel=1e-3)


def test_the_weights_of_a_model_in_training_are_found_and_its_flags_stay():
    """Dropout is off meanwhile."""
    module, x = own_modules.model("a loop over a ParameterList: three matrices per head")
    net = own_net(torch.nn.Sequential(module, torch.nn.Dropout(0.5)), x.shape[1:], "float64")
    net.module.train().requires_grad_(True)
    net.module[0].eval()
    modes, state = [m.training for m in net.module.modules()], torch.get_rng_state()
    SpecformerPenalty(net, Batch(x, None, ("a", "b")))
    assert [m.training for m in net.module.modules()] == modes
    assert all(p.requires_grad and p.grad is None for p in net.module.parameters())
    assert torch.equal(torch.get_rng_state(), state)
