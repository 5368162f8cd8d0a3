"""Predictions in the arithmetic of deployment: those of a plain loop under `torch.autocast`."""

from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import lipaudit
from lipaudit.engine.prepare import Request, prepare
from lipaudit.engine.results import identify
from lipaudit.errors import EvaluationError, UsageError
from lipaudit.gate import judge
from lipaudit.measures import option_types
from lipaudit.models import precision
from lipaudit.models.precision import exact_arithmetic
from lipaudit.settings import RunOptions
from tests.commands import invoke, refuse
from tests.gate.cases import attack, flags, report
from tests.nets import TEXT, Calls, Classifier, draw, hf_net, own_batch, own_net, seeded

CPU = torch.device("cpu")
HALVES = ("bfloat16", "float16")


class CastsItself(nn.Module):
    """Parts in float32 whatever the caller asks for, and one that is always rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        z = self.first(x).tanh()
        with torch.autocast("cpu", enabled=False):
            z = self.second(z.float()).tanh()
        return self.head(z.mean(1).to(torch.bfloat16).float())


MODULES = {
    "rounded": lambda: Classifier(tokens=4, width=6, classes=4),
    "casts itself": CastsItself,
    "returns half": lambda: Calls(lambda head, x: head(x.mean(1)), nn.Linear(6, 4)),
}


def loop(module: nn.Module, x: torch.Tensor, name: str, size: int = 64) -> torch.Tensor:
    """Predict as a program does that knows nothing of lipaudit."""
    with torch.no_grad(), torch.autocast("cpu", dtype=getattr(torch, name)):
        return torch.cat([module.eval()(part).argmax(1) for part in x.split(size)])


@torch.no_grad()
def find_doubtful(module: nn.Module, count: int) -> torch.Tensor:
    """Return samples whose two likeliest classes are close, so that rounding decides."""
    x = draw(3, 64 * count, 4, 6)
    first, second = module(x).topk(2, dim=1)[0].T
    return x[(first - second).argsort()[:count]]


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("kind", MODULES)
def test_accuracy_and_what_is_broken_are_those_of_a_plain_loop(kind, name, tmp_path):
    module = seeded(MODULES[kind]).eval()
    x = find_doubtful(module, 256)
    exact = module(x).argmax(1)
    y = loop(module, x, name)
    assert (y != exact).any()  # rounding turns some
    run = {"attack": "pgd", "norm": "l2", "eps": "0.02", "steps": 3, "samples": 256}
    path = tmp_path / "adv.safetensors"
    found = lipaudit.measure(
        seeded(MODULES[kind]), "attack", data=(x, y), save_adv=path, autocast=name, **run
    )
    columns = found.section("attack").samples
    # Samples are drawn in another order: their labels are the predictions of the plain loop.
    assert columns["predicted"] == columns["label"]
    assert all(columns["correct"])
    plain = lipaudit.measure(seeded(MODULES[kind]), "attack", data=(x, y), **run)
    assert sum(plain.section("attack").samples["correct"]) == int((y == exact).sum()) < 256
    stored = load_file(path)
    robust = torch.tensor(columns["robust@pgd,l2,0.02"]).bool()
    assert 0 < int(robust.sum()) < 256
    adversarial = stored["x"].reshape(256, 4, 6)
    right = loop(module, adversarial, name, size=1) == torch.tensor(columns["label"])
    assert torch.equal(right, robust)


def test_an_attack_follows_the_exact_gradient_of_the_deployed_scores():
    net, x = own_net(seeded(MODULES["rounded"]), (4, 6)), draw(0, 5, 4, 6)
    deployed, batch = net.deploy("bfloat16"), own_batch(x)
    points = [x.clone().requires_grad_() for _ in range(2)]
    with exact_arithmetic(CPU):
        scores = [each.forward(z, batch) for each, z in zip((net, deployed), points, strict=True)]
        gradients = [
            torch.autograd.grad(s[:, 1].sum(), z)[0] for s, z in zip(scores, points, strict=True)
        ]
        assert torch.equal(*gradients)
        assert not torch.equal(*scores)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(scores[1], net.module(x).float())
        # Without a gradient, the model runs once.
        calls = []
        net.module.register_forward_hook(lambda *_: calls.append(1))
        with torch.no_grad():
            deployed.forward(x, batch)
        assert len(calls) == 1
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("name", HALVES)
def test_texts_are_read_as_the_plain_model_reads_them(name):
    """Also where the embedding itself is rounded: its rounded output is the point of a sample."""
    config = transformers.BertConfig(**TEXT, num_labels=5)
    module = seeded(lambda: transformers.BertForSequenceClassification(config)).eval()
    net, ids = hf_net(module), torch.arange(1, 49).reshape(6, 8)
    for entry in (net.entry, nn.Sequential(net.entry, seeded(lambda: nn.Linear(32, 32)))):
        module.bert.embeddings.word_embeddings = entry
        changed = replace(net, entry=entry).deploy(name)
        batch = own_batch(ids)
        with torch.autocast("cpu", dtype=getattr(torch, name)), torch.no_grad():
            plain = module(input_ids=ids).logits.float()
        with exact_arithmetic(CPU), torch.no_grad():
            point = changed.point(batch)
            assert point.dtype == torch.float32
            assert torch.equal(changed.output(batch), plain)
            assert torch.equal(changed.forward(point, batch), plain)


def test_an_overflow_of_float16_names_the_sample_and_the_other_half_precision():
    def run(head, x):
        return head(x.mean(1) * 1e5)

    x = draw(1, 8, 4, 6)
    data = (x, torch.zeros(8, dtype=torch.long))
    how = {"attack": "fgsm", "norm": "l2", "eps": "0.1", "samples": 8}
    module = Calls(run, seeded(lambda: nn.Linear(6, 4)))
    lipaudit.measure(module, "attack", data=data, **how)
    lipaudit.measure(module, "attack", data=data, autocast="bfloat16", **how)
    with pytest.raises(EvaluationError, match="output is not finite") as caught:
        lipaudit.measure(module, "attack", data=data, autocast="float16", **how)
    assert "--autocast bfloat16" in caught.value.advice


def test_what_torch_or_the_model_cannot_run_is_refused(monkeypatch):
    def run(head, x):
        rounded = x.mean(1).to(torch.get_autocast_dtype("cpu"))
        if torch.is_autocast_enabled("cpu") and rounded.dtype == torch.float16:
            raise RuntimeError("\"thing\" not implemented for 'Half'")
        return head(x.mean(1))

    data = draw(1, 2, 4, 6), torch.zeros(2, dtype=torch.long)
    how = {"attack": "fgsm", "norm": "l2", "eps": "0.1", "data": data}
    module = Calls(run, nn.Linear(6, 4))
    with pytest.raises(UsageError, match="--autocast float16: .* not implemented for 'Half'"):
        lipaudit.measure(module, "attack", autocast="float16", **how)
    # As torch does where it supports a dtype not at all: it warns, and rounds nothing.
    monkeypatch.setattr(precision.torch, "autocast", lambda *_, **__: torch.enable_grad())
    with pytest.raises(UsageError, match="bfloat16: torch .* does not support it on cpu"):
        lipaudit.measure(module, "attack", autocast="bfloat16", **how)


def test_it_is_refused_where_it_rounds_nothing():
    refuse(2, "--autocast has no effect on bounds", "bounds", "demo", "--autocast", "bfloat16")
    line = ("attack", "demo", "--eps", "0.1", "--autocast", "bfloat16", "--dtype", "float64")
    refuse(2, "--dtype is float64", *line)
    off = Calls(lambda part, x: part(x), CastsItself())
    off.forward = torch.autocast("cpu", enabled=False)(off.forward)
    data = draw(1, 2, 4, 6), torch.zeros(2, dtype=torch.long)
    how = {"attack": "fgsm", "norm": "l2", "eps": "0.1", "data": data, "autocast": "bfloat16"}
    notes = lipaudit.measure(off, "attack", **how).section("attack").notes
    (note,) = (each for each in notes if each.code == "autocast")
    assert note.level == "warning"
    assert "does not change the output" in note.text


def test_corrupted_copies_are_judged_in_it_and_a_training_refuses_it():
    module = Calls(lambda head, x: head(x.flatten(1)), seeded(lambda: nn.Linear(64, 4))).eval()
    x = draw(5, 8192, 1, 8, 8).sigmoid()
    with torch.no_grad():
        first, second = module(x).topk(2, dim=1)[0].T
    x = x[(first - second).argsort()[:256]]
    y = loop(module, x, "bfloat16")
    how = {"data": (x, y), "corruption": "contrast", "severity": "1", "samples": 256}
    found = [lipaudit.measure(module, "corrupt", autocast=a, **how) for a in (None, "bfloat16")]
    counts = [sum(each.section("corrupt").samples["correct"]) for each in found]
    assert counts[0] < counts[1] == 256
    refuse(2, "--autocast has no effect on train", "train", "demo", "--autocast", "bfloat16")


def test_norms_are_not_rounded_and_the_report_says_what_is():
    how = {"samples": 4, "attack": {"attack": "fgsm", "eps": "0.1"}}
    measures = {"jacobian": {}, "attack": {"attack": "fgsm", "eps": "0.1"}}
    del how["attack"]
    plain = lipaudit.audit("demo", measures, **how)
    deployed = lipaudit.audit("demo", measures, autocast="bfloat16", **how)
    assert plain.section("jacobian").samples == deployed.section("jacobian").samples
    assert deployed.run.label == "demo bfloat16"
    page = lipaudit.render(deployed, "markdown").decode()
    assert "predictions under autocast in bfloat16" in page
    assert "Norms and bounds are not rounded" in page
    assert "autocast" not in lipaudit.render(plain, "markdown").decode()


def test_it_is_part_of_the_identity_of_a_run():
    options = {"attack": option_types()["attack"].parse({"attack": "fgsm", "eps": "0.1"})}
    found = []
    for name in (None, *HALVES):
        job = prepare(Request("demo", options, RunOptions.parse({"samples": 2, "autocast": name})))
        found.append(str(identify(job, "attack", options["attack"])))
    assert len(set(found)) == 3


def test_a_model_is_compared_and_judged_as_it_ships(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    invoke("attack", "demo", "--attack", "fgsm", "--eps", "0.1", "-n", "32", "-q", "-o", "a.json")
    ship = ("--autocast", "bfloat16", "--quantize", "int4:16", "-q")
    done = invoke("gate", "demo", "-b", "a.json", *ship, "--report", "b.json", code=None)
    assert "autocast: not given became bfloat16" in " ".join(done.stdout.split())
    assert "demo int4:16 bfloat16 against demo" in done.stdout
    # The baseline's arithmetic is repeated.
    again = invoke("gate", "demo", "-b", "b.json", "-q", "--report", "c.json")
    assert "demo int4:16 bfloat16 against demo int4:16 bfloat16" in again.stdout
    said = invoke("compare", "a.json", "demo", *ship).stdout
    assert "demo int4:16 bfloat16" in said


def test_another_arithmetic_is_another_model():
    """Other starts of one model are no change; of another arithmetic they are."""
    before = report(attack(flags(100)))
    for autocast, status in (({}, "unchanged"), ({"autocast": "bfloat16"}, "regressed")):
        now = report(attack(flags(40), seed=1), options=autocast)
        robust = [v for v in judge(now, before).verdicts if "robust" in v.metric]
        assert [verdict.status for verdict in robust] == [status]
