"""Who is ranked before whom, against hand calculations, other libraries and simulated truth."""

import math

import numpy as np
import pytest
from scipy import stats

from lipaudit.errors import UsageError
from lipaudit.gate import rank
from lipaudit.gate.statistics import judge_share
from lipaudit.measures import layouts
from lipaudit.tables.columns import wilson
from lipaudit.tables.report import Failure

RNG = np.random.default_rng(5)
HALF = np.r_[np.ones(64, int), np.zeros(64, int)]


def flipped(flags, up, down):
    """Flags of which so many zeros became one and so many ones zero."""
    flags = flags.copy()
    flags[np.flatnonzero(HALF == 0)[:up]] = 1
    flags[np.flatnonzero(HALF == 1)[:down]] = 0
    return flags


@pytest.fixture
def attacked(report, attack):
    def one(name, flags, **options):
        return report(attack(flags, **options), spec=name, weights=name[0])

    return one


@pytest.fixture
def steep(report, jacobian):
    def one(name, norms, **options):
        return report(jacobian(norms, **options), spec=name, weights=name[0])

    return one


def outcomes(ranking):
    return {model.model: (model.rank, model.outcome) for model in ranking.models}


def test_the_best_is_first_and_ties_are_called_ties(attacked):
    ranking = rank(
        [
            attacked("a", HALF),
            attacked("b", flipped(HALF, up=40, down=2)),
            attacked("c", flipped(HALF, up=39, down=5)),
        ]
    )
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


def test_samples_are_paired_so_that_small_differences_show(attacked):
    # 12 of 128 better and none worse: McNemar's p is 0.0005; independent limits overlap widely.
    ranking = rank([attacked("a", HALF), attacked("b", flipped(HALF, up=12, down=0))])
    assert wilson(76, 128)[0] < wilson(64, 128)[1]
    assert outcomes(ranking)["a"] == (2, "behind the best")
    (difference,) = (m.difference for m in ranking.models if m.difference)
    limits = judge_share(12, 0, 128).limits(0.025)
    assert (-difference.high, -difference.low) == pytest.approx(limits)
    # Unpaired disagreement of the same net size is no difference.
    noisy = rank([attacked("a", HALF), attacked("b", flipped(HALF, up=40, down=28))])
    assert outcomes(noisy)["a"] == (1, "not distinguishable from the best")


def test_without_attacks_the_smaller_median_norm_is_better(steep, norms):
    other = norms * RNG.lognormal(0, 0.02, norms.size)
    ranking = rank([steep("a", 1.5 * norms), steep("b", norms), steep("c", other)])
    assert (ranking.criterion, ranking.better) == ("jacobian.norm:median", "lower")
    assert ranking.models[-1].model == "a"
    assert outcomes(ranking)["a"] == (3, "behind the best")
    assert {m.outcome for m in ranking.models[:2]} == {
        "best",
        "not distinguishable from the best",
    }
    difference = ranking.models[-1].difference
    assert difference.unit == "%"
    best = norms if ranking.models[0].model == "b" else other
    assert difference.paired == pytest.approx(np.median(1.5 * norms / best) - 1)


def test_limits_are_corrected_for_the_models_compared_with_the_best(steep):
    """Two models against the best: each limit is one-sided at half of 2.5 %."""
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


def test_the_smallest_ball_that_most_have_decides(attacked):
    both = np.stack([HALF, 0 * HALF])
    reports = [
        attacked("a", both, eps=("4/255", "8/255")),
        attacked("b", both[::-1], eps=("4/255", "8/255")),
        attacked("c", HALF, eps=("8/255",)),
    ]
    assert rank(reports).ball == "linf 8/255"
    assert rank(reports[:2]).ball == "linf 4/255"
    assert outcomes(rank(reports))["c"][1] == "not comparable"


def test_what_cannot_be_compared_is_not_ranked(attacked, steep, report, norms):
    weak = attacked("weak", np.ones(128, int), attacks=("pgd",))
    ranking = rank([weak, attacked("a", HALF), attacked("b", flipped(HALF, up=30, down=0))])
    assert outcomes(ranking)["b"] == (1, "best")
    assert outcomes(ranking)["weak"] == (None, "not comparable")
    assert "weaker than" in ranking.models[-1].reason
    assert ranking.compared == 1
    alone = rank([attacked("a", HALF), steep("j", norms), steep("k", 2 * norms)])
    assert outcomes(alone)["a"] == (None, "not measured")
    others = steep("other", norms, ids=tuple(f"{i:04x}" for i in range(norms.size)))
    apart = rank([steep("j", norms), steep("k", 2 * norms), others])
    assert "only 0 of the baseline" in apart.models[-1].reason
    nothing = rank([report(spec="a"), report(spec="b", weights="b")])
    assert (nothing.criterion, nothing.compared) == ("", 0)
    assert set(outcomes(nothing).values()) == {(None, "")}
    with pytest.raises(UsageError, match="no reports were given to rank"):
        rank([])


def test_what_is_not_ranked_widens_no_limits(steep, norms, ids):
    """Two models on other samples are compared with each other, and with none that is ranked."""
    ranked = [steep(n, f * norms) for n, f in zip("abc", (1.0, 1.1, 1.3), strict=True)]
    others = [steep(n, f * norms, ids=ids(64, 500)) for n, f in zip("de", (1, 2), strict=True)]
    alone, among = rank(ranked), rank([*ranked, *others])
    assert among.models[:3] == alone.models
    assert (among.compared, alone.compared) == (2, 2)
    assert {model.outcome for model in among.models[3:]} == {"not comparable"}


def test_a_measure_that_failed_spoils_its_own_figures_alone(attacked, steep, norms):
    failed = layouts()["attention"].section(failure=Failure(reason="no", exit_code=3))
    partial = attacked("a", HALF)
    partial = partial.model_copy(
        update={"status": "partial", "sections": (*partial.sections, failed)}
    )
    ranking = rank([partial, attacked("b", flipped(HALF, up=30, down=0))])
    assert outcomes(ranking)["a"] == (2, "behind the best")


def test_a_model_is_never_told_apart_from_itself(attacked):
    """Not where its attack began elsewhere, and broke others."""
    again = attacked("also", flipped(HALF, up=40, down=0), seed=1)
    ranking = rank([attacked("as", HALF), again])
    assert outcomes(ranking)["as"] == (1, "not distinguishable from the best")


def test_equal_medians_are_not_equal_models(steep):
    """All samples but that of the median are a little worse: they are told apart, unlike ties."""
    norms = np.arange(1.0, 32.0)
    worse = np.where(norms == 16.0, 1.0, 1.01) * norms
    ranking = rank([steep("b", worse), steep("a", norms)])
    assert [model.summary.norms.median for model in ranking.models] == [16.0, 16.0]
    assert outcomes(ranking) == {"a": (1, "best"), "b": (2, "behind the best")}


def test_equal_models_are_seldom_told_apart(steep):
    """Of five models that do not differ any is called behind in about 5 % of trials.

    At 2.5 % for each comparison with the best it would be about 17 %.
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
    ids = tuple(f"{start + i:05x}" for i in range(len(section.samples["ids"])))
    section = section.model_copy(update={"samples": section.samples | {"ids": ids}})
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
def test_inputs_in_another_form_are_paired_by_their_place(steep, norms, place, text, run, paired):
    def name(**patterns):
        count = range(norms.size)
        return {key: tuple(map(p.format, count)) for key, p in patterns.items() if p}

    line = "lipaudit jacobian"
    first = moved(
        steep("a", norms), name(place="cat/{}.png", text=text and "begins {}"), command=f"{line} a"
    )
    other = moved(
        steep("b", 2 * norms), name(place=place, text=text), 500, command=f"{line} b", **run
    )
    ranking = rank([first, other])
    assert ("paired-by-place" in {note.code for note in ranking.notes}) == paired
    assert math.isfinite(ranking.models[0].summary.norms.median)
    if paired:
        assert outcomes(ranking)["b"] == (2, "behind the best")
        assert ranking.models[1].difference.paired == pytest.approx(1.0)
    else:
        assert {model.outcome for model in ranking.models} <= {"best", "not comparable"}
        assert "only 0 of the baseline" in ranking.models[-1].reason


def test_models_are_ranked_by_what_is_asked_for(report, jacobian, attack, norms):
    both = np.stack([HALF, flipped(HALF, up=0, down=30)])
    eps = ("4/255", "8/255")
    first = report(attack(both, eps=eps), jacobian(norms), spec="a")
    second = report(attack(both[::-1], eps=eps), jacobian(2 * norms), spec="b", weights="b")
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
def test_what_models_cannot_be_ranked_by_is_refused(attacked, by, says):
    reports = [attacked(n, np.stack([HALF, HALF]), eps=("4/255", "8/255")) for n in "ab"]
    with pytest.raises(UsageError, match=says) as refused:
        rank(reports, by)
    assert refused.value.advice
