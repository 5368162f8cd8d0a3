"""The sweep over random networks: nothing leaves its certificate."""

import argparse
import re

import pytest

from benchmarks import soundness
from lipaudit.certify.form import Form
from lipaudit.certify.prove import RULES


def test_random_networks_stay_within_their_certificates(capsys):
    """The command fails for a violation, and for a rule that no network draws."""
    with pytest.raises(SystemExit) as end:
        soundness.run(argparse.Namespace(count=20, seed=0))
    printed = capsys.readouterr().out
    assert end.value.code == 0, printed
    called = len(RULES.keys() - soundness.UNREACHABLE)
    assert f"0 violations; {called} of {len(RULES)} rules are called" in printed


def test_a_rule_that_is_too_narrow_is_found_and_printed(monkeypatch, capsys):
    """By one percent: the printed case shows it again, and not with the right rule."""
    right = RULES["linear"]

    def narrow(*args, **options):
        form = right(*args, **options)
        return Form(form.centre, 0.99 * form.generators, 0.99 * form.slack, form.symbols)

    with monkeypatch.context() as patch:
        patch.setitem(RULES, "linear", narrow)
        with pytest.raises(SystemExit) as end:
            soundness.run(argparse.Namespace(count=1, seed=10))
        printed = capsys.readouterr().out
        assert end.value.code == 1
        (case,) = re.findall(r"check\((Case\(.*?\))\), layers", printed)
        least = eval(case, {"Case": soundness.Case})
        assert soundness.check(least)[0] == "VIOLATION"
    assert soundness.check(least)[0] != "VIOLATION"
    assert len(least.parts) < 4  # it was shrunk
