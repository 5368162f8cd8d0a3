"""Which commit of a repository is read: asked of the Hub, or of the cache where it may not be."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from lipaudit.data.hub.refusal import OFFLINE, Repository, not_cached, refusal
from lipaudit.results import Note

HASH = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class Commit:
    """A state of a repository.

    Attributes:
        repository: whose, and the revision that was asked for.
        sha: the commit.
        files: the names of its files; of those on this machine where the Hub did not answer.
        unasked: why the Hub was not asked, or did not answer; empty where it did.
    """

    repository: Repository
    sha: str
    files: tuple[str, ...] = ()
    unasked: str = ""

    @property
    def note(self) -> Note:
        """What must be said of it: a warning where the cache may be behind the Hub."""
        name, revision, short = self.repository.name, self.repository.revision, self.sha[:12]
        of = "" if HASH.fullmatch(revision) else f" of {revision}"
        if self.unasked and of:
            text = f"{name} is as it was when it was fetched, commit {short}{of}: {self.unasked}"
            return Note(level="warning", code="hub-cache", text=text)
        text = f"{name} is read at commit {short}{of}"
        return Note(level="info", code="hub-commit", text=text)

    def remember(self) -> None:
        """Let the cache know the commit of a branch or tag, as its clients do for their own."""
        revision = self.repository.revision
        if self.unasked or HASH.fullmatch(revision):
            return
        reference = _cache(self.repository) / "refs" / revision
        with suppress(OSError):  # a cache that cannot be written is read all the same
            reference.parent.mkdir(parents=True, exist_ok=True)
            reference.write_text(self.sha)


def is_offline(*, asked: bool) -> bool:
    """Say whether no connection may be opened: by the option, or by the environment."""
    from huggingface_hub import constants

    return asked or constants.HF_HUB_OFFLINE


def find_commit(repository: Repository, *, offline: bool) -> Commit:
    """Ask for the commit of a revision.

    Where the Hub does not answer, and what was fetched before is in the cache, that is taken.

    Raises:
        InputError: it cannot be had, with the reason.
    """
    from huggingface_hub import HfApi, constants

    if is_offline(asked=offline):
        return _kept(repository, "the Hub was not asked (--offline or HF_HUB_OFFLINE)", OFFLINE)
    try:
        info = HfApi().repo_info(
            repository.name,
            repo_type=repository.kind,
            revision=repository.revision,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
    except Exception as error:  # every HTTP library has exceptions of its own
        return _instead(repository, error)
    files = tuple(file.rfilename for file in getattr(info, "siblings", None) or ())
    return Commit(repository, str(info.sha), files)


def _instead(repository: Repository, error: Exception) -> Commit:
    from huggingface_hub.errors import HFValidationError, RevisionNotFoundError

    refused = refusal(error, repository)
    commit = _cached(repository, refused.message)
    if commit is None or isinstance(error, (HFValidationError, RevisionNotFoundError)):
        raise refused from error
    return commit


def _kept(repository: Repository, unasked: str, why: str) -> Commit:
    commit = _cached(repository, unasked)
    if commit is None:
        raise not_cached(repository, why)
    return commit


def _cached(repository: Repository, unasked: str) -> Commit | None:
    """Return the commit that the cache knows for a revision."""
    folder, revision = _cache(repository), repository.revision
    reference = folder / "refs" / revision
    sha = reference.read_text().strip() if reference.is_file() else revision
    snapshot = folder / "snapshots" / sha
    if not snapshot.is_dir():
        return None
    files = (p.relative_to(snapshot).as_posix() for p in snapshot.rglob("*") if p.is_file())
    return Commit(repository, sha, tuple(sorted(files)), unasked)


def _cache(repository: Repository) -> Path:
    from huggingface_hub import constants

    parts = (f"{repository.kind}s", *repository.name.split("/"))
    return Path(constants.HF_HUB_CACHE) / constants.REPO_ID_SEPARATOR.join(parts)


@contextmanager
def hushed() -> Iterator[None]:
    """Silence what the clients of the Hub draw and warn of while the block runs."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with hub_bars(), warnings.catch_warnings(), redirect_stderr(StringIO()):
            _draw(bars=False)
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


@contextmanager
def hub_bars() -> Iterator[None]:
    """Have bars drawn or not as before when the block ends: other libraries switch them too."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled

    drawn = not are_progress_bars_disabled()
    try:
        yield
    finally:
        _draw(bars=drawn)


def _draw(*, bars: bool) -> None:
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    (enable_progress_bars if bars else disable_progress_bars)()


@contextmanager
def hub_access(*, offline: bool) -> Iterator[None]:
    """Forbid connections to the Hub, where asked to, while the block runs."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or offline
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
