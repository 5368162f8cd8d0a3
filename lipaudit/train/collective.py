"""The processes of a run as a group of torch.distributed: it ends in all once it ends in one."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist

from lipaudit.engine.ranks import AGAIN, BEAT, FAREWELL, PAUSE, Ranks
from lipaudit.errors import EvaluationError, LipauditError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

End = Callable[[LipauditError], NoReturn]
EVER = timedelta(days=365)
"""One process may measure or write for long: whether it lives is seen from its signs of life."""


@contextmanager
def collective(ranks: Ranks, device: torch.device, end: End) -> Iterator[None]:
    """Let the processes of a run reduce tensors in the block; all of them leave it together.

    NCCL serves where each has a GPU of its own, gloo elsewhere.

    Args:
        ranks: that have met.
        device: of this process.
        end: ends it with an error, where another process has ended and this one would wait for
            it for ever: a reduction cannot be interrupted.

    Raises:
        LipauditError: another process failed or has ended.
    """
    left = threading.Event()
    threading.Thread(target=_guard, args=(ranks, left, end), daemon=True).start()
    try:
        store = ranks.store()
        places = _exchanged(f"{socket.gethostname()} {device}", store, ranks)
        own = device.type == "cuda" and len({*places}) == ranks.size
        if own:
            torch.cuda.set_device(device)  # NCCL's barrier and objects go by that
        dist.init_process_group(
            "nccl" if own else "gloo",
            store=store,
            rank=ranks.rank,
            world_size=ranks.size,
            timeout=EVER,
        )
        yield
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        if _of_group(error):
            raise _cause(ranks) from error
        ranks.end(error)
        raise
    except KeyboardInterrupt:
        ranks.end(EvaluationError(f"rank {ranks.rank} of {ranks.size} was stopped", AGAIN))
        raise
    finally:
        left.set()


def _exchanged(value: str, store: Store, ranks: Ranks) -> list[bytes]:
    """Return what every process gives, in their order; then all of them are there."""
    store.set(f"device/{ranks.rank}", value)
    keys = [f"device/{rank}" for rank in range(ranks.size)]
    while not store.check(keys):
        ranks.require_whole()
        time.sleep(PAUSE)
    return [store.get(key) for key in keys]


def _of_group(error: Exception) -> bool:
    """Tell whether a reduction failed since another process is not there any more."""
    lost = isinstance(error, dist.DistError) or "gloo" in str(error)
    return isinstance(error, RuntimeError) and lost


def _cause(ranks: Ranks) -> LipauditError:
    """Wait until it is known why another process is not there."""
    while True:
        try:
            ranks.require_whole()
        except LipauditError as error:
            return error
        time.sleep(PAUSE)


def _guard(ranks: Ranks, left: threading.Event, end: End) -> None:
    try:
        while not left.wait(BEAT):
            ranks.require_whole()
    except LipauditError as error:
        if not left.wait(FAREWELL / 2):  # before rank 0 has gone, and with it what it says
            ranks.end(error)
            end(error)
