"""What runs side by side: a thread for each device, and one for each way between two devices.

A device of the kind `cpu` is a thread with cores of its own, so that several of them are several
devices in earnest.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch

from roost.errors import InputError
from roost.presets import machine
from roost.runtime.step.busy_wait import pause
from roost.runtime.step.devices import Event

_TURNS = 50_000  # of a pause: some microseconds
AWAKE_SECONDS = 2e-3  # seconds that a thread with a core of its own looks before it sleeps
_STARTING = threading.Lock()


def look(there: Callable[[], bool], seconds: float) -> None:
    """Look again and again, for so long, whether something is there; other threads of Python go on
    meanwhile."""
    end = time.perf_counter() + seconds
    while not there() and time.perf_counter() < end:
        pause(_TURNS)


class RunFailed(Exception):
    """Somebody else failed: nothing more will come."""


class Mailbox:
    """One value from one thread to another, once in each step."""

    def __init__(self, awake: float = 0.0) -> None:
        """Who waits for it stays awake for so many seconds: a core that sleeps takes its time to
        wake up."""
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._awake = awake

    def put(self, value: Any) -> None:
        self._queue.put(value)

    def take(self) -> Any:
        if self._awake and self._queue.empty():
            look(lambda: not self._queue.empty(), self._awake)
        value = self._queue.get()
        if value is RunFailed:
            raise RunFailed
        return value

    def end(self) -> None:
        self._queue.put(RunFailed)


class OldValueReads:
    """Who has read the old value of a parameter in this step; whoever writes the new one waits for
    all of them."""

    def __init__(self) -> None:
        self._marks: SimpleQueue[Any] = SimpleQueue()

    def add(self, mark: Event | None) -> None:
        """Someone will have read it at this point."""
        self._marks.put(mark)

    def there(self, count: int) -> bool:
        """Whether so many have been added."""
        return self._marks.qsize() >= count

    def take(self, count: int) -> list[Event | None]:
        """The points to wait for, when so many have been added."""
        found = []
        for _ in range(count):
            mark = self._marks.get()
            if mark is RunFailed:
                self.end()  # for who comes next
                raise RunFailed
            found.append(mark)
        return found

    def end(self) -> None:
        self._marks.put(RunFailed)


@contextmanager
def thread_count_kept() -> Iterator[None]:
    """Start threads that set, before the end of this, over how many threads PyTorch splits their
    ops.

    What one thread sets is what new threads begin with, so it is set back; and they are started one
    at a time, or what one of them has set would be taken by another for the number of its caller.
    """
    with _STARTING:
        before = torch.get_num_threads()
        try:
            yield
        finally:
            torch.set_num_threads(before)


class TaskThread:
    """A thread that does what it is given, one thing after the other, and tells when it failed."""

    def __init__(
        self,
        name: str,
        failed: Callable[[BaseException], None],
        cores: set[int] | None = None,
        threads: int = 0,
    ) -> None:
        """`threads` that ops of the CPU are split over; by default one for each core, or as many as
        PyTorch has."""
        machine.keep_memory()
        self._work: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._failed, self._cores = failed, cores
        self._threads = threads or len(cores or ())
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._ready = threading.Event()
        self._refused: Exception | None = None
        with thread_count_kept():
            self._thread.start()
            self._ready.wait()
        if self._refused is not None:
            self._thread.join()
            raise InputError(
                f"the thread of {name!r} cannot have cores {cores}: {self._refused}; give cores "
                f"that this process may "
                "use"
            )

    def give(self, work: Callable[[], Any]) -> None:
        self._work.put(work)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            if self._cores:
                os.sched_setaffinity(0, self._cores)  # of this thread
        # No such core, or none that this process may use, or no number of one.
        except Exception as error:
            self._refused = error
            self._ready.set()
            return
        # Said even where it changes nothing: otherwise products are split over as many threads as
        # are free, and a sum made in another order is another sum. Asked for before: a thread that
        # has never asked takes over, at its first op, what another thread has set in the meantime.
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads or before)
        self._ready.set()
        with torch.no_grad():
            while (work := self._work.get()) is not None:
                try:
                    work()
                except RunFailed:
                    pass
                except BaseException as error:
                    self._failed(error)
                del work  # what it holds may be large
