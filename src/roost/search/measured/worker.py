"""A process that measures, seen from outside: asked with a time limit, watched, and ended where it
fails."""

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


class Failed(RoostError):
    """What was asked for did not come to an end.

    `kind` is time, memory (there was none left), runaway (it held more than it may), died, refused
    (it cannot be run, and nothing was) or failed. But for refused the process is gone.
    """

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


class Worker:
    """One process, from its start to its end."""

    def __init__(
        self,
        source: ModelSource,
        problem: Problem,
        runtime: Callable[..., Any] | None,
        limit: float,
        most_bytes: float,
    ) -> None:
        """Waits until the model is built and captured there; raises `Failed` where that does not
        work."""
        packed = pickle.dumps((source.packed(), problem, runtime))
        context = multiprocessing.get_context("spawn")  # not forked: this process may have threads
        _start_tracker()
        self._connection, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(
            target=_serve, args=(theirs,), name="roost-measure", daemon=True
        )
        # Ctrl-C is for the process that asks, which then ends this one: from its first moment,
        # while it imports.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self.rss = 0  # bytes, once the model is there
        self._busy, self._closed = True, False
        with contextlib.suppress(BrokenPipeError):  # it died at once: the next line says so
            self._connection.send_bytes(packed)
        try:
            self._answer(time.monotonic() + limit, limit, most_bytes)
        except Failed:
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
        """What it answers within so many seconds, while it holds at most so many bytes."""
        self._busy = True
        with contextlib.suppress(BrokenPipeError):
            self._connection.send((command, args))
        return self._answer(time.monotonic() + limit, limit, most_bytes)

    def _answer(self, until: float, limit: float, most_bytes: float) -> Any:
        try:
            while not wait([self._connection], _LOOK_SECONDS):
                if self._is_dead() and not self._connection.poll():
                    # Not told by the connection: a process that it started may hold the other end.
                    raise EOFError
                if time.monotonic() > until:
                    raise Failed("time", f"did not end within {show_seconds(limit)}")
                if (held := rss_of(self.pid)) > most_bytes:
                    raise Failed(
                        "runaway",
                        f"held {show_bytes(held)}, of {show_bytes(int(most_bytes))} that it may",
                    )
            fine, answer = self._connection.recv()
            self._busy = False
            if not fine:
                raise Failed(*answer)
            return answer
        except (EOFError, ConnectionError):
            self._wait_for_end()
            self.close()
            raise Failed("died", _ending(self._process.exitcode)) from None
        # Ctrl-C too: its answer would be taken for that to the next question.
        except BaseException as error:
            if not (isinstance(error, Failed) and error.kind == "refused"):
                self.close()
            raise

    def _is_dead(self) -> bool:
        """Whether it has ended. It is not collected by that: its number is not given to another
        process before."""
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return found is not None

    def _wait_for_end(self) -> None:
        until = time.monotonic() + _END_SECONDS
        while not self._is_dead() and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        """End it, and all that it has started."""
        if self._closed:
            return
        self._closed = True
        self._connection.close()  # one that waits for a question ends by itself
        if not self._busy:
            self._wait_for_end()
        end_tree(self.pid)
        self._process.join()


def _serve(connection: Connection) -> None:
    from roost.search.measured.worker_process import serve  # PyTorch, in that process only

    serve(connection)


def _start_tracker() -> None:
    """Start what Python tidies up with after processes, if it is not there: without a word of what
    it tidied up.

    A process that is killed leaves a semaphore of a library behind, and a search may kill many.
    """
    quiet = "ignore:resource_tracker:UserWarning"
    sys.warnoptions.append(quiet)  # what it is started with
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
    """Bytes of memory that a process holds; 0 where that cannot be known."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def available_bytes() -> float:
    """Memory of this machine that is free for the taking; infinite where that cannot be known."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return inf


def end_tree(pid: int) -> None:
    """Kill a process with its group, and those that it started and that left the group."""
    for each in (pid, *descendants(pid)):
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if kill is os.kill or os.getpgid(each) == each:  # never a group that is ours
                    kill(each, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """All processes that a process started, and those that these did, as far as they are its
    children still."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = entry.read_text()
            parents.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(
                int(entry.parent.name)
            )
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return found[1:]
