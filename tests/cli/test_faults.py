"""Whose fault it is: no file, terminal, disk, device or option of a user is a bug in lipaudit."""

import ast
import errno
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import lipaudit
from lipaudit import schema
from lipaudit.errors import (
    EvaluationError,
    InputError,
    UsageError,
    explain_failure,
    find_user_error,
    is_machine_error,
    is_out_of_memory,
)
from lipaudit.settings import RunOptions
from tests.commands import invoke, refuse

ARCH = ("--arch", "timm:vit_tiny_patch16_224")


def test_what_torch_compile_wraps_is_measured_as_it_was(monkeypatch):
    def compiled(*_args, **_options):
        raise AssertionError("something was compiled")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compiled)
    how = ("--data", "demo", "-n", "1", "--layers", "0", "-f", "json")
    reports = [
        schema.loads(invoke("bounds", f"py:tests.cli.own:{factory}", *how).stdout)
        for factory in ("module", "outside", "in_place", "inside")
    ]
    truth, *found = [[row.exact for row in r.section("bounds").rows] for r in reports]
    assert found == [truth] * 3


def test_a_transformer_encoder_is_one_function_with_and_without_gradients():
    """Its fast path, which needs no gradients, sets the outputs at padded tokens to 0."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.embed, self.encoder = nn.Embedding(20, 8), nn.TransformerEncoder(layer, 1)

        def forward(self, ids):
            return self.encoder(self.embed(ids), src_key_padding_mask=ids == 0).mean(1)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module, ids = Encoder().eval(), torch.tensor([[3, 4, 5, 0, 0], [6, 7, 8, 9, 0]])
    attack = {"eps": "0.1", "attack": "fgsm"}
    y = module(ids).argmax(1)
    report = lipaudit.audit(module, {"jacobian": {}, "attack": attack}, data=(ids, y))
    norms, attacked = report.section("jacobian"), report.section("attack")
    assert "randomised" not in [note.code for note in attacked.notes]
    top, second = module(ids).detach().topk(2).values.T
    assert norms.samples["margin"] == pytest.approx((top - second).tolist(), rel=1e-4)
    # It is measured as in training; without padding both are one function.
    whole = lipaudit.measure(module, "jacobian", data=(ids[:, :3], y))
    warned = [[n.code for n in r.sections[0].notes].count("fast-path") for r in (report, whole)]
    assert warned == [1, 0]
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_compiled_module_is_measured_from_python_and_compiled_again_afterwards():
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    spec = lipaudit.ModelSpec(torch.compile(module, backend="eager"), (1, 8, 8))
    x = torch.rand(2, 1, 8, 8)
    report = lipaudit.measure(spec, "jacobian", data=x)
    assert report.run.model.architecture == "Sequential"
    truth = torch.linalg.matrix_norm(module[1].weight, 2)
    assert report.section("jacobian").samples["norm"][0] == pytest.approx(float(truth), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("junk.pt", b"junk" * 50),
        ("junk.pth", b"PK\x03\x04" + b"j" * 100),
        ("junk.bin", b""),
        ("junk.ckpt", b"\x80\x02]q\x00."),
        ("junk.safetensors", b"\x08" + bytes(7) + b"no json!"),
    ],
)
def test_junk_is_no_file_of_weights(name, content):
    Path(name).write_bytes(content)
    kind = "safetensors" if name.endswith("safetensors") else "PyTorch file"
    refuse(4, f"not a complete {kind}", "bounds", name, *ARCH)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchscript_is_named_as_such():
    torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)).save("scripted.pt")
    refuse(4, "is TorchScript (a program), not a weights file", "bounds", "scripted.pt", *ARCH)
    refuse(4, "is TorchScript", "bounds", "py:tests.cli.own:traced", "--data", "demo")


def test_memory_that_runs_out_while_a_model_is_built_moved_or_trained(monkeypatch):
    refuse(3, "out of memory", "bounds", "py:tests.cli.own:full")

    def step(*_args, **_options):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes")

    def moved(*_args, **_options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    with monkeypatch.context() as training:
        training.setattr(nn.functional, "cross_entropy", step)
        refuse(3, "out of memory", "train", "demo", "-n", "8", "--epochs", "1")
    monkeypatch.setattr(nn.Module, "to", moved)
    for command in ("bounds", "train"):
        refuse(3, "out of memory (CUDA out of memory", command, "demo")
    with pytest.raises(EvaluationError, match="out of memory"):
        lipaudit.measure("demo", "jacobian")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
    """A report with bounds, whose table has all kinds of characters."""
    path = tmp_path_factory.mktemp("saved") / "a.json"
    path.write_text(schema.dumps(lipaudit.measure("demo", "bounds", samples=1, layers=0)))
    return str(path)


def test_reports_that_cannot_be_a_baseline_and_places_that_cannot_be_written_to(saved):
    document = json.loads(Path(saved).read_text()) | {"status": "partial"}
    Path("bad.json").write_text(json.dumps(document))
    for command in ("save", "update"):
        refuse(5, "cut short", "baseline", command, "bad.json", "--reason", "x")
    assert not Path("lipaudit-baseline.json").exists()
    Path("folder").mkdir()
    Path("file").touch()
    for place in ("nowhere/new", "file/new", "folder"):
        refuse(2, "cannot write", "baseline", "update", saved, "--reason", "x", "-o", place)
    refuse(2, "file is a file", "train", "demo", "--out", "file/new")


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
    assert is_machine_error(error)
    met = find_user_error(error)
    assert isinstance(met, EvaluationError)
    assert met.advice
    kind = InputError if isinstance(error, OSError) else type(error)
    with pytest.raises(kind) as caught, explain_failure("it fails", "Mend it."):
        raise error
    assert (caught.value is error) == (kind is not InputError)  # nor is it laid to what is loaded
    for said in (RuntimeError("shapes do not fit"), ValueError("CUDA error")):
        assert not is_machine_error(said)
        assert not is_out_of_memory(said)
        assert find_user_error(said) is None


def test_options_of_texts_are_refused_for_images_unless_they_are_configured():
    Path("lipaudit.toml").write_text("max-tokens = 3\n")
    invoke("jacobian", "demo", "-n", "1")
    with pytest.raises(UsageError, match="max-tokens works only for models that take text"):
        lipaudit.measure("demo", "jacobian", samples=1, max_tokens=3)
    RunOptions.parse({"mean": "0.5"}).require_kind("image")


# Broad handlers that raise again, report, or ask no model: they need not ask whose fault it is.
BESIDE = {"api.py": 1, "engine/execute.py": 2, "engine/launcher.py": 2, "models/precision.py": 1,
          "wings/training/commands.py": 2, "wings/training/watching.py": 1}  # fmt: skip


def test_every_broad_handler_asks_whose_fault_it_is():
    """A fault of the device, of memory or of the disk is never said to be the model's."""
    root, silent = Path(lipaudit.__file__).parent, Counter()
    for room in ("api.py", "engine", "measures", "models", "theory", "wings"):
        for path in [*(root / room).rglob("*.py")] or [root / room]:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ExceptHandler) and node.type:
                    kinds, text = ast.unparse(node.type), ast.unparse(node)
                    questions = ("is_machine_error", "is_out_of_memory", "find_user_err")
                    asks = any(question in text for question in questions)
                    broad = re.search(r"\b(Exception|RuntimeError)\b", kinds)
                    silent[path.relative_to(root).as_posix()] += bool(broad) and not asks
    assert +silent == BESIDE
