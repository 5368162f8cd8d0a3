"""Language models that score continuations, choices and labels, from end to end."""

import json
import re
from itertools import product

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.autograd.functional import jacobian

from tests.commands import invoke, refuse

TEXTS = [
    ("The film was", "very good"),
    ("A dull film was", "very bad"),
    ("The capital of France is", "Paris"),
    ("One, two, three,", "four"),
    ("Red and green and", "blue"),
]
WRONG = {"prompt": "The film was", "continuation": "Paris four"}
TABLES = {
    "continuation": [{"prompt": p, "continuation": c} for p, c in TEXTS] + [WRONG],
    "choices": [
        {"question": TEXTS[2][0], "choices": ["Paris", "blue", "four"], "answer": 0},
        {"question": TEXTS[3][0], "choices": ["very bad", "blue", "four"], "answer": "C"},
    ],
    "labels": [{"text": p, "label": c} for p, c in TEXTS[2:]],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny GPT-2 that has learnt a few texts, its tokenizer, and tables of these."""
    folder = tmp_path_factory.mktemp("language")
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<e>"], initial_alphabet=letters)
    raw.train_from_iterator([f"{p} {c}" for p, c in TEXTS] * 2, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<e>")
    tokenizer.save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
        sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
        config = transformers.GPT2Config(vocab_size=len(tokenizer), **sizes)
        module = transformers.GPT2LMHeadModel(config)
        inputs = [tokenizer(f"{p} {c}", return_tensors="pt").input_ids for p, c in TEXTS]
        optimizer = torch.optim.Adam(module.parameters(), 0.01)
        for _ in range(40):
            optimizer.zero_grad()
            sum(module(ids, labels=ids).loss for ids in inputs).backward()
            optimizer.step()
    module.save_pretrained(folder)
    for name, rows in TABLES.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture
def run(folder):
    """Measure the model on one of its tables."""

    def run(command, table, *args):
        data = str(folder / f"{table}.jsonl")
        how = ("--data", data, *args, "-q", "-f", "json")
        return json.loads(invoke(command, folder, *how).stdout)

    return run


def order(found, table):
    """Return the rows of a table in the order of a report."""
    lines = [int(re.search(r"line (\d+)", p)[1]) for p in found["samples"]["place"]]
    return [TABLES[table][line - 1] for line in lines]


class Plain:
    """The model as a plain loop of transformers runs it, from the embeddings of a prompt."""

    def __init__(self, folder, dtype=torch.float32):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.table = self.module.get_input_embeddings()

    def ids(self, text):
        return torch.tensor([self.tokenizer(text)["input_ids"]])

    def start(self, prompt):
        return self.table(self.ids(prompt))[0]

    def tokens(self, start, text):
        """Return log p of the tokens of a continuation, and whether each is the likeliest."""
        ids = self.ids(f" {text}")
        z = torch.cat([start, self.table(ids)[0]])[None]
        logs = self.module(inputs_embeds=z).logits[0, len(start) - 1 : -1].log_softmax(1)
        return logs.gather(1, ids.T)[:, 0], logs.argmax(1) == ids[0]

    def scores(self, start, texts):
        return torch.stack([self.tokens(start, text)[0].sum() for text in texts])


@torch.no_grad()
@pytest.mark.parametrize("norm", ["linf", "l2", "token-l2"])
def test_losses_and_what_stands_are_those_of_the_stored_embeddings(run, folder, norm):
    eps = {"linf": 0.1, "l2": 0.5, "token-l2": 0.3}[norm]
    args = ("--eps", str(eps), "--norm", norm, "--steps", "8", "--save-adv", "adv.safetensors")
    found = run("attack", "continuation", *args)
    section, plain, stored = found["sections"][0], Plain(folder), load_file("adv.safetensors")
    samples = section["samples"]
    assert 0 < sum(samples[f"robust@worst,{norm},{eps}"]) < sum(samples["correct"]) == 5
    for i, row in enumerate(order(found, "continuation")):
        start, text = plain.start(row["prompt"]), row["continuation"]
        logs, right = plain.tokens(start, text)
        assert samples["loss"][i] == pytest.approx(-float(logs.sum()), rel=1e-4)
        assert samples["correct"][i] == right.all() == (row != WRONG)
        for attack in ("fgsm", "pgd"):
            key = f"{attack},{norm},{eps}"
            moved = stored[key][i, : len(start)]
            logs, right = plain.tokens(moved, text)
            assert samples[f"loss@{key}"][i] == pytest.approx(-float(logs.sum()), rel=1e-4)
            assert samples[f"loss@{key}"][i] > samples["loss"][i]
            assert samples[f"robust@{key}"][i] == (right.all() and row != WRONG)
            far = {"linf": moved - start, "l2": (moved - start).norm()}
            far = far.get(norm, (moved - start).norm(dim=1)).abs().max()
            assert float(far) == pytest.approx(samples[f"distance@{key}"][i], rel=1e-4)
            assert float(far) <= eps * (1 + 1e-4)
    assert "clean-accuracy-at-chance" not in [note["code"] for note in section["notes"]]
    (said,) = [note["text"] for note in section["notes"] if note["code"] == "loss"]
    assert f"{sum(samples['loss']) / 6:#.3g} nats" in said


@torch.no_grad()
def test_a_gradient_raises_the_loss_further_than_chance(run, folder):
    found = run("attack", "continuation", "--eps", "0.2", "--attack", "pgd")
    samples, plain = found["sections"][0]["samples"], Plain(folder)
    for i, row in enumerate(order(found, "continuation")):
        start = plain.start(row["prompt"])
        noise = torch.randn(20, *start.shape, generator=torch.Generator().manual_seed(i))
        noise *= 0.2 / noise.norm(dim=2, keepdim=True)
        lost = [-plain.tokens(start + each, row["continuation"])[0].sum() for each in noise]
        rise = samples["loss@pgd,token-l2,0.2"][i] - samples["loss"][i]
        assert rise > 1.5 * (float(max(lost)) - samples["loss"][i]) > 0


@torch.no_grad()
@pytest.mark.parametrize("table", ["choices", "labels"])
def test_choices_and_labels_are_those_of_the_stored_embeddings(run, folder, table):
    args = ("--eps", "0.05,2", "--steps", "8", "--save-adv", "adv.safetensors")
    found = run("attack", table, *args)
    samples, plain, stored = found["sections"][0]["samples"], Plain(folder), load_file(args[-1])
    small, large = [row["robust"] for row in found["sections"][0]["rows"]][-2:]
    assert small > large
    assert found["run"]["options"]["score"] == "sum"
    notes = [note["text"] for note in found["sections"][0]["notes"]]
    assert any("summed over their tokens" in note for note in notes)
    for i, row in enumerate(order(found, table)):
        texts = row.get("choices") or ["Paris", "blue", "four"]
        answers = {0: 0, "C": 2} | {text: i for i, text in enumerate(texts)}
        right = answers[row.get("answer", row.get("label"))]
        start = plain.start(row.get("question") or row["text"])
        assert samples["label"][i] == right
        assert samples["predicted"][i] == int(plain.scores(start, texts).argmax()) == right
        for attack, eps in product(("fgsm", "pgd"), ("0.05", "2")):
            key = f"{attack},token-l2,{eps}"
            said = int(plain.scores(stored[key][i, : len(start)], texts).argmax())
            assert samples[f"robust@{key}"][i] == (said == right)


def test_the_jacobian_of_scores_is_that_of_the_plain_loop(run, folder):
    args = ("--score", "mean", "--dtype", "float64", "--tol", "1e-6")
    found = run("jacobian", "choices", *args)
    plain = Plain(folder, torch.float64)
    (row,) = found["sections"][0]["rows"]
    assert (row["from"], row["to"]) == ("embeddings", "scores")
    for i, row in enumerate(order(found, "choices")):

        def means(start, texts=row["choices"]):
            return torch.stack([plain.tokens(start, text)[0].mean() for text in texts])

        dense = jacobian(means, plain.start(row["question"]).detach()).flatten(1)
        norm = torch.linalg.matrix_norm(dense.detach(), 2)
        assert found["sections"][0]["samples"]["norm"][i] == pytest.approx(float(norm), rel=1e-6)
        kept = found["sections"][0]["gradients"][found["sections"][0]["samples"]["ids"][i]]
        written = "".join(kept["tokens"]).replace("Ġ", "")
        assert written == row["question"].replace(" ", "")
        assert sum(kept["shares"]) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("table", TABLES)
def test_a_dry_run_plans_what_can_be_measured_of_scores(run, table):
    seen = run("check", table, "--score", "sum")
    assert (*seen["measures"],) == ("jacobian", "attack")
    assert any("and bounds measures plain texts" in note for note in seen["notes"])
    assert {*seen["measures"].values()} == {len(TABLES[table])}
    assert all(each.startswith("line ") for each in seen["first"])


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("bounds --score sum", 2, "hint: Measure them without --score: lipaudit bounds MODEL"),
        ("certify --eps 0.1", 4, "scores continuations"),
        ("attack --attack words --target Rome", 2, "hint: Give one of its classes: A, B, C."),
        ("jacobian --score sum --to hidden", 4, "has no single output 'hidden' per sample"),
        ("jacobian --score sum --to logits:1", 4, "hint: Use --to logits."),
        ("jacobian --score sum --per-layer", 2, "--per-layer does not work with --score"),
        ("jacobian --score sum --from layer:0", 2, "--from layer:0 does not work with --score"),
        ("jacobian --score sum --data random", 4, "no continuations, choices or labels"),
    ],
)
def test_what_cannot_be_done_with_scores_is_refused(folder, line, code, message):
    command, *args = line.split()
    refuse(code, message, command, folder, "--data", folder / "choices.jsonl", *args)


@torch.no_grad()
def test_scores_under_autocast_are_those_of_a_plain_loop(run, folder):
    args = ("--attack", "fgsm", "--eps", "0.1")
    found = run("attack", "choices", *args, "--autocast", "bfloat16")
    samples, plain = found["sections"][0]["samples"], Plain(folder)
    for i, row in enumerate(order(found, "choices")):
        prompt = plain.ids(row["question"])
        scores = []
        for choice in row["choices"]:
            answer = plain.ids(f" {choice}")
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = plain.module(torch.cat([prompt, answer], 1)).logits[0]
            logs = logits[prompt.shape[1] - 1 : -1].float().log_softmax(1)
            scores.append(logs.gather(1, answer.T).sum())
        shares = torch.stack(scores).softmax(0)
        assert samples["predicted"][i] == int(shares.argmax())
        assert samples["confidence"][i] == pytest.approx(float(shares.max()), abs=1e-6)
    exact = run("attack", "choices", *args)["sections"][0]["samples"]
    assert exact["confidence"] != samples["confidence"]
