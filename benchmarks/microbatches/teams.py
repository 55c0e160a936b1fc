"""The processes of a competitor, as the benchmark sees them: they sleep until a step is asked for.

A process ends when the benchmark closes it, when its pipe breaks, and when the benchmark dies.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from competitors import Job

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux


@dataclass(frozen=True)
class Lap:
    """Some steps in a row of one competitor."""

    seconds: float  # of one step: from the first start to the last end, over their number
    members: list[float]  # the same for each process
    losses: list[float]  # of the process that knows them


class TeamFailed(Exception):
    """A process of a competitor ended, failed or never answered; the text says why."""


class Team:
    """The processes of one competitor."""

    def __init__(
        self, name: str, jobs: Sequence[Job], cache: Path, preloaded: Path | None = None
    ) -> None:
        """Start the processes, with a preloaded library; `ready` waits for them."""
        self.name = name
        self.members: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        context = multiprocessing.get_context("spawn")
        for job in jobs:
            ours, theirs = context.Pipe()
            arguments = (theirs, replace(job, store=store), str(cache), os.getpid())
            process = context.Process(target=serve, args=arguments, daemon=True)
            with _preloading(preloaded):
                process.start()
            theirs.close()
            self.members.append((process, ours))

    def ready(self, seconds: float) -> dict[str, Any]:
        """The facts of the competitor, once its processes are set up."""
        facts: dict[str, Any] = {}
        for answer in reversed(self._answers(seconds)):
            facts |= answer
        return facts

    def lap(self, steps: int, copies: int, seconds: float = 300.0) -> Lap:
        """Take steps in all processes at once."""
        answers = self._ask(("lap", steps, copies), seconds)
        begin = min(answer["begin"] for answer in answers)
        end = max(answer["end"] for answer in answers)
        members = [(answer["end"] - answer["begin"]) / steps for answer in answers]
        known = [answer["losses"] for answer in answers if not math.isnan(answer["losses"][0])]
        return Lap((end - begin) / steps, members, known[0] if known else [])

    def memory(self, seconds: float = 300.0) -> dict[str, Any]:
        """Peak memory of each device in one step; empty where it cannot be measured."""
        answer = self._ask(("memory", 1, 1), seconds)[0]
        return answer["devices"] or {}

    def _ask(self, message: tuple[str, int, int], seconds: float) -> list[dict[str, Any]]:
        for _, connection in self.members:
            try:
                connection.send(message)
            except OSError as error:
                raise TeamFailed(f"a process of it is gone: {error}") from error
        return self._answers(seconds)

    def _answers(self, seconds: float) -> list[dict[str, Any]]:
        """One answer of each process, in their order; the first failure ends the waiting."""
        answers: dict[int, dict[str, Any]] = {}
        end = time.monotonic() + seconds
        while len(answers) < len(self.members):
            waiting = {
                connection: number
                for number, (_, connection) in enumerate(self.members)
                if number not in answers
            }
            heard = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not heard:
                raise TeamFailed(f"no answer within {seconds:.0f} s")
            for connection in heard:
                assert isinstance(connection, Connection)
                try:
                    answer = connection.recv()
                except (EOFError, OSError) as error:
                    raise TeamFailed("a process of it ended") from error
                if "failed" in answer:
                    raise TeamFailed(answer["failed"])
                answers[waiting[connection]] = answer
        return [answers[number] for number in range(len(self.members))]

    def close(self) -> None:
        """End the processes, at once where they do not answer."""
        for _, connection in self.members:
            connection.close()  # they read the end of it
        for process, _ in self.members:
            process.join(3.0)
            if process.is_alive():
                process.kill()
                process.join()
        self.members.clear()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@contextmanager
def _preloading(library: Path | None) -> Iterator[None]:
    """Processes that start in here have a library loaded before all others."""
    if library is not None:
        os.environ["LD_PRELOAD"] = str(library)
    try:
        yield
    finally:
        os.environ.pop("LD_PRELOAD", None)


class Slowdown:
    """A process that keeps a core busy at equal priority, so that it is half as fast for others."""

    def __init__(self, core: int) -> None:
        code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile os.getppid() == {os.getpid()}:\n"
        code += "    for _ in range(10**7): pass\n"
        self.process = subprocess.Popen([sys.executable, "-c", code], preexec_fn=_with_parent)

    def rest(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def _with_parent() -> None:
    """End with the parent; Ctrl-C is for the parent, which ends its children."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def serve(connection: Connection, job: Job, cache: str, parent: int) -> None:
    """The life of a process: set up once, then steps whenever they are asked for."""
    _with_parent()
    if os.getppid() != parent:
        return  # it died before
    os.environ["XDG_CACHE_HOME"] = cache
    os.sched_setaffinity(0, set(job.cores))
    try:
        _serve(connection, job)
    except (EOFError, BrokenPipeError):
        return  # the benchmark is done
    except BaseException as error:
        words = str(error) if type(error).__name__ == "Missing" else traceback.format_exc()
        connection.send({"failed": words})


def _serve(connection: Connection, job: Job) -> None:
    import torch
    from competitors import KINDS, batches

    from roost.presets import machine

    torch.set_num_threads(len(job.cores))
    machine.keep_memory()
    competitor = KINDS[job.kind](job)
    given = batches(job)
    connection.send(competitor.facts)
    while True:
        try:
            what, steps, copies = connection.recv()
        except EOFError:
            break
        if what == "memory":
            connection.send({"devices": competitor.memory(next(given))})
            continue
        chosen = [next(given) for _ in range(steps)]
        begin = time.perf_counter()
        losses = [competitor.step(batch, copies) for batch in chosen]
        end = time.perf_counter()
        connection.send({"begin": begin, "end": end, "losses": losses})
    competitor.close()
