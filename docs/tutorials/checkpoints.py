"""Write two checkpoints of model.py, which `lipaudit init py` writes, as a training would."""
# ruff: noqa: TID253

import runpy
from pathlib import Path

import torch

torch.manual_seed(0)
model = runpy.run_path("model.py")["model"]().module
Path("weights").mkdir()
for step in (100, 200):
    torch.save(model.state_dict(), f"weights/step_{step}.pt")
    model.head.weight.data *= 2
