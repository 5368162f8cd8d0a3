"""The Hugging Face Hub: repositories, their commits, refusals, and data sets."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Literal

from lipaudit.data.tables import SampleTable
from lipaudit.errors import InputError, explain_failure, first_line, list_causes, similar
from lipaudit.tables import Note

Kind = Literal["model", "dataset"]
KINDS: dict[Kind, str] = {"model": "model", "dataset": "data set"}
LOG_IN = "log in with `hf auth login` or set HF_TOKEN"
OFFLINE = "--offline (or HF_HUB_OFFLINE) forbids the download"


@dataclass(frozen=True)
class Repository:
    """A repository of the Hub.

    Attributes:
        name: ORG/NAME.
        kind: model or dataset.
        revision: a branch, a tag or a commit.
    """

    name: str
    kind: Kind = "model"
    revision: str = "main"

    @property
    def page(self) -> str:
        """Return the address of its web page."""
        from huggingface_hub import constants

        folder = "datasets/" if self.kind == "dataset" else ""
        return f"{constants.ENDPOINT}/{folder}{self.name}"

    @property
    def cache(self) -> Path:
        """Return its folder in the local cache."""
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        return Path(constants.HF_HUB_CACHE) / repo_folder_name(
            repo_id=self.name, repo_type=self.kind
        )


def explain_refusal(error: Exception, repository: Repository) -> InputError:
    """Return the error that explains, from the client's exception, why access failed."""
    from huggingface_hub import constants, errors

    what, page = f"the {KINDS[repository.kind]} {repository.name}", repository.page
    revision = repository.revision
    option = "" if repository.kind == "model" else " --repo-type dataset"
    answers: dict[type[Exception], tuple[str, str]] = {
        errors.GatedRepoError: (
            f"{what} is gated: this user has no access",
            f"Request access on {page}, then {LOG_IN}.",
        ),
        errors.RepositoryNotFoundError: (
            f"{what} does not exist on the Hub, or it is private",
            f"Check the name; for a private one {LOG_IN}.",
        ),
        errors.RevisionNotFoundError: (
            f"{what} has no revision {revision!r}",
            f"Its branches and tags are listed on {page}/tree/main.",
        ),
        errors.HFValidationError: (
            f"{repository.name!r} is not a valid repository name",
            "Write hf:ORG/NAME.",
        ),
        errors.OfflineModeIsEnabled: (
            f"{what} at {revision} is not in the local cache, and {OFFLINE}",
            f"Fetch it while there is a connection: `hf download{option} {repository.name}`.",
        ),
    }
    # Clients wrap an exception twice, and a subclass stands before its base in the table.
    for cause in list_causes(error):
        for kind, words in answers.items():
            if isinstance(cause, kind):
                return InputError(*words)
    first = error.__cause__ or error
    return InputError(
        f"{what} cannot be downloaded ({type(first).__name__}: {first_line(first)})",
        f"Look at {page}, the network and HF_ENDPOINT ({constants.ENDPOINT}), and try again. "
        "--offline reads the local cache; a directory that `hf download` wrote is read, too.",
    )


HASH = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class Commit:
    """A commit of a repository.

    Attributes:
        repository: the repository, with the requested revision.
        sha: the commit.
        files: names of its files; if the Hub did not answer, of those on this machine.
        unasked: why the Hub was not asked or did not answer; empty if it answered.
    """

    repository: Repository
    sha: str
    files: tuple[str, ...] = ()
    unasked: str = ""

    @property
    def note(self) -> Note:
        """Return a warning if the cache may be older than the Hub."""
        name, revision, short = self.repository.name, self.repository.revision, self.sha[:12]
        of = "" if HASH.fullmatch(revision) else f" of {revision}"
        if self.unasked and of:
            text = f"{name} is the cached version, commit {short}{of}: {self.unasked}"
            return Note(level="warning", code="hub-cache", text=text)
        text = f"{name} is read at commit {short}{of}"
        return Note(level="info", code="hub-commit", text=text)

    def remember(self) -> None:
        """Record the commit of a branch or tag in the cache, as the clients of the Hub do."""
        revision = self.repository.revision
        if self.unasked or HASH.fullmatch(revision):
            return
        # Files are downloaded by commit, so the cache does not learn the branch.
        reference = self.repository.cache / "refs" / revision
        with suppress(OSError):  # a read-only cache still works for reading
            reference.parent.mkdir(parents=True, exist_ok=True)
            reference.write_text(self.sha)


def is_offline(*, asked: bool) -> bool:
    """Say whether connections are forbidden, by the option or by the environment."""
    from huggingface_hub import constants

    return asked or constants.HF_HUB_OFFLINE


def find_commit(repository: Repository, *, offline: bool) -> Commit:
    """Return the commit of a revision.

    If the Hub does not answer, the commit in the cache is used.

    Raises:
        InputError: access failed; the message gives the reason.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import (
        HFValidationError,
        OfflineModeIsEnabled,
        RevisionNotFoundError,
    )

    name, revision = repository.name, repository.revision
    try:
        cache = repository.cache
    except HFValidationError as error:
        raise explain_refusal(error, repository) from error
    unasked, denied = "the Hub was not contacted (--offline or HF_HUB_OFFLINE)", False
    refused: Exception = OfflineModeIsEnabled(OFFLINE)
    if not is_offline(asked=offline):
        try:
            info = HfApi().repo_info(
                name,
                repo_type=repository.kind,
                revision=revision,
                timeout=constants.HF_HUB_ETAG_TIMEOUT,
            )
        except Exception as error:  # every HTTP library has its own exceptions
            refused, unasked = error, explain_refusal(error, repository).message
            # If the Hub denies a revision, the connection works: the cache is not used instead.
            denied = isinstance(error, (ValueError, RevisionNotFoundError))
        else:
            files = tuple(file.rfilename for file in getattr(info, "siblings", None) or ())
            return Commit(repository, str(info.sha), files)
    if denied:
        raise explain_refusal(refused, repository) from refused
    reference = cache / "refs" / revision
    sha = reference.read_text().strip() if reference.is_file() else revision
    snapshot = cache / "snapshots" / sha
    if not snapshot.is_dir():
        raise explain_refusal(refused, repository) from refused
    stored = (p.relative_to(snapshot).as_posix() for p in snapshot.rglob("*") if p.is_file())
    return Commit(repository, sha, tuple(sorted(stored)), unasked)


@contextmanager
def silence_clients() -> Iterator[None]:
    """Silence progress bars and warnings of the Hub's clients inside the block."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with hub_bars(), warnings.catch_warnings(), redirect_stderr(StringIO()):
            disable_progress_bars()
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


@contextmanager
def hub_bars() -> Iterator[None]:
    """Restore the setting of progress bars after the block: other libraries change it, too."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    restore = disable_progress_bars if are_progress_bars_disabled() else enable_progress_bars
    try:
        yield
    finally:
        restore()


@contextmanager
def hub_access(*, offline: bool) -> Iterator[None]:
    """Inside the block, forbid connections to the Hub if the options say so."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or offline
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


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
