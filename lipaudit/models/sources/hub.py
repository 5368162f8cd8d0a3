"""A repository of the Hugging Face Hub as a directory on this machine."""

from __future__ import annotations

from pathlib import Path

from lipaudit.errors import InputError

SETTINGS = ["*.json", "*.txt", "*.model", "1_Pooling/config.json"]
IGNORED = ["onnx/*", "openvino/*", "coreml/*", "*/onnx/*"]


def fetch(repository: str, revision: str | None, *, offline: bool, weights: bool = True) -> Path:
    """Return the directory that holds a repository: settings, tokenizer and weights, no code.

    Weights, where they are wanted, come as safetensors, or pickled where there is nothing else.

    Raises:
        InputError: the repository cannot be had, with the reason.
    """
    from huggingface_hub import snapshot_download

    def snapshot(patterns: list[str]) -> Path:
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=IGNORED,
                local_files_only=offline,
            )
        )

    try:
        path = snapshot([*SETTINGS, "*.safetensors"] if weights else SETTINGS)
        if weights and not any(path.glob("*.safetensors")):
            path = snapshot([*SETTINGS, "*.bin"])
    except Exception as error:  # every HTTP library has exceptions of its own
        name = repository + (f"@{revision}" if revision else "")
        raise InputError(
            f"{name} is neither in the local cache nor to be had from the Hugging Face Hub "
            f"({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})",
            "Check the name and the network; without one, download the repository elsewhere "
            "(`hf download`) and give its directory as MODEL.",
        ) from error
    return path
