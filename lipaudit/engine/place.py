"""What a launcher says of this process: which of how many it is, and where they meet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lipaudit.errors import UsageError
from lipaudit.settings import RunOptions


@dataclass(frozen=True)
class Place:
    """Which process of how many this is, and where they meet.

    Attributes:
        rank: from 0.
        size: how many there are.
        local: which on its machine: it takes that device.
        host: where rank 0, or the launcher, keeps the store.
        port: of the store.
    """

    rank: int
    size: int
    local: int
    host: str
    port: int


def placed(env: Mapping[str, str] = os.environ) -> Place | None:
    """Return what a launcher says of this process; None where it is alone.

    torchrun and `accelerate launch` set RANK and WORLD_SIZE. A step of srun is known by its
    number of tasks: a batch script has SLURM_NTASKS, too, and is one process.

    Raises:
        UsageError: it does not say where the processes meet.
    """
    if "RANK" in env and int(env.get("WORLD_SIZE", "1")) > 1:
        rank, size, local = (int(env.get(n, "0")) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        return Place(rank, size, local, *_meeting(env, "", ""))
    if "SLURM_PROCID" in env and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
        rank, size, local = (int(env.get(name, "0")) for name in names)
        here = "127.0.0.1" if env.get("SLURM_STEP_NUM_NODES") == "1" else ""
        port = 20000 + int(env.get("SLURM_JOB_ID", "0")) % 20000
        return Place(rank, size, local, *_meeting(env, here, str(port)))
    return None


def follows() -> bool:
    """Tell whether a launcher started this process beside a first one, which says what is."""
    with suppress(UsageError):
        place = placed()
        return place is not None and place.rank > 0
    return False


def share_run(run: RunOptions, place: Place) -> RunOptions:
    """Return the options of one process: its shard of the samples, on a device of its own.

    Raises:
        UsageError: every process would spread its model over all devices, or the run is a shard.
    """
    import torch

    if run.shard:
        raise UsageError(
            "--shard, and a launcher of several processes: each shares the samples out",
            "Leave --shard out, or run one process.",
        )
    run = run.model_copy(update={"shard": (place.rank + 1, place.size)})
    if run.device_map is not None:
        if Path(run.device_map).is_file():
            return run
        raise UsageError(
            f"--device-map {run.device_map}: each process would spread its model over all devices",
            "Run one process, or give a file that says where the modules lie.",
        )
    if run.device not in (None, "auto", "cuda") or not torch.cuda.is_available():
        return run
    device = f"cuda:{place.local % torch.cuda.device_count()}"
    return run.model_copy(update={"device": device})


def _meeting(env: Mapping[str, str], host: str, port: str) -> tuple[str, int]:
    host, port = env.get("MASTER_ADDR", host), env.get("MASTER_PORT", port)
    if not host or not port:
        raise UsageError(
            "several processes are started, and nothing says where they meet",
            "Start them with torchrun, or set MASTER_ADDR and MASTER_PORT.",
        )
    return host, int(port)
