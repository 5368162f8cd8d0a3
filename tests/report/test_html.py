from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from lipaudit.report.formats import html
from lipaudit.report.page.document import document

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

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, {k: v or "" for k, v in attrs}))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def attributes(self, name: str) -> list[str]:
        return [attrs[name] for _, attrs in self.tags if name in attrs]


@pytest.fixture(scope="module")
def parsed(page):
    return Page(page)


@pytest.fixture(scope="module", params=["page", "double_page"])
def any_page(request):
    return Page(request.getfixturevalue(request.param))


def test_nothing_is_loaded_and_only_its_own_script_runs(any_page):
    tags = [tag for tag, _ in any_page.tags]
    assert not {*tags} & {"link", "iframe", "object", "embed", "base", "form"}
    assert tags.count("script") == 1
    names = {name for _, attrs in any_page.tags for name in attrs}
    assert not [name for name in names if name.startswith("on")]
    for name in ("src", "href", "xlink:href", "data", "action", "srcset", "poster"):
        assert all(v.startswith(("#", "data:image/png;")) for v in any_page.attributes(name))


def test_no_address_stands_anywhere(page):
    assert not re.search(r"https?://|@import|url\((?!#)", page)


def test_browser_is_told_to_load_nothing(parsed):
    (policy,) = [a["content"] for t, a in parsed.tags if t == "meta" and "http-equiv" in a]
    assert "default-src 'none'" in policy


def test_browser_is_told_the_one_script_that_may_run(page, parsed):
    (policy,) = [a["content"] for t, a in parsed.tags if t == "meta" and "http-equiv" in a]
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"; script-src 'sha256-{digest}';" in policy
    assert "\r" not in script


def test_hostile_name_is_text(page, parsed):
    assert page.count("<script") == 1
    assert any("<script>alert(1)</script>" in word for word in parsed.words)
    assert "\x1b" not in page


def test_references_lead_somewhere(any_page):
    ids = any_page.attributes("id")
    assert len(ids) == len(set(ids))
    links = any_page.attributes("href") + any_page.attributes("xlink:href")
    used = {v.removeprefix("#") for v in links if v.startswith("#")}
    used |= {
        i for _, a in any_page.tags for v in a.values() for i in re.findall(r"url\(#(\w+)", v)
    }
    assert used <= set(ids)


def test_every_picture_has_an_alternative_text(any_page):
    pictures = [attrs for tag, attrs in any_page.tags if tag == "svg"]
    assert pictures
    assert all(a["role"] == "img" and len(a["aria-label"]) > 20 for a in pictures)


def test_every_section_is_there(report, parsed):
    ids = set(parsed.attributes("id"))
    assert {section.measure for section in report.sections} <= ids


def test_equal_reports_give_equal_bytes(report):
    alone = report.model_copy(update={"sections": report.sections[3:5]})
    assert html.render(document(alone)) == html.render(document(alone))


def test_page_of_a_large_model_stays_small(large_report):
    assert len(html.render(document(large_report))) < 2_000_000


def test_rows_beyond_the_limit_are_announced(large_report, monkeypatch):
    monkeypatch.setattr(html, "MOST_ROWS", 100)
    assert "The first 100 of 1024 rows" in html.render(document(large_report)).decode()
