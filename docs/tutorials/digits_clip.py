"""Train a small CLIP on captions of digits: writes the folders clip and digits, and names.txt."""
# ruff: noqa: TID253

from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel, CLIPConfig, CLIPImageProcessor, PreTrainedTokenizerFast

names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
words = ["<unk>", "<end>", "a", "the", "photo", "drawing", "digit", "of", "number", *names]
spell = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
spell.pre_tokenizer = pre_tokenizers.Whitespace()
spell.post_processor = processors.TemplateProcessing("$A <end>", special_tokens=[("<end>", 1)])
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=spell,
    unk_token="<unk>",
    eos_token="<end>",
    pad_token="<end>",
    model_input_names=["input_ids", "attention_mask"],
)

torch.manual_seed(0)
torch.set_num_threads(1)
size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
size |= {"num_attention_heads": 4, "projection_dim": 16}
text = {"vocab_size": len(words), "max_position_embeddings": 16, "eos_token_id": 1}
text |= {"bos_token_id": 0, "pad_token_id": 1}
image = {"image_size": 8, "patch_size": 2, "num_channels": 1}
config = CLIPConfig(text_config=size | text, vision_config=size | image, projection_dim=16)
# In double precision, so that no rounding grows into another model.
model = AutoModel.from_config(config, dtype=torch.float64)

with np.load(files("lipaudit.data") / "assets" / "digits_train.npz") as data:
    x, y = torch.tensor(data["x"] / 255), torch.tensor(data["y"]).long()
captions = ["a photo of a {}", "a drawing of the digit {}", "the number {}"]
adam = torch.optim.AdamW(model.parameters(), 3e-3)
for step in range(300):
    rows = torch.randint(len(x), (64,))
    said = tokenizer([captions[step % 3].format(name) for name in names], return_tensors="pt")
    scores = model(pixel_values=2 * x[rows] - 1, **said).logits_per_image
    loss = torch.nn.functional.cross_entropy(scores, y[rows])
    adam.zero_grad()
    loss.backward()
    adam.step()
model.float().save_pretrained("clip")
tokenizer.save_pretrained("clip")
CLIPImageProcessor(
    do_resize=False, do_center_crop=False, do_convert_rgb=False, image_mean=[0.5], image_std=[0.5]
).save_pretrained("clip")

Path("names.txt").write_text("\n".join(names) + "\n")
with np.load(files("lipaudit.data") / "assets" / "digits_test.npz") as data:
    for i in range(64):
        folder = Path("digits", names[int(data["y"][i])])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(data["x"][i][0]).save(folder / f"{i}.png")
