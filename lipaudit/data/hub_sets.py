"""Data sets of the library `datasets`: one split, from the Hub or from a directory."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lipaudit.data.hub import Commit, Repository, explain_refusal, find_commit, hub_access
from lipaudit.data.tables import SampleTable
from lipaudit.errors import InputError, explain_failure, similar

DEFAULT_SPLIT = "test"
FORM = "hf:ORG/NAME[SPLIT], hf:ORG/NAME/CONFIGURATION[SPLIT] or hf:ORG/NAME[SPLIT]@REVISION"


@dataclass(frozen=True)
class Reference:
    """The parts of `NAME[/CONFIGURATION][[SPLIT]][@REVISION]`.

    Attributes:
        place: ORG/NAME, or a directory.
        config: a configuration; None for the default one.
        split: one or several splits, or parts of them, in the syntax of `datasets`: test[:10%].
        revision: a branch, a tag or a commit.
    """

    place: str
    config: str | None = None
    split: str = DEFAULT_SPLIT
    revision: str = "main"

    @property
    def splits(self) -> list[str]:
        """Return the names of the splits: `train[:10%]+test` has two."""
        return [part.partition("[")[0].strip() for part in self.split.split("+")]


def parse_reference(text: str) -> Reference:
    """Read a reference; a revision may precede or follow the split.

    Raises:
        InputError: the text names no data set.
    """
    match = re.fullmatch(r"([^\[\]]+)(?:\[(.+)\])?(?:@([^\[\]]+))?", text)
    if match is None:
        raise InputError(f"hf:{text} names no data set", f"Write {FORM}.")
    name, split, after = match.groups()
    if Path(name).is_dir():
        return Reference(name, split=split or DEFAULT_SPLIT)
    name, _, before = name.partition("@")
    parts = name.split("/", 2)
    place, config = "/".join(parts[:2]), "".join(parts[2:])
    return Reference(place, config or None, split or DEFAULT_SPLIT, after or before or "main")


def read_dataset(text: str, *, offline: bool) -> tuple[SampleTable, Commit | None]:
    """Read `NAME[/CONFIGURATION][[SPLIT]][@REVISION]`; a directory is a name, too.

    From a repository of the Hub, only the split is downloaded, by default `test`.

    Raises:
        InputError: `datasets` is not installed, or the data set or split does not exist.
    """
    reference, origin = parse_reference(text), f"hf:{text}"
    with hub_access(offline=offline):
        data, commit = _open_split(reference, offline=offline)
    if not len(data):
        raise InputError(f"{origin} is empty", "Choose another split.")
    names = {name: getattr(kind, "names", None) for name, kind in data.features.items()}
    table = SampleTable(
        origin,
        data.column_names,
        [f"index {i}" for i in range(len(data))],
        data.__getitem__,
        lambda name: list(data[name]),
        classes={name: labels for name, labels in names.items() if labels},
    )
    return table, commit


def _open_split(reference: Reference, *, offline: bool) -> tuple[Any, Commit | None]:
    """Return the rows of a split as `datasets` gives them, and their commit."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled

    try:
        import datasets
    except ImportError as error:
        raise InputError(
            "--data hf: needs the library `datasets`, which is not installed",
            "pip install 'lipaudit[datasets]'",
        ) from error
    path, commit = Path(reference.place), None
    with ExitStack() as undo:
        if are_progress_bars_disabled() and datasets.is_progress_bar_enabled():
            datasets.disable_progress_bars()  # no bar if the Hub's client draws none
            undo.callback(datasets.enable_progress_bars)
        if path.is_dir():
            with explain_failure(
                f"{path} cannot be read as a data set",
                "Give a directory written by save_to_disk, or a file or folder without hf:.",
            ):
                if (path / "state.json").is_file():  # a single split
                    return datasets.load_from_disk(str(path)), None
                saved = (path / "dataset_dict.json").is_file()
                splits = (datasets.load_from_disk if saved else datasets.load_dataset)(str(path))
            for split in reference.splits:
                _require_known("split", split, splits, reference)
        else:
            repository = Repository(reference.place, "dataset", reference.revision)
            commit = find_commit(repository, offline=offline)
            splits = {split: _open_table(reference, commit, split) for split in reference.splits}
            commit.remember()
    with explain_failure(
        f"the split {reference.split!r} cannot be read",
        "Name a split, or a part of one: test[:100], test[10%:20%].",
        ValueError,
        AssertionError,
    ):
        instruction = datasets.ReadInstruction.from_spec(reference.split)
        parts = instruction.to_absolute({split: len(rows) for split, rows in splits.items()})
    rows = [splits[part.splitname].select(range(part.from_ or 0, part.to)) for part in parts]
    return datasets.concatenate_datasets(rows), commit


def _open_table(reference: Reference, commit: Commit, split: str) -> Any:
    """Return a whole split; download it and make its table if that is not done yet."""
    import datasets

    # Beside the tables of `datasets`, which hold every split.
    name = commit.repository.name.replace("/", "___")
    tables = Path(datasets.config.HF_DATASETS_CACHE) / "lipaudit"
    folder = tables / name / commit.sha / (reference.config or "default") / split
    if not folder.is_dir():
        if commit.unasked:
            text = f"the split {split!r} of {commit.repository.name} is not in the local cache"
            raise InputError(f"{text}, and {commit.unasked}", "Run it once with a connection.")
        try:
            _build_table(reference, commit, split, folder)
        except InputError:
            raise
        except Exception as error:  # every HTTP library has its own exceptions
            raise explain_refusal(error, commit.repository) from error
    files = sorted(folder.glob("*.arrow"))
    return datasets.concatenate_datasets([datasets.Dataset.from_file(str(f)) for f in files])


def _build_table(reference: Reference, commit: Commit, split: str, folder: Path) -> None:
    """Download the files of a split and make a table in a folder."""
    import datasets

    name = commit.repository.name
    try:
        builder = datasets.load_dataset_builder(name, reference.config, revision=commit.sha)
    except ValueError:
        configs = datasets.get_dataset_config_names(name, revision=commit.sha)
        _require_known("configuration", reference.config or "", configs, reference)
        raise
    files = builder.config.data_files
    _require_known("split", split, files, reference)
    # `datasets` would download all splits: for a large data set that takes hours.
    builder.config.data_files = datasets.data_files.DataFilesDict({split: files[split]})
    builder.download_and_prepare(output_dir=str(folder), verification_mode="no_checks")


def _require_known(what: str, name: str, known: Any, reference: Reference) -> None:
    """Refuse an unknown split or configuration, and list the known ones.

    Raises:
        InputError: the message suggests similar names.
    """
    names = [str(each) for each in known]
    if name in names:
        return
    listed = ", ".join(names) or "none"
    raise InputError(
        f"{reference.place} has no {what} {name!r} (it has: {listed})"
        if name
        else f"{reference.place} has several {what}s: {listed}",
        f"Did you mean {(similar(name, names) or names)[0]!r}? Write {FORM}."
        if names
        else f"Write {FORM}.",
    )
