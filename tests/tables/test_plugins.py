"""Packages of others: what they add, and that what cannot be used is refused by its package."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import lipaudit
from lipaudit import schema
from lipaudit.errors import UsageError
from lipaudit.measures import AuditOptions, layouts, load_measures
from lipaudit.tables.plugins import GROUP, collect, load_wings
from tests.commands import installed, invoke, refuse, write_package
from tests.gate import cases

pytestmark = pytest.mark.usefixtures("elsewhere")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "tests/plugins"


@pytest.fixture
def install(tmp_path):
    """Write packages of a module each, and have them installed."""
    with installed(tmp_path):
        yield partial(write_package, tmp_path)


def test_the_wings_come_by_name_after_ours(install):
    install("two", "WING = Wing(public={'a': 'math:tau'})", "second")
    install("one", "WING = Wing(public={'b': 'math:pi'})", "first")
    assert [point.name for point in load_wings()][-2:] == ["first", "second"]
    assert [point.dist.name for point in load_wings()][:-2] == ["lipaudit"] * 4
    assert list(collect(str, "public"))[-2:] == ["b", "a"]


@pytest.mark.parametrize("name", ["lipaudit.attacks", "lipaudit.bounds", "lipaudit.measures"])
def test_a_package_for_an_older_lipaudit_says_what_to_do(install, name):
    install("older", "", "old", name)
    said = refuse(2, f"'old' ({name}) of older is declared as in lipaudit 0.2", "bounds", "demo")
    assert "part of a Wing in lipaudit.wings" in said
    assert "docs/extending.md" in said


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module_at_all", "cannot be loaded: ModuleNotFoundError"),
        ("raise SyntaxError('spoilt')", "cannot be loaded: SyntaxError: spoilt"),
        ("", "cannot be loaded: AttributeError"),
        ("WING = 'seven'", "is str, not lipaudit.tables.plugins.Wing"),
        ("WING = Wing(measures=7)", "cannot be loaded: TypeError: measures is a int, not a tuple"),
        ("WING = Wing(public='a')", "cannot be loaded: TypeError: public is a str, not a mapping"),
        (
            "WING = Wing(public={'a': 7})",
            "has 'a' among its public, which is int, not builtins.str",
        ),
        ("WING = Wing(public={'audit': 'm:a'})", "which has a name that is in use already"),
        ("WING = Wing(public={'watch': 'm:a'})", "which has a name that is in use already"),
    ],
)
def test_what_cannot_be_used_is_refused_by_the_name_of_its_package(install, source, reason):
    install("bad-numbers", source, "seven")
    with pytest.raises(UsageError) as caught:
        lipaudit.list_public()
    assert f"'seven' ({GROUP}) of bad-numbers " in caught.value.message
    assert reason in caught.value.message
    assert "bad-numbers" in caught.value.advice


def test_a_module_of_lipaudit_is_imported_without_a_look_at_wings(install):
    install("bad-wing", "raise SyntaxError('spoilt')")
    for name in ("tensors", "__path_hooks__"):
        with pytest.raises(AttributeError):
            lipaudit.__getattr__(name)
    with pytest.raises(UsageError, match="spoilt"):
        lipaudit.__getattr__("watch")


def test_a_wing_needs_a_name_of_its_own(install):
    install("one", "WING = Wing()", "seven")
    install("two", "WING = Wing()", "seven")
    with pytest.raises(UsageError, match="has a name that is in use already"):
        load_wings()


@pytest.mark.parametrize("name", ["gate", "bounds", "watch", "heat"])
def test_a_command_with_a_name_in_use_or_without_a_function_is_refused(install, name):
    place = "('Learn', 'no_such_module_at_all:run')"
    install("strange-commands", f"WING = Wing(commands={{{name!r}: {place}}})")
    says = (
        "name that is in use" if name != "heat" else "no_such_module_at_all:run cannot be loaded"
    )
    refuse(2, says, "--help")


def test_a_command_is_a_heading_and_a_function(install):
    install("strange-commands", "WING = Wing(commands={'heat': ('Learn',)})")
    refuse(2, "'heat' among its commands, which is not a pair", "heat")


MEASURE = """
from lipaudit.measures.base import Measure, MeasureOptions
from lipaudit.tables.report import Display, Layout
tables = [Layout(name=name, display=Display(about="", drawings={drawings}), fixed=dict())
          for name in {sections}]
functions = dict.fromkeys(("compute", "summarise"), lambda *given: None)
measure = Measure(name="heat", tables=tables, options=MeasureOptions, batch=1, **functions)
WING = Wing(measures=(measure,))
"""


@pytest.mark.parametrize(
    ("sections", "drawings", "reason"),
    [
        ((), (), "has no table of the section 'heat'"),
        (("cold",), (), "has no table of the section 'heat'"),
        (("heat", "heated"), (), "has a table of the section 'heated'"),
        (("heat", "heat"), (), "has a table of the section 'heat'"),
        (("heat", "heat.more"), ("bound",), "shows a drawing 'bound', which does not exist"),
        (("heat", "heat.more"), ("tightness",), ""),
    ],
)
def test_a_measure_with_strange_sections_is_refused(install, sections, drawings, reason):
    source = MEASURE.format(sections=sections, drawings=drawings)
    install("heat-of-heads", source)
    if not reason:
        assert "heat.more" in layouts()
        return
    with pytest.raises(
        UsageError, match="of heat-of-heads has 'heat' among its measures"
    ) as caught:
        layouts()
    assert reason in caught.value.message
    assert not drawings or "tightness, attention" in caught.value.message


def test_a_picture_that_fails_leaves_the_page_and_names_its_package(install):
    source = MEASURE.format(sections=("heat",), drawings=("flames",))
    broken = "def draw(sections):\n    raise ValueError('no fire')\n    yield\n"
    source = source.replace("fixed=dict()", "fixed=dict(), sample_columns=WARM")
    place = "drawings={'flames': 'heat_of_heads_of_strangers:draw'}, measures"
    columns = "from lipaudit.tables import Column\nWARM = {'warm': Column('warm', 'Warmth.')}\n"
    install("heat-of-heads", columns + broken + source.replace("measures=(", f"{place}=("))
    section = layouts()["heat"].section(samples={"ids": ("a",), "warm": (1.0,)})
    report = cases.report(section)
    page = lipaudit.render(report, "markdown").decode().replace("\\", "")
    assert "No picture: heat_of_heads_of_strangers:draw failed: ValueError: no fire." in page
    assert "Update heat_of_heads_of_strangers, or uninstall it." in page


def test_a_headline_of_no_column_is_refused(install):
    source = MEASURE.format(sections=("heat",), drawings=())
    headline = "from lipaudit.tables.summary import Headline as H\n"
    heads = "headlines=[H(name='warm', column='warmth', label='warmth')], fixed"
    install("heat-of-heads", headline + source.replace("fixed", heads))
    with pytest.raises(UsageError, match="has a headline of the column 'warmth', which it does"):
        layouts()


@pytest.mark.parametrize(
    ("record", "says"), [("OWN['bounds']", "name that is in use"), ("3", "is int, not")]
)
def test_a_measure_with_a_bad_record_is_refused(install, record, says):
    source = f"from lipaudit.measures import OWN\nWING = Wing(measures=({record},))"
    install("strange-measures", source)
    with pytest.raises(UsageError, match=says):
        load_measures()


BOUND = """
from lipaudit.theory.bounds.record import Bound
words = dict.fromkeys(("label", "meaning", "formula", "source", "explanation"), "x")
def low(known): return 1e-6 * known.p_norm
WING = Wing(bounds=(Bound(name={name!r}, **words, {compute}),))
"""


def test_a_bound_below_the_norm_ends_the_run_by_its_name(install):
    source = BOUND.format(name="strange", compute="compute=low")
    install("strange-bounds", source)
    said = refuse(3, "strange of head 0.0 (blocks.0.attn) is", "bounds", "demo", "-n", 2, "-q")
    assert "below the exact norm" in said
    assert "a bug in strange_bounds_of_strangers:low. Report it to its authors" in said
    assert "bug in lipaudit" not in said


@pytest.mark.parametrize(
    ("name", "compute", "says"),
    [
        ("exact", "compute=low", "has a name that is in use already"),
        ("castin", "compute=low", "has a name that is in use already"),
        ("strange", "", "missing 1 required keyword-only argument: 'compute'"),
        ("strange", "compute=no_such", "name 'no_such' is not defined"),
        ("log10_x", "compute=low", "not a valid name of a bound"),
    ],
)
def test_a_bound_that_cannot_be_used_is_refused(install, name, compute, says):
    source = BOUND.format(name=name, compute=compute)
    install("strange-bounds", source)
    assert "strange-bounds" in refuse(2, says, "explain", "sharp")


@pytest.fixture(scope="module")
def measured(tmp_path_factory, blank_charts):
    """Reports of `bounds demo`, with the bound of the example."""
    folder = tmp_path_factory.mktemp("measured")
    outputs = [f"-o{folder / name}" for name in ("a.json", "a.html", "a.md")]
    with installed(EXAMPLE):
        printed = invoke("bounds", "demo", "-n", 2, "-q", "--details", *outputs).stdout
    (folder / "a.txt").write_text(printed, encoding="utf-8")
    return folder


def test_the_bound_of_the_example_is_in_every_format_above_the_exact_norm(measured):
    rows = json.loads((measured / "a.json").read_text())["sections"][0]["rows"]
    assert all(row["frobenius"] > row["exact"] for row in rows)
    names = list(rows[0])
    assert names.index("frobenius") == names.index("hu") + 1
    assert names.index("log10_frobenius") == names.index("log10_hu") + 1
    # Beside the exact norm in the table of all columns, in that of tightness, and in the picture.
    for name, places in (("a.txt", 1), ("a.md", 2), ("a.html", 3)):
        text = (measured / name).read_text(encoding="utf-8")
        assert text.count("Frobenius") >= places


def test_it_is_on_bare_tensors_explained_compared_gated_and_followed(measured, tmp_path):
    rng, both = np.random.default_rng(0), (measured / "a.json",) * 2
    gate = ("gate", both[0], "-b", both[1], "--fail-on")
    with installed(EXAMPLE):
        for scale in (0.0, 1e-3, 1.0, 30.0):  # uniform attention to one-hot
            x, (wq, wk, wv) = rng.normal(size=(2, 5, 4)), scale * rng.normal(size=(3, 2, 4, 3))
            bound = lipaudit.bounds.frobenius(x, wq, wk, wv)
            assert (lipaudit.bounds.exact(x, wq, wk, wv) <= bound * (1 + 1e-6) + 1e-12).all()
        said = invoke("explain", "frobenius").stdout
        assert "||K W_Q^T||_F" in said
        assert "Proven upper bound, at the samples X only" in said
        compared = invoke("compare", *both, "-f", "json", "-q").stdout
        assert '"metric": "bounds.frobenius:median"' in compared
        assert "Frobenius" in invoke("report", *both, "-f", "markdown", "-q").stdout
        invoke(*gate, "bounds.frobenius:each <= 1e9")
        assert "What a model's logits are divided by." in invoke("explain", "temperature").stdout
        assert lipaudit.mi_fgsm.__module__ == "lipaudit_example.momentum"
        broken = invoke(*gate, "bounds.frobenius:each <= 1e-3", code=1).stdout
        assert "regressed: bounds.frobenius:each <= 1e-3" in broken
        scaling = ("scaling", "demo", "-n", 1, "--mode", "real", "-q", "-f", "json")
        sections = json.loads(invoke(*scaling).stdout)["sections"]
    layers = [row for row in sections[0]["rows"] if row["layer"] is not None]
    assert layers
    assert all(row["bound_frobenius"] > row["norm"] for row in layers)
    assert any(row["frobenius_exponent"] for row in sections[1]["rows"])


def test_a_measure_is_asked_for_in_an_audit_by_its_switch_and_says_how_many_samples():
    usual = ("bounds", "attention", "jacobian", "attack")
    with installed(EXAMPLE):
        assert "--confidence" in invoke("audit", "--help").stdout
        options = AuditOptions(confidence=True, skip="attack")
        assert options.names == (*usual[:3], "confidence")
        assert options.plan(demo=True)["confidence"].temperature == 1
        assert options.counts(demo=True)["confidence"] == 8
        assert "confidence" not in options.counts(demo=False)
    assert AuditOptions().names == usual
    refuse(2, "no such option", "audit", "demo", "--confidence")


def test_a_headline_is_ranked_gated_and_kept_where_the_plugin_is_not_installed(tmp_path):
    reports = []
    with installed(EXAMPLE):
        for temperature, file in (("1", "a.json"), ("4", "b.json")):
            given = ("-n", 16, "--temperature", temperature, "-q", "-o", file)
            invoke("confidence", "demo", *given)
            reports.append(json.loads((tmp_path / file).read_text()))
        ranked = invoke("report", "a.json", "b.json", "-f", "csv", "-q").stdout
        said = invoke("gate", "a.json", "-b", "a.json", "-q").stdout
        assert "Mean over the samples." in invoke("explain", "mean confidence").stdout
    figures = [report["summary"]["rows"][0] for report in reports]
    values = [report["sections"][0]["rows"][0]["mean"] for report in reports]
    assert [figure["value"] for figure in figures] == values
    names, *lines = ranked.splitlines()
    column = names.split(",").index("mean confidence")
    assert {float(line.split(",")[column]) for line in lines} == set(values)
    assert "confidence.confidence:median >= -10%" in said
    # Without the package the stored figure counts, but none that this installation computes.
    report = reports[0]
    assert f"mean confidence  {values[0]:.1%}" in str(schema.loads(json.dumps(report)))
    forged = figures[0] | {"name": "steepest_head", "metric": "bounds.exact"}
    report["summary"]["rows"] = [figures[0], forged]
    (kept,) = schema.loads(json.dumps(report)).figures
    assert kept == figures[0]


def test_a_report_is_read_and_printed_where_the_plugin_is_not_installed(measured, tmp_path):
    done = invoke("report", measured / "a.json", "-f", "markdown", "-oagain.json")
    assert done.stdout.count("Frobenius") >= 2
    paths = measured / "a.json", tmp_path / "again.json"
    before, after = (json.loads(path.read_text())["sections"] for path in paths)
    assert after == before


def test_reading_a_report_needs_no_torch(measured):
    code = (
        "import sys\nfrom pathlib import Path\nfrom lipaudit import report, schema\n"
        f"page = report.render(schema.load(Path({str(measured / 'a.json')!r})), 'markdown')\n"
        "assert b'Frobenius' in page\n"
        "assert 'lipaudit_example.bounds' in sys.modules\n"
        "from lipaudit.attacks.kinds import attack_kinds\n"
        "assert 'mi-fgsm' in attack_kinds() and 'torch' not in sys.modules"
    )
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{EXAMPLE}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr


def test_the_guide_quotes_the_example():
    guide = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    files = [*EXAMPLE.rglob("*.py"), *EXAMPLE.rglob("entry_points.txt")]
    example = "".join(path.read_text(encoding="utf-8") for path in files)
    quoted = re.findall(r"```\w+\n(.*?)```", guide, re.DOTALL)
    assert len(quoted) >= 3
    assert [block for block in quoted if block not in example] == []
