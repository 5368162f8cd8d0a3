"""The Hugging Face Hub: repositories, their commits, refusals, and data sets."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from huggingface_hub import constants

from lipaudit import errors
from lipaudit.data.tables import SampleTable
from lipaudit.errors import InputError, LipauditError, explain_failure
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
        folder = "datasets/" if self.kind == "dataset" else ""
        return f"{constants.ENDPOINT}/{folder}{self.name}"

    @property
    def cache(self) -> Path:
        """Return the folder of the repository in the local cache."""
        from huggingface_hub.file_download import repo_folder_name

        folder = repo_folder_name(repo_id=self.name, repo_type=self.kind)
        return Path(constants.HF_HUB_CACHE) / folder


# Message and advice by the name of the client's exception.
REFUSALS = {
    "GatedRepoError": (
        "{what} is gated: this user has no access",
        f"Request access on {{page}}, then {LOG_IN}.",
    ),
    "RepositoryNotFoundError": (
        "{what} does not exist on the Hub, or it is private",
        f"Check the name; for a private one {LOG_IN}.",
    ),
    "RevisionNotFoundError": (
        "{what} has no revision {revision!r}",
        "Its branches and tags are listed on {page}/tree/main.",
    ),
    "HFValidationError": ("{name!r} is not a valid repository name", "Write hf:ORG/NAME."),
    "OfflineModeIsEnabled": (
        f"{{what}} at {{revision}} is not in the local cache, and {OFFLINE}",
        "Fetch it while there is a connection: `hf download{option} {name}`.",
    ),
}


def explain_refusal(error: Exception, repository: Repository) -> InputError:
    """Return an error that explains why access to a repository failed.

    Args:
        error: the exception of the Hub's client.
        repository: the repository.
    """
    # What the messages may mention: "{name}", "{revision}", "{page}"...
    facts = {
        **vars(repository),
        "page": repository.page,
        "what": f"the {KINDS[repository.kind]} {repository.name}",
        "option": "",
    }
    if repository.kind == "dataset":
        facts["option"] = " --repo-type dataset"
    # An exception may be the cause of another one, or have base classes. The first class whose
    # name is in `REFUSALS` gives the message.
    for cause in errors.list_causes(error):
        for kind in type(cause).__mro__:
            if kind.__name__ in REFUSALS:
                message, advice = REFUSALS[kind.__name__]
                return InputError(message.format(**facts), advice.format(**facts))
    first = error.__cause__ or error
    reason = f"{type(first).__name__}: {errors.first_line(first)}"
    return InputError(
        f"{facts['what']} cannot be downloaded ({reason})",
        f"Look at {facts['page']}, the network and HF_ENDPOINT ({constants.ENDPOINT}), and try "
        "again. --offline reads the local cache; a directory that `hf download` wrote is read, "
        "too.",
    )


@contextmanager
def explain_refusals(repository: Repository) -> Iterator[None]:
    """Turn exceptions of the Hub's clients inside the block into an error with the reason.

    Raises:
        InputError: the block raised an exception of another library.
    """
    try:
        yield
    except LipauditError:
        raise
    except Exception as error:  # every HTTP library has its own exceptions
        if errors.is_out_of_memory(error):
            raise
        raise explain_refusal(error, repository) from error


HASH = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class Commit:
    """A commit of a repository.

    Attributes:
        repository: the repository, with the requested revision.
        sha: the commit.
        files: names of its files; if the Hub did not answer, of those on this machine.
        no_answer: why the Hub was not asked or did not answer; empty if it answered.
    """

    repository: Repository
    sha: str
    files: tuple[str, ...] = ()
    no_answer: str = ""

    @property
    def note(self) -> Note:
        """Return the note on the commit; a warning if the cache may be older than the Hub."""
        name = self.repository.name
        revision = self.repository.revision
        commit = f"commit {self.sha[:12]}"
        is_fixed = HASH.fullmatch(revision)  # the revision is a commit, and cannot change
        if not is_fixed:
            commit = f"{commit} of {revision}"
        if is_fixed or not self.no_answer:
            return Note.info("hub-commit", f"{name} is read at {commit}")
        return Note.warn("hub-cache", f"{name} is the cached version, {commit}: {self.no_answer}")

    def record_revision(self) -> None:
        """Record the commit of a branch or tag in the cache, as the clients of the Hub do."""
        revision = self.repository.revision
        if self.no_answer or HASH.fullmatch(revision):
            return
        # Files are downloaded by commit, so the cache does not record the branch by itself.
        reference = self.repository.cache / "refs" / revision
        with suppress(OSError):  # a read-only cache still works for reading
            reference.parent.mkdir(parents=True, exist_ok=True)
            reference.write_text(self.sha)


def find_commit(repository: Repository, *, offline: bool) -> Commit:
    """Return the commit of the revision of a repository: of a branch, a tag or a commit.

    If the Hub does not answer, or must not be contacted, the commit in the local cache is used.

    Args:
        repository: the repository, with the revision.
        offline: True if the Hub must not be contacted.

    Raises:
        InputError: access failed, or the cache cannot be read; the message gives the reason.
    """
    from huggingface_hub.errors import OfflineModeIsEnabled, RevisionNotFoundError

    with explain_refusals(repository):
        cache = repository.cache  # raises an error if the name is malformed
        # `no_answer` is the reason, in words, why the Hub does not name the commit. `refusal` is
        # the exception to raise if the cache does not have the commit, either.
        if offline or constants.HF_HUB_OFFLINE:
            no_answer = "the Hub was not contacted (--offline or HF_HUB_OFFLINE)"
            refusal: Exception = OfflineModeIsEnabled(OFFLINE)
        else:
            try:
                return _ask_hub(repository)
            except (ValueError, RevisionNotFoundError):
                # The name is malformed, or the Hub has no such revision: do not use an old cache.
                raise
            except Exception as error:  # every HTTP library has its own exceptions
                no_answer = explain_refusal(error, repository).message
                refusal = error
        advice = "Check its permissions, remove it, or set HF_HOME to another folder."
        with explain_failure(f"the cache {cache} cannot be read", advice, OSError, ValueError):
            commit = _find_cached(repository, no_answer)
        if commit is None:
            raise refusal
        return commit


def _ask_hub(repository: Repository) -> Commit:
    """Return the commit that the Hub names; the Hub's client raises an error without an answer."""
    from huggingface_hub import HfApi

    info = HfApi().repo_info(
        repository.name,
        repo_type=repository.kind,
        revision=repository.revision,
        timeout=constants.HF_HUB_ETAG_TIMEOUT,
    )
    files = tuple(file.rfilename for file in getattr(info, "siblings", None) or ())
    return Commit(repository, str(info.sha), files)


def _find_cached(repository: Repository, no_answer: str) -> Commit | None:
    """Return the commit in the local cache, with the files there; None if it is not cached.

    Args:
        repository: the repository, with the revision.
        no_answer: why the Hub did not name the commit.
    """
    # refs/REVISION holds the commit of a branch or tag, snapshots/COMMIT its files.
    reference = repository.cache / "refs" / repository.revision
    sha = repository.revision
    if reference.is_file():
        sha = reference.read_text().strip()
    snapshot = repository.cache / "snapshots" / sha
    if not snapshot.is_dir():
        return None
    files = [p.relative_to(snapshot).as_posix() for p in snapshot.rglob("*") if p.is_file()]
    return Commit(repository, sha, files=tuple(sorted(files)), no_answer=no_answer)


@contextmanager
def silence_clients() -> Iterator[None]:
    """Silence progress bars and warnings of the Hub's clients inside the block."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    quiet = redirect_stderr(StringIO())
    # The callbacks of `undo` restore the settings when the block ends.
    with restore_hub_bars() as undo, warnings.catch_warnings(action="ignore"), quiet:
        undo.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)
        disable_progress_bars()
        yield


def restore_hub_bars() -> ExitStack:
    """Return a context that restores the Hub's setting of progress bars when it ends.

    The caller may add further settings to restore, with `callback`.
    """
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    undo = ExitStack()
    undo.callback(disable_progress_bars if are_progress_bars_disabled() else enable_progress_bars)
    return undo


def hub_access(*, offline: bool) -> AbstractContextManager[Any]:
    """Return a context in which connections to the Hub are forbidden if `offline` is True."""
    return patch.object(constants, "HF_HUB_OFFLINE", constants.HF_HUB_OFFLINE or offline)


FORM = "hf:ORG/NAME[SPLIT], hf:ORG/NAME/CONFIGURATION[SPLIT] or hf:ORG/NAME[SPLIT]@REVISION"


def parse_reference(text: str) -> tuple[Repository, str, str]:
    """Read `NAME[/CONFIGURATION][[SPLIT]][@REVISION]`; a revision may precede or follow the split.

    "nyu-mll/glue/sst2[test[:10%]]@abc" names the data set nyu-mll/glue at revision abc, the
    configuration sst2, and a part of the split test, in the syntax of `datasets`.

    Returns:
        The data set, its configuration (empty: the default one), and the split (default: test).

    Raises:
        InputError: the text names no data set.
    """
    # Groups: before the split; the split in brackets; a revision behind it.
    match = re.fullmatch(r"([^\[\]]+)(?:\[(.+)\])?(?:@([^\[\]]+))?", text)
    if match is None:
        raise InputError(f"hf:{text} names no data set", f"Write {FORM}.")
    before_split, split, revision_after = match.groups()
    path, _, revision_before = before_split.partition("@")
    revision = revision_after or revision_before or "main"
    parts = path.split("/", 2)  # ORG, NAME, and perhaps the configuration
    name = "/".join(parts[:2])
    config = "".join(parts[2:])
    return Repository(name, "dataset", revision), config, split or "test"


def read_dataset(text: str, *, offline: bool) -> tuple[SampleTable, Commit]:
    """Read a data set of the Hub (see `parse_reference`); only the split is downloaded.

    Raises:
        InputError: `datasets` is not installed, or the data set or split does not exist.
    """
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled

    advice = "pip install 'lipaudit[datasets]'"
    with explain_failure("--data hf: needs the library `datasets`", advice, ImportError):
        import datasets
    repository, config, split = parse_reference(text)
    origin = f"hf:{text}"
    whole_split = split.partition("[")[0].strip()  # test[:10%] -> test
    with ExitStack() as undo:
        undo.enter_context(hub_access(offline=offline))
        if are_progress_bars_disabled() and datasets.is_progress_bar_enabled():
            datasets.disable_progress_bars()  # no bar if the Hub's client draws none
            undo.callback(datasets.enable_progress_bars)
        commit = find_commit(repository, offline=offline)
        whole = _open_table(commit, config, whole_split)
        commit.record_revision()
    data = _select_rows(whole, whole_split, split)
    if not len(data):
        raise InputError(f"{origin} is empty", "Choose another split.")
    classes = {}
    for name, kind in data.features.items():
        names = getattr(kind, "names", None)  # a label column has the names of its classes
        if names:
            classes[name] = names
    places = [f"index {i}" for i in range(len(data))]
    return SampleTable(origin, data.column_names, places, data, classes=classes), commit


def _select_rows(table: Any, whole: str, split: str) -> Any:
    """Return the rows of a part of a split, such as test[:10%].

    Args:
        table: the table of the whole split.
        whole: name of the whole split.
        split: the part, in the syntax of `datasets`.

    Raises:
        InputError: the part cannot be read.
    """
    import datasets

    text = f"the split {split!r} cannot be read"
    advice = "Name a split, or a part of one: test[:100], test[10%:20%]."
    with explain_failure(text, advice, ValueError, AssertionError):
        instruction = datasets.ReadInstruction.from_spec(split)
        # A single part, with its rows from `from_` (None: from the beginning) to before `to`.
        (part,) = instruction.to_absolute({whole: len(table)})
    return table.select(range(part.from_ or 0, part.to))


def _open_table(commit: Commit, config: str, split: str) -> Any:
    """Return the table of a whole split; download and convert the split on first use.

    Args:
        commit: the commit of the data set.
        config: the configuration of the data set; "" for the default one.
        split: the split, such as test.
    """
    import datasets

    # The usual folder of `datasets` has all splits of a data set. Here each split has a folder.
    name = commit.repository.name
    tables = Path(datasets.config.HF_DATASETS_CACHE) / "lipaudit" / name.replace("/", "___")
    folder = tables / commit.sha / (config or "default") / split
    if not folder.is_dir():
        if commit.no_answer:
            raise InputError(
                f"the split {split!r} of {name} is not in the local cache, and {commit.no_answer}",
                "Run it once with a connection.",
            )
        with explain_refusals(commit.repository):
            _download_split(commit, config, split, folder)
    files = sorted(folder.glob("*.arrow"))
    return datasets.concatenate_datasets([datasets.Dataset.from_file(str(f)) for f in files])


def _download_split(commit: Commit, config: str, split: str, folder: Path) -> None:
    """Download a split of a data set and write it to a folder, as .arrow files.

    Args:
        commit: the commit of the data set.
        config: the configuration of the data set; "" for the default one.
        split: the split, such as test.
        folder: where to write.

    Raises:
        InputError: the configuration or the split is unknown.
    """
    import datasets

    name = commit.repository.name
    try:
        builder = datasets.load_dataset_builder(name, config or None, revision=commit.sha)
    except ValueError:  # perhaps an unknown configuration: then the error lists them
        known = datasets.get_dataset_config_names(name, revision=commit.sha)
        _require_known("configuration", name=config, known=known, place=name)
        raise
    files = builder.config.data_files
    _require_known("split", name=split, known=files, place=name)
    # `datasets` would download all splits: for a large data set that takes hours.
    builder.config.data_files = datasets.data_files.DataFilesDict({split: files[split]})
    builder.download_and_prepare(output_dir=str(folder), verification_mode="no_checks")


def _require_known(what: str, name: str, known: Any, place: str) -> None:
    """Refuse an unknown split or configuration, and list the known ones.

    Args:
        what: split or configuration, for the message.
        name: the requested split or configuration; "" if none was given, although there are
            several.
        known: the splits or configurations of the data set.
        place: the data set, for the message.

    Raises:
        InputError: the message suggests similar names.
    """
    names = list(map(str, known))
    if name in names:
        return
    listed = ", ".join(names) or "none"
    if name:
        fault = f"no {what} {name!r} (it has: {listed})"
    else:
        fault = f"several {what}s: {listed}"
    advice = f"Write {FORM}."
    suggestions = errors.similar(name, names) or names
    if suggestions:
        advice = f"Did you mean {suggestions[0]!r}? {advice}"
    raise InputError(f"{place} has {fault}", advice)
