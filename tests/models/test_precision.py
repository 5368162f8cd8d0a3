"""Whatever the caller has switched on, figures are of float32, and it is left as it was."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from threading import Event, Thread
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.backends import cuda, cudnn, mkldnn

import lipaudit
from lipaudit.engine.execute import execute
from lipaudit.engine.prepare import Request, prepare
from lipaudit.measures import option_types
from lipaudit.models.net import LoadOptions
from lipaudit.models.precision import exact_arithmetic, seed_device
from lipaudit.models.sources.loader import load_net
from lipaudit.settings import RunOptions
from tests.nets import Calls

MATMUL = torch.set_float32_matmul_precision
CPU = torch.device("cpu")


def precision(part, value: str) -> Callable[[], None]:
    return lambda: setattr(part, "fp32_precision", value)


CALLERS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "matmul high": lambda: MATMUL("high"),
    "matmul medium": lambda: MATMUL("medium"),
    "cudnn without TF32": lambda: setattr(cudnn, "allow_tf32", False),
    "cuda with TF32": lambda: setattr(cuda.matmul, "allow_tf32", True),
}
if hasattr(cudnn, "conv"):
    CALLERS |= {
        "everything TF32": precision(torch.backends, "tf32"),
        "cudnn ieee": precision(cudnn, "ieee"),
        "convolutions ieee": precision(cudnn.conv, "ieee"),
        "matmul TF32, newly": precision(cuda.matmul, "tf32"),
        "half precision on the CPU": precision(mkldnn, "bf16"),
        "mixed": lambda: (MATMUL("high"), precision(cudnn.rnn, "ieee")(), MATMUL("medium")),
    }


def settings() -> dict[str, object]:
    """All that decides in which precision a product of float32 is taken, as torch tells it."""
    parts = {"all": torch.backends, "cuda": cuda.matmul, "cudnn": cudnn, "cpu": mkldnn}
    if hasattr(cudnn, "conv"):
        parts |= {"conv": cudnn.conv, "rnn": cudnn.rnn, "cpu matmul": mkldnn.matmul}
    told = {name: getattr(part, "fp32_precision", None) for name, part in parts.items()}
    for name, read in {
        "old cudnn": lambda: cudnn.allow_tf32,
        "old cuda": lambda: cuda.matmul.allow_tf32,
        "old matmul": torch.get_float32_matmul_precision,
    }.items():
        try:
            told[name] = read()
        except RuntimeError:
            told[name] = "unreadable"
    return told


def is_float32(told: dict[str, object]) -> bool:
    new = [told[name] in ("ieee", None) for name in ("cuda", "cudnn", "cpu", "all")]
    old = told["old cudnn"], told["old cuda"], told["old matmul"]
    return all(new) and old == (False, False, "highest")


@contextmanager
def put_back() -> Iterator[None]:
    """What a test switches goes back to what torch begins with."""
    try:
        yield
    finally:
        for part in (torch.backends, cudnn, mkldnn) if hasattr(cudnn, "conv") else ():
            part.fp32_precision = "none"
        MATMUL("highest")
        cudnn.allow_tf32 = True
        if hasattr(cudnn, "conv"):
            cuda.matmul.fp32_precision = mkldnn.matmul.fp32_precision = "none"


@pytest.mark.parametrize("caller", CALLERS)
def test_float32_is_float32_and_every_setting_comes_back(caller):
    with put_back():
        CALLERS[caller]()
        before = settings()
        with exact_arithmetic(CPU):
            assert is_float32(settings())
            with exact_arithmetic(CPU):
                assert is_float32(settings())
            assert is_float32(settings())
        assert settings() == before


def test_a_thread_that_ends_first_changes_no_setting_of_another():
    begun, may_end = Event(), Event()

    def compute():
        with exact_arithmetic(CPU):
            begun.set()
            may_end.wait(60)

    def read():
        return settings(), torch.batch_norm, torch.backends.mha.get_fastpath_enabled()

    with put_back():
        CALLERS["matmul high"]()
        before = read()
        other = Thread(target=compute)
        other.start()
        begun.wait(60)
        with exact_arithmetic(CPU):
            may_end.set()
            other.join()
            assert is_float32(settings())
        assert read() == before


def test_compiled_code_is_plain_python_if_the_compiler_is_loaded_in_between():
    compiled = []

    def backend(graph, _inputs):
        compiled.append(graph)
        return graph.forward

    double = torch.compile(lambda x: 2 * x, backend=backend)  # loads the compiler
    x = torch.ones(2)
    with ExitStack() as block:
        with patch.dict(sys.modules):
            del sys.modules["torch._dynamo"]
            block.enter_context(exact_arithmetic(CPU))
        with exact_arithmetic(CPU):
            double(x)
    with exact_arithmetic(CPU):
        double(x)
    assert not compiled
    double(x)
    assert compiled


@pytest.mark.parametrize("measure", ["bounds", "attention", "jacobian", "attack", "scaling"])
def test_every_measure_runs_the_model_in_float32(measure):
    net = load_net("demo", LoadOptions(device="cpu"))
    seen: list[dict[str, object]] = []
    net.module.register_forward_pre_hook(lambda *_: seen.append(settings()))
    own = {
        "attack": {"attack": "pgd", "steps": 2, "eps": "8/255"},
        "scaling": {"modes": "real", "lengths": "4:8:log2", "layers": "0"},
    }.get(measure, {})
    options = option_types()[measure].parse(own)
    with put_back():
        CALLERS["matmul high"]()
        execute(prepare(Request("demo", {measure: options}, RunOptions(samples=2)), net=net))
    assert seen
    assert all(map(is_float32, seen))


def test_a_model_may_use_flags_of_its_own():
    """Some choose how cuDNN works, around their convolutions."""

    def norms(*, chooses: bool):
        def run(read, head, x):
            with cudnn.flags(enabled=False) if chooses else torch.enable_grad():
                x = read(x)
            return head(x.flatten(1).tanh())

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = Calls(run, nn.Conv2d(1, 4, 3), nn.Linear(16, 3)).eval()
        report = lipaudit.measure(module, "jacobian", input_shape=(1, 4, 4), samples=2)
        return report.section("jacobian").samples["norm"]

    before = settings()
    assert norms(chooses=True) == norms(chooses=False)
    assert settings() == before


def test_only_the_device_that_is_used_is_seeded(monkeypatch):
    """To read the state of another GPU takes memory, which may be missing."""
    asked = []

    def seen(name):
        return lambda *args: asked.append((name, *map(str, args)))

    for name in ("get_rng_state", "manual_seed"):
        monkeypatch.setattr(torch.cuda, name, seen(name))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *_args: None)
    monkeypatch.setattr(torch.cuda, "device", lambda place: nullcontext(asked.append(str(place))))
    torch.manual_seed(7)
    asked.clear()
    before = torch.get_rng_state()
    with seed_device(3, torch.device("cuda:1")):
        assert torch.initial_seed() == 3
    assert asked == [("get_rng_state", "cuda:1"), "cuda:1", ("manual_seed", "3")]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_gradients_of_normalisations_do_not_depend_on_strides(kind, n):
    """torch 2.14 computes a wrong one for a single sample on a CPU: here tokens become a map."""
    norm = kind(6).eval()
    x = torch.rand(n, 6, 2, 3, requires_grad=True)
    above = torch.rand(n, 6, 6).mT.unflatten(2, (2, 3))
    with exact_arithmetic(x.device):
        (gradient,) = torch.autograd.grad(norm(x), x, above)
    double = norm.double()
    columns = torch.autograd.functional.jacobian(double, x.detach().double()).flatten(4)
    truth = torch.einsum("bchw,bchwk->k", above.double(), columns).reshape(x.shape)
    torch.testing.assert_close(gradient.double(), truth, rtol=1e-4, atol=1e-5)
