"""Train the model of digits.py for a few seconds; write digits.pt.

float64 and a large eps give the same figures on every machine.
"""
# ruff: noqa: TID253

from importlib.resources import files

import numpy as np
import torch
from digits import build

torch.set_num_threads(1)
with np.load(files("lipaudit.data") / "assets" / "digits_train.npz") as data:
    x, y = torch.tensor(data["x"]).double() / 255, torch.tensor(data["y"]).long()
model = build().double().train()
adam = torch.optim.AdamW(model.parameters(), 3e-3, eps=1e-3)
for step in range(300):
    index = torch.randint(len(x), (64,), generator=torch.Generator().manual_seed(step))
    loss = torch.nn.functional.cross_entropy(model(x[index] * 2 - 1), y[index])
    adam.zero_grad()
    loss.backward()
    adam.step()
torch.save(model.float().state_dict(), "digits.pt")
