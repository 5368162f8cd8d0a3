"""One record per bound: every place that speaks of a bound says what its record says."""

import re
from dataclasses import replace

import pytest

from lipaudit.gate.rules import list_metrics, parse_rule
from lipaudit.measures import layouts
from lipaudit.measures.bounds import BOUNDS_TABLE
from lipaudit.report.blocks import Curve
from lipaudit.report.cells import STATUS, write_math
from lipaudit.report.sections import show_section
from lipaudit.tables.formats import BRIEF_DOMAINS, DOMAINS
from lipaudit.theory.bounds.record import AT_X, EVERYWHERE, Bound, load_bounds
from lipaudit.theory.bounds.sharp import SHARP
from lipaudit.wings.growth.scaling_tables import FITS_TABLE, SCALING_TABLE
from tests.commands import invoke

NUMBER = [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}, {"type": "null"}]


def rows(count=2, **values):
    values = dict.fromkeys(load_bounds(), 3.0) | {"exact": 2.0} | values
    return tuple(BOUNDS_TABLE.row(layer=0, head=i, **values) for i in range(count))


def said_by_columns(bound):
    """In reports of `bounds`, and over lengths."""
    columns = [BOUNDS_TABLE.columns[name] for name in bound.columns()]
    lengths = [c for name, c in SCALING_TABLE.columns.items() if name == f"bound_{bound.name}"]
    assert bool(lengths) == bound.scaling
    return {(column.status, column.domain) for column in columns + lengths}


def said_by_explain(bound):
    """Every line of `explain` that names a status."""
    text = invoke("explain", f"bounds.{bound.name}", code=None).stdout
    lines = {meaning: status for status, meaning in STATUS.items()}
    flat = " ".join(text.split())
    said = {
        (status, where[1] or AT_X)
        for line, status in lines.items()
        if (where := re.search(r"(?:Domain: ([^.]*)\. )?" + re.escape(line), flat))
    }
    constant = "Lipschitz constant" in flat
    return said | ({("certified", EVERYWHERE)} if constant else set())


def said_by_the_page(bound):
    blocks = show_section(layouts()["bounds"].section(rows=rows()))
    (table,) = [block.table for block in blocks if isinstance(block, Curve)]
    domains = {text: domain for domain, text in {**DOMAINS, **BRIEF_DOMAINS}.items()}
    return {(line[1], domains[line[2]]) for line in table.rows if line[0] == bound.label}


@pytest.mark.parametrize("place", [said_by_columns, said_by_explain, said_by_the_page])
@pytest.mark.parametrize("bound", load_bounds().values(), ids=lambda bound: bound.name)
def test_every_place_says_the_status_and_domain_of_the_record(bound, place):
    said = {(status, write_math(domain)) for status, domain in place(bound)}
    assert said == {(bound.status, write_math(bound.domain))}


def test_every_bound_has_its_column_its_rule_and_its_place_on_the_page():
    assert load_bounds().keys() <= BOUNDS_TABLE.columns.keys()
    assert {f"bounds.{name}" for name in load_bounds()} <= set(list_metrics())
    assert parse_rule("bounds.castin:each <= +5%").column == "castin"
    parts = show_section(layouts()["bounds"].section(rows=rows()))
    (scatter,) = [block for block in parts if isinstance(block, Curve)]
    labels = [bound.label for bound in load_bounds().values()]
    assert [series.label for series in scatter.series] == [*labels, "y = x"]
    assert [line[0] for line in scatter.table.rows] == labels
    names, declared = list(BOUNDS_TABLE.columns), list(BOUNDS_TABLE.declared())
    start = names.index("exact_max") + 1
    assert names[start : start + len(declared)] == declared
    own = [*load_bounds()]
    ours = [name for name in declared if name.removeprefix("log10_") in own]
    assert ours == [*own, "log10_castin", "log10_mean_field", "log10_hu"]
    assert list(rows()[0]) == names
    exponents = ["sharp_exponent", "theorem3_exponent", "castin_exponent"]
    assert list(FITS_TABLE.declared())[:3] == exponents
    assert list(SCALING_TABLE.declared())[:3] == ["bound_sharp", "bound_theorem3", "bound_castin"]


@pytest.mark.parametrize("name", ["Sharp", "log10_mine", "bound_mine"])
def test_a_name_that_would_collide_and_a_bound_that_is_no_number_are_refused(name):
    with pytest.raises(ValueError, match="not a valid name"):
        replace(SHARP, name=name)
    for value in ("high", [1.0], {"a": 1.0}):
        with pytest.raises(ValueError, match="castin is"):
            BOUNDS_TABLE.row(layer=0, head=0, castin=value)


def test_a_record_is_all_that_a_place_needs():
    """Its columns carry everything that they are printed with."""
    bound = Bound(
        name="mine", label="my own", meaning="What it is.", formula="||W_V||", source="ours",
        explanation="Says little.", compute=SHARP.compute, null="needs luck", better="lower",
        log10_label="log10 mine",
    )  # fmt: skip
    columns = bound.columns()
    assert list(columns) == ["mine", "log10_mine"]
    needs = "Not computed for every head: it needs luck."
    assert columns["mine"].reading.splitlines() == ["Source: ours.", "Says little.", needs]
    assert (columns["mine"].better, columns["log10_mine"].better) == ("lower", None)
