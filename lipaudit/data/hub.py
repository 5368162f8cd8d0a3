"""Data sets and models of the Hugging Face Hub: references, commits, and errors of access."""

from __future__ import annotations

import errno
import logging
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Literal

from lipaudit.errors import InputError, explain_failure, first_line, list_causes, similar
from lipaudit.tables import Note

Kind = Literal["model", "dataset"]
KINDS: dict[Kind, str] = {"model": "model", "dataset": "data set"}
HUB = "the Hugging Face Hub"
LOG_IN = "log in with `hf auth login` or set HF_TOKEN"
OFFLINE = "--offline (or HF_HUB_OFFLINE) forbids the download"

# Names of exceptions in all HTTP libraries that the client has used.
TIMEOUTS = {"TimeoutException", "TimeoutError", "Timeout"}
BROKEN = {"TransportError", "NetworkError", "ConnectionError", "RequestException", "URLError"}


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


Words = tuple[str, str]
"""An error message and its hint."""


def explain_refusal(error: Exception, repository: Repository) -> InputError:
    """Return the error that explains, from the client's exception, why access failed."""
    causes = list(list_causes(error))  # clients often wrap an exception twice
    # By name: the client has changed its HTTP library twice, and the exceptions with it.
    names = {kind.__name__ for cause in causes for kind in type(cause).__mro__}
    words = _word_denial(names, repository) or _word_answer(causes)
    words = words or _word_silence(causes, names, repository)
    if words is None:
        first, what = error.__cause__ or error, f"{KINDS[repository.kind]} {repository.name}"
        words = (
            f"the {what} cannot be downloaded ({type(first).__name__}: {first_line(first)})",
            f"Check {repository.page}, or download it elsewhere and give its directory.",
        )
    return InputError(*words)


def _word_absence(repository: Repository, why: str) -> Words:
    """Explain that a file is not on this machine, and that the Hub may not or cannot be asked."""
    option = "" if repository.kind == "model" else " --repo-type dataset"
    elsewhere = {
        "model": "give its directory as MODEL",
        "dataset": "save it there with save_to_disk, and give hf:DIRECTORY as --data",
    }
    at = "" if repository.revision == "main" else f" at {repository.revision}"
    return (
        f"{repository.name}{at} is not in the local cache, and {why}",
        f"Fetch it while there is a connection (`hf download{option} {repository.name}`), or "
        f"download it elsewhere and {elsewhere[repository.kind]}.",
    )


def _word_denial(names: set[str], repository: Repository) -> Words | None:
    """Explain that the repository does not exist, or that this user has no access."""
    from huggingface_hub import get_token

    what, page = f"{KINDS[repository.kind]} {repository.name}", repository.page
    if "GatedRepoError" in names:
        sent = "your token has no access" if get_token() else "no token was sent"
        text = f"the {what} is gated (access on request), and {sent}"
        return text, f"Request access on {page}, then {LOG_IN}."
    if "RevisionNotFoundError" in names:
        text = f"the {what} has no revision {repository.revision!r}"
        return text, f"Its branches and tags are listed on {page}/tree/main."
    if "RepositoryNotFoundError" in names:
        text = f"there is no {what} on {HUB}, or it is private"
        return text, f"Check the name; for a private one {LOG_IN}."
    if "HFValidationError" in names:
        return f"{repository.name!r} is not a valid repository name", "Write hf:ORG/NAME."
    return _word_absence(repository, OFFLINE) if "OfflineModeIsEnabled" in names else None


def _word_answer(causes: list[BaseException]) -> Words | None:
    """Explain the status code that the Hub answered."""
    error: Any = next((each for each in causes if hasattr(each, "response")), None)
    status = getattr(error and error.response, "status_code", None)
    if status is None:
        return None
    if status == 429:
        after = error.response.headers.get("retry-after", "")
        when = f"in {after} seconds" if after.isdigit() else "in a few minutes"
        text = f"{HUB} refuses further requests for now (429: too many requests)"
        return text, f"Try again {when}; to raise the limit, {LOG_IN}."
    if status >= 500:
        text = f"{HUB} has a temporary problem (status {status})"
        return text, "Try again later, or use --offline to read the local cache."
    if status == 401:
        text = f"{HUB} rejected the token"
        return text, "Log in again with `hf auth login`, or unset HF_TOKEN."
    answer = getattr(error, "server_message", None) or first_line(error)
    return f"{HUB} answers {status}: {answer}", f"If access is restricted, {LOG_IN}."


def _word_silence(
    causes: list[BaseException], names: set[str], repository: Repository
) -> Words | None:
    """Explain a missing or incomplete answer, or a full disk."""
    from huggingface_hub import constants

    if names & TIMEOUTS:
        text = f"{HUB} did not answer in time ({constants.ENDPOINT})"
        return text, "Try again, or set HF_HUB_DOWNLOAD_TIMEOUT=60 to wait longer."
    broken = (each for each in causes if BROKEN & {k.__name__ for k in type(each).__mro__})
    if error := next(broken, None):
        reason = first_line(error) or type(error).__name__
        text = f"there is no connection to {HUB} ({constants.ENDPOINT}: {reason})"
        return text, (
            "Check the network, the proxy and HF_ENDPOINT, and try again. Or use --offline "
            "to read the local cache, or give a directory that `hf download` wrote elsewhere."
        )
    cache = (
        f"Free space in the cache ({constants.HF_HUB_CACHE}), or set HF_HOME to another folder."
    )
    for each in causes:
        if isinstance(each, OSError) and each.errno == errno.ENOSPC:
            return f"the disk is full: no space for {repository.name}", cache
        if isinstance(each, PermissionError):
            return f"the local cache cannot be written ({each.strerror}: {each.filename})", cache
    return None


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
        reference = _find_cache(self.repository) / "refs" / revision
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
    from huggingface_hub.errors import HFValidationError, RevisionNotFoundError

    if is_offline(asked=offline):
        unasked = "the Hub was not contacted (--offline or HF_HUB_OFFLINE)"
        if commit := _find_cached(repository, unasked):
            return commit
        raise InputError(*_word_absence(repository, OFFLINE))
    try:
        info = HfApi().repo_info(
            repository.name,
            repo_type=repository.kind,
            revision=repository.revision,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
    except Exception as error:  # every HTTP library has its own exceptions
        refused = explain_refusal(error, repository)
        cached = _find_cached(repository, refused.message)
        # If the Hub denies a revision, the connection works: the cache is not used instead.
        if cached is None or isinstance(error, (HFValidationError, RevisionNotFoundError)):
            raise refused from error
        return cached
    files = tuple(file.rfilename for file in getattr(info, "siblings", None) or ())
    return Commit(repository, str(info.sha), files)


def _find_cached(repository: Repository, unasked: str) -> Commit | None:
    """Return the commit that the cache holds for a revision."""
    folder, revision = _find_cache(repository), repository.revision
    reference = folder / "refs" / revision
    sha = reference.read_text().strip() if reference.is_file() else revision
    snapshot = folder / "snapshots" / sha
    if not snapshot.is_dir():
        return None
    files = (p.relative_to(snapshot).as_posix() for p in snapshot.rglob("*") if p.is_file())
    return Commit(repository, sha, tuple(sorted(files)), unasked)


def _find_cache(repository: Repository) -> Path:
    from huggingface_hub import constants

    parts = (f"{repository.kind}s", *repository.name.split("/"))
    return Path(constants.HF_HUB_CACHE) / constants.REPO_ID_SEPARATOR.join(parts)


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

    def spell(self, **changes: str) -> str:
        """Write a reference as the user types it, with changes."""
        of = {"config": self.config, "split": self.split} | changes
        config = f"/{of['config']}" if of["config"] else ""
        at = "" if self.revision == "main" else f"@{self.revision}"
        return f"hf:{self.place}{config}[{of['split']}]{at}"


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
    place, config = re.fullmatch(r"([^/]*(?:/[^/]*)?)(?:/(.*))?", name).groups()  # type: ignore[union-attr]
    return Reference(place, config or None, split or DEFAULT_SPLIT, after or before or "main")


def open_split(reference: Reference, *, offline: bool) -> tuple[Any, Commit | None]:
    """Return the table of a split, and its commit.

    Raises:
        InputError: access failed; the message gives the reason.
    """
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled

    try:
        import datasets
    except ImportError as error:
        raise InputError(
            "--data hf: needs the library `datasets`, which is not installed",
            "pip install 'lipaudit[datasets]'",
        ) from error
    with ExitStack() as undo:
        if are_progress_bars_disabled() and datasets.is_progress_bar_enabled():
            datasets.disable_progress_bars()  # no bar if the Hub's client draws none
            undo.callback(datasets.enable_progress_bars)
        if Path(reference.place).is_dir():
            return _open_local(reference), None
        repository = Repository(reference.place, "dataset", reference.revision)
        commit = find_commit(repository, offline=offline)
        tables = {split: _open_table(reference, commit, split) for split in reference.splits}
        commit.remember()
        return _select_rows(reference, tables), commit


def _select_rows(reference: Reference, tables: dict[str, Any]) -> Any:
    import datasets

    with explain_failure(
        f"the split {reference.split!r} cannot be read",
        f"Use {reference.spell(split='test')}, or a part: test[:100], test[10%:20%].",
        ValueError,
        AssertionError,
    ):
        instruction = datasets.ReadInstruction.from_spec(reference.split)
        parts = instruction.to_absolute({split: len(table) for split, table in tables.items()})
    rows = (tables[p.splitname].select(range(p.from_ or 0, p.to)) for p in parts)
    return datasets.concatenate_datasets(list(rows))


def _open_local(reference: Reference) -> Any:
    """Read a directory: one written by `save_to_disk`, or one of data files."""
    import datasets

    path = Path(reference.place)
    with explain_failure(
        f"{path} cannot be read as a data set",
        "Give a directory written by save_to_disk, or a file or folder without hf:.",
    ):
        if (path / "state.json").is_file():
            return datasets.load_from_disk(str(path))
        written = (path / "dataset_dict.json").is_file()
        stored = (datasets.load_from_disk if written else datasets.load_dataset)(str(path))
    for split in reference.splits:
        _require_known("split", split, list(stored), reference)
    return _select_rows(reference, stored)


def _open_table(reference: Reference, commit: Commit, split: str) -> Any:
    """Return a whole split; download it and make a table if that is not done yet."""
    import datasets
    from huggingface_hub import HfApi, errors

    # Beside the tables of `datasets`, which hold every split.
    tables, repository = Path(datasets.config.HF_DATASETS_CACHE) / "lipaudit", commit.repository
    name = repository.name.replace("/", "___")
    folder = tables / name / commit.sha / (reference.config or "default") / split
    if not folder.is_dir():
        if commit.unasked:
            text = f"{reference.spell(split=split)} is not in the local cache"
            raise InputError(f"{text}, and {commit.unasked}", "Run it once with a connection.")
        try:
            _build_table(reference, commit, split, folder)
        except InputError:
            raise
        except Exception as error:  # every HTTP library has its own exceptions
            denial = error
            try:  # `datasets` drops the Hub's answer that this user has no access
                HfApi().auth_check(repository.name, repo_type=repository.kind)
            except errors.RepositoryNotFoundError as refused:
                denial = refused
            except Exception:  # then the first exception is reported
                pass
            raise explain_refusal(denial, repository) from error
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
    _require_known("split", split, [str(name) for name in files], reference)
    # `datasets` would download all splits: for a large data set that takes hours.
    builder.config.data_files = datasets.data_files.DataFilesDict({split: files[split]})
    builder.download_and_prepare(output_dir=str(folder), verification_mode="no_checks")


def _require_known(what: str, name: str, names: Iterable[str], reference: Reference) -> None:
    """Refuse an unknown split or configuration, and list the known ones.

    Raises:
        InputError: the message suggests similar names.
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
        f"Did you mean {reference.spell(**{key: close[0]})}?" if close else f"Write {FORM}.",
    )
