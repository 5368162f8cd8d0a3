"""Reports over other samples: the same weights are unchanged, whichever samples are shared."""

from contextlib import suppress
from importlib.resources import files

import numpy as np
import pytest

import lipaudit
from lipaudit.errors import UsageError
from lipaudit.gate import compare, judge
from lipaudit.gate.conditions import promote
from lipaudit.gate.rules import STATS, list_metrics, parse_rule
from lipaudit.measures import layouts
from lipaudit.tables.trials import FLAGS

PLAN = {
    "bounds": {"radius": "0.03", "layers": "0"},
    "attention": {"layers": "0"},
    "jacobian": {"per_layer": True, "layers": "0"},
    "attack": {"eps": "0.1", "attack": "fgsm,pgd", "steps": 1},
}
BASE = tuple(range(8))
OTHER = {
    "a superset in another order": (*range(5, 11), *range(4, -1, -1)),
    "a subset": (6, 2, 3),
    "some of them and others": (11, 7, 1, 0, 9, 3),
    "one of them": (4, 10),
}


@pytest.fixture(scope="module")
def audit():
    """Audit a demo model on some of the digits; each only once."""
    with np.load(str(files("lipaudit.data") / "assets" / "digits_test.npz")) as kept:
        x, y = kept["x"], kept["y"]
    audits = {}

    def audited(rows, model="demo", plan=PLAN):
        if (model, rows) not in audits:
            data = x[list(rows)], y[list(rows)]
            audits[model, rows] = lipaudit.audit(model, plan, data=data, samples=len(rows))
        return audits[model, rows]

    return audited


@pytest.fixture(scope="module")
def rules(audit):
    """Every metric by two statistics, as far as they make sense for what is measured here."""
    report = audit(BASE)
    sensible = []
    names = sorted(set(list_metrics()) - {"attack.seconds"})  # wall time is no figure of the model
    for number, metric in enumerate(names):
        limit = "+1pp" if metric.rpartition(".")[2] in FLAGS else "+1%"
        stats = (STATS[(number + step) % len(STATS)] for step in (0, 1))
        for text in (f"{metric}:{stat} <= {limit}" for stat in stats):
            with suppress(UsageError):
                judge(report, report, [parse_rule(text)])
                sensible.append(parse_rule(text))
    assert {rule.measure for rule in sensible} == {s.measure for s in report.sections}
    return sensible


def recomputed(verdict, report):
    """Whether a report keeps what a figure is made of: values per sample, for each row."""
    rule = parse_rule(verdict.rule)
    how = layouts()[rule.measure].columns[rule.column].reduction if not rule.per_sample else None
    kept = how and not how.per and how.values in report.section(rule.measure).arrays
    return rule.per_sample or bool(kept)


def test_every_rule_finds_the_same_weights_unchanged_over_more_samples(audit, rules):
    more = audit(OTHER["a superset in another order"])
    judgement = judge(more, audit(BASE), rules)
    statuses = {True: set(), False: set()}
    for verdict in judgement.verdicts:
        statuses[recomputed(verdict, more)].add(verdict.status)
    assert statuses == {True: {"unchanged"}, False: {"not comparable"}}
    assert judge(more, audit(BASE)).exit_code == 0


def test_every_rule_finds_the_same_weights_unchanged_in_another_order(audit, rules):
    judgement = judge(audit(BASE[::-1]), audit(BASE), rules)
    assert {v.status for v in judgement.verdicts} == {"unchanged"}


def test_a_baseline_keeps_all_that_other_samples_need(audit, rules):
    more = audit(OTHER["a superset in another order"])
    whole, slim = (judge(more, old, rules) for old in (audit(BASE), promote(audit(BASE), "new")))
    assert slim.verdicts == whole.verdicts


@pytest.mark.parametrize("name", ["a subset", "some of them and others"])
def test_the_gate_wants_nearly_all_samples_of_the_baseline(audit, rules, name):
    judgement = judge(audit(OTHER[name]), audit(BASE), rules)
    assert {v.status for v in judgement.verdicts} == {"not comparable"}
    assert judgement.exit_code == 5


@pytest.mark.parametrize("name", OTHER)
def test_a_comparison_finds_the_same_weights_unchanged(audit, name):
    reports = audit(BASE), audit(OTHER[name])
    for pair in (compare(reports).pairs[0], compare(reports[::-1]).pairs[0]):
        compared = {v.metric.rpartition(":")[0]: v.status for v in pair.verdicts if not v.reason}
        assert set(compared.values()) == {"unchanged"}
        measured = {name for name in layouts() if name.partition(".")[0] in PLAN}
        assert {metric.rpartition(".")[0] for metric in compared} >= measured
        assert pair.heads
        assert all(abs(head.change) < 1e-4 and not head.stands for head in pair.heads)


def test_another_model_is_judged_as_if_measured_on_the_shared_samples_only(audit):
    name = "some of them and others"
    shared = tuple(i for i in BASE if i in OTHER[name])
    plan = {measure: options for measure, options in PLAN.items() if measure != "attack"}
    exactly = compare([audit(shared), audit(shared, "demo:jasmin", plan)]).pairs[0]
    partly = compare([audit(BASE), audit(OTHER[name], "demo:jasmin", plan)]).pairs[0]
    expected = {(v.metric, v.name): v for v in exactly.verdicts}
    assert expected.keys() == {(v.metric, v.name) for v in partly.verdicts}
    assert {v.status for v in partly.verdicts} & {"improved", "regressed"}
    for verdict in partly.verdicts:
        alike = expected[verdict.metric, verdict.name]
        assert verdict.status == alike.status
        for name in ("old", "new", "paired", "low", "high"):
            ours, theirs = getattr(verdict, name), getattr(alike, name)
            assert ours == theirs or ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
