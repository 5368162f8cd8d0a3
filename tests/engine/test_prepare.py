"""From a request to a job: what is left out or refused before any work, and what models share."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import lipaudit
from lipaudit.engine.execute import execute
from lipaudit.engine.outlines import outline_job, require_shared
from lipaudit.engine.prepare import Request, prepare
from lipaudit.engine.results import in_order
from lipaudit.errors import InputError, UsageError
from lipaudit.measures import load_measures
from lipaudit.measures.attack import AttackOptions
from lipaudit.measures.base import Part
from lipaudit.measures.bounds import BoundsOptions
from lipaudit.measures.jacobian import JacobianOptions
from lipaudit.models.sources.loader import load_net
from lipaudit.settings import RunOptions

ATTACK = {"attack": AttackOptions(attack="fgsm", eps=("0.1",))}


def test_labels_are_not_called_missing_where_the_model_has_no_classes():
    unclassed = replace(load_net("demo"), classes=None)
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
    counts = {"bounds": 1, "attack": 3}
    prepare(Request("demo", {"bounds": BoundsOptions()} | ATTACK, counts=counts))
    assert seen == counts


def test_labels_of_another_model_are_refused_only_where_they_are_needed(tmp_path):
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).random((6, 1, 8, 8)), y=range(8, 14))
    strangers = RunOptions(data=str(tmp_path / "x.npz"))
    norms = {"bounds": BoundsOptions(), "jacobian": JacobianOptions()}
    job = prepare(Request("demo", norms, strangers))
    assert list(job.request.measures) == ["bounds", "jacobian"]
    assert (job.samples.batch.y, job.net.classes) == (None, 10)
    (note,) = (note for note in job.notes if note.code == "labels-unused")
    assert note.level == "warning"
    assert "is not one of the model's 10 classes" in note.text
    for optional in (frozenset(), frozenset(ATTACK)):
        with pytest.raises(InputError, match="not one of the model's 10 classes"):
            prepare(Request("demo", norms | ATTACK, strangers, optional=optional))


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((3, 128, 128), 16),
        ((3, 128, 144), 4),  # 72 patches of 16 x 16 pixels
        ((1, 16, 64, 64), 4),  # a volume
        ((64,), 16),
        ((65,), 4),
        ((64, 8), 16),
    ],
)
def test_short_samples_are_measured_more_at_a_time(job, shape, size):
    batch = replace(job.samples.batch, x=torch.zeros(len(job.samples.batch), *shape))
    of_shape = replace(job, samples=replace(job.samples, batch=batch))
    assert of_shape.choose_batch("bounds") == size
    assert of_shape.choose_batch("jacobian") == load_measures()["jacobian"].batch


def test_the_batch_size_is_that_of_the_samples_or_of_the_option():
    samples = {"bounds": BoundsOptions()}
    for options, expected in (({}, [16, 4]), ({"batch_size": 8}, [8, 8, 4])):
        job = prepare(Request("demo", samples, RunOptions(samples=20, **options)))
        assert [len(batch) for batch in job.batches("bounds")[1]] == expected


@pytest.fixture(scope="module")
def job():
    return prepare(Request("demo", {"jacobian": JacobianOptions()}, RunOptions(samples=2)))


@pytest.fixture(scope="module")
def first(job):
    return outline_job(job)


def other(first, data="demo", suite=None, places=None, **changes):
    """Return the outline of another model, on samples with other ids (`suite`) or places."""
    facts = {"spec": data, "suite_id": suite or first.run.data.suite_id}
    run = first.run.model_copy(update={"data": first.run.data.model_copy(update=facts)})
    samples = first.samples if places is None else {"place": places}
    request = replace(first.request, model="other")
    return replace(first, **{"request": request, "run": run, "samples": samples} | changes)


ELSEWHERE = {"suite": "other", "places": ("index 0", "index 1")}
FEWER = {"suite": "fewer", "places": ("index 0",)}
MADE_UP = {"suite": "other", "samples": {}}


def test_a_part_that_is_split_by_samples_stays_incomplete():
    part = Part(("a", "c"), {"x": np.arange(2)}, {"first": 1}, complete=False)
    pieces = in_order([part, Part(("b",), {"x": np.array([7])})], ("a", "b", "c"))
    assert [(piece.ids, piece.complete) for piece in pieces] == [
        (("a",), False),
        (("b",), True),
        (("c",), False),
    ]
    assert [int(piece.values["x"][0]) for piece in pieces] == [0, 7, 1]
    assert [dict(piece.facts) for piece in pieces] == [{"first": 1}, {}, {}]


@pytest.mark.parametrize("name", ["bounds", "jacobian", "weights"])
def test_norms_need_a_step(name):
    with pytest.raises(UsageError, match="max.steps"):
        lipaudit.measure("demo", name, max_steps=0)


def test_an_outline_says_what_the_report_will(job, first):
    report = execute(job)
    assert first.samples == report.samples
    assert first.run.data == report.run.data
    assert first.labels == tuple(job.samples.batch.y.tolist())
    assert (first.kind, first.classes) == ("image", 10)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"suite": "other"},  # another form of the same inputs
        {"places": ()},  # the same tensors
        {"suite": "other", "labels": None},
        {"labels": (1, 2), "suite": "other", "classes": 1000},  # matched by name
        {"names": tuple(f"LABEL_{i}" for i in range(10))},
        {"classes": None, "labels": None, "suite": "other"},
    ],
)
def test_models_that_share_samples_are_taken(first, changes):
    require_shared([first, other(first, **changes)])


@pytest.mark.parametrize(
    ("changes", "says", "advice"),
    [
        ({"kind": "text"}, "demo .image, demo. and other .text, demo. do not", "table"),
        ({"classes": 5}, "10 classes, other 5, so the labels of demo cannot", "class names"),
        (ELSEWHERE | {"data": "random"}, "and other .image, random. do not", "--data"),
        (ELSEWHERE, "and other .image, demo. do not read the same samples", "a table of texts"),
        (FEWER, "do not read the same samples", "--data"),
        (MADE_UP, "do not read the same samples", "Random samples"),
    ],
)
def test_models_that_share_none_are_refused(first, changes, says, advice):
    second = other(first, **changes)
    first = replace(first, samples=changes.get("samples", first.samples))
    with pytest.raises(InputError, match=says) as refused:
        require_shared([first, second])
    assert advice in refused.value.advice


def test_labels_that_mean_other_classes_and_models_named_twice_are_refused(first):
    named = replace(first, names=("cat",) * 10)
    with pytest.raises(InputError, match="the class 'cat' of demo is 'church, minster' in other"):
        require_shared([named, other(first, names=("church, minster",) * 10)])
    require_shared([named, other(first, names=("Tabby, Cat",) * 10)])
    require_shared([named, other(first, names=None)])
    with pytest.raises(UsageError, match="demo is named twice"):
        require_shared([first, other(first), first])
