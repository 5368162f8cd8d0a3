"""Commands that a report suggests, run as they are printed; and what it says at chance level."""

import json
import sys
from pathlib import Path
from shlex import split

import numpy as np
import pytest

from lipaudit.data.loading import DataOptions, load_data
from lipaudit.models.sources.loader import load_net
from lipaudit.report import of_reports
from lipaudit.report.opening import CHANCE
from lipaudit.schema import load
from tests.attacks.text_folders import FOLDERS, save
from tests.commands import invoke

pytestmark = pytest.mark.usefixtures("blank_charts")


def measure(monkeypatch, *args: str):
    """Run a command as the process that it names itself, with the report in report.json."""
    words = [*args, "-o", "report.json", "-q"]
    monkeypatch.setattr(sys, "argv", ["lipaudit", *words])
    invoke(*words)
    return load(Path("report.json"))


def suggest(report) -> list[str]:
    """Return the commands of the chapter of next steps."""
    chapters = [c for c in of_reports(report).page().chapters if c.name == "next-steps"]
    return [command for c in chapters for _, _, command in c.blocks[0].points]


def save_digits(path: str, samples: int, shift: int = 0) -> None:
    """Save digits of the demo, with labels that many classes off."""
    net = load_net("demo")
    batch = load_data("demo", net, DataOptions(samples=samples)).batch
    np.savez(path, x=batch.x.numpy(), y=(batch.y.numpy() + shift) % 10)


def save_texts(path: str) -> None:
    rows = [{"title": text, "label": i % 3} for i, text in enumerate(["a good film", "bad"] * 3)]
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("command", "aims"),
    [
        ("jacobian demo --data digits.npz", ["jacobian", "attack", "inspect", "gate"]),
        ("attack demo -n 2 --eps 0.1 --attack fgsm", ["attack", "inspect", "gate"]),
        ("bounds demo -n 1 --layers 0", ["gate"]),
        (
            "jacobian ./bert --data t.jsonl --text-column title --max-tokens 9",
            ["jacobian", "attack", "inspect"],
        ),
    ],
)
def test_every_suggested_command_runs_as_it_is_printed(monkeypatch, command, aims):
    save_digits("digits.npz", 2)
    if "bert" in command:
        folder = next(folder for folder in FOLDERS if folder.name == "bert, characters")
        save(folder, Path("bert"))
        save_texts("t.jsonl")
    report = measure(monkeypatch, *split(command))
    suggested = suggest(report)
    assert [split(each)[1] for each in suggested][: len(aims)] == aims
    for each in suggested:
        # The data have two samples: others stand in for the larger data that are asked for.
        name, *args = split(each.replace("LARGER", "t.jsonl" if "bert" in command else "demo"))
        assert name == "lipaudit"
        invoke(*args)


def test_labels_of_another_order_are_named_first_and_no_baseline_is_advised(monkeypatch):
    save_digits("wrong.npz", 32, shift=1)
    args = ("attack", "demo", "--data", "wrong.npz", "--eps", "0.1", "--attack", "fgsm")
    report = measure(monkeypatch, *args)
    page = of_reports(report).page()
    answer = page.chapters[0].blocks[0]
    assert answer.text.startswith("Check the labels and the order of the classes")
    assert answer.tone == "broken"
    first, *others = suggest(report)
    assert first == "lipaudit check demo --data wrong.npz"
    assert not any("baseline" in each for each in others)
    invoke(*split(first)[1:])
    done = invoke("audit", *args[1:-2], "--only", "attack", "--run-dir", "run")
    assert "baseline" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("next:   Check the labels")
    assert CHANCE in {note.code for note in load(Path("run/report.json")).section("attack").notes}


@pytest.mark.parametrize(
    ("eps", "says"),
    [
        ("0.03", "% survive fgsm, pgd at linf 0.03 of the pixel range 0 to 1 (95% CI "),
        ("0", "0 of 4 correct"),
    ],
)
def test_few_samples_are_counted_and_no_loss_is_called_chance(monkeypatch, eps, says):
    report = measure(
        monkeypatch, "attack", "demo", "-n", "4", "--eps", eps, "--attack", "fgsm,pgd"
    )
    text = of_reports(report).page().chapters[0].blocks[0].text
    (section,) = report.sections
    correct = sum(section.samples["correct"])
    (robust,) = {row.robust for row in section.rows if row.attack == "worst"}
    broken = round(correct - 4 * robust)
    assert says in text
    assert f"{broken} of {correct:.0f} correct samples broken" in text
    assert "chance" not in text


def test_files_are_named_where_nothing_else_is_printed(audited, monkeypatch):
    folder, _ = audited
    monkeypatch.chdir(folder)
    saved = "run/report.json"
    for words in (("report", saved), ("inspect", saved), ("compare", saved, saved)):
        done = invoke(*words, "-o", "one.json", "-o", "two.html")
        assert done.stderr.splitlines()[-2:] == ["wrote one.json", "wrote two.html"]
        assert done.stdout == ""
        assert "wrote" not in invoke(*words, "-o", "one.json", "-q").stderr
        assert "wrote" not in invoke(*words).stderr
