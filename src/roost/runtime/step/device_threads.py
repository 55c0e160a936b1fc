"""Threads of a run: one launcher for each device or for several, and one for each copying link.

A device of the kind `cpu` is a thread with cores of its own, so several of them really work side by
side. `GraphRuntime` and its transfers make these threads.
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
AWAKE_SECONDS = 2e-3  # a thread with a core of its own looks so long before it sleeps
_STARTING = threading.Lock()


def look(is_ready: Callable[[], bool], seconds: float) -> None:
    """Ask again and again, for at most so long, until it is ready; other threads of Python go on.

    A core that sleeps takes its time to wake up.
    """
    end = time.perf_counter() + seconds
    while not is_ready() and time.perf_counter() < end:
        pause(_TURNS)


class RunFailed(Exception):
    """Another thread of the run failed: the value that this thread waits for never comes."""


class Mailbox:
    """One value from one thread to another, once in each step."""

    def __init__(self, awake: float = 0.0) -> None:
        """`awake`: seconds for which the receiver looks before it sleeps."""
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._awake = awake

    def put(self, value: Any) -> None:
        self._queue.put(value)

    def take(self) -> Any:
        if self._awake and self._queue.empty():
            look(lambda: not self._queue.empty(), self._awake)
        value = self._queue.get()
        if value is RunFailed:
            self.end()  # for the next that waits
            raise RunFailed
        return value

    def end(self) -> None:
        self._queue.put(RunFailed)


class OldValueReads(Mailbox):
    """Events of the reads of a parameter's old value in this step; the update waits for all."""

    def has(self, count: int) -> bool:
        return self._queue.qsize() >= count

    def take_all(self, count: int) -> list[Event | None]:
        """Wait until so many reads were put here; give the points where they are done."""
        return [self.take() for _ in range(count)]


@contextmanager
def thread_count_kept() -> Iterator[None]:
    """Start threads in here that set how many threads PyTorch splits their ops over.

    New threads inherit the number that any thread has set last. So it is set back in the end, and
    such threads start one at a time.
    """
    with _STARTING:
        before = torch.get_num_threads()
        try:
            yield
        finally:
            torch.set_num_threads(before)


class TaskThread:
    """A thread that runs the tasks it is given one after the other, and reports a failure."""

    def __init__(
        self,
        name: str,
        failed: Callable[[BaseException], None],
        cores: set[int] | None = None,
        threads: int = 0,
    ) -> None:
        """`threads` that ops of the CPU are split over; 0: one a core, or PyTorch's own number."""
        machine.keep_memory()
        self._tasks: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._failed = failed
        self._cores = cores
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
                f"that this process may use"
            )

    def submit(self, task: Callable[[], Any]) -> None:
        self._tasks.put(task)

    def close(self) -> None:
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            if self._cores:
                os.sched_setaffinity(0, self._cores)  # of this thread
        # No such core, or one that this process may not use, or not a number.
        except Exception as error:
            self._refused = error
            self._ready.set()
            return
        # Set even if it changes nothing: else PyTorch splits a product over as many threads as are
        # free, and another order of summing gives another sum. Ask first: a thread that never asked
        # takes over, at its first op, the number that another thread has set meanwhile.
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads or before)
        self._ready.set()
        with torch.no_grad():
            while (task := self._tasks.get()) is not None:
                try:
                    task()
                except RunFailed:
                    pass
                except BaseException as error:
                    self._failed(error)
                del task  # it may hold much memory
