"""The scorecard: what it says is what the sections say, and every format draws it."""

import html
from math import log10
from shlex import quote
from statistics import median

import pytest
from scipy.stats import binom

from lipaudit.gate import judge
from lipaudit.measures import ATTENTION_TABLE, CERTIFY_TABLE, layouts
from lipaudit.report import of_judgement, of_reports, render
from lipaudit.report.blocks import Table
from lipaudit.report.page.document import make_page, make_screen
from lipaudit.report.page.scorecard import make_scorecard
from lipaudit.tables.figures import median_limits, wilson
from lipaudit.tables.summary import summary
from tests.report.conftest import keep


def lines(report) -> dict[str, tuple[object, str, str]]:
    card = make_scorecard(report)
    return {line.label: (line.value, line.text, line.command) for line in card.lines}


def with_rows(report, measure, **changes):
    section = report.section(measure)
    rows = tuple(row.replace(**changes) for row in section.rows)
    return keep(report, section.model_copy(update={"rows": rows}))


def test_accuracies_and_their_limits(report):
    attack = keep(report, report.section("attack"))
    clean, *attacked = summary(attack).accuracy
    assert (clean.share, clean.samples) == (23 / 24, 24)
    assert (clean.low, clean.high) == wilson(23, 24)
    rows = {row.eps_text: row for row in report.section("attack").rows if row.attack == "worst"}
    assert [each.eps for each in attacked] == list(rows)
    for each in attacked:
        row = rows[each.eps]
        assert (each.share, each.low, each.high) == (row.robust, row.robust_low, row.robust_high)
        assert each.attacks == ("fgsm", "pgd")
    said = lines(report)["robust accuracy, linf 2/255"]
    assert said[:2] == (15 / 24, "95 % CI 43.5 to 79.5%, worst of fgsm, pgd")


def test_what_is_proven_stands_below_what_attacks_left(report):
    proven = {"certified": 0.25, "certified_low": 0.1, "certified_high": 0.4, "undecided": 3}
    row = CERTIFY_TABLE.row(
        norm="linf", eps=2 / 255, eps_text="2/255", samples=8, robust=0.5, **proven
    )
    section = layouts()["certify"].section(rows=(row,))
    for others, labels in (
        ((), ["robust accuracy, linf 2/255", "certified accuracy, linf 2/255"]),
        (
            (report.section("attack"),),
            ["clean accuracy", *(f"robust accuracy, linf {e}/255" for e in (2, 4)),
             "certified accuracy, linf 2/255"],
        ),
    ):  # fmt: skip
        said = lines(keep(report, *others, section))
        assert list(said) == labels
        assert said["certified accuracy, linf 2/255"] == (
            0.25, "95 % CI 10.0 to 40.0%, 8 samples, 3 undecided", "",
        )  # fmt: skip


def test_the_certified_radius_is_the_median_of_what_is_right_with_its_limits(report):
    proven = report.section("certify"), report.section("certify.radius")
    both = keep(report, *proven)
    summed, radii = summary(both).radii, sorted(filter(None, proven[0].samples["radius"]))
    assert (summed.norm, summed.median, summed.adversarial) == ("linf", 0.0033, 0.029)
    assert [0.0, *radii].index(summed.low) + 1 == 7  # the ranks in tables of the sign test, n = 23
    assert [0.0, *radii].index(summed.high) + 1 == 17
    text = "95 % CI 0.00180 to 0.00480, median of 23 samples, nearest adversarial 0.0290"
    assert lines(both)["certified radius, linf"] == (0.0033, text, "")
    assert f"| 0.00330 | {text} |" in render(both, "brief").decode()
    assert summary(keep(report, proven[0])).radii is None


def test_what_is_not_measured_of_a_certificate_has_no_column(report):
    section = report.section("certify")
    unknown = tuple(row.replace(clean=None) for row in section.rows)
    bare = keep(report, section.model_copy(update={"rows": unknown}))
    for shown, there in ((report, True), (bare, False)):
        chapter = next(c for c in make_page(shown).chapters if c.name == "certify")
        table = next(block for block in chapter.blocks if isinstance(block, Table))
        assert ("clean" in [column.label for column in table.columns]) == there
        assert {len(row) for row in table.rows} == {len(table.columns)}


def test_settings_are_written_once(report):
    text = render(report, "table").decode()
    assert text.count("Settings: eps 1/255, 2/255; norm linf; radius; attack pgd.") == 1
    radii = report.section("certify.radius")
    other = radii.model_copy(update={"settings": radii.settings | {"norm": "l2"}})
    assert "norm l2; radius;" in render(keep(report, other), "table").decode()
    both = keep(report, report.section("certify"), other)
    assert "norm l2; radius;" in render(both, "table").decode()


@pytest.mark.parametrize("count", [1, 5, 6, 7, 8, 9, 20, 101, 9999])
def test_limits_of_a_median_hold_it_as_often_as_they_say(count):
    """Of as many values as coins, fewer than k lie below the median in `cdf(k - 1)` of cases."""
    limits = median_limits([*range(count), None, float("nan")])
    missed = [2 * binom.cdf(k - 1, count, 0.5) for k in range(1, count // 2 + 2)]
    k = sum(chance <= 0.05 for chance in missed)
    assert limits == ((k - 1, count - k) if k else None)


def test_norms_name_the_sample_that_has_the_largest(report):
    row, norms = report.section("jacobian").rows[0], summary(report).norms
    assert (norms.median, norms.p95, norms.max) == (row.median, row.p95, row.max)
    ids, values = (report.section("jacobian").samples[name] for name in ("ids", "norm"))
    known = {v: i for i, v in zip(ids, values, strict=True) if v is not None and v == v}
    assert norms.sample == known[max(known)]
    value, text, _ = lines(report)["model sensitivity, median ‖J‖"]
    assert value == row.median
    assert text.endswith(f"largest {row.max:.3g} (sample {norms.sample[:12]})")


@pytest.mark.parametrize("format", ["table", "markdown", "html"])
def test_where_a_sample_is_found_stands_wherever_it_is_named(report, format):
    name = summary(report).norms.sample
    said = {"ids": (name,), "place": ("cat/7.png",), "text": ("so it begins",)}
    report = keep(report, report.section("jacobian"), report.section("attack"))
    placed = report.model_copy(update={"samples": said})
    text = html.unescape(render(placed, format).decode().replace("\\", ""))
    assert f'sample {name[:12]}, cat/7.png "so it begins"' in " ".join(text.split())
    tables = ["scorecard", "what to do next", "worst"]
    assert text.count('cat/7.png "so it begins"') == len(tables)
    assert "cat/7.png" in render(placed, "brief").decode()
    assert "cat/7.png" not in render(report, format).decode()


def test_one_sample_has_one_norm_and_no_quantiles(report):
    section = report.section("jacobian")
    row = section.rows[0].replace(samples=1)
    samples = {name: values[:1] for name, values in section.samples.items()}
    one = section.model_copy(update={"rows": (row,), "samples": samples})
    labels = [name for name in lines(keep(report, one)) if name.startswith("model")]
    assert labels == ["model sensitivity, ‖J‖"]


def test_steepest_heads_are_the_largest_norms(report):
    exact = {
        (row.layer, row.head): row.exact
        for row in report.section("bounds").rows
        if row.exact is not None and row.exact == row.exact
    }
    heads = summary(report).heads
    top = sorted(exact, key=exact.get)[::-1][:3]
    assert [(each.layer, each.head, each.exact) for each in heads.steepest] == [
        (*name, exact[name]) for name in top
    ]
    assert (heads.median, heads.heads) == (median(exact.values()), len(exact))


@pytest.mark.parametrize(
    ("shares", "tokens", "k"),
    [
        ({"uniform": 0.2, "categorical": 0.6}, 17, 0),
        ({"uniform": 0.6, "categorical": 0.2}, 17, 10),
        ({"uniform": 0.6, "categorical": 0.2}, 10, 0),
    ],
)
def test_penalty_pulls_to_where_the_rows_lie(report, shares, tokens, k):
    row = ATTENTION_TABLE.row(layer=0, head=0, intermediate=0.2, tokens=tokens, **shares)
    section = layouts()["attention"].section(settings={"k": 10}, rows=(row,))
    fragile = summary(keep(report, section)).fragile
    assert (fragile.share, fragile.heads, fragile.of, fragile.k) == (0.2, 0, 1, k)


def test_the_command_that_lowers_the_share_of_fragile_rows(report):
    demo = report.run.model.model_copy(update={"spec": "demo", "source": "demo"})
    run = report.run.model_copy(update={"model": demo})
    said = lines(report.model_copy(update={"run": run}))["fragile attention rows"][2]
    assert said == "lipaudit train demo --penalty jasmin"
    assert lines(report)["fragile attention rows"][2].endswith("--penalty jasmin --data TRAIN")
    for share in (0.01, 0.3):  # nothing to pull; no head with more than half
        calm = with_rows(report, "attention", intermediate=share)
        assert lines(calm)["fragile attention rows"][2] == ""
    features = report.section("jacobian")
    rows = tuple(row.replace(to="features") for row in features.rows)
    encoder = (report.section("attention"), features.model_copy(update={"rows": rows}))
    assert lines(keep(report, *encoder))["fragile attention rows"][2] == ""


def test_what_attacks_are_shown_to_break_comes_with_the_training_against_them(report):
    attack = keep(report, report.section("attack"))
    clean = summary(attack).accuracy[0]
    for robust, known in ((3, True), (23, False)):
        low, high = wilson(robust, 24)
        changed = {"robust": robust / 24, "robust_low": low, "robust_high": high}
        shown = lines(with_rows(attack, "attack", **changed))
        assert (high < clean.low) == known
        told = [shown[f"robust accuracy, linf {eps}/255"][2] for eps in (2, 4)]
        asked = f"lipaudit train {quote(report.run.model.spec)} --adversarial pgd --eps 2/255"
        assert told == [f"{asked} --data TRAIN" if known else "", ""]
        run = report.run.model_copy(update={"preprocess": {}})
        text = attack.model_copy(update={"run": run})
        assert not any("train" in said[2] for said in lines(text).values())


@pytest.mark.parametrize("samples", [2, 19, 20])
def test_a_95th_percentile_needs_twenty_samples(report, samples):
    few = with_rows(report, "jacobian", samples=samples)
    assert ("; p95 " in render(few, "brief").decode()) == (samples == 20)


def test_a_page_explains_the_words_of_its_scorecard(report):
    facts, more = make_page(report).chapters[-1].blocks
    words = {line.label.partition(",")[0] for line in make_scorecard(report).lines}
    assert words | {"linf", "pgd", "certified", "versions"} <= dict(facts.pairs).keys()
    assert "lipaudit explain WORD" in more.text


def test_heads_are_named_as_such_with_the_samples_they_were_measured_at(report):
    section = report.section("bounds").model_copy(update={"samples": {"ids": ("00", "01")}})
    said = lines(keep(report, section))["steepest attention head, ‖J‖"][1]
    assert said.startswith("head 1.2; next ")
    assert said.endswith("; at 2 samples")
    bare = section.model_copy(update={"samples": {}})
    assert " samples" not in lines(keep(report, bare))["steepest attention head, ‖J‖"][1]


def test_bounds_shown_are_the_tightest_of_each_standing(report):
    summed = {each.bound: each for each in summary(report).bounds}
    ratios = {
        name: [
            getattr(row, name) / row.exact
            for row in report.section("bounds").rows
            if row.exact is not None and row.exact == row.exact and getattr(row, name)
        ]
        for name in ("sharp", "castin")
    }
    for name, values in ratios.items():
        assert summed[name].median == pytest.approx(10 ** median(map(log10, values)))
        assert summed[name].largest == pytest.approx(max(values))
    shown = [name for name in lines(report) if " bound, " in name]
    assert shown == ["tightest bound, sharp", "certified bound, castin"]


def test_a_report_without_figures_has_no_scorecard(report, blank_report):
    for bare in (keep(report), blank_report):
        assert make_scorecard(bare) is None
        assert render(bare, "brief")


@pytest.mark.parametrize("format", ["table", "markdown", "html"])
def test_every_format_draws_it_above_findings_and_sections(report, format):
    part = keep(report, *map(report.section, ("bounds", "jacobian", "attack")))
    text = render(part, format).decode().rpartition("</nav>")[2]  # contents name all of them
    places = [
        text.find(word)
        for word in ("Scorecard", "clean accuracy", "What stands out", "Heads with the largest")
    ]
    assert 0 < places[0] < places[1] < places[2] < places[3]


def test_a_screen_has_the_warnings_the_scorecard_and_no_section(report):
    page, first = make_page(report), make_screen(report)
    assert first.chapters == ()
    assert (first.notes, first.scorecard) == (page.notes, page.scorecard)
    assert [text for text, _ in first.findings] == [text for text, _ in page.findings]
    texts = [note.text for note in first.notes if note.level == "warning"]
    assert "jacobian: 2 of 24 samples did not converge." in texts
    assert "--details" in first.more


def test_a_printed_report_is_its_scorecard_in_at_most_25_lines(report, blank_report):
    attack = report.section("attack")
    balls = tuple(
        row.replace(eps=f"{n}/255", norm="linf") for n in range(1, 60) for row in attack.rows[:1]
    )
    many = keep(report, attack.model_copy(update={"rows": balls}))
    noted = sum(note.level == "warning" for note in make_screen(report).notes)
    for each in (report, blank_report, many):
        printed = str(each).split("\n")
        assert len(printed) <= 25
        assert repr(each) == str(each)
        assert printed[0] == f"lipaudit: {each.run.model.spec}"
        assert printed[-1].endswith("lipaudit.render(report, 'table') has all sections.")
        assert all(len(line) <= 100 for line in printed)
    assert f"Warnings: {noted}." in str(report)
    usual = keep(report, *(s for s in report.sections if not s.measure.startswith("certify")))
    for line in make_scorecard(usual).lines:
        assert line.label in str(usual)


def test_a_printed_report_that_is_cut_says_how_many_lines_are_left(report, monkeypatch):
    monkeypatch.setattr("lipaudit.report.MOST_LINES", 1000)
    whole = str(report).split("\n")
    monkeypatch.setattr("lipaudit.report.MOST_LINES", 10)
    cut = str(report).split("\n")
    assert cut == [*whole[:8], f"and {len(whole) - 9} more lines", whole[-1]]


def test_a_single_measure_is_shown_whole(report):
    assert "screen" in of_reports(report)
    alone = keep(report, report.section("bounds"), report.section("bounds.layers"))
    assert "screen" not in of_reports(alone)


def test_a_brief_is_15_lines(report, other):
    failed = report.model_copy(update={"status": "partial"})
    for shown in (report, failed, of_judgement(judge(other, report))):
        assert len(render(shown, "brief").decode().splitlines()) <= 15
    text = render(failed, "brief").decode()
    assert "Partial: the run was cut short" in text
    assert "did not converge" in text
    assert text.index("did not converge") < text.index("clean accuracy")


def test_a_brief_of_a_judgement_has_what_fails_first(report, other):
    judgement = judge(other, report)
    verdicts = [v for v in judgement.verdicts if judgement.fails(v)]
    assert verdicts
    text = render(of_judgement(judgement), "brief").decode()
    assert f"FAILED (exit code {judgement.exit_code}): " in text
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert all(row.startswith("| ✗") for row in rows[: min(len(verdicts), 8)])
