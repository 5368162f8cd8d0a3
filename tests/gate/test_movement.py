"""How predictions moved: tables counted by hand, limits of other code, divergences of torch."""

import json

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional

import lipaudit
from lipaudit.gate import compare, judge
from lipaudit.gate.conditions import promote
from lipaudit.gate.movement import compute_divergence, describe_movement
from lipaudit.tables import Array
from lipaudit.tables.report import SCORES
from tests.commands import invoke
from tests.gate.cases import attack, jacobian, new, report, sample_ids, with_samples
from tests.nets import draw, seeded

LABELS = [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
BEFORE = [0, 0, 0, 1, 1, 1, 0, 2, 0, 1]  # right at 0, 1, 2, 4, 5, 7
AFTER = [0, 1, 2, 0, 1, 1, 2, 2, 1, 1]  # right at 0, 3, 4, 5, 7
NAMES = {0: "cat", 1: "dog", 2: "owl"}


def predicted(cells, labels=LABELS, *, ids=None, classes=None, scores=None, **more):
    """An attack section with these predictions."""
    right = [None if y is None else int(p == y) for p, y in zip(cells, labels, strict=True)]
    section = attack(np.zeros(len(cells), dtype=int))
    samples = {"label": labels, "predicted": cells, "correct": right}
    if ids is not None:
        samples["ids"] = ids
    arrays = {} if scores is None else {SCORES: Array.of(scores.T)}
    update = {"classes": classes or {}, "arrays": arrays, **more}
    return with_samples(section, **samples).model_copy(update=update)


def bonett_price(lost, gained, n):
    """Return the limits as in the paper, with a sample more in each of two cells."""
    p12, p21 = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    half = stats.norm.ppf(0.975) * np.sqrt((p12 + p21 - (p12 - p21) ** 2) / (n + 2))
    return p12 - p21 - half, p12 - p21 + half


def test_the_paired_table_is_counted_as_by_hand():
    moved = describe_movement(new(predicted(AFTER)), report(predicted(BEFORE)))
    parts = (moved.equal, moved.right_to_wrong, moved.wrong_to_right, moved.wrong_to_other)
    assert [part.count for part in parts] == [5, 2, 1, 2]
    assert (moved.samples, moved.labelled) == (10, 10)
    for part in parts:
        limits = stats.binomtest(part.count, 10).proportion_ci(method="wilson")
        assert part.share == part.count / 10
        assert (part.low, part.high) == pytest.approx((limits.low, limits.high), abs=1e-12)
    assert moved.change == pytest.approx(-0.1)
    assert (moved.low, moved.high) == pytest.approx(bonett_price(2, 1, 10), abs=1e-12)
    assert moved.mcnemar == pytest.approx(stats.binomtest(2, 3).pvalue)
    assert "few classes" in moved.reason
    # The other way round, losses are gains.
    back = describe_movement(new(predicted(BEFORE)), report(predicted(AFTER)))
    assert (back.right_to_wrong.count, back.wrong_to_right.count) == (1, 2)
    assert (back.low, back.high) == pytest.approx((-moved.high, -moved.low))


def test_where_many_are_lost_the_limits_exclude_0():
    before = report(predicted([0] * 40, [0] * 40))
    moved = describe_movement(new(predicted([0] * 25 + [1] * 15, [0] * 40)), before)
    assert moved.mcnemar == pytest.approx(stats.binomtest(0, 15).pvalue)
    assert (moved.low, moved.high) == pytest.approx(bonett_price(15, 0, 40), abs=1e-12)
    assert moved.high < 0


def test_samples_without_a_label_have_only_equal_predictions():
    labels = [None] * 9 + [2]
    moved = describe_movement(new(predicted(AFTER, labels)), report(predicted(BEFORE, labels)))
    assert (moved.samples, moved.labelled, moved.equal.count) == (10, 1, 5)
    assert (moved.wrong_to_other.count, moved.right_to_wrong.count) == (0, 0)
    labels = [None] * 10
    moved = describe_movement(new(predicted(AFTER, labels)), report(predicted(BEFORE, labels)))
    assert moved.labelled == 0
    assert moved.change is moved.right_to_wrong is None


def test_samples_are_paired_by_id_and_repeats_count_once():
    ids = [*sample_ids(8), f"{sample_ids(1)[0]}-2", "other"]
    shuffled = [ids[i] for i in (3, 1, 0, 2, 4, 5, 6, 7, 8)] + ["new"]
    cells = [BEFORE[i] for i in (3, 1, 0, 2, 4, 5, 6, 7, 8, 9)]
    labels = [LABELS[i] for i in (3, 1, 0, 2, 4, 5, 6, 7, 8, 9)]
    after = new(predicted(cells, labels, ids=shuffled))
    moved = describe_movement(after, report(predicted(BEFORE, ids=ids)))
    assert (moved.samples, moved.equal.count) == (8, 8)
    alone = new(predicted(AFTER, ids=sample_ids(10, 100)))
    assert describe_movement(alone, report(predicted(BEFORE))) is None
    assert describe_movement(new(jacobian()), report(jacobian())) is None


def test_classes_in_another_order_are_matched_by_their_names():
    turned = {0: "owl", 1: "cat", 2: "dog"}
    number = {name: key for key, name in turned.items()}
    scores = np.log(np.full((10, 3), 1 / 3))
    cells, labels = ([number[NAMES[i]] for i in each] for each in (BEFORE, LABELS))
    after = predicted(cells, labels, ids=sample_ids(10), classes=turned, scores=scores)
    before = report(predicted(BEFORE, classes=NAMES, scores=scores))
    moved = describe_movement(new(after), before)
    assert moved.equal.count == 10
    assert "other classes" in moved.reason
    # Without the name of one class, numbers are all that is known.
    del turned[0]
    after = after.model_copy(update={"classes": turned})
    assert describe_movement(new(after), before).equal.count < 10


def torch_divergence(first, second):
    log_p, log_q = (torch.tensor(each).double().log_softmax(1) for each in (first, second))
    return functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(1).numpy()


def test_the_divergence_is_that_of_torch():
    first, second = (draw(i, 300, 7).double().numpy() * 5 for i in (0, 1))
    expected = torch_divergence(first, second)
    assert compute_divergence(first, second) == pytest.approx(expected, rel=1e-12)
    # Stored with six digits.
    logs = [torch.tensor(each).log_softmax(1).numpy() for each in (first, second)]
    sections = [predicted([0] * 300, [0] * 300, scores=each) for each in logs]
    moved = describe_movement(new(sections[1]), report(sections[0]))
    assert moved.kl == pytest.approx(expected.mean(), rel=1e-5)
    drawn = stats.bootstrap((expected,), np.mean, method="percentile", rng=1).confidence_interval
    assert (moved.kl_low, moved.kl_high) == pytest.approx((drawn.low, drawn.high), rel=0.02)
    # Not symmetric: the first report has the reference.
    back = describe_movement(new(sections[0]), report(sections[1]))
    assert back.kl == pytest.approx(torch_divergence(second, first).mean(), rel=1e-5)
    assert abs(back.kl - moved.kl) > 0.01
    few = [predicted([0] * 255, [0] * 255, scores=each[:255]) for each in logs]
    moved = describe_movement(new(few[1]), report(few[0]))
    assert moved.kl_low is moved.kl_high is None


def test_certain_outputs_have_a_divergence():
    sure, even = np.log([[1.0, 1e-300]]), np.log([[0.5, 0.5]])
    sure[0, 1] = -np.inf
    assert compute_divergence(sure, sure) == 0
    assert compute_divergence(sure, even) == pytest.approx(np.log(2))
    assert compute_divergence(even, sure) == np.inf


@pytest.mark.parametrize(("classes", "stored"), [(4, True), (100, True), (101, False)])
def test_reports_of_few_classes_hold_the_outputs_of_the_plain_model(classes, stored):
    modules = [seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, classes)))]
    modules.append(nn.Sequential(nn.Flatten(), nn.Linear(64, classes)))
    x = draw(2, 40, 1, 8, 8).sigmoid()
    how = {"attack": "fgsm", "eps": "0.01", "samples": 40}
    data = x, torch.zeros(40, dtype=torch.long)
    reports = [lipaudit.measure(each, "attack", data=data, **how) for each in modules]
    (pair,) = compare(reports).pairs
    moved = pair.predictions
    with torch.no_grad():
        logits = [each(x) for each in modules]
    same = logits[0].argmax(1) == logits[1].argmax(1)
    assert moved.equal.count == int(same.sum()) < 40
    assert (moved.kl is not None) == stored
    # A baseline keeps them.
    kept = judge(reports[1], promote(reports[0], "first")).predictions
    assert kept == moved
    if stored:
        expected = torch_divergence(*(each.numpy() for each in logits)).mean()
        assert moved.kl == pytest.approx(expected, rel=1e-4)


def test_compare_and_gate_print_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = ("--attack", "fgsm", "--eps", "0.1", "-n", "24", "-q")
    invoke("attack", "demo", *line, "-o", "a.json")
    invoke("attack", "demo:robust", *line, "-o", "b.json")
    said = invoke("compare", "a.json", "b.json").stdout
    assert "How did the predictions move?" in said
    assert "Mean KL divergence" in " ".join(said.split())
    found = json.loads(invoke("compare", "a.json", "b.json", "-f", "json").stdout)
    moved = found["pairs"][0]["predictions"]
    counts = [moved[name]["count"] for name in ("right_to_wrong", "wrong_to_right")]
    said = invoke("gate", "b.json", "-b", "a.json", code=None).stdout
    assert f"right to wrong {counts[0]}, wrong to right {counts[1]}" in said
    assert f"mean KL {moved['kl']:.3g} nats" in said
    page = invoke("gate", "b.json", "-b", "a.json", "-f", "markdown", code=None).stdout
    assert f"mean KL {moved['kl']:.3g} nats" in page
    # Nothing moves from a report to itself.
    said = invoke("gate", "a.json", "-b", "a.json").stdout
    assert "100.0% of 24 predictions are equal" in said
    assert "mean KL 0 nats" in said
