"""The pages of several reports: what changed first, and who is best."""

import csv
import io
import math
import re

import numpy as np
import pytest

from lipaudit.gate import compare, judge, rank
from lipaudit.gate.verdicts import Verdict
from lipaudit.measures import summarise
from lipaudit.report import of_comparison, of_judgement, of_reports, render, terminal
from lipaudit.report.blocks import Bar, Forest, Gallery, Heatmap, Table
from lipaudit.report.changes import choose_tone, draw_changes, write_answer
from lipaudit.report.charts import draw_svg
from lipaudit.report.judgements import describe_ranking, list_models
from lipaudit.tables import Column, Data, Note
from lipaudit.tables.report import Example
from lipaudit.tables.summary import find_figures
from tests.gate import cases
from tests.gate.cases import flags
from tests.report.conftest import find_chapter, keep, rename, swap

pytestmark = pytest.mark.usefixtures("blank_charts")

HEADS = 12
RNG = np.random.default_rng(20)
NORMS = RNG.lognormal(2, 0.4, 64)
EXACT = RNG.lognormal(0, 0.4, (HEADS, 8))


def measured(exact, norms, robust, **run):
    """A model whose samples and heads are measured one by one."""
    heads = cases.bounds(exact, heads=4)
    heads = heads.model_copy(update={"arrays": {"exact": heads.arrays["exact"]}})
    attacked = cases.attack(robust, eps=("0.1",))
    places = {"ids": cases.sample_ids(64), "place": tuple(f"index {i}" for i in range(64))}
    whole = cases.report(heads, cases.jacobian(norms), attacked, **run)
    return whole.model_copy(update={"samples": places})


@pytest.fixture(scope="module")
def before():
    return measured(EXACT, NORMS, flags(30, 64))


@pytest.fixture(scope="module")
def after():
    """Half of all norms, one louder head, three samples broken and ten mended."""
    louder = EXACT * np.exp(np.random.default_rng(21).normal(0, 0.01, EXACT.shape))
    louder[5] *= 10
    robust = flags(40, 64) - flags(3, 64)
    return measured(louder, NORMS / 2, robust, spec="new", weights="f")


@pytest.fixture(scope="module")
def subject(before, after):
    return of_comparison(compare([before, after]), [before, after])


def show_pair(reports, **update):
    """The page of two reports of which the comparison found something else."""
    found = compare(reports)
    pair = found.pairs[0].model_copy(update=update)
    return of_comparison(found.model_copy(update={"pairs": (pair,)}), reports).page()


def blocks(page, name, kind):
    return [block for block in find_chapter(page, name).blocks if isinstance(block, kind)]


def figures(page, name="change") -> dict[str, dict[str, object]]:
    """Return the rows of the table of figures by their metric; on one screen by their name."""
    (table,) = blocks(page, name, Table)
    labels = [column.label for column in table.columns]
    rows = [dict(zip(labels, row, strict=True)) for row in table.rows]
    return {row.get("metric", row["figure"]): row for row in rows}


def warnings(page) -> list[str]:
    return [text for level, text, _ in page.chapters[0].blocks[-1].points if level == "warning"]


def test_it_begins_with_what_changed_regressions_first(subject, before, after):
    page = subject.page()
    assert page.title == f"lipaudit: new against {before.run.model.spec}"
    shown = figures(page)
    norm = shown["jacobian.norm:median"]
    assert (norm["figure"], norm["change"], norm["verdict"]) == ("Jacobian norm", "-50%", "better")
    assert norm["paired change"] == "-50%"
    robust = shown["attack.robust:mean worst,linf,0.1"]
    assert (robust["change"], robust["old"], robust["new"]) == ("+10.9pp", "46.9%", "57.8%")
    assert robust["figure"] == "robust accuracy (linf 0.1)"
    assert shown["bounds.exact_max:median"]["verdict"] == "worse"
    accuracies = [*shown][:2]  # shares of yes-or-no results come first
    assert all(name.startswith("attack.") for name in accuracies)
    words = [row["verdict"] for name, row in shown.items() if name not in accuracies]
    order = ["worse", "better", "not proven", "unchanged"]
    assert words == sorted(words, key=order.index)
    answer = page.chapters[0].blocks[0].text
    robust = "new: robust accuracy (linf 0.1) 46.9% → 57.8%, not proven with 64 samples."
    assert answer.startswith(f"{robust} new is worse in largest head norm 1.619 → 8.873, ")
    assert "; and better in Jacobian norm 7.265 → 3.633. " in answer
    sure = "95% confidence for each figure alone, 8 to 64 samples."
    assert answer.endswith(f"No proven change in 5 of 8 figures. {sure}")
    assert page.chapters[0].blocks[0].tone == "broken"


def test_an_answer_begins_with_robust_accuracy_where_it_is_better(subject):
    (pair,) = subject.record.pairs
    verdicts = []
    for verdict in pair.verdicts:
        if verdict.metric == "attack.robust:mean":
            verdict = verdict.model_copy(update={"status": "improved"})
        verdicts.append(verdict)
    answer = write_answer(pair.model_copy(update={"verdicts": tuple(verdicts)}))
    assert choose_tone([pair.model_copy(update={"verdicts": tuple(verdicts)})]) == "open"
    assert answer.startswith("new is better in robust accuracy (linf 0.1) 46.9% → 57.8%, ")
    assert "; and worse in largest head norm 1.619 → 8.873" in answer


def test_changes_are_drawn_by_size_with_their_intervals_one_picture_for_a_unit(subject):
    points, ratios = blocks(subject.page(), "change", Forest)
    (pair,) = subject.record.pairs
    known = {verdict.subject: verdict for verdict in pair.verdicts}
    labels = ["robust accuracy (linf 0.1)", "clean accuracy"]
    assert [bar.label for bar in points.bars] == labels
    assert (points.centre, ratios.centre, ratios.log) == (0.0, 1.0, True)
    sizes = []
    for picture, unit in ((points, "pp"), (ratios, "%")):
        for bar in picture.bars:
            verdict = known[bar.label]
            assert verdict.unit == unit
            change = verdict.change if verdict.paired is None else verdict.paired
            ends = [end for end in (change, verdict.low, verdict.high) if end is not None]
            shown = [100 * end if unit == "pp" else 1 + end for end in ends]
            assert [bar.value, bar.low, bar.high][: len(ends)] == pytest.approx(shown)
            assert bar.text.startswith(verdict.values.replace("->", "→"))
            words = {"regressed": "worse", "improved": "better"}
            assert picture.legend[bar.colour] == words.get(verdict.status, "not proven")
            if unit == "%":
                sizes.append(abs(math.log(bar.value)))
    assert sizes == sorted(sizes, reverse=True)
    assert "new / old" not in terminal.render(subject.page()).decode()  # its table has all
    assert not blocks(subject.page(short=True), "change", Forest)


def test_a_change_alone_is_not_drawn(subject):
    (pair,) = subject.record.pairs
    (robust,) = [v for v in pair.verdicts if v.metric == "attack.robust:mean"]
    assert draw_changes([("robust accuracy", robust)]) == []
    assert len(draw_changes([("robust accuracy", robust), ("the same again", robust)])) == 1


def test_every_figure_that_is_called_better_or_worse_is_drawn(before, after):
    """Also a figure in units of its own, a figure alone, and one without a test."""
    (pair,) = compare([before, after]).pairs
    margin = Verdict(
        rule="jacobian.margin:median", metric="jacobian.margin:median", status="regressed",
        old=8.0, new=5.0, paired=-2.0, low=-4.0, high=-1.0, samples=64,
    )  # fmt: skip
    untested = margin.model_copy(
        update={"metric": "a.b:each", "unit": "%", "paired": None, "low": None, "high": None}
    )
    page = show_pair([before, after], verdicts=(margin, untested, *pair.verdicts))
    drawn = {bar.label: bar for forest in blocks(page, "change", Forest) for bar in forest.bars}
    proven = {row["figure"] for row in figures(page).values() if row["verdict"] != "not proven"}
    assert {"margin", "b", "Jacobian norm"} <= proven <= drawn.keys()
    bar = drawn["margin"]
    assert (bar.value, bar.low, bar.high) == (-25.0, -50.0, -12.5)  # percent of the old value
    assert bar.text == "8 → 5, paired -25%"
    assert (drawn["b"].value, drawn["b"].low) == (5 / 8, None)


def test_a_figure_that_several_measures_have_is_shown_once(before, after):
    (pair,) = compare([before, after]).pairs
    (clean,) = [v for v in pair.verdicts if v.metric == "attack.correct:mean"]
    fewer = clean.model_copy(update={"metric": "jacobian.correct:mean", "samples": 16})
    page = show_pair([before, after], verdicts=(fewer, *pair.verdicts))
    shown = [row for row in figures(page).values() if row["figure"] == "clean accuracy"]
    assert [row["samples"] for row in shown] == [64]
    assert page.chapters[0].blocks[0].text.count("of 8 figures") == 1


def test_next_steps_have_the_paths_of_the_run_and_enough_samples(before, after):
    command = "lipaudit audit demo --only 'bounds' -n 8 --run-dir 'a b' -q"
    before = before.model_copy(update={"run": before.run.model_copy(update={"command": command})})
    reports = [before, after]
    files = ["old one.json", "new.json"]
    page = of_comparison(compare(reports), reports, files).page()
    (points,) = find_chapter(page, "next-steps").blocks
    (_, settle, again), (_, _, inspect), (_, _, gated) = points.points
    robust = next(v for v in compare(reports).pairs[0].verdicts if v.metric.startswith("attack.r"))
    needed = robust.samples_needed
    assert 64 < needed < 6400
    assert settle.startswith(f"Measure both models on at least {needed} samples: enough to ")
    assert again == (
        f"lipaudit audit demo --only 'bounds' -q -n {needed} --run-dir {needed}-samples && "
        f"lipaudit compare {needed}-samples/report.json new"
    )
    worst = max(range(3), key=lambda i: NORMS[i])
    assert inspect == f"lipaudit inspect new.json {cases.sample_ids(64)[worst][:12]}"
    assert gated == "lipaudit gate new.json --baseline 'old one.json'"
    page = of_judgement(judge(after, before), reports, files).page()
    (points,) = find_chapter(page, "next-steps").blocks
    assert points.points[-1][2] == "lipaudit compare 'old one.json' new.json"
    other = before.model_copy(update={"run": before.run.model_copy(update={"command": "x.py"})})
    page = of_comparison(compare([other, after]), [other, after]).page()
    (points,) = find_chapter(page, "next-steps").blocks
    assert [command for _, _, command in points.points] == [""]  # no file and no command is known


def test_a_forest_plot_has_each_interval_where_its_axis_says():
    bars = (Bar("a", 10.0, 5.0, 20.0, "up", 1), Bar("b", 1.0, None, None, "same", 6, limit=2.0))
    column = Column("new / old", "", "×")
    legend = {1: "worse", 6: "not proven"}
    element = draw_svg(Forest("f", column, bars, centre=1.0, log=True, legend=legend))
    assert "a: up" in element
    paths = re.findall(r'<path d="M ([\d. L]+)"[^>]*stroke: var\(--c1, #d55e00\)', element)
    (line,) = [p for p in paths if p.count("L") == 1 and p.split()[1] == p.split()[4]][:1]
    marks = re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)"[^>]*fill: var\(--c1', element)
    left, _, _, right, height = (float(p) if p != "L" else 0.0 for p in line.split())
    dots = [(float(x), float(y)) for x, y in marks]
    assert any(
        x == pytest.approx((left + right) / 2, abs=0.1) and y == pytest.approx(height, abs=0.1)
        for x, y in dots
    )  # 10 is halfway from 5 to 20 on a logarithmic axis
    for word in ("worse", "not proven", "limit of the rule", "new / old (×)"):
        assert word in element


@pytest.mark.parametrize(
    ("change", "low", "high", "ticks"),
    [(0.0, -10.7, 10.7, ["-10", "-5", "0", "5", "10"]), (0.05, -0.3, 0.4, ["-2", "-1", "0"])],
)
def test_an_axis_has_room_for_intervals_of_no_change_and_for_the_limits_of_rules(
    change, low, high, ticks
):
    bars = [Bar(name, change, low, high, "", 6, limit=-2.0) for name in ("a", "b")]
    element = draw_svg(Forest("f", Column("new - old", "", "points"), bars))
    assert re.findall(r"<text[^>]*>(-?[0-9.]+)</text>", element) == ticks


def test_samples_that_flipped_are_shown_with_what_is_kept_of_them(subject, before, after):
    example = {
        "trial": "worst,linf,0.1", "classes": ("1", "2"), "image": "AAAA",
        "before": (0.9, 0.1), "after": (0.2, 0.8),
    }  # fmt: skip
    (pair,) = subject.record.pairs
    first = next(sample for sample in pair.samples if sample.lost)
    attack = after.section("attack").model_copy(
        update={"examples": {first.id: Example(**example)}}
    )
    reports = [before, swap(after, attack)]
    (shown,) = blocks(of_comparison(compare(reports), reports).page(), "samples", Gallery)
    (item,) = shown.items
    assert item.title.startswith(first.id[:12])
    assert item.pictures == [("sample", "AAAA")]
    assert item.lines[0] == "robust at linf 0.1: yes → no"
    texts = ["a fine film" if name == first.id else "" for name in before.samples["ids"]]
    places = {**before.samples, "text": tuple(texts)}
    reports = [before.model_copy(update={"samples": places}), after]
    (shown,) = blocks(of_comparison(compare(reports), reports).page(), "samples", Gallery)
    assert shown.items[0].lines == ("robust at linf 0.1: yes → no", '"a fine film"')


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
    labels = ["sample", "place", "became", "Jacobian norm, old", "Jacobian norm, new"]
    # No column of the steepest head, which is known of 8 samples.
    assert [column.label for column in flipped.columns] == labels
    first, last = flipped.rows[0], flipped.rows[-1]
    worst = max(range(3), key=lambda i: NORMS[i])
    became = "robust at linf 0.1: yes → no"
    assert first[:3] == [cases.sample_ids(64)[worst][:12], f"index {worst}", became]
    assert first[3:5] == pytest.approx([NORMS[worst], NORMS[worst] / 2])
    assert last[2] == "robust at linf 0.1: no → yes"
    assert len(flipped.rows) == 13


def test_metrics_of_one_heading_keep_their_columns(before, after):
    (pair,) = compare([before, after]).pairs
    figures = {"x.score": (1.0, 2.0), "y.score": (30.0, 40.0)}
    samples = [sample.model_copy(update={"figures": figures}) for sample in pair.samples]
    heads = [
        head.model_copy(update={"metric": f"{name}:each", "old": old, "new": new})
        for name, (old, new) in figures.items()
        for head in pair.heads[:HEADS]
    ]
    page = show_pair([before, after], samples=tuple(samples), heads=tuple(heads))
    for name in ("samples", "heads"):
        (table,) = blocks(page, name, Table)
        assert [column.label for column in table.columns[-4:]] == ["score, old", "score, new"] * 2
        assert {tuple(row[-4:]) for row in table.rows} == {(1.0, 2.0, 30.0, 40.0)}
    unknown = {"change": None, "paired": None, "new": None}  # leaves no table
    heads = tuple(head.model_copy(update=unknown) for head in pair.heads)
    page = show_pair([before, after], heads=heads)
    assert not blocks(page, "heads", Table)
    assert terminal.render(page, width=80)


def test_heads_stand_by_how_much_they_moved(subject):
    (heads,) = blocks(subject.page(), "heads", Table)
    cells = dict(zip([column.label for column in heads.columns], heads.rows[0], strict=True))
    assert (cells["head"], cells["stands"]) == ("1.1", True)
    assert 850 < float(cells["paired change"].strip("+%")) < 950
    assert cells["head norm, new"] == pytest.approx(10 * cells["head norm, old"], rel=0.05)
    assert heads.strong == {0}
    maps = blocks(subject.page(), "heads", Heatmap)
    assert maps[0].title == "How head norm changed in every head"
    assert [block.centre for block in maps] == [0.0] * len(maps)
    assert maps[0].values[1][1] == pytest.approx(9.0, rel=0.05)


def test_warnings_stand_first_and_say_what_could_not_be_compared(before, after):
    jacobian = after.section("jacobian")
    loose = jacobian.model_copy(update={"settings": {**jacobian.settings, "tol": 0.1}})
    run = after.run.model_copy(update={"dtype": "float64"})
    changed = swap(after, loose).model_copy(update={"run": run})
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
    """And equal ones have nothing to tell."""
    third = rename(after, spec="third", weights_sha256="e" * 64)
    reports = [before, after, third]
    page = of_comparison(compare(reports), reports).page()
    names = [chapter.name for chapter in page.chapters if chapter.name[-2:] in ("-1", "-2")]
    assert names == [f"{part}-{i}" for i in (1, 2) for part in ("change", "samples", "heads")]
    for number in (1, 2):
        assert "jacobian.norm:median" in figures(page, f"change-{number}")
    page = of_comparison(compare([before, before]), [before, before]).page()
    assert {row["verdict"] for row in figures(page).values()} == {"unchanged"}
    assert any("both reports are of the same weights" in text for text in warnings(page))
    assert "0 of 12 changes are proven" in find_chapter(page, "heads").blocks[0].text


BEHIND = Verdict(
    rule="attack.robust", metric="attack.robust:mean", status="regressed", samples=24,
    old=0.625, new=0.375, paired=-0.25, low=-0.4, high=-0.125, unit="pp", p=1e-3,
)  # fmt: skip


@pytest.fixture(scope="module")
def ranking(report, other):
    first, second = rank([report, other]).models
    second = second.model_copy(update={"outcome": "not distinguishable from the best"})
    third = second.model_copy(
        update={"model": "third", "outcome": "behind the best", "difference": BEHIND, "rank": 3}
    )
    models = first, second, third
    return rank([report, other]).model_copy(update={"models": models, "compared": 2})


def columns(ranking, reports) -> dict[str, list[object]]:
    """Return the cells of the table of models, by the heading of the column."""
    found, rows = list_models(ranking, reports)
    return {column.label: [row.get(name) for row in rows] for name, column in found.items()}


def test_the_outcome_is_said_in_words(ranking, report):
    first, second, _ = (model.model for model in ranking.models)
    assert describe_ranking(ranking) == (
        f"Best by robust accuracy (linf 2/255): {first} (62.5%). "
        f"Not distinguishable from the best: {second} (62.5%). "
        "Behind the best: third (37.5%; difference -40pp to -12.5pp, 24 samples)."
    )
    apart = keep(report, report.section("attack"))
    ids = {"ids": tuple(f"{i:03x}" for i in range(24))}
    section = apart.sections[0].model_copy(update={"samples": apart.sections[0].samples | ids})
    said = describe_ranking(rank([apart, keep(apart, section)]))
    assert said.startswith("Not comparable: A: ")
    assert said.endswith("samples are in the current report).")


def test_a_row_for_every_model_with_its_difference_and_its_scorecard(report, other):
    ranking = rank([report, other])
    shown = columns(ranking, [report, other])
    assert shown["model"] == [model.model for model in ranking.models]
    assert (shown["rank"], shown["difference"]) == ([1, 1], [None, "+0pp"])
    lines = {row.figure: row.value for row in summarise(report).rows}
    assert {label: values[0] for label, values in shown.items() if label in lines} == lines
    steepest = shown["steepest attention head, ‖J‖"]
    assert steepest[0] == 2 * steepest[1]
    best, second = ranking.models
    endless = BEHIND.model_copy(update={"low": -1.0, "high": math.inf, "unit": "%"})
    texts = (BEHIND, "-25pp (-40pp to -12.5pp)"), (endless, "-25% (too few samples)")
    for change, text in texts:
        behind = second.model_copy(update={"difference": change})
        changed = ranking.model_copy(update={"models": (best, behind)})
        assert columns(changed, [report, other])["difference"] == [None, text]


def test_in_the_order_given_or_without_a_common_figure_no_report_is_ranked(report, other):
    ranked = [model.model for model in rank([report, other]).models]
    back = [other, report] if ranked[0] == report.run.model.spec else [report, other]
    specs = [each.run.model.spec for each in back]
    kept = rank(back, "order")
    assert [model.model for model in kept.models] == specs != ranked
    assert {model.rank for model in kept.models} == {None}
    page = render(of_reports(*back, by="order"), "table").decode()
    assert "The models, in order" in page
    assert "Which model is" not in page
    heads = [keep(each, each.section("bounds")) for each in back]
    (block,) = find_chapter(of_reports(*heads).page(), "ranking").blocks
    assert [row[0] for row in block.rows] == specs


def test_reports_without_a_common_fact_or_warning_have_a_screen(before, after):
    """Such a page has nothing to open with."""
    after = after.model_copy(update={"run": after.run.model_copy(update={"device": "cuda"})})
    data = after.run.data.model_copy(update={"spec": "folder"})
    after = after.model_copy(update={"run": after.run.model_copy(update={"data": data})})
    page = of_reports(before, after, by="order").page(short=True)
    assert not page.chapters[0].blocks
    assert "The models, in order" in terminal.render(page).decode()


def test_fragile_rows_are_the_same_figure_on_a_scorecard(report, other):
    for one, two in ((report, other), (other, report)):
        verdicts = {v.metric: v for v in compare([one, two]).pairs[0].verdicts}
        (figure,) = find_figures(summarise(one), "fragile_rows")
        assert verdicts["attention.intermediate:mean"].old == pytest.approx(figure.value)
        assert not any(metric.startswith("jacobian.shares") for metric in verdicts)


PAGES = ("table", "markdown", "html")
RANDOM = Note(level="warning", code="random-weights", text="the weights are random numbers")
FEWER = Note(level="info", code="fewer-samples", text="only a handful of samples were there")
STUCK = Note(level="warning", code="not-converged", text="seven norms are lower estimates")


@pytest.fixture
def spoiled(report):
    """A report whose every measure is of random weights, and whose heads did not converge."""

    def noted(section):
        if "." in section.measure:
            return section
        own = (STUCK,) if section.measure == "bounds" else ()
        return section.model_copy(update={"notes": (RANDOM, FEWER, *section.notes, *own)})

    return keep(report, *tuple(map(noted, report.sections)))


@pytest.mark.parametrize("format", PAGES)
def test_what_is_said_of_all_measures_is_said_once_above_them(spoiled, format):
    text = render(of_reports(spoiled), format).decode().rpartition("</nav>")[2]  # its contents
    for note in (RANDOM, FEWER, STUCK):
        assert text.count(note.text) == 1
        assert 0 < text.find(note.text) < text.find("clean accuracy")
    alone = render(keep(spoiled, spoiled.section("attack")), format).decode()
    assert alone.count(RANDOM.text) == 1
    assert 0 < alone.find(RANDOM.text) < alone.find("clean accuracy")


@pytest.mark.parametrize("format", ["text", *PAGES])
def test_warnings_stand_above_what_they_spoil(spoiled, report, format):
    """Above reports side by side, above what changed, and above the verdicts."""
    judgement = of_judgement(judge(spoiled, report))
    text = render(judgement, format).decode()
    assert all(RANDOM.text in render(judgement, name).decode() for name in ("json", "junit"))
    assert 0 < text.find(RANDOM.text) < text.find("jacobian.norm:median")
    pair = [keep(each, *map(each.section, ("bounds", "jacobian"))) for each in (report, spoiled)]
    for subject in (of_reports(*pair), of_comparison(compare(pair), pair)):
        if format in PAGES:
            text = render(subject, format).decode().rpartition("</nav>")[2]
            assert 0 < text.find(RANDOM.text) < text.find("What do the words mean")


def test_what_a_comparison_leaves_out_is_said_once_for_a_reason(spoiled, report):
    attention = report.section("attention").model_copy(update={"settings": {"k": 3}})
    layers = report.section("bounds.layers")
    other = keep(report, layers, attention)
    text = render(of_comparison(compare([report, other]), [report, other]), "table").decode()
    words = " ".join(text.split())
    metrics = "attention.g1:median, attention.softmax_norm:median, attention.intermediate:mean"
    assert words.count(f"gamma 0.1 became unset; k 10 became 3: {metrics}") == 1
    for measure in ("bounds", "bounds.ball", "jacobian", "attack", "certify"):
        assert f"has it: {measure} " in words


@pytest.mark.parametrize(("samples", "said"), [(1, "1 sample"), (2, "2 samples")])
def test_one_sample_is_no_samples(samples, said):
    """Of pages and logs: the number and its noun agree."""
    first, second = (
        cases.report(
            cases.jacobian(NORMS[:samples] * times),
            cases.attack(flags(samples - 1, samples)),
            data=Data(spec="demo", samples=samples, suite_id="s" * 64),
            spec=spec,
        )
        for spec, times in (("a", 1.0), ("b", 2.0))
    )
    both = [first, second]
    texts = [
        terminal.render(subject.page(short=short)).decode()
        for subject in (of_reports(first), of_reports(*both), of_comparison(compare(both), both))
        for short in (False, True)
    ]
    assert not re.search(r"\b1 (samples|figures)\b|\b[02-9] (sample|figure)\b", "\n".join(texts))
    assert said in texts[0]
    assert f"{said}." in texts[4]


@pytest.mark.parametrize("limit", ["-2pp", "-2.0pp", "-2e0pp", "-20e-1pp", "-.2e+1pp"])
def test_the_limit_of_a_rule_is_drawn_however_it_is_written(limit):
    judged = BEHIND.model_copy(update={"rule": f"attack.robust@linf,2/255 >= {limit}"})
    (forest,) = draw_changes([("robust", judged)])
    assert [bar.limit for bar in forest.bars] == [-2.0]  # percentage points
