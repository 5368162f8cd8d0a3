"""Attacks of other packages: the example plug-in, and plug-ins that do not do what they should."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lipaudit.attacks.evaluate import Chunk, evaluate_chunk
from lipaudit.attacks.kinds import (
    ATTACKS,
    PRESETS,
    RESERVED,
    AttackKind,
    attack_kinds,
    read_plan,
    require_suitable,
)
from lipaudit.errors import EvaluationError, UsageError
from tests.commands import installed, invoke, write_package

PLUGINS = str(Path(__file__).parents[1] / "plugins")


@pytest.fixture
def example():
    """Install the example package."""
    with installed(PLUGINS):
        yield


@pytest.fixture
def bad(radius):
    """Attack five samples of class 0 by a function of this module."""

    def attack(function, x, y=None):
        chunk = Chunk(0, x, torch.zeros(5, dtype=torch.int64) if y is None else y)
        with installed() as patch:
            patch.setitem(ATTACKS, "bad", AttackKind(f"{__name__}:{function}"))
            trials = read_plan("custom:bad", radii=[radius("0.1")])
            return list(evaluate_chunk(lambda z: z + torch.arange(4).flip(0), chunk, trials))[-1]

    return attack


@pytest.mark.usefixtures("example", "elsewhere", "blank_charts")
def test_an_attack_of_another_package_is_used_like_ours():
    """In lists, tables, JSON, HTML and rules of the gate, with nothing of ours changed."""
    options = ["--eps", "0.1", "--attack", "fgsm,mi-fgsm", "-n", "24", "-q"]
    done = invoke("attack", "demo", *options, "-o", "a.json", "-o", "a.html", "-f", "table")
    report = json.loads(Path("a.json").read_text())["sections"][0]
    rows = {row["attack"]: row for row in report["rows"]}
    assert list(rows) == ["worst", "fgsm", "mi-fgsm"]
    assert rows["worst"]["robust"] <= rows["mi-fgsm"]["robust"] < rows["fgsm"]["robust"]
    assert sum(report["samples"]["robust@mi-fgsm,linf,0.1"]) == 24 * rows["mi-fgsm"]["robust"]
    assert "mi-fgsm" in done.stdout
    assert "mi-fgsm" in Path("a.html").read_text()
    for step, code in ((-0.01, 0), (0.01, 1)):
        rule = f"attack.robust@mi-fgsm,linf,0.1 >= {rows['mi-fgsm']['robust'] + step:.4f}"
        done = invoke("gate", "a.json", "-b", "a.json", "--fail-on", rule, code=code)
        assert (f"regressed: {rule}" in done.stdout) == bool(code)


def test_the_example_takes_its_own_steps_and_is_named_where_names_are_listed(example, radius):
    (trial,) = read_plan("mi-fgsm", radii=[radius("0.1")])
    assert [attack.steps for attack in trial.attacks] == [10]
    (ensemble,) = read_plan("custom:mi-fgsm,square", radii=[radius("0.1")])
    assert [attack.name for attack in ensemble.attacks] == ["mi-fgsm", "square"]
    with pytest.raises(UsageError) as caught:
        read_plan("magic", radii=[radius("0.1")])
    assert "mi-fgsm" in caught.value.advice
    trials = read_plan("custom:mi-fgsm", norm="l2", radii=[radius("0.1")])
    with pytest.raises(UsageError, match="mi-fgsm cannot search l2 balls, only linf"):
        require_suitable(trials, "image")


def test_the_example_is_exact_on_a_linear_model_of_two_classes(example, linear, radius):
    model, x, y = linear(2, (1, 4, 4), samples=40)
    reach = model.reach(x, y, "linf")
    eps = float(reach[reach > 0].median()) * 1.01
    trials = read_plan("custom:mi-fgsm", radii=[radius(f"{eps:.12f}")], steps=3)
    outcome = list(evaluate_chunk(model, Chunk(0, x, y), trials))[-1]
    assert torch.equal(outcome.robust, reach > eps)
    assert 0 < int(outcome.robust.sum()) < 40
    tried = int(outcome.tried.sum())
    assert (outcome.forwards, outcome.backwards) == (4 * tried, 3 * tried)  # 3 steps, 1 judgement


CHEATS = {
    "outside": lambda x, eps: x + 1.01 * eps,
    "beside_the_box": lambda x, eps: torch.where(x < 0.5, -eps / 2, x),
    "not_a_number": lambda x, _: x * torch.nan,
    "shapeless": lambda x, _: x[:1],
    "nothing": lambda *_: None,
    "claims": lambda x, eps: x + eps / 2,  # stays in the ball, and breaks nothing
}


def __getattr__(name):
    """Let an attack be loaded by the name of a cheat."""
    if name not in CHEATS:
        raise AttributeError(name)
    return lambda _f, x, _y, ball, _turn: CHEATS[name](x, ball.eps)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("outside", "left the ball or the box on 5 samples, by up to 0.001"),
        ("beside_the_box", "left the ball or the box"),
        ("not_a_number", "returned values that are not finite on 5 samples"),
        ("shapeless", r"returned \(1, 4\), not samples of shape \(5, 4\)"),
        ("nothing", r"returned NoneType, not samples of shape \(5, 4\)"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_attack_that_cheats_is_named(bad, name, reason, dtype):
    with pytest.raises(EvaluationError, match=f"the attack bad {reason}"):
        bad(name, torch.full((5, 4), 0.3, dtype=dtype))


def moves_its_input(_f, x, y, _ball, _turn):
    """Pretend that samples and labels were others."""
    x += 0.4
    y += 1
    return x


def test_success_is_our_own_judgement_of_samples_that_an_attack_cannot_move(bad):
    x, y = torch.full((5, 4), 0.3), torch.zeros(5, dtype=torch.int64)
    with pytest.raises(EvaluationError, match="left the ball or the box on 5 samples, by up to"):
        bad("moves_its_input", x, y)
    assert torch.equal(x, torch.full((5, 4), 0.3))
    assert not y.any()
    outcome = bad("claims", x)
    assert outcome.robust.all()
    assert outcome.forwards == 5
    torch.testing.assert_close(outcome.distance, torch.full((5,), 0.05))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("no_such_package.attacks:run", "cannot be loaded: ModuleNotFoundError"),
        ("lipaudit.attacks.oracle:nothing", "cannot be loaded: AttributeError"),
    ],
)
def test_an_attack_without_its_function_is_refused_first(radius, function, reason):
    with installed() as patch:
        patch.setitem(ATTACKS, "fgsm", replace(ATTACKS["fgsm"], function=function))
        trials = read_plan("custom:fgsm", radii=[radius("0.1")])
        with pytest.raises(UsageError, match=f"{function} {reason}") as caught:
            require_suitable(trials, "image")
    assert function.partition(".")[0] in caught.value.advice


def test_a_plugin_needs_a_name_of_its_own_that_can_stand_in_an_option(tmp_path):
    assert PRESETS.keys() < RESERVED
    refused = dict.fromkeys((*ATTACKS, *RESERVED), "has a name that is in use")
    refused |= dict.fromkeys(("a,b", "a@b", "a:b", "a b", "-a"), "has an invalid name")
    for number, (name, says) in enumerate(refused.items()):
        with pytest.raises(
            UsageError, match=f"odd{number} has '{name}' among its attacks, which {says}"
        ):
            entries_of(tmp_path / f"{number}", name, f"odd{number}")


def entries_of(folder, name, package):
    """Read all attacks where a package made on the spot adds one by this name."""
    record = f"AttackKind('lipaudit_{package}:attack')"
    source = "from lipaudit.attacks.kinds import AttackKind\n"
    write_package(folder, package, f"{source}WING = Wing(attacks={{{name!r}: {record}}})\n")
    with installed(folder):
        return attack_kinds()
