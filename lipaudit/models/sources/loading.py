"""The MODEL argument: which source it names, and the `Net` it gives."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lipaudit.data.hub import Commit, hub_access
from lipaudit.data.intake import remark
from lipaudit.errors import InputError, UsageError, neighbours, suggestion
from lipaudit.models.net import Net
from lipaudit.models.precision import seed_device
from lipaudit.models.sources.assembly import assemble, device
from lipaudit.models.sources.demo import demo_model
from lipaudit.models.sources.names import DEMOS, FORMS, similar_models
from lipaudit.models.sources.spec import LoadOptions as LoadOptions
from lipaudit.models.sources.spec import ModelSpec as ModelSpec
from lipaudit.models.sources.weights import SUFFIXES
from lipaudit.schema import read_json

SEED = 0
"""Random weights, where they are asked for, are always the same."""
CONVERTED = (".gguf", ".onnx", ".tflite", ".mlmodel", ".engine")
"""What checkpoints are converted to, to be run without PyTorch."""

NamedSpec = tuple[str, ModelSpec]


def load_net(spec: str, options: LoadOptions | None = None) -> Net:
    """Load the model that a MODEL argument names.

    The forms: `demo[:NAME]`; `timm:NAME`; `hf:ORG/NAME[@REVISION]` (`hf-hub:` is the same); a
    directory with config.json in the format of timm or transformers; a file of weights with
    `arch`; `py:FILE_OR_MODULE:FACTORY`. A bare name is looked for among the demos, the paths,
    timm's models and the Hub, in that order, and a note says where it was found. Weights are read
    without running code (`py:` apart), missing and surplus tensors are errors, and random weights
    come only with `model_kwargs={"pretrained": False}` and a loud note.

    The module comes back in eval mode with frozen parameters. The global random state is left as
    it was.

    Raises:
        UsageError: the request makes no sense (a file of weights without `arch`).
        InputError: the model is missing, damaged or not supported.
    """
    options = options or LoadOptions()
    place = device(options.device)
    with seed_device(SEED, place):
        source, model = _resolve(spec, options)
        if options.arch is not None and source != "file":
            raise UsageError(f"--arch is for files of weights; {spec} says what it is", "Drop it.")
        if options.model_kwargs and source == "demo":
            raise UsageError(
                f"{spec} is made one way, and takes no {', '.join(options.model_kwargs)}",
                "Leave --model-kwargs out; those of a gate are its baseline's: is that of this "
                "model?",
            )
        if options.tower is not None and source not in ("hf", "py"):
            raise UsageError(f"{spec} has no towers", "Leave --tower out.")
        if options.classes is not None and source in ("demo", "py"):
            raise UsageError(f"{spec} has its own classes", "Leave --classes out.")
        if options.weights == "stored" and source not in ("hf", "py"):
            raise UsageError(
                f"--weights stored is for models of transformers and py: factories, and {spec} is "
                "neither",
                "Leave it out.",
            )
        return assemble(model, options, name=spec, source=source)


def _resolve(spec: str, options: LoadOptions) -> NamedSpec:
    prefix, colon, rest = spec.partition(":")
    if colon and prefix in PREFIXES:
        return PREFIXES[prefix](rest, options)
    if spec in ("demo", ""):
        return _demo("", options) if spec else _unknown(spec)
    return _bare(spec, options)


def _bare(name: str, options: LoadOptions) -> NamedSpec:
    """Look a bare name up, and say what it was taken for."""
    path = Path(name)
    if name in DEMOS:
        return _add_note(
            _demo(name, options), f"{name!r} taken as the demo checkpoint demo:{name}"
        )
    if path.is_dir():
        return _directory(path, options)
    if path.is_file():
        return _file(path, options)
    if path.suffix in SUFFIXES or name.startswith((".", "/", "~")):
        advice = suggestion(name, neighbours(path), "Check the path.")
        raise InputError(f"there is no file or directory {name}", advice)
    from lipaudit.models.sources import timm

    if timm.is_timm(name):
        return _add_note(_timm(name, options), f"{name!r} taken as the timm model timm:{name}")
    if name.count("/") == 1:
        try:
            source = _hub(name, options)
        except InputError as error:
            message = f"there is no file or directory {name}; as a repository, {error.message}"
            raise InputError(message, error.advice) from error
        return _add_note(source, f"{name!r} taken as the Hugging Face repository hf:{name}")
    return _unknown(name)


def _unknown(name: str) -> NamedSpec:
    close = [*_as_repository(name), *similar_models(name)]
    hint = f"Did you mean {' or '.join(close)}? " if close else ""
    raise InputError(f"no model {name!r}", f"{hint}MODEL is one of: {FORMS}.")


def _as_repository(name: str) -> list[str]:
    """Return the repository that a bare name may stand for: those of transformers have no `_`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    families = "|".join(map(re.escape, CONFIG_MAPPING_NAMES))
    known = re.match(rf"({families})([-.0-9]|$)", name.casefold())
    return [f"hf:{name}"] if known and "_" not in name else []


def _add_note(source: NamedSpec, note: str) -> NamedSpec:
    rule, model = source
    return rule, replace(model, notes=(remark("resolved", note), *model.notes))


def _demo(name: str, _options: LoadOptions) -> NamedSpec:
    return "demo", demo_model(name or "standard")


def _timm(name: str, options: LoadOptions) -> NamedSpec:
    from lipaudit.models.sources import timm

    place, colon, rest = name.partition(":")
    if colon and place in WITHIN_TIMM:
        return WITHIN_TIMM[place](rest, options)
    with hub_access(offline=options.offline):
        return "timm", timm.load_pretrained(name, options)


def _hub(name: str, options: LoadOptions) -> NamedSpec:
    repository, _, revision = name.partition("@")
    if repository.count("/") > 1 or not repository:
        raise UsageError(f"{name!r} is no repository of the Hub", "Write hf:ORG/NAME[@REVISION].")
    path, commit = _fetch(repository, revision, options)
    rule, model = _directory(path, options)
    return rule, replace(model, commit=commit)


def _fetch(repository: str, revision: str | None, options: LoadOptions) -> tuple[Path, Commit]:
    from lipaudit.models.sources.hub import fetch

    weights = _weights_wanted(options)
    return fetch(repository, revision or None, offline=options.offline, weights=weights)


def _weights_wanted(options: LoadOptions) -> bool:
    return bool(options.model_kwargs.get("pretrained", True))


def _directory(path: Path, options: LoadOptions) -> NamedSpec:
    """Read a directory by the keys of its config.json: timm's, or those of transformers."""
    from lipaudit.models.sources.hf.adapter import is_adapter

    if is_adapter(path):
        return _load_adapter(path, options)
    keys = _config_keys(path)
    if "model_type" in keys:
        from lipaudit.models.sources.hf import directory as hf

        return "hf", hf.from_directory(path, options)
    if keys & {"architecture", "pretrained_cfg"}:
        from lipaudit.models.sources import timm

        return "timm", timm.from_directory(path, options)
    raise InputError(
        f"{path / 'config.json'} is neither timm's (architecture) nor transformers' (model_type)",
        "Pass the file of weights itself with --arch timm:NAME.",
    )


def _load_adapter(path: Path, options: LoadOptions) -> NamedSpec:
    """Read an adapter of peft's on its base model, which it names."""
    from lipaudit.models.sources.hf import adapter
    from lipaudit.models.sources.hf import directory as hf

    base, revision = adapter.base_of(path)
    where, commit = Path(base), None
    if not where.is_dir() and (base.count("/") > 1 or base.startswith((".", "/", "~"))):
        raise InputError(
            f"the adapter in {path} was trained on {base}, which is not here",
            "Put its base model there, or write where it is into base_model_name_or_path of its "
            "adapter_config.json.",
        )
    if not where.is_dir():
        where, commit = _fetch(base, revision, options)
    if adapter.is_adapter(where) or "model_type" not in _config_keys(where):
        raise InputError(
            f"{base}, the base model of the adapter in {path}, is no model of transformers",
            "Correct base_model_name_or_path in its adapter_config.json.",
        )
    of = "" if commit is None else f" at commit {commit.sha[:12]}"
    note = remark("adapter", f"an adapter was merged into its base model {base}{of}")
    model = hf.from_directory(where, options, path if _weights_wanted(options) else None)
    asked = () if commit is None or not commit.unasked else (commit.note,)
    return "hf", replace(model, notes=(note, *asked, *model.notes))


def _config_keys(path: Path) -> set[str]:
    config = path / "config.json"
    if not config.is_file():
        raise InputError(f"{path} has no config.json", _in_place_of(path))
    content = read_json(config)
    return set(content) if isinstance(content, dict) else set()


def _in_place_of(path: Path) -> str:
    """Say what to give in place of a file or a folder that PyTorch finds no weights in."""
    files = [path, *sorted(path.iterdir())] if path.is_dir() else [path]
    if path.suffix == ".py":
        return f"A function in it that returns the model is py:{path}:FUNCTION."
    if converted := next((file for file in files if file.suffix in CONVERTED), None):
        return (
            f"{converted.name} was converted to be run without gradients: give the checkpoint "
            "that it was made from."
        )
    if path.is_dir():
        return "Pass its file of weights with --arch timm:NAME, or add the configuration."
    return f"They end in {', '.join(SUFFIXES)}."


def _file(path: Path, options: LoadOptions) -> NamedSpec:
    if path.suffix not in SUFFIXES:
        raise InputError(f"{path} is not a file of weights", _in_place_of(path))
    if options.arch is None:
        raise UsageError(
            f"{path} holds weights only: which architecture are they for?",
            "Add --arch timm:NAME (and --model-kwargs where it differs), or --arch "
            "py:FILE:FACTORY of a factory of yours.",
        )
    if options.arch.startswith("py:"):
        from lipaudit.models.sources.own import from_weights

        return "file", from_weights(path, options.arch.removeprefix("py:"), options)
    from lipaudit.models.sources import timm

    return "file", timm.from_file(path, options.arch.removeprefix("timm:"), options)


def _factory(reference: str, options: LoadOptions) -> NamedSpec:
    from lipaudit.models.sources.own import from_factory

    return "py", from_factory(reference, options)


WITHIN_TIMM: dict[str, Callable[[str, LoadOptions], NamedSpec]] = {
    "hf_hub": _hub,
    "hf-hub": _hub,
    "local-dir": lambda name, options: _directory(Path(name), options),
}
"""What timm itself takes before the colon of a name."""

PREFIXES: dict[str, Callable[[str, LoadOptions], NamedSpec]] = {
    "demo": _demo,
    "timm": _timm,
    "hf": _hub,
    "hf-hub": _hub,
    "py": _factory,
}
"""What stands before the colon of a MODEL argument."""
