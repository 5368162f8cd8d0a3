"""The scorecard: what it says is what the sections say, and every format draws it."""

from math import log10
from shlex import split
from statistics import median
from typing import get_args

import pytest
from scipy.stats import binom

from lipaudit.measures import layouts, summarise
from lipaudit.measures.attention import ATTENTION_TABLE
from lipaudit.report import of_reports, render, terminal
from lipaudit.report.cells import format_significant
from lipaudit.tables import Note
from lipaudit.tables.columns import Status, finite, median_limits, wilson
from lipaudit.tables.formats import STATUSES
from lipaudit.tables.summary import find_figures
from lipaudit.tables.weakest import find_worst
from lipaudit.wings.certificates.certificate_tables import CERTIFY_TABLE
from tests.commands import list_commands
from tests.report.conftest import find_chapter, keep


def lines(report) -> dict[str, tuple[object, str]]:
    return {row.figure: (row.value, row.text) for row in summarise(report).rows}


def find_figure(report, name):
    (figure,) = find_figures(summarise(report), name)
    return figure


def steps(report) -> dict[str, str]:
    """Return the commands of a page, each with what it is for."""
    page = of_reports(report).page()
    chapters = [chapter for chapter in page.chapters if chapter.name == "next-steps"]
    return {command: text for c in chapters for _, text, command in c.blocks[0].points}


def test_accuracies_and_their_limits(report):
    attack = keep(report, report.section("attack"))
    clean, *attacked = summarise(attack).rows
    assert (clean.name, clean.value, clean.samples) == ("clean_accuracy", 23 / 24, 24)
    assert (clean.low, clean.high) == wilson(23, 24)
    rows = {row.eps_text: row for row in report.section("attack").rows if row.attack == "worst"}
    assert [each.radius for each in attacked] == list(rows)
    for each in attacked:
        row = rows[each.radius]
        assert (each.value, each.low, each.high) == (row.robust, row.robust_low, row.robust_high)
        assert (each.name, each.better) == ("attacked_accuracy", "higher")
        assert each.metric == f"attack.robust@linf,{each.radius}"
    assert [each.text.partition("%, ")[2] for each in attacked] == [
        "worst of fgsm, pgd",
        "same attacks",
    ]
    said = lines(report)["robust accuracy, linf 2/255"]
    assert said == (15 / 24, "95% CI 43.5 to 79.5%, worst of fgsm, pgd")


def test_what_is_proven_stands_below_what_attacks_left(report):
    proven = {"certified": 0.25, "certified_low": 0.1, "certified_high": 0.4, "undecided": 3}
    ball = {"norm": "linf", "eps": 2 / 255, "eps_text": "2/255", "samples": 8, "robust": 0.5}
    section = layouts()["certify"].section(rows=(CERTIFY_TABLE.row(**ball, **proven),))
    robust = [f"robust accuracy, linf {e}/255" for e in (2, 4)]
    alone, attacked = ((), robust[:1]), ((report.section("attack"),), ["clean accuracy", *robust])
    for others, labels in (alone, attacked):
        said = lines(keep(report, *others, section))
        assert list(said) == [*labels, "certified accuracy, linf 2/255"]
        text = "95% CI 10.0 to 40.0%, 2 of 8 samples, 3 undecided"
        assert said["certified accuracy, linf 2/255"] == (0.25, text)


def test_corruptions_and_votes_under_noise_have_a_line(report):
    corrupt, smoothing = report.section("corrupt"), report.section("smoothing")
    said = lines(keep(report, corrupt, smoothing))
    (mean,) = [row for row in corrupt.rows if row.corruption == "mean"]
    assert said["accuracy under corruptions"][0] == mean.accuracy
    for row in smoothing.rows:
        assert said[f"smoothed certified, l2 {row.eps_text}"][0] == row.certified
    # Votes of another classifier are no limits of this model's robust accuracy.
    assert not any("robust" in name for name in said)


def test_the_certified_radius_is_the_median_of_what_is_right_with_its_limits(report):
    proven = report.section("certify"), report.section("certify.radius")
    both = keep(report, *proven)
    radii = sorted(filter(None, proven[0].samples["radius"]))
    summed = find_figure(both, "certified_radius")
    assert (summed.norm, summed.value, summed.samples) == ("linf", 0.0033, 23)
    assert [0.0, *radii].index(summed.low) + 1 == 7  # the ranks in tables of the sign test, n = 23
    assert [0.0, *radii].index(summed.high) + 1 == 17
    text = "95% CI 0.00180 to 0.00480, median of 23 samples, nearest adversarial 0.0290"
    assert lines(both)["certified radius, linf"] == (0.0033, text)
    assert f"| 0.00330 | {text} |" in render(both, "markdown").decode()
    assert find_figures(summarise(keep(report, proven[0])), "certified_radius") == []


@pytest.mark.parametrize("count", [1, 5, 6, 7, 8, 9, 20, 101, 999])
def test_limits_of_a_median_hold_it_as_often_as_they_say(count):
    """Of as many values as coins, fewer than k lie below the median in `cdf(k - 1)` of cases."""
    limits = median_limits([*range(count), None, float("nan")])
    missed = [2 * binom.cdf(k - 1, count, 0.5) for k in range(1, count // 2 + 2)]
    k = sum(chance <= 0.05 for chance in missed)
    assert limits == ((k - 1, count - k) if k else None)


def test_norms_name_the_sample_that_has_the_largest(report):
    row, norms = report.section("jacobian").rows[0], find_figure(report, "jacobian_norm")
    assert (norms.value, norms.samples, norms.better) == (row.median, row.samples, "lower")
    ids, values = (report.section("jacobian").samples[name] for name in ("ids", "norm"))
    known = {v: i for i, v in zip(ids, values, strict=True) if v is not None and v == v}
    assert (norms.low, norms.high) == median_limits(values)
    assert f"p95 {row.p95:.3g}" in norms.text
    assert norms.text.endswith(f"largest {row.max:.3g} (sample {known[max(known)][:12]})")
    for samples in (2, 19, 20):  # a 95th percentile needs twenty
        section = report.section("jacobian")
        rows = tuple(row.replace(samples=samples) for row in section.rows)
        few = keep(report, section.model_copy(update={"rows": rows}))
        assert ("; p95 " in lines(few)["model sensitivity, median ‖J‖"][1]) == (samples == 20)


def test_steepest_heads_are_the_largest_norms(report):
    known = [row for row in report.section("bounds").rows if finite([row.exact])]
    exact = {(row.layer, row.head): row.exact for row in known}
    steepest = find_figure(report, "steepest_head")
    first, second, third = sorted(exact, key=exact.get)[::-1][:3]
    assert steepest.value == exact[first]
    assert "head {}.{} ".format(*first) in steepest.text
    others = [f"{i}.{j} ({exact[i, j]:.3g})" for i, j in (second, third)]
    assert f"next {', '.join(others)}; median {median(exact.values()):.3g}" in steepest.text
    section = report.section("bounds").model_copy(update={"samples": {"ids": ("00", "01")}})
    said = lines(keep(report, section))["steepest attention head, ‖J‖"][1]
    assert said.startswith("head 1.2; next ")
    assert said.endswith("; at 2 samples")
    bare = section.model_copy(update={"samples": {}})
    assert " samples" not in lines(keep(report, bare))["steepest attention head, ‖J‖"][1]


@pytest.mark.parametrize(
    ("shares", "text"),
    [
        ((0.2, 0.2, 0.6), "in 0 of 1 heads over half; most other rows near one-hot"),
        ((0.2, 0.6, 0.2), "in 0 of 1 heads over half; most other rows near uniform"),
        ((0.6, 0.3, 0.1), "in 1 of 1 heads over half; most other rows near uniform"),
        ((0.04, 0.6, 0.36), "in 0 of 1 heads over half"),  # too few to move
    ],
)
def test_fragile_rows_are_counted_beside_where_the_others_lie(report, shares, text):
    share, uniform, categorical = shares
    regimes = {"intermediate": share, "uniform": uniform, "categorical": categorical}
    row = ATTENTION_TABLE.row(layer=0, head=0, tokens=17, **regimes)
    section = layouts()["attention"].section(rows=(row,))
    fragile = find_figure(keep(report, section), "fragile_rows")
    assert (fragile.value, fragile.text) == (share, text)


def test_tightness_is_one_figure_with_the_tightest_certified_bound_beside_it(report):
    (figure,) = [row for row in summarise(report).rows if "bound" in row.figure]
    assert figure.figure == "tightest bound, sharp"
    known = [row for row in report.section("bounds").rows if finite([row.exact])]
    ratios = [row.sharp / row.exact for row in known if row.sharp]
    certified = [row.castin / row.exact for row in known if row.castin]
    assert figure.value == pytest.approx(10 ** median(map(log10, ratios)))
    text = f"of ‖J‖, {len(ratios)} heads, largest {max(ratios):.3g}×"
    middle = 10 ** median(map(log10, certified))
    assert figure.text == f"{text}; for any input of no larger norm: castin {middle:.1f}×"


def test_a_screen_has_the_warnings_the_scorecard_and_no_section(report):
    forms = of_reports(report)
    page, first = forms.page(), forms.page(short=True)
    assert [chapter.name for chapter in first.chapters] == ["", "scorecard", ""]
    assert first.chapters[0].blocks[-1] == page.chapters[0].blocks[-1]  # the notes
    assert first.chapters[1] == page.chapters[1]
    texts = [text for level, text, _ in first.chapters[0].blocks[-1].points if level == "warning"]
    assert "jacobian: 2 of 24 samples did not converge." in texts
    assert "--details" in first.chapters[2].blocks[0].text
    facts, more = find_chapter(page, "words").blocks  # how far figures are proven
    words = [STATUSES.get(name, name) for name in get_args(Status)]
    assert [name for name, _ in facts.rows] == words
    assert "lipaudit explain WORD" in more.text


def test_a_screen_of_one_measure_begins_with_its_table(report):
    alone = keep(report, report.section("bounds"), report.section("bounds.layers"))
    opening, *_, end = of_reports(alone).page(short=True).chapters
    table, closeness = opening.blocks
    labels = [column.label for column in table.columns]
    assert labels == ["head", "||J||", "sharp", "castin"]
    rows = alone.section("bounds").rows
    known = [row for row in rows if len(finite([row.exact, row.sharp])) == 2]
    ratio = format_significant(median(row.sharp / row.exact for row in known))
    assert closeness.text.startswith(f"The closest bound, sharp, is {ratio} times ‖J‖ (")
    assert "--details" in end.blocks[-1].text
    printed = terminal.render(of_reports(alone).page(short=True), width=80)
    assert len(printed.splitlines()) <= 30


def test_a_printed_report_is_its_scorecard_in_at_most_25_lines(report, blank_report):
    attack = report.section("attack")
    balls = tuple(attack.rows[0].replace(eps=f"{n}/255", norm="linf") for n in range(1, 60))
    many = keep(report, attack.model_copy(update={"rows": balls}))
    noted = len(summarise(report).notes)
    for bare in (keep(report), blank_report):  # without figures
        assert summarise(bare).rows == ()
        assert "Scorecard" not in render(bare, "markdown").decode()
    for each in (report, blank_report, many):
        printed = str(each).split("\n")
        assert len(printed) <= 25
        assert repr(each) == str(each)
        assert printed[0] == f"lipaudit: {each.run.model.spec}"
        assert printed[-1].endswith("lipaudit.render(report, 'table') has all sections.")
        assert all(len(line) <= 100 for line in printed)
    assert f"Warnings: {noted}." in str(report)
    rare = ("certify", "corrupt", "smoothing")
    usual = keep(report, *(s for s in report.sections if not s.measure.startswith(rare)))
    assert all(label in str(usual) for label in lines(usual))


# The next steps


def test_a_gate_is_offered_on_what_is_complete(report):
    partial = report.model_copy(update={"status": "partial"})
    assert any(" --baseline report.json" in each for each in steps(report))
    assert not any("--baseline" in each for each in steps(partial))
    assert next(iter(steps(partial))) == "lipaudit audit demo --resume"
    resumed = report.run.model_copy(update={"command": "lipaudit audit demo --resume"})
    assert next(iter(steps(partial.model_copy(update={"run": resumed})))) == resumed.command


def test_commands_read_the_model_as_the_run_did(report):
    note = Note(level="warning", code="random-data", text="noise")
    first = report.sections[0].model_copy(update={"notes": (note,)})
    given = {"quantize": "int4", "classes": "my names.txt", "tower": "image", "label_column": "y"}
    run = report.run.model_copy(update={"options": given})
    noise = keep(report, first, *report.sections[1:]).model_copy(update={"run": run})
    how = ["--tower", "image", "--quantize", "int4", "--classes", "my names.txt"]
    assert [split(each) for each in steps(noise)][0] == [
        *("lipaudit", "audit", run.model.spec, *how, "--data", "DATA")
    ]
    # The gate reads them from the baseline.
    (gate,) = [each for each in steps(report.model_copy(update={"run": run})) if " gate " in each]
    assert split(gate)[2:] == [run.model.spec, "--baseline", "report.json"]


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        ("random-data", "Measure on real samples: the current ones are noise."),
        ("random-weights", "Load trained weights: the current ones are random."),
    ],
)
def test_noise_calls_for_a_model_in_use(report, code, advice):
    note = Note(level="warning", code=code, text="noise")
    first = report.sections[0].model_copy(update={"notes": (note,)})
    noise = keep(report, first, *report.sections[1:])
    command, text = next(iter(steps(noise).items()))
    assert text == advice
    assert command.endswith("--data DATA")
    assert not any(each.endswith("--data DATA") for each in steps(report))
    assert not any("--baseline" in each for each in steps(noise))


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("jacobian demo", "report.json"),
        ("jacobian demo -o k.html", "report.json"),
        ("jacobian demo -o k.json -n 4", "k.json"),
        ("jacobian demo -qo k.json", "k.json"),
        ("jacobian demo -ok.json", "k.json"),
        ("jacobian demo -o'a b.json'", "a b.json"),
        ("attack demo --output=runs/own.json", "runs/own.json"),
        ("jacobian demo -o k.html -o k.json", "k.json"),
        ("audit demo --run-dir runs/one/", "runs/one/report.json"),
        ("gate demo --baseline base.json", "report.json"),
        ("gate demo --baseline base.json -o verdict.json", "report.json"),
        ("gate demo --baseline base.json -o verdict.json --report now.json", "now.json"),
        ("gate demo --report='my now.json' --baseline base.json", "my now.json"),
        ("jacobian demo -o 'k.json", "report.json"),  # no command of a shell
    ],
)
def test_steps_name_the_report_that_the_command_wrote_and_no_verdict(report, command, file):
    run = report.run.model_copy(update={"command": f"lipaudit {command}"})
    chosen = report.model_copy(update={"run": run})
    # Few samples: a command that measures is offered with more of them.
    few, other = [], steps(chosen)
    if not command.startswith("gate"):
        few = [next(iter(other))]
        assert few[0].startswith("lipaudit ")
        assert few[0].endswith(" -n 64")
        assert "-n 4" not in few[0]
        other.pop(few[0])
    inspect, attack, gate = map(split, other)
    how = ["--data", "demo", "--attack", "pgd", "--norm", "linf", "--eps", "0:1/255:9"]
    assert (attack[1], attack[3:]) == ("attack", how)
    assert (inspect[1:3], gate[1], gate[-1]) == (["inspect", file], "gate", file)
    # No file of this name was written.
    missing = file == "report.json" and not command.startswith("audit")
    hints = ["saves the report" in text for text in other.values()]
    assert hints == [missing, False, missing]


@pytest.mark.parametrize(
    ("samples", "code", "words"),
    [
        (24, "other", ["--data", "x.csv", "-n", "64"]),
        (24, "fewer-samples", ["--data", "LARGER", "-n", "64"]),
        (30, "other", None),
    ],
)
def test_more_samples_are_offered_where_few_leave_wide_limits(report, samples, code, words):
    note = Note(level="info", code=code, text="")
    attack = report.section("attack").model_copy(update={"notes": (note,)})
    ids = tuple(f"{i:016x}" for i in range(samples))
    flags = {"ids": ids, "correct": (1,) * samples}
    few = keep(report, attack.model_copy(update={"samples": flags}))
    run = report.run.model_copy(update={"command": "lipaudit attack m --samples=9 --data x.csv"})
    more = [each for each in steps(few.model_copy(update={"run": run})) if "-n 64" in each]
    assert [split(each) for each in more] == (
        [["lipaudit", "attack", "m", *words]] if words else []
    )


@pytest.mark.parametrize(("certified", "tone"), [(1.0, "kept"), (0.5, "open")])
def test_an_answer_is_green_only_where_every_correct_sample_is_certified(report, certified, tone):
    ball = {"norm": "linf", "eps": 2 / 255, "eps_text": "2/255", "samples": 4, "clean": 1.0}
    figures = {"robust": 1.0, "robust_low": 0.51, "robust_high": 1.0, "certified": certified}
    ids = tuple(f"{i:016x}" for i in range(4))
    section = layouts()["certify"].section(
        rows=(CERTIFY_TABLE.row(**ball, **figures),), samples={"ids": ids, "correct": (1,) * 4}
    )
    answer = of_reports(keep(report, section)).page().chapters[0].blocks[0]
    assert answer.tone == tone
    assert answer.text.startswith("Clean accuracy 100.0% (95% CI 51.0 to 100.0%, 4 samples).")


def test_heads_within_the_proven_error_are_counted_beside_the_steepest(report):
    section = report.section("bounds")
    norms = {(0, 0): 4.0, (0, 1): 3.9, (1, 0): 3.89, (1, 1): 3.0}
    first = section.rows[0]
    rows = []
    for (layer, head), norm in norms.items():
        rows.append(first.replace(layer=layer, head=head, exact=norm, within=0.027))
    tied = keep(report, section.model_copy(update={"rows": tuple(rows)}))
    figure = find_figure(tied, "steepest_head")
    assert figure.text.startswith("head 0.0 and 1 more within 2.7%; next 0.1 (3.90), 1.0 (3.89);")
    assert figure.sentence == "Steepest attention head: 0.0 and 1 more within 2.7% (‖J‖ 4.00)."


def test_steps_are_commands_of_the_tool_each_listed_once(report):
    calm = keep(report, report.section("jacobian"))
    assert [text for each, text in steps(report).items() if split(each)[1] == "attack"] == [
        "Find the radius at which attacks begin to succeed."
    ]
    assert any(split(each)[1] == "attack" for each in steps(calm))
    assert f"lipaudit inspect report.json {find_worst(report)[0][:12]}" in steps(report)
    known = {*list_commands()}
    text = " ".join(render(report, "table").decode().split())
    for command, aim in steps(report).items():
        assert text.count(command) == 1
        assert aim.endswith(".")
        assert split(command)[1] in known
