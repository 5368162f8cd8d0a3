"""Whose fault it is: no file, terminal, disk, device or option of a user is a bug in lipaudit."""

import ast
import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import lipaudit
from lipaudit import schema
from lipaudit.errors import (
    EvaluationError,
    UsageError,
    explain_failure,
    find_user_error,
    of_machine,
    out_of_memory,
)
from lipaudit.measures import load_measures
from lipaudit.settings import RunOptions
from tests.commands import invoke, refuse, replace_parts

ARCH = ("--arch", "timm:vit_tiny_patch16_224")
FACTORY = """
import torch
from torch import nn
from lipaudit.models.sources.timm import load_demo

def module():
    return load_demo("standard").module

def outside():
    return torch.compile(module())

def in_place():
    model = module()
    model.compile()
    return model

def inside():
    model = module()
    model.blocks[0] = torch.compile(model.blocks[0])
    return model

def traced():
    return torch.jit.trace(module(), torch.zeros(1, 1, 8, 8))

def full():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
"""


@pytest.fixture(autouse=True)
def _own(_elsewhere):
    Path("own.py").write_text(FACTORY)


def test_what_torch_compile_wraps_is_measured_as_it_was(monkeypatch):
    def compiled(*_args, **_options):
        raise AssertionError("something was compiled")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compiled)
    how = ("--data", "demo", "-n", "1", "--layers", "0", "-f", "json")
    reports = [
        schema.loads(invoke("bounds", f"py:own.py:{factory}", *how).stdout)
        for factory in ("module", "outside", "in_place", "inside")
    ]
    truth, *found = [[row.exact for row in r.section("bounds").rows] for r in reports]
    assert found == [truth] * 3


def test_a_compiled_module_is_measured_from_python_and_compiled_again_afterwards():
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    spec = lipaudit.ModelSpec(torch.compile(module, backend="eager"), (1, 8, 8))
    x = torch.rand(2, 1, 8, 8)
    report = lipaudit.measure(spec, "jacobian", data=x)
    assert report.run.model.architecture == "Sequential"
    truth = torch.linalg.matrix_norm(module[1].weight, 2)
    assert report.section("jacobian").samples["norm"][0] == pytest.approx(float(truth), rel=1e-4)


def junk(name: str, content: bytes) -> str:
    Path(name).write_bytes(content)
    return name


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("junk.pt", b"junk" * 50, "not a complete PyTorch file"),
        ("junk.pth", b"PK\x03\x04" + b"j" * 100, "not a complete PyTorch file"),
        ("junk.bin", b"", "not a complete PyTorch file"),
        ("junk.ckpt", b"\x80\x02]q\x00.", "not a complete PyTorch file"),
        ("junk.safetensors", b"\x08" + bytes(7) + b"no json!", "not a complete safetensors"),
    ],
)
def test_junk_is_no_file_of_weights(name, content, says):
    refuse(4, says, "bounds", junk(name, content), *ARCH)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchscript_is_named_as_such():
    torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)).save("scripted.pt")
    refuse(4, "is TorchScript (a program), not a weights file", "bounds", "scripted.pt", *ARCH)
    refuse(4, "is TorchScript", "bounds", "py:own.py:traced", "--data", "demo")


def test_memory_that_runs_out_while_the_model_is_built_or_moved(monkeypatch):
    refuse(3, "out of memory", "bounds", "py:own.py:full")

    def moved(*_args, **_options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    monkeypatch.setattr(nn.Module, "to", moved)
    for command in ("bounds", "train"):
        refuse(3, "out of memory (CUDA out of memory", command, "demo")
    with pytest.raises(EvaluationError, match="out of memory"):
        lipaudit.measure("demo", "jacobian")


def test_memory_that_runs_out_in_training(monkeypatch):
    from lipaudit.train import loop

    def step(*_args, **_options):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes")

    monkeypatch.setattr(loop.F, "cross_entropy", step)
    refuse(3, "out of memory", "train", "demo", "-n", "8", "--epochs", "1")


def test_memory_of_the_host_that_runs_out_halves_the_batch_too(monkeypatch):
    whole, sizes = load_measures()["jacobian"], []

    def parts(net, batches, options):
        for batch in batches:
            sizes.append(len(batch))
            if len(batch) > 1:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes")
            yield from whole.compute(net, [batch], options)

    replace_parts(monkeypatch, "jacobian", parts)
    invoke("jacobian", "demo", "-n", "3", "--batch-size", "3")
    assert sizes == [3, 1, 1, 1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
    """A report with bounds, whose table has all kinds of characters."""
    path = tmp_path_factory.mktemp("saved") / "a.json"
    path.write_text(schema.dumps(lipaudit.measure("demo", "bounds", samples=1, layers=0)))
    return str(path)


@pytest.mark.parametrize("command", ["save", "update"])
def test_a_report_that_cannot_be_a_baseline(command, saved):
    document = json.loads(Path(saved).read_text()) | {"status": "partial"}
    Path("bad.json").write_text(json.dumps(document))
    refuse(5, "cut short", "baseline", command, "bad.json", "--reason", "x")
    assert not Path("lipaudit-baseline.json").exists()


def test_one_shard_is_neither_a_baseline_nor_judged():
    invoke("jacobian", "demo", "-n", "2", "--shard", "1/2", "-o", "shard.json")
    invoke("jacobian", "demo", "-n", "2", "-o", "whole.json")
    refuse(5, "join all shards with lipaudit merge", "baseline", "save", "shard.json")
    for pair in (("shard.json", "-b", "whole.json"), ("whole.json", "-b", "shard.json")):
        done = invoke("gate", *pair, code=5)
        assert "the report is shard 1 of 2: join all shards" in done.stdout


@pytest.mark.parametrize("place", ["nowhere/new", "file/new", "folder"])
def test_a_place_that_cannot_be_written_to_is_a_usage_error(place, saved):
    Path("folder").mkdir()
    Path("file").touch()
    refuse(2, "cannot write", "baseline", "update", saved, "--reason", "x", "-o", place)
    if place == "file/new":
        refuse(2, "file is a file", "train", "demo", "--out", place)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("args", [("report", "SAVED"), ("report", "SAVED", "-fjson"), ("schema",)])
def test_a_full_disk_behind_stdout(args, saved):
    typed = [saved if arg == "SAVED" else arg for arg in args]
    command = [sys.executable, "-m", "lipaudit", *typed]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3
    assert "No space left on device" in done.stderr
    assert "internal error" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "locale", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}]
)
def test_an_ascii_terminal_gets_every_number(locale, saved):
    plain, env = invoke("report", saved).stdout, os.environ | locale
    command = [sys.executable, "-m", "lipaudit", "report", saved]
    done = subprocess.run(command, env=env, capture_output=True, check=True)
    text = done.stdout.decode("ascii" if "PYTHONIOENCODING" in locale else "utf-8")
    assert text.count("?") == plain.count("?")  # nothing is replaced by one
    numbers = r"\b\d+\.\d+"
    assert re.findall(numbers, text) == re.findall(numbers, plain)
    assert len(text.splitlines()) == len(plain.splitlines())


MACHINE = [
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    OSError(errno.ENOSPC, "No space left on device", "a.json"),
]


@pytest.mark.parametrize("error", MACHINE, ids=str)
def test_faults_of_the_machine_are_told_from_those_of_a_model(error):
    assert of_machine(error)
    met = find_user_error(error)
    assert isinstance(met, EvaluationError)
    assert met.advice


@pytest.mark.parametrize("error", MACHINE[3:6], ids=str)
def test_a_device_that_fails_is_not_laid_to_what_is_loaded(error):
    with pytest.raises(RuntimeError) as caught, explain_failure("it fails", "Mend it."):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("error", [RuntimeError("shapes do not fit"), ValueError("CUDA error")])
def test_what_a_model_says_is_no_fault_of_the_machine(error):
    assert not of_machine(error)
    assert not out_of_memory(error)
    assert find_user_error(error) is None


def test_what_is_configured_for_texts_does_not_stop_images():
    Path("lipaudit.toml").write_text("max-tokens = 3\n")
    invoke("jacobian", "demo", "-n", "1")
    refuse(2, "--max-tokens", "jacobian", "demo", "-n", "1", "--max-tokens", "4")


def test_options_of_a_kind_are_refused_from_python_alike():
    with pytest.raises(UsageError, match="max-tokens works only for models that take text"):
        lipaudit.measure("demo", "jacobian", samples=1, max_tokens=3)
    RunOptions.parse({"mean": "0.5"}).require_kind("image")


BESIDE = {
    "api.py:open_job": "asks find_user_error",
    "api.py:run_audits": "leaves the reason in a report",
    "models/attention/events.py:_broadcast": "compares shapes",
    "models/precision.py:exact_arithmetic": "reads a setting",
    "models/sources/offload.py:find_device": "asks for a device",
    "engine/execute.py:run_job": "raises again",
    "engine/launcher.py:_connect": "meets the other processes",
    "engine/launcher.py:_require_others": "hears from the other processes",
}
"""Broad handlers that need not ask whose fault an error is, and why."""


def test_every_broad_handler_asks_whose_fault_it_is():
    strangers = []
    root = Path(lipaudit.__file__).parent
    for layer in ("api.py", "engine", "measures", "models", "theory", "train"):
        for path in [root / layer] if layer.endswith(".py") else (root / layer).rglob("*.py"):
            tree = ast.parse(path.read_text())
            for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
                handlers = (n for n in ast.walk(function) if isinstance(n, ast.ExceptHandler))
                broad = [h for h in handlers if h.type and _broad(ast.unparse(h.type))]
                name = f"{path.relative_to(root).as_posix()}:{function.name}"
                asks = all(
                    "of_machine" in t or "out_of_memory" in t for t in map(ast.unparse, broad)
                )
                strangers += [] if asks or name in BESIDE else [name]
    assert strangers == []


def _broad(caught: str) -> bool:
    return bool({"Exception", "RuntimeError"} & set(re.findall(r"\w+", caught)))
