"""The sweep over random networks: nothing leaves its certificate."""

import argparse

import pytest

from benchmarks import soundness
from lipaudit.certify.prove import RULES


def test_random_networks_stay_within_their_certificates(capsys):
    """The command fails for a violation, and for a rule that no network draws."""
    with pytest.raises(SystemExit) as end:
        soundness.run(argparse.Namespace(count=20, seed=0))
    printed = capsys.readouterr().out
    assert end.value.code == 0, printed
    assert f"0 violations; {len(RULES)} of {len(RULES)} rules" in printed
