"""What is measured, with which precision, and how model and data are read: of every measure."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from lipaudit.settings.option import Settings, option
from lipaudit.settings.parsing import (
    Duration,
    Keywords,
    Numbers,
    ShardNumber,
    Size,
    Sizes,
    write_keywords,
)

MODEL, DATA, RUN = "Model", "Data", "Run"

READING = (
    "arch",
    "input_size",
    "label_column",
    "max_tokens",
    "mean",
    "model_kwargs",
    "score",
    "skip_bad",
    "std",
    "text_column",
    "tower",
)
"""Options that decide how model and data are read: a report keeps those that were given."""


class RunOptions(Settings):
    """The options that all measures share; None means not given."""

    data: str | None = option(
        None,
        "demo, random, an image folder, .npz, .safetensors, IDX, .csv, .jsonl, .txt..., "
        "hf:NAME[SPLIT].",
        panel=DATA,
        env="LIPAUDIT_DATA",
        usual="demo for demos, else random",
        values=lambda: ("demo", "demo:train", "random"),
    )
    samples: int | None = option(
        None, "How many samples to use.", "--samples", "-n", panel=DATA, ge=1
    )
    max_tokens: int | None = option(
        None,
        "Cut texts to this many tokens.",
        panel=DATA,
        usual="128; of scaling its longest length",
        kinds=("text",),
        ge=1,
    )
    text_column: str | None = option(
        None,
        "Column of a table with texts; FIRST,SECOND of pairs.",
        panel=DATA,
        kinds=("text",),
    )
    label_column: str | None = option(None, "Column with labels.", panel=DATA)
    score: Literal["sum", "mean"] | None = option(
        None,
        "Score continuations, choices or labels with a language model: log-likelihoods, their "
        "sum or mean over tokens.",
        panel=DATA,
        kinds=("text",),
        usual="sum for attack of a language model",
    )
    skip_bad: bool = option(
        False, "Leave out samples that cannot be read, and count them.", panel=DATA
    )
    arch: str | None = option(
        None, "Architecture of a weights file: timm:NAME, py:FILE:FACTORY.", panel=MODEL
    )
    model_kwargs: Keywords = option(None, "k=v,... for the model's constructor.", panel=MODEL)
    mean: Numbers = option(None, "Override the pixel mean, R,G,B.", panel=MODEL, kinds=("image",))
    std: Numbers = option(
        None, "Override the pixel deviation, R,G,B.", panel=MODEL, kinds=("image",)
    )
    input_size: Sizes = option(
        None, "Override the image size: 224, or 1,28,28.", panel=MODEL, kinds=("image",)
    )
    tower: str | None = option(
        None,
        "Which tower of a model with two: image or text.",
        panel=MODEL,
        values=lambda: ("image", "text"),
    )
    seed: int = option(0, "Seed of everything random.", panel=RUN, ge=-(2**63), lt=2**63)
    device: str | None = option(
        None,
        "auto (CUDA, else the CPU), cpu, cuda, cuda:1...",
        panel=RUN,
        usual="auto",
        values=lambda: ("auto", "cpu", "cuda"),
    )
    dtype: Literal["float32", "float64"] = option("float32", "float32 or float64.", panel=RUN)
    weights: Literal["converted", "stored"] = option(
        "converted",
        "converted to --dtype on loading, or kept as stored and lifted a layer at a time.",
        panel=RUN,
    )
    device_map: str | None = option(
        None,
        "Spread weights over GPUs, CPU and disk: auto, balanced, or a JSON of modules to devices.",
        panel=RUN,
        values=lambda: ("auto", "balanced"),
    )
    batch_size: Size = option(
        None,
        "Samples at a time; auto: fewer if memory runs out.",
        panel=RUN,
        usual="auto",
    )
    shard: ShardNumber = option(
        None, "i/n: measure the i-th of n parts of the samples; merge makes one report.", panel=RUN
    )
    time_limit: Duration = option(
        None,
        "End after so long (90s, 30min, 1h30m) with what is measured: looked at between batches.",
        panel=RUN,
    )
    resume: bool = option(False, "Go on with an interrupted run of the same command.", panel=RUN)
    offline: bool = option(False, "Never reach for the network.", panel=RUN)

    @field_validator("batch_size")
    @classmethod
    def _positive(cls, size: int | None) -> int | None:
        if size is not None and size < 1:
            raise ValueError("it must be auto or a positive number")
        return size

    def reading(self) -> dict[str, Any]:
        """Return what was given of the options that decide how the model and data are read."""
        given = {name: getattr(self, name) for name in READING}
        unset = (None, False)
        return {name: _plain(v) for name, v in given.items() if not any(v is u for u in unset)}


def _plain(value: Any) -> Any:
    """Write a parsed option the way it is typed."""
    if isinstance(value, dict):
        return write_keywords(value)
    if isinstance(value, tuple):
        return ",".join(f"{n}" if isinstance(n, int) else f"{n:g}" for n in value)
    return value
