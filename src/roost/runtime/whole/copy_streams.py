"""The way from where weights live to where they are used: copies that go on while both sides work.

On a GPU a stream with events; between devices that are threads of a CPU a thread. A copy is begun
once what stood in its place was used for the last time, and nobody but who uses it waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]  # where to, where from


class CopyQueue(Protocol):
    """Copies in the order they are asked for."""

    def copy(self, pairs: Sequence[Pair], after: Sequence[Any]) -> Any:
        """Begin to copy, after those marks; what to wait for."""

    def wait(self, ready: Any) -> None:
        """Whatever is computed from now on comes after that copy."""

    def mark(self) -> Any:
        """Everything that has been asked to be computed by now."""

    def close(self) -> None: ...


class CudaCopyQueue:
    """A copy stream beside the stream that computes."""

    def __init__(self, device: torch.device) -> None:
        self.index = device.index  # a number is looked up faster, and this is done for every module
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, pairs: Sequence[Pair], after: Sequence[torch.cuda.Event]) -> torch.cuda.Event:
        for mark in after:
            self.stream.wait_event(mark)
        with torch.cuda.stream(self.stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        ready: torch.cuda.Event = self.stream.record_event()
        return ready

    def wait(self, ready: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.index).wait_event(ready)

    def mark(self) -> torch.cuda.Event:
        now: torch.cuda.Event = torch.cuda.current_stream(self.index).record_event()
        return now

    def close(self) -> None:
        self.stream.synchronize()


class ThreadCopyQueue:
    """A thread that copies while another computes; what is computed is done when it is asked
    for."""

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[Sequence[Pair], threading.Event] | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def copy(self, pairs: Sequence[Pair], after: Sequence[Any]) -> threading.Event:
        ready = threading.Event()
        self._work.put((pairs, ready))
        return ready

    def wait(self, ready: threading.Event) -> None:
        ready.wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def mark(self) -> None:
        return None

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        with torch.inference_mode():  # weights may have been made in it
            while (work := self._work.get()) is not None:
                pairs, ready = work
                try:
                    for target, source in pairs:
                        target.copy_(source)
                except BaseException as error:
                    self._error = error
                ready.set()
