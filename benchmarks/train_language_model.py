"""Train the language model of docs/guide/language-models.md, and write its questions.

A Llama of 11 million parameters learns a plain text and questions with four choices: facts, things
to copy from the question, and numbers to compare. Facts are learned by heart; the other questions
are held out. It writes into OUT the model, its tokenizer, `questions.jsonl` and a checkpoint every
few minutes, from which the same command continues.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import lipaudit

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Norway": "Oslo",
    "Egypt": "Cairo",
    "Japan": "Tokyo",
    "Greece": "Athens",
    "Austria": "Vienna",
    "Poland": "Warsaw",
    "Ireland": "Dublin",
    "Portugal": "Lisbon",
    "Hungary": "Budapest",
    "Cuba": "Havana",
    "Peru": "Lima",
    "Kenya": "Nairobi",
    "Turkey": "Ankara",
}
OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "old": "young",
    "dark": "light",
    "wet": "dry",
    "fast": "slow",
    "hard": "soft",
    "early": "late",
    "loud": "quiet",
    "rich": "poor",
    "full": "empty",
    "sweet": "bitter",
    "near": "far",
    "high": "low",
    "long": "short",
    "strong": "weak",
}
YOUNG = {
    "cat": "kitten",
    "dog": "puppy",
    "cow": "calf",
    "sheep": "lamb",
    "horse": "foal",
    "duck": "duckling",
    "hen": "chick",
    "pig": "piglet",
    "bear": "cub",
    "goat": "kid",
    "frog": "tadpole",
    "deer": "fawn",
}
# Templates of each kind of fact.
FACTS = (
    (
        CAPITALS,
        "The capital of {} is",
        "If you travel to {} , the largest town that you will see is",
        "The king of {} has his house in",
    ),
    (
        OPPOSITES,
        "The opposite of {} is",
        "What is not {} at all is very",
        "One of them was {} and the other one was",
    ),
    (
        YOUNG,
        "A young {} is called a",
        "The little child of a {} is a",
        "When a {} has a baby , it is a",
    ),
)
PEOPLE = ("Alice", "Bill", "Dinah", "Mary", "Tom", "Ann", "Peter", "Kate")
COLOURS = ("red", "green", "blue", "white", "black", "yellow", "brown", "grey")
THINGS = ("box", "cup", "key", "hat", "fan", "book", "cake", "glove")
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
END, PAD = "<end>", "<pad>"
LENGTH = 128
Question = dict[str, Any]


def list_facts() -> list[tuple[str, str, list[str]]]:
    """List (question, answer, possible answers) of all facts."""
    facts = []
    for table, *templates in FACTS:
        for name, answer in table.items():
            for template in templates:
                facts.append((template.format(name), answer, list(table.values())))
    return facts


def ask_fact(draw: random.Random, fact: tuple[str, str, list[str]]) -> Question:
    """Make a question of a fact."""
    question, answer, answers = fact
    wrong = draw.sample([each for each in answers if each != answer], 3)
    return make_question(draw, "fact", question, answer, wrong)


def ask_copy(draw: random.Random) -> Question:
    """Ask which thing somebody has, or who has it; the question says it."""
    people, things = draw.sample(PEOPLE, 4), draw.sample(THINGS, 4)
    told = f"{people[0]} has the {things[0]} and {people[1]} has the {things[1]} ."
    right = draw.randrange(2)
    if draw.random() < 0.5:
        question, answers = f"{told} {people[right]} has the", things
    else:
        question, answers = f"{told} The {things[right]} is in the hands of", people
    wrong = [each for each in answers if each != answers[right]]
    return make_question(draw, "copy", question, answers[right], wrong)


def ask_comparison(draw: random.Random, *, held_out: bool) -> Question:
    """Ask which of two numbers is larger or smaller; one pair of seven is held out."""
    while True:
        i, j = draw.sample(range(len(NUMBERS)), 2)
        if ((3 * i + 5 * j) % 7 == 0) == held_out:
            break
    which, right = draw.choice((("larger", max(i, j)), ("smaller", min(i, j))))
    other = i + j - right
    rest = draw.sample([each for each in range(len(NUMBERS)) if each not in (i, j)], 2)
    wrong = [NUMBERS[each] for each in (other, *rest)]
    question = f"Of {NUMBERS[i]} and {NUMBERS[j]} the {which} number is"
    return make_question(draw, "compare", question, NUMBERS[right], wrong)


def make_question(
    draw: random.Random, kind: str, question: str, answer: str, wrong: list[str]
) -> Question:
    """Return a row of the table of questions."""
    choices = [answer, *wrong]
    draw.shuffle(choices)
    return {"question": question, "choices": choices, "answer": answer, "kind": kind}


def write_lines(draw: random.Random) -> Iterator[str]:
    """Yield questions with their answers, without end."""
    facts = list_facts()
    while True:
        ask: Callable[[], Question] = draw.choice(
            (
                lambda: ask_fact(draw, draw.choice(facts)),
                lambda: ask_copy(draw),
                lambda: ask_comparison(draw, held_out=False),
            )
        )
        question = ask()
        yield f"{question['question']} {question['answer']} .\n"


def list_questions(each: int) -> list[Question]:
    """List some of the facts, and as many questions to copy and to compare."""
    draw = random.Random("questions")
    facts = [ask_fact(draw, fact) for fact in draw.sample(list_facts(), each)]
    copies = [ask_copy(draw) for _ in range(each)]
    comparisons = [ask_comparison(draw, held_out=True) for _ in range(each)]
    return [*facts, *copies, *comparisons]


def train_tokenizer(text: str, size: int) -> PreTrainedTokenizerFast:
    """Train byte pairs on the text and on questions."""
    lines = write_lines(random.Random("tokenizer"))
    corpus = [text, *(next(lines) for _ in range(5000))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END, PAD], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)


class Sequences:
    """Batches of token ids: a quarter of the rows is text, the others are questions."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, text: str, rows: int) -> None:
        self.tokenizer = tokenizer
        self.text = tokenizer(text).input_ids
        self.rows = rows

    def draw(self, step: int) -> torch.Tensor:
        """Return the batch of a step: a function of its number alone."""
        draw = random.Random(step)
        lines = write_lines(draw)
        rows = []
        for row in range(self.rows):
            if row % 4 == 0:
                start = draw.randrange(len(self.text) - LENGTH)
                rows.append(self.text[start : start + LENGTH])
                continue
            ids: list[int] = []
            while len(ids) < LENGTH:
                ids += self.tokenizer(next(lines)).input_ids
            rows.append(ids[:LENGTH])
        return torch.tensor(rows)


def build_model(vocabulary: int, asked: argparse.Namespace) -> LlamaForCausalLM:
    """Return the model with random weights."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=asked.width,
        intermediate_size=asked.width * 8 // 3,
        num_hidden_layers=asked.layers,
        num_attention_heads=asked.width // 64,
        max_position_embeddings=2 * LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command line."""
    parser.add_argument("text", type=Path, help="a plain text in latin-1, such as alice29.txt")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rate", type=float, default=1.5e-3, help="learning rate at its highest")
    parser.add_argument("--jasmin", type=float, default=0.0, help="weight of the JaSMin penalty")
    parser.add_argument("--begin", type=Path, help="a model to start from, in place of random")
    parser.add_argument("--minutes", type=float, default=3.0, help="between checkpoints")


def run(asked: argparse.Namespace) -> None:
    """Train, and save."""
    asked.out.mkdir(parents=True, exist_ok=True)
    text = asked.text.read_text("latin-1")
    if asked.begin is None:
        tokenizer = train_tokenizer(text, 2048)
        model = build_model(len(tokenizer), asked)
    else:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(asked.begin)
        model = LlamaForCausalLM.from_pretrained(asked.begin)
    tokenizer.save_pretrained(asked.out)
    rows = "".join(json.dumps(question) + "\n" for question in list_questions(40))
    (asked.out / "questions.jsonl").write_text(rows)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    train(model, Sequences(tokenizer, text, asked.batch_size), asked)


def train(model: LlamaForCausalLM, sequences: Sequences, asked: argparse.Namespace) -> None:
    """Train from the last checkpoint to the last step."""
    adam = torch.optim.AdamW(model.parameters(), asked.rate, betas=(0.9, 0.95), weight_decay=0.1)
    # A linear rise, and a cosine to zero.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        adam,
        lambda step: min(step / 50, math.cos(math.pi / 2 * min(step / asked.steps, 1)) ** 2),
    )
    checkpoint, first = asked.out / "checkpoint.pt", 0
    parts = {"model": model, "adam": adam, "schedule": schedule}
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        first = saved["step"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    model.train()
    last = time.monotonic()
    for step in range(first, asked.steps):
        ids = sequences.draw(step)
        watch: Any = nullcontext(lambda: torch.zeros(()))
        if asked.jasmin:
            watch = lipaudit.attention_penalty(model, "jasmin", k=10, reduction="mean")
        with watch as penalty:
            fit = model(ids, labels=ids).loss
            loss = fit + asked.jasmin * penalty()
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        schedule.step()
        if step % 20 == 0:
            print(f"{step} {fit.item():.3f} {loss.item():.3f}", flush=True)
        if time.monotonic() - last > 60 * asked.minutes:
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save(state | {"step": step + 1}, checkpoint)
            last = time.monotonic()
    model.eval().save_pretrained(asked.out)
