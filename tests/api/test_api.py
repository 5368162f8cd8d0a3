"""lipaudit from Python: the same figures as the command line, and nothing left behind."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import lipaudit
from lipaudit.errors import InputError, LipauditError, UsageError
from lipaudit.tables.trials import parse_radius
from lipaudit.tables.weakest import find_worst
from tests.commands import read_sections
from tests.nets import Classifier, seeded


@pytest.fixture
def module():
    return seeded(Classifier)


def test_a_module_of_ones_own_is_measured_and_left_as_it_was(module):
    module.train()
    module.attention.eval()
    module.embed.weight.requires_grad_(False)
    modes = [part.training for part in module.modules()]
    trained = [p.requires_grad for p in module.parameters()]
    state = {name: value.clone() for name, value in module.state_dict().items()}
    x, y = torch.rand(6, 3, 4, 4), torch.randint(3, (6,))
    rng = torch.get_rng_state()
    how = {"eps": "0.01", "attack": "fgsm,pgd"}
    report = lipaudit.audit(module, data=(x, y), input_shape=(3, 4, 4), samples=6, **how)
    assert {s.measure for s in report.sections} >= {"bounds", "attention", "jacobian", "attack"}
    assert report.run.model.spec == "Classifier"
    assert [part.training for part in module.modules()] == modes
    assert [p.requires_grad for p in module.parameters()] == trained
    assert all(torch.equal(module.state_dict()[name], value) for name, value in state.items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    assert all(p.grad is None for p in module.parameters())
    assert torch.equal(torch.get_rng_state(), rng)
    with pytest.raises(UsageError, match="labelled"):  # nor does an error change it
        lipaudit.measure(module, "attack", eps="0.1", input_shape=(3, 4, 4))
    assert [part.training for part in module.modules()] == modes
    assert [p.requires_grad for p in module.parameters()] == trained


@pytest.mark.parametrize("made_inside", [False, True])
def test_a_caller_in_inference_mode_gets_the_same_figures(module, made_inside):
    x, y = torch.rand(2, 3, 4, 4), torch.arange(2)
    how = {"input_shape": (3, 4, 4), "eps": "0.05", "attack": "pgd", "steps": 3}
    plain = lipaudit.measure(module, "attack", data=(x, y), **how)
    with torch.inference_mode():
        data = (x.clone(), y.clone()) if made_inside else (x, y)
        report = lipaudit.measure(module, "attack", data=data, **how)
        assert torch.is_inference_mode_enabled()
        assert lipaudit.measure("demo", "jacobian", samples=1).status == "complete"
    assert read_sections(report) == read_sections(plain)


def test_a_scripted_part_of_a_module_is_put_back():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    module = nn.Sequential(nn.Linear(4, 4), scripted).train()
    x, how = torch.rand(2, 4), {"input_shape": (4,), "samples": 2}
    lipaudit.measure(module, "jacobian", data=x, dtype="float64", **how)
    assert all(part.training for part in module.modules())
    assert all(p.requires_grad and p.dtype == torch.float32 for p in module.parameters())


def test_its_figures_are_those_of_the_dense_jacobian_whatever_the_layout_of_arrays(module):
    array = np.random.default_rng(0).random((3, 3, 4, 4), dtype=np.float32)
    fixed = array.copy()
    fixed.flags.writeable = False
    reports = [
        lipaudit.measure(module, "jacobian", data=data, input_shape=(3, 4, 4), samples=3)
        for data in (torch.from_numpy(array), array[::-1].copy()[::-1], fixed, list(array))
    ]
    assert len({report.run.data.suite_id for report in reports}) == 1
    module.eval().double()
    order = torch.randperm(3, generator=torch.Generator().manual_seed(0))
    for i, norm in zip(order, reports[0].section("jacobian").samples["norm"], strict=True):
        x = torch.from_numpy(array[i : i + 1]).double()
        dense = torch.autograd.functional.jacobian(module, x)
        assert norm == pytest.approx(float(torch.linalg.matrix_norm(dense.reshape(3, -1), 2)))


def test_another_precision_is_asked_for_and_put_back(module):
    x = torch.rand(2, 3, 4, 4)
    module.kept = module(x)  # a tensor with a graph: such a module cannot be copied
    module.kept.sum().backward()

    def places():
        return [(id(p), p.data_ptr(), id(p.grad), p.grad.data_ptr()) for p in module.parameters()]

    held = [p.grad for p in module.parameters()]  # so that none takes the place of another
    before, how = places(), {"input_shape": (3, 4, 4), "samples": 2, "dtype": "float64"}
    report = lipaudit.measure(module, "bounds", data=x, **how)
    assert report.run.dtype == "float64"
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert places() == before
    assert all(p.grad is grad for p, grad in zip(module.parameters(), held, strict=True))


def test_a_function_of_a_spec_that_refers_to_the_module_runs_what_is_measured(module):
    """With a buffer of another dtype a copy would be measured, and the original would run."""
    module.register_buffer("steps", torch.zeros(1, dtype=torch.float64))
    x = torch.rand(2, 3, 4, 4)
    spec = lipaudit.ModelSpec(module, (3, 4, 4), call=lambda x, mask: module(x))
    module.train()  # with its dropout
    report = lipaudit.measure(spec, "bounds", data=x, samples=2)
    assert all(row.exact > 0 for row in report.section("bounds").rows)
    assert module.steps.dtype == torch.float64
    assert all(part.training for part in module.modules())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.to("meta"), "embed.weight of Classifier has no values"),
        (lambda m: nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), "1.weight of Sequential has no"),
        (lambda m: torch.jit.script(nn.Sequential(nn.Linear(4, 3))), "is TorchScript"),
    ],
)
def test_a_module_that_cannot_be_read_is_refused(module, change, says):
    with pytest.raises(lipaudit.LipauditError, match=re.escape(says)):
        lipaudit.measure(change(module), "jacobian", input_shape=(3, 4, 4))


def listen():
    """Return an observer, and the list of what begins and advances."""
    observer, events = lipaudit.Observer(), []
    observer.begins = lambda measure, samples: events.append((measure, samples))
    observer.advances = lambda _measure, samples: events.append(samples)
    return observer, events


class Stop(lipaudit.Observer):
    """Ends a run when its first part is finished."""

    def advances(self, measure, samples):
        raise KeyboardInterrupt


def test_no_other_module_goes_on_with_what_one_has_finished(module, tmp_path, monkeypatch):
    """Modules of equal weights may differ in their code: in the number of heads, say."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = {"data": torch.rand(3, 3, 4, 4), "input_shape": (3, 4, 4), "batch_size": 1}
    with pytest.raises(KeyboardInterrupt):
        lipaudit.measure(module, "jacobian", observer=Stop(), **asked)
    assert not list(tmp_path.rglob("*.npz"))
    with pytest.raises(UsageError, match="resume"):
        lipaudit.measure(module, "jacobian", resume=True, **asked)
    with pytest.raises(KeyboardInterrupt):
        lipaudit.measure("demo", "jacobian", samples=2, batch_size=1, observer=Stop())
    assert list(tmp_path.rglob("*.npz"))


@pytest.mark.parametrize("eps", [0.1, [0.1], (parse_radius("1/10"),), "0.1"])
def test_a_radius_may_be_text_a_number_or_a_list(eps):
    report = lipaudit.measure("demo", "attack", attack=["fgsm"], samples=2, eps=eps)
    rows = report.section("attack").rows
    assert [row.attack for row in rows] == ["worst", "fgsm"]
    assert {float(parse_radius(row.eps_text)) for row in rows} == {0.1}


def test_options_have_the_names_of_the_command_line_and_layers_may_be_any_list_of_them():
    asked = [
        lipaudit.measure("demo", "jacobian", samples=1, **{name: "probabilities"})
        for name in ("to", "target")
    ]
    assert read_sections(asked[0]) == read_sections(asked[1])
    assert asked[0].section("jacobian").settings["target"] == "probabilities"
    certified = lipaudit.measure("demo", "certify", samples=1, eps="1e-9", order=1)
    assert certified.section("certify").settings["order"] == "1"
    for layers, chosen in (("0,1", (0, 1)), ([1, 0, 1], (0, 1)), (range(2), (0, 1)), (1, (1,))):
        report = lipaudit.audit("demo", {"attention": {"layers": layers}}, samples=1)
        section = report.section("attention")
        assert section.settings["layers"] == chosen
        assert {row.layer for row in section.rows} == {*chosen}


def test_what_an_audit_is_told_of_a_measure_comes_on_top_of_the_usual():
    for told, eps in (({"eps": 0.2}, "0.2"), ({}, "0.1")):
        report = lipaudit.audit("demo", {"attack": {"attack": "fgsm"}}, samples=2, **told)
        assert [row.eps_text for row in report.section("attack").rows] == [eps] * 2
    report = lipaudit.audit("demo", "jacobian", samples=1)  # one measure needs no list
    measured = [section.measure for section in report.sections]
    assert measured == ["jacobian", "jacobian.shares", "jacobian.paths"]


def measure_data(data):
    return lambda m: lipaudit.measure(m, "jacobian", data=data, input_shape=(3, 4, 4), samples=1)


X = torch.ones(4, 3, 4, 4)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (measure_data(torch.tensor(1.0)), "x has no samples"),
        (measure_data(X[:0]), "x has no samples"),
        (measure_data(X.to(torch.complex64)), "its inputs are torch.complex64"),
        (measure_data([X, torch.zeros(4)]), "data of type list cannot be read as an array"),
        (measure_data((X, torch.zeros(4), 1)), "data of type tuple cannot be read as an array"),
        (measure_data(object()), "data of type object cannot be read as an array"),
        (measure_data({"x": X}), "data of type dict cannot be read as an array"),
        (measure_data(["a", "b"]), "data of type list cannot be read as an array"),
        (measure_data(Path("nowhere.npz")), "there is no data 'nowhere.npz'"),
        (lambda m: lipaudit.measure("demo", "bound"), "no measure 'bound'"),
        (lambda m: lipaudit.measure("demo", "bounds", tools=1), "no option 'tools'"),
        (lambda m: lipaudit.measure("demo", "bounds", input_shape=(1, 8, 8)), "already defines"),
        (lambda m: lipaudit.audit("demo", "bounds", eps="0.1"), "--eps needs a measure attack or"),
        (lambda m: lipaudit.measure("demo", "bounds", samples=0), "--samples"),
        (lambda m: lipaudit.measure(m, "bounds"), "the input shape of Classifier is unknown"),
        (lambda m: lipaudit.measure(m, "bounds", input_shape=(1, 2, 3, 4, 5)), "input_shape"),
        (lambda m: lipaudit.measure(3, "bounds"), "int is not a model"),
        (lambda m: lipaudit.audit("demo", ["bounds"], samples=1, tol=1e-3), "no option 'tol'"),
        (lambda m: lipaudit.audit("demo", []), "no measure was given"),
        (lambda m: lipaudit.measure("demo", "bounds", layers=-1), "counted from 0"),
        (lambda m: lipaudit.measure("demo", "bounds", layers=[]), "counted from 0"),
        (lambda m: lipaudit.audit(m, ["attack"], input_shape=(3, 4, 4)), "attack needs labelled"),
        (lambda m: lipaudit.measure(m, "bounds", input_shape=8), "input_shape 8"),
        (lambda m: lipaudit.render(lipaudit.load("nowhere.json"), "html"), "cannot read"),
    ],
)
def test_what_cannot_be_is_one_clear_error(module, call, says):
    with pytest.raises(lipaudit.LipauditError, match=re.escape(says)):
        call(module)


def test_an_observer_is_told_and_nothing_is_printed(capsys):
    observer, events = listen()
    lipaudit.measure("demo", "attention", samples=10, observer=observer)
    assert events == [("attention", 10), 8, 2]
    assert capsys.readouterr() == ("", "")


def test_what_an_attack_found_is_written_and_a_wrong_path_is_said_before_it_begins(tmp_path):
    observer, events = listen()

    def attack(path):
        options = {"eps": "1/255", "attack": "fgsm", "save_adv": path}
        return lipaudit.measure("demo", "attack", samples=4, observer=observer, **options)

    with pytest.raises(LipauditError, match="cannot write"):
        attack(tmp_path / "nowhere" / "adv.safetensors")
    assert events == []
    attack(tmp_path / "adv.safetensors")
    tensors = load_file(tmp_path / "adv.safetensors")
    assert {name: value.shape[0] for name, value in tensors.items()} == dict.fromkeys(tensors, 4)
    assert tensors.keys() == {"fgsm,linf,1/255", "x", "y"}


def test_a_section_is_a_frame_and_a_report_shows_itself(monkeypatch):
    report = lipaudit.measure("demo", "bounds", samples=2)
    framed = report.section("bounds").frame().to_dict("records")
    monkeypatch.setitem(sys.modules, "pandas", None)
    rows = report.section("bounds").frame()
    assert [list(row) for row in rows] == [list(row) for row in framed]
    assert len(rows) == 12
    assert all(row["sharp"] >= row["exact"] for row in rows)
    assert lipaudit.render([report, report], "html").count(b"A: demo") > 0
    shown = report._repr_html_()
    assert shown.startswith("<iframe")  # the page's style does not reach the notebook's
    assert "&lt;svg" in shown
    for written in (repr(report), str(report)):  # a terminal's: no screens full of numbers
        assert written.startswith("lipaudit: demo\n")
        assert "steepest attention head" in written
        assert len(written.splitlines()) <= 25
    assert len(repr(report.section("bounds").arrays)) < 200


def test_importing_loads_nothing_heavy():
    for package, heavy in (
        ("lipaudit", {"torch", "pydantic", "numpy"}),
        ("lipaudit.report", {"torch", "numpy", "matplotlib", "jinja2", "scipy"}),
        ("lipaudit.gate", {"torch", "scipy", "matplotlib", "rich"}),
    ):
        code = f"import sys, {package}; assert not {heavy} & set(sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True)


def test_every_name_is_typed():
    stub = Path(lipaudit.__file__).with_suffix(".pyi").read_text()
    assert Path(lipaudit.__file__).with_name("py.typed").is_file()
    assert set(re.findall(r"(?<= as )\w+|^\w+(?= = )", stub, re.M)) == set(lipaudit.list_public())
    assert all(getattr(lipaudit, name) is not None for name in dir(lipaudit))
    with pytest.raises(AttributeError):
        _ = lipaudit.nothing


def test_a_report_keeps_the_pictures_of_its_worst_samples():
    report = lipaudit.measure("demo", "attack", samples=24, eps="0.1", attack="fgsm")
    assert list(report.section("attack").examples) == find_worst(report)
    assert len(find_worst(report)) == 10


def test_several_models_get_a_report_each_and_are_ranked(module):
    names, asked = ["demo:robust", "demo"], {"samples": 3, "attack": "pgd", "eps": "0.1"}
    reports = lipaudit.audit(names, ["jacobian", "attack"], **asked)
    assert [report.run.model.spec for report in reports] == names
    alone = lipaudit.audit("demo", ["jacobian", "attack"], **asked)
    assert read_sections(reports[1]) == read_sections(alone)
    ranking = lipaudit.rank(reports)
    assert [model.model for model in ranking.models] == names
    assert b"side by side" in lipaudit.render(reports, "markdown")
    x = torch.rand(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    both = lipaudit.audit([module, module], "jacobian", data=x)
    assert read_sections(both[0]) == read_sections(both[1])
    assert module.training
    with pytest.raises(LipauditError, match="cannot share samples|do not read the same|takes"):
        lipaudit.audit(["demo", module], "jacobian", data=x)
    with pytest.raises(UsageError, match="no model was given"):
        lipaudit.audit([])


def test_a_module_made_in_inference_mode_is_refused():
    with torch.inference_mode():
        module = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
        data = torch.rand(2, 3, 2, 2)
    with pytest.raises(InputError, match="made in torch.inference_mode"):
        lipaudit.measure(module, "jacobian", data=data, input_shape=(3, 2, 2))
