"""Own models held to truths that do not come from lipaudit."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location(
    "own_models", Path(__file__).with_name("own_models.py")
)
assert _SPEC is not None
assert _SPEC.loader is not None
own_models = importlib.util.module_from_spec(_SPEC)
sys.modules["own_models"] = own_models
_SPEC.loader.exec_module(own_models)


@pytest.mark.parametrize("case", own_models.CASES, ids=lambda case: case.name)
def test_the_figure_is_the_truth(case):
    figure, truth = case.run()
    assert figure.startswith(truth)
