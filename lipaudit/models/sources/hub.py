"""A repository of the Hugging Face Hub as a directory on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lipaudit.data.hub import Commit, Repository, find_commit, refusal
from lipaudit.errors import InputError
from lipaudit.models.sources.weights import few, weight_files

SETTINGS = (".json", ".txt", ".model")
POOLING = "1_Pooling/config.json"


def fetch(
    name: str, revision: str | None, *, offline: bool, weights: bool = True
) -> tuple[Path, Commit]:
    """Return the directory that holds a repository, and the commit that it is of.

    It gets settings, tokenizer and, where they are wanted, the weights that are loaded: no code,
    and nothing in other precisions or formats.

    Raises:
        InputError: the repository cannot be had, with the reason.
    """
    from huggingface_hub import snapshot_download

    repository = Repository(name, "model", revision or "main")
    commit = find_commit(repository, offline=offline)
    try:
        path = snapshot_download(
            name,
            revision=commit.sha,
            allow_patterns=_list_wanted(commit, weights=weights),
            local_files_only=bool(commit.unasked),
        )
    except Exception as error:  # every HTTP library has exceptions of its own
        raise refusal(error, repository) from error
    commit.remember()
    return Path(path), commit


def _list_wanted(commit: Commit, *, weights: bool) -> list[str]:
    """Return the files that are read.

    Raises:
        InputError: there are no weights among them.
    """
    settings = [f for f in commit.files if _at_root(f) and f.endswith(SETTINGS) or f == POOLING]
    if not weights:
        return settings
    stored = weight_files(commit.files)
    if not stored:
        raise InputError(*_without_weights(commit))
    return [*settings, *stored]


def _without_weights(commit: Commit) -> tuple[str, str]:
    name = commit.repository.name
    if commit.unasked:
        text = f"the local cache has no weights of {name}, and {commit.unasked}"
        return text, "Run it once with a connection."
    text = f"{name} has no weights for PyTorch (it has: {_name_files(commit.files)})"
    return text, "Name a repository with model.safetensors or pytorch_model.bin."


def _name_files(files: Iterable[str]) -> str:
    return few([file for file in files if _at_root(file)]) or "no files"


def _at_root(file: str) -> bool:
    return "/" not in file
