"""A name that nothing has is met by the one that was meant, wherever a name is given."""

import ast
import shlex
from pathlib import Path

import pytest

import lipaudit
from tests.commands import invoke

SOURCES = sorted(Path(lipaudit.__file__).parent.rglob("*.py"))


def read_refusal(*args: str) -> str:
    """Run a command that fails; return what it says."""
    done = invoke(*args, code=None)
    assert done.exit_code in (2, 4, 5), done.output
    return done.stderr


@pytest.mark.parametrize(
    ("args", "meant"),
    [
        ("boundz demo", "bounds"),
        ("baseline sav x.json", "save"),
        ("bounds demo --sample 3", "--samples"),
        ("bounds dmeo", "demo"),
        ("bounds demo:jasmine", "jasmin"),
        ("bounds jasmine", "demo:jasmin"),
        ("bounds tim:vit_tiny_patch16_22", "timm:vit_tiny_patch16_224"),
        ("bounds vit_tinny_patch16_224", "timm:vit_tiny_patch16_224"),
        ("bounds timm:vit_tinny_patch16_224", "vit_tiny_patch16_224"),
        ("bounds py:mine.py:modle", "model"),
        ("bounds mine.py:model", "py:mine.py:model"),
        ("bounds mine.pt", "mine.py"),
        ("attack demo --eps 0.1 --attack pdg", "pgd"),
        ("attack demo --eps 0.1 --attack fgsm,sqare", "square"),
        ("attack demo --eps 0.1 --attack custom:apgd-c", "apgd-ce"),
        ("attack demo --eps 0.1 --attack standart", "standard"),
        ("attack demo --eps 0.1 --norm linff", "linf"),
        ("jacobian demo --to logit", "logits"),
        ("jacobian demo --from pixel", "pixels"),
        ("scaling demo --mode real,adverserial", "adversarial"),
        ("scaling demo --mask casual", "causal"),
        ("train demo --optimizer sdg", "sgd"),
        ("train demo --penalty jasmine", "jasmin"),
        ("bounds demo --dtype float46", "float64"),
        ("bounds demo --data demo:trian", "demo:train"),
        ("bounds demo --data min.py", "mine.py"),
        ("bounds demo -f jsn", "json"),
        ("bounds demo -o x.jsno", ".json"),
        ("report mine.p", "mine.py"),
        ("explain sharpp", "sharp"),
        ("models vit_tinny", "vit_tiny_patch16_224"),
    ],
)
def test_the_name_that_was_meant_is_named(args, meant):
    Path("mine.py").write_text("def model():\n    pass\n")
    page = read_refusal(*shlex.split(args))
    assert meant in page.replace("Possible options", "Did you mean").partition("Did you mean")[2]


@pytest.mark.parametrize(
    ("text", "meant"), [("sample = 3", "'samples'"), ("dtype = 'flaot32'", "'float32'")]
)
def test_so_is_a_name_of_the_configuration(text, meant):
    Path("pyproject.toml").write_text(f"[tool.lipaudit]\n{text}\n")
    assert f"Did you mean {meant}" in read_refusal("bounds", "demo")


def test_names_of_timm_are_those_that_timm_lists():
    import timm

    from lipaudit.models.sources import timm_names

    assert list(timm_names()) == sorted(timm.list_models())


def test_one_function_says_what_was_meant():
    users = [path.name for path in SOURCES if "get_close_matches" in path.read_text()]
    assert users == ["errors.py"]


def test_whoever_calls_a_name_unknown_says_which_was_meant():
    says = ('Error(f"unknown ', 'message = f"unknown ')
    refusing = [f for path in SOURCES for f in functions(path) if any(s in f for s in says)]
    assert len(refusing) > 3
    assert [body for body in refusing if "suggestion(" not in body] == []


def functions(path: Path) -> list[str]:
    text = path.read_text()
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    return ["\n".join(text.splitlines()[n.lineno - 1 : n.end_lineno]) for n in nodes]
