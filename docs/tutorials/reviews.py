"""Train a small BERT to tell praise from blame: writes the folder reviews and test.jsonl."""
# ruff: noqa: TID253

import itertools
import json
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

words = {
    "adverb": ["very", "quite", "really", "hardly"],
    "good": ["good", "fine", "moving", "clever"],
    "bad": ["bad", "dull", "clumsy", "hollow"],
    "noun": ["film", "book", "play", "song"],
}
grid = itertools.product(
    words["noun"], words["adverb"], words["good"] + words["bad"], ["was", "is"]
)
table = [
    {
        "text": f"i think that this {noun} {verb} {adverb} {adjective}",
        "label": int((adjective in words["good"]) != (adverb == "hardly")),
    }
    for noun, adverb, adjective, verb in grid
]
shuffled = [table[i] for i in torch.randperm(256, generator=torch.Generator().manual_seed(0))]
train, test = shuffled[:192], shuffled[192:]
Path("test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in test))

special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
seen = sorted({word for row in table for word in row["text"].split()})
Path("vocab.txt").write_text("\n".join(special + seen))
tokenizer = BertTokenizerFast("vocab.txt")

torch.manual_seed(0)
torch.set_num_threads(1)
config = BertConfig(
    vocab_size=len(special + seen),
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=16,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    id2label={0: "blame", 1: "praise"},
    label2id={"blame": 0, "praise": 1},
)
model = BertForSequenceClassification(config).double().train()
adam = torch.optim.AdamW(model.parameters(), 3e-3)
inputs = tokenizer([row["text"] for row in train], return_tensors="pt")
labels = torch.tensor([row["label"] for row in train])
for _ in range(150):
    loss = model(**inputs, labels=labels).loss
    adam.zero_grad()
    loss.backward()
    adam.step()
model.float().save_pretrained("reviews")
tokenizer.save_pretrained("reviews")
