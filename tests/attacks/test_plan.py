import subprocess
import sys
from pathlib import Path

import pytest

from lipaudit.attacks.kinds import ATTACKS
from lipaudit.attacks.plan import (
    PRESETS,
    Attack,
    adapt,
    read_plan,
)
from lipaudit.errors import UsageError
from lipaudit.tables.trials import parse_radius


def test_standard_is_the_reference_autoattack():
    (trial,) = read_plan("standard", radii=[parse_radius("8/255")])
    assert [attack.name for attack in trial.attacks] == ["apgd-ce", "apgd-t", "fab-t", "square"]
    assert {attack.steps for attack in trial.attacks} == {100}
    assert [attack.turns for attack in trial.attacks] == [1, 9, 9, 1]
    assert trial.attacks[-1].queries == 5000


def test_paper_brings_its_own_radii_and_says_what_is_ours():
    plan = read_plan("paper")
    assert [(trial.label, trial.radius.text) for trial in plan] == [
        ("fgsm", "2/255"),
        ("fgsm", "4/255"),
        ("pgd", "2/255"),
        ("pgd", "4/255"),
        ("autoattack", "2/255"),
    ]
    assert [[attack.steps for attack in trial.attacks] for trial in plan[2:]] == [
        [4],
        [4],
        [10] * 4,
    ]
    assert [[note.code for note in trial.notes] for trial in plan[2:]] == [
        ["own-step-size"],
        ["own-step-size"],
        ["own-queries"],
    ]
    with pytest.raises(UsageError, match="fixes"):
        read_plan("paper", radii=[parse_radius("8/255")])


def test_custom_keeps_the_order_and_takes_settings():
    radii = [parse_radius("0.1"), parse_radius("0.2")]
    plan = read_plan("custom:square, pgd", norm="l2", radii=radii, queries=7, steps=3, restarts=2)
    assert [trial.radius for trial in plan] == radii
    assert plan[0].norm == "l2"
    assert plan[0].attacks == (
        Attack("square", steps=3, restarts=2, queries=7),
        Attack("pgd", steps=3, restarts=2, queries=7),
    )
    assert plan[0].notes == ()


def test_a_changed_preset_says_so():
    (trial,) = read_plan("standard", radii=[parse_radius("0.1")], queries=100)
    assert trial.attacks[-1].queries == 100
    assert [note.code for note in trial.notes] == ["preset-changed"]
    assert "queries = 100" in trial.notes[0].text


@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        ("strong", {}, "unknown attack preset 'strong'"),
        ("custom:apgd", {}, "unknown attack 'apgd'"),
        ("standard", {"radii": []}, "no attack radius"),
        ("quick", {"steps": 0}, "steps is 0"),
    ],
)
def test_mistakes_are_named(spec, settings, message):
    given = {"radii": [parse_radius("0.1")]} | settings
    with pytest.raises(UsageError, match=message):
        read_plan(spec, **given)


@pytest.mark.parametrize("classes", [2, 3, 4, 9, 10, 1000])
@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_fit_any_number_of_classes(name, classes):
    attack, notes = adapt(Attack(name), classes)
    dlr = attack.name in ("apgd-dlr", "apgd-t") and attack.turns > 0
    assert not (dlr and classes == 2)
    assert not (attack.name == "apgd-t" and attack.turns > 0 and classes < 4)
    assert attack.targets <= classes - 1 or attack.name not in ("apgd-t", "fab-t") or not dlr
    assert bool(notes) == (attack != Attack(name))


def test_what_was_changed_is_reported():
    assert [n.code for n in adapt(Attack("apgd-t"), 2)[1]] == ["attack-skipped"]
    assert [n.code for n in adapt(Attack("apgd-t"), 3)[1]] == ["attack-replaced"]
    assert [n.code for n in adapt(Attack("fab-t"), 4)[1]] == ["fewer-targets"]
    assert adapt(Attack("fab-t"), 4)[0].targets == 3


def test_a_plan_needs_no_torch():
    code = "import sys, lipaudit.attacks.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_presets_are_listed():
    assert set(PRESETS) == {"paper", "standard", "lean", "quick"}


@pytest.mark.parametrize("preset", PRESETS)
def test_the_guide_says_what_each_preset_runs(preset):
    guide = Path(__file__).parents[2] / "docs/guide/attack.md"
    rows = [line for line in guide.read_text("utf-8").splitlines() if line.startswith("|")]
    assert any(f"`{preset}`" in row.split("|")[1] for row in rows)
