"""What a report says of a sample that cannot be: certified, and broken."""

import pytest

from lipaudit.measures import layouts
from lipaudit.tables.report import Data, Model, Report, Run
from lipaudit.tables.summary import contradictions, summary

IDS = ("aa", "bb")
RUN = Run(
    lipaudit="0", command="", created="", seed=0, device="cpu", dtype="float32", versions={},
    model=Model(spec="m", source="py", architecture="M", parameters=1, weights_sha256="00"),
    data=Data(spec="d", samples=2, suite_id="00"),
)  # fmt: skip


def made(attack, certify, norm) -> Report:
    attacked = layouts()["attack"].section(samples={"ids": IDS, **attack})
    settings, samples = {"norm": norm}, {"ids": IDS, **certify}
    proven = layouts()["certify"].section(settings=settings, samples=samples)
    return Report(run=RUN, sections=(attacked, proven))


CERTIFIED = {"certified@linf,4/255": (1, 0)}
BROKEN = {"correct": (1, 1), "robust@pgd,linf,4/255": (0, 0)}


@pytest.mark.parametrize(
    ("attack", "certify", "norm"),
    [
        (BROKEN, CERTIFIED, "linf"),
        ({"robust@pgd,linf,2/255": (0, 0)}, CERTIFIED, "linf"),
        # nearer than the trial allowed
        ({"robust@pgd,linf,1": (0, 0), "distance@pgd,linf,1": (0.01, 1.0)}, CERTIFIED, "linf"),
        # linf <= l2
        ({"robust@pgd,l2,4/255": (0, 0)}, CERTIFIED, "linf"),
        (BROKEN, {"radius": (0.02, 0.01)}, "linf"),
        ({}, {"radius": (0.02, None), "radius_adversarial": (0.015, 0.01)}, "l2"),
        ({}, CERTIFIED | {"robust@linf,2/255": (0, 1)}, "linf"),
    ],
)
def test_a_sample_is_not_both_certified_and_broken(attack, certify, norm):
    report = made(attack, certify, norm)
    (pair,) = contradictions(report)
    first = summary(report).warnings[0]
    assert (first.level, first.code, pair.sample) == ("warning", "contradiction", "aa")
    assert first.text.startswith(
        f"a contradiction: sample aa is certified in {pair.certified.ball}"
    )
    assert "(such samples: 1)" in first.text
    if (attack, certify) == (BROKEN, CERTIFIED):
        assert (str(pair.certified), str(pair.attack)) == ("linf,4/255", "pgd,linf,4/255")


@pytest.mark.parametrize(
    ("attack", "certify", "norm"),
    [
        (BROKEN, {"certified@linf,2/255": (1, 1)}, "linf"),
        (BROKEN | {"correct": (0, 1)}, CERTIFIED, "linf"),
        ({"robust@pgd,linf,4/255": (1, 0)}, CERTIFIED, "linf"),
        # 4/255 in linf may be farther in l2
        ({"robust@pgd,linf,4/255": (0, 0)}, {"certified@l2,4/255": (1, 1)}, "linf"),
        ({"robust@pgd,linf,4/255": (0, 0)}, {"radius": (0.02, 0.02)}, "l2"),
        ({"robust@words,words,1": (0, 0)}, {"radius": (2.0, 2.0)}, "linf"),
        (BROKEN, {"radius": (0.0, None), "radius_adversarial": (0.01, None)}, "linf"),
    ],
)
def test_what_is_broken_outside_of_what_is_certified_is_no_contradiction(attack, certify, norm):
    report = made(attack, certify, norm)
    assert (contradictions(report), summary(report).warnings) == ([], ())
