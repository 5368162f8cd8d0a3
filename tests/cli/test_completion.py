"""What a shell offers behind a half-typed word, by the completion of a real process."""

import os
import shutil
import subprocess
import sys

import pytest
from typer.main import get_command

from lipaudit.cli.commands import build
from lipaudit.cli.options import complete_words
from lipaudit.gate.rules import metrics
from lipaudit.measures import option_types
from lipaudit.models.sources.names import timm_names
from lipaudit.settings import Recipe, RunOptions

PROGRAM = f"#!{sys.executable}\nfrom lipaudit.cli import main\nmain()\n"
HEAVY = "\nassert not {'torch', 'timm', 'transformers', 'matplotlib'} & set(sys.modules)\n"


FITTING = [
    ("bounds demo", ["demo", "demo:jasmin", "demo:robust", "demo:standard"]),
    ("bounds timm:vit_tiny", ["timm:vit_tiny_patch16_224"]),
    ("bounds demo --format j", ["json", "junit"]),
    ("attack demo --norm l", ["linf", "l2"]),
    ("attack demo --attack fgsm,ap", ["fgsm,apgd-ce", "fgsm,apgd-t"]),
    ("scaling demo --mode real,a", ["real,adversarial", "real,ascent"]),
    ("train demo --penalty ", ["jasmin", "specformer"]),
    ("gate r.json --fail-on jacobian.n", ["jacobian.norm"]),
    ("explain theor", ["theorem3", "theorem3_g1"]),
    ("report r.json -f ma", ["markdown"]),
    ("report r.json -f la", ["latex"]),
    ("models vit_tiny", ["vit_tiny_patch16_224"]),
]
"""Words that are typed, the last by half, and some of what fits them."""


def test_what_fits_is_offered_without_loading_torch():
    """As zsh and fish ask for it."""
    code = (
        "import os, sys\nfrom lipaudit.cli import main\nsys.argv = ['lipaudit']\n"
        f"for line in {[line for line, _ in FITTING]}:\n"
        "    os.environ['_TYPER_COMPLETE_ARGS'] = f'lipaudit {line}'\n"
        f"    try: main()\n    except SystemExit: print('#')\n{HEAVY}"
    )
    env = {"_LIPAUDIT_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    command, env = [sys.executable, "-c", code], os.environ | env
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    pages = done.stdout.split("#\n")[:-1]
    for (line, among), page in zip(FITTING, pages, strict=True):
        said = [each.partition("\t")[0] for each in page.splitlines()]
        assert set(among) <= set(said), line
        assert all(each.startswith(line.rpartition(" ")[2]) for each in said), line


def parameters() -> dict[tuple[str, str], object]:
    return {(name, parameter.name): parameter
            for name, command in get_command(build()).commands.items()
            for parameter in command.params}  # fmt: skip


def test_every_option_that_takes_words_offers_all_of_them():
    known = parameters()
    groups = {**option_types(), "train": Recipe} | {"bounds ": RunOptions}
    for command, group in groups.items():
        for option in group.options().values():
            item = known[command.strip(), option.name]._custom_shell_complete(None, None, "")
            assert [each.value for each in item] == list(option.values()), option


def test_models_metrics_and_names_of_timm_are_offered_whole():
    known = parameters()
    models = known["bounds", "model"]._custom_shell_complete(None, None, "timm:")
    assert [item.value for item in models] == [f"timm:{name}" for name in timm_names()]
    rules = known["gate", "fail_on"]._custom_shell_complete(None, None, "")
    assert [item.value for item in rules] == list(metrics())


def test_only_the_last_of_several_words_is_completed():
    assert complete_words(lambda: ("a", "b"), commas=True)("x,y,") == ["x,y,a", "x,y,b"]
    assert complete_words(lambda: ("a", "b"))("x,y,") == ["a", "b"]


PIECES = [
    ("bounds demo : j", "jasmin"),
    ("bounds demo :", "standard jasmin robust"),
    ("attack demo --norm = li", "linf"),
    ("bounds demo : robust --dtype float6", "float64"),
    ("boun", "bounds"),
]
"""Words as bash breaks them, at colons and equals signs, and the replies."""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_which_breaks_words_at_colons_gets_the_last_piece(tmp_path):
    program = tmp_path / "lipaudit"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    # Typer's own switch: else it looks for a shell among the parents of the process.
    env = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    shown = [program, "--show-completion", "bash"]
    script = subprocess.run(shown, capture_output=True, text=True, check=True, env=env).stdout
    function = next(w for w in script.split() if w.endswith("()")).removesuffix("()")
    asks = [
        f"COMP_WORDS=(lipaudit {words})\nCOMP_CWORD={len(words.split())}\n"
        f'{function} {program}\necho "${{COMPREPLY[@]}}"\n'
        for words, _ in PIECES
    ]
    command = ["bash", "-c", "\n".join([script, *asks])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.splitlines() == [replies for _, replies in PIECES], done.stderr
