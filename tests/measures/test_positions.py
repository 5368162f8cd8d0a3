"""Jacobians of language models at positions of a text, beside dense ones from plain autograd."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import cross_entropy

from lipaudit.data.batch import Batch
from lipaudit.errors import InputError
from lipaudit.measures.jacobian import JACOBIAN, JacobianOptions, measure
from lipaudit.models import endpoints
from lipaudit.models.net import NextToken
from tests.attacks.text_folders import InDouble
from tests.live import Live
from tests.measures.cases import dense, dense_norm, run_measure
from tests.nets import hf_net, own_net

SMALL = {"num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 24}
SMALL |= {"vocab_size": 23, "max_position_embeddings": 16, "intermediate_size": 40}
SMALL |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 6}
SOFTCAP = {"query_pre_attn_scalar": 6, "final_logit_softcapping": 0.3}
LANGUAGE = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**GROUPED)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**GROUPED, **SOFTCAP, attn_implementation="eager")
    ),
}
LONG, SHORT = 5, 3


def net_of(module):
    torch.manual_seed(3)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return hf_net(module, "float64")


@pytest.fixture(scope="module", params=["gpt2", "llama", "gemma2"])
def net(request):
    return net_of(LANGUAGE[request.param]())


@pytest.fixture(scope="module")
def gpt2():
    return net_of(LANGUAGE["gpt2"]())


def texts(*, left: bool = False) -> Batch:
    """A text of five tokens, and one of three beside it."""
    ids = torch.randint(3, 23, (2, LONG), generator=torch.Generator().manual_seed(5))
    mask = torch.ones(2, LONG, dtype=torch.bool)
    padded = slice(0, LONG - SHORT) if left else slice(SHORT, None)
    if left:
        ids[1, LONG - SHORT :] = ids[1, :SHORT].clone()
    ids[1, padded], mask[1, padded] = 0, False
    return Batch(ids, None, ("0" * 12, "f" * 12), mask)


def embedded(net, ids):
    return net.module.get_input_embeddings()(ids[None]).detach()


def run(net, z):
    """What plain transformers makes of a text's embeddings: logits, and last hidden states."""
    with InDouble():
        out = net.module(inputs_embeds=z, output_hidden_states=True)
    return out.logits[0], out.hidden_states[-1][0]


def norms_of(net, batch, target, **how):
    JACOBIAN.check(net, batch, JacobianOptions(target=target, **how))
    return run_measure("jacobian", net, batch, target=target, tol=1e-10, within=1e-9, **how)[0]


def own(batch):
    return [ids[mask] for ids, mask in zip(batch.x, batch.mask, strict=True)]


@pytest.mark.parametrize(
    ("target", "end"),
    [
        ("logits", lambda net, z: run(net, z)[0][-1]),
        ("logits:1", lambda net, z: run(net, z)[0][1]),
        ("logits:-2", lambda net, z: run(net, z)[0][-2]),
        ("probabilities:last", lambda net, z: run(net, z)[0][-1].softmax(-1)),
        ("hidden:0", lambda net, z: run(net, z)[1][0]),
        ("hidden", lambda net, z: run(net, z)[1][-1]),
    ],
)
def test_norms_are_those_of_dense_jacobians(net, target, end):
    rivals = {"rivals": 3} if target == "logits:1" else {}
    section = norms_of(net, texts(), target, **rivals)
    for ids, norm in zip(own(texts()), section.samples["norm"], strict=True):
        assert norm == pytest.approx(dense_norm(partial(end, net), embedded(net, ids)), rel=1e-8)


def loss_of(net, ids, z):
    return cross_entropy(run(net, z)[0][:-1], ids[1:])


def test_the_loss_has_the_norm_of_its_gradient(net):
    section = norms_of(net, texts(), "loss")
    for i, ids in enumerate(own(texts())):
        z = embedded(net, ids).requires_grad_()
        loss = loss_of(net, ids, z)
        (slope,) = torch.autograd.grad(loss, z)
        assert section.samples["loss"][i] == pytest.approx(float(loss.detach()), rel=1e-10)
        assert section.samples["norm"][i] == pytest.approx(float(slope.norm()), rel=1e-10)
        step = slope / slope.norm() * 1e-5
        ends = [float(loss_of(net, ids, z.detach() + sign * step)) for sign in (1, -1)]
        assert section.samples["norm"][i] == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6)
    assert section.samples["products"] == (1, 1)
    assert section.rows[0].within == 0


def test_the_loss_in_another_norm_and_beside_blocks(gpt2):
    (ids,) = own(texts())[:1]
    z = embedded(gpt2, ids).requires_grad_()
    (slope,) = torch.autograd.grad(loss_of(gpt2, ids, z), z)
    section = norms_of(gpt2, texts()[:1], "loss", norm="inf")
    assert section.samples["norm"] == pytest.approx([float(slope.abs().sum())], rel=1e-10)
    section = norms_of(gpt2, texts()[:1], "loss", per_layer=True)
    assert section.samples["norm"] == pytest.approx([float(slope.norm())], rel=1e-10)
    assert [row.to for row in section.rows] == ["loss", "block output", "block output"]


def test_the_radius_is_that_of_the_next_token(gpt2):
    section = norms_of(gpt2, texts(), None, rivals=23)
    assert section.rows[0].to == "logits:last"
    for i, ids in enumerate(own(texts())):
        z = embedded(gpt2, ids)
        logits = run(gpt2, z)[0][-1]
        rows = dense(lambda z: run(gpt2, z)[0][-1], z)
        top = int(logits.argmax())
        others = [j for j in range(23) if j != top]
        radii = (logits[top] - logits[others]) / (rows[top] - rows[others]).norm(dim=1)
        radius = section.samples["radius_first_order"][i]
        assert radius == pytest.approx(float(radii.min()), rel=1e-8)
    assert "correct" not in section.samples
    labelled = replace(texts(), y=torch.ones(2))  # labels of texts are no tokens
    assert norms_of(gpt2, labelled, None, rivals=23) == section


def test_positions_count_from_the_first_token_wherever_the_padding_is():
    net = net_of(LANGUAGE["llama"]())
    for target in ("logits:1", "hidden", "loss"):
        right, left = (norms_of(net, texts(left=side), target) for side in (False, True))
        assert left.samples["norm"] == pytest.approx(right.samples["norm"], rel=1e-8)


@pytest.mark.parametrize("target", ["logits:2", "loss"])
def test_batches_of_other_lengths_are_joined(gpt2, target):
    batch = texts()
    halves, how = (batch[1:].trim(), batch[:1]), {"tol": 1e-10, "within": 1e-9}
    (apart,) = run_measure("jacobian", gpt2, *halves, target=target, **how)
    together = norms_of(gpt2, batch, target)
    for name in ("norm", "upper"):
        for one, other in zip(apart.samples[name][::-1], together.samples[name], strict=True):
            assert one == pytest.approx(other, rel=1e-8)


@pytest.mark.parametrize("target", ["logits", "probabilities:0", "hidden"])
def test_no_position_that_is_not_asked_for_has_logits(target):
    size, count = 3000, 12
    small = GROUPED | {"hidden_size": 8, "head_dim": 2, "vocab_size": size}
    config = transformers.Qwen2Config(**small, tie_word_embeddings=True)
    net = net_of(transformers.Qwen2ForCausalLM(config))
    batch = Batch(torch.arange(3, 3 + count)[None], None, ("0" * 12,))
    options = JacobianOptions(target=target, max_steps=3)
    with Live() as live:
        list(measure(net, [batch], options))
    assert live.largest <= 8 * endpoints.TRIED * size < 8 * count * size  # bytes of float64


def test_a_head_that_mixes_positions_is_refused_and_is_no_default(gpt2):
    summed = NextToken(gpt2.next_token.head, lambda out: out[0].logits.cumsum(1))
    net = replace(gpt2, next_token=summed)
    with pytest.raises(InputError, match="does not score each position separately"):
        norms_of(net, texts(), "logits")
    assert norms_of(net, texts(), None).rows[0].to == "features"


def test_half_precision_that_is_kept_gives_the_same():
    module = LANGUAGE["qwen2"]().to(torch.bfloat16)
    sections = []
    for weights in ("converted", "stored"):
        net = hf_net(copy.deepcopy(module), weights=weights)
        sections += [norms_of(net, texts(), target).samples for target in ("loss", "logits:1")]
    assert sections[:2] == sections[2:]


def bert(head, **kwargs):
    return net_of(getattr(transformers, head)(transformers.BertConfig(**SMALL, **kwargs)))


def test_hidden_states_of_an_encoder():
    net = bert("BertModel")
    section = norms_of(net, texts(), "hidden:2")
    for ids, norm in zip(own(texts()), section.samples["norm"], strict=True):
        states = lambda z: net.module(inputs_embeds=z).last_hidden_state[0, 2]  # noqa: E731
        assert norm == pytest.approx(dense_norm(states, embedded(net, ids)), rel=1e-8)


class Halved(nn.Module):
    """Two tokens become one before the last LayerNorm."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(9, 6), nn.LayerNorm(6)

    def forward(self, ids):
        return self.norm(self.table(ids).unflatten(1, (-1, 2)).mean(2)).mean(1)


def test_states_that_are_none_of_tokens_have_no_position():
    net = own_net(Halved(), (8,), kind="text", vocabulary=9, classifier=False)
    with pytest.raises(InputError, match="do not have one vector per token"):
        norms_of(net, Batch(torch.ones(1, 4, dtype=torch.long), None, ("0" * 12,)), "hidden")


def test_the_loss_of_a_classifier_is_that_of_the_label_or_of_what_it_says():
    net = bert("BertForSequenceClassification", num_labels=3)
    batch = replace(texts(), y=torch.tensor([2, -1]))
    section = norms_of(net, batch, "loss")
    for i, ids in enumerate(own(texts())):
        z = embedded(net, ids).requires_grad_()
        logits = net.module(inputs_embeds=z).logits
        y = logits.argmax(1) if i else torch.tensor([2])
        loss = cross_entropy(logits, y)
        (slope,) = torch.autograd.grad(loss, z)
        assert section.samples["loss"][i] == pytest.approx(float(loss.detach()), rel=1e-10)
        assert section.samples["norm"][i] == pytest.approx(float(slope.norm()), rel=1e-10)
    (note,) = (note for note in section.notes if note.code == "loss-of-predicted")
    assert "of 1 sample" in note.text


@pytest.mark.parametrize(
    ("head", "target", "says"),
    [
        ("BertModel", "loss", "has no single output"),
        ("BertModel", "logits:1", "has no single output"),
        ("BertForSequenceClassification", "logits:1", "have no position"),
        ("BertModel", "hidden:9", "2 of 2 texts are too short"),
        ("BertModel", "hidden:3", "1 of 2 texts are too short for --to hidden:3"),
        ("BertModel", "hidden:-6", "2 of 2 texts are too short"),
    ],
)
def test_what_is_not_there_is_refused(head, target, says):
    with pytest.raises(InputError, match=says):
        norms_of(bert(head), texts(), target)
