"""A Hugging Face Hub on 127.0.0.1, as far as its clients need one, that can misbehave.

A test that takes the fixture `hub` talks to it through the real clients (huggingface_hub,
datasets, timm), with a cache of its own. `hub.add` puts a repository there, `hub.log` says what
was asked, `hub.downloads` what was sent.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

LARGE = (".safetensors", ".bin", ".parquet")
TOKEN = "hf_good"


@dataclass
class Repository:
    """Files by revision, and how the Hub behaves when it is asked for them."""

    revisions: dict[str, dict[str, bytes]]
    gated: bool = False
    private: bool = False
    status: int | None = None
    files_status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut: int = 0
    stall: float = 0.0

    def commit(self, revision: str) -> str | None:
        """Return the commit of a branch, a tag or a commit; None where there is no such thing."""
        known = {name: _commit(files) for name, files in self.revisions.items()}
        return known.get(revision, revision if revision in known.values() else None)

    def files(self, commit: str) -> dict[str, bytes]:
        """Return what there was at a commit."""
        return next(files for files in self.revisions.values() if _commit(files) == commit)


class Hub:
    """The server, and what it was asked."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.log: list[str] = []
        self.closing = threading.Event()
        handler = type("Bound", (_Answers,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def add(
        self,
        name: str,
        files: dict[str, bytes],
        revisions: dict[str, dict[str, bytes]] | None = None,
        **conduct: Any,
    ) -> str:
        """Put a repository there (`datasets/ORG/NAME`: a data set); return its commit."""
        self.repositories[name] = Repository({"main": files} | (revisions or {}), **conduct)
        return _commit(files)

    def downloads(self) -> list[str]:
        """Return the files whose content was sent, sorted."""
        sent = (line for line in self.log if line.startswith("GET /") and "/resolve/" in line)
        return sorted({line.rpartition("/resolve/")[2].partition("/")[2] for line in sent})

    def __enter__(self) -> "Hub":
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

    def _answer(self, body: dict[str, Any] | None = None) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.log.append(f"{self.command} /{path}")
        parts = path.removeprefix("api/").removeprefix("models/").split("/")
        kind = [parts.pop(0)] if parts[0] == "datasets" else []
        name, rest = "/".join([*kind, *parts[:2]]), parts[2:]
        repository, known = self.hub.repositories.get(name), self._token() == TOKEN
        if repository is None or (repository.private and not known):
            return self._error(404 if known else 401, "Repository not found", "RepoNotFound")
        if repository.status:
            return self._error(repository.status, "The Hub is not well", **repository.headers)
        commit = repository.commit(rest[1] if len(rest) > 1 else "main")
        if commit is None:
            return self._error(404, f"Invalid rev id: {rest[1]}", "RevisionNotFound")
        verb, shut = rest[0] if rest else "revision", repository.gated and not known
        if shut and (verb != "revision" or not path.startswith("api/")):
            status = 403 if self._token() else 401
            return self._error(status, f"Access to {name} is restricted", "GatedRepo")
        files = repository.files(commit)
        if path.startswith("api/"):
            return self._facts(name, repository, commit, verb, "/".join(rest[2:]), body)
        if repository.files_status:
            return self._error(repository.files_status, "The Hub is not well")
        self._file(repository, commit, "/".join(rest[2:]), files)
        return None

    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _facts(
        self, name: str, repository: Repository, commit: str, verb: str, under: str, body: Any
    ) -> None:
        files = repository.files(commit)
        if verb == "refs":
            refs = [{"name": n, "ref": n, "targetCommit": _commit(f)}
                    for n, f in repository.revisions.items()]  # fmt: skip
            return self._json({"branches": refs, "tags": [], "converts": []})
        if verb == "tree":
            return self._json(_listing(files, under, whole="recursive=True" in self.path))
        if verb == "paths-info":
            return self._json([_entry(f, files[f]) for f in (body or {})["paths"] if f in files])
        siblings = [{"rfilename": f} for f in files]
        return self._json({"_id": "0", "id": name.removeprefix("datasets/"), "sha": commit,
                           "private": repository.private, "gated": repository.gated,
                           "tags": [], "siblings": siblings})  # fmt: skip

    def _file(
        self, repository: Repository, commit: str, file: str, files: dict[str, bytes]
    ) -> None:
        if file not in files:
            self._error(404, "Entry not found", "EntryNotFound", **{"X-Repo-Commit": commit})
            return
        content, large = files[file], file.endswith(LARGE)
        digest, size = hashlib.sha256(content).hexdigest(), len(content)
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        headers = {"X-Repo-Commit": commit, "ETag": digest, "Content-Length": str(size - first)}
        if first:
            headers["Content-Range"] = f"bytes {first}-{size - 1}/{size}"
        if large:
            headers |= {"X-Linked-Etag": digest, "X-Linked-Size": str(size)}
        self._head(206 if first else 200, headers)
        if self.command == "GET" and large and (repository.cut or repository.stall):
            self.wfile.write(content[first:][:40])
            self.wfile.flush()
            self.hub.closing.wait(repository.stall)
            repository.cut = max(repository.cut - 1, 0)
            self.close_connection = True
        elif self.command == "GET":
            self.wfile.write(content[first:])

    def _json(self, value: object, status: int = 200, **headers: str) -> None:
        content = json.dumps(value).encode()
        facts = {"Content-Type": "application/json", "Content-Length": str(len(content))}
        self._head(status, facts | headers)
        if self.command != "HEAD":
            self.wfile.write(content)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _error(self, status: int, text: str, code: str = "", **headers: str) -> None:
        told = {"X-Error-Message": text} | ({"X-Error-Code": code} if code else {})
        self._json({"error": text}, status, **(told | headers))


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder, as a repository has them."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in paths}


def _commit(files: dict[str, bytes]) -> str:
    parts = [name.encode() + b"\0" + content for name, content in sorted(files.items())]
    return hashlib.sha1(b"\1".join(parts)).hexdigest()


def _listing(files: dict[str, bytes], under: str, *, whole: bool) -> list[dict[str, Any]]:
    """List a folder as the Hub does: all that is below, or its own files and folders."""
    start = f"{under}/" if under else ""
    inside = [f for f in files if f.startswith(start)]
    own = [f for f in inside if whole or "/" not in f.removeprefix(start)]
    folders = {start + f.removeprefix(start).partition("/")[0] for f in inside if f not in own}
    below = [{"type": "directory", "path": f, "oid": "0" * 40, "size": 0} for f in sorted(folders)]
    return [_entry(f, files[f]) for f in own] + below


def _entry(file: str, content: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(content).hexdigest()
    large = {"lfs": {"oid": digest, "size": len(content), "pointerSize": 135}}
    facts = {"type": "file", "path": file, "size": len(content), "oid": digest[:40]}
    return facts | (large if file.endswith(LARGE) else {})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """Serve a Hub of one's own, and let every client talk to it, with an empty cache."""
    from huggingface_hub import constants

    with Hub() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        # clients wait for seconds before they ask again
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _seconds: None)
        yield served
