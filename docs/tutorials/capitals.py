"""Train a small GPT-2 on six capitals: writes the folder capitals, texts and questions."""
# ruff: noqa: TID253

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

capitals = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Norway": "Oslo",
    "Egypt": "Cairo",
    "Japan": "Tokyo",
}
texts = [f"the capital of {country} is {city}" for country, city in capitals.items()]
words = ["<unk>", "<end>", *sorted({word for text in texts for word in text.split()})]
tokenizer = Tokenizer(
    models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
)
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>"
)

torch.manual_seed(0)
torch.set_num_threads(1)
config = GPT2Config(
    vocab_size=len(words),
    n_positions=16,
    n_embd=32,
    n_layer=2,
    n_head=4,
    bos_token_id=1,
    eos_token_id=1,
)
model = GPT2LMHeadModel(config).double().eval()
adam = torch.optim.AdamW(model.parameters(), 3e-3)
ids = tokenizer(texts, return_tensors="pt").input_ids
for _ in range(150):
    loss = model(ids, labels=ids).loss
    adam.zero_grad()
    loss.backward()
    adam.step()
model.float().save_pretrained("capitals")
tokenizer.save_pretrained("capitals")

Path("texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
cities = list(capitals.values())
rows = [
    {"question": f"the capital of {country} is", "choices": cities, "answer": city}
    for country, city in capitals.items()
]
Path("questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
