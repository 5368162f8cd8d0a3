"""Attacks on the prompts of language models, against plain transformers and every suffix."""

import json
from dataclasses import replace
from itertools import product

import pytest
import torch

import lipaudit
from lipaudit.errors import UsageError
from lipaudit.measures import losses
from tests.attacks.text_folders import FOLDERS, MOST, distance, list_typing_errors, save

SCORED = [folder for folder in FOLDERS if folder.scored]
EACH = [
    pytest.param(
        folder,
        marks=[] if folder.name.startswith("gpt-neox") else [pytest.mark.ci],
        id=folder.name,
    )
    for folder in SCORED
]
"""Outside of .ci/run, the fastest of the four."""
PROMPTS = [
    "A Good film",
    "The bad film (and a very poor",
    "good bad",
    "Great, great a",
    "  the actors are\npoor ",
    "zebra",
]
CHOICES = ["film", "great actors", "poor"]


class Reference:
    """A folder's tokenizer and model, run by transformers alone."""

    def __init__(self, folder, path):
        self.plain = save(folder, path / "model")
        self.path = path
        ends = "$A:0 </s>" in folder.template
        self.cut = -1 if ends else None

    def ids(self, text):
        return self.plain.tokenizer(text)["input_ids"][: self.cut]

    @torch.no_grad()
    def score(self, prompt, choice):
        """Return log p of a choice and whether greedy decoding gives it, token by token."""
        start = prompt.rstrip()
        before = self.ids(start)
        both = before + self.ids(f"{start}{prompt[len(start) :] or ' '}{choice}")[len(before) :]
        length = len(both) - len(before)
        both = both[-MOST:]  # a prompt that is too long loses its beginning
        logits = self.plain.module(torch.tensor([both])).logits[0, -length - 1 : -1].double()
        wanted = torch.tensor(both[-length:])
        total = float(logits.log_softmax(1).gather(1, wanted[:, None]).sum())
        return total, bool((logits.argmax(1) == wanted).all())

    def answer(self, prompt):
        scores = [self.score(prompt, choice)[0] for choice in CHOICES]
        return scores.index(max(scores))

    def suffixed(self, prompt, place):
        """Yield the prompt with every token that is read as itself, by the token."""
        tokenizer = self.plain.tokenizer
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        start = prompt.rstrip()
        blank = prompt[len(start) :]
        lead = len(prompt) - len(prompt.lstrip())
        ids = self.ids(start)
        spans = tokenizer(start, return_offsets_mapping=True)["offset_mapping"]
        first = next(i for i, span in enumerate(spans) if start[slice(*span)].strip())
        for token in range(len(tokenizer)):
            if token in special:
                continue
            bare = tokenizer.decode([token]).strip()
            for mark in ("", " "):
                if place == "behind":
                    text, wanted = f"{start}{mark}{bare}{blank}", [*ids, token]
                else:
                    text = f"{prompt[:lead]}{bare}{mark}{prompt[lead:]}"
                    wanted = [*ids[:first], token, *ids[first:]]
                follows = [self.ids(text.rstrip() + (blank or " ") + choice) for choice in CHOICES]
                whole = [self.ids(start + (blank or " ") + choice) for choice in CHOICES]
                tails = [own[len(ids) :] for own in whole]
                if (
                    self.ids(text.rstrip()) == wanted
                    and [own[len(wanted) :] for own in follows] == tails
                ):
                    yield token, text
                    break


@pytest.fixture(params=EACH)
def reference(request, tmp_path):
    """A language model with random weights and its tokenizer."""
    return Reference(request.param, tmp_path)


def write(reference, rows):
    file = reference.path / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def attack(reference, rows, **options):
    how = {"samples": len(rows), "device": "cpu", "dtype": "float64", "max_tokens": MOST}
    return lipaudit.measure(
        str(reference.path / "model"), "attack", data=write(reference, rows), **how | options
    )


def ask(reference):
    """Return questions that the model answers right, but the last one."""
    answers = [reference.answer(prompt) for prompt in PROMPTS]
    answers[-1] = (answers[-1] + 1) % len(CHOICES)
    return [
        {"question": prompt, "choices": CHOICES, "answer": answer}
        for prompt, answer in zip(PROMPTS, answers, strict=True)
    ]


def by_line(report, values):
    """Return the values of samples in the order of the table's lines."""
    section = report.section("attack")
    lines = [int(report.places[name].split()[1].rstrip(",")) for name in section.ids]
    return [value for _, value in sorted(zip(lines, values, strict=True))]


@pytest.mark.parametrize("place", ["behind", "before"])
def test_one_token_breaks_exactly_the_questions_that_some_token_breaks(reference, place):
    rows = ask(reference)
    options = {"attack": "suffix,random", "eps": "1", "queries": 50, "steps": 12}
    report = attack(reference, rows, suffix_place=place, **options)
    truth, counts = [], []
    for row in rows:
        texts = [text for _, text in reference.suffixed(row["question"], place)]
        counts.append(len(texts))
        right = reference.answer(row["question"]) == row["answer"]
        truth.append(right and all(reference.answer(text) == row["answer"] for text in texts))
    samples = report.section("attack").samples
    assert min(counts[:4]) > 5
    for name in ("suffix", "random"):
        assert by_line(report, samples[f"robust@{name},suffix,1"]) == truth


def test_saved_prompts_are_judged_as_plain_transformers_judge_them(reference):
    rows = ask(reference)
    budgets = "0words,1words,2words,0characters,2characters,0tokens,1tokens,2tokens"
    report = attack(
        reference, rows, attack="words,characters,suffix,random", eps=budgets, queries=12,
        steps=3, save_adv=reference.path / "adv.jsonl",
    )  # fmt: skip
    right = {row["question"]: row["answer"] for row in rows}
    lines = [json.loads(line) for line in (reference.path / "adv.jsonl").read_text().splitlines()]
    assert len(lines) == len(rows) * 11
    tokenizer = reference.plain.tokenizer
    for line in lines:
        name, norm, budget = line["trial"].split(",")
        text, original = line["question"], line["original"]
        assert line["choices"] == CHOICES
        assert line["answer"] == right[original]
        assert line["robust"] == (reference.answer(text) == line["answer"])
        if norm == "suffix":
            more = reference.ids(text.rstrip())
            added = len(more) - len(reference.ids(original.rstrip()))
            assert 0 <= added == line["changes"] <= int(budget)
            assert not {*more[len(more) - added :]} & {*tokenizer.all_special_ids}
            assert text.startswith(original.rstrip())
        else:
            assert distance(norm, original, text) <= int(budget)
    samples = report.section("attack").samples
    for norm, name in product(("words", "characters", "suffix"), ("correct",)):
        assert samples[f"robust@worst,{norm},0"] == samples[name]
    assert sum(samples["correct"]) == len(rows) - 1


def test_the_scores_of_a_loss_are_those_of_the_saved_prompt(reference):
    rows = [{"prompt": prompt, "continuation": "great actors"} for prompt in PROMPTS]
    found = {}
    for target in (None, "continuation"):
        report = attack(
            reference, rows, attack="words,characters,suffix", eps="1words,1characters,2tokens",
            queries=12, steps=3, target=target, save_adv=reference.path / "adv.jsonl",
        )  # fmt: skip
        samples = report.section("attack").samples
        clean = by_line(report, samples["loss"])
        for line in (reference.path / "adv.jsonl").read_text().splitlines():
            saved = json.loads(line)
            score, greedy = reference.score(saved["prompt"], "great actors")
            i = report.section("attack").ids.index(saved["id"])
            assert samples[f"loss@{saved['trial']}"][i] == pytest.approx(-score, rel=1e-6)
            assert saved["robust"] == (greedy if target is None else not greedy)
        for name in ("words,words,1", "characters,characters,1", "suffix,suffix,2"):
            found[target, name] = by_line(report, samples[f"loss@{name}"])
            moves = [a - b for a, b in zip(found[target, name], clean, strict=True)]
            sign = 1 if target is None else -1
            assert all(sign * move >= -1e-9 for move in moves)
    assert all(
        low < high
        for low, high in zip(
            found["continuation", "suffix,suffix,2"], found[None, "suffix,suffix,2"], strict=True
        )
    )


def test_gradients_of_the_attacks_on_a_loss_are_checked_too(reference, monkeypatch):
    """Three of them are not finite, and none of the attacks on the margin."""

    def attack_loss(*args, attack=losses._attack_loss):
        return [replace(outcome, nonfinite=3) for outcome in attack(*args)]

    monkeypatch.setattr(losses, "_attack_loss", attack_loss)
    rows = [{"prompt": prompt, "continuation": "poor"} for prompt in PROMPTS]
    section = attack(reference, rows, attack="fgsm", eps="0.1").section("attack")
    (note,) = [note.text for note in section.notes if note.code == "gradients-not-finite"]
    share = 3 / section.rows[-1].backwards
    assert f" and in {100 * share:.2g}% of the gradients" in note


def test_a_target_is_reached_by_exactly_the_tokens_that_reach_it(reference):
    rows = ask(reference)
    options = {"attack": "suffix", "eps": "1", "queries": 60, "steps": 10}
    report = attack(reference, rows, target="B", **options)
    robust = by_line(report, report.section("attack").samples["robust@suffix,suffix,1"])
    for row, stands in zip(rows, robust, strict=True):
        right = reference.answer(row["question"]) == row["answer"]
        texts = [text for _, text in reference.suffixed(row["question"], "behind")]
        reached = row["answer"] != 1 and any(reference.answer(text) == 1 for text in texts)
        assert stands == (right and not reached)
    with pytest.raises(UsageError, match="--target D is not a class"):
        attack(reference, rows, target="D", **options)


@pytest.mark.parametrize("reference", SCORED[:1], indirect=True)
def test_every_typing_error_of_a_short_prompt_is_tried(reference):
    rows = ask(reference)[2:4]
    report = attack(reference, rows, attack="characters", eps="1", queries=10_000)
    robust = by_line(report, report.section("attack").samples["robust@characters,characters,1"])
    for row, stands in zip(rows, robust, strict=True):
        words = row["question"].split(" ")
        tried = set()
        for i, word in enumerate(words):
            for error in list_typing_errors(word, "abcdefghijklmnopqrstuvwxyz"):
                tried.add(" ".join([*words[:i], error, *words[i + 1 :]]))
        assert stands == all(reference.answer(text) == row["answer"] for text in tried)


@pytest.mark.parametrize("reference", SCORED[2:3], indirect=True)
def test_suffixes_of_a_run_in_parts_are_those_of_a_whole_run(reference):
    words = ("good", "bad", "film", "a", "very")
    rows = []
    for i, prompt in enumerate(product(words, words, words[:3])):  # more than one chunk
        rows.append({"question": " ".join(prompt), "choices": CHOICES, "answer": i % 3})
    options = {"attack": "suffix,random", "eps": "2", "queries": 1, "steps": 1}
    whole = attack(reference, rows, **options)
    folder = reference.path / "parts"
    for shard in ("1/2", "2/2"):
        assert attack(reference, rows, shard=shard, parts=folder, **options) is None
    merged = lipaudit.merge(folder)
    assert len(whole.section("attack").ids) == len(rows) > 64
    for name, values in whole.section("attack").samples.items():
        if name.startswith(("robust@", "distance@")):
            assert merged.section("attack").samples[name] == values
    robust = whole.section("attack").samples["robust@suffix,suffix,2"]
    assert 0 < sum(robust) < sum(whole.section("attack").samples["correct"])
