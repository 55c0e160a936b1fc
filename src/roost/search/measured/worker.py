"""A worker process, seen from outside: it gets requests with limits, and is ended if it fails.

`served_model.py` is the other side: the code that runs in the process.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from math import inf
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from roost.core.problem import Problem
from roost.core.units import show_bytes, show_seconds
from roost.errors import RoostError
from roost.search.measured.model_source import ModelSource

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.02  # between two looks at the memory of the process
_END_SECONDS = 2.0  # for a process to end by itself


class WorkerFailed(RoostError):
    """A request failed.

    `kind` is time, memory (none was left), runaway (the process held more than its limit), died,
    refused (the placement cannot run, and did not) or failed. Unless it is refused, the process has
    ended.
    """

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


class WorkerProcess:
    """One process, from its start to its end."""

    def __init__(
        self,
        source: ModelSource,
        problem: Problem,
        runtime: Callable[..., Any] | None,
        limit: float,
        most_bytes: float,
    ) -> None:
        """Wait until the model is built and captured there. Raises `WorkerFailed`."""
        packed = pickle.dumps((source.packed(), problem, runtime))
        context = multiprocessing.get_context("spawn")  # not forked: this process may have threads
        _start_tracker()
        self._connection, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(
            target=_serve, args=(theirs,), name="roost-measure", daemon=True
        )
        # Ctrl-C is for the process that searches, which then ends this one.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self.rss = 0  # bytes, once the model is there
        self._busy = True
        self._closed = False
        with contextlib.suppress(BrokenPipeError):  # it died at once: the next line says so
            self._connection.send_bytes(packed)
        try:
            self._answer(time.monotonic() + limit, limit, most_bytes)
        except WorkerFailed:
            self.close()
            raise
        self.rss = rss_of(self.pid)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def held_bytes(self) -> int:
        return rss_of(self.pid)

    def ask(self, command: str, *args: Any, limit: float, most_bytes: float = inf) -> Any:
        """The answer to a request, within so many seconds and so many bytes of memory."""
        self._busy = True
        with contextlib.suppress(BrokenPipeError):
            self._connection.send((command, args))
        return self._answer(time.monotonic() + limit, limit, most_bytes)

    def _answer(self, until: float, limit: float, most_bytes: float) -> Any:
        try:
            while not wait([self._connection], _LOOK_SECONDS):
                if self._is_dead() and not self._connection.poll():
                    # The connection may stay open: a process that it started holds the other end.
                    raise EOFError
                if time.monotonic() > until:
                    raise WorkerFailed("time", f"did not end within {show_seconds(limit)}")
                if (held := rss_of(self.pid)) > most_bytes:
                    allowed = show_bytes(int(most_bytes))
                    why = f"held {show_bytes(held)}; its limit is {allowed}"
                    raise WorkerFailed("runaway", why)
            fine, answer = self._connection.recv()
            self._busy = False
            if not fine:
                raise WorkerFailed(*answer)
            return answer
        except (EOFError, ConnectionError):
            self._wait_for_end()
            self.close()
            raise WorkerFailed("died", _ending(self._process.exitcode)) from None
        except BaseException as error:  # also Ctrl-C: the next request would get its answer
            if not (isinstance(error, WorkerFailed) and error.kind == "refused"):
                self.close()
            raise

    def _is_dead(self) -> bool:
        """True after its end. It is not collected, so that no other process gets its number."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _wait_for_end(self) -> None:
        until = time.monotonic() + _END_SECONDS
        while not self._is_dead() and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        """End the process and all that it has started."""
        if self._closed:
            return
        self._closed = True
        self._connection.close()  # an idle process then ends by itself
        if not self._busy:
            self._wait_for_end()
        end_tree(self.pid)
        self._process.join()


def _serve(connection: Connection) -> None:
    from roost.search.measured.served_model import serve  # loads PyTorch, in the process only

    serve(connection)


def _start_tracker() -> None:
    """Start Python's resource tracker without its warnings.

    A process that is killed leaves a semaphore of a library behind, and a search may kill many.
    """
    quiet = "ignore:resource_tracker:UserWarning"
    sys.warnoptions.append(quiet)  # the tracker inherits these
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(quiet)


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        more = ", as the system does where memory is short" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{more}"
    return f"its process ended by itself, with exit code {code}"


def rss_of(pid: int) -> int:
    """Bytes of memory that a process holds; 0 if unknown."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def available_bytes() -> float:
    """Free memory of this machine; infinite if unknown."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return inf


def end_tree(pid: int) -> None:
    """Kill a process, its group, and its descendants that left the group."""
    for each in (pid, *descendants(pid)):
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if kill is os.kill or os.getpgid(each) == each:  # never our own group
                    kill(each, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """All processes that a process started, and that these started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    pids = [pid]
    for each in pids:
        pids += children.get(each, [])
    return pids[1:]
