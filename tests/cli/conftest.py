from contextlib import chdir
from pathlib import Path

import pytest
from click.testing import Result

from tests.commands import invoke


@pytest.fixture(autouse=True)
def _elsewhere(elsewhere):
    """Every test of a command begins there."""


@pytest.fixture(scope="session")
def audited(tmp_path_factory) -> tuple[Path, Result]:
    """A folder with an audit of the demo in `run/` and its baseline; how the audit ended."""
    folder = tmp_path_factory.mktemp("audited")
    with chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        done = invoke("audit", "demo", "-n", 4, "--run-dir", "run", "-o", "run.md", columns=80)
        invoke("baseline", "save", "run/report.json")
    return folder, done
