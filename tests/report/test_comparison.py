"""The page of a comparison: what it says first, and where each figure is found."""

import csv
import io

import numpy as np
import pytest

from lipaudit.gate import compare
from lipaudit.report import of_comparison, render, terminal
from lipaudit.report.blocks import Heatmap, Table
from lipaudit.tables import Array
from tests.report.conftest import find_chapter, rename

HEADS = 12
RNG = np.random.default_rng(20)
NORMS = RNG.lognormal(2, 0.4, 64)
EXACT = RNG.lognormal(0, 0.4, (HEADS, 8))


@pytest.fixture
def before(report):
    """A model whose samples and heads are measured one by one."""
    return measured(report, EXACT, NORMS, np.r_[np.ones(30, int), np.zeros(34, int)])


@pytest.fixture
def after(report):
    """Half of all norms, one louder head, three samples broken and ten mended."""
    louder = EXACT * np.exp(np.random.default_rng(21).normal(0, 0.01, EXACT.shape))
    louder[5] *= 10
    robust = np.r_[np.zeros(3, int), np.ones(37, int), np.zeros(24, int)]
    changed = measured(report, louder, NORMS / 2, robust)
    return rename(changed, spec="new", weights_sha256="f" * 64)


def measured(report, exact, norms, robust):
    names, medians = tuple(f"{i:016x}" for i in range(64)), np.median(exact, 1).tolist()
    bounds, jacobian, attack = map(report.section, ("bounds", "jacobian", "attack"))
    heads = (
        row.replace(exact=middle, converged=True)
        for row, middle in zip(bounds.rows, medians, strict=True)
    )
    models = (row.replace(converged=64) for row in jacobian.rows)
    figures = (
        {"exact_max": exact.max(0)},
        {"norm": norms},
        {"correct": np.ones(64, int), "robust@worst,linf,0.1": robust},
    )
    sections = []
    for section, rows, values in zip(
        (bounds, jacobian, attack), (heads, models, ()), figures, strict=True
    ):
        samples = {name: tuple(each.tolist()) for name, each in values.items()}
        ids = {"ids": names[: max(map(len, samples.values()))]}
        arrays = {"exact": Array.of(exact)} if section is bounds else {}
        update = {"rows": tuple(rows), "samples": ids | samples, "arrays": arrays}
        sections.append(section.model_copy(update=update))
    places = {"ids": names, "place": tuple(f"index {i}" for i in range(64))}
    return report.model_copy(update={"sections": tuple(sections), "samples": places})


@pytest.fixture
def subject(before, after):
    return of_comparison(compare([before, after]), [before, after])


def blocks(page, name, kind):
    return [block for block in find_chapter(page, name).blocks if isinstance(block, kind)]


def figures(page, name="change") -> dict[str, dict[str, object]]:
    """Return the rows of the table of figures by their metric."""
    (table,) = blocks(page, name, Table)
    labels = [column.label for column in table.columns]
    return {row[0]: dict(zip(labels, row, strict=True)) for row in table.rows}


def warnings(page) -> list[str]:
    return [text for level, text, _ in page.chapters[0].blocks[-1].points if level == "warning"]


def test_it_begins_with_what_changed_regressions_first(subject, before, after):
    page = subject.page()
    assert page.title == f"lipaudit: new against {before.run.model.spec}"
    shown = figures(page)
    norm = shown["jacobian.norm:median"]
    assert (norm["change"], norm["verdict"]) == ("-50%", "improved")
    assert shown["attack.robust:mean worst,linf,0.1"]["change"] == "+10.9pp"
    assert shown["bounds.exact_max:median"]["verdict"] == "regressed"
    words = [row["verdict"] for row in shown.values()]
    order = ["regressed", "improved", "inconclusive", "unchanged"]
    assert words == sorted(words, key=order.index)
    assert "Regressed: bounds.exact_max:median" in page.chapters[0].blocks[0].text
    assert page.chapters[0].blocks[0].tone == "broken"


def test_a_screen_counts_what_changed_and_names_the_first(subject):
    screen = subject.page(short=True)
    share = figures(subject.page())["attack.robust:mean worst,linf,0.1"]
    assert (share["samples"], share["gained"], share["lost"]) == (64, 10, 3)
    assert len(figures(screen)) == 6
    (flipped,) = blocks(screen, "samples", Table)
    lost = sorted(range(3), key=lambda i: -NORMS[i])
    assert [row[1] for row in flipped.rows] == [f"index {i}" for i in lost]
    assert "1 of 12 changes are proven" in find_chapter(screen, "heads").blocks[0].text
    (heads,) = blocks(screen, "heads", Table)
    assert len(heads.rows) == 3
    assert heads.rows[0][0] == "1.1"
    text = terminal.render(screen, width=80).decode()
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) <= 55
    assert "--details" in text


def test_samples_that_flipped_stand_with_their_place_the_worst_first(subject):
    (flipped,) = blocks(subject.page(), "samples", Table)
    labels = ["sample", "place", "became", "||J||, old", "||J||, new"]
    # No column of the steepest head, which is known of 8 samples.
    assert [column.label for column in flipped.columns] == labels
    first, last = flipped.rows[0], flipped.rows[-1]
    worst = max(range(3), key=lambda i: NORMS[i])
    became = "attack.robust@worst,linf,0.1: yes → no"
    assert first[:3] == (f"{worst:016x}"[:12], f"index {worst}", became)
    assert first[3:5] == pytest.approx((NORMS[worst], NORMS[worst] / 2))
    assert last[2] == "attack.robust@worst,linf,0.1: no → yes"
    assert len(flipped.rows) == 13


def test_metrics_of_one_heading_keep_their_columns(before, after):
    found = compare([before, after])
    figures = {"x.score": (1.0, 2.0), "y.score": (30.0, 40.0)}
    samples = [sample.model_copy(update={"figures": figures}) for sample in found.pairs[0].samples]
    heads = [
        head.model_copy(update={"metric": f"{name}:each", "old": old, "new": new})
        for name, (old, new) in figures.items()
        for head in found.pairs[0].heads[:HEADS]
    ]
    pair = found.pairs[0].model_copy(update={"samples": tuple(samples), "heads": tuple(heads)})
    found = found.model_copy(update={"pairs": (pair,)})
    page = of_comparison(found, [before, after]).page()
    for name in ("samples", "heads"):
        (table,) = blocks(page, name, Table)
        assert [column.label for column in table.columns[-4:]] == ["score, old", "score, new"] * 2
        assert {row[-4:] for row in table.rows} == {(1.0, 2.0, 30.0, 40.0)}


def test_heads_without_a_known_change_leave_no_table(before, after):
    found = compare([before, after])
    unknown = {"change": None, "paired": None, "new": None}
    heads = [head.model_copy(update=unknown) for head in found.pairs[0].heads]
    pair = found.pairs[0].model_copy(update={"heads": tuple(heads)})
    page = of_comparison(found.model_copy(update={"pairs": (pair,)}), [before, after]).page()
    assert not blocks(page, "heads", Table)
    assert terminal.render(page, width=80)


def test_heads_stand_by_how_much_they_moved(subject):
    (heads,) = blocks(subject.page(), "heads", Table)
    cells = dict(zip([column.label for column in heads.columns], heads.rows[0], strict=True))
    assert (cells["head"], cells["stands"]) == ("1.1", True)
    assert 850 < float(cells["change"].strip("+%")) < 950
    assert cells["exact, new"] == pytest.approx(10 * cells["exact, old"], rel=0.05)
    assert heads.strong == {0}
    maps = blocks(subject.page(), "heads", Heatmap)
    assert [block.centre for block in maps] == [0.0] * len(maps)
    assert maps[0].values[1][1] == pytest.approx(9.0, rel=0.05)


def test_warnings_stand_first_and_say_what_could_not_be_compared(before, after):
    jacobian = after.section("jacobian")
    loose = jacobian.model_copy(update={"settings": {**jacobian.settings, "tol": 0.1}})
    run = after.run.model_copy(update={"dtype": "float64"})
    changed = after.model_copy(
        update={"run": run, "sections": (after.section("bounds"), loose, after.section("attack"))}
    )
    page = of_comparison(compare([before, changed]), [before, changed]).page()
    shown = warnings(page)
    assert any("dtype: float32 became float64" in text for text in shown)
    (text,) = (text for text in shown if "jacobian.norm:median, jacobian.norm:p95" in text)
    assert "settings differ: tol" in text


def test_csv_has_a_row_for_every_sample(subject):
    rows = list(csv.DictReader(io.StringIO(render(subject, "csv").decode())))
    assert len(rows) == 64
    by_place = {row["place"]: row for row in rows}
    for i in (0, 40, 63):
        row = by_place[f"index {i}"]
        assert float(row["jacobian.norm.old"]) == NORMS[i]
        assert float(row["jacobian.norm.new"]) == NORMS[i] / 2
    assert by_place["index 0"]["attack.robust@worst,linf,0.1.old"] == "1.0"
    assert (by_place["index 0"]["lost"], by_place["index 0"]["gained"]) == ("1", "0")
    assert by_place["index 31"]["attack.robust@worst,linf,0.1.new"] == "1.0"


def test_every_other_report_stands_against_the_first(before, after):
    third = rename(after, spec="third", weights_sha256="e" * 64)
    reports = [before, after, third]
    page = of_comparison(compare(reports), reports).page()
    names = [chapter.name for chapter in page.chapters if chapter.name[-2:] in ("-1", "-2")]
    assert names == [f"{part}-{i}" for i in (1, 2) for part in ("change", "samples", "heads")]
    for number in (1, 2):
        assert "jacobian.norm:median" in figures(page, f"change-{number}")


def test_equal_reports_have_nothing_to_tell(before):
    page = of_comparison(compare([before, before]), [before, before]).page()
    assert {row["verdict"] for row in figures(page).values()} == {"unchanged"}
    assert any("both reports are of the same weights" in text for text in warnings(page))
    assert "0 of 12 changes are proven" in find_chapter(page, "heads").blocks[0].text
