"""Fine-tuning with a penalty on attention, or against attacks; and watching a training."""

from lipaudit.tables.plugins import Wing
from lipaudit.wings.training.recipe import Recipe

WING = Wing(
    commands={
        "watch": ("Measure a checkpoint", "lipaudit.wings.training.commands:watch"),
        "train": ("Improve a checkpoint", "lipaudit.wings.training.commands:train"),
    },
    options={"train": Recipe},
    public={
        "attention_penalty": "lipaudit.wings.training.penalty:attention_penalty",
        "monitor": "lipaudit.wings.training.monitor",
        "watch": "lipaudit.wings.training.watching:watch",
    },
)
