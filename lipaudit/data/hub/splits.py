"""A split of a data set: of the Hub, of which nothing else is downloaded, or of this machine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lipaudit.data.hub.commit import Commit, find_commit
from lipaudit.data.hub.refusal import Repository, first_line, refusal
from lipaudit.errors import InputError, similar

DEFAULT_SPLIT = "test"
FORM = "hf:ORG/NAME[SPLIT], hf:ORG/NAME/CONFIGURATION[SPLIT] or hf:ORG/NAME[SPLIT]@REVISION"


@dataclass(frozen=True)
class Reference:
    """What `NAME[/CONFIGURATION][[SPLIT]][@REVISION]` names.

    Attributes:
        place: ORG/NAME, or a directory.
        config: which of its configurations; None for its own choice.
        split: one or several splits, perhaps in part, as `datasets` writes them: test[:10%].
        revision: a branch, a tag or a commit.
    """

    place: str
    config: str | None = None
    split: str = DEFAULT_SPLIT
    revision: str = "main"

    def spelled(self, **changes: str) -> str:
        """Write a reference as it is typed, with changes."""
        of = {"config": self.config, "split": self.split} | changes
        config = f"/{of['config']}" if of["config"] else ""
        at = "" if self.revision == "main" else f"@{self.revision}"
        return f"hf:{self.place}{config}[{of['split']}]{at}"


def parse_reference(text: str) -> Reference:
    """Read a reference; a revision may stand before or after the split.

    Raises:
        InputError: it names no data set.
    """
    match = re.fullmatch(r"([^\[\]]+)(?:\[(.+)\])?(?:@([^\[\]]+))?", text)
    if match is None:
        raise InputError(f"hf:{text} names no data set", f"Write {FORM}.")
    name, split, after = match.groups()
    if Path(name).is_dir():
        return Reference(name, split=split or DEFAULT_SPLIT)
    name, _, before = name.partition("@")
    place, config = re.fullmatch(r"([^/]*(?:/[^/]*)?)(?:/(.*))?", name).groups()  # type: ignore[union-attr]
    return Reference(place, config or None, split or DEFAULT_SPLIT, after or before or "main")


def open_split(reference: Reference, *, offline: bool) -> tuple[Any, Commit | None]:
    """Return the table of a split, and the commit that it is of.

    Raises:
        InputError: it cannot be had, with the reason.
    """
    try:
        import datasets  # noqa: F401
    except ImportError as error:
        raise InputError(
            "hf: data need the library `datasets`, which is not installed",
            "pip install 'lipaudit[datasets]'",
        ) from error
    with _as_loud_as_the_hub():
        if Path(reference.place).is_dir():
            return _local(reference), None
        repository = Repository(reference.place, "dataset", reference.revision)
        commit = find_commit(repository, offline=offline)
        tables = {split: _table(reference, commit, split) for split in _splits(reference)}
        commit.remember()
        return _part(reference, tables), commit


@contextmanager
def _as_loud_as_the_hub() -> Iterator[None]:
    """Let `datasets` draw no bars where the client of the Hub draws none."""
    import datasets
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled

    silenced = are_progress_bars_disabled() and datasets.is_progress_bar_enabled()
    if silenced:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if silenced:
            datasets.enable_progress_bars()


def _splits(reference: Reference) -> list[str]:
    """Return the splits that are read: `train[:10%]+test` has two."""
    return [part.partition("[")[0].strip() for part in reference.split.split("+")]


def _part(reference: Reference, tables: dict[str, Any]) -> Any:
    """Return the rows that are asked for, of the splits that they are in."""
    import datasets

    try:
        instruction = datasets.ReadInstruction.from_spec(reference.split)
        parts = instruction.to_absolute({split: len(table) for split, table in tables.items()})
    except (ValueError, AssertionError) as error:
        raise InputError(
            f"the split {reference.split!r} cannot be read ({first_line(error)})",
            f"Write {reference.spelled(split='test')}, or a part: test[:100], test[10%:20%].",
        ) from error
    rows = (tables[p.splitname].select(range(p.from_ or 0, p.to)) for p in parts)
    return datasets.concatenate_datasets(list(rows))


def _local(reference: Reference) -> Any:
    """Read a directory: one that `save_to_disk` wrote, or one of files of data."""
    import datasets

    path = Path(reference.place)
    try:
        if (path / "state.json").is_file():
            return datasets.load_from_disk(str(path))
        if (path / "dataset_dict.json").is_file():
            stored = datasets.load_from_disk(str(path))
        else:
            stored = datasets.load_dataset(str(path))
    except Exception as error:  # whatever its reader of files raises
        raise InputError(
            f"{path} cannot be read as a data set ({type(error).__name__}: {first_line(error)})",
            "Give a directory written by save_to_disk, or a file or folder without hf:.",
        ) from error
    for split in _splits(reference):
        _require("split", split, list(stored), reference)
    return _part(reference, stored)


def _table(reference: Reference, commit: Commit, split: str) -> Any:
    """Return a whole split, downloaded and made into a table where that was not done before."""
    import datasets

    folder = _folder(reference, commit, split)
    if not folder.is_dir():
        if commit.unasked:
            text = f"{reference.spelled(split=split)} is not in the local cache"
            raise InputError(f"{text}, and {commit.unasked}", "Run it once with a connection.")
        try:
            _build(reference, commit, split, folder)
        except InputError:
            raise
        except Exception as error:  # every HTTP library has exceptions of its own
            raise refusal(_shut_out(commit.repository) or error, commit.repository) from error
    files = sorted(folder.glob("*.arrow"))
    return datasets.concatenate_datasets([datasets.Dataset.from_file(str(f)) for f in files])


def _folder(reference: Reference, commit: Commit, split: str) -> Path:
    """Return where a table is kept: apart from those of `datasets`, which hold every split."""
    import datasets

    name = commit.repository.name.replace("/", "___")
    own = Path(datasets.config.HF_DATASETS_CACHE) / "lipaudit" / name / commit.sha
    return own / (reference.config or "default") / split


def _build(reference: Reference, commit: Commit, split: str, folder: Path) -> None:
    """Download the files of a split and make them a table, in a folder."""
    import datasets

    name = commit.repository.name
    try:
        builder = datasets.load_dataset_builder(name, reference.config, revision=commit.sha)
    except ValueError:
        configs = datasets.get_dataset_config_names(name, revision=commit.sha)
        _require("configuration", reference.config or "", configs, reference)
        raise
    files = builder.config.data_files
    _require("split", split, [str(name) for name in files], reference)
    builder.config.data_files = datasets.data_files.DataFilesDict({split: files[split]})
    builder.download_and_prepare(output_dir=str(folder), verification_mode="no_checks")


def _shut_out(repository: Repository) -> Exception | None:
    """Return why a data set is not for this user: `datasets` drops what the Hub answered."""
    from huggingface_hub import HfApi, errors

    try:
        HfApi().auth_check(repository.name, repo_type=repository.kind)
    except errors.RepositoryNotFoundError as error:
        return error
    except Exception:  # then it is what the caller has met already
        return None
    return None


def _require(what: str, name: str, names: Iterable[str], reference: Reference) -> None:
    """Refuse a split or configuration that there is not, and name those that there are.

    Raises:
        InputError: with what may have been meant.
    """
    if name in names:
        return
    listed = ", ".join(names) or "none"
    close = similar(name, names) or list(names)
    key = "split" if what == "split" else "config"
    raise InputError(
        f"{reference.place} has no {what} {name!r} (it has: {listed})"
        if name
        else f"{reference.place} has several {what}s: {listed}",
        f"Did you mean {reference.spelled(**{key: close[0]})}?" if close else f"Write {FORM}.",
    )
