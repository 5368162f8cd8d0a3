"""Why something of the Hugging Face Hub cannot be had, and what to do about it."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from lipaudit.errors import InputError, similar

Kind = Literal["model", "dataset"]
KINDS: dict[Kind, str] = {"model": "model", "dataset": "data set"}
HUB = "the Hugging Face Hub"
LOG_IN = "log in with `hf auth login` or set HF_TOKEN"
OFFLINE = "--offline (or HF_HUB_OFFLINE) forbids to fetch it"

# By name: the client's HTTP library has changed twice, and its exceptions with it.
TIMEOUTS = {"TimeoutException", "TimeoutError", "Timeout"}
BROKEN = {"TransportError", "NetworkError", "ConnectionError", "RequestException", "URLError"}


@dataclass(frozen=True)
class Repository:
    """What is asked of the Hub.

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
        """Its address for a browser."""
        from huggingface_hub import constants

        folder = "datasets/" if self.kind == "dataset" else ""
        return f"{constants.ENDPOINT}/{folder}{self.name}"


Words = tuple[str, str]
"""What happened, and what to do about it."""


def refusal(error: Exception, repository: Repository) -> InputError:
    """Return the error that says why a repository cannot be had, by what its client raised."""
    causes = list(_causes(error))
    for reason in REASONS:
        for cause in causes:
            if words := reason(cause, repository):
                return InputError(*words)
    what, cause = f"{KINDS[repository.kind]} {repository.name}", error.__cause__ or error
    return InputError(
        f"the {what} cannot be had ({type(cause).__name__}: {first_line(cause)})",
        f"Look at {repository.page}, or download it elsewhere and give its directory.",
    )


def first_line(error: BaseException) -> str:
    """Return what an exception says, on one line."""
    return str(error).strip().partition("\n")[0]


def not_cached(repository: Repository, why: str) -> InputError:
    """Return the error on something that may not be asked for, or can not, and is not here."""
    option = "" if repository.kind == "model" else " --repo-type dataset"
    elsewhere = {
        "model": "give its directory as MODEL",
        "dataset": "save it there with save_to_disk, and give hf:DIRECTORY as --data",
    }
    at = "" if repository.revision == "main" else f" at {repository.revision}"
    return InputError(
        f"{repository.name}{at} is not in the local cache, and {why}",
        f"Fetch it while there is a connection (`hf download{option} {repository.name}`), or "
        f"download it elsewhere and {elsewhere[repository.kind]}.",
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _denied(error: BaseException, repository: Repository) -> Words | None:
    """Put into words that there is no such thing, or none for this user."""
    from huggingface_hub import errors

    name, kind = repository.name, KINDS[repository.kind]
    if isinstance(error, errors.GatedRepoError):
        sent = "the token that was sent has none" if _token() else "no token was sent"
        text = f"the {kind} {name} is gated: its owners give access to those who ask, and {sent}"
        return text, f"Ask for it on {repository.page}, then {LOG_IN}."
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the {kind} {name} has no revision {repository.revision!r}", _revisions(repository)
    if isinstance(error, errors.RepositoryNotFoundError):
        text = f"there is no {kind} {name} on {HUB}, or it is private"
        return text, f"Check the name; for a private one {LOG_IN}."
    if isinstance(error, errors.HFValidationError):
        return f"{name!r} is no name of a repository", "Write hf:ORG/NAME."
    return None


def _token() -> str | None:
    from huggingface_hub import get_token

    return get_token()


def _revisions(repository: Repository) -> str:
    """Name the revisions that there are, the nearest ones first."""
    from huggingface_hub import HfApi

    try:
        refs = HfApi().list_repo_refs(repository.name, repo_type=repository.kind)
    except Exception:  # it was an error already: this is but for its advice
        return "Name a branch, a tag or a commit."
    names = [ref.name for ref in (*refs.branches, *refs.tags)]
    close = similar(repository.revision, names)
    near = f"Did you mean {' or '.join(close)}? " if close else ""
    return f"{near}Its branches and tags are: {', '.join(names[:10])}."


def _answered(error: BaseException, _repository: Repository) -> Words | None:
    """Put into words the status that the Hub answered with."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is None:
        return None
    if status == 429:
        return _too_many(error)
    if status >= 500:
        text = f"{HUB} has a fault of its own for now (it answers {status})"
        return text, "Try again later; --offline reads what is in the local cache."
    if status == 401:
        text = f"{HUB} does not know the token that was sent"
        return text, "Log in anew with `hf auth login`, or unset HF_TOKEN."
    said = getattr(error, "server_message", None) or first_line(error)
    return f"{HUB} answers {status}: {said}", f"If it is a matter of access, {LOG_IN}."


def _too_many(error: Any) -> Words:
    after = error.response.headers.get("retry-after", "")
    when = f"in {after} seconds" if after.isdigit() else "in some minutes"
    text = f"{HUB} takes no more requests from here for now (429: too many)"
    return text, f"Try again {when}; its limit is higher for those who {LOG_IN}."


def _uncached(error: BaseException, repository: Repository) -> Words | None:
    from huggingface_hub import errors

    if not isinstance(error, errors.OfflineModeIsEnabled):
        return None
    absent = not_cached(repository, OFFLINE)
    return absent.message, absent.advice


def _unheard(error: BaseException, _repository: Repository) -> Words | None:
    """Put into words that nothing came back, or not all of it."""
    from huggingface_hub import constants

    names = {kind.__name__ for kind in type(error).__mro__}
    if names & TIMEOUTS:
        text = f"{HUB} did not answer in time ({constants.ENDPOINT})"
        return text, "Try again; HF_HUB_DOWNLOAD_TIMEOUT=60 waits longer."
    if names & BROKEN:
        reason = first_line(error) or type(error).__name__
        text = f"there is no connection to {HUB} ({constants.ENDPOINT}: {reason})"
        return text, (
            "Check the network, the proxy and HF_ENDPOINT, and try again; --offline reads what is "
            "in the local cache; what `hf download` fetched elsewhere can be given as a directory."
        )
    return None


def _full(error: BaseException, repository: Repository) -> Words | None:
    from huggingface_hub import constants

    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        text = f"there is no room left on the disk for {repository.name}"
    elif isinstance(error, PermissionError):
        text = f"the local cache cannot be written ({error.strerror}: {error.filename})"
    else:
        return None
    return text, f"The cache is {constants.HF_HUB_CACHE}: make room, or set HF_HOME to another."


REASONS: tuple[Callable[[BaseException, Repository], Words | None], ...] = (
    _denied,
    _answered,
    _uncached,
    _unheard,
    _full,
)
"""Each puts an exception into words, if it is of its kind; the first that does is right."""
