"""The MODEL argument: find its source, load the model, and check it as a `Net`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lipaudit.data.hub import hub_access
from lipaudit.data.image_files import Resizing
from lipaudit.errors import (
    InputError,
    UsageError,
    explain_failure,
    find_unmet_requirement,
    join_few,
    neighbours,
    similar,
)
from lipaudit.models.net import OWN, UNUSED_NAMES, Call, Net, PerChannel, Read
from lipaudit.models.net import LoadOptions as LoadOptions
from lipaudit.models.net import ModelSpec as ModelSpec
from lipaudit.models.outputs import (
    Probe,
    convert_outputs,
    find_main_output,
    note_form,
    probe_model,
)
from lipaudit.models.precision import seed_device
from lipaudit.models.sources import FORMS, adapters, huggingface, own, similar_models, timm
from lipaudit.models.sources.offload import find_device, place_weights
from lipaudit.models.sources.quantised import dequantise
from lipaudit.models.sources.rounding import round_weights
from lipaudit.models.sources.timm import RESIZING, load_demo
from lipaudit.models.sources.weight_files import (
    SUFFIXES,
    advise_on_file,
    hash_weights,
    holds_weights,
    read_json,
    read_weights,
    require_fetched,
)
from lipaudit.tables import Note

# Seed of random weights, so that they are always the same.
SEED = 0
# Sources of models that read an option, for each option that not all of them read.
READERS = {
    "arch": ("file",),
    "model_kwargs": ("timm", "file", "hf", "py"),
    "tower": ("hf", "py"),
    "classes": ("timm", "file", "hf"),
    "weights": ("hf", "py"),
    "class_names": ("hf",),
}
FLAGS = {"class_names": "classes"}


def load_net(name: str, options: LoadOptions | None = None) -> Net:
    """Load the model that a MODEL argument names.

    Forms of a MODEL: `demo[:NAME]`; `timm:NAME`; `hf:ORG/NAME[@REVISION]` (`hf-hub:` is the same);
    a directory with config.json in the format of timm or transformers; a file of weights with
    `arch`; `py:FILE_OR_MODULE:FACTORY`. Only `py:` runs code. Missing and surplus tensors are
    errors. Random weights need `model_kwargs={"pretrained": False}` and give a warning.

    The module is returned in eval mode with frozen parameters. The global random state does not
    change.

    Raises:
        UsageError: the options do not fit (a file of weights without `arch`).
        InputError: the model is missing, damaged or not supported.
    """
    # Message and advice on a package that is missing or too old.
    if unmet := find_unmet_requirement():
        raise InputError(*unmet)
    options = options or LoadOptions()
    # Random weights are the same each time; the caller's random state is restored.
    with seed_device(SEED, find_device(options.device)), hub_access(offline=options.offline):
        source, spec = _load_spec(name, options)
        _require_known_options(name, source, options)
        return assemble(spec, options, name=name, source=source)


def _require_known_options(name: str, source: str, options: LoadOptions) -> None:
    """Refuse an option that models of this source do not read: it would have no effect.

    `READERS` lists, for an option such as "tower", the sources that read it, such as "hf".
    """
    for option, readers in READERS.items():
        is_given = getattr(options, option) != getattr(LoadOptions(), option)
        if is_given and source not in readers:
            flag = FLAGS.get(option, option.replace("_", "-"))
            raise UsageError(
                f"{name} does not take --{flag}",
                "Leave it out. In a gate it comes from the baseline: check that this is of the "
                "same model.",
            )


def _load_spec(model: str, options: LoadOptions) -> tuple[str, ModelSpec]:
    """Return the source of a MODEL argument, and the model with its description."""
    prefix, colon, name = model.partition(":")
    form = prefix if colon or model == "demo" else ""  # a path has no prefix
    if form == "demo":
        return form, load_demo(name or "standard")
    if form == "timm":
        return form, timm.load_pretrained(name, options)
    if form == "py":
        return form, own.load_factory(name, options)
    if form in ("hf", "hf-hub"):
        folder, commit = huggingface.fetch_repository(name, options)
        source, spec = _load_directory(folder, options)
        return source, replace(spec, commit=commit)
    path = Path(model)
    if model and path.is_dir():
        return _load_directory(path, options)
    if path.is_file():
        return "file", _load_file(path, options)
    raise InputError(
        f"no model {model!r}: there is no such file or directory",
        f"{_suggest_models(model)}MODEL is one of: {FORMS}.",
    )


def _suggest_models(model: str) -> str:
    """Return a question that names models of a similar name, or nothing: "Did you mean ...? "."""
    path = Path(model)
    suggestions = []
    if ".py:" in model:
        suggestions.append(f"py:{model}")
    suggestions += similar(model, neighbours(path))
    suggestions += similar_models(model)
    if path.suffix not in SUFFIXES and re.fullmatch(r"\w[\w.-]*[/-][\w.-]+", model):
        suggestions.append(f"hf:{model}")  # ORG/NAME
    if not suggestions:
        return ""
    return f"Did you mean {' or '.join(suggestions[:3])}? "


def _load_file(path: Path, options: LoadOptions) -> ModelSpec:
    """Load a file of weights into the architecture of --arch."""
    if not holds_weights(path):
        raise InputError(f"{path} is not a file of weights for PyTorch", advise_on_file(path))
    arch = options.arch or ""
    if not arch:
        read_weights(path)  # a file without weights is refused first: --arch would not help
        advice = (
            "Add --arch timm:NAME (and --model-kwargs where it differs), or --arch "
            "py:FILE:FACTORY with your own factory."
        )
        if (path.parent / "config.json").is_file():
            advice = f"Give its folder {path.parent}, which has a config.json."
        raise UsageError(f"{path} is a file of weights, and the architecture is unknown", advice)
    if arch.startswith("py:"):
        return own.load_file(path, arch, options)
    return timm.load_file(path, arch, options)


def _load_directory(path: Path, options: LoadOptions) -> tuple[str, ModelSpec]:
    """Load a directory in the format of timm, transformers or peft; return its source, too.

    The keys of config.json distinguish timm and transformers; peft has another file.
    """
    for entry in path.iterdir():
        if entry.is_file():
            require_fetched(entry)  # refuses pointers of git-lfs
    if (path / adapters.CONFIG).is_file():
        return adapters.load_adapter(path, options, _load_spec)
    config_file = path / "config.json"
    config = {}
    if config_file.is_file():
        config = read_json(config_file)
    if isinstance(config, dict):
        if "model_type" in config:
            return "hf", huggingface.load_directory(path, options)
        if "architecture" in config or "pretrained_cfg" in config:
            return "timm", timm.load_directory(path, options)
    raise InputError(
        f"{path} has no config.json that names a timm architecture or a transformers model_type",
        "Give its weights file with --arch timm:NAME or py:FILE:FACTORY, or add the config.json.",
    )


def assemble(spec: ModelSpec, options: LoadOptions, *, name: str, source: str) -> Net:
    """Make a model ready to be measured.

    Put the module in eval mode, freeze its parameters, and move it to the requested device and
    dtype. Run it on a blank sample, so a model that cannot run is refused here.

    Args:
        spec: the model, with its description.
        options: the user's options.
        name: the MODEL argument, for the report.
        source: the source of the model, such as "timm".

    Raises:
        InputError: weights are not finite, or the model cannot run on a blank sample.
        UsageError: a normalisation that does not fit the images, or an unknown device.
    """
    spec, digest = _prepare_module(spec, options, name)
    spec, call = _add_preprocessing(spec, options)
    call, places, notes_on_places = place_weights(spec.module, call, options)
    read = _read_rows(spec.read or find_main_output)
    probe = probe_model(spec, call, read)  # runs the model on a blank sample
    # All measures take logits, so probabilities are turned into logits.
    call, read, scorer = convert_outputs(probe.form, call, read, spec.next_token)
    spec = replace(
        spec,
        call=call,
        read=read,
        entry=probe.entry,  # the embedding layer
        notes=(*spec.notes, *notes_on_places, *probe.notes, *_note_facts(spec, probe, options)),
        next_token=scorer,
        vocabulary=spec.vocabulary or getattr(probe.entry, "num_embeddings", None),
    )
    classes = None  # None: the output is features
    if spec.classifier and probe.output.ndim == 2:
        classes = probe.output.shape[1]
    if options.labels:
        # The names given replace those of the configuration: no warning about these.
        notes = tuple(note for note in spec.notes if note.code != UNUSED_NAMES)
        spec = replace(spec, labels=options.labels, aliases={}, notes=notes)
    _require_labels_fit(spec, options, classes)
    if classes == 1:  # a regression
        classes = None
    # Copy field by field: a factory may return a subclass of ModelSpec with further fields.
    description = {each.name: getattr(spec, each.name) for each in fields(ModelSpec)}
    return Net(
        **description,
        name=name,
        source=source,
        parameters=sum(p.numel() for p in spec.module.parameters()),
        weights_sha256=digest,
        classes=classes,
        device_map=places,
        form=probe.form,
        undefined=probe.undefined,  # not finite on the blank sample: the first sample decides
        tokens_first=probe.tokens_first,  # `entry` returns (tokens, batch, width)
    )


def _prepare_module(spec: ModelSpec, options: LoadOptions, name: str) -> tuple[ModelSpec, str]:
    """Put a module in eval mode, freeze it, and dequantise or round its weights if necessary.

    Args:
        spec: the model, with its description.
        options: the user's options.
        name: the model's name in errors.

    Returns:
        The description with the original module, and the hash of the weights.

    Raises:
        InputError, UsageError: as in `_prepare_weights`.
    """
    module = own.unwrap(spec.module)
    quantised, digest = _prepare_weights(module, spec.quantised, options, name)
    # A program of torch.export has no modes.
    with explain_failure(f"{name} cannot be put in eval mode", "Give the original module."):
        module.eval().requires_grad_(False)
    # Only the setting "eager" multiplies mixtures of experts in float64.
    if options.dtype == "float64":
        for config, _ in huggingface.list_expert_settings(module):
            setattr(config, huggingface.EXPERTS, "eager")
    spec = replace(
        spec,
        module=module,
        quantised=quantised,
        architecture=spec.architecture or type(module).__name__,
    )
    return spec, digest


def _read_rows(read: Read) -> Read:
    """Return a function that reads an output as a row per sample: (batch,) becomes (batch, 1)."""

    def read_rows(result: Any) -> Tensor:
        """Return the output tensor of a result, (batch, ...), of at least two axes."""
        output = read(result)
        if output.ndim == 1:
            return output[:, None]
        return output

    return read_rows


def _note_facts(spec: ModelSpec, probe: Probe, options: LoadOptions) -> Iterator[Note]:
    """Yield the notes on the form of the output, quantised weights and the commit of a model."""
    yield from note_form(probe.form)
    if spec.quantised:
        yield Note.info(
            "quantised",
            f"{spec.quantised}. The results are those of this function: the rounded weights in "
            f"{options.dtype} arithmetic, activations not rounded",
        )
    if spec.commit is not None:
        yield spec.commit.note


def _prepare_weights(
    module: nn.Module, quantised: str, options: LoadOptions, name: str
) -> tuple[str, str]:
    """Dequantise quantised weights, or round weights for --quantize, in place; then hash them.

    Args:
        module: the model.
        quantised: a description if loading has dequantised the weights already; else empty.
        options: the user's options.
        name: the model's name in errors.

    Returns:
        A description of the quantisation for the report, empty without one, and the hash.

    Raises:
        InputError: weights are not finite, or cannot be dequantised or rounded.
        UsageError: --quantize does not apply.
    """
    # `later`: quantised weights are dequantised each time a layer reads them, to save memory.
    quantised = quantised or dequantise(
        module, later=options.weights == "stored" and options.device_map is None
    )
    # Hash the weights before they are converted to the dtype of the run: the hash identifies the
    # checkpoint.
    digest = hash_weights(module, name)
    if not options.quantize:
        return quantised, digest
    flag = f"--quantize {options.quantize}"
    if options.weights == "stored":
        raise UsageError(
            f"{flag} rounds weights on loading, and --weights stored keeps them",
            "Leave one of them out.",
        )
    if quantised:
        raise UsageError(
            f"{flag} rounds float weights, and {name} is quantised ({quantised})",
            "Leave --quantize out.",
        )
    quantised = round_weights(module, options.quantize)
    return quantised, hash_weights(module, name)  # the hash of the rounded weights


def _require_labels_fit(spec: ModelSpec, options: LoadOptions, classes: int | None) -> None:
    """Refuse names of classes if the model has another number of classes, or none."""
    if options.labels and classes is None:
        raise UsageError(
            "--class-names names classes, and the output of this model has none", "Leave it out."
        )
    if spec.labels is not None and classes not in (None, len(spec.labels)):
        raise InputError(
            f"{len(spec.labels)} labels ({join_few(spec.labels)}) for {classes} outputs",
            "Check num_classes, --class-names and the labels of the model's configuration. Two "
            "classes need two logits: torch.cat([0 * z, z], 1).",
        )


def _add_preprocessing(spec: ModelSpec, options: LoadOptions) -> tuple[ModelSpec, Call]:
    """Return the completed description, and a function that runs a model on raw samples.

    The function normalises images first: (samples, mask) -> result. The description gets the range
    of pixels, the resizing and facts for the report.
    """
    _require_images(spec, options)
    module = spec.module
    prepare: Callable[[Tensor], Tensor] = torch.clone  # a copy: the module may write into it
    if spec.kind == "image":
        channels = spec.input_shape[0]
        mean = _expand_channels("mean", options.mean or spec.mean or (0.0,), channels)
        std = _expand_channels("std", options.std or spec.std or (1.0,), channels)
        facts = {"mean": list(mean), "std": list(std), "size": list(spec.input_shape)}
        spec = _choose_resizing(spec, options)
        spec = replace(spec, box=spec.box or (0.0, 1.0), preprocess={**spec.preprocess, **facts})
        prepare = _make_normaliser(mean, std)

    def call(x: Tensor, mask: Tensor | None) -> Any:
        """Run the model on samples; images are normalised first."""
        if spec.kind != "text":
            x = prepare(x)
        if spec.call is not None:
            return spec.call(x, mask)
        # Many modules take no mask, and a mask that is True everywhere is not needed.
        if mask is None or mask.all():
            return module(x)
        return module(x, mask)

    return spec, call


def _make_normaliser(mean: PerChannel, std: PerChannel) -> Callable[[Tensor], Tensor]:
    """Return the function x -> (x - mean) / std of images, (batch, channels, height, width)."""

    @cache  # without a cache, each call would copy the values to the GPU, and wait for the copy
    def make_constant(values: PerChannel, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return one value per channel, (channels, 1, 1)."""
        with torch.inference_mode(False):  # the tensor may become part of a graph later
            return torch.tensor(values, device=device, dtype=dtype)[:, None, None]

    def normalise(x: Tensor) -> Tensor:
        centred = x - make_constant(mean, x.device, x.dtype)
        return centred / make_constant(std, x.device, x.dtype)

    return normalise


def _require_images(spec: ModelSpec, options: LoadOptions) -> None:
    """Refuse options for images if the model takes something else."""
    image_options = {
        "--mean": options.mean,
        "--std": options.std,
        "--input-size": options.input_size,
        "--preprocess": options.preprocess,
    }
    given_options = [name for name, value in image_options.items() if value is not None]
    if given_options and spec.kind != "image":
        raise UsageError(
            f"{join_few(given_options)} was given, but the model takes {spec.kind}",
            "Leave it out.",
        )


def _expand_channels(name: str, values: PerChannel, channels: int) -> PerChannel:
    """Return the mean or std of every channel; a single value holds for all channels.

    Raises:
        UsageError: another number of values, or a std that is not positive.
    """
    if len(values) not in (1, channels) or (name == "std" and min(values) <= 0):
        raise UsageError(
            f"{name} {values} does not fit {channels} channels, or is not positive",
            f"Give --{name} one value, or {channels} separated by commas. Pixels are divided by "
            "std, which must be positive.",
        )
    if len(values) == 1:
        return tuple(values) * channels
    return tuple(values)


def _choose_resizing(spec: ModelSpec, options: LoadOptions) -> ModelSpec:
    """Return the description with `prepare`, the function that turns pictures into pixels.

    --preprocess chooses what happens to a picture:
    - None: pictures of another size than the model takes go through the model's own steps.
    - "model": pictures of every size go through the model's own steps.
    - "resize": pictures of another size are scaled and cropped, without the model's own steps.
    - "none": pictures of another size are refused.

    Raises:
        UsageError: the model's own steps are requested, and it has none.
    """
    choice = options.preprocess
    prepare = spec.prepare or Resizing(spec.input_shape)
    if choice is None:
        return replace(spec, prepare=prepare)
    if choice == "model":
        # The steps, by the names that the report shows. `prepare` of a user's factory is one step.
        if isinstance(prepare, Resizing):
            steps = prepare.steps
        else:
            steps = {"prepare": prepare}
        if not steps:
            raise UsageError(
                "--preprocess model: this model has no resizing of its own for its size",
                "Leave it out, or give --preprocess resize.",
            )
        return replace(spec, prepare=Resizing(spec.input_shape, steps, choice))
    # resize or none. The report must not describe the model's own resizing, which is not used.
    facts = {name: fact for name, fact in spec.preprocess.items() if name not in RESIZING}
    return replace(spec, prepare=Resizing(spec.input_shape, choice=choice), preprocess=facts)


@contextmanager
def borrow(
    model: nn.Module | ModelSpec, options: LoadOptions, input_shape: Sequence[int] | None = None
) -> Iterator[Net]:
    """Make a module ready to be measured inside the block, and restore it afterwards.

    Restored are flags (training, requires_grad), dtype, device, and every tensor with its own
    storage. A copy of the module would fail: functions of a `ModelSpec` may refer to the module
    itself, and tensors that a forward pass left on the module cannot be copied.

    Args:
        model: a module, or a `ModelSpec`, which also describes the input.
        options: device (auto keeps the module's device), dtype and normalisation of images.
        input_shape: shape of one sample, if the module does not declare it: (channels, height,
            width), (tokens, width), or (samples,) of a waveform.

    Raises:
        UsageError: the input of the module is unknown.
        InputError: the object is no module, or cannot run on a blank sample.
    """
    name = type(own.unwrap(model)).__name__
    if options.device_map is not None:
        raise UsageError(
            "device_map works only for models that are loaded by name, not for a module",
            "Leave device_map out: a module is measured on its own device.",
        )
    if not isinstance(model, nn.Module | ModelSpec):
        raise InputError(
            f"{name} is not a model",
            "Give the name of a checkpoint, an nn.Module or a lipaudit.ModelSpec.",
        )
    if options.class_names:
        raise UsageError(
            "classes works only for models that are loaded by name, not for a module",
            "Leave classes out: it needs the tokenizer in the folder of a model.",
        )
    if input_shape is None or isinstance(model, ModelSpec):
        spec = own.describe(model, options)
    else:
        spec = _describe_by_shape(model, input_shape)
    name = type(spec.module).__name__
    if any(not is_lazy(p) and p.is_inference() for p in spec.module.parameters()):
        raise InputError(
            f"the weights of {name} were made in torch.inference_mode(), without gradients",
            "Make the module outside of it.",
        )
    if options.device == "auto":
        first = next(spec.module.parameters(), torch.empty(0))
        options = replace(options, device=str(first.device))
    with restore(spec.module):
        yield assemble(spec, options, name=name, source=OWN)


def _describe_by_shape(model: nn.Module, input_shape: Sequence[int]) -> ModelSpec:
    """Describe a module by the shape of one sample: its number of axes says what a sample is.

    Raises:
        UsageError: this is not the shape of a sample.
    """
    axes = 0  # of an input that is no shape, such as a number: refused below
    if isinstance(input_shape, Sequence):
        axes = len(input_shape)
    if axes not in own.KINDS:
        raise UsageError(
            f"input_shape {input_shape} is not the shape of a sample",
            "Give (channels, height, width), (tokens, width), (samples,), or the four axes of a "
            "volume or video.",
        )
    return ModelSpec(own.unwrap(model), tuple(input_shape), kind=own.KINDS[axes])


@contextmanager
def freeze_net(net: Net) -> Iterator[Net]:
    """Make a model in training ready to be measured inside the block, with its current weights.

    Flags, weights and gradients are restored when the block ends. The block gets a copy of the
    `Net`, without what was cached for earlier weights.
    """
    with restore(net.module):
        net.module.eval().requires_grad_(False)
        yield replace(net, weights_sha256=hash_weights(net.module, net.name))


@contextmanager
def restore(module: nn.Module) -> Iterator[None]:
    """Undo, when the block ends, all changes that `assemble` makes to a module inside the block.

    Restored are train and eval modes, tables of tensors and submodules, values of tensors with
    their dtype and device, `requires_grad`, gradients, and settings of experts. `assemble` adds no
    entries to tables and makes no gradients, so nothing has to be removed.
    """
    modes = {part: part.training for part in module.modules()}
    # The tables of each module, with copies of their entries: `convert_on_read` and `dequantise`
    # replace whole tables, or entries of a table.
    tables = []
    for part in modes:
        for name in ("_parameters", "_buffers", "_modules"):
            table = getattr(part, name)
            tables.append((part, name, table, dict(table.items())))
    # `module.to(...)` keeps the tensor objects and their gradients, and gives them new data.
    values = [(t, t.data, t.requires_grad) for t in (*module.parameters(), *module.buffers())]
    gradients = [(p, p.grad, p.grad.data) for p in module.parameters() if p.grad is not None]
    experts = huggingface.list_expert_settings(module)
    try:
        yield
    finally:
        for config, choice in experts:
            setattr(config, huggingface.EXPERTS, choice)
        for part, name, table, entries in tables:
            vars(part)[name] = table
            if name != "_modules":  # entries of a table of submodules were not replaced
                for key, t in entries.items():
                    table[key] = t
        for part, mode in modes.items():
            part.training = mode
        for t, value, requires_grad in values:
            t.data = value
            if t.requires_grad != requires_grad:  # setting a lazy parameter raises an error
                t.requires_grad_(requires_grad)
        for p, gradient, value in gradients:
            gradient.data = value
            p.grad = gradient
