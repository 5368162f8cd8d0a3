"""Entry points of packages made on the spot."""

import sys

import pytest

from lipaudit.errors import UsageError
from lipaudit.tables.plugins import entries

GROUP = "lipaudit.numbers"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Write packages whose module has `value = ...`, and put them on the path."""

    def add(package, entry, source="value = 7", target="value"):
        module = f"{package.replace('-', '_')}_of_numbers"
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{entry} = {module}:{target}\n")
        sys.modules.pop(module, None)

    monkeypatch.syspath_prepend(tmp_path)
    return add


def test_the_objects_come_by_their_names_in_order(install):
    install("one", "seven")
    install("two", "eight", "value = 8")
    assert list(entries(GROUP, int).items()) == [("eight", 8), ("seven", 7)]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"source": "import no_such_module_at_all"}, "cannot be loaded: ModuleNotFoundError"),
        ({"source": "raise SyntaxError('spoilt')"}, "cannot be loaded: SyntaxError: spoilt"),
        ({"target": "other"}, "cannot be loaded: AttributeError"),
        ({"source": "value = 'seven'"}, "is str, not builtins.int"),
    ],
)
def test_what_cannot_be_used_is_refused_by_the_name_of_its_package(install, how, reason):
    install("bad-numbers", "seven", **how)
    with pytest.raises(UsageError) as caught:
        entries(GROUP, int)
    assert f"'seven' ({GROUP}) of bad-numbers {reason}" in caught.value.message
    assert "bad-numbers" in caught.value.advice


def test_a_name_of_another_plugin_is_refused(install):
    install("numbers", "seven")
    install("other-numbers", "seven")
    with pytest.raises(UsageError, match="numbers has a name that is in use already"):
        entries(GROUP, int)
