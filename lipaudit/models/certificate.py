"""What is proven of a model's decision on a ball around one sample.

Proven of the function of real numbers that the stored weights define (`certify`): what
rounding a program that runs it in floating point adds is no part of it.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lipaudit.certify.branch import Effort, decide
from lipaudit.certify.form import UnboundedError
from lipaudit.certify.prove import ball, margins, run
from lipaudit.certify.symbols import Norm
from lipaudit.data.batch import Batch
from lipaudit.errors import InputError
from lipaudit.models.net import Net
from lipaudit.models.precision import eager
from lipaudit.theory.policy import NODES

Why = Literal["", "bound", "signs", "nodes", "seconds", "unbounded"]

TENSORS = 4
"""Forms of the widest tensor that a pass holds at once."""
MOST_PAIRS = 10_000
"""Products of two inputs that forms carry where nobody asks for order 2."""


@dataclass(frozen=True)
class Proof:
    """How a proof is tried.

    Attributes:
        norm: of the ball.
        order: 1 for affine forms, 2 for quadratic ones.
        nodes: parts of a ball that branch and bound looks at, at most.
        deadline: of `time.monotonic`, after which nothing is begun.
    """

    norm: Norm = "linf"
    order: int = 1
    nodes: int = NODES
    deadline: float = math.inf

    @property
    def seconds(self) -> float:
        """What is left of the time."""
        return self.deadline - time.monotonic()


@dataclass(frozen=True)
class Certificate:
    """What is proven of one ball.

    Attributes:
        certified: no input of the ball is classified otherwise.
        why: what ended the proof where it is not: "bound" (no ReLU is left to decide), "signs"
            (those of all ReLUs are), "nodes" or "seconds" (the limits), or "unbounded" (the
            bounds overflowed: the ball is too large).
        bound: least margin of a part, or that times a positive number; proven where certified.
        nodes: parts of the ball that were looked at.
    """

    certified: bool
    why: Why
    bound: float = -math.inf
    nodes: int = 0


def certificate(
    net: Net, sample: Batch, label: int, eps: float, proof: Proof | None = None
) -> Certificate:
    """Try to prove that the whole ball around a sample gets its label.

    Args:
        net: a classifier.
        sample: one sample; texts move in their embeddings.
        label: the class that is to stand.
        eps: radius of the ball, in the attacked space; the L-inf ball is cut by its box.
        proof: how it is tried.

    Raises:
        NoRuleError: the model uses an operation that nothing is known of on balls.
    """
    proof = proof or Proof()
    if proof.seconds <= 0:
        return Certificate(certified=False, why="seconds")
    free = net.free(sample)
    start = ball(
        net.point(sample),
        eps,
        norm=proof.norm,
        order=proof.order,
        box=net.box,
        moving=None if free is None else free[..., None],
        dtype=net.dtype,
    )
    try:
        logits = run(lambda z: net.forward(z, sample), start, module=net.module)
        form = margins(logits, label)
        verdict = decide(form, Effort(nodes=proof.nodes, seconds=proof.seconds))
    except UnboundedError:
        return Certificate(certified=False, why="unbounded")
    why: Why = "" if verdict.certified else verdict.limit  # type: ignore[assignment]
    if why == "signs" and not verdict.units:
        why = "bound"
    return Certificate(verdict.certified, why, verdict.bound, verdict.nodes)


def order_of(net: Net, sample: Batch, asked: str = "auto") -> int:
    """Return the order of forms: the one asked for, or what inputs of this size allow."""
    if asked != "auto":
        return int(asked)
    inputs = _inputs(net, sample)
    return 2 if inputs * (inputs + 1) // 2 <= MOST_PAIRS else 1


def _inputs(net: Net, sample: Batch) -> int:
    """Count the numbers of a sample that may move."""
    free, point = net.free(sample), net.point(sample)
    return point.numel() if free is None else int(free.sum()) * point.shape[-1]


def rows_of(net: Net, sample: Batch, order: int) -> int:
    """Return about how many rows of symbols a pass ends with: it costs as many forwards.

    One per input (and pair of inputs at order 2), and one per number that a module returns.
    """
    inputs = _inputs(net, sample)
    pairs = inputs * (inputs + 1) // 2 if order == 2 else 0
    return inputs + pairs + sum(_count_numbers(net, sample))


def require_room(net: Net, sample: Batch, order: int) -> None:
    """Refuse a pass that does not fit into the memory of its device.

    Each row of symbols is as wide as the widest tensor; some tensors are held at once.

    Raises:
        InputError: with the memory that it would take.
    """
    widest = max([net.point(sample).numel(), *_count_numbers(net, sample)])
    rows = rows_of(net, sample, order)
    needed = TENSORS * rows * widest * torch.finfo(net.dtype).bits // 8
    there = _memory(net.device)
    if needed > there:
        raise InputError(
            f"a certificate of {net.info.architecture} takes about {needed / 2**30:,.0f} GiB at "
            f"order {order}, and {net.device.type} has {there / 2**30:,.0f}",
            "Certificates are for small models and inputs; attacks work on any."
            if order == 1
            else "Try --order 1.",
        )


def _count_numbers(net: Net, sample: Batch) -> list[int]:
    """Count the numbers that each innermost module returns on a sample."""
    counts: list[int] = []
    hooks = [
        module.register_forward_hook(
            lambda _module, _args, out: counts.append(
                out.numel() if isinstance(out, Tensor) else 0
            )
        )
        for module in net.module.modules()
        if not any(True for _ in module.children())
    ]
    try:
        with eager(), torch.no_grad():
            net.output(sample)
    finally:
        for hook in hooks:
            hook.remove()
    return counts


def _memory(device: torch.device) -> int:
    """Return the bytes that a device has in all."""
    if device.type == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(torch.get_device_module(device).mem_get_info(device)[1])


def require_rules(net: Net, sample: Batch) -> None:
    """Refuse a model with an operation that has no rule, for the price of a few forwards.

    One entry moves by nothing, and rounding stays slack: no symbols are born.

    Raises:
        NoRuleError: with the operation and its module.
    """
    point = net.point(sample)
    first = torch.zeros(point.shape, dtype=torch.bool, device=point.device)
    first.view(-1)[0] = True
    start = ball(point, 0.0, moving=first, dtype=net.dtype, settle=math.inf)
    try:
        with eager():
            run(lambda z: net.forward(z, sample), start, module=net.module)
    except UnboundedError:
        return  # slack grows faster than symbols do: what comes later is met when it is run
