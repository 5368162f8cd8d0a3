"""Entry points of packages made on the spot."""

import sys

import pytest

from lipaudit.errors import UsageError
from lipaudit.measures import layouts, load_measures
from lipaudit.tables.plugins import entries
from tests.strangers import registry as registry

GROUP = "lipaudit.numbers"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Write packages whose module has `value = ...`, and put them on the path."""

    def add(package, entry, source="value = 7", target="value", group=GROUP):
        module = f"{package.replace('-', '_')}_of_numbers"
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{entry} = {module}:{target}\n")
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


MEASURE = """
from lipaudit.measures.base import Measure, MeasureOptions
from lipaudit.tables.report import Display, Layout
tables = [Layout(name=name, display=Display(about="", drawings={drawings}), fixed=dict())
          for name in {sections}]
functions = dict.fromkeys(("compute", "summarise"), lambda *given: None)
value = Measure(name="heat", tables=tables, options=MeasureOptions, batch=1, **functions)
"""


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("sections", "drawings", "reason"),
    [
        ((), (), "has no table of the section 'heat'"),
        (("heat", "heated"), (), "has a table of the section 'heated'"),
        (("heat", "heat"), (), "has a table of the section 'heat'"),
        (("heat", "heat.more"), ("bound",), "shows a drawing 'bound', which does not exist"),
        (("heat", "heat.more"), ("bounds",), ""),
    ],
)
def test_a_measure_with_strange_sections_or_drawings_is_refused(
    install, sections, drawings, reason
):
    source = MEASURE.format(sections=sections, drawings=drawings)
    install("heat-of-heads", "heat", source, group="lipaudit.measures")
    load_measures.cache_clear()
    if not reason:
        assert "heat.more" in layouts()
        return
    with pytest.raises(UsageError, match="'heat' .* of heat-of-heads") as caught:
        layouts()
    assert reason in caught.value.message
    assert not drawings or "tightness, bounds, attention" in caught.value.message
