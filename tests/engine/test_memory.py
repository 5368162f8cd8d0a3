"""What measures take of memory, what there is of it, and what is done where it runs out."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lipaudit
from lipaudit.data.batch import Share
from lipaudit.engine.execute import advise_on_memory, execute
from lipaudit.engine.prepare import Request, prepare
from lipaudit.engine.preview import footprint
from lipaudit.measures import AuditOptions, load_measures
from lipaudit.models.memory import Footprint, Held, find_free_memory
from lipaudit.settings import RunOptions
from tests.commands import break_measure, replace_parts
from tests.live import Live

CPU = torch.device("cpu")
NAMES = ("bounds", "attention", "jacobian", "attack")


def job(samples=8, **run):
    """All measures of the demo on a few samples, of one layer."""
    plan = AuditOptions(quick=True, attack="fgsm").plan(demo=True)
    for name in ("bounds", "attention"):
        plan[name] = plan[name].model_copy(update={"layers": (1,)})
    return prepare(Request("demo", plan, RunOptions(samples=samples, **run)))


def test_memory_is_counted_while_somebody_holds_it():
    module = nn.Linear(100, 100)
    with Held(module) as counted:
        a = torch.ones(100)
        b = a + 1
        assert counted.most == 800
        del a
        c = b.view(10, 10).t()
        del b
        d = c.clone()
        assert counted.most == 800
        del c, d
        x = torch.ones(5, 100, requires_grad=True)
        y = module(x).tanh().sum()  # tanh keeps its result, and nobody has a name for it
        assert counted.most == 3 * 2000
        del x
        torch.ones(1000)
        assert counted.most == 2 * 2000 + 4 + 4000
    del y


def files(root, **contents):
    for path, text in contents.items():
        place = root / path.replace("__", "/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


GROUPS = {
    "none": ({}, 8000),
    "a limit": (
        {"proc__self__cgroup": "0::/a/b\n", "sys__fs__cgroup__a__b__memory.max": "5000\n",
         "sys__fs__cgroup__a__b__memory.current": "2000\n"}, 3000),
    "caches": (
        {"proc__self__cgroup": "0::/a\n", "sys__fs__cgroup__a__memory.max": "5000\n",
         "sys__fs__cgroup__a__memory.current": "4500\n",
         "sys__fs__cgroup__a__memory.stat": "anon 1\ninactive_file 400\n"}, 900),
    "one around it": (
        {"proc__self__cgroup": "0::/a/b\n", "sys__fs__cgroup__a__memory.max": "1500\n",
         "sys__fs__cgroup__a__memory.current": "500\n",
         "sys__fs__cgroup__a__b__memory.max": "max\n",
         "sys__fs__cgroup__a__b__memory.current": "500\n"}, 1000),
    "a container": (
        {"proc__self__cgroup": "0::/../../pod\n", "sys__fs__cgroup__memory.max": "700\n",
         "sys__fs__cgroup__memory.current": "100\n"}, 600),
    "above all there is": (
        {"proc__self__cgroup": "0::/\n", "sys__fs__cgroup__memory.max": "9999999\n",
         "sys__fs__cgroup__memory.current": "1\n"}, 8000),
}  # fmt: skip


@pytest.mark.parametrize("case", GROUPS)
def test_free_is_what_machine_and_control_groups_leave(tmp_path, case):
    contents, expected = GROUPS[case]
    files(tmp_path, proc__meminfo="MemTotal: 99 kB\nMemAvailable: 8 kB\n", **contents)
    assert find_free_memory(CPU, tmp_path) == (8192 if expected == 8000 else expected)


def test_where_nothing_is_known_of_memory_nothing_is_said(tmp_path):
    assert find_free_memory(CPU, tmp_path) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_that_is_tried_tells_what_many_take(name):
    asked = job()
    known = footprint(asked, name)
    size = min(asked.size(name), 8)
    weights = sum(p.nbytes for p in asked.net.module.parameters())
    with Live() as counted:  # weights among the rest
        next(iter(load_measures()[name].parts(
            asked.net, iter([asked.samples.batch[:size]]), asked.request.measures[name]
        )))  # fmt: skip
    assert (counted.most - weights) / 2 < known.of(size) < 2 * counted.most


def test_what_many_samples_take_is_what_one_takes_and_more():
    assert Footprint(fixed=100, sample=30).of(4) == 220


@pytest.mark.parametrize("name", NAMES)
def test_batches_are_halved_until_they_fit_and_nothing_is_measured_twice(monkeypatch, name):
    """No more than three samples fit: five are tried, then two at a time."""
    asked = job(5, dtype="float64", batch_size=5)
    options = {name: asked.request.measures[name]}
    asked = replace(asked, counts={name: 5}, request=replace(asked.request, measures=options))
    whole, sizes = execute(asked), []
    measure = load_measures()[name]

    def parts(net, batches, options):
        for part in measure.parts(net, Share(batches.first, fit(batches, options)), options):
            sizes.append(len(part.ids))
            yield part

    def fit(batches, options):
        for batch in batches:
            if min(len(batch), getattr(options, "batch_size", None) or 5) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            yield batch

    replace_parts(monkeypatch, name, parts)
    cut = execute(asked)
    assert sizes == ([5] if measure.chunk else [2, 2, 1])
    for before, after in zip(whole.sections, cut.sections, strict=True):
        for one, other in zip(before.rows, after.rows, strict=True):
            for key in one.keys() - {"seconds"}:
                value = one[key]
                assert other[key] == (
                    pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
                ), key


def test_random_numbers_of_the_caller_stay_as_they_were():
    asked = job()
    module = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, 10))  # in training mode
    net = replace(asked.net, module=module, call=lambda x, _mask: module(x))
    state = torch.get_rng_state()
    footprint(replace(asked, net=net), "attack")
    assert torch.equal(torch.get_rng_state(), state)


def test_where_one_sample_is_too_much_the_error_says_what_helps(monkeypatch):
    break_measure(monkeypatch, "jacobian", torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(lipaudit.LipauditError, match="one sample at a time") as caught:
        lipaudit.measure("demo", "jacobian", samples=2)
    assert "--input-size" in caught.value.advice
    assert "--max-tokens" not in caught.value.advice


def test_weights_in_half_precision_are_said_to_be_kept_smaller_as_they_are():
    asked = job()
    note = SimpleNamespace(code="half-precision")
    net = replace(asked.net, notes=(note,))
    assert "--weights stored" in advise_on_memory(replace(asked, net=net))
    assert "--weights stored" not in advise_on_memory(asked)
