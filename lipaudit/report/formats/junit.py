"""A judgement as JUnit XML, which continuous integration reads as tests."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lipaudit.errors import visible
from lipaudit.report.form import Format

if TYPE_CHECKING:
    from xml.etree import ElementTree

    from lipaudit.gate import Judgement, Verdict

_NOT_XML = re.compile("[\ufffe\uffff]")


def render(judgement: Judgement) -> bytes:
    """Write a test case per verdict."""
    from xml.etree import ElementTree

    failed = [v for v in judgement.verdicts if judgement.fails(v)]
    errors = [v for v in failed if v.reason]
    counts = {
        "tests": str(len(judgement.verdicts)),
        "failures": str(len(failed) - len(errors)),
        "errors": str(len(errors)),
    }
    root = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(root, "testsuite", {"name": "lipaudit gate", **counts})
    for verdict in judgement.verdicts:
        _add(suite, verdict, failed=judgement.fails(verdict))
    if judgement.warnings:
        ElementTree.SubElement(suite, "system-err").text = _xml("\n".join(judgement.warnings))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n"


def _add(suite: ElementTree.Element, verdict: Verdict, *, failed: bool) -> None:
    from xml.etree import ElementTree

    name = {
        "classname": _xml(verdict.metric),
        "name": _xml(f"{verdict.rule} {verdict.name}".rstrip()),
    }
    test = ElementTree.SubElement(suite, "testcase", name)
    if failed:
        kind = "error" if verdict.reason else "failure"
        note = {"message": _xml(verdict.line), "type": verdict.status}
        ElementTree.SubElement(test, kind, note)
    else:
        ElementTree.SubElement(test, "system-out").text = _xml(verdict.line)


def _xml(text: str) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", visible(text, keep="\n\t"))


FORMAT = Format(
    "junit",
    takes="judgement",
    render=render,
    suffixes=(".xml",),
    refusal=("JUnit XML is of a judgement", "lipaudit gate CURRENT -o gate.xml writes it."),
)
