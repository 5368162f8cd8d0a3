"""The options of every run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lipaudit.settings.option import Settings, needs, option
from lipaudit.settings.value_types import (
    Duration,
    Keywords,
    Numbers,
    Quantization,
    ShardNumber,
    Size,
    Sizes,
    write_keywords,
)

MODEL = "Model"
DATA = "Data"
RUN = "Run"
# Most options of models and all options of texts are `rare`: only --help-all shows them.
model_option = partial(option, panel=MODEL, rare=True)
data_option = partial(option, panel=DATA)
image_option = partial(model_option, kinds=("image",))
text_option = partial(data_option, kinds=("text",), rare=True)
run_option = partial(option, panel=RUN)


class RunOptions(Settings):
    """The options that all measures share; None means not given."""

    data: str | None = data_option(
        None,
        "Folder of images, .npz, .safetensors, IDX, .csv, .jsonl, .txt..., hf:NAME[SPLIT], "
        "demo, random.",
        env="LIPAUDIT_DATA",
        usual="demo for demos, else random",
        values=lambda: ("demo", "demo:train", "random"),
    )
    samples: int | None = data_option(
        None, "Number of samples.", "--samples", "-n", usual="by measure", ge=1
    )
    max_tokens: int | None = text_option(
        None,
        "Cut texts to this many tokens.",
        usual="128, or what a measure of long texts needs",
        ge=1,
    )
    text_column: str | None = text_option(
        None,
        "Table column with the texts; FIRST,SECOND for pairs of texts.",
    )
    label_column: str | None = data_option(None, "Table column with the labels.", rare=True)
    group_column: str | None = data_option(
        None,
        "Table column that groups the samples, or `classes`: figures, comparisons and rules can "
        "be read by group.",
        rare=True,
    )
    score: Literal["sum", "mean"] | None = text_option(
        None,
        "Score continuations, choices or labels with a language model: sum or mean of the "
        "log-likelihoods of their tokens.",
        usual="sum when a language model is attacked",
    )
    skip_bad: bool = data_option(
        False,
        "Leave out samples that cannot be read; a warning counts them.",
        rare=True,
    )
    arch: str | None = model_option(
        None,
        "Architecture of a weights file: timm:NAME, py:FILE:FACTORY.",
        rare=False,
    )
    model_kwargs: Keywords = model_option(None, "k=v,... for the model's constructor.")
    mean: Numbers = image_option(
        None,
        "Pixel mean R,G,B that the model was trained with, in place of the stored one.",
    )
    std: Numbers = image_option(
        None,
        "Pixel standard deviation R,G,B that the model was trained with, in place of "
        "the stored one.",
    )
    input_size: Sizes = image_option(
        None,
        "Image size, in place of the model's own: 224, or 1,28,28.",
    )
    preprocess: Literal["model", "resize", "none"] | None = image_option(
        None,
        "How images get that size: by the model's own resizing (model), scaled and cropped in "
        "the middle (resize), or not at all (none).",
        usual="model, but images of that size stay as they are",
    )
    class_names: str | None = model_option(
        None,
        "File of class names, one per line, in the order of the model's outputs; in place of its "
        "own names.",
    )
    tower: str | None = model_option(
        None,
        "Tower to measure, for a model with two: image or text.",
        values=lambda: ("image", "text"),
    )
    quantize: Quantization = model_option(
        None,
        "Round the weights of linear layers on loading: int8, int4, or with groups of inputs "
        "int4:32.",
        values=lambda: ("int8", "int4", "int4:32"),
    )
    autocast: Literal["bfloat16", "float16"] | None = model_option(
        None,
        "Judge predictions as torch.autocast computes them: bfloat16 or float16. Norms and bounds "
        "stay in --dtype.",
    )
    classes: str | None = model_option(
        None,
        "File of class names, one per line: CLIP, SigLIP and other image-text models become a "
        "zero-shot classifier. For training, the number of classes of the data: if the model has "
        "another number, its classifier is replaced by a new one.",
    )
    prompt: str | None = model_option(
        None,
        "Text that --classes compares with images, with {} for the class name; the mean of "
        "several, separated by |.",
        usual="a photo of a {}",
        need=needs("classes"),
    )
    # torch takes seeds of 64 bits.
    seed: int = run_option(0, "Random seed.", ge=-(2**63), lt=2**63, rare=True)
    device: str | None = run_option(
        None,
        "Device: auto (CUDA, else CPU), cpu, cuda, cuda:1...",
        usual="auto",
        values=lambda: ("auto", "cpu", "cuda"),
    )
    dtype: Literal["float32", "float64"] = run_option(
        "float32",
        "Precision of the computation: float32 or float64.",
        rare=True,
    )
    weights: Literal["converted", "stored"] = run_option(
        "converted",
        "converted (to --dtype on loading) or stored (kept as stored, converted one layer at "
        "a time; saves memory).",
        rare=True,
    )
    device_map: str | None = run_option(
        None,
        "Distribute weights over GPUs, CPU and disk: auto, balanced, or a JSON file that "
        "maps modules to devices.",
        values=lambda: ("auto", "balanced"),
        rare=True,
    )
    batch_size: Size = run_option(
        None, "Batch size; auto: smaller if memory runs out.", usual="auto"
    )
    shard: ShardNumber = run_option(
        None,
        "i/n: measure only part i of n of the samples, and store the results in --parts.",
        rare=True,
    )
    parts: Path | None = run_option(
        None,
        "Keep finished batches in this folder. The same command continues there; `lipaudit merge` "
        "makes the report of all shards.",
        metavar="FOLDER",
        rare=True,
    )
    time_limit: Duration = run_option(
        None,
        "Stop after this time (90s, 30min, 1h30m) and report the finished batches.",
        rare=True,
    )
    resume: bool = run_option(
        False, "Continue an interrupted run of the same command after its last whole batch."
    )
    offline: bool = run_option(False, "Do not use the network.", rare=True)

    @property
    def continues(self) -> bool:
        """Return whether the run uses batches that an earlier run finished."""
        return self.resume or self.parts is not None

    def reading(self) -> dict[str, Any]:
        """Return the given options that decide how model and data are read, for the report.

        The values are by name, written as on the command line.
        """
        # --data and --samples are left out: a report stores them in other fields.
        options = self.options()
        given = {}
        for name in sorted(options.keys() - {"data", "samples"}):
            value = getattr(self, name)
            # `is not False` in place of `!= False`: 0 is a given value, and 0 == False.
            is_given = value is not None and value is not False
            if is_given and options[name].panel in (MODEL, DATA):
                given[name] = _spell_value(value)
        return given


def spell_options(given: Mapping[str, Any], panel: str = MODEL) -> list[str]:
    """Return the given options of a panel (a group in the help) as words of a command line.

    Args:
        given: values by name, as `RunOptions.reading` returns them.
        panel: MODEL or DATA.
    """
    words = []
    for name, known in RunOptions.options().items():
        if known.panel != panel or name not in given:
            continue
        words.append(known.flags[0])
        if given[name] is not True:  # a switch has no value
            words.append(str(given[name]))
    return words


def _spell_value(value: Any) -> Any:
    """Return the value of an option as a person types it."""
    if isinstance(value, dict):
        return write_keywords(value)
    if isinstance(value, tuple):
        return ",".join(map(_spell_number, value))
    return value


def _spell_number(value: Any) -> str:
    """Return a number in few digits, such as 0.5 or 1, but with all that it needs.

    The gate measures with these values again, and compares them with those of older baselines.
    """
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return str(value)
