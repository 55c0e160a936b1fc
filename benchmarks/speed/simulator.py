"""How fast the simulator is: ratios measured side by side in one run, in CPU time, best of several
repeats.

    python benchmarks/speed/simulator.py [--save]

Nothing is asserted about time. What is asserted is the work: every way of simulating must give the
same step times, peaks and numbers of transfers. `--save` writes the page to benchmarks/results/.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.simulator import reference
from roost.simulator.compiled import Simulator
from roost.simulator.kernels.base import Layout, compiled, new_moves
from roost.simulator.kernels.push import push, push_times
from roost.testing.problems import scattered, training_like

HERE = Path(__file__).parent
SIZES = (100, 1_000, 10_000, 100_000)
DEVICES = (4, 8)
RUNS = {"scattered": 1, "in runs of 16": 16}  # ops in a row that share a device
WORK = 1_500_000  # ops simulated in each repeat, at the least


def cpu_seconds(work: Callable[[], object], repeats: int = 5) -> float:
    best = float("inf")
    for _ in range(repeats):
        begin = time.thread_time()
        work()
        best = min(best, time.thread_time() - begin)
    return best


@compiled
def push_rows(layout, devices, held, memory, step_time, peak, num_transfers):  # type: ignore[no-untyped-def]
    """What the twin does: the push pass over each row, with nothing around it."""
    num_ops = devices.shape[1]
    ready, dying = np.zeros(num_ops), np.zeros(num_ops, np.int64)
    free, bus_free, arrives = np.zeros(64), np.zeros(len(layout.bus_gap)), np.zeros(64)
    last, now = np.zeros(64, np.uint32), np.zeros(64, np.int64)
    moves = new_moves(0)
    for row in range(len(devices)):
        now[: layout.num_devices] = held[row]
        if memory:
            step_time[row], num_transfers[row] = push(
                layout,
                devices[row],
                ready,
                dying,
                free,
                bus_free,
                arrives,
                last,
                now,
                peak[row],
                moves,
            )
        else:
            step_time[row], num_transfers[row] = push_times(
                layout,
                devices[row],
                ready,
                dying,
                free,
                bus_free,
                arrives,
                last,
                now,
                peak[row],
                moves,
            )


ARRAYS = ("time", "output", "workspace", "next_start", "next", "bus")
RATES = ("latency", "seconds_per_byte", "bus_gap", "device_gap")
FIELDS = (*ARRAYS, *RATES)  # in the order of the struct in twin.cpp


class Twin:
    """The same pass in C++, compiled here."""

    class Arrays(ctypes.Structure):
        _fields_ = [(n, ctypes.c_int64) for n in ("num_ops", "num_devices", "num_buses")] + [
            (n, ctypes.c_void_p) for n in FIELDS
        ]

    def __init__(self, folder: Path) -> None:
        library = folder / "twin.so"
        # Without -ffp-contract=off gcc fuses multiply and add, and the last digit differs.
        flags = ["-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC"]
        subprocess.check_call(["g++", *flags, "-o", str(library), str(HERE / "twin.cpp")])
        self.library = ctypes.CDLL(str(library))

    def __call__(
        self, layout: Layout, devices, held, memory, step_time, peak, num_transfers
    ) -> None:  # type: ignore[no-untyped-def]
        counts = (devices.shape[1], layout.num_devices, len(layout.bus_gap))
        arrays = self.Arrays(*counts, *(getattr(layout, name).ctypes.data for name in FIELDS))
        pointer = [
            ctypes.c_void_p(array.ctypes.data)
            for array in (devices, held, step_time, peak, num_transfers)
        ]
        self.library.push_batch(
            ctypes.byref(arrays),
            pointer[0],
            ctypes.c_int64(len(devices)),
            pointer[1],
            int(memory),
            pointer[2],
            pointer[3],
            pointer[4],
        )


def outcome_arrays(count: int, num_devices: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.zeros(count), np.zeros((count, num_devices), np.int64), np.zeros(count, np.int64)


def neighbours_of(problem: Problem, base: np.ndarray, count: int, moves: int, seed: int):  # type: ignore[no-untyped-def]
    """Random moves of ops that read no parameter, so that nothing has to be fetched."""
    graph, rng = problem.graph, np.random.default_rng(seed)
    reads = np.zeros(graph.num_ops, bool)
    reads[graph.edge_target[graph.is_parameter[graph.input_op]]] = True
    free = np.flatnonzero(~reads & ~graph.is_parameter)
    ops = rng.choice(free, (count, moves))
    devices = np.repeat(rng.integers(0, problem.cluster.num_devices, count), moves)
    rows = np.repeat(base[None], count, axis=0)
    rows[np.repeat(np.arange(count), moves), ops.ravel()] = devices
    return np.arange(0, count * moves + 1, moves), ops.ravel(), devices, rows


def measure(num_ops: int, num_devices: int, run: int, twin: Twin | None) -> dict[str, float]:
    problem = training_like(num_ops, num_devices)
    simulator = Simulator(problem)
    base = Placement(scattered(problem, 0, run))
    layout = simulator.layout(base)
    count = max(16, min(2048, WORK // num_ops))
    rows = np.array([scattered(problem, seed, run) for seed in range(min(count, 256))])
    rows = np.ascontiguousarray(np.tile(rows, (-(-count // len(rows)), 1))[:count])
    each = 1e9 / count / num_ops  # seconds for all -> ns for an op
    found: dict[str, float] = {}

    # The reference gives the truth, and with it the work that has to be done.
    truth = reference.simulate(problem, base)
    begin = time.thread_time()
    for _ in range(max(1, 20_000 // num_ops)):
        reference.simulate(problem, base)
    found["reference"] = (time.thread_time() - begin) / max(1, 20_000 // num_ops) / num_ops * 1e9
    outcome = simulator.evaluate(rows)
    assert outcome.step_time[0] == truth.step_time
    assert outcome.peak_memory[0].tolist() == truth.peak_memory.tolist()
    assert outcome.num_transfers[0] == truth.num_transfers
    found["transfers"] = truth.num_transfers / num_ops
    found["memory"] = cpu_seconds(lambda: simulator.evaluate(rows)) * each
    found["times"] = cpu_seconds(lambda: simulator.evaluate(rows, memory=False)) * each
    simulator.evaluate(rows[:1], "fifo")
    found["fifo"] = cpu_seconds(lambda: simulator.evaluate(rows, "fifo", memory=False)) * each
    found["fifo_memory"] = cpu_seconds(lambda: simulator.evaluate(rows, "fifo"), 3) * each

    placed = np.ascontiguousarray(rows[:, layout.op])
    held = np.zeros((count, num_devices), np.int64)
    ours = outcome_arrays(count, num_devices)
    push_rows(layout, placed, held, False, *ours)
    assert (ours[0] == outcome.step_time).all()
    found["push"] = cpu_seconds(lambda: push_rows(layout, placed, held, False, *ours)) * each
    if twin is not None:
        theirs = outcome_arrays(count, num_devices)
        twin(layout, placed, held, False, *theirs)
        assert (ours[0] == theirs[0]).all()
        assert (ours[2] == theirs[2]).all()
        found["twin"] = cpu_seconds(lambda: twin(layout, placed, held, False, *theirs)) * each

    for moves in (1, 8):
        start, ops, devices, changed = neighbours_of(problem, base.device, count, moves, seed=moves)
        together = simulator.neighbours(base, start, ops, devices)
        alone = simulator.evaluate(changed)
        assert (together.step_time == alone.step_time).all()
        assert (together.peak_memory == alone.peak_memory).all()
        assert (together.num_transfers == alone.num_transfers).all()
        found[f"together_{moves}"] = (
            cpu_seconds(lambda s=start, o=ops, d=devices: simulator.neighbours(base, s, o, d))
            * each
        )
        found[f"alone_{moves}"] = cpu_seconds(lambda c=changed: simulator.evaluate(c)) * each
    return found


START = """
from roost.core.placement import Placement
from roost.simulator.compiled import simulate
from roost.testing.problems import scattered, training_like
problem = training_like(100, 4)
simulate(problem, Placement(scattered(problem)))
"""


def start_seconds(cache: Path) -> float:
    """CPU seconds of a process that imports Roost and simulates one placement."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.check_call(
        [sys.executable, "-c", START], env=os.environ | {"NUMBA_CACHE_DIR": str(cache)}
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def table(rows: list[tuple[int, int, str, dict[str, float]]]) -> list[str]:
    lines = [
        "| ops | devices | placement | transfers per op | reference | compiled | ratio | times only | memory / times "
        "| push / C++ | fifo / program | fifo memory / times | 16 neighbours, 1 move | 8 moves |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for num_ops, num_devices, name, found in rows:
        twin = f"{found['push'] / found['twin']:.2f}" if "twin" in found else "-"
        lines.append(
            f"| {num_ops} | {num_devices} | {name} | {found['transfers']:.2f} | {found['reference']:.0f} ns "
            f"| {found['memory']:.1f} ns | {found['reference'] / found['memory']:.0f}x | {found['times']:.1f} ns "
            f"| {found['memory'] / found['times']:.2f} | {twin} | {found['fifo'] / found['times']:.2f} "
            f"| {found['fifo_memory'] / found['fifo']:.2f} | {found['alone_1'] / found['together_1']:.1f}x "
            f"| {found['alone_8'] / found['together_8']:.1f}x |"
        )
    return lines


def goals(
    rows: list[tuple[int, int, str, dict[str, float]]], first: float, second: float
) -> list[str]:
    """Each goal with the worst value found for it."""

    def worst(
        choose: Callable[..., float],
        key: Callable[[dict[str, float]], float],
        sizes: tuple[int, ...],
    ) -> str:
        values = [(key(found), n, d, name) for n, d, name, found in rows if n in sizes]
        value, n, d, name = choose(values)
        return f"{value:.2f} ({n} ops, {d} devices, {name})"

    grows = []
    for num_devices in DEVICES:
        for name in RUNS:
            at = {
                n: found["memory"] for n, d, kind, found in rows if (d, kind) == (num_devices, name)
            }
            if {1_000, 100_000} <= set(at):
                grows.append((at[100_000] / at[1_000], num_devices, name))
    middle, large = (1_000, 10_000), (1_000, 10_000, 100_000)
    lines = [
        "| goal | asked | worst found |",
        "|---|---|---|",
        "| compiled against reference, 1k and 10k ops | >= 50 | "
        + worst(min, lambda f: f["reference"] / f["memory"], middle)
        + " |",
        "| with memory against without | <= 2 | "
        + worst(max, lambda f: f["memory"] / f["times"], SIZES)
        + " |",
        "| fifo against program | <= 5 | "
        + worst(max, lambda f: f["fifo"] / f["times"], SIZES)
        + " |",
        "| 16 neighbours, 1 move each, against one by one, from 1k ops | >= 3.5 | "
        + worst(min, lambda f: f["alone_1"] / f["together_1"], large)
        + " |",
        "| the same at 100 ops | >= 3.5 | "
        + worst(min, lambda f: f["alone_1"] / f["together_1"], (100,))
        + " |",
    ]
    if all("twin" in found for *_, found in rows):
        lines.append(
            "| program order against C++ | <= 1.25 | "
            + worst(max, lambda f: f["push"] / f["twin"], SIZES)
            + " |"
        )
    if grows:
        lines.append(
            "| time per op at 100k against 1k | <= 2 | {:.2f} ({} devices, {}) |".format(
                *max(grows)
            )
        )
    lines.append(
        f"| second start against first | <= 0.125 | {second / first:.3f} ({second:.2f} s after {first:.1f} s) |"
    )
    return lines


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second = start_seconds(Path(folder)), start_seconds(Path(folder))
        twin = Twin(Path(folder)) if shutil.which("g++") else None
        rows = []
        for num_ops in SIZES:
            for num_devices in DEVICES:
                for name, run in RUNS.items():
                    print(
                        f"{num_ops} ops, {num_devices} devices, {name} ...",
                        file=sys.stderr,
                        flush=True,
                    )
                    rows.append(
                        (num_ops, num_devices, name, measure(num_ops, num_devices, run, twin))
                    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE
    ).stdout
    page = [
        "# Simulator speed",
        "",
        "`make bench`, or `python benchmarks/speed/simulator.py --save` for this page. CPU time of one thread, best of "
        "3 to 5 repeats, per op of one placement. Reference and compiled both with memory (the reference always makes "
        "the full timeline); `push / C++` is the bare pass without memory on both sides; neighbours against the same "
        "placements one by one. Every way of simulating is checked to give the same step times, peaks and numbers of "
        "transfers.",
        "",
        f"Commit {commit.strip() or 'unknown'}, Python {platform.python_version()}, numba {numba.__version__}, numpy "
        f"{np.__version__}, {platform.machine()}, {os.cpu_count()} cores.",
        "",
        *goals(rows, first, second),
        "",
        *table(rows),
        "",
    ]
    print("\n".join(page))
    if "--save" in sys.argv:
        stamp = time.strftime("%Y%m")
        path = (
            HERE.parent
            / "results"
            / f"simulator_{platform.machine()}_{os.cpu_count()}core_{stamp}.md"
        )
        path.write_text("\n".join(page))


if __name__ == "__main__":
    main()
