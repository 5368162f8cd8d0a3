import base64
import hashlib
import itertools
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
import torch

from lipaudit.data.arrays import thumbnail
from lipaudit.report import render
from lipaudit.tables import Array
from lipaudit.tables.report import Example
from lipaudit.tables.weakest import find_worst
from tests.report.conftest import keep

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """What a page holds: tags, attributes and text, and whether its tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, {k: v or "" for k, v in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def attributes(self, name: str) -> list[str]:
        return [attrs[name] for _, attrs in self.tags if name in attrs]


@pytest.fixture(scope="module")
def parsed(page):
    return Page(page)


@pytest.fixture(scope="module", params=["one report", "side by side"])
def any_page(request, parsed, report, other):
    if request.param == "one report":
        return parsed
    return Page(render([report, keep(other, other.section("bounds"))], "html").decode())


def test_nothing_is_loaded_and_only_its_own_script_runs(any_page):
    tags = [tag for tag, _ in any_page.tags]
    assert not {*tags} & {"link", "iframe", "object", "embed", "base", "form"}
    assert tags.count("script") == 1
    names = {name for _, attrs in any_page.tags for name in attrs}
    assert not [name for name in names if name.startswith("on")]
    for name in ("src", "href", "xlink:href", "data", "action", "srcset", "poster"):
        assert all(v.startswith(("#", "data:image/png;")) for v in any_page.attributes(name))


def test_browser_is_told_the_one_script_that_may_run(page, parsed):
    (policy,) = [a["content"] for t, a in parsed.tags if t == "meta" and "http-equiv" in a]
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; script-src 'sha256-{digest}';" in policy
    assert "\r" not in script
    assert page.count("<script") == 1  # the hostile name is text
    assert any("<script>alert(1)</script>" in word for word in parsed.words)
    assert "\x1b" not in page


DOM = """
const heading = index => ({ cellIndex: index, state: "none", childNodes: [], append() {},
  classList: { contains: () => index === 0 },
  getAttribute() { return this.state; }, setAttribute(name, value) { this.state = value; } });
const cells = [heading(0), heading(1)], presses = [];
for (const th of cells) th.parentNode = { cells };
const rows = ROWS.map(([name, text, v]) => ({ name, cells: [
  { textContent: name, dataset: {} }, { textContent: text, dataset: v === "" ? {} : { v } }] }));
let shown = rows;
const body = { rows, append(...all) { shown = all; } };
const table = { tHead: { rows: [{ cells }] }, tBodies: [body] };
const document = { querySelectorAll: of => of === "main table" ? [table] : [],
  createElement: () => ({ append() {}, addEventListener: (_, press) => presses.push(press) }) };
const addEventListener = () => {};
"""
"""The parts of a page that its script uses, for a table of a name and a number."""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_a_heading_sorts_by_number_or_name_and_a_third_press_restores_the_order(page):
    """Equal texts differ by their numbers; infinities are numbers, and missing values are last."""
    rows = [("b.10", "1.00e3", "1000.4"), ("b.2", "–", ""), ("A.1", "inf", "Infinity")]
    rows += [("b.3", "1.00e3", "999.7"), ("a.2", "-2.0", "-2")]
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    press = "[0, 0, 0, 1, 1, 1].map(i => (presses[i](), shown.map(row => row.name)))"
    code = f"const ROWS = {json.dumps(rows)};{DOM}{script};console.log(JSON.stringify({press}))"
    done = subprocess.run(["node", "-e", code], capture_output=True, text=True, check=True)
    stored, names = [name for name, *_ in rows], ["A.1", "a.2", "b.2", "b.3", "b.10"]
    numbers = ["a.2", "b.3", "b.10", "A.1"]
    assert json.loads(done.stdout) == [
        *(names, names[::-1], stored),
        *([*numbers, "b.2"], [*numbers[::-1], "b.2"], stored),
    ]


def test_references_lead_somewhere(any_page):
    ids = any_page.attributes("id")
    assert len(ids) == len(set(ids))
    links = any_page.attributes("href") + any_page.attributes("xlink:href")
    used = {v.removeprefix("#") for v in links if v.startswith("#")}
    used |= {
        i for _, a in any_page.tags for v in a.values() for i in re.findall(r"url\(#(\w+)", v)
    }
    assert used <= set(ids)


def test_every_section_is_in_the_contents_and_links_to_itself(parsed):
    sections = [a["id"] for tag, a in parsed.tags if tag == "section" and "id" in a]
    links = [attrs for tag, attrs in parsed.tags if tag == "a"]
    own = [a["href"] for a in links if "anchor" in a.get("class", "")]
    contents = [a["href"] for a in links if "class" not in a]
    assert own == contents == [f"#{name}" for name in sections]


def test_every_heading_has_the_name_of_the_contents(page):
    contents = re.findall(r'^<a href="#([\w.-]+)">(.+?)</a>', page, re.MULTILINE)
    headings = re.findall(
        r'<h2>.+ <a class="anchor" href="#([\w.-]+)" title="link to (.+?)">#</a></h2>', page
    )
    assert len(contents) > 5
    assert headings == contents


def scaled(row, layer: int, head: int):
    """Return a row as that of another head, with figures of its own."""
    factor = 1 + 0.003 * head + 0.04 * layer
    figures = {n: v * factor for n, v in row.items() if isinstance(v, float) and math.isfinite(v)}
    return row.replace(**(figures | {"layer": layer, "head": head}))


def make_example(noise: np.random.Generator, side: int) -> Example:
    """Return an example with the stored pictures of noise, which do not compress."""
    picture = thumbnail(torch.from_numpy(noise.random((3, side, side))))
    return Example(
        trial="pgd,linf,2/255", times=12.5, classes=("cat", "dog"), before=(0.9, 0.1),
        after=(0.2, 0.8), image=picture, adversarial=picture, difference=picture,
    )  # fmt: skip


def test_page_of_an_audit_of_12_heads_stays_within_250_kb(report):
    """With the sections of an audit, and pictures of the weakest samples."""
    example = make_example(np.random.default_rng(0), 8)
    attack = report.section("attack")
    attack = attack.model_copy(update={"examples": dict.fromkeys(find_worst(report), example)})
    measures = ("bounds", "attention", "jacobian")
    audited = [s for s in report.sections if s.measure.split(".")[0] in measures]
    sections = [*audited, attack]
    assert len(sections) >= 6
    page = render(keep(report, *sections), "html")
    assert page.count(example.image.encode()) == 3 * len(find_worst(report))
    assert len(page) < 250_000


def test_page_of_an_audit_of_144_heads_stays_within_1500_kb(report):
    """With all sections, an attention map of 197 tokens, and images of 224 pixels.

    However many images are measured, a page shows the least robust ones.
    """
    noise = np.random.default_rng(0)
    example = make_example(noise, 224)
    weights = noise.dirichlet(np.ones(197), 197)
    arrays = {"map@1.2": Array.of(weights), "map_tokens@1.2": Array.of(np.array([197, 197]))}
    changes: dict[str, dict[str, Any]] = {
        "attention": {"arrays": report.section("attention").arrays | arrays},
        "attack": {"examples": dict.fromkeys(find_worst(report), example)},
    }
    for measure in ("bounds", "attention", "jacobian.shares"):
        rows = [r for r in report.section(measure).rows if (r.layer, r.head) != (2, 1)]
        heads = list(itertools.product(range(12), range(12)))
        many = tuple(scaled(rows[i % len(rows)], *at) for i, at in enumerate(heads))
        changes.setdefault(measure, {})["rows"] = many
    sections = [s.model_copy(update=changes.get(s.measure, {})) for s in report.sections]
    page = render(keep(report, *tuple(sections)), "html").decode()
    assert page.count(example.image) == 30
    assert page.count("<title>head ") > 7 * 100
    # Maps of norms, fragile rows and shares; two maps of weights are of 12 heads.
    assert page.count("<title>layer ") == 4 * 144 + 2 * 12
    assert "<title>query " not in page  # a map of so many cells has none
    assert len(page.encode()) < 1_500_000
