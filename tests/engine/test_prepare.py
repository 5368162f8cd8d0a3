"""From a request to a job: what is left out, and what is refused before any work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lipaudit.engine.prepare import Request, prepare
from lipaudit.errors import InputError, UsageError
from lipaudit.models.sources.loading import load_net
from lipaudit.settings import AttackOptions, BoundsOptions, RunOptions

ATTACK = {"attack": AttackOptions(attack="fgsm", eps=("0.1",))}


@pytest.fixture(scope="module")
def unclassed():
    """A model without classes: its data have labels, which are of no use."""
    return replace(load_net("demo"), classes=None)


def test_labels_are_not_called_missing_where_the_model_has_no_classes(unclassed):
    request = Request("demo", {"bounds": BoundsOptions()} | ATTACK, skip_unlabelled=True)
    job = prepare(request, net=unclassed)
    assert list(job.request.measures) == ["bounds"]
    (note,) = (note for note in job.notes if note.code == "no-labels")
    assert "no classes to label samples with" in note.text
    with pytest.raises(UsageError, match="nothing is left to measure: .* has no classes"):
        prepare(replace(request, measures=ATTACK), net=unclassed)


def test_an_attack_on_a_model_without_classes_is_refused_before_data_are_read(unclassed):
    request = Request("demo", ATTACK, RunOptions(data="nowhere"))
    with pytest.raises(InputError, match="has no class scores"):
        prepare(request, net=unclassed)
