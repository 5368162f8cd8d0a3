"""The sweeps over random networks and planted counterexamples: nothing leaves its certificate."""

import argparse
import re
from pathlib import Path

import pytest

from benchmarks import soundness
from benchmarks.shared import planted
from lipaudit.wings.certificates.form import Form
from lipaudit.wings.certificates.prove import RULES
from lipaudit.wings.certificates.symbols import Symbols

PLANTED = Path(__file__).with_name("planted.safetensors")
"""Written by `python -m benchmarks soundness --planted --save FOLDER`: relu, linf."""


def sweep(count=1, seed=0, **how):
    soundness.run(
        argparse.Namespace(count=count, seed=seed, **{"planted": False, "words": False, **how})
    )


def narrow(name, share):
    """Return a rule whose ranges are a share of what they have to be."""
    right = RULES[name]

    def rule(*args, **options):
        form = right(*args, **options)
        return Form(form.centre, share * form.generators, share * form.slack, form.symbols)

    return rule


def test_random_networks_stay_within_their_certificates(capsys):
    """The command fails for a violation, and for a rule that no network draws."""
    with pytest.raises(SystemExit) as end:
        sweep(count=20)
    printed = capsys.readouterr().out
    assert end.value.code == 0, printed
    called = len(RULES.keys() - soundness.UNREACHABLE)
    assert f"0 violations; {called} of {len(RULES)} rules are called" in printed


def test_a_rule_that_is_too_narrow_is_found_and_printed(monkeypatch, capsys):
    """By one percent: the printed case shows it again, and not with the right rule."""
    with monkeypatch.context() as patch:
        patch.setitem(RULES, "linear", narrow("linear", 0.99))
        with pytest.raises(SystemExit) as end:
            sweep(seed=14)
        printed = capsys.readouterr().out
        assert end.value.code == 1
        (case,) = re.findall(r"check\((Case\(.*?\))\), layers", printed)
        least = eval(case, {"Case": soundness.Case})
        assert soundness.check(least)[0] == "VIOLATION"
    assert soundness.check(least)[0] != "VIOLATION"
    assert len(least.parts) < 4  # it was shrunk


def test_no_ball_with_a_planted_counterexample_is_certified(monkeypatch, capsys):
    """Others are, so that the check can fail: it does for a rule that is 30% too narrow."""
    network = planted.load_planted(PLANTED)
    assert network.holds().all()
    counts = list(planted.examine(network, (1, 2), nodes=1))
    assert [count.wrong for count in counts] == [0, 0]
    assert all(count.certified for count in counts)
    monkeypatch.setitem(RULES, "linear", narrow("linear", 0.7))
    (count,) = planted.examine(network, (1,), nodes=1)
    assert count.wrong > 0
    assert planted.fails([count])


@pytest.mark.slow(seconds=60)
def test_plants_are_trained_where_attacks_miss_them(capsys):
    counts = list(planted.examine(planted.train_planted(planted.RECIPES[0]), (1,), nodes=200))
    assert not planted.fails(counts), capsys.readouterr().out


def test_words_stay_within_their_certificates_and_effects_cut_by_a_third_are_found(
    monkeypatch, capsys
):
    with pytest.raises(SystemExit) as end:
        sweep(count=12, words=True)
    printed = capsys.readouterr().out
    assert end.value.code == 0, printed
    assert "0 violations" in printed
    right = Symbols.maximise_over_words
    monkeypatch.setattr(Symbols, "maximise_over_words", lambda *args: 0.7 * right(*args))
    assert soundness.check(soundness.Case(7, words=True))[0] == "VIOLATION"
