"""Models of transformers: repositories of the Hub, directories and their weights."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from packaging.version import Version
from torch import nn

from lipaudit.data.hub import Commit, Repository, explain_refusals, find_commit, restore_hub_bars
from lipaudit.errors import InputError, explain_failure, join_few
from lipaudit.models.net import RANDOM, LoadOptions, ModelSpec, new_classifier
from lipaudit.models.sources.imports import import_library
from lipaudit.models.sources.quantised import plan_dequantising, transpose_codes
from lipaudit.models.sources.text_models import find_text_config
from lipaudit.models.sources.transformer_inputs import describe_transformers
from lipaudit.models.sources.transformer_outputs import (
    CLASSIFIERS,
    HEADS,
    has_head,
)
from lipaudit.models.sources.weight_files import (
    describe_misfit,
    list_weight_files,
    note_half_precision,
    read_json,
    refuse_codes,
)
from lipaudit.tables import Note, Notes

SETTINGS = (".json", ".txt", ".model")
POOLING = "1_Pooling/config.json"
# The auto class of a model, by the ending of its class name; `AutoModel` gives features.
LOADERS = HEADS | {"EncoderModel": "AutoModelForTextEncoding"}
SEQUENCES = CLASSIFIERS["ForSequenceClassification"]
# Parts of the names of weights and settings of transformers.
WINDOWS = "relative_position_index"
EXPERTS = "_experts_implementation"
POOLER = "pooler"
MASK = "mask_token"
# Number formats of safetensors.
HALF_NAMES = {"F16": torch.float16, "BF16": torch.bfloat16}


def fetch_repository(reference: str, options: LoadOptions) -> tuple[Path, Commit]:
    """Return the directory of a repository of the Hub, ORG/NAME[@REVISION], and the commit.

    Download only settings, tokenizer and one set of weights: no code, no other formats.

    Raises:
        InputError: the repository cannot be downloaded, or has no weights.
    """
    from huggingface_hub import snapshot_download

    name, _, revision = reference.partition("@")
    repository = Repository(name, "model", revision or "main")
    commit = find_commit(repository, offline=options.offline)
    top = [file for file in commit.files if "/" not in file]
    weights = []
    if options.pretrained:
        weights = list_weight_files(top)
    if not weights and "adapter_config.json" in top:
        # Of two files, take the last by name: .safetensors comes after .bin.
        weights = sorted(file for file in top if file.startswith("adapter_model."))[-1:]
    if options.pretrained and not weights:
        text = f"{name} has no weights for PyTorch (it has: {join_few(top) or 'no files'})"
        if commit.no_answer:
            text += f", and {commit.no_answer}"
        raise InputError(
            text,
            "Name a repository with model.safetensors or pytorch_model.bin. If the local cache "
            "is incomplete, run it with a connection.",
        )
    settings = [file for file in top if file.endswith(SETTINGS)]
    with explain_refusals(repository):
        path = snapshot_download(
            name,
            revision=commit.sha,
            allow_patterns=[*settings, POOLING, *weights],
            local_files_only=bool(commit.no_answer),  # the Hub was not asked or did not answer
        )
    commit.record_revision()  # so that the cache knows which commit the revision was
    return Path(path), commit


def load_directory(path: Path, options: LoadOptions) -> ModelSpec:
    """Load a directory in the format of transformers; missing or surplus weights are an error.

    Raises:
        InputError: the model is not supported or incomplete; the message names the tensors.
    """
    import_library("transformers.modeling_utils")  # with this, most of what models import
    with silence_transformers():
        config = _read_config(path, options.building)
        # If another number of classes is requested, the classifier is new, and a note says so.
        loader, head_notes = _choose_loader(config, options.classes)
        if options.pretrained:
            module, quantised, notes = _load_checkpoint(
                loader, path, config, options, has_new_classifier=bool(head_notes)
            )
        else:
            module = _build(loader, config)
            quantised = ""
            notes = (RANDOM,)
        spec = describe_transformers(module, options, path=path)
    notes = _note_unknown_fields(path, config) + head_notes + notes + spec.notes
    return replace(spec, quantised=quantised, notes=notes)


def _read_config(path: Path, overrides: Mapping[str, Any]) -> Any:
    """Return the configuration of a model of transformers, from its directory.

    Args:
        path: the directory.
        overrides: values for fields of the configuration: --model-kwargs, without `pretrained`.

    Raises:
        InputError: transformers does not know the model.
    """
    from transformers import AutoConfig

    with explain_failure(
        f"{path} is not a model that transformers knows",
        "Models with their own code are not run: write a py: factory. For a newer model, update "
        "transformers.",
        ValueError,
        KeyError,
        OSError,
        AttributeError,
        TypeError,
    ):
        return AutoConfig.from_pretrained(path, trust_remote_code=False, **overrides)


def _load_checkpoint(
    loader: Any, path: Path, config: Any, options: LoadOptions, has_new_classifier: bool
) -> tuple[Any, str, Notes]:
    """Load a model with its weights, and check that all weights fit.

    Args:
        loader: the class that loads the model.
        path: the directory.
        config: the configuration of the model.
        options: the user's options.
        has_new_classifier: whether the classifier, with its pooler, is new and random: weights
            outside of the base model then need not fit.

    Returns:
        The model, a description of its quantised weights (empty without any), and notes.

    Raises:
        InputError: weights are missing, surplus or of another shape.
    """
    formats = _read_formats(path)  # number format of each stored weight, such as BF16
    offload = options.device_map is not None
    # Quantised weights may be dequantised each time a layer reads them (`later`). A device map
    # moves the float values, so with a map weights are dequantised on loading.
    later = options.weights == "stored" and not offload
    plan = plan_dequantising(config, path, {*formats.values()}, later=later)
    # The weights, if lipaudit has read them. None: transformers reads the files.
    state = plan.state
    # Weights may keep their stored precision (`as_stored`) if the user asks for it (`later`), or
    # if a device map places them. An exception are weights that transformers dequantises itself:
    # then the plan describes them (`text`), but does not have them. Transformers would choose
    # their precision, so float32 is requested.
    is_dequantised_by_library = plan.text and state is None
    module, report, notes = _load_weights(
        loader,
        path,
        config,
        formats,
        state,
        as_stored=(later or offload) and not is_dequantised_by_library,
    )
    # Each mismatch is a name with the stored and the expected shape.
    wrong = [str(name) for name, *_ in report.get("mismatched_keys", ())]
    missing = report["missing_keys"]
    surplus = report["unexpected_keys"]
    if has_new_classifier:  # only weights of the base model must fit
        missing = _list_below(module.base_model, missing)
        surplus = _list_below(module.base_model, surplus)
        wrong = _list_below(module.base_model, wrong)
    # AutoGPTQ stores biases of zeros for layers without a bias: they are not surplus.
    zero_biases = {
        name for name, value in (state or {}).items() if name.endswith(".bias") and not value.any()
    }
    surplus = [name for name in surplus if name not in zero_biases]
    notes = _require_complete(module, missing, surplus, wrong, path) + plan.notes + notes
    return module, plan.text, notes


def list_expert_settings(module: nn.Module) -> list[tuple[Any, str]]:
    """Return each configuration in a module that chooses how experts multiply, and this choice.

    Experts are parts of a mixture of experts. The choice "grouped_mm" does not support float64,
    "eager" does. So `loader.assemble` changes the choice for float64, and `loader.restore` sets
    the old choice again.
    """
    configs = {}
    for part in module.modules():
        if hasattr(part, "config"):
            configs[id(part.config)] = part.config  # several parts may share a configuration
    settings = []
    for config in configs.values():
        choice = getattr(config, EXPERTS, None)
        if isinstance(choice, str):
            settings.append((config, choice))
    return settings


def _note_unknown_fields(path: Path, config: Any) -> Notes:
    """Warn of fields that a newer transformers has written and the installed one ignores."""
    import transformers

    settings = read_json(path / "config.json")
    installed_version = transformers.__version__
    written_version = str(settings.get("transformers_version") or 0)  # 0: unknown
    kind = type(config)
    # Known fields: attributes of the class, arguments of its constructor, and aliases of
    # attributes.
    known_fields = {
        *dir(kind),
        *inspect.signature(kind).parameters,
        *kind.attribute_map,
        "torch_dtype",  # the older name of `dtype`
    }
    known_fields.update(dir(transformers.PretrainedConfig()))
    unknown_fields = sorted(settings.keys() - known_fields)
    # If the installed version is not older than config.json, the author of the file has added the
    # unknown fields, and transformers never read them.
    if not unknown_fields or Version(written_version) <= Version(installed_version):
        return ()
    text = (
        f"config.json was written by transformers {written_version}, and {installed_version} "
        f"ignores {join_few(unknown_fields)}, so the model may differ from the trained one. Run "
        f"pip install 'transformers>={written_version}'"
    )
    return (Note.warn("newer-transformers", text),)


def _choose_loader(config: Any, classes: int | None) -> tuple[Any, Notes]:
    """Return the class that loads a model, by the architecture in its configuration, and notes.

    Usually this is an auto class, such as AutoModelForImageClassification. A model that was saved
    without a head is loaded without a head: its output is features. If another number of classes
    is requested, the model gets a new and random classifier, and a note says so.

    Args:
        config: the configuration; its class names are replaced for a new classifier.
        classes: the requested number of classes; None: as trained.
    """
    import transformers

    def has_class(auto: str) -> bool:
        """Say whether an auto class has a model for this configuration."""
        return type(config) in getattr(transformers, auto)._model_mapping

    # The name of the model's class. Its ending chooses the auto class.
    name = (config.architectures or [""])[0]
    auto = next((auto for end, auto in LOADERS.items() if name.endswith(end)), "AutoModel")
    # Some classifiers of sound have the name of a text classifier, such as
    # Wav2Vec2ForSequenceClassification.
    if auto == SEQUENCES and not has_class(SEQUENCES):
        auto = CLASSIFIERS["ForAudioClassification"]
    notes: Notes = ()
    trained_classes = None  # None: the model has no classifier
    if auto in CLASSIFIERS.values():
        trained_classes = len(config.id2label or ())
    if classes not in (None, trained_classes):
        config.id2label = {i: f"LABEL_{i}" for i in range(classes)}
        config.label2id = {label: i for i, label in config.id2label.items()}
        if trained_classes is None:  # take the first kind of classifier that has this model
            auto = next(filter(has_class, CLASSIFIERS.values()), SEQUENCES)
        notes = (new_classifier(classes),)
    # If the auto class does not have the model, the model's own class loads it.
    architecture = getattr(transformers, name, None)
    if not has_class(auto) and isinstance(architecture, type):
        return architecture, notes
    return getattr(transformers, auto), notes


def _read_formats(path: Path) -> dict[str, str]:
    """Return the number format of every tensor in the safetensors files of a directory."""
    from safetensors import SafetensorError, safe_open

    formats = dict[str, str]()
    for name in list_weight_files(file.name for file in path.iterdir()):
        if not name.endswith(".safetensors"):
            continue
        # Damaged files are skipped here: loading raises an error that explains the fault.
        with suppress(SafetensorError, OSError), safe_open(path / name, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                formats[key] = file.get_slice(key).get_dtype()
    return formats


def _load_weights(
    loader: Any,
    path: Path,
    config: Any,
    formats: Mapping[str, str],
    state: Any,
    *,
    as_stored: bool,
) -> tuple[Any, dict[str, Any], Notes]:
    """Load a model of transformers with its weights.

    First, weights of integers without a scale are refused. Then the dtype is chosen: the stored
    one on request, else float32. Then transformers loads the weights. Constants that the model
    has computed in half precision are replaced at the end.

    Args:
        loader: the class that loads the model.
        path: the directory.
        config: the configuration of the model.
        formats: number format of each weight in the directory, as safetensors spells it: F32, I8.
        state: the weights by name, if lipaudit has read quantised files itself; None: transformers
            reads the directory.
        as_stored: whether to keep the stored dtype, if all weights have one dtype.

    Returns:
        The model, transformers' report on missing and surplus names and wrong shapes, and notes.
    """
    # A weight of integers is quantised. Without a quantisation in config.json no scale is known,
    # and transformers would take the integers for values.
    if state is None and not getattr(config, "quantization_config", None):
        refuse_codes(_list_integer_weights(formats), path)
    # Dtypes of the float weights, whose formats have an F in their names: F64, F32, F16, BF16.
    dtypes = {HALF_NAMES.get(each, torch.float32) for each in formats.values() if "F" in each}
    dtype = torch.float32
    if as_stored and len(dtypes) == 1:
        (dtype,) = dtypes
    with explain_failure(
        f"transformers cannot load {path}",
        "Check that the directory is complete: config.json and its weights. Copy or download "
        "damaged files again; pickled files may hold tensors only.",
    ):
        # An auto class loads weights from a path only, and not from `state`. So build the model on
        # the meta device (without values), to find the model's own class and the layers whose
        # quantised weights must be transposed.
        if state is not None:
            with torch.device("meta"):
                empty_model = _build(loader, config)
            transpose_codes(empty_model, state)
            loader = type(empty_model)
        module, report = loader.from_pretrained(
            path if state is None else None,
            state_dict=state,
            config=config,
            dtype=dtype,
            attn_implementation=_choose_attention(config),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # no error here: the caller names all wrong shapes
            trust_remote_code=False,
            local_files_only=True,
        )
    if dtype == torch.float32:
        return module, report, note_half_precision(dtypes)
    # The model was built in half precision, and so its computed constants are rounded.
    _compute_constants(module, loader, config)
    return module, report, ()


def _list_integer_weights(formats: Mapping[str, str]) -> list[str]:
    """Return the names of weights that are stored as integers, such as I8 and U8.

    Other tensors, such as counters and positions, may be integers.
    """
    return [
        name
        for name, number_format in formats.items()
        if name.endswith("weight") and number_format[0] in "IU"
    ]


def _compute_constants(module: nn.Module, loader: Any, config: Any) -> None:
    """Replace the constants of a model in half precision by the constants of a float32 model.

    A model computes constants that it does not store, such as rotary frequencies, in the dtype of
    its construction. The float32 model is built without values of parameters: a second copy of
    the weights would not fit into memory.
    """
    register = nn.Module.register_parameter  # the original, which is replaced for a moment below

    def register_without_values(part: nn.Module, name: str, p: nn.Parameter | None) -> None:
        """Register a parameter on the meta device, which needs no memory."""
        if p is not None:
            p = nn.Parameter(p.detach().to("meta"), p.requires_grad)
        register(part, name, p)

    with patch.object(nn.Module, "register_parameter", register_without_values):
        exact_parts = dict(_build(loader, config).named_modules())
    for name, part in module.named_modules():
        # A module that the float32 model lacks keeps its constants.
        exact = getattr(exact_parts.get(name), "_buffers", {})
        # Non-persistent buffers are not in the checkpoint: these are the computed constants.
        for key in part._non_persistent_buffers_set & exact.keys():
            part._buffers[key] = exact[key]


def _build(loader: Any, config: Any) -> Any:
    """Build a model with random weights."""
    build = getattr(loader, "from_config", None) or loader._from_config
    return build(config, dtype=torch.float32, attn_implementation=_choose_attention(config))


def _choose_attention(config: Any) -> str | None:
    """Return the attention implementation: "eager" if logits are capped, else None (the fastest).

    Fused kernels would leave out the cap.
    """
    capped = getattr(find_text_config(config), "attn_logit_softcapping", None)
    return "eager" if capped else None


def _require_complete(
    module: Any, missing: list[str], surplus: list[str], wrong: list[str], path: Path
) -> Notes:
    """Refuse weights that do not fit, except those that the measured output does not use.

    If the output is features, a missing pooler is accepted, and so are surplus weights of a head,
    a pooler or a mask token: a note names them.

    Args:
        module: the model.
        missing: names of weights that the checkpoint lacks.
        surplus: names of weights that the model lacks.
        wrong: names of weights of another shape.
        path: the directory, for messages.
    """
    gives_features = not has_head(module)
    without_pooler = gives_features and any(_has_part(key, POOLER) for key in missing)
    # Newer Swin checkpoints lack the position indices of windows: transformers 5.4 computes them.
    optional = [WINDOWS]
    if gives_features:
        optional.append(POOLER)
    missing = sorted(key for key in missing if not _has_part(key, *optional))
    # Older checkpoints store constants, such as position_ids, that the model now computes.
    constants = {key for part in module.modules() for key in part._non_persistent_buffers_set}
    surplus = sorted(key for key in surplus if key.split(".")[-1] not in constants)
    unused = []
    if gives_features:  # features do not depend on a head, the pooler and the mask token
        unused = [
            key for key in surplus if _has_part(key, POOLER, MASK) or not _is_inside(module, key)
        ]
    surplus = [key for key in surplus if key not in unused]
    misfit = describe_misfit(missing, surplus, wrong)
    if misfit:
        raise InputError(
            f"the weights in {path} do not fit {type(module).__name__}: {misfit}",
            "Check `architectures` in config.json and that the fine-tuned head was saved.",
        )
    if without_pooler:
        module.pooler = None  # random, and not used
    if not unused:
        return ()
    return (Note.info("features", f"not read: {join_few(unused)} (the output is features)"),)


def _list_below(base: nn.Module, keys: Sequence[str]) -> list[str]:
    """Return the names of weights that belong to a base model, but not to its pooler."""
    return [key for key in keys if _is_inside(base, key) and not _has_part(key, POOLER)]


def _has_part(key: str, *parts: str) -> bool:
    """Say whether one of these words is a part of a dotted name."""
    return not set(parts).isdisjoint(key.split("."))


def _is_inside(module: Any, key: str) -> bool:
    """Say whether the name of a weight belongs to a model, with or without the base prefix.

    In a model of BERT, the names `encoder.layer.0...` and `bert.encoder.layer.0...` do.
    """
    parts = {name for name, _ in module.named_children()}
    prefix = module.base_model_prefix
    return key.split(".")[0] in parts or bool(prefix and key.startswith(f"{prefix}."))


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Silence the tables and progress bars of transformers inside the block."""
    from transformers.utils import logging

    with restore_hub_bars() as undo:  # its callbacks restore the settings when the block ends
        undo.callback(logging.set_verbosity, logging.get_verbosity())
        if logging.is_progress_bar_enabled():
            undo.callback(logging.enable_progress_bar)
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        yield
