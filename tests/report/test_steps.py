import shlex

import pytest

from lipaudit.cli.commands import build
from lipaudit.report import terminal
from lipaudit.report.page.document import make_page
from lipaudit.report.page.scorecard import make_scorecard
from lipaudit.tables import Note
from lipaudit.tables.worst import worst
from tests.report.conftest import keep


def commands(report) -> list[str]:
    return [command for _, command in make_page(report).steps]


def test_worst_sample_comes_with_its_command(report):
    (first, *_) = worst(report)
    assert f"lipaudit inspect report.json {first[:12]}" in commands(report)


def test_every_command_of_the_scorecard_is_a_step(report):
    known = [line.command for line in make_page(report).scorecard.lines if line.command]
    assert known
    assert set(known) <= set(commands(report))


def test_a_gate_is_offered_on_what_is_complete(report):
    partial = report.model_copy(update={"status": "partial"})
    assert any(" --baseline report.json" in each for each in commands(report))
    assert not any("--baseline" in each for each in commands(partial))
    assert commands(partial)[0] == "lipaudit audit demo --resume"
    resumed = report.run.model_copy(update={"command": "lipaudit audit demo --resume"})
    assert commands(partial.model_copy(update={"run": resumed}))[0] == resumed.command


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        ("random-data", "Measure on real samples: the current ones are noise."),
        ("random-weights", "Load trained weights: the current ones are random."),
    ],
)
def test_noise_calls_for_a_model_in_use(report, code, advice):
    note = Note(level="warning", code=code, text="noise")
    first = report.sections[0].model_copy(update={"notes": (note,)})
    noise = keep(report, first, *report.sections[1:])
    text, command = make_page(noise).steps[0]
    assert text == advice
    assert command.endswith("--data DATA")
    assert not any(each.endswith("--data DATA") for each in commands(report))
    assert not any("--baseline" in each for each in commands(noise))


def test_every_step_says_what_its_command_is_for(report):
    steps, card = make_page(report).steps, make_scorecard(report)
    (line,) = [line for line in card.lines if "--adversarial" in line.command]
    ball, left = line.label.removeprefix("robust accuracy, "), f"{100 * line.value:.1f}%"
    aim = f"Train against attacks: at {ball} only {left} of the samples stay right."
    assert (aim, line.command) in steps
    assert all(text.endswith(".") for text, _ in steps)


def test_what_was_not_attacked_calls_for_an_attack(report):
    attack = [each for each in commands(report) if "attack" in each]
    calm = keep(report, report.section("jacobian"))
    assert attack == []
    assert any(shlex.split(each)[1] == "attack" for each in commands(calm))


def test_a_terminal_lists_each_step_once(report):
    text = " ".join(terminal.render(make_page(report), width=80).decode().split())
    for each in commands(report):
        assert text.count(each) == 1


def test_commands_are_those_of_the_tool(report):
    known = {command.name for command in build().registered_commands}
    for each in commands(report):
        assert shlex.split(each)[1] in known
