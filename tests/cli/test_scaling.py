"""The command `scaling` from arguments to report."""

import json

import pytest
from typer.testing import CliRunner

from lipaudit.cli.commands import build


def invoke(*args):
    return CliRunner().invoke(build(), ["scaling", *args])


def test_the_first_line_says_what_will_run_and_stdout_is_the_report(tmp_path):
    page = tmp_path / "scaling.html"
    done = invoke(
        *("demo", "-n", "1", "--layers", "2", "--lengths", "8:40:log3", "-f", "json"),
        *("--mode", "real,adversarial,radius,ascent", "-o", str(page)),
    )
    assert done.exit_code == 0, done.stderr
    assert done.stderr.splitlines()[0] == (
        "scaling of demo: 1 samples at 3 lengths; adversarial, radius, ascent of the "
        "strongest head of each layer"
    )
    sections = {s["measure"]: s for s in json.loads(done.stdout)["sections"]}
    assert list(sections) == ["scaling", "scaling.fit"]
    rows = sections["scaling"]["rows"]
    assert {r["mode"] for r in rows} == {"real", "adversarial", "radius", "ascent"}
    assert {r["layer"] for r in rows} == {2, None}
    assert [r["n"] for r in rows if r["mode"] == "real" and r["layer"] == 2] == [5, 17, 37]
    html = page.read_text()
    assert "n^1/4" in html
    assert html.count("<svg") >= 4


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--mode", "real,fake", "--mode: 'fake'"),
        ("--mask", "some", "--mask: 'some'"),
        ("--lengths", "8-256", "FIRST:LAST:logCOUNT"),
        ("--radius", "-1", "--radius: -1.0"),
        ("--radius", "1e200", "--radius: 1e+200"),
        ("--heads", "0.9", "there is no head 0.9"),
    ],
)
def test_impossible_options_are_usage_errors(option, value, told):
    args = [] if option == "--mode" else ["--mode", "adversarial"]
    done = invoke("demo", *args, option, value)
    assert done.exit_code == 2
    assert told in done.stderr
