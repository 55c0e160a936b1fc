"""What runs side by side: a thread for each device, and one for each way between two devices.

A device of the kind `cpu` is a thread with cores of its own, so that several of them are several devices in earnest.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

from roost.runtime.places import Mark


class Ended(Exception):
    """Somebody else failed: nothing more will come."""


class Box:
    """One value from one thread to another, once in each step."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()

    def put(self, value: Any) -> None:
        self._queue.put(value)

    def take(self) -> Any:
        value = self._queue.get()
        if value is Ended:
            raise Ended
        return value

    def end(self) -> None:
        self._queue.put(Ended)


class Reads:
    """Who has read the old value of a parameter in this step; whoever writes the new one waits for all of them."""

    def __init__(self) -> None:
        self._marks: SimpleQueue[Any] = SimpleQueue()

    def add(self, mark: Mark | None) -> None:
        """Someone will have read it at this point."""
        self._marks.put(mark)

    def there(self, count: int) -> bool:
        """Whether so many have been added."""
        return self._marks.qsize() >= count

    def take(self, count: int) -> list[Mark | None]:
        """The points to wait for, when so many have been added."""
        found = []
        for _ in range(count):
            mark = self._marks.get()
            if mark is Ended:
                self.end()  # for who comes next
                raise Ended
            found.append(mark)
        return found

    def end(self) -> None:
        self._marks.put(Ended)


class Worker:
    """A thread that does what it is given, one thing after the other, and tells when it failed."""

    def __init__(self, name: str, failed: Callable[[BaseException], None], cores: set[int] | None = None) -> None:
        self._work: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._failed, self._cores = failed, cores
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def give(self, work: Callable[[], Any]) -> None:
        self._work.put(work)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        if self._cores:
            os.sched_setaffinity(0, self._cores)  # of this thread
        # Said even where it changes nothing: otherwise products are split over as many threads as are free, and a sum
        # made in another order is another sum.
        torch.set_num_threads(len(self._cores) if self._cores else torch.get_num_threads())
        with torch.no_grad():
            while (work := self._work.get()) is not None:
                try:
                    work()
                except Ended:
                    pass
                except BaseException as error:
                    self._failed(error)
                del work  # what it holds may be large
