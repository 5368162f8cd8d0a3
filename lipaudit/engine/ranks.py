"""Processes of one run that a launcher started: each measures a shard, rank 0 joins them.

They share a store of torch.distributed. Through it each gives rank 0 the report of its shard, and
hears how the run has ended.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from lipaudit.engine.place import Place
from lipaudit.errors import EvaluationError, LipauditError, as_user_meets, bug

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

JOIN = 300.0
"""Seconds within which all processes have to be there."""
CLOSING = 30.0
"""Seconds within which the store of the command before has closed, and its port is free."""
BEAT, LOST = 2.0, 30.0
"""Seconds between two signs of life of a process, and without one until it counts as dead."""
PAUSE = 0.05
FAREWELL = 5.0
"""Seconds that rank 0 waits for the others to hear how the run has ended."""
AGAIN = "What is finished is kept: --resume goes on, with any number of processes."


def join(place: Place) -> Ranks:
    """Meet the other processes.

    Raises:
        EvaluationError: they do not come.
    """
    return Ranks(lambda: _store(place), place.rank, place.size)


def _store(place: Place) -> Store:
    from torch.distributed.rendezvous import rendezvous

    url = f"tcp://{place.host}:{place.port}?rank={place.rank}&world_size={place.size}"
    end = time.monotonic() + CLOSING
    while True:
        try:
            store, *_ = next(rendezvous(url, timeout=timedelta(seconds=JOIN)))
        except RuntimeError as error:
            # A launcher may start one command after the other: until the store of the first has
            # closed, rank 0 finds its port taken and the others are cut off.
            if time.monotonic() > end:
                raise EvaluationError(
                    f"rank {place.rank} of {place.size} cannot meet the others at "
                    f"{place.host}:{place.port}: {str(error).partition(chr(10))[0]}",
                    "Check that rank 0 runs there and that no other program uses the port. "
                    "To run alone, unset RANK and WORLD_SIZE.",
                ) from error
            time.sleep(PAUSE)
        else:
            return store


class StoreClosedError(EvaluationError):
    """The store that the processes share has ended."""


class Ranks:
    """One process among those of a run; as a context it waits for all of them to be there.

    Args:
        connect: returns the store that all of them share.
        rank: of this process; rank 0 joins the shards.
        size: how many processes there are.

    Attributes:
        exit_code: with which all end where nothing fails; rank 0 sets it.
    """

    def __init__(self, connect: Callable[[], Store], rank: int, size: int) -> None:
        self.rank, self.size, self.exit_code = rank, size, 0
        self._connect, self._store, self._run = connect, connect(), ""
        self._beats: dict[int, tuple[int, float, float]] = {}
        self._given, self._ended = False, threading.Event()
        self._alive = threading.Thread(target=self._live, daemon=True)

    def __enter__(self) -> Self:
        try:
            self._meet()
        except StoreClosedError:
            # It was that of the command before: this process was done with it, rank 0 was not.
            self._store = self._connect()
            self._meet()
        self._alive.start()
        return self

    def _meet(self) -> None:
        joined = self._add("joined", 1)
        # A launcher may start one command after the other: each has keys of its own.
        number = (joined - 1) // self.size
        start = time.monotonic()
        while (here := self._add("joined", 0) - number * self.size) < self.size:
            if time.monotonic() - start > JOIN:
                raise EvaluationError(
                    f"{here} of {self.size} processes are there after {JOIN:.0f} s",
                    "Start as many as WORLD_SIZE says, or run without RANK and WORLD_SIZE.",
                )
            time.sleep(PAUSE)
        self._run = f"{number}/"

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        with suppress(EvaluationError):  # there is nobody left
            if self.rank == 0:
                self._say("end", error)
                end = time.monotonic() + FAREWELL
                while self._add("left", 0) < self.size - 1 and time.monotonic() < end:
                    time.sleep(PAUSE)  # the store that the others still ask may end with this one
            elif not self._given:
                self._say(f"given/{self.rank}", error)
                if isinstance(error, Exception):
                    # A launcher ends all as soon as one has ended: rank 0 speaks first.
                    self._awaited("end", 0)
        self._ended.set()
        if self.rank:
            with suppress(EvaluationError):
                self._add("left", 1)
        self._alive.join(BEAT)  # it holds the store, whose port the next command needs
        del self._store

    def gather(self) -> list[str]:
        """Return what the other processes give, in their order: rank 0.

        Raises:
            LipauditError: another process failed or has ended.
        """
        return [self._heard(f"given/{rank}", rank)["text"] for rank in range(1, self.size)]

    def give(self, text: str) -> None:
        """Give rank 0 the report of a shard, and wait until the run has ended.

        Raises:
            LipauditError: rank 0 failed or has ended.
        """
        self._say(f"given/{self.rank}", None, text)
        self._given = True
        self.exit_code = self._heard("end", 0)["exit_code"]

    def require_first(self) -> None:
        """Look whether rank 0 goes on: the others measure for it.

        Raises:
            LipauditError: it failed or has ended.
        """
        if self._check("end"):
            self._given = True  # nobody reads what would be given
            self._heard("end", 0)
        self._require_alive(0)

    def _say(self, key: str, error: BaseException | None, text: str = "") -> None:
        said: dict[str, Any] = {"message": "", "exit_code": self.exit_code, "text": text}
        if error is not None:
            if not isinstance(error, Exception):
                error = EvaluationError(f"rank {self.rank} was stopped", AGAIN)
            fault = as_user_meets(error) or bug(error)
            said = {n: getattr(fault, n) for n in ("message", "advice", "exit_code")}
        self._asked(self._store.set, key, json.dumps(said))

    def _heard(self, key: str, rank: int) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(self._awaited(key, rank))
        if said["message"]:
            raise LipauditError(said["message"], said["advice"], said["exit_code"])
        return said

    def _awaited(self, key: str, rank: int) -> bytes:
        while not self._check(key):
            self._require_alive(rank)
            time.sleep(PAUSE)
        return bytes(self._asked(self._store.get, key))

    def _require_alive(self, rank: int) -> None:
        now, beat = time.monotonic(), self._add(f"beat/{rank}", 0)
        last, silent, looked = self._beats.get(rank, (beat, 0.0, now))
        # A job that is suspended and goes on was not listening meanwhile, either.
        silent = silent + min(now - looked, BEAT) if beat == last else 0.0
        self._beats[rank] = beat, silent, now
        if silent > LOST:
            raise EvaluationError(f"rank {rank} of {self.size} has ended", AGAIN)

    def _live(self) -> None:
        with suppress(EvaluationError):
            while not self._ended.wait(BEAT):
                self._add(f"beat/{self.rank}", 1)

    def _add(self, key: str, number: int) -> int:
        return int(self._asked(self._store.add, key, number))

    def _check(self, key: str) -> bool:
        return bool(self._asked(lambda name: self._store.check([name]), key))

    def _asked(self, ask: Any, key: str, *args: Any) -> Any:
        try:
            return ask(self._run + key, *args)
        except RuntimeError as error:
            raise StoreClosedError("rank 0, or the launcher, has ended", AGAIN) from error
