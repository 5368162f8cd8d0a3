"""Which models can be measured on the same samples, and which reports are whole."""

from dataclasses import replace

import pytest

from lipaudit.api import outline_job, require_shared
from lipaudit.engine.execute import execute
from lipaudit.engine.prepare import Request, prepare
from lipaudit.errors import InputError, UsageError
from lipaudit.measures.jacobian import JacobianOptions
from lipaudit.settings import RunOptions


@pytest.fixture(scope="module")
def job():
    request = Request("demo", {"jacobian": JacobianOptions()}, RunOptions(samples=2))
    return prepare(request)


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
        (
            {"kind": "text"},
            "demo .image, demo. and other .text, demo. do not",
            "table",
        ),
        ({"classes": 5}, "10 classes, other 5, so the labels of demo cannot", "class names"),
        (
            ELSEWHERE | {"data": "random"},
            "and other .image, random. do not",
            "--data",
        ),
        (ELSEWHERE, "and other .image, demo. do not read the same samples", "a table of texts"),
        (FEWER, "do not read the same samples", "--data"),
    ],
)
def test_models_that_share_none_are_refused(first, changes, says, advice):
    with pytest.raises(InputError, match=says) as refused:
        require_shared([first, other(first, **changes)])
    assert advice in refused.value.advice


def test_labels_that_mean_other_classes_are_refused(first):
    named = replace(first, names=("cat",) * 10)
    with pytest.raises(InputError, match="the class 'cat' of demo is 'church, minster' in other"):
        require_shared([named, other(first, names=("church, minster",) * 10)])
    require_shared([named, other(first, names=("Tabby, Cat",) * 10)])
    require_shared([named, other(first, names=None)])


def test_made_up_samples_of_another_form_are_refused(first):
    made_up = replace(first, samples={})
    with pytest.raises(InputError, match="do not read the same samples") as refused:
        require_shared([made_up, other(made_up, suite="other")])
    assert "Random samples" in refused.value.advice


def test_a_model_is_named_once(first):
    with pytest.raises(UsageError, match="demo is named twice"):
        require_shared([first, other(first), first])
