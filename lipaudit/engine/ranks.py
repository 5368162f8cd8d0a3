"""Processes of one run that a launcher started: they share its batches, rank 0 makes its report.

Batches are handed out one by one, by a counter that all processes share, so that a slow one does
not hold up the others. What they give goes to rank 0 through the same store of torch.distributed.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from lipaudit.data.batch import Batch
from lipaudit.engine.journal import packed, unpacked
from lipaudit.engine.place import Place
from lipaudit.errors import EvaluationError, LipauditError, as_user_meets, bug
from lipaudit.measures import Part

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

JOIN = 300.0
"""Seconds within which all processes have to be there."""
BEAT, LOST = 2.0, 30.0
"""A process gives a sign of life every so many seconds; without one for so long it has ended."""
PAUSE = 0.05
FAREWELL = 5.0
"""Seconds that rank 0 waits for the others to hear how the run has ended."""
ENDED = 2**40
"""More batches than there are: a counter there hands out no more."""
AGAIN = "What is finished is kept: --resume goes on, with any number of processes."


def join(place: Place) -> Ranks:
    """Meet the other processes.

    Raises:
        EvaluationError: they do not come.
    """
    return Ranks(_store(place), place.rank, place.size, again=lambda: _store(place))


def _store(place: Place) -> Store:
    from torch.distributed.rendezvous import rendezvous

    url = f"tcp://{place.host}:{place.port}?rank={place.rank}&world_size={place.size}"
    try:
        store, *_ = next(rendezvous(url, timeout=timedelta(seconds=JOIN)))
    except RuntimeError as error:
        raise EvaluationError(
            f"rank {place.rank} of {place.size} cannot reach {place.host}:{place.port}",
            "Look whether rank 0 runs there; alone, run without RANK and WORLD_SIZE.",
        ) from error
    return store


class _Gone(EvaluationError):
    """The store that the processes share is not there any more."""


@dataclass(frozen=True)
class Begun:
    """What rank 0 says of a measure that begins.

    Attributes:
        options: those that are not as they were given.
        finished: samples that an earlier run measured.
        keeps: whether what is finished is kept on disk.
    """

    options: dict[str, Any]
    finished: tuple[str, ...]
    keeps: bool


class Ranks:
    """One process among those of a run; to be entered, which waits for the others.

    Args:
        store: that all of them share.
        rank: of this one; rank 0 gathers.
        size: how many there are.
        again: gives the store anew, should it end before all are there.
    """

    def __init__(
        self, store: Store, rank: int, size: int, *, again: Callable[[], Store] | None = None
    ) -> None:
        self.rank, self.size = rank, size
        self._store, self._run, self._again = store, "", again
        self._gathered: dict[tuple[str, int], int] = {}
        self._beats: dict[int, tuple[int, float, float]] = {}
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        try:
            self._meet()
        except _Gone:
            # It was that of the command before: this process was done with it, rank 0 was not.
            if self._again is None:
                raise
            self._store = self._again()
            self._meet()
        threading.Thread(target=self._live, daemon=True).start()
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
        self._ended.set()
        if self.rank == 0:
            self._part_from_others(error)
        else:
            self._quietly(f"stopped/{self.rank}", int(error is not None))
            self._quietly("left", 1)

    def begin(self, measure: str, begun: Begun) -> None:
        """Say to the others that a measure begins: rank 0."""
        self._set(f"{measure}/begun", json.dumps(vars(begun)))

    def begun(self, measure: str) -> Begun:
        """Wait until a measure begins.

        Raises:
            LipauditError: rank 0 has ended.
        """
        said = json.loads(self._awaited(f"{measure}/begun"))
        return Begun(said["options"], tuple(said["finished"]), said["keeps"])

    def conclude(self, exit_code: int) -> None:
        """Say with which code all end: rank 0."""
        self._set("conclusion", str(int(exit_code)))

    def conclusion(self) -> int:
        """Wait until rank 0 says with which code all end.

        Raises:
            LipauditError: rank 0 has ended.
        """
        return int(self._awaited("conclusion"))

    def require_whole(self) -> None:
        """Look whether the others go on; rank 0 looks after all of them.

        Raises:
            LipauditError: one of them failed or has ended.
        """
        if self._check("over"):
            raise _fault(json.loads(self._get("over")))
        self._require_alive([0] if self.rank else range(1, self.size))

    def end(self, error: BaseException) -> None:
        """Say that the run has failed, if there is anybody to tell."""
        with suppress(EvaluationError):
            self._set("over", json.dumps(_said(error)))

    def store(self) -> Store:
        """Return a store for a process group: its waiting does not hold up the signs of life."""
        from torch._C._distributed_c10d import PrefixStore

        return PrefixStore(f"{self._run}group", self._store.clone())

    def units(self, measure: str, batches: Sequence[Batch]) -> Iterator[Batch]:
        """Yield those of the batches that no other process takes, each when it is asked for."""
        while (number := self._add(f"{measure}/next", 1) - 1) < len(batches):
            yield batches[number]

    def hand_in(self, measure: str, part: Part) -> None:
        """Give a part to rank 0."""
        number = self._add(f"{measure}/given/{self.rank}", 0)
        self._set(f"{measure}/part/{self.rank}/{number}", packed([part]))
        self._add(f"{measure}/given/{self.rank}", 1)

    def fail(self, measure: str, error: Exception) -> None:
        """Say that a measure failed: it is over for all."""
        self._set(f"{measure}/fault", json.dumps(_said(error)))
        self._add(f"{measure}/next", ENDED)

    def gathered(
        self, measure: str, own: Iterator[Part], batches: Sequence[Batch], end: float = math.inf
    ) -> Iterator[Part]:
        """Yield the parts of all processes, as they come: rank 0.

        Args:
            measure: whose.
            own: those of this process.
            batches: what is measured.
            end: the reading of `time.monotonic` from which no further batch is handed out; those
                that are begun are waited for.

        Raises:
            LipauditError: another process failed or has ended.
        """
        samples = 0
        try:
            for part in own:
                samples -= len(part.ids)
                yield part
                for other in self._handed_in(measure):
                    samples -= len(other.ids)
                    yield other
            begun = len(batches)
            if time.monotonic() >= end:
                begun = self._add(f"{measure}/next", ENDED) - ENDED
            samples += sum(map(len, batches[:begun]))
            while samples > 0:
                self._require_alive(range(1, self.size))
                for other in self._handed_in(measure):
                    samples -= len(other.ids)
                    yield other
                time.sleep(PAUSE)
        except BaseException:  # a rank 0 that is stopped, too: what the others do is for it
            self._add(f"{measure}/next", ENDED)
            raise

    def _handed_in(self, measure: str) -> Iterator[Part]:
        if self._check(f"{measure}/fault"):
            raise _fault(json.loads(self._get(f"{measure}/fault")))
        for rank in range(1, self.size):
            key = measure, rank
            for number in range(
                self._gathered.get(key, 0), self._add(f"{measure}/given/{rank}", 0)
            ):
                name = f"{measure}/part/{rank}/{number}"
                yield from unpacked(self._get(name).decode())
                self._store.delete_key(self._run + name)
                self._gathered[key] = number + 1

    def _require_alive(self, ranks: Sequence[int]) -> None:
        now = time.monotonic()
        for rank in ranks:
            beat = self._add(f"beat/{rank}", 0)
            last, silent, looked = self._beats.get(rank, (beat, 0.0, now))
            # A job that is suspended and goes on was not listening meanwhile, either.
            silent = silent + min(now - looked, BEAT) if beat == last else 0.0
            self._beats[rank] = beat, silent, now
            if silent > LOST or self._add(f"stopped/{rank}", 0):
                raise EvaluationError(f"rank {rank} of {self.size} has ended", AGAIN)

    def _live(self) -> None:
        while not self._ended.wait(BEAT):
            self._quietly(f"beat/{self.rank}", 1)

    def _part_from_others(self, error: BaseException | None) -> None:
        """Wait a little for the others: the store that they still ask may end with this one."""
        if error is not None:
            self.end(error)
        end = time.monotonic() + FAREWELL
        with suppress(EvaluationError):  # there is nobody left
            while self._add("left", 0) < self.size - 1 and time.monotonic() < end:
                time.sleep(PAUSE)

    def _quietly(self, key: str, number: int) -> None:
        try:
            self._add(key, number)
        except EvaluationError:
            self._ended.set()

    def _awaited(self, key: str) -> bytes:
        while not self._check(key):
            self.require_whole()
            time.sleep(PAUSE)
        return self._get(key)

    def _add(self, key: str, number: int) -> int:
        return int(self._asked(self._store.add, key, number))

    def _set(self, key: str, value: str) -> None:
        self._asked(self._store.set, key, value)

    def _get(self, key: str) -> bytes:
        return bytes(self._asked(self._store.get, key))

    def _check(self, key: str) -> bool:
        return bool(self._asked(lambda name: self._store.check([name]), key))

    def _asked(self, ask: Any, key: str, *args: Any) -> Any:
        try:
            return ask(self._run + key, *args)
        except RuntimeError as error:
            raise _Gone("rank 0, or the launcher, has ended", AGAIN) from error


def _said(error: BaseException) -> dict[str, Any]:
    if not isinstance(error, Exception):
        error = EvaluationError("rank 0 was stopped", AGAIN)
    fault = as_user_meets(error) or bug(error)
    return {"message": fault.message, "advice": fault.advice, "exit_code": fault.exit_code}


def _fault(said: Mapping[str, Any]) -> LipauditError:
    return LipauditError(said["message"], said["advice"], said["exit_code"])
