from dataclasses import replace

import pytest
from torch import nn

from lipaudit.attacks.sanity import (
    Checks,
    note_signs,
    note_square,
    refuse_training,
)
from lipaudit.errors import UsageError

FINE = Checks(classes=10, samples=100, correct=90, zero_gradients=0, random=0, probabilities=0)


def codes(checks):
    return [note.code for note in note_signs(checks)]


@pytest.mark.parametrize(
    ("correct", "expected"), [(10, True), (15, True), (17, False), (90, False), (0, True)]
)
def test_guessing_is_told_from_knowing(correct, expected):
    found = codes(replace(FINE, correct=correct))
    assert ("clean-accuracy-at-chance" in found) == expected


def test_no_sample_wrong_is_no_guessing_however_few_there_are():
    few = replace(FINE, classes=2, samples=2, correct=2)
    assert codes(few) == []
    assert codes(replace(few, correct=1)) == ["clean-accuracy-at-chance"]


def test_counts_add_up_and_keep_the_classes():
    total = FINE + replace(FINE, zero_gradients=3, random=2)
    assert total == Checks(10, 200, 180, 3, 2, 0)
    assert "3 of 180" in note_signs(total)[0].text


@pytest.mark.parametrize(
    ("before", "after", "samples", "flag"),
    [(50, 50, 64, False), (50, 49, 64, True), (500, 498, 1000, False), (500, 497, 1000, True)],
)
def test_square_doing_better_than_gradients_is_a_warning(before, after, samples, flag):
    notes = note_square(before, after, samples)
    assert bool(notes) == flag
    assert all(note.level == "warning" and str(before - after) in note.text for note in notes)


def test_a_module_in_training_mode_is_refused_by_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)).eval()
    refuse_training(model)
    refuse_training(model.forward)
    refuse_training(lambda z: z)
    model[1].train()
    for f in (model, model.forward):
        with pytest.raises(UsageError, match=r"1 \(Dropout\) is in training mode"):
            refuse_training(f)
