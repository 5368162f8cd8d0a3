"""No command line and no file ends in an internal error; see fuzz.py for what is tried.

The long run: FUZZ_INPUTS=5000 FUZZ_SEED=1 python -m pytest -m slow tests/cli/test_fuzz.py
"""

from __future__ import annotations

import os
import socket

import pytest

from tests.cli import fuzz

ROUND = 50
"""Command lines for each directory of files."""


@pytest.fixture(scope="module")
def reports() -> list[str]:
    return fuzz.originals()


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    def refused(*_args, **_options):
        raise OSError("no network in a test")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")


def faults(root, reports, *, seed: int, inputs: int, seconds: float) -> list[str]:
    found = []
    for start in range(0, inputs, ROUND):
        with fuzz.playground(root, seed + start, reports, files=40) as files:
            typist = fuzz.Typist(seed + start, files)
            for _ in range(min(ROUND, inputs - start)):
                outcome = fuzz.run(typist.line(), seconds)
                if outcome.fault:
                    found.append(f"{outcome.args}: {outcome.fault}")
                    print(found[-1], flush=True)
    return found


def test_nothing_that_is_typed_is_a_bug(tmp_path, reports):
    assert faults(tmp_path, reports, seed=0, inputs=80, seconds=0.3) == []


@pytest.mark.slow(seconds=300)
def test_nothing_that_is_typed_is_a_bug_at_length(tmp_path, reports):
    inputs, seed = (
        int(os.environ.get("FUZZ_INPUTS", "3000")),
        int(os.environ.get("FUZZ_SEED", "1")),
    )
    assert faults(tmp_path, reports, seed=seed, inputs=inputs, seconds=2.0) == []
