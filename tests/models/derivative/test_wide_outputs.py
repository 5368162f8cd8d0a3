"""Logits of many classes and of a vocabulary: exact, in few products, without a dense Jacobian."""

import pytest
import timm
import torch
import transformers as hf

from lipaudit.models.derivative.linearize import linearize
from lipaudit.models.derivative.model_norms import compute_jacobian_norms
from tests.live import Live

WORDS = 30_000


def classifier():
    """1000 classes of 3 x 32 x 32 pixels: more pixels than classes."""
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_classes": 1000}
    model = timm.create_model("vit_tiny_patch16_224", **sizes)
    features = lambda z: model.forward_head(model.forward_features(z), pre_logits=True)  # noqa: E731
    return model, model, features, model.head, torch.randn(2, 3, 32, 32)


def decoder():
    """The scores of the token behind the last one."""
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 8}
    config = hf.GPT2Config(**sizes, vocab_size=WORDS, bos_token_id=0, eos_token_id=0)
    model = hf.GPT2LMHeadModel(config)
    logits = lambda z: model(inputs_embeds=z).logits[:, -1]  # noqa: E731
    hidden = lambda z: model.transformer(inputs_embeds=z).last_hidden_state[:, -1]  # noqa: E731
    return model, logits, hidden, model.lm_head, torch.randn(2, 5, 24)


def masked_words():
    """The scores of one masked word."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    model = hf.BertForMaskedLM(hf.BertConfig(**sizes, vocab_size=WORDS, intermediate_size=40))
    logits = lambda z: model(inputs_embeds=z).logits[:, 2]  # noqa: E731
    head = model.cls.predictions

    def hidden(z):
        return head.transform(model.bert(inputs_embeds=z).last_hidden_state[:, 2])

    return model, logits, hidden, head.decoder, torch.randn(2, 5, 24)


@pytest.mark.parametrize("make", [classifier, decoder, masked_words])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_of_many_outputs(make, dtype):
    torch.manual_seed(0)
    model, logits, features, head, x = make()
    model.eval().double().requires_grad_(False)
    for p in model.parameters():
        p.mul_(3 if p.ndim > 1 else 1)  # attention that is not uniform
    root = torch.linalg.cholesky(head.weight.T @ head.weight)
    truth = []
    for z in x.double():  # ||W J|| = ||R^T J|| where W^T W = R R^T
        j = torch.autograd.functional.jacobian(lambda z: features(z[None])[0], z).flatten(1)
        truth.append(torch.linalg.matrix_norm(root.T @ j, 2))
    model.to(dtype)
    with Live() as live:
        linear = linearize(lambda z, _: logits(z), x.to(dtype))
        norms = compute_jacobian_norms(linear, tol=1e-7)
    torch.testing.assert_close(norms.norm, torch.stack(truth), rtol=1e-6, atol=0)
    assert norms.converged.all()
    assert (norms.products <= 60).all()
    weights = head.weight.numel()
    most = max(weights, 16 * linear.output.numel())
    assert live.largest <= most * x.to(dtype).element_size()
    assert weights < linear.outputs * linear.inputs / 4  # which is what a dense one would take
