"""Models of transformers: repositories of the Hub, directories, adapters of peft."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import nn

from lipaudit.data.hub import Commit, Repository, explain_refusal, find_commit, hub_bars
from lipaudit.errors import InputError, UsageError, explain_failure
from lipaudit.models.net import RANDOM, LoadOptions, ModelSpec, new_classifier
from lipaudit.models.sources.inputs import (
    CLASSIFIERS,
    HEADS,
    TOWERS,
    describe_images,
    describe_sounds,
    describe_texts,
    find_text_config,
    has_head,
)
from lipaudit.models.sources.weights import (
    describe_misfit,
    few,
    list_weight_files,
    note_half_precision,
    read_json,
)
from lipaudit.tables import Note

SETTINGS = (".json", ".txt", ".model")
POOLING = "1_Pooling/config.json"
FEATURES = "AutoModel"
ENCODER = "AutoModelForTextEncoding"
SEQUENCES = "AutoModelForSequenceClassification"
SOUNDS = "AutoModelForAudioClassification"
WINDOWS = "relative_position_index"
POOLER, MASK = "pooler", "mask_token"
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
    stored = list_weight_files(top) if options.pretrained else []
    if options.pretrained and not stored:
        raise InputError(
            f"{name} has no weights for PyTorch (it has: {few(top) or 'no files'})"
            + (f", and {commit.unasked}" if commit.unasked else ""),
            "Name a repository with model.safetensors or pytorch_model.bin. Merge an adapter "
            "into its model first. If the local cache is incomplete, run it with a connection.",
        )
    wanted = [file for file in top if file.endswith(SETTINGS)] + [POOLING] + stored
    try:
        path = snapshot_download(
            name,
            revision=commit.sha,
            allow_patterns=wanted,
            local_files_only=bool(commit.unasked),
        )
    except Exception as error:  # every HTTP library has its own exceptions
        raise explain_refusal(error, repository) from error
    commit.remember()
    return Path(path), commit


def load_directory(path: Path, options: LoadOptions) -> ModelSpec:
    """Load a directory in the format of transformers; missing or surplus weights are an error.

    Raises:
        InputError: the model is not supported or incomplete; the message names the tensors.
    """
    from transformers import AutoConfig

    overrides = options.building
    if options.dtype == "float64":  # grouped products of experts do not support float64
        overrides = {"experts_implementation": "eager"} | overrides
    with silence_transformers():
        with explain_failure(
            f"{path} is not a model that transformers knows",
            "Models with their own code are not run: write a py: factory. For a newer model, "
            "update transformers.",
            ValueError,
            KeyError,
            OSError,
        ):
            config = AutoConfig.from_pretrained(path, trust_remote_code=False, **overrides)
        loader, added = _choose_loader(config, options.classes)
        if options.pretrained:
            kept = options.weights == "stored" or options.device_map is not None
            module, report, notes = _load_weights(loader, path, config, kept=kept)
            wrong = [str(mismatch[0]) for mismatch in report.get("mismatched_keys", ())]
            missing, surplus = [*report["missing_keys"]], [*report["unexpected_keys"]]
            if added:  # only the weights below the new classifier and its pooler have to fit
                base = module.base_model
                missing, surplus, wrong = (
                    [k for k in keys if _is_inside(base, k) and not _has_part(k, POOLER)]
                    for keys in (missing, surplus, wrong)
                )
            notes = _require_complete(module, missing, surplus, wrong, path) + notes
        else:
            module, notes = _build(loader, config), (RANDOM,)
        spec = describe_transformers(module, options, path=path)
    return replace(spec, notes=_note_unknown_fields(path, config) + added + notes + spec.notes)


def describe_transformers(
    module: Any, options: LoadOptions, *, path: Path | None = None
) -> ModelSpec:
    """Describe the input of a model of transformers, and the output that is measured.

    Tokenizer, image processor and pooling are read from `path`.

    Raises:
        InputError: the model takes other inputs than images, text or sound.
        UsageError: a model with two towers needs the option `tower`, or lacks that tower.
    """
    for config in (module.config, find_text_config(module.config)):
        for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if not hasattr(config, key):  # the code of transformers asks every model for them
                setattr(config, key, None)
    find_text_config(module.config).use_cache = False
    tower, name = options.tower, type(module).__name__
    towers = [each for each in TOWERS if hasattr(module, f"get_{each}_features")]
    if tower is not None and tower not in towers:
        has = f"only {' and '.join(towers)}" if towers else "none"
        raise UsageError(f"{name} has no tower {tower!r}: it has {has}", "Leave --tower out.")
    if tower is None and len(towers) > 1:
        raise UsageError(
            f"{name} has an image tower and a text tower, and none was chosen",
            "Add --tower image or --tower text.",
        )
    takes = module.main_input_name if tower is None else TOWERS[tower]
    if takes == "pixel_values":
        return describe_images(module, options, path, tower)
    if takes == "input_ids":
        return describe_texts(module, path, tower)
    if takes in ("input_values", "input_features"):
        return describe_sounds(module)
    raise InputError(
        f"{name} takes {takes}: neither images, text nor sound",
        "Write a py: factory that returns a ModelSpec of kind tokens.",
    )


def _note_unknown_fields(path: Path, config: Any) -> tuple[Note, ...]:
    """Name the fields of a configuration that the installed transformers ignores."""
    import transformers

    stored, installed = read_json(path / "config.json"), transformers.__version__
    written = str(stored.get("transformers_version") or 0)  # 0: unknown
    kind = type(config)
    known = {*dir(kind), *inspect.signature(kind).parameters, *kind.attribute_map, "torch_dtype"}
    known.update(dir(transformers.PretrainedConfig()))
    unknown = sorted(stored.keys() - known)
    if not unknown or Version(written) <= Version(installed):
        return ()
    text = (
        f"config.json was written by transformers {written}, and {installed} ignores "
        f"{few(unknown)}, so the model may differ from the trained one. Run pip install "
        f"'transformers>={written}'"
    )
    return (Note.warn("newer-transformers", text),)


def _choose_loader(config: Any, classes: int | None) -> tuple[Any, tuple[Note, ...]]:
    """Return the class that loads a model, by the architecture in its configuration.

    No head is invented, except a new classifier for another number of classes.
    """
    import transformers

    def knows(auto: str) -> bool:
        return type(config) in getattr(transformers, auto)._model_mapping

    name = (config.architectures or [""])[0]
    auto = next((auto for head, auto in HEADS.items() if name.endswith(head)), FEATURES)
    if name.endswith("EncoderModel"):
        auto = ENCODER
    if auto == SEQUENCES and not knows(SEQUENCES):
        auto = SOUNDS  # Wav2Vec2ForSequenceClassification classifies sounds
    added: tuple[Note, ...] = ()
    trained = len(config.id2label or ()) if auto in CLASSIFIERS.values() else None
    if classes not in (None, trained):
        config.id2label = {i: f"LABEL_{i}" for i in range(classes)}
        config.label2id = {label: i for i, label in config.id2label.items()}
        if trained is None:
            auto = next(filter(knows, CLASSIFIERS.values()), SEQUENCES)
        added = (new_classifier(classes),)
    named = getattr(transformers, name, None)
    if not knows(auto) and isinstance(named, type):
        return named, added
    return getattr(transformers, auto), added


def _load_weights(
    loader: Any, path: Path, config: Any, *, kept: bool
) -> tuple[Any, dict[str, Any], tuple[Note, ...]]:
    """Load the weights; return the model, transformers' report on names and shapes, and notes.

    Args:
        loader: the class that loads the model.
        path: the directory.
        config: its configuration.
        kept: whether weights that are all of one precision stay as stored.
    """
    from safetensors import SafetensorError, safe_open

    kinds: set[str] = set()
    files = list_weight_files(file.name for file in path.iterdir())
    for file in (path / name for name in files if name.endswith(".safetensors")):
        # Loading explains why a file cannot be read.
        with suppress(SafetensorError, OSError), safe_open(file, "pt") as stored:
            kinds |= {stored.get_slice(k).get_dtype() for k in stored.keys()}  # noqa: SIM118
    halves = [HALF_NAMES.get(kind, torch.float32) for kind in kinds if "F" in kind]
    dtype = halves[0] if kept and len(halves) == 1 else torch.float32
    with explain_failure(
        f"transformers cannot load {path}",
        "Check that the directory is complete: config.json and its weights. Copy or download "
        "damaged files again; pickled files may hold tensors only.",
    ):
        module, report = loader.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=_choose_attention(config),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are named in the error
            trust_remote_code=False,
            local_files_only=True,
        )
    if dtype == torch.float32:
        return module, report, note_half_precision(halves)
    # The model computes its constants in the dtype of construction: take those of a float32
    # model. It is built without values: a second copy of the weights would not fit into memory.
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, p: nn.Parameter | None) -> None:
        given = None if p is None else nn.Parameter(p.detach().to("meta"), p.requires_grad)
        register(module, name, given)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        built = dict(_build(loader, config).named_modules())
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
    for name, part in module.named_modules():
        for key in part._non_persistent_buffers_set & {*getattr(built.get(name), "_buffers", ())}:
            part._buffers[key] = built[name]._buffers[key]
    return module, report, ()


def _build(loader: Any, config: Any) -> Any:
    """Build a model with random weights."""
    build = getattr(loader, "from_config", None) or loader._from_config
    return build(config, dtype=torch.float32, attn_implementation=_choose_attention(config))


def _choose_attention(config: Any) -> str | None:
    """Return eager for capped logits, whose cap fused kernels leave out; None is the fastest."""
    capped = getattr(find_text_config(config), "attn_logit_softcapping", None)
    return "eager" if capped else None


def _require_complete(
    module: Any, missing: list[str], surplus: list[str], wrong: list[str], path: Path
) -> tuple[Note, ...]:
    """Refuse missing and surplus weights, except heads that the measured features do not use."""
    features = not has_head(module)
    without_pooler = features and any(_has_part(key, POOLER) for key in missing)
    # Checkpoints of Swin by newer versions lack WINDOWS: transformers 5.4 computes these.
    optional = (WINDOWS, POOLER) if features else (WINDOWS,)
    missing = sorted(k for k in missing if not _has_part(k, *optional))
    # Older checkpoints store constants, such as position_ids, that the model now computes.
    constants = {key for part in module.modules() for key in part._non_persistent_buffers_set}
    surplus = sorted(k for k in surplus if k.split(".")[-1] not in constants)
    # Features do not depend on heads, pooler and mask.
    unused = [
        k
        for k in surplus
        if features and (_has_part(k, POOLER, MASK) or not _is_inside(module, k))
    ]
    surplus = [k for k in surplus if k not in unused]
    if misfit := describe_misfit(missing, surplus, wrong):
        raise InputError(
            f"the weights in {path} do not fit {type(module).__name__}: {misfit}",
            "Check `architectures` in config.json and that the fine-tuned head was saved.",
        )
    if without_pooler:
        module.pooler = None  # random, and not used
    text = f"not read: {few(unused)} (the output is features)"
    return (Note.info("features", text),) if unused else ()


def _has_part(key: str, *parts: str) -> bool:
    return not set(parts).isdisjoint(key.split("."))


def _is_inside(module: Any, key: str) -> bool:
    """Say whether a key belongs to the backbone, with or without its prefix."""
    parts = {name for name, _ in module.named_children()}
    prefix = module.base_model_prefix
    return key.split(".")[0] in parts or bool(prefix and key.startswith(f"{prefix}."))


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Silence the tables and progress bars of transformers inside the block."""
    from transformers.utils import logging

    with hub_bars(), ExitStack() as undo:
        undo.callback(logging.set_verbosity, logging.get_verbosity())
        if logging.is_progress_bar_enabled():
            undo.callback(logging.enable_progress_bar)
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        yield
