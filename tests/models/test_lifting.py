"""Weights that are kept as they are stored: the same function, without a lifted copy of them."""

import copy
import hashlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lipaudit import measure
from lipaudit.data.batch import Batch
from lipaudit.models import precision
from lipaudit.models.attention.survey import find_layers
from lipaudit.models.linearize import linearize
from lipaudit.models.sources.loader import LoadOptions, load_net
from lipaudit.models.sources.weight_files import hash_weights
from tests.live import Live
from tests.models.sources.cases import SMALL, build, classifier, figures, qwen
from tests.models.sources.cases import texts as save_texts

STORED = LoadOptions(weights="stored")


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return qwen(tmp_path_factory.mktemp("stored"), "bfloat16")


def texts(net, tokens=12):
    ids = torch.randint(4, 60, (2, tokens), generator=torch.Generator().manual_seed(1))
    return Batch(ids, None, ("a", "b"), torch.ones_like(ids).bool())


@pytest.mark.parametrize(
    ("name", "dtype"), [("bounds", "float32"), ("jacobian", "float64"), ("attack", "float64")]
)
def test_every_figure_is_that_of_converted_weights(tmp_path, stored, name, dtype):
    options = {"dtype": dtype, "max_tokens": 6, "samples": 1}
    if name == "attack":
        stored = classifier(tmp_path / "bert", "bfloat16")
        options |= {"eps": "0.1", "data": save_texts(tmp_path), "attack": "fgsm,pgd", "steps": 5}
    converted, before = figures(stored, name, **options)
    kept, after = figures(stored, name, weights="stored", **options)
    assert kept == converted
    assert ("half-precision" in before, "stored-weights" in after) == (True, True)


def test_weights_stay_as_they_are_stored_and_have_one_hash(stored):
    net, lifted = load_net(stored, STORED), load_net(stored)
    assert {p.dtype for p in net.module.parameters()} == {torch.bfloat16}
    assert net.dtype == torch.float32
    assert net.weights_sha256 == lifted.weights_sha256
    assert net.parameters == lifted.parameters
    (note,) = net.notes
    assert note.code == "stored-weights"
    assert "stay in bfloat16" in note.text
    assert "The results are those of exactly these weights" in note.text


def test_the_hash_is_that_of_float32_weights_and_lifts_none_whole():
    torch.manual_seed(0)
    module = nn.Linear(2048, 1500).bfloat16()
    module.register_buffer("steps", torch.tensor(3))
    expected = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        value = value.float() if name != "steps" else value
        expected.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        expected.update(value.numpy().tobytes())
    with Live() as live:
        assert hash_weights(module, "a layer") == expected.hexdigest()
    assert 0 < live.largest < 2 * module.weight.nbytes


def differentiate(net, batch):
    linear = linearize(
        lambda z, rows: net.forward(z, batch.rows_without_ids(rows)), net.point(batch)
    )
    linear.outer(linear.output)


@pytest.mark.parametrize(
    ("run", "kept", "share"),
    [
        (find_layers, "stored", 0.75),
        (differentiate, "stored", 0.25),
        (differentiate, "disk", 0.25),
    ],
)
def test_few_lifted_layers_are_alive_at_a_time(tmp_path, run, kept, share):
    """A survey also finds the maps of a layer, as large as its weights."""
    (tmp_path / "map.json").write_text('{"": "disk"}')
    how = {"weights": "stored"} if kept == "stored" else {"device_map": str(tmp_path / "map.json")}
    path = qwen(tmp_path, "bfloat16", hidden_size=256, intermediate_size=512)
    net = load_net(path, LoadOptions(**how))
    with Live() as live:
        run(net, texts(net, 4))
    assert live.most < share * 4 * net.parameters  # of what all lifted weights take


def test_the_constants_of_a_model_are_those_of_float32(tmp_path):
    scaled = {"type": "yarn", "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    path = qwen(tmp_path, "bfloat16", rope_parameters=scaled)
    pairs = zip(
        load_net(path, STORED).module.named_buffers(), load_net(path).module.named_buffers(),
        strict=True,
    )  # fmt: skip
    for (name, kept), (_, converted) in pairs:
        assert kept.dtype == converted.dtype, name
        assert torch.equal(kept, converted), name


def test_a_model_that_asks_for_its_own_type_gets_that_of_the_run():
    class Asking(nn.Linear):
        def forward(self, x):
            return super().forward(x.to(next(self.parameters()).dtype))

    module = Asking(3, 2).bfloat16().requires_grad_(False)
    plain = copy.deepcopy(module).float()
    assert precision.convert_on_read(module, torch.float32) == {torch.bfloat16}
    x = torch.rand(5, 3) + 2**-20
    assert torch.equal(precision.lift_parameters(module)(x), plain(x))


def test_a_module_that_was_lent_keeps_its_weights_as_they_were():
    module = nn.Linear(4, 3).bfloat16()
    before = module.weight
    measure(module, "jacobian", input_shape=(4,), samples=1, weights="stored")
    assert module.weight is before
    assert module.weight.requires_grad


def test_modules_that_read_weights_of_others_read_lifted_ones():
    attention = nn.MultiheadAttention(8, 2).bfloat16().eval().requires_grad_(False)
    recurrent = nn.GRU(8, 8).bfloat16().eval().requires_grad_(False)
    both = nn.ModuleList([attention, recurrent])
    plain = copy.deepcopy(both).float()
    precision.convert_on_read(both, torch.float32)
    x = torch.rand(4, 1, 8)
    assert torch.equal(attention(x, x, x)[0], plain[0](x, x, x)[0])
    assert torch.equal(recurrent(x)[0], plain[1](x)[0])
    assert torch.equal(copy.deepcopy(both)[0](x, x, x)[0], plain[0](x, x, x)[0])


def test_tied_weights_stay_one_tensor_and_what_was_read_can_be_put_back():
    table, head = nn.Embedding(5, 3).half(), nn.Linear(3, 5, bias=False).half()
    head.weight = table.weight
    precision.convert_on_read(nn.ModuleList([table, head]), torch.float32)
    assert table.weight is head.weight
    assert torch.func.functional_call(head, {}, torch.ones(3)).dtype == torch.float32
    head.weight = head.weight
    assert next(head.parameters()) is next(table.parameters())
    assert next(head.parameters()).dtype == torch.float16


def test_a_view_that_is_kept_is_lifted_again_to_the_same_values():
    module = nn.Linear(300, 400).bfloat16()  # large enough for pages of its own
    precision.convert_on_read(module, torch.float64)
    kept = precision.refer_to_weight(module.weight.t()[10:20])
    assert isinstance(kept, precision.WeightReference)
    assert torch.equal(precision.read_weight(kept), next(module.parameters()).double().t()[10:20])
    assert kept.shape == (10, 400)
    assert torch.equal(precision.read_weight(precision.refer_to_weight(kept.stored)), kept.stored)
    assert F.linear(torch.ones(300).double(), module.weight).dtype == torch.float64


def test_where_nothing_can_be_kept_the_report_says_so(tmp_path):
    build("BertModel", **SMALL).save_pretrained(tmp_path)
    (note,) = load_net(str(tmp_path), STORED).notes
    assert "has no effect" in note.text
