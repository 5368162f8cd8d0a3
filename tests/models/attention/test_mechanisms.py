"""Heads, norms and bounds of every mechanism, against autograd through a model of it."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

from benchmarks.reference import truth
from benchmarks.reference.loaded import alone
from benchmarks.reference.mechanisms import MECHANISMS, describe, load, texts
from lipaudit.engine.results import in_order
from lipaudit.measures import load_measures, option_types
from lipaudit.measures.base import join_parts
from lipaudit.measures.layers import max_windows
from lipaudit.models.attention.capture import Layer, capture, list_blocks_without_attention
from lipaudit.models.attention.numeric import compute_numeric_norms
from lipaudit.models.attention.survey import survey
from lipaudit.models.sources.loader import LoadOptions, load_net
from lipaudit.theory.bounds.record import load_bounds
from lipaudit.theory.head_bounds import head_bounds
from lipaudit.theory.products import dense_jacobian
from tests.models.attention import own_modules


def norms(layer: Layer) -> Tensor:
    """The norm of every head, (samples, heads)."""
    if not layer.site.closed_form:
        return compute_numeric_norms(layer, seeds=[0] * layer.samples, tol=1e-12, within=1e-6).norm
    heads = layer.heads()
    return max_windows(torch.linalg.matrix_norm(dense_jacobian(heads), 2), heads.sample)


def bounds(layer: Layer) -> dict[str, Tensor]:
    if not layer.site.closed_form:
        return {}
    heads = layer.heads()
    found = head_bounds(heads)
    return {
        name: max_windows(found[name], heads.sample) for name in found if name in load_bounds()
    }


def check(net, batch, sites, index, within=1e-9) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Compare a layer with the truth of each sample alone; return norms and bounds of heads."""
    read = lambda layer: (norms(layer), bounds(layer))  # noqa: E731
    found = []
    for part in batch.by_length(len(batch)):  # as they are measured: padding changes some models
        ((exact, above),) = capture(net, sites, part, read, layers=[index])
        for i in range(len(part)):
            true = truth.truths(net, alone(part, i), sites, [index])[index].heads
            torch.testing.assert_close(exact[i], true, rtol=within, atol=1e-12)
            for bound, values in above.items():
                assert not (values[i] < true * (1 - 1e-12)).any(), bound
        found.append((exact, above))
    return found


@pytest.mark.ci
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("name", MECHANISMS)
def test_heads_and_bounds_are_those_of_the_model(name, hard):
    """Hard: tokens that stand twice, and weights that leave most rows of P one entry."""
    case = MECHANISMS[name]
    net = load(name, gain=case.steep if hard else 1.0)
    batch = texts(net, doubled=hard)
    sites = survey(net, batch).sites
    check(net, batch, sites, case.layer)
    if not hard:
        (line,) = capture(net, sites, batch, partial(describe, case), layers=[case.layer])
        assert line in read_rows()


ZOO = {
    **dict.fromkeys(
        ["timm-vit", "hf-vit", "hf-dinov2", "timm-eva02", "timm-qk-norm", "timm-swin",
         "timm-swinv2", "timm-sam", "timm-sam-eager", "bert", "torch-encoder",
         "distilbert", "mobilebert", "deberta", "deberta-v1"],
        [1],
    ),
    **dict.fromkeys(["bert-eager", "deberta-v3"], [0]),
    "timm-cait": [0, 1],
    "t5": [0, 2, 3],
}  # fmt: skip
"""Models of other kinds, by the layers that are compared."""
PAIRED = ("deberta", "deberta-v1", "deberta-v3", "timm-sam", "timm-sam-eager")
"""Those whose logits have terms beside s q k^T."""
DEBERTA_SCALE = 1e-9 if Version(transformers.__version__) >= Version("5.23") else 2e-7
"""Before 5.23 a scripted function rounds DeBERTa's scale to float32 (6e-8), in every precision."""


@pytest.mark.parametrize(("name", "index"), [(name, i) for name in ZOO for i in ZOO[name]])
def test_heads_and_bounds_of_the_zoo_are_those_of_the_models(zoo, name, index):
    net, sites, batch = zoo(name, "float64")
    within = DEBERTA_SCALE if name.startswith("deberta") else 1e-9
    for exact, above in check(net, batch, sites, index, within):
        if name in PAIRED:
            assert (above["sharp"] < 20 * exact)[exact > 0].all()
            for bound in ("hu", "castin", "mean_field", "appendix_c"):
                assert above[bound].isnan().all(), bound


@pytest.mark.parametrize("name", ["experts", "expert-queries"])
def test_the_norm_of_a_model_with_experts_is_that_of_their_choice(name):
    net = load(name)
    batch, options = texts(net), option_types()["jacobian"](tol=1e-10, within=1e-6)
    parts = in_order([*load_measures()["jacobian"].compute(net, [batch], options)], batch.ids)
    for i, norm in enumerate(join_parts(parts, "norm")):
        assert norm == pytest.approx(truth.norm(truth.whole(net, alone(batch, i))), rel=1e-9)


def test_experts_are_measured_in_double_precision(tmp_path):
    """The grouped products that transformers takes by itself know no float64."""
    net = load("experts", "float32")
    net.module.save_pretrained(tmp_path)
    batch = texts(net)
    wide = load_net(str(tmp_path), LoadOptions(device="cpu", dtype="float64"))
    torch.testing.assert_close(wide.output(batch).float(), net.output(batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "left_out"),
    [("state-space", ("model.layers.0",)), ("linear", ("model.layers.0",)), ("grouped", ())],
)
def test_blocks_without_attention_are_named(name, left_out):
    net = load(name)
    batch = texts(net)
    assert list_blocks_without_attention(net.module, survey(net, batch).sites) == left_out
    (part,) = load_measures()["bounds"].compute(net, [batch], option_types()["bounds"]())
    said = [note.text for note in part.notes if note.code == "no-attention"]
    assert len(said) == len(left_out)
    for block, text in zip(left_out, said, strict=True):
        assert f"({block}: {type(net.module.get_submodule(block)).__name__})" in text


def test_a_block_that_shares_its_attention_has_it():
    stack = nn.ModuleList(nn.ModuleDict({"own": nn.Linear(2, 2)}) for _ in range(3))
    stack[0]["shared"] = stack[2]["shared"] = nn.Identity()
    model = nn.ModuleDict({"body": nn.ModuleDict({"layers": stack})})
    site = survey(net := load("grouped"), texts(net)).sites[0]
    shared = replace(site, module="body.layers.0.shared")
    assert list_blocks_without_attention(model, [shared]) == ("body.layers.1",)


def read_rows() -> list[str]:
    """Return the rows of the table on the page."""
    text = own_modules.PAGE.read_text(encoding="utf-8").partition(own_modules.HEADING)[0]
    return [line for line in text.splitlines() if line.startswith("| ")][1:]


def test_the_page_has_no_other_rows():
    assert len(read_rows()) == len(MECHANISMS)
