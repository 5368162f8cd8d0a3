"""Reports as JSON: their summary, contradictions in them, and files of earlier versions."""

import json
import re
from pathlib import Path

import pytest

from lipaudit import schema
from lipaudit.errors import InputError
from lipaudit.measures import layouts, summarise
from lipaudit.tables import Report, model_labels
from lipaudit.tables.weakest import find_contradictions
from tests.gate import cases

OLD = sorted((Path(__file__).parent / "reports").glob("*.json"))
"""Reports as version 1.1 wrote them: of most measures and of plug-ins."""


def test_a_report_is_written_with_its_summary_and_read_without():
    report = schema.load(OLD[2])
    text = schema.dumps(report)
    document = json.loads(text)
    assert list(document).index("summary") < list(document).index("sections")
    assert document["summary"] == json.loads(summarise(report).model_dump_json())
    assert schema.loads(text) == report
    # The summary of earlier reports had another form.
    for other in ({"warnings": "none"}, {"accuracy": [], "norms": None}, None):
        forged = json.dumps(document | {"summary": other})
        assert schema.dumps(schema.loads(forged)) == text
    del document["summary"]
    assert schema.dumps(schema.loads(json.dumps(document))) == text


FIGURE = {"name": "heat", "metric": "heat.mean", "figure": "mean heat", "value": 3.5}


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "999999999d"},
        {"status": "proven"},
        {"better": "left"},
        {"value": "3"},
        {"metric": 3},
        {"colour": "red"},
    ],
)
def test_a_stored_figure_that_is_damaged_is_left_out(changes):
    """Figures of measures that are not installed are kept, if they can be shown."""
    document = json.loads(schema.dumps(schema.load(OLD[2])))
    whole = FIGURE | {"format": ".3g", "status": "exact", "domain": "at X", "sentence": "Hot."}
    for row, shown in ((whole, 1), (whole | changes, 0)):
        document["summary"]["rows"] = [row]
        report = schema.loads(json.dumps(document))
        assert len(report.figures) == shown
        assert str(report).count("mean heat") == shown
        assert schema.loads(schema.dumps(report)) == report


@pytest.mark.parametrize("path", OLD, ids=lambda path: path.stem)
def test_a_report_of_version_1_is_read_and_written_as_one_of_this(path):
    old, report = json.loads(path.read_text()), schema.load(path)
    text = schema.dumps(report)
    assert json.loads(text)["schema_version"] == "2.0"
    assert schema.loads(text) == report
    assert schema.dumps(schema.loads(text)) == text
    for before, after in zip(old["sections"], json.loads(text)["sections"], strict=True):
        assert all(
            after[name] == before[name] for name in before if name not in ("rows", "attended")
        )
        for old_row, new_row in zip(before["rows"], after["rows"], strict=True):
            assert old_row.items() <= new_row.items()  # a bound of today may be new
        assert all(after["columns"].keys() == row.keys() for row in after["rows"])


def test_a_column_that_a_report_lacks_is_empty():
    """As in reports of an earlier minor version."""
    document = json.loads(schema.dumps(schema.load(OLD[1])))
    (section,) = document["sections"]
    del section["columns"]["entropy"]
    rows = [{n: v for n, v in row.items() if n != "entropy"} for row in section["rows"]]
    section["rows"] = rows
    read = schema.loads(json.dumps(document)).section("attention")
    assert {row.entropy for row in read.rows} == {None}
    assert read.columns["entropy"].label == "entropy"


@pytest.mark.parametrize(
    ("column", "why"),
    [
        ({"format": "999999999d"}, "format"),
        ({"format": "s"}, "rows"),
        ({"status": "guessed"}, "status"),
        ({"better": "left"}, "better"),
        ({"colour": "red"}, "colour"),
        ({"label": 3}, "label"),
        ({"reduction": {"stat": "mode", "values": "exact"}}, "reduction"),
        (None, "columns"),
    ],
)
def test_a_damaged_column_is_refused(column, why):
    document = json.loads(schema.dumps(schema.load(OLD[2])))
    columns = document["sections"][0]["columns"]
    columns["exact"] = None if column is None else columns["exact"] | column
    with pytest.raises(InputError, match=why):
        schema.loads(json.dumps(document))


def test_the_schema_describes_columns_and_the_summary():
    described = schema.json_schema()
    assert described["properties"]["summary"] == {"$ref": "#/$defs/Section"}
    assert {"label", "meaning", "format", "better"} <= described["$defs"]["Column"][
        "properties"
    ].keys()
    names = described["$defs"]["Section"]["properties"]
    assert {"columns", "rows", "notes"} <= names.keys()


JSON_TYPES = {
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "string": str,
    "null": type(None),
    "array": list,
    "object": dict,
}


def fits(value, rule, definitions) -> bool:
    """Say whether a value fits a JSON Schema, by the keywords that ours uses."""
    if isinstance(rule, bool):  # any value fits, or none
        return rule
    if "$ref" in rule:
        return fits(value, definitions[rule["$ref"].removeprefix("#/$defs/")], definitions)
    if "anyOf" in rule:
        return any(fits(value, each, definitions) for each in rule["anyOf"])
    types = rule.get("type", [*JSON_TYPES])
    types = [types] if isinstance(types, str) else types
    kinds = tuple(JSON_TYPES[name] for name in types)
    # In JSON Schema, true and false are no numbers.
    if not isinstance(value, kinds) or (isinstance(value, bool) and "boolean" not in types):
        return False
    if value not in rule.get("enum", [rule.get("const", value)]):
        return False
    if isinstance(value, str):
        return re.search(rule.get("pattern", ""), value) is not None
    if isinstance(value, list):
        first = rule.get("prefixItems", [])
        rules = [*first, *[rule.get("items", {})] * (len(value) - len(first))]
        return all(fits(*pair, definitions) for pair in zip(value, rules, strict=True))
    if isinstance(value, dict):
        known, other = rule.get("properties", {}), rule.get("additionalProperties", {})
        if not value.keys() >= {*rule.get("required", ())}:
            return False
        return all(fits(value[name], known.get(name, other), definitions) for name in value)
    return True


GOLDEN = Path(__file__).parents[1] / "report" / "goldens" / "report.json"


@pytest.mark.parametrize("path", [*OLD, GOLDEN], ids=lambda path: path.stem)
def test_a_report_fits_the_schema(path):
    described = schema.json_schema()
    document = json.loads(schema.dumps(schema.load(path)))
    assert fits(document, described, described["$defs"])
    (name,) = list(document["sections"][0]["columns"])[:1]
    document["sections"][0]["columns"][name]["colour"] = "red"
    assert not fits(document, described, described["$defs"])


IDS = ("aa", "bb")


def make_report(attack, certify, norm) -> Report:
    attacked = layouts()["attack"].section(samples={"ids": IDS, **attack})
    settings, samples = {"norm": norm}, {"ids": IDS, **certify}
    proven = layouts()["certify"].section(settings=settings, samples=samples)
    return cases.report(attacked, proven)


CERTIFIED = {"certified@linf,4/255": (1, 0)}
BROKEN = {"correct": (1, 1), "robust@pgd,linf,4/255": (0, 0)}


@pytest.mark.parametrize(
    ("attack", "certify", "norm"),
    [
        (BROKEN, CERTIFIED, "linf"),
        ({"robust@pgd,linf,2/255": (0, 0)}, CERTIFIED, "linf"),
        # nearer than the trial allowed
        ({"robust@pgd,linf,1": (0, 0), "distance@pgd,linf,1": (0.01, 1.0)}, CERTIFIED, "linf"),
        # linf <= l2
        ({"robust@pgd,l2,4/255": (0, 0)}, CERTIFIED, "linf"),
        (BROKEN, {"radius": (0.02, 0.01)}, "linf"),
        ({}, {"radius": (0.02, None), "radius_adversarial": (0.015, 0.01)}, "l2"),
        ({}, CERTIFIED | {"robust@linf,2/255": (0, 1)}, "linf"),
    ],
)
def test_a_sample_is_not_both_certified_and_broken(attack, certify, norm):
    report = make_report(attack, certify, norm)
    (pair,) = find_contradictions(report)
    first = summarise(report).notes[0]
    assert (first.level, first.code, pair.sample) == ("warning", "contradiction", "aa")
    assert first.text.startswith(
        f"a contradiction: sample aa is certified in {pair.certified.ball}"
    )
    assert "(such samples: 1)" in first.text
    if (attack, certify) == (BROKEN, CERTIFIED):
        assert (str(pair.certified), str(pair.attack)) == ("linf,4/255", "pgd,linf,4/255")


@pytest.mark.parametrize(
    ("attack", "certify", "norm"),
    [
        (BROKEN, {"certified@linf,2/255": (1, 1)}, "linf"),
        (BROKEN | {"correct": (0, 1)}, CERTIFIED, "linf"),
        ({"robust@pgd,linf,4/255": (1, 0)}, CERTIFIED, "linf"),
        # 4/255 in linf may be farther in l2
        ({"robust@pgd,linf,4/255": (0, 0)}, {"certified@l2,4/255": (1, 1)}, "linf"),
        ({"robust@pgd,linf,4/255": (0, 0)}, {"radius": (0.02, 0.02)}, "l2"),
        ({"robust@words,words,1": (0, 0)}, {"radius": (2.0, 2.0)}, "linf"),
        (BROKEN, {"radius": (0.0, None), "radius_adversarial": (0.01, None)}, "linf"),
    ],
)
def test_what_is_broken_outside_of_what_is_certified_is_no_contradiction(attack, certify, norm):
    report = make_report(attack, certify, norm)
    assert (find_contradictions(report), summarise(report).notes) == ([], ())


def test_equal_models_are_told_apart_by_letters_however_many_they_are():
    report = schema.load(OLD[0])
    labels = model_labels([report] * 80)
    assert len(set(labels)) == 80
    assert all(re.fullmatch(r"[A-Z]\d?: .+", label) for label in labels)
    assert [label.partition(":")[0] for label in labels[24:28]] == ["Y", "Z", "A1", "B1"]
    assert model_labels([report]) == [report.run.label]
