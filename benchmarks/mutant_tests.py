"""Runs the tests of a mutant: those that call the changed function first, the quickest in front.

The tests run in a fork of this process, which has imported the heavy packages once. Roost itself is
imported by the fork alone, from a copy of the tracked files.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MEMORY = 8 << 30  # bytes: a mutant may ask for ever more
HEAVY = ("numpy", "numba", "torch", "hypothesis", "jsonschema", "scipy.optimize", "networkx")
STARTERS = ("/subprocess.py", "/multiprocessing/process.py", "/multiprocessing/context.py")
ENDED_BY_ALARM = -signal.SIGALRM


def digest(paths: list[Path]) -> str:
    """Digest of files, and of all Python files of folders."""
    text = hashlib.sha256()
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            text.update(file.read_bytes())
    return text.hexdigest()[:16]


@dataclass
class Calls:
    """Seconds of each test, and the functions that each test calls."""

    seconds: dict[str, float] = field(default_factory=dict)  # test -> seconds
    of: dict[str, list[str]] = field(default_factory=dict)  # "file function" -> tests
    starters: list[str] = field(default_factory=list)  # tests that start other processes

    def tests_of(self, file: str, function: str) -> list[str]:
        """Tests that call the function; of a line outside of all functions, those of its file."""
        exact = self.of.get(f"{file} {function}")
        if exact is not None:
            return exact
        within = (tests for name, tests in self.of.items() if name.startswith(f"{file} "))
        return sorted({test for tests in within for test in tests})

    def others_of(self, callers: list[str]) -> list[str]:
        """Tests that may notice a change of a function though they do not call it here.

        They share fixtures with callers, or start processes, which may call it.
        """
        files = {test.partition("::")[0] for test in callers}
        shared = [test for test in self.seconds if test.partition("::")[0] in files]
        return sorted({*shared, *self.starters} - {*callers})

    def order(self, tests: list[str], near: str) -> dict[str, int]:
        """Place of each test: those of the file `near` first, then quick test files, then quick tests.

        Tests of one file stay together, since they share fixtures.
        """
        by_file: dict[str, list[str]] = defaultdict(list)
        for test in tests:
            by_file[test.partition("::")[0]].append(test)
        seconds = {name: sum(map(self._least, group)) for name, group in by_file.items()}
        files = sorted(by_file, key=lambda name: (Path(name).name != near, seconds[name], name))
        ordered = [test for name in files for test in sorted(by_file[name], key=self._least)]
        return {test: place for place, test in enumerate(ordered)}

    def _least(self, test: str) -> float:
        return self.seconds.get(test, 0.0)


class Recorder:
    """A plug-in of pytest that fills `Calls`."""

    def __init__(self, source: Path) -> None:
        self.prefix = f"{source}{os.sep}"
        self.calls = Calls()
        self.now: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        """Watch which functions a test calls, its fixtures included."""
        self.now = set()
        began = time.perf_counter()
        threading.settrace(self._called)
        sys.settrace(self._called)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            self.calls.seconds[item.nodeid] = round(time.perf_counter() - began, 4)
            if "process" in self.now:
                self.calls.starters.append(item.nodeid)
            for name in self.now - {"process"}:
                self.calls.of.setdefault(name, []).append(item.nodeid)

    def _called(self, frame: Any, event: str, argument: Any) -> None:
        """Note the function; no trace of its lines."""
        code = frame.f_code
        if code.co_filename.startswith(self.prefix):
            name = re.sub(r"\.?<[a-z]*>", "", code.co_qualname)
            self.now.add(f"src/{code.co_filename.removeprefix(self.prefix)} {name}")
        elif code.co_filename.endswith(STARTERS):
            self.now.add("process")


class Chosen:
    """A plug-in of pytest that runs some tests in an order, each with a time limit."""

    def __init__(self, places: dict[str, int], calls: Calls, more: int) -> None:
        self.places = places
        self.calls = calls
        self.more = more  # seconds, to compile loops

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keep the chosen tests, in their order."""
        if self.places:
            items[:] = [item for item in items if item.nodeid in self.places]
            items.sort(key=lambda item: self.places[item.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        """End the process where a test takes far longer than without a change."""
        seconds = self.calls.seconds.get(item.nodeid, 0.0)
        signal.alarm(30 + self.more + int(10 * seconds))
        try:
            return (yield)
        finally:
            signal.alarm(0)


class Copy:
    """A copy of the tracked files, in which the tests of a mutant run."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.tree = place / "tree"
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
        )
        shutil.rmtree(self.tree, ignore_errors=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.tree / name)

    def loops(self) -> set[Path]:
        """The caches of compiled loops: one for each state of their text."""
        return set((self.place / "numba").glob("*/kernels-*"))

    def test(self, tests: list[Path], limit: float, *plugins: Any) -> tuple[str, float, str]:
        """`passed`, `failed` or `slow`; seconds; the test that failed."""
        began = time.monotonic()
        output = self.place / "output.txt"
        code = forked(lambda: self._pytest(tests, output, plugins), limit)
        lines = output.read_text(errors="replace").strip().splitlines()
        if code in (3, 4, 5) or code == 99:
            raise RuntimeError(f"pytest cannot run {tests}: {lines[-1:]}")
        named = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
        slow = code in (None, ENDED_BY_ALARM)
        outcome = "slow" if slow else "passed" if code == 0 else "failed"
        return outcome, time.monotonic() - began, (named or lines or [""])[-1][:200]

    def calls(self, tests: list[Path]) -> Calls:
        """Which test calls which function; read from the last time as long as no file changed."""
        source = self.tree / "src"
        file = self.place / f"all-calls-{digest([*tests, source / 'roost'])}.json"
        if not file.exists():
            recorder = Recorder(source)

            def record() -> int:
                code = self._pytest(tests, self.place / "output.txt", (recorder,))
                file.with_suffix(".new").write_text(json.dumps(asdict(recorder.calls)))
                return code

            code = forked(record, 3600)
            if code != 0:
                text = (self.place / "output.txt").read_text().splitlines()[-1:]
                raise SystemExit(f"the tests {tests} fail without a change: {text}")
            file.with_suffix(".new").rename(file)
        return Calls(**json.loads(file.read_text()))

    def _pytest(self, tests: list[Path], output: Path, plugins: tuple[Any, ...]) -> int:
        """Run pytest in this process, a fork, with Roost from the copy."""
        os.chdir(self.tree)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(self.tree / "src"))
        os.environ |= {
            "NUMBA_CACHE_DIR": str(self.place / "numba"),
            "PYTHONPATH": str(self.tree / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        ignored = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        words = ["-x", "--tb=no", "-p", "no:cacheprovider", *ignored, *map(str, tests)]
        return int(pytest.main(words, plugins=list(plugins)))


def forked(job: Any, limit: float) -> int | None:
    """Exit code of a job in a process of its own; None if it takes too long."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
            code = job()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    end = time.monotonic() + limit
    status = None
    try:
        while status is None and time.monotonic() < end:
            done, found = os.waitpid(child, os.WNOHANG)
            status = found if done else None
            time.sleep(0.02)
    finally:
        for process in _session(child):
            os.kill(process, signal.SIGKILL)
        if status is None:
            os.waitpid(child, 0)
    return None if status is None else os.waitstatus_to_exitcode(status)


def _session(leader: int) -> Iterator[int]:
    """Processes that a test has left: those of its session."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) == leader:
                yield int(folder.name)
        except ProcessLookupError:
            continue


def import_heavy() -> None:
    """Import once what most tests need; not Roost."""
    for name in HEAVY:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    assert "roost" not in sys.modules
