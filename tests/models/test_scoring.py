"""Scores of continuations beside plain loops over a model of transformers, in float64."""

import pytest
import torch
import transformers

from lipaudit.data.batch import Batch, Task, make_batch
from lipaudit.data.continuations import pack
from lipaudit.errors import InputError
from lipaudit.models.net import LoadOptions
from lipaudit.models.sources.classifiers import score_continuations
from lipaudit.models.sources.transformer_inputs import describe_transformers
from tests.nets import hf_net

pytestmark = pytest.mark.rounding

VOCABULARY = 40
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 24, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 4}
MODELS = {
    "gpt2": ("GPT2Config", {}),
    "llama": ("LlamaConfig", GROUPED),
    "gemma2": ("Gemma2Config", GROUPED | {"sliding_window": 4, "query_pre_attn_scalar": 4}),
    "opt": ("OPTConfig", {"ffn_dim": 24, "word_embed_proj_dim": 16}),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
}
ROWS = [
    ([5, 6, 7], [[8], [9, 10], [11, 12, 13]]),
    ([3, 4, 5, 6, 7, 8], [[9, 3], [4], [4, 5]]),
    ([21], [[22, 23, 24, 25], [26], [27, 28]]),
]
CHOICES = Task("choices", ("A", "B", "C"))
ALONE = Task("continuation", ("continuation", "rival"))


def language_model(name, attention="eager", dtype="float64", **options):
    config, own = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, config)(**SIZES | own), attn_implementation=attention
        )
        for p in module.parameters():  # at their initial size all tokens are equally likely
            p.data = torch.randn_like(p) * 0.4
    return hf_net(module, dtype, **options)


def batch_of(net, rows):
    x = [pack(prompt, choices, VOCABULARY) for prompt, choices in rows]
    return make_batch(x, net, [0] * len(rows))


@torch.no_grad()
def plain(module, prompt, continuation):
    """Return log p of every token of a continuation and of the likeliest other, one by one."""
    own, other = [], []
    for i, token in enumerate(continuation):
        logits = module(torch.tensor([prompt + continuation[:i]])).logits[0, -1]
        logs = logits.log_softmax(0)
        own.append(logs[token])
        other.append(max(value for j, value in enumerate(logs) if j != token))
    return torch.stack(own), torch.stack(other)


def slack(net, name):
    """Return how far rounding may move a score.

    All is float64 but what transformers computes in float32 in every attention and norm (not of
    GPT-2): to first order, each of some 4 roundings u per layer and those of a softmax over n
    tokens move the logits l by u max |l|, and log p of each token by twice that.
    """
    if name == "gpt2":
        return 1e-10
    tokens = max(len(text) for _, texts in ROWS for text in texts)
    length = max(len(prompt) for prompt, _ in ROWS) + tokens
    largest = net.module(torch.arange(3, 3 + length)[None]).logits.abs().max()
    layers = SIZES["num_hidden_layers"]
    return 2 * tokens * layers * (4 + length) * 2**-24 * float(largest)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_a_plain_loop(name):
    net = language_model(name)
    batch = batch_of(net, ROWS)
    loops = [[plain(net.module, prompt, text)[0] for text in texts] for prompt, texts in ROWS]
    for how, reduce in (("sum", torch.sum), ("mean", torch.mean)):
        scored = score_continuations(net, CHOICES, how)
        truth = torch.stack([torch.stack([reduce(own) for own in row]) for row in loops])
        assert torch.allclose(scored.output(batch), truth, rtol=0, atol=slack(net, name))
    assert (scored.classes, scored.labels) == (3, ("A", "B", "C"))
    assert "mean of their tokens" in scored.notes[-1].text


def test_a_continuation_leads_its_rival_where_greedy_decoding_gives_it():
    net = language_model("llama")
    rows, greedy = [], []
    for prompt in ([5, 6, 7], [9, 3], [30, 2, 8, 8]):
        text = []
        for _ in range(3):
            text.append(int(net.module(torch.tensor([prompt + text])).logits[0, -1].argmax()))
        rows += [(prompt, [text]), (prompt, [[*text[:2], (text[2] + 1) % VOCABULARY]])]
        greedy += [True, False]
    for how, reduce in (("sum", torch.sum), ("mean", torch.mean)):
        scores = score_continuations(net, ALONE, how).output(batch_of(net, rows))
        assert (scores.argmax(1) == 0).tolist() == greedy
        for (prompt, (text,)), (score, rival) in zip(rows, scores, strict=True):
            own, other = plain(net.module, prompt, text)
            weakest = int((own - other).argmin())
            replaced = torch.cat([own[:weakest], other[weakest, None], own[weakest + 1 :]])
            assert torch.allclose(score, reduce(own), rtol=1e-10)
            assert torch.allclose(rival, reduce(replaced), rtol=1e-10)


def test_the_prompt_moves_and_nothing_else():
    """The gradient is that of a plain loop in the prompt's embeddings, zero behind it."""
    net = language_model("gpt2")
    batch, scored = batch_of(net, ROWS), score_continuations(net, CHOICES, "sum")
    z = scored.point(batch).requires_grad_()
    scored.forward(z, batch)[:, 1].sum().backward()
    free = scored.find_free_tokens(batch)
    assert free.tolist() == [[i < len(prompt) for i in range(z.shape[1])] for prompt, _ in ROWS]
    assert not z.grad[~free].any()
    table = net.module.get_input_embeddings()
    for row, (prompt, texts) in enumerate(ROWS):
        start = table(torch.tensor([prompt])).requires_grad_()
        both = torch.cat([start, table(torch.tensor([texts[1]]))], 1)
        logs = net.module(inputs_embeds=both).logits[0].log_softmax(1)
        behind = range(len(prompt) - 1, both.shape[1] - 1)
        sum(logs[i, t] for i, t in zip(behind, texts[1], strict=True)).backward()
        assert torch.allclose(z.grad[row, : len(prompt)], start.grad[0], rtol=1e-9, atol=1e-12)


def test_weights_as_stored_give_the_scores_of_these_weights():
    net = language_model("llama", dtype="float32")
    batch = batch_of(net, ROWS)
    held = language_model("llama", dtype="float64", weights="stored")
    scores = [
        score_continuations(each, CHOICES, "sum").output(batch).double() for each in (net, held)
    ]
    assert torch.allclose(*scores, rtol=1e-4)
    assert next(held.module.parameters()).dtype == torch.float32


@pytest.mark.parametrize("seed", range(3))
def test_models_that_see_what_follows_are_refused(seed):
    """However little: what random weights see of it is near rounding."""
    torch.manual_seed(seed)
    module = transformers.BertLMHeadModel(transformers.BertConfig(**SIZES))
    with pytest.raises(InputError, match="looks at later tokens"):
        score_continuations(hf_net(module), CHOICES, "sum")


def test_models_that_read_more_than_embeddings_are_refused():
    net = language_model("gpt2")
    unlike = net.next_logits
    object.__setattr__(net, "next_logits", lambda z, first: 2 * unlike(z, first))
    with pytest.raises(InputError, match="gives different logits for embeddings"):
        score_continuations(net, ALONE, "sum")


def test_models_of_no_language_have_no_next_logits():
    module = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES))
    assert describe_transformers(module, LoadOptions()).next_logits is None


def test_packed_rows_are_taken_apart_whatever_their_padding():
    net = language_model("gpt2")
    scored = score_continuations(net, CHOICES, "sum")
    batch = batch_of(net, ROWS)
    wide = torch.cat([batch.x, batch.x.new_zeros(len(batch), 4)], 1)
    mask = torch.cat([batch.mask, batch.mask.new_zeros(len(batch), 4)], 1)
    padded = scored.output(Batch(wide, None, batch.ids, mask))
    assert torch.allclose(padded, scored.output(batch), rtol=1e-12)


@torch.no_grad()
def test_choices_of_one_token_share_the_run_of_their_prompt():
    rows = [([5, 6, 7], [[8], [9], [11]]), ([3, 4, 5, 6], [[9], [4, 5], [7]])]
    net = language_model("gpt2")
    runs = []
    spied = net.next_logits

    def next_logits(z, first):
        runs.append(tuple(z.shape[:2]))
        return spied(z, first)

    scored = score_continuations(net, CHOICES, "sum")
    batch = batch_of(net, rows)
    wanted = scored.output(batch)
    object.__setattr__(net, "next_logits", next_logits)
    assert torch.equal(score_continuations(net, CHOICES, "sum").output(batch), wanted)
    # A run for the first prompt; for the second one, one for [4, 5] and one for the others.
    assert runs[-1] == (3, 5)
    for found, (prompt, choices) in zip(wanted, rows, strict=True):
        truth = [plain(net.module, prompt, choice)[0].sum() for choice in choices]
        assert torch.allclose(found, torch.stack(truth), rtol=1e-10)
