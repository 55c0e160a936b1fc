"""Copies of weights that go on while both devices work, for the window of a placed model.

On a GPU a stream with events copies; between devices that are threads of a CPU a thread does. A
copy begins after the last use of the weights in its place, and only its reader waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]  # target, source


class CopyQueue(Protocol):
    """Copies in the order they are asked for."""

    def copy(self, pairs: Sequence[Pair], after: Sequence[Any]) -> Any:
        """Begin to copy after these events; give what to wait for."""

    def wait(self, ready: Any) -> None:
        """Make all computation from now on wait for a copy."""

    def record_event(self) -> Any:
        """Mark the point where all computation asked for so far is done."""

    def close(self) -> None: ...


class CudaCopyQueue:
    """A copy stream beside the stream that computes."""

    def __init__(self, device: torch.device) -> None:
        self.index = device.index  # found faster by its number, for every module
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, pairs: Sequence[Pair], after: Sequence[torch.cuda.Event]) -> torch.cuda.Event:
        for event in after:
            self.stream.wait_event(event)
        with torch.cuda.stream(self.stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        ready: torch.cuda.Event = self.stream.record_event()
        return ready

    def wait(self, ready: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.index).wait_event(ready)

    def record_event(self) -> torch.cuda.Event:
        now: torch.cuda.Event = torch.cuda.current_stream(self.index).record_event()
        return now

    def close(self) -> None:
        self.stream.synchronize()


class ThreadCopyQueue:
    """A thread that copies while another computes on a CPU; a computation ends with its call."""

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
            error = self._error
            self._error = None
            raise error

    def record_event(self) -> None:
        return None

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        with torch.inference_mode():  # the weights may be inference tensors
            while (work := self._work.get()) is not None:
                pairs, ready = work
                try:
                    for target, source in pairs:
                        target.copy_(source)
                except BaseException as error:
                    self._error = error
                ready.set()
