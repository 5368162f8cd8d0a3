"""Rules, comparisons and tables by group: as if each group were a report of its own."""

import json

import numpy as np
import pytest
from scipy import stats

import lipaudit
from lipaudit.errors import BaselineError
from lipaudit.gate import compare, judge
from lipaudit.gate.conditions import promote
from lipaudit.gate.groups import list_group_figures
from lipaudit.gate.judging import require_judgeable
from lipaudit.schema import dumps, loads
from tests.commands import invoke, refuse, replace_parts
from tests.gate.cases import attack, bounds, jacobian, new, report, rules, sample_ids

RNG = np.random.default_rng(7)
N = 120
GROUPS = ["a"] * 60 + ["b"] * 40 + ["c"] * 20
BEFORE = (RNG.random(N) < 0.8).astype(int)
AFTER = np.where(RNG.random(N) < 0.3, 0, BEFORE)
NORMS = RNG.lognormal(0, 0.5, N)
LOUDER = NORMS * RNG.lognormal(0.05, 0.15, N)
# Reports hold six digits.
HEADS = RNG.lognormal(0, 0.3, (4, N)).round(4)
LOUDER_HEADS = (HEADS * RNG.lognormal(0.02, 0.1, HEADS.shape)).round(4)
RULES = (
    "attack.robust@group=each >= -5pp",
    "attack.clean@group=each >= -5pp",
    "jacobian.norm@group=each:median <= +1%",
)


def with_groups(found, groups, ids=None):
    ids = sample_ids(len(groups)) if ids is None else ids
    columns = {"ids": tuple(ids), "place": tuple(f"line {i}" for i in range(len(ids)))}
    return found.model_copy(update={"samples": columns | {"group": tuple(groups)}})


def sections(flags, norms, heads, rows=slice(None)):
    """Sections of some of the samples."""
    ids = sample_ids(N)[rows]
    flags = flags[rows]
    made = [attack(flags, correct=flags), jacobian(norms[rows], ids=ids)]
    made += [bounds(heads[:, rows], ids=ids)]
    made[0] = made[0].model_copy(
        update={
            "samples": made[0].samples | {"ids": ids},
            "rows": tuple(row.replace(clean=float(flags.mean())) for row in made[0].rows),
        }
    )
    return made


def both(rows=slice(None)):
    now = new(*sections(AFTER, LOUDER, LOUDER_HEADS, rows))
    return now, report(*sections(BEFORE, NORMS, HEADS, rows))


def grouped(groups=GROUPS):
    return tuple(with_groups(each, groups) for each in both())


@pytest.mark.parametrize(
    "metric",
    [
        "attack.robust{} >= -5pp",
        "attack.clean{} >= -5pp",
        "jacobian.norm{}:median <= +1%",
        "jacobian.norm{}:median <= +0.01",
        "bounds.exact{}:each <= +20%",
        "bounds.exact{}:median <= +20%",
        "attack.robust{} >= 0.5",
        "attack.clean{} >= 0.5",
        "bounds.exact{}:max <= 3",
    ],
)
def test_a_group_is_judged_as_a_report_of_its_samples_alone(metric):
    known = ("status", "old", "new", "paired", "low", "high", "p", "lost", "gained")
    found = judge(*grouped(), rules(metric.format("@group=each"))).verdicts
    assert {verdict.group for verdict in found} == {"a", "b", "c"}
    for name, rows in {"a": slice(60), "b": slice(60, 100), "c": slice(100, N)}.items():
        alone = judge(*both(rows), rules(metric.format(""))).verdicts
        own = [verdict for verdict in found if verdict.group == name]
        single = judge(*grouped(), rules(metric.format(f"@group={name}"))).verdicts
        assert len(own) == len(single) == len(alone)
        alone_by_name = {verdict.name: verdict for verdict in alone}
        for verdict in (*own, *single):
            # Every row of clean accuracy is of the same samples: it has no name.
            twin = alone_by_name.get(verdict.name, alone[0])
            assert verdict.samples == rows.indices(N)[1] - rows.indices(N)[0]
            for field in known[1:]:
                assert getattr(verdict, field) == pytest.approx(getattr(twin, field)), field
        assert [v.status for v in single] == [v.status for v in alone]


def test_groups_are_corrected_by_holm_and_the_worst_comes_first():
    (rule,) = rules("attack.robust@group=each >= -5pp")
    found = judge(*grouped(), (rule,)).verdicts
    tests = {
        v.group: stats.binomtest(v.lost, v.lost + v.gained, alternative="greater").pvalue
        for v in found
    }
    ordered = sorted(tests.values())
    adjusted = np.maximum.accumulate([p * (3 - i) for i, p in enumerate(ordered)])
    expected = dict(zip(ordered, np.minimum(adjusted, 1), strict=True))
    for verdict in found:
        assert verdict.p == pytest.approx(tests[verdict.group])
        assert verdict.p_adjusted == pytest.approx(expected[tests[verdict.group]])
    changes = [verdict.paired for verdict in found]
    assert changes == sorted(changes)
    assert found[0].status == "regressed"
    assert f"group {found[0].group}: " in found[0].line
    assert f"(linf 2/255, group {found[0].group})" in found[0].sentence


def test_small_groups_cost_the_others_nothing_and_prove_nothing():
    """Of fewer than five samples no test can prove anything, whatever they do."""
    wide = judge(*grouped(["a"] * 60 + ["b"] * 40 + [f"c{i}" for i in range(20)]), rules(RULES[0]))
    narrow = judge(*grouped(["a"] * 60 + ["b"] * 40 + [""] * 20), rules(RULES[0]))
    alone = {v.group: v.p_adjusted for v in narrow.verdicts}
    assert {*alone} == {"a", "b"}
    for verdict in wide.verdicts:
        if verdict.group in alone:
            assert verdict.p_adjusted == alone[verdict.group]
        else:
            assert verdict.samples == 1
            assert verdict.status in ("pass", "inconclusive")
    assert len(wide.verdicts) == 22


def test_a_hundred_groups():
    names = [f"group {i % 100}" for i in range(N)]
    found = judge(*grouped(names), rules(*RULES)).verdicts
    assert len(found) == 300
    (pair,) = compare([*grouped(names)][::-1]).pairs
    assert {verdict.group for verdict in pair.groups} == {*names}
    page = lipaudit.render(grouped(names)[1], "markdown").decode()
    assert "(the worst 12 of 100)" in page


def test_clean_accuracy_is_judged_once_per_group_in_several_balls():
    lines = [BEFORE, BEFORE]
    reports = [
        with_groups(make(attack(lines, correct=flags, eps=("1/255", "2/255"))), GROUPS)
        for make, flags in ((new, AFTER), (report, BEFORE))
    ]
    reports = [
        each.model_copy(
            update={
                "sections": tuple(
                    s.model_copy(
                        update={
                            "rows": tuple(
                                r.replace(clean=float(np.mean(s.samples["correct"])))
                                for r in s.rows
                            )
                        }
                    )
                    for s in each.sections
                )
            }
        )
        for each in reports
    ]
    assert len(judge(*reports, rules(RULES[1])).verdicts) == 3
    assert len(judge(*reports, rules(RULES[0])).verdicts) == 6


def test_clean_accuracy_of_rows_is_judged_on_the_shared_samples():
    now, then = both(slice(2, N))[0], both()[1]
    (verdict,) = judge(now, then, rules("attack.clean >= -50pp")).verdicts
    assert verdict.samples == N - 2
    assert (verdict.old, verdict.new) == pytest.approx((BEFORE[2:].mean(), AFTER[2:].mean()))


@pytest.mark.parametrize(
    ("current", "baseline", "says"),
    [
        (GROUPS, None, "the baseline has no groups"),
        (None, GROUPS, "the current report has no groups"),
        (GROUPS, GROUPS[1:] + ["b"], "samples are in another group"),
    ],
)
def test_reports_whose_groups_do_not_fit_are_refused(current, baseline, says):
    now, then = both()
    now = with_groups(now, current) if current else now
    then = with_groups(then, baseline) if baseline else then
    judged = judge(now, then, rules(RULES[0]))
    assert [verdict.status for verdict in judged.verdicts] == ["not comparable"]
    assert says in judged.verdicts[0].reason
    assert judged.exit_code == 5
    # A comparison goes on without groups.
    (pair,) = compare([then, now]).pairs
    assert all(verdict.reason for verdict in pair.groups)
    assert any(not verdict.reason for verdict in pair.verdicts)


def test_a_group_that_lost_its_samples_is_refused_and_a_new_one_is_not():
    """95% of all samples may be there while a small group is gone, with what it would show."""
    names = ["a"] * 115 + ["rare"] * 5
    now, then = grouped(names)
    kept = slice(116)
    smaller = with_groups(new(*sections(AFTER, LOUDER, HEADS, kept)), names[kept], sample_ids(116))
    assert judge(smaller, then, rules("attack.robust >= -50pp")).exit_code == 0
    judged = judge(smaller, then, rules("attack.robust@group=each >= -50pp"))
    assert judged.exit_code == 5
    assert "only 1 of the baseline's 5 samples of group rare" in judged.verdicts[0].reason
    groups = [
        v.group for v in judge(then, smaller, rules("attack.robust@group=each >= -50pp")).verdicts
    ]
    assert sorted(groups) == ["a", "rare"]
    few = with_groups(
        new(*sections(AFTER, LOUDER, HEADS, slice(115))), names[:115], sample_ids(115)
    )
    note = "the baseline has no such group, so no change is judged: rare"
    assert note in judge(then, few, rules("attack.robust@group=each >= -50pp")).notes
    assert note not in judge(then, few, rules("attack.robust >= -50pp")).notes
    gone = with_groups(
        new(*sections(AFTER, LOUDER, HEADS, slice(115))), names[:115], sample_ids(115)
    )
    (pair,) = compare([then, gone]).pairs
    assert {verdict.group for verdict in pair.groups} == {"a"}
    judged = judge(now, then, rules("attack.robust@group=nobody >= -5pp"))
    assert "there is no group 'nobody'" in judged.verdicts[0].reason


def test_an_absolute_limit_is_judged_in_each_group():
    now, then = grouped()
    judged = judge(now, then, rules("attack.robust@group=each >= 0.55"))
    shares = {name: AFTER[np.array(GROUPS) == name].mean() for name in "abc"}
    for verdict in judged.verdicts:
        assert verdict.new == pytest.approx(shares[verdict.group])
        assert (verdict.status == "regressed") == (shares[verdict.group] < 0.55)
        assert f"(n = {GROUPS.count(verdict.group)})" in verdict.line
    values = [verdict.new for verdict in judged.verdicts]
    assert values == sorted(values)


def test_a_comparison_lists_the_groups_with_a_two_sided_correction():
    now, then = grouped()
    (pair,) = compare([then, now]).pairs
    found = [v for v in pair.groups if v.metric.startswith("attack.robust")]
    tests = {v.group: stats.binomtest(v.lost, v.lost + v.gained).pvalue for v in found}
    ordered = sorted(tests, key=tests.get)
    worst = 0.0
    for i, name in enumerate(ordered):
        worst = max(worst, min(1.0, tests[name] * (3 - i)))
        (verdict,) = (v for v in found if v.group == name)
        assert verdict.p_adjusted == pytest.approx(worst)
    (back,) = compare([now, then]).pairs
    turned = {v.group: v.p_adjusted for v in back.groups if v.metric.startswith("attack.robust")}
    assert turned == pytest.approx({v.group: v.p_adjusted for v in found})


def test_the_tables_of_a_report_have_the_limits_of_each_group():
    _, then = grouped()
    found = {(each[0].metric, each[0].name): each for each in list_group_figures(then)}
    assert not any("converged" in metric for metric, _ in found)
    for figures in found.values():
        assert [figure.samples for figure in sorted(figures, key=lambda f: f.group)] == [
            60,
            40,
            20,
        ]
    shares = found["attack.robust@group=each:mean".replace("@group=each", ""), "worst,linf,2/255"]
    for figure in shares:
        flags = BEFORE[np.array(GROUPS) == figure.group]
        limits = stats.binomtest(int(flags.sum()), len(flags)).proportion_ci(method="wilson")
        assert figure.value == pytest.approx(flags.mean())
        assert (figure.low, figure.high) == pytest.approx((limits.low, limits.high))
    assert [f.value for f in shares] == sorted(f.value for f in shares)
    norms = found["jacobian.norm:median", ""]
    assert [f.value for f in norms] == sorted((f.value for f in norms), reverse=True)
    for figure in norms:
        values = NORMS[np.array(GROUPS) == figure.group]
        low, high = stats.quantile_test(values, q=0, p=0.5).confidence_interval(0.95)
        assert figure.value == pytest.approx(np.median(values))
        assert (figure.low, figure.high) == pytest.approx((low, high))


def test_groups_survive_a_file_and_a_baseline():
    now, then = grouped()
    assert loads(dumps(then)).groups == dict(zip(sample_ids(N), GROUPS, strict=True))
    kept = promote(then, "first")
    one, two = (judge(now, each, rules(*RULES)).verdicts for each in (then, kept))
    assert one == two


def test_a_model_is_not_measured_for_groups_that_the_baseline_lacks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = ("--attack", "fgsm", "--eps", "0.1", "-n", "32", "-q")
    invoke("attack", "demo:robust", *line, "-o", "none.json")
    invoke("attack", "demo:robust", *line, "--group-column", "classes", "-o", "base.json")
    rule = ("--fail-on", "attack.robust@group=each >= -5pp")
    done = invoke("gate", "demo", "-b", "base.json", *rule, "--report", "now.json")
    assert "group 4: " in done.stdout
    # The baseline's column is repeated.
    stored = json.loads((tmp_path / "now.json").read_text())["samples"]
    assert {*stored["group"]} <= {*map(str, range(10))}
    said = invoke("compare", "base.json", "now.json").stdout
    assert "Which groups changed?" in said
    assert "Which groups fare worse?" in invoke("report", "base.json", "--details").stdout
    replace_parts(monkeypatch, "attack", lambda *_: pytest.fail("measured"))
    refuse(5, "the baseline has no groups", "gate", "demo", "-b", "none.json", *rule)
    unknown = ("--fail-on", "attack.robust@group=nobody >= -5pp")
    refuse(5, "there is no group 'nobody'", "gate", "demo", "-b", "base.json", *unknown)
    refuse(
        2,
        "it is of a group",
        "report",
        "base.json",
        "now.json",
        "--rank-by",
        "attack.robust@group=3",
    )
    _, then = both()
    with pytest.raises(BaselineError, match="no groups"):
        require_judgeable(rules(RULES[0]), then)


def test_groups_without_a_change_are_seldom_flagged():
    """Ten groups of 24, of which half of the samples change sides: the promise is 5%."""
    rng = np.random.default_rng(3)
    names = [str(i % 10) for i in range(240)]
    ids = sample_ids(240)
    (rule,) = rules("attack.robust@group=each >= -5pp")
    alarms = 0
    for _ in range(40):
        before = rng.integers(2, size=240)
        after = np.where(rng.random(240) < 0.5, 1 - before, before)
        pair = (
            with_groups(make(attack(f)), names, ids)
            for make, f in ((new, after), (report, before))
        )
        alarms += judge(*pair, (rule,)).exit_code
    # Of 40 true null hypotheses at 5%, more than 7 are rejected once in a thousand times.
    assert alarms <= 7
