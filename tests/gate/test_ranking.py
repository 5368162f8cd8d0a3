"""Who is ranked before whom, against hand calculations, other libraries and simulated truth."""

import math

import numpy as np
import pytest
from scipy import stats

from lipaudit.errors import UsageError
from lipaudit.gate import rank
from lipaudit.gate.statistics import judge_share
from lipaudit.measures import layouts
from lipaudit.report.judgements import describe_ranking
from lipaudit.tables.columns import wilson
from lipaudit.tables.report import Failure
from lipaudit.tables.summary import find_figures
from tests.gate.cases import NORMS, attack, flags, jacobian, new, report, sample_ids, with_samples

HALF = flags(64)


def flipped(up=0, down=0):
    """Half of the samples, of which so many zeros became one and so many ones zero."""
    return np.r_[1 - flags(down, 64), flags(up, 64)]


def attacked(name, robust, **options):
    return report(attack(robust, **options), spec=name, weights=name[0])


def steep(name, norms=NORMS, **options):
    return report(jacobian(norms, **options), spec=name, weights=name[0])


def outcomes(ranking):
    return {model.model: (model.rank, model.outcome) for model in ranking.models}


def test_the_best_is_first_and_ties_are_called_ties():
    given = {"a": HALF, "b": flipped(40, 2), "c": flipped(39, 5)}
    ranking = rank([attacked(name, robust) for name, robust in given.items()])
    assert (ranking.criterion, ranking.ball) == ("attack.robust@linf,2/255:mean", "linf 2/255")
    assert (ranking.better, ranking.compared) == ("higher", 2)
    assert list(outcomes(ranking).items()) == [
        ("b", (1, "best")),
        ("c", (1, "not distinguishable from the best")),
        ("a", (3, "behind the best")),
    ]
    behind = ranking.models[2].difference
    assert behind.paired == pytest.approx(-38 / 128)
    assert behind.low < behind.paired < behind.high < 0
    tied = ranking.models[1].difference
    assert tied.low < 0 < tied.high
    assert (tied.unit, tied.samples) == ("pp", 128)


def test_samples_are_paired_so_that_small_differences_show():
    # 12 of 128 better and none worse: McNemar's p is 0.0005; independent limits overlap widely.
    ranking = rank([attacked("a", HALF), attacked("b", flipped(12))])
    assert wilson(76, 128)[0] < wilson(64, 128)[1]
    assert outcomes(ranking)["a"] == (2, "behind the best")
    (difference,) = (m.difference for m in ranking.models if m.difference)
    limits = judge_share(12, 0, 128).limits(0.025)
    assert (-difference.high, -difference.low) == pytest.approx(limits)
    # Unpaired disagreement of the same net size is no difference.
    noisy = rank([attacked("a", HALF), attacked("b", flipped(40, 28))])
    assert outcomes(noisy)["a"] == (1, "not distinguishable from the best")


def test_without_attacks_the_smaller_median_norm_is_better():
    other = NORMS * np.random.default_rng(5).lognormal(0, 0.02, NORMS.size)
    ranking = rank([steep("a", 1.5 * NORMS), steep("b"), steep("c", other)])
    assert (ranking.criterion, ranking.better) == ("jacobian.norm:median", "lower")
    assert ranking.models[-1].model == "a"
    assert outcomes(ranking)["a"] == (3, "behind the best")
    words = ["best", "not distinguishable from the best"]
    assert [m.outcome for m in ranking.models[:2]] == words
    difference = ranking.models[-1].difference
    assert difference.unit == "%"
    best = NORMS if ranking.models[0].model == "b" else other
    assert difference.paired == pytest.approx(np.median(1.5 * NORMS / best) - 1)


def test_limits_are_corrected_for_the_models_compared_with_the_best():
    """Two models against the best: each limit is one-sided at half of 2.5%."""
    i, grow = np.arange(60), 1 + np.arange(60) / 1000
    c = grow * np.where(i < 41, 0.1, -0.1)
    logs = [0 * grow, c + grow * np.where(i < 16, -0.01, 1), c]
    ranking = rank([steep(n, np.exp(each)) for n, each in zip("abc", logs, strict=True)])
    assert [model.model for model in ranking.models] == ["a", "c", "b"]
    assert ranking.compared == 2
    for model in ranking.models[1:]:
        line = np.sort(logs["abc".index(model.model)])
        k = int(stats.binom(60, 0.5).cdf(range(60)).searchsorted(0.025 / 2, "right"))
        limits = np.expm1([line[k - 1], line[-k]])
        assert (model.difference.low, model.difference.high) == pytest.approx(limits)
        assert model.difference.p == pytest.approx(
            stats.binomtest(int((line > 0).sum()), 60, 0.5, alternative="greater").pvalue
        )
        assert (model.outcome == "behind the best") == (line[k - 1] > 0)


def test_the_smallest_ball_that_most_have_decides():
    both = np.stack([HALF, 0 * HALF])
    reports = [
        attacked("a", both, eps=("4/255", "8/255")),
        attacked("b", both[::-1], eps=("4/255", "8/255")),
        attacked("c", HALF, eps=("8/255",)),
    ]
    assert rank(reports).ball == "linf 8/255"
    assert rank(reports[:2]).ball == "linf 4/255"
    assert outcomes(rank(reports))["c"][1] == "not comparable"


def test_what_cannot_be_compared_is_not_ranked():
    weak = attacked("weak", np.ones(128, int), attacks=("pgd",))
    ranking = rank([weak, attacked("a", HALF), attacked("b", flipped(30))])
    assert outcomes(ranking)["b"] == (1, "best")
    assert outcomes(ranking)["weak"] == (None, "not comparable")
    assert "weaker than" in ranking.models[-1].reason
    assert ranking.compared == 1
    alone = rank([attacked("a", HALF), steep("j"), steep("k", 2 * NORMS)])
    assert outcomes(alone)["a"] == (None, "not measured")
    others = steep("other", ids=sample_ids(64, 500))
    apart = rank([steep("j"), steep("k", 2 * NORMS), others])
    assert "only 0 of the baseline" in apart.models[-1].reason
    nothing = rank([report(spec="a"), new(spec="b")])
    assert (nothing.criterion, nothing.compared) == ("", 0)
    assert set(outcomes(nothing).values()) == {(None, "")}
    with pytest.raises(UsageError, match="no reports were given to rank"):
        rank([])


def test_the_fault_of_a_model_is_no_reason_against_the_others():
    cut = attacked("cut", flipped(30)).model_copy(update={"status": "partial"})
    reason = "the report is partial: its run was cut short"
    for reports in ([attacked("a", HALF), cut], [cut, attacked("a", HALF)]):
        found = {model.model: (model.outcome, model.reason) for model in rank(reports).models}
        assert found == {"a": ("", ""), "cut": ("not comparable", reason)}
        assert describe_ranking(rank(reports)) == f"Not comparable: cut ({reason})."
    three = rank([cut, attacked("a", HALF), attacked("b", flipped(30))])
    assert outcomes(three)["b"] == (1, "best")
    assert outcomes(three)["cut"] == (None, "not comparable")
    assert set(outcomes(rank([cut, cut])).values()) == {(None, "not comparable")}


def test_what_is_not_ranked_widens_no_limits():
    """Two models on other samples are compared with each other, and with none that is ranked."""
    ranked = [steep(n, f * NORMS) for n, f in zip("abc", (1.0, 1.1, 1.3), strict=True)]
    ids = sample_ids(64, 500)
    alone = rank(ranked)
    among = rank([*ranked, steep("d", ids=ids), steep("e", 2 * NORMS, ids=ids)])
    assert among.models[:3] == alone.models
    assert (among.compared, alone.compared) == (2, 2)
    assert {model.outcome for model in among.models[3:]} == {"not comparable"}


def test_a_measure_that_failed_spoils_its_own_figures_alone():
    failed = layouts()["attention"].section(failure=Failure(reason="no", exit_code=3))
    partial = report(attack(HALF), failed, spec="a", status="partial")
    ranking = rank([partial, attacked("b", flipped(30))])
    assert outcomes(ranking)["a"] == (2, "behind the best")


def test_a_model_is_never_told_apart_from_itself_but_from_one_of_equal_median():
    """Not where its attack began elsewhere, and broke others."""
    ranking = rank([attacked("as", HALF), attacked("also", flipped(40), seed=1)])
    assert outcomes(ranking)["as"] == (1, "not distinguishable from the best")
    # All samples but that of the median are a little worse.
    norms = np.arange(1.0, 32.0)
    worse = np.where(norms == 16.0, 1.0, 1.01) * norms
    ranking = rank([steep("b", worse), steep("a", norms)])
    medians = [find_figures(model.summary, "jacobian_norm")[0].value for model in ranking.models]
    assert medians == [16.0, 16.0]
    assert outcomes(ranking) == {"a": (1, "best"), "b": (2, "behind the best")}


def test_equal_models_are_seldom_told_apart():
    """Of five models that do not differ any is called behind in about 5% of trials.

    At 2.5% for each comparison with the best it would be about 17%.
    """
    corrected = single = 0
    trials, rng = 40, np.random.default_rng(5)
    for _ in range(trials):
        logs = rng.normal(size=40) + rng.normal(size=(5, 40))
        ranking = rank([steep(n, np.exp(each)) for n, each in zip("abcde", logs, strict=True)])
        others = ranking.models[1:]
        corrected += any(model.outcome == "behind the best" for model in others)
        single += any(model.difference.p <= 0.05 for model in others)
    limit = stats.binom(trials, 0.05).ppf(0.999)
    assert corrected <= limit < single


def moved(report, places, start=0, **run):
    """The report of a model that sees the same inputs in another form, under other ids."""
    (section,) = report.sections
    ids = sample_ids(len(section.ids), start)
    section = with_samples(section, ids=ids)
    changed = report.run.model_copy(update=run)
    return report.model_copy(
        update={"run": changed, "sections": (section,), "samples": {"ids": ids, **places}}
    )


FORM = {"preprocess": {"size": [3, 384, 384]}}


@pytest.mark.parametrize(
    ("place", "text", "run", "paired"),
    [
        ("cat/{}.png", None, FORM, True),
        ("cat/{}.png", None, {}, False),  # the same form: other ids are other contents
        ("dog/{}.png", None, FORM, False),
        ("cat/{}.png", "ends {}", FORM, False),
    ],
)
def test_inputs_in_another_form_are_paired_by_their_place(place, text, run, paired):
    def name(**patterns):
        count = range(64)
        return {key: tuple(map(p.format, count)) for key, p in patterns.items() if p}

    line = "lipaudit jacobian"
    places = name(place="cat/{}.png", text=text and "begins {}")
    first = moved(steep("a"), places, command=f"{line} a")
    places = name(place=place, text=text)
    other = moved(steep("b", 2 * NORMS), places, 500, command=f"{line} b", **run)
    ranking = rank([first, other])
    assert ("paired-by-place" in {note.code for note in ranking.notes}) == paired
    (norm,) = find_figures(ranking.models[0].summary, "jacobian_norm")
    assert math.isfinite(norm.value)
    if paired:
        assert outcomes(ranking)["b"] == (2, "behind the best")
        assert ranking.models[1].difference.paired == pytest.approx(1.0)
    else:
        assert {model.outcome for model in ranking.models} <= {"best", "not comparable"}
        assert "only 0 of the baseline" in ranking.models[-1].reason


def test_models_are_ranked_by_what_is_asked_for():
    both = np.stack([HALF, flipped(down=30)])
    eps = ("4/255", "8/255")
    first = report(attack(both, eps=eps), jacobian(), spec="a")
    second = new(attack(both[::-1], eps=eps), jacobian(2 * NORMS), spec="b")
    reports = [first, second]
    assert outcomes(rank(reports))["b"] == (2, "behind the best")
    ranking = rank(reports, "attack.robust@linf,8/255")
    assert (ranking.criterion, ranking.ball) == ("attack.robust@linf,8/255:mean", "linf 8/255")
    assert outcomes(ranking)["a"] == (2, "behind the best")
    ranking = rank(reports, by="jacobian.norm:p95")
    assert (ranking.criterion, ranking.better) == ("jacobian.norm:p95", "lower")
    # 64 samples prove no change of a 95th percentile
    assert outcomes(ranking)["b"] == (1, "not distinguishable from the best")
    clean = rank(reports, by="attack.correct")
    assert (clean.better, outcomes(clean)["b"]) == ("higher", (1, "best"))


@pytest.mark.parametrize(
    ("by", "says"),
    [
        ("attack.nonsense", "unknown metric"),
        ("bounds.exact", "it has one value per row"),
        ("jacobian.norm:max", "it varies too much by chance"),
        ("jacobian.products", "it has no better direction"),
        ("attack.robust", "matches several values: worst,linf,4/255; worst,linf,8/255"),
        ("attack.robust@linf,3/255", "no report has attack.robust@linf,3/255"),
        ("certify.certified", "no report has certify.certified"),
    ],
)
def test_what_models_cannot_be_ranked_by_is_refused(by, says):
    reports = [attacked(n, np.stack([HALF, HALF]), eps=("4/255", "8/255")) for n in "ab"]
    with pytest.raises(UsageError, match=says) as refused:
        rank(reports, by)
    assert refused.value.advice
