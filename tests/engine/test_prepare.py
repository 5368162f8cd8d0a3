"""From a request to a job: what is left out, and what is refused before any work."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from lipaudit.engine.prepare import Request, prepare
from lipaudit.errors import InputError
from lipaudit.measures import load_measures
from lipaudit.measures.attack import AttackOptions
from lipaudit.measures.bounds import BoundsOptions
from lipaudit.measures.jacobian import JacobianOptions
from lipaudit.models.sources.loader import load_net
from lipaudit.settings import RunOptions

ATTACK = {"attack": AttackOptions(attack="fgsm", eps=("0.1",))}


@pytest.fixture(scope="module")
def unclassed():
    """A model without classes: its data have labels, which are of no use."""
    return replace(load_net("demo"), classes=None)


def test_labels_are_not_called_missing_where_the_model_has_no_classes(unclassed):
    request = Request("demo", {"bounds": BoundsOptions()} | ATTACK, optional=frozenset(ATTACK))
    job = prepare(request, net=unclassed)
    assert job.samples.batch.y is not None
    assert list(job.request.measures) == ["bounds"]
    (note,) = (note for note in job.notes if note.code == "left-out")
    assert "has no class scores" in note.text
    assert "--score sum" in note.text
    for asked in (request, replace(request, optional=frozenset())):
        with pytest.raises(InputError, match="has no class scores"):
            prepare(replace(asked, measures=ATTACK), net=unclassed)


def test_a_measure_is_refused_for_its_own_samples_only(monkeypatch):
    seen = {}
    for name in ("bounds", "attack"):
        looked = partial(seen.setdefault, name)
        check = lambda _net, batch, _options, looked=looked: looked(len(batch))  # noqa: E731
        monkeypatch.setitem(load_measures(), name, replace(load_measures()[name], check=check))
    prepare(
        Request("demo", {"bounds": BoundsOptions()} | ATTACK, counts={"bounds": 1, "attack": 3})
    )
    assert seen == {"bounds": 1, "attack": 3}


@pytest.fixture
def strangers(tmp_path):
    """Run options with digits whose labels are those of some other model."""
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).random((6, 1, 8, 8)), y=range(8, 14))
    return RunOptions(data=str(tmp_path / "x.npz"))


def test_labels_of_another_model_keep_no_norm_from_being_measured(strangers):
    norms = {"bounds": BoundsOptions(), "jacobian": JacobianOptions()}
    job = prepare(Request("demo", norms, strangers))
    assert list(job.request.measures) == ["bounds", "jacobian"]
    assert job.samples.batch.y is None
    assert job.net.classes == 10
    (note,) = (note for note in job.notes if note.code == "labels-unused")
    assert note.level == "warning"
    assert "is not one of the model's 10 classes" in note.text


def test_labels_of_another_model_are_refused_where_they_are_needed(strangers):
    both = {"bounds": BoundsOptions(), "jacobian": JacobianOptions()} | ATTACK
    for optional in (frozenset(), frozenset(ATTACK)):
        with pytest.raises(InputError, match="not one of the model's 10 classes"):
            prepare(Request("demo", both, strangers, optional=optional))
