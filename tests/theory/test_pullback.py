"""Products without torch's import for cotangents: equal to those of `torch.autograd.grad`."""

import subprocess
import sys

import pytest
import torch

from lipaudit.theory.pullback import pull_back, pull_back_rows


def make_graph():
    generator = torch.Generator().manual_seed(0)
    x, w, u = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((3, 4), (4, 5), (6, 3, 5))
    )
    x.requires_grad_()
    return x, torch.nn.functional.gelu(x @ w).softmax(1), u


def test_products_and_their_derivatives_are_those_of_autograd():
    x, y, us = make_graph()
    found, known = [], []
    for differentiate, images in ((pull_back, found), (torch.autograd.grad, known)):
        u = us[0].clone().requires_grad_()
        (pulled,) = differentiate(y, x, u, create_graph=True)
        (moved,) = differentiate(pulled, u, us[1, :, :4].contiguous(), retain_graph=True)
        images += [pulled.detach(), moved]
    assert all(torch.equal(one, other) for one, other in zip(found, known, strict=True))
    rows = torch.autograd.grad(y, x, us, retain_graph=True, is_grads_batched=True)[0]
    torch.testing.assert_close(pull_back_rows(y, x, us), rows, rtol=1e-14, atol=1e-15)
    with pytest.raises(RuntimeError, match="has the shape"):
        pull_back(y, x, us)


COMMANDS = """
import sys
from lipaudit.cli import main

for command in ("jacobian", "attack --eps 0.1 --attack pgd", "attention", "bounds"):
    sys.argv = ["lipaudit", *command.split(), "demo", "-n", "1", "-q"]
    try:
        main()
    except SystemExit as end:
        assert not end.code
    print("\\nimported by", command, {"sympy", "torch._dynamo"} & sys.modules.keys())
"""


def test_commands_import_neither_sympy_nor_a_compiler():
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS], capture_output=True, text=True, check=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("imported by")]
    assert [line.rpartition(" ")[2] for line in lines] == ["set()"] * 4, lines
