"""Everything that a page, a table, a note or a JSON file says can be explained."""

from dataclasses import fields, is_dataclass
from itertools import cycle
from typing import get_args

import pytest

from lipaudit.attacks.kinds import RESERVED, attack_kinds
from lipaudit.cli.tools import list_explanations
from lipaudit.gate import compare, judge
from lipaudit.gate.rules import STATS, list_default_rules, list_metrics
from lipaudit.gate.verdicts import VerdictStatus
from lipaudit.measures import layouts, load_measures, option_types
from lipaudit.report import of_comparison, of_judgement, of_reports, topics
from lipaudit.report.blocks import Card
from lipaudit.report.cells import describe_standing, list_footnotes, write_math
from lipaudit.settings import RunOptions
from lipaudit.tables import Column
from lipaudit.tables.columns import Status
from lipaudit.tables.trials import Norm
from lipaudit.theory.bounds.record import load_bounds
from lipaudit.wings.training.recipe import Recipe
from tests.commands import invoke

KINDS = ("affine", "local", "numerical", "one input", "queries apart", "keys and values")
KINDS += ("module input", "module input (x, context)", "too few samples", "pp")


def unexplained(names) -> list[str]:
    names = list(dict.fromkeys(names))
    assert names
    known = list_explanations()
    return [name for name in names if not topics.find_topics(name, known)]


def test_every_column_by_its_names_and_its_heading():
    known = list_explanations()
    for section, layout in layouts().items():
        for name, column in (*layout.columns.items(), *layout.sample_columns.items()):
            full = f"{section}.{name}"
            for word in (full, name, column.label, write_math(column.label)):
                titles = {topic.title for topic in topics.find_topics(word, known)}
                assert {full, f"{full} (per sample)"} & titles, word


def test_every_name_of_a_record_a_rule_and_the_json(report):
    options = [o for kind in (*option_types().values(), Recipe, RunOptions)
               for o in kind.options().values()]  # fmt: skip
    names = [*load_measures(), *layouts(), *load_bounds(), *attack_kinds(), *RESERVED, *STATS]
    names += [*get_args(Status), *get_args(Norm), *get_args(VerdictStatus), *KINDS]
    names += [name for o in options for name in (o.name, *o.flags, *o.values())]
    names += [bound.domain for bound in load_bounds().values()]
    names += [text for rule in list_default_rules() for text in (rule.text, rule.metric)]
    names += [f"{name}:{stat}" for name, stat in zip(list_metrics(), cycle(STATS), strict=False)]
    names += [name for s in report.sections for name in s.samples]
    names += [name for kind in option_types().values() for name in kind().model_dump()]
    names += [
        word
        for section in report.sections
        for row in section.rows
        for name in ("kind", "input", "method")
        if (word := getattr(row, name, ""))
    ]
    assert unexplained(names) == []
    told = topics.find_topics("attack.robust@worst,linf,2/255:mean >= -2pp", list_explanations())
    assert [topic.title for topic in told] == [
        "attack.robust", "attack.robust (per sample)", "worst", "linf", "mean",
    ]  # fmt: skip


def shown(block, kind) -> list:
    """Every object of a type in a block, however deep."""
    if isinstance(block, kind):
        return [block]
    if is_dataclass(block):
        return [each for f in fields(block) for each in shown(getattr(block, f.name), kind)]
    return [e for b in block for e in shown(b, kind)] if isinstance(block, (tuple, list)) else []


@pytest.mark.parametrize("kind", ["single", "double", "comparison", "judgement"])
def test_every_heading_of_a_page(kind, report, other):
    pages = {
        "single": of_reports(report),
        "double": of_reports(report, other),
        "comparison": of_comparison(compare([report, other]), [report, other]),
        "judgement": of_judgement(judge(other, report)),
    }
    page = pages[kind].page()
    heads = [column for chapter in page.chapters for column in shown(chapter.blocks, Column)]
    labels = [
        write_math(column.label) for column in heads if column.label not in models(report, other)
    ]
    stands = [describe_standing(column) for column in heads]
    marked = [label + mark for label in labels for mark in list_footnotes(heads)[0][:1]]
    cards = [block for c in page.chapters[:2] for block in c.blocks if isinstance(block, Card)]
    names = [row[0] for card in cards for row in card.rows]
    assert len(names) > 2
    standings = [text for text in stands if text]
    assert unexplained([*labels, *marked, *names, *standings]) == []


def models(*reports) -> set[str]:
    """Headings that are names of reports, in any order and numbering."""
    specs = {r.run.model.spec for r in reports}
    return specs | {f"{letter}: {spec}" for letter in "AB" for spec in specs}


def run(*args: str, width: int = 80):
    return invoke("explain", *args, code=None, columns=width)


def test_what_is_asked_for_by_its_own_name_comes_first():
    assert run("exact").stdout.startswith("exact: Computed at the samples X")
    within = " ".join(run("within").stdout.split())
    assert within.startswith("bounds.within, bounds.layers.within, jacobian.within: ")
    assert within.count("The true norm is at most this share higher") == 1
    text = run("theorem", "3").stdout
    parts = [text.find(part) for part in ("How to read it:", "What it does not say:", "Formula:")]
    assert parts == sorted(parts)
    assert parts[0] > 0
    assert run("theorem", "3").stdout.startswith("bounds.theorem3: Yudin et al. 2025")
    parts = run("empirical in the ball").stdout.split("\n\n")
    assert [part.partition(":")[0] for part in parts] == ["empirical", "in the ball"]
    assert "the largest norm that searches find" in run("ascent").stdout
    assert run("pgd").stdout.startswith("pgd: Projected gradient")
