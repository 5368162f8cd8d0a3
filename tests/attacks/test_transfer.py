"""Examples of another model, and signs of masked gradients: caught where made, else absent."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lipaudit.attacks.transfer import MADE_OF
from lipaudit.data.batch import Batch
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.models.sources.loader import load_net
from tests.commands import invoke, refuse

# The weights of the demo, behind logits so large that the gradient of their cross-entropy
# underflows, or behind a rounding of the input, whose derivative is 0.
MASKED = """
import torch
from lipaudit import ModelSpec
from lipaudit.models.sources.loader import load_net

class Masked(torch.nn.Module):
    def __init__(self, before, times):
        super().__init__()
        self.inner, self.before, self.times = load_net("demo").module, before, times

    def forward(self, x):
        return self.times * self.inner(self.before(x))

def hot():
    return ModelSpec(Masked(torch.nn.Identity(), 1000), (1, 8, 8), mean=(0.5,), std=(0.5,))

def rounded():
    return ModelSpec(Masked(lambda x: (8 * x).round() / 8, 1), (1, 8, 8), mean=(0.5,), std=(0.5,))
"""
MODELS = {"demo": "demo:robust", "demo:robust": "demo"}
MODELS |= dict.fromkeys(("py:masked.py:hot", "py:masked.py:rounded"), "demo")


@pytest.fixture(autouse=True)
def _masked_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("masked.py").write_text(MASKED)


def attack(model: str, *args: object) -> dict:
    how = ("attack", model, "--data", "demo", "-n", "32", *args)
    return json.loads(invoke(*how, "-q", "-f", "json").stdout)["sections"][0]


def save_examples(model: str = "demo", *args: object) -> str:
    attack(model, "--attack", "pgd", "--eps", "0.1,0.5", "--save-adv", "a.safetensors", *args)
    return "a.safetensors"


def read_signs(section: dict) -> str:
    return "".join(n["text"] for n in section["notes"] if n["code"] == "gradient-masking")


@pytest.mark.parametrize(("model", "other"), MODELS.items())
@pytest.mark.parametrize(
    ("sign", "queries"),
    [
        ("transfer", None),
        ("survive", None),
        ("square", 300),
        pytest.param("square", 5000, marks=pytest.mark.ci),
    ],
)
def test_each_sign_names_masked_gradients_and_no_honest_ones(model, other, sign, queries):
    eps = "0.5" if sign == "survive" else "0.1"
    given = ("--attack", "pgd,square" if queries else "pgd", "--eps", eps, "--steps", 5)
    more = ("--transfer", save_examples(other)) if sign == "transfer" else ()
    more = ("--queries", queries) if queries else more
    signs = read_signs(attack(model, *given, *more))
    assert (sign in signs) == model.startswith("py:"), signs


def test_examples_are_judged_as_they_are_moved_into_each_ball():
    """Each saved tensor, clamped to the ball and the box, is passed forward here."""
    path = save_examples()
    found = attack("demo:robust", "--attack", "pgd", "--eps", "0.05,0.5", "--transfer", path)
    net = load_net("demo:robust")
    batch, saved = load_data("demo", net, DataOptions(samples=32)).batch, load_file(path)
    stands = torch.ones(32, dtype=torch.bool)
    for eps in (0, 0.05, 0.5):  # what broke a sample in a smaller ball counts in a larger one
        for name in ("pgd,linf,0.1", "pgd,linf,0.5"):
            z = (batch.x + (saved[name] - batch.x).clamp(-eps, eps)).clamp(0, 1)
            with torch.no_grad():
                stands &= net.output(Batch(z, None, batch.ids)).argmax(1) == batch.y
        if eps:
            flags = found["samples"][f"robust@transfer,linf,{eps}"]
            assert [bool(flag) for flag in flags] == stands.tolist()
            worst = [found["samples"][f"robust@{n},linf,{eps}"] for n in ("worst", "pgd")]
            assert worst[0] == [min(pair) for pair in zip(flags, worst[1], strict=True)]
    assert 0 < int(stands.sum()) < 32


def test_the_order_of_samples_does_not_matter_and_files_add_up():
    """Rows are found by id, so fewer samples and a shuffled file give the same flags."""
    path = save_examples()
    with safe_open(path, "pt") as file:
        names = json.loads(file.metadata()[MADE_OF])
    turned = {name: tensor.flip(0).contiguous() for name, tensor in load_file(path).items()}
    save_file(turned, "b.safetensors", {MADE_OF: json.dumps(names[::-1])})
    how = ("demo:robust", "--attack", "transfer", "--eps", "0.5")
    both = [attack(*how, "--transfer", name) for name in (path, "b.safetensors")]
    assert both[0]["samples"] == both[1]["samples"]
    twice = attack(*how, "--transfer", path, "--transfer", "b.safetensors")
    assert twice["samples"] == both[0]["samples"]
    assert twice["rows"][0]["forwards"] > both[0]["rows"][0]["forwards"]
    codes = [note["code"] for note in twice["notes"]]
    assert codes.count("transferred-examples") == 2


def test_what_is_no_file_of_examples_is_refused():
    path = save_examples()
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        meta = file.metadata()
    Path("cut.safetensors").write_bytes(Path(path).read_bytes()[:300])
    save_file(tensors, "unknown.safetensors")
    save_file(tensors, "odd.safetensors", {MADE_OF: "[[1]]"})
    small = {n: t if n == "y" else t[..., :4].contiguous() for n, t in tensors.items()}
    save_file(small, "small.safetensors", meta)
    save_file(tensors | {"pgd,linf,0.1": tensors["x"] / 0}, "nan.safetensors", meta)
    how = ("attack", "demo", "-n", "32", "--attack", "pgd", "--eps", "0.1", "--transfer")
    for name, says in {
        "no": "there is no file", "cut": "not a complete", "unknown": "no adversarial examples",
        "odd": "no adversarial examples", "small": "not samples of shape (1, 8, 8)",
        "nan": "not finite",
    }.items():  # fmt: skip
        refuse(4, says, *how, f"{name}.safetensors")
    refuse(4, "no examples of 8 of the 40 samples", *how, path, "-n", "40")
    refuse(2, "needs the examples of another model", *how[:4], "--attack", "transfer", "--eps", 1)
    refuse(2, "transfer needs a ball", *how[:4], "--eps", "1patch", "--transfer", path)


def test_a_gate_tries_the_examples_again_and_judges_them_by_a_rule():
    path = save_examples()
    rule = ("--fail-on", "attack.robust@transfer,linf,0.1 >= -2pp")
    attack("demo:robust", "--attack", "pgd", "--eps", "0.1", "--transfer", path, "-o", "b.json")
    refuse(5, "tried examples of another model", "gate", "demo", "-b", "b.json", *rule)
    how = ("--baseline", "b.json", "--transfer", path, "--report", "now.json", *rule)
    assert "transfer,linf,0.1" in invoke("gate", "demo", *how, code=1).stdout
    invoke("gate", "demo:robust", *how)


def test_a_gate_and_a_comparison_find_the_examples_that_the_baseline_saved():
    """Beside the report or at the old path, with the contents of then: else none is tried."""
    Path("then").mkdir()
    how = ("--attack", "pgd", "--eps", "0.1,0.5", "--save-adv", "a.safetensors")
    attack("demo", *how, "-o", "then/b.json")
    by_hand = ("demo:robust", "--attack", "pgd", "--eps", "0.1,0.5", "--transfer", "a.safetensors")
    rows = [row | {"seconds": None} for row in attack(*by_hand)["rows"]]

    def measure_again(*command: object) -> tuple[list[dict], str]:
        says = invoke(*command, "--report", "now.json", code=None).stderr
        section = json.loads(Path("now.json").read_text())["sections"][0]
        return [row | {"seconds": None} for row in section["rows"]], says

    commands = (
        ("gate", "demo:robust", "-b", "then/b.json"),
        ("compare", "then/b.json", "demo:robust"),
    )
    for command in commands:
        assert measure_again(*command)[0] == rows
    attack("demo:robust", *how[:4], "-o", "new.json")
    both = invoke("compare", "then/b.json", "new.json", "--details", columns=200).stdout
    assert "the examples that the baseline saved (a.safetensors) were not tried again" in both
    Path("a.safetensors").rename("then/a.safetensors")
    found, says = measure_again(*commands[0])
    assert found == rows
    assert "then/a.safetensors" in says
    save_file(load_file("then/a.safetensors"), "then/a.safetensors")  # without the samples' ids
    found, says = measure_again(*commands[0])
    assert {row["attack"] for row in found} == {"worst", "pgd"}
    assert "moved or changed" in says


def test_what_transfers_nothing_is_not_tried_again():
    """Patches have no ball: their examples are saved, but no attack transfers them."""
    how = ("--attack", "patch", "--eps", "1patch", "--save-adv", "a.safetensors")
    attack("demo", *how, "-o", "b.json")
    invoke("gate", "demo", "-b", "b.json", "--report", "now.json")
