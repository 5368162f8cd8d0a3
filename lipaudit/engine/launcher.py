"""The processes of a launcher: find this one, connect them, and gather their shards.

Process r of n measures every n-th batch, like `--shard`; rank 0 makes the report.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from lipaudit.errors import EvaluationError, UsageError, first_line
from lipaudit.settings import RunOptions

# Longest time that a process waits for the other processes to start. They connect before they load
# the model, so they differ by the imports alone.
JOIN = timedelta(seconds=120)
# Seconds to wait for the port that the previous command of the same launcher used.
CLOSING = 30.0
# Longest time that a process waits for the shards of other processes (a dead one is noticed at
# once).
MEASURING = timedelta(days=365)
PAUSE = 0.05
T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """The rank of this process, and the address at which the processes meet.

    Attributes:
        rank: number of the process, from 0.
        size: number of processes.
        local: number of the process on its machine, and of its device.
        host: host of the store, which rank 0 or the launcher runs.
        port: port of the store.
    """

    rank: int
    size: int
    local: int
    host: str
    port: int


def find_place(env: Mapping[str, str] = os.environ) -> Place | None:
    """Return the rank of this process by the launcher's environment; None for a single process.

    torchrun and `accelerate launch` set RANK and WORLD_SIZE. srun sets SLURM_STEP_NUM_TASKS, the
    number of processes in a step. SLURM_NTASKS does not help: it is also set in a batch script,
    which is a single process.

    Raises:
        UsageError: the address of the store is missing.
    """
    host = port = ""  # the address at which the processes find each other
    if "RANK" in env and int(env.get("WORLD_SIZE", "1")) > 1:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    elif "SLURM_PROCID" in env and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
        if env.get("SLURM_STEP_NUM_NODES") == "1":
            host = "127.0.0.1"
        # Two jobs on one machine need two ports, derived from the job's number.
        job = int(env.get("SLURM_JOB_ID", "0"))
        port = str(20000 + job % 20000)
    else:
        return None
    host = env.get("MASTER_ADDR", host)
    port = env.get("MASTER_PORT", port)
    if not host or not port:
        raise UsageError(
            "several processes were started, but no address for their communication is set",
            "Start them with torchrun, or set MASTER_ADDR and MASTER_PORT.",
        )
    # torchrun always sets LOCAL_RANK; other launchers may not: then it is 0.
    rank, size, local = (int(env.get(name, "0")) for name in names)
    return Place(rank, size, local, host, int(port))


def share_run(run: RunOptions, place: Place) -> RunOptions:
    """Return the options of one process of a launcher: its shard of the samples, on its own GPU.

    Args:
        run: the options that all processes got.
        place: the rank of this process.

    Raises:
        UsageError: every process would spread its model over all devices.
    """
    import torch

    run = run.model_copy(update={"shard": (place.rank + 1, place.size)})
    if run.device_map is not None:
        where = run.device_map
        text = f"--device-map {where}: each process would spread its model over all devices"
        if not Path(where).is_file():
            raise UsageError(text, "Run one process, or give a file that maps modules to devices.")
        return run
    # A typed device such as cuda:1 or cpu stays. Otherwise each process gets a GPU of its own.
    if run.device not in (None, "auto", "cuda") or not torch.cuda.is_available():
        return run
    return run.model_copy(update={"device": f"cuda:{place.local % torch.cuda.device_count()}"})


@contextmanager
def join_processes(place: Place) -> Iterator[None]:
    """Connect to the other processes of a run, for the duration of the block.

    Raises:
        EvaluationError: a process does not connect.
    """
    import torch.distributed

    _connect(place)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def wait_for_all(place: Place) -> None:
    """Wait until every process of the run has called this function.

    Raises:
        EvaluationError: another process has ended.
    """
    import torch.distributed

    with _require_others(place):
        torch.distributed.barrier()


def gather(value: T, place: Place) -> list[T]:
    """Return the values that all processes pass, in the order of their ranks, in every process.

    Raises:
        EvaluationError: another process has ended.
    """
    import torch.distributed

    values: list[Any] = [None] * place.size
    with _require_others(place):
        torch.distributed.all_gather_object(values, value)
    return values


def _connect(place: Place) -> None:
    """Create the process group that gathers the shards over sockets.

    Raises:
        EvaluationError: the other processes cannot be reached.
    """
    end = time.monotonic() + CLOSING
    while True:
        try:
            _join_group(place)
        except RuntimeError as error:
            # While the store of a previous command closes, the port is taken and connections are
            # cut off: try again until `end`.
            if time.monotonic() > end:
                raise EvaluationError(
                    f"rank {place.rank} of {place.size} cannot reach the other processes at "
                    f"{place.host}:{place.port}: {first_line(error)}",
                    f"Start WORLD_SIZE processes within {JOIN.seconds} seconds, rank 0 on that "
                    "machine, and use a free port. To run one process, unset RANK and WORLD_SIZE.",
                ) from error
            time.sleep(PAUSE)
        else:
            return


def _join_group(place: Place) -> None:
    """Wait until all processes of this command have connected to rank 0, and make them a group.

    Raises:
        RuntimeError: the connection fails, or a process does not arrive in time.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    url = f"tcp://{place.host}:{place.port}?rank={place.rank}&world_size={place.size}"
    store, *_ = next(rendezvous(url, timeout=JOIN))
    # A launcher's store outlives a command, so each command uses keys with its number. `add`
    # counts the processes of all commands so far.
    command_number = (store.add("joined", 1) - 1) // place.size
    store = PrefixStore(f"lipaudit-{command_number}", store)
    store.set(f"{place.rank}", "here")
    store.wait([f"{rank}" for rank in range(place.size)], JOIN)
    # gloo runs everywhere, and a few kilobytes at the end need no speed.
    dist.init_process_group(
        "gloo", store=store, rank=place.rank, world_size=place.size, timeout=MEASURING
    )


@contextmanager
def _require_others(place: Place) -> Iterator[None]:
    """Turn a closed connection inside the block into an error: another process has ended."""
    try:
        yield
    except RuntimeError as error:
        raise EvaluationError(
            f"another of the {place.size} processes has ended",
            "Finished batches are kept. Run the same command with --resume to continue, with "
            "any number of processes.",
        ) from error
