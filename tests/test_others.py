"""Models of other packages: every attention is right, numerical, or named.

Run by .ci/others, which installs the packages, or with -m others.
"""

import importlib.util

import pytest

from benchmarks.reference import others

OTHERS = others.list_others()


@pytest.mark.others
@pytest.mark.parametrize("name", OTHERS)
def test_every_number_of_another_package_is_true(name):
    other = OTHERS[name]
    if importlib.util.find_spec(other.package) is None:
        pytest.skip(f"needs {others.PACKAGES[other.package]}")
    outcome = others.find_outcome(name, other)
    assert outcome.outcome in ("ok", "numerical", "refused"), "\n".join(outcome.reasons)
