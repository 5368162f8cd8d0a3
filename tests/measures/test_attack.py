"""The measure `attack`: rows, columns, intervals."""

import pytest
from pydantic import ValidationError

from lipaudit.attacks.plan import CHUNK
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import InputError, UsageError
from lipaudit.measures.attack import AttackOptions, measure, summarise
from lipaudit.models.sources.loading import load_net
from lipaudit.results.figures import wilson


@pytest.fixture(scope="module")
def net():
    return load_net("demo")


def section(net, batch_size=64, samples=24, **options):
    batch = load_data("demo", net, DataOptions(samples=samples)).batch
    options = AttackOptions(batch_size=batch_size, steps=4, **options)
    return summarise(list(measure(net, batch.split(64), options)), options)[0]


def test_rows_and_columns_agree(net):
    found = section(net, attack="fgsm,pgd", eps=("0.05", "0.1"))
    assert [(row.attack, row.eps_text) for row in found.rows] == [
        ("fgsm", "0.05"), ("fgsm", "0.1"), ("pgd", "0.05"), ("pgd", "0.1"),
        ("worst", "0.05"), ("worst", "0.1"),
    ]  # fmt: skip
    for row in found.rows:
        flags = found.samples[f"robust@{row.attack},linf,{row.eps_text}"]
        assert sum(flags) / len(flags) == row.robust
        assert row.robust_low <= row.robust <= row.robust_high
        assert row.robust <= row.clean
    worst = [
        min(flags)
        for flags in zip(
            found.samples["robust@fgsm,linf,0.1"],
            found.samples["robust@pgd,linf,0.1"],
            strict=True,
        )
    ]
    assert list(found.samples["robust@worst,linf,0.1"]) == worst


def test_the_device_batch_changes_nothing(net):
    first, second = (section(net, b, attack="pgd", eps=("0.1",)) for b in (64, 7))
    assert first.samples["robust@pgd,linf,0.1"] == second.samples["robust@pgd,linf,0.1"]
    assert first.settings == second.settings


def test_the_recorded_chunk_is_the_one_that_was_used(net):
    """It decides the random starts, so a report must not say one thing and do another."""
    options = AttackOptions(attack="pgd", eps=("0.1",), steps=1)
    assert options.model_dump()["logical_chunk"] == CHUNK
    assert AttackOptions.model_validate(options.model_dump()) == options  # an old report's
    with pytest.raises(ValidationError, match="logical_chunk"):
        AttackOptions(logical_chunk=32)
    batch = load_data("demo", net, DataOptions(samples=2 * CHUNK)).batch
    for size in (CHUNK // 2, CHUNK + 1):
        with pytest.raises(UsageError, match="chunks of 64"):
            list(measure(net, batch.split(size), options))


def test_a_radius_of_zero_changes_nothing(net):
    found = section(net, attack="fgsm,pgd", eps=("0",))
    assert all(row.robust == row.clean for row in found.rows)


def test_wilson_limits_are_those_of_statsmodels():
    # statsmodels.stats.proportion.proportion_confint(5, 10, method="wilson"), and 0 of 20
    assert wilson(5, 10) == pytest.approx((0.236593, 0.763407), abs=1e-6)
    assert wilson(0, 20) == pytest.approx((0.0, 0.161125), abs=1e-6)


def test_what_cannot_be_attacked_is_refused(net):
    with pytest.raises(UsageError):
        AttackOptions(attack="pgd")
    with pytest.raises(UsageError):
        AttackOptions(attack="magic", eps=("0.1",))
    batch = load_data("random", net, DataOptions(samples=2)).batch
    with pytest.raises(InputError):
        list(measure(net, [batch], AttackOptions(attack="fgsm", eps=("0.1",))))
