"""Every test runs offline, with OMP_NUM_THREADS threads (1); what is slow says how slow."""

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

from tests import shapes

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["NO_COLOR"] = "1"
os.environ.pop("FORCE_COLOR", None)

# The same examples on every machine, however slow. `--hypothesis-profile search` draws others.
REPEATABLE = settings(
    derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", REPEATABLE, derandomize=False, max_examples=1000)
settings.register_profile("repeatable", REPEATABLE)
settings.load_profile("repeatable")
shapes.install()
gc.disable()  # until tests are collected: hardly anything that is imported is ever freed


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Work in an empty directory, with a cache of its own and a wide terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def blank_charts():
    """Leave the charts of pages out, for files that ask for it and read none: each takes 0.2 s."""
    with pytest.MonkeyPatch.context() as patch:
        # No <svg>, so that a test that looks for a chart fails.
        patch.setattr("lipaudit.report.markup.draw_svg", lambda _block: "<p>no chart here</p>")
        yield


def pytest_configure(config):
    # xdist puts files of few tests last, which are the longest; as collected, short ones are last.
    config.option.loadscopereorder = False


def pytest_collection_finish():
    """Collect garbage of tests alone: modules are passed over, and that seldom.

    By default each full collection walks two million objects of torch and transformers.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


def pytest_report_collectionfinish(items):
    """List what is slow with its time, where nothing else is chosen: -m slow --collect-only."""
    marks = [(item.get_closest_marker("slow"), item.nodeid) for item in items]
    if not all(mark for mark, _ in marks):
        return []
    times = sorted((mark.kwargs["seconds"], name) for mark, name in marks)
    return [f"{seconds:5} s  {name}" for seconds, name in times]
